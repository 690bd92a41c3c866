// What a compiled program and the CUDA kernels that it calls must agree on. A
// program may be compiled on one machine and run on another, so each call says
// with which version of this agreement it was compiled, in the attribute "abi",
// and the kernels refuse other versions when the program is loaded.

#ifndef JAX_BNAR_NATIVE_CUDA_ABI_H_
#define JAX_BNAR_NATIVE_CUDA_ABI_H_

#include <cstdint>

#include "xla/ffi/api/c_api.h"
#include "xla/ffi/api/ffi.h"

namespace jax_bnar {

// Increase this when a CUDA call needs more workspace than before, reads
// another order of the bits of a mask, or means something else by its operands
// or attributes (test_ahead_of_time.py notices the first two). Calls without
// the attribute were compiled before it was introduced; they are of version 1.
inline constexpr int64_t kCudaAbi = 1;

// The handler of the stage "instantiate" of all CUDA targets: an error that
// names both versions if the call was compiled for another one. XLA runs this
// stage once, when it compiles or loads a program.
XLA_FFI_DECLARE_HANDLER_SYMBOL(CheckCudaAbi);

// Takes the attribute "abi" off a call for as long as this object lives,
// because a handler accepts neither more nor fewer attributes than it binds,
// and calls without it must still run. Attributes are sorted by name, and this
// is the first.
class WithoutAbi {
 public:
  explicit WithoutAbi(XLA_FFI_CallFrame* frame);
  ~WithoutAbi() { frame_->attrs = attributes_; }
  WithoutAbi(const WithoutAbi&) = delete;
  WithoutAbi& operator=(const WithoutAbi&) = delete;

 private:
  XLA_FFI_CallFrame* frame_;
  XLA_FFI_Attrs attributes_;
};

// The handler of the stage "execute" of a CUDA target whose attributes
// `kHandler` reads.
template <XLA_FFI_Handler* kHandler>
XLA_FFI_Error* CudaTarget(XLA_FFI_CallFrame* frame) {
  const WithoutAbi without(frame);
  return kHandler(frame);
}

}  // namespace jax_bnar

#endif  // JAX_BNAR_NATIVE_CUDA_ABI_H_
