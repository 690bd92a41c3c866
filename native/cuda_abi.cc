#include "native/cuda_abi.h"

#include <string>
#include <string_view>

namespace jax_bnar {
namespace {

namespace ffi = xla::ffi;

constexpr std::string_view kAbi = "abi";

ffi::Error CheckAbi(ffi::Dictionary attributes) {
  int64_t compiled_for = 1;
  if (attributes.contains(kAbi)) {
    const ffi::ErrorOr<int64_t> given = attributes.get<int64_t>(kAbi);
    if (given.has_error()) {
      return ffi::Error::InvalidArgument(
          "jax_bnar: attribute abi must be an integer of 64 bits");
    }
    compiled_for = *given;
  }
  if (compiled_for == kCudaAbi) return ffi::Error::Success();
  return ffi::Error(
      ffi::ErrorCode::kFailedPrecondition,
      "jax_bnar: this program was compiled for version " +
          std::to_string(compiled_for) +
          " of the calls of the CUDA kernels, but this installation, "
          "jax_bnar " JAX_BNAR_VERSION ", has version " +
          std::to_string(kCudaAbi) +
          ". Way out: install the same jax-bnar and jax-bnar-cuda13 where the "
          "program is compiled and where it runs, or compile it again with "
          "jax_bnar " JAX_BNAR_VERSION);
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(CheckCudaAbi, CheckAbi,
                              ffi::Ffi::BindInstantiate().Attrs());

WithoutAbi::WithoutAbi(XLA_FFI_CallFrame* frame)
    : frame_(frame), attributes_(frame->attrs) {
  // A question for the handler's metadata comes without attributes.
  if (frame->extension_start != nullptr &&
      frame->extension_start->type == XLA_FFI_Extension_Metadata) {
    return;
  }
  XLA_FFI_Attrs& attrs = frame->attrs;
  if (attrs.size == 0) return;
  const XLA_FFI_ByteSpan* first = attrs.names[0];
  if (std::string_view(first->ptr, first->len) != kAbi) return;
  --attrs.size;
  ++attrs.types;
  ++attrs.names;
  ++attrs.attrs;
}

}  // namespace jax_bnar
