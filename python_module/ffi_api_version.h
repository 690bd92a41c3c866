// The versions of XLA's FFI API in this build and in the runtime. A runtime
// rejects handlers that are built for a newer API than its own.

#ifndef JAX_BNAR_PYTHON_MODULE_FFI_API_VERSION_H_
#define JAX_BNAR_PYTHON_MODULE_FFI_API_VERSION_H_

#include <optional>
#include <utility>

#include "xla/ffi/api/c_api.h"

namespace jax_bnar {

using FfiApiVersion = std::pair<int, int>;  // major, minor

// The version of the headers that the handlers are compiled with.
inline constexpr FfiApiVersion kBuildFfiApiVersion{XLA_FFI_API_MAJOR,
                                                   XLA_FFI_API_MINOR};

// A handler that computes nothing. When it is registered, the runtime calls it
// to ask for its metadata and hands it the runtime's API, whose version the
// probe keeps.
XLA_FFI_Error* FfiApiProbe(XLA_FFI_CallFrame* call_frame);

// The version that the last registration of FfiApiProbe found, or nullopt if it
// has never been registered.
std::optional<FfiApiVersion> RuntimeFfiApiVersion();

}  // namespace jax_bnar

#endif  // JAX_BNAR_PYTHON_MODULE_FFI_API_VERSION_H_
