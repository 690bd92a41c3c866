"""The custom calls of y = relu(batch_norm(x1) + batch_norm(x2)).

A platform may have kernels for one input but none for two. The operations below are then composed
of calls with one input: one call writes the normalised x2 as an array, which is the residual of the
other call. The call for x1 adds the sum of both biases, in forward and in the gate of backward, so
that both round alike. With gate "x", backward recomputes y.
"""

from typing import Any, Final

import jax
import jax.numpy as jnp

from jax_bnar import dual_reference
from jax_bnar._base import signatures
from jax_bnar._base.config import Gate
from jax_bnar._kernels import kernel_call
from jax_bnar._kernels.kernel_call import Operation

_Results = tuple[jax.Array, ...]

# With scale=a, var=1 and an epsilon that vanishes beside 1, `normalise` computes
# y = act((x - mean) * a + bias + z). In the kernels this epsilon does vanish, because they compute
# the square root in double.
_NO_EPSILON: Final = 1e-300


def _composed_forward(
    x1: jax.Array,
    x2: jax.Array,
    scale1: jax.Array | None,
    bias1: jax.Array | None,
    scale2: jax.Array | None,
    bias2: jax.Array | None,
    *,
    save_mask: bool,
    **options: Any,
) -> _Results:
    z, mean2, var2 = kernel_call.forward(
        x2, None, scale2, None, activation="none", save_mask=False, **options
    )
    bias = dual_reference.sum_of_biases(bias1, bias2)
    y, mean1, var1, *mask = kernel_call.forward(
        x1, z, scale1, bias, activation="relu", save_mask=save_mask, **options
    )
    return (y, mean1, var1, mean2, var2, *mask)


def _composed_normalise(
    x1: jax.Array,
    x2: jax.Array,
    scale1: jax.Array | None,
    bias1: jax.Array | None,
    scale2: jax.Array | None,
    bias2: jax.Array | None,
    mean1: jax.Array,
    var1: jax.Array,
    mean2: jax.Array,
    var2: jax.Array,
    *,
    save_mask: bool,
    **options: Any,
) -> _Results:
    (z,) = kernel_call.normalise(
        x2, None, scale2, None, mean2, var2, activation="none", save_mask=False, **options
    )
    bias = dual_reference.sum_of_biases(bias1, bias2)
    return kernel_call.normalise(
        x1, z, scale1, bias, mean1, var1, activation="relu", save_mask=save_mask, **options
    )


def _composed_backward(
    dy: jax.Array,
    x1: jax.Array,
    x2: jax.Array,
    saved: jax.Array | None,
    mean1: jax.Array,
    var1: jax.Array,
    mean2: jax.Array,
    var2: jax.Array,
    scale1: jax.Array | None,
    bias1: jax.Array | None,
    scale2: jax.Array | None,
    bias2: jax.Array | None,
    dmean1: jax.Array,
    dvar1: jax.Array,
    dmean2: jax.Array,
    dvar2: jax.Array,
    *,
    gate: Gate,
    **options: Any,
) -> _Results:
    if gate == "x":
        affine = (scale1, bias1, scale2, bias2)
        (saved,) = _composed_normalise(
            x1, x2, *affine, mean1, var1, mean2, var2, save_mask=False, **options
        )
        gate = "y"
    dx1, dscale1, dbias, e = kernel_call.backward(
        dy, x1, saved, mean1, var1, scale1, None, dmean1, dvar1, gate=gate, has_z=True, **options
    )
    dx2, dscale2, _ = kernel_call.backward(
        e, x2, None, mean2, var2, scale2, None, dmean2, dvar2, gate="none", has_z=False, **options
    )
    return dx1, dx2, dscale1, dscale2, dbias


def _made_again(
    x1: jax.Array,
    x2: jax.Array,
    mean1: jax.Array,
    a1: jax.Array,
    mean2: jax.Array,
    a2: jax.Array,
    bias: jax.Array | None,
    **options: Any,
) -> jax.Array:
    """y, recomputed from the coefficients and rounded as in `_composed_normalise`."""
    (y,) = _composed_normalise(
        *(x1, x2, a1, bias, a2, None),
        *(mean1, jnp.ones_like(mean1), mean2, jnp.ones_like(mean2)),
        epsilon=_NO_EPSILON,
        save_mask=False,
        **options,
    )
    return y


def _composed_backward_reduce(
    dy: jax.Array,
    x1: jax.Array,
    x2: jax.Array,
    saved: jax.Array | None,
    mean1: jax.Array,
    a1: jax.Array | None,
    mean2: jax.Array,
    a2: jax.Array | None,
    bias: jax.Array | None,
    *,
    gate: Gate,
    **options: Any,
) -> _Results:
    if gate == "x":
        assert a1 is not None
        assert a2 is not None
        saved, gate = _made_again(x1, x2, mean1, a1, mean2, a2, bias, **options), "y"
    sum_e, sum_e_centred1, e = kernel_call.backward_reduce(
        dy, x1, saved, mean1, None, None, gate=gate, has_z=True, **options
    )
    _, sum_e_centred2 = kernel_call.backward_reduce(
        e, x2, None, mean2, None, None, gate="none", has_z=False, **options
    )
    return sum_e, sum_e_centred1, sum_e_centred2


def _composed_backward_apply(
    dy: jax.Array,
    x1: jax.Array,
    x2: jax.Array,
    saved: jax.Array | None,
    mean1: jax.Array,
    a1: jax.Array,
    b1: jax.Array,
    k1: jax.Array,
    mean2: jax.Array,
    a2: jax.Array,
    b2: jax.Array,
    k2: jax.Array,
    bias: jax.Array | None,
    *,
    gate: Gate,
    **options: Any,
) -> _Results:
    if gate == "x":
        saved, gate = _made_again(x1, x2, mean1, a1, mean2, a2, bias, **options), "y"
    options |= {"gate": gate}
    (dx1,) = kernel_call.backward_apply(dy, x1, saved, mean1, a1, b1, k1, None, **options)
    (dx2,) = kernel_call.backward_apply(dy, x2, saved, mean2, a2, b2, k2, None, **options)
    return dx1, dx2


forward = Operation(signatures.DUAL_FORWARD, dual_reference.forward, _composed_forward)
backward = Operation(signatures.DUAL_BACKWARD, dual_reference.backward, _composed_backward)
normalise = Operation(signatures.DUAL_NORMALISE, dual_reference.normalise, _composed_normalise)
backward_reduce = Operation(
    signatures.DUAL_BACKWARD_REDUCE, dual_reference.backward_reduce, _composed_backward_reduce
)
backward_apply = Operation(
    signatures.DUAL_BACKWARD_APPLY, dual_reference.backward_apply, _composed_backward_apply
)

OPERATIONS: Final = (forward, backward, normalise, backward_reduce, backward_apply)
