#include "python_module/ffi_api_version.h"

#include <mutex>

namespace jax_bnar {
namespace {

std::mutex mutex;
std::optional<FfiApiVersion> runtime_version;

}  // namespace

XLA_FFI_Error* FfiApiProbe(XLA_FFI_CallFrame* call_frame) {
  // The struct has other names in other versions of jaxlib.
  const auto* extension = call_frame->extension_start;
  if (extension == nullptr || extension->type != XLA_FFI_Extension_Metadata) {
    return nullptr;  // success
  }
  const XLA_FFI_Api_Version& version = call_frame->api->api_version;
  {
    std::lock_guard<std::mutex> lock(mutex);
    runtime_version.emplace(version.major_version, version.minor_version);
  }
  XLA_FFI_Metadata* metadata =
      reinterpret_cast<const XLA_FFI_Metadata_Extension*>(extension)->metadata;
  // Report the runtime's own version, not the build's. The probe exists to
  // detect a mismatch between the two, so the runtime must never reject the
  // probe itself.
  metadata->api_version.major_version = version.major_version;
  metadata->api_version.minor_version = version.minor_version;
  metadata->traits = 0;
  metadata->state_type_id = XLA_FFI_UNKNOWN_TYPE_ID;
  return nullptr;
}

std::optional<FfiApiVersion> RuntimeFfiApiVersion() {
  std::lock_guard<std::mutex> lock(mutex);
  return runtime_version;
}

}  // namespace jax_bnar
