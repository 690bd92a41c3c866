// How the tiles of a block come to shared memory, and which of them stay on
// chip between the two passes.

#ifndef JAX_BNAR_CUDA_DEVICE_TILE_STREAM_CUH_
#define JAX_BNAR_CUDA_DEVICE_TILE_STREAM_CUH_

#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "cuda/device/intrinsics.cuh"
#include "cuda/device/shared_memory.cuh"
#include "cuda/device/tile_ring.cuh"
#include "cuda/device/tiles.cuh"
#include "cuda/device/vector.cuh"
#include "cuda/host/parameters.h"

namespace jax_bnar {
namespace cuda {

// ForEachTile in stages: before() and after() are called around the uses of
// each stage, which are kStageTiles, or fewer where the first stage or the last
// has fewer items: these have the positions [skip, end), where `skip` is less
// than kStageTiles. Only SecondPass skips items, where the last stage of a slab
// has left slots empty. (One function for both loops would spill registers in
// the kernels of two inputs, for compute capability 10.0.)
template <int kDepth, typename Item, int kStageTiles, Copies kCopies,
          typename Load, typename Use, typename Before, typename After>
__device__ __forceinline__ void ForEachTileInStages(int end, Load load, Use use,
                                                    Before before, After after,
                                                    int skip = 0) {
  constexpr int kRound = kDepth < kStageTiles ? kStageTiles : kDepth;
  static_assert(kRound % kDepth == 0 && kRound % kStageTiles == 0,
                "whole numbers");
  Item ring[kDepth];
#pragma unroll
  for (int k = 0; k < kDepth; ++k) {
    if (skip <= k && k < end) load(&ring[k]);
  }
#pragma unroll 1
  while (skip < end) {
    // These rounds have no test for each item: all but the last one or two, and
    // but the first one if items are missing there.
    if constexpr (kCopies == Copies::kMany) {
#pragma unroll 1
      for (; skip <= 0 && end >= kRound + kDepth; end -= kRound) {
#pragma unroll
        for (int k = 0; k < kRound; ++k) {
          if (k % kStageTiles == 0) before();
          use(ring[k % kDepth]);
          load(&ring[k % kDepth]);
          if ((k + 1) % kStageTiles == 0) after();
        }
      }
    }
#pragma unroll
    for (int k = 0; k < kRound; ++k) {
      const int next = k + kDepth;
      if (k % kStageTiles == 0 && k < end) before();
      if (skip <= k && k < end) use(ring[k % kDepth]);
      if (skip <= next && next < end) load(&ring[k % kDepth]);
      if ((k + 1) % kStageTiles == 0 && k + 1 - kStageTiles < end) after();
    }
    skip = 0;
    end -= kRound;
  }
}

// Single elements are not copied, because copies of two bytes do not exist.
template <int kElements>
constexpr bool kCopiesTiles = kElements > 1;

// The tiles of a block as one stream of copies through the ring. Position p of
// the stream lies in slot p of the ring, and a slot is filled anew as soon as
// the tiles of its stage have been used, unless the block keeps it:
//   first pass    all tiles in order. The last `shared_tiles` stay;
//   second pass   all tiles in the reverse order. The slots of those that
//                 stayed take the others again, of which L2 has had the least
//                 time to evict the last.
// The stream is a pipeline, and goes on by stages, as CUTLASS calls what a
// thread waits for at once. Slots, and the tiles that stay, are whole stages. A
// slab begins with a new stage, and its last one may leave slots empty. Each
// stage that has been used closes a group of copies, which is empty where
// nothing is left to be copied, so that a thread always waits for all groups
// but the same number of them (see Streams in host/plan.cc for how many slots
// this needs).
//
// Why this is enough, with stages of B tiles and S slots: when the first pass
// begins, S/B groups are closed, one for each stage that has slots, in the
// order of their use, and each stage that has been used closes one more. So
// before stage i, at least S/B + i groups are closed, of which its own is
// number i: if all but the last S/B - 1 are complete, it is. In the second
// pass, i groups are closed before stage i, and that of a stage which was
// copied again is number i - S/B: if all but the last S/B - 1 are complete, it
// is.
template <typename T, Layout kLayout, int kElements, int kArrays>
class TileStream {
 public:
  using Ring = TileRing<T, kElements, kArrays>;
  using V = typename Ring::V;
  static constexpr int kStageTiles =
      TilesOfStage(kElements, Ring::kSlotWords * sizeof(typename Ring::Word));

  struct Arrays {
    const void* at[kArrays];
    // Whether the second pass may read them again.
    bool again[kArrays] = {};
  };

  __device__ __forceinline__ TileStream(const Tiling& tiling,
                                        const SharedMemory& shared,
                                        const Arrays& arrays)
      : tiling_(tiling),
        ring_(tiling, shared),
        arrays_(arrays),
        slot_(ring_.At(0)) {}

  // Starts the copies of as many tiles of this slab as have slots.
  template <typename SlabOf>
  __device__ __forceinline__ void Start(const SlabOf& slab) const {
    if constexpr (kCopiesTiles<kElements>) {
      const int mine = slab.Count(0, slab.tiles());
      auto in = slab.At(0);
      int slot = slot_;
#pragma unroll 1
      for (int tile = 0; tile < ring_.slots(); tile += kStageTiles) {
        CopyStage<1>(arrays_, mine - tile, mine - tile > shared_tiles(), slot,
                     &in);
        slot = ring_.Next(slot, kStageTiles);
      }
    }
  }

  // Waits for the first tiles of this slab, and returns the first array of one
  // of them. They are at most as many as have slots.
  __device__ __forceinline__ void WaitForFirst(int tiles) const {
    WaitForAllCopiesBut((ring_.slots() - tiles) / kStageTiles);
  }
  __device__ __forceinline__ V Peek(int tile) const {
    return ring_.Get(ring_.Next(slot_, tile), 0);
  }
  __device__ __forceinline__ const Ring& ring() const { return ring_; }

  // The tiles of a slab that stay in their slots between the passes.
  __device__ __forceinline__ int shared_tiles() const {
    return tiling_.shared_tiles;
  }

  // What a thread does to the tile that it uses.
  class Tile {
   public:
    __device__ __forceinline__ Tile(const Ring& ring, int slot)
        : ring_(ring), slot_(slot) {}
    __device__ __forceinline__ V Get(int array) const {
      return ring_.Get(slot_, array);
    }
    __device__ __forceinline__ void Set(int array, const V& vector) const {
      ring_.Set(slot_, array, vector);
    }

   private:
    const Ring& ring_;
    const int slot_;
  };

  // The first pass.
  template <typename SlabOf>
  class FirstPass {
   public:
    __device__ __forceinline__ FirstPass(TileStream* stream, const SlabOf& slab)
        : stream_(*stream),
          next_(slab.At(stream->ring_.slots())),
          left_(slab.Count(0, slab.tiles()) - stream->ring_.slots()) {}

    // Goes on with the next `count` tiles: use(tile, item, reuse), where
    // `reuse` is a constant that says whether the second pass reads the tile
    // from memory.
    template <int kDepth, typename Item, Copies kCopies = Copies::kMany,
              typename Load, typename Use>
    __device__ __forceinline__ void ForEach(int count, Load load, Use use) {
      const Ring& ring = stream_.ring_;
      int slot = stream_.slot_;
      const auto wait = [&] { WaitForStage(ring.slots()); };
      // The last stage stays, so these are whole ones.
      const int streamed =
          min(count,
              max(SlotsOf(left_ + ring.slots() - stream_.shared_tiles()), 0));
      ForEachTileInStages<kDepth, Item, kStageTiles, kCopies>(
          streamed, load,
          [&](Item& item) {
            use(Tile(ring, slot), item,
                std::integral_constant<Reuse, Reuse::kSoon>());
            slot += Ring::kSlotWords;
          },
          wait,
          [&] {
            slot -= kStageTiles * Ring::kSlotWords;
            stream_.template CopyStage<1>(stream_.arrays_, left_,
                                          left_ > stream_.shared_tiles(), slot,
                                          &next_);
            left_ -= kStageTiles;
            slot = ring.Next(slot, kStageTiles);
          });
      // The slots of tiles that stay are not filled anew.
      ring.ForEachRun(count - streamed, &slot, [&](int run) {
        ForEachTileInStages<kDepth, Item, kStageTiles, kCopies>(
            run, load,
            [&](Item& item) {
              use(Tile(ring, slot), item,
                  std::integral_constant<Reuse, Reuse::kNever>());
              slot += Ring::kSlotWords;
            },
            wait, CloseCopies);
      });
      stream_.slot_ = ring.Next(slot, EmptySlots(count));
    }

   private:
    TileStream& stream_;
    typename SlabOf::template CursorOf<1> next_;
    // The number of tiles whose copies have not been started; below 0, how many
    // slots were left.
    int left_;
  };

  template <typename SlabOf>
  __device__ __forceinline__ auto First(const SlabOf& slab) {
    return FirstPass<SlabOf>(this, slab);
  }

  // The second pass of this thread's `count` tiles. What was not kept is read
  // from `arrays`.
  template <typename SlabOf>
  class SecondPass {
   public:
    __device__ __forceinline__ SecondPass(const TileStream& stream,
                                          const SlabOf& slab, int count,
                                          const Arrays& arrays)
        : stream_(stream),
          arrays_(arrays),
          empty_(EmptySlots(count)),
          left_(SlotsOf(count) - stream.shared_tiles()),
          next_(slab.template At<-1>(max(left_ - 1, 0))),
          slot_(stream.ring_.Before(stream.slot_, empty_ + 1)) {}

    // The number of tiles that were kept, if there were more.
    __device__ __forceinline__ int kept() const {
      return stream_.shared_tiles() - empty_;
    }

    // Goes on with the next `count` tiles: use(tile, item). kCopied says that
    // some of them may have been read again.
    template <bool kCopied, int kDepth, typename Item,
              Copies kCopies = Copies::kMany, typename Load, typename Use>
    __device__ __forceinline__ void ForEach(int count, Load load, Use use) {
      const Ring& ring = stream_.ring_;
      ForEachTileInStages<kDepth, Item, kStageTiles, kCopies>(
          empty_ + count, load,
          [&](Item& item) {
            use(Tile(ring, slot_), item);
            slot_ -= Ring::kSlotWords;
          },
          [&] {
            if constexpr (kCopied) WaitForStage(stream_.shared_tiles());
          },
          [&] {
            stream_.template CopyStage<-1>(
                arrays_, left_, /*again=*/false,
                slot_ + kStageTiles * Ring::kSlotWords, &next_);
            left_ -= kStageTiles;
            slot_ = ring.Before(slot_ + Ring::kSlotWords);
          },
          empty_);
      empty_ = 0;
    }

    // The same where all tiles were kept.
    template <int kDepth, typename Item, Copies kCopies = Copies::kMany,
              typename Load, typename Use>
    __device__ __forceinline__ void ForEachKept(int count, Load load, Use use) {
      const Ring& ring = stream_.ring_;
      ring.ForEachRunBack(count, &slot_, [&](int run) {
        ForEachTile<kDepth, Item, kCopies>(run, load, [&](Item& item) {
          use(Tile(ring, slot_), item);
          slot_ -= Ring::kSlotWords;
        });
      });
    }

   private:
    const TileStream& stream_;
    const Arrays arrays_;
    int empty_;  // The number of slots that the next stage leaves empty.
    int left_;  // The number of tiles whose copies have not been started again.
    typename SlabOf::template CursorOf<-1> next_;
    int slot_;
  };

  template <typename SlabOf>
  __device__ __forceinline__ auto Second(const SlabOf& slab, int count,
                                         const Arrays& arrays) const {
    return SecondPass<SlabOf>(*this, slab, count, arrays);
  }

 private:
  // The slots of the stages of so many tiles, and how many of them are empty.
  static __device__ __forceinline__ int SlotsOf(int tiles) {
    return tiles + EmptySlots(tiles);
  }
  static __device__ __forceinline__ int EmptySlots(int tiles) {
    return -tiles & (kStageTiles - 1);  // kStageTiles is a power of 2.
  }

  // Waits for the stage that is used next, where copies go on in `slots`.
  static __device__ __forceinline__ void WaitForStage(int slots) {
    WaitForAllCopiesBut(slots / kStageTiles - 1);
  }

  // Starts the copies of a stage, with as many of the `left` tiles at `in` as
  // it has slots: upwards from `slot`, or downwards (kStep is 1 or -1). `again`
  // says whether the second pass reads these tiles from memory.
  template <int kStep, typename CursorOf>
  __device__ __forceinline__ void CopyStage(const Arrays& arrays, int left,
                                            bool again, int slot,
                                            CursorOf* in) const {
    // Where channels are first, finding a vector takes registers.
    [[maybe_unused]] constexpr int kAtOnce =
        kLayout == Layout::kChannelsFirst ? 1 : kStageTiles;
#pragma unroll kAtOnce
    for (int k = 0; k < kStageTiles; ++k) {
#pragma unroll
      for (int a = 0; a < kArrays; ++a) {
        const T* from = static_cast<const T*>(arrays.at[a]) + in->offset();
        // The stage is a whole one then, because the last one stays.
        const bool soon = again && arrays.again[a];
        ring_.template CopyIf<Reuse::kSoon>(soon, slot, a, from,
                                            in->word_step());
        ring_.template CopyIf<Reuse::kNever>(k < left && !soon, slot, a, from,
                                             in->word_step());
      }
      in->Advance();
      slot += kStep * Ring::kSlotWords;
    }
    CloseCopies();
  }

  const Tiling& tiling_;
  const Ring ring_;
  const Arrays arrays_;
  int slot_;  // The slot of the position that the next first pass begins with.
};

// Takes the place of a stream where nothing is kept.
struct NoStream {};

}  // namespace cuda
}  // namespace jax_bnar

#endif  // JAX_BNAR_CUDA_DEVICE_TILE_STREAM_CUH_
