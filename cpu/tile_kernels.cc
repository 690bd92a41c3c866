// Tables of kernels for one instruction set (BNAR_ISA) and every dtype: turns
// the run-time flags of a call into template arguments.

#include "cpu/plane_kernels.h"
#include "cpu/rows_kernels.h"

namespace jax_bnar {
namespace BNAR_ISA {
namespace {

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

// f(relu, residual, mask, stream) as integral constants.
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

template <typename T>
void DispatchRowsNormalise(const RowsTile& tile, const NormaliseArgs& args) {
  WithNormaliseFlags(args, [&](auto relu, auto residual, auto mask,
                               auto stream) {
    Normalise<T, relu.value, residual.value, mask.value, stream.value>::Rows(
        tile, args);
  });
}

template <typename T>
void DispatchPlaneNormalise(const Plane& plane, const NormaliseArgs& args) {
  WithNormaliseFlags(
      args, [&](auto relu, auto residual, auto mask, auto stream) {
        PlaneNormalise<T, relu.value, residual.value, mask.value, stream.value>(
            plane, args);
      });
}

// f(residual, stream) as integral constants.
template <typename F>
void WithResidual(const ReduceArgs& args, F f) {
  if (args.dz == nullptr) return f(Bool<false>(), Bool<false>());
  WithBool(args.stream, [&](auto stream) { f(Bool<true>(), stream); });
}

template <typename T>
void DispatchRowsReduce(const RowsTile& tile, const ReduceArgs& args) {
  WithGate(args.gate, [&](auto gate) {
    WithResidual(args, [&](auto residual, auto stream) {
      Reduce<T, gate.value, residual.value, stream.value>::Rows(tile, args);
    });
  });
}

template <typename T>
void DispatchPlaneReduce(const Plane& plane, const ReduceArgs& args) {
  WithGate(args.gate, [&](auto gate) {
    WithResidual(args, [&](auto residual, auto stream) {
      PlaneReduce<T, gate.value, residual.value, stream.value>(plane, args);
    });
  });
}

template <typename T>
void DispatchRowsApply(const RowsTile& tile, const ApplyArgs& args) {
  WithGate(args.gate, [&](auto gate) {
    WithBool(args.stream, [&](auto stream) {
      Apply<T, gate.value, stream.value>::Rows(tile, args);
    });
  });
}

template <typename T>
void DispatchPlaneApply(const Plane& plane, const ApplyArgs& args) {
  WithGate(args.gate, [&](auto gate) {
    WithBool(args.stream, [&](auto stream) {
      PlaneApply<T, gate.value, stream.value>(plane, args);
    });
  });
}

template <typename T>
const TileKernels& Table() {
  static const TileKernels table = {
      RowsStatistics<T>,      DispatchRowsNormalise<T>,
      DispatchRowsReduce<T>,  DispatchRowsApply<T>,
      PlaneStatistics<T>,     DispatchPlaneNormalise<T>,
      DispatchPlaneReduce<T>, DispatchPlaneApply<T>};
  return table;
}

}  // namespace

const TileKernels& Kernels(DType dtype) {
  switch (dtype) {
    case DType::kFloat16:
      return Table<Float16>();
    case DType::kBFloat16:
      return Table<BFloat16>();
    case DType::kFloat32:
      return Table<float>();
    default:
      return Table<double>();
  }
}

}  // namespace BNAR_ISA
}  // namespace jax_bnar
