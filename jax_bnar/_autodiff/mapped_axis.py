"""The axis that a batching rule is given, recorded so that functions can be mapped over it later.

The primitives of `_autodiff` take whole functions as parameters, and those functions may
communicate over named axes. Their batching rules wrap the function in another `jax.vmap`, which
binds the axis name whenever the function runs: at lowering, or when it is differentiated.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
from jax.extend.core import unmapped_aval

from jax_bnar._base import jax_compat


@dataclasses.dataclass(frozen=True)
class MappedAxis:
    """One `jax.vmap` of a function of a pytree of arrays.

    Attributes:
        data: name and size of the axis, as JAX passes them to batching rules.
        tree: the structure of the arguments.
        dims: the mapped axis of each leaf of the arguments, or None.
        out_dims: the mapped axis of each result, 0 or None.
    """

    data: Any
    tree: Any
    dims: tuple[int | None, ...]
    out_dims: tuple[int | None, ...]

    @classmethod
    def create(
        cls, data: Any, tree: Any, dims: Sequence[int | None], is_mapped: Sequence[bool]
    ) -> "MappedAxis":
        """The axis; `is_mapped` says which results vary along it."""
        return cls(data, tree, tuple(dims), tuple(0 if each else None for each in is_mapped))

    @property
    def in_axes(self) -> Any:
        """`in_axes` of the arguments; an argument that is None has no leaf, so any axis will do."""
        return jax.tree.unflatten(self.tree, self.dims)

    def vmap(self, function: Any, in_axes: Any, out_axes: Any) -> Any:
        return jax.vmap(
            function,
            in_axes,
            out_axes,
            axis_name=self.data.name,
            axis_size=self.data.size,
            spmd_axis_name=self.data.spmd_name or self.data.explicit_mesh_axis,
        )

    def name_seen_inside(self, axis_name: Any) -> Any:
        """The axis that this name denotes inside the mapped function: this axis may shadow it."""
        return jax_compat.no_axis_name if axis_name == self.data.name else axis_name

    def batched(self, avals: Sequence[Any]) -> tuple[Any, ...]:
        """The types of the batched results, given those of a single example."""
        return tuple(
            unmapped_aval(self.data.size, dim, aval, self.data.explicit_mesh_axis)
            for aval, dim in zip(avals, self.out_dims, strict=True)
        )
