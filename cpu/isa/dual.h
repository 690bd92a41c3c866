// What the kernels with two normalised inputs share.

#ifndef JAX_BNAR_CPU_ISA_DUAL_H_
#define JAX_BNAR_CPU_ISA_DUAL_H_

#include "cpu/isa/elements.h"
#include "cpu/tile_kernels.h"

namespace jax_bnar::cpu::BNAR_ISA {

// The constants of a vector of columns, or of one plane. a1, a2 and bias are
// set in forward, and in backward if the gate needs them (Gate::kX).
template <typename A>
struct DualVectors {
  Vec<A> mean1;
  Vec<A> mean2;
  Vec<A> a1;
  Vec<A> a2;
  Vec<A> bias;

  // y before ReLU and rounding. Forward and the gate of backward both call this
  // function, because the same operations give the same sign.
  BNAR_INLINE Vec<A> Normalised(const Vec<A>& centred1,
                                const Vec<A>& centred2) const {
    return centred2 * a2 + (centred1 * a1 + bias);
  }
};

// Pointers to the constants of columns. The kernels copy the pointers, because
// the compiler cannot know that a store does not change `args`.
template <typename A>
struct DualColumns {
  const A* mean1;
  const A* mean2;
  const A* a1;
  const A* a2;
  const A* bias;

  template <typename Args>
  explicit DualColumns(const Args& args)
      : mean1(static_cast<const A*>(args.mean[0])),
        mean2(static_cast<const A*>(args.mean[1])),
        a1(static_cast<const A*>(args.a[0])),
        a2(static_cast<const A*>(args.a[1])),
        bias(static_cast<const A*>(args.bias)) {}

  // Loads the constants of a vector of columns.
  template <Gate kGate>
  BNAR_INLINE DualVectors<A> At(int64_t column) const {
    DualVectors<A> r{};
    r.mean1 = Load(mean1 + column);
    r.mean2 = Load(mean2 + column);
    if constexpr (kGate == Gate::kX) {
      r.a1 = Load(a1 + column);
      r.a2 = Load(a2 + column);
      r.bias = Load(bias + column);
    }
    return r;
  }

  // Broadcasts the constants of a plane.
  template <Gate kGate>
  BNAR_INLINE DualVectors<A> OfPlane() const {
    DualVectors<A> r{};
    r.mean1 = Broadcast(*mean1);
    r.mean2 = Broadcast(*mean2);
    if constexpr (kGate == Gate::kX) {
      r.a1 = Broadcast(*a1);
      r.a2 = Broadcast(*a2);
      r.bias = Broadcast(*bias);
    }
    return r;
  }
};

}  // namespace jax_bnar::cpu::BNAR_ISA

#endif  // JAX_BNAR_CPU_ISA_DUAL_H_
