"""Detects programs that contain their own gradient; `fuse` has to go inside `jax.grad` instead."""

from collections.abc import Iterator

from jax_bnar._fuse.match import RefusedMatch
from jax_bnar._fuse.plan import Plan

HINT = (
    "the function holds the gradient of what is to be fused, which reads arrays that the fused"
    " operator does not keep; turn it round: jax.grad(fuse(loss)), not fuse(jax.grad(loss))"
)


def is_to_be_turned_round(refused: RefusedMatch, around: str = "") -> bool:
    """Whether only the gradient stands in the way, which JAX records in the names of equations.

    What is refused for another reason (LayerNorm) would also be refused without the gradient.
    """
    return refused.is_used_elsewhere and "jvp(" in f"{around}{refused.node.name_stack}"


def require_undifferentiated(plan: Plan) -> None:
    for refused, around in _refused(plan, ""):
        if is_to_be_turned_round(refused, around):
            raise ValueError(f"fuse: {HINT}.")


def _refused(plan: Plan, around: str) -> Iterator[tuple[RefusedMatch, str]]:
    for refused in plan.refused:
        yield refused, around
    for node, inner in plan.inner.items():
        for one in inner:
            yield from _refused(one, f"{around}{node.name_stack}/")
