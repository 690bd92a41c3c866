// Where the elements of a block lie.

#ifndef JAX_BNAR_CUDA_DEVICE_SLAB_CUH_
#define JAX_BNAR_CUDA_DEVICE_SLAB_CUH_

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/device/intrinsics.cuh"
#include "cuda/host/parameters.h"

namespace jax_bnar {
namespace cuda {

// A block's share of a slab, as one thread sees it: tile by tile, a vector of
// each. Whatever the tiling knows is read from there, to save registers.
template <int kElements>
class Slab {
 public:
  __device__ __forceinline__ Slab(const Tiling& tiling, int64_t index, int rank)
      : tiling_(tiling) {
    const Shape& shape = tiling.shape;
    const int lane = static_cast<int>(threadIdx.x) & (tiling.row_vectors - 1);
    const int tile_rows = kThreads / tiling.row_vectors;
    group_ = static_cast<int>(index / tiling.slabs_per_group);
    const int64_t in_group = index - group_ * tiling.slabs_per_group;
    const int64_t begin = rank * tiling.rows_per_block;
    int64_t end = begin + tiling.rows_per_block;
    if (end > tiling.rows) end = tiling.rows;
    tiles_ = begin < end
                 ? static_cast<int>((end - begin + tile_rows - 1) / tile_rows)
                 : 0;
    const int64_t row =
        begin + static_cast<int>(threadIdx.x) / tiling.row_vectors;
    if (tiling.planes) {
      channel_ = in_group;
      first_ = row * tiling.row_vectors + lane;
      base_ = (group_ * shape.rows * shape.channels + channel_) * shape.inner;
      int64_t last = end * tiling.row_vectors;
      if (last > tiling.vectors) last = tiling.vectors;
      mine_ = first_ < last
                  ? static_cast<int>((last - first_ + kThreads - 1) / kThreads)
                  : 0;
    } else {
      channel_ = in_group * tiling.columns;
      const int64_t vector = in_group * tiling.row_vectors + lane;
      base_ = (group_ * shape.rows + row) * shape.channels + vector * kElements;
      first_ = 0;
      mine_ = row < end && vector < tiling.vectors
                  ? static_cast<int>((end - row + tile_rows - 1) / tile_rows)
                  : 0;
    }
  }

  __device__ __forceinline__ int64_t group() const { return group_; }
  // Columns have sums. In the planes layout there is one, but its constants are
  // repeated for each element of a vector.
  __device__ __forceinline__ int64_t channel(int column) const {
    return channel_ + (tiling_.planes ? 0 : column);
  }
  __device__ __forceinline__ bool HasConstant(int column) const {
    if (tiling_.planes) return column < kElements;
    return column < tiling_.columns && channel(column) < tiling_.shape.channels;
  }
  __device__ __forceinline__ bool HasColumn(int column) const {
    return column < tiling_.columns && HasConstant(column);
  }
  // Column of the constants of this thread's first element; those of the others
  // follow.
  __device__ __forceinline__ int FirstConstant() const {
    return tiling_.planes
               ? 0
               : (static_cast<int>(threadIdx.x) & (tiling_.row_vectors - 1)) *
                     kElements;
  }
  // Column of the sums of this thread's element i.
  __device__ __forceinline__ int Column(int i) const {
    return tiling_.planes ? 0 : FirstConstant() + i;
  }
  // Of the block; this thread has vectors in the first of them.
  __device__ __forceinline__ int tiles() const { return tiles_; }
  __device__ __forceinline__ bool Has(int tile) const { return tile < mine_; }
  // Any element of a channel of this slab, of shape.count().
  __device__ __forceinline__ int64_t OffsetInChannel(int column,
                                                     int64_t element) const {
    const Shape& shape = tiling_.shape;
    const int64_t row = element / shape.inner;
    return ((group_ * shape.rows + row) * shape.channels + channel(column)) *
               shape.inner +
           (element - row * shape.inner);
  }
  // First element of this thread's vector.
  __device__ __forceinline__ int64_t Offset(int tile) const {
    if (!tiling_.planes) return base_ + tile * tiling_.tile_stride;
    const int64_t vector = first_ + static_cast<int64_t>(tile) * kThreads;
    const int64_t plane = Quotient(vector, tiling_.vectors_per_plane);
    const int64_t in_plane = vector - plane * tiling_.vectors_per_plane;
    return base_ + plane * tiling_.shape.channels * tiling_.shape.inner +
           in_plane * kElements;
  }
  // Bit of the group's mask for an element of the array.
  __device__ __forceinline__ int64_t Bit(int64_t offset) const {
    return offset - group_ * tiling_.shape.group_size();
  }

 private:
  const Tiling& tiling_;
  int group_;
  int tiles_;
  int mine_;
  int64_t channel_;
  int64_t base_;
  int64_t first_;  // planes layout: vector of the first tile
};

}  // namespace cuda
}  // namespace jax_bnar

#endif  // JAX_BNAR_CUDA_DEVICE_SLAB_CUH_
