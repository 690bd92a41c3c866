"""The training form with statistics over named axes: `shard_map`, `pmap`, `vmap(axis_name=...)`.

Each pass runs the two halves of the kernels with one all-reduce in between, for all inputs
(`_sharding.collectives`). The derivatives are those of `_sharding.halves.backward`. With n the
number of elements of a group on all devices, and S[.] the sum over the devices, for each input:

    dx = a*e - S[a*sum(e)]/n - rstd*(x-mean)*S[a*sum(e*xhat)]/n + dmean/n + 2*dvar*(x-mean)/n

The factor a = scale*rstd may differ between devices. dscale and dbias are each device's
contribution; JAX sums them, as it does for any operand that devices share.

If the axis is that of a `jax.vmap`, the examples lie in one array, and nothing needs to be merged:
the training form of that array is one call each way, with the statistics of all examples.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

from jax_bnar import primitive
from jax_bnar._autodiff.linear_call import linear_call
from jax_bnar._autodiff.named_call import named_call
from jax_bnar._autodiff.remat import STATISTICS_NAME, named_mask
from jax_bnar._autodiff.tangents import Residuals, mapped_tangents, training_tangents
from jax_bnar._autodiff.training import saved_for, training, transposed
from jax_bnar._base.config import Config
from jax_bnar._base.inputs import Affine, Statistics
from jax_bnar._sharding import halves
from jax_bnar._sharding.collectives import NamedSpan, parts_of

_Names = tuple[Any, ...]
_Groups = tuple[tuple[int, ...], ...] | None
# y, followed by the mean and var of each input
_Results = tuple[jax.Array, ...]


def synchronised(
    x: tuple[jax.Array, ...],
    z: jax.Array | None,
    affine: tuple[Affine, ...],
    config: Config,
    names: _Names,
    groups: _Groups,
) -> tuple[jax.Array, tuple[Statistics, ...]]:
    """Returns (y, statistics), of shape (num_groups, C), taken over the axes `names`.

    All operands must vary over the same mesh axes (`jax_bnar._sharding.alignment`).
    """
    y, *rest = named_call(Synchronised(config, names, groups), (x, z, affine))
    return y, tuple(map(Statistics, rest[::2], rest[1::2]))


@dataclasses.dataclass(frozen=True)
class Synchronised:
    """The function from (x, z, affine) to y and the statistics."""

    config: Config
    names: _Names
    groups: _Groups

    def value(self, operands: Any) -> _Results:
        y, statistics, _, _ = self._forward(operands, save_mask=False)
        return y, *jax.tree.leaves(statistics)

    def derivative(self, operands: Any, tangents: Any) -> tuple[_Results, _Results]:
        """Like the rule of the training form, see `jax_bnar._autodiff.training`."""
        y, statistics, mask, parts = self._forward(operands, save_mask=self.config.save_mask)
        mask = named_mask(mask)
        x, z, affine = operands
        results = (y, *jax.tree.leaves(statistics))
        # `parts` is saved, because psum(1, names) in backward would be a NameError under
        # grad(vmap(axis_name)).
        residuals = (*Residuals(x, saved_for(self.config, y, mask, z), statistics, affine), parts)
        linear_map = SynchronisedTangent(self.config, self.names, self.groups)
        return results, linear_call(linear_map, residuals, tangents, results)

    def _forward(
        self, operands: Any, *, save_mask: bool
    ) -> tuple[jax.Array, tuple[Statistics, ...], jax.Array | None, jax.Array | int]:
        x, *_ = operands
        operations = primitive.OPERATIONS[self.config.inputs]
        parts = parts_of(self.names, self.groups)
        span = NamedSpan(self.names, self.groups, parts)
        statistics = halves.statistics_of_groups(
            x, span, operations.statistics, **self.config.common_statics
        )
        # As in `training`, they are named before their first use.
        statistics = checkpoint_name(statistics, STATISTICS_NAME)
        y, mask = operations.normalise(
            *operands, statistics, **self.config.forward_statics(save_mask=save_mask)
        )
        return y, statistics, mask, parts

    def sees(self, axis_name: Any) -> bool:
        return axis_name in self.names

    def mapped_results(self, axis_name: Any, operands: Any) -> tuple[bool, ...]:
        x, *_ = operands
        # Along an axis in `names`, all examples share the same statistics. Along another axis, the
        # statistics of all inputs vary as soon as one of them does, because they are merged in one
        # array.
        of_statistics = any(x) and not self.sees(axis_name)
        return any(jax.tree.leaves(operands)), *(of_statistics,) * (2 * len(x))

    def of_all_examples(self, axis_name: Any, operands: Any) -> Callable[[Any], _Results] | None:
        x, z, affine = operands
        layout = self.config.layout
        if (
            not self.sees(axis_name)
            or self.groups is not None
            # A ghost batch would be a slice of each example, and these do not lie side by side.
            or layout.num_groups > 1
            or not all(jax.tree.leaves((x, z)))
            or any(jax.tree.leaves(affine))
        ):
            return None
        names = tuple(name for name in self.names if name != axis_name)
        layout = dataclasses.replace(layout, axis=layout.axis + 1)
        config = dataclasses.replace(self.config, layout=layout)

        def whole(operands: Any) -> _Results:
            x, z, affine = operands
            if names:
                y, statistics = synchronised(x, z, affine, config, names, None)
            else:
                y, statistics, _ = training(x, z, affine, config)
            return y, *jax.tree.leaves(statistics)

        return whole


@dataclasses.dataclass(frozen=True)
class SynchronisedTangent:
    """The linear map from the tangents of (x, z, affine) to those of y and the statistics.

    Its residuals are those of the form on one device, followed by the number of parts.
    """

    config: Config
    names: _Names
    groups: _Groups

    def sees(self, axis_name: Any) -> bool:
        return axis_name in self.names

    def mapped_results(self, axis_name: Any, residuals: Any, tangents: Any) -> tuple[bool, ...]:
        y, *statistics = mapped_tangents(Residuals(*residuals[:-1]), tangents)
        # Statistics over that axis are the same for all its examples.
        return y, *(each and not self.sees(axis_name) for each in statistics)

    def tangent(self, residuals: Any, tangents: Any) -> tuple[jax.Array, ...]:
        local, span = self._split(residuals)
        return training_tangents(local, tangents, self.config, span)

    def transpose(self, residuals: Any, cotangents: Any) -> tuple[Any, ...]:
        local, span = self._split(residuals)
        operations = primitive.OPERATIONS[self.config.inputs]
        own = halves.Halves(operations.backward_reduce, operations.backward_apply)
        return transposed(halves.backward, local, cotangents, self.config, span=span, halves=own)

    def _split(self, residuals: Any) -> tuple[Residuals, NamedSpan]:
        """The residuals of the form on one device, and the span."""
        *local, parts = residuals
        return Residuals(*local), NamedSpan(self.names, self.groups, parts)
