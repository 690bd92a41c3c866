"""`nnx_layers.convert_batch_norms`: which norms it replaces, and which activations they take."""

import functools
from typing import Any

import jax
import pytest
from flax import nnx
from flax_tools import as_flax_needs_it, assert_close, normal, tolerance
from nnx_tools import outcome

from jax_bnar.nnx_layers import BatchNorm, convert_batch_norms

pytestmark = pytest.mark.quick


class Model(nnx.Module):
    """BatchNorms in places where a traversal may miss them: shared, in containers, subclassed."""

    class Special(nnx.BatchNorm):
        pass

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.layers = nnx.Sequential(nnx.Linear(3, 4, rngs=rngs), nnx.BatchNorm(4, rngs=rngs))
        self.first = nnx.BatchNorm(4, momentum=0.8, use_running_average=False, rngs=rngs)
        self.shared = self.first
        self.nested = nnx.data([(nnx.BatchNorm(4, epsilon=1e-3, rngs=rngs),)])
        self.special = Model.Special(4, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.shared(self.first(self.layers(x)))
        return self.special(self.nested[0][0](x))


def norms(model: Any) -> dict[Any, Any]:
    return {p: m for p, m in nnx.iter_modules(model) if isinstance(m, nnx.BatchNorm)}


def test_convert_batch_norms() -> None:
    x = normal(0, (8, 3))
    with as_flax_needs_it():
        model: Any = Model(nnx.Rngs(0))
        model.first.bias.set_metadata(note="kept")
        expected = outcome(nnx.clone(model), x)
        before = norms(model)
        variables = {path: (m.scale, m.bias, m.mean, m.var) for path, m in before.items()}
        assert convert_batch_norms(model, save="mask") is model
        after = norms(model)
        assert after.keys() == before.keys()
        for path, layer in after.items():
            assert layer is before[path]
            assert all(
                a is b
                for a, b in zip(
                    (layer.scale, layer.bias, layer.mean, layer.var), variables[path], strict=True
                )
            )
            assert type(layer) is (Model.Special if path == ("special",) else BatchNorm)
        assert (model.first.momentum, model.first.save) == (0.8, "mask")
        assert model.first.bias.note == "kept"
        assert model.shared is model.first
        assert model.nested[0][0].epsilon == 1e-3
        # The model used NNX's fast variance, which is the less accurate side here.
        assert_close(outcome(model, x), expected, 64 * tolerance(x.dtype))
        model.eval()
        assert model.first.use_running_average


def test_convert_batch_norms_chooses() -> None:
    model = Model(nnx.Rngs(0))
    convert_batch_norms(model, only=nnx.PathContains("layers"))
    assert [path for path, m in norms(model).items() if isinstance(m, BatchNorm)] == [
        ("layers", "layers", 1)
    ]
    linear = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"no flax\.nnx\.BatchNorm to convert"):
        convert_batch_norms(linear)
    assert convert_batch_norms(linear, raise_if_not_found=False) is linear
    with pytest.raises(TypeError, match=r"unknown options \['epsilon'\]"):
        convert_batch_norms(model, epsilon=1.0)
    untouched: Any = nnx.BatchNorm(3, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="save must be 'y' or 'mask', got 'Y'"):
        convert_batch_norms(untouched, save="Y")
    with pytest.raises(ValueError, match="num_groups must be at least 1, got -3"):
        convert_batch_norms(untouched, num_groups=-3)
    with pytest.raises(TypeError, match=r"report must be a function of a text.*got True"):
        convert_batch_norms(untouched, report=True)  # type: ignore[arg-type]
    assert type(untouched) is nnx.BatchNorm


@pytest.mark.parametrize(
    ("act", "stored"),
    [(nnx.silu, "silu"), (functools.partial(nnx.leaky_relu, negative_slope=0.3), None)],
)
def test_convert_batch_norms_takes_other_activations_of_a_sequential(act: Any, stored: Any) -> None:
    x = normal(0, (8, 3))
    with as_flax_needs_it():
        model: Any = nnx.Sequential(nnx.BatchNorm(3, rngs=nnx.Rngs(0)), act)
        expected = outcome(nnx.clone(model), x)
        convert_batch_norms(model)
        assert model.layers[0].activation == (stored or act)
        assert_close(outcome(model, x), expected, 64 * tolerance(x.dtype))


def test_convert_batch_norms_takes_the_relus_of_a_sequential() -> None:
    """And says which layers were only swapped; a shared layer keeps what its calls do."""

    class Net(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            linear = nnx.Linear(3, 3, rngs=rngs)
            shared = nnx.BatchNorm(3, rngs=rngs)
            self.body = nnx.Sequential(
                linear, nnx.BatchNorm(3, rngs=rngs), jax.nn.relu, shared, nnx.relu
            )
            self.shared = shared
            self.last = nnx.BatchNorm(3, rngs=rngs)

        def __call__(self, x: Any) -> Any:
            return nnx.gelu(self.last(self.shared(self.body(x))))

    x = normal(0, (8, 3))
    with as_flax_needs_it():
        model: Any = Net(nnx.Rngs(0))
        expected = outcome(nnx.clone(model), x)
        texts: list[str] = []
        convert_batch_norms(model, report=texts.append)
        assert_close(outcome(model, x), expected, 64 * tolerance(x.dtype))
        layers = model.body.layers
        assert [layers[1].activation, model.shared.activation] == ["relu", "none"]
        assert layers[2] is not jax.nn.relu
        assert layers[4] is nnx.relu
        (text,) = texts
        assert "3 BatchNorm layers" in text
        assert "1 with the activation that follows: body.layers.1\n" in text
        assert "2 only swapped: " in text
        assert "jax_bnar.fuse" in text

        given: Any = Net(nnx.Rngs(0))
        convert_batch_norms(given, activation="none")
        assert given.body.layers[2] is jax.nn.relu
