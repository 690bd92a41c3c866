// The Python module jax_bnar._native, which exports the handlers of the CPU
// kernels and answers questions about XLA's FFI API. It also has the planner of
// the CUDA kernels, and handlers that stand in for them. cuda_module.cc is the
// module of the CUDA kernels.

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>

#include <cstdint>
#include <string>
#include <tuple>

#include "cpu/dispatch.h"
#include "cpu/ffi_handlers.h"
#include "cpu/huge_pages.h"
#include "cuda/host/tiling.h"
#include "cuda/host/workspace.h"
#include "native/operations.h"
#include "python_module/cuda_planner.h"
#include "python_module/encapsulate.h"
#include "python_module/ffi_api_version.h"
#include "python_module/missing_cuda.h"

namespace nb = nanobind;

namespace {

nb::dict Registrations() {
  nb::dict cpu;
#define BNAR_REGISTER(name, python, ...) \
  cpu[python] = jax_bnar::Encapsulate(jax_bnar::cpu::name##Handler);
  BNAR_FOR_EACH_TARGET(BNAR_REGISTER)
#undef BNAR_REGISTER
  nb::dict platforms;
  platforms["cpu"] = cpu;
  return platforms;
}

// What the CUDA kernels need is known here as well, so that programs for them
// can be compiled where they are not installed.
bool IsCuda(const std::string& platform) { return platform == "CUDA"; }

// The CPU kernels need no workspace: they allocate their scratch memory.
int64_t WorkspaceBytes(const std::string& platform, int64_t groups,
                       int64_t rows, int64_t channels, int64_t inner) {
  if (!IsCuda(platform)) return 0;
  return jax_bnar::cuda::WorkspaceBytes({groups, rows, channels, inner});
}

std::tuple<int64_t, int64_t, int64_t> WorkspaceBound(
    const std::string& platform) {
  if (!IsCuda(platform)) return {0, 0, 0};
  const jax_bnar::cuda::WorkspaceBound bound =
      jax_bnar::cuda::BoundOfWorkspace();
  return {bound.bytes, bound.bytes_per_group, bound.bytes_per_channel};
}

// The CPU kernels write rows, and a mask in the order of the elements.
int64_t MaskChannels(const std::string& platform, int64_t groups, int64_t rows,
                     int64_t channels, int64_t inner, int64_t item_size) {
  if (!IsCuda(platform)) return 0;
  return jax_bnar::cuda::MaskChannels({groups, rows, channels, inner},
                                      item_size);
}

const char* CpuIsa() {
  if (!jax_bnar::cpu::WrongIsa().empty()) {
    throw nb::value_error(jax_bnar::cpu::WrongIsa().c_str());
  }
  return jax_bnar::cpu::IsaName();
}

bool HugePages() {
  if (!jax_bnar::cpu::WrongHugePages().empty()) {
    throw nb::value_error(jax_bnar::cpu::WrongHugePages().c_str());
  }
  return jax_bnar::cpu::UsesHugePages();
}

}  // namespace

NB_MODULE(_native, m) {
  m.doc() = "FFI handlers of jax_bnar on the CPU.";
  m.def("registrations", &Registrations,
        "Capsules of the handlers, by platform and operation.");
  m.def("cpu_isa", &CpuIsa,
        "The instruction set that the CPU kernels run with on this machine; "
        "ValueError where JAX_BNAR_CPU_ISA asks for one that they cannot.");
  m.def("huge_pages", &HugePages,
        "Whether the CPU kernels ask this machine for huge pages for large "
        "results; ValueError where JAX_BNAR_HUGE_PAGES is neither 0 nor 1.");
  m.def("workspace_bytes", &WorkspaceBytes, nb::arg("platform"),
        nb::arg("groups"), nb::arg("rows"), nb::arg("channels"),
        nb::arg("inner"),
        "Bytes that an operation which sums needs as one more result, or 0.");
  m.def("workspace_bound", &WorkspaceBound, nb::arg("platform"),
        "(b, g, c), where b + groups * (g + channels * c) is never below "
        "workspace_bytes; zeros where that is 0.");
  m.def("mask_channels", &MaskChannels, nb::arg("platform"), nb::arg("groups"),
        nb::arg("rows"), nb::arg("channels"), nb::arg("inner"),
        nb::arg("item_size"),
        "How many channels of a row have their bits together in a mask, or 0 "
        "where the bits are in the order of the elements.");
  m.def(
      "why_no_cuda", [] { return JAX_BNAR_WHY_NO_CUDA; },
      "Why the CUDA kernels were not built with this module; an empty string "
      "where they were.");
  m.def(
      "ffi_api_version", [] { return jax_bnar::kBuildFfiApiVersion; },
      "(major, minor) of XLA's FFI API that the handlers are built for.");
  m.def(
      "ffi_api_probe",
      [] { return jax_bnar::Encapsulate(jax_bnar::FfiApiProbe); },
      "Capsule of a handler; registering it tells runtime_ffi_api_version.");
  m.def("runtime_ffi_api_version", &jax_bnar::RuntimeFfiApiVersion,
        "(major, minor) of the runtime that ffi_api_probe was last registered "
        "with, None before.");
  jax_bnar::AddCudaPlanner(m);
  jax_bnar::AddMissingCuda(m);
}
