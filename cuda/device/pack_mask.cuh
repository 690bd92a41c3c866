// Packs the bit mask of an activation from a y that was written without it: of
// y > 0 where it was written element by element, and of curves.

#ifndef JAX_BNAR_CUDA_DEVICE_PACK_MASK_CUH_
#define JAX_BNAR_CUDA_DEVICE_PACK_MASK_CUH_

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/device/curves.cuh"
#include "cuda/device/vector.cuh"
#include "cuda/host/parameters.h"
#include "native/problem.h"

namespace jax_bnar {
namespace cuda {

// Returns the first of the eight elements whose bits a byte holds; both are
// counted in the group.
__device__ __forceinline__ int64_t FirstElementOf(int64_t byte,
                                                  const Problem& problem) {
  const int64_t bytes = problem.mask_channels / 8;  // of a row
  if (bytes == 0) return byte * 8;
  const int64_t run = byte / bytes;  // of the bytes of one row
  const int64_t before = run / problem.shape.rows;
  const int64_t row = run - before * problem.shape.rows;
  return row * problem.shape.channels + before * problem.mask_channels +
         (byte - run * bytes) * 8;
}

// Each thread writes whole bytes.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    PackMaskKernel(const void* y, uint8_t* mask,
                   const __grid_constant__ Problem problem,
                   const __grid_constant__ Activation activation) {
  using Bits = typename Element<T>::Bits;
  const Curve<T, 1> curve(activation);
  const int64_t group_size = problem.shape.group_size();
  const int64_t bytes_per_group = problem.shape.mask_bytes_per_group();
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  const int64_t begin = static_cast<int64_t>(blockIdx.x) * kThreads +
                        static_cast<int>(threadIdx.x);
  for (int64_t i = begin; i < problem.shape.groups * bytes_per_group;
       i += step) {
    const int64_t group = i / bytes_per_group;
    const int64_t first = FirstElementOf(i - group * bytes_per_group, problem);
    const Bits* elements =
        static_cast<const Bits*>(y) + group * group_size + first;
    uint32_t byte = 0;
    for (int bit = 0; bit < 8 && first + bit < group_size; ++bit) {
      const Accumulator<T> element = Element<T>::Decode(elements[bit]);
      const bool open = activation.is_curve() ? curve.OpenBits({{element}}) != 0
                                              : element > 0;
      byte |= (open ? 1u : 0u) << bit;
    }
    mask[i] = static_cast<uint8_t>(byte);
  }
}

}  // namespace cuda
}  // namespace jax_bnar

#endif  // JAX_BNAR_CUDA_DEVICE_PACK_MASK_CUH_
