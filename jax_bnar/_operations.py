"""The operations as JAX primitives on arrays in the user's layout.

One for each of `jax_bnar.primitive`, with the same operands and results, in the shapes of
`jax_bnar._layout`. They own what those on canonical arrays cannot: sharding, for which an array
must have its own axes, and with it batching. On one device, and inside `shard_map`, they lower to
the canonical primitive and reshapes that move no data; under jit with several devices to a call
that XLA partitions (`jax_bnar._partitioning`).
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.sharding import PartitionSpec

from jax_bnar import _compat, _local, primitive
from jax_bnar._agreement import with_automatic_axes
from jax_bnar._dtypes import accumulation_dtype
from jax_bnar._implementation import Implementation
from jax_bnar._layout import Kind, Layout, kind_of
from jax_bnar._partitioning import Partitioned
from jax_bnar._shards import Shards


@dataclasses.dataclass(frozen=True)
class ArrayOperation:
    """One operation on arrays in the user's layout."""

    canonical: primitive.Operation

    @functools.cached_property
    def primitive(self) -> Primitive:
        primitive = Primitive(f"bnar_{self.canonical.name}")
        primitive.multiple_results = True
        primitive.def_impl(functools.partial(_compat.apply_primitive, primitive))
        primitive.def_abstract_eval(self._abstract)
        _compat.register_lowering(primitive, self._lower)
        _compat.needs_devices_at_lowering(primitive)
        _compat.primitive_batchers[primitive] = self._batch
        _compat.primitive_jvps[primitive] = self._jvp
        return primitive

    def __call__(
        self,
        *operands: jax.Array | None,
        layout: Layout,
        implementation: Implementation,
        **statics: Any,
    ) -> tuple[jax.Array, ...]:
        """Binds the primitive, or computes the reference where implementation is 'xla'."""
        if implementation == "xla":
            present = tuple(operand is not None for operand in operands)
            given = (operand for operand in operands if operand is not None)
            return self._reference(*given, present=present, layout=layout, **statics)
        return tuple(
            self.primitive.bind(
                *(a for a in _compat.vary_together(operands) if a is not None),
                present=tuple(operand is not None for operand in operands),
                layout=layout,
                require_kernel=implementation == "ffi",
                **statics,
            )
        )

    def _named(self, given: Sequence[Any], present: tuple[bool, ...]) -> dict[str, Any]:
        """The operands that are there, by name."""
        names = (n for n, p in zip(self.canonical.operands, present, strict=True) if p)
        return dict(zip(names, given, strict=True))

    def _abstract(
        self,
        *avals: Any,
        present: tuple[bool, ...],
        layout: Layout,
        require_kernel: bool,
        **statics: Any,
    ) -> list[jax.core.ShapedArray]:
        del require_kernel
        x = self._named(avals, present)["x"]
        kinds = _local.result_kinds(self.canonical.name, statics)
        return [_result_aval(x, layout, kind, kinds) for kind in kinds]

    def _lower(self, ctx: Any, *operands: Any, **params: Any) -> Any:
        automatic = _compat.automatic_axes(ctx)
        where = None
        if automatic:
            names = ", ".join(map(str, automatic))
            where = f"inside a shard_map that leaves mesh axes ({names}) automatic"
        elif automatic is None and _compat.is_for_export(ctx):
            # A partitioned call needs Python when XLA partitions, which is after export.
            where = "in a program exported for several devices"
        if where is not None:
            if params["require_kernel"]:
                raise NotImplementedError(
                    f"jax_bnar: implementation='ffi' asks for the {self.canonical.name} kernel, but"
                    f" XLA cannot partition it {where}; implementation=None falls back to pure JAX."
                )
            function = self._reference
        elif automatic is None:
            function = functools.partial(self._partitioned, ctx.avals_in, ctx.avals_out)
        else:
            function = self._on_one_device
        # Types of Explicit meshes name shardings; inside, arrays are those of one device.
        ctx = ctx.replace(avals_in=_compat.without_shardings(ctx.avals_in))
        return _compat.lower_fun(function, multiple_results=True)(ctx, *operands, **params)

    def _partitioned(
        self,
        avals_in: Sequence[Any],
        avals_out: Sequence[Any],
        *given: jax.Array,
        present: tuple[bool, ...],
        layout: Layout,
        require_kernel: bool,
        **statics: Any,
    ) -> list[jax.Array]:
        kinds = _local.result_kinds(self.canonical.name, statics)
        return Partitioned(
            self.canonical,
            tuple(
                (name, kind_of(name, statics.get("gate")), aval.shape)
                for name, aval in self._named(avals_in, present).items()
            ),
            tuple((kind, aval.shape) for kind, aval in zip(kinds, avals_out, strict=True)),
            layout,
            "ffi" if require_kernel else None,
            statics,
        )(*given)

    def _on_one_device(
        self,
        *given: jax.Array,
        present: tuple[bool, ...],
        layout: Layout,
        require_kernel: bool,
        **statics: Any,
    ) -> tuple[jax.Array, ...]:
        implementation = "ffi" if require_kernel else None
        return self._call(given, present, layout, implementation, statics)

    def _reference(
        self,
        *given: jax.Array,
        present: tuple[bool, ...],
        layout: Layout,
        require_kernel: bool = False,
        **statics: Any,
    ) -> tuple[jax.Array, ...]:
        """In pure JAX, whatever the sharding: XLA partitions it by itself."""
        del require_kernel

        def function(*given: jax.Array) -> tuple[jax.Array, ...]:
            return self._call(given, present, layout, "xla", statics)

        avals = self._abstract(
            *map(jax.typeof, given),
            present=present,
            layout=layout,
            require_kernel=False,
            **statics,
        )
        return with_automatic_axes(function, tuple(a.sharding.spec for a in avals), *given)

    def _call(
        self,
        given: Sequence[jax.Array],
        present: tuple[bool, ...],
        layout: Layout,
        implementation: Implementation,
        statics: dict[str, Any],
    ) -> tuple[jax.Array, ...]:
        named = self._named(given, present)
        operands = (named.get(name) for name in self.canonical.operands)
        return _local.call(
            self.canonical, *operands, layout=layout, implementation=implementation, **statics
        )

    def _batch(
        self,
        batched: Sequence[Any],
        dims: Sequence[int | None],
        *,
        present: tuple[bool, ...],
        layout: Layout,
        **params: Any,
    ) -> tuple[list[jax.Array], list[int | None]]:
        """Another leading axis: each example keeps statistics of its own."""
        size = next(a.shape[d] for a, d in zip(batched, dims, strict=True) if d is not None)
        gate = params.get("gate")
        axes = self._named(dims, present)
        leading = [
            _leading(array, axes[name], size, kind_of(name, gate))
            for name, array in self._named(batched, present).items()
        ]
        layout = dataclasses.replace(layout, leading=layout.leading + 1)
        results = self._bind_batched(leading, present=present, layout=layout, **params)
        # What depends on operands that are not mapped is one value, and users may say so
        # (`out_axes=None`).
        mapped = {name for name, axis in axes.items() if axis is not None}
        depends = _dependencies(self.canonical.name, gate)
        shared = [at in depends and not (mapped & depends[at]) for at in range(len(results))]
        return (
            [r[0] if one else r for r, one in zip(results, shared, strict=True)],
            [None if one else 0 for one in shared],
        )

    def _bind_batched(self, leading: Sequence[jax.Array], **params: Any) -> list[jax.Array]:
        return self.primitive.bind(*leading, **params)

    def _jvp(
        self, primals: Sequence[Any], tangents: Sequence[Any], **params: Any
    ) -> tuple[list[jax.Array], list[jax.Array]]:
        """Derivatives of a derivative have no kernel: they run through the reference."""
        tangents = [_compat.instantiate_zeros(t) for t in tangents]
        results = self.primitive.bind(*primals, **params)
        _, out_tangents = jax.jvp(
            functools.partial(self._reference, **params), tuple(primals), tuple(tangents)
        )
        return list(results), list(out_tangents)


def _dependencies(operation: str, gate: Any) -> dict[int, set[str]]:
    """The operands that a result depends on, by its position; of all of them if it is not here."""
    of_statistics = {"x"}
    of_gated = {"dy"} | {
        "none": set(),
        "x": {"x", "mean", "var", "a", "scale", "bias"},
    }.get(gate, {"evidence"})
    return {
        "forward": {1: of_statistics, 2: of_statistics},
        "backward": {2: of_gated, 3: of_gated},
        "backward_reduce": {0: of_gated, 2: of_gated},
    }.get(operation, {})


def _leading(array: jax.Array, axis: int | None, size: int, kind: Kind) -> jax.Array:
    """An operand with the mapped axis (of length `size`) in front."""
    if axis is not None:
        return jnp.moveaxis(array, axis, 0)
    return jnp.broadcast_to(array, (1 if kind == "vector" else size, *array.shape))


def _result_aval(x: Any, layout: Layout, kind: Kind, kinds: Sequence[Kind]) -> jax.core.ShapedArray:
    shape = layout.shape_of(kind, x.shape)
    dtype = {"tensor": x.dtype, "vector": accumulation_dtype(x.dtype), "mask": jnp.uint8}[kind]
    mesh, spec = x.sharding.mesh, PartitionSpec()
    if any(entry is not None for entry in x.sharding.spec):
        shards = Shards.create(
            layout, x.shape, x.sharding.spec, mesh.shape, has_mask="mask" in kinds
        )
        spec = x.sharding.spec if kind == "tensor" else shards.spec(kind, shape)
    return _compat.sharded_aval(x, shape, dtype, spec)


forward = ArrayOperation(primitive.forward)
backward = ArrayOperation(primitive.backward)
statistics = ArrayOperation(primitive.statistics)
normalise = ArrayOperation(primitive.normalise)
backward_reduce = ArrayOperation(primitive.backward_reduce)
backward_apply = ArrayOperation(primitive.backward_apply)
