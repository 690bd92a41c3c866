// Loads and stores of sixteen elements, with conversion to and from the
// accumulation type. This header is compiled once for each instruction set (see
// simd.h).

#ifndef JAX_BNAR_CPU_ISA_SIMD_MEMORY_H_
#define JAX_BNAR_CPU_ISA_SIMD_MEMORY_H_

#include "cpu/isa/simd.h"

namespace jax_bnar::cpu::BNAR_ISA {

// Sixteen stored elements, as parts of the size that one instruction stores.
template <typename T>
struct Stored;
template <>
struct Stored<float> {
  Part<float>::Float part[Part<float>::kCount];
};
template <>
struct Stored<double> {
  Part<double>::Float part[Part<double>::kCount];
};
template <>
struct Stored<BFloat16> {
  Part<float>::Half part[Part<float>::kCount];
};
template <>
struct Stored<Float16> {
  Part<float>::Half part[Part<float>::kCount];
};

template <typename A>
BNAR_INLINE Vec<A> Load(const A* p) {
  Vec<A> r;
  std::memcpy(&r, p, sizeof(r));
  return r;
}

template <typename A>
BNAR_INLINE void StoreLanes(A* p, const Vec<A>& v) {
  std::memcpy(p, &v, sizeof(v));
}

// Zero-extends lanes of 16 bits to 32 bits. This is one instruction, whereas
// GCC compiles __builtin_convertvector to five, which convert two halves and
// join them.
BNAR_INLINE Part<float>::UInt Extend(const Part<float>::Half& half) {
#if defined(__AVX512F__)
  return BitCast<Part<float>::UInt>(
      _mm512_cvtepu16_epi32(BitCast<__m256i>(half)));
#elif defined(__AVX2__)
  return BitCast<Part<float>::UInt>(
      _mm256_cvtepu16_epi32(BitCast<__m128i>(half)));
#else
  return __builtin_convertvector(half, Part<float>::UInt);
#endif
}

BNAR_INLINE Vec<float> Load(const BFloat16* p) {
  using P = Part<float>;
  Vec<float> r;
  BNAR_UNROLL
  for (int i = 0; i < P::kCount; ++i) {
    P::Half half;
    std::memcpy(&half, p + i * P::kLanesPerPart, sizeof(half));
    r.part[i] = BitCast<P::Float>(Extend(half) << 16);
  }
  return r;
}

BNAR_INLINE Vec<float> Load(const Float16* p) {
  Vec<float> r;
#if defined(__AVX512F__)
  __m256i half;
  std::memcpy(&half, p, sizeof(half));
  r.part[0] = BitCast<Part<float>::Float>(_mm512_cvtph_ps(half));
#elif defined(__AVX2__)
  BNAR_UNROLL
  for (int i = 0; i < 2; ++i) {
    __m128i half;
    std::memcpy(&half, p + 8 * i, sizeof(half));
    r.part[i] = BitCast<Part<float>::Float>(_mm256_cvtph_ps(half));
  }
#else
  float lanes[kLanes];
  for (int i = 0; i < kLanes; ++i) lanes[i] = HalfToFloat(p[i].bits);
  std::memcpy(&r, lanes, sizeof(r));
#endif
  return r;
}

// Widens what is stored, which is exact.
template <typename T>
BNAR_INLINE Vec<Accumulator<T>> Widen(const Stored<T>& stored) {
  T elements[kLanes];
  std::memcpy(static_cast<void*>(elements), &stored, sizeof(elements));
  return Load(elements);
}

template <typename T>
BNAR_INLINE Stored<T> LoadStored(const T* p) {
  Stored<T> r;
  std::memcpy(&r, static_cast<const void*>(p), sizeof(r));
  return r;
}

// Rounds to nearest, ties to even. This is the only rounding of a result. A NaN
// that is rounded to bfloat16 must have its payload in the upper 16 bits only,
// or rounding would carry it into the sign. That holds for NaNs from bfloat16
// arrays, and ColumnVector ensures it for those from vectors.
template <typename T>
BNAR_INLINE Stored<T> Round(const Vec<Accumulator<T>>& v) {
  using P = Part<float>;
  Stored<T> r;
  if constexpr (std::is_same_v<T, BFloat16>) {
#if defined(__AVX512BF16__)
    // This instruction replaces seven. It flushes results below 2^-126 to 0, as
    // XLA's own conversion does on such a processor.
    const auto half = _mm512_cvtneps_pbh(BitCast<__m512>(v.part[0]));
    std::memcpy(&r, &half, sizeof(r));
    return r;
#endif
    BNAR_UNROLL
    for (int i = 0; i < P::kCount; ++i) {
      const P::UInt bits = BitCast<P::UInt>(v.part[i]);
      const P::UInt rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
      r.part[i] = __builtin_convertvector(rounded >> 16, P::Half);
    }
  } else if constexpr (std::is_same_v<T, Float16>) {
#if defined(__AVX512F__)
    const __m256i half =
        _mm512_cvtps_ph(BitCast<__m512>(v.part[0]), _MM_FROUND_TO_NEAREST_INT);
    std::memcpy(&r, &half, sizeof(r));
#elif defined(__AVX2__)
    BNAR_UNROLL
    for (int i = 0; i < P::kCount; ++i) {
      const __m128i half = _mm256_cvtps_ph(BitCast<__m256>(v.part[i]),
                                           _MM_FROUND_TO_NEAREST_INT);
      std::memcpy(&r.part[i], &half, sizeof(half));
    }
#else
    float lanes[kLanes];
    std::memcpy(lanes, &v, sizeof(lanes));
    uint16_t half[kLanes];
    for (int i = 0; i < kLanes; ++i) half[i] = FloatToHalf(lanes[i]);
    std::memcpy(&r, half, sizeof(r));
#endif
  } else {
    std::memcpy(&r, &v, sizeof(r));
  }
  return r;
}

// Narrows what Load widened, which is exact, subnormal numbers included.
template <typename T>
BNAR_INLINE Stored<T> Narrow(const Vec<Accumulator<T>>& v) {
  if constexpr (std::is_same_v<T, BFloat16>) {
    using P = Part<float>;
    Stored<T> r;
    BNAR_UNROLL
    for (int i = 0; i < P::kCount; ++i) {
      r.part[i] =
          __builtin_convertvector(BitCast<P::UInt>(v.part[i]) >> 16, P::Half);
    }
    return r;
  } else {
    return Round<T>(v);
  }
}

template <typename T>
BNAR_INLINE void Store(T* p, const Stored<T>& stored) {
  std::memcpy(static_cast<void*>(p), &stored, sizeof(stored));
}

// Returns `stored` where gate > 0 and 0 elsewhere, also where gate is NaN.
// Sixteen-bit floats need no conversion: the bits of positive ones, as
// integers, are those from 1 to the bits of Inf.
template <typename T>
BNAR_INLINE Stored<T> WhereStoredPositive(const Stored<T>& gate,
                                          const Stored<T>& stored) {
  constexpr int kParts = sizeof(stored.part) / sizeof(stored.part[0]);
  Stored<T> r;
  BNAR_UNROLL
  for (int i = 0; i < kParts; ++i) {
    const auto zero = decltype(+stored.part[i]){};
    if constexpr (std::is_same_v<T, BFloat16>) {
      r.part[i] =
          gate.part[i] - uint16_t{1} < uint16_t{0x7f80} ? stored.part[i] : zero;
    } else if constexpr (std::is_same_v<T, Float16>) {
      r.part[i] =
          gate.part[i] - uint16_t{1} < uint16_t{0x7c00} ? stored.part[i] : zero;
    } else {
      r.part[i] = gate.part[i] > zero ? stored.part[i] : zero;
    }
  }
  return r;
}

// Stores past the caches. p is aligned to the size of sixteen elements.
template <typename T>
BNAR_INLINE void StoreStreaming(T* p, const Stored<T>& stored) {
#if defined(__x86_64__)
  constexpr int kBytes = sizeof(stored.part[0]);
  constexpr int kParts = sizeof(stored) / kBytes;
  BNAR_UNROLL
  for (int i = 0; i < kParts; ++i) {
    char* target = reinterpret_cast<char*>(p) + i * kBytes;
#if defined(__AVX512F__)
    if constexpr (kBytes == 64) {
      _mm512_stream_si512(reinterpret_cast<__m512i*>(target),
                          BitCast<__m512i>(stored.part[i]));
    }
#endif
#if defined(__AVX2__)
    if constexpr (kBytes == 32) {
      _mm256_stream_si256(reinterpret_cast<__m256i*>(target),
                          BitCast<__m256i>(stored.part[i]));
    }
#endif
    if constexpr (kBytes == 16) {
      _mm_stream_si128(reinterpret_cast<__m128i*>(target),
                       BitCast<__m128i>(stored.part[i]));
    }
    if constexpr (kBytes == 8) {
      _mm_stream_si64(reinterpret_cast<long long*>(target),
                      BitCast<long long>(stored.part[i]));
    }
  }
#else
  Store(p, stored);
#endif
}

// Orders streaming stores before the hand-over to another thread.
BNAR_INLINE void StreamingFence() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

// Loads the first n < 16 elements. The other lanes are 0.
template <typename T>
BNAR_INLINE Vec<Accumulator<T>> LoadPartial(const T* p, int n) {
  T elements[kLanes] = {};
  std::memcpy(static_cast<void*>(elements), p, n * sizeof(T));
  return Load(elements);
}

template <typename T>
BNAR_INLINE void StorePartial(T* p, const Stored<T>& stored, int n) {
  std::memcpy(static_cast<void*>(p), &stored, n * sizeof(T));
}

}  // namespace jax_bnar::cpu::BNAR_ISA

#endif  // JAX_BNAR_CPU_ISA_SIMD_MEMORY_H_
