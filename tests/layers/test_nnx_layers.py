"""The NNX BatchNorm against `flax.nnx.BatchNorm`."""

import importlib.util
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax.nnx.nn import dtypes
from flax_tools import SHAPE, apply, as_flax_needs_it, assert_close, normal, tolerance
from nnx_tools import outcome, pure, run

from jax_bnar import flax_layers, nnx_layers
from jax_bnar.nnx_layers import BatchNorm

pytestmark = pytest.mark.quick


def make(kind: Any, num_features: int = 3, seed: int = 7, **fields: Any) -> Any:
    """A layer whose state differs from the initial one."""
    # NNX's fast variance is not accurate enough to compare with; ours has no such mode.
    layer = kind(num_features, use_fast_variance=False, rngs=nnx.Rngs(0), **fields)
    generator = np.random.default_rng(seed)
    for name in ("scale", "bias", "mean", "var"):
        variable = getattr(layer, name)
        if variable is not None:
            values = generator.uniform(0.5, 2.0, variable.shape)
            variable[...] = jnp.asarray(values, variable.dtype)
    return layer


FIELDS: dict[str, dict[str, Any]] = {
    "default": {},
    "momentum": {"momentum": 0.9, "epsilon": 1e-3},
    "no bias": {"use_bias": False},
    "no scale": {"use_scale": False},
    "neither": {"use_bias": False, "use_scale": False},
    "axis 1": {"axis": 1, "num_features": 4},
    "float32": {"dtype": jnp.float32},
    "bfloat16 parameters": {"param_dtype": jnp.bfloat16},
}


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, dtype) for name in FIELDS for dtype in ("bfloat16", "float32")),
        ("default", "float64"),
        ("default", "int32"),
    ],
)
def test_equals_nnx(name: str, train: bool, dtype: str) -> None:
    fields = FIELDS[name]
    x = normal(0, dtype=dtype)
    with as_flax_needs_it():
        plain = make(nnx.BatchNorm, use_running_average=not train, **fields)
        if dtype == "float64" and train:
            # NNX scatters float64 into its float32 statistics, and JAX warns about that.
            with pytest.warns(FutureWarning, match="scatter"):
                expected = outcome(plain, x)
        else:
            expected = outcome(plain, x)
    ours = outcome(make(BatchNorm, use_running_average=not train, **fields), x)
    # The statistics are float32 even for float64 values, and limit the accuracy.
    parameters = fields.get("param_dtype", jnp.float32)
    assert_close(ours, expected, tolerance(jnp.float32, parameters))


@pytest.mark.parametrize("train", [True, False])
def test_rounds_once_where_nnx_rounds_before_it_computes(train: bool) -> None:
    """With mean 3, standard deviation 0.1 and dtype=bfloat16, rounding first costs a third of the
    deviation.
    """
    generator = np.random.default_rng(0)
    x = jnp.asarray(3 + 0.1 * generator.normal(size=(512, 3)), jnp.float32)
    errors = []
    exact = None
    for kind, dtype in (
        (nnx.BatchNorm, None),
        (nnx.BatchNorm, "bfloat16"),
        (BatchNorm, "bfloat16"),
    ):
        layer = kind(
            3, dtype=dtype, use_running_average=not train, use_fast_variance=False, rngs=nnx.Rngs(0)
        )
        layer.mean[...] = jnp.full(3, 3.003, jnp.float32)
        layer.var[...] = jnp.full(3, 0.0101, jnp.float32)
        with as_flax_needs_it():
            y = np.asarray(run(layer, x), np.float64)
        exact = y if exact is None else exact
        errors.append(float(np.max(np.abs(y - exact))))
    half_an_ulp = float(np.max(np.abs(exact))) * 2.0**-8  # pyright: ignore
    assert errors[2] <= half_an_ulp < 0.05 < errors[1]


def test_promote_dtype_of_ones_own_is_used() -> None:
    """If NNX's own function is passed under another name, rounding is as in NNX."""
    x = normal(0)

    def promote(arrays: Any, *, dtype: Any) -> Any:
        return dtypes.promote_dtype(arrays, dtype=dtype)

    fields = {"dtype": jnp.bfloat16, "promote_dtype": promote, "use_running_average": True}
    with as_flax_needs_it():
        expected = run(make(nnx.BatchNorm, **fields), x)
    layer = make(BatchNorm, **fields)
    assert_close(run(layer, x), expected, tolerance(jnp.bfloat16))
    layer.promote_dtype = lambda arrays, dtype: tuple(a.astype(jnp.float64) for a in arrays)
    layer.dtype = None
    assert run(layer, x).dtype == jnp.float64


@pytest.mark.parametrize("train", [True, False])
def test_gradients_equal_nnx(train: bool) -> None:
    """Gradients of parameters and x; none flow through the running statistics."""
    x, weight = normal(0), normal(1)

    @nnx.jit
    def gradients(layer: Any, x: jax.Array) -> Any:
        def loss(layer: Any, x: jax.Array) -> jax.Array:
            y = layer(x)
            return (y * weight).sum() + jnp.square(layer.mean[...]).sum() + layer.var[...].sum()

        return nnx.grad(loss, argnums=(0, 1))(layer, x)

    def both(kind: Any) -> Any:
        of_layer, of_x = gradients(make(kind, use_running_average=not train), x)
        return nnx.to_pure_dict(of_layer), of_x

    with as_flax_needs_it():
        expected = both(nnx.BatchNorm)
    assert_close(both(BatchNorm), expected, 8 * tolerance(x.dtype))


def test_modes() -> None:
    x = normal(0)
    layer = make(BatchNorm)
    model = nnx.Sequential(layer, nnx.Dropout(0.0))
    before = pure(layer)

    model.eval()
    assert layer.use_running_average
    evaluated = run(layer, x)
    assert_close(pure(layer), before, 0)

    model.train()
    view = nnx.view(model, use_running_average=False, update_batch_stats=False)
    y = view(x)
    assert_close(pure(layer), before, 0)
    assert layer.update_batch_stats
    assert not np.array_equal(y, evaluated)

    model.set_attributes(BatchNorm, update_batch_stats=False)
    np.testing.assert_array_equal(layer(x), layer(x, use_running_average=False))
    assert_close(pure(layer), before, 0)
    np.testing.assert_array_equal(layer(x, use_running_average=True), evaluated)

    model.set_attributes(BatchNorm, update_batch_stats=True)
    run(layer, x)
    assert np.all(pure(layer)["mean"] != before["mean"])
    for name in ("scale", "bias"):
        np.testing.assert_array_equal(pure(layer)[name], before[name])
    for name in ("use_running_average", "update_batch_stats"):
        assert name in nnx.view_info(model)


@pytest.mark.parametrize("train", [True, False])
def test_residual_and_relu(train: bool) -> None:
    x, residual = normal(0), -normal(1)
    fused = make(BatchNorm, activation="relu", save="mask", use_running_average=not train)
    with as_flax_needs_it():
        plain = make(nnx.BatchNorm, use_running_average=not train)
        expected = nnx.relu(run(plain, x) + residual)
    y = run(fused, x, residual=residual)
    assert 0.2 < float((y > 0).mean()) < 0.8
    assert_close((y, pure(fused)), (expected, pure(plain)), tolerance(x.dtype))
    np.testing.assert_array_equal(
        run(make(BatchNorm), x, residual=residual), run(make(BatchNorm), x) + residual
    )


def test_what_is_new_equals_linen() -> None:
    """Compares ghost batch, unbiased variance and mask with Linen, where they are tested."""
    x = normal(0)
    mask = normal(1, (6, 1, 1, 1)) > 2
    fields: dict[str, Any] = {"num_groups": 3, "unbiased_running_var": True, "momentum": 0.5}
    layer = make(BatchNorm, **fields)
    state = pure(layer)
    variables = {
        "params": {name: state[name] for name in ("scale", "bias")},
        "batch_stats": {name: state[name] for name in ("mean", "var")},
    }
    linen = flax_layers.BatchNorm(use_running_average=False, **fields)
    y, updated = apply(linen, variables, x, mask=mask, mutable=["batch_stats"])
    actual, state = outcome(layer, x, mask=mask)
    np.testing.assert_allclose(actual, y, rtol=1e-6, atol=1e-6)
    for name in ("mean", "var"):
        np.testing.assert_allclose(state[name], updated["batch_stats"][name], rtol=1e-6)


def test_axis_name() -> None:
    x = normal(0)
    layer = make(BatchNorm, update_batch_stats=False)
    whole = layer(x)
    layer.axis_name = "parts"
    parts = jax.vmap(lambda x: layer(x), axis_name="parts")(x.reshape(3, 2, *SHAPE[1:]))
    np.testing.assert_allclose(parts.reshape(SHAPE), whole, rtol=1e-5, atol=1e-5)


def test_several_feature_axes() -> None:
    x = normal(0)
    layer = BatchNorm(12, axis=(1, 3), rngs=nnx.Rngs(0))
    out = np.asarray(run(layer, x), np.float64)
    np.testing.assert_allclose(out.mean(axis=(0, 2)), 0, atol=1e-5)
    np.testing.assert_allclose(out.var(axis=(0, 2)), 1, atol=1e-3)


def test_state_and_metadata_are_those_of_nnx() -> None:
    fields = {
        "scale_metadata": {"out_sharding": ("model",), "note": "last"},
        "bias_init": nnx.with_partitioning(nnx.initializers.ones_init(), ("model",)),
    }
    mesh = jax.make_mesh((2,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))
    x = normal(0, (6, 4))
    ours: Any
    abstract: Any
    with jax.set_mesh(mesh):
        plain, ours = (kind(4, rngs=nnx.Rngs(0), **fields) for kind in (nnx.BatchNorm, BatchNorm))
        abstract = nnx.eval_shape(lambda: BatchNorm(4, rngs=nnx.Rngs(0), **fields))
        run(ours, x)
    expected = nnx.to_flat_state(nnx.state(plain))
    for layer in (ours, abstract):
        state = nnx.to_flat_state(nnx.state(layer))
        assert [path for path, _ in state] == [path for path, _ in expected]
        for (_, variable), (_, like) in zip(state, expected, strict=True):
            assert type(variable) is type(like)
            assert variable.get_metadata() == like.get_metadata()
            assert (variable.shape, variable.dtype) == (like.shape, like.dtype)
        assert isinstance(layer, nnx.BatchNorm)
        scale: Any = layer.scale
        assert scale.note == "last"
    assert ours.scale[...].sharding.spec == jax.P("model")


def test_split_merge_and_plain_jit() -> None:
    x = normal(0)
    layer = make(BatchNorm, activation="relu")
    graph, params, statistics = nnx.split(layer, nnx.Param, nnx.BatchStat)

    @jax.jit
    def step(params: Any, statistics: Any, x: jax.Array) -> Any:
        layer = nnx.merge(graph, params, statistics)
        return layer(x), nnx.state(layer, nnx.BatchStat)

    y, updated = step(params, statistics, x)
    expected = outcome(layer, x)
    merged = nnx.merge(graph, params, updated)
    assert_close((y, pure(merged)), expected, 0)


def test_state_of_nnx_loads_and_back() -> None:
    x = normal(0)
    with as_flax_needs_it():
        plain = make(nnx.BatchNorm)
        expected = outcome(plain, x)
        ours = make(BatchNorm, seed=1)
        nnx.update(ours, nnx.state(make(nnx.BatchNorm)))
        assert_close(outcome(ours, x), expected, tolerance(x.dtype))
        nnx.update(plain, nnx.state(ours))
    assert_close(pure(plain), pure(ours), 0)


@pytest.mark.parametrize(
    ("fields", "call", "error", "words"),
    [
        ({"use_running_average": None}, {}, ValueError, "use_running_average is None"),
        ({"num_features": 4}, {}, ValueError, "num_features=4"),
        ({"axis": 4}, {}, ValueError, "axis must lie in"),
        ({"epsilon": 0.0}, {}, ValueError, "epsilon"),
        ({"momentum": -0.1}, {}, ValueError, "momentum is the weight .* from 0 to 1, got -0.1"),
        ({"num_groups": 4}, {}, ValueError, "num_groups"),
        ({"dtype": jnp.complex64}, {}, TypeError, r"the result has the complex dtype complex64"),
        ({}, {"residual": np.zeros(3, np.float32)}, ValueError, "residual must have the shape"),
        ({}, {"residual": nnx.relu}, TypeError, r"pass its result, or .* Shortcut\(norm, x\)"),
        (
            {},
            {"use_running_average": np.zeros((2, 3), np.float32)},
            TypeError,
            r"must be True or False, got an array of shape \(2, 3\). A residual is passed by",
        ),
    ],
    ids=[
        "mode",
        "features",
        "axis",
        "epsilon",
        "momentum",
        "groups",
        "complex",
        "shape",
        "a function for the residual",
        "a residual for the mode",
    ],
)
def test_errors(
    fields: dict[str, Any], call: dict[str, Any], error: type[Exception], words: str
) -> None:
    layer = make(BatchNorm, **fields)
    with pytest.raises(error, match=words):
        layer(normal(0), **call)


@pytest.mark.parametrize(
    ("option", "value", "error", "words"),
    [
        ("num_groups", 0, ValueError, "num_groups must be at least 1"),
        ("save", "x", ValueError, "save must be 'y' or 'mask'"),
        ("implementation", "tpu", ValueError, r"implementation must be None, .* got 'tpu'"),
        ("unbiased_running_var", "no", TypeError, "unbiased_running_var must be True or F"),
        ("update_batch_stats", None, TypeError, "update_batch_stats must be True or False"),
    ],
)
def test_options_are_refused_where_they_are_written(
    option: str, value: Any, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        make(BatchNorm, **{option: value})
    layer = make(BatchNorm)
    setattr(layer, option, value)
    with pytest.raises(error, match=words):
        layer(normal(0))


def test_complex_input_is_refused() -> None:
    words = r"x has the complex dtype complex64.*float16, bfloat16, float32, float64.*flax\.nnx"
    with pytest.raises(TypeError, match=words):
        make(BatchNorm)(normal(0).astype(jnp.complex64))


def test_without_flax_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flax", None)
    assert nnx_layers.__file__ is not None
    spec = importlib.util.spec_from_file_location("nnx_layers_again", nnx_layers.__file__)
    assert spec is not None
    assert spec.loader is not None
    with pytest.raises(ImportError, match="pip install flax"):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


def test_float64_without_x64_is_float32_as_in_nnx() -> None:
    with as_flax_needs_it(), jax.enable_x64(False):
        x = jnp.asarray(np.asarray(normal(0), np.float32))
        layer = BatchNorm(x.shape[-1], dtype=float, rngs=nnx.Rngs(0))
        assert layer(x).dtype == jnp.float32
        layer.eval()
        assert layer(x[:0]).shape == (0, *x.shape[1:])
