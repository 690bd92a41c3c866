// What is computed from the elements of a vector, whether they are columns of a
// row or a piece of a plane.

#ifndef JAX_BNAR_CPU_ISA_ELEMENTS_H_
#define JAX_BNAR_CPU_ISA_ELEMENTS_H_

#include <cstring>

#include "cpu/isa/inputs.h"
#include "cpu/isa/simd_memory.h"
#include "cpu/tile_kernels.h"

namespace jax_bnar::cpu::BNAR_ISA {

// Stores a result, past the caches if `non_temporal` is set. One kernel that
// reads this flag runs as fast as two without it, and takes two thirds of their
// time to compile. Only dx has two (Apply), which has no register for the flag.
template <typename T>
BNAR_INLINE void StoreResult(bool non_temporal, T* p, const Stored<T>& stored) {
  non_temporal ? StoreNonTemporal(p, stored) : Store(p, stored);
}

// Returns y before it is rounded, of the elements that load(input) returns.
template <bool kRelu, bool kResidual, typename A, int N, typename F, typename T>
BNAR_INLINE Vec<A> NormalisedElements(const InputVectors<A, N>& vectors, F load,
                                      const T* z) {
  Vec<A> y = vectors.Normalised(vectors.Centred(load));
  if constexpr (kResidual) y = y + Load(z);
  if constexpr (kRelu) y = Relu(y);
  return y;
}

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

// Returns dx of one input.
template <typename T, typename A, int N>
BNAR_INLINE Stored<T> GradientElements(const GradientVectors<A, N>& vectors,
                                       int input, const Vec<A>& e,
                                       const InputVecs<A, N>& centred) {
  return Round<T>(vectors.a[input] * e +
                  (vectors.b[input] * centred[input] + vectors.k[input]));
}

}  // namespace jax_bnar::cpu::BNAR_ISA

#endif  // JAX_BNAR_CPU_ISA_ELEMENTS_H_
