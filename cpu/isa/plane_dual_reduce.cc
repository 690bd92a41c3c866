// Computes the sums of backward over a plane, with two inputs.

#include <algorithm>

#include "cpu/isa/dual.h"
#include "cpu/isa/elements.h"
#include "cpu/isa/flags.h"
#include "cpu/isa/kernels.h"
#include "cpu/isa/planes.h"

namespace jax_bnar::cpu::BNAR_ISA {
namespace {

template <typename T, Gate kGate>
void Reduce(const Plane& plane, const DualReduceArgs& args) {
  using A = Accumulator<T>;
  const void* saved = args.saved;
  const int64_t mask_bit = plane.mask_bit;
  const T* dy = static_cast<const T*>(args.dy);
  const T* x1 = static_cast<const T*>(args.x[0]);
  const T* x2 = static_cast<const T*>(args.x[1]);
  const auto vectors = DualColumns<A>(args).template OfPlane<kGate>();
  double sum_e = 0, sum_e_centred1 = 0, sum_e_centred2 = 0;
  for (int64_t begin = 0; begin < plane.size; begin += kSegment) {
    const int64_t size = std::min(kSegment, plane.size - begin);
    Vec<A> s0[kSums<A>] = {};
    Vec<A> s1[kSums<A>] = {};
    Vec<A> s2[kSums<A>] = {};
    ForEachSummand<T>(
        size,
        [&](int64_t j, auto p) BNAR_LAMBDA {
          const int64_t i = begin + j;
          const Vec<A> centred1 = Load(x1 + i) - vectors.mean1;
          const Vec<A> centred2 = Load(x2 + i) - vectors.mean2;
          const Vec<A> e =
              PlaneGated<kGate>(dy, saved, i, mask_bit, [&]() BNAR_LAMBDA {
                return vectors.Normalised(centred1, centred2);
              });
          s0[p] = s0[p] + e;
          s1[p] = s1[p] + e * centred1;
          s2[p] = s2[p] + e * centred2;
        },
        [&](int64_t j, int n) BNAR_LAMBDA {
          const int64_t i = begin + j;
          const Vec<A> centred1 =
              FirstLanes(LoadPartial(x1 + i, n) - vectors.mean1, n);
          const Vec<A> centred2 =
              FirstLanes(LoadPartial(x2 + i, n) - vectors.mean2, n);
          const Vec<A> e = PlaneGatedPartial<kGate>(
              dy, saved, i, mask_bit,
              [&]() BNAR_LAMBDA {
                return vectors.Normalised(centred1, centred2);
              },
              n);
          s0[0] = s0[0] + e;
          s1[0] = s1[0] + e * centred1;
          s2[0] = s2[0] + e * centred2;
        });
    sum_e += LaneSum(s0);
    sum_e_centred1 += LaneSum(s1);
    sum_e_centred2 += LaneSum(s2);
  }
  *args.sum_e = sum_e;
  *args.sum_e_centred[0] = sum_e_centred1;
  *args.sum_e_centred[1] = sum_e_centred2;
}

}  // namespace

template <typename T>
void PlaneDualReduce(const Plane& plane, const DualReduceArgs& args) {
  WithDualGate(args.gate,
               [&](auto gate) { Reduce<T, gate.value>(plane, args); });
}

BNAR_INSTANTIATE(PlaneDualReduce, Plane, DualReduceArgs);

}  // namespace jax_bnar::cpu::BNAR_ISA
