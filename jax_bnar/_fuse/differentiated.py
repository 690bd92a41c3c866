"""Detects programs that contain their own gradient; `fuse` has to go inside `jax.grad` instead."""

from jax_bnar._fuse.match import RefusedMatch
from jax_bnar._fuse.plan import Plan

HINT = (
    "the function contains the gradient of what is to be fused, which reads arrays that the"
    " fused operator does not keep; write jax.grad(fuse(loss)) instead of fuse(jax.grad(loss))"
)


def needs_fuse_inside_grad(refused: RefusedMatch, around: str = "") -> bool:
    """Whether only the gradient stands in the way, which JAX records in the names of equations.

    What is refused for another reason (LayerNorm) would also be refused without the gradient.
    """
    return refused.is_used_elsewhere and "jvp(" in f"{around}{refused.node.name_stack}"


def require_undifferentiated(plan: Plan) -> None:
    for one, _, around in plan.walk():
        if any(needs_fuse_inside_grad(refused, around) for refused in one.refusals):
            raise ValueError(f"fuse: {HINT}.")
