// The storage types of 16-bit floats, and scalar conversions of float16 on any
// processor. The kernels convert vectors (cpu/isa/convert.h).

#ifndef JAX_BNAR_CPU_HALF_H_
#define JAX_BNAR_CPU_HALF_H_

#include <cstdint>
#include <cstring>

namespace jax_bnar::cpu {

// Storage types. They hold only bits, which loads and stores convert.
struct Float16 {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};

inline float BitsToFloat(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

inline uint32_t FloatToBits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

inline float HalfToFloat(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16;
  const uint32_t magnitude = half & 0x7fffu;
  if (magnitude >= 0x7c00u) {  // Inf or NaN
    return BitsToFloat(sign | 0x7f800000u | ((magnitude & 0x3ffu) << 13));
  }
  if (magnitude >= 0x0400u) {
    return BitsToFloat(sign | ((magnitude << 13) + 0x38000000u));
  }
  // Subnormal: magnitude * 2^-24 is exact in float.
  const float value = static_cast<float>(magnitude) * 0x1p-24f;
  return BitsToFloat(sign | FloatToBits(value));
}

// Rounds to nearest, ties to even.
inline uint16_t FloatToHalf(float value) {
  const uint32_t bits = FloatToBits(value);
  const uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000u);
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return sign | 0x7e00u;   // NaN
  if (magnitude >= 0x477ff000u) return sign | 0x7c00u;  // rounds to Inf
  if (magnitude >= 0x38800000u) {
    const uint32_t rebased = magnitude - 0x38000000u;
    return static_cast<uint16_t>(
        sign | ((rebased + 0xfffu + ((rebased >> 13) & 1u)) >> 13));
  }
  // Subnormal half: adding 0.5 leaves the rounded multiple of 2^-24 in the low
  // bits of the sum.
  const float shifted = BitsToFloat(magnitude) + 0.5f;
  return static_cast<uint16_t>(sign | (FloatToBits(shifted) - 0x3f000000u));
}

}  // namespace jax_bnar::cpu

#endif  // JAX_BNAR_CPU_HALF_H_
