// The CUDA operations on emulated devices.

#ifndef JAX_BNAR_TESTS_NATIVE_CUDA_PLATFORM_H_
#define JAX_BNAR_TESTS_NATIVE_CUDA_PLATFORM_H_

#include <cuda_runtime.h>

#include <cstring>
#include <string>
#include <utility>

#include "cuda/host/workspace.h"
#include "cuda/operations.h"
#include "tests/native/array.h"
#include "tests/native/check.h"
#include "tests/native/platform.h"

namespace jax_bnar {
namespace testing {

// The workspace is as XLA gives it: it is not zeroed, and has not a byte more
// than was asked for. No launch may leave its tag there, because a replayed
// CUDA graph would take it for its own.
class CudaPlatform : public Platform {
 public:
  explicit CudaPlatform(const cuda::Settings& settings) : settings_(settings) {}

  void Statistics(const Problem& problem, const void* x, void* mean,
                  void* var) override {
    Check(problem, [&](cuda::Launch& launch) {
      return cuda::Statistics(launch, problem, x, mean, var);
    });
  }
  void Normalise(const Problem& problem, const NormaliseBuffers& buffers,
                 const AffineOperands& affine, const VectorOperand& mean,
                 const VectorOperand& var) override {
    Check(problem, [&](cuda::Launch& launch) {
      return cuda::Normalise(launch, problem, buffers, affine, mean, var);
    });
  }
  void Forward(const Problem& problem, const NormaliseBuffers& buffers,
               const AffineOperands& affine, void* mean, void* var) override {
    Check(problem, [&](cuda::Launch& launch) {
      return cuda::Forward(launch, problem, buffers, affine, mean, var);
    });
  }
  void BackwardReduce(const Problem& problem, const GradientBuffers& buffers,
                      const ReduceOperands& operands, void* sum_e,
                      void* sum_e_centred, void* dz) override {
    Check(problem, [&](cuda::Launch& launch) {
      return cuda::BackwardReduce(launch, problem, buffers, operands, sum_e,
                                  sum_e_centred, dz);
    });
  }
  void BackwardApply(const Problem& problem, const GradientBuffers& buffers,
                     const ApplyOperands& operands, void* dx) override {
    Check(problem, [&](cuda::Launch& launch) {
      return cuda::BackwardApply(launch, problem, buffers, operands, dx);
    });
  }
  void Backward(const Problem& problem, const GradientBuffers& buffers,
                const BackwardOperands& operands, void* dx, void* dscale,
                void* dbias, void* dz) override {
    Check(problem, [&](cuda::Launch& launch) {
      return cuda::Backward(launch, problem, buffers, operands, dx, dscale,
                            dbias, dz);
    });
  }

  void DualForward(const Problem& problem, const DualNormaliseBuffers& buffers,
                   const Both<AffineOperands>& affine, const Both<void*>& mean,
                   const Both<void*>& var) override {
    CheckBoth(problem, [&](cuda::Launch& launch) {
      return cuda::DualForward(launch, problem, buffers, affine, mean, var);
    });
  }
  void DualNormalise(const Problem& problem,
                     const DualNormaliseBuffers& buffers,
                     const Both<AffineOperands>& affine,
                     const Both<VectorOperand>& mean,
                     const Both<VectorOperand>& var) override {
    CheckBoth(problem, [&](cuda::Launch& launch) {
      return cuda::DualNormalise(launch, problem, buffers, affine, mean, var);
    });
  }
  void DualBackward(const Problem& problem, const DualGradientBuffers& buffers,
                    const Both<BackwardOperands>& operands,
                    const Both<void*>& dx, const Both<void*>& dscale,
                    void* dbias) override {
    CheckBoth(problem, [&](cuda::Launch& launch) {
      return cuda::DualBackward(launch, problem, buffers, operands, dx, dscale,
                                dbias);
    });
  }
  void DualBackwardReduce(const Problem& problem,
                          const DualGradientBuffers& buffers,
                          const Both<ReduceOperands>& operands, void* sum_e,
                          const Both<void*>& sum_e_centred) override {
    CheckBoth(problem, [&](cuda::Launch& launch) {
      return cuda::DualBackwardReduce(launch, problem, buffers, operands, sum_e,
                                      sum_e_centred);
    });
  }
  void DualBackwardApply(const Problem& problem,
                         const DualGradientBuffers& buffers,
                         const Both<ApplyOperands>& operands,
                         const Both<void*>& dx) override {
    CheckBoth(problem, [&](cuda::Launch& launch) {
      return cuda::DualBackwardApply(launch, problem, buffers, operands, dx);
    });
  }

 private:
  template <typename F>
  void Check(const Problem& problem, F f) {
    CheckWith(problem.shape, f);
  }

  // Operations with two inputs have the workspace of twice as many groups.
  template <typename F>
  void CheckBoth(const Problem& problem, F f) {
    Shape shape = problem.shape;
    shape.groups *= 2;
    CheckWith(shape, f);
  }

  template <typename F>
  void CheckWith(const Shape& shape, F f) {
    const int64_t bytes = cuda::WorkspaceBytes(shape);
    ExactMemory workspace(bytes, 0);
    cuda::Launch launch{nullptr, workspace.data(), settings_, {}};
    const cudaError_t error = f(launch);
    BNAR_CHECK(error == cudaSuccess, std::string(cudaGetErrorName(error)) +
                                         ": " + launch.failure + ": " +
                                         cuda_emulation::LastMessage());
    for (int64_t i = 0; i + 8 <= bytes; i += 8) {
      uint64_t word;
      std::memcpy(&word, workspace.data() + i, 8);
      BNAR_CHECK(word != launch.tag, "a tag is left in the workspace");
    }
  }

  cuda::Settings settings_;
};

}  // namespace testing
}  // namespace jax_bnar

#endif  // JAX_BNAR_TESTS_NATIVE_CUDA_PLATFORM_H_
