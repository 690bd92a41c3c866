// The operations of cuda/operations.h behind native/ffi_operations.h.

#ifndef JAX_BNAR_CUDA_FFI_BACKEND_H_
#define JAX_BNAR_CUDA_FFI_BACKEND_H_

#include <string>

#include "cuda/host/plan.h"
#include "cuda/host/settings.h"
#include "cuda/host/workspace.h"
#include "cuda/operations.h"
#include "native/ffi_call.h"
#include "native/problem.h"
#include "xla/ffi/api/ffi.h"

namespace jax_bnar {
namespace cuda {

inline xla::ffi::Error ToFfiError(cudaError_t error, const std::string& where) {
  if (error == cudaSuccess) return xla::ffi::Error::Success();
  const auto code = error == cudaErrorMemoryAllocation
                        ? xla::ffi::ErrorCode::kResourceExhausted
                        : xla::ffi::ErrorCode::kInternal;
  return xla::ffi::Error(code, std::string("jax_bnar: ") +
                                   cudaGetErrorName(error) + " (" +
                                   cudaGetErrorString(error) + ") " + where);
}

class FfiBackend {
 public:
  static constexpr bool kTakesMaskChannels = true;
  static constexpr bool kTakesFloat32Outputs = false;

  explicit FfiBackend(cudaStream_t stream) : launch_{stream, nullptr, {}, {}} {}

  // XLA allocates the workspace as one more result, because an allocation here
  // could not be captured in a CUDA graph. The sums of two inputs take as much
  // of it as those of twice as many groups.
  void ReadWorkspace(FfiCall& call, int inputs) {
    if (call.failed()) return;
    Shape shape = call.problem().shape;
    shape.groups *= inputs;
    launch_.workspace = call.Workspace(WorkspaceBytes(shape));
  }

#define BNAR_RUN_ON_STREAM(name, ...)                         \
  template <typename... Args>                                 \
  xla::ffi::Error name(const Args&... args) {                 \
    return Run([&] { return cuda::name(launch_, args...); }); \
  }
  BNAR_FOR_EACH_OPERATION(BNAR_RUN_ON_STREAM)
#undef BNAR_RUN_ON_STREAM

 private:
  template <typename F>
  xla::ffi::Error Run(F f) {
    const std::string wrong = KnownSettings(&launch_.settings);
    if (!wrong.empty()) {
      return xla::ffi::Error::InvalidArgument("jax_bnar: " + wrong);
    }
    const cudaError_t error = f();
    if (error == cudaSuccess) return xla::ffi::Error::Success();
    const bool launched = !launch_.failure.empty();
    return ToFfiError(error,
                      launched ? "in " + launch_.failure : "in a device query");
  }

  Launch launch_;
};

}  // namespace cuda
}  // namespace jax_bnar

#endif  // JAX_BNAR_CUDA_FFI_BACKEND_H_
