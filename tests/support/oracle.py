"""Forward and backward of every operator in wide NumPy arithmetic, with bounds on the error.

The formulas of batch normalization and of its gradient are written down independently of
`jax_bnar.reference`. Everything is computed in float64, or in long double for float64 data.

An allowance is an elementwise bound on the error: one rounding at the store, plus `ROUNDINGS` units
of the accumulation dtype times the sum of the magnitudes that enter the result. A second rounding,
or cancellation in the variance, exceeds it.
"""

from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]

# The number of roundings in the accumulation dtype that a result may have. The sums in the tests
# are short enough for a plain chain of float32 additions to stay below it.
ROUNDINGS = 24


class Forward(NamedTuple):
    y: Array
    mean: Array
    var: Array
    y_allowance: Array
    mean_allowance: Array
    var_allowance: Array


class Backward(NamedTuple):
    dx: Array
    dz: Array
    dscale: Array
    dbias: Array
    dx_allowance: Array
    dscale_allowance: Array
    dbias_allowance: Array


class InferenceBackward(NamedTuple):
    """Gradients and allowances in the order of the operands x, z, scale, bias, mean, var."""

    gradients: tuple[Array, ...]
    allowances: tuple[Array, ...]


def wide_dtype(dtype: Any) -> Any:
    return np.longdouble if np.dtype(dtype) == np.float64 else np.float64


def accumulation_dtype(dtype: Any) -> Any:
    return np.float64 if np.dtype(dtype) == np.float64 else np.float32


def unit_roundoff(dtype: Any) -> float:
    return float(ml_dtypes.finfo(np.dtype(dtype)).eps) / 2


def canonical(array: Array, axis: int, num_groups: int = 1) -> Array:
    """An array with its channels at `axis`, as (G, N, C, S) in the wide dtype."""
    axis %= array.ndim
    shape = (num_groups, -1, array.shape[axis], int(np.prod(array.shape[axis + 1 :])))
    return array.reshape(shape).astype(wide_dtype(array.dtype))


def _rounding(exact: Array, dtype: Any) -> Array:
    """Half a unit in the last place of `exact` when stored as `dtype`."""
    subnormal = float(ml_dtypes.finfo(np.dtype(dtype)).smallest_subnormal)
    return unit_roundoff(dtype) * np.abs(exact) + subnormal / 2


def _vector(vector: Array | None, default: float, like: Array) -> Array:
    channels = like.shape[2]
    if vector is None:
        return np.full((1, 1, channels, 1), default, like.dtype)
    return np.asarray(vector).astype(like.dtype).reshape(-1, 1, channels, 1)


def _squeeze(vector: Array, num_groups: int) -> Array:
    return vector.reshape(vector.shape[2]) if num_groups == 1 else vector[:, 0, :, 0]


def _sum(array: Array) -> Array:
    return array.sum(axis=(1, 3), keepdims=True)


def _normalised(
    x: Array,
    z: Array | None,
    scale: Array | None,
    bias: Array | None,
    mean: Array,
    var: Array,
    epsilon: float,
    relu: bool,
    unit: float,
    mean_error: Array | float = 0.0,
) -> tuple[Array, Array]:
    """y of canonical wide operands, and the allowance for the arithmetic before the store.

    `mean_error` is the possible error of a computed mean, in units of roundoff.
    """
    multiplier = _vector(scale, 1, x) / np.sqrt(var + epsilon)
    shift = _vector(bias, 0, x)
    residual = np.zeros_like(x) if z is None else z
    pre = (x - mean) * multiplier + shift + residual
    magnitude = (np.abs(x - mean) + np.abs(mean) + mean_error) * np.abs(multiplier)
    magnitude = magnitude + np.abs(shift) + np.abs(residual)
    return np.maximum(pre, 0) if relu else pre, ROUNDINGS * unit * magnitude


def forward(
    x: Array,
    z: Array | None,
    scale: Array | None,
    bias: Array | None,
    *,
    epsilon: float,
    axis: int = -1,
    num_groups: int = 1,
    relu: bool = True,
) -> Forward:
    wide = canonical(x, axis, num_groups)
    n = wide.shape[1] * wide.shape[3]
    mean = _sum(wide) / n
    var = _sum(np.square(wide - mean)) / n
    unit = unit_roundoff(accumulation_dtype(x.dtype))
    y, allowance = _normalised(
        wide,
        None if z is None else canonical(z, axis, num_groups),
        scale,
        bias,
        mean,
        var,
        epsilon,
        relu,
        unit,
        mean_error=np.sqrt(var),
    )
    return Forward(
        y=y.reshape(x.shape),
        mean=_squeeze(mean, num_groups),
        var=_squeeze(var, num_groups),
        y_allowance=(allowance + _rounding(y, x.dtype)).reshape(x.shape),
        mean_allowance=_squeeze(unit * (np.abs(mean) + ROUNDINGS * np.sqrt(var)), num_groups),
        var_allowance=_squeeze(unit * ROUNDINGS * var, num_groups),
    )


def backward(
    dy: Array,
    x: Array,
    y: Array | None,
    scale: Array | None,
    dmean: Array | None,
    dvar: Array | None,
    *,
    epsilon: float,
    axis: int = -1,
    num_groups: int = 1,
    parameter_dtype: Any = np.float64,
) -> Backward:
    """Gradients with the gate of the ReLU taken from the given y; None means no ReLU."""
    wide = canonical(x, axis, num_groups)
    n = wide.shape[1] * wide.shape[3]
    mean = _sum(wide) / n
    centred = wide - mean
    rstd = 1 / np.sqrt(_sum(np.square(centred)) / n + epsilon)
    e = np.where(_open_gate(y, dy), dy, np.zeros_like(dy))
    dz, e = e, canonical(e, axis, num_groups)
    a = _vector(scale, 1, wide) * rstd
    dm, dv = _vector(dmean, 0, wide), _vector(dvar, 0, wide)
    dbias, dscale = _sum(e), _sum(e * centred) * rstd
    dx = a * (e - dbias / n - centred * rstd * dscale / n) + dm / n + 2 * dv * centred / n

    # The mean is a rounded sum, so |mean| and std count towards the magnitude of (x-mean).
    distance = (
        np.abs(centred) + np.abs(mean) + np.sqrt(np.square(centred).mean((1, 3), keepdims=True))
    )
    sum_e, sum_ec = _sum(np.abs(e)), _sum(np.abs(e) * distance)
    magnitude = np.abs(a) * (np.abs(e) + sum_e / n + distance * rstd * rstd * sum_ec / n)
    magnitude = magnitude + np.abs(dm) / n + 2 * np.abs(dv) * distance / n
    unit = ROUNDINGS * unit_roundoff(accumulation_dtype(x.dtype))
    # The gradients of scale and bias are summed over the groups, which share them.
    dscale, dbias = dscale.sum(axis=0).ravel(), dbias.sum(axis=0).ravel()
    return Backward(
        dx=dx.reshape(x.shape),
        dz=dz,
        dscale=dscale,
        dbias=dbias,
        dx_allowance=(unit * magnitude + _rounding(dx, x.dtype)).reshape(x.shape),
        dscale_allowance=unit * (sum_ec * rstd).sum(axis=0).ravel()
        + _rounding(dscale, parameter_dtype),
        dbias_allowance=unit * sum_e.sum(axis=0).ravel() + _rounding(dbias, parameter_dtype),
    )


def _open_gate(y: Array | None, dy: Array) -> Array:
    return np.ones(dy.shape, bool) if y is None else np.asarray(y > 0)


def inference(
    x: Array,
    z: Array | None,
    scale: Array | None,
    bias: Array | None,
    mean: Array,
    var: Array,
    *,
    epsilon: float,
    axis: int = -1,
    relu: bool = True,
) -> tuple[Array, Array]:
    """Computes y and its allowance."""
    wide = canonical(x, axis)
    y, allowance = _normalised(
        wide,
        None if z is None else canonical(z, axis),
        scale,
        bias,
        _vector(mean, 0, wide),
        _vector(var, 0, wide),
        epsilon,
        relu,
        unit_roundoff(accumulation_dtype(x.dtype)),
    )
    return y.reshape(x.shape), (allowance + _rounding(y, x.dtype)).reshape(x.shape)


def inference_backward(
    dy: Array,
    x: Array,
    y: Array | None,
    scale: Array | None,
    mean: Array,
    var: Array,
    *,
    epsilon: float,
    axis: int = -1,
    parameter_dtype: Any = np.float64,
) -> InferenceBackward:
    wide = canonical(x, axis)
    dz = np.where(_open_gate(y, dy), dy, np.zeros_like(dy))
    e = canonical(dz, axis)
    m, factor = _vector(mean, 0, wide), _vector(scale, 1, wide)
    rstd = 1 / np.sqrt(_vector(var, 0, wide) + epsilon)
    a = factor * rstd
    sum_e, sum_ec = _sum(e), _sum(e * (wide - m))
    abs_e = _sum(np.abs(e))
    abs_ec = _sum(np.abs(e) * (np.abs(wide - m) + np.abs(m)))
    vectors = [
        (rstd * sum_ec, rstd * abs_ec),
        (sum_e, abs_e),
        (-a * sum_e, np.abs(a) * abs_e),
        (-a * rstd * rstd * sum_ec / 2, np.abs(a) * rstd * rstd * abs_ec / 2),
    ]
    unit = ROUNDINGS * unit_roundoff(accumulation_dtype(x.dtype))
    dx = a * e
    return InferenceBackward(
        gradients=(dx.reshape(x.shape), dz, *(v.ravel() for v, _ in vectors)),
        allowances=(
            (unit * np.abs(dx) + _rounding(dx, x.dtype)).reshape(x.shape),
            np.zeros(x.shape),
            *((unit * m + _rounding(v, parameter_dtype)).ravel() for v, m in vectors),
        ),
    )


def assert_within(name: str, got: Any, exact: Array, allowance: Array) -> None:
    """Asserts |got - exact| <= allowance elementwise; the message names the worst element."""
    actual = np.asarray(got)
    assert actual.shape == exact.shape, f"{name}: shape {actual.shape}, expected {exact.shape}"
    error = np.abs(actual.astype(exact.dtype) - exact)
    excess = np.where(np.isnan(error), np.inf, error - allowance)
    worst = np.unravel_index(np.argmax(excess), excess.shape)
    assert excess[worst] <= 0, (
        f"{name}[{', '.join(map(str, worst))}]: {actual[worst]}, exact {exact[worst]},"
        f" error {error[worst]:.3e}, allowed {allowance[worst]:.3e}"
    )
