// Tests of the conversions of half and bfloat16 numbers.

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "tests/native/check.h"

namespace jax_bnar {
namespace testing {
namespace {

struct Half {
  static constexpr int kMantissaBits = 10;
  static constexpr int kMinExponent = -14;
  static constexpr int kMaxExponent = 15;
  static float ToFloat(unsigned short b) {
    return __half2float(__ushort_as_half(b));
  }
  static unsigned short FromFloat(float x) {
    return __half_as_ushort(__float2half_rn(x));
  }
};

struct Bfloat16 {
  static constexpr int kMantissaBits = 7;
  static constexpr int kMinExponent = -126;
  static constexpr int kMaxExponent = 127;
  static float ToFloat(unsigned short b) {
    return __bfloat162float(__ushort_as_bfloat16(b));
  }
  static unsigned short FromFloat(float x) {
    return __bfloat16_as_ushort(__float2bfloat16_rn(x));
  }
};

// What the bits mean, from the definition of the format.
template <typename Format>
double Value(unsigned bits) {
  const unsigned mantissa = bits & ((1u << Format::kMantissaBits) - 1);
  const int exponent = static_cast<int>(bits >> Format::kMantissaBits) +
                       Format::kMinExponent - 1;
  if (exponent < Format::kMinExponent) {
    return std::ldexp(mantissa, Format::kMinExponent - Format::kMantissaBits);
  }
  return std::ldexp(mantissa + (1u << Format::kMantissaBits),
                    exponent - Format::kMantissaBits);
}

template <typename Format>
void Check(float x, unsigned expected) {
  for (const unsigned sign : {0u, 0x8000u}) {
    const unsigned got = Format::FromFloat(sign == 0 ? x : -x);
    BNAR_CHECK(got == (expected | sign),
               std::to_string(x) + " gives " + std::to_string(got));
  }
}

// Tests all numbers of the format, and the floats around each boundary between
// two neighbours. If those are right, rounding is right everywhere, because it
// is monotonic.
template <typename Format>
void Test() {
  const auto infinity =
      static_cast<unsigned>(Format::kMaxExponent - Format::kMinExponent + 2)
      << Format::kMantissaBits;
  const float inf = std::numeric_limits<float>::infinity();
  for (unsigned bits = 0; bits < infinity; ++bits) {
    const double value = Value<Format>(bits);
    const auto x = static_cast<float>(value);
    BNAR_CHECK(Format::ToFloat(static_cast<unsigned short>(bits)) == value,
               std::to_string(bits));
    BNAR_CHECK(
        Format::ToFloat(static_cast<unsigned short>(bits | 0x8000)) == -value,
        std::to_string(bits));
    Check<Format>(x, bits);
    // Beyond the largest number, rounding works as if the next number were
    // finite.
    const double next = bits + 1 < infinity
                            ? Value<Format>(bits + 1)
                            : std::ldexp(1.0, Format::kMaxExponent + 1);
    const auto middle = static_cast<float>((value + next) / 2);
    Check<Format>(middle, bits % 2 == 0 ? bits : bits + 1);
    Check<Format>(std::nextafter(middle, 0.0f), bits);
    Check<Format>(std::nextafter(middle, inf), bits + 1);
  }
  Check<Format>(inf, infinity);
  Check<Format>(std::numeric_limits<float>::max(), infinity);
  Check<Format>(std::numeric_limits<float>::denorm_min(), 0);
  for (unsigned bits = infinity + 1; bits < 0x8000; ++bits) {
    BNAR_CHECK(std::isnan(Format::ToFloat(static_cast<unsigned short>(bits))),
               std::to_string(bits));
  }
  for (const unsigned nan : {0x7fc00000u, 0x7f800001u, 0xffffffffu}) {
    BNAR_CHECK(Format::FromFloat(__uint_as_float(nan)) == 0x7fff,
               std::to_string(nan));
  }
  BNAR_CHECK(std::isinf(Format::ToFloat(static_cast<unsigned short>(infinity))),
             "");
}

// Tests the functions that compare, clamp and select two numbers or four bytes
// at once.
template <typename Pair>
Pair PairOf(unsigned bits) {
  Pair pair;
  std::memcpy(&pair, &bits, sizeof(pair));
  return pair;
}

template <typename Pair>
unsigned BitsOf(Pair pair) {
  unsigned bits;
  std::memcpy(&bits, &pair, sizeof(bits));
  return bits;
}

template <typename Pair>
void TestPairs(unsigned one) {
  const auto zero = PairOf<Pair>(0);
  const auto relu = [&](unsigned bits) {
    return BitsOf(__hmax2_nan(PairOf<Pair>(bits), zero));
  };
  const auto above = [&](unsigned bits) {
    return __hgt2_mask(PairOf<Pair>(bits), zero);
  };
  BNAR_CHECK(relu(one << 16 | one) == (one << 16 | one), "both positive");
  BNAR_CHECK(relu(0x80000000u | one << 16 | one) == one, "upper negative");
  BNAR_CHECK(relu(0x80008000u) == 0, "negative zeros");
  BNAR_CHECK(relu(0xffff0001u) == 0x7fff0001u, "NaN, and the least number");
  BNAR_CHECK(above(one) == 0x0000ffffu, "lower positive");
  BNAR_CHECK(above(one << 16 | 0x8000u | one) == 0xffff0000u, "upper positive");
  BNAR_CHECK(above(0x00018000u) == 0xffff0000u, "the least number");
  BNAR_CHECK(above(0x7fff0000u) == 0, "NaN and 0");
}

void TestBytes() {
  BNAR_CHECK(__byte_perm(0x33221100u, 0x77665544u, 0x6420) == 0x66442200u,
             "even bytes");
  BNAR_CHECK(__byte_perm(0x33221100u, 0x77665544u, 0x0f73) == 0x00777733u,
             "the highest bit of a digit does not count");
}

static_assert(sizeof(__half) == 2 && sizeof(__half2) == 4);
static_assert(sizeof(__nv_bfloat16) == 2 && sizeof(__nv_bfloat162) == 4);

}  // namespace
}  // namespace testing
}  // namespace jax_bnar

int main() {
  jax_bnar::testing::context = "half";
  jax_bnar::testing::Test<jax_bnar::testing::Half>();
  jax_bnar::testing::context = "bfloat16";
  jax_bnar::testing::Test<jax_bnar::testing::Bfloat16>();
  jax_bnar::testing::context = "pairs";
  jax_bnar::testing::TestPairs<__half2>(0x3c00);
  jax_bnar::testing::TestPairs<__nv_bfloat162>(0x3f80);
  jax_bnar::testing::TestBytes();
  return jax_bnar::testing::Finish();
}
