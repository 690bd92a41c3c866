// Which slabs a block has, and where their elements lie in memory.

#ifndef JAX_BNAR_CUDA_DEVICE_SLAB_CUH_
#define JAX_BNAR_CUDA_DEVICE_SLAB_CUH_

#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "cuda/device/intrinsics.cuh"
#include "cuda/device/mask_cursor.cuh"
#include "cuda/host/parameters.h"

namespace jax_bnar {
namespace cuda {

// Gives the offset of a thread's vector in one tile after the other, upwards or
// downwards (`kStep` is 1 or -1). To save registers, it reads from the tiling
// what the tiling knows.
template <Layout kLayout, int kElements, int kStep>
class Cursor;

template <int kElements, int kStep>
class Cursor<Layout::kChannelsLast, kElements, kStep> {
 public:
  __device__ __forceinline__ Cursor(const Tiling& tiling, int64_t first,
                                    int64_t, int tile)
      : tiling_(tiling), offset_(first + tile * tiling.tile_stride) {}

  __device__ __forceinline__ int64_t offset() const { return offset_; }
  __device__ __forceinline__ void Advance() {
    offset_ += kStep * tiling_.tile_stride;
  }

 private:
  const Tiling& tiling_;
  int64_t offset_;
};

// A division finds the first vector, and additions find those after it.
template <int kElements, int kStep>
class Cursor<Layout::kChannelsFirst, kElements, kStep> {
 public:
  __device__ __forceinline__ Cursor(const Tiling& tiling, int64_t base,
                                    int64_t first_vector, int tile)
      : tiling_(tiling) {
    const int64_t vector = first_vector + static_cast<int64_t>(tile) * kThreads;
    const int64_t plane = Quotient(vector, tiling.vectors_per_plane);
    in_plane_ = vector - plane * tiling.vectors_per_plane.value;
    plane_ = base + plane * tiling.plane_stride;
  }

  __device__ __forceinline__ int64_t offset() const {
    return plane_ + in_plane_ * kElements;
  }
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
template <Layout kLayout, int kElements>
class Slab {
 public:
  static constexpr bool kPlanes = kLayout == Layout::kChannelsFirst;
  template <int kStep>
  using CursorOf = Cursor<kLayout, kElements, kStep>;

  __device__ __forceinline__ Slab(const Tiling& tiling, int64_t index, int rank)
      : tiling_(tiling), index_(index), rank_(rank) {
    const Shape& shape = tiling.shape;
    const int lane = static_cast<int>(threadIdx.x) & (tiling.row_vectors - 1);
    // Both numbers are powers of 2.
    const int log_tile_rows = __ffs(kThreads / tiling.row_vectors) - 1;
    const int tile_rows = 1 << log_tile_rows;
    group_ = static_cast<int>(Quotient(index, tiling.slabs_per_group));
    const int64_t in_group = index - group_ * tiling.slabs_per_group.value;
    const int64_t begin = rank * tiling.rows_per_block;
    int64_t end = begin + tiling.rows_per_block;
    if (end > tiling.rows) end = tiling.rows;
    tiles_ =
        begin < end
            ? static_cast<int>((end - begin + tile_rows - 1) >> log_tile_rows)
            : 0;
    const int64_t row = begin + RowInTile(tiling);
    if constexpr (kPlanes) {
      channel_ = in_group;
      first_vector_ = row * tiling.row_vectors + lane;
      base_ = (group_ * shape.rows * shape.channels + channel_) * shape.inner;
      int64_t last = end * tiling.row_vectors;
      if (last > tiling.vectors) last = tiling.vectors;
      mine_ = first_vector_ < last
                  ? static_cast<int>((last - first_vector_ + kThreads - 1) /
                                     kThreads)
                  : 0;
    } else {
      channel_ = in_group * tiling.columns;
      const int64_t vector = in_group * tiling.row_vectors + lane;
      base_ = (group_ * shape.rows + row) * shape.channels + vector * kElements;
      first_vector_ = 0;
      mine_ =
          row < end && vector < tiling.vectors
              ? static_cast<int>((end - row + tile_rows - 1) >> log_tile_rows)
              : 0;
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
  // The column of the constants of this thread's first element; those of its
  // other elements follow.
  __device__ __forceinline__ int FirstConstant() const {
    return kPlanes
               ? 0
               : (static_cast<int>(threadIdx.x) & (tiling_.row_vectors - 1)) *
                     kElements;
  }
  // The column of the sums of this thread's element i.
  __device__ __forceinline__ int Column(int i) const {
    return kPlanes ? 0 : FirstConstant() + i;
  }
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
      const int64_t row = rank_ * tiling_.rows_per_block + RowInTile(tiling_);
      const int64_t bit = MaskBit(tiling_, row, channel_ + FirstConstant());
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
  static __device__ __forceinline__ int RowInTile(const Tiling& tiling) {
    return static_cast<int>(threadIdx.x) >> (__ffs(tiling.row_vectors) - 1);
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
template <Layout kLayout, int kElements, int kInputs = 1, typename F>
__device__ __forceinline__ void ForEachSlab(const Tiling& tiling,
                                            bool last_first, F f) {
  const BlockPosition position(tiling, last_first);
  for (int64_t index = position.team; index < tiling.num_slabs / kInputs;
       index += tiling.num_teams) {
    const Slab<kLayout, kElements> slab(tiling, index, position.rank);
    f(slab, index, position.rank);
  }
}

}  // namespace cuda
}  // namespace jax_bnar

#endif  // JAX_BNAR_CUDA_DEVICE_SLAB_CUH_
