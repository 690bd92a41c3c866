"""A program that holds its own gradient: it is fused the other way round."""

from collections.abc import Iterator

from jax_bnar._fuse.match import RefusedMatch
from jax_bnar._fuse.nodes import Node
from jax_bnar._fuse.plan import Plan

HINT = (
    "the function holds the gradient of what is to be fused, which reads arrays that the fused"
    " operator does not keep; turn it round: jax.grad(fuse(loss)), not fuse(jax.grad(loss))"
)


def is_differentiated(node: Node, around: str = "") -> bool:
    """Whether an equation was traced by differentiation: JAX leaves that in its name."""
    return "jvp(" in f"{around}{node.name_stack}"


def require_undifferentiated(plan: Plan) -> None:
    for refused, around in _refused(plan, ""):
        if is_differentiated(refused.node, around):
            raise ValueError(f"fuse: {HINT}.")


def _refused(plan: Plan, around: str) -> Iterator[tuple[RefusedMatch, str]]:
    for refused in plan.refused:
        yield refused, around
    for node, inner in plan.inner.items():
        for one in inner:
            yield from _refused(one, f"{around}{node.name_stack}/")
