// The FFI handlers of the CPU, one for each operation of
// native/operations.h.

#ifndef JAX_BNAR_CPU_FFI_HANDLERS_H_
#define JAX_BNAR_CPU_FFI_HANDLERS_H_

#include "native/ffi_handlers.h"

namespace jax_bnar {

BNAR_DECLARE_HANDLERS(Cpu)

}  // namespace jax_bnar

#endif  // JAX_BNAR_CPU_FFI_HANDLERS_H_
