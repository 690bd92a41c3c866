// Turns exceptions into errors, because none may leave an FFI handler: XLA
// would not catch it.

#ifndef JAX_BNAR_NATIVE_CAUGHT_H_
#define JAX_BNAR_NATIVE_CAUGHT_H_

#include <exception>
#include <new>
#include <stdexcept>
#include <string>

#include "xla/ffi/api/ffi.h"

namespace jax_bnar {

// Has the function `Call`, which is kFunction without exceptions.
template <auto kFunction>
struct Caught;

template <typename... Args, xla::ffi::Error (*kFunction)(Args...)>
struct Caught<kFunction> {
  static xla::ffi::Error Call(Args... args) {
    try {
      return kFunction(args...);
    } catch (const std::bad_alloc&) {
      return xla::ffi::Error(xla::ffi::ErrorCode::kResourceExhausted,
                             "jax_bnar: not enough memory for the call");
    } catch (const std::invalid_argument& e) {
      return xla::ffi::Error::InvalidArgument(e.what());
    } catch (const std::exception& e) {
      return xla::ffi::Error::Internal(std::string("jax_bnar: ") + e.what());
    }
  }
};

}  // namespace jax_bnar

#endif  // JAX_BNAR_NATIVE_CAUGHT_H_
