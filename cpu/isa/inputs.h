// What the kernels do for each of the N inputs that are normalised and added.

#ifndef JAX_BNAR_CPU_ISA_INPUTS_H_
#define JAX_BNAR_CPU_ISA_INPUTS_H_

#include <type_traits>
#include <utility>

#include "cpu/isa/simd.h"
#include "cpu/isa/simd_memory.h"
#include "cpu/tile_kernels.h"

namespace jax_bnar::cpu::BNAR_ISA {

template <int kValue>
using Constant = std::integral_constant<int, kValue>;

template <int... kInputs, typename F>
BNAR_INLINE void ForEachOf(std::integer_sequence<int, kInputs...>, F f) {
  (f(Constant<kInputs>()), ...);
}

// Calls f(input) for each input in order. The number is a constant, because the
// compiler keeps an array that is indexed by a variable in memory.
template <int N, typename F>
BNAR_INLINE void ForEachInput(F f) {
  ForEachOf(std::make_integer_sequence<int, N>(), f);
}

// Pointers to an array of each input. The kernels copy them, because the
// compiler cannot know that a store does not change the arguments of a call.
template <typename T, int N>
struct Pointers {
  T* of[N];

  template <typename Void>
  BNAR_INLINE explicit Pointers(const PerInput<Void*, N>& all) {
    ForEachInput<N>([&](auto input) BNAR_LAMBDA {
      of[input] = static_cast<T*>(all[input]);
    });
  }

  BNAR_INLINE T* operator[](int input) const { return of[input]; }
};

template <typename A, int N>
using InputVecs = PerInput<Vec<A>, N>;

// Calls make(input) for the vector of each input.
template <typename A, int N, typename F>
BNAR_INLINE InputVecs<A, N> InputVecsOf(F make) {
  InputVecs<A, N> r;
  ForEachInput<N>([&](auto input) BNAR_LAMBDA { r[input] = make(input); });
  return r;
}

// The constants of a vector of columns, or of one plane. `a` and `bias` are set
// in forward, and in backward if the gate needs them (Gate::kX).
template <typename A, int N>
struct InputVectors {
  InputVecs<A, N> mean;
  InputVecs<A, N> a;
  Vec<A> bias;

  // The elements that load(input) returns, less their means.
  template <typename F>
  BNAR_INLINE InputVecs<A, N> Centred(F load) const {
    return InputVecsOf<A, N>(
        [&](auto input) BNAR_LAMBDA { return load(input) - mean[input]; });
  }

  // y before z, ReLU and rounding. Forward and the gate of backward both call
  // this function, because the same operations give the same sign.
  BNAR_INLINE Vec<A> Normalised(const InputVecs<A, N>& centred) const {
    Vec<A> y = centred[0] * a[0] + bias;
    ForEachInput<N>([&](auto input) BNAR_LAMBDA {
      if constexpr (decltype(input)::value > 0) {
        y = centred[input] * a[input] + y;
      }
    });
    return y;
  }
};

// Pointers to these constants.
template <typename A, int N>
struct InputColumns {
  Pointers<const A, N> mean;
  Pointers<const A, N> a;
  const A* bias;

  template <typename Args>
  BNAR_INLINE explicit InputColumns(const Args& args)
      : mean(args.mean), a(args.a), bias(static_cast<const A*>(args.bias)) {}

  // Loads the constants of a vector of columns.
  template <Gate kGate>
  BNAR_INLINE InputVectors<A, N> At(int64_t column) const {
    return Read<kGate>([&](const A* p)
                           BNAR_LAMBDA { return Load(p + column); });
  }

  // Broadcasts the constants of a plane.
  template <Gate kGate>
  BNAR_INLINE InputVectors<A, N> OfPlane(int64_t plane) const {
    return Read<kGate>([&](const A* p)
                           BNAR_LAMBDA { return Broadcast(p[plane]); });
  }

 private:
  template <Gate kGate, typename F>
  BNAR_INLINE InputVectors<A, N> Read(F read) const {
    InputVectors<A, N> r{};
    ForEachInput<N>([&](auto input)
                        BNAR_LAMBDA { r.mean[input] = read(mean[input]); });
    if constexpr (kGate == Gate::kX) {
      ForEachInput<N>([&](auto input)
                          BNAR_LAMBDA { r.a[input] = read(a[input]); });
      r.bias = read(bias);
    }
    return r;
  }
};

// The constants of dx = a * e + (b * (x - mean) + k), which backward reads
// beside those of the gate.
template <typename A, int N>
struct GradientVectors {
  InputVecs<A, N> a;
  InputVecs<A, N> b;
  InputVecs<A, N> k;
};

// Pointers to these constants.
template <typename A, int N>
struct GradientColumns {
  Pointers<const A, N> a;
  Pointers<const A, N> b;
  Pointers<const A, N> k;

  BNAR_INLINE explicit GradientColumns(const ApplyArgs<N>& args)
      : a(args.a), b(args.b), k(args.k) {}

  BNAR_INLINE GradientVectors<A, N> At(int64_t column) const {
    return Read([&](const A* p) BNAR_LAMBDA { return Load(p + column); });
  }

  BNAR_INLINE GradientVectors<A, N> OfPlane(int64_t plane) const {
    return Read([&](const A* p) BNAR_LAMBDA { return Broadcast(p[plane]); });
  }

 private:
  template <typename F>
  BNAR_INLINE GradientVectors<A, N> Read(F read) const {
    const auto all = [&](const Pointers<const A, N>& vectors) BNAR_LAMBDA {
      return InputVecsOf<A, N>(
          [&](auto input) BNAR_LAMBDA { return read(vectors[input]); });
    };
    return {all(a), all(b), all(k)};
  }
};

}  // namespace jax_bnar::cpu::BNAR_ISA

#endif  // JAX_BNAR_CPU_ISA_INPUTS_H_
