// __nv_bfloat16 as storage, and its conversions; see cuda_fp16.h.

#ifndef CUDA_EMULATION_CUDA_BF16_H_
#define CUDA_EMULATION_CUDA_BF16_H_

#include "cuda_emulation/half_bits.h"
#include "cuda_runtime.h"

struct alignas(2) __nv_bfloat16 {
  __nv_bfloat16() = default;

 private:
  friend __nv_bfloat16 __ushort_as_bfloat16(unsigned short bits);
  friend unsigned short __bfloat16_as_ushort(__nv_bfloat16 h);
  unsigned short bits_;
};
using nv_bfloat16 = __nv_bfloat16;
struct alignas(4) __nv_bfloat162 {
  __nv_bfloat16 x, y;
};

inline __nv_bfloat16 __ushort_as_bfloat16(unsigned short bits) {
  __nv_bfloat16 h;
  h.bits_ = bits;
  return h;
}
inline unsigned short __bfloat16_as_ushort(__nv_bfloat16 h) { return h.bits_; }

inline __nv_bfloat16 __float2bfloat16_rn(float x) {
  return __ushort_as_bfloat16(cuda_emulation::Bfloat16FromFloat(x));
}
inline __nv_bfloat16 __float2bfloat16(float x) {
  return __float2bfloat16_rn(x);
}
inline float __bfloat162float(__nv_bfloat16 h) {
  return cuda_emulation::FloatFromBfloat16(__bfloat16_as_ushort(h));
}

inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) {
  return {__float2bfloat16_rn(x), __float2bfloat16_rn(y)};
}
inline __nv_bfloat162 __float22bfloat162_rn(float2 v) {
  return __floats2bfloat162_rn(v.x, v.y);
}
inline float2 __bfloat1622float2(__nv_bfloat162 h) {
  return make_float2(__bfloat162float(h.x), __bfloat162float(h.y));
}

namespace cuda_emulation {

// Returns NaN if either is NaN. +0 counts as larger than -0.
inline __nv_bfloat16 MaxNan(__nv_bfloat16 a, __nv_bfloat16 b) {
  const float x = __bfloat162float(a), y = __bfloat162float(b);
  if (x != x || y != y) return __ushort_as_bfloat16(0x7fff);
  if (x == y) return std::signbit(x) ? b : a;
  return x < y ? b : a;
}

}  // namespace cuda_emulation

inline __nv_bfloat162 __hmax2_nan(__nv_bfloat162 a, __nv_bfloat162 b) {
  return {cuda_emulation::MaxNan(a.x, b.x), cuda_emulation::MaxNan(a.y, b.y)};
}
// Sets all bits of a half where a is larger than b; NaN is never larger.
inline unsigned __hgt2_mask(__nv_bfloat162 a, __nv_bfloat162 b) {
  return (__bfloat162float(a.x) > __bfloat162float(b.x) ? 0xffffu : 0u) |
         (__bfloat162float(a.y) > __bfloat162float(b.y) ? 0xffff0000u : 0u);
}

#endif  // CUDA_EMULATION_CUDA_BF16_H_
