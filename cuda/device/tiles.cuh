// How a block goes through its tiles: which of them stay on chip between the
// two passes, where they lie, and the loop that every pass uses.

#ifndef JAX_BNAR_CUDA_DEVICE_TILES_CUH_
#define JAX_BNAR_CUDA_DEVICE_TILES_CUH_

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/device/intrinsics.cuh"
#include "cuda/device/shared_memory.cuh"
#include "cuda/device/vector.cuh"
#include "cuda/host/parameters.h"

namespace jax_bnar {
namespace cuda {

// A thread accumulates the sums of at most this many tiles in its own dtype
// before they are added in double. This bounds the rounding error of float
// sums.
constexpr int kFlushTiles = 256;

// The number of tiles for which a thread has loads in flight when each tile has
// kArrays vectors. Memory is busy when a thread has 64 bytes in flight, which
// is 32 KB on a multiprocessor. A single element takes a register, as four
// bytes of a vector do.
constexpr int kSinglesInFlight = kShortOfRegisters ? 2 : 8;
template <typename T, int kElements, int kArrays>
constexpr int kInFlight =
    kElements == 1
        ? (kArrays < kSinglesInFlight ? kSinglesInFlight / kArrays : 1)
    : sizeof(T) == 4 ? (kArrays == 1 ? 2 : 1)
    : kArrays == 1   ? 4
    : kArrays == 2   ? 2
                     : (kShortOfRegisters ? 1 : 2);

// An item that needs no load, and nothing to do before a batch.
struct Nothing {};
struct AtOnce {
  __device__ __forceinline__ void operator()() const {}
};

// Loads and uses `count` items in order, with kDepth loads in flight ahead of
// each use, so that a thread that waits for memory waits for its oldest load.
// load(&item) and use(item) keep track of their own positions. before() is
// called before each batch of kDepth uses, or fewer at the end.
template <int kDepth, typename Item, typename Load, typename Use,
          typename Before = AtOnce>
__device__ __forceinline__ void ForEachTile(int count, Load load, Use use,
                                            Before before = {}) {
  Item ring[kDepth];
#pragma unroll
  for (int k = 0; k < kDepth; ++k) {
    if (k < count) load(&ring[k]);
  }
  // This loop has no test for each item. It runs as long as there are enough
  // items.
#pragma unroll 1
  for (; count >= 2 * kDepth; count -= kDepth) {
    before();
#pragma unroll
    for (int k = 0; k < kDepth; ++k) {
      use(ring[k]);
      load(&ring[k]);
    }
  }
#pragma unroll 1
  for (; count > 0; count -= kDepth) {
    before();
#pragma unroll
    for (int k = 0; k < kDepth; ++k) {
      if (k < count) use(ring[k]);
      if (k + kDepth < count) load(&ring[k]);
    }
  }
}

// Goes through the tiles of a first pass. The first `shared_tiles` of them stay
// in shared memory: kept(begin, end). The others are read twice:
// streamed(begin, end). They come last, and the second pass starts with them
// and goes backwards, because L2 has had the least time to evict the last ones.
// flush() is called after at most kFlushTiles tiles and at the end.
template <typename Kept, typename Streamed, typename Flush>
__device__ __forceinline__ void ForEachSegment(int shared_tiles, int tiles,
                                               Kept kept, Streamed streamed,
                                               Flush flush) {
  int pending = 0;
  int begin = 0;
  do {
    if (begin < tiles) {
      const bool is_kept = begin < shared_tiles;
      const int end = min(is_kept ? min(shared_tiles, tiles) : tiles,
                          begin + kFlushTiles - pending);
      if (is_kept) {
        kept(begin, end);
      } else {
        streamed(begin, end);
      }
      pending += end - begin;
      begin = end;
    }
    if (pending == kFlushTiles || begin == tiles) {
      flush();
      pending = 0;
    }
  } while (begin < tiles);
}

// A thread's vectors of the tiles in shared memory, of which each has a slot
// with kArrays arrays. Of each array, the first words of all threads come
// before the second words of all threads, so that the accesses of a warp are
// spread evenly over the banks. A thread accesses only its own vectors.
template <typename T, int kElements, int kArrays>
class SharedTiles {
 public:
  using V = Vector<T, kElements>;
  using Word = typename V::Word;

  __device__ __forceinline__ SharedTiles(const SharedMemory& shared, int slot)
      : word_(reinterpret_cast<Word*>(shared.tiles) + slot * kSlotWords +
              threadIdx.x) {}

  __device__ __forceinline__ V Get(int array) const {
    V vector;
#pragma unroll
    for (int w = 0; w < V::kWords; ++w) vector.SetWord(w, *At(array, w));
    return vector;
  }
  __device__ __forceinline__ void Set(int array, const V& vector) const {
#pragma unroll
    for (int w = 0; w < V::kWords; ++w) *At(array, w) = vector.GetWord(w);
  }
  // Starts the copy of a vector. The thread must not use what the slot held
  // before any more.
  __device__ __forceinline__ void Copy(int array, const T* from) const {
#pragma unroll
    for (int w = 0; w < V::kWords; ++w) {
      StartCopy(At(array, w), reinterpret_cast<const Word*>(from) + w);
    }
  }
  __device__ __forceinline__ void Advance() { word_ += kSlotWords; }

 private:
  static constexpr int kSlotWords = kArrays * V::kWords * kThreads;

  __device__ __forceinline__ Word* At(int array, int word) const {
    return word_ + (array * V::kWords + word) * kThreads;
  }

  Word* word_;
};

// The slots are a ring. The tiles that a block keeps of a slab lie in
// neighbouring ones, and behind them is room for the first tiles of the next
// slab, whose copies are under way before the blocks of the team wait for each
// other. Single elements are not copied, because copies of two bytes do not
// exist.
template <int kElements>
constexpr bool kCopiesTiles = kElements > 1;

__device__ __forceinline__ int SlotsOf(const Tiling& tiling) {
  return tiling.shared_tiles + tiling.prefetch_tiles;
}

// The slot that comes `tiles` after another; `tiles` is at most their number.
__device__ __forceinline__ int SlotAfter(const Tiling& tiling, int slot,
                                         int tiles) {
  slot += tiles;
  return slot < SlotsOf(tiling) ? slot : slot - SlotsOf(tiling);
}

// Calls run(slot, begin, end) for the tiles [begin, end), of which the first
// lies in `slot`: once, or twice where they go on at the start of the ring.
template <typename Run>
__device__ __forceinline__ void ForEachRun(const Tiling& tiling, int slot,
                                           int begin, int end, Run run) {
#pragma unroll 1
  while (begin < end) {
    const int stop = min(end, begin + SlotsOf(tiling) - slot);
    run(slot, begin, stop);
    begin = stop;
    slot = 0;
  }
}

// The copies of the tiles that a block keeps, of kArrays arrays. Each tile is a
// group of copies of its own, even for a thread that has no vector in it, so
// that all threads count alike.
template <typename T, int kElements, int kArrays>
class KeptTiles {
 public:
  struct Arrays {
    const void* at[kArrays];
  };

  __device__ __forceinline__ KeptTiles(const Tiling& tiling,
                                       const SharedMemory& shared,
                                       const Arrays& arrays)
      : tiling_(tiling), shared_(shared), arrays_(arrays) {}

  // The slot of the first tile of this slab.
  __device__ __forceinline__ int slot() const { return slot_; }

  // Starts the copies of the first tiles of slab `index`, if there is such a
  // slab: of this one, or later of the next one, into the slots that this one
  // does not use.
  template <typename SlabOf>
  __device__ __forceinline__ void StartFirst(int64_t index, int rank,
                                             int slot) const {
    if (tiling_.prefetch_tiles > 0 && index < tiling_.num_slabs) {
      Start(SlabOf(tiling_, index, rank), 0, tiling_.prefetch_tiles, slot);
    }
  }
  template <typename SlabOf>
  __device__ __forceinline__ void StartNext(int64_t index, int rank) const {
    StartFirst<SlabOf>(index + tiling_.num_teams, rank, NextSlot());
  }

  // Starts the copies of the other tiles of this slab. All of them are under
  // way at once, far more than registers could wait for.
  template <typename SlabOf>
  __device__ __forceinline__ void StartRest(const SlabOf& slab) const {
    Start(slab, tiling_.prefetch_tiles, tiling_.shared_tiles, slot_);
  }

  // Goes to the next slab.
  __device__ __forceinline__ void Advance() { slot_ = NextSlot(); }

 private:
  __device__ __forceinline__ int NextSlot() const {
    return SlotAfter(tiling_, slot_, tiling_.shared_tiles);
  }

  template <typename SlabOf>
  __device__ __forceinline__ void Start(const SlabOf& slab, int begin, int end,
                                        int first) const {
    if constexpr (kCopiesTiles<kElements>) {
      auto in = slab.At(begin);
      int slot = SlotAfter(tiling_, first, begin);
#pragma unroll 1
      for (int tile = begin; tile < end; ++tile) {
        if (slab.Has(tile)) {
          const SharedTiles<T, kElements, kArrays> tiles(shared_, slot);
#pragma unroll
          for (int a = 0; a < kArrays; ++a) {
            tiles.Copy(a, static_cast<const T*>(arrays_.at[a]) + in.offset());
          }
        }
        CloseCopies();
        in.Advance();
        slot = SlotAfter(tiling_, slot, 1);
      }
    }
  }

  const Tiling& tiling_;
  const SharedMemory& shared_;
  const Arrays arrays_;
  int slot_ = 0;
};

// Where teams or clusters share the device, one half of them begins a little
// later. Memory then serves the tiles of the other half first, so that the
// halves do not wait at the same time: while the blocks of one add their sums,
// memory is busy with the other. The time is about what a block takes to start
// all of its copies, ten instructions for each of two dozen tiles.
template <int kElements>
__device__ __forceinline__ void LetOthersBegin(const Tiling& tiling,
                                               unsigned team) {
  constexpr unsigned kNanoseconds = 500;
  if (kCopiesTiles<kElements> && tiling.team > 1 && tiling.num_teams > 1 &&
      2 * team >= static_cast<unsigned>(tiling.num_teams)) {
    __nanosleep(kNanoseconds);
  }
}

// The team that a block belongs to, and its rank in that team.
struct BlockPosition {
  __device__ __forceinline__ BlockPosition(const Tiling& tiling,
                                           bool last_first) {
    // Blocks start in the order of their indices. In the reverse order, the
    // first blocks to start find in L2 what the previous kernel read last.
    const unsigned block = last_first ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
    team = block / static_cast<unsigned>(tiling.team);
    rank = static_cast<int>(block - team * tiling.team);
  }
  unsigned team;
  int rank;
};

}  // namespace cuda
}  // namespace jax_bnar

#endif  // JAX_BNAR_CUDA_DEVICE_TILES_CUH_
