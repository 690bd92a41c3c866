"""The operations under jit with sharded arrays: each device works on its own shard.

XLA cannot see inside a custom call and would gather whole activations on every device. Here each
operation tells XLA, through `custom_partitioning`, how its operands and results are sharded, and
adds the communication: of statistics (`jax_bnar._sharding.collectives`), never of activations. The
statistics are those of the whole logical array, as for `jnp` code.

x determines all shardings. y, z, dy and dx are sharded like x, whatever sharding they arrive with
(a cotangent that is the broadcast of a sum arrives replicated), and vectors like the channels of x.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

from jax_bnar._base.implementation import Computation
from jax_bnar._base.jax_compat import (
    SdyShardingRule,
    custom_partitioning,
    mesh_of_parts,
    partition_spec,
    sharding_of,
    shards_and_devices,
)
from jax_bnar._base.layout import ChannelLayout
from jax_bnar._base.signatures import OperandKind
from jax_bnar._kernels import kernel_call
from jax_bnar._sharding.gathers import warn_of_gather
from jax_bnar._sharding.halves import ACROSS_DEVICES
from jax_bnar._sharding.parts_of_axes import parts_of_axes
from jax_bnar._sharding.rule import sharding_rule
from jax_bnar._sharding.shards import Shards, spec_of

_Operand = tuple[str, OperandKind, tuple[int, ...]]


@dataclasses.dataclass(frozen=True)
class Partitioned:
    """One operation on operands of known shapes. Operands that are None are left out.

    Attributes:
        operation: the operation.
        operands: name, kind and shape of each operand that is present.
        results: kind and shape of each result.
        layout: the layout of x.
        implementation: the implementation that each device uses.
        statics: static parameters of the operation.
    """

    operation: kernel_call.Operation
    operands: tuple[_Operand, ...]
    results: tuple[tuple[OperandKind, tuple[int, ...]], ...]
    layout: ChannelLayout
    implementation: Computation
    statics: dict[str, Any]

    def __call__(self, *given: jax.Array) -> list[jax.Array]:
        """The operation, which XLA partitions when it partitions the program."""
        # What is traced here may have no constants, which pure JAX has.
        is_pinned = self.implementation == "pinned"
        whole = dataclasses.replace(self, implementation=None) if is_pinned else self
        function = custom_partitioning(lambda *given: whole._on_one_device(self.layout, given))
        function.def_partition(
            self._partition,
            infer_sharding_from_operands=self._infer,
            decode_shardings=False,  # A mask's sharding may not be expressible as a PartitionSpec.
            sharding_rule=self._rule,
        )
        return function(*given)

    @property
    def _x(self) -> int:
        return [name for name, _, _ in self.operands].index(self.operation.signature.x)

    def _on_one_device(
        self, layout: ChannelLayout, given: Sequence[jax.Array]
    ) -> tuple[jax.Array, ...]:
        return self.operation.bind_in_layout(
            self._with_nones(given),
            layout=layout,
            implementation=self.implementation,
            **self.statics,
        )

    def _with_nones(self, given: Sequence[jax.Array]) -> list[jax.Array | None]:
        there = {name: array for (name, _, _), array in zip(self.operands, given, strict=True)}
        return [there.get(operand.name) for operand in self.operation.signature.operands]

    @property
    def _has_mask(self) -> bool:
        return "mask" in {kind for _, kind, _ in self.operands} | {kind for kind, _ in self.results}

    def _mesh_and_spec(self, mesh: Any, arguments: Sequence[Any]) -> tuple[Any, PartitionSpec]:
        """The sharding of x, over this mesh or, if it cannot be expressed, over parts of its axes.

        Where neither is possible, x counts as replicated, so XLA gathers it.
        """
        sharding = arguments[self._x].sharding
        spec = partition_spec(sharding, mesh)
        if spec is not None:
            return mesh, spec
        found = shards_and_devices(sharding)
        parts = None if found is None else parts_of_axes(*found)
        if parts is None:
            return mesh, PartitionSpec()
        sizes, axes = parts
        mesh = mesh_of_parts(mesh, sizes)
        names = [tuple(mesh.axis_names[i] for i in own) for own in axes]
        return mesh, spec_of(names[: len(arguments[self._x].shape)])

    def _shards(
        self, mesh: Any, spec: PartitionSpec, arguments: Sequence[Any], *, has_mask: bool
    ) -> Shards:
        shape = arguments[self._x].shape
        return Shards.create(self.layout, shape, tuple(spec), mesh.shape, has_mask=has_mask)

    def _partition(
        self, mesh: Any, arguments: Sequence[Any], results: Any
    ) -> tuple[Any, Callable[..., Any], Any, Any]:
        del results
        mesh, spec = self._mesh_and_spec(mesh, arguments)
        shards = self._shards(mesh, spec, arguments, has_mask=self._has_mask)
        warn_of_gather(shards, self._shards(mesh, spec, arguments, has_mask=False))
        span, layout = shards.span(), shards.local_layout()

        def lower(*given: jax.Array) -> tuple[jax.Array, ...]:
            # The arguments are shards, not arrays on a mesh. With an Explicit mesh in the context,
            # jax 0.12 would attach shardings here, which nothing would resolve any more.
            with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
                if span is None:
                    return self._on_one_device(layout, given)
                results = ACROSS_DEVICES[self.operation.name](
                    *self.operation.signature.structured(self._with_nones(given)),
                    span=span,
                    layout=layout,
                    implementation=self.implementation,
                    **self.statics,
                )
                return tuple(jax.tree.leaves(results))

        like = arguments[self._x].sharding
        operand_shardings = tuple(
            sharding_of(shards.spec(kind, shape), mesh, like) for _, kind, shape in self.operands
        )
        return mesh, lower, self._result_shardings(mesh, arguments, shards), operand_shardings

    def _infer(self, mesh: Any, arguments: Sequence[Any], results: Any) -> Any:
        """Used by GSPMD only; Shardy uses the sharding rule."""
        del results
        mesh, spec = self._mesh_and_spec(mesh, arguments)
        shards = self._shards(mesh, spec, arguments, has_mask=self._has_mask)
        return self._result_shardings(mesh, arguments, shards)

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
