"""The native module, or the error that kept it from loading."""

from jax_bnar._base import startup

load_error = startup.trouble_of_native_module() if startup.is_doctor() else None
native = None
if load_error is None:
    try:
        from jax_bnar import _native
    except ImportError as error:  # a source tree that was never built
        load_error = error
    else:
        native = _native
