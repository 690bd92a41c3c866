// The Python module: one dict of capsules for each platform.

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>

#include <type_traits>

#include "cpu/dispatch.h"
#include "cpu/ffi_api_version.h"
#include "cpu/ffi_handlers.h"

namespace nb = nanobind;

namespace {

template <typename T>
nb::capsule Encapsulate(T* handler) {
  static_assert(std::is_invocable_r_v<XLA_FFI_Error*, T, XLA_FFI_CallFrame*>,
                "an FFI handler takes a call frame and returns an error");
  return nb::capsule(reinterpret_cast<void*>(handler));
}

nb::dict Registrations() {
  nb::dict cpu;
  cpu["forward"] = Encapsulate(jax_bnar::ForwardCpu);
  cpu["backward"] = Encapsulate(jax_bnar::BackwardCpu);
  cpu["statistics"] = Encapsulate(jax_bnar::StatisticsCpu);
  cpu["normalise"] = Encapsulate(jax_bnar::NormaliseCpu);
  cpu["backward_reduce"] = Encapsulate(jax_bnar::BackwardReduceCpu);
  cpu["backward_apply"] = Encapsulate(jax_bnar::BackwardApplyCpu);
  nb::dict platforms;
  platforms["cpu"] = cpu;
  return platforms;
}

}  // namespace

NB_MODULE(_native, m) {
  m.doc() = "FFI handlers of jax_bnar.";
  m.def("registrations", &Registrations,
        "Capsules of the handlers, by platform and operation.");
  m.def("cpu_isa", &jax_bnar::IsaName,
        "The instruction set that the CPU kernels run with on this machine.");
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
