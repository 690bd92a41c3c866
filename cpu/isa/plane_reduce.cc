// Computes the sums of backward over a plane, and dz.

#include <algorithm>

#include "cpu/isa/elements.h"
#include "cpu/isa/flags.h"
#include "cpu/isa/kernels.h"
#include "cpu/isa/planes.h"

namespace jax_bnar::cpu::BNAR_ISA {
namespace {

// kStream has an effect only with a residual.
template <typename T, Gate kGate, bool kResidual, bool kStream>
void Reduce(const Plane& plane, const ReduceArgs& args) {
  using A = Accumulator<T>;
  const void* saved = args.saved;
  const int64_t mask_bit = plane.mask_bit;
  const T* dy = static_cast<const T*>(args.dy);
  const T* x = static_cast<const T*>(args.x);
  T* dz = static_cast<T*>(args.dz);
  const auto vectors = PlaneVectors<kGate, A>(args.mean, args.a, args.bias);
  double sum_e = 0, sum_e_centred = 0;
  for (int64_t begin = 0; begin < plane.size; begin += kSegment) {
    const int64_t size = std::min(kSegment, plane.size - begin);
    Vec<A> s0[kSums<A>] = {};
    Vec<A> s1[kSums<A>] = {};
    ForEachSummand<T>(
        size,
        [&](int64_t j, auto p) BNAR_LAMBDA {
          const int64_t i = begin + j;
          const Vec<A> centred = Load(x + i) - vectors.mean;
          const Vec<A> e = PlaneGated<kGate>(
              dy, saved, i, mask_bit,
              [&]() BNAR_LAMBDA { return vectors.Normalised(centred); });
          s0[p] = s0[p] + e;
          s1[p] = s1[p] + e * centred;
          if constexpr (kResidual) {
            StoreResult<T, kStream>(dz + i, Narrow<T>(e));
          }
        },
        [&](int64_t j, int n) BNAR_LAMBDA {
          const int64_t i = begin + j;
          const Vec<A> centred =
              FirstLanes(LoadPartial(x + i, n) - vectors.mean, n);
          const Vec<A> e = PlaneGatedPartial<kGate>(
              dy, saved, i, mask_bit,
              [&]() BNAR_LAMBDA { return vectors.Normalised(centred); }, n);
          s0[0] = s0[0] + e;
          s1[0] = s1[0] + e * centred;
          if constexpr (kResidual) StorePartial(dz + i, Narrow<T>(e), n);
        });
    sum_e += LaneSum(s0);
    sum_e_centred += LaneSum(s1);
  }
  if constexpr (kStream) StreamingFence();
  *args.sum_e = sum_e;
  *args.sum_e_centred = sum_e_centred;
}

}  // namespace

template <typename T>
void PlaneReduce(const Plane& plane, const ReduceArgs& args) {
  WithGate(args.gate, [&](auto gate) {
    WithResidual(args, [&](auto residual, auto stream) {
      Reduce<T, gate.value, residual.value, stream.value>(plane, args);
    });
  });
}

BNAR_INSTANTIATE(PlaneReduce, Plane, ReduceArgs);

}  // namespace jax_bnar::cpu::BNAR_ISA
