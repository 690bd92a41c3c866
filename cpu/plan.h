// How a canonical (G, N, C, S) array is cut into tiles. A plan depends only on
// the shape and the size of an element, never on the number of threads, so
// results are the same on any machine with the same instruction set.

#ifndef JAX_BNAR_CPU_PLAN_H_
#define JAX_BNAR_CPU_PLAN_H_

#include <cstdint>

#include "native/problem.h"

namespace jax_bnar::cpu {

// The half-open range [begin, end).
struct Range {
  int64_t begin;
  int64_t end;

  int64_t size() const { return end - begin; }
};

struct Plan {
  // Whether neighbours in memory are columns, which belong to different
  // channels (NHWC, and short planes), or elements of one plane, which belong
  // to one channel (NCHW).
  enum class Layout { kChannelsLast, kChannelsFirst };
  Layout layout;
  Shape shape;

  // One group is a matrix. With kChannelsLast, `rows_joined` rows of the array
  // are laid side by side, so that the width is a multiple of 16 for any C:
  // column j belongs to channel (j / S) % C. The elements that do not fill a
  // last row are the tail. If all rows together do not fill one, only the tail
  // exists, and columns that make the width a multiple of 16 belong to no
  // channel. With kChannelsFirst a column is a channel and a row is an index n.
  int64_t rows_joined;
  int64_t columns;
  int64_t rows;
  int64_t tail;

  // The tasks of a reduction are chunks of rows by slabs of columns, then
  // pieces of the tail.
  int64_t chunk_rows;
  int64_t num_chunks;
  int64_t slab_columns;
  int64_t num_slabs;

  // The tasks of an elementwise pass are blocks of rows or of planes, then
  // pieces of the tail. Planes come in multiples of 8, so that no two tasks
  // write bits of one mask byte.
  int64_t block;
  int64_t num_blocks;

  // The elements of each piece of the tail, a multiple of 16.
  int64_t tail_piece;
  int64_t num_tail_pieces;

  bool has_tail() const { return tail > 0; }
  // The number of partial sums of each column in one group: one for each chunk,
  // and one for the tail.
  int64_t num_partials() const { return num_chunks + (has_tail() ? 1 : 0); }
  int64_t reduction_tasks_per_group() const {
    return num_chunks * num_slabs + num_tail_pieces;
  }
  int64_t elementwise_tasks_per_group() const {
    return num_blocks + num_tail_pieces;
  }
  int64_t planes_per_group() const { return shape.rows * shape.channels; }

  Range ChunkRows(int64_t chunk) const;
  Range SlabColumns(int64_t slab) const;
  Range Block(int64_t block_index) const;
  // The columns of a piece of the tail.
  Range TailColumns(int64_t piece) const;
};

Plan MakePlan(const Shape& shape, int64_t item_size);

}  // namespace jax_bnar::cpu

#endif  // JAX_BNAR_CPU_PLAN_H_
