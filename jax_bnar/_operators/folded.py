"""What remains of a BatchNorm that was folded into a convolution."""

from typing import Any

import jax

from jax_bnar._base.activations import Activation
from jax_bnar._base.implementation import Implementation
from jax_bnar._base.inputs import Affine, Statistics
from jax_bnar._operators.forms import checked, evaluate
from jax_bnar._operators.validation import check_like
from jax_bnar._sharding.alignment import align_operands
from jax_bnar.plain_inference import NEUTRAL_EPSILON


def bias_act(
    x: Any,
    z: Any,
    bias: Any,
    *,
    activation: Activation,
    negative_slope: float = 0.0,
    implementation: Implementation = None,
) -> jax.Array:
    """act(x + bias + z), with channels last; z may be None.

    The kernel computes it as `relu(batch_norm(x) + z)` of mean 0 and variance 1. In plain JAX it is
    the sum as it stands, which XLA for GPUs computes within the convolution.
    """
    if activation == "none" and z is not None:
        z = check_like("bias_act", "z", z, x)
        return bias_act(x, None, bias, activation="none", implementation=implementation) + z
    (given, z, affine, layout), config = checked(
        *("bias_act", (x,), z, (Affine(None, bias),), activation),
        epsilon=NEUTRAL_EPSILON,
        axis=-1,
        implementation=implementation,
        negative_slope=negative_slope,
        may_be_empty=True,
    )
    with jax.named_scope("bias_act"):
        (given, z), affine = align_operands(layout, (given, z), affine)
        return evaluate(given, z, affine, (Statistics(None, None),), config)
