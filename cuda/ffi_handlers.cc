#include "cuda/ffi_handlers.h"

#include <cuda_runtime.h>

#include <mutex>
#include <set>

#include "cuda/ffi_backend.h"
#include "native/ffi_operations.h"

namespace jax_bnar {
namespace {

namespace ffi = xla::ffi;

class CudaBackend : public gpu::FfiBackend {
 public:
  using Native = cudaStream_t;
  using FfiBackend::FfiBackend;
};

// XLA calls this before each run of a program, not once: the attributes are set
// for a device the first time.
cudaError_t PrepareKernelsOnce() {
  static std::mutex mutex;
  static std::set<int>* prepared = new std::set<int>;  // outlives every thread
  int device = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  const std::lock_guard<std::mutex> lock(mutex);
  if (prepared->count(device) != 0) return cudaSuccess;
  error = gpu::PrepareKernels();
  if (error == cudaSuccess) prepared->insert(device);
  return error;
}

ffi::Error Initialize() {
  return gpu::ToFfiError(PrepareKernelsOnce(), "while loading the kernels");
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(InitializeCuda, Initialize,
                              ffi::Ffi::BindInitialize());

// A call enqueues the same launches each time: XLA may capture and replay it.
BNAR_DEFINE_HANDLERS(Cuda, CudaBackend,
                     ffi::Ffi::Bind().Ctx<ffi::PlatformStream<cudaStream_t>>(),
                     {ffi::Traits::kCmdBufferCompatible});

}  // namespace jax_bnar
