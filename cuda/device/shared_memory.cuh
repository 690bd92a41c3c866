// What a block keeps in shared memory.

#ifndef JAX_BNAR_CUDA_DEVICE_SHARED_MEMORY_CUH_
#define JAX_BNAR_CUDA_DEVICE_SHARED_MEMORY_CUH_

#include <cuda_runtime.h>

#include "cuda/device/intrinsics.cuh"
#include "cuda/device/vector.cuh"
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

// The constants of a thread's elements, which stay in registers for a pass:
// read for each vector, they would take more of the memory pipes than the
// vector itself. Where channels are first, all elements have the same one.
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
