#include "cuda/ffi_handlers.h"

#include <cuda_runtime.h>

#include <atomic>
#include <cstdint>

#include "cuda/ffi_backend.h"
#include "native/ffi_targets.h"

namespace jax_bnar {
namespace {

namespace ffi = xla::ffi;

class CudaBackend : public cuda::FfiBackend {
 public:
  using Native = cudaStream_t;
  using FfiBackend::FfiBackend;
};

// XLA calls this before each run of a program, not once: the attributes are set
// for a device the first time (from the 65th device on, every time).
cudaError_t PrepareKernelsOnce() {
  static std::atomic<uint64_t> prepared{0};  // a bit for each device
  int device = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  const uint64_t bit = device < 64 ? uint64_t{1} << device : 0;
  if ((prepared.load(std::memory_order_acquire) & bit) != 0) return error;
  error = cuda::PrepareKernels();
  if (error == cudaSuccess) prepared.fetch_or(bit, std::memory_order_release);
  return error;
}

ffi::Error Initialize() {
  return cuda::ToFfiError(PrepareKernelsOnce(),
                          "while loading the kernels; `python -m "
                          "jax_bnar.doctor` says for which GPUs they are");
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(InitializeCuda, Initialize,
                              ffi::Ffi::BindInitialize());

// A call enqueues the same launches each time: XLA may capture and replay it.
BNAR_DEFINE_HANDLERS(Cuda, CudaBackend,
                     ffi::Ffi::Bind().Ctx<ffi::PlatformStream<cudaStream_t>>(),
                     {ffi::Traits::kCmdBufferCompatible})

}  // namespace jax_bnar
