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

// Vectors are read, written and copied one part at a time. GCC 12 copies all
// parts of a Vec or Stored at once in pieces of 16 bytes, through the stack,
// and a load of a part then waits until the pieces are in the cache.

template <typename V, typename T>
BNAR_INLINE V LoadPart(const T* p) {
  V part;
  std::memcpy(&part, static_cast<const void*>(p), sizeof(part));
  return part;
}

template <typename A>
BNAR_INLINE void StoreLanes(A* p, const Vec<A>& v) {
  using P = Part<A>;
  BNAR_UNROLL
  for (int i = 0; i < P::kCount; ++i) {
    std::memcpy(p + i * P::kLanesPerPart, &v.part[i], sizeof(v.part[i]));
  }
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

// Widens the bits of float16 in one register, which is exact.
BNAR_INLINE Part<float>::Float WidenHalf(const Part<float>::Half& half) {
  using P = Part<float>;
#if defined(__AVX512F__)
  return BitCast<P::Float>(_mm512_cvtph_ps(BitCast<__m256i>(half)));
#elif defined(__AVX2__)
  return BitCast<P::Float>(_mm256_cvtph_ps(BitCast<__m128i>(half)));
#elif defined(__aarch64__)
  return BitCast<P::Float>(vcvt_f32_f16(BitCast<float16x4_t>(half)));
#else
  // HalfToFloat (cpu/half.h) without its branches. The magnitude is compared
  // and converted as a signed integer, for which there are instructions.
  const P::UInt bits = Extend(half);
  const auto magnitude = BitCast<P::Int>(bits & 0x7fffu);
  const P::UInt infinite = magnitude > 0x7bff;  // all ones for Inf and NaN
  const P::UInt normal = BitCast<P::UInt>(magnitude << 13) + 0x38000000u +
                         (infinite & 0x38000000u);
  const P::UInt subnormal =
      BitCast<P::UInt>(__builtin_convertvector(magnitude, P::Float) * 0x1p-24f);
  return BitCast<P::Float>((magnitude < 0x0400 ? subnormal : normal) |
                           (bits & 0x8000u) << 16);
#endif
}

// Rounds to float16 to nearest, ties to even.
BNAR_INLINE Part<float>::Half RoundToHalf(const Part<float>::Float& v) {
  using P = Part<float>;
#if defined(__AVX512F__)
  return BitCast<P::Half>(
      _mm512_cvtps_ph(BitCast<__m512>(v), _MM_FROUND_TO_NEAREST_INT));
#elif defined(__AVX2__)
  return BitCast<P::Half>(
      _mm256_cvtps_ph(BitCast<__m256>(v), _MM_FROUND_TO_NEAREST_INT));
#elif defined(__aarch64__)
  return BitCast<P::Half>(vcvt_f16_f32(BitCast<float32x4_t>(v)));
#else
  // FloatToHalf (cpu/half.h) without its branches.
  const P::UInt bits = BitCast<P::UInt>(v);
  const auto magnitude = BitCast<P::Int>(bits & 0x7fffffffu);
  const P::UInt rebased = BitCast<P::UInt>(magnitude) - 0x38000000u;
  const P::UInt normal = (rebased + 0xfffu + ((rebased >> 13) & 1u)) >> 13;
  const P::UInt subnormal =
      BitCast<P::UInt>(BitCast<P::Float>(magnitude) + 0.5f) - 0x3f000000u;
  P::UInt half = magnitude < 0x38800000 ? subnormal : normal;
  half = magnitude < 0x477ff000 ? half : P::UInt{} + 0x7c00u;
  half = magnitude > 0x7f800000 ? P::UInt{} + 0x7e00u : half;
  return __builtin_convertvector(half | ((bits >> 16) & 0x8000u), P::Half);
#endif
}

// Widens what is stored, which is exact.
template <typename T>
BNAR_INLINE Vec<Accumulator<T>> Widen(const Stored<T>& stored) {
  using P = Part<Accumulator<T>>;
  Vec<Accumulator<T>> r;
  BNAR_UNROLL
  for (int i = 0; i < P::kCount; ++i) {
    if constexpr (std::is_same_v<T, BFloat16>) {
      r.part[i] = BitCast<typename P::Float>(Extend(stored.part[i]) << 16);
    } else if constexpr (std::is_same_v<T, Float16>) {
      r.part[i] = WidenHalf(stored.part[i]);
    } else {
      r.part[i] = stored.part[i];
    }
  }
  return r;
}

template <typename T>
BNAR_INLINE Stored<T> LoadStored(const T* p) {
  using P = Part<Accumulator<T>>;
  Stored<T> r;
  BNAR_UNROLL
  for (int i = 0; i < P::kCount; ++i) {
    r.part[i] = LoadPart<std::remove_reference_t<decltype(r.part[i])>>(
        p + i * P::kLanesPerPart);
  }
  return r;
}

template <typename T>
BNAR_INLINE Vec<Accumulator<T>> Load(const T* p) {
  return Widen<T>(LoadStored(p));
}

// Rounds to nearest, ties to even. This is the only rounding of a result. A NaN
// that is rounded to bfloat16 must have its payload in the upper 16 bits only,
// or rounding would carry it into the sign. That holds for NaNs from bfloat16
// arrays, and ColumnVector ensures it for those from vectors.
template <typename T>
BNAR_INLINE Stored<T> Round(const Vec<Accumulator<T>>& v) {
  using P = Part<Accumulator<T>>;
  Stored<T> r;
  BNAR_UNROLL
  for (int i = 0; i < P::kCount; ++i) {
    if constexpr (std::is_same_v<T, BFloat16>) {
#if defined(__AVX512BF16__)
      // This instruction replaces seven. It flushes results below 2^-126 to 0,
      // as XLA's own conversion does on such a processor.
      r.part[i] = BitCast<typename P::Half>(
          _mm512_cvtneps_pbh(BitCast<__m512>(v.part[i])));
#else
      const auto bits = BitCast<typename P::UInt>(v.part[i]);
      const auto rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
      r.part[i] = __builtin_convertvector(rounded >> 16, typename P::Half);
#endif
    } else if constexpr (std::is_same_v<T, Float16>) {
      r.part[i] = RoundToHalf(v.part[i]);
    } else {
      r.part[i] = v.part[i];
    }
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
  using P = Part<Accumulator<T>>;
  BNAR_UNROLL
  for (int i = 0; i < P::kCount; ++i) {
    std::memcpy(static_cast<void*>(p + i * P::kLanesPerPart), &stored.part[i],
                sizeof(stored.part[i]));
  }
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
