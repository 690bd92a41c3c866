// What the emulation's tests share.

#ifndef CUDA_EMULATION_TESTING_H_
#define CUDA_EMULATION_TESTING_H_

#include <cuda_runtime.h>

#include <string>
#include <utility>

#include "tests/native/check.h"

namespace jax_bnar {
namespace testing {

constexpr unsigned kAll = 0xffffffffu;

template <typename T>
__device__ T WarpSum(T value) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    value += __shfl_xor_sync(kAll, value, step);
  }
  return value;
}

// Returns the sum over all threads of the block to each of them. `partial` has
// room for one number for each warp.
template <typename T>
__device__ T BlockSum(T value, T* partial) {
  value = WarpSum(value);
  __syncthreads();  // By now, the last sum has been read.
  if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = value;
  __syncthreads();
  T sum = 0;
  for (unsigned i = 0; i < blockDim.x / 32; ++i) sum += partial[i];
  return sum;
}

struct LaunchOptions {
  dim3 grid = 1;
  dim3 block = 1;
  std::size_t shared_size = 0;
  bool cooperative = false;
  unsigned cluster = 1;  // The number of blocks along x.
};

template <typename... Parameters, typename... Arguments>
cudaError_t Launch(const LaunchOptions& options, void (*kernel)(Parameters...),
                   Arguments&&... arguments) {
  cudaLaunchAttribute attributes[2];
  cudaLaunchConfig_t config = {};
  config.gridDim = options.grid;
  config.blockDim = options.block;
  config.dynamicSmemBytes = options.shared_size;
  config.attrs = attributes;
  if (options.cooperative) {
    attributes[config.numAttrs].id = cudaLaunchAttributeCooperative;
    attributes[config.numAttrs++].val.cooperative = 1;
  }
  if (options.cluster > 1) {
    attributes[config.numAttrs].id = cudaLaunchAttributeClusterDimension;
    attributes[config.numAttrs++].val.clusterDim = {options.cluster, 1, 1};
  }
  return cudaLaunchKernelEx(&config, kernel,
                            std::forward<Arguments>(arguments)...);
}

inline void SetSeed(unsigned seed) {
  cuda_emulation::Schedule schedule = cuda_emulation::GetSchedule();
  schedule.seed = seed;
  cuda_emulation::SetSchedule(schedule);
  context = "seed " + std::to_string(seed);
}

}  // namespace testing
}  // namespace jax_bnar

#endif  // CUDA_EMULATION_TESTING_H_
