"""oneDNN Graph's fusion patterns with a BatchNorm, and what jax_bnar has for each of them.

There is a test for each row of the list in oneDNN's documentation. The graphs are written in plain
JAX, without jax_bnar; the table in `docs/guide/other_systems.md` says how each is supported.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from cases import Case, operands
from fuse_tools import array, assert_fused
from programs import hlo_calls

import jax_bnar
from jax_bnar import ops

EPSILON = 1e-3
CHANNELS = 8
SHAPE = (2, 6, 5, CHANNELS)

UNARY = {
    "Abs": jnp.abs,
    "Clamp": lambda a: jnp.clip(a, -0.5, 1.0),
    "Elu": jax.nn.elu,
    "Exp": jnp.exp,
    "GELU": lambda a: jax.nn.gelu(a, approximate=False),
    "HardSwish": jax.nn.hard_swish,
    "LeakyReLU": lambda a: jax.nn.leaky_relu(a, 0.1),
    "Log": lambda a: jnp.log(jnp.abs(a) + 1),  # the logarithm of a positive number
    "Sigmoid": jax.nn.sigmoid,
    "SoftPlus": jax.nn.softplus,
    "Pow": lambda a: a**3,
    "ReLU": jax.nn.relu,
    "Round": jnp.round,
    "Sqrt": lambda a: jnp.sqrt(jnp.abs(a)),
    "Square": jnp.square,
    "Tanh": jnp.tanh,
}
BINARY = {
    "Add": lambda a, b: a + b,
    "Divide": lambda a, b: a / (jnp.abs(b) + 1),
    "Maximum": jnp.maximum,
    "Minimum": jnp.minimum,
    "Multiply": lambda a, b: a * b,
    "Subtract": lambda a, b: a - b,
}


def conv(x: Any, kernel: Any) -> Any:
    return jax.lax.conv_general_dilated(
        x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def spread(vector: Any, like: Any) -> Any:
    return jnp.broadcast_to(vector, like.shape)


def normalise(x: Any, mean: Any, variance: Any, gamma: Any, beta: Any) -> Any:
    rstd = jax.lax.rsqrt(variance + jnp.asarray(EPSILON, variance.dtype))
    return (x - spread(mean, x)) * spread(rstd * gamma, x) + spread(beta, x)


def batch_norm_inference(x: Any, norm: Any) -> Any:
    return normalise(x, norm["mean"], norm["variance"], norm["gamma"], norm["beta"])


def batch_norm_forward_training(x: Any, norm: Any) -> Any:
    """Returns (dst, running mean, running variance, batch mean, batch variance)."""
    mean, variance = x.mean((0, 1, 2)), x.var((0, 1, 2))
    running = [0.9 * norm["mean"] + 0.1 * mean, 0.9 * norm["variance"] + 0.1 * variance]
    return normalise(x, mean, variance, norm["gamma"], norm["beta"]), *running, mean, variance


def norm_of(seed: int) -> dict[str, Any]:
    random = np.random.default_rng(seed)
    wide = {
        "mean": random.standard_normal(CHANNELS),
        "variance": random.uniform(0.5, 2, CHANNELS),
        "gamma": random.uniform(0.5, 2, CHANNELS),
        "beta": random.standard_normal(CHANNELS),
    }
    return {name: jnp.asarray(value, jnp.float32) for name, value in wide.items()}


def kernel_of(seed: int, size: int = 1) -> Any:
    return array((size, size, CHANNELS, CHANNELS), seed=seed) / 4


TAILS = [
    *((name,) for name in UNARY),
    *((name,) for name in BINARY),
    ("Multiply", "Sigmoid", "Add"),
    ("Add", "Tanh", "Subtract"),
    (),
]


@pytest.mark.parametrize("tail", TAILS, ids="+".join)
@pytest.mark.parametrize("has_bias", [True, False], ids=["bias", "no-bias"])
def test_convolution_batch_norm_inference_and_a_tail(tail: tuple[str, ...], has_bias: bool) -> None:
    """Convolution + BiasAdd? + BatchNormInference + [Unary | Binary]{0-3}.

    The BatchNorm is one pass of ours, and what follows is one pass of XLA.
    """
    x, z, kernel, norm = array(SHAPE), array(SHAPE, seed=1), kernel_of(2, 3), norm_of(3)

    def tailed(y: Any, z: Any) -> Any:
        for name in tail:
            y = UNARY[name](y) if name in UNARY else BINARY[name](y, z)
        return y

    def plain(x: Any, z: Any, kernel: Any, norm: Any) -> Any:
        y = conv(x, kernel)
        if has_bias:
            y = y + spread(norm["beta"], y)
        return tailed(batch_norm_inference(y, norm), z)

    def ours(x: Any, z: Any, kernel: Any, norm: Any) -> Any:
        y = conv(x, kernel)
        if has_bias:
            y = y + spread(norm["beta"], y)
        dst = ops.batch_norm_inference(
            y,
            *(norm["gamma"], norm["beta"], norm["mean"], norm["variance"]),
            epsilon=EPSILON,
            implementation="ffi",
        )
        return tailed(dst, z)

    given = x, z, kernel, norm
    exact = np.asarray(plain(*jax.tree.map(lambda a: a.astype(jnp.float64), given)))
    if tail == ("Round",):  # a step, where the last bit of a float32 decides
        error = np.abs(np.asarray(jax.jit(ours)(*given)) - exact)
        assert (error > 0.5).mean() < 0.01
    else:
        np.testing.assert_allclose(jax.jit(ours)(*given), exact, rtol=2e-4, atol=2e-5)
    assert hlo_calls(ours, *given) == {"jax_bnar_normalise_v1": 1}


@pytest.mark.parametrize("has_bias", [True, False], ids=["bias", "no-bias"])
@pytest.mark.parametrize("adds", [True, False], ids=["add", "no-add"])
def test_convolution_batch_norm_inference_add_relu(has_bias: bool, adds: bool) -> None:
    """Tails with a ReLU are one pass together with it, and `fuse` finds them."""

    def plain(x: Any, z: Any, kernel: Any, norm: Any) -> Any:
        y = conv(x, kernel)
        if has_bias:
            y = y + spread(norm["beta"], y)
        y = batch_norm_inference(y, norm)
        return jax.nn.relu(y + z if adds else y)

    name = "bn_add_relu_inference" if adds else "bn_relu_inference"
    given = array(SHAPE), array(SHAPE, seed=1), kernel_of(2, 3), norm_of(3)
    assert_fused(plain, *given, **{name: 1})
    assert hlo_calls(jax_bnar.fuse(plain), *given) == {"jax_bnar_normalise_v1": 1}


def test_batch_norm_inference_relu() -> None:
    """BatchNormInference + ReLU, as in DenseNet."""
    x, norm = array(SHAPE), norm_of(1)

    def plain(x: Any, norm: Any) -> Any:
        return jax.nn.relu(batch_norm_inference(x, norm))

    assert_fused(plain, x, norm, bn_relu_inference=1)
    dst = ops.batch_norm_inference(
        x,
        *(norm["gamma"], norm["beta"], norm["mean"], norm["variance"]),
        epsilon=EPSILON,
        fuse_norm_relu=True,
    )
    np.testing.assert_allclose(dst, jax.jit(plain)(x, norm), rtol=1e-5, atol=1e-6)


def test_relu_backward_batch_norm_training_backward() -> None:
    """ReLUBackward + BatchNormTrainingBackward is one call, which reads dst like ReLUBackward."""
    case = Case((4, 6, 5, 33), epsilon=EPSILON, form="bn_relu")
    x, _, gamma, beta = operands(case)
    forward = oracle.forward(x, None, gamma, beta, epsilon=EPSILON)
    dst, mean, variance = (a.astype(np.float32) for a in forward[:3])
    diff_dst = operands(Case(case.shape, seed=7)).x

    def ours(x: Any, diff_dst: Any, dst: Any) -> Any:
        return ops.batch_norm_training_backward(
            *(x, diff_dst, mean, variance, gamma),
            epsilon=EPSILON,
            fuse_norm_relu=True,
            dst=dst,
            implementation="ffi",
        )

    found = jax.jit(ours)(x, diff_dst, dst)
    exact = oracle.backward(diff_dst, x, dst, gamma, None, None, epsilon=EPSILON)
    oracle.assert_within("diff_src", found.diff_src, exact.dx, exact.dx_allowance)
    for name, got, value, allowance in (
        ("diff_gamma", found.diff_gamma, exact.dscale, exact.dscale_allowance),
        ("diff_beta", found.diff_beta, exact.dbias, exact.dbias_allowance),
    ):
        rounding = oracle.rounding(value, np.float32)
        oracle.assert_within(name, got, value, allowance + rounding)
    assert hlo_calls(ours, x, diff_dst, dst) == {"jax_bnar_backward_v1": 1}


def identical_bottleneck(x: Any, kernels: Any, norms: Any) -> Any:
    """conv-BN-relu twice, then conv-BN-add-relu, with the arrays that the pattern returns.

    The normalised arrays are left out, because backward reads src and the statistics instead.
    """
    outputs = []
    y = x
    for kernel, norm in zip(kernels[:2], norms[:2], strict=True):
        convolved = conv(y, kernel)
        dst, *statistics = batch_norm_forward_training(convolved, norm)
        y = jax.nn.relu(dst)
        outputs += [convolved, y, statistics]
    convolved = conv(y, kernels[2])
    dst, *statistics = batch_norm_forward_training(convolved, norms[2])
    return jax.nn.relu(dst + x), [*outputs, convolved, statistics]


def convolutional_bottleneck(x: Any, kernels: Any, norms: Any) -> Any:
    """The same block with a convolution and a BatchNorm on the shortcut."""
    shortcut_src = conv(x, kernels[3])
    shortcut, *of_shortcut = batch_norm_forward_training(shortcut_src, norms[3])
    outputs = [shortcut_src, of_shortcut]
    y = x
    for kernel, norm in zip(kernels[:2], norms[:2], strict=True):
        convolved = conv(y, kernel)
        dst, *statistics = batch_norm_forward_training(convolved, norm)
        y = jax.nn.relu(dst)
        outputs += [convolved, y, statistics]
    convolved = conv(y, kernels[2])
    dst, *statistics = batch_norm_forward_training(convolved, norms[2])
    return jax.nn.relu(dst + shortcut), [*outputs, convolved, statistics]


BLOCK = (
    array(SHAPE),
    [kernel_of(1), kernel_of(2, 3), kernel_of(3), kernel_of(4)],
    [norm_of(seed) for seed in range(4)],
)


def gradients(block: Any) -> Any:
    """Gradients of a loss of the block's result, as in training."""

    def loss(x: Any, kernels: Any, norms: Any) -> Any:
        y, outputs = jax_bnar.fuse(block)(x, kernels, norms)
        return jnp.square(y).sum(), outputs

    return jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True)


def test_identical_bottleneck_training_forward() -> None:
    assert_fused(identical_bottleneck, *BLOCK, bn_relu=2, bn_add_relu=1)
    assert hlo_calls(jax_bnar.fuse(identical_bottleneck), *BLOCK) == {"jax_bnar_forward_v1": 3}


def test_convolutional_bottleneck_training_forward() -> None:
    assert_fused(convolutional_bottleneck, *BLOCK, bn_relu=2, dual_bn_add_relu=1)


def test_identical_bottleneck_training_backward() -> None:
    """ReLUBackward + BatchNormTrainingBackward three times.

    The result of the last ReLUBackward is also the residual's gradient. `assert_fused` above has
    compared the gradients.
    """
    assert hlo_calls(gradients(identical_bottleneck), *BLOCK) == {
        "jax_bnar_forward_v1": 3,
        "jax_bnar_backward_v1": 3,
    }


def test_convolutional_bottleneck_training_backward() -> None:
    """The ReLUBackward of the dual join feeds two BatchNormTrainingBackward."""
    calls = hlo_calls(gradients(convolutional_bottleneck), *BLOCK)
    backward = sum(count for name, count in calls.items() if "backward" in name)
    # The dual join takes one or two calls each way.
    assert backward in (3, 4)
    assert calls.total() == 2 * backward


def test_a_returned_normalised_array_is_not_joined() -> None:
    """Patterns may return the normalised array; a fused join has none, and `fuse` says so."""

    def block(x: Any, z: Any, norm: Any) -> Any:
        dst, *_ = batch_norm_forward_training(x, norm)
        return jax.nn.relu(dst + z), dst

    report = jax_bnar.explain(block)(array(SHAPE), array(SHAPE, seed=1), norm_of(2))
    assert [candidate.operator for candidate in report.matched] == ["batch_norm"]


@pytest.mark.parametrize("blocks", [1, 2], ids=["convolutional", "identical"])
def test_bottleneck_inference(blocks: int) -> None:
    """Folding gives [Convolution + BiasAdd + ReLU]{1-3} + Convolution + BiasAdd + Add + ReLU."""
    from jax_bnar.flax_layers import ResNet, fold_batch_norms

    net = ResNet(stage_sizes=(blocks,), num_classes=3, num_filters=8, stem="small")
    x = array((2, 8, 8, 3))
    with jax.numpy_dtype_promotion("standard"):
        variables = net.init(jax.random.key(0), x, train=False)
        folded, folded_variables = fold_batch_norms(net, variables)

        def inference(variables: Any, x: Any) -> Any:
            return folded.apply(variables, x, train=False)

        # One for the stem, and three convolutions for each block.
        assert hlo_calls(inference, folded_variables, x) == {
            "jax_bnar_normalise_v1": 1 + 3 * blocks
        }
        expected: Any = net.apply(variables, x, train=False)
        np.testing.assert_allclose(
            jax.jit(inference)(folded_variables, x), expected, rtol=1e-4, atol=1e-5
        )


def test_quantised_patterns_are_not_taken() -> None:
    """Dequantize + ... + Quantize raises an error, because integer dtypes are not supported."""
    x, vector = jnp.ones(SHAPE, jnp.int8), jnp.ones(CHANNELS, jnp.float32)
    with pytest.raises(TypeError, match="src must have one of the dtypes"):
        ops.batch_norm_inference(x, None, None, vector, vector, epsilon=1)
