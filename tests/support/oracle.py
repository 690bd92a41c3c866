"""Forward and backward of every operator in wide NumPy arithmetic, with bounds on the error.

The formulas of batch normalization and of its gradient are written down independently of
`jax_bnar.reference`. Everything is computed in float64, or in long double for float64 data.

An allowance is an elementwise bound on the error: one rounding at the store, plus `ROUNDINGS` units
of the accumulation dtype times the sum of the magnitudes that enter the result. A second rounding,
or cancellation in the variance, exceeds it.

The operator is y = act(sum of batch_norm(x) over its inputs + z). What belongs to an input (x,
scale, bias, mean, var, and their gradients) is one array if there is one input, and a tuple of
arrays, one for each input, if there are several.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]
# An array of the only input, or a tuple with an array of each input.
PerInput = Any

# The number of roundings in the accumulation dtype that a result may have. The sums in the tests
# are short enough for a plain chain of float32 additions to stay below it.
ROUNDINGS = 24


class Forward(NamedTuple):
    y: Array
    mean: PerInput
    var: PerInput
    y_allowance: Array
    mean_allowance: PerInput
    var_allowance: PerInput


class Backward(NamedTuple):
    dx: PerInput
    dz: Array
    dscale: PerInput
    dbias: PerInput
    dx_allowance: PerInput
    dscale_allowance: PerInput
    dbias_allowance: PerInput


class InferenceBackward(NamedTuple):
    """Gradients and allowances in the order of the operands x, z, scale, bias, mean, var."""

    gradients: tuple[PerInput, ...]
    allowances: tuple[PerInput, ...]


def each_input(x: PerInput, *others: PerInput) -> Iterator[tuple[Any, ...]]:
    """What belongs to each input, input by input; None stands for a None of each."""
    if not isinstance(x, tuple):
        return iter([(x, *others)])
    return zip(x, *((None,) * len(x) if o is None else o for o in others), strict=True)


def per_input(x: PerInput, results: Sequence[Sequence[Any]]) -> list[PerInput]:
    """The inverse of `each_input`: for each result, what belongs to all inputs."""
    columns = zip(*results, strict=True)
    return [column if isinstance(x, tuple) else column[0] for column in columns]


def shape_and_dtype(x: PerInput) -> tuple[tuple[int, ...], Any]:
    first = x[0] if isinstance(x, tuple) else x
    return first.shape, first.dtype


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


def rounding(exact: Array, dtype: Any) -> Array:
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
    scale: Array | None,
    bias: Array | None,
    mean: Array,
    var: Array,
    epsilon: float,
    mean_error: Array | float = 0.0,
) -> tuple[Array, Array]:
    """The batch norm of one canonical wide input, and the sum of the magnitudes that enter it.

    `mean_error` is the possible error of a computed mean, in units of roundoff.
    """
    multiplier = _vector(scale, 1, x) / np.sqrt(var + epsilon)
    shift = _vector(bias, 0, x)
    magnitude = (np.abs(x - mean) + np.abs(mean) + mean_error) * np.abs(multiplier)
    return (x - mean) * multiplier + shift, magnitude + np.abs(shift)


def _joined(
    parts: Sequence[tuple[Array, Array]], z: Array | None, relu: bool, shape: Any, dtype: Any
) -> tuple[Array, Array]:
    """y from what `_normalised` gives for each input and a canonical z, and its allowance."""
    if z is not None:
        parts = [*parts, (z, np.abs(z))]
    # Not sum(), which would add the first one to an integer.
    pre, magnitude = parts[0]
    for value, size in parts[1:]:
        pre, magnitude = pre + value, magnitude + size
    y = np.maximum(pre, 0) if relu else pre
    unit = unit_roundoff(accumulation_dtype(dtype))
    allowance = ROUNDINGS * unit * magnitude + rounding(y, dtype)
    return y.reshape(shape), allowance.reshape(shape)


def forward(
    x: PerInput,
    z: Array | None,
    scale: PerInput,
    bias: PerInput,
    *,
    epsilon: float,
    axis: int = -1,
    num_groups: int = 1,
    relu: bool = True,
    out_dtype: Any = None,
) -> Forward:
    """`out_dtype` is the dtype of y, if it is not that of x."""
    shape, dtype = shape_and_dtype(x)
    unit = unit_roundoff(accumulation_dtype(dtype))
    parts, statistics = [], []
    for own_x, own_scale, own_bias in each_input(x, scale, bias):
        wide = canonical(own_x, axis, num_groups)
        n = wide.shape[1] * wide.shape[3]
        mean = _sum(wide) / n
        var = _sum(np.square(wide - mean)) / n
        std = np.sqrt(var)
        parts.append(_normalised(wide, own_scale, own_bias, mean, var, epsilon, mean_error=std))
        of_input = (mean, var, unit * (np.abs(mean) + ROUNDINGS * std), unit * ROUNDINGS * var)
        statistics.append([_squeeze(vector, num_groups) for vector in of_input])
    residual = None if z is None else canonical(z, axis, num_groups)
    y, y_allowance = _joined(parts, residual, relu, shape, out_dtype or dtype)
    mean, var, mean_allowance, var_allowance = per_input(x, statistics)
    return Forward(y, mean, var, y_allowance, mean_allowance, var_allowance)


def backward(
    dy: Array,
    x: PerInput,
    y: Array | None,
    scale: PerInput,
    dmean: PerInput,
    dvar: PerInput,
    *,
    epsilon: float,
    axis: int = -1,
    num_groups: int = 1,
    parameter_dtype: Any = np.float64,
) -> Backward:
    """Gradients with the gate of the ReLU taken from the given y; None means no ReLU.

    All inputs have the same gated cotangent, so the gradients of each are those of a single one.
    """
    dz = np.where(_open_gate(y, dy), dy, np.zeros_like(dy))
    options: dict[str, Any] = {
        "epsilon": epsilon,
        "axis": axis,
        "num_groups": num_groups,
        "parameter_dtype": parameter_dtype,
    }
    results = [_backward(dz, *own, **options) for own in each_input(x, scale, dmean, dvar)]
    dx, dscale, dbias, *allowances = per_input(x, results)
    return Backward(dx, dz, dscale, dbias, *allowances)


def _backward(
    dz: Array,
    x: Array,
    scale: Array | None,
    dmean: Array | None,
    dvar: Array | None,
    *,
    epsilon: float,
    axis: int,
    num_groups: int,
    parameter_dtype: Any,
) -> tuple[Array, ...]:
    """(dx, dscale, dbias) of one input and their allowances, from the gated cotangent dz."""
    wide, e = canonical(x, axis, num_groups), canonical(dz, axis, num_groups)
    n = wide.shape[1] * wide.shape[3]
    mean = _sum(wide) / n
    centred = wide - mean
    rstd = 1 / np.sqrt(_sum(np.square(centred)) / n + epsilon)
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
    return (
        dx.reshape(x.shape),
        dscale,
        dbias,
        (unit * magnitude + rounding(dx, x.dtype)).reshape(x.shape),
        unit * (sum_ec * rstd).sum(axis=0).ravel() + rounding(dscale, parameter_dtype),
        unit * sum_e.sum(axis=0).ravel() + rounding(dbias, parameter_dtype),
    )


def _open_gate(y: Array | None, dy: Array) -> Array:
    return np.ones(dy.shape, bool) if y is None else np.asarray(y > 0)


def inference(
    x: PerInput,
    z: Array | None,
    scale: PerInput,
    bias: PerInput,
    mean: PerInput,
    var: PerInput,
    *,
    epsilon: float,
    axis: int = -1,
    relu: bool = True,
    out_dtype: Any = None,
) -> tuple[Array, Array]:
    """Computes y and its allowance."""
    parts = []
    for own_x, own_scale, own_bias, own_mean, own_var in each_input(x, scale, bias, mean, var):
        wide = canonical(own_x, axis)
        statistics = _vector(own_mean, 0, wide), _vector(own_var, 0, wide)
        parts.append(_normalised(wide, own_scale, own_bias, *statistics, epsilon))
    shape, dtype = shape_and_dtype(x)
    residual = None if z is None else canonical(z, axis)
    return _joined(parts, residual, relu, shape, out_dtype or dtype)


def inference_backward(
    dy: Array,
    x: PerInput,
    y: Array | None,
    scale: PerInput,
    mean: PerInput,
    var: PerInput,
    *,
    epsilon: float,
    axis: int = -1,
    parameter_dtype: Any = np.float64,
) -> InferenceBackward:
    dz = np.where(_open_gate(y, dy), dy, np.zeros_like(dy))
    results = [
        _inference_backward(dz, *own, epsilon=epsilon, axis=axis, parameter_dtype=parameter_dtype)
        for own in each_input(x, scale, mean, var)
    ]
    (dx, dx_allowance), *vectors = (per_input(x, column) for column in zip(*results, strict=True))
    return InferenceBackward(
        gradients=(dx, dz, *(gradient for gradient, _ in vectors)),
        allowances=(dx_allowance, np.zeros(dz.shape), *(allowance for _, allowance in vectors)),
    )


def _inference_backward(
    dz: Array,
    x: Array,
    scale: Array | None,
    mean: Array,
    var: Array,
    *,
    epsilon: float,
    axis: int,
    parameter_dtype: Any,
) -> list[tuple[Array, Array]]:
    """The gradients of x, scale, bias, mean and var of one input, each with its allowance."""
    wide, e = canonical(x, axis), canonical(dz, axis)
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
    return [
        (dx.reshape(x.shape), (unit * np.abs(dx) + rounding(dx, x.dtype)).reshape(x.shape)),
        *((v.ravel(), (unit * m + rounding(v, parameter_dtype)).ravel()) for v, m in vectors),
    ]


def assert_within(
    name: str, got: PerInput, exact: PerInput, allowance: PerInput, *, times: float = 1
) -> None:
    """Asserts |got - exact| <= times * allowance elementwise, for each input if there are several.

    The message names the worst element.
    """
    if isinstance(exact, tuple):
        assert isinstance(got, tuple), name
        for i, own in enumerate(zip(got, exact, allowance, strict=True), start=1):
            assert_within(f"{name}{i}", *own, times=times)
        return
    actual = np.asarray(got)
    assert actual.shape == exact.shape, f"{name}: shape {actual.shape}, expected {exact.shape}"
    error = np.abs(actual.astype(exact.dtype) - exact)
    excess = np.where(np.isnan(error), np.inf, error - times * allowance)
    worst = np.unravel_index(np.argmax(excess), excess.shape)
    assert excess[worst] <= 0, (
        f"{name}[{', '.join(map(str, worst))}]: {actual[worst]}, exact {exact[worst]},"
        f" error {error[worst]:.3e}, allowed {times * allowance[worst]:.3e}"
    )
