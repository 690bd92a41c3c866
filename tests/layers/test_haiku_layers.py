"""The Haiku BatchNorm against `haiku.BatchNorm`."""

import importlib.util
import sys
from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax_tools import SHAPE, as_flax_needs_it, assert_close, normal, tolerance
from jax.sharding import PartitionSpec as P
from programs import hlo_calls, opcodes_of_size, ours
from sharding_tools import make_mesh

from jax_bnar import haiku_layers
from jax_bnar.haiku_layers import BatchNorm, Shortcut

pytestmark = pytest.mark.quick


def network(kind: Any, **fields: Any) -> Any:
    """A transformed norm, followed by + residual and ReLU outside if it is Haiku's."""
    fields = {"create_scale": True, "create_offset": True, "decay_rate": 0.9, "eps": 1e-3} | fields

    def forward(x: Any, is_training: bool = True, residual: Any = None, **call: Any) -> Any:
        if kind is BatchNorm:
            return kind(**fields)(x, is_training, residual=residual, **call)
        y = kind(**fields)(x, is_training, **call)
        return jax.nn.relu(y if residual is None else y + residual)

    return hk.transform_with_state(forward)


def variables(net: Any, x: Any, **call: Any) -> tuple[Any, Any]:
    """Parameters that differ from the initial ones, and the state after `init` on a batch."""
    with as_flax_needs_it():
        params, state = net.init(jax.random.key(0), x, **call)
    generator = np.random.default_rng(7)

    def value(leaf: Any) -> Any:
        return jnp.asarray(generator.uniform(0.5, 2.0, leaf.shape), leaf.dtype)

    return jax.tree.map(value, params), state


def outcome(net: Any, params: Any, state: Any, x: Any, residual: Any, **call: Any) -> Any:
    """y, the new state, and gradients of parameters, x, residual and averages."""
    weight = normal(1, x.shape, x.dtype)

    @jax.jit
    def run(params: Any, state: Any, x: Any, residual: Any) -> Any:
        moving = jax.tree.map(lambda a: a if jnp.issubdtype(a.dtype, jnp.inexact) else None, state)

        def loss(params: Any, moving: Any, x: Any, residual: Any) -> Any:
            whole = jax.tree.map(
                lambda a, m: a if m is None else m, state, moving, is_leaf=lambda a: a is None
            )
            y, new = net.apply(params, whole, None, x, residual=residual, **call)
            averages = [a for a in jax.tree.leaves(new) if jnp.issubdtype(a.dtype, jnp.inexact)]
            return (y * weight).sum() + sum(jnp.square(a).sum() for a in averages), (y, new)

        indices = (0, 1, 2) if residual is None else (0, 1, 2, 3)
        return jax.grad(loss, indices, has_aux=True)(params, moving, x, residual)

    return run(params, state, x, residual)


OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "no scale": {"create_scale": False},
    "no offset": {"create_offset": False},
    "neither": {"create_scale": False, "create_offset": False},
    "channels first": {"data_format": "channels_first"},
    "NCHW": {"data_format": "NCHW"},
    "two features": {"axis": (0, 1)},
    "features apart": {"axis": (0, 2)},
    "no features": {"axis": (0, 1, 2, 3)},
    "negative axis": {"axis": (0, -2)},
    "initialisers": {"scale_init": hk.initializers.Constant(2.0), "offset_init": jnp.ones},
}
CALLS: dict[str, dict[str, Any]] = {
    "training": {"is_training": True},
    "averages": {"is_training": False},
    "local": {"is_training": False, "test_local_stats": True},
}
calls = pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)


def compared(x: Any, residual: Any, call: Any, ours: Any, options: Any, times: float) -> None:
    plain, fused = network(hk.BatchNorm, **options), network(BatchNorm, **options, **ours)
    given = variables(plain, x)
    with as_flax_needs_it():
        expected = outcome(plain, *given, x, residual, **call)
        wide = jax.tree.map(
            lambda a: a.astype(jnp.float64) if jnp.issubdtype(a.dtype, jnp.inexact) else a,
            (*given, x, residual),
        )
        exact = outcome(plain, *wide, **call)
        actual = outcome(fused, *given, x, residual, **call)
    assert_close(actual, expected, 4 * times * tolerance(x.dtype))
    exact = jax.tree.map(lambda e, a: e.astype(a.dtype), exact, actual)
    assert_close(actual, exact, times * tolerance(x.dtype))


@calls
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_equals_haiku(options: dict[str, Any], call: dict[str, Any]) -> None:
    """Values, gradients and states, also against a run in float64."""
    compared(normal(0), -normal(2), call, {"activation": "relu"}, options, 64)


@calls
@pytest.mark.parametrize("implementation", ["ffi", "xla"])
@pytest.mark.parametrize("save", ["y", "mask"])
def test_relu_without_residual(call: dict[str, Any], implementation: Any, save: Any) -> None:
    fields = {"activation": "relu", "implementation": implementation, "save": save}
    compared(normal(0), None, call, fields, {}, 64)


@calls
@pytest.mark.parametrize(
    ("scale", "offset"),
    [((3,), (1, 1, 1, 3)), ((), None), ((6, 1, 1, 3), (3,)), (None, (6, 4, 5, 3))],
    ids=["vectors", "scalar", "conditional scale", "whole offset"],
)
def test_scale_and_offset_of_the_call(scale: Any, offset: Any, call: dict[str, Any]) -> None:
    x, residual = normal(0), -normal(2)
    fields = {"create_scale": False, "create_offset": False}
    plain = network(hk.BatchNorm, **fields)
    fused = network(BatchNorm, **fields, activation="relu")
    given = variables(plain, x)
    arrays = {
        name: None if shape is None else normal(i, shape)
        for i, (name, shape) in enumerate({"scale": scale, "offset": offset}.items())
    }
    with as_flax_needs_it():
        actual, expected = (
            outcome(net, *given, x, residual, **call, **arrays) for net in (fused, plain)
        )
    assert_close(actual, expected, 64 * tolerance(x.dtype))


def test_parameters_and_states_are_interchangeable() -> None:
    """Names, shapes and dtypes, for the dtypes of x; both directions run."""
    for dtype in (jnp.float32, jnp.bfloat16):
        x = normal(0, dtype=dtype)
        plain, fused = network(hk.BatchNorm), network(BatchNorm, activation="relu")
        with as_flax_needs_it():
            trees = [net.init(jax.random.key(0), x) for net in (plain, fused)]
            trees += [net.apply(*trees[1 - i], None, x)[1] for i, net in enumerate((plain, fused))]
        shapes = [jax.tree.map(lambda a: (a.shape, a.dtype), tree) for tree in trees]
        assert shapes[0] == shapes[1]
        assert shapes[2] == shapes[3] == shapes[0][1]
        assert list(trees[1][0]) == ["batch_norm"]
        assert sorted(trees[1][1]) == ["batch_norm/~/mean_ema", "batch_norm/~/var_ema"]


def test_the_variance_is_right_far_from_zero() -> None:
    """Haiku's E[x^2] - E[x]^2 has no digit left here."""
    x = jnp.asarray(1e4 + np.random.default_rng(0).normal(size=(512, 3)), jnp.float32)
    net = network(BatchNorm)
    with as_flax_needs_it():
        _, state = net.init(jax.random.key(0), x)
    var = state["batch_norm/~/var_ema"]["average"]
    np.testing.assert_allclose(var[0], np.asarray(x, np.float64).var(0), rtol=1e-4)


def test_averages_are_not_biased() -> None:
    """After one batch, the average is that batch, whatever the decay."""
    x = normal(0)
    net = network(BatchNorm, decay_rate=0.999)
    with as_flax_needs_it():
        _, state = net.apply(*net.init(jax.random.key(0), x), None, x)
    mean = state["batch_norm/~/mean_ema"]
    np.testing.assert_allclose(mean["average"], x.mean((0, 1, 2), keepdims=True), rtol=1e-4)
    assert mean["counter"] == 1


@pytest.mark.parametrize("save", ["y", "mask"])
def test_one_call_each_way_and_no_other_pass(save: Any) -> None:
    shape = (16, 8, 8, 3)
    x, residual = normal(0, shape), normal(1, shape)
    net = network(BatchNorm, activation="relu", save=save)
    params, state = variables(net, x)

    def run(x: Any, residual: Any) -> Any:
        return net.apply(params, state, None, x, residual=residual)[0]

    def both(x: Any, residual: Any, dy: Any) -> Any:
        y, vjp = jax.vjp(run, x, residual)
        return y, vjp(dy)

    given = x, residual, normal(2, shape)
    assert ours(run, x, residual) == {"forward": 1}
    assert ours(both, *given) == {"forward": 1, "backward": 1}
    assert hlo_calls(both, *given) == {"jax_bnar_forward_v1": 1, "jax_bnar_backward_v1": 1}
    moving = opcodes_of_size(x.size, both, *given)
    assert moving <= {"parameter", "bitcast", "custom-call", "get-tuple-element", "tuple"}


def test_evaluation_is_one_pass() -> None:
    x, residual = normal(0), normal(1)
    net = network(BatchNorm, activation="relu", implementation="ffi")
    params, state = variables(net, x)

    def run(x: Any, residual: Any) -> Any:
        return net.apply(params, state, None, x, is_training=False, residual=residual)[0]

    assert ours(run, x, residual) == {"normalise": 1}


@pytest.mark.parametrize("groups", [None, [[0, 1], [2, 3]]], ids=["all", "groups"])
def test_cross_replica_axis(groups: Any) -> None:
    """Under shard_map on several devices; values, gradients of x, and the averages."""
    x, residual = normal(0, (8, 4, 5, 3)), normal(1, (8, 4, 5, 3))
    options = {"cross_replica_axis": "d", "cross_replica_axis_index_groups": groups}
    params, state = variables(network(hk.BatchNorm), x)

    def results(kind: Any, **fields: Any) -> Any:
        net = network(kind, **options, **fields)

        def one(x: Any, residual: Any) -> Any:
            y, new = net.apply(params, state, None, x, residual=residual)
            return y, jax.tree.map(lambda a: a[None], new)

        mapped = jax.shard_map(
            one,
            mesh=make_mesh("auto", d=4),
            in_specs=P("d"),
            out_specs=P("d"),
            check_vma=False,
        )

        def loss(x: Any, residual: Any) -> Any:
            y, new = mapped(x, residual)
            return jnp.square(y).sum(), (y, new)

        return jax.jit(jax.grad(loss, (0, 1), has_aux=True))(x, residual)

    with as_flax_needs_it():
        actual, expected = results(BatchNorm, activation="relu"), results(hk.BatchNorm)
    assert_close(actual, expected, 64 * tolerance(x.dtype))


def test_interceptors_see_arrays_alone() -> None:
    """Those that a network's author wrote for Haiku's layers, which take and return arrays."""
    seen, x = [], normal(0)

    def doubled(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
        result = call(*args, **kwargs)
        if context.method_name == "__init__":
            return result
        seen.append(context.method_name)
        return 2 * result

    def forward(kind: Any) -> Any:
        def function(x: jax.Array) -> jax.Array:
            with hk.intercept_methods(doubled):
                return kind(True, True, 0.9)(x, True)

        net = hk.transform_with_state(function)
        params, state = net.init(jax.random.key(0), x)
        seen.clear()
        return net.apply(params, state, None, x), tuple(seen)

    with as_flax_needs_it():
        (expected, by_haiku), (actual, by_ours) = forward(hk.BatchNorm), forward(BatchNorm)
    assert by_ours == by_haiku
    assert_close(actual, expected, 64 * tolerance(x.dtype))
    with as_flax_needs_it(), hk.intercept_methods(doubled):
        net = block(BatchNorm)
        images = normal(0, (2, 8, 8, 3))
        net.apply(*net.init(jax.random.key(0), images, True), None, images, True)


def test_vmap_with_an_axis_name() -> None:
    x = normal(0, (6, 4, 5, 3))
    params, state = variables(network(hk.BatchNorm), x[0])

    def results(kind: Any, **fields: Any) -> Any:
        net = network(kind, cross_replica_axis="batch", **fields)

        def run(x: Any) -> Any:
            one = jax.vmap(
                lambda x: net.apply(params, state, None, x), out_axes=(0, None), axis_name="batch"
            )
            y, new = one(x)
            return jnp.square(y).sum(), (y, new)

        return jax.jit(jax.grad(run, has_aux=True))(x), run

    with as_flax_needs_it():
        (actual, program), (expected, _) = (
            results(BatchNorm, activation="relu"),
            results(hk.BatchNorm),
        )
    assert_close(actual, expected, 64 * tolerance(x.dtype))
    with as_flax_needs_it():
        assert ours(lambda x: program(x)[0], x) == {"forward": 1}


def block(norm: Any) -> Any:
    """A residual block that changes shape, and so ends with the join of two norms."""
    fused = norm is BatchNorm

    def forward(images: Any, is_training: bool) -> Any:
        def named(name: str, relu: bool) -> Any:
            options = {"activation": "relu"} if fused and relu else {}
            return norm(True, True, 0.9, name=name, **options)

        y = hk.Conv2D(8, 3, with_bias=False, name="conv1")(images)
        x = hk.Conv2D(8, 1, with_bias=False, name="conv3")(images)
        if fused:
            y = named("bn1", True)(y, is_training)
            y = hk.Conv2D(8, 3, with_bias=False, name="conv2")(y)
            shortcut = Shortcut(named("bn3", False), x)
            y = named("bn2", True)(y, is_training, residual=shortcut)
        else:
            y = jax.nn.relu(named("bn1", True)(y, is_training))
            y = hk.Conv2D(8, 3, with_bias=False, name="conv2")(y)
            x = named("bn3", False)(x, is_training)
            y = jax.nn.relu(named("bn2", True)(y, is_training) + x)
        return hk.Linear(4)(y.mean((1, 2)))

    return hk.transform_with_state(forward)


def trained(norm: Any) -> Any:
    """Losses of a few steps of gradient descent, the logits of evaluation, and the variables."""
    net = block(norm)
    images, labels = normal(0, (8, 6, 6, 3)), jnp.arange(8, dtype=jnp.int32) % 4
    params, state = net.init(jax.random.key(0), images, True)

    def loss(params: Any, state: Any) -> Any:
        logits, state = net.apply(params, state, None, images, True)
        logits = jax.nn.log_softmax(logits)
        return -jnp.take_along_axis(logits, labels[:, None], 1).mean(), state

    @jax.jit
    def step(params: Any, state: Any) -> Any:
        (value, state), gradient = jax.value_and_grad(loss, has_aux=True)(params, state)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradient), state, value

    losses = []
    for _ in range(4):
        params, state, value = step(params, state)
        losses.append(value)
    logits, _ = net.apply(params, state, None, images, False)
    return losses, logits, params, state


@pytest.mark.slow
def test_a_block_trains_as_with_haiku() -> None:
    with as_flax_needs_it():
        actual, expected = trained(BatchNorm), trained(hk.BatchNorm)
    assert_close(actual, expected, 1e-4)
    assert actual[0][-1] < actual[0][0]


def test_join_is_one_call() -> None:
    net = block(BatchNorm)
    images = normal(0, (8, 6, 6, 3))
    with as_flax_needs_it():
        params, state = net.init(jax.random.key(0), images, True)

        def loss(params: Any) -> Any:
            return net.apply(params, state, None, images, True)[0].sum()

        found = ours(jax.grad(loss), params)
    assert found == {"forward": 1, "dual_forward": 1, "backward": 1, "dual_backward": 1}


def test_mixed_precision_policy() -> None:
    """Parameters in float32 with bfloat16 inputs promote, as in Haiku."""
    x = normal(0, dtype=jnp.bfloat16)
    plain, fused = network(hk.BatchNorm), network(BatchNorm, activation="relu")
    params, state = variables(plain, x.astype(jnp.float32))
    with as_flax_needs_it():
        (y, new), (expected, want) = (net.apply(params, state, None, x) for net in (fused, plain))
    assert y.dtype == expected.dtype == jnp.float32
    assert_close((y, new), (expected, want), 8 * tolerance(x.dtype))


def test_the_result_has_the_promotion_with_the_residual() -> None:
    x, residual = normal(0, dtype=jnp.bfloat16), normal(1)
    net = network(BatchNorm, activation="relu")
    params, state = variables(network(hk.BatchNorm), x)
    with as_flax_needs_it():
        assert net.apply(params, state, None, x)[0].dtype == jnp.bfloat16
        assert net.apply(params, state, None, x, residual=residual)[0].dtype == jnp.float32


@pytest.mark.parametrize("act", [jax.nn.silu, jax.nn.celu])
def test_other_activations(act: Any) -> None:
    """One of them is fused, so its argument is not rounded before."""
    x = normal(0)
    params, state = variables(network(BatchNorm), x)
    with as_flax_needs_it():
        plain, _ = network(BatchNorm).apply(params, state, None, x)
        y, _ = network(BatchNorm, activation=act).apply(params, state, None, x)
    np.testing.assert_allclose(y, act(plain), rtol=1e-5, atol=1e-6)


BAD: list[tuple[dict[str, Any], dict[str, Any], type[Exception], str]] = [
    ({}, {"scale": jnp.ones(3)}, ValueError, "scale was given to .* create_scale=False"),
    ({}, {"offset": jnp.ones(3)}, ValueError, "offset was given to .* create_offset=False"),
    (
        {"create_scale": False},
        {"scale": jnp.ones(4)},
        ValueError,
        r"scale must broadcast to inputs, whose shape is \(6, 4, 5, 3\), got shape \(4,\)",
    ),
    ({}, {"residual": jnp.ones((6, 4, 5, 1))}, ValueError, "residual must have the shape of x"),
    ({}, {"x": jnp.ones(SHAPE, jnp.complex64)}, TypeError, "complex64.* use haiku.BatchNorm"),
    ({"activation": "celu"}, {}, ValueError, "activation must be 'none', 'relu'"),
    ({"activation": np.zeros(3)}, {}, TypeError, r"got an array of shape \(3,\)"),
    ({"activation": 3}, {}, TypeError, "activation must be 'none', 'relu'.* of type int"),
    ({"implementation": "cuda"}, {}, ValueError, "implementation"),
    ({"eps": 0.0}, {}, ValueError, "eps must be finite and > 0"),
    ({"decay_rate": 9}, {}, ValueError, "decay_rate is the weight .* from 0 to 1, got 9"),
    ({"axis": (0, 4)}, {}, ValueError, r"axis must lie in \[-4, 4\)"),
    ({"axis": ("x",)}, {}, TypeError, "axis must be an integer or a sequence of integers"),
    ({"cross_replica_axis": "d"}, {}, NameError, "cross_replica_axis='d' does not name a mapped"),
    (
        {"cross_replica_axis": "d", "cross_replica_axis_index_groups": [[0, 0]]},
        {},
        ValueError,
        "cross_replica_axis_index_groups must hold each index of the axis exactly once",
    ),
    ({}, {"is_training": False}, ValueError, "No value for 'average'"),
    ({}, {"is_training": "no"}, TypeError, "is_training must be True or False, got 'no'"),
    (
        {},
        {"is_training": jnp.ones(SHAPE)},
        TypeError,
        r"got an array of shape \(6, 4, 5, 3\)\. A residual is passed by keyword",
    ),
    ({"create_scale": False, "scale_init": jnp.ones}, {}, ValueError, "Cannot set `scale_init`"),
]


@pytest.mark.parametrize(("fields", "call", "error", "words"), BAD, ids=lambda v: str(v)[:30])
def test_refused(fields: Any, call: Any, error: type[Exception], words: str) -> None:
    net = network(BatchNorm, **fields)
    with as_flax_needs_it(), pytest.raises(error, match=words):
        net.init(jax.random.key(0), **({"x": normal(0)} | call))


@pytest.mark.parametrize(("option", "value"), [("save", "x"), ("implementation", "tpu")])
def test_options_are_refused_where_they_are_written(option: str, value: Any) -> None:
    def construct() -> None:
        BatchNorm(True, True, 0.9, **{option: value})

    with pytest.raises(ValueError, match=f"BatchNorm: {option} must be .*, got '{value}'"):
        hk.transform(construct).init(jax.random.key(0))


def test_the_norm_of_a_shortcut_must_be_ours() -> None:
    def forward(x: Any) -> Any:
        other = hk.BatchNorm(True, True, 0.9)
        return BatchNorm(True, True, 0.9)(x, True, residual=Shortcut(other, x))  # pyright: ignore

    class Doubled(BatchNorm):
        def __call__(self, *args: Any, **keywords: Any) -> Any:
            return 2 * super().__call__(*args, **keywords)

    def with_a_call_of_its_own(x: Any) -> Any:
        other = Doubled(True, True, 0.9)
        return BatchNorm(True, True, 0.9)(x, True, residual=Shortcut(other, x))

    with pytest.raises(TypeError, match=r"norm of a Shortcut must be .* pass its result"):
        hk.transform_with_state(forward).init(jax.random.key(0), normal(0))
    with pytest.raises(TypeError, match=r"Shortcut must not have a __call__ of its own"):
        hk.transform_with_state(with_a_call_of_its_own).init(jax.random.key(0), normal(0))

    def without_a_shortcut(x: Any) -> Any:
        return BatchNorm(True, True, 0.9)(x, True, residual=(x, x))  # pyright: ignore

    with pytest.raises(TypeError, match="residual must be an array, got tuple"):
        hk.transform_with_state(without_a_shortcut).init(jax.random.key(0), normal(0))


@pytest.mark.parametrize("scale_shape", [SHAPE[-1:], SHAPE])
def test_the_input_of_a_shortcut_has_the_shape_of_x(scale_shape: tuple[int, ...]) -> None:
    """Also where plain JAX applies a scale for each element, and would broadcast."""

    def forward(x: Any) -> Any:
        norm, other = (BatchNorm(False, True, 0.9, name=name) for name in ("first", "second"))
        scale = jnp.ones(scale_shape, x.dtype)
        shortcut = Shortcut(other, x.reshape(SHAPE[1], SHAPE[0], *SHAPE[2:]))
        return norm(x, True, scale=scale, residual=shortcut)

    assert SHAPE[0] != SHAPE[1]
    with pytest.raises(ValueError, match=r"input of the shortcut's norm must have the shape of x"):
        hk.transform_with_state(forward).init(jax.random.key(0), normal(0))


def test_without_haiku_the_error_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "haiku", None)
    assert haiku_layers.__file__ is not None
    spec = importlib.util.spec_from_file_location("haiku_again", haiku_layers.__file__)
    assert spec is not None
    assert spec.loader is not None
    with pytest.raises(ImportError, match="pip install dm-haiku"):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


def test_integers_are_normalised_as_in_haiku() -> None:
    x = jnp.arange(24, dtype=jnp.int32).reshape(2, 4, 3) ** 2

    def outcome(kind: Any) -> Any:
        net = network(kind, **({"activation": "relu"} if kind is BatchNorm else {}))
        return net.apply(*net.init(jax.random.key(0), x), None, x)

    with as_flax_needs_it():
        actual, expected = outcome(BatchNorm), outcome(hk.BatchNorm)
    dtypes = [jax.tree.map(lambda a: a.dtype, found) for found in (actual, expected)]
    assert dtypes[0] == dtypes[1]
    assert_close(actual, expected, 1e-5)
