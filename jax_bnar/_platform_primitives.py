"""Primitives that run kernels on CPUs, and are left to XLA elsewhere.

XLA computes them together with what comes before and after. A custom call would prevent that: the
convolution before it could not add the bias, and arrays would be stored for it. They are the
inference form, in which mean and var are given, its cotangents, and the statistics of an array that
is made for them. Which one it is, is decided when the program is lowered, for each platform that it
is lowered for. implementation="ffi" demands the kernels on every platform.
"""

import abc
import dataclasses
import functools
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
from jax.extend.core import Primitive

from jax_bnar import plain_inference, reference
from jax_bnar._array_primitive import ArrayPrimitive, ComputedPrimitive
from jax_bnar._base import jax_compat
from jax_bnar._base.dtypes import is_wide
from jax_bnar._base.gates import Gate, recomputes
from jax_bnar._base.implementation import Implementation
from jax_bnar._base.inputs import Affine, Coefficients, Statistics, read_by_gate
from jax_bnar._base.layout import ChannelLayout
from jax_bnar._base.signatures import Operand, Signature


class _ByPlatform(ComputedPrimitive):
    """A primitive that runs kernels on CPUs, and is left to XLA elsewhere."""

    @abc.abstractmethod
    def by_operations(self, *arguments: Any, **statics: Any) -> Any:
        """The results of the operations that kernels compute, structured as the signature says.

        With `implementation="xla"` pure JAX computes the same operations.
        """

    @abc.abstractmethod
    def left_to_xla(self, *arguments: Any, **statics: Any) -> Any:
        """The same in `jax.numpy`, on arrays without explicit shardings."""

    def register_lowerings(self, new: Primitive) -> None:
        jax_compat.register_lowering(new, jax_compat.lower_fun(self.in_pure_jax))
        jax_compat.register_lowering(new, jax_compat.lower_fun(self.on_cpu), platform="cpu")

    def __call__(
        self,
        *arguments: Any,
        layout: ChannelLayout,
        implementation: Implementation,
        **statics: Any,
    ) -> Any:
        """The structured results, by this primitive unless an implementation is asked for."""
        statics |= {"layout": layout, "implementation": implementation}
        if implementation is None:
            return self.bind(*arguments, **statics)
        return self.by_operations(*arguments, **statics)

    def on_cpu(
        self, *given: jax.Array, present: tuple[bool, ...], **statics: Any
    ) -> tuple[jax.Array, ...]:
        arguments = self.signature.unpack_structured(given, present)
        return tuple(jax.tree.leaves(self.by_operations(*arguments, **statics)))

    def compute(
        self,
        *given: jax.Array,
        present: tuple[bool, ...],
        implementation: Implementation,
        **statics: Any,
    ) -> tuple[jax.Array, ...]:
        del implementation
        arguments = self.signature.unpack_structured(given, present)
        return tuple(jax.tree.leaves(self.left_to_xla(*arguments, **statics)))


@dataclasses.dataclass(frozen=True)
class Inference(_ByPlatform):
    """The operation `normalise`, where no mask is wanted.

    Attributes:
        name: the name of the primitive, without its prefix.
        normalise: the operation that the kernel computes.
    """

    name: str
    normalise: ArrayPrimitive

    @functools.cached_property
    def signature(self) -> Signature:  # type: ignore[override]
        full = self.normalise.signature
        return dataclasses.replace(full, name=self.name, outputs=full.outputs[:1])

    def by_operations(
        self, x: Any, z: Any, affine: Any, statistics: Any, **statics: Any
    ) -> tuple[jax.Array]:
        statistics = plain_inference.given_or_neutral(x, statistics, statics["layout"])
        y, _ = self.normalise(x, z, affine, statistics, save_mask=False, **statics)
        return (y,)

    def left_to_xla(self, *arguments: Any, **statics: Any) -> tuple[jax.Array]:
        return (plain_inference.inference(*arguments, **statics),)


@dataclasses.dataclass(frozen=True)
class InferenceBackward(_ByPlatform):
    """dx = scale*rstd*e of each input, dz = e, and the sums of `backward_reduce`, where wanted.

    It takes what `backward_reduce` takes, and var and scale for every gate. The static parameter
    `has_sums` says whether anyone asks for the sums, which the gradients of parameters and
    statistics are made of. No mask is read (see `Config.inference_gate`).

    x is read for the sums, and where the derivative of the activation is computed from it. Where
    that follows from y, dx does not depend on x: a network with frozen statistics and parameters
    reads and keeps no x for backward.

    Attributes:
        name: the name of the primitive, without its prefix.
        normalise: the operation of one input, which multiplies dz by a.
        backward_reduce: the operation with the sums.
        backward_apply: the operation with dx, for coefficients that are 0 here.
    """

    name: str
    normalise: ArrayPrimitive
    backward_reduce: ArrayPrimitive
    backward_apply: ArrayPrimitive

    @functools.cached_property
    def signature(self) -> Signature:  # type: ignore[override]
        sum_e, sums_centred, dz = self.backward_reduce.signature.outputs
        dx = self.backward_apply.signature.outputs
        sums = jax.tree.map(
            lambda result: dataclasses.replace(result, present_if="has_sums"), (sum_e, sums_centred)
        )
        full = self.backward_reduce.signature
        return dataclasses.replace(full, name=self.name, outputs=(dx, dz, *sums))

    def on_cpu(
        self, *given: jax.Array, present: tuple[bool, ...], **statics: Any
    ) -> tuple[jax.Array, ...]:
        # Without sums, XLA's loop takes a tenth less time than the kernels, which have none for e
        # alone. In 16 bits it takes twice as long as they.
        dtype = self.signature.unpack(given, present)["dy"].dtype
        if recomputes(statics["gate"]) and not statics["has_sums"] and is_wide(dtype):
            return self.in_pure_jax(*given, present=present, **statics)
        return super().on_cpu(*given, present=present, **statics)

    def by_operations(
        self,
        dy: jax.Array,
        x: tuple[jax.Array, ...],
        saved: jax.Array | None,
        statistics: tuple[Statistics, ...],
        affine: tuple[Affine, ...],
        *,
        gate: Gate,
        has_sums: bool,
        **statics: Any,
    ) -> Any:
        has_z = statics.get("has_z", False)
        of_apply = {name: value for name, value in statics.items() if name != "has_z"}
        sum_e = centred = dz = None
        if has_sums or (has_z and recomputes(gate)):
            of_gate = read_by_gate(gate, statistics, affine)
            sum_e, centred, dz = self.backward_reduce(dy, x, saved, *of_gate, gate=gate, **statics)
        elif has_z:
            dz = self._gated(dy, saved, statistics, gate, **of_apply)
        if dz is not None and _is_exact(dz, statics["activation"]):
            dy, saved, gate = dz, None, "none"
        dx = self._scaled(dy, x, saved, statistics, affine, gate, **of_apply)
        if not has_sums:
            sum_e, centred = None, (None,) * len(x)
        return dx, dz, sum_e, centred

    def _gated(
        self,
        dy: jax.Array,
        y: jax.Array | None,
        statistics: tuple[Statistics, ...],
        gate: Gate,
        **statics: Any,
    ) -> jax.Array:
        """e of one input, for a gate that does not recompute."""
        if gate == "none":
            return dy
        (given,) = statistics
        neutral = plain_inference.neutral_statistics(given)
        statics |= {"epsilon": plain_inference.NEUTRAL_EPSILON}
        (e,) = self._scaled(dy, (y,), y, (neutral,), (Affine(None, None),), gate, **statics)
        return e

    def _scaled(
        self,
        dy: jax.Array,
        x: tuple[Any, ...],
        saved: jax.Array | None,
        statistics: tuple[Statistics, ...],
        affine: tuple[Affine, ...],
        gate: Gate,
        **statics: Any,
    ) -> tuple[jax.Array, ...]:
        """a*e of each input, in the dtype of x."""
        zeros = [jnp.zeros_like(statistics_i.var) for statistics_i in statistics]
        if not recomputes(gate):
            # dx depends on neither mean nor bias.
            affine = tuple(Affine(affine_i.scale, None) for affine_i in affine)
            statistics = tuple(
                Statistics(zero, statistics_i.var)
                for zero, statistics_i in zip(zeros, statistics, strict=True)
            )
        if gate == "none" and dy.dtype == x[0].dtype:
            statics |= {"activation": "none", "negative_slope": 0.0, "save_mask": False}
            scaled = functools.partial(self.normalise, (dy,), None, **statics)
            pairs = zip(affine, statistics, strict=True)
            return tuple(scaled((a_i,), (statistics_i,))[0] for a_i, statistics_i in pairs)
        if gate == "y" and dy.dtype == x[0].dtype:
            # The kernel multiplies what it reads as x by 0. It reads dy in any case, so this is no
            # more memory, and an x or a y that is infinite or NaN does not matter. (An infinite dy
            # gives NaN where a closed gate would give 0: docs/verification.md.)
            x = (dy,) * len(x)
        coefficients = tuple(Coefficients(zero, zero) for zero in zeros)
        return self.backward_apply(
            dy, x, saved, statistics, affine, coefficients, gate=gate, **statics
        )

    def left_to_xla(
        self, *arguments: Any, layout: ChannelLayout, has_sums: bool, **statics: Any
    ) -> Any:
        dx, dz = plain_inference.backward(*arguments, layout=layout, **statics)
        if not has_sums:
            return dx, dz
        dy, x, saved, statistics, affine = arguments
        if "has_z" in statics:
            statics["has_z"] = False
        sum_e, centred, _ = self.backward_reduce(
            *(dy, x, saved, *read_by_gate(statics["gate"], statistics, affine)),
            layout=layout,
            implementation="xla",
            **statics,
        )
        return dx, dz, sum_e, centred


@dataclasses.dataclass(frozen=True)
class StatisticsAround(_ByPlatform):
    """`statistics` of an array that a loop makes of others, given a centre near the mean.

    XLA sums the elements as it makes them, where a kernel would have them stored first. The kernel
    finds a centre of its own.

    Attributes:
        name: the name of the primitive, without its prefix.
        statistics: the operation that the kernel computes.
    """

    name: str
    statistics: ArrayPrimitive

    @functools.cached_property
    def signature(self) -> Signature:  # type: ignore[override]
        full = self.statistics.signature
        outputs = jax.tree.map(lambda r: dataclasses.replace(r, depends_on="all"), full.outputs)
        arguments = (*full.arguments, Operand("centre", "vector"))
        return dataclasses.replace(full, name=self.name, arguments=arguments, outputs=outputs)

    def by_operations(self, x: jax.Array, centre: jax.Array, **statics: Any) -> Statistics:
        del centre
        return self.statistics(x, **statics)

    def left_to_xla(
        self, x: jax.Array, centre: jax.Array, *, layout: ChannelLayout
    ) -> tuple[jax.Array, ...]:
        canonical = layout.to_canonical([x, centre], ["tensor", "vector"], x.shape)
        found = reference.statistics_around(*canonical)
        return layout.from_canonical(found, ["vector", "vector"], x.shape)


def _is_exact(dz: jax.Array, activation: str) -> bool:
    """Whether e has not been rounded to dz: where there are no more digits, or it is dy or 0."""
    return is_wide(dz.dtype) or activation in ("none", "relu", "relu6")
