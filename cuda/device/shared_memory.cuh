// What a block keeps in shared memory.

#ifndef JAX_BNAR_CUDA_DEVICE_SHARED_MEMORY_CUH_
#define JAX_BNAR_CUDA_DEVICE_SHARED_MEMORY_CUH_

#include <cuda_runtime.h>

#include "cuda/device/intrinsics.cuh"
#include "cuda/device/vector.cuh"
#include "cuda/host/parameters.h"

namespace jax_bnar {
namespace cuda {

// The layout whose size host/parameters.h has.
struct SharedMemory {
  Sums* scratch;             // [kScratch]
  Sums* sums;                // [column], of this block, and then of the team
  unsigned char* constants;  // [kConstants][column], each of type A
  uint4* tiles;              // in kernels of both passes, where A is float

  __device__ __forceinline__ SharedMemory() {
    unsigned char* bytes = DynamicShared();
    scratch = reinterpret_cast<Sums*>(bytes);
    Place(bytes + kScratchBytes);
    tiles = reinterpret_cast<uint4*>(constants + kConstantsBytes);
  }

  // Places the sums and the constants of an input.
  __device__ __forceinline__ void Place(unsigned char* bytes) {
    sums = reinterpret_cast<Sums*>(bytes);
    constants = bytes + kSumsBytes;
  }

  template <typename A>
  __device__ __forceinline__ A* Constant(int which) const {
    return reinterpret_cast<A*>(constants) + which * kMaxColumns;
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
  const A* columns = shared.Constant<A>(which);
  if constexpr (kAgain && kElements > 1 && !SlabOf::kPlanes) {
    constexpr int kWords = sizeof(A) * kElements / sizeof(uint4);
    constexpr int kOfWord = kElements / kWords;
    uint4 words[kWords];
#pragma unroll
    for (int k = 0; k < kWords; ++k) {
      words[k] = LoadSharedAgain(
          reinterpret_cast<const uint4*>(columns + slab.Column(k * kOfWord)));
    }
    return BitsAs<Values<A, kElements>>(words);
  } else {
    Values<A, kElements> constants;
#pragma unroll
    for (int i = 0; i < kElements; ++i) {
      constants[i] =
          SlabOf::kPlanes && i > 0 ? constants[0] : columns[slab.Column(i)];
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
