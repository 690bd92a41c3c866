// CUDA's arithmetic intrinsics, and min and max in the global namespace.

#ifndef CUDA_EMULATION_ARITHMETIC_H_
#define CUDA_EMULATION_ARITHMETIC_H_

#include <math.h>

#include <cmath>
#include <cstring>

namespace cuda_emulation {

template <typename To, typename From>
To BitCast(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}

}  // namespace cuda_emulation

inline unsigned __float_as_uint(float x) {
  return cuda_emulation::BitCast<unsigned>(x);
}
inline float __uint_as_float(unsigned x) {
  return cuda_emulation::BitCast<float>(x);
}
inline int __float_as_int(float x) { return cuda_emulation::BitCast<int>(x); }
inline float __int_as_float(int x) { return cuda_emulation::BitCast<float>(x); }
inline long long __double_as_longlong(double x) {
  return cuda_emulation::BitCast<long long>(x);
}
inline double __longlong_as_double(long long x) {
  return cuda_emulation::BitCast<double>(x);
}

inline float __fmaf_rn(float x, float y, float z) { return std::fma(x, y, z); }
inline double __fma_rn(double x, double y, double z) {
  return std::fma(x, y, z);
}

// A compiler that contracts to fused multiply-adds must not do so with these
// operations, so the empty assembly hides where the value comes from.
#define CUDA_EMULATION_ROUNDED(name, type, operation) \
  inline type name(type x, type y) {                  \
    type result = x operation y;                      \
    __asm__("" : "+m"(result));                       \
    return result;                                    \
  }
CUDA_EMULATION_ROUNDED(__fadd_rn, float, +)
CUDA_EMULATION_ROUNDED(__fsub_rn, float, -)
CUDA_EMULATION_ROUNDED(__fmul_rn, float, *)
CUDA_EMULATION_ROUNDED(__fdiv_rn, float, /)
CUDA_EMULATION_ROUNDED(__dadd_rn, double, +)
CUDA_EMULATION_ROUNDED(__dsub_rn, double, -)
CUDA_EMULATION_ROUNDED(__dmul_rn, double, *)
CUDA_EMULATION_ROUNDED(__ddiv_rn, double, /)
#undef CUDA_EMULATION_ROUNDED
inline float __fsqrt_rn(float x) { return std::sqrt(x); }
inline double __dsqrt_rn(double x) { return std::sqrt(x); }

inline double rsqrt(double x) { return 1.0 / std::sqrt(x); }
inline float rsqrtf(float x) {
  return static_cast<float>(1.0 / std::sqrt(static_cast<double>(x)));
}
// A device rounds the product as well, and then has errors of two more ulp here
// and in the quotient. (PTX: ex2.approx, div.approx)
inline float __expf(float x) { return std::exp2(x * 1.44269504f); }
inline float __fdividef(float a, float b) {
  return std::fabs(b) > 0x1p126f ? a * 0.0f : a / b;
}

// Byte i of the result is the byte of (y, x) that digit i of the selector
// names.
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
  const unsigned long long bytes = static_cast<unsigned long long>(y) << 32 | x;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i) {
    const unsigned digit = selector >> 4 * i & 7u;
    result |= static_cast<unsigned>(bytes >> 8 * digit & 0xffu) << 8 * i;
  }
  return result;
}

inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __ffsll(long long x) { return __builtin_ffsll(x); }
inline int __clz(int x) {
  return x == 0 ? 32 : __builtin_clz(static_cast<unsigned>(x));
}
inline int __clzll(long long x) {
  return x == 0 ? 64 : __builtin_clzll(static_cast<unsigned long long>(x));
}

#define CUDA_EMULATION_MIN_MAX(result, type1, type2)       \
  inline constexpr result min(type1 a, type2 b) {          \
    return static_cast<result>(b) < static_cast<result>(a) \
               ? static_cast<result>(b)                    \
               : static_cast<result>(a);                   \
  }                                                        \
  inline constexpr result max(type1 a, type2 b) {          \
    return static_cast<result>(a) < static_cast<result>(b) \
               ? static_cast<result>(b)                    \
               : static_cast<result>(a);                   \
  }
#define CUDA_EMULATION_MIN_MAX_MIXED(result, other) \
  CUDA_EMULATION_MIN_MAX(other, other, other)       \
  CUDA_EMULATION_MIN_MAX(result, result, result)    \
  CUDA_EMULATION_MIN_MAX(result, result, other)     \
  CUDA_EMULATION_MIN_MAX(result, other, result)
CUDA_EMULATION_MIN_MAX_MIXED(unsigned, int)
CUDA_EMULATION_MIN_MAX_MIXED(unsigned long, long)
CUDA_EMULATION_MIN_MAX_MIXED(unsigned long long, long long)
#undef CUDA_EMULATION_MIN_MAX
#undef CUDA_EMULATION_MIN_MAX_MIXED

// Given a NaN and a number, these return the number.
inline float min(float a, float b) { return std::fmin(a, b); }
inline float max(float a, float b) { return std::fmax(a, b); }
inline double min(double a, double b) { return std::fmin(a, b); }
inline double max(double a, double b) { return std::fmax(a, b); }
inline double min(float a, double b) { return std::fmin(double{a}, b); }
inline double max(float a, double b) { return std::fmax(double{a}, b); }
inline double min(double a, float b) { return std::fmin(a, double{b}); }
inline double max(double a, float b) { return std::fmax(a, double{b}); }

#endif  // CUDA_EMULATION_ARITHMETIC_H_
