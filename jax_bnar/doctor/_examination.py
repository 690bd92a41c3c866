"""Examines one platform in a separate process: `python -m jax_bnar.doctor._examination`.

`examine_in_process` starts that process and reads what it found. A separate process is needed
because a backend that fails to start, or a kernel, may crash it. It prints what it is about to do
and what it finds, as JSON objects with fields of `Examination`, so what it printed tells how far it
came. The platform is JAX's default, which the caller selects with JAX_PLATFORMS.
"""

import dataclasses
import functools
import json
import os
import sys
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jax_bnar
from jax_bnar._base.implementation import Implementation
from jax_bnar._kernels import targets
from jax_bnar.doctor import _processes
from jax_bnar.doctor._report import Case, Examination, Problem

# MLIR's names, which do not include "gpu".
_PLATFORMS = ("cpu", "cuda", "rocm", "tpu")
_LAYOUTS = {"NHWC": -1, "NCHW": 1}
# The channels and the number of rows do not fill whole vectors, and need more than one vector.
_BATCH, _HEIGHT, _WIDTH, _CHANNELS = 3, 5, 7, 19
_EPSILON = 1e-3
_RESULTS = ("y", "mean", "var", "dx", "dz", "dscale", "dbias")
# Tolerated float32 roundings between two ways to compute a result, relative to its largest value.
_ROUNDINGS = 16
_PREALLOCATE = "XLA_PYTHON_CLIENT_PREALLOCATE"
# Begins our lines, of which each begins with a line break as well: a plugin may print, too.
_FOUND = "jax_bnar.doctor found "


class Examined(NamedTuple):
    """One process's findings, how it failed (None if it succeeded), and its standard error."""

    found: Examination
    trouble: str | None
    log: str = ""


def examine_in_process(jax_platforms: str | None, *, timeout: float) -> Examined:
    """Examines the default platform with this value of JAX_PLATFORMS, or None for the current."""
    environment = dict(os.environ)
    if jax_platforms is not None:
        environment["JAX_PLATFORMS"] = jax_platforms
    # With -P as well if we have it, or in a checkout the process would import its sources instead.
    options = ["-P"] if sys.flags.safe_path else []
    finished = _processes.run(
        [sys.executable, *options, "-m", "jax_bnar.doctor._examination"],
        timeout=timeout,
        environment=environment,
    )
    found = read(finished.stdout)
    return Examined(found, finished.problem, finished.stderr)


def read(printed: str) -> Examination:
    """What a process has found, as far as it came."""
    found: dict[str, Any] = {}
    # A line without an end was cut off when the process died.
    for line in printed.split("\n")[:-1]:
        if line.startswith(_FOUND):
            found |= json.loads(line.removeprefix(_FOUND))
    if version := found.get("runtime_ffi_api_version"):
        found["runtime_ffi_api_version"] = (version[0], version[1])
    if obstacle := found.get("cuda_obstacle"):
        found["cuda_obstacle"] = Problem(**obstacle)
    found["cases"] = tuple(Case(**case) for case in found.get("cases", ()))
    return Examination(**found)


def note(**fields: Any) -> None:
    """Prints fields of `Examination` at once, because the next step may crash the process."""
    print(f"\n{_FOUND}{json.dumps(fields, default=dataclasses.asdict)}", flush=True)


def examine() -> None:
    note(step="start of the backend")
    # Without preallocation, this works on a GPU whose memory another job has filled.
    added = _PREALLOCATE not in os.environ
    os.environ.setdefault(_PREALLOCATE, "false")
    try:
        devices = jax.local_devices()
        platform = device_platform(devices[0])
    except Exception as error:
        note(error=describe(error))
        return
    finally:
        if added:
            del os.environ[_PREALLOCATE]  # Otherwise jax.print_environment_info would show it.
    note(platform=platform, device_kind=devices[0].device_kind, device_count=len(devices))
    note(runtime_ffi_api_version=runtime_ffi_api_version(platform))
    if platform == "cuda":
        ask_the_driver()
    if targets.has_kernel("forward", platform) and targets.has_kernel("backward", platform):
        cases = []
        for dtype in ("float32", "bfloat16"):
            for layout in _LAYOUTS:
                note(step=f"operator in {dtype}, {layout}")
                cases.append(examine_case(dtype, layout))
                note(cases=cases)
    if platform != "cuda":
        ask_the_driver()
    # This comes last, because it runs nvidia-smi and waits for it.
    note(step="jax.print_environment_info")
    note(jax_environment=jax.print_environment_info(return_string=True))
    note(step="end")


def ask_the_driver() -> None:
    note(step="devices of the CUDA driver")
    obstacle = targets.cuda_obstacle()
    if obstacle is not None:
        note(cuda_obstacle=Problem(*obstacle))


def describe(error: BaseException) -> str:
    """The type and message of an error, or where it was raised if it has no message."""
    message = str(error).strip()
    if not message and error.__traceback__ is not None:
        trace = error.__traceback__
        while trace.tb_next is not None:
            trace = trace.tb_next
        message = f"raised in {trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}"
    return f"{type(error).__name__}: {message}"


def device_platform(device: Any) -> str:
    """MLIR's name of the device's platform; `device.platform` is "gpu" for both CUDA and ROCm."""
    for name in _PLATFORMS:
        try:
            if device in jax.local_devices(backend=name):
                return name
        except RuntimeError:  # There is no such backend.
            continue
    return device.platform


def runtime_ffi_api_version(platform: str) -> tuple[int, int] | None:
    """The version that the runtime tells our probe handler; its backend must have started."""
    native = targets.native
    if native is None:
        return None
    jax.ffi.register_ffi_target(
        targets.target_name("ffi_api_probe"),
        native.ffi_api_probe(),
        platform=targets.XLA_PLATFORM.get(platform, platform),
    )
    return native.runtime_ffi_api_version()


def examine_case(dtype: str, layout: str) -> Case:
    try:
        got = execute("ffi", dtype, layout)
        expected = execute("xla", dtype, layout)
    except Exception as error:
        return Case(dtype, layout, agrees=False, error=describe(error))
    errors = {
        name: relative_error(g, e) for name, g, e in zip(_RESULTS, got, expected, strict=True)
    }
    # A NaN counts as the largest error.
    worst = max(errors, key=lambda name: np.inf if np.isnan(errors[name]) else errors[name])
    largest = errors[worst]
    return Case(
        dtype,
        layout,
        agrees=largest <= 1,
        # JSON has neither NaN nor Infinity.
        largest_error=largest if np.isfinite(largest) else None,
        worst_result=worst,
    )


def operands(dtype: str, layout: str) -> tuple[jax.Array, ...]:
    """x, z, scale, bias, and the cotangents of y, mean and var.

    The seed is fixed, so that no pre-activation is close enough to 0 for rounding to flip its sign.
    """
    random = np.random.default_rng(0)
    shape = (_BATCH, _HEIGHT, _WIDTH, _CHANNELS)
    x, z, dy = (random.standard_normal(shape, np.float32) for _ in range(3))
    scale, bias, dmean, dvar = (random.standard_normal(_CHANNELS, np.float32) for _ in range(4))
    x = 3 + 2 * x
    if layout == "NCHW":
        x, z, dy = (np.moveaxis(array, -1, 1) for array in (x, z, dy))
    x, z, dy = (jnp.asarray(array, dtype) for array in (x, z, dy))
    return (
        x,
        z,
        *(jnp.asarray(array) for array in (scale, bias)),
        dy,
        *map(jnp.asarray, (dmean, dvar)),
    )


def execute(implementation: Implementation, dtype: str, layout: str) -> list[np.ndarray]:
    """The results named in `_RESULTS`, computed by forward and backward in one jitted program."""

    @jax.jit
    def results(x: jax.Array, z: jax.Array, scale: jax.Array, bias: jax.Array, *cotangents: Any):
        operator = functools.partial(
            jax_bnar.bn_add_relu,
            epsilon=_EPSILON,
            axis=_LAYOUTS[layout],
            implementation=implementation,
        )
        forward, backward = jax.vjp(operator, x, z, scale, bias)
        return *forward, *backward(jax_bnar.BatchNormResult(*cotangents))

    return [np.asarray(array) for array in results(*operands(dtype, layout))]


def relative_error(got: np.ndarray, expected: np.ndarray) -> float:
    """The largest error, relative to a bound of one unit of the dtype plus float32 roundings."""
    unit = float(jnp.finfo(expected.dtype).eps)
    got, expected = got.astype(np.float64), expected.astype(np.float64)
    largest = np.abs(expected).max()
    bound = unit * np.abs(expected) + _ROUNDINGS * float(np.finfo(np.float32).eps) * largest
    return float(np.max(np.abs(got - expected) / bound))


if __name__ == "__main__":
    examine()
