// The platforms on which the operations are tested.

#ifndef JAX_BNAR_TESTS_NATIVE_PLATFORM_H_
#define JAX_BNAR_TESTS_NATIVE_PLATFORM_H_

#include "cpu/operations.h"
#include "native/problem.h"

namespace jax_bnar {
namespace testing {

class Platform {
 public:
  virtual ~Platform() = default;

  virtual void Statistics(const Problem& problem, const void* x, void* mean,
                          void* var) = 0;
  virtual void Normalise(const Problem& problem,
                         const NormaliseBuffers& buffers,
                         const AffineOperands& affine,
                         const VectorOperand& mean,
                         const VectorOperand& var) = 0;
  virtual void Forward(const Problem& problem, const NormaliseBuffers& buffers,
                       const AffineOperands& affine, void* mean, void* var) = 0;
  virtual void BackwardReduce(const Problem& problem,
                              const GradientBuffers& buffers,
                              const ReduceOperands& operands, void* sum_e,
                              void* sum_e_centred, void* dz) = 0;
  virtual void BackwardApply(const Problem& problem,
                             const GradientBuffers& buffers,
                             const ApplyOperands& operands, void* dx) = 0;
  virtual void Backward(const Problem& problem, const GradientBuffers& buffers,
                        const BackwardOperands& operands, void* dx,
                        void* dscale, void* dbias, void* dz) = 0;
};

class CpuPlatform : public Platform {
 public:
  explicit CpuPlatform(cpu::ThreadPool& pool) : pool_(pool) {}

  void Statistics(const Problem& problem, const void* x, void* mean,
                  void* var) override {
    cpu::Statistics(pool_, problem, x, mean, var);
  }
  void Normalise(const Problem& problem, const NormaliseBuffers& buffers,
                 const AffineOperands& affine, const VectorOperand& mean,
                 const VectorOperand& var) override {
    cpu::Normalise(pool_, problem, buffers, affine, mean, var);
  }
  void Forward(const Problem& problem, const NormaliseBuffers& buffers,
               const AffineOperands& affine, void* mean, void* var) override {
    cpu::Forward(pool_, problem, buffers, affine, mean, var);
  }
  void BackwardReduce(const Problem& problem, const GradientBuffers& buffers,
                      const ReduceOperands& operands, void* sum_e,
                      void* sum_e_centred, void* dz) override {
    cpu::BackwardReduce(pool_, problem, buffers, operands, sum_e, sum_e_centred,
                        dz);
  }
  void BackwardApply(const Problem& problem, const GradientBuffers& buffers,
                     const ApplyOperands& operands, void* dx) override {
    cpu::BackwardApply(pool_, problem, buffers, operands, dx);
  }
  void Backward(const Problem& problem, const GradientBuffers& buffers,
                const BackwardOperands& operands, void* dx, void* dscale,
                void* dbias, void* dz) override {
    cpu::Backward(pool_, problem, buffers, operands, dx, dscale, dbias, dz);
  }

 private:
  cpu::ThreadPool& pool_;
};

}  // namespace testing
}  // namespace jax_bnar

#endif  // JAX_BNAR_TESTS_NATIVE_PLATFORM_H_
