"""The Linen BatchNorm against `flax.linen.BatchNorm`."""

import dataclasses
import functools
import importlib.util
import inspect
import sys
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import errors
from flax_tools import (
    SHAPE,
    apply,
    as_flax_needs_it,
    assert_close,
    evaluated,
    init,
    normal,
    some_variables,
    tolerance,
    trained,
)

from jax_bnar import flax_layers
from jax_bnar._base.config import Save
from jax_bnar.flax_layers import BatchNorm

pytestmark = pytest.mark.quick

FROZEN = functools.partial(BatchNorm, update_batch_stats=False)

_FIELDS = [
    {},
    {"momentum": 0.9, "epsilon": 1e-3},
    {"use_bias": False},
    {"use_scale": False},
    {"use_bias": False, "use_scale": False},
    {"axis": 1},
    {"axis": (1, -1)},
    {"axis": (3, 1)},
    {"momentum": 1.0},
    {"axis": (-2, -1)},
    {"axis": (0, 1, 2, 3)},
    {"axis": ()},
    {"dtype": jnp.bfloat16},
    {"dtype": jnp.float16, "param_dtype": jnp.float16},
    {"dtype": jnp.float32},
    {"dtype": jnp.float64},
    {"param_dtype": jnp.bfloat16},
    {"param_dtype": jnp.float64},
    {"param_dtype": jnp.bfloat16, "force_float32_reductions": False},
    {"bias_init": nn.initializers.normal(), "scale_init": nn.initializers.uniform()},
]
# Flax's fast variance is not accurate enough to compare with; ours has no such mode.
FIELDS = [{"use_fast_variance": False, **f} for f in _FIELDS]
NOT_IN_FLOAT32 = {"use_fast_variance": False, "param_dtype": jnp.bfloat16}
NOT_IN_FLOAT32 |= {"force_float32_reductions": False}


def name(value: Any) -> str:
    """A test's id, which must be the same in every process, unlike `str` of a function."""
    if isinstance(value, dict):
        return " ".join(f"{k}={name(v)}" for k, v in value.items())
    return getattr(value, "__name__", str(value))


grid = pytest.mark.parametrize(
    ("fields", "dtype"),
    [
        *((fields, dtype) for fields in FIELDS for dtype in (jnp.bfloat16, jnp.float32)),
        *(({"use_fast_variance": False}, d) for d in (jnp.float16, jnp.float64, jnp.int32)),
        *((NOT_IN_FLOAT32, d) for d in (jnp.float16, jnp.float64, jnp.int32)),
    ],
    ids=name,
)


def coarsest(fields: dict[str, Any], dtype: Any) -> float:
    if not fields.get("force_float32_reductions", True):
        # Flax then computes in the dtype of x and the parameters; we still use float32.
        return 16 * tolerance(dtype, fields["param_dtype"])
    return tolerance(dtype, fields.get("dtype", dtype), fields.get("param_dtype", dtype))


def test_fields_and_call_begin_as_those_of_flax() -> None:
    """Names, order and defaults agree, so every call of Flax's layer means the same with ours."""

    def fields(layer: Any) -> list[Any]:
        given = [f for f in dataclasses.fields(layer) if f.name not in ("parent", "name")]
        return [(f.name, f.default) for f in given]

    def parameters(layer: Any) -> list[Any]:
        given = inspect.signature(layer.__call__).parameters.values()
        return [(p.name, p.kind, p.default) for p in given]

    flax = fields(nn.BatchNorm)
    assert fields(BatchNorm)[: len(flax)] == flax
    flax = parameters(nn.BatchNorm)
    assert parameters(BatchNorm)[: len(flax)] == flax


@pytest.mark.parametrize("fields", FIELDS, ids=name)
@pytest.mark.parametrize("train", [True, False])
def test_init_equals_flax(fields: dict[str, Any], train: bool) -> None:
    x = normal(0)
    ours = init(BatchNorm(**fields), x, use_running_average=not train)
    with as_flax_needs_it():
        flax = init(nn.BatchNorm(**fields), x, use_running_average=not train)
    assert_close(ours, flax, 0)
    assert ours["batch_stats"]["mean"].max() == 0
    assert ours["batch_stats"]["var"].min() == 1


@grid
def test_training_equals_flax(fields: dict[str, Any], dtype: Any) -> None:
    x = normal(0, dtype=dtype)
    layer = BatchNorm(**fields)
    variables = some_variables(layer, x)
    with as_flax_needs_it():
        flax = trained(nn.BatchNorm(**fields), variables, x)
    assert_close(trained(layer, variables, x), flax, coarsest(fields, dtype))


@grid
def test_evaluation_equals_flax(fields: dict[str, Any], dtype: Any) -> None:
    x = normal(0, dtype=dtype)
    layer = BatchNorm(**fields)
    variables = some_variables(layer, x)
    y = evaluated(layer, variables, x)
    with as_flax_needs_it():
        flax = evaluated(nn.BatchNorm(**fields), variables, x)
    assert_close(y, flax, coarsest(fields, dtype))


@pytest.mark.parametrize("forced", [True, False])
@pytest.mark.parametrize(("stored", "wanted"), [("bfloat16", "float32"), ("float32", "bfloat16")])
def test_variables_of_another_dtype(stored: str, wanted: str, forced: bool) -> None:
    """Such as a checkpoint in float32, read by a network of bfloat16."""
    x = normal(0, dtype="bfloat16")
    variables = some_variables(BatchNorm(), x)
    variables = jax.tree.map(lambda leaf: leaf.astype(stored), variables)
    fields: dict[str, Any] = {"param_dtype": wanted, "force_float32_reductions": forced}
    wide_x, wide = jax.tree.map(lambda leaf: leaf.astype("float64"), (x, variables))
    for run in (trained, evaluated):
        result = run(BatchNorm(**fields), variables, x)
        with as_flax_needs_it():
            flax = run(nn.BatchNorm(use_fast_variance=False, **fields), variables, x)
            exact = run(nn.BatchNorm(use_fast_variance=False), wide, wide_x)
        assert_close(result, flax, 16 * tolerance("bfloat16"))
        # Flax itself loses digits where it computes in 16 bits.
        as_wide = jax.tree.map(lambda own, leaf: own.astype(leaf.dtype), result, exact)
        assert_close(as_wide, exact, 2 * tolerance("bfloat16"))


@pytest.mark.parametrize("shape", [(3,), (5, 3), (4, 5, 3), (2, 2, 4, 5, 3)], ids=str)
def test_any_rank_equals_flax(shape: tuple[int, ...]) -> None:
    x = normal(0, shape)
    layer = BatchNorm()
    variables = some_variables(layer, x)
    with as_flax_needs_it():
        flax = trained(nn.BatchNorm(use_fast_variance=False), variables, x)
    assert_close(trained(layer, variables, x), flax, tolerance(x.dtype))


@pytest.mark.parametrize(
    ("fields", "dtype"),
    [
        ({}, jnp.bfloat16),
        ({}, jnp.float32),
        ({}, jnp.float64),
        ({"axis": 1}, jnp.float32),
        ({"axis": (1, 3)}, jnp.float32),
        ({"dtype": jnp.bfloat16}, jnp.bfloat16),
        ({"dtype": jnp.bfloat16}, jnp.float32),
    ],
    ids=str,
)
@pytest.mark.parametrize("train", [True, False])
def test_gradients_equal_flax(fields: dict[str, Any], dtype: Any, train: bool) -> None:
    """Gradients flow through y and through the updated running statistics."""
    x, weight = normal(0, dtype=dtype), normal(1, dtype=jnp.float64)

    def gradient(layer: nn.Module, variables: Any) -> Any:
        def loss(params: Any, x: jax.Array) -> jax.Array:
            y, updated = apply(
                layer,
                {**variables, "params": params},
                x,
                use_running_average=not train,
                mutable=["batch_stats"],
            )
            statistics = updated["batch_stats"]
            total = (y.astype(jnp.float64) * weight).sum()
            for name in ("mean", "var"):
                total = total + jnp.square(statistics[name].astype(jnp.float64)).sum()
            return total

        return jax.jit(jax.grad(loss, argnums=(0, 1)))(variables["params"], x)

    layer = BatchNorm(**fields)
    variables = some_variables(layer, x)
    with as_flax_needs_it():
        flax = gradient(nn.BatchNorm(use_fast_variance=False, **fields), variables)
    assert_close(gradient(layer, variables), flax, 8 * coarsest(fields, dtype))


def test_batch_statistics_without_update() -> None:
    x, layer = normal(0), BatchNorm(use_running_average=False)
    frozen = layer.clone(update_batch_stats=False)
    variables = some_variables(BatchNorm(), x)
    y, updated = apply(layer, variables, x, mutable=["batch_stats"])
    assert not np.array_equal(updated["batch_stats"]["mean"], variables["batch_stats"]["mean"])
    np.testing.assert_array_equal(apply(frozen, variables, x), y)
    y, same = apply(frozen, variables, x, mutable=["batch_stats"])
    assert_close(same["batch_stats"], variables["batch_stats"], 0)


@pytest.mark.parametrize("kind", [nn.BatchNorm, BatchNorm])
@pytest.mark.parametrize("mutable", [False, ["intermediates"]])
def test_training_needs_mutable_statistics_as_in_flax(kind: Any, mutable: Any) -> None:
    x = normal(0)
    variables = some_variables(BatchNorm(), x)
    layer = kind(use_running_average=False)
    words = 'Cannot update variable "mean" in "/" because collection "batch_stats" is immutable'
    with as_flax_needs_it(), pytest.raises(errors.ModifyScopeVariableError, match=words):
        layer.apply(variables, x, mutable=mutable)


def test_evaluation_leaves_running_statistics_alone() -> None:
    x, layer = normal(0), BatchNorm(use_running_average=True)
    variables = some_variables(BatchNorm(), x)
    _, updated = apply(layer, variables, x, mutable=["batch_stats"])
    assert_close(updated["batch_stats"], variables["batch_stats"], 0)


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize(
    ("dtype", "residual_dtype"),
    [(jnp.bfloat16, jnp.bfloat16), (jnp.bfloat16, jnp.float32), (jnp.float32, jnp.bfloat16)],
)
@pytest.mark.parametrize(("axis", "save"), [(-1, "y"), ((1, 3), "mask")])
def test_residual_and_relu(
    dtype: Any, residual_dtype: Any, axis: Any, save: Save, train: bool
) -> None:
    x, residual = normal(0, dtype=dtype), -normal(1, dtype=residual_dtype)
    fused = FROZEN(use_running_average=not train, axis=axis, activation="relu", save=save)
    plain = nn.BatchNorm(use_running_average=not train, axis=axis, use_fast_variance=False)
    variables = some_variables(BatchNorm(axis=axis), x)

    def with_fused(variables: Any, x: jax.Array, residual: jax.Array) -> jax.Array:
        return apply(fused, variables, x, residual=residual)

    def with_plain(variables: Any, x: jax.Array, residual: jax.Array) -> jax.Array:
        y, _ = apply(plain, variables, x, mutable=["batch_stats"])
        return nn.relu(y + residual)

    y = with_fused(variables, x, residual)
    assert 0.2 < float((y > 0).mean()) < 0.8
    with as_flax_needs_it():
        expected = with_plain(variables, x, residual)
    assert_close(y, expected, tolerance(jnp.float32))

    def gradients(function: Callable[..., jax.Array]) -> Any:
        return jax.jit(jax.grad(lambda *a: jnp.square(function(*a)).sum(), argnums=(0, 1, 2)))(
            variables, x, residual
        )

    with as_flax_needs_it():
        expected = gradients(with_plain)
    assert_close(gradients(with_fused), expected, 8 * tolerance(dtype, residual_dtype))


@pytest.mark.parametrize("enable_x64", [False, True])
def test_the_type_float_is_weak_for_statistics(enable_x64: bool) -> None:
    """As Flax's promotion takes it: the running statistics remain float32."""
    x = normal(0)
    with jax.enable_x64(enable_x64):
        for kind in (nn.BatchNorm, BatchNorm):
            layer = kind(use_running_average=False, dtype=float)
            _, updated = layer.apply(init(layer, x), x, mutable=["batch_stats"])
            assert {leaf.dtype for leaf in jax.tree.leaves(updated)} == {np.dtype(np.float32)}


def test_init_takes_an_empty_batch() -> None:
    empty = jnp.zeros((0, *SHAPE[1:]), jnp.float32)
    with as_flax_needs_it():
        kinds = (BatchNorm, nn.BatchNorm)
        ours, plain = (init(kind(use_running_average=False), empty) for kind in kinds)
    assert_close(ours, plain, 0)
    with pytest.raises(ValueError, match="must not be empty"):
        BatchNorm(use_running_average=False).apply(ours, empty, mutable=["batch_stats"])


def test_residual_decides_the_dtype_like_any_operand() -> None:
    x = normal(0, dtype=jnp.bfloat16)
    layer = FROZEN(use_running_average=False, param_dtype=jnp.bfloat16, activation="relu")
    variables = some_variables(BatchNorm(param_dtype=jnp.bfloat16), x)
    assert apply(layer, variables, x, residual=x).dtype == jnp.bfloat16
    assert apply(layer, variables, x, residual=x.astype(jnp.float32)).dtype == jnp.float32
    narrow = layer.clone(dtype=jnp.bfloat16)
    assert apply(narrow, variables, x, residual=x.astype(jnp.float32)).dtype == jnp.bfloat16


@pytest.mark.parametrize("train", [True, False])
def test_residual_without_activation(train: bool) -> None:
    x, residual = normal(0), normal(1)
    layer = FROZEN(use_running_average=not train)
    variables = some_variables(BatchNorm(), x)
    np.testing.assert_array_equal(
        apply(layer, variables, x, residual=residual), apply(layer, variables, x) + residual
    )


@pytest.mark.parametrize("batch", [1, 2, 6])
def test_unbiased_running_var(batch: int) -> None:
    x = normal(0, (batch, 3))
    variables = some_variables(BatchNorm(), x)
    y, biased = trained(BatchNorm(momentum=0.0), variables, x)
    y_unbiased, unbiased = trained(BatchNorm(momentum=0.0, unbiased_running_var=True), variables, x)
    np.testing.assert_array_equal(y_unbiased, y)
    np.testing.assert_array_equal(unbiased["batch_stats"]["mean"], biased["batch_stats"]["mean"])
    expected = np.var(np.asarray(x, np.float64), axis=0, ddof=1 if batch > 1 else 0)
    np.testing.assert_allclose(unbiased["batch_stats"]["var"], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("fields", "call", "error", "words"),
    [
        ({}, {}, ValueError, "use_running_average"),
        (
            {"use_running_average": True},
            {"use_running_average": True},
            ValueError,
            "use_running_average",
        ),
        ({"axis": 4}, {"use_running_average": False}, ValueError, "axis must lie in"),
        ({"axis": 1.5}, {"use_running_average": False}, TypeError, "axis must be an integer"),
        ({"axis": True}, {"use_running_average": False}, TypeError, "axis must be an integer"),
        ({"momentum": 99}, {"use_running_average": False}, ValueError, "momentum .* from 0 to 1"),
        ({"momentum": "0.9"}, {"use_running_average": True}, TypeError, "momentum must be a numb"),
        ({"epsilon": 0.0}, {"use_running_average": False}, ValueError, "epsilon"),
        ({"epsilon": -1.0}, {"use_running_average": False, "mask": True}, ValueError, "epsilon"),
        ({"num_groups": 4}, {"use_running_average": False}, ValueError, "num_groups"),
        ({"num_groups": 4}, {"use_running_average": False, "mask": True}, ValueError, "num_groups"),
        ({"save": "x", "activation": "relu"}, {"use_running_average": False}, ValueError, "save"),
        ({"implementation": "tpu"}, {"use_running_average": False}, ValueError, "implementation"),
        ({}, {"use_running_average": False, "mask": np.ones(2)}, ValueError, "mask must broadcast"),
        (
            {"axis_index_groups": [[0], [1]]},
            {"use_running_average": False},
            ValueError,
            "axis_name is None",
        ),
        ({"dtype": jnp.complex64}, {"use_running_average": False}, TypeError, "the result has the"),
        ({"dtype": jnp.int32}, {"use_running_average": False}, ValueError, "inexact"),
        (
            {},
            {"use_running_average": False, "residual": np.zeros((6, 3), np.float32)},
            ValueError,
            "residual must have the shape of x",
        ),
        ({"use_running_average": 8}, {}, TypeError, "must be True or False, got 8"),
        ({}, {"use_running_average": np.int32(8)}, TypeError, r"must be True or False, got .*8"),
        (
            {"unbiased_running_var": "no"},
            {"use_running_average": False},
            TypeError,
            "unbiased_running_var must be True or",
        ),
        (
            {"update_batch_stats": "no"},
            {"use_running_average": False},
            TypeError,
            "update_batch_stats must be True or F",
        ),
        (
            {},
            {"use_running_average": np.zeros(1, np.float32)},
            TypeError,
            "A residual is passed by keyword",
        ),
        (
            {"use_running_average": False},
            {"use_running_average": np.zeros(1, np.float32)},
            TypeError,
            "A residual is passed by keyword",
        ),
    ],
    ids=str,
)
def test_errors(
    fields: dict[str, Any], call: dict[str, Any], error: type[Exception], words: str
) -> None:
    x = normal(0)
    variables = some_variables(BatchNorm(), x)
    with pytest.raises(error, match=words):
        apply(BatchNorm(**fields), variables, x, **call)


def test_complex_input_is_refused() -> None:
    x = normal(0).astype(jnp.complex64)
    words = r"x has the complex dtype complex64.*float16, bfloat16, float32, float64.*flax\.linen"
    with pytest.raises(TypeError, match=words):
        init(BatchNorm(use_running_average=False), x)


def test_missing_collection_is_an_error_as_in_flax() -> None:
    x = normal(0)
    params = {"params": some_variables(BatchNorm(), x)["params"]}
    for layer in (nn.BatchNorm(), BatchNorm()):
        with pytest.raises(errors.ScopeCollectionNotFound):
            apply(layer, params, x, use_running_average=True)


def test_without_flax_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flax", None)
    assert flax_layers.__file__ is not None
    spec = importlib.util.spec_from_file_location("flax_layers_again", flax_layers.__file__)
    assert spec is not None
    assert spec.loader is not None
    with pytest.raises(ImportError, match="pip install flax"):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


@pytest.mark.parametrize("use_bias", [True, False])
@pytest.mark.parametrize("use_scale", [True, False])
def test_another_axis_than_that_of_the_variables(use_scale: bool, use_bias: bool) -> None:
    x = jnp.ones((2, 4, 4, 6), jnp.float32)
    layer = BatchNorm(use_running_average=True, use_scale=use_scale, use_bias=use_bias)
    variables = layer.init(jax.random.key(0), x)
    sentence = (
        r"x of shape \(2, 4, 4, 6\) has 4 features along axis 1, but the layer's \w+ was made"
        r" for 6. Pass the feature axis of x as axis"
    )
    with pytest.raises(ValueError, match=sentence):
        layer.clone(axis=1).apply(variables, x)
    with pytest.raises(ValueError, match=r"has 4x6 features along axis \(1, -1\)"):
        layer.clone(axis=(1, -1)).apply(variables, x)


def test_variables_in_boxes_have_the_shapes_of_their_values() -> None:
    boxed = nn.with_partitioning(nn.initializers.ones, (None,))
    layer = BatchNorm(use_running_average=True, scale_init=boxed)
    x = normal(0)
    variables: Any = layer.init(jax.random.key(0), x)
    assert isinstance(variables["params"]["scale"], nn.Partitioned)
    y: Any = layer.apply(variables, x)
    expected: Any = nn.BatchNorm(use_running_average=True).apply(nn.unbox(variables), x)
    np.testing.assert_allclose(y, expected, rtol=1e-6)


@pytest.mark.parametrize("shape", [(0, 3), (0, 4, 4, 3)], ids=str)
def test_evaluation_of_an_empty_batch_is_empty_as_in_flax(shape: tuple[int, ...]) -> None:
    variables = some_variables(BatchNorm(), normal(0))
    x = jnp.zeros(shape, jnp.bfloat16)
    with as_flax_needs_it():
        y, expected = (
            apply(kind(use_running_average=True), variables, x)
            for kind in (BatchNorm, nn.BatchNorm)
        )
    assert (y.shape, y.dtype) == (expected.shape, expected.dtype)
    activated = BatchNorm(use_running_average=True, activation="silu")
    assert apply(activated, variables, x, residual=x).shape == shape


def test_integer_parameters_are_taken_as_in_flax() -> None:
    def outcome(kind: Any, x: Any) -> Any:
        layer = kind(use_running_average=False, param_dtype=jnp.int32, use_fast_variance=False)
        y, variables = layer.init_with_output(jax.random.key(0), x)
        return y, layer.apply(variables, x, use_running_average=None, mutable="batch_stats")

    with as_flax_needs_it():
        x = normal(0)
        assert_close(outcome(BatchNorm, x), outcome(nn.BatchNorm, x), 64 * tolerance(x.dtype))


def test_float64_without_x64_is_float32_as_in_flax() -> None:
    with as_flax_needs_it(), jax.enable_x64(False):
        x = np.asarray(normal(0), np.float64)
        for kind in (BatchNorm, flax_layers.BatchRenorm):
            layer = kind(use_running_average=False, dtype=x.dtype, activation="silu")
            assert layer.init_with_output(jax.random.key(0), x)[0].dtype == jnp.float32
