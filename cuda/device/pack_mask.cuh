// Packs the bit mask of y > 0 where y was written element by element.

#ifndef JAX_BNAR_CUDA_DEVICE_PACK_MASK_CUH_
#define JAX_BNAR_CUDA_DEVICE_PACK_MASK_CUH_

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/device/vector.cuh"
#include "cuda/host/parameters.h"

namespace jax_bnar {
namespace cuda {

// Each thread writes whole bytes.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    PackMaskKernel(const void* y, uint8_t* mask, int64_t groups,
                   int64_t group_size, int64_t bytes_per_group) {
  using Bits = typename Element<T>::Bits;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  const int64_t begin = static_cast<int64_t>(blockIdx.x) * kThreads +
                        static_cast<int>(threadIdx.x);
  for (int64_t i = begin; i < groups * bytes_per_group; i += step) {
    const int64_t group = i / bytes_per_group;
    const int64_t first = (i - group * bytes_per_group) * 8;
    const Bits* elements =
        static_cast<const Bits*>(y) + group * group_size + first;
    uint32_t byte = 0;
    for (int bit = 0; bit < 8 && first + bit < group_size; ++bit) {
      byte |= (Element<T>::Decode(elements[bit]) > 0 ? 1u : 0u) << bit;
    }
    mask[i] = static_cast<uint8_t>(byte);
  }
}

}  // namespace cuda
}  // namespace jax_bnar

#endif  // JAX_BNAR_CUDA_DEVICE_PACK_MASK_CUH_
