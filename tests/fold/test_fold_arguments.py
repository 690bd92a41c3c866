"""Arguments that `fold_batch_norms` and the folded network reject."""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from fold_tools import W, X, norm
from jax import lax

import jax_bnar

OTHER_PROGRAMS: dict[str, tuple[Callable[..., jax.Array], dict[str, Any]]] = {
    "another variable": (
        lambda w, x, name="mean": (x @ w["kernel"]) * lax.rsqrt(w[name] ** 2 + 1).reshape(1, 6),
        {"name": "var"},
    ),
    "another number": (
        lambda w, x, epsilon=1e-3: (x @ w["kernel"]) * lax.rsqrt(w["var"] + epsilon).reshape(1, 6),
        {"epsilon": 0.5},
    ),
    "another operation": (
        lambda w, x, step=jnp.add: (
            step(x @ w["kernel"], w["mean"].reshape(1, 6)) * w["var"].reshape(1, 6)
        ),
        {"step": jnp.subtract},
    ),
}


@pytest.mark.parametrize("name", OTHER_PROGRAMS)
def test_arguments_with_which_the_variables_would_be_others(name: str) -> None:
    """They have the same shapes, but other values."""
    net, others = OTHER_PROGRAMS[name]
    network = jax_bnar.fold_batch_norms(net, W, X)
    assert network.report.folded
    np.testing.assert_allclose(network.apply(network.variables, X), net(W, X), rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match="the network is another program"):
        network.apply(network.variables, X, **others)


class _Model(nnx.Module):
    def __init__(self) -> None:
        self.layer = nnx.Linear(4, 6, rngs=nnx.Rngs(0))
        self.norm = nnx.BatchNorm(6, rngs=nnx.Rngs(0))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.norm(self.layer(x))


def test_it_is_shown_without_its_weights() -> None:
    model = _Model()
    model.eval()
    network = jax_bnar.fold_batch_norms(model, X)
    head, *lines = repr(network).splitlines()
    assert head == "FoldedNetwork with 2 arrays of variables and this report:"
    assert "\n".join(lines) == str(network.report)


def test_a_module_in_training_says_so() -> None:
    network = jax_bnar.fold_batch_norms(_Model(), X)
    (layer,) = network.report.layers
    assert "call the network in evaluation" in layer.reason


def test_arguments_of_training_are_rejected() -> None:
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array, train: bool, use_scale: bool = True) -> jax.Array:
            y = nn.BatchNorm(use_running_average=not train)(nn.Dense(6)(x))
            return y if use_scale else x

    net = Net()
    variables = net.init(jax.random.key(0), X, train=False)
    network = jax_bnar.fold_batch_norms(net.apply, variables, X, train=False)
    with pytest.raises(ValueError, match="the network is another program, with the variables"):
        network.apply(network.variables, X, use_scale=False)
    with pytest.raises(ValueError, match=r"the variables must be the arrays .*got float32\[6\]"):
        network.apply((jnp.zeros(6, jnp.float32),), X, train=False)


def _scaled_by(factor: float) -> Any:
    """A function with a derivative rule and an array of its own."""
    own = np.arange(6, dtype=np.float32) * factor

    @jax.custom_jvp
    def scaled(v: jax.Array) -> jax.Array:
        return v * own

    scaled.defjvp(lambda p, t: (scaled(*p), t[0] * own))
    return scaled


CONSTANTS: dict[str, Callable[..., jax.Array]] = {
    "read by the fold": lambda w, x, t=1.0: norm(
        x @ (w["kernel"] * np.full((4, 6), t, np.float32)), w
    ),
    "read by the rest": lambda w, x, t=1.0: norm(x @ w["kernel"], w) + np.full((3, 6), t, "f4"),
    "of a function within": lambda w, x, t=1.0: (
        (x @ w["kernel"]) * _scaled_by(t)(w["mean"]).reshape(1, 6)
    ),
}


@pytest.mark.parametrize("name", CONSTANTS)
def test_arguments_with_other_constants(name: str) -> None:
    """NumPy computes them from an argument, so that two traces look alike but for their values."""
    net = CONSTANTS[name]
    network = jax_bnar.fold_batch_norms(net, W, X)
    for t in (1.0, 1):  # They are computed anew, and are equal.
        y = network.apply(network.variables, X, t=t)
        np.testing.assert_allclose(y, net(W, X), rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match=r"other constants .* than when it was folded"):
        network.apply(network.variables, X, t=2.0)


def test_errors_of_the_program_are_its_own() -> None:
    def fails(_: Any) -> Any:
        raise RuntimeError("of the program")

    def net(w: Any, x: jax.Array) -> jax.Array:
        return jax.pure_callback(fails, jax.ShapeDtypeStruct((3, 6), np.float32), norm(x, w))

    x = jnp.ones((3, 6), np.float32)
    network = jax_bnar.fold_batch_norms(net, W, x)
    with pytest.raises(Exception, match="of the program"):
        jax.block_until_ready(network.apply(network.variables, x))


def test_bad_arguments() -> None:
    network = jax_bnar.fold_batch_norms(lambda w, x: norm(x @ w["kernel"], w), W, X)
    for variables, named in ((W, "got a dict"), ([1.0, 2.0], "got a float"), (None, "a NoneType")):
        with pytest.raises(ValueError, match=f"not the variables that it was given.*{named}"):
            network.apply(variables, X)
    with pytest.raises(TypeError, match="the variables must be arrays, whose values are folded"):
        jax_bnar.fold_batch_norms(
            lambda w, x: norm(x @ w["kernel"], w), jax.eval_shape(lambda: W), X
        )
    with pytest.raises(TypeError, match="fun must be a function of variables and inputs"):
        jax_bnar.fold_batch_norms(3, W, X)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="there are no variables; pass them"):
        jax_bnar.fold_batch_norms(norm)
    with pytest.raises(TypeError, match="there is no array after the variables"):
        jax_bnar.fold_batch_norms(lambda x: norm(x @ W["kernel"], W), X)
    for each in (nn.Dense, nnx.Linear):
        with pytest.raises(TypeError, match=f"fun is the class {each.__name__}; pass a module"):
            jax_bnar.fold_batch_norms(each, W, X)
    module = nn.Dense(3)
    variables = module.init(jax.random.key(0), X)
    misplaced: list[tuple[Any, ...]] = [(module, X, variables), (module.bind(variables), X)]
    for given in misplaced:
        with pytest.raises(TypeError, match=r"are a dict such as .*got float32\[3,4\]\. Pass"):
            jax_bnar.fold_batch_norms(*given)


def test_an_argument_that_becomes_an_array() -> None:
    """A number is a part of the program; an array in its place is another program."""

    def net(w: Any, x: jax.Array, epsilon: Any = 1e-3) -> jax.Array:
        return x @ w["kernel"] * lax.rsqrt(w["var"].reshape(1, 6) + epsilon)

    network = jax_bnar.fold_batch_norms(net, W, X)
    with pytest.raises(ValueError, match=r"another program.*a number when it was folded may be an"):
        network.apply(network.variables, X, epsilon=jnp.float32(1e-3))


@pytest.mark.parametrize("variables", [{}, {"rate": 2.0}, {"name": "net"}], ids=str)
def test_variables_without_an_array_are_refused(variables: Any) -> None:
    with pytest.raises(TypeError, match="no array among the variables"):
        jax_bnar.fold_batch_norms(lambda v, x: x, variables, X)
