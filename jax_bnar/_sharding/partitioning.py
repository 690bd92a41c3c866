"""The operations under jit with sharded arrays: each device works on its own shard.

XLA knows nothing about a custom call and would gather whole activations on every device. Here each
operation tells it, through `custom_partitioning`, how shards go in and out, and what crosses
devices: the statistics (`jax_bnar._sharding.collectives`), never an activation. Statistics are
those of the whole logical array, as for `jnp` code.

x decides: y, z, dy and dx are sharded as x is, whatever they came as (a cotangent may come
replicated, as the broadcast of a sum), vectors as its channels are.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jax_bnar._base.implementation import Implementation
from jax_bnar._base.jax_compat import (
    SdyShardingRule,
    custom_partitioning,
    partition_spec,
    sharding_of,
)
from jax_bnar._base.layout import ChannelLayout
from jax_bnar._base.signatures import OperandKind
from jax_bnar._kernels import kernel_call
from jax_bnar._sharding import halves
from jax_bnar._sharding.rule import sharding_rule
from jax_bnar._sharding.shards import Shards

_Operand = tuple[str, OperandKind, tuple[int, ...]]


@dataclasses.dataclass(frozen=True)
class Partitioned:
    """One operation on operands of known shapes; operands that are None are not among them.

    Attributes:
        operation: which.
        operands: name, kind and shape of each operand that is there.
        results: kind and shape of each result.
        layout: that of x.
        implementation: of the part of one device.
        statics: static parameters of the operation.
    """

    operation: kernel_call.Operation
    operands: tuple[_Operand, ...]
    results: tuple[tuple[OperandKind, tuple[int, ...]], ...]
    layout: ChannelLayout
    implementation: Implementation
    statics: dict[str, Any]

    def __call__(self, *given: jax.Array) -> list[jax.Array]:
        """The operation, partitioned by XLA when the program is."""
        function = custom_partitioning(lambda *given: self._on_one_device(self.layout, given))
        function.def_partition(
            self._partition,
            infer_sharding_from_operands=self._infer,
            decode_shardings=False,  # a mask may have one that no PartitionSpec can name
            sharding_rule=self._rule,
        )
        return function(*given)

    @property
    def _x(self) -> int:
        return [name for name, _, _ in self.operands].index("x")

    def _on_one_device(
        self, layout: ChannelLayout, given: Sequence[jax.Array]
    ) -> tuple[jax.Array, ...]:
        return halves.call(
            self.operation,
            *self._with_nones(given),
            layout=layout,
            implementation=self.implementation,
            **self.statics,
        )

    def _with_nones(self, given: Sequence[jax.Array]) -> list[jax.Array | None]:
        there = {name: array for (name, _, _), array in zip(self.operands, given, strict=True)}
        return [there.get(operand.name) for operand in self.operation.signature.operands]

    def _shards(self, mesh: Any, arguments: Sequence[Any]) -> Shards:
        x = arguments[self._x]
        return Shards.create(
            self.layout,
            x.shape,
            tuple(partition_spec(x.sharding, mesh)),
            mesh.shape,
            has_mask="mask" in {kind for _, kind, _ in self.operands}
            or "mask" in {kind for kind, _ in self.results},
        )

    def _partition(
        self, mesh: Any, arguments: Sequence[Any], results: Any
    ) -> tuple[Any, Callable[..., Any], Any, Any]:
        del results
        shards = self._shards(mesh, arguments)
        span, layout = shards.span(), shards.local_layout()

        def lower(*given: jax.Array) -> tuple[jax.Array, ...]:
            # Shards, not arrays of a mesh: with an Explicit one in the context, jax 0.12 would
            # name shardings in here, which nobody is left to resolve.
            with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
                if span is None:
                    return self._on_one_device(layout, given)
                return halves.ACROSS_DEVICES[self.operation.name](
                    *self._with_nones(given),
                    span=span,
                    layout=layout,
                    implementation=self.implementation,
                    **self.statics,
                )

        like = arguments[self._x].sharding
        operand_shardings = tuple(
            sharding_of(shards.spec(kind, shape), mesh, like) for _, kind, shape in self.operands
        )
        return mesh, lower, self._result_shardings(mesh, arguments, shards), operand_shardings

    def _infer(self, mesh: Any, arguments: Sequence[Any], results: Any) -> Any:
        """For GSPMD only; Shardy goes by the rule."""
        del results
        return self._result_shardings(mesh, arguments, self._shards(mesh, arguments))

    def _result_shardings(self, mesh: Any, arguments: Sequence[Any], shards: Shards) -> Any:
        like = arguments[self._x].sharding
        return tuple(sharding_of(shards.spec(*result), mesh, like) for result in self.results)

    def _rule(self, mesh: Any, operand_types: Any, result_types: Any) -> SdyShardingRule:
        del operand_types, result_types
        shape = self.operands[self._x][2]
        operands: list[tuple[OperandKind, tuple[int, ...]]] = [
            (kind, shape) for _, kind, shape in self.operands
        ]
        return sharding_rule(self.layout, shape, operands, self.results, tuple(mesh.shape.values()))
