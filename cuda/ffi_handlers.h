// The FFI handlers of the GPU, one for each primitive of
// jax_bnar/_kernels/kernel_call.py, and what runs before the first of them.

#ifndef JAX_BNAR_CUDA_FFI_HANDLERS_H_
#define JAX_BNAR_CUDA_FFI_HANDLERS_H_

#include "xla/ffi/api/ffi.h"

namespace jax_bnar {

XLA_FFI_DECLARE_HANDLER_SYMBOL(InitializeCuda);
XLA_FFI_DECLARE_HANDLER_SYMBOL(ForwardCuda);
XLA_FFI_DECLARE_HANDLER_SYMBOL(BackwardCuda);
XLA_FFI_DECLARE_HANDLER_SYMBOL(StatisticsCuda);
XLA_FFI_DECLARE_HANDLER_SYMBOL(NormaliseCuda);
XLA_FFI_DECLARE_HANDLER_SYMBOL(BackwardReduceCuda);
XLA_FFI_DECLARE_HANDLER_SYMBOL(BackwardApplyCuda);

}  // namespace jax_bnar

#endif  // JAX_BNAR_CUDA_FFI_HANDLERS_H_
