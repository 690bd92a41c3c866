// Turns the run-time flags of a call into template arguments.

#ifndef JAX_BNAR_CPU_ISA_FLAGS_H_
#define JAX_BNAR_CPU_ISA_FLAGS_H_

#include <type_traits>

#include "cpu/isa/simd.h"
#include "cpu/tile_kernels.h"

namespace jax_bnar::cpu::BNAR_ISA {

template <bool kValue>
using Bool = std::integral_constant<bool, kValue>;

template <Gate kValue>
using GateConstant = std::integral_constant<Gate, kValue>;

template <typename F>
void WithBool(bool value, F f) {
  value ? f(Bool<true>()) : f(Bool<false>());
}

template <typename F>
void WithGate(Gate gate, F f) {
  switch (gate) {
    case Gate::kNone:
      return f(GateConstant<Gate::kNone>());
    case Gate::kY:
      return f(GateConstant<Gate::kY>());
    case Gate::kMask:
      return f(GateConstant<Gate::kMask>());
    case Gate::kX:
      return f(GateConstant<Gate::kX>());
    case Gate::kZ:
      return;  // Only other activations than ReLU have this gate.
  }
}

// Calls f(relu, residual, mask) with integral constants.
template <int N, typename F>
void WithNormaliseFlags(const NormaliseArgs<N>& args, F f) {
  const auto with = [&](auto residual) {
    if (!args.activation.is_relu()) {
      return f(Bool<false>(), residual, Bool<false>());
    }
    WithBool(args.mask != nullptr,
             [&](auto mask) { f(Bool<true>(), residual, mask); });
  };
  if constexpr (kHasEveryForm<N>) {
    WithBool(args.z != nullptr, with);
  } else {
    with(Bool<false>());
  }
}

// Calls f(gate, residual) with integral constants.
template <int N, typename F>
void WithReduceFlags(const ReduceArgs<N>& args, F f) {
  WithGate(args.gate, [&](auto gate) {
    if constexpr (kHasEveryForm<N>) {
      WithBool(args.dz != nullptr, [&](auto residual) { f(gate, residual); });
    } else {
      f(gate, Bool<false>());
    }
  });
}

// Calls f(gate, non_temporal) with integral constants.
template <int N, typename F>
void WithApplyFlags(const ApplyArgs<N>& args, F f) {
  WithGate(args.gate, [&](auto gate) {
    WithBool(args.non_temporal,
             [&](auto non_temporal) { f(gate, non_temporal); });
  });
}

}  // namespace jax_bnar::cpu::BNAR_ISA

#endif  // JAX_BNAR_CPU_ISA_FLAGS_H_
