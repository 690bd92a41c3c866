// Wraps an FFI handler in a capsule, the form in which Python hands it to
// jax.ffi.register_ffi_target.

#ifndef JAX_BNAR_PYTHON_MODULE_ENCAPSULATE_H_
#define JAX_BNAR_PYTHON_MODULE_ENCAPSULATE_H_

#include <nanobind/nanobind.h>

#include <type_traits>

#include "xla/ffi/api/c_api.h"

namespace jax_bnar {

template <typename T>
nanobind::capsule Encapsulate(T* handler) {
  static_assert(std::is_invocable_r_v<XLA_FFI_Error*, T, XLA_FFI_CallFrame*>,
                "an FFI handler takes a call frame and returns an error");
  return nanobind::capsule(reinterpret_cast<void*>(handler));
}

}  // namespace jax_bnar

#endif  // JAX_BNAR_PYTHON_MODULE_ENCAPSULATE_H_
