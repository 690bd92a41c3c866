// Computes y of planes.

#include <cstdint>

#include "cpu/isa/elements.h"
#include "cpu/isa/flags.h"
#include "cpu/isa/inputs.h"
#include "cpu/isa/kernels.h"
#include "cpu/isa/planes.h"
#include "cpu/isa/prefetch.h"

namespace jax_bnar::cpu::BNAR_ISA {
namespace {

template <typename In, typename Out, int N, bool kRelu, bool kResidual,
          bool kMask>
void Normalise(const PlanesTile& tile, const NormaliseArgs<N>& args) {
  using A = Accumulator<In>;
  const Pointers<const In, N> x(args.x);
  const Out* z = static_cast<const Out*>(args.z);
  Out* y = static_cast<Out*>(args.y);
  uint8_t* mask = args.mask;
  const bool non_temporal = args.non_temporal;
  const int64_t mask_bit = tile.mask_bit;
  const InputColumns<A, N> columns(args);
  const Lookahead<A> ahead(tile, args);
  ForEachPlane(tile, [&](int64_t p, int64_t first) BNAR_LAMBDA {
    // The constants of forward are those of gate kX: a and bias too.
    const auto vectors = columns.template OfPlane<Gate::kX>(p);
    ForEachVector<Out>(tile.size, [&](int64_t i) BNAR_LAMBDA {
      const int64_t at = first + i;
      ahead.template OfForward<kResidual>(x, z, at);
      const Vec<A> value = NormalisedElements<kRelu, kResidual>(
          vectors, [&](auto input) BNAR_LAMBDA { return Load(x[input] + at); },
          kResidual ? z + at : z);
      StoreResult(non_temporal, y + at, Round<Out>(value));
      if constexpr (kMask) {
        WriteBits(mask, mask_bit + at, kVecLanes<A>, PositiveBits<Out>(value));
      }
    });
  });
  if (non_temporal) NonTemporalFence();
}

}  // namespace

template <typename In, typename Out, int N>
void PlanesNormalise(const PlanesTile& tile, const NormaliseArgs<N>& args) {
  if constexpr (std::is_same_v<In, Out>) {
    if (args.activation.is_curve()) {
      return PlanesNormaliseCurve<In, N>(tile, args);
    }
  }
  WithNormaliseFlags(args, [&](auto relu, auto residual, auto mask) {
    Normalise<In, Out, N, relu.value, residual.value, mask.value>(tile, args);
  });
}

BNAR_INSTANTIATE_ALL(PlanesNormalise, PlanesTile, NormaliseArgs)

}  // namespace jax_bnar::cpu::BNAR_ISA
