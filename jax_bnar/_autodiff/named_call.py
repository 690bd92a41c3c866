"""A function that contains collectives and has a custom derivative rule.

`jax.custom_jvp` runs its rule when the function is differentiated. If a `jax.vmap` binds the axis
name that the rule communicates over, and a `jit`, `scan`, `cond` or `jax.checkpoint` lies between
the vmap and the derivative, that name is no longer bound. For example, this is a NameError for any
custom_jvp `f` with a collective:

    jax.grad(lambda x: jax.jit(jax.vmap(f, axis_name="batch"))(x).sum())

Here the function is a parameter of a primitive, whose batching rule binds the name inside that
parameter.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive

from jax_bnar._autodiff.mapped_axis import MappedAxis
from jax_bnar._base import jax_compat

_Arrays = tuple[jax.Array, ...]


class NamedFunction(Protocol):
    """A function; hashable, because it is a static parameter: equal functions share one program."""

    def value(self, operands: Any) -> _Arrays:
        """The results."""
        ...

    def derivative(self, operands: Any, tangents: Any) -> tuple[_Arrays, _Arrays]:
        """The results and their tangents; an input tangent of None means zero."""
        ...

    def sees(self, axis_name: Any) -> bool:
        """Whether the function communicates over the mapped axis of this name."""
        ...

    def mapped_results(self, axis_name: Any, operands: Any) -> tuple[bool, ...]:
        """Which results vary along an axis of this name that `jax.vmap` maps.

        In `operands`, each array is replaced by whether it is mapped over that axis.
        """
        ...

    def of_all_examples(
        self, axis_name: Any, operands: Any
    ) -> Callable[[Any], Sequence[jax.Array]] | None:
        """The function of all examples along this axis at once, or None if there is no such one.

        `operands` is that of `mapped_results`. What is mapped has the axis first, in the operands
        of the function and in its results.
        """
        ...


def named_call(function: NamedFunction, operands: Any) -> _Arrays:
    """`function.value(operands)`, differentiated by `function.derivative`."""
    leaves, tree = jax.tree.flatten(operands)

    def flat(*leaves: jax.Array) -> _Arrays:
        return function.value(jax.tree.unflatten(tree, leaves))

    out_avals = tuple(jax.make_jaxpr(flat)(*leaves).out_avals)
    return tuple(named_p.bind(*leaves, function=function, tree=tree, out_avals=out_avals))


def _evaluate(
    *leaves: jax.Array, function: NamedFunction, tree: Any, out_avals: Any
) -> list[jax.Array]:
    del out_avals
    return list(function.value(jax.tree.unflatten(tree, leaves)))


def _jvp(
    primals: Sequence[Any],
    tangents: Sequence[Any],
    *,
    function: NamedFunction,
    tree: Any,
    out_avals: Any,
) -> tuple[list[jax.Array], list[jax.Array]]:
    del out_avals
    moved = [None if isinstance(t, jax_compat.Zero) else t for t in tangents]
    results, dots = function.derivative(
        jax.tree.unflatten(tree, primals), jax.tree.unflatten(tree, moved)
    )
    return list(results), list(dots)


@dataclasses.dataclass(frozen=True)
class _Mapped:
    """`jax.vmap` of a function."""

    inner: NamedFunction
    axis: MappedAxis

    def value(self, operands: Any) -> _Arrays:
        function = self.axis.vmap(self.inner.value, (self.axis.in_axes,), self.axis.out_dims)
        return function(operands)

    def derivative(self, operands: Any, tangents: Any) -> tuple[_Arrays, _Arrays]:
        axes, out_dims = self.axis.in_axes, self.axis.out_dims
        function = self.axis.vmap(self.inner.derivative, (axes, axes), (out_dims, out_dims))
        return function(operands, tangents)

    def sees(self, axis_name: Any) -> bool:
        return self.inner.sees(self.axis.name_seen_inside(axis_name))

    def mapped_results(self, axis_name: Any, operands: Any) -> tuple[bool, ...]:
        return self.inner.mapped_results(self.axis.name_seen_inside(axis_name), operands)

    def of_all_examples(self, axis_name: Any, operands: Any) -> None:
        return None


def _batch(
    axis_data: Any,
    leaves: Sequence[Any],
    dims: Sequence[int | None],
    *,
    function: NamedFunction,
    tree: Any,
    out_avals: Any,
) -> tuple[list[jax.Array], list[int | None]]:
    if all(dim is None for dim in dims) and not function.sees(axis_data.name):
        results = named_p.bind(*leaves, function=function, tree=tree, out_avals=out_avals)
        return results, [None] * len(out_avals)
    operands = jax.tree.unflatten(tree, [dim is not None for dim in dims])
    is_mapped = function.mapped_results(axis_data.name, operands)
    whole = function.of_all_examples(axis_data.name, operands)
    # An axis with an `spmd_axis_name` must stay an axis of its own.
    if whole is not None and not axis_data.spmd_name:
        in_front = [
            leaf if dim is None else jnp.moveaxis(leaf, dim, 0)
            for leaf, dim in zip(leaves, dims, strict=True)
        ]
        results = list(whole(jax.tree.unflatten(tree, in_front)))
        return results, [0 if each else None for each in is_mapped]
    axis = MappedAxis.create(axis_data, tree, dims, is_mapped)
    results = named_p.bind(
        *leaves, function=_Mapped(function, axis), tree=tree, out_avals=axis.batched(out_avals)
    )
    return results, list(axis.out_dims)


named_p = Primitive("jax_bnar_named")
named_p.multiple_results = True
named_p.def_impl(lambda *leaves, **params: jax_compat.apply_primitive(named_p, *leaves, **params))
named_p.def_abstract_eval(lambda *_, out_avals, **__: list(out_avals))
jax_compat.register_lowering(named_p, jax_compat.lower_fun(_evaluate, multiple_results=True))
# The operations inside are partitioned if arrays are sharded over a mesh.
jax_compat.needs_devices_at_lowering(named_p)
jax_compat.primitive_jvps[named_p] = _jvp
jax_compat.fancy_primitive_batchers[named_p] = _batch
