// Computes y of a plane.

#include <cstring>

#include "cpu/isa/elements.h"
#include "cpu/isa/flags.h"
#include "cpu/isa/inputs.h"
#include "cpu/isa/kernels.h"
#include "cpu/isa/planes.h"

namespace jax_bnar::cpu::BNAR_ISA {
namespace {

template <typename T, int N, bool kRelu, bool kResidual, bool kMask,
          bool kStream>
void Normalise(const Plane& plane, const NormaliseArgs<N>& args) {
  using A = Accumulator<T>;
  const Pointers<const T, N> x(args.x);
  const T* z = static_cast<const T*>(args.z);
  T* y = static_cast<T*>(args.y);
  uint8_t* mask = args.mask;
  const int64_t mask_bit = plane.mask_bit;
  // The constants of forward are those of gate kX: a and bias too.
  const auto vectors = InputColumns<A, N>(args).template OfPlane<Gate::kX>();
  ForEachVector<T>(
      plane.size,
      [&](int64_t i) BNAR_LAMBDA {
        const Vec<A> value = NormalisedElements<kRelu, kResidual>(
            vectors, [&](auto input) BNAR_LAMBDA { return Load(x[input] + i); },
            kResidual ? z + i : z);
        StoreResult<T, kStream>(y + i, Round<T>(value));
        if constexpr (kMask) {
          WriteBits(mask, mask_bit + i, kVecLanes<A>, PositiveBits<T>(value));
        }
      },
      [&](int64_t i, int n) BNAR_LAMBDA {
        T residual[kVecLanes<A>] = {};
        if constexpr (kResidual) {
          std::memcpy(static_cast<void*>(residual), z + i, n * sizeof(T));
        }
        const T* const padded = residual;
        const Vec<A> value = NormalisedElements<kRelu, kResidual>(
            vectors,
            [&](auto input)
                BNAR_LAMBDA { return LoadPartial(x[input] + i, n); },
            padded);
        StorePartial(y + i, Round<T>(value), n);
        if constexpr (kMask) {
          const uint32_t bits = PositiveBits<T>(value);
          WriteBits(mask, mask_bit + i, n, bits & ((1u << n) - 1u));
        }
      });
  if constexpr (kStream) StreamingFence();
}

}  // namespace

template <typename T, int N>
void PlaneNormalise(const Plane& plane, const NormaliseArgs<N>& args) {
  if constexpr (kHasEveryForm<N>) {
    if (args.activation.is_curve()) {
      return PlaneNormaliseCurve<T>(plane, args);
    }
  }
  WithNormaliseFlags(
      args, [&](auto relu, auto residual, auto mask, auto stream) {
        Normalise<T, N, relu.value, residual.value, mask.value, stream.value>(
            plane, args);
      });
}

BNAR_FOR_EACH_INPUT_COUNT(BNAR_INSTANTIATE_FOR_INPUTS, PlaneNormalise, Plane,
                          NormaliseArgs)

}  // namespace jax_bnar::cpu::BNAR_ISA
