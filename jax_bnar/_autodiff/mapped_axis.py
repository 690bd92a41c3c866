"""What batching rules know of the axis that `jax.vmap` maps, kept to map functions over it later.

The primitives of this room have whole functions as parameters, and those may communicate over named
axes. Their batching rules wrap the function in a `jax.vmap` of its own, which binds the name
whenever the function is run: at lowering, or when it is differentiated.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
from jax.extend.core import unmapped_aval

from jax_bnar._base import jax_compat


@dataclasses.dataclass(frozen=True)
class MappedAxis:
    """One `jax.vmap` of a function of a tree of arrays.

    Attributes:
        data: name and size of the axis, as JAX hands it to batching rules.
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
        """The axis; `is_mapped` says which results differ along it."""
        return cls(data, tree, tuple(dims), tuple(0 if each else None for each in is_mapped))

    @property
    def in_axes(self) -> Any:
        """`in_axes` of the arguments; one that is None has no leaf, and any axis suits it."""
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
        """What the mapped function means by the name of another axis: this axis may hide it."""
        return jax_compat.no_axis_name if axis_name == self.data.name else axis_name

    def batched(self, avals: Sequence[Any]) -> tuple[Any, ...]:
        """Types of the results of all examples, from those of one."""
        return tuple(
            unmapped_aval(self.data.size, dim, aval, self.data.explicit_mesh_axis)
            for aval, dim in zip(avals, self.out_dims, strict=True)
        )
