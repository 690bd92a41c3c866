#include <cuda_runtime_api.h>

#include "cuda/launch/build_info.h"

namespace jax_bnar {
namespace cuda {

int ToolkitVersion() { return CUDART_VERSION; }

std::vector<int> Architectures() {
  // Only nvcc knows what "native" turned out to be. Its list has 800 for sm_80.
  std::vector<int> architectures;
  for (const int architecture : {__CUDA_ARCH_LIST__}) {
    architectures.push_back(architecture / 10);
  }
  return architectures;
}

}  // namespace cuda
}  // namespace jax_bnar
