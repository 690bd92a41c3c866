"""What to do after reading a report: the sentences with which it ends."""

from collections.abc import Iterator, Sequence

from jax_bnar._fuse.candidate import Candidate
from jax_bnar._fuse.nodes import Node
from jax_bnar._fuse.plan import Plan


def next_steps(candidates: Sequence[Candidate], own_calls: int) -> Iterator[str]:
    """One sentence for each thing that the user may do."""
    if not candidates:
        yield _of_nothing(own_calls)
        return
    matched = [candidate for candidate in candidates if candidate.is_matched]
    if len(matched) < len(candidates):
        yield (
            "what is refused runs as before; docs/guide/fuse.md says what is refused and how to"
            " write it instead"
        )
    in_part = [candidate for candidate in matched if candidate.reason]
    if any(candidate.operator == "batch_statistics" for candidate in in_part):
        yield (
            "where batch_statistics comes with a reason, no operator takes the whole normalisation,"
            " and what is made of the statistics runs as before (docs/guide/fuse.md)"
        )
    if any(candidate.operator != "batch_statistics" for candidate in in_part):
        yield (
            "where a reason is given, what follows the BatchNorm is not fused with it, and runs as"
            " before (docs/guide/fuse.md; docs/guide/activations.md lists the activations that are"
            " fused)"
        )
    if matched:
        operators = [candidate.operator or "" for candidate in matched]
        in_training = not all(operator.endswith("_inference") for operator in operators)
        use = "jax.grad(jax_bnar.fuse(fun))" if in_training else "jax_bnar.fuse(fun)"
        yield f"use {use}; jax_bnar.benchmark(fun)(*args) measures what it gains on this machine"


def _of_nothing(own_calls: int) -> str:
    if own_calls:
        return (
            "nothing: fun calls the fused operators of jax_bnar itself, and jax_bnar.fuse would"
            " leave it as it is"
        )
    return (
        "fuse looks for arrays that are normalised by their own mean and variance over the batch,"
        " which BatchNorm does in training: is fun called in training mode, and is its norm a"
        " BatchNorm? (docs/guide/fuse.md) In evaluation it takes norms with a ReLU alone, and"
        " jax_bnar.fold_batch_norms all that follow a convolution (docs/guide/inference.md)"
    )


def own_calls(plan: Plan) -> int:
    """How many calls of jax_bnar's operators a program contains before anything is fused."""
    return sum(_is_own(node) for one, _, _ in plan.walk() for node in one.graph.nodes)


def _is_own(node: Node) -> bool:
    if node.name == "jax_bnar_named" or node.name.startswith("bnar_"):
        return True
    if node.name != "custom_jvp_call":
        return False
    equations = node.params["call_jaxpr"].jaxpr.eqns
    return any(equation.primitive.name.startswith("bnar_") for equation in equations)
