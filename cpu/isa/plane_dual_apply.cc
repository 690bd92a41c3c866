// Computes dx1 and dx2 of a plane.

#include "cpu/isa/dual.h"
#include "cpu/isa/elements.h"
#include "cpu/isa/flags.h"
#include "cpu/isa/kernels.h"
#include "cpu/isa/planes.h"

namespace jax_bnar::cpu::BNAR_ISA {
namespace {

template <typename T, Gate kGate, bool kStream>
void Apply(const Plane& plane, const DualApplyArgs& args) {
  using A = Accumulator<T>;
  const void* saved = args.saved;
  const int64_t mask_bit = plane.mask_bit;
  const T* dy = static_cast<const T*>(args.dy);
  const T* x1 = static_cast<const T*>(args.x[0]);
  const T* x2 = static_cast<const T*>(args.x[1]);
  T* dx1 = static_cast<T*>(args.dx[0]);
  T* dx2 = static_cast<T*>(args.dx[1]);
  const DualColumns<A> columns(args);
  const auto vectors = columns.template OfPlane<kGate>();
  const auto broadcast = [](const void* p) BNAR_LAMBDA {
    return Broadcast(*static_cast<const A*>(p));
  };
  const Vec<A> a1 = broadcast(args.a[0]), a2 = broadcast(args.a[1]);
  const Vec<A> b1 = broadcast(args.b[0]), b2 = broadcast(args.b[1]);
  const Vec<A> k1 = broadcast(args.k[0]), k2 = broadcast(args.k[1]);
  ForEachVector<T>(
      plane.size,
      [&](int64_t i) BNAR_LAMBDA {
        const Vec<A> centred1 = Load(x1 + i) - vectors.mean1;
        const Vec<A> centred2 = Load(x2 + i) - vectors.mean2;
        const Vec<A> e =
            PlaneGated<kGate>(dy, saved, i, mask_bit, [&]() BNAR_LAMBDA {
              return vectors.Normalised(centred1, centred2);
            });
        StoreResult<T, kStream>(dx1 + i,
                                GradientElements<T>(e, centred1, a1, b1, k1));
        StoreResult<T, kStream>(dx2 + i,
                                GradientElements<T>(e, centred2, a2, b2, k2));
      },
      [&](int64_t i, int n) BNAR_LAMBDA {
        const Vec<A> centred1 = LoadPartial(x1 + i, n) - vectors.mean1;
        const Vec<A> centred2 = LoadPartial(x2 + i, n) - vectors.mean2;
        const Vec<A> e = PlaneGatedPartial<kGate>(
            dy, saved, i, mask_bit,
            [&]()
                BNAR_LAMBDA { return vectors.Normalised(centred1, centred2); },
            n);
        StorePartial(dx1 + i, GradientElements<T>(e, centred1, a1, b1, k1), n);
        StorePartial(dx2 + i, GradientElements<T>(e, centred2, a2, b2, k2), n);
      });
  if constexpr (kStream) StreamingFence();
}

}  // namespace

template <typename T>
void PlaneDualApply(const Plane& plane, const DualApplyArgs& args) {
  WithDualGate(args.gate, [&](auto gate) {
    WithBool(args.stream, [&](auto stream) {
      Apply<T, gate.value, stream.value>(plane, args);
    });
  });
}

BNAR_INSTANTIATE(PlaneDualApply, Plane, DualApplyArgs);

}  // namespace jax_bnar::cpu::BNAR_ISA
