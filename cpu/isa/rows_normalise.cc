// Computes y of a rows tile.

#include <cstring>

#include "cpu/isa/elements.h"
#include "cpu/isa/flags.h"
#include "cpu/isa/inputs.h"
#include "cpu/isa/kernels.h"
#include "cpu/isa/prefetch.h"
#include "cpu/isa/rows.h"

namespace jax_bnar::cpu::BNAR_ISA {
namespace {

template <typename In, typename Out, int N, bool kRelu, bool kResidual,
          bool kMask>
void Normalise(const RowsTile& tile, const NormaliseArgs<N>& args) {
  using A = Accumulator<In>;
  const Pointers<const In, N> x(args.x);
  const Out* z = static_cast<const Out*>(args.z);
  Out* y = static_cast<Out*>(args.y);
  uint8_t* mask = args.mask;
  const bool non_temporal = args.non_temporal;
  const InputColumns<A, N> columns(args);
  const Lookahead<A> ahead(tile, args);
  ForEachElement<Out>(
      tile, non_temporal,
      [&](int64_t index, int64_t distance, int64_t column,
          auto streams) BNAR_LAMBDA {
        constexpr int kStreams = decltype(streams)::value;
        // The constants of forward are those of gate kX: a and bias too.
        const auto vectors = columns.template At<Gate::kX>(column);
        BNAR_UNROLL
        for (int k = 0; k < kStreams; ++k) {
          const int64_t at = index + k * distance;
          ahead.template OfForward<kResidual>(x, z, at);
          const Vec<A> value = NormalisedElements<kRelu, kResidual>(
              vectors,
              [&](auto input) BNAR_LAMBDA { return Load(x[input] + at); },
              kResidual ? z + at : z);
          StoreResult(kStreams == 1 && non_temporal, y + at, Round<Out>(value));
          if constexpr (kMask) {
            const auto bits =
                static_cast<MaskBits<A>>(PositiveBits<Out>(value));
            std::memcpy(mask + at / 8, &bits, sizeof(bits));
          }
        }
      });
  if (non_temporal) NonTemporalFence();
}

}  // namespace

template <typename In, typename Out, int N>
void RowsNormalise(const RowsTile& tile, const NormaliseArgs<N>& args) {
  if constexpr (std::is_same_v<In, Out>) {
    if (args.activation.is_curve()) {
      return RowsNormaliseCurve<In, N>(tile, args);
    }
  }
  WithNormaliseFlags(args, [&](auto relu, auto residual, auto mask) {
    Normalise<In, Out, N, relu.value, residual.value, mask.value>(tile, args);
  });
}

BNAR_INSTANTIATE_ALL(RowsNormalise, RowsTile, NormaliseArgs)

}  // namespace jax_bnar::cpu::BNAR_ISA
