"""A join by a `Shortcut` is the sum of the two layers, whatever either of them has been given."""

import functools
from typing import Any

import haiku as hk
import jax
import numpy as np
import pytest
from flax import nnx
from flax_tools import SHAPE, as_flax_needs_it, assert_close, normal

from jax_bnar import haiku_layers
from jax_bnar.nnx_layers import BatchNorm, Shortcut

LEAKY = functools.partial(nnx.leaky_relu, negative_slope=0.3)


@pytest.mark.parametrize(
    ("activation", "fields", "frozen"),
    [
        ("relu", {}, True),
        ("relu", {"num_groups": 3}, False),
        ("relu", {"unbiased_running_var": True}, False),
        (LEAKY, {}, False),
        ("none", {"num_groups": 2, "unbiased_running_var": True}, True),
    ],
    ids=["frozen shortcut", "ghost batches", "unbiased", "leaky", "all"],
)
def test_nnx(activation: Any, fields: dict[str, Any], frozen: bool) -> None:
    """The running statistics as well."""
    x1, x2 = normal(0, (6, 5, 8)), 2 * normal(1, (6, 5, 8))

    def pair() -> tuple[BatchNorm, BatchNorm]:
        common: dict[str, Any] = {"momentum": 0.5, "rngs": nnx.Rngs(0)} | fields
        last, shortcut = BatchNorm(8, activation=activation, **common), BatchNorm(8, **common)
        if frozen:
            shortcut.eval()
        return last, shortcut

    joined, added = pair(), pair()
    y = joined[0](x1, residual=Shortcut(joined[1], x2))
    expected = added[0](x1, residual=added[1](x2))
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-5)
    for one, other in zip(joined, added, strict=True):
        state, expected_state = (nnx.to_pure_dict(nnx.state(layer)) for layer in (one, other))
        assert_close(state, expected_state, 1e-5)


@pytest.mark.parametrize("scale_shape", [(3,), SHAPE], ids=["vectors", "conditional scale"])
def test_haiku(scale_shape: tuple[int, ...]) -> None:
    """A scale of each element is multiplied outside the call, and the leaky slope is not lost."""
    x1, x2 = normal(0), -normal(1)
    scale, offset = normal(2, scale_shape) - 3, normal(3, (3,)) - 3

    def forward(joined: bool) -> Any:
        def run(x1: Any, x2: Any) -> Any:
            fields = {"create_scale": False, "create_offset": False, "decay_rate": 0.9}
            last = haiku_layers.BatchNorm(**fields, activation=LEAKY)
            other = haiku_layers.BatchNorm(True, True, 0.9, name="shortcut")
            residual = haiku_layers.Shortcut(other, x2) if joined else other(x2, True)
            return last(x1, True, scale=scale, offset=offset, residual=residual)

        return hk.transform_with_state(run)

    with as_flax_needs_it():
        (y, state), (expected, expected_state) = (
            net.apply(*net.init(jax.random.key(0), x1, x2), None, x1, x2)
            for net in map(forward, (True, False))
        )
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-5)
    assert float(np.min(y)) < -0.1
    assert_close(state, expected_state, 1e-5)
