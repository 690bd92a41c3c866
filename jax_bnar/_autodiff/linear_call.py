"""A linear map with a custom transpose, which lets one operator support forward and reverse mode.

`jax.custom_vjp` does not support forward mode: `jax.jvp`, `jax.linearize` and `jax.jacfwd` of such
a function are errors. `jax.custom_jvp` supports both modes, but JAX derives the transpose of its
tangent, and so would never call a backward kernel. The operators are therefore custom_jvp functions
whose tangent is one call of the primitive below. Evaluating it computes the tangent in pure JAX,
its transpose rule calls the backward kernels, and its nonlinear operands are exactly the residuals
of reverse mode. `jax.custom_derivatives.linear_call` implements the same idea, but supports neither
vmap nor differentiation with respect to the residuals, and so rules out per-example gradients and
Hessians.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive

from jax_bnar._autodiff.mapped_axis import MappedAxis
from jax_bnar._base import jax_compat

_Arrays = tuple[jax.Array | None, ...]


class LinearMap(Protocol):
    """A linear map; hashable, because it is a static parameter: equal maps share one program."""

    def tangent(self, residuals: Any, tangents: Any) -> _Arrays:
        """The map: linear in `tangents` (None means zero), differentiable in float residuals."""
        ...

    def transpose(self, residuals: Any, cotangents: Any) -> Any:
        """One cotangent per input, including inputs whose tangent was None; may contain None.

        They have the structure of the tangents.
        """
        ...

    def sees(self, axis_name: Any) -> bool:
        """Whether the map communicates over the mapped axis of this name."""
        ...

    def mapped_results(self, axis_name: Any, residuals: Any, tangents: Any) -> tuple[bool, ...]:
        """Which results vary along an axis of this name that `jax.vmap` maps.

        In the arguments, each array is replaced by whether it is mapped over that axis. A result
        that is the same for all examples must be reported as such, because users may request it
        with `out_axes=None`.
        """
        ...


class LocalMap:
    """A linear map that communicates over no axis."""

    def sees(self, axis_name: Any) -> bool:
        del axis_name
        return False


def linear_call(
    linear_map: LinearMap, residuals: Any, tangents: Any, like: Sequence[jax.Array]
) -> tuple[jax.Array, ...]:
    """`linear_map.tangent(residuals, tangents)`: the tangents of the arrays `like`."""
    out_avals = tuple(jax.typeof(array).to_tangent_aval() for array in like)
    return _bind(linear_map, residuals, tangents, out_avals)


def _bind(linear_map: LinearMap, residuals: Any, tangents: Any, out_avals: Any) -> Any:
    leaves, tree = jax.tree.flatten((residuals, tangents))
    return tuple(
        linear_p.bind(
            *leaves,
            linear_map=linear_map,
            tree=tree,
            # A None has no leaf, so the residuals are exactly the first leaves.
            num_residuals=len(jax.tree.leaves(residuals)),
            out_avals=out_avals,
        )
    )


def _evaluate(
    *leaves: jax.Array, linear_map: LinearMap, tree: Any, num_residuals: int, out_avals: Any
) -> list[jax.Array | None]:
    del num_residuals, out_avals
    return list(linear_map.tangent(*jax.tree.unflatten(tree, leaves)))


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> Any:
    """d(L(r) t) = L(r) dt + (dL(r) dr) t: the same map again, plus its derivative in r.

    The first term keeps the custom transpose, so derivatives of derivatives run the kernels too.
    """
    linear_map, tree, count = params["linear_map"], params["tree"], params["num_residuals"]
    results = linear_p.bind(*primals, **params)
    terms = []
    if not all(isinstance(t, jax_compat.Zero) for t in tangents[count:]):
        residuals, _ = jax.tree.unflatten(tree, primals)
        _, moved = jax.tree.unflatten(
            tree, [None if isinstance(t, jax_compat.Zero) else t for t in tangents]
        )
        terms.append(_bind(linear_map, residuals, moved, params["out_avals"]))
    moving = [i for i, t in enumerate(tangents[:count]) if not isinstance(t, jax_compat.Zero)]
    if moving:

        def of_residuals(*moved: jax.Array) -> list[jax.Array | None]:
            leaves = list(primals)
            for i, leaf in zip(moving, moved, strict=True):
                leaves[i] = leaf
            return _evaluate(*leaves, **params)

        _, term = jax.jvp(
            of_residuals, tuple(primals[i] for i in moving), tuple(tangents[i] for i in moving)
        )
        terms.append(term)
    total = terms[0] if len(terms) == 1 else [a + b for a, b in zip(*terms, strict=True)]
    return results, list(total)


def _transpose(cotangents: Sequence[Any], *leaves: Any, **params: Any) -> list[Any]:
    tree, count = params["tree"], params["num_residuals"]
    residuals, _ = jax.tree.unflatten(tree, leaves)
    _, positions = jax.tree.unflatten(tree, range(len(leaves)))
    everything = params["linear_map"].transpose(
        residuals, tuple(jax_compat.instantiate_zeros(ct) for ct in cotangents)
    )
    results: list[Any] = [None] * len(leaves)
    for position, cotangent in zip(*map(_with_nones, (positions, everything)), strict=True):
        # A tangent that is known is a constant here, so it has no cotangent.
        if position is not None and jax_compat.is_undefined_primal(leaves[position]):
            results[position] = cotangent
    assert not any(map(jax_compat.is_undefined_primal, leaves[:count]))
    return results


def _with_nones(tree: Any) -> list[Any]:
    """The leaves of a structure of tangents, with None for those that are zero."""
    return jax.tree.leaves(tree, is_leaf=lambda leaf: leaf is None)


@dataclasses.dataclass(frozen=True)
class _Mapped:
    """`jax.vmap` of a linear map."""

    inner: LinearMap
    axis: MappedAxis

    def sees(self, axis_name: Any) -> bool:
        return self.inner.sees(self.axis.name_seen_inside(axis_name))

    def mapped_results(self, axis_name: Any, residuals: Any, tangents: Any) -> tuple[bool, ...]:
        name = self.axis.name_seen_inside(axis_name)
        return self.inner.mapped_results(name, residuals, tangents)

    def tangent(self, residuals: Any, tangents: Any) -> _Arrays:
        function = self.axis.vmap(self.inner.tangent, self.axis.in_axes, self.axis.out_dims)
        return function(residuals, tangents)

    def transpose(self, residuals: Any, cotangents: Sequence[jax.Array]) -> Any:
        residual_axes, tangent_axes = self.axis.in_axes
        # True for each tangent that is an array; None, as in the tree, for one that is zero.
        _, is_given = jax.tree.unflatten(self.axis.tree, [True] * len(self.axis.dims))
        # A result shared by all examples counts as the result of the first one.
        cotangents = tuple(
            _of_the_first(cotangent, self.axis.data.size) if axis is None else cotangent
            for cotangent, axis in zip(cotangents, self.axis.out_dims, strict=True)
        )
        function = self.axis.vmap(self.inner.transpose, (residual_axes, 0), 0)
        return jax.tree.map(
            lambda cotangent, axis, given: (
                _unbatched(cotangent, axis) if given and cotangent is not None else None
            ),
            *(function(residuals, cotangents), tangent_axes, is_given),
            is_leaf=lambda leaf: leaf is None,
        )


def _unbatched(cotangent: jax.Array, axis: int | None) -> jax.Array:
    """The cotangent of a tangent whose examples lie along `axis`, or that all examples share."""
    return cotangent.sum(axis=0) if axis is None else jnp.moveaxis(cotangent, 0, axis)


def _of_the_first(cotangent: jax.Array, size: int) -> jax.Array:
    """The cotangents of all examples: the given one for the first, zero for the others."""
    return jnp.zeros((size, *cotangent.shape), cotangent.dtype).at[0].set(cotangent)


def _batch(
    axis_data: Any, leaves: Sequence[Any], dims: Sequence[int | None], **params: Any
) -> tuple[list[jax.Array], list[int | None]]:
    out_avals, linear_map = params.pop("out_avals"), params.pop("linear_map")
    if all(dim is None for dim in dims) and not linear_map.sees(axis_data.name):
        results = linear_p.bind(*leaves, linear_map=linear_map, out_avals=out_avals, **params)
        return results, [None] * len(out_avals)
    arguments = jax.tree.unflatten(params["tree"], [dim is not None for dim in dims])
    is_mapped = linear_map.mapped_results(axis_data.name, *arguments)
    axis = MappedAxis.create(axis_data, params["tree"], dims, is_mapped)
    mapped = _Mapped(linear_map, axis)
    results = linear_p.bind(*leaves, linear_map=mapped, out_avals=axis.batched(out_avals), **params)
    return results, list(axis.out_dims)


linear_p = Primitive("jax_bnar_linear")
linear_p.multiple_results = True
linear_p.def_impl(lambda *leaves, **params: jax_compat.apply_primitive(linear_p, *leaves, **params))
linear_p.def_abstract_eval(lambda *_, out_avals, **__: list(out_avals))
jax_compat.register_lowering(linear_p, jax_compat.lower_fun(_evaluate, multiple_results=True))
jax_compat.primitive_jvps[linear_p] = _jvp
jax_compat.primitive_transposes[linear_p] = _transpose
jax_compat.fancy_primitive_batchers[linear_p] = _batch
