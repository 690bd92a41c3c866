"""Data for which statistics lose digits: outliers, borders, clusters, orders and magnitudes.

Each regime makes one channel of a case in float64, with shape (groups, count), which `fill`
arranges and rounds to the case's dtype. Outliers and clusters are `far` standard deviations away.
"""

import dataclasses
from collections.abc import Callable

import jax.numpy as jnp
import ml_dtypes
import numpy as np
from cases import Case, as_dtype
from oracle import Array

# Outliers are at least and at most this many standard deviations away.
FAR = {
    "float16": (3e2, 3e4),
    "bfloat16": (3e2, 1e9),
    "float32": (3e2, 1e9),
    "float64": (3e2, 1e9),
}
# Squares of the huge values fit into the accumulation dtype, but those of the tiny ones do not.
HUGE = {"float16": 1e4, "bfloat16": 1e15, "float32": 1e15, "float64": 1e140}
TINY = {"float16": 1e-6, "bfloat16": 1e-30, "float32": 1e-30, "float64": 1e-200}


@dataclasses.dataclass(frozen=True)
class Draw:
    """What a regime uses: normal data, a generator, and the distance of outliers."""

    normal: Array
    random: np.random.Generator
    far: float
    dtype: str
    inner: int  # elements after the channel axis

    @property
    def count(self) -> int:
        return self.normal.shape[-1]

    def positions(self, most: int) -> Array:
        number = int(self.random.integers(1, max(2, min(most, self.count // 2) + 1)))
        return self.random.choice(self.count, number, replace=False)


def _with(values: Array, where: Array | slice | int, added: float) -> Array:
    values = values.copy()
    values[..., where] += added
    return values


def _padded(draw: Draw) -> Array:
    values = np.zeros_like(draw.normal)
    values[..., draw.positions(6)] = draw.far * draw.random.uniform(0.5, 1)
    return values


def _zero_borders(draw: Draw) -> Array:
    """Rows of images, each with a border of zeros around data far from zero."""
    period = int(draw.random.integers(3, 60))
    border = np.isin(np.arange(draw.count) % period, (0, period - 1))
    return np.where(border, 0.0, draw.far / 2 + draw.normal)


def _near_constant(draw: Draw) -> Array:
    """Values that differ by a few units in the last place."""
    unit = float(ml_dtypes.finfo(jnp.dtype(draw.dtype)).eps)
    return 1.0 + unit * draw.random.integers(0, 3, draw.normal.shape)


def _alternating(draw: Draw) -> Array:
    return np.where(np.arange(draw.count) % 2, draw.far, -draw.far) / 2 + draw.normal


REGIMES: dict[str, Callable[[Draw], Array]] = {
    "normal": lambda d: d.normal,
    "outlier first": lambda d: _with(d.normal, 0, d.far),
    "two outliers first": lambda d: _with(d.normal, slice(0, 2), d.far),
    "first row": lambda d: _with(d.normal, slice(0, d.inner), d.far),
    "outlier last": lambda d: _with(d.normal, -1, d.far),
    "outliers anywhere": lambda d: _with(d.normal, d.positions(6), d.far),
    "padded": _padded,
    "zero borders": _zero_borders,
    "near constant": _near_constant,
    "far from zero": lambda d: d.far + d.normal,
    "two clusters": lambda d: np.sign(d.normal) * d.far / 2 + d.normal,
    "ascending": lambda d: np.sort(d.normal),
    "alternating": _alternating,
    "tiny": lambda d: TINY[d.dtype] * d.normal,
    "huge": lambda d: HUGE[d.dtype] * d.normal,
}
MIXED = "mixed channels"
NAMES = (*REGIMES, MIXED)


def fill(case: Case, regime: str, seed: int) -> Array:
    """The operand x of the case."""
    random = np.random.default_rng(seed)
    axis = case.axis % len(case.shape)
    inner = int(np.prod(case.shape[axis + 1 :]))
    rows = int(np.prod(case.shape[:axis])) // case.num_groups
    normal = random.standard_normal((case.num_groups, case.channels, rows * inner))
    low, high = np.log(FAR[case.dtype])

    def draw(normal: Array) -> Draw:
        return Draw(normal, random, float(np.exp(random.uniform(low, high))), case.dtype, inner)

    values = np.empty_like(normal)
    for channel in range(case.channels):
        name = str(random.choice(list(REGIMES))) if regime == MIXED else regime
        values[:, channel] = REGIMES[name](draw(normal[:, channel]))
    arranged = values.reshape(case.num_groups, case.channels, rows, inner).swapaxes(1, 2)
    return as_dtype(arranged.reshape(case.shape), case.dtype)
