"""Batch normalisation as checked by oneDNN's benchdnn: its data, reference and thresholds.

The inputs are chosen so that mean and variance are exact in any order of summation (`exact_fill`),
nothing cancels, and every flag changes the result: scales are powers of two that differ between
channels, the added array has the sign of the normalised one, and cotangents are sparse small
integers. The statistics given for `use_global_stats` are not those of the batch.
"""

import dataclasses
import itertools
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from cases import as_dtype
from exact_fill import exact_fill
from oracle import Array

EPSILON = 1 / 16
# All combinations of benchdnn's flags: G use_global_stats, C use_scale, H use_shift,
# R fuse_norm_relu, A fuse_norm_add_relu.
FLAG_SETS = [
    "".join(flags) for flags in itertools.product(("", "G"), ("", "C"), ("", "H"), ("", "R", "A"))
]
# (src and dst, statistics and parameters), as oneDNN's documentation pairs them.
DTYPES = [
    ("float32", "float32"),
    ("bfloat16", "float32"),
    ("bfloat16", "bfloat16"),
    ("float16", "float32"),
]


@dataclasses.dataclass(frozen=True)
class Problem:
    """One of benchdnn's shapes (N, C, ...), with a layout and dtypes."""

    shape: tuple[int, ...]
    dtype: str = "float32"
    parameter_dtype: str = "float32"
    data_format: str = "NXC"

    @property
    def channels(self) -> int:
        return self.shape[1]

    @property
    def count(self) -> int:
        return int(np.prod(self.shape)) // self.channels

    def arranged(self, columns: Array) -> Array:
        """Rearranges (count, C) to the layout of the problem."""
        last = columns.reshape(self.shape[0], *self.shape[2:], self.channels)
        return last if self.data_format == "NXC" else np.moveaxis(last, -1, 1)

    def columns(self, array: Any) -> Array:
        """The inverse of `arranged`, in float64."""
        wide = np.asarray(array).astype(np.float64)
        last = wide if self.data_format == "NXC" else np.moveaxis(wide, 1, -1)
        return last.reshape(self.count, self.channels)


class Data(NamedTuple):
    """Operands in the layout of the problem, the batch's statistics, and the given ones."""

    src: Array
    src_1: Array
    diff_dst: Array
    gamma: Array
    beta: Array
    running_mean: Array
    running_variance: Array
    batch_mean: Array
    batch_variance: Array


def fill(problem: Problem, seed: int = 0) -> Data:
    random = np.random.default_rng(seed)
    channel = np.arange(problem.channels)
    power = 2.0 ** (channel % 7)
    exact = exact_fill(problem.count, problem.channels, problem.dtype, seed)
    centred = exact.x.astype(np.float64) - exact.mean
    sign = np.where(centred < 0, -1.0, 1.0)
    # At most 5 % of the cotangents are not 0, or about 8 in each channel if these are more.
    dense = random.random(centred.shape) < max(0.05, 8 / problem.count)
    diff_dst = random.integers(-2, 3, centred.shape) * dense

    def tensor(columns: Array) -> Array:
        return np.ascontiguousarray(problem.arranged(as_dtype(columns, problem.dtype)))

    def vector(values: Array) -> Array:
        return as_dtype(values, problem.parameter_dtype)

    return Data(
        src=tensor(exact.x),
        src_1=tensor(sign * random.integers(0, 3, centred.shape)),
        diff_dst=tensor(diff_dst.astype(np.float64)),
        gamma=vector(power / 8),
        beta=vector((channel % 3 - 1) * power / 512),
        # Close enough to the batch's mean for src - mean to have both signs.
        running_mean=vector(exact.mean + power / 64),
        running_variance=vector(2 * exact.var + 0.5),
        # The exact value is rounded to float32, and then to the parameters' dtype.
        batch_mean=vector(exact.mean),
        batch_variance=vector(exact.var),
    )


class Forward(NamedTuple):
    """Columns in float64: dst, and dst before beta and src_1 were added."""

    dst: Array
    scaled: Array


class Backward(NamedTuple):
    diff_src: Array
    diff_gamma: Array
    diff_beta: Array
    diff_src_1: Array


def _wide(vector: Array) -> Array:
    return vector.astype(np.float64)


def _normalised(problem: Problem, data: Data, mean: Array, variance: Array) -> Array:
    centred = problem.columns(data.src) - _wide(mean)
    return centred / np.sqrt(_wide(variance) + EPSILON)


def forward(problem: Problem, data: Data, flags: str) -> Forward:
    statistics = data[5:7] if "G" in flags else data[7:9]
    scaled = _normalised(problem, data, *statistics)
    if "C" in flags:
        scaled = scaled * _wide(data.gamma)
    dst = scaled
    if "H" in flags:
        dst = dst + _wide(data.beta)
    if "A" in flags:
        dst = dst + problem.columns(data.src_1)
    if "A" in flags or "R" in flags:
        dst = np.maximum(dst, 0)
    return Forward(dst, scaled)


def backward(problem: Problem, data: Data, flags: str, dst: Array) -> Backward:
    """The gradients; the sign of `dst` is the gate."""
    statistics = data[5:7] if "G" in flags else data[7:9]
    normalised = _normalised(problem, data, *statistics)
    factor = 1 / np.sqrt(_wide(statistics[1]) + EPSILON)
    if "C" in flags:
        factor = factor * _wide(data.gamma)
    dd = problem.columns(data.diff_dst)
    if "A" in flags or "R" in flags:
        dd = np.where(dst > 0, dd, 0)
    diff_gamma, diff_beta = (dd * normalised).sum(axis=0), dd.sum(axis=0)
    inner = dd
    if "G" not in flags:
        inner = dd - (diff_beta + normalised * diff_gamma) / problem.count
    return Backward(factor * inner, diff_gamma, diff_beta, dd)


def _digits(dtype: str) -> int:
    return ml_dtypes.finfo(np.dtype(dtype)).nmant + 1


def assert_dst(problem: Problem, got: Any, exact: Forward, name: str) -> None:
    """Asserts benchdnn's bound on each element's error.

    It is relative, but absolute below 1e-5, and relative to the scaled part if the sum cancels.
    """
    threshold = 6e-7 * 2.0 ** (24 - _digits(problem.dtype))
    error = np.abs(problem.columns(got) - exact.dst)
    size = np.where(np.abs(exact.dst) > 1e-5, np.abs(exact.dst), 1)
    cancels = (np.abs(exact.scaled) > np.abs(exact.dst)) & (exact.dst != 0)
    size = np.where(cancels, np.maximum(size, np.abs(exact.scaled)), size)
    worst = (error / size).max()
    assert worst <= threshold, f"{name}: {worst:.3g} > {threshold:.3g}"


def assert_norm(got: Array, exact: Array, threshold: float, dtype: str, name: str) -> None:
    """Bounds the L2 norm of the error, relative to that of the exact result if that is not 0."""
    threshold *= 2.0 ** (24 - _digits(dtype))
    error = np.linalg.norm(np.asarray(got).astype(np.float64) - exact)
    size = np.linalg.norm(exact)
    relative = error / size if size > 0 else error
    assert relative <= threshold, f"{name}: {relative:.3g} > {threshold:.3g}"
