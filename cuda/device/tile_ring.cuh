// Where the tiles of a block lie in shared memory.

#ifndef JAX_BNAR_CUDA_DEVICE_TILE_RING_CUH_
#define JAX_BNAR_CUDA_DEVICE_TILE_RING_CUH_

#include <cuda_runtime.h>

#include "cuda/device/intrinsics.cuh"
#include "cuda/device/shared_memory.cuh"
#include "cuda/device/vector.cuh"
#include "cuda/host/parameters.h"

namespace jax_bnar {
namespace cuda {

// The slots for a thread's vectors of tiles in shared memory, each of kArrays
// arrays. Of each array, the first words of all threads come before the second
// words of all threads, so that the accesses of a warp are spread evenly over
// the banks. The slots are a ring, and each thread goes round it on its own,
// because it accesses only its own vectors. A slot is named by the index of the
// thread's first word in it.
template <typename T, int kElements, int kArrays>
class TileRing {
 public:
  using V = Vector<T, kElements>;
  using Word = typename V::Word;
  static constexpr int kSlotWords = kArrays * V::kWords * kThreads;

  __device__ __forceinline__ TileRing(const Tiling& tiling,
                                      const SharedMemory& shared)
      : tiling_(tiling), words_(reinterpret_cast<Word*>(shared.tiles)) {}

  __device__ __forceinline__ int slots() const { return tiling_.shared_tiles; }
  // Returns slot `index`, which is less than slots().
  __device__ __forceinline__ int At(int index) const {
    return index * kSlotWords + static_cast<int>(threadIdx.x);
  }
  // Returns the slot that comes `distance` after another, or before it;
  // `distance` is at most slots().
  __device__ __forceinline__ int Next(int slot, int distance = 1) const {
    slot += distance * kSlotWords;
    const int end = slots() * kSlotWords;
    return slot < end ? slot : slot - end;
  }
  __device__ __forceinline__ int Before(int slot, int distance = 1) const {
    slot -= distance * kSlotWords;
    return slot >= 0 ? slot : slot + slots() * kSlotWords;
  }

  // Calls use(run) for runs of neighbouring slots, `count` of them in all, of
  // which the first is *slot: upwards, or downwards. The runs end where the
  // ring does. use() moves *slot.
  template <typename Use>
  __device__ __forceinline__ void ForEachRun(int count, int* slot,
                                             Use use) const {
#pragma unroll 1
    while (count > 0) {
      const int run = min(count, slots() - *slot / kSlotWords);
      use(run);
      *slot = Next(*slot, 0);
      count -= run;
    }
  }
  template <typename Use>
  __device__ __forceinline__ void ForEachRunBack(int count, int* slot,
                                                 Use use) const {
#pragma unroll 1
    while (count > 0) {
      const int run = min(count, *slot / kSlotWords + 1);
      use(run);
      *slot = Before(*slot, 0);
      count -= run;
    }
  }

  __device__ __forceinline__ V Get(int slot, int array) const {
    V vector;
#pragma unroll
    for (int w = 0; w < V::kWords; ++w) {
      vector.SetWord(w, words_[Index(slot, array, w)]);
    }
    return vector;
  }
  __device__ __forceinline__ void Set(int slot, int array,
                                      const V& vector) const {
#pragma unroll
    for (int w = 0; w < V::kWords; ++w) {
      words_[Index(slot, array, w)] = vector.GetWord(w);
    }
  }
  // Starts the copy of a vector, if `condition`. Its words are `step` words
  // apart, from `from` on. The thread must not use what the slot held before
  // any more.
  template <Reuse kReuse>
  __device__ __forceinline__ void CopyIf(bool condition, int slot, int array,
                                         const T* from, int step) const {
#pragma unroll
    for (int w = 0; w < V::kWords; ++w) {
      StartCopyIf<kReuse == Reuse::kSoon>(
          condition, words_ + Index(slot, array, w),
          reinterpret_cast<const Word*>(from) + w * step);
    }
  }

 private:
  static __device__ __forceinline__ int Index(int slot, int array, int word) {
    return slot + (array * V::kWords + word) * kThreads;
  }

  const Tiling& tiling_;
  Word* words_;
};

}  // namespace cuda
}  // namespace jax_bnar

#endif  // JAX_BNAR_CUDA_DEVICE_TILE_RING_CUH_
