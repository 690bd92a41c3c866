"""What the two `ResNet`s refuse alike: numbers of blocks, classes and channels, and norms."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax_tools import normal

from jax_bnar import flax_layers, nnx_layers

pytestmark = pytest.mark.quick


def linen_resnet(**fields: Any) -> Any:
    net = flax_layers.ResNet(**fields)
    return jax.eval_shape(net.init, jax.random.key(0), normal(0, (2, 8, 8, 3)))


def nnx_resnet(**fields: Any) -> Any:
    return nnx.eval_shape(lambda: nnx_layers.ResNet(**fields, rngs=nnx.Rngs(0)))


def test_arguments_of_a_norm_come_before_those_of_the_network() -> None:
    small: dict[str, Any] = {"stage_sizes": (1,), "num_classes": 2, "num_filters": 4, "epsilon": 1}
    partial = functools.partial(
        functools.partial(nnx_layers.BatchNorm, epsilon=0.25, momentum=0.5), momentum=0.75
    )
    model = nnx_layers.ResNet(**small, norm=partial, rngs=nnx.Rngs(0))
    found = {
        (norm.epsilon, norm.momentum)
        for _, norm in nnx.iter_modules(model)
        if isinstance(norm, nnx.BatchNorm)
    }
    assert found == {(0.25, 0.75)}

    x = normal(0, (2, 8, 8, 3))
    norm = functools.partial(flax_layers.BatchNorm, epsilon=1e4, dtype=jnp.float32)
    other = flax_layers.ResNet(**{**small, "epsilon": 1e4})
    nets = {"own": flax_layers.ResNet(**small, norm=norm), "given": other}
    variables = other.init(jax.random.key(0), x)
    logits = {name: net.apply(variables, x, train=False) for name, net in nets.items()}
    np.testing.assert_array_equal(logits["own"], logits["given"])
    # A frozen norm.
    frozen = flax_layers.ResNet(
        **small, norm=functools.partial(flax_layers.BatchNorm, use_running_average=True)
    )
    evaluated, trained = (
        frozen.apply(variables, x, train=train, mutable=["batch_stats"]) for train in (False, True)
    )
    jax.tree.map(np.testing.assert_array_equal, evaluated, trained)


@pytest.mark.parametrize("make", [linen_resnet, nnx_resnet])
@pytest.mark.parametrize(
    ("field", "error", "words"),
    [
        (
            {"stage_sizes": ()},
            ValueError,
            r"blocks of each stage, such as \(3, 4, 6, 3\), got \(\)",
        ),
        ({"stage_sizes": 3}, TypeError, r"such as \(3, 4, 6, 3\), got 3"),
        ({"stage_sizes": "12"}, TypeError, r"such as \(3, 4, 6, 3\), got '12'"),
        ({"stage_sizes": (1, 0)}, ValueError, r"stage_sizes\[1\] must be at least 1, got 0"),
        ({"stage_sizes": (1.5,)}, TypeError, r"stage_sizes\[0\] must be an integer, got 1.5"),
        ({"num_classes": 0}, ValueError, "num_classes must be at least 1, got 0"),
        ({"num_filters": 0}, ValueError, "num_filters must be at least 1, got 0"),
        ({"norm": "bn"}, TypeError, "norm must be a class .* got an instance of builtins.str"),
        (
            {"norm": flax_layers.BatchNorm()},
            TypeError,
            r"got an instance of jax_bnar\.flax_layers\.BatchNorm; the network makes the norms",
        ),
        (
            {"norm": nnx_layers.BatchNorm(3, rngs=nnx.Rngs(0))},
            TypeError,
            r"got an instance of jax_bnar\.nnx_layers\.BatchNorm; the network makes the norms",
        ),
    ],
    ids=lambda value: str(value)[:30] if isinstance(value, dict) else "",
)
def test_refused(make: Any, field: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=f"ResNet: .*{words}"):
        make(**{"stage_sizes": (1,), "num_classes": 2, **field})
