"""What all primitives on arrays in the user's layout have in common: all rules but lowering."""

import abc
import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.sharding import PartitionSpec

from jax_bnar._base import jax_compat
from jax_bnar._base.implementation import Implementation
from jax_bnar._base.layout import ChannelLayout
from jax_bnar._base.signatures import OperandKind, Signature
from jax_bnar._sharding.alignment import with_automatic_axes
from jax_bnar._sharding.shards import Shards


class ArrayPrimitive(abc.ABC):
    """The base of all primitives on arrays in the user's layout: signature and batching rule."""

    @property
    @abc.abstractmethod
    def signature(self) -> Signature: ...

    @abc.abstractmethod
    def create(self) -> Primitive:
        """The primitive, with its rules."""

    @abc.abstractmethod
    def __call__(
        self,
        *arguments: Any,
        layout: ChannelLayout,
        implementation: Implementation,
        **statics: Any,
    ) -> Any:
        """The structured results, by the implementation that is asked for, if any."""

    @functools.cached_property
    def primitive(self) -> Primitive:
        return self.create()

    def bind(
        self,
        *arguments: Any,
        layout: ChannelLayout,
        implementation: Implementation,
        **statics: Any,
    ) -> Any:
        """The results of the primitive, structured like its arguments."""
        signature = self.signature
        given, present = signature.pack_structured(arguments)
        results = self.primitive.bind(
            *jax_compat.reconcile_vma(given),
            present=present,
            layout=layout,
            implementation=implementation,
            **statics,
        )
        return signature.returned(results, statics)

    def named(self, given: Sequence[Any], present: tuple[bool, ...]) -> dict[str, Any]:
        """The operands that are present, by name."""
        return {n: v for n, v in self.signature.unpack(given, present).items() if v is not None}

    def batch(
        self,
        batched: Sequence[Any],
        dims: Sequence[int | None],
        *,
        present: tuple[bool, ...],
        layout: ChannelLayout,
        **params: Any,
    ) -> tuple[list[jax.Array], list[int | None]]:
        """Batches over a new leading axis: each example keeps its own statistics."""
        size = next(a.shape[d] for a, d in zip(batched, dims, strict=True) if d is not None)
        kinds = self.signature.operand_kinds(params)
        arrays, axes = (self.signature.unpack(each, present) for each in (batched, dims))
        leading = {
            name: _leading(array, axes[name], size, kinds[name])
            for name, array in arrays.items()
            if array is not None
        }
        layout = dataclasses.replace(layout, leading=layout.leading + 1)
        results = self.bind_batched(leading, present=present, layout=layout, **params)
        # A result that depends only on unmapped operands must come back unmapped, because users
        # may request it with `out_axes=None`.
        mapped = {name for name, axis in axes.items() if axis is not None}
        differs = [
            not mapped.isdisjoint(self.signature.dependencies(result, params))
            for result in self.signature.results_with(params)
        ]
        return (
            [r if each else r[0] for r, each in zip(results, differs, strict=True)],
            [0 if each else None for each in differs],
        )

    def bind_batched(self, leading: Mapping[str, jax.Array], **params: Any) -> list[jax.Array]:
        return self.primitive.bind(*leading.values(), **params)


class ComputedPrimitive(ArrayPrimitive):
    """A primitive whose results `jax.numpy` defines, whatever computes them."""

    @abc.abstractmethod
    def register_lowerings(self, new: Primitive) -> None: ...

    @abc.abstractmethod
    def compute(self, *given: jax.Array, **params: Any) -> tuple[jax.Array, ...]:
        """The results in `jax.numpy`, for arrays without explicit shardings."""

    def create(self) -> Primitive:
        new = Primitive(f"bnar_{self.signature.name}")
        new.multiple_results = True
        new.def_impl(functools.partial(jax_compat.apply_primitive, new))
        new.def_abstract_eval(self._abstract)
        self.register_lowerings(new)
        jax_compat.needs_devices_at_lowering(new)
        jax_compat.primitive_batchers[new] = self.batch
        jax_compat.primitive_jvps[new] = self._jvp
        return new

    def in_pure_jax(self, *given: jax.Array, **params: Any) -> tuple[jax.Array, ...]:
        """The results of the primitive in `jax.numpy`, which XLA can partition for any sharding."""
        avals = self._abstract(*map(jax.typeof, given), **params)
        function = functools.partial(self.compute, **params)
        return with_automatic_axes(function, tuple(aval.sharding.spec for aval in avals), *given)

    def _jvp(
        self, primals: Sequence[Any], tangents: Sequence[Any], **params: Any
    ) -> tuple[list[jax.Array], list[jax.Array]]:
        """Derivatives of derivatives have no kernel; they differentiate `in_pure_jax`."""
        tangents = [jax_compat.instantiate_zeros(t) for t in tangents]
        results = self.primitive.bind(*primals, **params)
        function = functools.partial(self.in_pure_jax, **params)
        _, out_tangents = jax.jvp(function, tuple(primals), tuple(tangents))
        return list(results), list(out_tangents)

    def _abstract(
        self,
        *avals: Any,
        present: tuple[bool, ...],
        layout: ChannelLayout,
        implementation: Implementation,
        **statics: Any,
    ) -> list[jax.core.ShapedArray]:
        del implementation
        signature = self.signature
        kinds, named = signature.result_kinds(statics), signature.unpack(avals, present)
        dtypes = signature.result_dtypes(named, statics)
        return _result_avals(named[signature.x], layout, kinds, dtypes)


def _leading(array: jax.Array, axis: int | None, size: int, kind: OperandKind) -> jax.Array:
    """An operand with the mapped axis, of length `size`, moved to the front."""
    if axis is not None:
        return jnp.moveaxis(array, axis, 0)
    return jnp.broadcast_to(array, (1 if kind == "vector" else size, *array.shape))


def _result_avals(
    x: Any, layout: ChannelLayout, kinds: Sequence[OperandKind], dtypes: Sequence[Any]
) -> list[jax.core.ShapedArray]:
    shapes = layout.shapes_of(kinds, x.shape)
    specs = [PartitionSpec()] * len(kinds)
    if any(entry is not None for entry in x.sharding.spec):
        specs = [_result_spec(x, layout, *each) for each in zip(kinds, shapes, strict=True)]
    return jax_compat.sharded_avals(x, shapes, dtypes, specs)


def _result_spec(
    x: Any, layout: ChannelLayout, kind: OperandKind, shape: tuple[int, ...]
) -> PartitionSpec:
    spec, sizes = x.sharding.spec, x.sharding.mesh.shape
    if kind == "tensor":
        return spec
    # For a mask, x may be gathered first. Vectors nevertheless have the type that they have without
    # one, because derivative rules ask for a mask where the function itself does not.
    return Shards.create(layout, x.shape, spec, sizes, has_mask=kind == "mask").spec(kind, shape)
