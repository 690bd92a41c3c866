"""The blocks as programs: with plain Flax, the same under `fuse`, and with our layer."""

import functools
import math
from typing import Any, Final, Literal

import jax
import jax.numpy as jnp
from flax import linen as nn

import jax_bnar
from benchmarks.gpu.architectures.blocks import BLOCKS, Net
from benchmarks.gpu.compiled.programs import Program, step_of
from benchmarks.sites.problem import DType
from jax_bnar.flax_layers import BatchNorm

Variant = Literal["flax", "fuse", "layer"]
VARIANTS: Final[tuple[Variant, ...]] = ("flax", "fuse", "layer")


def program_of(name: str, variant: Variant, dtype: DType, divide_batch: int = 1) -> Program:
    """A block, forward and backward.

    Args:
        name: one of `BLOCKS`.
        variant: one of `VARIANTS`.
        dtype: that of the arrays.
        divide_batch: by how much the batch is divided, for small machines.
    """
    batch, *sizes = BLOCKS[name].shape
    x = jax.ShapeDtypeStruct((max(1, batch // divide_batch), *sizes), jnp.dtype(dtype))
    net = Net(name, BatchNorm if variant == "layer" else nn.BatchNorm, jnp.dtype(dtype))
    apply = functools.partial(
        net.apply, mutable=["batch_stats"], rngs={"dropout": jax.random.key(0)}
    )

    def forward(params: Any, batch_stats: Any, x: jax.Array) -> Any:
        return apply({"params": params, "batch_stats": batch_stats}, x)

    step = step_of(jax_bnar.fuse(forward) if variant == "fuse" else forward)

    def without_y(variables: Any, divided: Any) -> Any:
        return step(variables, divided)[1:]

    keys = {"params": jax.random.key(0), "dropout": jax.random.key(0)}
    variables = jax.eval_shape(net.init, keys, x)
    y, _ = jax.eval_shape(apply, variables, x)
    return Program(
        without_y, variables, (x, y), donated=False, least_activation=math.prod(x.shape) // 8
    )
