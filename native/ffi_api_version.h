// The version of XLA's FFI API: that of this build, and that of the runtime.
// A runtime refuses handlers built for a newer API than its own.

#ifndef JAX_BNAR_NATIVE_FFI_API_VERSION_H_
#define JAX_BNAR_NATIVE_FFI_API_VERSION_H_

#include <optional>
#include <utility>

#include "xla/ffi/api/c_api.h"

namespace jax_bnar {

using FfiApiVersion = std::pair<int, int>;  // major, minor

// Of the headers that the handlers are compiled with.
inline constexpr FfiApiVersion kBuildFfiApiVersion{XLA_FFI_API_MAJOR,
                                                   XLA_FFI_API_MINOR};

// A handler that does nothing. Whoever registers it hands it the runtime's API
// to ask for its metadata, and it keeps the version found there.
XLA_FFI_Error* FfiApiProbe(XLA_FFI_CallFrame* call_frame);

// What the last registration of FfiApiProbe found; nothing before.
std::optional<FfiApiVersion> RuntimeFfiApiVersion();

}  // namespace jax_bnar

#endif  // JAX_BNAR_NATIVE_FFI_API_VERSION_H_
