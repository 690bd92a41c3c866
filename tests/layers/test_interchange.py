"""Orbax checkpoints of plain Flax load into our networks and back, and training continues."""

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from flax_tools import apply, as_flax_needs_it, assert_close, normal, tolerance, trained_looking

from benchmarks.models.linen import PlainResNet
from jax_bnar import flax_layers, nnx_layers

checkpoint = pytest.importorskip("orbax.checkpoint", reason="these tests are about its files")

IMAGES = (4, 33, 33, 3)
OPTIMIZER = optax.sgd(0.05, momentum=0.9)


def saved_and_restored(tree: Any, abstract: Any, path: Path) -> Any:
    """Saves `tree` and returns what a reader that expects `abstract` gets."""
    with checkpoint.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, tree)
        checkpointer.wait_until_finished()
        return checkpointer.restore(path, abstract)


@functools.partial(jax.jit, static_argnums=0)
def two_steps(net: Any, state: Any) -> Any:
    """The state after two steps, and the logits of each."""

    def step(state: Any, images: jax.Array) -> Any:
        def loss(params: Any) -> Any:
            variables = {"params": params, "batch_stats": state["batch_stats"]}
            logits, updated = apply(net, variables, images, mutable=["batch_stats"])
            return jnp.square(logits).mean(), (logits, updated)

        gradients, (logits, updated) = jax.grad(loss, has_aux=True)(state["params"])
        updates, optimizer = OPTIMIZER.update(gradients, state["optimizer"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, **updated, "optimizer": optimizer}, logits

    return jax.lax.scan(step, state, jnp.stack([normal(0, IMAGES) - 3, normal(1, IMAGES) - 3]))


@pytest.mark.slow
def test_linen_and_back(tmp_path: Path) -> None:
    """A training state goes from plain Flax to ours and back, with two steps on each side."""
    plain = PlainResNet((1, 1), 5, num_filters=4)
    ours = flax_layers.ResNet((1, 1), 5, num_filters=4)

    def state_of(net: Any) -> Any:
        shape = jax.ShapeDtypeStruct(IMAGES, jnp.float32)
        variables = dict(jax.eval_shape(net.init, jax.random.key(0), shape))
        return {**variables, "optimizer": jax.eval_shape(OPTIMIZER.init, variables["params"])}

    with as_flax_needs_it():
        # What each side expects in the file comes from its own network.
        abstract = {net: state_of(net) for net in (plain, ours)}
        written = trained_looking(abstract[plain])
        expected, _ = two_steps(plain, written)
        read = saved_and_restored(written, abstract[ours], tmp_path / "plain")
        trained, logits = two_steps(ours, read)
        _, plain_logits = two_steps(plain, written)
        assert_close((trained, logits), (expected, plain_logits), 512 * tolerance(jnp.float32))
        # The way back, after those steps.
        back = saved_and_restored(trained, abstract[plain], tmp_path / "ours")
        assert_close(back, trained, 0)
        from_ours, from_plain = two_steps(ours, trained), two_steps(plain, back)
        assert_close(from_ours, from_plain, 512 * tolerance(jnp.float32))


@nnx.jit
def nnx_steps(model: Any) -> Any:
    logits = [model(normal(seed, IMAGES) - 3) for seed in (0, 1)]
    model.eval()
    return logits, model(normal(2, IMAGES) - 3)


def test_nnx_and_back(tmp_path: Path) -> None:
    def make(norm: Any) -> Any:
        return nnx_layers.ResNet((1, 1), 5, num_filters=4, norm=norm, rngs=nnx.Rngs(0))

    norms = {
        "plain": functools.partial(nnx.BatchNorm, use_fast_variance=False),
        "ours": nnx_layers.BatchNorm,
    }
    with as_flax_needs_it():
        abstract: Any = {
            name: nnx.eval_shape(functools.partial(make, norm)) for name, norm in norms.items()
        }
        tree = nnx.to_pure_dict(nnx.state(abstract["plain"]))
        written = trained_looking(tree)
        for source, target in (("plain", "ours"), ("ours", "plain")):
            expected = nnx.to_pure_dict(nnx.state(abstract[target]))
            read = saved_and_restored(written, expected, tmp_path / source)
            outcomes = []
            for name, values in ((source, written), (target, read)):
                model = nnx.clone(abstract[name])
                nnx.update(model, values)
                outcomes.append((nnx_steps(model), nnx.to_pure_dict(nnx.state(model))))
            assert_close(outcomes[1], outcomes[0], 64 * tolerance(jnp.float32))
            written = outcomes[1][1]
