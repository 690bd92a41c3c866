// Computes the sums of backward over a plane, and dz.

#include <algorithm>

#include "cpu/isa/elements.h"
#include "cpu/isa/flags.h"
#include "cpu/isa/inputs.h"
#include "cpu/isa/kernels.h"
#include "cpu/isa/planes.h"

namespace jax_bnar::cpu::BNAR_ISA {
namespace {

// kStream has an effect only with a residual.
template <typename In, typename Out, int N, Gate kGate, bool kResidual,
          bool kStream>
void Reduce(const Plane& plane, const ReduceArgs<N>& args) {
  using A = Accumulator<In>;
  const void* saved = args.saved;
  const int64_t mask_bit = plane.mask_bit;
  const Out* dy = static_cast<const Out*>(args.dy);
  const Pointers<const In, N> x(args.x);
  Out* dz = static_cast<Out*>(args.dz);
  const auto vectors = InputColumns<A, N>(args).template OfPlane<kGate>();
  double sum_e = 0, sum_e_centred[N] = {};
  for (int64_t begin = 0; begin < plane.size; begin += kSegment) {
    const int64_t size = std::min(kSegment, plane.size - begin);
    Vec<A> s0[kSums<A>] = {};
    Vec<A> s1[N][kSums<A>] = {};
    ForEachSummand<In>(
        size,
        [&](int64_t j, auto p) BNAR_LAMBDA {
          const int64_t i = begin + j;
          const auto centred = vectors.Centred(
              [&](auto input) BNAR_LAMBDA { return Load(x[input] + i); });
          const Vec<A> e = PlaneGated<kGate>(
              dy, saved, i, mask_bit,
              [&]() BNAR_LAMBDA { return vectors.Normalised(centred); });
          s0[p] = s0[p] + e;
          ForEachInput<N>([&](auto input) BNAR_LAMBDA {
            s1[input][p] = s1[input][p] + e * centred[input];
          });
          if constexpr (kResidual) {
            StoreResult<Out, kStream>(dz + i, Narrow<Out>(e));
          }
        },
        [&](int64_t j, int n) BNAR_LAMBDA {
          const int64_t i = begin + j;
          auto centred = vectors.Centred([&](auto input) BNAR_LAMBDA {
            return LoadPartial(x[input] + i, n);
          });
          ForEachInput<N>([&](auto input) BNAR_LAMBDA {
            centred[input] = FirstLanes(centred[input], n);
          });
          const Vec<A> e = PlaneGatedPartial<kGate>(
              dy, saved, i, mask_bit,
              [&]() BNAR_LAMBDA { return vectors.Normalised(centred); }, n);
          s0[0] = s0[0] + e;
          ForEachInput<N>([&](auto input) BNAR_LAMBDA {
            s1[input][0] = s1[input][0] + e * centred[input];
          });
          if constexpr (kResidual) StorePartial(dz + i, Narrow<Out>(e), n);
        });
    sum_e += LaneSum(s0);
    ForEachInput<N>([&](auto input) BNAR_LAMBDA {
      sum_e_centred[input] += LaneSum(s1[input]);
    });
  }
  if constexpr (kStream) StreamingFence();
  *args.sum_e = sum_e;
  ForEachInput<N>([&](auto input) BNAR_LAMBDA {
    *args.sum_e_centred[input] = sum_e_centred[input];
  });
}

}  // namespace

template <typename In, typename Out, int N>
void PlaneReduce(const Plane& plane, const ReduceArgs<N>& args) {
  if constexpr (std::is_same_v<In, Out>) {
    if (args.gate != Gate::kNone && args.activation.is_curve()) {
      return PlaneReduceCurve<In, N>(plane, args);
    }
  }
  WithGate<kHasEveryForm<N>>(args.gate, [&](auto gate) {
    WithResidual(args, [&](auto residual, auto stream) {
      Reduce<In, Out, N, gate.value, residual.value, stream.value>(plane, args);
    });
  });
}

BNAR_INSTANTIATE_ALL(PlaneReduce, Plane, ReduceArgs)

}  // namespace jax_bnar::cpu::BNAR_ISA
