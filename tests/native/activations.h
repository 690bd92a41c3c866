// The activations in double, for the expectations, and which of them a case
// has.

#ifndef JAX_BNAR_TESTS_NATIVE_ACTIVATIONS_H_
#define JAX_BNAR_TESTS_NATIVE_ACTIVATIONS_H_

#include <algorithm>
#include <cmath>
#include <string>

#include "native/problem.h"

namespace jax_bnar {
namespace testing {

constexpr Activation kCurves[] = {
    {ActivationKind::kRelu6},     {ActivationKind::kLeakyRelu, 0.25},
    {ActivationKind::kSilu},      {ActivationKind::kHardSilu},
    {ActivationKind::kElu},       {ActivationKind::kGelu},
    {ActivationKind::kExactGelu}, {ActivationKind::kMish}};

inline std::string NameOf(const Activation& activation) {
  switch (activation.kind) {
    case ActivationKind::kNone:
      return "none";
    case ActivationKind::kRelu:
      return "relu";
    case ActivationKind::kRelu6:
      return "relu6";
    case ActivationKind::kLeakyRelu:
      return "leaky_relu";
    case ActivationKind::kSilu:
      return "silu";
    case ActivationKind::kHardSilu:
      return "hard_silu";
    case ActivationKind::kElu:
      return "elu";
    case ActivationKind::kGelu:
      return "gelu";
    case ActivationKind::kExactGelu:
      return "exact_gelu";
    case ActivationKind::kMish:
      return "mish";
  }
  return "";
}

constexpr double kRootOfTwoOverPi = 0.79788456080286535588;

// The tanh in GELU is that of this, and in Mish that of log(1 + e^u).
inline double InsideGelu(double u) {
  return kRootOfTwoOverPi * (u + 0.044715 * u * u * u);
}

inline double ValueOf(const Activation& activation, double u) {
  switch (activation.kind) {
    case ActivationKind::kNone:
      return u;
    case ActivationKind::kRelu:
      return std::max(u, 0.0);
    case ActivationKind::kRelu6:
      return std::min(std::max(u, 0.0), 6.0);
    case ActivationKind::kLeakyRelu:
      return u >= 0 ? u : u * activation.negative_slope;
    case ActivationKind::kSilu:
      return u / (1 + std::exp(-u));
    case ActivationKind::kHardSilu:
      return u * std::min(std::max(u + 3, 0.0), 6.0) / 6;
    case ActivationKind::kElu:
      return u > 0 ? u : std::expm1(u);
    case ActivationKind::kGelu:
      return u * (1 + std::tanh(InsideGelu(u))) / 2;
    case ActivationKind::kExactGelu:
      return u * std::erfc(-u / std::sqrt(2.0)) / 2;
    case ActivationKind::kMish:
      return u * std::tanh(std::log1p(std::exp(u)));
  }
  return 0;
}

// Whether the derivative of a piecewise linear activation at this y is 1, and
// not the one below 0.
inline bool IsOpen(const Activation& activation, double y) {
  switch (activation.kind) {
    case ActivationKind::kRelu6:
      return y > 0 && y < 6;
    case ActivationKind::kLeakyRelu:
      // A 0 that was rounded has kept its sign, and NaN is nowhere open.
      return y >= 0 && !std::signbit(y);
    default:
      return y > 0;
  }
}

inline double DerivativeWhere(const Activation& activation, bool open) {
  return open ? 1 : activation.negative_slope;
}

// The derivative of one that is not piecewise linear.
inline double DerivativeAt(const Activation& activation, double u) {
  const double sigmoid = 1 / (1 + std::exp(-u));
  switch (activation.kind) {
    case ActivationKind::kSilu:
      return sigmoid * (1 + u * (1 - sigmoid));
    case ActivationKind::kElu:
      return u > 0 ? 1 : std::exp(u);
    case ActivationKind::kGelu: {
      const double t = std::tanh(InsideGelu(u));
      const double slope = kRootOfTwoOverPi * (1 + 3 * 0.044715 * u * u);
      return (1 + t) / 2 + u * (1 - t * t) / 2 * slope;
    }
    case ActivationKind::kExactGelu:
      return std::erfc(-u / std::sqrt(2.0)) / 2 +
             u * std::exp(-u * u / 2) * kRootOfTwoOverPi / 2;
    case ActivationKind::kMish: {
      const double t = std::tanh(std::log1p(std::exp(u)));
      return t + u * (1 - t * t) * sigmoid;
    }
    default:  // hard_silu
      if (std::fabs(u) >= 3) return u > 0 ? 1 : 0;
      return (2 * u + 3) / 6;
  }
}

}  // namespace testing
}  // namespace jax_bnar

#endif  // JAX_BNAR_TESTS_NATIVE_ACTIVATIONS_H_
