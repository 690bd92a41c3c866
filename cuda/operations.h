// The six operations on the GPU, for the buffers of native/problem.h, which lie
// in its memory. They enqueue on the stream and return: no allocation, no
// synchronisation. Arguments are taken as valid.

#ifndef JAX_BNAR_CUDA_OPERATIONS_H_
#define JAX_BNAR_CUDA_OPERATIONS_H_

#include <cuda_runtime.h>

#include <cstdint>
#include <string>

#include "cuda/plan.h"
#include "native/problem.h"

namespace jax_bnar {
namespace gpu {

// Where an operation runs. After an error `failure` says which kernel failed,
// and how it was launched.
struct Launch {
  cudaStream_t stream;
  void* workspace;  // WorkspaceBytes(shape), aligned to 256 bytes
  Settings settings;
  std::string failure;
};

// Function attributes and the loading of the kernels, for the current device:
// once before the first operation, not while a stream is captured.
cudaError_t PrepareKernels();

cudaError_t Statistics(Launch& launch, const Problem& problem, const void* x,
                       void* mean, void* var);

cudaError_t NormaliseWith(Launch& launch, const Problem& problem,
                          const NormaliseBuffers& buffers,
                          const AffineOperands& affine,
                          const VectorOperand& mean, const VectorOperand& var);

cudaError_t Forward(Launch& launch, const Problem& problem,
                    const NormaliseBuffers& buffers,
                    const AffineOperands& affine, void* mean, void* var);

cudaError_t BackwardReduce(Launch& launch, const Problem& problem,
                           const GradientBuffers& buffers,
                           const ReduceOperands& operands, void* sum_e,
                           void* sum_e_centred, void* dz);

cudaError_t BackwardApply(Launch& launch, const Problem& problem,
                          const GradientBuffers& buffers,
                          const ApplyOperands& operands, void* dx);

cudaError_t Backward(Launch& launch, const Problem& problem,
                     const GradientBuffers& buffers,
                     const BackwardOperands& operands, void* dx, void* dscale,
                     void* dbias, void* dz);

}  // namespace gpu
}  // namespace jax_bnar

#endif  // JAX_BNAR_CUDA_OPERATIONS_H_
