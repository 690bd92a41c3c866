"""Tests what jax_bnar/_benchmark/memory.py counts as residuals, also of a whole block."""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("optax")

from jax_bnar._benchmark.memory import residual_bytes
from jax_bnar.flax_layers import BatchNorm, FusedBottleneck

pytestmark = pytest.mark.quick


def test_residuals_are_counted_once_and_without_the_arguments() -> None:
    x = jnp.ones((5, 7), jnp.float32)

    def sines(x: jax.Array) -> jax.Array:
        return (jnp.sin(x) * x).sum()  # keeps sin(x) and cos(x); x is the argument

    assert residual_bytes(sines, x) == 2 * x.nbytes
    assert residual_bytes(lambda x: (x * x).sum(), x) == 0


def test_the_fused_block_keeps_less() -> None:
    """It keeps what the kernels save: x of each BatchNorm, and y, which the next layer keeps
    anyway; with masks, one bit per element instead of the last y.
    """
    images = np.ones((8, 4, 4, 16), np.float32)

    def kept(norm: Any) -> int:
        block = FusedBottleneck(4, norm=norm)
        init = functools.partial(block.init, use_running_average=False)
        shapes: Any = jax.eval_shape(init, jax.random.key(0), images)
        variables = jax.tree.map(lambda s: np.zeros(s.shape, s.dtype), shapes)

        def run(params: Any) -> jax.Array:
            y, _ = block.apply(
                {**variables, "params": params}, images, False, mutable=["batch_stats"]
            )
            return jnp.asarray(y).sum()

        return residual_bytes(run, variables["params"])

    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        fused, masks, plain = map(
            kept, (BatchNorm, functools.partial(BatchNorm, save="mask"), nn.BatchNorm)
        )
    assert masks < fused < 0.75 * plain
    # relu(bn(conv(.))) twice with 4 channels and once with 16: x and y of each, plus statistics.
    elements = 8 * 4 * 4
    arrays = 4 * elements * (4 + 4 + 4 + 4 + 16 + 16)
    assert arrays <= fused < arrays + 2048
