"""The operands of a site, and the results that every peer must compute from them."""

from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

import ml_dtypes
import numpy as np

from benchmarks.common.sites import Site

DType = Literal["float32", "bfloat16", "float16"]
# The order of the activations in memory. Peers that know only one refuse the other.
Layout = Literal["NHWC", "NCHW"]

EPSILON: Final = 1e-5
MOMENTUM: Final = 0.9  # as in Flax: new = MOMENTUM * old + (1 - MOMENTUM) * batch
RUNNING_MEAN: Final = 0.0
RUNNING_VAR: Final = 1.0

NUMPY_DTYPES: Final = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
}
# dy is 0 where the pre-activation is closer to 0 than this. There, rounding may close the gate of
# one peer and open that of another, and this difference would dominate the comparison.
_GATE_MARGIN: Final = 0.05
# Largest error of a peer over the root mean square of the result: (in L2 norm, at any element).
# This detects a peer that computes something else; how accurately it rounds is tested in tests/.
_TOLERANCES: Final = {"float32": (1e-4, 1e-2), "bfloat16": (2e-2, 0.5), "float16": (3e-3, 0.1)}


class Results(NamedTuple):
    """Everything that one step returns, in float32 and NHWC."""

    y: np.ndarray
    running_mean: np.ndarray
    running_var: np.ndarray
    dx: np.ndarray
    dz: np.ndarray | None
    dscale: np.ndarray
    dbias: np.ndarray


@dataclass(frozen=True)
class Problem:
    """The operands of one site; x, z and dy hold numbers that `dtype` can represent exactly.

    They are in NHWC here, whatever the layout in which the peers take them.
    """

    site: Site
    batch: int
    dtype: DType
    layout: Layout
    x: np.ndarray
    z: np.ndarray | None
    dy: np.ndarray
    scale: np.ndarray
    bias: np.ndarray

    @property
    def count(self) -> int:
        """The number of elements in a channel, over which the statistics are taken."""
        return self.x.size // self.site.channels

    @property
    def axis(self) -> int:
        """The axis of the channels, in the layout of the peers."""
        return axis_of(self.layout)

    def in_layout(self, values: np.ndarray) -> np.ndarray:
        """An activation of this problem in the layout of the peers, in memory of its own."""
        return np.ascontiguousarray(np.moveaxis(values, -1, self.axis))

    def from_layout(self, values: np.ndarray) -> np.ndarray:
        """A peer's result in NHWC; vectors stay as they are."""
        return np.moveaxis(values, self.axis, -1) if values.ndim == 4 else values


def axis_of(layout: Layout) -> int:
    return 1 if layout == "NCHW" else -1


def itemsize(dtype: DType) -> int:
    return NUMPY_DTYPES[dtype].itemsize


def make_problem(
    site: Site, batch: int, dtype: DType, seed: int = 0, layout: Layout = "NHWC"
) -> Problem:
    rng = np.random.default_rng(seed)
    shape = site.shape(batch)

    def normal() -> np.ndarray:
        values = rng.standard_normal(shape, np.float32)
        return values.astype(NUMPY_DTYPES[dtype]).astype(np.float32)

    x, dy = normal(), normal()
    z = normal() if site.form == "bn_add_relu" else None
    scale = 1 + 0.1 * rng.standard_normal(site.channels, np.float32)
    bias = 0.1 * rng.standard_normal(site.channels, np.float32)
    if site.form != "batch_norm":
        dy[np.abs(_normalize(x, z, scale, bias)[0]) < _GATE_MARGIN] = 0
    return Problem(site, batch, dtype, layout, x, z, dy, scale, bias)


def _normalize(
    x: np.ndarray, z: np.ndarray | None, scale: np.ndarray, bias: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Pre-activation, xhat, mean and var, with sums in float64."""
    axes = tuple(range(x.ndim - 1))
    mean = x.mean(axes, dtype=np.float64).astype(np.float32)
    xhat = x - mean
    var = np.square(xhat).mean(axes, dtype=np.float64).astype(np.float32)
    xhat *= 1 / np.sqrt(var + np.float32(EPSILON))
    pre = xhat * scale + bias
    if z is not None:
        pre += z
    return pre, xhat, mean, var


def expected(problem: Problem) -> Results:
    """Computes a step in NumPy: elementwise operations in float32, sums in float64."""
    axes = tuple(range(problem.x.ndim - 1))
    y, xhat, mean, var = _normalize(problem.x, problem.z, problem.scale, problem.bias)
    e = problem.dy
    if problem.site.form != "batch_norm":
        e = np.where(y > 0, e, np.float32(0))
        np.maximum(y, 0, out=y)
    dbias = e.sum(axes, dtype=np.float64).astype(np.float32)
    dscale = (e * xhat).sum(axes, dtype=np.float64).astype(np.float32)
    rstd = 1 / np.sqrt(var + np.float32(EPSILON))
    n = np.float32(problem.count)
    dx = (problem.scale * rstd) * (e - dbias / n - xhat * (dscale / n))
    return Results(
        y,
        MOMENTUM * RUNNING_MEAN + (1 - MOMENTUM) * mean,
        MOMENTUM * RUNNING_VAR + (1 - MOMENTUM) * var,
        dx,
        e if problem.site.form == "bn_add_relu" else None,
        dscale,
        dbias,
    )


def biased_running_var(unbiased: np.ndarray, problem: Problem) -> np.ndarray:
    """What the running variance would be, had it been updated with the biased batch variance."""
    kept = MOMENTUM * RUNNING_VAR
    return kept + (unbiased - kept) * (problem.count - 1) / problem.count


def check_results(peer: str, problem: Problem, results: Results, reference: Results) -> None:
    """Raises ValueError if a peer's results are not those of the problem."""
    norm_tolerance, element_tolerance = _TOLERANCES[problem.dtype]
    for name, result, wanted in zip(Results._fields, results, reference, strict=True):
        if (result is None) != (wanted is None):
            raise ValueError(
                f"{peer} at {problem.site.label}: {name} is missing, or returned although the site"
                " does not have it."
            )
        if result is None or wanted is None:
            continue
        if result.shape != wanted.shape:
            raise ValueError(
                f"{peer} at {problem.site.label}: {name} has shape {result.shape},"
                f" expected {wanted.shape}."
            )
        size = max(_root_mean_square(wanted), 1e-30)
        error = result - wanted
        norm_error = _root_mean_square(error) / size
        element_error = float(np.abs(error).max()) / size
        # `not <=` rather than `>`, so that NaN fails too.
        if not (norm_error <= norm_tolerance and element_error <= element_tolerance):
            raise ValueError(
                f"{peer} at {problem.site.label} {problem.dtype}: {name} is wrong by"
                f" {norm_error:.2g} in norm and {element_error:.2g} at the worst element; the"
                f" tolerances are {norm_tolerance:.2g} and {element_tolerance:.2g}."
            )


def _root_mean_square(values: np.ndarray) -> float:
    return float(np.sqrt(np.square(values).mean(dtype=np.float64)))
