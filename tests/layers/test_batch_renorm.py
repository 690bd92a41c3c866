"""BatchRenorm of Linen and NNX against the formulas of the paper in float64, over several steps.

The operator under it has all transformations: it is the kind "renorm" of
`test_transformation_properties.py`.
"""

import functools
from collections.abc import Callable
from typing import Any, Final

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import both_implementations
from flax import nnx
from flax_tools import trained_looking
from jax.sharding import PartitionSpec as P
from programs import hlo_calls
from sharding_tools import MeshKind, collectives, make_mesh, put, relative_difference, use_mesh

import jax_bnar
from jax_bnar import flax_layers, nnx_layers

CHANNELS: Final = 5
SHAPE: Final = (16, 3, CHANNELS)
# Statistics differ enough from step to step for both limits to be reached in some channels.
FIELDS: Final[dict[str, Any]] = {
    "momentum": 0.9,
    "warm_up_steps": 2,
    "r_max": 1.3,
    "d_max": 0.8,
}
# (params, batch_stats, x, residual) -> (y, batch_stats)
Step = Callable[..., tuple[Any, Any]]


def linen(name: str = "BatchRenorm", *, train: bool = True, **fields: Any) -> Step:
    layer = getattr(flax_layers, name)(use_running_average=not train, **fields)

    def step(params: Any, stats: Any, x: Any, residual: Any = None) -> tuple[Any, Any]:
        variables = {"params": params, "batch_stats": stats}
        y, updated = layer.apply(variables, x, residual=residual, mutable=["batch_stats"])
        return y, updated["batch_stats"]

    return step


def of_nnx(name: str = "BatchRenorm", *, train: bool = True, **fields: Any) -> Step:
    kind = getattr(nnx_layers, name)

    def step(params: Any, stats: Any, x: Any, residual: Any = None) -> tuple[Any, Any]:
        layer = kind(CHANNELS, use_running_average=not train, rngs=nnx.Rngs(0), **fields)
        given = params | stats
        variables = {key: getattr(layer, key) for key in given}
        for key, variable in variables.items():
            variable[...] = given[key]
        y = layer(x, residual=residual)
        return y, {key: variables[key][...] for key in stats}

    return step


LIBRARIES: Final = {"linen": linen, "nnx": of_nnx}
libraries = pytest.mark.parametrize("library", LIBRARIES)


def start(dtype: Any = np.float32) -> tuple[Any, Any]:
    """params and batch_stats."""
    random = np.random.default_rng(2)
    params = {
        "scale": random.uniform(0.5, 2, CHANNELS).astype(dtype),
        "bias": random.normal(size=CHANNELS).astype(dtype),
    }
    stats = {
        "mean": np.zeros(CHANNELS, dtype),
        "var": np.ones(CHANNELS, dtype),
        "steps": np.zeros((), np.int32),
    }
    return params, stats


def batch(number: int, shape: tuple[int, ...] = SHAPE, dtype: Any = np.float32) -> Any:
    """x and residual of this step."""
    random = np.random.default_rng([3, number])
    stds, means = random.uniform(0.6, 1.5, CHANNELS), random.normal(size=CHANNELS)
    x = random.normal(size=shape) * stds + means
    return x.astype(dtype), random.normal(size=shape).astype(dtype)


def paper(
    *,
    activation: str = "none",
    epsilon: float = 1e-3,
    momentum: float,
    warm_up_steps: int,
    r_max: Any,
    d_max: Any,
    num_groups: int = 1,
    **_: Any,
) -> Step:
    """What the paper says, for channels on the last axis."""

    def step(params: Any, stats: Any, x: Any, residual: Any = None) -> tuple[Any, Any]:
        groups = x.reshape(num_groups, -1, CHANNELS)
        mean, var = groups.mean(1, keepdims=True), groups.var(1, keepdims=True)
        std, running_std = jnp.sqrt(var + epsilon), jnp.sqrt(stats["var"] + epsilon)
        steps = int(stats["steps"])
        r, d = jnp.ones_like(std), jnp.zeros_like(mean)
        if steps >= warm_up_steps:
            r_limit: Any = r_max(steps) if callable(r_max) else r_max
            d_limit: Any = d_max(steps) if callable(d_max) else d_max
            r = jnp.clip(std / running_std[None, None], 1 / r_limit, r_limit)
            d = (mean - stats["mean"][None, None]) / running_std[None, None]
            d = jnp.clip(d, -d_limit, d_limit)
        r, d = jax.lax.stop_gradient((r, d))
        spread = functools.partial(jnp.broadcast_to, shape=groups.shape)
        y = spread(r / std) * (groups - spread(mean)) + spread(d)
        y = y * spread(params["scale"][None, None]) + spread(params["bias"][None, None])
        y = y.reshape(x.shape)
        y = y if residual is None else y + residual
        updated = {
            name: momentum * stats[name] + (1 - momentum) * batch.mean(0)[0]
            for name, batch in (("mean", mean), ("var", var))
        }
        return jax.nn.relu(y) if activation == "relu" else y, updated | {"steps": steps + 1}

    return step


def with_gradients(step: Step) -> Callable[..., Any]:
    """y, the new statistics, and gradients of a loss with respect to params, x and residual."""

    def both(params: Any, stats: Any, x: Any, residual: Any = None) -> Any:
        def loss(params: Any, x: Any, residual: Any) -> Any:
            y, updated = step(params, stats, x, residual)
            weights = jnp.cos(jnp.arange(y.size, dtype=y.dtype)).reshape(y.shape)
            return (jnp.sin(y) * weights).sum(), (y, updated)

        arguments = (0, 1) if residual is None else (0, 1, 2)
        gradients, results = jax.grad(loss, arguments, has_aux=True)(params, x, residual)
        return *results, gradients

    return both


def as_float64(tree: Any) -> Any:
    return jax.tree.map(lambda a: jnp.asarray(a, jnp.float64), tree)


VARIANTS: Final[dict[str, tuple[dict[str, Any], bool]]] = {
    "norm": ({}, False),
    "relu": ({"activation": "relu"}, False),
    "relu and residual": ({"activation": "relu"}, True),
    "mask": ({"activation": "relu", "save": "mask"}, True),
    "residual": ({}, True),
    "groups": ({"activation": "relu", "num_groups": 4}, True),
    "schedules": (
        {"r_max": lambda steps: 1 + 0.1 * steps, "d_max": lambda steps: 0.2 * steps},
        False,
    ),
    "no warm-up": ({"warm_up_steps": 0}, False),
}


@libraries
@both_implementations
@pytest.mark.parametrize("variant", VARIANTS)
def test_equals_the_paper_over_steps(library: str, implementation: str, variant: str) -> None:
    """Values, gradients and state, from before the end of the warm-up to after it."""
    more, has_residual = VARIANTS[variant]
    fields = FIELDS | more
    ours = jax.jit(with_gradients(LIBRARIES[library](**fields, implementation=implementation)))
    exact = with_gradients(paper(**fields))
    params, stats = start()
    expected_stats = stats
    for number in range(5):
        x, residual = batch(number)
        given = (x, residual) if has_residual else (x,)
        y, stats, gradients = ours(params, stats, *given)
        expected = exact(as_float64(params), as_float64(expected_stats), *as_float64(given))
        expected_stats = expected[1]
        assert int(stats["steps"]) == number + 1
        assert stats["steps"].dtype == np.int32
        assert relative_difference((y, stats, gradients), expected) < 1e-5, f"step {number}"


@libraries
@both_implementations
@pytest.mark.parametrize("neutral", [{"warm_up_steps": 10**9}, {"r_max": 1, "d_max": 0}], ids=str)
def test_without_correction_it_is_batch_norm(
    library: str, implementation: str, neutral: dict[str, Any]
) -> None:
    params, stats = start()
    stats["steps"] += 5
    options = {"activation": "relu", "implementation": implementation, "epsilon": 1e-3}
    renorm = jax.jit(with_gradients(LIBRARIES[library](**FIELDS | neutral | options)))
    norm = jax.jit(
        with_gradients(LIBRARIES[library]("BatchNorm", momentum=FIELDS["momentum"], **options))
    )
    y, updated, gradients = renorm(params, stats, *batch(0))
    assert updated.pop("steps") == 6
    del stats["steps"]
    expected = norm(params, stats, *batch(0))
    if implementation == "ffi":
        jax.tree.map(np.testing.assert_array_equal, (y, updated, gradients), expected)
    else:  # XLA fuses the two programs differently.
        assert relative_difference((y, updated, gradients), expected) < 1e-6


@libraries
def test_evaluation_is_that_of_batch_norm(library: str) -> None:
    params, stats = start()
    stats["mean"] += 0.3
    make = LIBRARIES[library]
    y, after = make(train=False, **FIELDS)(params, stats, *batch(0))
    assert after["steps"] == 0
    del stats["steps"]
    expected, _ = make("BatchNorm", train=False, epsilon=1e-3)(params, stats, *batch(0))
    np.testing.assert_array_equal(y, expected)


@libraries
def test_without_update(library: str) -> None:
    params, stats = start()
    stats["steps"] += 5
    make = LIBRARIES[library]
    y, after = make(update_batch_stats=False, **FIELDS)(params, stats, *batch(0))
    jax.tree.map(np.testing.assert_array_equal, after, stats)
    np.testing.assert_array_equal(y, make(**FIELDS)(params, stats, *batch(0))[0])


@libraries
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_dtypes(library: str, dtype: str) -> None:
    """The statistics stay in float32, and y is rounded once."""
    params, stats = start()
    stats["steps"] += 5
    x, residual = batch(1, dtype=jnp.dtype(dtype))
    fields: dict[str, Any] = FIELDS | {"activation": "relu"}
    y, _ = LIBRARIES[library](dtype=x.dtype, **fields)(params, stats, x, residual)
    exact, _ = paper(**fields)(*as_float64((params, stats, x, residual)))
    assert y.dtype == x.dtype
    rounding = float(jnp.finfo(x.dtype).eps)
    # In float64, everything is computed in it, the limits of the fields included.
    assert np.abs(np.asarray(y, np.float64) - exact).max() < rounding * 4 + 1e-13 + (
        0 if dtype == "float64" else 1e-6
    )


@pytest.mark.parametrize("shape", [(16, CHANNELS, 3), (CHANNELS, 7), (16, CHANNELS)], ids=str)
def test_other_axes(shape: tuple[int, ...]) -> None:
    axis = shape.index(CHANNELS)
    params, stats = start()
    stats["steps"] += 5
    x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    y, updated = linen(axis=axis, **FIELDS)(params, stats, x)
    expected = linen(**FIELDS)(params, stats, np.moveaxis(x, axis, -1))
    assert relative_difference((np.moveaxis(y, axis, -1), updated), expected) < 1e-6


def test_several_feature_axes() -> None:
    """They are the same channels as where a reshape makes one axis of them."""
    fields: dict[str, Any] = FIELDS | {"warm_up_steps": 0}
    random = np.random.default_rng(0)
    x = random.normal(size=(64, 3, 4)).astype(np.float32)
    shape = (3, 4)
    params = {name: random.uniform(0.5, 2, shape).astype(np.float32) for name in ("scale", "bias")}
    stats = {
        "mean": random.normal(size=shape).astype(np.float32),
        "var": random.uniform(0.5, 2, shape).astype(np.float32),
        "steps": np.zeros((), np.int32),
    }
    y, updated = linen(**fields, axis=(1, 2))(params, stats, x)
    flat = jax.tree.map(lambda leaf: leaf.reshape(-1) if leaf.ndim else leaf, (params, stats))
    expected, expected_stats = linen(**fields)(*flat, x.reshape(64, 12))
    np.testing.assert_allclose(y.reshape(64, 12), expected, rtol=1e-5, atol=1e-5)
    for name in ("mean", "var"):
        assert updated[name].shape == shape
        np.testing.assert_allclose(updated[name].reshape(-1), expected_stats[name], rtol=1e-5)


def later() -> tuple[Any, Any]:
    """Variables after the warm-up."""
    params, stats = start()
    stats["steps"] += 5
    return params, stats


@pytest.mark.parametrize("num_groups", [1, 16])
@pytest.mark.parametrize("kind", ["auto", "explicit"])
def test_under_jit_over_a_mesh(kind: MeshKind, num_groups: int) -> None:
    """One small all-reduce each way, as for BatchNorm."""
    step = with_gradients(linen(activation="relu", num_groups=num_groups, **FIELDS))
    given, mesh = batch(0, (32, 3, CHANNELS)), make_mesh(kind, d=8)
    expected = jax.jit(step)(*later(), *given)
    variables = jax.tree.map(lambda a: put(a, mesh, P()), later())
    placed = [put(a, mesh, P("d")) for a in given]
    with use_mesh(mesh):
        assert relative_difference(jax.jit(step)(*variables, *placed), expected) < 5e-6
        found = collectives(step, *variables, *placed)
    assert {each.opcode for operation in found for each in operation} <= {"all-reduce"}
    if num_groups == 1:
        assert len(found) == 2


@libraries
def test_calls_are_those_of_two_passes_each_way(library: str) -> None:
    """No pass over x is made twice, and dx needs no pass of its own for the statistics."""
    function = with_gradients(LIBRARIES[library](activation="relu", implementation="ffi", **FIELDS))
    assert hlo_calls(function, *later(), *batch(0)) == {
        "jax_bnar_statistics_v1": 1,
        "jax_bnar_normalise_v1": 1,
        "jax_bnar_backward_v1": 1,
    }


@libraries
@pytest.mark.parametrize("check_vma", [True, False])
def test_axis_name_under_shard_map(library: str, check_vma: bool) -> None:
    make = functools.partial(LIBRARIES[library], activation="relu", **FIELDS)
    mapped: Any = jax.shard_map(
        make(axis_name="d"),
        mesh=make_mesh("auto", d=8),
        in_specs=(P(), P(), P("d"), P("d")),
        out_specs=(P("d"), P()),
        check_vma=check_vma,
    )
    actual = jax.jit(with_gradients(mapped))(*later(), *batch(0))
    assert relative_difference(actual, with_gradients(make())(*later(), *batch(0))) < 5e-6


def test_axis_name_under_vmap() -> None:
    """Statistics come back unmapped, as Flax's documentation maps a BatchNorm over examples."""
    make = functools.partial(linen, activation="relu", **FIELDS)
    mapped = jax.vmap(make(axis_name="b"), (None, None, 0, 0), (0, None), axis_name="b")
    actual = jax.jit(with_gradients(mapped))(*later(), *batch(0))
    assert relative_difference(actual, with_gradients(make())(*later(), *batch(0))) < 5e-6


def test_an_ensemble_under_vmap() -> None:
    """Several networks with variables of their own on one batch, as critics have."""
    step = with_gradients(linen(activation="relu", **FIELDS))
    params, stats = later()
    more = jax.tree.map(lambda a: np.stack([a, a + a.dtype.type(1)]), (params, stats))
    x, residual = batch(0)
    actual = jax.jit(jax.vmap(step, (0, 0, None, None)))(*more, x, residual)
    for i in range(2):
        own = jax.tree.map(lambda a, i=i: a[i], more)
        expected = step(*own, x, residual)
        assert relative_difference(jax.tree.map(lambda a, i=i: a[i], actual), expected) < 5e-6


def test_fuse_leaves_it_alone() -> None:
    """It is not evaluation with given statistics, though it runs the same pass over x."""

    def loss(params: Any, x: Any) -> Any:
        y, _ = linen(**FIELDS)(params, later()[1], x)
        return jnp.sin(jax.nn.relu(y)).sum()

    def named(params: Any, x: Any) -> Any:
        step = linen(axis_name="b", **FIELDS)
        mapped = jax.vmap(step, (None, None, 0), (0, None), axis_name="b")
        return jnp.sin(jax.nn.relu(mapped(params, later()[1], x)[0])).sum()

    params, x = later()[0], batch(0)[0]
    expected = jax.grad(loss, (0, 1))(params, x)
    for function in (loss, named):
        actual = jax.grad(jax_bnar.fuse(function), (0, 1))(params, x)
        assert relative_difference(actual, expected) < 5e-6


@libraries
@pytest.mark.parametrize(
    ("fields", "error", "words"),
    [
        ({"r_max": 0.5}, ValueError, "r_max must be at least 1, got 0.5"),
        ({"d_max": -1}, ValueError, "d_max must be at least 0, got -1"),
        ({"r_max": "three"}, TypeError, "r_max must be a number or a function"),
        ({"d_max": None}, TypeError, "d_max must be a number or a function"),
        ({"warm_up_steps": 1.5}, TypeError, "warm_up_steps must be an integer, got 1.5"),
        ({"warm_up_steps": True}, TypeError, "warm_up_steps must be an integer, got True"),
        ({"warm_up_steps": -1}, ValueError, "warm_up_steps must be at least 0, got -1"),
        ({"epsilon": 0.0}, ValueError, "epsilon"),
        ({"num_groups": 3}, ValueError, "num_groups"),
        ({"axis_name": "nowhere"}, NameError, "does not name a mapped axis"),
    ],
    ids=str,
)
def test_errors(library: str, fields: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        LIBRARIES[library](**FIELDS | fields)(*later(), batch(0)[0])


def test_masks_are_refused() -> None:
    x = batch(0)[0]
    mask = np.ones(x.shape, bool)
    params, stats = start()
    layer = flax_layers.BatchRenorm(use_running_average=False)
    with pytest.raises(NotImplementedError, match="BatchRenorm: mask is not supported"):
        layer.apply({"params": params, "batch_stats": stats}, x, mask=mask)
    with pytest.raises(NotImplementedError, match="BatchRenorm: mask is not supported"):
        nnx_layers.BatchRenorm(CHANNELS, rngs=nnx.Rngs(0))(x, mask=mask)


def test_linen_variables() -> None:
    """Those of BatchNorm, and steps; a checkpoint with limits, as CrossQ's, works too."""
    layer = flax_layers.BatchRenorm(warm_up_steps=0)
    x = batch(0)[0]
    for train in (True, False):
        variables = layer.init(jax.random.key(0), x, use_running_average=not train)
        assert jax.tree.map(jnp.shape, variables) == {
            "params": {"scale": (CHANNELS,), "bias": (CHANNELS,)},
            "batch_stats": {"mean": (CHANNELS,), "var": (CHANNELS,), "steps": ()},
        }
        assert variables["batch_stats"]["steps"] == 0
    apply = functools.partial(layer.apply, use_running_average=False, mutable=["batch_stats"])
    expected, updated = apply(variables, x)
    with_limits = {**variables["batch_stats"], "r_max": 3, "d_max": 5}
    y, kept = apply({**variables, "batch_stats": with_limits}, x)
    np.testing.assert_array_equal(y, expected)
    assert kept["batch_stats"].keys() >= updated["batch_stats"].keys()
    # Evaluation, and the begin of training, take the variables of a BatchNorm.
    without = {k: v for k, v in variables["batch_stats"].items() if k != "steps"}
    layer.apply({**variables, "batch_stats": without}, x, use_running_average=True)
    assert apply({**variables, "batch_stats": without}, x)[1]["batch_stats"]["steps"] == 1
    assert isinstance(layer, nn.BatchNorm)


def test_nnx_state() -> None:
    layer = nnx_layers.BatchRenorm(CHANNELS, rngs=nnx.Rngs(0))
    assert isinstance(layer.steps, nnx.BatchStat)
    layer.train()
    layer(batch(0)[0])
    assert layer.steps[...] == 1
    layer.eval()
    layer(batch(0)[0])
    assert layer.steps[...] == 1
    assert set(nnx.to_pure_dict(nnx.state(layer, nnx.Param))) == {"scale", "bias"}


@pytest.mark.parametrize("corrected", ["first", "shortcut", "both"])
def test_nnx_shortcut(corrected: str) -> None:
    """Beside another norm, it is what it is alone."""
    x, _ = batch(0)

    def norm(place: str, **fields: Any) -> Any:
        if corrected in (place, "both"):
            fields |= {"warm_up_steps": 0, "r_max": 1.5, "d_max": 0.5}
            return nnx_layers.BatchRenorm(CHANNELS, rngs=nnx.Rngs(0), **fields)
        return nnx_layers.BatchNorm(CHANNELS, rngs=nnx.Rngs(0), **fields)

    first, other = norm("first", activation="relu"), norm("shortcut")
    y = first(x, residual=nnx_layers.Shortcut(other, 3 * x))
    alone, other_alone = norm("first", activation="relu"), norm("shortcut")
    np.testing.assert_array_equal(y, alone(x, residual=other_alone(3 * x)))
    for ours, expected in ((first, alone), (other, other_alone)):
        jax.tree.map(np.testing.assert_array_equal, nnx.state(ours), nnx.state(expected))
    with pytest.raises(NotImplementedError, match="BatchRenorm: mask is not supported"):
        first(x, residual=nnx_layers.Shortcut(other, x), mask=np.ones(x.shape, bool))


def test_as_the_norm_of_a_network() -> None:
    """A ResNet trains with it, and it folds like a BatchNorm."""
    net = flax_layers.ResNet(
        stage_sizes=(1, 1),
        num_classes=4,
        num_filters=4,
        stem="small",
        norm=flax_layers.BatchRenorm,
    )
    x = np.random.default_rng(0).normal(size=(4, 8, 8, 3)).astype(np.float32)
    variables = trained_looking(jax.eval_shape(lambda: net.init(jax.random.key(0), x, train=False)))
    variables["batch_stats"] = jax.tree.map(
        lambda a: jnp.asarray(5, a.dtype) if a.ndim == 0 else a, variables["batch_stats"]
    )
    apply = jax.jit(functools.partial(net.apply, train=True, mutable=["batch_stats"]))
    _, updated = apply(variables, x)
    steps = [a for a in jax.tree.leaves(updated) if a.ndim == 0]
    assert steps
    assert all(step == 6 for step in steps)
    folded, folded_variables = flax_layers.fold_batch_norms(net, variables)
    expected = jax.jit(functools.partial(net.apply, train=False))(variables, x)
    actual = jax.jit(functools.partial(folded.apply, train=False))(folded_variables, x)
    assert relative_difference(actual, expected) < 1e-4
