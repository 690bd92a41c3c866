// What an operation works on, on every platform, in plain C++ types and raw
// pointers, without XLA or Python. Arrays have the canonical shape (G, N, C, S)
// in row-major order. Vectors are (G, C) or (1, C) in the accumulation dtype,
// which is double for float64 and float otherwise. A bit mask has ceil(N*C*S/8)
// bytes per group, lowest bit first, in the order of Problem::mask_channels.

#ifndef JAX_BNAR_NATIVE_PROBLEM_H_
#define JAX_BNAR_NATIVE_PROBLEM_H_

#include <cstdint>

#include "native/host_device.h"
#include "native/per_input.h"

namespace jax_bnar {

enum class DType { kFloat16, kBFloat16, kFloat32, kFloat64 };

// Where backward finds the derivative of the activation: nowhere (there is no
// activation, or dy is already multiplied by it), in y, in a bit mask, or in x.
// From x it recomputes the normalised value as forward did; without a residual
// nothing else is needed, and y is not read. kZ is kX with a residual, which it
// reads again.
enum class Gate { kNone, kY, kMask, kX, kZ };

// Whether the gate computes again what comes before the activation.
constexpr bool Recomputes(Gate gate) {
  return gate == Gate::kX || gate == Gate::kZ;
}

// The functions that may follow, as in jax.nn. Their order has a meaning: first
// come those that are piecewise linear, and of these, first those that are no
// curve.
enum class ActivationKind {
  kNone,
  kRelu,
  kRelu6,
  kLeakyRelu,
  kSilu,
  kHardSilu,
  kElu,
  kGelu,  // in the approximation by tanh
  kExactGelu,
  kMish
};

struct Activation {
  ActivationKind kind = ActivationKind::kNone;
  double negative_slope = 0;  // of kLeakyRelu, at least 0

  BNAR_HOST_DEVICE bool is_relu() const {
    return kind == ActivationKind::kRelu;
  }
  // Other activations than ReLU are functions of their own (cpu/isa/curves.h).
  BNAR_HOST_DEVICE bool is_curve() const {
    return kind > ActivationKind::kRelu;
  }
  // Whether the derivative follows from y, or from a bit for each element.
  BNAR_HOST_DEVICE bool is_piecewise_linear() const {
    return kind <= ActivationKind::kLeakyRelu;
  }
};

// The canonical shape (G, N, C, S): G statistics groups, N elements before the
// channel axis, C channels, and S elements after it.
struct Shape {
  int64_t groups;
  int64_t rows;
  int64_t channels;
  int64_t inner;

  BNAR_HOST_DEVICE int64_t group_size() const {
    return rows * channels * inner;
  }
  BNAR_HOST_DEVICE int64_t size() const { return groups * group_size(); }
  // The number of elements that share one mean.
  BNAR_HOST_DEVICE int64_t count() const { return rows * inner; }
  BNAR_HOST_DEVICE int64_t mask_bytes_per_group() const {
    return (group_size() + 7) / 8;
  }
};

struct Problem {
  Shape shape;
  DType dtype;
  // The order of the bits of a mask. If this is 0, they are in the order of the
  // elements. Otherwise S is 1, this number is a power of 2, at least 8, that
  // divides C, and the bits of so many neighbouring channels of a row are
  // followed by those of the same channels of the next row: in the order
  // (C / mask_channels, N, mask_channels). Only CUDA kernels take such masks.
  int64_t mask_channels = 0;
  // The dtype of y, z, dy, dz and a saved y or z, while x and dx have `dtype`.
  // Where nothing else is said it is the same, which all kernels take. Those of
  // the CPU for one input (kHasEveryForm) also take kFloat32 with 16-bit x.
  DType out_dtype = dtype;
};

inline int64_t ItemSize(DType dtype) {
  return dtype == DType::kFloat64 ? 8 : dtype == DType::kFloat32 ? 4 : 2;
}

// A (groups, C) or (1, C) operand; data is null if it is absent.
struct VectorOperand {
  const void* data = nullptr;
  int64_t groups = 1;
};

struct AffineOperands {
  VectorOperand scale;
  VectorOperand bias;
  double epsilon;
};

// The arrays that y = act(sum_i batch_norm(x_i) + z) reads and writes.
template <int N>
struct NormaliseBuffers {
  PerInput<const void*, N> x;
  const void* z;  // may be null
  void* y;
  uint8_t* mask;  // may be null
  Activation activation;
};

// The arrays that backward reads.
template <int N>
struct GradientBuffers {
  const void* dy;
  PerInput<const void*, N> x;
  const void* saved;  // y, the mask or z, as the gate says, or null
  Gate gate;
  Activation activation;
};

// The operands of one input follow.

// With Gate::kX or kZ the gate is sum_i (x_i - mean_i) * a_i + bias > 0,
// rounded to the dtype of y, with the multipliers a_i of forward (Multiplier in
// native/numerics.h) and the sum of all biases. Otherwise var, scale and bias
// are absent.
struct ReduceOperands {
  VectorOperand mean;
  VectorOperand var;
  AffineOperands affine;
};

// dx = a * e + b * (x - mean) + k, with the multiplier a of forward. bias is
// absent as in ReduceOperands.
struct ApplyOperands {
  VectorOperand mean;
  VectorOperand var;
  AffineOperands affine;
  VectorOperand b;
  VectorOperand k;
};

struct BackwardOperands {
  VectorOperand mean;
  VectorOperand var;
  VectorOperand scale;
  VectorOperand bias;
  VectorOperand dmean;
  VectorOperand dvar;
  double epsilon;
};

}  // namespace jax_bnar

#endif  // JAX_BNAR_NATIVE_PROBLEM_H_
