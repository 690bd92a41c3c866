// A native module whose kernels for "cpu" are the CUDA kernels in the host
// emulation, so that the operators' tests run on them unchanged (see
// tests/conftest.py).

#include <nanobind/nanobind.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/string.h>

#include <string>

#include "cuda/ffi_backend.h"
#include "cuda/host/settings.h"
#include "cuda/launch/launch_counts.h"
#include "native/cuda_abi.h"
#include "native/ffi_targets.h"
#include "python_module/encapsulate.h"
#include "python_module/missing_cuda.h"
#include "python_module/workspace_sizes.h"

namespace nb = nanobind;

namespace jax_bnar {
namespace {

namespace ffi = xla::ffi;

class EmulatedBackend : public cuda::FfiBackend {
 public:
  using Native = ffi::ThreadPool;
  explicit EmulatedBackend(ffi::ThreadPool&) : FfiBackend(nullptr) {}
};

BNAR_DEFINE_HANDLERS(Emulated, EmulatedBackend,
                     ffi::Ffi::Bind().Ctx<ffi::ThreadPool>())

// The handlers of one custom call by stage, as python_module/cuda_module.cc has
// them.
template <typename T>
nb::dict Stages(T* execute) {
  nb::dict stages;
  stages["instantiate"] = Encapsulate(CheckCudaAbi);
  stages["execute"] = Encapsulate(execute);
  return stages;
}

nb::dict Registrations() {
  nb::dict handlers;
#define BNAR_REGISTER(name, python, ...) \
  handlers[python] = Stages(CudaTarget<name##Emulated>);
  BNAR_FOR_EACH_TARGET(BNAR_REGISTER)
#undef BNAR_REGISTER
  nb::dict platforms;
  platforms["cpu"] = handlers;
  return platforms;
}

}  // namespace
}  // namespace jax_bnar

NB_MODULE(_native, m) {
  if (jax_bnar::cuda::PrepareKernels() != cudaSuccess) {
    throw nb::import_error("the emulated device rejected the kernels");
  }
  m.def("registrations", &jax_bnar::Registrations);
  m.def("cpu_isa", [] { return "emulation of CUDA"; });
  m.def("huge_pages", [] { return false; });
  jax_bnar::AddWorkspaceSizes(m, [](const std::string&) { return true; });
  m.def("cuda_launches", &jax_bnar::cuda::LaunchCounts);
  m.def("forget_cuda_settings", &jax_bnar::cuda::ForgetSettings);
  jax_bnar::AddMissingCuda(m);
  m.def("why_no_cuda", [] { return "this is the emulation"; });
}
