// The arithmetic of channels: the constants of the elementwise passes, written
// once for the CPU and the GPU, and the merge of partial statistics on the CPU.
// (On the GPU all blocks sum around one origin, and their sums are added.)

#ifndef JAX_BNAR_NATIVE_NUMERICS_H_
#define JAX_BNAR_NATIVE_NUMERICS_H_

#include <cfloat>
#include <cmath>
#include <cstdint>

#include "native/host_device.h"
#include "native/problem.h"

namespace jax_bnar {

// Merges the sum and the squared deviations of n elements into those of m
// others (Youngs and Cramer 1971). The sums are taken around an origin near the
// mean; otherwise float64 data would lose the digits of mean/std here.
template <typename A>
BNAR_HOST_DEVICE void MergeStatistics(A m, A n, A sum_b, A m2_b, A* sum,
                                      A* m2) {
  if (m == 0) {
    *sum = sum_b;
    *m2 = m2_b;
    return;
  }
  const A t = *sum * (n / m) - sum_b;
  *m2 += m2_b + t * t * (m / (n * (m + n)));
  *sum += sum_b;
}

// Computes sum((x - mean)^2) from the sums of (x - origin) and (x - origin)^2,
// in double.
BNAR_HOST_DEVICE double SquaredDeviations(double sum, double squares,
                                          double count) {
  return std::fma(-sum, sum / count, squares);
}

template <typename A>
BNAR_HOST_DEVICE A MeanOf(A origin, double sum, double count) {
  return static_cast<A>(origin + sum / count);
}

template <typename A>
BNAR_HOST_DEVICE A VarianceOf(double m2, double count) {
  // What SquaredDeviations computed may be negative, by rounding, where the
  // elements hardly differ.
  return static_cast<A>(m2 < 0 ? 0.0 : m2 / count);
}

BNAR_HOST_DEVICE double SmallestNormal(float) { return FLT_MIN; }
BNAR_HOST_DEVICE double SmallestNormal(double) { return DBL_MIN; }

// 1 / sqrt(var + epsilon), computed in double from the var that the caller
// sees, so that whole operations and their halves agree. Epsilon is raised to
// the smallest normal A, because a smaller one would vanish.
template <typename A>
BNAR_HOST_DEVICE double ReciprocalStd(A var, double epsilon) {
  const double smallest = SmallestNormal(var);
  return 1.0 / std::sqrt(static_cast<double>(var) +
                         (epsilon > smallest ? epsilon : smallest));
}

// Returns a of y = act((x - mean) * a + bias + z).
template <typename A>
BNAR_HOST_DEVICE A Multiplier(A scale, A var, double epsilon) {
  return static_cast<A>(scale * ReciprocalStd(var, epsilon));
}

// b and k of dx = a * e + b * (x - mean) + k, and the gradients of scale and
// bias.
template <typename A>
struct BackwardChannel {
  A b;
  A k;
  A dscale;
  A dbias;
};

template <typename A>
BNAR_HOST_DEVICE BackwardChannel<A> BackwardChannelOf(A var, A scale, A dmean,
                                                      A dvar, double epsilon,
                                                      double sum_e,
                                                      double sum_e_centred,
                                                      double count) {
  const double rstd = ReciprocalStd(var, epsilon);
  const double a = scale * rstd;
  // The order of the products matters: rstd * sum_e_centred is about as large
  // as sum_e, while rstd^3 underflows from |x| = 1e103 on.
  return {static_cast<A>((2 * static_cast<double>(dvar) -
                          a * (rstd * (rstd * sum_e_centred))) /
                         count),
          static_cast<A>((dmean - a * sum_e) / count),
          static_cast<A>(rstd * sum_e_centred), static_cast<A>(sum_e)};
}

// Returns an element of a (G, C) or (1, C) operand, or `otherwise` if the
// operand is absent.
template <typename A>
BNAR_HOST_DEVICE A ElementOr(const VectorOperand& vector, int64_t channels,
                             int64_t group, int64_t channel, A otherwise) {
  if (vector.data == nullptr) return otherwise;
  const int64_t row = vector.groups == 1 ? 0 : group;
  return static_cast<const A*>(vector.data)[row * channels + channel];
}

}  // namespace jax_bnar

#endif  // JAX_BNAR_NATIVE_NUMERICS_H_
