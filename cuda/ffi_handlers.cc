#include "cuda/ffi_handlers.h"

#include <cuda_runtime.h>

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

ffi::Error Initialize() {
  return gpu::ToFfiError(gpu::PrepareKernels(), "while loading the kernels");
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(InitializeCuda, Initialize,
                              ffi::Ffi::BindInitialize());

// A call enqueues the same launches each time: XLA may capture and replay it.
BNAR_DEFINE_HANDLERS(Cuda, CudaBackend,
                     ffi::Ffi::Bind().Ctx<ffi::PlatformStream<cudaStream_t>>(),
                     {ffi::Traits::kCmdBufferCompatible});

}  // namespace jax_bnar
