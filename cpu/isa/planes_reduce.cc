// Computes the sums of backward over each plane, and dz.

#include <algorithm>

#include "cpu/isa/elements.h"
#include "cpu/isa/flags.h"
#include "cpu/isa/inputs.h"
#include "cpu/isa/kernels.h"
#include "cpu/isa/planes.h"
#include "cpu/isa/prefetch.h"

namespace jax_bnar::cpu::BNAR_ISA {
namespace {

// Only of terms with few digits do long sums need runs (see kRun), and two
// inputs leave no registers for them.
template <typename Out, int N>
constexpr bool kInRuns = sizeof(Out) == 2 && N == 1;

template <typename In, typename Out, int N, Gate kGate, bool kResidual>
void Reduce(const PlanesTile& tile, const ReduceArgs<N>& args) {
  using A = Accumulator<In>;
  const void* saved = args.saved;
  const bool non_temporal = kResidual && args.non_temporal;
  const int64_t mask_bit = tile.mask_bit;
  const Out* dy = static_cast<const Out*>(args.dy);
  const Pointers<const In, N> x(args.x);
  Out* dz = static_cast<Out*>(args.dz);
  double* sum_e = args.sum_e;
  const Pointers<double, N> sum_e_centred(args.sum_e_centred);
  const InputColumns<A, N> columns(args);
  const Lookahead<A> ahead(tile, args);
  ForEachPlane(tile, [&](int64_t p, int64_t first) BNAR_LAMBDA {
    const auto vectors = columns.template OfPlane<kGate>(p);
    double total_e = 0, total_e_centred[N] = {};
    for (int64_t begin = 0; begin < tile.size; begin += kSegment) {
      SumOfRuns<A> s0, s1[N];
      // Adds what keep(values) leaves of the vector at element j.
      const auto add = [&](int64_t j, auto k, auto keep) BNAR_LAMBDA {
        const int64_t at = first + j;
        ahead.template OfBackward<kGate>(dy, x, saved, at);
        const auto centred = vectors.Centred(
            [&](auto input) BNAR_LAMBDA { return Load(x[input] + at); });
        const Vec<A> e = PlaneGated<kGate>(
            dy, saved, at, mask_bit,
            [&]() BNAR_LAMBDA { return vectors.Normalised(centred); });
        s0.Add(k, keep(e));
        ForEachInput<N>([&](auto input) BNAR_LAMBDA {
          s1[input].Add(k, keep(e * centred[input]));
        });
        if constexpr (kResidual) {
          StoreResult(non_temporal, dz + at, Narrow<Out>(e));
        }
      };
      ForEachSummand<In, kInRuns<Out, N>>(
          begin, std::min(kSegment, tile.size - begin),
          [&](int64_t j, auto k) BNAR_LAMBDA {
            add(j, k, [](const Vec<A>& v) BNAR_LAMBDA { return v; });
          },
          [&](int64_t j, int fresh) BNAR_LAMBDA {
            add(j, Constant<0>(), [&](const Vec<A>& v) BNAR_LAMBDA {
              return LastLanes(v, fresh);
            });
          },
          [&]() BNAR_LAMBDA {
            s0.EndRun();
            ForEachInput<N>([&](auto input)
                                BNAR_LAMBDA { s1[input].EndRun(); });
          });
      total_e += s0.Total();
      ForEachInput<N>([&](auto input) BNAR_LAMBDA {
        total_e_centred[input] += s1[input].Total();
      });
    }
    sum_e[p] = total_e;
    ForEachInput<N>([&](auto input) BNAR_LAMBDA {
      sum_e_centred[input][p] = total_e_centred[input];
    });
  });
  if (non_temporal) NonTemporalFence();
}

}  // namespace

template <typename In, typename Out, int N>
void PlanesReduce(const PlanesTile& tile, const ReduceArgs<N>& args) {
  if constexpr (std::is_same_v<In, Out>) {
    if (args.gate != Gate::kNone && args.activation.is_curve()) {
      return PlanesReduceCurve<In, N>(tile, args);
    }
  }
  WithReduceFlags(args, [&](auto gate, auto residual) {
    Reduce<In, Out, N, gate.value, residual.value>(tile, args);
  });
}

BNAR_INSTANTIATE_ALL(PlanesReduce, PlanesTile, ReduceArgs)

}  // namespace jax_bnar::cpu::BNAR_ISA
