// The only list of the operations in C++: their names, and the arguments that
// they take on every platform. Declarations, handlers and registrations are
// generated from it.

#ifndef JAX_BNAR_NATIVE_OPERATIONS_H_
#define JAX_BNAR_NATIVE_OPERATIONS_H_

#include "native/problem.h"

// Expands to OPERATION(function name, further arguments) for each operation.
#define BNAR_FOR_EACH_OPERATION(OPERATION, ...) \
  OPERATION(Forward, __VA_ARGS__)               \
  OPERATION(Backward, __VA_ARGS__)              \
  OPERATION(Statistics, __VA_ARGS__)            \
  OPERATION(Normalise, __VA_ARGS__)             \
  OPERATION(BackwardReduce, __VA_ARGS__)        \
  OPERATION(BackwardApply, __VA_ARGS__)

// Expands to TARGET(handler name, Python name, further arguments) for each
// custom call, in the order of jax_bnar/_base/signatures.py. An operation has
// one for each number of inputs, but for the statistics, which are those of one
// input; with two inputs its name begins with "dual".
#define BNAR_FOR_EACH_TARGET(TARGET, ...)                         \
  TARGET(Forward, "forward", __VA_ARGS__)                         \
  TARGET(Backward, "backward", __VA_ARGS__)                       \
  TARGET(Statistics, "statistics", __VA_ARGS__)                   \
  TARGET(Normalise, "normalise", __VA_ARGS__)                     \
  TARGET(BackwardReduce, "backward_reduce", __VA_ARGS__)          \
  TARGET(BackwardApply, "backward_apply", __VA_ARGS__)            \
  TARGET(DualForward, "dual_forward", __VA_ARGS__)                \
  TARGET(DualBackward, "dual_backward", __VA_ARGS__)              \
  TARGET(DualNormalise, "dual_normalise", __VA_ARGS__)            \
  TARGET(DualBackwardReduce, "dual_backward_reduce", __VA_ARGS__) \
  TARGET(DualBackwardApply, "dual_backward_apply", __VA_ARGS__)

// Declares the functions of a platform, which work on the buffers of
// native/problem.h. `Context` says where they run, for example on which pool of
// threads. They assume that their arguments are valid.
#define BNAR_DECLARE_STATISTICS(Result, Context)                            \
  Result Statistics(Context context, const Problem& problem, const void* x, \
                    void* mean, void* var)

// Declares those of N inputs. `prefix` is `template <int N>` if N is a
// parameter, and `template` if they shall be instantiated. dz is null if
// kHasEveryForm<N> is false.
#define BNAR_DECLARE_FORWARD(prefix, Result, Context, N)             \
  prefix Result Forward(Context context, const Problem& problem,     \
                        const NormaliseBuffers<N>& buffers,          \
                        const PerInput<AffineOperands, N>& affine,   \
                        const PerInput<void*, N>& mean,              \
                        const PerInput<void*, N>& var);              \
  prefix Result Normalise(Context context, const Problem& problem,   \
                          const NormaliseBuffers<N>& buffers,        \
                          const PerInput<AffineOperands, N>& affine, \
                          const PerInput<VectorOperand, N>& mean,    \
                          const PerInput<VectorOperand, N>& var)
#define BNAR_DECLARE_BACKWARD(prefix, Result, Context, N)                 \
  prefix Result Backward(Context context, const Problem& problem,         \
                         const GradientBuffers<N>& buffers,               \
                         const PerInput<BackwardOperands, N>& operands,   \
                         const PerInput<void*, N>& dx,                    \
                         const PerInput<void*, N>& dscale, void* dbias,   \
                         void* dz);                                       \
  prefix Result BackwardReduce(                                           \
      Context context, const Problem& problem,                            \
      const GradientBuffers<N>& buffers,                                  \
      const PerInput<ReduceOperands, N>& operands, void* sum_e,           \
      const PerInput<void*, N>& sum_e_centred, void* dz);                 \
  prefix Result BackwardApply(Context context, const Problem& problem,    \
                              const GradientBuffers<N>& buffers,          \
                              const PerInput<ApplyOperands, N>& operands, \
                              const PerInput<void*, N>& dx)
#define BNAR_DECLARE_OPERATIONS(prefix, Result, Context, N) \
  BNAR_DECLARE_FORWARD(prefix, Result, Context, N);         \
  BNAR_DECLARE_BACKWARD(prefix, Result, Context, N)

#endif  // JAX_BNAR_NATIVE_OPERATIONS_H_
