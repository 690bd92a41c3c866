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
   `backward`, below, on the residuals x, mean, var, scale, bias and, if they are needed, y, a mask
   or z.

A `jax.custom_vjp` would need the same residuals and the same two kernels, but would not support
forward mode. The next layer keeps y as its input anyway, so with a residual, backward reads the
sign of the ReLU from y; without one, it finds the sign in x. The pre-ReLU tensor is never kept.

There is one primitive for each operation of `_kernels.kernel_call`, with the same operands and
results, in the shapes of `_base.layout`, and a few that are not kernels on every platform
(`_platform_primitives`). These primitives handle what custom calls on canonical arrays cannot:
sharding, which needs the array's own axes, and therefore batching too.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, Final

import jax
from jax.extend.core import Primitive

from jax_bnar._array_primitive import ComputedPrimitive
from jax_bnar._base import jax_compat
from jax_bnar._base.implementation import Implementation
from jax_bnar._base.inputs import PREFIXES
from jax_bnar._base.layout import ChannelLayout
from jax_bnar._base.signatures import PerOperation, Signature
from jax_bnar._kernels import convolution_layout, in_passing, kernel_call
from jax_bnar._platform_primitives import Inference, InferenceBackward, StatisticsAround
from jax_bnar._sharding.partitioning import Partitioned


@dataclasses.dataclass(frozen=True)
class ArrayOperation(ComputedPrimitive):
    """One operation on arrays in the user's layout."""

    canonical: kernel_call.Operation

    @property
    def signature(self) -> Signature:
        return self.canonical.signature

    def register_lowerings(self, new: Primitive) -> None:
        # What a call is lowered to depends on what comes before it in the program.
        jax_compat.register_lowering(new, self._lower, cacheable=False)

    def compute(self, *given: jax.Array, **params: Any) -> tuple[jax.Array, ...]:
        params |= {"implementation": "xla"}
        return self._on_one_device(*given, **params)

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
        given, present = signature.pack_structured(arguments)
        results = self.in_pure_jax(*given, present=present, **options)
        return signature.returned(results, statics)

    def _lower(self, ctx: Any, *operands: Any, **params: Any) -> Any:
        x, aval = (
            self.signature.unpack(each, params["present"])[self.signature.x]
            for each in (operands, ctx.avals_in)
        )
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
            function = self.in_pure_jax
        elif automatic is None:
            function = functools.partial(self._partitioned, ctx.avals_in, ctx.avals_out)
        else:
            function = self._on_one_device
        if self.signature.inputs == 1 and in_passing.is_left_to_xla(ctx, x, params):
            params |= {"implementation": convolution_layout.pure_jax(ctx)}
        params |= {"layout": convolution_layout.in_program(ctx, params["layout"], x, aval)}
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
        operands = list(self.signature.unpack(given, present).values())
        return self.canonical.bind_in_layout(operands, **statics)


@dataclasses.dataclass(frozen=True)
class Operations(PerOperation[ArrayOperation]):
    """The primitives of an operator; those of statistics are the same for any number of inputs."""

    inference: Inference
    inference_backward: InferenceBackward
    statistics_around: StatisticsAround


# Equal operations are one object, with one primitive.
_operation = functools.cache(ArrayOperation)


_STATISTICS_AROUND: Final = StatisticsAround(
    "statistics_around", _operation(kernel_call.CANONICAL[1].statistics)
)


def _operations(inputs: int) -> Operations:
    canonical = kernel_call.CANONICAL[inputs]
    return Operations(
        **{name: _operation(each) for name, each in canonical.by_name().items()},
        inference=Inference(f"{PREFIXES[inputs]}inference", _operation(canonical.normalise)),
        inference_backward=InferenceBackward(
            f"{PREFIXES[inputs]}inference_backward",
            normalise=_operation(kernel_call.CANONICAL[1].normalise),
            backward_reduce=_operation(canonical.backward_reduce),
            backward_apply=_operation(canonical.backward_apply),
        ),
        statistics_around=_STATISTICS_AROUND,
    )


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
