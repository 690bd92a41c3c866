// What the CUDA kernels of this build were compiled with, and for which GPUs.

#ifndef JAX_BNAR_CUDA_LAUNCH_BUILD_INFO_H_
#define JAX_BNAR_CUDA_LAUNCH_BUILD_INFO_H_

#include <vector>

namespace jax_bnar {
namespace cuda {

// The version as CUDART_VERSION has it: 13000 for CUDA 13.0.
int ToolkitVersion();

// Compute capabilities times 10, in ascending order: 80, 90, ...
std::vector<int> Architectures();

}  // namespace cuda
}  // namespace jax_bnar

#endif  // JAX_BNAR_CUDA_LAUNCH_BUILD_INFO_H_
