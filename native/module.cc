// The Python module: one dict of capsules for each platform.

#include <nanobind/nanobind.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "cpu/dispatch.h"
#include "cpu/ffi_handlers.h"
#include "native/ffi_api_version.h"
#include "native/operations.h"

#ifdef JAX_BNAR_HAS_CUDA
#include "cuda/ffi_handlers.h"
#include "cuda/host/workspace.h"
#include "cuda/launch/build_info.h"
#include "cuda/launch/launch_counts.h"
#endif

namespace nb = nanobind;

namespace {

template <typename T>
nb::capsule Encapsulate(T* handler) {
  static_assert(std::is_invocable_r_v<XLA_FFI_Error*, T, XLA_FFI_CallFrame*>,
                "an FFI handler takes a call frame and returns an error");
  return nb::capsule(reinterpret_cast<void*>(handler));
}

#ifdef JAX_BNAR_HAS_CUDA
// The stages of one custom call.
template <typename T>
nb::dict Stages(T* execute) {
  nb::dict stages;
  stages["initialize"] = Encapsulate(jax_bnar::InitializeCuda);
  stages["execute"] = Encapsulate(execute);
  return stages;
}
#endif

nb::dict Registrations() {
  nb::dict platforms;
  nb::dict cpu;
#define BNAR_REGISTER(name, python, ...) \
  cpu[python] = Encapsulate(jax_bnar::cpu::name##Handler);
  BNAR_FOR_EACH_OPERATION(BNAR_REGISTER)
#undef BNAR_REGISTER
  platforms["cpu"] = cpu;
#ifdef JAX_BNAR_HAS_CUDA
  nb::dict cuda;
#define BNAR_REGISTER(name, python, ...) \
  cuda[python] = Stages(jax_bnar::name##Cuda);
  BNAR_FOR_EACH_OPERATION(BNAR_REGISTER)
#undef BNAR_REGISTER
  platforms["CUDA"] = cuda;
#endif
  return platforms;
}

// Bytes of the hidden result of an operation that sums.
int64_t WorkspaceBytes(const std::string& platform, int64_t groups,
                       int64_t rows, int64_t channels, int64_t inner) {
#ifdef JAX_BNAR_HAS_CUDA
  if (platform == "CUDA") {
    return jax_bnar::cuda::WorkspaceBytes({groups, rows, channels, inner});
  }
#endif
  static_cast<void>(platform);
  static_cast<void>(groups + rows + channels + inner);
  return 0;
}

// A bound on that where a size is not known: bytes, bytes for each group, and
// bytes for each channel of each group.
std::tuple<int64_t, int64_t, int64_t> WorkspaceBound(
    const std::string& platform) {
#ifdef JAX_BNAR_HAS_CUDA
  if (platform == "CUDA") {
    const jax_bnar::cuda::WorkspaceBound bound =
        jax_bnar::cuda::BoundOfWorkspace();
    return {bound.bytes, bound.bytes_per_group, bound.bytes_per_channel};
  }
#endif
  static_cast<void>(platform);
  return {0, 0, 0};
}

// The version of CUDA that the kernels were compiled with.
std::optional<std::pair<int, int>> CudaVersion() {
#ifdef JAX_BNAR_HAS_CUDA
  const int version = jax_bnar::cuda::ToolkitVersion();
  return std::pair{version / 1000, version % 1000 / 10};
#else
  return std::nullopt;
#endif
}

std::vector<int> CudaArchitectures() {
#ifdef JAX_BNAR_HAS_CUDA
  return jax_bnar::cuda::Architectures();
#else
  return {};
#endif
}

// Why there are no CUDA kernels, or an empty string.
const char* WhyNoCuda() {
#ifdef JAX_BNAR_HAS_CUDA
  return "";
#else
  return JAX_BNAR_WHY_NO_CUDA;
#endif
}

const char* CpuIsa() {
  if (!jax_bnar::cpu::WrongIsa().empty()) {
    throw nb::value_error(jax_bnar::cpu::WrongIsa().c_str());
  }
  return jax_bnar::cpu::IsaName();
}

std::map<std::string, int64_t> CudaLaunches() {
#ifdef JAX_BNAR_HAS_CUDA
  return jax_bnar::cuda::LaunchCounts();
#else
  return {};
#endif
}

}  // namespace

NB_MODULE(_native, m) {
  m.doc() = "FFI handlers of jax_bnar.";
  m.def("registrations", &Registrations,
        "Capsules of the handlers, by platform and operation.");
  m.def("cpu_isa", &CpuIsa,
        "The instruction set that the CPU kernels run with on this machine; "
        "ValueError where JAX_BNAR_CPU_ISA asks for one that they cannot.");
  m.def("workspace_bytes", &WorkspaceBytes, nb::arg("platform"),
        nb::arg("groups"), nb::arg("rows"), nb::arg("channels"),
        nb::arg("inner"),
        "Bytes that an operation which sums needs as one more result, or 0.");
  m.def(
      "workspace_bound", &WorkspaceBound, nb::arg("platform"),
      "(bytes, bytes a group, bytes a channel of a group), whose sum is never "
      "below workspace_bytes; zeros where that is 0.");
  m.def("cuda_version", &CudaVersion,
        "(major, minor) of the CUDA that this build's kernels were compiled "
        "with, None without CUDA kernels.");
  m.def("cuda_architectures", &CudaArchitectures,
        "Compute capabilities, times 10, that the CUDA kernels are compiled "
        "for.");
  m.def("why_no_cuda", &WhyNoCuda,
        "Why this build has no CUDA kernels; an empty string where it has.");
  m.def("cuda_launches", &CudaLaunches,
        "Launches of each CUDA kernel by each strategy, since the process "
        "began.");
  m.def(
      "ffi_api_version", [] { return jax_bnar::kBuildFfiApiVersion; },
      "(major, minor) of XLA's FFI API that the handlers are built for.");
  m.def(
      "ffi_api_probe", [] { return Encapsulate(jax_bnar::FfiApiProbe); },
      "Capsule of a handler; registering it tells runtime_ffi_api_version.");
  m.def("runtime_ffi_api_version", &jax_bnar::RuntimeFfiApiVersion,
        "(major, minor) of the runtime that ffi_api_probe was last registered "
        "with, None before.");
}
