"""The custom calls on canonical (G, N, C, S) arrays, each with its own primitive.

forward and backward are whole passes for one device. statistics, normalise, backward_reduce and
backward_apply are their halves: a collective goes between two halves, and inference is normalise
alone.

Each operation takes the same arguments as its namesake in `jax_bnar.reference`; there are some for
each number of inputs that have kernels. Operands that are None are left out of the call and
recorded in the static parameter `present`. On a platform without a kernel, the lowering is the
reference itself, so one trace lowers for cpu, cuda and tpu.

These inner primitives are bound only while an outer primitive of `jax_bnar.primitive` is lowered.
JAX transforms the outer ones, so the inner ones need no rules for derivatives or batching.
TransformerEngine makes the same distinction between outer and inner primitives.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive

from jax_bnar import reference
from jax_bnar._base import jax_compat
from jax_bnar._base.activations import statics_of
from jax_bnar._base.canonical import CanonicalShape, mask_bytes
from jax_bnar._base.implementation import Computation, warn_once
from jax_bnar._base.inputs import PREFIXES
from jax_bnar._base.layout import ChannelLayout
from jax_bnar._base.signatures import PerOperation, Signature, signatures
from jax_bnar._kernels import ahead_of_time, convolution_layout, targets
from jax_bnar._kernels.channel_padding import padded_channels, with_channels, without_channels
from jax_bnar._kernels.mask_layout import mask_layout


@dataclasses.dataclass(frozen=True)
class Operation:
    """One custom call.

    Attributes:
        signature: its arguments and results.
        reference: the reference that defines its results, in pure JAX.
    """

    signature: Signature
    reference: Callable[..., Any]

    @property
    def name(self) -> str:
        return self.signature.name

    @functools.cached_property
    def primitive(self) -> Primitive:
        new = Primitive(f"bnar_canonical_{self.name}")
        new.multiple_results = True
        new.def_impl(functools.partial(jax_compat.apply_primitive, new))
        new.def_abstract_eval(self._abstract)
        jax_compat.register_lowering(new, self._lower_reference)
        for platform in {platform for _, platform in targets.callable_kernels}:
            if (self.name, platform) in targets.callable_kernels:
                lower = functools.partial(self._lower_on, platform)
                jax_compat.register_lowering(new, lower, platform=platform)
        return new

    def __call__(self, *arguments: Any, implementation: Computation, **statics: Any) -> Any:
        """The operation on canonical arrays."""
        operands = self.signature.flat(arguments)
        results = self.bind(operands, implementation=implementation, **statics)
        return self.signature.returned(results, statics)

    def on_one_device(
        self,
        *arguments: Any,
        layout: ChannelLayout,
        implementation: Computation,
        **statics: Any,
    ) -> Any:
        """The operation on the arrays of one device, in the user's layout."""
        operands = self.signature.flat(arguments)
        results = self.bind_in_layout(
            operands, layout=layout, implementation=implementation, **statics
        )
        return self.signature.returned(results, statics)

    def bind(
        self,
        operands: Sequence[jax.Array | None],
        *,
        implementation: Computation,
        pixels: int = 0,
        **statics: Any,
    ) -> tuple[jax.Array, ...]:
        """Binds the primitive, or computes the reference where that is asked for.

        `pixels` is the number of elements of the spatial axes if channels and pixels are expected
        in the other order in the memory of a GPU, and otherwise 0.
        """
        given, present = self.signature.pack(operands)
        statics |= {"present": present, "implementation": implementation, "pixels": pixels}
        if implementation in ("xla", "pinned"):
            return self._reference(*given, **statics)
        return tuple(self.primitive.bind(*given, **statics))

    def bind_in_layout(
        self,
        operands: Sequence[jax.Array | None],
        *,
        layout: ChannelLayout,
        implementation: Computation,
        **statics: Any,
    ) -> tuple[jax.Array, ...]:
        """The same on arrays of this layout."""
        signature = self.signature
        kinds = signature.operand_kinds(statics)
        x = operands[list(kinds).index(signature.x)]
        assert x is not None
        canonical = layout.to_canonical(operands, kinds.values(), x.shape)
        pixels = math.prod(layout.spatial_sizes(x.shape)) if layout.swapped_on_cuda else 0
        results = self.bind(canonical, implementation=implementation, pixels=pixels, **statics)
        return layout.from_canonical(results, signature.result_kinds(statics), x.shape)

    def _abstract(
        self,
        *avals: Any,
        present: tuple[bool, ...],
        implementation: Computation,
        pixels: int,
        **statics: Any,
    ) -> list[jax.core.ShapedArray]:
        del implementation, pixels
        named = self.signature.unpack(avals, present)
        x = named[self.signature.x]
        kinds = self.signature.result_kinds(statics)
        groups, rows, channels, inner = x.shape
        shape_of = {
            "tensor": x.shape,
            "vector": (groups, channels),
            "mask": (groups, mask_bytes(rows, channels, inner)),
        }
        dtypes = self.signature.result_dtypes(named, statics)
        return jax_compat.out_avals(x, [shape_of[k] for k in kinds], dtypes)

    def _reference(
        self,
        *given: jax.Array,
        present: tuple[bool, ...],
        implementation: Computation,
        pixels: int,
        **statics: Any,
    ) -> tuple[jax.Array, ...]:
        if pixels:
            params: dict[str, Any] = {"present": present, "implementation": implementation}
            compute = functools.partial(self._reference, pixels=0, **params, **statics)
            order = self._other_order(given, present, pixels)
            return tuple(self._in_order(order, compute, *given, present=present, **statics))
        if implementation == "pinned":
            given = tuple(convolution_layout.pinned(a) if a.ndim == 4 else a for a in given)
        arguments = self.signature.unpack_structured(given, present)
        return tuple(jax.tree.leaves(self.reference(*arguments, **statics)))

    def _lower_on(self, platform: str, ctx: Any, *operands: Any, **params: Any) -> Any:
        """Lowers to the kernel, or to the reference where the kernel is missing or not loaded."""
        implementation = params["implementation"]
        if self._lacks(platform, ctx.avals_in, params):
            return self._lower_reference(ctx, *operands, **params)
        if platform == "cuda" and ahead_of_time.runs_elsewhere(ctx):
            if ahead_of_time.calls_kernel(self.name, ctx, implementation):
                return self._lower_kernel(platform, ctx, *operands, **params)
        elif targets.has_kernel(self.name, platform):
            return self._lower_kernel(platform, ctx, *operands, **params)
        elif (self.name, platform) in targets.kernels and implementation is None:
            obstacle = targets.obstacle(platform)
            if obstacle is not None:
                warn_once(f"its {platform.upper()} kernels", *obstacle)
        return self._lower_reference(ctx, *operands, **params)

    def _lower_reference(self, ctx: Any, *operands: Any, **params: Any) -> Any:
        if params["implementation"] == "ffi":
            platforms = ctx.module_context.platforms
            lacks = (self._lacks(platform, ctx.avals_in, params) for platform in platforms)
            why = next(filter(None, lacks), None) or targets.why_no_kernel(self.name, platforms)
            raise NotImplementedError(
                f"jax_bnar: implementation='ffi' requires the {self.name} kernel on"
                f" {', '.join(platforms)}, but {why}. implementation=None falls back to pure JAX."
            )
        if not convolution_layout.is_for_gpus_alone(ctx):
            params |= {"pixels": 0}
        params |= {"implementation": convolution_layout.pure_jax(ctx)}
        rule = jax_compat.lower_fun(self._reference, multiple_results=True)
        return rule(ctx, *operands, **params)

    def _lacks(self, platform: str, avals: Sequence[Any], params: Mapping[str, Any]) -> str:
        """Why a platform that has kernels has none for this call; empty if it has one.

        CUDA has no kernels whose y has another dtype than x.
        """
        if platform != "cuda":
            return ""
        named = self.signature.unpack(avals, params["present"])
        x = named[self.signature.x]
        out_dtype = named["dy"].dtype if "dy" in named else params.get("out_dtype", x.dtype)
        return f"there is none from {x.dtype} to {out_dtype}" if out_dtype != x.dtype else ""

    def _lower_kernel(self, platform: str, ctx: Any, *operands: Any, **params: Any) -> Any:
        if platform == "cpu":
            # These refuse invalid values of JAX_BNAR_CPU_ISA and JAX_BNAR_HUGE_PAGES before
            # anything runs.
            targets.cpu_isa()
            targets.huge_pages()
        call = functools.partial(self._call_kernel, platform, ctx.avals_out)
        if platform == "cpu" and (channels := self._padded_channels(ctx.avals_in, params)):
            call = functools.partial(self._call_padded, channels, ctx.avals_out)
        elif params["pixels"] and platform in convolution_layout.PLATFORMS:
            call = functools.partial(self._call_swapped, platform, ctx.avals_out)
        return jax_compat.lower_fun(call, multiple_results=True)(ctx, *operands, **params)

    def _padded_channels(self, avals: Sequence[Any], params: Mapping[str, Any]) -> int | None:
        kind_of = self.signature.operand_kinds(params)
        named = self.signature.unpack(avals, params["present"])
        given = [kind_of[name] for name, aval in named.items() if aval is not None]
        x = CanonicalShape(*named[self.signature.x].shape)
        return padded_channels(x, [*given, *self.signature.result_kinds(params)])

    def _call_padded(
        self, channels: int, results: Sequence[Any], *operands: jax.Array, **params: Any
    ) -> list[jax.Array]:
        """Binds the custom call for the CPU on arrays with more channels."""
        more = [with_channels(operand, channels) for operand in operands]
        declared = [
            jax.eval_shape(lambda r=r: with_channels(jnp.zeros(r.shape, r.dtype), channels))
            for r in results
        ]
        outputs = self._call_kernel("cpu", declared, *more, **params)
        return [
            without_channels(output, result.shape[result.ndim // 2])
            for output, result in zip(outputs, results, strict=True)
        ]

    def _call_swapped(
        self, platform: str, results: Sequence[Any], *operands: jax.Array, **params: Any
    ) -> list[jax.Array]:
        """Binds the custom call on arrays with channels and pixels in the other order."""
        order = self._other_order(operands, params["present"], params["pixels"])
        kinds = self.signature.result_kinds(params)
        declared = [
            jax.eval_shape(functools.partial(order.apply, kind=kind), result)
            for result, kind in zip(results, kinds, strict=True)
        ]
        call = functools.partial(self._call_kernel, platform, declared, **params)
        return self._in_order(order, call, *operands, **params)

    def _other_order(
        self, operands: Sequence[Any], present: tuple[bool, ...], pixels: int
    ) -> convolution_layout.Swapped:
        x = self.signature.unpack(operands, present)[self.signature.x]
        return convolution_layout.Swapped(CanonicalShape(*x.shape), pixels)

    def _in_order(
        self,
        order: convolution_layout.Swapped,
        compute: Callable[..., Any],
        *operands: jax.Array,
        present: tuple[bool, ...],
        **statics: Any,
    ) -> list[jax.Array]:
        """The results of `compute`, which gets and returns arrays in the other order."""
        kind_of = self.signature.operand_kinds(statics)
        named = self.signature.unpack(operands, present)
        given = [
            order.apply(operand, kind_of[name])
            for name, operand in named.items()
            if operand is not None
        ]
        kinds = self.signature.result_kinds(statics)
        return [order.undo(o, kind) for o, kind in zip(compute(*given), kinds, strict=True)]

    def _call_kernel(
        self,
        platform: str,
        results: Sequence[Any],
        *operands: jax.Array,
        present: tuple[bool, ...],
        implementation: Computation,
        pixels: int,
        **statics: Any,
    ) -> list[jax.Array]:
        """Binds the custom call on arrays without the dimensions G and S if they have size 1.

        When XLA:CPU reshapes bfloat16 arrays with dimensions of size 1, it picks its own layout and
        then copies whole arrays into the layout that the call requires. It does the same, in every
        dtype, when it reshapes a result of shape (N, C) to one such as (N, 1, 1, C). A reshape from
        one dimension leaves no choice of layout, so tensors are returned flat.
        """
        del implementation, pixels
        named = self.signature.unpack(operands, present)
        kind_of = self.signature.operand_kinds(statics)
        result_kinds = self.signature.result_kinds(statics)
        given_kinds = [kind_of[name] for name, operand in named.items() if operand is not None]

        x = named[self.signature.x]
        canonical = CanonicalShape(*x.shape)
        groups, rows, channels, inner = canonical
        workspace = 0
        if inputs := self.signature.sums:
            # Two inputs need as much as one with twice as many groups.
            sizes = (inputs * groups, rows, channels, inner)
            workspace = targets.workspace_bytes(platform, *sizes)
        mask_shape = mask_order = None
        if "mask" in (*given_kinds, *result_kinds):
            masks = mask_layout(platform, canonical)
            mask_shape, mask_order = masks.shape, masks.major_to_minor

        has = {
            f"has_{operand.name}": named[operand.name] is not None
            for operand in self.signature.operands
            if operand.optional
        }
        given = [
            operand.reshape(
                mask_shape if kind == "mask" else _squeezed(operand.shape, groups, inner)
            )
            for operand, kind in zip(operands, given_kinds, strict=True)
        ]
        shape_of = {"tensor": (math.prod(canonical),), "mask": mask_shape}
        declared = [
            jax.ShapeDtypeStruct(shape_of.get(kind, aval.shape), aval.dtype)
            for kind, aval in zip(result_kinds, results, strict=True)
        ]
        if not _is_zero(workspace):
            # The workspace is a result, because CUDA graphs cannot capture a kernel's allocation.
            declared.append(jax.ShapeDtypeStruct((workspace,), jnp.uint8))
        layouts = [mask_order if kind == "mask" else None for kind in result_kinds]
        call = jax.ffi.ffi_call(
            targets.target_name(self.name),
            declared,
            input_layouts=[mask_order if kind == "mask" else None for kind in given_kinds],
            output_layouts=layouts + [None] * (len(declared) - len(layouts)),
        )
        statics.pop("out_dtype", None)  # The kernel reads it from the buffers.
        # A caller may leave the activation out; the default is that of `reference`.
        activation = statics_of("relu", 0.0) if self.signature.has_activation else {}
        outputs = call(
            *given,
            has_groups=not _is_one(groups),
            has_inner=not _is_one(inner),
            **has,
            **{name: _attribute(value) for name, value in (activation | statics).items()},
            # Programs for the CPU are compiled where they run, by the kernels' own version.
            **({"abi": targets.cuda_abi()} if platform == "cuda" else {}),
        )
        outputs = outputs[: len(results)]
        return [o.reshape(aval.shape) for o, aval in zip(outputs, results, strict=True)]


def _is_one(size: Any) -> bool:
    return isinstance(size, int) and size == 1  # A symbolic size (jax.export) is not an int.


def _is_zero(size: Any) -> bool:
    return isinstance(size, int) and size == 0


def _squeezed(shape: tuple[Any, ...], groups: Any, inner: Any) -> tuple[Any, ...]:
    """A tensor's shape without G and S if their size is 1; other shapes stay as they are."""
    if len(shape) == 4:
        return shape[_is_one(groups) : 3 if _is_one(inner) else 4]
    return shape


def _attribute(value: Any) -> Any:
    # The FFI decoder accepts only f64 here; it would refuse an int or a np.float32 at run time.
    return np.float64(value) if isinstance(value, float) else value


# `statistics` is equal for all numbers of inputs. This makes it one operation, with one primitive.
_operation = functools.cache(Operation)


def _operations(inputs: int) -> PerOperation[Operation]:
    """Each signature with the function of `jax_bnar.reference` that has its name."""
    named = signatures(inputs).by_name().items()
    return PerOperation(
        **{name: _operation(signature, getattr(reference, name)) for name, signature in named}
    )


# By the number of inputs.
CANONICAL: Final = {inputs: _operations(inputs) for inputs in PREFIXES}
# All of them, in the order of `native/operations.h`.
ALL: Final = tuple(dict.fromkeys(each for family in CANONICAL.values() for each in family))
