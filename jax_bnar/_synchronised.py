"""Training form with statistics over named axes: `shard_map`, `pmap`, `vmap(axis_name=...)`.

The halves of the kernels with one all-reduce between them, forward and backward
(`jax_bnar._collectives`). Derivatives are written down as those of one device: with

    n = elements of a group on all devices,    S[.] = sum over the devices

    dx = a*(e - S[sum(e)]/n - (x-mean)*rstd^2*S[sum(e*(x-mean))]/n) + dmean/n + 2*dvar*(x-mean)/n

while dscale and dbias are the device's own part: what adds them up is JAX, as for any operand that
devices share.
"""

import dataclasses
import functools
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero

from jax_bnar import _compat, _local, _operations, reference
from jax_bnar._collectives import NamedSpan, merge_statistics, parts_of, sum_packed
from jax_bnar._config import Config
from jax_bnar._linear_call import linear_call
from jax_bnar._remat import MASK_NAME, STATISTICS_NAME
from jax_bnar._tangents import training_tangents

_Vector = jax.Array | None
_Names = tuple[Any, ...]
_Groups = tuple[tuple[int, ...], ...] | None
_Results = tuple[jax.Array, jax.Array, jax.Array]


def _forward(
    x: jax.Array,
    z: jax.Array | None,
    scale: _Vector,
    bias: _Vector,
    config: Config,
    names: _Names,
    groups: _Groups,
    save: bool,
) -> tuple[_Results, jax.Array | None, jax.Array | int]:
    common: dict[str, Any] = {"layout": config.layout, "implementation": config.implementation}
    parts = parts_of(names, groups)
    mean, var = _operations.statistics(x, **common)
    mean, var = merge_statistics(mean, var, NamedSpan(names, groups, parts))
    mean, var = (_one_on_each_device(v, names) for v in (mean, var))
    # Named before use, so that a policy which saves them cuts the recomputation here.
    mean = checkpoint_name(mean, STATISTICS_NAME)
    var = checkpoint_name(var, STATISTICS_NAME)
    y, *mask = _operations.normalise(
        x,
        z,
        scale,
        bias,
        mean,
        var,
        **common,
        epsilon=config.epsilon,
        activation=config.activation,
        save_mask=save and config.save_mask,
    )
    return (y, mean, var), mask[0] if mask else None, parts


def _one_on_each_device(vector: jax.Array, names: _Names) -> jax.Array:
    """A sum over the axes `names`, as a value of each device (or example) that shares it.

    vmap would take it for one value, and hand backward the sum of its cotangents; backward cannot
    tell that from a cotangent of one device, which is what it gets in `pmap`. The choice between
    two equal values is removed by XLA. Where JAX tracks what varies there is nothing to do.
    """
    for name in names:
        index = jax.lax.axis_index(name)
        if name not in _compat.varying_axes(index):
            vector = jax.lax.select(index >= 0, vector, vector)
    return vector


@functools.partial(jax.custom_jvp, nondiff_argnums=(4, 5, 6))
def synchronised(
    x: jax.Array,
    z: jax.Array | None,
    scale: _Vector,
    bias: _Vector,
    config: Config,
    names: _Names,
    groups: _Groups,
) -> _Results:
    """(y, mean, var) of x; mean and var, of shape (num_groups, C), over the axes `names`."""
    results, _, _ = _forward(x, z, scale, bias, config, names, groups, save=False)
    return results


@functools.partial(synchronised.defjvp, symbolic_zeros=True)
def _synchronised_jvp(
    config: Config,
    names: _Names,
    groups: _Groups,
    primals: tuple[Any, ...],
    tangents: tuple[Any, ...],
) -> tuple[_Results, _Results]:
    """As the rule of the training form: see `_training`."""
    x, z, scale, bias = primals
    results, mask, parts = _forward(x, z, scale, bias, config, names, groups, save=True)
    y, mean, var = results
    evidence = None
    if config.gate == "y":
        evidence = y
    elif config.gate == "mask":
        assert mask is not None
        evidence = checkpoint_name(mask, MASK_NAME)
    # The count is saved: psum(1, names) in backward is a NameError under grad(vmap(axis_name)).
    residuals = (x, evidence, mean, var, scale, bias, parts)
    moving = tuple(None if isinstance(t, SymbolicZero) else t for t in tangents)
    linear_map = _SynchronisedTangent(config, names, groups)
    y_dot, mean_dot, var_dot = linear_call(linear_map, residuals, moving, results)
    return results, (y_dot, mean_dot, var_dot)


@dataclasses.dataclass(frozen=True)
class _SynchronisedTangent:
    """Tangents of (x, z, scale, bias) to those of (y, mean, var)."""

    config: Config
    names: _Names
    groups: _Groups

    def tangent(self, residuals: Any, tangents: tuple[jax.Array | None, ...]) -> _Results:
        *local, parts = residuals
        span = NamedSpan(self.names, self.groups, parts)
        return training_tangents(tuple(local), tangents, self.config, span)

    def transpose(self, residuals: Any, cotangents: Any) -> tuple[jax.Array | None, ...]:
        return _synchronised_backward(self.config, self.names, self.groups, residuals, cotangents)


def _synchronised_backward(
    config: Config,
    names: _Names,
    groups: _Groups,
    residuals: tuple[Any, ...],
    cotangents: _Results,
) -> tuple[jax.Array, jax.Array | None, _Vector, _Vector]:
    x, evidence, mean, var, scale, bias, parts = residuals
    dy, dmean, dvar = cotangents
    common: dict[str, Any] = {"layout": config.layout, "implementation": config.implementation}
    multiplier = _local.gate_multiplier(
        config.gate,
        scale,
        var,
        normalise=_operations.normalise,
        implementation=config.implementation,
        epsilon=config.epsilon,
    )
    gate_bias = bias if config.gate == "x" else None
    sum_e, sum_e_centred, *dz = _operations.backward_reduce(
        dy,
        x,
        evidence,
        mean,
        multiplier,
        gate_bias,
        **common,
        gate=config.gate,
        has_residual=config.has_residual,
    )
    span = NamedSpan(names, groups, parts)
    # Where JAX knows x to vary over an axis (check_vma=True), mean and var are one value to all its
    # devices, and so are their cotangents. Elsewhere each device has a cotangent of its own.
    apart = tuple(name for name in names if name not in _compat.varying_axes(x))
    if apart == names:
        sums = sum_packed(span, *_compat.vary_together([sum_e, sum_e_centred, dmean, dvar]))
        total_e, total_e_centred, dmean, dvar = sums
    else:
        total_e, total_e_centred = sum_packed(span, sum_e, sum_e_centred)
        if apart:
            dmean, dvar = sum_packed(NamedSpan(apart, None, 1), dmean, dvar)
    dx = _local.input_gradient(
        dz[0] if dz else dy,
        x,
        evidence,
        mean,
        var,
        scale,
        gate_bias,
        multiplier,
        sums=(total_e, total_e_centred),
        cotangents=(dmean, dvar),
        count=parts * _local.element_count(config.layout, x.shape),
        epsilon=config.epsilon,
        gate="none" if dz else config.gate,
        apply=functools.partial(_operations.backward_apply, **common),
    )
    rstd = reference.reciprocal_std(var, config.epsilon)
    return (
        dx,
        dz[0] if dz else None,
        None if scale is None else (rstd * sum_e_centred).sum(axis=0, keepdims=True),
        None if bias is None else sum_e.sum(axis=0, keepdims=True),
    )
