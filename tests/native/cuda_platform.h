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
    Check(problem, 1, [&](cuda::Launch& launch) {
      return cuda::Statistics(launch, problem, x, mean, var);
    });
  }
#define BNAR_LAUNCHED(N, name, parameters, ...)   \
  void name parameters override {                 \
    Check(problem, N, [&](cuda::Launch& launch) { \
      return cuda::name(launch, __VA_ARGS__);     \
    });                                           \
  }
#define BNAR_ALL_LAUNCHED(N, ...) BNAR_FOR_EACH_CALL(N, BNAR_LAUNCHED)
  BNAR_FOR_EACH_INPUT_COUNT(BNAR_ALL_LAUNCHED)
#undef BNAR_ALL_LAUNCHED
#undef BNAR_LAUNCHED

 private:
  // Operations with N inputs have the workspace of N times as many groups.
  template <typename F>
  void Check(const Problem& problem, int inputs, F f) {
    Shape shape = problem.shape;
    shape.groups *= inputs;
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
