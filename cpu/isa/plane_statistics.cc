// Computes the sums of a plane that its statistics need.

#include <algorithm>

#include "cpu/isa/kernels.h"
#include "cpu/isa/planes.h"
#include "cpu/samples.h"
#include "native/numerics.h"

namespace jax_bnar::cpu::BNAR_ISA {
namespace {

// Returns an element near the mean, for the reason given at ShiftOfColumns in
// rows_statistics.cc. It is the median of five medians, each of elements from
// the same five places, so that only a few cache lines are waited for.
template <typename T>
BNAR_INLINE Accumulator<T> ShiftOfPlane(const T* x, int64_t size) {
  using A = Accumulator<T>;
  A lanes[kLanes], spread[kSamples];
  for (int lane = 0; lane < kLanes; lane += kVecLanes<A>) {
    const auto sample = [&](int i) {
      return Load(x + SampleAt(i, size - kLanes + 1) + lane);
    };
    StoreLanes(lanes + lane,
               Median(sample(0), sample(1), sample(2), sample(3), sample(4)));
  }
  for (int i = 0; i < kSamples; ++i) spread[i] = lanes[3 * i];
  return FiniteMedian(spread);
}

}  // namespace

template <typename T>
void PlaneStatistics(const Plane& plane, const StatisticsArgs& args) {
  using A = Accumulator<T>;
  const A shift_scalar =
      ShiftOfPlane(static_cast<const T*>(args.x), plane.size);
  const Vec<A> shift = Broadcast<A>(shift_scalar);
  double total = 0, total_squares = 0;
  for (int64_t begin = 0; begin < plane.size; begin += kSegment) {
    const T* x = static_cast<const T*>(args.x) + begin;
    const int64_t size = std::min(kSegment, plane.size - begin);
    Vec<A> s1[kSums<A>] = {};
    Vec<A> s2[kSums<A>] = {};
    ForEachSummand<T>(
        size,
        [&](int64_t i, auto p) BNAR_LAMBDA {
          const Vec<A> d = Load(x + i) - shift;
          s1[p] = s1[p] + d;
          s2[p] = s2[p] + d * d;
        },
        [&](int64_t i, int n) BNAR_LAMBDA {
          const Vec<A> d = FirstLanes(LoadPartial(x + i, n) - shift, n);
          s1[0] = s1[0] + d;
          s2[0] = s2[0] + d * d;
        });
    total += LaneSum(s1);
    total_squares += LaneSum(s2);
  }
  const double n = static_cast<double>(plane.size);
  *args.sum = n * (static_cast<double>(shift_scalar) -
                   *static_cast<const A*>(args.origin)) +
              total;
  *args.m2 = SquaredDeviations(total, total_squares, n);
}

BNAR_INSTANTIATE(PlaneStatistics, Plane, StatisticsArgs)

}  // namespace jax_bnar::cpu::BNAR_ISA
