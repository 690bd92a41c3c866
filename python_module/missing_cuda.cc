#include "python_module/missing_cuda.h"

#include <nanobind/stl/string.h>

#include <string>
#include <utility>

#include "native/cuda_abi.h"
#include "native/operations.h"
#include "python_module/encapsulate.h"
#include "xla/ffi/api/ffi.h"

namespace nb = nanobind;

namespace jax_bnar {
namespace {

namespace ffi = xla::ffi;

// Written when the package is imported, before XLA knows the handlers.
std::string& Why() {
  static std::string* why = new std::string;  // never destroyed: XLA may ask
  return *why;
}

ffi::Error Refuse() {
  return ffi::Error(
      ffi::ErrorCode::kFailedPrecondition,
      "jax_bnar: this program was compiled for jax_bnar's CUDA kernels, which "
      "cannot be loaded here: " +
          Why());
}

// Before the program begins, so that no device waits for another that has
// stopped in the middle.
XLA_FFI_DEFINE_HANDLER_SYMBOL(RefuseToInitialize, Refuse,
                              ffi::Ffi::BindInitialize());

// XLA arranges a program by the traits of its targets, so they are those of
// cuda/ffi_handlers.cc.
XLA_FFI_DEFINE_HANDLER_SYMBOL(RefuseToExecute, Refuse, ffi::Ffi::Bind(),
                              {ffi::Traits::kCmdBufferCompatible});

nb::dict Stages() {
  nb::dict stages;
  stages["instantiate"] = Encapsulate(CheckCudaAbi);
  stages["initialize"] = Encapsulate(RefuseToInitialize);
  stages["execute"] = Encapsulate(RefuseToExecute);
  return stages;
}

nb::dict MissingCudaKernels(std::string why) {
  Why() = std::move(why);
  nb::dict handlers;
#define BNAR_REGISTER(name, python, ...) handlers[python] = Stages();
  BNAR_FOR_EACH_TARGET(BNAR_REGISTER)
#undef BNAR_REGISTER
  return handlers;
}

}  // namespace

void AddMissingCuda(nb::module_& m) {
  m.def("missing_cuda_kernels", &MissingCudaKernels, nb::arg("why"),
        "Capsules of handlers for the CUDA targets, by operation and stage, "
        "for where there are no kernels: a call ends with an error that says "
        "why.");
  m.def(
      "cuda_abi", [] { return kCudaAbi; },
      "The version of the calls of the CUDA kernels, their attribute abi.");
}

}  // namespace jax_bnar
