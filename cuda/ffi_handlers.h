// The FFI handlers of the GPU, one for each custom call of
// native/operations.h, and what runs before the first of them.

#ifndef JAX_BNAR_CUDA_FFI_HANDLERS_H_
#define JAX_BNAR_CUDA_FFI_HANDLERS_H_

#include "native/ffi_handlers.h"
#include "xla/ffi/api/ffi.h"

namespace jax_bnar {

XLA_FFI_DECLARE_HANDLER_SYMBOL(InitializeCuda);
BNAR_DECLARE_HANDLERS(Cuda)

}  // namespace jax_bnar

#endif  // JAX_BNAR_CUDA_FFI_HANDLERS_H_
