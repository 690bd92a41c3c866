"""What XLA for GPUs computes in the loop that reads it, so that it need not be in memory.

A kernel reads its array from memory. If x is made by a ReLU, which nobody else reads, the kernels
cost the pass that writes it and, backward, one that reads the cotangent of x again for the ReLU's
own derivative. XLA makes x in its own loops, forward and backward. If an activation follows the
norm, the kernels save more than that: a norm between a GELU and a ReLU moves 0.80 of the bytes of
plain Flax with them, and 0.90 without. If none does, the norm is better left to XLA
(`benchmarks.gpu.architectures` counts what that moves). XLA for CPUs is so much slower at the sums
that the kernels are ahead there.
"""

from typing import Any, Final

from jaxlib.mlir import ir

from jax_bnar._kernels.convolution_layout import is_for_gpus_alone
from jax_bnar._kernels.producers import CALL, returned_by

# From x on, so many operations are looked at.
_MOST: Final = 32
# These neither compute nor move anything.
_VIEWS: Final = frozenset(
    """
    sdy.sharding_constraint stablehlo.convert stablehlo.dynamic_reshape stablehlo.reshape
    stablehlo.transpose
    """.split()  # noqa: SIM905 (a list would take a line for each)
)
# What activations, gates and dropout end in. A sum of two arrays is missing: it joins the blocks of
# a network, so something else reads it, too.
_COMPUTED: Final = frozenset(
    f"stablehlo.{name}"
    for name in """
    abs clamp cosine divide exponential exponential_minus_one log log_plus_one logistic maximum
    minimum multiply negate power rsqrt select sine sqrt subtract tanh
    """.split()  # noqa: SIM905
) | {"chlo.erf", "chlo.erf_inv", "chlo.erfc", "chlo.square"}

# Of one number, or one for each channel.
_BROADCASTS: Final = (
    "stablehlo.broadcast_in_dim",
    "stablehlo.constant",
    "stablehlo.dynamic_broadcast_in_dim",
)
# These have it in memory.
_READERS: Final = ("stablehlo.convolution", "stablehlo.dot_general")


def is_left_to_xla(ctx: Any, x: ir.Value, params: dict[str, Any]) -> bool:
    """Whether an operation of one input is better computed by XLA, in the loop that makes x.

    Args:
        ctx: the context of the lowering.
        x: the array in the program.
        params: the static parameters of the operation.
    """
    if not is_for_gpus_alone(ctx) or params["implementation"] is not None:
        return False
    gates = params.get("activation", "none"), params.get("gate", "none")
    return gates == ("none", "none") and is_computed_in_passing(ctx, x)


def is_computed_in_passing(ctx: Any, x: ir.Value) -> bool:
    """Whether operations on single elements make x, and nobody before has read it from memory."""
    calls: list[Any] = []
    for _ in range(_MOST):
        if any(use.owner.name in _READERS for use in x.uses):
            return False
        operation = x.owner
        if isinstance(operation, ir.Block):
            if not calls:
                return False
            x = calls.pop().operands[ir.BlockArgument(x).arg_number]
        elif operation.name == CALL:
            calls.append(operation)
            x = returned_by(ctx, x)
        elif operation.name in _VIEWS:
            x = operation.operands[0]
        elif operation.name == "stablehlo.add":
            terms = [term for term in operation.operands if not _is_broadcast(term)]
            if len(terms) != 1:
                return False
            (x,) = terms
        else:
            return operation.name in _COMPUTED
    return False


def _is_broadcast(value: ir.Value) -> bool:
    return not isinstance(value.owner, ir.Block) and value.owner.name in _BROADCASTS
