"""The jaxprs inside equations: which ones are searched, and how an equation gets a new body."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax

from jax_bnar._base import jax_compat
from jax_bnar._fuse.nodes import Node

if TYPE_CHECKING:
    from jax_bnar._fuse.plan import Plan, Planner

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


def plans(node: Node, planner: "Planner", axis_sizes: Mapping[Any, int]) -> list["Plan"]:
    """The plans of the node's bodies, in the order of its parameters."""
    if node.name == "shard_map":
        mesh, manual = node.params["mesh"], jax_compat.manual_axes(node.params)
        axis_sizes = {**axis_sizes, **{name: mesh.shape[name] for name in manual}}
    return [planner.plan(jax_compat.open_jaxpr(body), axis_sizes) for body in _bodies(node)]


def _bodies(node: Node) -> list[Any]:
    found = []
    for name in _BODIES.get(node.name, ()):
        body = node.params[name]
        found.extend(body if isinstance(body, tuple | list) else [body])
    return found


def rebuilt(node: Node, inner: Sequence["Plan"], planner: "Planner") -> Node:
    """The node with its bodies replaced by their plans and everything else unchanged."""
    if node.name in ("remat2", "checkpoint"):
        return dataclasses.replace(node, run=_remat(node, inner[0]))
    if node.name == "shard_map":
        return dataclasses.replace(node, run=_shard_map(node, inner[0]))
    return dataclasses.replace(node, run=_with_new_bodies(node, inner, planner))


def _with_new_bodies(node: Node, inner: Sequence["Plan"], planner: "Planner") -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        # The bodies are traced where the node runs, because a shard_map around it binds the names
        # of the axes over which they may communicate.
        closed = [
            _traced(body, plan, planner) if plan.changes else body
            for body, plan in zip(_bodies(node), inner, strict=True)
        ]
        waiting = iter(closed)
        params = dict(node.params)
        for name in _BODIES[node.name]:
            many = isinstance(params[name], tuple | list)
            params[name] = tuple(next(waiting) for _ in params[name]) if many else next(waiting)
        return jax_compat.binder(node.equation.replace(params=params))(*args)

    return run


def _traced(body: Any, plan: "Plan", planner: "Planner") -> Any:
    """A body, traced from its plan once, however many equations have it."""
    key = (id(plan), id(body))
    if key not in planner.rebuilt:
        avals = [value.aval for value in plan.graph.inputs][len(body.consts) :]
        run: Callable[..., Any] = lambda *args: plan.run(*body.consts, *args)  # noqa: E731
        # Keeping the plan and the body alive prevents other ones from getting their ids.
        planner.rebuilt[key] = (plan, body, jax.make_jaxpr(run)(*avals))
    return planner.rebuilt[key][-1]


def _remat(node: Node, plan: "Plan") -> Callable[..., Any]:
    params = node.params

    def run(*args: Any) -> Any:
        return jax.checkpoint(plan.run, prevent_cse=params["prevent_cse"], policy=params["policy"])(
            *args
        )

    return run


def _shard_map(node: Node, plan: "Plan") -> Callable[..., Any]:
    params = node.params

    def run(*args: Any) -> Any:
        mapped = jax.shard_map(
            lambda *shards: tuple(plan.run(*shards)),
            mesh=params["mesh"],
            in_specs=tuple(params["in_specs"]),
            out_specs=tuple(params["out_specs"]),
            axis_names=jax_compat.manual_axes(params),
            check_vma=params["check_vma"],
        )
        return mapped(*args)

    return run
