"""The training form if the statistics of x are wanted before y is.

Its statistics are those of `jax_bnar._autodiff.statistics.batch_statistics` for the same x. They
decide about the parameters, as in batch renormalization, so y cannot be computed in the same pass.
But nothing is computed twice: forward is the pass for the statistics followed by `normalise`, and
backward is that of the training form, which takes the gradient through the statistics into dx. The
tangents of the statistics are therefore not used here; they are those of x once more.

Operands are (statistics, x, z, affine), and what belongs to the inputs is in tuples; see
`jax_bnar._base.inputs`. The statistics come first to tell the call from one of inference, where
mean and var do not depend on x.
"""

import dataclasses
import functools
from typing import Any

import jax
from jax.custom_derivatives import zero_from_primal

from jax_bnar import primitive
from jax_bnar._autodiff.linear_call import linear_call
from jax_bnar._autodiff.named_call import named_call
from jax_bnar._autodiff.remat import named_mask
from jax_bnar._autodiff.synchronised import SynchronisedTangent
from jax_bnar._autodiff.tangents import Residuals
from jax_bnar._autodiff.training import TrainingTangent, saved_for, without_symbolic_zeros
from jax_bnar._base.config import Config
from jax_bnar._base.inputs import Affine, Statistics
from jax_bnar._base.jax_compat import reconcile_vma
from jax_bnar._sharding.collectives import parts_of

_Names = tuple[Any, ...]
_Groups = tuple[tuple[int, ...], ...] | None
_Results = tuple[jax.Array, jax.Array | None]  # y, mask


def training_with_statistics(
    x: jax.Array,
    z: jax.Array | None,
    affine: Affine,
    statistics: Statistics,
    config: Config,
    names: _Names,
    groups: _Groups,
) -> jax.Array:
    """y; the parameters have the shape (num_groups, C) of the statistics, or (1, C)."""
    # What depends on the statistics may be the same on all devices that share them.
    leaves, tree = jax.tree.flatten((x, z, affine))
    x, z, affine = jax.tree.unflatten(tree, reconcile_vma(leaves))
    operands = ((statistics,), (x,), z, (affine,))
    if not names:
        return _of_array(*operands, config, False)[0]
    (y,) = named_call(_SynchronisedWithStatistics(config, names, groups), operands)
    return y


@functools.partial(jax.custom_jvp, nondiff_argnums=(4, 5))
def _of_array(
    statistics: tuple[Statistics, ...],
    x: tuple[jax.Array, ...],
    z: jax.Array | None,
    affine: tuple[Affine, ...],
    config: Config,
    save_mask: bool,
) -> _Results:
    """(y, mask); mask is None unless `save_mask` is set."""
    normalise = primitive.OPERATIONS[config.inputs].normalise
    return normalise(x, z, affine, statistics, **config.forward_statics(save_mask=save_mask))


@functools.partial(_of_array.defjvp, symbolic_zeros=True)
def _of_array_jvp(
    config: Config, save_mask: bool, primals: tuple[Any, ...], tangents: tuple[Any, ...]
) -> tuple[_Results, tuple[Any, ...]]:
    """Like the rule of the training form, see `jax_bnar._autodiff.training`."""
    statistics, x, z, affine = primals
    # This calls `_of_array` rather than the primitive, so that second derivatives use this rule.
    y, mask = _of_array(*primals, config, save_mask or config.save_mask)
    mask = named_mask(mask)
    residuals = Residuals(x, saved_for(config, y, mask, z), statistics, affine)
    _, *moved = without_symbolic_zeros(tangents)
    like = (y, *jax.tree.leaves(statistics))
    y_dot, *_ = linear_call(TrainingTangent(config), residuals, tuple(moved), like)
    mask = mask if save_mask else None
    return (y, mask), (y_dot, zero_from_primal(mask, symbolic_zeros=True))


@dataclasses.dataclass(frozen=True)
class _SynchronisedWithStatistics:
    """The function from (statistics, x, z, affine) to y; the statistics span named axes."""

    config: Config
    names: _Names
    groups: _Groups

    def value(self, operands: Any) -> tuple[jax.Array, ...]:
        return self._normalise(operands, save_mask=False)[:1]

    def derivative(
        self, operands: Any, tangents: Any
    ) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
        statistics, x, z, affine = operands
        y, mask = self._normalise(operands, save_mask=self.config.save_mask)
        mask = named_mask(mask)
        residuals = Residuals(x, saved_for(self.config, y, mask, z), statistics, affine)
        # `parts` is saved for the reason given in `jax_bnar._autodiff.synchronised`.
        parts = parts_of(self.names, self.groups)
        linear_map = SynchronisedTangent(self.config, self.names, self.groups)
        _, *moved = tangents
        like = (y, *jax.tree.leaves(statistics))
        return (y,), linear_call(linear_map, (*residuals, parts), tuple(moved), like)[:1]

    def _normalise(self, operands: Any, *, save_mask: bool) -> _Results:
        statistics, x, z, affine = operands
        config = self.config
        normalise = primitive.OPERATIONS[config.inputs].normalise
        return normalise(x, z, affine, statistics, **config.forward_statics(save_mask=save_mask))

    def sees(self, axis_name: Any) -> bool:
        return axis_name in self.names

    def mapped_results(self, axis_name: Any, operands: Any) -> tuple[bool, ...]:
        del axis_name
        return (any(jax.tree.leaves(operands)),)

    def of_all_examples(self, axis_name: Any, operands: Any) -> None:
        return None
