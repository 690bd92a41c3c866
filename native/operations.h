// The only list of the operations: their names, and the arguments that they
// take on every platform. Declarations, handlers and registrations are
// generated from it.

#ifndef JAX_BNAR_NATIVE_OPERATIONS_H_
#define JAX_BNAR_NATIVE_OPERATIONS_H_

#include "native/problem.h"

// Expands to OPERATION(function name, Python name, further arguments) for each
// operation, in the order of jax_bnar/_base/signatures.py.
#define BNAR_FOR_EACH_OPERATION(OPERATION, ...)             \
  OPERATION(Forward, "forward", __VA_ARGS__)                \
  OPERATION(Backward, "backward", __VA_ARGS__)              \
  OPERATION(Statistics, "statistics", __VA_ARGS__)          \
  OPERATION(Normalise, "normalise", __VA_ARGS__)            \
  OPERATION(BackwardReduce, "backward_reduce", __VA_ARGS__) \
  OPERATION(BackwardApply, "backward_apply", __VA_ARGS__)

// The operations with two normalised inputs, which have handlers of their own
// (native/ffi_dual_operations.h).
#define BNAR_FOR_EACH_DUAL_OPERATION(OPERATION, ...)                 \
  OPERATION(DualForward, "dual_forward", __VA_ARGS__)                \
  OPERATION(DualBackward, "dual_backward", __VA_ARGS__)              \
  OPERATION(DualNormalise, "dual_normalise", __VA_ARGS__)            \
  OPERATION(DualBackwardReduce, "dual_backward_reduce", __VA_ARGS__) \
  OPERATION(DualBackwardApply, "dual_backward_apply", __VA_ARGS__)

// Declares the functions of a platform, which work on the buffers of
// native/problem.h. `Context` says where they run, for example on which pool of
// threads. They assume that their arguments are valid.
#define BNAR_DECLARE_OPERATIONS(Result, Context)                            \
  Result Forward(Context context, const Problem& problem,                   \
                 const NormaliseBuffers& buffers,                           \
                 const AffineOperands& affine, void* mean, void* var);      \
  Result Backward(Context context, const Problem& problem,                  \
                  const GradientBuffers& buffers,                           \
                  const BackwardOperands& operands, void* dx, void* dscale, \
                  void* dbias, void* dz);                                   \
  Result Statistics(Context context, const Problem& problem, const void* x, \
                    void* mean, void* var);                                 \
  Result Normalise(Context context, const Problem& problem,                 \
                   const NormaliseBuffers& buffers,                         \
                   const AffineOperands& affine, const VectorOperand& mean, \
                   const VectorOperand& var);                               \
  Result BackwardReduce(Context context, const Problem& problem,            \
                        const GradientBuffers& buffers,                     \
                        const ReduceOperands& operands, void* sum_e,        \
                        void* sum_e_centred, void* dz);                     \
  Result BackwardApply(Context context, const Problem& problem,             \
                       const GradientBuffers& buffers,                      \
                       const ApplyOperands& operands, void* dx)

#define BNAR_DECLARE_DUAL_OPERATIONS(Result, Context)                          \
  Result DualForward(Context context, const Problem& problem,                  \
                     const DualNormaliseBuffers& buffers,                      \
                     const Both<AffineOperands>& affine,                       \
                     const Both<void*>& mean, const Both<void*>& var);         \
  Result DualBackward(Context context, const Problem& problem,                 \
                      const DualGradientBuffers& buffers,                      \
                      const Both<BackwardOperands>& operands,                  \
                      const Both<void*>& dx, const Both<void*>& dscale,        \
                      void* dbias);                                            \
  Result DualNormalise(                                                        \
      Context context, const Problem& problem,                                 \
      const DualNormaliseBuffers& buffers, const Both<AffineOperands>& affine, \
      const Both<VectorOperand>& mean, const Both<VectorOperand>& var);        \
  Result DualBackwardReduce(Context context, const Problem& problem,           \
                            const DualGradientBuffers& buffers,                \
                            const Both<ReduceOperands>& operands, void* sum_e, \
                            const Both<void*>& sum_e_centred);                 \
  Result DualBackwardApply(Context context, const Problem& problem,            \
                           const DualGradientBuffers& buffers,                 \
                           const Both<ApplyOperands>& operands,                \
                           const Both<void*>& dx)

#endif  // JAX_BNAR_NATIVE_OPERATIONS_H_
