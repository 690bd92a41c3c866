// The bits of half and bfloat16 numbers. Conversions from float round to
// nearest even, subnormal numbers are kept, and NaN becomes 0x7fff as on a
// device.

#ifndef CUDA_EMULATION_HALF_BITS_H_
#define CUDA_EMULATION_HALF_BITS_H_

#include <cstdint>

#include "cuda_emulation/arithmetic.h"

namespace cuda_emulation {

inline unsigned short HalfFromFloat(float x) {
  const std::uint32_t bits = BitCast<std::uint32_t>(x);
  const std::uint32_t sign = bits >> 16 & 0x8000;
  const std::uint32_t magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) return 0x7fff;
  std::uint32_t half;
  if (magnitude >= 0x38800000) {  // 2^-14, the smallest normal half
    // The exponents' biases differ by 112. A carry out of the mantissa raises
    // the exponent, as it should.
    const std::uint32_t odd = magnitude >> 13 & 1;
    half = (magnitude - (112u << 23) + 0xfff + odd) >> 13;
    if (half > 0x7c00) half = 0x7c00;
  } else {
    // The last bit of 0.5 + |x| stands for 2^-24, as that of a subnormal half
    // does, and the addition rounds to nearest even.
    half =
        BitCast<std::uint32_t>(BitCast<float>(magnitude) + 0.5f) - 0x3f000000;
  }
  return static_cast<unsigned short>(sign | half);
}

inline float FloatFromHalf(unsigned short half) {
  const std::uint32_t sign = (half & 0x8000u) << 16;
  const std::uint32_t magnitude = half & 0x7fffu;
  std::uint32_t bits;
  if (magnitude >= 0x7c00) {
    bits = 0x7f800000 | (magnitude & 0x3ff) << 13;
  } else if (magnitude >= 0x400) {
    bits = (magnitude << 13) + (112u << 23);
  } else {
    bits = BitCast<std::uint32_t>(static_cast<float>(magnitude) * 0x1p-24f);
  }
  return BitCast<float>(sign | bits);
}

inline unsigned short Bfloat16FromFloat(float x) {
  const std::uint32_t bits = BitCast<std::uint32_t>(x);
  if ((bits & 0x7fffffff) > 0x7f800000) return 0x7fff;
  return static_cast<unsigned short>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

inline float FloatFromBfloat16(unsigned short bits) {
  return BitCast<float>(std::uint32_t{bits} << 16);
}

}  // namespace cuda_emulation

#endif  // CUDA_EMULATION_HALF_BITS_H_
