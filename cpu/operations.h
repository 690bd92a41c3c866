// The six operations on the CPU, for the buffers of native/problem.h. Arguments
// are taken as valid.

#ifndef JAX_BNAR_CPU_OPERATIONS_H_
#define JAX_BNAR_CPU_OPERATIONS_H_

#include "cpu/executor.h"
#include "native/problem.h"

namespace jax_bnar {

void Statistics(ThreadPool& pool, const Problem& problem, const void* x,
                void* mean, void* var);

void NormaliseWith(ThreadPool& pool, const Problem& problem,
                   const NormaliseBuffers& buffers,
                   const AffineOperands& affine, const VectorOperand& mean,
                   const VectorOperand& var);

void Forward(ThreadPool& pool, const Problem& problem,
             const NormaliseBuffers& buffers, const AffineOperands& affine,
             void* mean, void* var);

void BackwardReduce(ThreadPool& pool, const Problem& problem,
                    const GradientBuffers& buffers,
                    const ReduceOperands& operands, void* sum_e,
                    void* sum_e_centred, void* dz);

void BackwardApply(ThreadPool& pool, const Problem& problem,
                   const GradientBuffers& buffers,
                   const ApplyOperands& operands, void* dx);

void Backward(ThreadPool& pool, const Problem& problem,
              const GradientBuffers& buffers, const BackwardOperands& operands,
              void* dx, void* dscale, void* dbias, void* dz);

}  // namespace jax_bnar

#endif  // JAX_BNAR_CPU_OPERATIONS_H_
