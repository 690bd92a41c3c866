"""relu(batch_norm(x1) + batch_norm(x2)) with statistics over named axes; see `synchronised`.

Forward has one all-reduce, for the statistics of both inputs, and backward has one.
"""

import dataclasses
import functools
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

from jax_bnar import primitive
from jax_bnar._autodiff import dual_tangents
from jax_bnar._autodiff.dual import transposed
from jax_bnar._autodiff.linear_call import linear_call
from jax_bnar._autodiff.named_call import named_call
from jax_bnar._autodiff.remat import MASK_NAME, STATISTICS_NAME
from jax_bnar._autodiff.synchronised import LocalFunctions, SynchronisedTangent
from jax_bnar._base.config import Config
from jax_bnar._sharding import dual_halves
from jax_bnar._sharding.collectives import NamedSpan, parts_of
from jax_bnar._sharding.halves import Halves

_Names = tuple[Any, ...]
_Groups = tuple[tuple[int, ...], ...] | None
_Results = tuple[jax.Array, ...]

_HALVES = Halves(primitive.dual_backward_reduce, primitive.dual_backward_apply)
_LOCAL = LocalFunctions(
    dual_tangents.mapped_tangents,
    dual_tangents.training_tangents,
    functools.partial(transposed, dual_halves.backward, halves=_HALVES),
)


def synchronised(
    operands: tuple[Any, ...], config: Config, names: _Names, groups: _Groups
) -> _Results:
    """(y, mean1, var1, mean2, var2) of (x1, x2, scale1, bias1, scale2, bias2).

    The statistics have shape (num_groups, C) and are taken over the axes `names`. All operands must
    vary over the same mesh axes (`jax_bnar._sharding.alignment`).
    """
    return named_call(_Synchronised(config, names, groups), operands)


@dataclasses.dataclass(frozen=True)
class _Synchronised:
    config: Config
    names: _Names
    groups: _Groups

    def value(self, operands: Any) -> _Results:
        results, _, _ = self._forward(operands, save=False)
        return results

    def derivative(self, operands: Any, tangents: Any) -> tuple[_Results, _Results]:
        """Like the rule of the training form; see `jax_bnar._autodiff.training`."""
        results, mask, parts = self._forward(operands, save=True)
        saved = None
        if self.config.gate == "mask":
            assert mask is not None
            saved = checkpoint_name(mask, MASK_NAME)
        x1, x2, *affine = operands
        _, *statistics = results
        # The number of parts is saved, because psum(1, names) in backward would raise NameError
        # under grad(vmap(axis_name)).
        residuals = (x1, x2, saved, *statistics, *affine, parts)
        linear_map = SynchronisedTangent(self.config, self.names, self.groups, _LOCAL)
        return results, linear_call(linear_map, residuals, tangents, results)

    def _forward(
        self, operands: Any, *, save: bool
    ) -> tuple[_Results, jax.Array | None, jax.Array | int]:
        x1, x2, *_ = operands
        parts = parts_of(self.names, self.groups)
        of_both = dual_halves.statistics_of_both(
            *(x1, x2, NamedSpan(self.names, self.groups, parts), primitive.statistics),
            **self.config.common_statics,
        )
        # The statistics are named before they are used, so that under a policy which saves them the
        # recomputation stops here.
        of_both = tuple(checkpoint_name(vector, STATISTICS_NAME) for vector in of_both)
        y, *mask = primitive.dual_normalise(
            *operands,
            *of_both,
            **self.config.dual_forward_statics(save_mask=save and self.config.save_mask),
        )
        return (y, *of_both), mask[0] if mask else None, parts

    def sees(self, axis_name: Any) -> bool:
        return axis_name in self.names

    def mapped_results(self, axis_name: Any, operands: Any) -> tuple[bool, ...]:
        x1, x2, *_ = operands
        # Along an axis in `names`, all examples share the same statistics. Along another axis, the
        # statistics of both inputs vary as soon as one of them does, because they are merged in one
        # array.
        of_statistics = (x1 or x2) and not self.sees(axis_name)
        return any(jax.tree.leaves(operands)), *(of_statistics,) * 4
