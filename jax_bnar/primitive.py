"""The primitives that JAX transforms, on arrays in the user's layout.

This module is internal and may change without notice; the operators are in `jax_bnar`.

How a call of `jax_bnar.bn_add_relu` is lowered, and how it is differentiated:

1. `_operators` checks the operands and makes their shardings agree.
2. `_autodiff.training` is the function that JAX differentiates. It binds `forward`, below.
3. On one device, `forward` lowers to the custom call of `_kernels.kernel_call`, with reshapes that
   move no data; on several devices, to a call that XLA partitions (`_sharding.partitioning`); and
   on a platform without a kernel, to `reference`. `vmap` adds a leading axis to the same call.
4. The derivative is a `jax.custom_jvp` rule whose tangent is one linear primitive
   (`_autodiff.linear_call`). Evaluating it gives forward mode in pure JAX. Its transpose binds
   `backward`, below, on the residuals x, y (or a mask), mean, var, scale and bias.

A `jax.custom_vjp` would need the same residuals and the same two kernels, but would not support
forward mode. The next layer keeps y as its input anyway, so backward reads the sign of the ReLU
from y, and the pre-ReLU tensor is never kept.

There is one primitive for each operation of `_kernels.kernel_call`, with the same operands and
results, in the shapes of `_base.layout`, and one for evaluation, which is not a kernel on every
platform. These primitives handle what custom calls on canonical arrays cannot:
sharding, which needs the array's own axes, and therefore batching too.
"""

import abc
import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.sharding import PartitionSpec

from jax_bnar import plain_inference
from jax_bnar._base import jax_compat
from jax_bnar._base.implementation import Implementation
from jax_bnar._base.inputs import PREFIXES
from jax_bnar._base.layout import ChannelLayout
from jax_bnar._base.signatures import OperandKind, Signature
from jax_bnar._kernels import kernel_call
from jax_bnar._sharding.alignment import with_automatic_axes
from jax_bnar._sharding.partitioning import Partitioned
from jax_bnar._sharding.shards import Shards


class ArrayPrimitive(abc.ABC):
    """The base of all primitives on arrays in the user's layout: signature and batching rule."""

    @property
    @abc.abstractmethod
    def signature(self) -> Signature: ...

    @abc.abstractmethod
    def create(self) -> Primitive:
        """The primitive, with its rules."""

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
        given, present = signature.bind_structured(arguments)
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
        return {n: v for n, v in self.signature.unbind(given, present).items() if v is not None}

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
        arrays, axes = (self.signature.unbind(each, present) for each in (batched, dims))
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


@dataclasses.dataclass(frozen=True)
class ArrayOperation(ArrayPrimitive):
    """One operation on arrays in the user's layout."""

    canonical: kernel_call.Operation

    @property
    def signature(self) -> Signature:
        return self.canonical.signature

    def create(self) -> Primitive:
        new = Primitive(f"bnar_{self.canonical.name}")
        new.multiple_results = True
        new.def_impl(functools.partial(jax_compat.apply_primitive, new))
        new.def_abstract_eval(self._abstract)
        jax_compat.register_lowering(new, self._lower)
        jax_compat.needs_devices_at_lowering(new)
        jax_compat.primitive_batchers[new] = self.batch
        jax_compat.primitive_jvps[new] = self._jvp
        return new

    def __call__(
        self,
        *arguments: Any,
        layout: ChannelLayout,
        implementation: Implementation,
        **statics: Any,
    ) -> Any:
        """Binds the primitive, or computes the reference if the implementation is 'xla'."""
        options: dict[str, Any] = {"layout": layout, "implementation": implementation, **statics}
        if implementation != "xla":
            return self.bind(*arguments, **options)
        signature = self.signature
        given, present = signature.bind_structured(arguments)
        results = self._reference(*given, present=present, **options)
        return signature.returned(results, statics)

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
        kinds, named = signature.result_kinds(statics), signature.unbind(avals, present)
        dtypes = signature.result_dtypes(named, statics)
        return _result_avals(named[signature.x], layout, kinds, dtypes)

    def _lower(self, ctx: Any, *operands: Any, **params: Any) -> Any:
        automatic = jax_compat.automatic_axes(ctx)
        where = None
        if automatic:
            names = ", ".join(map(str, automatic))
            where = f"inside a shard_map that leaves mesh axes ({names}) automatic"
        elif automatic is None and jax_compat.is_for_export(ctx):
            # Partitioning calls back into Python, which is not possible after export.
            where = "in a program exported for several devices"
        if where is not None:
            if params["implementation"] == "ffi":
                raise NotImplementedError(
                    f"jax_bnar: implementation='ffi' requires the {self.canonical.name} kernel,"
                    f" but XLA cannot partition it {where}; implementation=None falls back to pure"
                    " JAX."
                )
            function = self._reference
        elif automatic is None:
            function = functools.partial(self._partitioned, ctx.avals_in, ctx.avals_out)
        else:
            function = self._on_one_device
        # With an Explicit mesh the types name shardings; here, arrays are those of one device.
        ctx = ctx.replace(avals_in=jax_compat.without_shardings(ctx.avals_in))
        lower = jax_compat.lower_fun(function, multiple_results=True)
        if automatic is not None:
            return lower(ctx, *operands, **params)
        with jax_compat.keeping_nothing_when_stored(ctx):
            return lower(ctx, *operands, **params)

    def _partitioned(
        self,
        avals_in: Sequence[Any],
        avals_out: Sequence[Any],
        *given: jax.Array,
        present: tuple[bool, ...],
        layout: ChannelLayout,
        implementation: Implementation,
        **statics: Any,
    ) -> list[jax.Array]:
        kinds = self.signature.operand_kinds(statics)
        results = self.signature.result_kinds(statics)
        return Partitioned(
            self.canonical,
            tuple(
                (name, kinds[name], aval.shape)
                for name, aval in self.named(avals_in, present).items()
            ),
            tuple((kind, aval.shape) for kind, aval in zip(results, avals_out, strict=True)),
            layout,
            implementation,
            statics,
        )(*given)

    def _on_one_device(
        self, *given: jax.Array, present: tuple[bool, ...], **statics: Any
    ) -> tuple[jax.Array, ...]:
        operands = list(self.signature.unbind(given, present).values())
        return self.canonical.bind_in_layout(operands, **statics)

    def _reference(self, *given: jax.Array, **params: Any) -> tuple[jax.Array, ...]:
        """The operation in pure JAX, which XLA can partition for any sharding."""
        params |= {"implementation": "xla"}
        avals = self._abstract(*map(jax.typeof, given), **params)
        function = functools.partial(self._on_one_device, **params)
        return with_automatic_axes(function, tuple(a.sharding.spec for a in avals), *given)

    def _jvp(
        self, primals: Sequence[Any], tangents: Sequence[Any], **params: Any
    ) -> tuple[list[jax.Array], list[jax.Array]]:
        """Derivatives of derivatives have no kernel; they differentiate the reference."""
        tangents = [jax_compat.instantiate_zeros(t) for t in tangents]
        results = self.primitive.bind(*primals, **params)
        _, out_tangents = jax.jvp(
            functools.partial(self._reference, **params), tuple(primals), tuple(tangents)
        )
        return list(results), list(out_tangents)


@dataclasses.dataclass(frozen=True)
class Inference(ArrayPrimitive):
    """Evaluation: the operation `normalise`, where no mask is wanted.

    On CPUs it runs the kernel. On other platforms it is left to XLA, which computes it together
    with what comes before and after; a custom call behind a convolution would prevent that. Which
    one it is, is decided when the program is lowered, for each platform that it is lowered for.
    implementation="ffi" demands the kernel on every platform.

    Attributes:
        name: the name of the primitive, without its prefix.
        normalise: the operation that the kernel computes.
    """

    name: str
    normalise: ArrayOperation

    @functools.cached_property
    def signature(self) -> Signature:  # type: ignore[override]
        full = self.normalise.signature
        return dataclasses.replace(full, outputs=full.outputs[:1])

    def create(self) -> Primitive:
        new = Primitive(f"bnar_{self.name}")
        new.multiple_results = True
        new.def_impl(functools.partial(jax_compat.apply_primitive, new))
        new.def_abstract_eval(self._abstract)
        jax_compat.register_lowering(new, jax_compat.lower_fun(self._in_plain_jax))
        jax_compat.register_lowering(new, jax_compat.lower_fun(self._by_normalise), platform="cpu")
        jax_compat.needs_devices_at_lowering(new)
        jax_compat.primitive_batchers[new] = self.batch
        jax_compat.primitive_jvps[new] = self._jvp
        return new

    def __call__(
        self,
        *arguments: Any,
        layout: ChannelLayout,
        implementation: Implementation,
        **statics: Any,
    ) -> jax.Array:
        """y, by this primitive unless an implementation is asked for."""
        statics |= {"layout": layout, "implementation": implementation}
        if implementation is None:
            return self.bind(*arguments, **statics)[0]
        given, present = self.signature.bind_structured(arguments)
        return self._by_normalise(*given, present=present, **statics)[0]

    def _abstract(self, *avals: Any, **params: Any) -> list[jax.core.ShapedArray]:
        return self.normalise._abstract(*avals, save_mask=False, **params)

    def _by_normalise(
        self, *given: jax.Array, present: tuple[bool, ...], **statics: Any
    ) -> tuple[jax.Array, ...]:
        x, z, affine, statistics = self.signature.unbind_structured(given, present)
        statistics = plain_inference.given_or_neutral(x, statistics, statics["layout"])
        return self.normalise(x, z, affine, statistics, save_mask=False, **statics)[:1]

    def _in_plain_jax(
        self,
        *given: jax.Array,
        present: tuple[bool, ...],
        implementation: Implementation,
        **statics: Any,
    ) -> tuple[jax.Array, ...]:
        del implementation

        def function(*given: jax.Array) -> tuple[jax.Array]:
            arguments = self.signature.unbind_structured(given, present)
            return (plain_inference.inference(*arguments, **statics),)

        return with_automatic_axes(function, (jax.typeof(given[0]).sharding.spec,), *given)

    def _jvp(
        self, primals: Sequence[Any], tangents: Sequence[Any], **params: Any
    ) -> tuple[Sequence[jax.Array], Sequence[jax.Array]]:
        """As in `ArrayOperation`."""
        tangents = [jax_compat.instantiate_zeros(t) for t in tangents]
        results = self.primitive.bind(*primals, **params)
        function = functools.partial(self._in_plain_jax, **params)
        return results, jax.jvp(function, tuple(primals), tuple(tangents))[1]


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
        shards = Shards.create(
            layout, x.shape, x.sharding.spec, x.sharding.mesh.shape, has_mask="mask" in kinds
        )
        specs = [
            x.sharding.spec if kind == "tensor" else shards.spec(kind, shape)
            for kind, shape in zip(kinds, shapes, strict=True)
        ]
    return jax_compat.sharded_avals(x, shapes, dtypes, specs)


class Operations(NamedTuple):
    """The primitives of an operator; `statistics` is the same for any number of inputs."""

    forward: ArrayOperation
    backward: ArrayOperation
    statistics: ArrayOperation
    normalise: ArrayOperation
    backward_reduce: ArrayOperation
    backward_apply: ArrayOperation
    inference: Inference


# Equal operations are one object, with one primitive.
_operation = functools.cache(ArrayOperation)


def _operations(inputs: int) -> Operations:
    of_arrays = [_operation(each) for each in kernel_call.OPERATIONS[inputs]]
    normalise = _operation(kernel_call.OPERATIONS[inputs].normalise)
    inference = Inference(f"{PREFIXES[inputs]}inference", normalise)
    return Operations(*of_arrays, inference=inference)


# By the number of inputs.
OPERATIONS: Final = {inputs: _operations(inputs) for inputs in PREFIXES}


def _drop_unused_mask(used: Sequence[bool], equation: Any) -> tuple[list[bool], Any]:
    """Drops a mask that nobody reads, such as one in a rematerialised forward pass."""
    if not any(used):
        return [False] * len(equation.invars), None
    if equation.params["save_mask"] and not used[-1]:
        equation = equation.replace(
            outvars=equation.outvars[:-1], params={**equation.params, "save_mask": False}
        )
    return [True] * len(equation.invars), equation


for _operations_of_inputs in OPERATIONS.values():
    for _masked in (_operations_of_inputs.forward, _operations_of_inputs.normalise):
        jax_compat.register_dce_rule(_masked.primitive, _drop_unused_mask)
