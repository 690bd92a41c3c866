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
  }
}

// The same for two inputs, where there is always a ReLU.
template <typename F>
void WithDualGate(Gate gate, F f) {
  switch (gate) {
    case Gate::kY:
      return f(GateConstant<Gate::kY>());
    case Gate::kMask:
      return f(GateConstant<Gate::kMask>());
    default:
      return f(GateConstant<Gate::kX>());
  }
}

// Calls f(relu, residual, mask, stream) with integral constants.
template <typename F>
void WithNormaliseFlags(const NormaliseArgs& args, F f) {
  WithBool(args.z != nullptr, [&](auto residual) {
    WithBool(args.stream, [&](auto stream) {
      if (!args.relu) return f(Bool<false>(), residual, Bool<false>(), stream);
      WithBool(args.mask != nullptr,
               [&](auto mask) { f(Bool<true>(), residual, mask, stream); });
    });
  });
}

// Calls f(residual, stream) with integral constants.
template <typename F>
void WithResidual(const ReduceArgs& args, F f) {
  if (args.dz == nullptr) return f(Bool<false>(), Bool<false>());
  WithBool(args.stream, [&](auto stream) { f(Bool<true>(), stream); });
}

}  // namespace jax_bnar::cpu::BNAR_ISA

#endif  // JAX_BNAR_CPU_ISA_FLAGS_H_
