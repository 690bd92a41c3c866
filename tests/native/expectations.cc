#include "tests/native/expectations.h"

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <string>

#include "tests/native/check.h"

namespace jax_bnar {
namespace testing {
namespace {

// The maximum number of roundings of an element in the accumulation dtype.
constexpr double kRoundings = 4;

std::string Describe(const char* what, int64_t i, double got, double expected,
                     double tolerance) {
  char text[200];
  std::snprintf(text, sizeof(text), "%s[%lld] = %.17g, expected %.17g +- %.3g",
                what, static_cast<long long>(i), got, expected, tolerance);
  return text;
}

void CheckNear(const char* what, int64_t i, double got, double expected,
               double tolerance) {
  // Not !(difference > tolerance), because a NaN must fail.
  BNAR_CHECK(std::fabs(got - expected) <= tolerance,
             Describe(what, i, got, expected, tolerance));
}

// The tolerance of a sum stored in `format`, computed in the accumulation dtype
// from terms with the given total magnitude.
class StoredTolerance {
 public:
  StoredTolerance(const Input& in, const Format& format)
      : of_terms_(kRoundings * in.accumulator.roundoff()),
        of_storing_(format.roundoff() * (1 + 1e-6)),
        least_(format.smallest_subnormal()) {}

  double operator()(double expected, double magnitude) const {
    return of_terms_ * magnitude + of_storing_ * std::fabs(expected) + least_;
  }

 private:
  double of_terms_;
  double of_storing_;
  double least_;
};

// 1 / standard deviation for each of (G, C).
std::vector<double> RstdOf(const std::vector<double>& var) {
  std::vector<double> rstd(var);
  for (double& value : rstd) value = 1 / std::sqrt(value + Input::kEpsilon);
  return rstd;
}

// What is expected of a vector, and by how much each number may be off beside
// its roundings.
struct Sum {
  explicit Sum(size_t channels) : value(channels), error(channels) {}

  void Add(size_t channel, double term, double error_of_term) {
    value[channel] += term;
    error[channel] += error_of_term;
  }

  std::vector<double> value, error;
};

void CheckVector(const Input& in, const char* what, const Array& got,
                 const Sum& expected, double roundings) {
  for (int64_t i = 0; i < got.size(); ++i) {
    const double value = expected.value[static_cast<size_t>(i)];
    CheckNear(what, i, got[i], value,
              roundings * in.accumulator.roundoff() * std::fabs(value) +
                  expected.error[static_cast<size_t>(i)]);
  }
}

struct Sums {
  Sum e, e_centred;
};

// These sums are exact where e is, because the inputs are chosen so.
Sums SumsOf(const Input& in, const GatedGradient& gradient) {
  const size_t channels =
      static_cast<size_t>(in.c.shape.groups * in.c.shape.channels);
  Sums sums{Sum(channels), Sum(channels)};
  const std::vector<double> mean = in.Spread(in.mean);
  for (int64_t i = 0; i < in.c.size(); ++i) {
    const size_t c = in.ChannelOf(i);
    const double e = gradient.e[static_cast<size_t>(i)];
    const double error = gradient.error[static_cast<size_t>(i)];
    const double centred = in.x[i] - mean[c];
    sums.e.Add(c, e, error);
    sums.e_centred.Add(c, e * centred, error * std::fabs(centred));
  }
  return sums;
}

// By how much an e that is not exact may be off once it is stored.
double StoredError(const GatedGradient& gradient, const Format& format,
                   int64_t i) {
  const double error = gradient.error[static_cast<size_t>(i)];
  if (error == 0) return 0;
  return error + format.smallest_subnormal() +
         format.roundoff() * std::fabs(gradient.e[static_cast<size_t>(i)]);
}

void CheckDz(const Inputs& in, const GatedGradient& gradient,
             const Results& results) {
  if (results.dz == nullptr) return;
  for (int64_t i = 0; i < in.c.size(); ++i) {
    CheckNear("dz", i, (*results.dz)[i], gradient.e[static_cast<size_t>(i)],
              StoredError(gradient, in.first().out_format, i));
  }
}

void CheckMask(const Inputs& in, const Activation& activation,
               const Results& results) {
  const uint8_t* mask = results.mask->data();
  for (int64_t i = 0; i < in.c.size(); ++i) {
    BNAR_CHECK(in.c.MaskBit(mask, i) == IsOpen(activation, (*results.y)[i]),
               "mask bit " + std::to_string(i));
  }
  const int64_t group_size = in.c.shape.group_size();
  const int64_t bytes = (group_size + 7) / 8;
  if (group_size % 8 == 0) return;
  for (int64_t g = 0; g < in.c.shape.groups; ++g) {
    BNAR_CHECK(mask[(g + 1) * bytes - 1] >> (group_size % 8) == 0,
               "padding bits are 0");
  }
}

// The coefficients of one input, for each of (G, C).
struct Coefficients {
  std::vector<double> mean, a, bias;
};

Coefficients CoefficientsOf(const Input& in, bool affine,
                            const Results::OfInput& of) {
  const bool own_statistics = of.mean != nullptr;
  Coefficients result{in.Spread(own_statistics ? *of.mean : in.mean),
                      RstdOf(in.Spread(own_statistics ? *of.var : in.var)),
                      in.Spread(in.bias)};
  const std::vector<double> scale = in.Spread(in.scale);
  for (size_t c = 0; c < scale.size(); ++c) {
    if (affine) result.a[c] *= scale[c];
    if (!affine) result.bias[c] = 0;
  }
  return result;
}

void CheckStatisticsOf(const Input& in, const Results::OfInput& of) {
  const size_t channels =
      static_cast<size_t>(in.c.shape.groups * in.c.shape.channels);
  // Add integers: values are multiples of 1/4, and their squares of 1/16.
  std::vector<int64_t> sum(channels), squares(channels);
  for (int64_t i = 0; i < in.c.size(); ++i) {
    const size_t c = in.ChannelOf(i);
    const int64_t quarters = static_cast<int64_t>(4 * in.x[i]);
    sum[c] += quarters;
    squares[c] += quarters * quarters;
  }
  const int64_t count = in.c.shape.count();
  std::vector<double> mean(channels), var(channels);
  for (size_t c = 0; c < channels; ++c) {
    const double n = static_cast<double>(count);
    mean[c] = static_cast<double>(sum[c]) / (4 * n);
    var[c] = static_cast<double>(count * squares[c] - sum[c] * sum[c]) /
             (16 * n * n);
  }
  // Sums are exact. What remains is the last rounding and, in double, those of
  // origin + sum / count and of the merges.
  const double roundings = in.c.dtype == DType::kFloat64 ? 50 : 2;
  for (size_t c = 0; c < channels; ++c) {
    const int64_t i = static_cast<int64_t>(c);
    CheckNear("mean", i, (*of.mean)[i], mean[c],
              2 * in.accumulator.roundoff() * std::fabs(mean[c]) + 0x1p-49);
    CheckNear("var", i, (*of.var)[i], var[c],
              roundings * in.accumulator.roundoff() * (var[c] + 1e-6));
  }
}

void CheckAppliedTo(const Input& in, const GatedGradient& e,
                    const Results::OfInput& of) {
  const std::vector<double> rstd = RstdOf(in.Spread(in.var)),
                            scale = in.Spread(in.scale), b = in.Spread(in.b),
                            k = in.Spread(in.k), mean = in.Spread(in.mean);
  const StoredTolerance tolerance(in, in.format);
  for (int64_t i = 0; i < in.c.size(); ++i) {
    const size_t c = in.ChannelOf(i);
    const double a = scale[c] * rstd[c];
    const double first = a * e.e[static_cast<size_t>(i)];
    const double second = b[c] * (in.x[i] - mean[c]);
    const double third = k[c];
    const double expected = first + second + third;
    CheckNear("dx", i, (*of.dx)[i], expected,
              tolerance(expected, std::fabs(first) + std::fabs(second) +
                                      std::fabs(third)) +
                  std::fabs(a) * StoredError(e, in.out_format, i));
  }
}

// Of one input, whose sum of e all inputs share.
void CheckBackwardOf(const Input& in, const GatedGradient& e,
                     bool statistics_cotangents, const Array& dbias,
                     const Results::OfInput& of) {
  const Sums sums = SumsOf(in, e);
  const double count = static_cast<double>(in.c.shape.count());
  const std::vector<double> rstds = RstdOf(in.Spread(in.var)),
                            mean = in.Spread(in.mean),
                            scale = in.Spread(in.scale),
                            dmean = in.Spread(in.dmean),
                            dvar = in.Spread(in.dvar);
  Sum dscale(sums.e_centred);
  for (size_t c = 0; c < rstds.size(); ++c) {
    dscale.value[c] *= rstds[c];
    dscale.error[c] *= rstds[c];
  }
  CheckVector(in, "dbias", dbias, sums.e, 1);
  CheckVector(in, "dscale", *of.second, dscale, 6);
  const double present = statistics_cotangents ? 1 : 0;
  const StoredTolerance tolerance(in, in.format);
  for (int64_t i = 0; i < in.c.size(); ++i) {
    const size_t c = in.ChannelOf(i);
    const double rstd = rstds[c];
    const double a = scale[c] * rstd;
    const double centred = in.x[i] - mean[c];
    const double from_dy = a * e.e[static_cast<size_t>(i)];
    const double from_sum = a * sums.e.value[c] / count;
    const double from_centred =
        a * (rstd * (rstd * sums.e_centred.value[c])) / count * centred;
    const double from_dmean = present * dmean[c] / count;
    const double from_dvar = present * 2 * dvar[c] * centred / count;
    const double expected =
        from_dy - from_sum - from_centred + from_dmean + from_dvar;
    const double magnitude = std::fabs(from_dy) + std::fabs(from_sum) +
                             std::fabs(from_centred) + std::fabs(from_dmean) +
                             std::fabs(from_dvar);
    const double from_error =
        StoredError(e, in.out_format, i) +
        (sums.e.error[c] +
         rstd * rstd * sums.e_centred.error[c] * std::fabs(centred)) /
            count;
    CheckNear("dx", i, (*of.dx)[i], expected,
              tolerance(expected, magnitude) + std::fabs(a) * from_error);
  }
}

// The relative error of an activation and of its derivative, with that of float
// sums of such numbers. Those of 16-bit elements are computed to fewer digits.
double CurveError(const Input& in) {
  return in.c.dtype == DType::kFloat64   ? 0x1p-46
         : in.c.dtype == DType::kFloat32 ? 0x1p-17
                                         : 0x1p-13;
}

// Where the activation is not piecewise linear.
void SetSmoothGradient(const Inputs& all, bool residual,
                       GatedGradient* gradient) {
  const Input& in = all.first();
  std::vector<Coefficients> coefficients;
  for (int input = 0; input < all.count(); ++input) {
    coefficients.push_back(CoefficientsOf(all[input], /*affine=*/true, {}));
  }
  for (int64_t i = 0; i < in.c.size(); ++i) {
    const size_t c = in.ChannelOf(i);
    double u = residual ? in.z[i] : 0;
    double magnitude = std::fabs(u);
    for (int input = 0; input < all.count(); ++input) {
      const Coefficients& of = coefficients[static_cast<size_t>(input)];
      const double scaled = (all[input].x[i] - of.mean[c]) * of.a[c];
      u += scaled + of.bias[c];
      magnitude += std::fabs(scaled) + std::fabs(of.bias[c]);
    }
    const double error_of_u =
        2 * kRoundings * in.accumulator.roundoff() * magnitude;
    // The derivative of hard_silu jumps there by a half, and what is stored of
    // the larger number has a larger rounding error.
    const bool jumps = in.c.activation.kind == ActivationKind::kHardSilu &&
                       std::fabs(std::fabs(u) - 3) <= error_of_u;
    const double dy = in.dy[i];
    gradient->e[static_cast<size_t>(i)] = dy * DerivativeAt(in.c.activation, u);
    gradient->error[static_cast<size_t>(i)] =
        std::fabs(dy) * (CurveError(in) + error_of_u + (jumps ? 0.51 : 0));
  }
}

}  // namespace

GatedGradient GatedGradientOf(Platform& platform, const Inputs& in, Gate gate) {
  const Input& first = in.first();
  const Activation& activation = in.c.activation;
  const size_t size = static_cast<size_t>(in.c.size());
  GatedGradient gradient{std::vector<double>(size), std::vector<double>(size)};
  if (!activation.is_piecewise_linear()) {
    SetSmoothGradient(in, gate == Gate::kZ, &gradient);
    return gradient;
  }
  Results forward;
  if (Recomputes(gate)) {
    // CheckNormalised checks what forward stores.
    forward =
        CallNormalise(platform, in, {true, gate == Gate::kZ, false, true});
  }
  for (int64_t i = 0; i < in.c.size(); ++i) {
    bool open = true;
    if (gate == Gate::kY) open = IsOpen(activation, first.y[i]);
    if (gate == Gate::kMask) open = in.c.MaskBit(first.mask.data(), i);
    if (Recomputes(gate)) open = IsOpen(activation, (*forward.y)[i]);
    gradient.e[static_cast<size_t>(i)] =
        first.dy[i] * DerivativeWhere(activation, open);
  }
  return gradient;
}

void CheckStatistics(const Inputs& in, const Results& results) {
  for (int i = 0; i < in.count(); ++i) CheckStatisticsOf(in[i], results.of[i]);
}

void CheckNormalised(const Inputs& in, const NormaliseOptions& options,
                     const Results& results) {
  std::vector<Coefficients> coefficients;
  for (int input = 0; input < in.count(); ++input) {
    coefficients.push_back(
        CoefficientsOf(in[input], options.affine, results.of[input]));
  }
  const Input& first = in.first();
  const Activation activation =
      options.activation ? in.c.activation : Activation{};
  const StoredTolerance tolerance(first, first.out_format);
  for (int64_t i = 0; i < in.c.size(); ++i) {
    const size_t c = first.ChannelOf(i);
    double expected = 0, magnitude = 0;
    for (int input = 0; input < in.count(); ++input) {
      const Coefficients& of = coefficients[static_cast<size_t>(input)];
      const double scaled = (in[input].x[i] - of.mean[c]) * of.a[c];
      expected += scaled + of.bias[c];
      magnitude += std::fabs(scaled) + std::fabs(of.bias[c]);
    }
    if (options.residual) {
      expected += first.z[i];
      magnitude += std::fabs(first.z[i]);
    }
    // No derivative is above 1.2.
    const double y = ValueOf(activation, expected);
    const double error =
        activation.is_piecewise_linear()
            ? 0
            : 0.2 * tolerance(0, magnitude) + CurveError(first) * std::fabs(y);
    CheckNear("y", i, (*results.y)[i], y, tolerance(y, magnitude) + error);
  }
  if (results.mask != nullptr) CheckMask(in, activation, results);
}

void CheckReduced(const Inputs& in, const GatedGradient& e,
                  const Results& results) {
  for (int i = 0; i < in.count(); ++i) {
    const Sums sums = SumsOf(in[i], e);
    CheckVector(in[i], "sum_e", *results.first, sums.e, 1);
    CheckVector(in[i], "sum_e_centred", *results.of[i].second, sums.e_centred,
                1);
  }
  CheckDz(in, e, results);
}

void CheckApplied(const Inputs& in, const GatedGradient& e,
                  const Results& results) {
  for (int i = 0; i < in.count(); ++i) CheckAppliedTo(in[i], e, results.of[i]);
}

void CheckBackward(const Inputs& in, const GatedGradient& e,
                   bool statistics_cotangents, const Results& results) {
  for (int i = 0; i < in.count(); ++i) {
    CheckBackwardOf(in[i], e, statistics_cotangents, *results.first,
                    results.of[i]);
  }
  CheckDz(in, e, results);
}

}  // namespace testing
}  // namespace jax_bnar
