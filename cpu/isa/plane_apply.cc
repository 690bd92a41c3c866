// Computes dx of each input of a plane.

#include "cpu/isa/elements.h"
#include "cpu/isa/flags.h"
#include "cpu/isa/inputs.h"
#include "cpu/isa/kernels.h"
#include "cpu/isa/planes.h"

namespace jax_bnar::cpu::BNAR_ISA {
namespace {

template <typename T, int N, Gate kGate, bool kStream>
void Apply(const Plane& plane, const ApplyArgs<N>& args) {
  using A = Accumulator<T>;
  const void* saved = args.saved;
  const int64_t mask_bit = plane.mask_bit;
  const T* dy = static_cast<const T*>(args.e);
  const Pointers<const T, N> x(args.x);
  const Pointers<T, N> dx(args.dx);
  const auto vectors = InputColumns<A, N>(args).template OfPlane<kGate>();
  const auto gradient = GradientColumns<A, N>(args).OfPlane();
  ForEachVector<T>(
      plane.size,
      [&](int64_t i) BNAR_LAMBDA {
        const auto centred = vectors.Centred(
            [&](auto input) BNAR_LAMBDA { return Load(x[input] + i); });
        const Vec<A> e = PlaneGated<kGate>(
            dy, saved, i, mask_bit,
            [&]() BNAR_LAMBDA { return vectors.Normalised(centred); });
        ForEachInput<N>([&](auto input) BNAR_LAMBDA {
          StoreResult<T, kStream>(
              dx[input] + i, GradientElements<T>(gradient, input, e, centred));
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
                       GradientElements<T>(gradient, input, e, centred), n);
        });
      });
  if constexpr (kStream) StreamingFence();
}

}  // namespace

template <typename T, int N>
void PlaneApply(const Plane& plane, const ApplyArgs<N>& args) {
  if constexpr (kHasEveryForm<N>) {
    if (args.gate != Gate::kNone && args.activation.is_curve()) {
      return PlaneApplyCurve<T>(plane, args);
    }
  }
  WithGate<N>(args.gate, [&](auto gate) {
    WithBool(args.stream, [&](auto stream) {
      Apply<T, N, gate.value, stream.value>(plane, args);
    });
  });
}

BNAR_FOR_EACH_INPUT_COUNT(BNAR_INSTANTIATE_FOR_INPUTS, PlaneApply, Plane,
                          ApplyArgs)

}  // namespace jax_bnar::cpu::BNAR_ISA
