"""What the two `ResNet`s refuse alike: numbers of blocks, classes and channels, and norms."""

from typing import Any

import jax
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
