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

// The tolerance of a stored sum, computed in the accumulation dtype from terms
// with the given total magnitude.
class StoredTolerance {
 public:
  explicit StoredTolerance(const Inputs& in)
      : of_terms_(kRoundings * in.accumulator.roundoff()),
        of_storing_(in.format.roundoff() * (1 + 1e-6)),
        least_(in.format.smallest_subnormal()) {}

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
  for (double& value : rstd) value = 1 / std::sqrt(value + Inputs::kEpsilon);
  return rstd;
}

void CheckVector(const Inputs& in, const char* what, const Array& got,
                 const std::vector<double>& expected, double roundings) {
  for (int64_t i = 0; i < got.size(); ++i) {
    const double value = expected[static_cast<size_t>(i)];
    CheckNear(what, i, got[i], value,
              roundings * in.accumulator.roundoff() * std::fabs(value));
  }
}

struct Sums {
  std::vector<double> e, e_centred;
};

// These sums are exact, because the inputs are chosen so.
Sums SumsOf(const Inputs& in, const std::vector<double>& e) {
  const size_t channels =
      static_cast<size_t>(in.c.shape.groups * in.c.shape.channels);
  Sums sums{std::vector<double>(channels), std::vector<double>(channels)};
  const std::vector<double> mean = in.Spread(in.mean);
  for (int64_t i = 0; i < in.c.size(); ++i) {
    const size_t c = in.ChannelOf(i);
    const double gradient = e[static_cast<size_t>(i)];
    sums.e[c] += gradient;
    sums.e_centred[c] += gradient * (in.x[i] - mean[c]);
  }
  return sums;
}

void CheckDz(const Inputs& in, const std::vector<double>& e,
             const Results& results) {
  if (results.dz == nullptr) return;
  for (int64_t i = 0; i < in.c.size(); ++i) {
    CheckNear("dz", i, (*results.dz)[i], e[static_cast<size_t>(i)], 0);
  }
}

void CheckMask(const Inputs& in, const Results& results) {
  const uint8_t* mask = results.mask->data();
  for (int64_t i = 0; i < in.c.size(); ++i) {
    BNAR_CHECK(in.c.MaskBit(mask, i) == ((*results.y)[i] > 0),
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

}  // namespace

std::vector<double> GatedGradient(Platform& platform, const Inputs& in,
                                  Gate gate) {
  std::vector<double> e(static_cast<size_t>(in.c.size()));
  Results forward;
  if (gate == Gate::kX) {
    // CheckNormalised checks what forward stores.
    forward = CallNormalise(platform, in, {true, false, false, true});
  }
  for (int64_t i = 0; i < in.c.size(); ++i) {
    bool open = true;
    if (gate == Gate::kY) open = in.y[i] > 0;
    if (gate == Gate::kMask) open = in.c.MaskBit(in.mask.data(), i);
    if (gate == Gate::kX) open = (*forward.y)[i] > 0;
    e[static_cast<size_t>(i)] = open ? in.dy[i] : 0.0;
  }
  return e;
}

void CheckStatistics(const Inputs& in, const Results& results) {
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
    CheckNear("mean", i, (*results.mean)[i], mean[c],
              2 * in.accumulator.roundoff() * std::fabs(mean[c]) + 0x1p-49);
    CheckNear("var", i, (*results.var)[i], var[c],
              roundings * in.accumulator.roundoff() * (var[c] + 1e-6));
  }
}

void CheckNormalised(const Inputs& in, const NormaliseOptions& options,
                     const Results& results) {
  const bool own_statistics = results.mean != nullptr;
  const std::vector<double> mean =
      in.Spread(own_statistics ? *results.mean : in.mean);
  const std::vector<double> rstd =
      RstdOf(in.Spread(own_statistics ? *results.var : in.var));
  const std::vector<double> scales = in.Spread(in.scale);
  const std::vector<double> biases = in.Spread(in.bias);
  const StoredTolerance tolerance(in);
  for (int64_t i = 0; i < in.c.size(); ++i) {
    const size_t c = in.ChannelOf(i);
    const double scale = options.affine ? scales[c] : 1.0;
    const double bias = options.affine ? biases[c] : 0.0;
    const double z = options.residual ? in.z[i] : 0.0;
    const double scaled = (in.x[i] - mean[c]) * scale * rstd[c];
    double expected = scaled + bias + z;
    if (options.relu && expected < 0) expected = 0;
    CheckNear("y", i, (*results.y)[i], expected,
              tolerance(expected,
                        std::fabs(scaled) + std::fabs(bias) + std::fabs(z)));
  }
  if (results.mask != nullptr) CheckMask(in, results);
}

void CheckDualNormalised(const Inputs& in1, const Inputs& in2, bool affine,
                         const Results& first, const Results& second) {
  const bool own_statistics = first.mean != nullptr;
  std::vector<double> mean[2], a[2], bias[2];
  for (int input = 0; input < 2; ++input) {
    const Inputs& in = input == 0 ? in1 : in2;
    const Results& results = input == 0 ? first : second;
    mean[input] = in.Spread(own_statistics ? *results.mean : in.mean);
    a[input] = RstdOf(in.Spread(own_statistics ? *results.var : in.var));
    bias[input] = in.Spread(in.bias);
    const std::vector<double> scale = in.Spread(in.scale);
    for (size_t c = 0; c < scale.size(); ++c) {
      if (affine) a[input][c] *= scale[c];
      if (!affine) bias[input][c] = 0;
    }
  }
  const StoredTolerance tolerance(in1);
  for (int64_t i = 0; i < in1.c.size(); ++i) {
    const size_t c = in1.ChannelOf(i);
    const double of_x1 = (in1.x[i] - mean[0][c]) * a[0][c];
    const double of_x2 = (in2.x[i] - mean[1][c]) * a[1][c];
    const double sum = of_x1 + bias[0][c] + of_x2 + bias[1][c];
    const double expected = sum < 0 ? 0 : sum;
    CheckNear(
        "y", i, (*first.y)[i], expected,
        tolerance(expected, std::fabs(of_x1) + std::fabs(of_x2) +
                                std::fabs(bias[0][c]) + std::fabs(bias[1][c])));
  }
  if (first.mask != nullptr) CheckMask(in1, first);
}

void CheckReduced(const Inputs& in, const std::vector<double>& e,
                  const Results& results) {
  const Sums sums = SumsOf(in, e);
  CheckVector(in, "sum_e", *results.first, sums.e, 1);
  CheckVector(in, "sum_e_centred", *results.second, sums.e_centred, 1);
  CheckDz(in, e, results);
}

void CheckApplied(const Inputs& in, const std::vector<double>& e,
                  const Results& results) {
  const std::vector<double> a = in.Spread(in.a), b = in.Spread(in.b),
                            k = in.Spread(in.k), mean = in.Spread(in.mean);
  const StoredTolerance tolerance(in);
  for (int64_t i = 0; i < in.c.size(); ++i) {
    const size_t c = in.ChannelOf(i);
    const double first = a[c] * e[static_cast<size_t>(i)];
    const double second = b[c] * (in.x[i] - mean[c]);
    const double third = k[c];
    const double expected = first + second + third;
    CheckNear("dx", i, (*results.dx)[i], expected,
              tolerance(expected, std::fabs(first) + std::fabs(second) +
                                      std::fabs(third)));
  }
}

void CheckBackward(const Inputs& in, const std::vector<double>& e,
                   bool statistics_cotangents, const Results& results) {
  const Sums sums = SumsOf(in, e);
  const double count = static_cast<double>(in.c.shape.count());
  const std::vector<double> rstds = RstdOf(in.Spread(in.var)),
                            mean = in.Spread(in.mean),
                            scale = in.Spread(in.scale),
                            dmean = in.Spread(in.dmean),
                            dvar = in.Spread(in.dvar);
  std::vector<double> dscale(sums.e_centred);
  for (size_t c = 0; c < dscale.size(); ++c) dscale[c] *= rstds[c];
  CheckVector(in, "dbias", *results.first, sums.e, 1);
  CheckVector(in, "dscale", *results.second, dscale, 6);
  CheckDz(in, e, results);
  const double present = statistics_cotangents ? 1 : 0;
  const StoredTolerance tolerance(in);
  for (int64_t i = 0; i < in.c.size(); ++i) {
    const size_t c = in.ChannelOf(i);
    const double rstd = rstds[c];
    const double a = scale[c] * rstd;
    const double centred = in.x[i] - mean[c];
    const double from_dy = a * e[static_cast<size_t>(i)];
    const double from_sum = a * sums.e[c] / count;
    const double from_centred =
        a * (rstd * (rstd * sums.e_centred[c])) / count * centred;
    const double from_dmean = present * dmean[c] / count;
    const double from_dvar = present * 2 * dvar[c] * centred / count;
    const double expected =
        from_dy - from_sum - from_centred + from_dmean + from_dvar;
    const double magnitude = std::fabs(from_dy) + std::fabs(from_sum) +
                             std::fabs(from_centred) + std::fabs(from_dmean) +
                             std::fabs(from_dvar);
    CheckNear("dx", i, (*results.dx)[i], expected,
              tolerance(expected, magnitude));
  }
}

}  // namespace testing
}  // namespace jax_bnar
