// Sixteen lanes of float or double on any instruction set.
//
// This header is compiled once for each instruction set, in a namespace of its
// own (BNAR_ISA), so that the linker cannot merge the variants. GCC's vector
// extensions carry the arithmetic; intrinsics stand only where the extensions
// have no word: half conversion, non-temporal stores, bits of a comparison.

#ifndef JAX_BNAR_CPU_SIMD_H_
#define JAX_BNAR_CPU_SIMD_H_

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "cpu/half.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#ifndef BNAR_ISA
#error "compile with -DBNAR_ISA=<namespace of this instruction set>"
#endif

#define BNAR_INLINE inline __attribute__((always_inline))
#define BNAR_UNROLL _Pragma("GCC unroll 16")

namespace jax_bnar {
namespace BNAR_ISA {

#if defined(__AVX512F__)
constexpr int kNativeBytes = 64;
#elif defined(__AVX2__)
constexpr int kNativeBytes = 32;
#else
constexpr int kNativeBytes = 16;
#endif

constexpr int kLanes = 16;

template <typename T>
using Accumulator =
    std::conditional_t<std::is_same_v<T, double>, double, float>;

template <typename E, int kBytes>
struct VectorOf {
  typedef E Type __attribute__((vector_size(kBytes)));
};

// What the parts of a Vec<A> are made of.
template <typename A>
struct Part {
  static constexpr int kLanesPerPart = kNativeBytes / sizeof(A);
  static constexpr int kCount = kLanes / kLanesPerPart;
  using Bits = std::conditional_t<sizeof(A) == 8, uint64_t, uint32_t>;
  using Float = typename VectorOf<A, kNativeBytes>::Type;
  using UInt = typename VectorOf<Bits, kNativeBytes>::Type;
  // Sixteen-bit storage of the same lanes.
  using Half = typename VectorOf<uint16_t, kLanesPerPart * 2>::Type;
};

template <typename A>
struct Vec {
  typename Part<A>::Float part[Part<A>::kCount];
};

template <typename V, typename U>
BNAR_INLINE V BitCast(const U& u) {
  static_assert(sizeof(V) == sizeof(U), "a bit cast keeps the size");
  V v;
  std::memcpy(&v, &u, sizeof(v));
  return v;
}

#define BNAR_BINARY(OP)                                              \
  template <typename A>                                              \
  BNAR_INLINE Vec<A> operator OP(const Vec<A>& a, const Vec<A>& b) { \
    Vec<A> r;                                                        \
    BNAR_UNROLL                                                      \
    for (int i = 0; i < Part<A>::kCount; ++i)                        \
      r.part[i] = a.part[i] OP b.part[i];                            \
    return r;                                                        \
  }
BNAR_BINARY(+)
BNAR_BINARY(-)
BNAR_BINARY(*)
#undef BNAR_BINARY

template <typename A>
BNAR_INLINE Vec<A> Broadcast(A value) {
  Vec<A> r;
  BNAR_UNROLL
  for (int i = 0; i < Part<A>::kCount; ++i) {
    r.part[i] = value - typename Part<A>::Float{};
  }
  return r;
}

template <typename A>
BNAR_INLINE Vec<A> Zero() {
  return Vec<A>{};
}

// relu that keeps NaN, as jax.nn.relu does.
template <typename A>
BNAR_INLINE Vec<A> Relu(const Vec<A>& v) {
  Vec<A> r;
  BNAR_UNROLL
  for (int i = 0; i < Part<A>::kCount; ++i) {
    const typename Part<A>::Float zero{};
    r.part[i] = v.part[i] <= zero ? zero : v.part[i];
  }
  return r;
}

// v where gate > 0, else 0 (also where gate is NaN).
template <typename A>
BNAR_INLINE Vec<A> WherePositive(const Vec<A>& gate, const Vec<A>& v) {
  Vec<A> r;
  BNAR_UNROLL
  for (int i = 0; i < Part<A>::kCount; ++i) {
    const typename Part<A>::Float zero{};
    r.part[i] = gate.part[i] > zero ? v.part[i] : zero;
  }
  return r;
}

// The largest number that rounds to 0 in storage.
template <typename T>
constexpr Accumulator<T> kRoundsToZero = 0;
template <>
inline constexpr float kRoundsToZero<Float16> = 0x1p-25f;
template <>
inline constexpr float kRoundsToZero<BFloat16> = 0x1p-134f;

// v where `gate`, once stored as T, is > 0; else 0.
template <typename T, typename A>
BNAR_INLINE Vec<A> WhereRoundsPositive(const Vec<A>& gate, const Vec<A>& v) {
  Vec<A> r;
  BNAR_UNROLL
  for (int i = 0; i < Part<A>::kCount; ++i) {
    const typename Part<A>::Float zero{};
    r.part[i] = gate.part[i] > kRoundsToZero<T> ? v.part[i] : zero;
  }
  return r;
}

// v where its bit is set, else 0; lane i has bit i.
template <typename A>
BNAR_INLINE Vec<A> WhereBits(uint32_t bits, const Vec<A>& v) {
#if defined(__AVX512F__)
  if constexpr (sizeof(A) == 4) {
    Vec<A> r;
    r.part[0] = BitCast<typename Part<A>::Float>(_mm512_maskz_mov_ps(
        static_cast<__mmask16>(bits), BitCast<__m512>(v.part[0])));
    return r;
  }
#endif
  using P = Part<A>;
  Vec<A> r;
  BNAR_UNROLL
  for (int i = 0; i < P::kCount; ++i) {
    typename P::UInt lane_bit;
    for (int j = 0; j < P::kLanesPerPart; ++j) {
      lane_bit[j] = typename P::Bits{1} << (i * P::kLanesPerPart + j);
    }
    const typename P::UInt set = lane_bit & typename P::Bits{bits};
    const typename P::Float zero{};
    r.part[i] = set != typename P::UInt{} ? v.part[i] : zero;
  }
  return r;
}

// Bit i is set where lane i > 0.
template <typename A>
BNAR_INLINE uint32_t PositiveBits(const Vec<A>& v) {
#if defined(__AVX512F__)
  if constexpr (sizeof(A) == 4) {
    return _mm512_cmp_ps_mask(BitCast<__m512>(v.part[0]), _mm512_setzero_ps(),
                              _CMP_GT_OQ);
  }
#elif defined(__AVX2__)
  if constexpr (sizeof(A) == 4) {
    uint32_t bits = 0;
    BNAR_UNROLL
    for (int i = 0; i < Part<A>::kCount; ++i) {
      const __m256 positive = _mm256_cmp_ps(BitCast<__m256>(v.part[i]),
                                            _mm256_setzero_ps(), _CMP_GT_OQ);
      bits |= static_cast<uint32_t>(_mm256_movemask_ps(positive)) << (8 * i);
    }
    return bits;
  }
#endif
  using P = Part<A>;
  uint32_t bits = 0;
  for (int i = 0; i < P::kCount; ++i) {
    for (int j = 0; j < P::kLanesPerPart; ++j) {
      bits |= static_cast<uint32_t>(v.part[i][j] > 0)
              << (i * P::kLanesPerPart + j);
    }
  }
  return bits;
}

// The middle one of three, in each lane.
template <typename A>
BNAR_INLINE Vec<A> Median(const Vec<A>& a, const Vec<A>& b, const Vec<A>& c) {
  Vec<A> r;
  BNAR_UNROLL
  for (int i = 0; i < Part<A>::kCount; ++i) {
    const auto low = a.part[i] < b.part[i] ? a.part[i] : b.part[i];
    const auto high = a.part[i] < b.part[i] ? b.part[i] : a.part[i];
    const auto capped = high < c.part[i] ? high : c.part[i];
    r.part[i] = low > capped ? low : capped;
  }
  return r;
}

// v where it is finite, else 0.
template <typename A>
BNAR_INLINE Vec<A> WhereFinite(const Vec<A>& v) {
  Vec<A> r;
  BNAR_UNROLL
  for (int i = 0; i < Part<A>::kCount; ++i) {
    const typename Part<A>::Float zero{};
    // Inf - Inf and NaN - NaN are NaN, which equals nothing.
    r.part[i] = v.part[i] - v.part[i] == zero ? v.part[i] : zero;
  }
  return r;
}

// --- Load and store, with conversion -----------------------------------------

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

BNAR_INLINE Vec<float> Load(const BFloat16* p) {
  using P = Part<float>;
  Vec<float> r;
  BNAR_UNROLL
  for (int i = 0; i < P::kCount; ++i) {
    P::Half half;
    std::memcpy(&half, p + i * P::kLanesPerPart, sizeof(half));
    const P::UInt wide = __builtin_convertvector(half, P::UInt);
    r.part[i] = BitCast<P::Float>(wide << 16);
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

template <typename T>
struct Stored;

// Widens what is stored: exact.
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

// Rounds to nearest, ties to even; the one rounding of a result. A bfloat16 NaN
// may have its payload in the upper 16 bits only, or rounding would carry it
// into the sign: arrays of bfloat16 do, and ColumnVector sees
// to the vectors.
template <typename T>
BNAR_INLINE Stored<T> Round(const Vec<Accumulator<T>>& v) {
  using P = Part<float>;
  Stored<T> r;
  if constexpr (std::is_same_v<T, BFloat16>) {
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

template <typename T>
BNAR_INLINE void Store(T* p, const Stored<T>& stored) {
  std::memcpy(static_cast<void*>(p), &stored, sizeof(stored));
}

// stored where gate > 0, else 0 (also where gate is NaN). Sixteen-bit floats
// need no conversion: positive ones are the integers from 1 to Inf.
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

// Past the caches; p is aligned to kStreamAlignment.
constexpr int kStreamAlignment = 64;

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

// Streaming stores are ordered with the hand-over to another thread.
BNAR_INLINE void StreamingFence() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

// The first n < 16 elements; the other lanes are 0.
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

}  // namespace BNAR_ISA
}  // namespace jax_bnar

#endif  // JAX_BNAR_CPU_SIMD_H_
