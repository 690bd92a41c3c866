// What a block keeps in shared memory.

#ifndef JAX_BNAR_CUDA_DEVICE_SHARED_MEMORY_CUH_
#define JAX_BNAR_CUDA_DEVICE_SHARED_MEMORY_CUH_

#include <cuda_runtime.h>

#include "cuda/device/intrinsics.cuh"
#include "cuda/host/parameters.h"

namespace jax_bnar {
namespace cuda {

// The layout that SharedBytes of host/parameters.h counts.
struct SharedMemory {
  Sums* scratch;      // kScratch
  Sums* block;        // [column] sums of this block
  Sums* total;        // [column] sums of the team
  double* constants;  // [kConstants][column], A each
  uint4* tiles;

  __device__ __forceinline__ SharedMemory() {
    unsigned char* bytes = DynamicShared();
    scratch = reinterpret_cast<Sums*>(bytes);
    block = scratch + kScratch;
    total = block + kMaxColumns;
    constants = reinterpret_cast<double*>(total + kMaxColumns);
    tiles = reinterpret_cast<uint4*>(constants + kConstants * kMaxColumns);
  }

  template <typename A>
  __device__ __forceinline__ A* Constant(int which) const {
    return reinterpret_cast<A*>(constants + which * kMaxColumns);
  }
};

// The constants of one vector's columns. Read where they are used rather than
// kept: registers are for tiles, and a read is one or two cycles for eight
// elements.
template <typename A, int kElements>
struct alignas(kElements == 8 ? 16 : sizeof(A)) Constants {
  A values[kElements];
  __device__ __forceinline__ A operator[](int i) const { return values[i]; }
};

// From a column of the first constant to the same column of another.
template <typename A>
__device__ __forceinline__ const A* NextConstant(const A* first, int which) {
  return reinterpret_cast<const A*>(reinterpret_cast<const double*>(first) +
                                    which * kMaxColumns);
}

template <int kElements, typename A>
__device__ __forceinline__ Constants<A, kElements> LoadConstants(
    const A* address) {
  Constants<A, kElements> constants;
  if constexpr (kElements == 8 && sizeof(A) == 4) {
    *reinterpret_cast<float4*>(constants.values) =
        *reinterpret_cast<const float4*>(address);
    *reinterpret_cast<float4*>(constants.values + 4) =
        *reinterpret_cast<const float4*>(address + 4);
  } else {
#pragma unroll
    for (int i = 0; i < kElements; ++i) constants.values[i] = address[i];
  }
  return constants;
}

}  // namespace cuda
}  // namespace jax_bnar

#endif  // JAX_BNAR_CUDA_DEVICE_SHARED_MEMORY_CUH_
