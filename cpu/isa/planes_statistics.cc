// Computes the sums of each plane that its statistics need.

#include <algorithm>

#include "cpu/isa/kernels.h"
#include "cpu/isa/planes.h"
#include "cpu/isa/prefetch.h"
#include "cpu/samples.h"
#include "native/numerics.h"

namespace jax_bnar::cpu::BNAR_ISA {
namespace {

// Returns an element near the mean, for the reason given at ShiftOfColumns in
// rows_statistics.cc: the median of five. Vectors are loaded at their places,
// because the median of vectors takes no longer than that of numbers. In a long
// plane there is time for the median of five such medians, which is nearer.
template <typename T>
BNAR_INLINE Accumulator<T> ShiftOfPlane(const T* x, int64_t size) {
  using A = Accumulator<T>;
  const auto sample = [&](int i) BNAR_LAMBDA {
    return Load(x + SampleAt(i, size - kVecLanes<A> + 1));
  };
  A lanes[kVecLanes<A>];
  StoreLanes(lanes, WhereFinite(Median(sample(0), sample(1), sample(2),
                                       sample(3), sample(4))));
  return size < kSegment / 4 ? lanes[0] : FiniteMedian(lanes);
}

}  // namespace

template <typename T>
void PlanesStatistics(const PlanesTile& tile, const StatisticsArgs& args) {
  using A = Accumulator<T>;
  const A* origin = static_cast<const A*>(args.origin);
  double* sum = args.sum;
  double* m2 = args.m2;
  const T* elements = static_cast<const T*>(args.x);
  const double n = static_cast<double>(tile.size);
  const Lookahead<A> ahead(tile, args);
  ForEachPlane(tile, [&](int64_t p, int64_t first) BNAR_LAMBDA {
    const T* x = elements + first;
    const A shift_scalar = ShiftOfPlane(x, tile.size);
    const Vec<A> shift = Broadcast<A>(shift_scalar);
    double total = 0, total_squares = 0;
    for (int64_t begin = 0; begin < tile.size; begin += kSegment) {
      SumOfRuns<A> s1, s2;
      ForEachSummand<T, /*kInRuns=*/true>(
          begin, std::min(kSegment, tile.size - begin),
          [&](int64_t i, auto k) BNAR_LAMBDA {
            ahead.Prefetch(x + i);
            const Vec<A> d = Load(x + i) - shift;
            s1.Add(k, d);
            s2.Add(k, d * d);
          },
          [&](int64_t i, int fresh) BNAR_LAMBDA {
            const Vec<A> d = LastLanes(Load(x + i) - shift, fresh);
            s1.Add(Constant<0>(), d);
            s2.Add(Constant<0>(), d * d);
          },
          [&]() BNAR_LAMBDA {
            s1.EndRun();
            s2.EndRun();
          });
      total += s1.Total();
      total_squares += s2.Total();
    }
    sum[p] = n * (static_cast<double>(shift_scalar) - origin[p]) + total;
    m2[p] = SquaredDeviations(total, total_squares, n);
  });
}

BNAR_INSTANTIATE(PlanesStatistics, PlanesTile, StatisticsArgs)

}  // namespace jax_bnar::cpu::BNAR_ISA
