// Computes dx of each input of a plane.

#include "cpu/isa/elements.h"
#include "cpu/isa/flags.h"
#include "cpu/isa/inputs.h"
#include "cpu/isa/kernels.h"
#include "cpu/isa/planes.h"

namespace jax_bnar::cpu::BNAR_ISA {
namespace {

template <typename In, typename Out, int N, Gate kGate, bool kStream>
void Apply(const Plane& plane, const ApplyArgs<N>& args) {
  using A = Accumulator<In>;
  const void* saved = args.saved;
  const int64_t mask_bit = plane.mask_bit;
  const Out* dy = static_cast<const Out*>(args.e);
  const Pointers<const In, N> x(args.x);
  const Pointers<In, N> dx(args.dx);
  const auto vectors = InputColumns<A, N>(args).template OfPlane<kGate>();
  const auto gradient = GradientColumns<A, N>(args).OfPlane();
  ForEachVector<In>(
      plane.size,
      [&](int64_t i) BNAR_LAMBDA {
        const auto centred = vectors.Centred(
            [&](auto input) BNAR_LAMBDA { return Load(x[input] + i); });
        const Vec<A> e = PlaneGated<kGate>(
            dy, saved, i, mask_bit,
            [&]() BNAR_LAMBDA { return vectors.Normalised(centred); });
        ForEachInput<N>([&](auto input) BNAR_LAMBDA {
          StoreResult<In, kStream>(
              dx[input] + i, GradientElements<In>(gradient, input, e, centred));
        });
      },
      [&](int64_t i, int n) BNAR_LAMBDA {
        const auto centred = vectors.Centred([&](auto input) BNAR_LAMBDA {
          return LoadPartial(x[input] + i, n);
        });
        const Vec<A> e = PlaneGatedPartial<kGate>(
            dy, saved, i, mask_bit,
            [&]() BNAR_LAMBDA { return vectors.Normalised(centred); }, n);
        ForEachInput<N>([&](auto input) BNAR_LAMBDA {
          StorePartial(dx[input] + i,
                       GradientElements<In>(gradient, input, e, centred), n);
        });
      });
  if constexpr (kStream) StreamingFence();
}

}  // namespace

template <typename In, typename Out, int N>
void PlaneApply(const Plane& plane, const ApplyArgs<N>& args) {
  if constexpr (std::is_same_v<In, Out>) {
    // Without a gate, e may lie where dx will be, and this kernel reads no
    // element after it has written it.
    if (args.activation.is_curve()) {
      return PlaneApplyCurve<In, N>(plane, args);
    }
  }
  WithGate<kHasEveryForm<N>>(args.gate, [&](auto gate) {
    WithBool(args.stream, [&](auto stream) {
      Apply<In, Out, N, gate.value, stream.value>(plane, args);
    });
  });
}

BNAR_INSTANTIATE_ALL(PlaneApply, Plane, ApplyArgs)

}  // namespace jax_bnar::cpu::BNAR_ISA
