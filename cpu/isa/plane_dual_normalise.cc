// Computes y of a plane from two inputs.

#include "cpu/isa/dual.h"
#include "cpu/isa/elements.h"
#include "cpu/isa/flags.h"
#include "cpu/isa/kernels.h"
#include "cpu/isa/planes.h"

namespace jax_bnar::cpu::BNAR_ISA {
namespace {

template <typename T, bool kMask, bool kStream>
void Normalise(const Plane& plane, const DualNormaliseArgs& args) {
  using A = Accumulator<T>;
  const T* x1 = static_cast<const T*>(args.x[0]);
  const T* x2 = static_cast<const T*>(args.x[1]);
  T* y = static_cast<T*>(args.y);
  uint8_t* mask = args.mask;
  const int64_t mask_bit = plane.mask_bit;
  const auto vectors = DualColumns<A>(args).template OfPlane<Gate::kX>();
  ForEachVector<T>(
      plane.size,
      [&](int64_t i) BNAR_LAMBDA {
        const Vec<A> value = Relu(vectors.Normalised(
            Load(x1 + i) - vectors.mean1, Load(x2 + i) - vectors.mean2));
        StoreResult<T, kStream>(y + i, Round<T>(value));
        if constexpr (kMask) {
          WriteBits(mask, mask_bit + i, kVecLanes<A>, PositiveBits<T>(value));
        }
      },
      [&](int64_t i, int n) BNAR_LAMBDA {
        const Vec<A> value =
            Relu(vectors.Normalised(LoadPartial(x1 + i, n) - vectors.mean1,
                                    LoadPartial(x2 + i, n) - vectors.mean2));
        StorePartial(y + i, Round<T>(value), n);
        if constexpr (kMask) {
          const uint32_t bits = PositiveBits<T>(value);
          WriteBits(mask, mask_bit + i, n, bits & ((1u << n) - 1u));
        }
      });
  if constexpr (kStream) StreamingFence();
}

}  // namespace

template <typename T>
void PlaneDualNormalise(const Plane& plane, const DualNormaliseArgs& args) {
  WithBool(args.mask != nullptr, [&](auto mask) {
    WithBool(args.stream, [&](auto stream) {
      Normalise<T, mask.value, stream.value>(plane, args);
    });
  });
}

BNAR_INSTANTIATE(PlaneDualNormalise, Plane, DualNormaliseArgs);

}  // namespace jax_bnar::cpu::BNAR_ISA
