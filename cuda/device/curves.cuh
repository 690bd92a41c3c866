// Activations other than ReLU, and what they let pass of a gradient. They agree
// with jax.nn in value and in derivative, also where the derivative jumps.
// cpu/isa/curves.h has the same for the CPU.

#ifndef JAX_BNAR_CUDA_DEVICE_CURVES_CUH_
#define JAX_BNAR_CUDA_DEVICE_CURVES_CUH_

#include <cuda_runtime.h>

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "cuda/device/intrinsics.cuh"
#include "cuda/device/vector.cuh"
#include "native/problem.h"
#include "native/scaled_erfc.h"

namespace jax_bnar {
namespace cuda {

// e^-u: accurate to 1 ulp in float32 and in double. Of 16-bit elements the
// errors are at most 2^-16, much smaller than those of rounding, and it takes
// three instructions.
template <typename T>
__device__ __forceinline__ Accumulator<T> ExpOfNegated(Accumulator<T> u) {
  if constexpr (sizeof(T) == 2) {
    return __expf(-u);
  } else if constexpr (std::is_same_v<T, float>) {
    return expf(-u);
  } else {
    return exp(-u);
  }
}

// a / b, where b is at least 1, with errors of at most 2 ulp. For 16-bit
// elements it is 0 where b is above 2^126, with which results below 2^-119
// become 0.
template <typename T>
__device__ __forceinline__ Accumulator<T> Divide(Accumulator<T> a,
                                                 Accumulator<T> b) {
  if constexpr (sizeof(T) == 2) {
    return __fdividef(a, b);
  } else if constexpr (std::is_same_v<T, float>) {
    return DivideNearly(a, b);
  } else {
    return a / b;
  }
}

// s = 1 / (1 + e^-u), and 1 - s, which is e^-u * s as well. This loses no
// digits where s is near to 1; of 16-bit elements nobody sees them.
template <typename T>
struct Sigmoid {
  using A = Accumulator<T>;
  A s;
  A rest;

  explicit __device__ __forceinline__ Sigmoid(A u) {
    const A e = ExpOfNegated<T>(u);
    s = Divide<T>(1, e + 1);
    if constexpr (sizeof(T) == 2) {
      rest = 1 - s;
    } else {
      rest = (e < Largest() ? e : Largest()) * s;
    }
  }

 private:
  static __device__ __forceinline__ A Largest() {
    return std::is_same_v<A, float> ? A(0x1.fffffep127)
                                    : A(0x1.fffffffffffffp1023);
  }
};

// The functions of one element. Gradient(u, dy) is act'(u) * dy. kFromY says
// whether the derivative at y is that at u; the derivatives at 1 and at -1 are
// then those where the bit of a mask is set (IsOpen) and where it is not.
// kIsLong says that a function has many instructions (see Curve::InTurns).

template <typename T>
struct Relu6 {
  using A = Accumulator<T>;
  static constexpr bool kFromY = true;
  static constexpr bool kIsLong = false;

  // NaN stays NaN.
  __device__ __forceinline__ A Value(A u) const {
    const A positive = u <= 0 ? A{0} : u;
    return positive >= 6 ? A{6} : positive;
  }
  __device__ __forceinline__ bool IsOpen(A u) const { return u > 0 && u < 6; }
  // As in jax.nn, it also stops infinite cotangents, and NaN.
  __device__ __forceinline__ A Gradient(A u, A dy) const {
    return IsOpen(u) ? dy : A{0};
  }
};

// A negative u may have a y that is 0, because the slope is 0 or y is rounded.
// That 0 is negative then, and that of a u which is 0 is made positive.
template <typename T>
struct LeakyRelu {
  using A = Accumulator<T>;
  static constexpr bool kFromY = true;
  static constexpr bool kIsLong = false;
  A negative_slope;

  __device__ __forceinline__ A Value(A u) const {
    return u >= 0 ? std::fabs(u) : u * negative_slope;
  }
  __device__ __forceinline__ bool IsOpen(A u) const {
    return u >= 0 && !std::signbit(u);
  }
  __device__ __forceinline__ A Gradient(A u, A dy) const {
    return IsOpen(u) ? dy : dy * negative_slope;
  }
};

template <typename T>
struct Silu {
  using A = Accumulator<T>;
  static constexpr bool kFromY = false;
  static constexpr bool kIsLong = false;

  // The divisor may be infinite.
  __device__ __forceinline__ A Value(A u) const {
    return Divide<T>(u, ExpOfNegated<T>(u) + 1);
  }
  // The derivative is s + u * s * (1 - s).
  __device__ __forceinline__ A Gradient(A u, A dy) const {
    const Sigmoid<T> of(u);
    return of.s * (u * of.rest + 1) * dy;
  }
};

template <typename T>
struct HardSilu {
  using A = Accumulator<T>;
  static constexpr bool kFromY = false;
  static constexpr bool kIsLong = false;

  __device__ __forceinline__ A Value(A u) const {
    return u * (Relu6<T>().Value(u + 3) * kSixth);
  }
  // The second term is selected, because it is 0 where u is infinite.
  __device__ __forceinline__ A Gradient(A u, A dy) const {
    const A shifted = u + 3;
    const A of_gate = Relu6<T>().IsOpen(shifted) ? u * kSixth : A{0};
    return (Relu6<T>().Value(shifted) * kSixth + of_gate) * dy;
  }

 private:
  // XLA divides by a constant like this as well.
  static constexpr A kSixth = A(1) / A(6);
};

template <typename T>
struct Elu {
  using A = Accumulator<T>;
  static constexpr bool kFromY = false;
  static constexpr bool kIsLong = sizeof(T) > 2;

  __device__ __forceinline__ A Value(A u) const {
    return u > 0 ? u : ExpMinusOne(u);
  }
  __device__ __forceinline__ A Gradient(A u, A dy) const {
    return u > 0 ? dy : ExpOfNegated<T>(-u) * dy;
  }

 private:
  // Of 16-bit elements the difference would lose digits where u is small.
  static __device__ __forceinline__ A ExpMinusOne(A u) {
    if constexpr (sizeof(T) == 2) {
      const A small = u + u * u * (A(0.5) + u * A(1. / 6));
      return u > A(-0x1p-5) ? small : ExpOfNegated<T>(-u) - 1;
    } else {
      return std::expm1(u);
    }
  }
};

// The approximation of GELU by tanh, which is u * sigmoid(w) with
//   w = 2 * sqrt(2 / pi) * (u + 0.044715 * u^3)
template <typename T>
struct Gelu {
  using A = Accumulator<T>;
  static constexpr bool kFromY = false;
  static constexpr bool kIsLong = false;

  __device__ __forceinline__ A Value(A u) const {
    const A w = u * (u * u * kThird + kFirst);
    return Divide<T>(u, ExpOfNegated<T>(w) + 1);
  }
  // The derivative is s + u * w' * s * (1 - s). Where u * w' is limited, s or
  // the difference is 0, and the product would not be where u * w' is infinite.
  __device__ __forceinline__ A Gradient(A u, A dy) const {
    const A square = u * u;
    const Sigmoid<T> of(u * (square * kThird + kFirst));
    const A slope = u * (square * (3 * kThird) + kFirst);
    const A limited = std::fmin(std::fmax(slope, A(-1e4)), A(1e4));
    return of.s * (limited * of.rest + 1) * dy;
  }

 private:
  static constexpr A kFirst = A(1.5957691216057308);
  static constexpr A kThird = A(0.07135481627260025);
};

// u * Phi(u), where Phi is the distribution function of the normal distribution
// and phi its density. Phi is computed from the tail beyond t = |u|, which
// keeps its digits where u is far below 0.
template <typename T>
struct ExactGelu {
  using A = Accumulator<T>;
  static constexpr bool kFromY = false;
  static constexpr bool kIsLong = true;

  __device__ __forceinline__ A Value(A u) const {
    const A t = Size(u);
    return u * Below(u, ExpOfNegatedHalfSquare(t) * ScaledTail(t));
  }
  // The derivative is Phi(u) + u * phi(u). Where t is limited, phi is 0, and
  // the product would not be where u is infinite.
  __device__ __forceinline__ A Gradient(A u, A dy) const {
    constexpr A kDensity = A(0.3989422804014327);  // 1 / sqrt(2 * pi)
    const A t = Size(u);
    const A scaled = ScaledTail(t) - t * kDensity;
    return Below(u, ExpOfNegatedHalfSquare(t) * scaled) * dy;
  }

 private:
  using Constants = ScaledErfc<sizeof(T)>;

  static __device__ __forceinline__ A Size(A u) {
    const A size = std::fabs(u);
    return size > A(Constants::kLargest) ? A(Constants::kLargest) : size;
  }
  static __device__ __forceinline__ A ExpOfNegatedHalfSquare(A t) {
    return ExpOfNegated<T>(t * t * A(0.5));
  }
  // The tail beyond t, without that factor.
  static __device__ __forceinline__ A ScaledTail(A t) {
    const A reciprocal = Divide<T>(1, t + 4);
    return reciprocal * Polynomial<0>((t - 4) * reciprocal);
  }

  // The sum of coefficients[i] * q^(i - kFirst) for i >= kFirst, by Horner's
  // scheme.
  template <int kFirst>
  static __device__ __forceinline__ A Polynomial(A q) {
    constexpr A kCoefficient = A(Constants::kCoefficients[kFirst]);
    if constexpr (kFirst + 1 == Constants::kTerms) {
      return kCoefficient;
    } else {
      return Polynomial<kFirst + 1>(q) * q + kCoefficient;
    }
  }
  // What is below u, by what is beyond |u|.
  static __device__ __forceinline__ A Below(A u, A beyond) {
    return u > 0 ? 1 - beyond : beyond;
  }
};

// u * tanh(log(1 + e^u)). With m = e^-|u|, which is at most 1, the tanh is
//   (1 + 2m) / (1 + 2m + 2m^2) where u is positive,
//   m * (m + 2) / (m * (m + 2) + 2) elsewhere,
// which loses no digits and has no infinities.
template <typename T>
struct Mish {
  using A = Accumulator<T>;
  static constexpr bool kFromY = false;
  static constexpr bool kIsLong = sizeof(T) > 2;

  __device__ __forceinline__ A Value(A u) const {
    const Terms of(u);
    return u * Divide<T>(of.numerator, of.denominator);
  }
  // The derivative of the tanh is 4m * (1 + m) / denominator^2, and once more m
  // where u is positive.
  __device__ __forceinline__ A Gradient(A u, A dy) const {
    const Terms of(u);
    const A slope = of.m * (of.m + 1) * of.m_or_one * 4;
    const A reciprocal = Divide<T>(1, of.denominator);
    return (of.numerator + u * (slope * reciprocal)) * reciprocal * dy;
  }

 private:
  struct Terms {
    A m;
    A m_or_one;  // m where u is positive
    A numerator;
    A denominator;

    explicit __device__ __forceinline__ Terms(A u)
        : m(ExpOfNegated<T>(std::fabs(u))),
          m_or_one(u > 0 ? m : A{1}),
          numerator(u > 0 ? 2 * m + 1 : m * (m + 2)),
          denominator(numerator + 2 * m_or_one * m_or_one) {}
  };
};

// The activation of a call, for vectors. Which one it is, is a branch that all
// threads of a launch take alike, once for each vector: a kernel for each would
// make the build, and the library, several times as large. `activation` is in
// the parameters of the kernel, which are read without a register.
template <typename T, int kElements>
class Curve {
 public:
  using A = Accumulator<T>;
  using Elements = Values<A, kElements>;

  explicit __device__ __forceinline__ Curve(const Activation& activation)
      : activation_(activation) {}

  // act(u).
  __device__ __forceinline__ Elements Value(const Elements& u) const {
    Elements y;
    WithAny</*kAnyCurve=*/true>([&](const auto& curve) {
      y = u;
      InTurns(curve, [&](int i) { y[i] = curve.Value(y[i]); }, &y);
    });
    return y;
  }

  // act'(u) * dy, for the u that was computed again. Where y may be saved
  // instead, the derivative is that of the rounded value; unless kAnyCurve, the
  // activation is none of these.
  template <bool kAnyCurve>
  __device__ __forceinline__ Elements
  GradientOfInput(const Elements& u, const Elements& dy) const {
    Elements e;
    WithAny<kAnyCurve>([&](const auto& curve) {
      using Chosen = std::decay_t<decltype(curve)>;
      Elements seen = u;
      if constexpr (Chosen::kFromY && sizeof(T) == 2) {
        Vector<T, kElements> rounded;
        rounded.Set(WithoutNegativeZero(u));
        seen = rounded.Get();
      } else if constexpr (Chosen::kFromY) {
        seen = WithoutNegativeZero(u);
      }
      SetGradient(curve, seen, dy, &e);
    });
    return e;
  }

  // The same from y.
  __device__ __forceinline__ Elements
  GradientOfOutput(const Elements& y, const Elements& dy) const {
    Elements e;
    WithPiecewiseLinear(
        [&](const auto& curve) { SetGradient(curve, y, dy, &e); });
    return e;
  }

  // The same from the bits of a mask.
  __device__ __forceinline__ Elements GradientOfBits(uint32_t bits,
                                                     const Elements& dy) const {
    Elements y;
#pragma unroll
    for (int i = 0; i < kElements; ++i) {
      y[i] = (bits >> i & 1u) != 0 ? A{1} : A{-1};
    }
    return GradientOfOutput(y, dy);
  }

  // The bits that a mask has for y.
  __device__ __forceinline__ uint32_t OpenBits(const Elements& y) const {
    uint32_t bits = 0;
    WithPiecewiseLinear([&](const auto& curve) {
#pragma unroll
      for (int i = 0; i < kElements; ++i) {
        bits |= (curve.IsOpen(y[i]) ? 1u : 0u) << i;
      }
    });
    return bits;
  }

 private:
  // In y, 0 has no sign.
  static __device__ __forceinline__ Elements
  WithoutNegativeZero(const Elements& u) {
    Elements result;
#pragma unroll
    for (int i = 0; i < kElements; ++i) result[i] = u[i] + 0;
    return result;
  }

  template <typename Chosen>
  static __device__ __forceinline__ void SetGradient(const Chosen& curve,
                                                     const Elements& u,
                                                     const Elements& dy,
                                                     Elements* e) {
    Elements turned = u;
    *e = dy;
    InTurns(
        curve, [&](int i) { (*e)[i] = curve.Gradient(turned[i], (*e)[i]); },
        &turned, e);
  }

  // Calls f(i) for all elements, those of a long function in turns of a loop.
  // Without the loop, its code would be as many times as long, and the compiler
  // would mix all elements, for which there are no registers. The elements of a
  // turn are always the first ones of the vectors, because registers have no
  // index.
  template <typename Chosen, typename F, typename... Vectors>
  static __device__ __forceinline__ void InTurns(const Chosen&, F f,
                                                 Vectors*... vectors) {
    constexpr int kOfTurn = Chosen::kIsLong && kElements > 2 ? 2 : kElements;
#pragma unroll 1
    for (int turn = 0; turn < kElements / kOfTurn; ++turn) {
#pragma unroll
      for (int i = 0; i < kOfTurn; ++i) f(i);
      (Rotate<kOfTurn>(vectors), ...);
    }
  }

  // Brings the elements of the next turn to the front.
  template <int kOfTurn>
  static __device__ __forceinline__ void Rotate(Elements* elements) {
    const Elements before = *elements;
#pragma unroll
    for (int i = 0; i < kElements; ++i) {
      (*elements)[i] = before[(i + kOfTurn) % kElements];
    }
  }

  template <typename F>
  __device__ __forceinline__ void WithPiecewiseLinear(F f) const {
    if (activation_.kind == ActivationKind::kRelu6) {
      f(Relu6<T>());
    } else {
      f(LeakyRelu<T>{static_cast<A>(activation_.negative_slope)});
    }
  }

  // A chain of comparisons would take a register more than a switch, which some
  // kernels do not have.
  template <bool kAnyCurve, typename F>
  __device__ __forceinline__ void WithAny(F f) const {
    switch (activation_.kind) {
      case ActivationKind::kSilu:
        return f(Silu<T>());
      case ActivationKind::kHardSilu:
        return f(HardSilu<T>());
      case ActivationKind::kElu:
        return f(Elu<T>());
      case ActivationKind::kGelu:
        return f(Gelu<T>());
      case ActivationKind::kExactGelu:
        return f(ExactGelu<T>());
      case ActivationKind::kMish:
        return f(Mish<T>());
      default:
        if constexpr (!kAnyCurve) __builtin_unreachable();
        return WithPiecewiseLinear(f);
    }
  }

  const Activation& activation_;
};

}  // namespace cuda
}  // namespace jax_bnar

#endif  // JAX_BNAR_CUDA_DEVICE_CURVES_CUH_
