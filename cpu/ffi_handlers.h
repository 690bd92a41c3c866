// The FFI handlers of the CPU: ForwardHandler and so on, one for each custom
// call of native/operations.h.

#ifndef JAX_BNAR_CPU_FFI_HANDLERS_H_
#define JAX_BNAR_CPU_FFI_HANDLERS_H_

#include "native/ffi_handlers.h"

namespace jax_bnar::cpu {

BNAR_DECLARE_HANDLERS(Handler)

}  // namespace jax_bnar::cpu

#endif  // JAX_BNAR_CPU_FFI_HANDLERS_H_
