// What is computed from the elements of a vector, whether they are columns of a
// row or a piece of a plane.

#ifndef JAX_BNAR_CPU_ISA_ELEMENTS_H_
#define JAX_BNAR_CPU_ISA_ELEMENTS_H_

#include <cstring>

#include "cpu/isa/simd_memory.h"
#include "cpu/tile_kernels.h"

namespace jax_bnar::cpu::BNAR_ISA {

template <typename T, bool kStream>
BNAR_INLINE void StoreResult(T* p, const Stored<T>& stored) {
  if constexpr (kStream) {
    StoreStreaming(p, stored);
  } else {
    Store(p, stored);
  }
}

// Returns y before it is rounded.
template <bool kRelu, bool kResidual, typename T, typename A = Accumulator<T>>
BNAR_INLINE Vec<A> NormalisedElements(const Vec<A>& x, const T* z,
                                      const Vec<A>& mean, const Vec<A>& a,
                                      const Vec<A>& bias) {
  Vec<A> y = (x - mean) * a + bias;
  if constexpr (kResidual) y = y + Load(z);
  if constexpr (kRelu) y = Relu(y);
  return y;
}

// The constants of a vector of columns, or of one plane.
template <typename A>
struct GateVectors {
  Vec<A> mean;
  Vec<A> a;     // set only with Gate::kX
  Vec<A> bias;  // set only with Gate::kX

  template <Gate kGate>
  static BNAR_INLINE GateVectors Columns(const A* mean, const A* a,
                                         const A* bias, int64_t c) {
    GateVectors r{};
    r.mean = Load(mean + c);
    if constexpr (kGate == Gate::kX) {
      r.a = Load(a + c);
      r.bias = Load(bias + c);
    }
    return r;
  }

  // Returns the sum that Normalise forms. The operations are the same, so the
  // sign is the same.
  BNAR_INLINE Vec<A> Normalised(const Vec<A>& centred) const {
    return centred * a + bias;
  }
};

// e, and its stored form in dz, which is exact.
template <typename T>
struct GatedValue {
  Vec<Accumulator<T>> e;
  Stored<T> stored;
};

// Returns dy where the gate is open and 0 elsewhere. For Gate::kX, normalised()
// returns the value that forward rounded to y.
template <Gate kGate, typename T, typename F>
BNAR_INLINE GatedValue<T> Gated(const T* dy, const void* saved, int64_t i,
                                F normalised) {
  GatedValue<T> r;
  if constexpr (kGate == Gate::kY) {
    const T* y = static_cast<const T*>(saved);
    r.stored = WhereStoredPositive<T>(LoadStored(y + i), LoadStored(dy + i));
    r.e = Widen<T>(r.stored);
    return r;
  }
  r.e = Load(dy + i);
  if constexpr (kGate == Gate::kMask) {
    MaskBits<Accumulator<T>> bits;
    std::memcpy(&bits,
                static_cast<const uint8_t*>(saved) +
                    static_cast<uint64_t>(i) / 8,  // i >= 0: this is a shift
                sizeof(bits));
    r.e = WhereBits(bits, r.e);
  } else if constexpr (kGate == Gate::kX) {
    r.e = WhereRoundsPositive<T>(normalised(), r.e);
  }
  r.stored = Narrow<T>(r.e);
  return r;
}

template <typename T, typename A = Accumulator<T>>
BNAR_INLINE Stored<T> GradientElements(const Vec<A>& e, const Vec<A>& centred,
                                       const Vec<A>& a, const Vec<A>& b,
                                       const Vec<A>& k) {
  return Round<T>(a * e + (b * centred + k));
}

}  // namespace jax_bnar::cpu::BNAR_ISA

#endif  // JAX_BNAR_CPU_ISA_ELEMENTS_H_
