// Computes y of a plane.

#include <cstring>

#include "cpu/isa/elements.h"
#include "cpu/isa/flags.h"
#include "cpu/isa/inputs.h"
#include "cpu/isa/kernels.h"
#include "cpu/isa/planes.h"

namespace jax_bnar::cpu::BNAR_ISA {
namespace {

template <typename In, typename Out, int N, bool kRelu, bool kResidual,
          bool kMask, bool kStream>
void Normalise(const Plane& plane, const NormaliseArgs<N>& args) {
  using A = Accumulator<In>;
  const Pointers<const In, N> x(args.x);
  const Out* z = static_cast<const Out*>(args.z);
  Out* y = static_cast<Out*>(args.y);
  uint8_t* mask = args.mask;
  const int64_t mask_bit = plane.mask_bit;
  // The constants of forward are those of gate kX: a and bias too.
  const auto vectors = InputColumns<A, N>(args).template OfPlane<Gate::kX>();
  ForEachVector<Out>(
      plane.size,
      [&](int64_t i) BNAR_LAMBDA {
        const Vec<A> value = NormalisedElements<kRelu, kResidual>(
            vectors, [&](auto input) BNAR_LAMBDA { return Load(x[input] + i); },
            kResidual ? z + i : z);
        StoreResult<Out, kStream>(y + i, Round<Out>(value));
        if constexpr (kMask) {
          WriteBits(mask, mask_bit + i, kVecLanes<A>, PositiveBits<Out>(value));
        }
      },
      [&](int64_t i, int n) BNAR_LAMBDA {
        Out residual[kVecLanes<A>] = {};
        if constexpr (kResidual) {
          std::memcpy(static_cast<void*>(residual), z + i, n * sizeof(Out));
        }
        const Out* const padded = residual;
        const Vec<A> value = NormalisedElements<kRelu, kResidual>(
            vectors,
            [&](auto input)
                BNAR_LAMBDA { return LoadPartial(x[input] + i, n); },
            padded);
        StorePartial(y + i, Round<Out>(value), n);
        if constexpr (kMask) {
          const uint32_t bits = PositiveBits<Out>(value);
          WriteBits(mask, mask_bit + i, n, bits & ((1u << n) - 1u));
        }
      });
  if constexpr (kStream) StreamingFence();
}

}  // namespace

template <typename In, typename Out, int N>
void PlaneNormalise(const Plane& plane, const NormaliseArgs<N>& args) {
  if constexpr (std::is_same_v<In, Out>) {
    if (args.activation.is_curve()) {
      return PlaneNormaliseCurve<In, N>(plane, args);
    }
  }
  WithNormaliseFlags(args, [&](auto relu, auto residual, auto mask,
                               auto stream) {
    Normalise<In, Out, N, relu.value, residual.value, mask.value, stream.value>(
        plane, args);
  });
}

BNAR_INSTANTIATE_ALL(PlaneNormalise, Plane, NormaliseArgs)

}  // namespace jax_bnar::cpu::BNAR_ISA
