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

  virtual void DualForward(const Problem& problem,
                           const DualNormaliseBuffers& buffers,
                           const Both<AffineOperands>& affine,
                           const Both<void*>& mean, const Both<void*>& var) = 0;
  virtual void DualNormalise(const Problem& problem,
                             const DualNormaliseBuffers& buffers,
                             const Both<AffineOperands>& affine,
                             const Both<VectorOperand>& mean,
                             const Both<VectorOperand>& var) = 0;
  virtual void DualBackward(const Problem& problem,
                            const DualGradientBuffers& buffers,
                            const Both<BackwardOperands>& operands,
                            const Both<void*>& dx, const Both<void*>& dscale,
                            void* dbias) = 0;
  virtual void DualBackwardReduce(const Problem& problem,
                                  const DualGradientBuffers& buffers,
                                  const Both<ReduceOperands>& operands,
                                  void* sum_e,
                                  const Both<void*>& sum_e_centred) = 0;
  virtual void DualBackwardApply(const Problem& problem,
                                 const DualGradientBuffers& buffers,
                                 const Both<ApplyOperands>& operands,
                                 const Both<void*>& dx) = 0;
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

  void DualForward(const Problem& problem, const DualNormaliseBuffers& buffers,
                   const Both<AffineOperands>& affine, const Both<void*>& mean,
                   const Both<void*>& var) override {
    cpu::DualForward(pool_, problem, buffers, affine, mean, var);
  }
  void DualNormalise(const Problem& problem,
                     const DualNormaliseBuffers& buffers,
                     const Both<AffineOperands>& affine,
                     const Both<VectorOperand>& mean,
                     const Both<VectorOperand>& var) override {
    cpu::DualNormalise(pool_, problem, buffers, affine, mean, var);
  }
  void DualBackward(const Problem& problem, const DualGradientBuffers& buffers,
                    const Both<BackwardOperands>& operands,
                    const Both<void*>& dx, const Both<void*>& dscale,
                    void* dbias) override {
    cpu::DualBackward(pool_, problem, buffers, operands, dx, dscale, dbias);
  }
  void DualBackwardReduce(const Problem& problem,
                          const DualGradientBuffers& buffers,
                          const Both<ReduceOperands>& operands, void* sum_e,
                          const Both<void*>& sum_e_centred) override {
    cpu::DualBackwardReduce(pool_, problem, buffers, operands, sum_e,
                            sum_e_centred);
  }
  void DualBackwardApply(const Problem& problem,
                         const DualGradientBuffers& buffers,
                         const Both<ApplyOperands>& operands,
                         const Both<void*>& dx) override {
    cpu::DualBackwardApply(pool_, problem, buffers, operands, dx);
  }

 private:
  cpu::ThreadPool& pool_;
};

}  // namespace testing
}  // namespace jax_bnar

#endif  // JAX_BNAR_TESTS_NATIVE_PLATFORM_H_
