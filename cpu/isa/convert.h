// Conversions between the stored elements of a vector and its lanes in the
// accumulation type. Each takes and gives whole registers, so that nothing goes
// through the stack.

#ifndef JAX_BNAR_CPU_ISA_CONVERT_H_
#define JAX_BNAR_CPU_ISA_CONVERT_H_

#include <limits>
#include <type_traits>

#include "cpu/isa/simd.h"

namespace jax_bnar::cpu::BNAR_ISA {

// What one instruction stores of T: a register of lanes, or 16-bit floats from
// as many registers as fill one.
template <typename T>
struct StoredPart {
  using Type = typename Part<T>::Float;
};
template <>
struct StoredPart<BFloat16> {
  using Type = Part<float>::Half;
};
template <>
struct StoredPart<Float16> {
  using Type = Part<float>::Half;
};

// The stored elements of a Vec.
template <typename T>
struct Stored {
  using Part = typename StoredPart<T>::Type;
  static constexpr int kLanesPerPart = sizeof(Part) / sizeof(T);
  static constexpr int kCount = kVecLanes<Accumulator<T>> / kLanesPerPart;
  Part part[kCount];
};

// The registers of float that one part of sixteen-bit floats widens to.
struct Widened {
  static constexpr int kCount =
      Stored<BFloat16>::kLanesPerPart / Part<float>::kLanesPerPart;
  Part<float>::UInt part[kCount];
};

// Puts each element into the upper half of 32 bits, whose lower half is 0.
BNAR_INLINE Widened ToUpperHalves(const Part<float>::Half& half) {
  using UInt = Part<float>::UInt;
#if defined(__AVX512F__)
  return {BitCast<UInt>(_mm512_cvtepu16_epi32(BitCast<__m256i>(half))) << 16};
#elif defined(__AVX2__)
  // Instructions that unpack and pack do so in each half of a register. The
  // quarters are in the order 0, 2, 1, 3, so that the results are in order.
  const __m256i zero = _mm256_setzero_si256();
  const __m256i quarters =
      _mm256_permute4x64_epi64(BitCast<__m256i>(half), 0xd8);
  return {BitCast<UInt>(_mm256_unpacklo_epi16(zero, quarters)),
          BitCast<UInt>(_mm256_unpackhi_epi16(zero, quarters))};
#elif defined(__x86_64__)
  const __m128i zero = _mm_setzero_si128();
  return {BitCast<UInt>(_mm_unpacklo_epi16(zero, BitCast<__m128i>(half))),
          BitCast<UInt>(_mm_unpackhi_epi16(zero, BitCast<__m128i>(half)))};
#elif defined(__aarch64__)
  const auto bits = BitCast<uint16x8_t>(half);
  return {BitCast<UInt>(vshll_n_u16(vget_low_u16(bits), 16)),
          BitCast<UInt>(vshll_high_n_u16(bits, 16))};
#else
  Widened r;
  for (int i = 0; i < Stored<BFloat16>::kLanesPerPart; ++i) {
    const int lane = i % Part<float>::kLanesPerPart;
    r.part[i / Part<float>::kLanesPerPart][lane] = uint32_t{half[i]} << 16;
  }
  return r;
#endif
}

// The inverse, whatever the lower halves are.
BNAR_INLINE Part<float>::Half FromUpperHalves(const Widened& bits) {
  using Half = Part<float>::Half;
#if defined(__AVX512F__)
  return __builtin_convertvector(bits.part[0] >> 16, Half);
#elif defined(__AVX2__)
  const __m256i quarters =
      _mm256_packus_epi32(BitCast<__m256i>(bits.part[0] >> 16),
                          BitCast<__m256i>(bits.part[1] >> 16));
  return BitCast<Half>(_mm256_permute4x64_epi64(quarters, 0xd8));
#elif defined(__x86_64__)
  // SSE2 packs signed integers only.
  return BitCast<Half>(
      _mm_packs_epi32(_mm_srai_epi32(BitCast<__m128i>(bits.part[0]), 16),
                      _mm_srai_epi32(BitCast<__m128i>(bits.part[1]), 16)));
#elif defined(__aarch64__)
  return BitCast<Half>(vuzp2q_u16(BitCast<uint16x8_t>(bits.part[0]),
                                  BitCast<uint16x8_t>(bits.part[1])));
#else
  Half half;
  for (int i = 0; i < Stored<BFloat16>::kLanesPerPart; ++i) {
    const int lane = i % Part<float>::kLanesPerPart;
    half[i] = bits.part[i / Part<float>::kLanesPerPart][lane] >> 16;
  }
  return half;
#endif
}

// Whether RoundToBFloat16 takes some NaNs for numbers. Instructions that
// convert do not.
#if defined(__AVX512BF16__) || defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
constexpr bool kRoundingNeedsQuietNaNs = false;
#else
constexpr bool kRoundingNeedsQuietNaNs = true;
#endif

// Rounds the bits of floats to bfloat16 to nearest, ties to even.
BNAR_INLINE Part<float>::Half RoundToBFloat16(const Widened& v) {
#if defined(__AVX512BF16__)
  // This instruction replaces seven. It flushes results below 2^-126 to 0, as
  // XLA's own conversion does on such a processor.
  return BitCast<Part<float>::Half>(
      _mm512_cvtneps_pbh(BitCast<__m512>(v.part[0])));
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
  const bfloat16x8_t low = vcvtq_low_bf16_f32(BitCast<float32x4_t>(v.part[0]));
  return BitCast<Part<float>::Half>(
      vcvtq_high_bf16_f32(low, BitCast<float32x4_t>(v.part[1])));
#elif defined(__aarch64__)
  // The lowest bits that remain are added by an instruction that widens, and
  // the rest by one that keeps the upper halves of the sums.
  const uint16x8_t odd =
      vandq_u16(BitCast<uint16x8_t>(FromUpperHalves(v)), vdupq_n_u16(1));
  const uint32x4_t almost_half = vdupq_n_u32(0x7fff);
  const uint16x4_t low =
      vaddhn_u32(vaddw_u16(BitCast<uint32x4_t>(v.part[0]), vget_low_u16(odd)),
                 almost_half);
  return BitCast<Part<float>::Half>(vaddhn_high_u32(
      low, vaddw_high_u16(BitCast<uint32x4_t>(v.part[1]), odd), almost_half));
#else
  Widened rounded;
  BNAR_UNROLL
  for (int i = 0; i < Widened::kCount; ++i) {
    const auto& bits = v.part[i];
    rounded.part[i] = bits + 0x7fffu + ((bits >> 16) & 1u);
  }
  return FromUpperHalves(rounded);
#endif
}

// Widens float16, which is exact, and gives the bits of floats.
BNAR_INLINE Widened WidenFloat16(const Part<float>::Half& half) {
  using P = Part<float>;
#if defined(__AVX512F__)
  return {BitCast<P::UInt>(_mm512_cvtph_ps(BitCast<__m256i>(half)))};
#elif defined(__AVX2__)
  const auto bits = BitCast<__m256i>(half);
  return {BitCast<P::UInt>(_mm256_cvtph_ps(_mm256_castsi256_si128(bits))),
          BitCast<P::UInt>(_mm256_cvtph_ps(_mm256_extracti128_si256(bits, 1)))};
#elif defined(__aarch64__)
  const auto bits = BitCast<float16x8_t>(half);
  return {BitCast<P::UInt>(vcvt_f32_f16(vget_low_f16(bits))),
          BitCast<P::UInt>(vcvt_high_f32_f16(bits))};
#else
  // HalfToFloat (cpu/half.h) without its branches. The magnitude is compared
  // and converted as a signed integer, for which there are instructions.
  Widened r = ToUpperHalves(half);
  BNAR_UNROLL
  for (int i = 0; i < Widened::kCount; ++i) {
    const P::UInt bits = r.part[i];
    const auto magnitude = BitCast<P::Int>((bits >> 16) & 0x7fffu);
    const auto scaled = BitCast<P::UInt>(magnitude << 13);
    const auto infinite = BitCast<P::UInt>(magnitude > 0x7bff);  // or NaN
    const P::UInt normal = scaled + 0x38000000u + (infinite & 0x38000000u);
    const auto subnormal = BitCast<P::UInt>(
        __builtin_convertvector(magnitude, P::Float) * 0x1p-24f);
    r.part[i] =
        (magnitude < 0x0400 ? subnormal : normal) | (bits & 0x80000000u);
  }
  return r;
#endif
}

// Rounds the bits of floats to float16 to nearest, ties to even.
BNAR_INLINE Part<float>::Half RoundToFloat16(const Widened& v) {
  using P = Part<float>;
#if defined(__AVX512F__)
  return BitCast<P::Half>(
      _mm512_cvtps_ph(BitCast<__m512>(v.part[0]), _MM_FROUND_TO_NEAREST_INT));
#elif defined(__AVX2__)
  return BitCast<P::Half>(_mm256_set_m128i(
      _mm256_cvtps_ph(BitCast<__m256>(v.part[1]), _MM_FROUND_TO_NEAREST_INT),
      _mm256_cvtps_ph(BitCast<__m256>(v.part[0]), _MM_FROUND_TO_NEAREST_INT)));
#elif defined(__aarch64__)
  return BitCast<P::Half>(
      vcvt_high_f16_f32(vcvt_f16_f32(BitCast<float32x4_t>(v.part[0])),
                        BitCast<float32x4_t>(v.part[1])));
#else
  // FloatToHalf (cpu/half.h) without its branches.
  Widened halves;
  BNAR_UNROLL
  for (int i = 0; i < Widened::kCount; ++i) {
    const P::UInt bits = v.part[i];
    const auto magnitude = BitCast<P::Int>(bits & 0x7fffffffu);
    const P::UInt rebased = BitCast<P::UInt>(magnitude) - 0x38000000u;
    const P::UInt normal = (rebased + 0xfffu + ((rebased >> 13) & 1u)) >> 13;
    const P::UInt subnormal =
        BitCast<P::UInt>(BitCast<P::Float>(magnitude) + 0.5f) - 0x3f000000u;
    P::UInt half = magnitude < 0x38800000 ? subnormal : normal;
    half = magnitude < 0x477ff000 ? half : P::UInt{} + 0x7c00u;
    half = magnitude > 0x7f800000 ? P::UInt{} + 0x7e00u : half;
    halves.part[i] = half << 16 | (bits & 0x80000000u);
  }
  return FromUpperHalves(halves);
#endif
}

// Widens what is stored, which is exact.
template <typename T>
BNAR_INLINE Vec<Accumulator<T>> Widen(const Stored<T>& stored) {
  Vec<Accumulator<T>> r;
  BNAR_UNROLL
  for (int i = 0; i < Stored<T>::kCount; ++i) {
    if constexpr (sizeof(T) > 2) {
      r.part[i] = stored.part[i];
    } else {
      Widened widened;
      if constexpr (std::is_same_v<T, BFloat16>) {
        widened = ToUpperHalves(stored.part[i]);
      } else {
        widened = WidenFloat16(stored.part[i]);
      }
      BNAR_UNROLL
      for (int j = 0; j < Widened::kCount; ++j) {
        r.part[i * Widened::kCount + j] =
            BitCast<Part<float>::Float>(widened.part[j]);
      }
    }
  }
  return r;
}

// Calls f(bits) for the bits of the floats that make up each part of stored
// elements, and returns what it gives. Other types are stored as they are.
template <typename T, typename F>
BNAR_INLINE Stored<T> EachPart(const Vec<Accumulator<T>>& v, F f) {
  Stored<T> r;
  BNAR_UNROLL
  for (int i = 0; i < Stored<T>::kCount; ++i) {
    if constexpr (sizeof(T) > 2) {
      r.part[i] = v.part[i];
    } else {
      Widened bits;
      BNAR_UNROLL
      for (int j = 0; j < Widened::kCount; ++j) {
        bits.part[j] =
            BitCast<Part<float>::UInt>(v.part[i * Widened::kCount + j]);
      }
      r.part[i] = f(bits);
    }
  }
  return r;
}

// Rounds to nearest, ties to even. This is the only rounding of a result. A NaN
// that is rounded to bfloat16 must have its payload in the upper 16 bits only,
// or rounding would carry it into the sign. That holds for NaNs from bfloat16
// arrays; ColumnVector ensures it for those from vectors, and QuietNaNs for
// those from float32 arrays.
template <typename T>
BNAR_INLINE Stored<T> Round(const Vec<Accumulator<T>>& v) {
  return EachPart<T>(v, [](const Widened& bits) BNAR_LAMBDA {
    if constexpr (std::is_same_v<T, BFloat16>) {
      return RoundToBFloat16(bits);
    } else {
      return RoundToFloat16(bits);
    }
  });
}

// Makes every NaN of elements `Out` one that Round<In> leaves a NaN.
template <typename In, typename Out, typename A>
BNAR_INLINE Vec<A> QuietNaNs(const Vec<A>& v) {
  if constexpr (kRoundingNeedsQuietNaNs && std::is_same_v<In, BFloat16> &&
                !std::is_same_v<Out, BFloat16>) {
    Vec<A> r;
    BNAR_UNROLL
    for (int i = 0; i < Part<A>::kCount; ++i) {
      using Float = typename Part<A>::Float;
      const Float quiet = Float{} + std::numeric_limits<A>::quiet_NaN();
      r.part[i] = v.part[i] == v.part[i] ? v.part[i] : quiet;
    }
    return r;
  } else {
    return v;
  }
}

// Narrows what Load widened, which is exact, subnormal numbers included.
template <typename T>
BNAR_INLINE Stored<T> Narrow(const Vec<Accumulator<T>>& v) {
  if constexpr (std::is_same_v<T, BFloat16>) {
    return EachPart<T>(v, [](const Widened& bits)
                              BNAR_LAMBDA { return FromUpperHalves(bits); });
  } else {
    return Round<T>(v);
  }
}

}  // namespace jax_bnar::cpu::BNAR_ISA

#endif  // JAX_BNAR_CPU_ISA_CONVERT_H_
