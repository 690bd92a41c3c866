"""The training form in the user's layout, with its derivatives.

It is not a `jax.custom_vjp`, which would not support forward mode. It is a `jax.custom_jvp` whose
tangent is one linear primitive with our backward as its transpose. This has the same residuals and
the same two kernels as a custom_vjp, and supports `jax.jvp`, `jax.linearize` and `jax.jacfwd` as
well; see `linear_call`.

Operands are (x, z, affine), and what belongs to the inputs is in tuples; see
`jax_bnar._base.inputs`.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero, zero_from_primal

from jax_bnar import primitive
from jax_bnar._autodiff.linear_call import LocalMap, linear_call
from jax_bnar._autodiff.remat import STATISTICS_NAME, named_mask, recomputable
from jax_bnar._autodiff.tangents import Residuals, mapped_tangents, training_tangents
from jax_bnar._base import jax_compat
from jax_bnar._base.config import Config
from jax_bnar._base.inputs import Affine, Statistics

# y, statistics, mask
_Results = tuple[jax.Array, tuple[Statistics, ...], jax.Array | None]


@functools.partial(jax.custom_jvp, nondiff_argnums=(3, 4))
def training(
    x: tuple[jax.Array, ...],
    z: jax.Array | None,
    affine: tuple[Affine, ...],
    config: Config,
    save_mask: bool = False,
) -> _Results:
    """Returns (y, statistics, mask); mean and var have shape (num_groups, C).

    mask is None unless `save_mask` is set. All operands must vary over the same mesh axes
    (`jax_bnar._sharding.alignment`).
    """
    operations = primitive.OPERATIONS[config.inputs]
    return operations.forward(x, z, affine, **config.forward_statics(save_mask=save_mask))


@functools.partial(training.defjvp, symbolic_zeros=True)
def _training_jvp(
    config: Config, save_mask: bool, primals: tuple[Any, ...], tangents: tuple[Any, ...]
) -> tuple[_Results, tuple[Any, ...]]:
    moved = without_symbolic_zeros(tangents)
    (y, statistics, mask), dots = _with_tangents(config, save_mask, primals, moved)
    # The mask is returned only if the caller asked for it.
    mask = mask if save_mask else None
    mask_dot = zero_from_primal(mask, symbolic_zeros=True)
    return (y, statistics, mask), (*dots, mask_dot)


def _with_tangents(
    config: Config, save_mask: bool, primals: tuple[Any, ...], tangents: tuple[Any, ...]
) -> tuple[_Results, tuple[Any, ...]]:
    """The results, whose mask is what backward reads, and the tangents of y and the statistics."""
    (y, statistics, mask), saved = _forward(primals, config, save_mask or config.save_mask)
    x, _, affine = primals
    dots = linear_call(
        TrainingTangent(config),
        Residuals(x, saved, statistics, affine),
        tangents,
        (y, *jax.tree.leaves(statistics)),
    )
    return (y, statistics, mask), jax.tree.unflatten(jax.tree.structure((y, statistics)), dots)


def without_symbolic_zeros(tangents: Any) -> Any:
    """The tangents that a rule is given, with None for those that are zero."""
    return jax.tree.map(lambda t: None if isinstance(t, SymbolicZero) else t, tangents)


def _forward(
    operands: tuple[Any, ...], config: Config, save_mask: bool
) -> tuple[_Results, jax.Array | None]:
    """The results, and what backward finds the derivative of the activation in."""
    # With pure JAX, this calls `training`, so that second derivatives use the rule above. Otherwise
    # they use the one below, and the primitive is lowered where it stands in the program: JAX
    # lowers what a custom_jvp contains apart, and it could not be seen there what x comes from.
    if config.implementation == "xla":
        y, statistics, mask = training(*operands, config, save_mask)
    else:
        forward = primitive.OPERATIONS[config.inputs].forward
        y, statistics, mask = forward(*operands, **config.forward_statics(save_mask=save_mask))
    # They are named before their first use, so that a policy that saves them ends the
    # recomputation here.
    statistics = checkpoint_name(statistics, STATISTICS_NAME)
    y, mask = recomputable[config.inputs](
        y, mask, *operands, statistics, **config.forward_statics(save_mask=save_mask)
    )
    mask = named_mask(mask)
    return (y, statistics, mask), saved_for(config, y, mask, operands[1])


def saved_for(
    config: Config, y: jax.Array, mask: jax.Array | None, z: jax.Array | None
) -> jax.Array | None:
    """What backward finds the derivative of the activation in, or None if x is enough."""
    # y instead of the pre-ReLU tensor, because it is the output and is kept anyway (Kaixi Hou; see
    # `bn_add_relu`).
    return {"y": y, "mask": mask, "z": z}.get(config.gate)


@dataclasses.dataclass(frozen=True)
class TrainingTangent(LocalMap):
    """The linear map from the tangents of (x, z, affine) to those of y and the statistics."""

    config: Config

    def mapped_results(self, axis_name: Any, residuals: Any, tangents: Any) -> tuple[bool, ...]:
        del axis_name
        return mapped_tangents(residuals, tangents)

    def tangent(self, residuals: Residuals, tangents: Any) -> tuple[jax.Array, ...]:
        return training_tangents(residuals, tangents, self.config)

    def transpose(self, residuals: Residuals, cotangents: tuple[jax.Array, ...]) -> tuple[Any, ...]:
        backward = primitive.OPERATIONS[self.config.inputs].backward
        return transposed(backward, residuals, cotangents, self.config)


def transposed(
    backward: Callable[..., Any],
    residuals: Residuals,
    cotangents: tuple[jax.Array, ...],
    config: Config,
    **options: Any,
) -> tuple[Any, ...]:
    """Cotangents of (x, z, affine) by `backward`; None for an operand that is None."""
    dy, *rest = cotangents
    of_statistics = jax.tree.unflatten(jax.tree.structure(residuals.statistics), rest)
    statics = config.backward_statics(config.gate)
    dx, dscale, dbias, dz = backward(dy, *residuals, of_statistics, **statics, **options)
    if config.dz_is_dy:
        dz = dy
    # All biases have the one gradient dbias, which is summed over the groups once.
    of_groups = (*dscale, dbias)
    *shared, shared_dbias = (total.sum(axis=0, keepdims=True) for total in of_groups)
    return (
        dx,
        dz,
        tuple(
            Affine(
                _of_parameter(affine_i.scale, dscale_i, shared_i),
                _of_parameter(affine_i.bias, dbias, shared_dbias),
            )
            for affine_i, dscale_i, shared_i in zip(residuals.affine, dscale, shared, strict=True)
        ),
    )


def _of_parameter(
    parameter: jax.Array | None, of_groups: jax.Array, shared: jax.Array
) -> jax.Array | None:
    """The gradient of a parameter: that of each group if it has a value for each."""
    if parameter is None:
        return None
    return shared if parameter.shape[0] == 1 else of_groups


def _forward_jvp(
    inputs: int, primals: Sequence[Any], tangents: Sequence[Any], **params: Any
) -> tuple[list[jax.Array], list[Any]]:
    """The derivative of the primitive `forward`, in derivatives of derivatives."""
    signature = primitive.OPERATIONS[inputs].forward.signature
    statics = {name: value for name, value in params.items() if name != "present"}
    save_mask = statics.pop("save_mask")
    config = Config(
        **statics,
        save="mask" if save_mask else "y",
        inputs=inputs,
        has_z=signature.unpack(primals, params["present"]).get("z") is not None,
    )
    moved = [None if isinstance(t, jax_compat.Zero) else t for t in tangents]
    results, dots = _with_tangents(
        config,
        save_mask,
        *(signature.unpack_structured(each, params["present"]) for each in (primals, moved)),
    )
    leaves, dots = jax.tree.leaves(results), jax.tree.leaves(dots)
    of_mask = [jax_compat.Zero(jax.typeof(mask).to_tangent_aval()) for mask in leaves[len(dots) :]]
    return leaves, [*dots, *of_mask]


for _inputs, _operations in primitive.OPERATIONS.items():
    jax_compat.primitive_jvps[_operations.forward.primitive] = functools.partial(
        _forward_jvp, _inputs
    )
