// The platforms on which the operations are tested.

#ifndef JAX_BNAR_TESTS_NATIVE_PLATFORM_H_
#define JAX_BNAR_TESTS_NATIVE_PLATFORM_H_

#include "cpu/operations.h"
#include "native/problem.h"

namespace jax_bnar {
namespace testing {

// Expands to OPERATION(N, name, (parameters), arguments...) for each operation
// of N inputs, as native/operations.h has them after the context.
#define BNAR_FOR_EACH_CALL(N, OPERATION)                                     \
  OPERATION(N, Normalise,                                                    \
            (const Problem& problem, const NormaliseBuffers<N>& buffers,     \
             const PerInput<AffineOperands, N>& affine,                      \
             const PerInput<VectorOperand, N>& mean,                         \
             const PerInput<VectorOperand, N>& var),                         \
            problem, buffers, affine, mean, var)                             \
  OPERATION(N, Forward,                                                      \
            (const Problem& problem, const NormaliseBuffers<N>& buffers,     \
             const PerInput<AffineOperands, N>& affine,                      \
             const PerInput<void*, N>& mean, const PerInput<void*, N>& var), \
            problem, buffers, affine, mean, var)                             \
  OPERATION(N, BackwardReduce,                                               \
            (const Problem& problem, const GradientBuffers<N>& buffers,      \
             const PerInput<ReduceOperands, N>& operands, void* sum_e,       \
             const PerInput<void*, N>& sum_e_centred, void* dz),             \
            problem, buffers, operands, sum_e, sum_e_centred, dz)            \
  OPERATION(N, BackwardApply,                                                \
            (const Problem& problem, const GradientBuffers<N>& buffers,      \
             const PerInput<ApplyOperands, N>& operands,                     \
             const PerInput<void*, N>& dx),                                  \
            problem, buffers, operands, dx)                                  \
  OPERATION(N, Backward,                                                     \
            (const Problem& problem, const GradientBuffers<N>& buffers,      \
             const PerInput<BackwardOperands, N>& operands,                  \
             const PerInput<void*, N>& dx, const PerInput<void*, N>& dscale, \
             void* dbias, void* dz),                                         \
            problem, buffers, operands, dx, dscale, dbias, dz)

class Platform {
 public:
  virtual ~Platform() = default;

  virtual void Statistics(const Problem& problem, const void* x, void* mean,
                          void* var) = 0;
#define BNAR_VIRTUAL(N, name, parameters, ...) virtual void name parameters = 0;
#define BNAR_VIRTUALS(N, ...) BNAR_FOR_EACH_CALL(N, BNAR_VIRTUAL)
  BNAR_FOR_EACH_INPUT_COUNT(BNAR_VIRTUALS)
#undef BNAR_VIRTUALS
#undef BNAR_VIRTUAL
};

class CpuPlatform : public Platform {
 public:
  explicit CpuPlatform(cpu::ThreadPool& pool) : pool_(pool) {}

  void Statistics(const Problem& problem, const void* x, void* mean,
                  void* var) override {
    cpu::Statistics(pool_, problem, x, mean, var);
  }
#define BNAR_ON_POOL(N, name, parameters, ...) \
  void name parameters override { cpu::name(pool_, __VA_ARGS__); }
#define BNAR_ALL_ON_POOL(N, ...) BNAR_FOR_EACH_CALL(N, BNAR_ON_POOL)
  BNAR_FOR_EACH_INPUT_COUNT(BNAR_ALL_ON_POOL)
#undef BNAR_ALL_ON_POOL
#undef BNAR_ON_POOL

 private:
  cpu::ThreadPool& pool_;
};

}  // namespace testing
}  // namespace jax_bnar

#endif  // JAX_BNAR_TESTS_NATIVE_PLATFORM_H_
