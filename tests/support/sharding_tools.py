"""Meshes of the eight CPU devices, operands placed on them, and their communication."""

import contextlib
from collections.abc import Iterator
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from benchmarks.sharding.hlo_collectives import Collective as Collective
from benchmarks.sharding.hlo_collectives import collectives as collectives
from benchmarks.sharding.hlo_collectives import compiled_collectives as compiled_collectives
from benchmarks.sharding.hlo_collectives import total_bytes as total_bytes

MeshKind = Literal["auto", "explicit"]


def make_mesh(kind: MeshKind, **sizes: int) -> Mesh:
    types = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}[kind]
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=(types,) * len(sizes))


def put(array: Any, mesh: Mesh, spec: PartitionSpec) -> Any:
    return None if array is None else jax.device_put(array, NamedSharding(mesh, spec))


@contextlib.contextmanager
def use_mesh(mesh: Mesh) -> Iterator[None]:
    """Sets an Explicit mesh, which a program needs; Auto meshes come with the operands."""
    if AxisType.Explicit in mesh.axis_types:
        with jax.set_mesh(mesh):
            yield
    else:
        yield


def relative_difference(left: Any, right: Any) -> float:
    """The largest difference between two trees, relative to the largest value of each leaf.

    NaN if there is any; arrays must not broadcast.
    """
    differences = []
    for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        a, b = np.asarray(a), np.asarray(b)
        assert a.shape == b.shape
        differences.append(np.abs(a - b).max() / (1 + np.abs(b).max()))
    # Unlike max(), it keeps a NaN that is not the first.
    return float(np.max(differences))
