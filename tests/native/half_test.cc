// Tests conversions of 16-bit floats, the scalar ones of cpu/half.h and those
// in the kernels, against arithmetic in double.

#include "cpu/half.h"

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "cpu/operations.h"
#include "tests/native/array.h"
#include "tests/native/check.h"
#include "tests/native/formats.h"
#include "tests/native/pools.h"

namespace jax_bnar {
namespace testing {

using cpu::BitsToFloat;
using cpu::FloatToHalf;
using cpu::HalfToFloat;
using cpu::IsaName;
namespace {

constexpr int kPatterns = 1 << 16;

// -0.0 differs from 0.0 here, and all NaNs are equal.
bool Same(double a, double b) {
  if (std::isnan(a) || std::isnan(b)) return std::isnan(a) && std::isnan(b);
  return a == b && std::signbit(a) == std::signbit(b);
}

std::string Values(double from, double got, double expected) {
  char text[120];
  std::snprintf(text, sizeof(text), "%a gives %a, not %a", from, got, expected);
  return text;
}

// All stored values, the ties between neighbours, and the floats next to them.
std::vector<float> Probes(DType dtype) {
  std::vector<float> probes;
  const auto add = [&](double value) {
    const float infinity = std::numeric_limits<float>::infinity();
    const float f = static_cast<float>(value);
    for (const float probe :
         {f, std::nextafterf(f, infinity), std::nextafterf(f, -infinity)}) {
      probes.push_back(probe);
      probes.push_back(-probe);
    }
  };
  for (int i = 0; i + 1 < kPatterns / 2; ++i) {
    const double value = DecodeBits(dtype, static_cast<uint16_t>(i));
    const double next = DecodeBits(dtype, static_cast<uint16_t>(i + 1));
    if (!std::isfinite(value)) break;
    add(value);
    if (std::isfinite(next)) add((value + next) / 2);
  }
  const Format format = FormatOf(dtype);
  // Values around the limit at which rounding gives Inf.
  add(format.max * (1 + format.roundoff() / 2));
  add(std::ldexp(1.0, std::ilogb(format.max)) *
      (2 - std::ldexp(1.0, -format.digits)));
  add(std::numeric_limits<float>::max());
  add(std::numeric_limits<float>::infinity());
  add(std::numeric_limits<float>::quiet_NaN());
  // Rounding must not carry a NaN's payload into Inf or 0.
  add(BitsToFloat(0x7fffffff));
  add(BitsToFloat(0x7fc00001));
  return probes;
}

void TestScalarHalf() {
  context = "cpu/half.h";
  for (int i = 0; i < kPatterns; ++i) {
    const uint16_t bits = static_cast<uint16_t>(i);
    const double expected = DecodeHalf(bits);
    const float wide = HalfToFloat(bits);
    BNAR_CHECK(Same(wide, expected), Values(i, wide, expected));
    BNAR_CHECK(std::isnan(wide) || FloatToHalf(wide) == bits,
               "the round trip changes " + std::to_string(i));
    BNAR_CHECK(!std::isnan(wide) || std::isnan(HalfToFloat(FloatToHalf(wide))),
               "a NaN became a number: " + std::to_string(i));
  }
  for (const float probe : Probes(DType::kFloat16)) {
    const double expected = RoundTo(FormatOf(DType::kFloat16), probe);
    const double got = DecodeHalf(FloatToHalf(probe));
    BNAR_CHECK(Same(got, expected), Values(probe, got, expected));
  }
}

// What the kernels store for a float. For bfloat16, the instruction of
// AVX512-BF16 treats subnormals as 0.
double Stored(DType dtype, double value) {
  const bool flushes =
      dtype == DType::kBFloat16 && std::strcmp(IsaName(), "avx512bf16") == 0;
  if (flushes && std::fabs(value) < 0x1p-126) return std::copysign(0.0, value);
  return RoundTo(FormatOf(dtype), value);
}

// y = (x - mean) * a + bias for one row, with a = 1.
void Normalise(DType dtype, const Array& x, const Array& mean,
               const Array& bias, Array* y) {
  const int64_t channels = x.size();
  Array var(DType::kFloat32, channels, 0);
  for (int64_t i = 0; i < channels; ++i) var.Set(i, 1);
  CallerOnly pool;
  cpu::Normalise<1>(pool, {{1, 1, channels, 1}, dtype},
                    {{x.data()}, nullptr, y->data(), nullptr, {}},
                    {{AffineOperands{{}, {bias.data(), 1}, 1e-30}}},
                    {{VectorOperand{mean.data(), 1}}},
                    {{VectorOperand{var.data(), 1}}});
}

// Tests the kernels' loads: x passes through unchanged.
void TestLoads(DType dtype) {
  context = std::string("loads of ") + FormatOf(dtype).name;
  Array x(dtype, kPatterns, 0);
  Array zero(DType::kFloat32, kPatterns, 0);
  for (int i = 0; i < kPatterns; ++i) {
    const uint16_t bits = static_cast<uint16_t>(i);
    std::memcpy(static_cast<uint16_t*>(x.data()) + i, &bits, sizeof(bits));
    zero.Set(i, 0);
  }
  Array y(dtype, x.size(), 0);
  Normalise(dtype, x, zero, zero, &y);
  for (int i = 0; i < kPatterns; ++i) {
    // Adding 0 makes -0.0 positive.
    const double expected = Stored(dtype, x[i] + 0.0);
    BNAR_CHECK(Same(y[i], expected), Values(i, y[i], expected));
  }
}

// Tests the kernels' stores: y is the rounded bias.
void TestStores(DType dtype) {
  context = std::string("stores of ") + FormatOf(dtype).name;
  const std::vector<float> probes = Probes(dtype);
  const int64_t size = static_cast<int64_t>(probes.size());
  Array x(dtype, size, 0);
  Array zero(DType::kFloat32, size, 0), bias(DType::kFloat32, size, 0);
  for (int64_t i = 0; i < size; ++i) {
    x.Set(i, 0);
    zero.Set(i, 0);
    bias.Set(i, probes[static_cast<size_t>(i)]);
  }
  Array y(dtype, x.size(), 0);
  Normalise(dtype, x, zero, bias, &y);
  for (int64_t i = 0; i < size; ++i) {
    const double expected = Stored(dtype, bias[i] + 0.0);
    BNAR_CHECK(Same(y[i], expected), Values(bias[i], y[i], expected));
  }
}

}  // namespace
}  // namespace testing
}  // namespace jax_bnar

int main() {
  using namespace jax_bnar;
  using namespace jax_bnar::testing;
  SkipUnlessWantedIsa();
  TestScalarHalf();
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
    TestLoads(dtype);
    TestStores(dtype);
  }
  return Finish();
}
