"""Traces a function and its arguments to a program: a jaxpr, its arrays, and its result tree."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend

from jax_bnar._base import jax_compat
from jax_bnar._base.array_leaves import split_arrays
from jax_bnar._fuse import failures, nnx_state
from jax_bnar._fuse.plan import Plan, Planner


@dataclasses.dataclass(frozen=True)
class Program:
    """A traced function.

    Attributes:
        closed: its jaxpr, in which everything is fused.
        plan: how that came about.
        arrays: the arguments of the jaxpr: the state of NNX modules, then the other arrays.
        finish: builds the function's result from the results of the jaxpr.
    """

    closed: Any
    plan: Plan
    arrays: list[Any]
    finish: Callable[[list[Any]], Any]

    def run(self) -> Any:
        failures.warn(self.plan.all_failures())
        return self.finish(jax.extend.core.jaxpr_as_fun(self.closed)(*self.arrays))


def trace(fun: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Program:
    """Traces the arrays; passes every other leaf (flag, function, Python number) on unchanged."""
    leaves, tree = jax.tree.flatten((args, kwargs), is_leaf=nnx_state.is_module)
    modules = nnx_state.Modules([leaf for leaf in leaves if nnx_state.is_module(leaf)])
    arrays, with_arrays = split_arrays(leaves)
    fixed: dict[str, Any] = {}

    def flat(state: list[Any], arrays: list[Any]) -> tuple[list[Any], list[Any]]:
        copies = modules.copies(state)
        waiting = iter(copies.modules)
        given = [
            next(waiting) if nnx_state.is_module(leaf) else leaf for leaf in with_arrays(arrays)
        ]
        called_args, called_kwargs = jax.tree.unflatten(tree, given)
        result = fun(*called_args, **called_kwargs)
        results, fixed["tree"] = jax.tree.flatten(result)
        results, fixed["with_arrays"] = split_arrays(results)
        changes = modules.changes(copies, state)
        fixed["changed"] = tuple(changes.arrays)
        fixed["attributes"] = changes.attributes
        return list(changes.arrays.values()), results

    state = modules.state
    with nnx_state.explained_errors():
        closed = jax.make_jaxpr(flat)(state, arrays)
    plan = Planner().plan(closed, jax_compat.mapped_axes())

    def finish(results: list[Any]) -> Any:
        changed = fixed["changed"]
        for change in fixed["attributes"]:
            change()
        modules.update(changed, results[: len(changed)])
        leaves = fixed["with_arrays"](results[len(changed) :])
        return jax.tree.unflatten(fixed["tree"], leaves)

    return Program(_fused(closed, plan, [*state, *arrays]), plan, [*state, *arrays], finish)


def _fused(closed: Any, plan: Plan, arrays: Sequence[Any]) -> Any:
    """The rewritten jaxpr, or the given one if there is nothing to fuse or fusing it fails.

    The rewritten program is traced as a whole before any of it runs, so a failure has no effects.
    """
    if not plan.changes:
        return closed
    with failures.caught(plan.failures):
        fused = jax.make_jaxpr(lambda *args: plan.run(*closed.consts, *args))(*arrays)
        if fused.out_avals == closed.out_avals:
            return fused
        raise TypeError(f"results of {fused.out_avals} instead of {closed.out_avals}")
    plan.abandon()
    return closed
