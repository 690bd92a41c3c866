// How the kernels of rows tiles walk through memory.
//
// All of them go row by row, so the sums of columns are in the L1 cache, not in
// registers. Strips of many rows would keep the sums in registers, and two
// neighbouring rows at a time would halve the loads of sums, but both defeat
// the prefetchers and took 4 and 2 times as long. What the prefetchers do
// follow is two rows at a time that are half a tile apart, that is, two streams
// through memory. The constants of a column are then loaded once for both
// streams.

#ifndef JAX_BNAR_CPU_ISA_ROWS_H_
#define JAX_BNAR_CPU_ISA_ROWS_H_

#include <algorithm>
#include <type_traits>

#include "cpu/isa/simd.h"
#include "cpu/tile_kernels.h"

namespace jax_bnar::cpu::BNAR_ISA {

// The number of rows that are summed in the accumulation type before the sums
// are added to those in double.
constexpr int64_t kBlockRows = 32;
// The number of columns whose sums are in the L1 cache at a time.
constexpr int64_t kSumColumns = 1024;
// A tile of fewer rows is read as one stream.
constexpr int64_t kMinRowsOfStreams = 8;

// The rows [begin, begin + count) of each stream, and the columns
// [column, column + columns). Streams are `distance` rows apart, and `before`
// is the number of rows in the blocks before this one.
struct Block {
  int64_t begin;
  int64_t count;
  int64_t distance;
  int64_t before;
  int64_t column;
  int64_t columns;
};

// Calls block(Block, streams), where `streams` is the number of streams as an
// integral constant.
template <int kStreams, typename F>
BNAR_INLINE void ForEachBlock(const RowsTile& tile, F block) {
  const auto rows = [&](int64_t begin, int64_t count, int64_t distance,
                        int64_t before, auto streams) BNAR_LAMBDA {
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

// Adds the sums of a block's columns to the totals in double of the blocks
// before it. It is not inlined, because it would then take most of the time
// that a kernel needs to compile.
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

// A store delays a later load from an address that is a multiple of this away
// (4K aliasing).
constexpr int64_t kAliasBytes = 4096;

// Calls element(index, distance, column, streams) for each vector of columns of
// each row of an elementwise pass that stores T. `index` is that of the first
// element, `distance` leads from there to the second stream, and `streams` is
// the number of streams as an integral constant. If results bypass the caches
// (`non_temporal`) there is one stream: two took a quarter longer with 16-bit
// elements, which write half a cache line at a time, and equally long with
// wider ones. The tile is passed by value, so that the compiler knows that no
// store can change it.
template <typename T, typename F>
BNAR_INLINE void ForEachElement(RowsTile tile, bool non_temporal, F element) {
  const auto rows = [&](int64_t begin, int64_t end, int64_t distance,
                        auto streams) BNAR_LAMBDA {
    for (int64_t r = begin; r < end; ++r) {
      for (int64_t c = 0; c < tile.width; c += kVecLanes<Accumulator<T>>) {
        element(r * tile.stride + c, distance * tile.stride, c, streams);
      }
    }
  };
  int64_t done = 0;
  if (!non_temporal) {
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
