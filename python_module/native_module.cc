// The Python module jax_bnar._native, which exports the handlers of the CPU
// kernels and answers questions about XLA's FFI API. It also has the planner of
// the CUDA kernels, and handlers that stand in for them. cuda_module.cc is the
// module of the CUDA kernels.

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>

#include <string>

#include "cpu/dispatch.h"
#include "cpu/ffi_handlers.h"
#include "cpu/huge_pages.h"
#include "native/operations.h"
#include "python_module/cuda_planner.h"
#include "python_module/encapsulate.h"
#include "python_module/ffi_api_version.h"
#include "python_module/missing_cuda.h"
#include "python_module/workspace_sizes.h"

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

// A ValueError unless the message, which may contain bytes of a variable that
// are not UTF-8, is empty.
void Require(const std::string& wrong) {
  if (wrong.empty()) return;
  const nb::object message = nb::steal(PyUnicode_DecodeUTF8(
      wrong.data(), static_cast<Py_ssize_t>(wrong.size()), "backslashreplace"));
  if (message.is_valid()) PyErr_SetObject(PyExc_ValueError, message.ptr());
  throw nb::python_error();
}

const char* CpuIsa() {
  Require(jax_bnar::cpu::WrongIsa());
  return jax_bnar::cpu::IsaName();
}

bool HugePages() {
  Require(jax_bnar::cpu::WrongHugePages());
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
  jax_bnar::AddWorkspaceSizes(m, IsCuda);
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
