// What the kernels with other activations than ReLU do with a strip, whether it
// is one of rows or of a plane (rows_curves.cc, planes_curves.cc). A strip has
//
//   Size<A>()                  the elements of its buffer, in whole vectors;
//   ForEachVector<A>(element)  calls element(at, column, i) for each vector,
//                              where `at` is the index of its first element in
//                              the tile, `column` that of its constants, and i
//                              that of its first element in the buffer;
//   Inputs<kGate>(columns)     a function of `column`: its InputVectors;
//   Gradients(columns)         a function of `column`: its GradientVectors;
//   ReadMask<A>(mask, at)      the bits of a vector's elements;
//   WriteMask<A>(mask, at, bits).

#ifndef JAX_BNAR_CPU_ISA_STRIP_PASSES_H_
#define JAX_BNAR_CPU_ISA_STRIP_PASSES_H_

#include <cstdint>

#include "cpu/isa/elements.h"
#include "cpu/isa/inputs.h"
#include "cpu/isa/strips.h"

namespace jax_bnar::cpu::BNAR_ISA {

// Writes the values before the activation to u, as `as` returns them.
template <typename T, int N, typename Strip, typename Args, typename F,
          typename A = Accumulator<T>>
BNAR_INLINE void Preactivations(const Strip& strip, const Args& args,
                                const void* residual, F as, A* u) {
  const Pointers<const T, N> x(args.x);
  const T* z = static_cast<const T*>(residual);
  const InputColumns<A, N> columns(args);
  const auto inputs = strip.template Inputs<Gate::kX>(columns);
  strip.template ForEachVector<A>(
      [&](int64_t at, int64_t column, int64_t i) BNAR_LAMBDA {
        const auto& vectors = inputs(column);
        Vec<A> value = vectors.Normalised(vectors.Centred(
            [&](auto input) BNAR_LAMBDA { return Load(x[input] + at); }));
        if (kHasEveryForm<N> && z != nullptr) value = value + Load(z + at);
        StoreLanes(u + i, as(value));
      });
}

// Writes the derivatives of the activation to `derivatives`.
template <typename T, int N, typename Strip, typename Args,
          typename A = Accumulator<T>>
void Derivatives(const Strip& strip, const Args& args, A* derivatives) {
  const Activation activation = args.activation;
  switch (args.gate) {
    case Gate::kNone:
      return;  // has no activation
    case Gate::kX:
    case Gate::kZ:
      Preactivations<T, N>(
          strip, args, args.saved,
          [&](const Vec<A>& u)
              BNAR_LAMBDA { return AsSaved<T>(activation, u); },
          derivatives);
      break;
    case Gate::kY: {
      const T* y = static_cast<const T*>(args.saved);
      strip.template ForEachVector<A>(
          [&](int64_t at, int64_t, int64_t i)
              BNAR_LAMBDA { StoreLanes(derivatives + i, Load(y + at)); });
      break;
    }
    case Gate::kMask: {
      const uint8_t* mask = static_cast<const uint8_t*>(args.saved);
      strip.template ForEachVector<A>(
          [&](int64_t at, int64_t, int64_t i) BNAR_LAMBDA {
            const uint32_t bits = strip.template ReadMask<A>(mask, at);
            StoreLanes(derivatives + i, OfBits<A>(bits));
          });
      break;
    }
  }
  Differentiate<Precision<T>>(activation, derivatives,
                              strip.template Size<A>());
}

// Writes y, and the mask if there is one. `values` is the strip's buffer.
template <typename T, int N, typename Strip, typename A = Accumulator<T>>
BNAR_INLINE void NormaliseStrip(const Strip& strip,
                                const NormaliseArgs<N>& args, A* values) {
  const Activation activation = args.activation;
  const bool non_temporal = args.non_temporal;
  T* y = static_cast<T*>(args.y);
  uint8_t* mask = args.mask;
  Preactivations<T, N>(
      strip, args, args.z, [](const Vec<A>& u) BNAR_LAMBDA { return u; },
      values);
  Activate<Precision<T>>(activation, values, strip.template Size<A>());
  strip.template ForEachVector<A>(
      [&](int64_t at, int64_t, int64_t i) BNAR_LAMBDA {
        const auto stored = Round<T>(Load(values + i));
        StoreResult(non_temporal, y + at, stored);
        if (mask != nullptr) StoreLanes(values + i, Widen<T>(stored));
      });
  if (mask == nullptr) return;
  Differentiate<Precision<T>>(activation, values, strip.template Size<A>());
  strip.template ForEachVector<A>(
      [&](int64_t at, int64_t, int64_t i) BNAR_LAMBDA {
        strip.template WriteMask<A>(
            mask, at, BitsOf(Load(values + i), activation.negative_slope));
      });
}

// Writes dx of each input. `derivatives` is the strip's buffer.
template <typename T, int N, typename Strip, typename A = Accumulator<T>>
BNAR_INLINE void ApplyStrip(const Strip& strip, const ApplyArgs<N>& args,
                            A* derivatives) {
  const bool non_temporal = args.non_temporal;
  const T* dy = static_cast<const T*>(args.e);
  const Pointers<const T, N> x(args.x);
  const Pointers<T, N> dx(args.dx);
  const InputColumns<A, N> columns(args);
  const auto inputs = strip.template Inputs<Gate::kNone>(columns);
  const auto gradients = strip.Gradients(GradientColumns<A, N>(args));
  const Vec<A> stopping = StoppingDerivative<A>(args.activation);
  Derivatives<T, N>(strip, args, derivatives);
  strip.template ForEachVector<A>([&](int64_t at, int64_t column,
                                      int64_t i) BNAR_LAMBDA {
    const auto centred = inputs(column).Centred(
        [&](auto input) BNAR_LAMBDA { return Load(x[input] + at); });
    const Vec<A> e =
        Differentiated(Load(derivatives + i), Load(dy + at), stopping);
    ForEachInput<N>([&](auto input) BNAR_LAMBDA {
      // The constants are read for one input after the other: those of two
      // inputs, beside the elements, are more than aarch64 has registers.
      StoreResult(non_temporal, dx[input] + at,
                  GradientElements<T>(gradients(column), input, e, centred));
    });
  });
}

}  // namespace jax_bnar::cpu::BNAR_ISA

#endif  // JAX_BNAR_CPU_ISA_STRIP_PASSES_H_
