"""`nnx_layers.convert_batch_norms`: which norms it replaces, and which activations they take."""

import copy
import functools
import operator
import re
from typing import Any, cast

import flax.linen
import jax
import jax.numpy as jnp
import numpy as np
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
    with pytest.raises(ValueError, match="only='first' selects none of the model's"):
        convert_batch_norms(Model(nnx.Rngs(0)), only="first")
    with pytest.raises(TypeError, match=r"unknown options \['epsilon'\]"):
        convert_batch_norms(model, epsilon=1.0)
    untouched: Any = nnx.BatchNorm(3, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="save must be 'y' or 'mask', got 'Y'"):
        convert_batch_norms(untouched, save="Y")
    with pytest.raises(ValueError, match="num_groups must be at least 1, got -3"):
        convert_batch_norms(untouched, num_groups=-3)
    with pytest.raises(TypeError, match=r"report must be a function of a text.*got True"):
        convert_batch_norms(untouched, report=True)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"implementation must be None, 'ffi'.*got 'cuda'"):
        convert_batch_norms(untouched, implementation="cuda")
    for option in ("update_batch_stats", "unbiased_running_var"):
        with pytest.raises(TypeError, match=f"{option} must be True or False, got 'no'"):
            convert_batch_norms(untouched, **cast(Any, {option: "no"}))
    assert type(untouched) is nnx.BatchNorm


def test_options_are_no_state() -> None:
    model: Any = nnx.BatchNorm(3, rngs=nnx.Rngs(0))
    before = jax.tree.structure(nnx.state(model))
    convert_batch_norms(model, num_groups=jnp.int32(2), update_batch_stats=np.bool_(False))
    assert jax.tree.structure(nnx.state(model)) == before
    assert (model.num_groups, model.update_batch_stats) == (2, False)
    assert nnx.jit(lambda model, x: model(x))(model, normal(0, (4, 3))).shape == (4, 3)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (None, "must be an NNX module or a tree of them, got a builtins.NoneType"),
        (Model, "must be an NNX module or a tree of them, got the class Model"),
        (
            flax.linen.Dense(3),
            "must be an NNX module or a tree of them, got a flax.linen.linear.Dense",
        ),
        (BatchNorm(3, rngs=nnx.Rngs(0)), "BatchNorms of the model are those of jax_bnar already"),
    ],
)
def test_convert_batch_norms_says_why_there_is_nothing(model: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        convert_batch_norms(model)


class Body(nnx.Module):
    """A `Sequential` with activations after its norms, run as a whole and layer by layer."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        shared = nnx.BatchNorm(3, rngs=rngs)
        self.body = nnx.Sequential(
            nnx.Linear(3, 3, rngs=rngs),
            nnx.BatchNorm(3, rngs=rngs),
            jax.nn.relu,
            shared,
            functools.partial(nnx.leaky_relu, negative_slope=0.3),
            nnx.BatchNorm(3, rngs=rngs),
            nnx.softplus,
        )
        self.shared = shared
        self.last = nnx.BatchNorm(3, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return nnx.gelu(self.last(self.shared(self.body(x))))

    def one_by_one(self, x: jax.Array) -> list[jax.Array]:
        results = []
        for layer in self.body.layers:
            x = layer(x)
            results.append(x)
        return [*results, nnx.Sequential(*self.body.layers[:2])(x)]


def test_convert_batch_norms_fuses_the_activations_of_a_sequential() -> None:
    """And says which layers were only swapped; a layer keeps what its other calls do."""
    x = normal(0, (8, 3))
    with as_flax_needs_it():
        plain = Body(nnx.Rngs(0))
        model = nnx.clone(plain)
        layers = list(model.body.layers)
        texts: list[str] = []
        convert_batch_norms(model, report=texts.append)
        assert isinstance(model.body, nnx.Sequential)
        assert all(map(operator.is_, model.body.layers, layers))
        graphdef, state = nnx.split(model.body)
        ran = str(jax.make_jaxpr(lambda state, x: nnx.merge(graphdef, state)(x))(state, x))
        assert re.findall(r"activation=(\w+)", ran) == ["relu", "leaky_relu", "none"]
        assert_close(outcome(model, x), outcome(plain, x), 64 * tolerance(x.dtype))
        for call in (nnx.clone, copy.deepcopy, lambda model: nnx.merge(*nnx.split(model))):
            assert_close(call(model)(x), call(plain)(x), 64 * tolerance(x.dtype))
        (text,) = texts
        assert "4 BatchNorm layers" in text
        assert "2 with the activation that follows: body.layers.1, " in text
        assert "2 only swapped: " in text
        assert "jax_bnar.fuse" in text


@pytest.mark.parametrize("training", [True, False])
def test_layers_of_a_converted_sequential_may_run_one_by_one(training: bool) -> None:
    """Each of them computes what it computed before, and so do others in their places."""
    x = normal(0, (8, 3))
    with as_flax_needs_it():
        plain = Body(nnx.Rngs(0))
        model = convert_batch_norms(nnx.clone(plain))
        for each in (plain, model):
            each.set_attributes(use_running_average=not training)
        # Ours run first, so that a wrong update of running statistics is seen by the comparison.
        found, expected = (
            (each.one_by_one(x), nnx.to_pure_dict(nnx.state(each))) for each in (model, plain)
        )
        assert_close(found, expected, 64 * tolerance(x.dtype))
        for each in (plain, model):
            each.body.layers[2] = nnx.softplus
        assert_close(model(x), plain(x), 64 * tolerance(x.dtype))


def test_a_given_activation_leaves_sequentials_alone() -> None:
    model = Body(nnx.Rngs(0))
    convert_batch_norms(model, activation="none")
    assert type(model.body) is nnx.Sequential


def test_sequentials_within_each_other_are_tabulated() -> None:
    """`nnx.tabulate` replaces the methods of all classes, also that which the fused one calls."""
    rngs = nnx.Rngs(0)
    inner = nnx.Sequential(nnx.BatchNorm(3, rngs=rngs), nnx.relu)
    model = convert_batch_norms(nnx.Sequential(nnx.Sequential(inner), nnx.Linear(3, 2, rngs=rngs)))
    x = normal(0, (8, 3))
    with as_flax_needs_it():
        expected = nnx.clone(model)(x)
        assert "FusedSequential" in nnx.tabulate(model, x, console_kwargs={"width": 200})
        assert_close(model(x), expected, tolerance(x.dtype))


def test_the_activations_of_a_copy_are_found() -> None:
    model = nnx.Sequential(nnx.BatchNorm(3, rngs=nnx.Rngs(0)), nnx.relu)
    reports: list[str] = []
    for each in (copy.deepcopy(model), model):
        convert_batch_norms(each, report=reports.append)
    assert reports[0] == reports[1]
    assert "with the activation" in reports[0]


def test_a_converted_sequential_passes_keywords_to_its_first_layer() -> None:
    x = normal(0, (8, 3))
    with as_flax_needs_it():
        plain = nnx.Sequential(nnx.BatchNorm(3, rngs=nnx.Rngs(0)), nnx.relu)
        model = convert_batch_norms(nnx.clone(plain))
        mask = x > 0
        calls: tuple[dict[str, Any], ...] = ({"mask": mask}, {"use_running_average": True})
        for call in calls:
            assert_close(model(x, **call), plain(x, **call), 64 * tolerance(x.dtype))
