#ifndef JAX_BNAR_CUDA_PREPARE_H_
#define JAX_BNAR_CUDA_PREPARE_H_

#include <cuda_runtime.h>

namespace jax_bnar {
namespace gpu {

// The part of PrepareKernels in forward.cu, and in backward.cu.
cudaError_t PrepareForwardKernels();
cudaError_t PrepareBackwardKernels();

}  // namespace gpu
}  // namespace jax_bnar

#endif  // JAX_BNAR_CUDA_PREPARE_H_
