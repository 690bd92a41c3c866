// The Python module _cuda, which exports the handlers of the CUDA kernels. A
// build from source puts it next to jax_bnar._native; the distribution
// jax-bnar-cuda13 has it in a package of its own.

#include <nanobind/nanobind.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "cuda/ffi_handlers.h"
#include "cuda/host/settings.h"
#include "cuda/launch/build_info.h"
#include "cuda/launch/launch_counts.h"
#include "native/cuda_abi.h"
#include "native/operations.h"
#include "python_module/encapsulate.h"
#include "python_module/ffi_api_version.h"
#include "python_module/workspace_sizes.h"

namespace nb = nanobind;

namespace {

// Returns the handlers of one custom call by stage.
template <typename T>
nb::dict Stages(T* execute) {
  nb::dict stages;
  stages["instantiate"] = jax_bnar::Encapsulate(jax_bnar::CheckCudaAbi);
  stages["initialize"] = jax_bnar::Encapsulate(jax_bnar::InitializeCuda);
  stages["execute"] = jax_bnar::Encapsulate(execute);
  return stages;
}

nb::dict Registrations() {
  nb::dict cuda;
#define BNAR_REGISTER(name, python, ...) \
  cuda[python] = Stages(jax_bnar::CudaTarget<jax_bnar::name##Cuda>);
  BNAR_FOR_EACH_TARGET(BNAR_REGISTER)
#undef BNAR_REGISTER
  nb::dict platforms;
  platforms["CUDA"] = cuda;
  return platforms;
}

std::pair<int, int> CudaVersion() {
  const int version = jax_bnar::cuda::ToolkitVersion();
  return {version / 1000, version % 1000 / 10};
}

}  // namespace

NB_MODULE(_cuda, m) {
  m.doc() = "FFI handlers of jax_bnar on NVIDIA GPUs.";
  m.def("registrations", &Registrations,
        "Capsules of the handlers, by platform, operation and stage.");
  jax_bnar::AddWorkspaceSizes(m, [](const std::string&) { return true; });
  m.def(
      "cuda_abi", [] { return jax_bnar::kCudaAbi; },
      "The version of the calls of the CUDA kernels, their attribute abi.");
  m.def("cuda_version", &CudaVersion,
        "(major, minor) of the CUDA that the kernels were compiled with.");
  m.def("cuda_architectures", &jax_bnar::cuda::Architectures,
        "Compute capabilities, times 10, that the kernels are compiled for.");
  m.def(
      "cuda_ptx_architectures",
      [] { return std::vector<int>{JAX_BNAR_CUDA_PTX}; },
      "Compute capabilities, times 10, of the PTX in this module, which the "
      "driver compiles for newer GPUs.");
  m.def("cuda_launches", &jax_bnar::cuda::LaunchCounts,
        "Launches of each kernel by each strategy, since the process began.");
  m.def("forget_cuda_settings", &jax_bnar::cuda::ForgetSettings,
        "Lets the next call read the variables JAX_BNAR_CUDA_... again.");
  m.def(
      "ffi_api_version", [] { return jax_bnar::kBuildFfiApiVersion; },
      "(major, minor) of XLA's FFI API that the handlers are built for.");
}
