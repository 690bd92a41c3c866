// Activations other than ReLU, and their derivatives. They agree with jax.nn in
// value and in derivative, also where the derivative jumps.
//
// curves.cc, the only source that includes this header, is compiled without
// contraction into fused multiply-adds, so that results are the same with every
// instruction set.

#ifndef JAX_BNAR_CPU_ISA_CURVES_H_
#define JAX_BNAR_CPU_ISA_CURVES_H_

#include <cstdint>
#include <limits>

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

// The sum of coefficients[i] * r^(i - kFirst) for i from kFirst on to kFirst +
// kCount. Its halves are summed side by side (Estrin's scheme), which makes the
// chain of steps shorter than Horner's.
template <int kFirst, int kCount, typename V>
BNAR_INLINE V Polynomial(const double* coefficients, const V& r) {
  using A = typename V::A;
  if constexpr (kCount == 2) {
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

// e^-u with an error below 1 ulp of T (tests/native/curves_test.cc), from
//   -u = n*ln(2) - r with an integer n and |r| <= ln(2)/2
//   e^-u = 2^n * (1 - r + r^2 * (1/2! - r/3! + ...))
// It is 0 where it is below the smallest normal number, and infinite from half
// of the first power of 2 that is infinite on. The part of r that its rounding
// to one number would lose is added at the end (as in fdlibm's e_exp.c).
template <typename V>
BNAR_INLINE V ExpOfNegated(const V& given) {
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
  const V e = ((kInTwoParts ? above_high - low : above_high) - high) + A{1};
  // The low bits of this sum are those of n plus the bias, which become the
  // exponent of 2^n. Of the lowest n they are 0, and so is 2^n; of the highest
  // they are all set, and 2^n is infinite.
  const V power = ForParts(
      [](const auto& v) BNAR_LAMBDA {
        return BitCast<typename V::Float>(BitCast<UInt>(v) << C::kMantissaBits);
      },
      n + (C::kInteger + C::kBias));
  return e * power;
}

template <typename V>
struct Relu6 {
  using A = typename V::A;
  using Float = typename V::Float;

  BNAR_INLINE V Value(const V& u) const {
    return ForParts(
        [](const Float& v) BNAR_LAMBDA {
          const Float zero{};
          const Float positive = v <= zero ? zero : v;
          return positive >= A{6} ? zero + A{6} : positive;
        },
        u);
  }
  BNAR_INLINE V Derivative(const V& u) const {
    return ForParts(
        [](const Float& v) BNAR_LAMBDA {
          const Float zero{};
          const Float one = zero + A{1};
          const Float below_six = v < A{6} ? one : zero;
          return v > zero ? below_six : zero;
        },
        u);
  }
};

// A negative u may have a y that is 0, because the slope is 0 or y is rounded.
// That 0 is negative then, and that of a u which is 0 is made positive, so that
// the derivative follows from y.
template <typename V>
struct LeakyRelu {
  using A = typename V::A;
  using Float = typename V::Float;
  A negative_slope;

  BNAR_INLINE V Value(const V& u) const {
    return ForParts(
        [slope = negative_slope](const Float& v)
            BNAR_LAMBDA { return v >= Float{} ? v + A{0} : v * slope; },
        u);
  }
  BNAR_INLINE V Derivative(const V& u) const {
    return ForParts(
        [slope = negative_slope](const Float& v) BNAR_LAMBDA {
          const auto has_no_sign = BitCast<typename Part<A>::Int>(v) >= 0;
          const Float slopes = Float{} + slope;
          const Float derivative = v >= Float{} ? Float{} + A{1} : slopes;
          return has_no_sign ? derivative : slopes;
        },
        u);
  }
};

template <typename V>
struct Silu {
  using A = typename V::A;
  using Float = typename V::Float;

  // u / (1 + e^-u), whose divisor may be infinite.
  BNAR_INLINE V Value(const V& u) const { return u / (ExpOfNegated(u) + A{1}); }
  // s + u * s * (1 - s) where s = 1 / (1 + e^-u), with one division. The
  // difference is e^-u * s, which loses no digits where s is near to 1.
  BNAR_INLINE V Derivative(const V& u) const {
    const V e = ExpOfNegated(u);
    const V s = ForParts([](const Float& v)
                             BNAR_LAMBDA { return (Float{} + A{1}) / v; },
                         e + A{1});
    const V finite = AtMost(std::numeric_limits<A>::max(), e);
    return s * (u * (finite * s) + A{1});
  }
};

template <typename V>
struct HardSilu {
  using A = typename V::A;
  using Float = typename V::Float;

  BNAR_INLINE V Value(const V& u) const {
    return u * (Relu6<V>().Value(u + A{3}) / A{6});
  }
  // The second term is selected, because it is 0 where u is infinite.
  BNAR_INLINE V Derivative(const V& u) const {
    const V shifted = u + A{3};
    const V of_gate =
        ForParts([](const Float& open, const Float& v)
                     BNAR_LAMBDA { return open > Float{} ? v : Float{}; },
                 Relu6<V>().Derivative(shifted), u / A{6});
    return Relu6<V>().Value(shifted) / A{6} + of_gate;
  }
};

}  // namespace jax_bnar::cpu::BNAR_ISA

#endif  // JAX_BNAR_CPU_ISA_CURVES_H_
