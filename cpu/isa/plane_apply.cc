// Computes dx of a plane.

#include "cpu/isa/elements.h"
#include "cpu/isa/flags.h"
#include "cpu/isa/kernels.h"
#include "cpu/isa/planes.h"

namespace jax_bnar::cpu::BNAR_ISA {
namespace {

template <typename T, Gate kGate, bool kStream>
void Apply(const Plane& plane, const ApplyArgs& args) {
  using A = Accumulator<T>;
  const void* saved = args.saved;
  const int64_t mask_bit = plane.mask_bit;
  const T* dy = static_cast<const T*>(args.e);
  const T* x = static_cast<const T*>(args.x);
  T* dx = static_cast<T*>(args.dx);
  const auto vectors = PlaneVectors<kGate, A>(args.mean, args.a, args.bias);
  const Vec<A> a = Broadcast(*static_cast<const A*>(args.a));
  const Vec<A> b = Broadcast(*static_cast<const A*>(args.b));
  const Vec<A> k = Broadcast(*static_cast<const A*>(args.k));
  ForEachVector<T>(
      plane.size,
      [&](int64_t i) BNAR_LAMBDA {
        const Vec<A> centred = Load(x + i) - vectors.mean;
        const Vec<A> e = PlaneGated<kGate>(
            dy, saved, i, mask_bit,
            [&]() BNAR_LAMBDA { return vectors.Normalised(centred); });
        StoreResult<T, kStream>(dx + i,
                                GradientElements<T>(e, centred, a, b, k));
      },
      [&](int64_t i, int n) BNAR_LAMBDA {
        const Vec<A> centred = LoadPartial(x + i, n) - vectors.mean;
        const Vec<A> e = PlaneGatedPartial<kGate>(
            dy, saved, i, mask_bit,
            [&]() BNAR_LAMBDA { return vectors.Normalised(centred); }, n);
        StorePartial(dx + i, GradientElements<T>(e, centred, a, b, k), n);
      });
  if constexpr (kStream) StreamingFence();
}

}  // namespace

template <typename T>
void PlaneApply(const Plane& plane, const ApplyArgs& args) {
  WithGate(args.gate, [&](auto gate) {
    WithBool(args.stream, [&](auto stream) {
      Apply<T, gate.value, stream.value>(plane, args);
    });
  });
}

BNAR_INSTANTIATE(PlaneApply, Plane, ApplyArgs);

}  // namespace jax_bnar::cpu::BNAR_ISA
