// Which slabs a block has, and where their elements lie in memory.

#ifndef JAX_BNAR_CUDA_DEVICE_SLAB_CUH_
#define JAX_BNAR_CUDA_DEVICE_SLAB_CUH_

#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "cuda/device/intrinsics.cuh"
#include "cuda/device/mask_cursor.cuh"
#include "cuda/device/vector.cuh"
#include "cuda/host/parameters.h"

namespace jax_bnar {
namespace cuda {

// Tiling::word_step, known where only one is possible.
template <typename T, Layout kLayout, int kElements>
__device__ __forceinline__ int WordStepOf(const Tiling& tiling) {
  constexpr bool kTwoWords = sizeof(T) * kElements == 2 * sizeof(uint4);
  return kTwoWords && kLayout == Layout::kChannelsLast ? tiling.word_step : 1;
}

// Gives the offset of a thread's vector in one tile after the other, upwards or
// downwards (`kStep` is 1 or -1), and where the vector's second word lies, if
// there is one: it is the offset of the first word. To save registers, it reads
// from the tiling what the tiling knows.
template <typename T, Layout kLayout, int kElements, int kStep>
class Cursor;

template <typename T, int kElements, int kStep>
class Cursor<T, Layout::kChannelsLast, kElements, kStep> {
 public:
  __device__ __forceinline__ Cursor(const Tiling& tiling, int64_t first,
                                    int64_t, int tile)
      : tiling_(tiling), offset_(first + tile * tiling.tile_stride) {}

  __device__ __forceinline__ int64_t offset() const { return offset_; }
  __device__ __forceinline__ int word_step() const {
    return WordStepOf<T, Layout::kChannelsLast, kElements>(tiling_);
  }
  __device__ __forceinline__ void Advance() {
    offset_ += kStep * tiling_.tile_stride;
  }

 private:
  const Tiling& tiling_;
  int64_t offset_;
};

// A division finds the first vector, and additions find those after it.
template <typename T, int kElements, int kStep>
class Cursor<T, Layout::kChannelsFirst, kElements, kStep> {
 public:
  __device__ __forceinline__ Cursor(const Tiling& tiling, int64_t base,
                                    int64_t first_vector, int tile)
      : tiling_(tiling) {
    const int64_t vector =
        first_vector + static_cast<int64_t>(tile) * tiling.team * kThreads;
    const int64_t plane = Quotient(vector, tiling.vectors_per_plane);
    in_plane_ = vector - plane * tiling.vectors_per_plane.value;
    plane_ = base + plane * tiling.plane_stride;
  }

  __device__ __forceinline__ int64_t offset() const {
    return plane_ + in_plane_ * kElements;
  }
  __device__ __forceinline__ int word_step() const { return 1; }
  __device__ __forceinline__ void Advance() {
    in_plane_ += kStep * tiling_.tile_vectors;
    plane_ += kStep * tiling_.tile_stride;
    const int64_t vectors = tiling_.vectors_per_plane.value;
    if (kStep > 0 ? in_plane_ >= vectors : in_plane_ < 0) {
      in_plane_ -= kStep * vectors;
      plane_ += kStep * tiling_.plane_stride;
    }
  }

 private:
  const Tiling& tiling_;
  int64_t plane_;     // The first element of the plane.
  int64_t in_plane_;  // The number of vectors before this one.
};

// A block's share of a slab as one thread sees it: one vector of each tile.
template <typename T, Layout kLayout, int kElements>
class Slab {
 public:
  static constexpr bool kPlanes = kLayout == Layout::kChannelsFirst;
  template <int kStep>
  using CursorOf = Cursor<T, kLayout, kElements, kStep>;

  __device__ __forceinline__ Slab(const Tiling& tiling, int64_t index, int rank)
      : tiling_(tiling), index_(index), rank_(rank) {
    const Shape& shape = tiling.shape;
    group_ = static_cast<int>(Quotient(index, tiling.slabs_per_group));
    const int64_t in_group = index - group_ * tiling.slabs_per_group.value;
    tiles_ = tiling.tiles_per_block - (rank < tiling.longer_blocks ? 0 : 1);
    // Of the last tile of a slab, some threads have no vector.
    const int64_t last_tile =
        static_cast<int64_t>(tiles_ - 1) * tiling.team + rank;
    if constexpr (kPlanes) {
      channel_ = in_group;
      first_vector_ = static_cast<int64_t>(rank) * kThreads + threadIdx.x;
      base_ = (group_ * shape.rows * shape.channels + channel_) * shape.inner;
      mine_ = last_tile * kThreads + threadIdx.x < tiling.vectors ? tiles_
                                                                  : tiles_ - 1;
    } else {
      channel_ = in_group * tiling.columns;
      const int64_t row = FirstRow();
      const int64_t vector = in_group * tiling.row_vectors + VectorInRow();
      base_ = (group_ * shape.rows + row) * shape.channels +
              vector * kElements - ShiftOfWords();
      first_vector_ = 0;
      const int64_t last_row = last_tile * TileRows() + RowInTile();
      mine_ = vector >= tiling.vectors ? 0
              : last_row < tiling.rows ? tiles_
                                       : tiles_ - 1;
    }
  }

  // The same share, computed anew where registers are too short to keep it
  // until the next loop.
  __device__ __forceinline__ Slab Again() const {
    return Slab(tiling_, Anew(index_), rank_);
  }

  __device__ __forceinline__ int64_t group() const { return group_; }
  // Each column has sums and constants. Where channels are first, there is only
  // one column.
  __device__ __forceinline__ int64_t channel(int column) const {
    return channel_ + column;
  }
  __device__ __forceinline__ bool HasColumn(int column) const {
    return column < tiling_.columns && channel(column) < tiling_.shape.channels;
  }
  // The column of the sums and the constants of this thread's element i.
  __device__ __forceinline__ int Column(int i) const {
    return kPlanes ? 0
                   : ColumnOf(VectorInRow(), kElements, i, WordStep(tiling_));
  }
  static __device__ __forceinline__ int WordStep(const Tiling& tiling) {
    return WordStepOf<T, kLayout, kElements>(tiling);
  }
  __device__ __forceinline__ int WordStep() const { return WordStep(tiling_); }
  // The number of tiles of the block. This thread has a vector in all of them,
  // in all but the last or, if it lies beyond the channels, in none.
  __device__ __forceinline__ int tiles() const { return tiles_; }
  __device__ __forceinline__ bool Has(int tile) const { return tile < mine_; }
  // Returns in how many of the tiles [begin, end) this thread has a vector.
  __device__ __forceinline__ int Count(int begin, int end) const {
    return max(min(end, mine_) - begin, 0);
  }
  // Returns a cursor that starts at this thread's vector of a tile.
  template <int kStep = 1>
  __device__ __forceinline__ CursorOf<kStep> At(int tile) const {
    return CursorOf<kStep>(tiling_, base_, first_vector_, tile);
  }
  template <int kStep>
  __device__ __forceinline__ CursorOf<kStep> At(int tile, NoMask) const {
    return At<kStep>(tile);
  }
  // The same, which also knows where `mask` has the bits of the vector.
  template <int kStep, typename Byte>
  __device__ __forceinline__ auto At(int tile, Byte* mask) const {
    using Base = CursorOf<kStep>;
    const Base base = At<kStep>(tile);
    const Shape& shape = tiling_.shape;
    Byte* group = mask + group_ * shape.mask_bytes_per_group();
    if constexpr (kPlanes && kElements == 8) {
      // Every group begins with a whole byte, so all of them are like one.
      return PlanesMaskCursor<Base, Byte>(base, mask, 0);
    } else if constexpr (kPlanes) {
      return PlanesMaskCursor<Base, Byte>(base, group,
                                          group_ * shape.group_size());
    } else {
      const int64_t bit =
          MaskBit(tiling_, FirstRow(), channel_ + VectorInRow() * kElements);
      using CursorWithMask =
          std::conditional_t<kElements == 8, RowsMaskCursor<Base, kStep, Byte>,
                             RowsMaskBitCursor<Base, kStep, Byte>>;
      return CursorWithMask(base, tiling_, group, bit, tile);
    }
  }
  // Returns the offset of any of the shape.count() elements of a channel of
  // this slab.
  __device__ __forceinline__ int64_t OffsetInChannel(int column,
                                                     int64_t element) const {
    const Shape& shape = tiling_.shape;
    const int64_t row = element / shape.inner;
    return ((group_ * shape.rows + row) * shape.channels + channel(column)) *
               shape.inner +
           (element - row * shape.inner);
  }

 private:
  // How many elements before the thread's own vector its first word lies, if it
  // shares vectors.
  __device__ __forceinline__ int ShiftOfWords() const {
    return 4 * (static_cast<int>(threadIdx.x) & (WordStep(tiling_) - 1));
  }

  // Where channels are last, the place of this thread's vector in a tile. All
  // numbers are powers of 2.
  __device__ __forceinline__ int TileRows() const {
    return kThreads >> (__ffs(tiling_.row_vectors) - 1);
  }
  __device__ __forceinline__ int VectorInRow() const {
    return static_cast<int>(threadIdx.x) & (tiling_.row_vectors - 1);
  }
  __device__ __forceinline__ int RowInTile() const {
    return static_cast<int>(threadIdx.x) >> (__ffs(tiling_.row_vectors) - 1);
  }
  __device__ __forceinline__ int64_t FirstRow() const {
    return static_cast<int64_t>(rank_) * TileRows() + RowInTile();
  }

  const Tiling& tiling_;
  int64_t index_;
  int rank_;
  int group_;
  int tiles_;
  int mine_;
  int64_t channel_;
  int64_t base_;
  int64_t first_vector_;  // Used where channels are first.
};

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

// Calls f(slab, index, rank) for each slab of the block's team. With several
// inputs, tiling.num_slabs counts those of all, and a team has all that lie at
// one place: slab `index` of input i has the number index * kInputs + i.
template <typename T, Layout kLayout, int kElements, int kInputs = 1,
          typename F>
__device__ __forceinline__ void ForEachSlab(const Tiling& tiling,
                                            bool last_first, F f) {
  const BlockPosition position(tiling, last_first);
  for (int64_t index = position.team; index < tiling.num_slabs / kInputs;
       index += tiling.num_teams) {
    const Slab<T, kLayout, kElements> slab(tiling, index, position.rank);
    f(slab, index, position.rank);
  }
}

}  // namespace cuda
}  // namespace jax_bnar

#endif  // JAX_BNAR_CUDA_DEVICE_SLAB_CUH_
