"""The policy keeps convolutions and statistics, and backward computes the rest again.

What is kept is compared by its bytes, what runs by its custom calls, and gradients with those that
are taken without the policy. These agree with the oracle (`test_backward`), and the kernels compute
the same y again from the same statistics, so the same bits are expected.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import both_implementations
from flax import linen as nn
from flax import nnx
from flax_tools import as_flax_needs_it, assert_close, init, normal, trained_looking, trained_model
from jax.sharding import PartitionSpec as P
from programs import hlo_calls, ours
from residuals import saved_bytes
from sharding_tools import compiled_collectives, make_mesh, put
from trees import assert_trees_close

import jax_bnar
from jax_bnar import flax_layers, nnx_layers
from jax_bnar._base.config import Save
from jax_bnar._base.implementation import Implementation
from jax_bnar.checkpoint_policies import dots_and_statistics_saveable as policy

pytestmark = pytest.mark.quick

SHAPE = (8, 6, 6, 16)
CHANNELS = SHAPE[-1]
KEPT, VECTOR = 4 * math.prod(SHAPE), 4 * CHANNELS  # the bytes of an activation and of a vector
saves = pytest.mark.parametrize("save", ["y", "mask"])


def convolved(x: Any, kernel: Any) -> Any:
    return jax.lax.conv_general_dilated(
        x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def block(x: Any, kernels: Any, scale: Any, bias: Any, **keywords: Any) -> Any:
    """A residual block of two convolutions. It can follow itself."""
    y = jax_bnar.bn_relu(convolved(x, kernels[0]), scale, bias, **keywords).y
    return jax_bnar.bn_add_relu(convolved(y, kernels[1]), x, scale, bias, **keywords).y


def operands() -> tuple[jax.Array, ...]:
    kernels = normal(1, (2, 3, 3, CHANNELS, CHANNELS)) - 3
    return normal(0, SHAPE) - 3, kernels / 24, normal(2, (CHANNELS,)), normal(3, (CHANNELS,))


def gradient(function: Any) -> Any:
    return jax.jit(jax.grad(lambda *given: jnp.sin(function(*given)).sum(), (0, 1, 2, 3)))


def assert_equal_bits(left: Any, right: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, left, right)


@saves
@both_implementations
def test_what_is_kept(implementation: Implementation, save: Save) -> None:
    """The results of both convolutions, four vectors, and the mask of the join if there is one."""
    function = functools.partial(block, save=save, implementation=implementation)
    masks = [KEPT // 32] if save == "mask" else []
    sizes = saved_bytes(jax.checkpoint(function, policy=policy), *operands())
    assert sizes == sorted([KEPT] * 2 + [VECTOR] * 4 + masks)
    # Without the policy, there is also the y between the convolutions, and that of the block if it
    # has no mask.
    saved_more = KEPT * (1 if save == "mask" else 2)
    assert sum(saved_bytes(function, *operands())) >= sum(sizes) + saved_more


@saves
def test_what_runs_again(save: Save) -> None:
    function = functools.partial(block, save=save)
    checkpointed = jax.checkpoint(function, policy=policy)
    assert hlo_calls(gradient(checkpointed), *operands()) == {
        "jax_bnar_forward_v1": 2,
        "jax_bnar_normalise_v1": 1 if save == "mask" else 2,
        "jax_bnar_backward_v1": 2,
    }
    assert_equal_bits(gradient(checkpointed)(*operands()), gradient(function)(*operands()))


@both_implementations
def test_blocks_in_a_row(implementation: Implementation) -> None:
    """Each y is computed again once, although the end of a block takes those before it."""
    function = functools.partial(block, implementation=implementation)

    def network(x: Any, *parameters: Any) -> Any:
        for _ in range(3):
            x = function(x, *parameters)
        return x

    checkpointed = jax.checkpoint(network, policy=policy)
    assert saved_bytes(checkpointed, *operands()) == sorted([KEPT] * 6 + [VECTOR] * 12)
    if implementation == "ffi":
        counted = ours(gradient(checkpointed), *operands())
        assert counted == {"forward": 6, "normalise": 6, "backward": 6}
    left, right = gradient(checkpointed)(*operands()), gradient(network)(*operands())
    assert_trees_close(left, right, tolerance=0 if implementation == "ffi" else 1e-4)


def test_shortcuts_with_a_norm() -> None:
    """A block with two normalised summands takes no block before it."""

    def joined(x: Any, kernels: Any, scale: Any, bias: Any) -> Any:
        first, second = (convolved(x, kernel) for kernel in kernels)
        return jax_bnar.dual_bn_add_relu(first, second, scale, bias, scale, bias).y

    def twice(x: Any, *parameters: Any) -> Any:
        return joined(joined(x, *parameters), *parameters)

    checkpointed = jax.checkpoint(twice, policy=policy)
    assert saved_bytes(checkpointed, *operands()) == sorted([KEPT] * 4 + [VECTOR] * 8)
    # Of the last block, backward needs no y.
    counted = ours(gradient(checkpointed), *operands())
    assert counted == {"dual_forward": 2, "dual_normalise": 1, "dual_backward": 2}
    assert_equal_bits(gradient(checkpointed)(*operands()), gradient(twice)(*operands()))


def test_frozen_statistics() -> None:
    """With given statistics, y is computed again from the convolution."""
    vectors = jnp.zeros(CHANNELS, jnp.float32), jnp.ones(CHANNELS, jnp.float32)

    def frozen(x: Any, kernels: Any, scale: Any, bias: Any) -> Any:
        y = jax_bnar.bn_relu_inference(convolved(x, kernels[0]), scale, bias, *vectors)
        return jax_bnar.bn_add_relu_inference(convolved(y, kernels[1]), x, scale, bias, *vectors)

    checkpointed = jax.checkpoint(frozen, policy=policy)
    assert [size for size in saved_bytes(checkpointed, *operands()) if size > VECTOR] == [KEPT] * 2
    assert ours(gradient(checkpointed), *operands())["inference"] == 4
    assert_equal_bits(gradient(checkpointed)(*operands()), gradient(frozen)(*operands()))


@both_implementations
def test_vmap_and_scan(implementation: Implementation) -> None:
    x, *parameters = operands()
    function = functools.partial(block, implementation=implementation)
    stacked = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf / 2, -leaf]), tuple(parameters))

    def scanned(function: Any) -> Any:
        def network(x: Any, kernels: Any, scales: Any, biases: Any) -> Any:
            layers = kernels, scales, biases
            return jax.lax.scan(lambda x, layer: (function(x, *layer), None), x, layers)[0]

        return network

    def mapped(function: Any) -> Any:
        return jax.vmap(function, (None, 0, 0, 0))

    for around in (scanned, mapped):
        with_policy = around(jax.checkpoint(function, policy=policy))
        left = gradient(with_policy)(x, *stacked)
        right = gradient(around(function))(x, *stacked)
        assert_trees_close(left, right, tolerance=0 if implementation == "ffi" else 1e-4)
        if implementation == "ffi":
            counted = ours(gradient(with_policy), x, *stacked)
            assert counted == {"forward": 2, "normalise": 2, "backward": 2}


def test_forward_mode_and_second_order() -> None:
    x, *parameters = operands()
    checkpointed = jax.checkpoint(block, policy=policy)

    def product(function: Any) -> Any:
        of_x = jax.grad(lambda x: jnp.sin(function(x, *parameters)).sum())
        return jax.jit(lambda: jax.jvp(of_x, (x,), (x,)))()

    assert_trees_close(product(checkpointed), product(block), tolerance=1e-3)


def test_sharded_statistics_are_communicated_once() -> None:
    mesh = make_mesh("auto", data=8)
    x, *parameters = operands()
    given = (put(x, mesh, P("data")), *(put(leaf, mesh, P()) for leaf in parameters))
    function = functools.partial(block, implementation="ffi")
    checkpointed = jax.checkpoint(function, policy=policy)
    with_policy, without = gradient(checkpointed), gradient(function)
    assert_equal_bits(with_policy(*given), without(*given))
    assert_trees_close(with_policy(*given), without(*operands()), tolerance=1e-3)
    sent, expected = (
        sorted(compiled_collectives(each.lower(*given).compile()))
        for each in (with_policy, without)
    )
    assert sent == expected


@pytest.mark.parametrize(("num_groups", "operation"), [(1, "forward"), (2, "statistics")])
def test_axis_names(num_groups: int, operation: str) -> None:
    """Statistics over a mapped axis are kept, so no collective runs again.

    Without ghost batches, all examples are one call.
    """
    x, *parameters = operands()
    parts = x.reshape(2, 4, *SHAPE[1:])

    def synchronised(function: Any) -> Any:
        def mapped(parts: Any, *parameters: Any) -> Any:
            return jax.vmap(lambda x: function(x, *parameters), axis_name="i")(parts)

        return mapped

    function = functools.partial(block, axis_name="i", num_groups=num_groups)
    checkpointed = jax.checkpoint(synchronised(function), policy=policy)
    sizes = saved_bytes(checkpointed, parts, *parameters)
    assert [size for size in sizes if size > 2 * VECTOR] == [KEPT] * 2
    counted = ours(gradient(checkpointed), parts, *parameters)
    without = ours(gradient(synchronised(function)), parts, *parameters)
    assert counted[operation] == 2
    assert counted == without | {"normalise": without.get("normalise", 0) + 2}
    left = gradient(checkpointed)(parts, *parameters)
    assert_equal_bits(left, gradient(synchronised(function))(parts, *parameters))


# --- layers and fuse ------------------------------------------------------------------------------

IMAGES = (8, 32, 32, 3)
NETWORK: Any = {"stage_sizes": (2, 1), "num_classes": 10, "num_filters": 16}
# The stem and the inner norms of three blocks; two of the blocks change shape and one does not.
CALLS = {"forward": 8, "backward": 8, "dual_forward": 2, "dual_backward": 2}
AGAIN = {"normalise": 8, "dual_normalise": 2}


def checkpointed_by_policy(function: Any) -> Any:
    return jax.checkpoint(function, policy=policy)


def linen(layer: Any, *around: Any) -> tuple[Any, Any, Any]:
    """(gradient, parameters, images) of a Linen network whose loss is wrapped in `around`."""
    images = normal(0, IMAGES)
    shapes = jax.eval_shape(functools.partial(layer.init, train=False), jax.random.key(0), images)
    variables = trained_looking(shapes)

    def loss(parameters: Any, images: Any) -> tuple[jax.Array, Any]:
        given = {**variables, "params": parameters}
        logits, updated = layer.apply(given, images, mutable=["batch_stats"])
        return jnp.square(logits).sum(), updated

    for wrapper in around:
        loss = wrapper(loss)
    return jax.jit(jax.grad(loss, has_aux=True)), variables["params"], images


def test_linen_network() -> None:
    with_policy, *given = linen(flax_layers.ResNet(**NETWORK), checkpointed_by_policy)
    without, *_ = linen(flax_layers.ResNet(**NETWORK))
    assert ours(with_policy, *given) == CALLS | AGAIN
    assert ours(without, *given) == CALLS
    assert_trees_close(with_policy(*given), without(*given), tolerance=1e-3)


LEAKY_RELU = functools.partial(jax.nn.leaky_relu, negative_slope=0.1)


class Chain(nn.Module):
    """Convolutions with a BatchNorm and an activation each, as in Darknet."""

    act: Any
    is_ours: bool

    @nn.compact
    def __call__(self, x: Any) -> Any:
        for _ in range(3):
            x = nn.Conv(CHANNELS, (3, 3), use_bias=False)(x)
            if self.is_ours:
                x = flax_layers.BatchNorm(use_running_average=False, activation=self.act)(x)
            else:
                x = self.act(nn.BatchNorm(use_running_average=False)(x))
        return x


@pytest.mark.parametrize(("act", "of_flax"), [(LEAKY_RELU, 8), (jax.nn.silu, 15)])
def test_what_other_activations_keep(act: Any, of_flax: int) -> None:
    """With the policy one array for each layer, as InPlace-ABN does for a leaky ReLU."""
    x, *_ = operands()

    def kept(is_ours: bool, around: Any = lambda f: f) -> int:
        """The number of arrays of the size of x."""
        chain = Chain(act, is_ours)
        variables = init(chain, x)

        def run(params: Any, x: Any) -> Any:
            return chain.apply({**variables, "params": params}, x, mutable=["batch_stats"])[0]

        sizes = saved_bytes(jax.jit(around(run)), variables["params"], x)
        return sum(size == KEPT for size in sizes)

    with as_flax_needs_it():
        assert kept(False) >= of_flax
        assert kept(True) == 2 * 3 - 1  # The last y is the result.
        assert kept(True, functools.partial(jax.checkpoint, policy=policy)) == 3


def test_blocks_by_linen_remat() -> None:
    """The lifted form around a block keeps what the policy says, besides the block's operand."""
    layer = nn.remat(flax_layers.FusedBottleneck, policy=policy)(4, norm=training_norm())
    plain = flax_layers.FusedBottleneck(4, norm=training_norm())
    x = normal(0, (2, 6, 6, 16))
    variables = init(plain, x)

    def applied(layer: Any) -> Any:
        def train(parameters: Any, x: Any) -> Any:
            given = {**variables, "params": parameters}
            return layer.apply(given, x, mutable=["batch_stats"])[0]

        return train

    def slopes(layer: Any) -> Any:
        return jax.jit(jax.grad(lambda p, x: jnp.sin(applied(layer)(p, x)).sum(), (0, 1)))

    parameters = variables["params"]
    assert_trees_close(slopes(layer)(parameters, x), slopes(plain)(parameters, x))
    pixels = 2 * 6 * 6
    convolutions = [pixels * 4 * 4] * 2 + [pixels * 16 * 4]
    statistics = [4 * 4] * 4 + [16 * 4] * 2
    sizes = saved_bytes(applied(layer), parameters, x)
    assert sizes == sorted(convolutions + statistics)
    counted = ours(slopes(layer), parameters, x)
    assert counted == {"forward": 3, "normalise": 3, "backward": 3}


def training_norm() -> Any:
    return functools.partial(flax_layers.BatchNorm, use_running_average=False)


def test_nnx_network() -> None:
    images = normal(0, IMAGES)

    def loss(model: Any, images: Any) -> jax.Array:
        return jnp.square(model(images)).sum()

    def outcome(loss: Any) -> Any:
        model = trained_model(functools.partial(nnx_layers.ResNet, **NETWORK))
        slopes = nnx.jit(nnx.grad(loss))(model, images)
        return nnx.to_pure_dict(slopes), nnx.to_pure_dict(nnx.state(model, nnx.BatchStat))

    assert_trees_close(outcome(nnx.remat(loss, policy=policy)), outcome(loss), tolerance=1e-3)


def test_nnx_network_by_its_functional_interface() -> None:
    images = normal(0, IMAGES)
    model = trained_model(functools.partial(nnx_layers.ResNet, **NETWORK))
    graph, parameters, rest = nnx.split(model, nnx.Param, ...)

    def loss(parameters: Any, rest: Any, images: Any) -> tuple[jax.Array, Any]:
        model = nnx.merge(graph, parameters, rest, copy=True)
        value = jnp.square(model(images)).sum()
        return value, nnx.state(model, nnx.BatchStat)

    with_policy, without = (
        jax.jit(jax.grad(function, has_aux=True))
        for function in (checkpointed_by_policy(loss), loss)
    )
    given = parameters, rest, images
    assert ours(with_policy, *given) == CALLS | AGAIN
    assert_trees_close(with_policy(*given), without(*given), tolerance=1e-3)


@pytest.mark.parametrize(
    "around",
    [(jax_bnar.fuse, checkpointed_by_policy), (checkpointed_by_policy, jax_bnar.fuse)],
    ids=["checkpoint of fuse", "fuse of checkpoint"],
)
def test_fused_network(around: tuple[Any, ...]) -> None:
    plain = flax_layers.ResNet(**NETWORK, norm=nn.BatchNorm)
    with as_flax_needs_it():
        with_policy, *given = linen(plain, *around)
        without, *_ = linen(plain)
        assert ours(with_policy, *given) == CALLS | AGAIN
        assert_close(with_policy(*given), without(*given), rtol=1e-2)


def test_policies_can_be_joined() -> None:
    """It returns a bool, which `save_from_both_policies` asks for."""
    names = jax.checkpoint_policies.save_only_these_names("other")
    either = jax.checkpoint_policies.save_from_both_policies(policy, names)
    checkpointed = jax.checkpoint(block, policy=either)
    assert saved_bytes(checkpointed, *operands()) == sorted([KEPT] * 2 + [VECTOR] * 4)
