// The FFI handlers of the CPU, one for each primitive of
// jax_bnar/_kernels/kernel_call.py.

#ifndef JAX_BNAR_CPU_FFI_HANDLERS_H_
#define JAX_BNAR_CPU_FFI_HANDLERS_H_

#include "xla/ffi/api/ffi.h"

namespace jax_bnar {

XLA_FFI_DECLARE_HANDLER_SYMBOL(ForwardCpu);
XLA_FFI_DECLARE_HANDLER_SYMBOL(BackwardCpu);
XLA_FFI_DECLARE_HANDLER_SYMBOL(StatisticsCpu);
XLA_FFI_DECLARE_HANDLER_SYMBOL(NormaliseCpu);
XLA_FFI_DECLARE_HANDLER_SYMBOL(BackwardReduceCpu);
XLA_FFI_DECLARE_HANDLER_SYMBOL(BackwardApplyCpu);

}  // namespace jax_bnar

#endif  // JAX_BNAR_CPU_FFI_HANDLERS_H_
