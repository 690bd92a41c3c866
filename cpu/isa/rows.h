// How the kernels of rows tiles walk through memory.
//
// All of them go row by row: the sums of a column live in the L1 cache, not in
// registers. Strips of many rows would keep them in registers, and two
// neighbouring rows side by side would halve the loads of sums; both defeat the
// prefetchers, and took 4 and 2 times as long. What they follow is two rows
// side by side that are half a tile apart: two streams along memory. Where the
// constants of a column are loaded, they serve both.

#ifndef JAX_BNAR_CPU_ISA_ROWS_H_
#define JAX_BNAR_CPU_ISA_ROWS_H_

#include <algorithm>
#include <type_traits>

#include "cpu/isa/simd.h"
#include "cpu/tile_kernels.h"

namespace jax_bnar::cpu::BNAR_ISA {

// Rows between two hand-overs from float to double sums.
constexpr int64_t kBlockRows = 32;
// Columns whose sums are kept in the L1 cache at once.
constexpr int64_t kSumColumns = 1024;
// Fewer rows are one stream.
constexpr int64_t kMinRowsOfStreams = 8;

// Rows [begin, begin + count) of each stream, and columns [column, column +
// columns). Streams are `distance` rows apart; `before` is the number of rows
// in the blocks before.
struct Block {
  int64_t begin;
  int64_t count;
  int64_t distance;
  int64_t before;
  int64_t column;
  int64_t columns;
};

// Calls block(Block, the number of its streams, as a type).
template <int kStreams, typename F>
BNAR_INLINE void ForEachBlock(const RowsTile& tile, F block) {
  const auto rows = [&](int64_t begin, int64_t count, int64_t distance,
                        int64_t before, auto streams) {
    for (int64_t c = 0; c < tile.width; c += kSumColumns) {
      block(Block{begin, count, distance, before, c,
                  std::min(kSumColumns, tile.width - c)},
            streams);
    }
  };
  int64_t done = 0;
  if (kStreams > 1 && tile.rows >= kMinRowsOfStreams) {
    const int64_t length = tile.rows / kStreams;
    for (int64_t r = 0; r < length; r += kBlockRows / kStreams) {
      rows(r, std::min(length - r, kBlockRows / kStreams), length, kStreams * r,
           std::integral_constant<int, kStreams>());
    }
    done = kStreams * length;
  }
  for (; done < tile.rows; done += kBlockRows) {
    const int64_t count = std::min(tile.rows - done, kBlockRows);
    rows(done, count, 0, done, std::integral_constant<int, 1>());
  }
}

// Adds the sums of a block's columns to what the blocks before have handed
// over. Not inlined, for it would be most of what the compiler does for a
// kernel.
template <typename A>
__attribute__((noinline)) void HandOver(const Block& block, const A* sums,
                                        double* total) {
  total += block.column;
  if (block.before == 0) {
    for (int64_t c = 0; c < block.columns; ++c) total[c] = sums[c];
  } else {
    for (int64_t c = 0; c < block.columns; ++c) total[c] += sums[c];
  }
}

// Stores hold up a load from an address that is a multiple of this away.
constexpr int64_t kAliasBytes = 4096;

// Calls element(index, distance to that of the second stream, column, the
// number of streams, as a type) for each sixteen columns of each row of an
// elementwise pass over T. Where results bypass the caches it is one stream:
// two took a quarter longer with 16 bits an element, which write half a line at
// a time, and as long with more. The tile is a copy, which no store can change.
template <typename T, bool kStream, typename F>
BNAR_INLINE void ForEachElement(RowsTile tile, F element) {
  const auto rows = [&](int64_t begin, int64_t end, int64_t distance,
                        auto streams) {
    for (int64_t r = begin; r < end; ++r) {
      for (int64_t c = 0; c < tile.width; c += kLanes) {
        element(r * tile.stride + c, distance * tile.stride, c, streams);
      }
    }
  };
  int64_t done = 0;
  if constexpr (!kStream) {
    const auto aliases = [&](int64_t distance) {
      return distance * tile.stride * sizeof(T) % kAliasBytes == 0;
    };
    int64_t half = tile.rows / 2;
    if (aliases(half)) --half;
    if (half > 0 && !aliases(half)) {
      rows(0, half, half, std::integral_constant<int, 2>());
      done = 2 * half;
    }
  }
  rows(done, tile.rows, 0, std::integral_constant<int, 1>());
}

}  // namespace jax_bnar::cpu::BNAR_ISA

#endif  // JAX_BNAR_CPU_ISA_ROWS_H_
