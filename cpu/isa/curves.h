// Activations other than ReLU, and their derivatives. They agree with jax.nn in
// value and in derivative, also where the derivative jumps.
//
// curves.cc, the only source that includes this header, is compiled without
// contraction into fused multiply-adds, so that results are the same with every
// instruction set.

#ifndef JAX_BNAR_CPU_ISA_CURVES_H_
#define JAX_BNAR_CPU_ISA_CURVES_H_

#include <limits>

#include "cpu/isa/exp.h"
#include "cpu/isa/simd.h"
#include "native/scaled_erfc.h"

namespace jax_bnar::cpu::BNAR_ISA {

// 1 / u.
template <typename V>
BNAR_INLINE V Reciprocal(const V& u) {
  using A = typename V::A;
  using Float = typename V::Float;
  return ForParts(
      [](const Float& v) BNAR_LAMBDA { return (Float{} + A{1}) / v; }, u);
}

// s + slope * s * (1 - s) where s = 1 / (1 + e^-w), with one division. The
// difference is e^-w * s, which loses no digits where s is near to 1.
template <typename V>
BNAR_INLINE V SigmoidAndSlope(const V& w, const V& slope) {
  using A = typename V::A;
  const V e = ExpOfNegated(w);
  const V s = Reciprocal(e + A{1});
  const V finite = AtMost(std::numeric_limits<A>::max(), e);
  return s * (slope * (finite * s) + A{1});
}

// |u|, and NaN where u is.
template <typename V>
BNAR_INLINE V Absolute(const V& u) {
  using Float = typename V::Float;
  return ForParts([](const Float& v)
                      BNAR_LAMBDA { return Larger<Float>(Float{} - v, v); },
                  u);
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
  // s + u * s * (1 - s)
  BNAR_INLINE V Derivative(const V& u) const { return SigmoidAndSlope(u, u); }
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

template <typename V>
struct Elu {
  using A = typename V::A;
  using Float = typename V::Float;

  BNAR_INLINE V Value(const V& u) const {
    return ForParts([](const Float& v, const Float& below)
                        BNAR_LAMBDA { return v > Float{} ? v : below; },
                    u, ExpMinusOne(u));
  }
  BNAR_INLINE V Derivative(const V& u) const {
    return ForParts(
        [](const Float& v, const Float& below)
            BNAR_LAMBDA { return v > Float{} ? Float{} + A{1} : below; },
        u, ExpOfNegated(u * A{-1}));
  }
};

// The approximation of GELU by tanh, which is u * sigmoid(w) with
//   w = 2 * sqrt(2 / pi) * (u + 0.044715 * u^3)
template <typename V>
struct Gelu {
  using A = typename V::A;
  static constexpr A kFirst = A(1.5957691216057308);
  static constexpr A kThird = A(0.07135481627260025);

  BNAR_INLINE V Value(const V& u) const {
    return u / (ExpOfNegated(u * (u * u * kThird + kFirst)) + A{1});
  }
  // s + u * w' * s * (1 - s). Where u * w' is limited, s or the difference is
  // 0, and the product would not be where u * w' is infinite.
  BNAR_INLINE V Derivative(const V& u) const {
    const V square = u * u;
    const V slope =
        AtMost(A{1e4}, AtLeast(A{-1e4}, u * (square * (3 * kThird) + kFirst)));
    return SigmoidAndSlope(u * (square * kThird + kFirst), slope);
  }
};

// u * Phi(u), where Phi is the distribution function of the normal distribution
// and phi its density. Phi is computed from the tail beyond t = |u|, which
// keeps its digits where u is far below 0.
template <typename V>
struct ExactGelu {
  using A = typename V::A;
  using Float = typename V::Float;
  using Tail = ScaledErfc<sizeof(typename V::T)>;

  BNAR_INLINE V Value(const V& u) const {
    const V t = Limited(u);
    return u * Below(u, ScaledTail(t) * ExpOfNegatedHalfSquare(t));
  }
  // Phi(u) + u * phi(u). Where t is limited, phi is 0, and the product would
  // not be where u is infinite.
  BNAR_INLINE V Derivative(const V& u) const {
    constexpr A kDensity = A(0.3989422804014327);  // 1 / sqrt(2 * pi)
    const V t = Limited(u);
    return Below(u, (ScaledTail(t) - t * kDensity) * ExpOfNegatedHalfSquare(t));
  }

 private:
  // min(|u|, kLargest), up to which the approximation of the tail holds.
  static BNAR_INLINE V Limited(const V& u) {
    return AtMost(static_cast<A>(Tail::kLargest), Absolute(u));
  }
  static BNAR_INLINE V ExpOfNegatedHalfSquare(const V& t) {
    return ExpOfNegated(t * t * A(0.5));
  }
  // The tail beyond t, without that factor.
  static BNAR_INLINE V ScaledTail(const V& t) {
    const V reciprocal = Reciprocal(t + A{4});
    return reciprocal * Polynomial<0, Tail::kTerms>(Tail::kCoefficients,
                                                    (t - A{4}) * reciprocal);
  }
  // What is below u, by what is beyond |u|.
  static BNAR_INLINE V Below(const V& u, const V& beyond) {
    return ForParts(
        [](const Float& v, const Float& tail)
            BNAR_LAMBDA { return v > Float{} ? Float{} + A{1} - tail : tail; },
        u, beyond);
  }
};

// u * tanh(log(1 + e^u)). With m = e^-|u|, which is at most 1, the tanh is
//   (1 + 2m) / (1 + 2m + 2m^2) where u is positive,
//   m * (m + 2) / (m * (m + 2) + 2) elsewhere,
// which loses no digits and has no infinities.
template <typename V>
struct Mish {
  using A = typename V::A;
  using Float = typename V::Float;

  BNAR_INLINE V Value(const V& u) const {
    const V m = ExpOfNegatedSize(u);
    const V numerator = Numerator(u, m);
    return u * (numerator / (numerator + Difference(u, m)));
  }
  // The derivative of the tanh is 4m * (1 + m) / denominator^2, and once more m
  // where u is positive.
  BNAR_INLINE V Derivative(const V& u) const {
    const V m = ExpOfNegatedSize(u);
    const V numerator = Numerator(u, m);
    const V reciprocal = Reciprocal(numerator + Difference(u, m));
    const V slope = m * (m + A{1}) * MOrOne(u, m) * A{4};
    return (numerator + u * slope * reciprocal) * reciprocal;
  }

 private:
  static BNAR_INLINE V ExpOfNegatedSize(const V& u) {
    return ExpOfNegated(Absolute(u));
  }
  static BNAR_INLINE V Numerator(const V& u, const V& m) {
    return ForParts([](const Float& v, const Float& above, const Float& below)
                        BNAR_LAMBDA { return v > Float{} ? above : below; },
                    u, m * A{2} + A{1}, m * (m + A{2}));
  }
  static BNAR_INLINE V MOrOne(const V& u, const V& m) {
    return ForParts(
        [](const Float& v, const Float& above)
            BNAR_LAMBDA { return v > Float{} ? above : Float{} + A{1}; },
        u, m);
  }
  // The denominator less the numerator.
  static BNAR_INLINE V Difference(const V& u, const V& m) {
    const V m_or_one = MOrOne(u, m);
    return m_or_one * m_or_one * A{2};
  }
};

}  // namespace jax_bnar::cpu::BNAR_ISA

#endif  // JAX_BNAR_CPU_ISA_CURVES_H_
