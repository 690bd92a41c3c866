// Sixteen lanes of float or double on any instruction set.
//
// This header is compiled once for each instruction set, in a namespace of its
// own (BNAR_ISA), so that the linker cannot merge the variants. The arithmetic
// uses GCC's vector extensions. Intrinsics are used only for what the
// extensions cannot express (conversion of halves, non-temporal stores, the
// bits of a comparison) or the compiler does not turn into one instruction.

#ifndef JAX_BNAR_CPU_ISA_SIMD_H_
#define JAX_BNAR_CPU_ISA_SIMD_H_

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "cpu/half.h"
#include "cpu/tile_kernels.h"

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#ifndef BNAR_ISA
#error "compile with -DBNAR_ISA=<namespace of this instruction set>"
#endif

#define BNAR_INLINE inline __attribute__((always_inline))
// The same for a lambda, written after its parameters.
#define BNAR_LAMBDA __attribute__((always_inline))
#define BNAR_UNROLL _Pragma("GCC unroll 16")

namespace jax_bnar::cpu::BNAR_ISA {

#if defined(__AVX512F__)
constexpr int kNativeBytes = 64;
#elif defined(__AVX2__)
constexpr int kNativeBytes = 32;
#else
constexpr int kNativeBytes = 16;
#endif

template <typename T>
using Accumulator =
    std::conditional_t<std::is_same_v<T, double>, double, float>;

template <typename E, int kBytes>
struct VectorOf {
  typedef E Type __attribute__((vector_size(kBytes)));
};

// The types of one part of a Vec<A>, which fills a native register.
template <typename A>
struct Part {
  static constexpr int kLanesPerPart = kNativeBytes / sizeof(A);
  static constexpr int kCount = kLanes / kLanesPerPart;
  using Bits = std::conditional_t<sizeof(A) == 8, uint64_t, uint32_t>;
  using Float = typename VectorOf<A, kNativeBytes>::Type;
  using UInt = typename VectorOf<Bits, kNativeBytes>::Type;
  // What a comparison of Float returns: all bits of a lane are set, or none.
  using Int = typename VectorOf<std::make_signed_t<Bits>, kNativeBytes>::Type;
  // The 16-bit storage of the same lanes.
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

// ReLU that keeps NaN, as jax.nn.relu does.
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

// Returns v where gate > 0 and 0 elsewhere, also where gate is NaN.
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
#if defined(__AVX512BF16__)
// The instruction that rounds treats every subnormal number as 0.
template <>
inline constexpr float kRoundsToZero<BFloat16> = 0x1.fffffcp-127f;
#else
template <>
inline constexpr float kRoundsToZero<BFloat16> = 0x1p-134f;
#endif

// Returns v where `gate`, once stored as T, is > 0, and 0 elsewhere.
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

// In each lane of part i, the bit that belongs to this lane.
template <typename A>
BNAR_INLINE typename Part<A>::UInt LaneBits(int i) {
  using P = Part<A>;
  typename P::Bits lanes[P::kLanesPerPart];
  for (int j = 0; j < P::kLanesPerPart; ++j) {
    lanes[j] = typename P::Bits{1} << (i * P::kLanesPerPart + j);
  }
  return BitCast<typename P::UInt>(lanes);
}

// Returns v where its bit is set and 0 elsewhere. Bit i belongs to lane i.
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
    const typename P::UInt set = LaneBits<A>(i) & typename P::Bits{bits};
    const typename P::Float zero{};
    r.part[i] = set != typename P::UInt{} ? v.part[i] : zero;
  }
  return r;
}

#if defined(__AVX2__)
// The highest bits of the lanes, lane 0 first.
BNAR_INLINE uint32_t SignBits(__m256 v) { return _mm256_movemask_ps(v); }
BNAR_INLINE uint32_t SignBits(__m256d v) { return _mm256_movemask_pd(v); }
#elif defined(__x86_64__)
BNAR_INLINE uint32_t SignBits(__m128 v) { return _mm_movemask_ps(v); }
BNAR_INLINE uint32_t SignBits(__m128d v) { return _mm_movemask_pd(v); }
#endif

// Bit i is set where lane i, once stored as T, is > 0.
template <typename T, typename A>
BNAR_INLINE uint32_t PositiveBits(const Vec<A>& v) {
  using P = Part<A>;
  constexpr A kZero = kRoundsToZero<T>;
  uint32_t bits = 0;
#if defined(__aarch64__)
  // Each lane keeps the bit of its place, and all lanes are added.
  typename P::UInt set{};
  BNAR_UNROLL
  for (int i = 0; i < P::kCount; ++i) {
    set |= BitCast<typename P::UInt>(v.part[i] > kZero) & LaneBits<A>(i);
  }
  if constexpr (sizeof(A) == 4) {
    bits = vaddvq_u32(BitCast<uint32x4_t>(set));
  } else {
    bits = static_cast<uint32_t>(vaddvq_u64(BitCast<uint64x2_t>(set)));
  }
#else
  BNAR_UNROLL
  for (int i = 0; i < P::kCount; ++i) {
    uint32_t of_part = 0;
#if defined(__AVX512F__)
    if constexpr (sizeof(A) == 4) {
      of_part = _mm512_cmp_ps_mask(BitCast<__m512>(v.part[i]),
                                   _mm512_set1_ps(kZero), _CMP_GT_OQ);
    } else {
      of_part = _mm512_cmp_pd_mask(BitCast<__m512d>(v.part[i]),
                                   _mm512_set1_pd(kZero), _CMP_GT_OQ);
    }
#elif defined(__x86_64__)
    of_part = SignBits(BitCast<typename P::Float>(v.part[i] > kZero));
#else
    // The lanes are read from an array, because with -fsanitize=undefined GCC
    // 12 mistakes v.part[i][j] for v.part[i][0].
    A lanes[P::kLanesPerPart];
    std::memcpy(lanes, &v.part[i], sizeof(lanes));
    for (int j = 0; j < P::kLanesPerPart; ++j) {
      of_part |= static_cast<uint32_t>(lanes[j] > kZero) << j;
    }
#endif
    bits |= of_part << (i * P::kLanesPerPart);
  }
#endif
  return bits;
}

// Returns the median of three, in each lane.
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

// Returns the median of five, in each lane. It is the median of the fifth and
// of the first four without their lowest and their highest.
template <typename A>
BNAR_INLINE Vec<A> Median(const Vec<A>& a, const Vec<A>& b, const Vec<A>& c,
                          const Vec<A>& d, const Vec<A>& e) {
  Vec<A> lower, upper;
  BNAR_UNROLL
  for (int i = 0; i < Part<A>::kCount; ++i) {
    const auto low_1 = a.part[i] < b.part[i] ? a.part[i] : b.part[i];
    const auto high_1 = a.part[i] < b.part[i] ? b.part[i] : a.part[i];
    const auto low_2 = c.part[i] < d.part[i] ? c.part[i] : d.part[i];
    const auto high_2 = c.part[i] < d.part[i] ? d.part[i] : c.part[i];
    lower.part[i] = low_1 < low_2 ? low_2 : low_1;
    upper.part[i] = high_1 < high_2 ? high_1 : high_2;
  }
  return Median(lower, upper, e);
}

// Returns v where it is finite and 0 elsewhere.
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

}  // namespace jax_bnar::cpu::BNAR_ISA

#endif  // JAX_BNAR_CPU_ISA_SIMD_H_
