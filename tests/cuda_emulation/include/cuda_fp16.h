// __half as storage, and its conversions. CUDA's arithmetic on __half and its
// implicit conversions are left out: going through float, they would compile
// but round differently.

#ifndef CUDA_EMULATION_CUDA_FP16_H_
#define CUDA_EMULATION_CUDA_FP16_H_

#include "cuda_emulation/half_bits.h"
#include "cuda_runtime.h"

struct alignas(2) __half {
  __half() = default;

 private:
  friend __half __ushort_as_half(unsigned short bits);
  friend unsigned short __half_as_ushort(__half h);
  unsigned short bits_;
};
using half = __half;
struct alignas(4) __half2 {
  __half x, y;
};

inline __half __ushort_as_half(unsigned short bits) {
  __half h;
  h.bits_ = bits;
  return h;
}
inline unsigned short __half_as_ushort(__half h) { return h.bits_; }

inline __half __float2half_rn(float x) {
  return __ushort_as_half(cuda_emulation::HalfFromFloat(x));
}
inline __half __float2half(float x) { return __float2half_rn(x); }
inline float __half2float(__half h) {
  return cuda_emulation::FloatFromHalf(__half_as_ushort(h));
}

inline __half2 __floats2half2_rn(float x, float y) {
  return {__float2half_rn(x), __float2half_rn(y)};
}
inline __half2 __float22half2_rn(float2 v) {
  return __floats2half2_rn(v.x, v.y);
}
inline float2 __half22float2(__half2 h) {
  return make_float2(__half2float(h.x), __half2float(h.y));
}

namespace cuda_emulation {

// Returns NaN if either is NaN. +0 counts as larger than -0.
inline __half MaxNan(__half a, __half b) {
  const float x = __half2float(a), y = __half2float(b);
  if (x != x || y != y) return __ushort_as_half(0x7fff);
  if (x == y) return std::signbit(x) ? b : a;
  return x < y ? b : a;
}

}  // namespace cuda_emulation

inline __half2 __hmax2_nan(__half2 a, __half2 b) {
  return {cuda_emulation::MaxNan(a.x, b.x), cuda_emulation::MaxNan(a.y, b.y)};
}
// Sets all bits of a half where a is larger than b; NaN is never larger.
inline unsigned __hgt2_mask(__half2 a, __half2 b) {
  return (__half2float(a.x) > __half2float(b.x) ? 0xffffu : 0u) |
         (__half2float(a.y) > __half2float(b.y) ? 0xffff0000u : 0u);
}

#endif  // CUDA_EMULATION_CUDA_FP16_H_
