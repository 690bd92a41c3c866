// Computes the sums of each column of a rows tile that its statistics need.

#include <algorithm>

#include "cpu/isa/kernels.h"
#include "cpu/isa/prefetch.h"
#include "cpu/isa/rows.h"
#include "cpu/isa/simd_memory.h"
#include "cpu/samples.h"

namespace jax_bnar::cpu::BNAR_ISA {
namespace {

// Returns the median of five rows of the tile, in each column. It is near the
// mean wherever a few outliers lie, so that few digits of the squares cancel. A
// shift that is k standard deviations from the mean would make the error
// 1 + k^2 times as large.
template <typename T>
BNAR_INLINE Vec<Accumulator<T>> ShiftOfColumns(const RowsTile& tile,
                                               const T* x) {
  const auto sample = [&](int i) {
    return Load(x + SampleAt(i, tile.rows) * tile.stride);
  };
  // An Inf would make the mean NaN.
  return WhereFinite(
      Median(sample(0), sample(1), sample(2), sample(3), sample(4)));
}

// Processes a tile of at most kSumColumns columns.
template <typename T>
BNAR_INLINE void StripStatistics(const RowsTile& tile,
                                 const Lookahead<Accumulator<T>>& ahead,
                                 const T* first, const Accumulator<T>* origin,
                                 double* sum, double* m2) {
  using A = Accumulator<T>;
  const int64_t stride = tile.stride;
  alignas(64) A shift[kSumColumns], s1[kSumColumns], s2[kSumColumns];
  for (int64_t c = 0; c < tile.width; c += kVecLanes<A>) {
    StoreLanes(shift + c, ShiftOfColumns(tile, first + c));
  }
  // Sum the differences from the shift and their squares.
  ForEachBlock<2>(tile, [&](const Block& block, auto streams) BNAR_LAMBDA {
    constexpr int kStreams = decltype(streams)::value;
    const int64_t distance = block.distance * stride;
    std::fill(s1, s1 + tile.width, A{0});
    std::fill(s2, s2 + tile.width, A{0});
    for (int64_t r = block.begin; r < block.begin + block.count; ++r) {
      const T* row = first + r * stride;
      for (int64_t c = 0; c < tile.width; c += kVecLanes<A>) {
        const Vec<A> around = Load(shift + c);
        Vec<A> sum_of_rows = Load(s1 + c), squares = Load(s2 + c);
        BNAR_UNROLL
        for (int k = 0; k < kStreams; ++k) {
          ahead.Prefetch(row + k * distance + c);
          const Vec<A> d = Load(row + k * distance + c) - around;
          sum_of_rows = sum_of_rows + d;
          squares = squares + d * d;
        }
        StoreLanes(s1 + c, sum_of_rows);
        StoreLanes(s2 + c, squares);
      }
    }
    HandOver(block, s1, sum);
    HandOver(block, s2, m2);
  });
  const double n = static_cast<double>(tile.rows);
  const double reciprocal = 1.0 / n;
  for (int64_t c = 0; c < tile.width; ++c) {
    const double s = sum[c];
    sum[c] = n * (static_cast<double>(shift[c]) - origin[c]) + s;
    m2[c] -= s * s * reciprocal;
  }
}

}  // namespace

template <typename T>
void RowsStatistics(const RowsTile& tile, const StatisticsArgs& args) {
  const Lookahead<Accumulator<T>> ahead(tile, args);
  for (int64_t c = 0; c < tile.width; c += kSumColumns) {
    StripStatistics(
        RowsTile{tile.rows, std::min(kSumColumns, tile.width - c), tile.stride},
        ahead, static_cast<const T*>(args.x) + c,
        static_cast<const Accumulator<T>*>(args.origin) + c, args.sum + c,
        args.m2 + c);
  }
}

BNAR_INSTANTIATE(RowsStatistics, RowsTile, StatisticsArgs)

}  // namespace jax_bnar::cpu::BNAR_ISA
