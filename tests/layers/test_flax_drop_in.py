"""The Linen BatchNorm in code that expects `flax.linen.BatchNorm`."""

import dataclasses
import functools
import pickle
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax_tools import (
    apply,
    as_flax_needs_it,
    assert_close,
    init,
    normal,
    some_variables,
    tolerance,
    trained_looking,
)

from jax_bnar._layers.linen import batch_norm as linen_batch_norm
from jax_bnar.flax_layers import BatchNorm

PLAIN = functools.partial(nn.BatchNorm, use_fast_variance=False)


def test_is_a_batch_norm_of_flax() -> None:
    """A subclass with its fields in the same order, so that positional arguments work."""
    assert issubclass(BatchNorm, nn.BatchNorm)
    assert isinstance(functools.partial(BatchNorm, axis=1)(), nn.BatchNorm)
    assert BatchNorm.__name__ == "BatchNorm"
    layer = BatchNorm(True, 1, 0.9, 1e-3, jnp.float32, jnp.float64, False, False)
    plain = nn.BatchNorm(True, 1, 0.9, 1e-3, jnp.float32, jnp.float64, False, False)
    for field in dataclasses.fields(nn.BatchNorm):
        if field.name not in ("parent", "name"):
            assert getattr(layer, field.name) == getattr(plain, field.name)


@pytest.mark.parametrize("copied", ["clone", "replace", "copy", "pickle", "partial"])
def test_copies(copied: str) -> None:
    layer = BatchNorm(axis=1, momentum=0.5, activation="relu", num_groups=2)
    copies: dict[str, Callable[[], Any]] = {
        "clone": lambda: layer.clone(momentum=0.7),
        "replace": lambda: dataclasses.replace(layer, momentum=0.7),
        "copy": lambda: layer.copy(momentum=0.7),
        "pickle": lambda: pickle.loads(
            pickle.dumps(BatchNorm(axis=1, momentum=0.7, activation="relu", num_groups=2))
        ),
        "partial": lambda: pickle.loads(
            pickle.dumps(functools.partial(BatchNorm, axis=1, num_groups=2))
        )(momentum=0.7, activation="relu"),
    }
    copy = copies[copied]()
    assert type(copy) is BatchNorm
    expected = BatchNorm(axis=1, momentum=0.7, activation="relu", num_groups=2)
    assert (copy, hash(copy)) == (expected, hash(expected))
    assert copy != layer


class Stacked(nn.Module):
    """A norm under a lifted transformation, with the names that Linen gives it."""

    norm: Any
    lift: str

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        axes: Any = {"params": 0, "batch_stats": 0}
        norm: Any = functools.partial(self.norm, use_running_average=False, momentum=0.5)
        if self.lift == "remat":
            return nn.remat(norm.func)(**norm.keywords)(x)
        if self.lift == "jit":
            return nn.jit(norm.func)(**norm.keywords)(x)
        if self.lift == "vmap":
            lifted = nn.vmap(norm.func, variable_axes=axes, split_rngs={"params": True})
            return lifted(**norm.keywords)(x)

        class Step(nn.Module):
            @nn.compact
            def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:
                return jnp.sin(norm()(x)), None

        lifted = nn.scan(Step, variable_axes=axes, split_rngs={"params": True}, length=3)
        return lifted()(x, None)[0]


@pytest.mark.parametrize("lift", ["remat", "jit", "vmap", "scan"])
def test_lifted_transformations_equal_flax(lift: str) -> None:
    """Values, gradients, running statistics and names are those of Flax's layer."""
    x = normal(0)

    def outcome(net: nn.Module) -> Any:
        tree = jax.eval_shape(functools.partial(init, net), x)
        variables = trained_looking(tree)

        @jax.jit
        @functools.partial(jax.value_and_grad, argnums=(0, 1), has_aux=True)
        def loss(params: Any, x: jax.Array) -> Any:
            given = {**variables, "params": params}
            y, updated = apply(net, given, x, mutable=["batch_stats"])
            return jnp.square(y).sum(), (y, updated)

        return loss(variables["params"], x)

    with as_flax_needs_it():
        plain = nn.BatchNorm
        expected = outcome(Stacked(functools.partial(plain, use_fast_variance=False), lift))
        actual = outcome(Stacked(BatchNorm, lift))
    assert_close(actual, expected, 64 * tolerance(x.dtype))


def test_under_setup_and_as_a_field() -> None:
    class Net(nn.Module):
        norm: nn.BatchNorm

        def setup(self) -> None:
            self.own = type(self.norm)(use_running_average=False)

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.own(self.norm(x))

    x = normal(0)
    with as_flax_needs_it():
        ours, plain = (init(Net(kind(False)), x) for kind in (BatchNorm, nn.BatchNorm))
    assert_close(ours, plain, 0)


def test_a_field_that_flax_adds_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A field that we inherit but do not know must raise, unless it has its default."""
    assert linen_batch_norm._UNKNOWN_FIELDS == ()
    new = [f for f in dataclasses.fields(nn.BatchNorm) if f.name == "use_fast_variance"]
    monkeypatch.setattr(linen_batch_norm, "_UNKNOWN_FIELDS", tuple(new))
    x = normal(0)
    variables = some_variables(BatchNorm(), x)
    apply(BatchNorm(), variables, x, True)
    with pytest.raises(NotImplementedError, match="use_fast_variance is a field of flax"):
        apply(BatchNorm(use_fast_variance=False), variables, x, True)


def test_in_the_place_of_flaxs_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replacing the name in `flax.linen` gives our layer to code that cannot be changed."""
    monkeypatch.setattr(nn, "BatchNorm", BatchNorm)
    x = normal(0)
    layer = nn.BatchNorm(use_running_average=False, momentum=0.5)
    y, _ = layer.init_with_output(jax.random.key(0), x)
    np.testing.assert_allclose(np.asarray(y).mean(axis=(0, 1, 2)), 0, atol=1e-5)


class Unmerged(nn.Module):
    """A typical block: the shortcut's norm comes last, and Linen numbers the norms in order."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        y = nn.relu(PLAIN(False)(nn.Conv(8, (3, 3), use_bias=False)(x)))
        y = PLAIN(False)(nn.Conv(8, (3, 3), use_bias=False)(y))
        shortcut = nn.Conv(8, (1, 1), use_bias=False, name="conv_proj")(x)
        shortcut = PLAIN(False)(shortcut)
        return nn.relu(y + shortcut)


class Merged(nn.Module):
    """The same block with ReLU and addition merged into the norms by hand, in one of three ways."""

    way: str

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        relu = functools.partial(BatchNorm, False, activation="relu")
        y = relu()(nn.Conv(8, (3, 3), use_bias=False)(x))
        y = nn.Conv(8, (3, 3), use_bias=False)(y)
        shortcut = nn.Conv(8, (1, 1), use_bias=False, name="conv_proj")(x)
        if self.way == "the trap":
            shortcut = BatchNorm(False)(shortcut)
            return relu()(y, residual=shortcut)
        if self.way == "names":
            shortcut = BatchNorm(False, name="BatchNorm_2")(shortcut)
            return relu(name="BatchNorm_1")(y, residual=shortcut)
        # Modules are numbered when they are constructed, not when they are called.
        last, of_shortcut = relu(), BatchNorm(False)
        return last(y, residual=of_shortcut(shortcut))


def merged_and_plain(way: str) -> tuple[Any, Any]:
    """Outputs and running statistics of the merged block and of plain Flax, from one checkpoint."""
    x = normal(0, (2, 6, 6, 4)) - 3
    with as_flax_needs_it():
        tree = jax.eval_shape(functools.partial(init, Unmerged()), x)
        checkpoint = trained_looking(tree)
        expected = apply(Unmerged(), checkpoint, x, mutable=["batch_stats"])
    loaded = jax.eval_shape(functools.partial(init, Merged(way)), x)
    # The two cannot be told apart, not even by the shapes.
    assert jax.tree.structure(loaded) == jax.tree.structure(tree)
    assert jax.tree.map(jnp.shape, loaded) == jax.tree.map(jnp.shape, tree)
    return apply(Merged(way), checkpoint, x, mutable=["batch_stats"]), expected


def test_merging_by_hand_swaps_the_names_of_norms() -> None:
    """The docstring warns of this: the old checkpoint loads, but the output differs."""
    (y, _), (expected, _) = merged_and_plain("the trap")
    assert float(np.max(np.abs(y - expected))) > 0.1


@pytest.mark.parametrize("way", ["names", "order"])
def test_merged_by_hand_with_the_old_names_equals_flax(way: str) -> None:
    actual, expected = merged_and_plain(way)
    assert_close(actual, expected, 16 * tolerance(jnp.float32))
