// Activations other than ReLU over a strip. Which one it is, is decided once
// for a strip, so that the kernels need no further copy for each activation.

#include "cpu/isa/curves.h"

#include "cpu/isa/strips.h"

namespace jax_bnar::cpu::BNAR_ISA {
namespace {

template <typename A, typename F>
BNAR_INLINE void ForEachPart(A* values, int64_t size, F f) {
  using Float = typename Part<A>::Float;
  for (int64_t i = 0; i < size; i += Part<A>::kLanesPerPart) {
    Float part;
    std::memcpy(&part, values + i, sizeof(part));
    part = f(part);
    std::memcpy(values + i, &part, sizeof(part));
  }
}

// Calls f with the activation.
template <typename A, typename F>
BNAR_INLINE void WithCurve(const Activation& activation, F f) {
  switch (activation.kind) {
    case ActivationKind::kNone:
    case ActivationKind::kRelu:
      return;  // not curves
    case ActivationKind::kRelu6:
      return f(Relu6<A>());
    case ActivationKind::kLeakyRelu:
      return f(LeakyRelu<A>{static_cast<A>(activation.negative_slope)});
    case ActivationKind::kSilu:
      return f(Silu<A>());
    case ActivationKind::kHardSilu:
      return f(HardSilu<A>());
  }
}

}  // namespace

template <typename A>
void Activate(const Activation& activation, A* values, int64_t size) {
  WithCurve<A>(activation, [&](auto curve) BNAR_LAMBDA {
    ForEachPart(values, size,
                [&](const auto& u) BNAR_LAMBDA { return curve.Value(u); });
  });
}

template <typename A>
void Differentiate(const Activation& activation, A* values, int64_t size) {
  WithCurve<A>(activation, [&](auto curve) BNAR_LAMBDA {
    ForEachPart(values, size,
                [&](const auto& u) BNAR_LAMBDA { return curve.Derivative(u); });
  });
}

template void Activate(const Activation&, float*, int64_t);
template void Activate(const Activation&, double*, int64_t);
template void Differentiate(const Activation&, float*, int64_t);
template void Differentiate(const Activation&, double*, int64_t);

}  // namespace jax_bnar::cpu::BNAR_ISA
