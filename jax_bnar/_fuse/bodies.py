"""The jaxprs inside equations: which ones are searched, and how an equation gets a new body."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import jax

from jax_bnar._base import jax_compat
from jax_bnar._fuse.nodes import Node

# The parameters that hold bodies. Those of custom_jvp and custom_vjp are left alone, because their
# derivative rules would not follow a new body.
_BODIES = {
    "jit": ("jaxpr",),
    "pjit": ("jaxpr",),
    "scan": ("jaxpr",),
    "while": ("cond_jaxpr", "body_jaxpr"),
    "cond": ("branches",),
    "remat2": ("jaxpr",),
    "checkpoint": ("jaxpr",),
    "shard_map": ("jaxpr",),
}


class NewBody(Protocol):
    """What is run instead of a body."""

    @property
    def changes(self) -> bool:
        """Whether it differs from the body at all."""
        ...

    def run(self, *args: Any) -> list[Any]: ...

    def closed(self, body: Any) -> Any:
        """It as a closed jaxpr with the constants of the body."""
        ...


def axis_sizes_within(node: Node, axis_sizes: Mapping[Any, int]) -> Mapping[Any, int]:
    """The sizes of the mapped axes that the node's bodies may name."""
    if node.name != "shard_map":
        return axis_sizes
    mesh, manual = node.params["mesh"], jax_compat.manual_axes(node.params)
    # In the order of the mesh: that of a set differs between processes, which then would compile
    # different programs.
    return {**axis_sizes, **{name: size for name, size in mesh.shape.items() if name in manual}}


def bodies_of(node: Node) -> list[Any]:
    """The node's bodies, in the order of its parameters."""
    found = []
    for name in _BODIES.get(node.name, ()):
        body = node.params[name]
        found.extend(body if isinstance(body, tuple | list) else [body])
    return found


def rebuilt(node: Node, inner: Sequence[NewBody]) -> Node:
    """The node with its bodies replaced and everything else unchanged."""
    if node.name in ("remat2", "checkpoint"):
        return dataclasses.replace(node, run=_remat(node, inner[0]))
    if node.name == "shard_map":
        return dataclasses.replace(node, run=_shard_map(node, inner[0]))
    return dataclasses.replace(node, run=_with_new_bodies(node, inner))


def _with_new_bodies(node: Node, inner: Sequence[NewBody]) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        # The bodies are traced where the node runs, because a shard_map around it binds the names
        # of the axes over which they may communicate.
        closed = [
            new.closed(body) if new.changes else body
            for body, new in zip(bodies_of(node), inner, strict=True)
        ]
        waiting = iter(closed)
        params = dict(node.params)
        for name in _BODIES[node.name]:
            many = isinstance(params[name], tuple | list)
            params[name] = tuple(next(waiting) for _ in params[name]) if many else next(waiting)
        return jax_compat.binder(node.equation.replace(params=params))(*args)

    return run


def _remat(node: Node, new: NewBody) -> Callable[..., Any]:
    params = node.params

    def run(*args: Any) -> Any:
        options = {name: params[name] for name in ("prevent_cse", "policy")}
        return jax.checkpoint(new.run, **options)(*args)

    return run


def _shard_map(node: Node, new: NewBody) -> Callable[..., Any]:
    params = node.params

    def run(*args: Any) -> Any:
        mapped = jax.shard_map(
            lambda *shards: tuple(new.run(*shards)),
            mesh=params["mesh"],
            in_specs=tuple(params["in_specs"]),
            out_specs=tuple(params["out_specs"]),
            axis_names=jax_compat.manual_axes(params),
            check_vma=params["check_vma"],
        )
        return mapped(*args)

    return run
