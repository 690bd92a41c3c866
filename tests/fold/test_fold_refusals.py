"""What `fold_batch_norms` leaves as it was, with the reason, and what it rejects."""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax_tools import as_flax_needs_it
from jax import lax

import jax_bnar

X = jax.random.normal(jax.random.key(0), (3, 4), jnp.float32)
W = {
    "kernel": jax.random.normal(jax.random.key(1), (4, 6), jnp.float32),
    "mean": jax.random.normal(jax.random.key(2), (6,), jnp.float32),
    "var": jnp.full((6,), 2.0, jnp.float32),
    "rows": jax.random.normal(jax.random.key(3), (3, 1), jnp.float32),
}


def norm(y: jax.Array, w: Any) -> jax.Array:
    return (y - w["mean"].reshape(1, 6)) * lax.rsqrt(w["var"].reshape(1, 6) + 1e-3)


def centred(y: jax.Array) -> jax.Array:
    return y - y.mean(0, keepdims=True)


def variance(y: jax.Array) -> jax.Array:
    return y.var(0, keepdims=True)


def by_the_batch(w: Any, x: jax.Array) -> jax.Array:
    y = x @ w["kernel"]
    return centred(y) * lax.rsqrt((centred(y) ** 2).mean(0, keepdims=True) + 1e-3)


def within(kind: str) -> Callable[[Any, jax.Array], jax.Array]:
    """A product and its norm in a loop, a branch, or a jit with a sharding."""

    def net(w: Any, x: jax.Array) -> jax.Array:
        def layer(y: jax.Array, w: Any = w) -> jax.Array:
            return norm(y[:, :4] @ w["kernel"], w)

        y = x @ w["kernel"]
        if kind == "calls in a scan":
            inner = jax.jit(jax.checkpoint(layer), donate_argnums=0)
            return lax.scan(lambda y, _: (inner(y), None), y, None, length=2)[0]
        if kind == "scan":
            return lax.scan(lambda y, _: (layer(y), None), y, None, length=2)[0]
        if kind == "scan over weights":
            many = {name: jnp.stack([w[name]] * 2) for name in ("kernel", "mean", "var")}
            return lax.scan(lambda y, w: (layer(y, w), None), y, many)[0]
        if kind == "while":
            return lax.while_loop(lambda y: jnp.sum(y) > 1e9, layer, y)
        if kind == "cond":
            return lax.cond(jnp.sum(x) > 0, layer, lambda y: y, y)
        return lax.cond(
            jnp.sum(x) > 0, lambda y: lax.fori_loop(0, 2, lambda _, y: layer(y), y), lambda y: y, y
        )

    return net


@jax.custom_vjp
def with_own_derivative(y: jax.Array, w: Any) -> jax.Array:
    return norm(y, w)


with_own_derivative.defvjp(
    lambda y, w: (norm(y, w), w), lambda w, dy: (dy, jax.tree.map(jnp.zeros_like, w))
)


def our_norm(y: jax.Array, w: Any, **options: Any) -> jax.Array:
    return jax_bnar.bn_relu_inference(y, None, None, w["mean"], w["var"], **options)


def across_the_batch(w: Any, x: jax.Array) -> jax.Array:
    """Each row is an example of its own, and the statistics are those of all."""
    return jax.vmap(
        lambda x: jax_bnar.bn_relu((x @ w["kernel"])[None], None, None, axis_name="batch")[0],
        axis_name="batch",
    )(x)


def read_twice(w: Any, x: jax.Array) -> jax.Array:
    y = x @ w["kernel"]
    return norm(y, w) + y


def along_the_rows(w: Any, x: jax.Array) -> jax.Array:
    return x @ w["kernel"] * lax.rsqrt(w["rows"] ** 2 + 1)


REFUSED: dict[str, tuple[Callable[[Any, jax.Array], jax.Array], str]] = {
    "statistics of the batch": (by_the_batch, "its statistics are those of the batch"),
    "statistics of the batch, divided by the root": (
        lambda w, x: centred(x @ w["kernel"]) / jnp.sqrt(variance(x @ w["kernel"]) + 1e-3),
        "its statistics are those of the batch",
    ),
    "statistics of the batch, by a power": (
        lambda w, x: centred(x @ w["kernel"]) * (variance(x @ w["kernel"]) + 1e-3) ** -0.5,
        "its statistics are those of the batch",
    ),
    "our training form": (
        lambda w, x: jax_bnar.batch_norm(x @ w["kernel"], None, None)[0],
        "its statistics are those of the batch",
    ),
    "our training form, with ReLU": (
        lambda w, x: jax_bnar.bn_relu(x @ w["kernel"], None, None)[0],
        "its statistics are those of the batch",
    ),
    "our training form in pure JAX": (
        lambda w, x: jax_bnar.bn_relu(x @ w["kernel"], None, None, implementation="xla")[0],
        "its statistics are those of the batch",
    ),
    "our training form, over a named axis": (
        across_the_batch,
        "its statistics are those of the batch",
    ),
    "our training form in a loop": (
        lambda w, x: lax.map(lambda x: jax_bnar.bn_relu(x @ w["kernel"], None, None)[0], x[None]),
        "its statistics are those of the batch",
    ),
    "our kernel": (
        lambda w, x: our_norm(x @ w["kernel"], w, implementation="ffi"),
        'implementation="ffi" asks for the kernel',
    ),
    "our operator in a loop": (
        lambda w, x: lax.map(lambda x: our_norm(x @ w["kernel"], w), x[None]),
        "it is in the body of a scan",
    ),
    "our operator in pure JAX, in a loop": (
        lambda w, x: lax.map(lambda x: our_norm(x @ w["kernel"], w, implementation="xla"), x[None]),
        "it is in the body of a scan",
    ),
    "a scan": (within("scan"), "it is in the body of a scan; a Python loop in its place"),
    "a scan over weights": (within("scan over weights"), "it is in the body of a scan"),
    "a while loop": (within("while"), "it is in the body of a while"),
    "a branch": (within("cond"), "it is in a branch of a cond"),
    "a loop in a branch": (within("loop in a branch"), "it is in the body of a scan"),
    "calls in a scan": (within("calls in a scan"), "it is in the body of a scan"),
    "single examples in a loop": (
        lambda w, x: lax.map(lambda x: norm(x[None] @ w["kernel"], w)[0], x),
        "it is in the body of a scan",
    ),
    "a vector in a loop": (
        lambda w, x: lax.map(lambda x: (x @ w["kernel"]) * lax.rsqrt(w["var"] + 1e-3), x),
        "it is in the body of a scan",
    ),
    "a function with a derivative of its own": (
        lambda w, x: with_own_derivative(x @ w["kernel"], w),
        "it is in a function with a derivative of its own (custom_vjp_call)",
    ),
    "a jit with an option": (
        lambda w, x: jax.jit(lambda y: norm(y, w), donate_argnums=0)(x @ w["kernel"]),
        "it is within a jit, which is left as it is",
    ),
    "the sum is read twice": (read_twice, "is used elsewhere as well"),
    "the sum is returned": (
        lambda w, x: (y := x @ w["kernel"], norm(y, w)),  # type: ignore[dict-item]
        "is used elsewhere as well",
    ),
    "no sum before it": (lambda w, x: norm(jnp.sin(x @ w["kernel"]), w), "comes from sin"),
    "an activation before it": (
        lambda w, x: norm(jax.nn.relu(x @ w["kernel"]), w),
        "comes from relu",
    ),
    "a sum of two products before it": (
        lambda w, x: norm(x @ w["kernel"] + (x * 2) @ w["kernel"], w),
        "comes from add",
    ),
    "an input before it": (
        lambda w, x: norm(jnp.tile(x[:, :2], (1, 3)), w),
        "not from a convolution or a matrix product",
    ),
    "a weight that is computed from the input": (
        lambda w, x: norm(x @ (w["kernel"] * x[0, 0]), w),
        "is not one of the variables",
    ),
    "vectors along what was an axis of the batch": (
        lambda w, x: norm((x[:2] @ w["kernel"]).reshape(2, 6).T.reshape(2, 6), w),
        "do not run along the channels",
    ),
    "vectors along another axis": (along_the_rows, "do not run along the channels"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    net, reason = REFUSED[name]
    network = jax_bnar.fold_batch_norms(net, W, X)
    assert not network.report.folded, network.report
    (refused, *_) = network.report.refused
    assert reason in refused.reason
    assert refused.reason in str(network.report)
    assert ".py:" in refused.line
    before, after = jax.jit(net)(W, X), jax.jit(network.apply)(network.variables, X)
    for left, right in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        # XLA may round the two programs differently: one reads what the other computes first.
        np.testing.assert_allclose(left, right, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shape", [(6, 3), (2, 3, 3)])
def test_a_reshape_that_transposes_first(shape: tuple[int, ...]) -> None:
    """Its shapes are those of one that does not, also where all axes have one length."""
    w = {"kernel": W["kernel"][:, :3], "var": jnp.arange(1.0, 7.0, dtype=jnp.float32)}

    def net(w: Any, x: jax.Array) -> jax.Array:
        y = x @ w["kernel"]  # (6, 3)
        last = w["var"][: shape[-1]].reshape((1,) * (len(shape) - 1) + (-1,))
        return lax.reshape(y, shape, dimensions=(1, 0)) * lax.rsqrt(last + 1e-3)

    x = jnp.concatenate([X, 2 * X])
    network = jax_bnar.fold_batch_norms(net, w, x)
    assert not network.report.folded
    y = network.apply(network.variables, x)
    np.testing.assert_allclose(y, net(w, x), rtol=1e-5, atol=1e-6)


ENLARGED: dict[str, Callable[[Any, jax.Array], jax.Array]] = {
    "added to more rows": lambda w, x: (
        norm(x[:1] @ w["kernel"], w) + jnp.zeros((5, 6), jnp.float32)
    ),
    "multiplied by more rows": lambda w, x: (x[:1] @ w["kernel"]) * w["rows"] * w["mean"],
    "one channel becomes six": lambda w, x: (x @ w["kernel"][:, :1]) * w["mean"] + w["var"],
}


@pytest.mark.parametrize("name", ENLARGED)
def test_what_makes_the_sum_larger_is_no_part_of_it(name: str) -> None:
    net = ENLARGED[name]
    with jax.numpy_rank_promotion("allow"):
        network = jax_bnar.fold_batch_norms(net, W, X)
        y, expected = network.apply(network.variables, X), net(W, X)
    assert y.shape == expected.shape
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.float8_e4m3fn, jnp.bfloat16, jnp.float16])
def test_a_weight_that_is_rounded_on_purpose(dtype: Any) -> None:
    """The program computes with rounded weights in float32."""

    def net(w: Any, x: jax.Array) -> jax.Array:
        return norm(x @ w["kernel"].astype(dtype).astype(jnp.float32), w)

    network = jax_bnar.fold_batch_norms(net, W, X)
    y = network.apply(network.variables, X)
    np.testing.assert_allclose(y, net(W, X), rtol=1e-5, atol=1e-5)


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


@pytest.mark.parametrize(
    "net",
    [
        nn.LayerNorm(),
        nn.LayerNorm(use_scale=False, use_bias=False),
        nn.GroupNorm(2),
        nn.InstanceNorm(),
        nn.RMSNorm(),
    ],
    ids=lambda net: type(net).__name__,
)
@pytest.mark.parametrize("shape", [(4, 6), (4, 3, 3, 6)])
def test_other_norms_are_no_batch_norm(net: nn.Module, shape: tuple[int, ...]) -> None:
    whole = nn.Sequential([nn.Dense(6), net])
    x = jnp.ones(shape, jnp.float32)
    with as_flax_needs_it():
        network = jax_bnar.fold_batch_norms(whole, whole.init(jax.random.key(0), x), x)
    assert network.report.layers == ()


def test_a_bias_is_no_batch_norm() -> None:
    network = jax_bnar.fold_batch_norms(lambda w, x: x @ w["kernel"] + 1 + w["mean"][None], W, X)
    assert network.report.layers == ()
    assert str(network.report) == "no BatchNorm in evaluation was found"


class _Model(nnx.Module):
    def __init__(self) -> None:
        self.layer = nnx.Linear(4, 6, rngs=nnx.Rngs(0))
        self.norm = nnx.BatchNorm(6, rngs=nnx.Rngs(0))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.norm(self.layer(x))


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


@pytest.mark.parametrize(
    ("dtype", "convolves"), [("int8", False), ("int4", False), ("bool", False), ("int8", True)]
)
def test_integer_weights_are_left(dtype: str, convolves: bool) -> None:
    """An integer cannot hold the factor."""
    w = W | {"kernel": jnp.asarray(np.arange(24).reshape(4, 6) % 5 - 2).astype(dtype)}

    def net(w: Any, x: jax.Array) -> jax.Array:
        if convolves:
            x, kernel = x[:, None, :], w["kernel"][None]
            y = lax.conv_general_dilated(
                x.astype(dtype),
                kernel,
                (1,),
                "SAME",
                dimension_numbers=("NWC", "WIO", "NWC"),
                preferred_element_type=jnp.float32,
            )[:, 0]
        else:
            y = lax.dot_general(
                x, w["kernel"], (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32
            )
        return norm(y, w)

    network = jax_bnar.fold_batch_norms(net, w, X)
    assert f"{dtype} weights or inputs cannot hold its factor" in str(network.report)
    assert not network.report.folded
    np.testing.assert_allclose(network.apply(network.variables, X), net(w, X), rtol=1e-5, atol=1e-6)


def test_float32_weights_whose_range_is_left() -> None:
    """The product of weight and factor overflows, but not what the network computes."""
    w = W | {"kernel": jnp.full((4, 6), 1e30, jnp.float32)}

    def net(w: Any, x: jax.Array) -> jax.Array:
        return (x @ w["kernel"]) * lax.rsqrt(1e-30 * w["var"].reshape(1, 6))

    x = jnp.full((3, 4), 1e-25, jnp.float32)
    network = jax_bnar.fold_batch_norms(net, w, x)
    (refused,) = network.report.refused
    assert "would leave the range of its dtype" in refused.reason
    np.testing.assert_allclose(network.apply(network.variables, x), net(w, x), rtol=1e-5)


@pytest.mark.parametrize(
    ("size", "var"), [(300.0, 1e-6), (1e-3, 1e8)], ids=["overflow", "underflow"]
)
def test_float16_weights_whose_range_is_left(size: float, var: float) -> None:
    """The others of the network are folded."""
    kernel, more = (jax.random.normal(jax.random.key(k), (4, 6), jnp.float16) for k in (1, 2))
    w = W | {"kernel": size * kernel, "far": jnp.full(6, var, jnp.float32)}
    w["more"] = jnp.concatenate([more, more[:2]])

    def net(w: Any, x: jax.Array) -> jax.Array:
        y = (x @ w["kernel"]).astype(jnp.float32) * lax.rsqrt(w["far"].reshape(1, 6) + 1e-6)
        return norm((jnp.tanh(y).astype(jnp.float16) @ w["more"]).astype(jnp.float32), w)

    x = X.astype(jnp.float16) / 64
    network = jax_bnar.fold_batch_norms(net, w, x)
    (refused,), (folded,) = network.report.refused, network.report.folded
    assert "would leave the range of its dtype" in refused.reason
    assert folded.folded_into == "matrix product"
    y = network.apply(network.variables, x)
    np.testing.assert_allclose(y, net(w, x), rtol=0.01, atol=0.01)


def test_an_infinite_factor_is_left() -> None:
    """The variance of a dead channel, without an epsilon: 0 times infinity is NaN."""
    w = {"kernel": jnp.ones((1, 2)), "var": jnp.asarray([0.0, 1.0])}

    def net(w: Any, x: jax.Array) -> jax.Array:
        return jax.nn.relu((x @ w["kernel"]) * lax.rsqrt(w["var"]).reshape(1, 2))

    x = jnp.arange(-1.0, 3.0).reshape(4, 1)
    network = jax_bnar.fold_batch_norms(net, w, x)
    np.testing.assert_array_equal(network.apply(network.variables, x), net(w, x))
    assert not network.report.folded


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
