// Activations other than ReLU over a strip. Which one it is, is decided once
// for a strip, so that the kernels need no further copy for each activation.

#include "cpu/isa/curves.h"

#include "cpu/isa/strips.h"

namespace jax_bnar::cpu::BNAR_ISA {
namespace {

// How many parts are computed side by side. Three are nearly as fast. In
// double, whose e^x has more constants, 16 registers are not enough for four.
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr bool kHasManyRegisters = true;
#else
constexpr bool kHasManyRegisters = false;
#endif
template <typename T>
constexpr int kSideBySide = sizeof(T) == 8 && !kHasManyRegisters ? 2 : 4;

// Replaces each of the values by f(it), where f takes and returns V.
template <typename V, typename F>
BNAR_INLINE void Replace(typename V::A* values, int64_t size, F f) {
  constexpr int64_t kLanesPerPart = V::kLanes / V::kCount;
  for (int64_t i = 0; i < size; i += V::kLanes) {
    V v;
    BNAR_UNROLL
    for (int k = 0; k < V::kCount; ++k) {
      std::memcpy(&v.part[k], values + i + k * kLanesPerPart,
                  sizeof(v.part[k]));
    }
    v = f(v);
    BNAR_UNROLL
    for (int k = 0; k < V::kCount; ++k) {
      std::memcpy(values + i + k * kLanesPerPart, &v.part[k],
                  sizeof(v.part[k]));
    }
  }
}

// Replaces each of the values by f(curve, it), where the curve takes and
// returns V.
template <typename V, typename F>
BNAR_INLINE void ReplaceBy(const Activation& activation, typename V::A* values,
                           int64_t size, F f) {
  const auto replace = [&](auto curve) BNAR_LAMBDA {
    Replace<V>(values, size,
               [&](const V& v) BNAR_LAMBDA { return f(curve, v); });
  };
  switch (activation.kind) {
    case ActivationKind::kNone:
    case ActivationKind::kRelu:
      return;  // not curves
    case ActivationKind::kRelu6:
      return replace(Relu6<V>());
    case ActivationKind::kLeakyRelu:
      return replace(
          LeakyRelu<V>{static_cast<typename V::A>(activation.negative_slope)});
    case ActivationKind::kSilu:
      return replace(Silu<V>());
    case ActivationKind::kHardSilu:
      return replace(HardSilu<V>());
    case ActivationKind::kElu:
      return replace(Elu<V>());
    case ActivationKind::kGelu:
      return replace(Gelu<V>());
    case ActivationKind::kExactGelu: {
      // Its polynomial has so many constants that fewer parts fit.
      using Fewer = Parts<typename V::T, (V::kCount + 1) / 2>;
      return Replace<Fewer>(values, size, [&](const Fewer& v) BNAR_LAMBDA {
        return f(ExactGelu<Fewer>(), v);
      });
    }
    case ActivationKind::kMish:
      return replace(Mish<V>());
  }
}

template <typename T, typename F>
BNAR_INLINE void ReplaceAll(const Activation& activation,
                            Accumulator<T>* values, int64_t size, F f) {
  using Several = Parts<T, kSideBySide<T>>;
  const int64_t whole = size / Several::kLanes * Several::kLanes;
  ReplaceBy<Several>(activation, values, whole, f);
  ReplaceBy<Parts<T, 1>>(activation, values + whole, size - whole, f);
}

}  // namespace

template <typename T>
void Activate(const Activation& activation, Accumulator<T>* values,
              int64_t size) {
  ReplaceAll<T>(activation, values, size,
                [](const auto& curve, const auto& u)
                    BNAR_LAMBDA { return curve.Value(u); });
}

template <typename T>
void Differentiate(const Activation& activation, Accumulator<T>* values,
                   int64_t size) {
  ReplaceAll<T>(activation, values, size,
                [](const auto& curve, const auto& u)
                    BNAR_LAMBDA { return curve.Derivative(u); });
}

#define BNAR_INSTANTIATE(T)                                               \
  template void Activate<T>(const Activation&, Accumulator<T>*, int64_t); \
  template void Differentiate<T>(const Activation&, Accumulator<T>*, int64_t);
BNAR_INSTANTIATE(Float16)
#ifndef BNAR_ISA_OF_BFLOAT16
BNAR_INSTANTIATE(float)
BNAR_INSTANTIATE(double)
#endif
#undef BNAR_INSTANTIATE

}  // namespace jax_bnar::cpu::BNAR_ISA
