"""The Equinox BatchNorm against `equinox.nn.BatchNorm`, under vmap as Equinox documents it."""

import functools
import importlib.util
import io
import sys
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax_tools import as_flax_needs_it, assert_close, normal, tolerance
from jax.sharding import PartitionSpec as P
from programs import hlo_calls, opcodes_of_size, ours, primitives
from sharding_tools import collectives, make_mesh, put

from jax_bnar import equinox_layers
from jax_bnar.equinox_layers import BatchNorm, Shortcut

pytestmark = pytest.mark.quick

BATCH = 6
SHAPE = (BATCH, 3, 4, 5)  # Equinox has channels first
modes = pytest.mark.parametrize("mode", ["batch", "ema"])


def make(kind: Any, mode: str, **fields: Any) -> tuple[Any, Any]:
    """A layer and its state after a batch, with parameters that differ from the initial ones."""
    fields = {"axis_name": "batch", "eps": 1e-3, "dtype": jnp.float32, "mode": mode} | fields

    class Model(eqx.Module):
        bn: Any

        def __call__(self, x: Any, state: Any, **call: Any) -> Any:
            return self.bn(x, state, **call)

    with as_flax_needs_it():
        model, state = eqx.nn.make_with_state(lambda: Model(kind(3, momentum=0.9, **fields)))()
    generator = np.random.default_rng(7)
    arrays, rest = eqx.partition((model, state), eqx.is_inexact_array)

    def value(leaf: Any) -> Any:
        return jnp.asarray(generator.uniform(0.5, 2.0, leaf.shape), leaf.dtype)

    return eqx.combine(jax.tree.map(value, arrays), rest)


def mapped(model: Any, x: Any, state: Any, residual: Any = None, **call: Any) -> Any:
    """The layer over a batch, with relu(. + residual) outside if the layer is Equinox's."""

    def one(x: Any, state: Any, residual: Any) -> Any:
        if isinstance(model.bn, BatchNorm):
            return model(x, state, residual=residual, **call)
        y, state = model(x, state, **call)
        return jax.nn.relu(y if residual is None else y + residual), state

    axes = (0, None, None if residual is None else 0)
    return jax.vmap(one, axes, (0, None), axis_name="batch")(x, state, residual)


def outcome(kind: Any, x: Any, residual: Any, mode: str, inference: bool, **fields: Any) -> Any:
    """Gradients of parameters, x, residual and averages, with y and the new state."""
    model, state = make(kind, mode, inference=inference, **fields)
    weight = normal(1, x.shape, x.dtype)

    @eqx.filter_jit
    def run(model: Any, state: Any, x: Any, residual: Any) -> Any:
        moving, fixed = eqx.partition((model, state, x, residual), eqx.is_inexact_array)

        def loss(moving: Any) -> Any:
            model, state, x, residual = eqx.combine(moving, fixed)
            y, state = mapped(model, x, state, residual)
            averages = [v for v in jax.tree.leaves(state) if eqx.is_inexact_array(v)]
            total = (y * weight).sum() + sum(jnp.square(v).sum() for v in averages)
            return total.astype(jnp.float32), (y, state)

        return jax.grad(loss, has_aux=True)(moving)

    gradients, (y, state) = run(model, state, x, residual)
    return [jax.tree.leaves(tree) for tree in (gradients, y, state)]


@modes
@pytest.mark.parametrize("inference", [False, True], ids=["training", "inference"])
@pytest.mark.parametrize("has_residual", [False, True], ids=["relu", "add-relu"])
@pytest.mark.parametrize("implementation", ["ffi", "xla"])
def test_equals_equinox(
    mode: str, inference: bool, has_residual: bool, implementation: Any
) -> None:
    """Values, gradients and the new state; float64 is the more exact run to compare with."""
    x = normal(0, SHAPE)
    residual = -normal(2, SHAPE) if has_residual else None
    call = (x, residual, mode, inference)
    actual = outcome(BatchNorm, *call, activation="relu", implementation=implementation)
    with as_flax_needs_it():
        expected = outcome(eqx.nn.BatchNorm, *call)
        x, residual = jax.tree.map(lambda a: a.astype(jnp.float64), (x, residual))
        exact = outcome(eqx.nn.BatchNorm, x, residual, mode, inference, dtype=jnp.float64)
    assert 0.1 < float((expected[1][0] > 0).mean()) < 1.0
    exact = jax.tree.map(lambda e, a: e.astype(a.dtype), exact, actual)
    assert_close(actual, exact, 32 * tolerance(jnp.float32))
    expected = jax.tree.map(lambda e, a: e.astype(a.dtype), expected, actual)
    assert_close(actual, expected, 64 * tolerance(jnp.float32))


@modes
@pytest.mark.parametrize(
    ("shape", "fields"),
    [
        ((BATCH, 3), {}),
        (SHAPE, {"channelwise_affine": False}),
        (SHAPE, {"dtype": jnp.bfloat16}),
        (SHAPE, {"axis_name": ["batch"]}),
    ],
    ids=["vector", "no affine", "bfloat16 parameters", "list of names"],
)
def test_options_equal_equinox(mode: str, shape: tuple[int, ...], fields: dict[str, Any]) -> None:
    x = normal(0, shape, fields.get("dtype", jnp.float32))
    axis_name = fields.get("axis_name", "batch")
    fields = {"mode": mode, "dtype": jnp.float32} | fields | {"axis_name": axis_name}

    def after_two_batches(kind: Any) -> Any:
        layer, state = eqx.nn.make_with_state(kind)(3, **fields)
        run = jax.vmap(layer, (0, None), (0, None), axis_name="batch")
        results = []
        for batch in (x, 2 * x):
            y, state = run(batch, state)
            results.append(y)
        evaluated = eqx.nn.inference_mode(layer)
        y, _ = jax.vmap(evaluated, (0, None), (0, None), axis_name="batch")(x, state)
        return [*results, y], jax.tree.leaves(state)

    with as_flax_needs_it():
        expected = after_two_batches(eqx.nn.BatchNorm)
    actual = after_two_batches(BatchNorm)
    expected = jax.tree.map(lambda e, a: e.astype(a.dtype), expected, actual)
    # Equinox rounds every step to bfloat16, and its errors add up.
    assert_close(actual, expected, 8 * tolerance(x.dtype))


def test_bfloat16_x_is_rounded_once() -> None:
    """Equinox rounds x - mean and the quotient to bfloat16 first."""
    wide = normal(0, SHAPE)
    x = wide.astype(jnp.bfloat16)
    layer, state = eqx.nn.make_with_state(BatchNorm)(3, "batch", mode="batch", dtype=jnp.bfloat16)
    y, _ = jax.vmap(layer, (0, None), (0, None), axis_name="batch")(x, state)
    x64 = np.asarray(x, np.float64)
    axes = (0, 2, 3)
    exact = (x64 - x64.mean(axes, keepdims=True)) / np.sqrt(x64.var(axes, keepdims=True) + 1e-5)
    assert y.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(y, np.float64), exact, rtol=2.0**-8, atol=1e-6)


@modes
def test_files_are_interchangeable(mode: str) -> None:
    """Paths and leaves of model and state, in both directions."""
    with as_flax_needs_it():
        plain, fused = make(eqx.nn.BatchNorm, mode), make(BatchNorm, mode, activation="relu")

    def named(tree: Any) -> dict[str, Any]:
        paths = jax.tree_util.tree_leaves_with_path(tree)
        return {jax.tree_util.keystr(path): leaf for path, leaf in paths}

    assert named(plain).keys() == named(fused).keys()
    assert jax.tree.structure(plain[1]) == jax.tree.structure(fused[1])
    for source, target in ((plain, fused), (fused, plain)):
        blank = jax.tree.map(lambda a: a * 0 if eqx.is_inexact_array(a) else a, target)
        file = io.BytesIO()
        eqx.tree_serialise_leaves(file, source)
        file.seek(0)
        loaded = eqx.tree_deserialise_leaves(file, blank)
        assert type(loaded[0].bn) is type(target[0].bn)
        for a, b in zip(jax.tree.leaves(loaded), jax.tree.leaves(source), strict=True):
            np.testing.assert_array_equal(a, b)


def loss_of(model: Any, state: Any) -> Callable[..., Any]:
    def loss(x: Any, residual: Any) -> Any:
        y, _ = mapped(model, x, state, residual)
        return jnp.square(y).sum()

    return loss


@pytest.mark.parametrize("save", ["y", "mask"])
def test_one_call_each_way_and_no_other_pass(save: Any) -> None:
    """In the jaxpr and in the compiled program, where nothing else makes arrays of full size."""
    shape = (16, 3, 8, 8)
    x, residual = normal(0, shape), normal(1, shape)
    model, state = make(BatchNorm, "batch", activation="relu", save=save)
    step = jax.grad(loss_of(model, state), (0, 1))
    assert ours(loss_of(model, state), x, residual) == {"forward": 1}
    assert ours(step, x, residual) == {"forward": 1, "backward": 1}

    def both(x: Any, residual: Any, dy: Any) -> Any:
        y, vjp = jax.vjp(lambda x, z: mapped(model, x, state, z)[0], x, residual)
        return y, vjp(dy)

    given = x, residual, normal(2, shape)
    assert hlo_calls(both, *given) == {"jax_bnar_forward_v1": 1, "jax_bnar_backward_v1": 1}
    moving = opcodes_of_size(x.size, both, *given)
    assert moving <= {"parameter", "bitcast", "custom-call", "get-tuple-element", "tuple"}


def test_ema_normalises_in_one_call() -> None:
    """The statistics are plain JAX, as no training operator normalises with the averages."""
    x, residual = normal(0, SHAPE), normal(1, SHAPE)
    model, state = make(BatchNorm, "ema", activation="relu", implementation="ffi")
    calls = ours(loss_of(model, state), x, residual)
    assert calls == {"normalise": 1}
    found = primitives(loss_of(model, state), x, residual)
    assert "max" not in found


def test_ema_has_the_digits_of_a_variance_far_from_zero() -> None:
    """The first batch is normalised with its own statistics, which begin the averages."""
    x = 1e4 + (normal(0, (512, 3)) - 3) / 2
    layer, state = eqx.nn.make_with_state(BatchNorm)(
        3, "batch", mode="ema", dtype=jnp.float32, channelwise_affine=False
    )
    y, _ = jax.vmap(layer, (0, None), (0, None), axis_name="batch")(x, state)
    np.testing.assert_allclose(y.std(axis=0), np.ones(3), rtol=1e-3)


@pytest.mark.parametrize(
    ("x_dtype", "dtype", "residual_dtype", "expected"),
    [
        ("bfloat16", "float32", "bfloat16", "float32"),
        ("bfloat16", "bfloat16", "float32", "float32"),
        ("bfloat16", "bfloat16", "bfloat16", "bfloat16"),
        ("int32", "float32", None, "float32"),
    ],
)
def test_the_result_has_the_promotion_of_the_dtypes(
    x_dtype: str, dtype: str, residual_dtype: str | None, expected: str
) -> None:
    x = normal(0, SHAPE, x_dtype)
    residual = None if residual_dtype is None else normal(1, SHAPE, residual_dtype)
    model, state = make(BatchNorm, "batch", dtype=jnp.dtype(dtype))
    for inference in (False, True):
        y, _ = mapped(model, x, state, residual, inference=inference)
        assert y.dtype == jnp.dtype(expected)


class Block(eqx.Module):
    """A residual block that changes shape, and so ends with the join of two norms."""

    convs: list[Any]
    norms: list[Any]
    head: Any

    def __init__(self, norm: Any, mode: Any) -> None:
        keys = jax.random.split(jax.random.key(0), 4)
        sizes = [(3, 8, 3), (8, 8, 3), (3, 8, 1)]
        self.convs = [
            eqx.nn.Conv2d(i, o, k, padding=k // 2, use_bias=False, dtype=jnp.float32, key=key)
            for (i, o, k), key in zip(sizes, keys, strict=False)
        ]
        fused: list[dict[str, Any]] = [{"activation": "relu"}, {"activation": "relu"}, {}]
        options = fused if norm is BatchNorm else [{}, {}, {}]
        self.norms = [norm(8, "batch", mode=mode, dtype=jnp.float32, **each) for each in options]
        self.head = eqx.nn.Linear(8, 4, dtype=jnp.float32, key=keys[3])

    def __call__(self, x: Any, state: Any) -> Any:
        first, second, shortcut = self.norms
        if isinstance(first, BatchNorm):
            y, state = first(self.convs[0](x), state)
            joined = Shortcut(shortcut, self.convs[2](x))
            y, state = second(self.convs[1](y), state, residual=joined)
        else:
            y, state = first(self.convs[0](x), state)
            z, state = shortcut(self.convs[2](x), state)
            y, state = second(self.convs[1](jax.nn.relu(y)), state)
            y = jax.nn.relu(y + z)
        return self.head(y.mean((1, 2))), state


def trained(norm: Any, mode: str) -> Any:
    """Losses of a few steps of gradient descent, and those of inference before and after."""
    model, state = eqx.nn.make_with_state(Block)(norm, mode)
    images = normal(0, (8, 3, 6, 6))
    labels = jnp.arange(8, dtype=jnp.int32) % 4

    def loss(model: Any, state: Any) -> Any:
        run = jax.vmap(model, (0, None), (0, None), axis_name="batch")
        logits, state = run(images, state)
        logits = jax.nn.log_softmax(logits)
        return -jnp.take_along_axis(logits, labels[:, None], 1).mean(), state

    @eqx.filter_jit
    def step(model: Any, state: Any) -> Any:
        (value, state), gradient = eqx.filter_value_and_grad(loss, has_aux=True)(model, state)
        return eqx.apply_updates(model, jax.tree.map(lambda g: -0.1 * g, gradient)), state, value

    losses = []
    for _ in range(4):
        model, state, value = step(model, state)
        losses.append(value)
    evaluated, _ = eqx.filter_jit(loss)(eqx.nn.inference_mode(model), state)
    return losses, evaluated, jax.tree.leaves(state)


@pytest.mark.slow
@modes
def test_a_block_trains_as_with_equinox(mode: str) -> None:
    with as_flax_needs_it():
        actual, expected = trained(BatchNorm, mode), trained(eqx.nn.BatchNorm, mode)
    expected = jax.tree.map(lambda e, a: e.astype(a.dtype), expected, actual)
    assert_close(actual, expected, 1e-4)
    assert actual[0][-1] < actual[0][0]


def test_join_is_one_call() -> None:
    model, state = eqx.nn.make_with_state(Block)(BatchNorm, "batch")
    images = normal(0, (8, 3, 6, 6))

    def loss(weight: Any) -> Any:
        changed = eqx.tree_at(lambda m: m.convs[0].weight, model, weight)
        y, _ = jax.vmap(changed, (0, None), (0, None), axis_name="batch")(images, state)
        return y.sum()

    expected = {"forward": 1, "dual_forward": 1, "backward": 1, "dual_backward": 1}
    with as_flax_needs_it():
        assert ours(jax.grad(loss), model.convs[0].weight) == expected
        _, new = jax.vmap(model, (0, None), (0, None), axis_name="batch")(images, state)
    # The shortcut's averages, too, are those of one batch.
    for norm in model.norms:
        first, *_ = jax.tree.leaves(new.get(norm.batch_state_index))
        assert not np.array_equal(first, jax.tree.leaves(state.get(norm.batch_state_index))[0])


@modes
def test_several_devices(mode: str) -> None:
    """Examples on each of several devices, with `axis_name` for both."""
    x, residual = normal(0, (8, 3, 4, 5)), normal(1, (8, 3, 4, 5))
    model, state = make(BatchNorm, mode, activation="relu")
    whole = mapped(model, x, state, residual)
    model, state = make(BatchNorm, mode, activation="relu", axis_name=("devices", "batch"))
    mapped_over_devices = functools.partial(
        jax.shard_map,
        lambda x, z, state: mapped(model, x, state, z),
        mesh=make_mesh("auto", devices=4),
        in_specs=(P("devices"), P("devices"), P()),
        out_specs=(P("devices"), P()),
    )
    with pytest.raises(ValueError, match=r"axis of a vmap in a shard_map .* pass check_vma=False"):
        jax.jit(mapped_over_devices())(x, residual, state)
    parts = jax.jit(mapped_over_devices(check_vma=False))(x, residual, state)
    assert_close(jax.tree.leaves(parts), jax.tree.leaves(whole), tolerance(x.dtype))


@modes
def test_sharded_under_jit(mode: str) -> None:
    """A batch on several devices, under `vmap` as on one: nothing is gathered."""
    x, residual = normal(0, (8, 3, 4, 5)), normal(1, (8, 3, 4, 5))
    model, state = make(BatchNorm, mode, activation="relu")

    def run(x: Any, residual: Any) -> Any:
        y, new = mapped(model, x, state, residual)
        return y, jax.tree.leaves(new)

    mesh = make_mesh("auto", devices=4)
    placed = [put(a, mesh, P("devices")) for a in (x, residual)]
    assert_close(jax.jit(run)(*placed), run(x, residual), tolerance(x.dtype))
    found = {c.opcode for each in collectives(run, *placed) for c in each}
    assert found == {"all-reduce"}


def test_an_ensemble_has_statistics_of_its_own() -> None:
    """vmap over models outside, over the batch inside."""
    x = normal(0, (2, *SHAPE))
    model, state = make(BatchNorm, "batch", activation="relu")

    def one(x: Any) -> Any:
        y, new = mapped(model, x, state)
        return y, jax.tree.leaves(new)

    together = jax.vmap(one)(x)
    apart = jax.tree.map(lambda *each: jnp.stack(each), one(x[0]), one(x[1]))
    assert_close(together, apart, tolerance(x.dtype))
    assert ours(jax.vmap(one), x) == {"forward": 1}


@pytest.mark.parametrize("act", [jax.nn.silu, jax.nn.celu])
def test_other_activations(act: Any) -> None:
    """One of them is fused, so its argument is not rounded before."""
    x = normal(0, SHAPE)
    model, state = make(BatchNorm, "batch", activation=act)
    plain, plain_state = make(BatchNorm, "batch")
    y, _ = mapped(model, x, state)
    expected, _ = mapped(plain, x, plain_state)
    np.testing.assert_allclose(y, act(expected), rtol=1e-5, atol=1e-6)


def test_refused() -> None:
    x = normal(0, SHAPE)

    def call(x: Any = x, fields: Any = None, **call: Any) -> Any:
        fields = {"axis_name": "batch", "mode": "batch", "dtype": jnp.float32} | (fields or {})
        layer, state = eqx.nn.make_with_state(BatchNorm)(3, **fields)
        run = jax.vmap(lambda x: layer(x, state, **call), out_axes=(0, None), axis_name="batch")
        return run(x)

    with pytest.raises(ValueError, match=r"input_size=3, got \(4, 5, 3\); .* channels first"):
        call(jnp.moveaxis(x, 1, -1))
    with pytest.raises(ValueError, match=r"axis_name must name the mapped axis .* got None"):
        call(fields={"axis_name": None})
    for mode in ("batch", "ema"):
        with pytest.raises(
            NameError, match=r"axis_name='nowhere' does not .*vmap\(axis_name=...\)\.(\n|$)"
        ):
            call(fields={"axis_name": "nowhere", "mode": mode})
    with pytest.raises(ValueError, match=r"residual must have the shape of x, \(3, 4, 5\)"):
        call(residual=x[0, :2])
    with pytest.raises(ValueError, match=r"must be 'none', 'relu', .*None or a callable"):
        call(fields={"activation": "celu"})
    with pytest.raises(TypeError, match="activation must be a function without arrays"):
        call(fields={"activation": eqx.nn.PReLU()})
    with pytest.raises(ValueError, match="save must be 'y' or 'mask', got 'x'"):
        BatchNorm(3, "batch", mode="batch", save="x")  # pyright: ignore
    with pytest.raises(ValueError, match=r"implementation must be None, .* got 'tpu'"):
        BatchNorm(3, "batch", mode="batch", implementation="tpu")  # pyright: ignore
    with pytest.raises(TypeError, match=r"complex64.* use equinox.nn.BatchNorm"):
        call(x.astype(jnp.complex64))
    with pytest.raises(ValueError, match="eps must be finite and > 0"):
        call(fields={"eps": 0.0})
    with pytest.raises(TypeError, match="inference must be True or False, got 'no'"):
        call(inference="no")
    for inference in (False, True):
        with pytest.raises(ValueError, match=r"momentum is the weight .* from 0 to 1, got nan"):
            call(fields={"momentum": float("nan")}, inference=inference)
    with pytest.raises(ValueError, match="Invalid mode"):
        call(fields={"mode": "both"})
    plain = eqx.nn.BatchNorm(3, "batch", mode="batch", dtype=jnp.float32)
    with pytest.raises(TypeError, match=r"norm of a Shortcut must be .* pass its result"):
        call(residual=Shortcut(plain, x[0]))  # pyright: ignore

    class Doubled(BatchNorm):
        def __call__(self, *args: Any, **keywords: Any) -> Any:
            y, state = super().__call__(*args, **keywords)
            return 2 * y, state

    make_doubled: Any = Doubled
    doubled, _ = eqx.nn.make_with_state(make_doubled)(3, "batch", mode="batch", dtype=jnp.float32)
    with pytest.raises(TypeError, match=r"Shortcut must not have a __call__ of its own"):
        call(residual=Shortcut(doubled, x[0]))
    other, _ = eqx.nn.make_with_state(BatchNorm)(3, "batch", mode="batch", dtype=jnp.float32)
    with pytest.raises(ValueError, match="input of the shortcut's norm must have the shape of x"):
        call(residual=Shortcut(other, jnp.concatenate([x[0], x[0]], -1)))
    with pytest.warns(UserWarning, match="defaults to 'ema'"):
        BatchNorm(3, "batch")


def test_without_equinox_the_error_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "equinox", None)
    assert equinox_layers.__file__ is not None
    spec = importlib.util.spec_from_file_location("equinox_again", equinox_layers.__file__)
    assert spec is not None
    assert spec.loader is not None
    with pytest.raises(ImportError, match="pip install equinox"):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
