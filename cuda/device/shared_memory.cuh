// What a block keeps in shared memory.

#ifndef JAX_BNAR_CUDA_DEVICE_SHARED_MEMORY_CUH_
#define JAX_BNAR_CUDA_DEVICE_SHARED_MEMORY_CUH_

#include <cuda_runtime.h>

#include "cuda/device/intrinsics.cuh"
#include "cuda/device/vector.cuh"
#include "cuda/host/parameters.h"

namespace jax_bnar {
namespace cuda {

// The layout whose size SharedBytes of host/parameters.h computes.
struct SharedMemory {
  Sums* scratch;      // [kScratch]
  Sums* block;        // [column], the sums of this block
  Sums* total;        // [column], the sums of the team
  double* constants;  // [kConstants][column], each of type A
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

// Loads the constants of a thread's elements, which stay in registers for a
// whole pass: if they were read again for each vector, they would occupy the
// memory pipes more than the vector itself does. Where channels are first, all
// elements have the same constant.
template <typename A, int kElements, typename SlabOf>
__device__ __forceinline__ Values<A, kElements> LoadConstants(
    const SharedMemory& shared, int which, const SlabOf& slab) {
  const A* address = shared.Constant<A>(which) + slab.FirstConstant();
  Values<A, kElements> constants;
#pragma unroll
  for (int i = 0; i < kElements; ++i) {
    constants[i] = SlabOf::kPlanes && i > 0 ? constants[0] : address[i];
  }
  return constants;
}

}  // namespace cuda
}  // namespace jax_bnar

#endif  // JAX_BNAR_CUDA_DEVICE_SHARED_MEMORY_CUH_
