// Activations other than ReLU, and their derivatives, as functions of a part of
// a Vec. They agree with jax.nn in value and in derivative, also where the
// derivative jumps.
//
// curves.cc, the only source that includes this header, is compiled without
// contraction into fused multiply-adds, so that results are the same with every
// instruction set.

#ifndef JAX_BNAR_CPU_ISA_CURVES_H_
#define JAX_BNAR_CPU_ISA_CURVES_H_

#include <cstdint>

#include "cpu/isa/simd.h"

namespace jax_bnar::cpu::BNAR_ISA {

template <typename A>
struct ExpConstants;

template <>
struct ExpConstants<float> {
  static constexpr float kLowest = -88.f;  // e^x is 0 from here on
  // ln 2 in two parts: products of the first with |n| < 512 are exact.
  static constexpr float kLn2High = 0x1.62e4p-1f;
  static constexpr float kLn2Low = 0x1.7f7d1cp-20f;
  static constexpr float kInteger = 0x1.8p23f;  // x + kInteger is an integer
  static constexpr int kMantissaBits = 23;
  static constexpr float kBias = 127;
  static constexpr int kTerms = 6;
};

template <>
struct ExpConstants<double> {
  static constexpr double kLowest = -709;
  static constexpr double kLn2High = 0x1.62e42feep-1;
  static constexpr double kLn2Low = 0x1.a39ef35793c76p-33;
  static constexpr double kInteger = 0x1.8p52;
  static constexpr int kMantissaBits = 52;
  static constexpr double kBias = 1023;
  static constexpr int kTerms = 12;
};

// The larger of `limit` and x, and NaN where x is.
template <typename A>
BNAR_INLINE typename Part<A>::Float AtLeast(A limit,
                                            const typename Part<A>::Float& x) {
  using Float = typename Part<A>::Float;
  const Float limits = Float{} + limit;
#if defined(__AVX2__) && !defined(__AVX512F__)
  // The compiler does not make one instruction of a comparison and a selection.
  if constexpr (sizeof(A) == 4) {
    return BitCast<Float>(
        _mm256_max_ps(BitCast<__m256>(limits), BitCast<__m256>(x)));
  }
#elif defined(__x86_64__) && !defined(__AVX512F__)
  if constexpr (sizeof(A) == 4) {
    return BitCast<Float>(
        _mm_max_ps(BitCast<__m128>(limits), BitCast<__m128>(x)));
  }
#endif
  return limits > x ? limits : x;
}

// e^x for x <= 0, with an error below 1 ulp (tests/native/curves_test.cc), from
//   x = n*ln(2) + r with an integer n and |r| <= ln(2)/2
//   e^x = 2^n * (1 + r + r^2 * (1/2! + r/3! + ...))
// Results below the smallest normal number are 0. The part of r that its
// rounding to one number would lose is added at the end (as in fdlibm's
// e_exp.c).
template <typename A>
BNAR_INLINE typename Part<A>::Float ExpOfNegative(
    const typename Part<A>::Float& given) {
  using C = ExpConstants<A>;
  using P = Part<A>;
  using Float = typename P::Float;
  const Float x = AtLeast<A>(C::kLowest, given);
  const Float n =
      (x * static_cast<A>(1.4426950408889634) + C::kInteger) - C::kInteger;
  const Float high = x - n * C::kLn2High;
  const Float low = n * C::kLn2Low;
  const Float r = high - low;
  constexpr double kInverseFactorials[] = {
      1. / 2,       1. / 6,        1. / 24,        1. / 120,
      1. / 720,     1. / 5040,     1. / 40320,     1. / 362880,
      1. / 3628800, 1. / 39916800, 1. / 479001600, 1. / 6227020800.};
  Float sum = Float{} + static_cast<A>(kInverseFactorials[C::kTerms - 1]);
  BNAR_UNROLL
  for (int i = C::kTerms - 2; i >= 0; --i) {
    sum = sum * r + static_cast<A>(kInverseFactorials[i]);
  }
  const Float e = (high + (r * r * sum - low)) + A{1};
  // The low bits of this sum are those of n plus the bias, which become the
  // exponent of 2^n. Of the lowest n they are 0, and so is 2^n.
  const Float sum_of_exponent = n + (C::kInteger + C::kBias);
  return e * BitCast<Float>(BitCast<typename P::UInt>(sum_of_exponent)
                            << C::kMantissaBits);
}

template <typename A>
struct Relu6 {
  using Float = typename Part<A>::Float;

  BNAR_INLINE Float Value(const Float& u) const {
    const Float zero{};
    const Float positive = u <= zero ? zero : u;
    return positive >= A{6} ? zero + A{6} : positive;
  }
  BNAR_INLINE Float Derivative(const Float& u) const {
    const Float zero{};
    const Float one = zero + A{1};
    const Float below_six = u < A{6} ? one : zero;
    return u > zero ? below_six : zero;
  }
};

template <typename A>
struct LeakyRelu {
  using Float = typename Part<A>::Float;
  A negative_slope;

  BNAR_INLINE Float Value(const Float& u) const {
    return u >= Float{} ? u : u * negative_slope;
  }
  BNAR_INLINE Float Derivative(const Float& u) const {
    return u >= Float{} ? Float{} + A{1} : Float{} + negative_slope;
  }
};

// 1 / (1 + e^-u) = weight / sum, and 1 less that = other / sum.
template <typename A>
struct Sigmoid {
  using Float = typename Part<A>::Float;
  Float weight;
  Float other;
  Float sum;

  // Only e^-|u| is computed, which cannot overflow.
  BNAR_INLINE explicit Sigmoid(const Float& u) {
    const Float zero{};
    const Float one = zero + A{1};
    const Float e = ExpOfNegative<A>(u < zero ? u : -u);
    weight = u < zero ? e : one;
    other = u < zero ? one : e;
    sum = e + A{1};
  }
};

template <typename A>
struct Silu {
  using Float = typename Part<A>::Float;

  BNAR_INLINE Float Value(const Float& u) const {
    const Sigmoid<A> sigmoid(u);
    return u * sigmoid.weight / sigmoid.sum;
  }
  // s + u * s * (1 - s), with one division.
  BNAR_INLINE Float Derivative(const Float& u) const {
    const Sigmoid<A> sigmoid(u);
    const Float inverse = (Float{} + A{1}) / sigmoid.sum;
    const Float value = sigmoid.weight * inverse;
    return value * (u * (sigmoid.other * inverse) + A{1});
  }
};

template <typename A>
struct HardSilu {
  using Float = typename Part<A>::Float;

  BNAR_INLINE Float Value(const Float& u) const {
    return u * (Relu6<A>().Value(u + A{3}) / A{6});
  }
  BNAR_INLINE Float Derivative(const Float& u) const {
    const Float shifted = u + A{3};
    return Relu6<A>().Value(shifted) / A{6} +
           u * (Relu6<A>().Derivative(shifted) / A{6});
  }
};

}  // namespace jax_bnar::cpu::BNAR_ISA

#endif  // JAX_BNAR_CPU_ISA_CURVES_H_
