// Some parts of a vector, and e^x of them.
//
// curves.cc, the only source that includes this header, is compiled without
// contraction into fused multiply-adds, so that results are the same with every
// instruction set.

#ifndef JAX_BNAR_CPU_ISA_EXP_H_
#define JAX_BNAR_CPU_ISA_EXP_H_

#include <cstdint>

#include "cpu/isa/simd.h"

namespace jax_bnar::cpu::BNAR_ISA {

// Some parts of a Vec<A>. Each step of a function is done for all of them
// before the next, because e^x and a division are a long chain of steps that
// wait for each other, and a processor looks ahead only some hundred
// instructions for others (docs/performance.md, "Other activations").
//
// Their results are rounded to `Element`, so no more digits are computed than
// that has.
template <typename Element, int kParts>
struct Parts {
  using T = Element;
  using A = Accumulator<T>;
  using Float = typename Part<A>::Float;
  static constexpr int kCount = kParts;
  static constexpr int64_t kLanes = kParts * Part<A>::kLanesPerPart;

  Float part[kParts];
};

// Returns f(part of each argument) for all parts.
template <typename V, typename F, typename... Vs>
BNAR_INLINE V ForParts(F f, const V& first, const Vs&... others) {
  V r;
  BNAR_UNROLL
  for (int i = 0; i < V::kCount; ++i) {
    r.part[i] = f(first.part[i], others.part[i]...);
  }
  return r;
}

#define BNAR_BINARY(OP)                                                    \
  template <typename T, int kParts>                                        \
  BNAR_INLINE Parts<T, kParts> operator OP(const Parts<T, kParts>& a,      \
                                           const Parts<T, kParts>& b) {    \
    return ForParts([](const auto& v, const auto& w)                       \
                        BNAR_LAMBDA { return v OP w; },                    \
                    a, b);                                                 \
  }                                                                        \
  template <typename T, int kParts>                                        \
  BNAR_INLINE Parts<T, kParts> operator OP(const Parts<T, kParts>& a,      \
                                           Accumulator<T> b) {             \
    return ForParts([b](const auto& v) BNAR_LAMBDA { return v OP b; }, a); \
  }
BNAR_BINARY(+)
BNAR_BINARY(-)
BNAR_BINARY(*)
BNAR_BINARY(/)
#undef BNAR_BINARY

template <typename T>
struct ExpConstants;

template <>
struct ExpConstants<float> {
  // e^x is 0 up to the first, and infinite from the second on.
  static constexpr float kLowest = -88.f;
  static constexpr float kHighest = 89.f;
  // ln 2 in two parts: products of the first with |n| < 512 are exact.
  static constexpr float kLn2High = 0x1.62e4p-1f;
  static constexpr float kLn2Low = 0x1.7f7d1cp-20f;
  static constexpr float kInteger = 0x1.8p23f;  // x + kInteger is an integer
  static constexpr int kMantissaBits = 23;
  static constexpr float kBias = 127;
  static constexpr int kTerms = 6;
};

// Relative errors of 2^-17 and less are much smaller than those of rounding to
// 16 bits.
template <>
struct ExpConstants<Float16> : ExpConstants<float> {
  static constexpr float kLn2High = 0x1.62e43p-1f;
  static constexpr float kLn2Low = 0;
  static constexpr int kTerms = 4;
};

template <>
struct ExpConstants<double> {
  static constexpr double kLowest = -709;
  static constexpr double kHighest = 710;
  static constexpr double kLn2High = 0x1.62e42feep-1;
  static constexpr double kLn2Low = 0x1.a39ef35793c76p-33;
  static constexpr double kInteger = 0x1.8p52;
  static constexpr int kMantissaBits = 52;
  static constexpr double kBias = 1023;
  static constexpr int kTerms = 12;
};

// The larger and the smaller of two parts, and the second where one is NaN. The
// compiler does not make one instruction of a comparison and a selection. (With
// AVX-512 it takes two, because GCC 12 warns of its own intrinsics.)
template <typename Float>
BNAR_INLINE Float Larger(const Float& a, const Float& b) {
#if defined(__AVX2__) && !defined(__AVX512F__)
  if constexpr (sizeof(a[0]) == 4) return Float(_mm256_max_ps(a, b));
  if constexpr (sizeof(a[0]) == 8) return Float(_mm256_max_pd(a, b));
#elif defined(__x86_64__) && !defined(__AVX512F__)
  if constexpr (sizeof(a[0]) == 4) return Float(_mm_max_ps(a, b));
  if constexpr (sizeof(a[0]) == 8) return Float(_mm_max_pd(a, b));
#endif
  return a > b ? a : b;
}

template <typename Float>
BNAR_INLINE Float Smaller(const Float& a, const Float& b) {
#if defined(__AVX2__) && !defined(__AVX512F__)
  if constexpr (sizeof(a[0]) == 4) return Float(_mm256_min_ps(a, b));
  if constexpr (sizeof(a[0]) == 8) return Float(_mm256_min_pd(a, b));
#elif defined(__x86_64__) && !defined(__AVX512F__)
  if constexpr (sizeof(a[0]) == 4) return Float(_mm_min_ps(a, b));
  if constexpr (sizeof(a[0]) == 8) return Float(_mm_min_pd(a, b));
#endif
  return a < b ? a : b;
}

// x, but at least or at most `limit`, and NaN where x is.
template <typename V, typename A = typename V::A>
BNAR_INLINE V AtLeast(A limit, const V& x) {
  using Float = typename V::Float;
  return ForParts([limit](const Float& v)
                      BNAR_LAMBDA { return Larger<Float>(Float{} + limit, v); },
                  x);
}

template <typename V, typename A = typename V::A>
BNAR_INLINE V AtMost(A limit, const V& x) {
  using Float = typename V::Float;
  return ForParts(
      [limit](const Float& v)
          BNAR_LAMBDA { return Smaller<Float>(Float{} + limit, v); },
      x);
}

// The sum of coefficients[i] * r^(i - kFirst) for kFirst <= i < kFirst +
// kCount. Its first 2, 4 or 8 terms and the others are summed side by side
// (Estrin's scheme), which makes the chain of steps shorter than Horner's.
template <int kFirst, int kCount, typename V>
BNAR_INLINE V Polynomial(const double* coefficients, const V& r) {
  using A = typename V::A;
  if constexpr (kCount == 1) {
    using Float = typename V::Float;
    const A coefficient = static_cast<A>(coefficients[kFirst]);
    return ForParts([coefficient](const Float&)
                        BNAR_LAMBDA { return Float{} + coefficient; },
                    r);
  } else if constexpr (kCount == 2) {
    return r * static_cast<A>(coefficients[kFirst + 1]) +
           static_cast<A>(coefficients[kFirst]);
  } else {
    constexpr int kLow = kCount > 8 ? 8 : kCount > 4 ? 4 : 2;
    V power = r * r;
    for (int i = 2; i < kLow; i *= 2) power = power * power;
    return Polynomial<kFirst, kLow>(coefficients, r) +
           power * Polynomial<kFirst + kLow, kCount - kLow>(coefficients, r);
  }
}

// Sets the factors of e^-u = (1 + above_one) * power, where power is 2^n. (GCC
// would keep a structure of both in memory.) They follow from
//   -u = n*ln(2) - r with an integer n and |r| <= ln(2)/2
//   e^-u = 2^n * (1 - r + r^2 * (1/2! - r/3! + ...))
// The power is 0 where e^-u is below the smallest normal number over sqrt(2),
// and infinite where it is above the first power of 2 that is infinite over
// sqrt(2), because n is -u/ln(2) to nearest. The part of r that its
// rounding to one number would lose is added at the end (as in fdlibm's
// e_exp.c).
template <typename V>
BNAR_INLINE void FactorsOfExpOfNegated(const V& given, V* above_one, V* power) {
  using A = typename V::A;
  using C = ExpConstants<typename V::T>;
  using UInt = typename Part<A>::UInt;
  const V u = AtMost(-C::kLowest, AtLeast(-C::kHighest, given));
  const V n =
      (u * static_cast<A>(-1.4426950408889634) + C::kInteger) - C::kInteger;
  const V high = u + n * C::kLn2High;
  constexpr bool kInTwoParts = C::kLn2Low != 0;
  const V low = n * C::kLn2Low;
  const V r = kInTwoParts ? high + low : high;
  constexpr double kCoefficients[] = {
      1. / 2,       -1. / 6,        1. / 24,        -1. / 120,
      1. / 720,     -1. / 5040,     1. / 40320,     -1. / 362880,
      1. / 3628800, -1. / 39916800, 1. / 479001600, -1. / 6227020800.};
  const V sum = Polynomial<0, C::kTerms>(kCoefficients, r);
  const V above_high = r * r * sum;
  *above_one = (kInTwoParts ? above_high - low : above_high) - high;
  // The low bits of this sum are those of n plus the bias, which become the
  // exponent of 2^n. Of the lowest n they are 0, and so is 2^n; of the highest
  // they are all set, and 2^n is infinite.
  *power = ForParts(
      [](const auto& v) BNAR_LAMBDA {
        return BitCast<typename V::Float>(BitCast<UInt>(v) << C::kMantissaBits);
      },
      n + (C::kInteger + C::kBias));
}

// e^-u with an error below 1 ulp of T (tests/native/curves_test.cc), between
// the ends where FactorsOfExpOfNegated gives 0 or infinity.
template <typename V>
BNAR_INLINE V ExpOfNegated(const V& u) {
  V above_one, power;
  FactorsOfExpOfNegated(u, &above_one, &power);
  return (above_one + typename V::A{1}) * power;
}

// e^u - 1 for u <= 0. No digits are lost where u is small, because the
// difference of the power and 1 is exact.
template <typename V>
BNAR_INLINE V ExpMinusOne(const V& u) {
  V above_one, power;
  FactorsOfExpOfNegated(u * typename V::A{-1}, &above_one, &power);
  return above_one * power + (power - typename V::A{1});
}

}  // namespace jax_bnar::cpu::BNAR_ISA

#endif  // JAX_BNAR_CPU_ISA_EXP_H_
