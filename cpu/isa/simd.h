// Vectors of float or double on any instruction set.
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
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kRegisters = 32;
#else
constexpr int kRegisters = 16;
#endif

template <typename T>
using Accumulator =
    std::conditional_t<std::is_same_v<T, double>, double, float>;

template <typename E, int kBytes>
struct VectorOf {
  typedef E Type __attribute__((vector_size(kBytes)));
};

// The number of lanes of a Vec<A>: eight or sixteen, so that a row has a whole
// number of vectors and a vector a whole number of bytes of the mask. A Vec
// takes at most an eighth of the registers, because the kernels use several at
// a time, unless eight lanes take more.
template <typename A>
constexpr int kVecLanes =
    kRegisters / 8 * kNativeBytes / static_cast<int>(sizeof(A)) >= kLanes
        ? kLanes
        : kLanes / 2;

// The bits of the mask that belong to a Vec<A>.
template <typename A>
using MaskBits = std::conditional_t<kVecLanes<A> == 8, uint8_t, uint16_t>;

// The types of one part of a Vec<A>, which fills a native register.
template <typename A>
struct Part {
  static constexpr int kLanesPerPart = kNativeBytes / sizeof(A);
  static constexpr int kCount = kVecLanes<A> / kLanesPerPart;
  using Bits = std::conditional_t<sizeof(A) == 8, uint64_t, uint32_t>;
  using Float = typename VectorOf<A, kNativeBytes>::Type;
  using UInt = typename VectorOf<Bits, kNativeBytes>::Type;
  using Int = typename VectorOf<std::make_signed_t<Bits>, kNativeBytes>::Type;
  using Words = typename VectorOf<uint32_t, kNativeBytes>::Type;
  // A register of 16-bit floats, or as much of one as the Vec fills.
  static constexpr int kHalfBytes =
      kNativeBytes < kVecLanes<A> * 2 ? kNativeBytes : kVecLanes<A> * 2;
  using Half = typename VectorOf<uint16_t, kHalfBytes>::Type;
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

// The bit that belongs to each lane of part i, in words of 32 bits: SSE2 cannot
// compare wider ones.
template <typename A>
BNAR_INLINE typename Part<A>::Words LaneBits(int i) {
  using P = Part<A>;
  constexpr int kWords = sizeof(A) / sizeof(uint32_t);
  uint32_t words[P::kLanesPerPart * kWords];
  for (int j = 0; j < P::kLanesPerPart * kWords; ++j) {
    words[j] = 1u << (i * P::kLanesPerPart + j / kWords);
  }
  return BitCast<typename P::Words>(words);
}

// Returns v where its bit is set and 0 elsewhere. Bit i belongs to lane i.
template <typename A>
BNAR_INLINE Vec<A> WhereBits(uint32_t bits, const Vec<A>& v) {
  using P = Part<A>;
  using Words = typename P::Words;
  Vec<A> r;
#if defined(__AVX512F__)
  if constexpr (sizeof(A) == 4) {
    r.part[0] = BitCast<typename P::Float>(_mm512_maskz_mov_ps(
        static_cast<__mmask16>(bits), BitCast<__m512>(v.part[0])));
    return r;
  }
#endif
  BNAR_UNROLL
  for (int i = 0; i < P::kCount; ++i) {
    const Words lanes = LaneBits<A>(i);
    const auto set = BitCast<Words>((lanes & bits) == lanes);
    r.part[i] = BitCast<typename P::Float>(BitCast<Words>(v.part[i]) & set);
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
  typename P::Words set{};
  BNAR_UNROLL
  for (int i = 0; i < P::kCount; ++i) {
    set |= BitCast<typename P::Words>(v.part[i] > kZero) & LaneBits<A>(i);
  }
  // A lane of double has its bit in two words.
  bits = vaddvq_u32(BitCast<uint32x4_t>(set)) / (sizeof(A) / sizeof(uint32_t));
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
