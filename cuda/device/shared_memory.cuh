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
// elements have the same constant. With kAgain they are for one vector; those
// of single elements and of planes are few, and may stay.
template <typename A, int kElements, bool kAgain = false, typename SlabOf>
__device__ __forceinline__ Values<A, kElements> LoadConstants(
    const SharedMemory& shared, int which, const SlabOf& slab) {
  const A* address = shared.Constant<A>(which) + slab.FirstConstant();
  if constexpr (kAgain && kElements > 1 && !SlabOf::kPlanes) {
    constexpr int kWords = sizeof(A) * kElements / sizeof(uint4);
    const uint4* from = reinterpret_cast<const uint4*>(address);
    uint4 words[kWords];
#pragma unroll
    for (int k = 0; k < kWords; ++k) words[k] = LoadSharedAgain(from + k);
    return BitsAs<Values<A, kElements>>(words);
  } else {
    Values<A, kElements> constants;
#pragma unroll
    for (int i = 0; i < kElements; ++i) {
      constants[i] = SlabOf::kPlanes && i > 0 ? constants[0] : address[i];
    }
    return constants;
  }
}

// An Of(shared, slab), which computes with constants, for all vectors of a
// pass. With kAgain it is made for each of them anew, where its constants would
// leave too few registers for what else is computed.
template <typename Of, bool kAgain, typename SharedMemoryOf, typename SlabOf>
class Computation {
 public:
  __device__ __forceinline__ Computation(const SharedMemoryOf& shared,
                                         const SlabOf& slab)
      : of_(shared, slab) {}
  __device__ __forceinline__ const Of& operator*() const { return of_; }

 private:
  Of of_;
};
template <typename Of, typename SharedMemoryOf, typename SlabOf>
class Computation<Of, /*kAgain=*/true, SharedMemoryOf, SlabOf> {
 public:
  __device__ __forceinline__ Computation(const SharedMemoryOf& shared,
                                         const SlabOf& slab)
      : shared_(shared), slab_(slab) {}
  __device__ __forceinline__ Of operator*() const { return Of(shared_, slab_); }

 private:
  const SharedMemoryOf& shared_;
  const SlabOf& slab_;
};

}  // namespace cuda
}  // namespace jax_bnar

#endif  // JAX_BNAR_CUDA_DEVICE_SHARED_MEMORY_CUH_
