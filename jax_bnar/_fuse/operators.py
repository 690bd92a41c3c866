"""Nodes that call the fused operators through the public functions."""

import dataclasses
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_bnar._base.dtypes import accumulation_dtype
from jax_bnar._fuse.affine import AffineMatch
from jax_bnar._fuse.dual import DualMatch
from jax_bnar._fuse.match import Statistic, TrainingMatch
from jax_bnar._fuse.nodes import Node, Value
from jax_bnar._fuse.own import OwnMatch
from jax_bnar._fuse.training import Normalisation
from jax_bnar._fuse.vectors import Vector, arrays_of
from jax_bnar._operators.api import (
    batch_norm,
    bn_add_relu,
    bn_add_relu_inference,
    bn_relu,
    bn_relu_inference,
)
from jax_bnar._operators.dual import dual_bn_add_relu

Match = TrainingMatch | DualMatch | AffineMatch | OwnMatch


def node_of(match: Match) -> Node:
    """The node with the fused operator that replaces a match."""
    if isinstance(match, AffineMatch):
        return _node(match, _affine_inputs(match), _Affine(match))
    if isinstance(match, OwnMatch):
        vectors = (v for call in match.calls for v in call.vectors if v is not None)
        inputs = [*(call.x for call in match.calls), *match.tail.residuals, *vectors]
        return _node(match, inputs, _Own(match))
    if isinstance(match, DualMatch):
        inputs = [
            match.first.x,
            match.second.x,
            *_vector_inputs(match.first),
            *_vector_inputs(match.second),
        ]
        return _node(match, inputs, _Dual(match, match.statistics))
    inputs = [match.x, *match.tail.residuals, *_vector_inputs(match)]
    return _node(match, inputs, _Training(match, match.statistics))


def without_unread(node: Node, read: Collection[Value]) -> None:
    """Removes the statistics that nothing reads from the node's outputs."""
    call = node.run
    if isinstance(call, _Training | _Dual):
        call.statistics = [s for s in call.statistics if s.value in read]
        node.outputs = [call.match.result, *(s.value for s in call.statistics)]


def _node(match: Match, inputs: Sequence[Any], call: Callable[..., Sequence[Any]]) -> Node:
    producer = match.result.producer
    assert producer is not None
    return Node(
        match.operator,
        {},
        list(inputs),
        match.replaced,
        producer.equation,
        producer.name_stack,
        call,
    )


def _vectors(match: TrainingMatch) -> list[Vector]:
    unknowns = match.region.unknowns
    return [
        Vector.of(match.form.scale, unknowns, neutral=1),
        Vector.of(match.form.bias, unknowns, neutral=0),
        Vector.of(match.form.shift, unknowns, neutral=0),
    ]


def _vector_inputs(match: TrainingMatch) -> list[Value]:
    return [value for vector in _vectors(match) for value in vector.values]


@dataclasses.dataclass
class _Training:
    match: TrainingMatch
    statistics: list[Statistic]

    def __call__(self, x: jax.Array, *rest: Any) -> list[jax.Array]:
        form, tail = self.match.form, self.match.tail
        residuals, arrays = rest[: len(tail.residuals)], rest[len(tail.residuals) :]
        x = x.astype(form.dtype)
        scale, bias, shift = arrays_of(_vectors(self.match), arrays, x.shape[form.axis], x.dtype)
        bias = _with_nans_of(shift, bias)
        shape, options = _options(form, self.match.result.shape)
        x = _arranged(x, form).reshape(shape)
        if not tail.has_relu:
            y, mean, var = batch_norm(x, scale, bias, **options)
        elif not residuals:
            y, mean, var = bn_relu(x, scale, bias, **options)
        else:
            z = _sum(residuals).reshape(shape)
            y, mean, var = bn_add_relu(x, z, scale, bias, **options)
        statistics = (_restored(s, mean, var, shift) for s in self.statistics)
        return [y.reshape(self.match.result.shape), *statistics]


@dataclasses.dataclass
class _Dual:
    match: DualMatch
    statistics: list[Statistic]

    def __call__(self, x1: jax.Array, x2: jax.Array, *arrays: Any) -> list[jax.Array]:
        first, second = self.match.first, self.match.second
        shape, options = _options(first.form, self.match.result.shape)
        x1, x2 = x1.astype(first.form.dtype), x2.astype(second.form.dtype)
        vectors = [*_vectors(first), *_vectors(second)]
        scale1, bias1, shift1, scale2, bias2, shift2 = arrays_of(
            vectors, arrays, x1.shape[first.form.axis], x1.dtype
        )
        y, mean1, var1, mean2, var2 = dual_bn_add_relu(
            _arranged(x1, first.form).reshape(shape),
            _arranged(x2, second.form).reshape(shape),
            scale1,
            _with_nans_of(shift1, bias1),
            scale2,
            _with_nans_of(shift2, bias2),
            **options,
        )
        statistics = (
            _restored(s, mean1, var1, shift1)
            if s in first.statistics
            else _restored(s, mean2, var2, shift2)
            for s in self.statistics
        )
        return [y.reshape(self.match.result.shape), *statistics]


def _arranged(x: jax.Array, form: Normalisation) -> jax.Array:
    """x with its axes (except those of size 1) in the order of the normalised array."""
    if list(form.order) == sorted(form.order):
        return x
    x = x.reshape([size for size in x.shape if size > 1])
    return x.transpose([sorted(form.order).index(axis) for axis in form.order])


def _options(form: Normalisation, shape: tuple[int, ...]) -> tuple[tuple[int, ...], dict[str, Any]]:
    """The shape that the operator's arrays take, and its keywords, for a result of this shape."""
    axis = form.result_axis
    if form.num_groups > 1 and form.groups_are_apart:
        # Here the groups have a separate axis, which the operator expects within the batch.
        shape, axis = (shape[0] * shape[1], *shape[2:]), axis - 1
    options = {
        "epsilon": form.epsilon,
        "axis": axis,
        "axis_name": form.axis_name or None,
        "num_groups": form.num_groups,
    }
    return shape, options


def _with_nans_of(shift: jax.Array | None, vector: jax.Array | None) -> jax.Array | None:
    """The vector with NaN where the shift is not finite, because only a finite shift cancels."""
    if shift is None:
        return vector
    return 0 * shift if vector is None else vector + (0 * shift).astype(vector.dtype)


def _restored(
    statistic: Statistic, mean: jax.Array, var: jax.Array, shift: jax.Array | None
) -> jax.Array:
    """The value that the program computed itself, restored from the kernel's results."""
    if shift is not None:
        shift = jnp.broadcast_to(shift.astype(mean.dtype).reshape(mean.shape[-1:]), mean.shape)
    if statistic.name == "var":
        array = var if shift is None else var + 0 * shift
    else:
        array = mean if shift is None else mean + shift
        if statistic.name == "mean of squares":
            array = var + array * array
    if statistic.factor != 1:
        array = array * jnp.asarray(float(statistic.factor), array.dtype)
    return array.astype(statistic.value.dtype).reshape(statistic.value.shape)


@dataclasses.dataclass
class _Own:
    match: OwnMatch

    def __call__(self, *arrays: Any) -> list[jax.Array]:
        calls, residuals = self.match.calls, self.match.tail.residuals
        waiting = iter(arrays)
        xs = [next(waiting) for _ in calls]
        z = _sum([next(waiting) for _ in residuals]) if residuals else None
        vectors: list[Any] = [
            None if vector is None else next(waiting).reshape(-1)
            for call in calls
            for vector in call.vectors
        ]
        options = dict(calls[0].options)
        if len(calls) == 2:
            results: Any = dual_bn_add_relu(*xs, *vectors, **options)
        else:
            (x,) = xs
            if calls[0].is_inference:
                if z is None:
                    return [bn_relu_inference(x, *vectors, **options)]
                return [bn_add_relu_inference(x, z, *vectors, **options)]
            scale, bias = vectors
            if z is None:
                results = bn_relu(x, scale, bias, **options)
            else:
                results = bn_add_relu(x, z, scale, bias, **options)
        y, *statistics = results
        pairs = zip(statistics, self.match.statistics, strict=True)
        return [y, *(array.reshape(value.shape) for array, value in pairs)]


# The scale already contains the reciprocal root, so the operators get a variance of 1, and an
# epsilon that leaves it at 1.
_NO_EPSILON = float(np.finfo(np.float32).tiny)


def _affine_vectors(match: AffineMatch) -> list[Vector]:
    unknowns = match.region.unknowns
    return [
        Vector.of(match.scale, unknowns, neutral=1),
        Vector.of(match.bias, unknowns, neutral=0),
        Vector.of(match.mean, unknowns, neutral=0),
    ]


def _affine_inputs(match: AffineMatch) -> list[Value]:
    vectors = [value for vector in _affine_vectors(match) for value in vector.values]
    return [match.x, *match.residuals, *vectors]


@dataclasses.dataclass
class _Affine:
    match: AffineMatch

    def __call__(self, x: jax.Array, *rest: Any) -> list[jax.Array]:
        match = self.match
        channels = x.shape[match.axis]
        residuals, arrays = rest[: len(match.residuals)], rest[len(match.residuals) :]
        scale, bias, mean = arrays_of(_affine_vectors(match), arrays, channels, x.dtype)
        dtype = accumulation_dtype(x.dtype)
        mean = jnp.zeros(channels, dtype) if mean is None else mean
        var = jnp.ones(channels, dtype)
        options: dict[str, Any] = {"epsilon": _NO_EPSILON, "axis": match.axis}
        if residuals:
            z = _sum(residuals).reshape(x.shape)
            y = bn_add_relu_inference(x, z, scale, bias, mean, var, **options)
        else:
            y = bn_relu_inference(x, scale, bias, mean, var, **options)
        return [y.reshape(match.result.shape)]


def _sum(residuals: Sequence[jax.Array]) -> jax.Array:
    z = residuals[0]
    for other in residuals[1:]:
        z = z + other
    return z
