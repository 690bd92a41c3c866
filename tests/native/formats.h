// Floating-point formats in double arithmetic: slow, simple, and independent of
// cpu/half.h, which they are used to test.

#ifndef JAX_BNAR_TESTS_NATIVE_FORMATS_H_
#define JAX_BNAR_TESTS_NATIVE_FORMATS_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "cpu/tile_kernels.h"

namespace jax_bnar {
namespace testing {

template <typename T>
T LoadAs(const void* source) {
  T value;
  std::memcpy(&value, source, sizeof(value));
  return value;
}

// libm's functions would take longer than the kernels under test. These work
// only for normal numbers.
inline double PowerOfTwo(int exponent) {
  const uint64_t bits = static_cast<uint64_t>(exponent + 1023) << 52;
  return LoadAs<double>(&bits);
}
inline int ExponentOf(double value) {
  return static_cast<int>(LoadAs<uint64_t>(&value) >> 52 & 0x7ff) - 1023;
}

struct Format {
  const char* name;
  int item_size;
  int digits;        // of the significand, including the hidden one
  int min_exponent;  // of the smallest normal number
  double max;

  // The largest relative error of a rounding.
  double roundoff() const { return std::ldexp(1.0, -digits); }
  double smallest_subnormal() const {
    return std::ldexp(1.0, min_exponent - digits + 1);
  }
};

inline Format FormatOf(DType dtype) {
  switch (dtype) {
    case DType::kFloat16:
      return {"float16", 2, 11, -14, 65504.0};
    case DType::kBFloat16:
      return {"bfloat16", 2, 8, -126, 0x1.fep127};
    case DType::kFloat32:
      return {"float32", 4, 24, -126, std::numeric_limits<float>::max()};
    default:
      return {"float64", 8, 53, -1022, std::numeric_limits<double>::max()};
  }
}

inline DType AccumulatorOf(DType dtype) {
  return dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
}

// Rounds to nearest, ties to even.
inline double RoundTo(const Format& format, double value) {
  if (format.digits == 53 || !std::isfinite(value) || value == 0) return value;
  const int exponent = std::max(ExponentOf(value), format.min_exponent);
  const double quantum = PowerOfTwo(exponent - format.digits + 1);
  const double rounded = std::nearbyint(value / quantum) * quantum;
  if (std::fabs(rounded) > format.max) {
    return std::copysign(std::numeric_limits<double>::infinity(), value);
  }
  return rounded;
}

inline uint16_t EncodeHalf(double value) {
  const uint16_t sign = std::signbit(value) ? 0x8000 : 0;
  const double magnitude = std::fabs(value);
  if (std::isnan(value)) return 0x7e00;
  if (std::isinf(value)) return sign | 0x7c00;
  if (magnitude < 0x1p-14) {
    return static_cast<uint16_t>(sign | static_cast<int>(magnitude * 0x1p24));
  }
  const int exponent = ExponentOf(magnitude);
  const int significand =
      static_cast<int>(magnitude * PowerOfTwo(10 - exponent)) - 1024;
  return static_cast<uint16_t>(sign | ((exponent + 15) << 10) | significand);
}

inline double DecodeHalf(uint16_t bits) {
  const int exponent = (bits >> 10) & 31;
  const int significand = bits & 1023;
  double magnitude;
  if (exponent == 31) {
    magnitude = significand == 0 ? std::numeric_limits<double>::infinity()
                                 : std::numeric_limits<double>::quiet_NaN();
  } else if (exponent == 0) {
    magnitude = std::ldexp(significand, -24);
  } else {
    magnitude = std::ldexp(1024 + significand, exponent - 25);
  }
  return (bits & 0x8000) != 0 ? -magnitude : magnitude;
}

inline uint16_t EncodeBFloat16(double value) {
  const float single = static_cast<float>(value);
  return static_cast<uint16_t>(LoadAs<uint32_t>(&single) >> 16);
}

inline double DecodeBFloat16(uint16_t half) {
  const uint32_t bits = static_cast<uint32_t>(half) << 16;
  return LoadAs<float>(&bits);
}

// Stores one element; `value` must be representable.
inline void Encode(DType dtype, double value, void* target) {
  if (dtype == DType::kFloat64) {
    std::memcpy(target, &value, sizeof(value));
  } else if (dtype == DType::kFloat32) {
    const float single = static_cast<float>(value);
    std::memcpy(target, &single, sizeof(single));
  } else {
    const uint16_t bits =
        dtype == DType::kFloat16 ? EncodeHalf(value) : EncodeBFloat16(value);
    std::memcpy(target, &bits, sizeof(bits));
  }
}

// Decodes an element of a 16-bit dtype.
inline double DecodeBits(DType dtype, uint16_t bits) {
  if (dtype == DType::kBFloat16) return DecodeBFloat16(bits);
  static const std::vector<double> table = [] {
    std::vector<double> values(1 << 16);
    for (int i = 0; i < 1 << 16; ++i) {
      values[static_cast<size_t>(i)] = DecodeHalf(static_cast<uint16_t>(i));
    }
    return values;
  }();
  return table[bits];
}

inline double Decode(DType dtype, const void* source) {
  if (dtype == DType::kFloat64) return LoadAs<double>(source);
  if (dtype == DType::kFloat32) return LoadAs<float>(source);
  return DecodeBits(dtype, LoadAs<uint16_t>(source));
}

}  // namespace testing
}  // namespace jax_bnar

#endif  // JAX_BNAR_TESTS_NATIVE_FORMATS_H_
