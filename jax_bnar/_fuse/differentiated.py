"""Detects programs that contain their own gradient; `fuse` has to go inside `jax.grad` instead."""

import warnings

from jax_bnar._fuse.match import RefusedMatch
from jax_bnar._fuse.plan import Plan
from jax_bnar._fuse.statistics_match import StatisticsMatch

HINT = (
    "the function contains the gradient (or the jvp) of what is to be fused, which reads arrays"
    " that the fused operator does not keep; write jax.grad(fuse(loss)) instead of"
    " fuse(jax.grad(loss)), and where a loss contains a derivative itself, fuse what it"
    " differentiates: jax.grad(fuse(f)), jax.jvp(fuse(f), ...)"
)


class ContainsGradientError(ValueError):
    """Nothing but a gradient within the function keeps everything from being fused."""


def needs_fuse_inside_grad(refused: RefusedMatch, around: str = "") -> bool:
    """Whether only the gradient stands in the way, which JAX records in the names of equations.

    What is refused for another reason (LayerNorm) would also be refused without the gradient.
    """
    return refused.is_used_elsewhere and "jvp(" in f"{around}{refused.node.name_stack}"


def require_undifferentiated(plan: Plan) -> None:
    """Raises `ContainsGradientError` if nothing but the gradient keeps all from being fused.

    A loss may contain a gradient, as a penalty of gradients does. What else it computes is fused,
    and a warning says that the rest is not.
    """
    is_left = is_fused = False
    for one, _, around in plan.walk():
        is_left |= any(needs_fuse_inside_grad(refused, around) for refused in one.refusals)
        is_fused |= any(not isinstance(match, StatisticsMatch) for match in one.matches)
    if is_left and not is_fused:
        raise ContainsGradientError(f"fuse: {HINT}.")
    if is_left:
        text = f"fuse: not everything is fused, because {HINT}. jax_bnar.explain lists the places."
        warnings.warn(text, RuntimeWarning, stacklevel=3)
