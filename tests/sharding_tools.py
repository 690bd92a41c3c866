"""Meshes of the eight CPU devices, operands laid out on them, and the collectives of a program."""

import contextlib
import math
import re
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

MeshKind = Literal["auto", "explicit"]

_COLLECTIVE = re.compile(
    r"= (\(.*?\)|\S+) "
    r"(all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute|collective-broadcast)"
    r"(?:-start)?\("
)
_ARRAY = re.compile(r"([a-z]+\d+)\[([\d,]*)\]")


class Collective(NamedTuple):
    """One array in one collective operation of compiled HLO."""

    opcode: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        bits = int(re.sub(r"\D", "", self.dtype))
        return math.prod(self.shape) * bits // 8


def make_mesh(kind: MeshKind, **sizes: int) -> Mesh:
    types = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}[kind]
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=(types,) * len(sizes))


def put(array: Any, mesh: Mesh, spec: PartitionSpec) -> Any:
    return None if array is None else jax.device_put(array, NamedSharding(mesh, spec))


@contextlib.contextmanager
def use_mesh(mesh: Mesh) -> Iterator[None]:
    """Explicit meshes have to be set around a program, Auto ones come with the operands."""
    if AxisType.Explicit in mesh.axis_types:
        with jax.set_mesh(mesh):
            yield
    else:
        yield


def collectives(function: Any, *arguments: Any) -> list[list[Collective]]:
    """The collective operations of the compiled program, each with its arrays."""
    text = jax.jit(function).lower(*arguments).compile().as_text()
    assert text is not None
    return [
        [
            Collective(match[2], dtype, tuple(int(n) for n in shape.split(",") if n))
            for dtype, shape in _ARRAY.findall(match[1])
        ]
        for match in _COLLECTIVE.finditer(text)
    ]


def total_bytes(operations: Sequence[Sequence[Collective]]) -> int:
    return sum(each.nbytes for operation in operations for each in operation)


def relative_difference(left: Any, right: Any) -> float:
    """Largest difference between two trees, relative to the largest value of each leaf."""
    pairs = zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True)
    return max(
        float(np.abs(np.asarray(a) - np.asarray(b)).max() / (1 + np.abs(np.asarray(b)).max()))
        for a, b in pairs
    )
