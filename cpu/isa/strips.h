// What the kernels with other activations than ReLU share. They work on strips,
// which are pieces of a tile whose values fit in the L1 cache in the
// accumulation type: one pass writes the values before the activation to a
// buffer, a function replaces them by the activation or by its derivative, and
// another pass goes on. The passes are small loops over the L1 cache, so a new
// activation adds a function, and no kernel.

#ifndef JAX_BNAR_CPU_ISA_STRIPS_H_
#define JAX_BNAR_CPU_ISA_STRIPS_H_

#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "cpu/isa/elements.h"
#include "cpu/isa/inputs.h"
#include "cpu/isa/simd_memory.h"
#include "cpu/tile_kernels.h"

namespace jax_bnar::cpu::BNAR_ISA {

// The elements of a strip.
constexpr int64_t kStrip = 1024;

// What functions of an activation are compiled for: elements of 16 bits have
// the same one.
template <typename T>
using Precision = std::conditional_t<sizeof(T) == 2, Float16, T>;

// Replaces each value u by act(u), accurate enough to be rounded to T, which is
// a Precision. `size` is a multiple of kVecLanes.
template <typename T>
void Activate(const Activation& activation, Accumulator<T>* values,
              int64_t size);

// Replaces each value u by the derivative of act at u.
template <typename T>
void Differentiate(const Activation& activation, Accumulator<T>* values,
                   int64_t size);

// A piecewise linear activation has the derivative at y that it has where y
// comes from, and at 1 and -1 those where the bit of the mask is set and where
// it is not. Forward sets a bit where the derivative at y is 1.
template <typename A>
BNAR_INLINE Vec<A> OfBits(uint32_t bits) {
  return WhereBits(bits, Broadcast(A{2})) - Broadcast(A{1});
}

// The bits of derivatives, each either 1 or `negative_slope`, which is below 1.
template <typename A>
BNAR_INLINE uint32_t BitsOf(const Vec<A>& derivatives, double negative_slope) {
  const A middle = static_cast<A>((1 + negative_slope) / 2);
  return PositiveBits<A>(derivatives - Broadcast(middle));
}

// The value before the activation, as backward must see it: where the
// derivative is found from y if y is saved, it is that of the rounded value.
template <typename T>
BNAR_INLINE Vec<Accumulator<T>> AsSaved(const Activation& activation,
                                        const Vec<Accumulator<T>>& u) {
  if (!activation.is_piecewise_linear()) return u;
  // In y, 0 has no sign, and what rounds to 0 has kept its sign (LeakyRelu).
  return Widen<T>(Round<T>(u + Zero<Accumulator<T>>()));
}

// The derivative that stops every cotangent, infinite and NaN ones as well. As
// in jax.nn, only ReLU6 has one, and others have a NaN, which nothing equals.
template <typename A>
BNAR_INLINE Vec<A> StoppingDerivative(const Activation& activation) {
  return Broadcast(activation.kind == ActivationKind::kRelu6
                       ? A{0}
                       : std::numeric_limits<A>::quiet_NaN());
}

// e = act'(u) * dy.
template <typename A>
BNAR_INLINE Vec<A> Differentiated(const Vec<A>& derivative, const Vec<A>& dy,
                                  const Vec<A>& stopping) {
  Vec<A> e = derivative * dy;
  BNAR_UNROLL
  for (int i = 0; i < Part<A>::kCount; ++i) {
    const typename Part<A>::Float zero{};
    e.part[i] = derivative.part[i] == stopping.part[i] ? zero : e.part[i];
  }
  return e;
}

}  // namespace jax_bnar::cpu::BNAR_ISA

#endif  // JAX_BNAR_CPU_ISA_STRIPS_H_
