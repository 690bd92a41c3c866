// Computes dx of each input of planes.

#include "cpu/isa/elements.h"
#include "cpu/isa/flags.h"
#include "cpu/isa/inputs.h"
#include "cpu/isa/kernels.h"
#include "cpu/isa/planes.h"
#include "cpu/isa/prefetch.h"

namespace jax_bnar::cpu::BNAR_ISA {
namespace {

template <typename In, typename Out, int N, Gate kGate, bool kNonTemporal>
void Apply(const PlanesTile& tile, const ApplyArgs<N>& args) {
  using A = Accumulator<In>;
  const void* saved = args.saved;
  const int64_t mask_bit = tile.mask_bit;
  const Out* dy = static_cast<const Out*>(args.e);
  const Pointers<const In, N> x(args.x);
  const Pointers<In, N> dx(args.dx);
  const InputColumns<A, N> columns(args);
  const GradientColumns<A, N> gradient_columns(args);
  const Lookahead<A> ahead(tile, args);
  ForEachPlane(tile, [&](int64_t p, int64_t first) BNAR_LAMBDA {
    const auto vectors = columns.template OfPlane<kGate>(p);
    const auto gradient = gradient_columns.OfPlane(p);
    // e_of(centred elements of each input) returns e.
    const auto vector = [&](int64_t at, auto e_of) BNAR_LAMBDA {
      ahead.template OfBackward<kGate>(dy, x, saved, at);
      const auto centred = vectors.Centred(
          [&](auto input) BNAR_LAMBDA { return Load(x[input] + at); });
      const Vec<A> e = QuietNaNs<In, Out>(e_of(centred));
      ForEachInput<N>([&](auto input) BNAR_LAMBDA {
        StoreResult(kNonTemporal, dx[input] + at,
                    GradientElements<In>(gradient, input, e, centred));
      });
    };
    if constexpr (kGate == Gate::kNone) {
      // e may lie where dx will be, and the last vector may overlap the one
      // before it, so its e is read before anything is written.
      const int64_t last = first + tile.size - kVecLanes<A>;
      const Vec<A> last_e = Load(dy + last);
      for (int64_t at = first; at < last; at += kVecLanes<A>) {
        vector(at, [&](const auto&) BNAR_LAMBDA { return Load(dy + at); });
      }
      vector(last, [&](const auto&) BNAR_LAMBDA { return last_e; });
    } else {
      ForEachVector<In>(tile.size, [&](int64_t i) BNAR_LAMBDA {
        const int64_t at = first + i;
        vector(at, [&](const auto& centred) BNAR_LAMBDA {
          return PlaneGated<kGate>(dy, saved, at, mask_bit, [&]() BNAR_LAMBDA {
            return vectors.Normalised(centred);
          });
        });
      });
    }
  });
  if constexpr (kNonTemporal) NonTemporalFence();
}

}  // namespace

template <typename In, typename Out, int N>
void PlanesApply(const PlanesTile& tile, const ApplyArgs<N>& args) {
  if constexpr (std::is_same_v<In, Out>) {
    if (args.gate != Gate::kNone && args.activation.is_curve()) {
      return PlanesApplyCurve<In, N>(tile, args);
    }
  }
  WithApplyFlags(args, [&](auto gate, auto non_temporal) {
    Apply<In, Out, N, gate.value, non_temporal.value>(tile, args);
  });
}

BNAR_INSTANTIATE_ALL(PlanesApply, PlanesTile, ApplyArgs)

}  // namespace jax_bnar::cpu::BNAR_ISA
