// Declarations of the FFI handlers of a platform, one for each custom
// call of native/operations.h.

#ifndef JAX_BNAR_NATIVE_FFI_HANDLERS_H_
#define JAX_BNAR_NATIVE_FFI_HANDLERS_H_

#include "native/operations.h"
#include "xla/ffi/api/ffi.h"

#define BNAR_DECLARE_HANDLER(name, python, suffix) \
  XLA_FFI_DECLARE_HANDLER_SYMBOL(name##suffix);

// Declares Forward<suffix>, DualForward<suffix> and so on.
#define BNAR_DECLARE_HANDLERS(suffix) \
  BNAR_FOR_EACH_TARGET(BNAR_DECLARE_HANDLER, suffix)

#endif  // JAX_BNAR_NATIVE_FFI_HANDLERS_H_
