// A tuple with one entry for each of the N inputs x_i of
// y = act(sum_i batch_norm(x_i) + z).

#ifndef JAX_BNAR_NATIVE_PER_INPUT_H_
#define JAX_BNAR_NATIVE_PER_INPUT_H_

#include <utility>

#include "native/host_device.h"

// Expands to EXPAND(N, further arguments) for each number of inputs that there
// are kernels for. tests/native/three_inputs_test.cc compiles them for another.
#ifdef BNAR_THREE_INPUTS
#define BNAR_FOR_EACH_INPUT_COUNT(EXPAND, ...) EXPAND(3, __VA_ARGS__)
#else
#define BNAR_FOR_EACH_INPUT_COUNT(EXPAND, ...) \
  EXPAND(1, __VA_ARGS__) EXPAND(2, __VA_ARGS__)
#endif

namespace jax_bnar {

template <typename T, int N>
struct PerInput {
  T of[N];

  BNAR_HOST_DEVICE T& operator[](int input) { return of[input]; }
  BNAR_HOST_DEVICE const T& operator[](int input) const { return of[input]; }
  BNAR_HOST_DEVICE const T* begin() const { return of; }
  BNAR_HOST_DEVICE const T* end() const { return of + N; }
};

// Whether there may be a z, and may be outputs of another dtype than x. Nothing
// needs that with more than one input, and each form would be one more kernel
// of every dtype.
template <int N>
constexpr bool kHasEveryForm = N == 1;

template <typename F, int... kInputs>
auto PerInputOf(std::integer_sequence<int, kInputs...>, F make)
    -> PerInput<decltype(make(0)), sizeof...(kInputs)> {
  // The elements of a braced list are made in order.
  return {make(kInputs)...};
}

// Returns make(input) for each input. The calls are in order.
template <int N, typename F>
auto PerInputOf(F make) {
  return PerInputOf(std::make_integer_sequence<int, N>(), make);
}

}  // namespace jax_bnar

#endif  // JAX_BNAR_NATIVE_PER_INPUT_H_
