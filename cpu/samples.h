// Samples a few of many elements, of which one near the mean is taken.
//
// Everything here is always inlined. Otherwise the linker could use what was
// compiled for one instruction set (see cpu/isa/simd.h) for all of them.

#ifndef JAX_BNAR_CPU_SAMPLES_H_
#define JAX_BNAR_CPU_SAMPLES_H_

#include <cstdint>

namespace jax_bnar::cpu {

// The number is odd, so that the median is one of the elements. Sums around an
// element are exact where those of the elements are, and 0 if all elements are
// equal.
constexpr int kSamples = 5;

// The index of sample i among `count` elements. The positions are multiples of
// the golden ratio, modulo 1 and in ascending order. They avoid the ends and
// equal steps, because data have borders and periods (padding, the first token
// of each example).
__attribute__((always_inline)) inline int64_t SampleAt(int i, int64_t count) {
  constexpr int64_t kOf1024[kSamples] = {93, 241, 483, 633, 875};
  return count / 1024 * kOf1024[i] + count % 1024 * kOf1024[i] / 1024;
}

template <typename A>
__attribute__((always_inline)) inline A Lower(A a, A b) {
  return a < b ? a : b;
}

template <typename A>
__attribute__((always_inline)) inline A Higher(A a, A b) {
  return a < b ? b : a;
}

// The median of the samples, or 0 if it is not finite.
template <typename A>
__attribute__((always_inline)) inline A FiniteMedian(const A* s) {
  // These two are the first four without their lowest and their highest.
  const A one = Higher(Lower(s[0], s[1]), Lower(s[2], s[3]));
  const A other = Lower(Higher(s[0], s[1]), Higher(s[2], s[3]));
  const A middle = Higher(Lower(one, other), Lower(Higher(one, other), s[4]));
  return middle - middle == 0 ? middle : 0;
}

}  // namespace jax_bnar::cpu

#endif  // JAX_BNAR_CPU_SAMPLES_H_
