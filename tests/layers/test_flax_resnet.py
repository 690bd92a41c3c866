"""The blocks and networks against the same ones made with `flax.linen.BatchNorm`."""

import functools
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
    evaluated,
    init,
    normal,
    shapes_and_dtypes,
    tolerance,
    trained,
    trained_looking,
)

import jax_bnar
from benchmarks.models.linen import PlainResNet
from jax_bnar.flax_layers import BatchNorm, FusedBottleneck, ResNet, ResNet50

FROZEN = functools.partial(BatchNorm, update_batch_stats=False)
PLAIN = functools.partial(nn.BatchNorm, use_fast_variance=False)


class PlainBottleneck(nn.Module):
    """ResNet v1.5's bottleneck with `flax.linen.BatchNorm` and the names of Flax's example."""

    filters: int
    strides: tuple[int, int]

    @nn.compact
    def __call__(self, x: jax.Array, use_running_average: bool) -> jax.Array:
        conv = functools.partial(nn.Conv, use_bias=False)
        norm = functools.partial(PLAIN, use_running_average=use_running_average)
        y = nn.relu(norm()(conv(self.filters, (1, 1))(x)))
        y = nn.relu(norm()(conv(self.filters, (3, 3), self.strides)(y)))
        y = norm(scale_init=nn.initializers.zeros_init())(conv(4 * self.filters, (1, 1))(y))
        if x.shape != y.shape:
            x = conv(4 * self.filters, (1, 1), self.strides, name="conv_proj")(x)
            x = norm(name="norm_proj")(x)
        return nn.relu(y + x)


def random_like(variables: Any) -> Any:
    generator = np.random.default_rng(5)
    return jax.tree.map(lambda v: v + generator.uniform(0, 0.5, v.shape).astype(v.dtype), variables)


BLOCKS = pytest.mark.parametrize(
    ("channels", "strides"), [(8, (1, 1)), (4, (1, 1)), (8, (2, 2))], ids=str
)


@pytest.mark.parametrize(
    ("channels", "strides", "norm", "train"),
    [
        (8, (1, 1), BatchNorm, True),
        (4, (1, 1), BatchNorm, True),
        (8, (2, 2), BatchNorm, True),
        (8, (2, 2), BatchNorm, False),
        (8, (2, 2), functools.partial(BatchNorm, save="mask"), True),
        (8, (2, 2), PLAIN, True),
    ],
    ids=str,
)
def test_bottleneck_equals_flax(
    channels: int, strides: tuple[int, int], norm: Any, train: bool
) -> None:
    x = normal(0, (3, 6, 6, channels)) - 3
    block = FusedBottleneck(2, norm=norm, strides=strides)
    plain = PlainBottleneck(2, strides=strides)
    mode = {"use_running_average": not train}

    def run(block: nn.Module, variables: Any, x: jax.Array) -> tuple[jax.Array, Any]:
        y, updated = apply(block, variables, x, mutable=["batch_stats"], **mode)
        return jnp.square(y).sum(), (y, updated)

    def initial(block: nn.Module) -> Any:
        return jax.jit(functools.partial(init, block, **mode))(x)

    with as_flax_needs_it():
        expected = initial(plain)
    variables = initial(block)
    assert_close(variables, expected, 0)

    variables = random_like(variables)
    gradient = jax.jit(jax.grad(run, argnums=(1, 2), has_aux=True), static_argnums=0)
    with as_flax_needs_it():
        expected = gradient(plain, variables, x)
    assert_close(gradient(block, variables, x), expected, 64 * tolerance(x.dtype))


@BLOCKS
def test_bottleneck_is_three_operators(channels: int, strides: tuple[int, int]) -> None:
    x = normal(0, (3, 6, 6, channels))
    has_projection = channels != 8 or strides != (1, 1)

    def operators(block: nn.Module) -> tuple[int, int, int]:
        variables = init(block, x, use_running_average=False)
        text = str(
            jax.make_jaxpr(lambda v, x: apply(block, v, x, use_running_average=False))(variables, x)
        )
        relus = text.count(" max ") + text.count("name=relu")
        return text.count("bnar_forward["), text.count("bnar_dual_forward["), relus

    # The norm of a projection is in the same call as the last one.
    expected = (2, 1, 0) if has_projection else (3, 0, 0)
    assert operators(FusedBottleneck(2, strides=strides, norm=FROZEN)) == expected
    unfused = operators(FusedBottleneck(2, strides=strides, norm=FROZEN, act=nn.soft_sign))
    assert unfused == (3 + has_projection, 0, 0)


def test_bottleneck_starts_as_its_shortcut() -> None:
    x = normal(0, (3, 6, 6, 8)) - 3
    block = FusedBottleneck(2, norm=FROZEN)
    variables = init(block, x, use_running_average=False)
    scales = [variables["params"][f"BatchNorm_{i}"]["scale"].tolist() for i in range(3)]
    assert scales == [[1.0] * 2, [1.0] * 2, [0.0] * 8]
    y = apply(block, variables, x, use_running_average=False)
    np.testing.assert_array_equal(y, nn.relu(x))


def test_bottleneck_takes_the_place_of_the_flax_examples() -> None:
    """It works as `block_cls`, with the fields that the example passes and its class name."""

    class BottleneckResNetBlock(FusedBottleneck):
        pass

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            norm = functools.partial(BatchNorm, use_running_average=False)
            conv = functools.partial(nn.Conv, use_bias=False)
            for _ in range(2):
                x = BottleneckResNetBlock(2, strides=(1, 1), conv=conv, norm=norm, act=nn.relu)(x)
            return x

    variables = jax.eval_shape(functools.partial(init, Net()), normal(0, (3, 6, 6, 8)))
    blocks = ["BottleneckResNetBlock_0", "BottleneckResNetBlock_1"]
    assert sorted(variables["params"]) == blocks


@pytest.mark.parametrize("strides", [1, 2])
@pytest.mark.parametrize("run", [trained, evaluated])
@pytest.mark.parametrize("act", [nn.silu, nn.relu6, nn.celu])
def test_bottleneck_with_another_activation(act: Any, run: Any, strides: int) -> None:
    x = normal(0, (3, 6, 6, 8)) - 3
    with as_flax_needs_it():
        outcomes = []
        for norm in (BatchNorm, PLAIN):
            block = FusedBottleneck(2, norm=norm, act=act, strides=(strides, strides))
            variables = init(block, x, use_running_average=False)
            outcomes.append(run(block, random_like(variables), x))
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5), *outcomes)


@pytest.mark.parametrize("naming", ["flax", "algoperf"])
def test_resnet50_has_the_variables_of_the_example(naming: Any) -> None:
    images = jax.ShapeDtypeStruct((1, 224, 224, 3), jnp.float32)
    net = ResNet50(num_classes=1000, naming=naming)
    variables = jax.eval_shape(net.init, jax.random.key(0), images)
    assert sum(leaf.size for leaf in jax.tree.leaves(variables["params"])) == 25_557_032
    with as_flax_needs_it():
        plain = PlainResNet((3, 4, 6, 3), 1000, algoperf=naming == "algoperf")
        expected = jax.eval_shape(plain.init, jax.random.key(0), images)
    assert shapes_and_dtypes(variables) == shapes_and_dtypes(expected)
    logits = jax.eval_shape(functools.partial(net.apply, train=False), variables, images)
    assert (logits.shape, logits.dtype) == ((1, 1000), jnp.float32)


@pytest.mark.parametrize("naming", ["flax", "algoperf"])
def test_resnet_equals_the_example(naming: Any) -> None:
    """Gradients, logits and running statistics in training; logits in evaluation."""
    x = normal(0, (4, 36, 36, 3)) - 3
    ours = ResNet((1, 1), 5, num_filters=4, naming=naming)
    plain = PlainResNet((1, 1), 5, num_filters=4, algoperf=naming == "algoperf")

    @functools.partial(jax.jit, static_argnums=0)
    def step(net: nn.Module, variables: Any) -> Any:
        def loss(params: Any) -> Any:
            logits, updated = apply(
                net, {**variables, "params": params}, x, mutable=["batch_stats"]
            )
            return jnp.square(logits).sum(), (logits, updated)

        gradient, outputs = jax.grad(loss, has_aux=True)(variables["params"])
        return gradient, outputs, apply(net, variables, x, train=False)

    variables = trained_looking(jax.eval_shape(ours.init, jax.random.key(0), x))
    with as_flax_needs_it():
        expected = step(plain, variables)
    assert_close(step(ours, variables), expected, 256 * tolerance(x.dtype))


def test_the_shortcuts_norm_is_joined() -> None:
    """The last call of a block that downsamples is `dual_bn_add_relu`."""
    x = normal(0, (3, 6, 6, 8)) - 3
    block = FusedBottleneck(2, strides=(2, 2), norm=FROZEN)
    variables = random_like(init(block, x, use_running_average=False))
    params = variables["params"]
    with jax.numpy_rank_promotion("allow"):
        y = apply(block, variables, x, False)
        captured, intermediate = apply(
            block, variables, x, False, capture_intermediates=True, mutable=["intermediates"]
        )
    outputs = intermediate["intermediates"]
    result = jax_bnar.dual_bn_add_relu(
        outputs["Conv_2"]["__call__"][0],
        outputs["conv_proj"]["__call__"][0],
        *(params[n][v] for n in ("BatchNorm_2", "norm_proj") for v in ("scale", "bias")),
    )
    np.testing.assert_array_equal(y, result.y)
    assert_close(captured, y, 8 * tolerance(x.dtype))


@pytest.mark.parametrize("train", [True, False])
def test_a_joined_block_is_the_same_as_one_that_is_not(train: bool) -> None:
    """A subclass may be called in another way, so it is not joined: only the rounding differs."""

    class Other(BatchNorm):
        pass

    x = normal(0, (3, 6, 6, 8)) - 3
    blocks = [
        FusedBottleneck(2, strides=(2, 2), norm=functools.partial(norm, momentum=0.5))
        for norm in (BatchNorm, Other)
    ]
    variables = trained_looking(init(blocks[0], x, use_running_average=False))

    def renamed(tree: Any, old: str, new: str) -> Any:
        return {name.replace(old, new): value for name, value in tree.items()}

    others = {kind: renamed(tree, "BatchNorm", "Other") for kind, tree in variables.items()}

    def run(block: nn.Module, variables: Any) -> Any:
        def loss(params: Any, x: Any) -> Any:
            y, updated = apply(
                block, {**variables, "params": params}, x, not train, mutable=["batch_stats"]
            )
            return jnp.sin(y).sum(), (y, updated)

        return jax.grad(loss, argnums=(0, 1), has_aux=True)(variables["params"], x)

    (params, dx), (y, updated) = run(blocks[0], variables)
    (other_params, other_dx), (other_y, other_updated) = run(blocks[1], others)
    same = renamed(other_params, "Other", "BatchNorm"), other_dx, other_y
    assert_close((params, dx, y), same, 64 * tolerance(x.dtype))
    statistics = updated.get("batch_stats", {}), other_updated.get("batch_stats", {})
    assert_close(statistics[0], renamed(statistics[1], "Other", "BatchNorm"), 1e-6)


def test_a_joined_block_can_be_captured_and_tabulated() -> None:
    """As with Flax's own norms, everyone sees an array of each norm."""
    x = normal(0, (3, 6, 6, 8))
    block = FusedBottleneck(2, strides=(2, 2), norm=FROZEN)
    variables = init(block, x, use_running_average=False)
    run = jax.jit(
        lambda v: apply(block, v, x, False, capture_intermediates=True, mutable=["intermediates"])
    )
    y, captured = run(variables)
    outputs = captured["intermediates"]
    np.testing.assert_array_equal(outputs["BatchNorm_2"]["__call__"][0], y)
    assert outputs["norm_proj"]["__call__"][0].shape == y.shape

    wide: Any = {"use_running_average": False, "console_kwargs": {"width": 300}}
    table = functools.partial(block.tabulate, jax.random.key(0), x, **wide)
    assert "norm_proj" in table()
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        assert "vjp_flops" in table(compute_flops=True, compute_vjp_flops=True)

    def doubled(method: Any, args: Any, keywords: Any, context: Any) -> Any:
        result = method(*args, **keywords)
        return 2 * result if isinstance(context.module, nn.BatchNorm) else result

    with nn.intercept_methods(doubled):
        intercepted = apply(block, variables, x, False)
    assert not np.allclose(intercepted, y)


@pytest.mark.parametrize(
    ("stem", "dtype", "rtol"),
    [("imagenet", jnp.bfloat16, 0.1), ("small", jnp.float32, 64 * tolerance(jnp.float32))],
)
def test_resnet_equals_flax(stem: Any, dtype: Any, rtol: float) -> None:
    x = normal(0, (4, 16, 16, 3)) - 3
    options: dict[str, Any] = {"stage_sizes": (1, 1), "num_classes": 5, "num_filters": 4}
    options |= {"stem": stem, "dtype": dtype}
    ours, plain = ResNet(**options), ResNet(**options, norm=PLAIN)
    variables = trained_looking(jax.eval_shape(ours.init, jax.random.key(0), x))
    run = functools.partial(jax.jit, static_argnums=0)(
        lambda net, variables: apply(net, variables, x, mutable=["batch_stats"])
    )
    with as_flax_needs_it():
        expected = run(plain, variables)
    logits, updated = run(ours, variables)
    assert logits.dtype == dtype
    assert_close((logits, updated), expected, rtol)


@pytest.mark.parametrize(
    ("field", "words"),
    [
        ({"stem": "tiny"}, "stem must be 'imagenet' or 'small', got 'tiny'"),
        ({"padding": "VALID"}, "padding must be 'SAME' or 'torch', got 'VALID'"),
        ({"naming": "bonsai"}, "naming must be 'flax' or 'algoperf', got 'bonsai'"),
    ],
    ids=["stem", "padding", "naming"],
)
def test_resnet_refuses_an_unknown_option(field: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        init(ResNet(stage_sizes=(1,), num_classes=2, **field), normal(0, (2, 8, 8, 3)))
    if "stem" not in field:
        with pytest.raises(ValueError, match=f"FusedBottleneck: {words}"):
            init(FusedBottleneck(4, **field), normal(0, (2, 8, 8, 3)))
