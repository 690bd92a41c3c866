"""How far the results of two programs are apart."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Final

import jax.numpy as jnp
import numpy as np

# The worst array is sought relative to its own norm, but to no less than this part of the norm of
# all. Otherwise a gradient that is mathematically zero, such as that of a bias in front of another
# BatchNorm, would always be the worst: what is computed there is rounding error alone.
_SMALLEST_PART: Final = 1e-3


@dataclasses.dataclass(frozen=True)
class Difference:
    """The difference between the plain and the fused function, in results or in gradients.

    Norms are Euclidean. Integers and flags do not take part, because they are not rounded.

    Attributes:
        what: "results" or "gradients".
        relative: the norm of the difference of all arrays together, relative to `norm`.
        norm: the norm of all arrays of the plain function together.
        worst: the path of the array that differs most in relation to its norm, or to a thousandth
            of `norm` if that is larger. A path of gradients begins with the argument's index.
        worst_difference: the norm of the difference in this array.
        worst_norm: the norm of this array in the plain function.
    """

    what: str
    relative: float
    norm: float
    worst: str
    worst_difference: float
    worst_norm: float


def difference(
    what: str, paths: Sequence[str], plain: Sequence[Any], fused: Sequence[Any]
) -> Difference | None:
    """The difference between two lists of arrays; None if none of them is floating-point.

    Raises:
        ValueError: the shapes differ, or only one of two arrays is floating-point.
    """
    if [p.shape for p in plain] != [f.shape for f in fused]:
        raise _not_the_same("shapes", [[each.shape for each in of] for of in (plain, fused)])
    if [is_real(p) for p in plain] != [is_real(f) for f in fused]:
        raise _not_the_same("dtypes", [[str(each.dtype) for each in of] for of in (plain, fused)])
    real = [each for each in zip(paths, plain, fused, strict=True) if is_real(each[1])]
    if not real:
        return None
    apart, norms = np.array([_norms(a, b) for _, a, b in real]).T
    norm = float(np.linalg.norm(norms))
    worst = int(np.argmax(_ratio(apart, np.maximum(norms, _SMALLEST_PART * norm))))
    return Difference(
        what=what,
        relative=float(_ratio(np.linalg.norm(apart), norm)),
        norm=norm,
        worst=real[worst][0],
        worst_difference=float(apart[worst]),
        worst_norm=float(norms[worst]),
    )


def _not_the_same(what: str, found: list[Any]) -> ValueError:
    return ValueError(
        f"benchmark: the two functions do not compute the same results: their {what} are"
        f" {found[0]} and {found[1]}."
    )


def is_real(array: Any) -> bool:
    return bool(jnp.issubdtype(array.dtype, jnp.floating))


def _norms(plain: Any, fused: Any) -> tuple[float, float]:
    """The norms of the difference and of the plain array, over what is finite in the latter."""
    a, b = (np.asarray(each).astype(np.float64) for each in (plain, fused))
    finite = np.isfinite(a)
    with np.errstate(invalid="ignore"):
        apart = np.where((a == b) | (np.isnan(a) & np.isnan(b)), 0, a - b)
    # A value that only one of the two has, such as a NaN, is an infinite difference.
    apart = np.where(np.isnan(apart), np.inf, apart)
    return float(np.linalg.norm(apart)), float(np.linalg.norm(np.where(finite, a, 0)))


def _ratio(difference: Any, norm: Any) -> Any:
    """Their quotient; two arrays of zeros do not differ."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(difference == 0, 0, difference / norm)
