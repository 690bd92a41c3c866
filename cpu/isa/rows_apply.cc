// Computes dx of each input of a rows tile.

#include "cpu/isa/elements.h"
#include "cpu/isa/flags.h"
#include "cpu/isa/inputs.h"
#include "cpu/isa/kernels.h"
#include "cpu/isa/prefetch.h"
#include "cpu/isa/rows.h"

namespace jax_bnar::cpu::BNAR_ISA {
namespace {

template <typename In, typename Out, int N, Gate kGate, bool kNonTemporal>
void Apply(const RowsTile& tile, const ApplyArgs<N>& args) {
  using A = Accumulator<In>;
  const Out* dy = static_cast<const Out*>(args.e);
  const Pointers<const In, N> x(args.x);
  const Pointers<In, N> dx(args.dx);
  const void* saved = args.saved;
  const InputColumns<A, N> columns(args);
  const GradientColumns<A, N> gradient_columns(args);
  const Lookahead<A> ahead(tile, args);
  ForEachElement<In>(
      tile, kNonTemporal,
      [&](int64_t index, int64_t distance, int64_t column,
          auto streams) BNAR_LAMBDA {
        const auto vectors = columns.template At<kGate>(column);
        const auto gradient = gradient_columns.At(column);
        BNAR_UNROLL
        for (int k = 0; k < decltype(streams)::value; ++k) {
          const int64_t at = index + k * distance;
          ahead.template OfBackward<kGate>(dy, x, saved, at);
          const auto centred = vectors.Centred(
              [&](auto input) BNAR_LAMBDA { return Load(x[input] + at); });
          const Vec<A> e =
              QuietNaNs<In, Out>(Gated<kGate>(dy, saved, at, [&]() BNAR_LAMBDA {
                                   return vectors.Normalised(centred);
                                 }).e);
          ForEachInput<N>([&](auto input) BNAR_LAMBDA {
            StoreResult(kNonTemporal, dx[input] + at,
                        GradientElements<In>(gradient, input, e, centred));
          });
        }
      });
  if constexpr (kNonTemporal) NonTemporalFence();
}

}  // namespace

template <typename In, typename Out, int N>
void RowsApply(const RowsTile& tile, const ApplyArgs<N>& args) {
  if constexpr (std::is_same_v<In, Out>) {
    if (args.gate != Gate::kNone && args.activation.is_curve()) {
      return RowsApplyCurve<In, N>(tile, args);
    }
  }
  WithApplyFlags(args, [&](auto gate, auto non_temporal) {
    Apply<In, Out, N, gate.value, non_temporal.value>(tile, args);
  });
}

BNAR_INSTANTIATE_ALL(RowsApply, RowsTile, ApplyArgs)

}  // namespace jax_bnar::cpu::BNAR_ISA
