// The six operations on raw pointers: no XLA, no Python. Arrays are row-major
// canonical (G, N, C, S); vectors are (G, C) or (1, C) in the accumulation
// dtype (double for float64, else float); a bit mask has ceil(N*C*S/8) bytes to
// a group, lowest bit first. Arguments are taken as valid.

#ifndef JAX_BNAR_CPU_OPERATIONS_H_
#define JAX_BNAR_CPU_OPERATIONS_H_

#include <cstdint>

#include "cpu/executor.h"
#include "cpu/plan.h"
#include "cpu/tile_kernels.h"

namespace jax_bnar {

// A (groups, C) or (1, C) operand; data is null where it is absent.
struct VectorOperand {
  const void* data = nullptr;
  int64_t groups = 1;
};

struct Problem {
  Shape shape;
  DType dtype;
};

struct AffineOperands {
  VectorOperand scale;
  VectorOperand bias;
  double epsilon;
};

// What y = act(batch_norm(x) + z) reads and writes.
struct NormaliseBuffers {
  const void* x;
  const void* z;  // may be null
  void* y;
  uint8_t* mask;  // may be null
  bool relu;
};

void Statistics(ThreadPool& pool, const Problem& problem, const void* x,
                void* mean, void* var);

void NormaliseWith(ThreadPool& pool, const Problem& problem,
                   const NormaliseBuffers& buffers,
                   const AffineOperands& affine, const VectorOperand& mean,
                   const VectorOperand& var);

void Forward(ThreadPool& pool, const Problem& problem,
             const NormaliseBuffers& buffers, const AffineOperands& affine,
             void* mean, void* var);

// What backward reads of an element.
struct GradientBuffers {
  const void* dy;
  const void* x;
  const void* evidence;  // y or the mask, by gate; else null
  Gate gate;
};

// With Gate::kX the gate is (x - mean) * a + bias > 0, else a and bias are
// ignored.
struct ReduceOperands {
  VectorOperand mean;
  VectorOperand a;
  VectorOperand bias;
};

void BackwardReduce(ThreadPool& pool, const Problem& problem,
                    const GradientBuffers& buffers,
                    const ReduceOperands& operands, void* sum_e,
                    void* sum_e_centred, void* dz);

// dx = a * e + b * (x - mean) + k; bias as above.
struct ApplyOperands {
  VectorOperand mean;
  VectorOperand a;
  VectorOperand b;
  VectorOperand k;
  VectorOperand bias;
};

void BackwardApply(ThreadPool& pool, const Problem& problem,
                   const GradientBuffers& buffers,
                   const ApplyOperands& operands, void* dx);

struct BackwardOperands {
  VectorOperand mean;
  VectorOperand var;
  VectorOperand scale;
  VectorOperand bias;
  VectorOperand dmean;
  VectorOperand dvar;
  double epsilon;
};

void Backward(ThreadPool& pool, const Problem& problem,
              const GradientBuffers& buffers, const BackwardOperands& operands,
              void* dx, void* dscale, void* dbias, void* dz);

}  // namespace jax_bnar

#endif  // JAX_BNAR_CPU_OPERATIONS_H_
