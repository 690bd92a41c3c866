"""jax.checkpoint: how many bytes are saved, and which kernels run again in the backward pass."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import (
    FLOAT64,
    Case,
    Form,
    call,
    inputs_of,
    one_or_two_inputs,
    operands,
    operation_of,
    unfused,
)
from flax_tools import init, normal
from programs import hlo_calls, ours
from residuals import saved_bytes
from trees import assert_trees_close

from jax_bnar._base.config import Save
from jax_bnar._base.implementation import Implementation
from jax_bnar.flax_layers import BatchNorm, FusedBottleneck

pytestmark = pytest.mark.quick

CASE = Case((6, 5, 16))
SIZE, CHANNELS = 6 * 5 * 16, 16
NAMES = ("bnar_statistics", "bnar_mask")
NAMED = jax.checkpoint_policies.save_only_these_names(*NAMES)
saves = pytest.mark.parametrize("save", ["y", "mask"])


def once(form: Form = "bn_add_relu") -> dict[str, int]:
    return {operation_of(form, name): 1 for name in ("forward", "backward")}


def normalised(form: Form = "bn_add_relu") -> dict[str, int]:
    """With y, but not the statistics, computed again."""
    return once(form) | {operation_of(form, "normalise"): 1}


def operands_of_block(form: Form, **keywords: Any) -> tuple[Any, Any, Any]:
    """x, scale and bias of a block."""
    x, _, scale, bias = operands(Case(form=form, **{"shape": CASE.shape, **keywords}))
    return jax.tree.leaves(x)[0], scale, bias


def tensors(x: Any, scale: Any) -> Any:
    """The operands of a residual block that are not vectors: x and z, or two x."""
    return ((jnp.sin(x), x), None) if isinstance(scale, tuple) else (jnp.sin(x), x)


def block(x: Any, scale: Any, bias: Any, **keywords: Any) -> Any:
    """A residual block with relu(batch_norm(w) + x), of which backward reads w, x and y.

    With a pair of scales it is relu(batch_norm(w) + batch_norm(x)).
    """
    form = "dual_bn_add_relu" if isinstance(scale, tuple) else "bn_add_relu"
    first, second = tensors(x, scale)
    return jnp.cos(call(form, first, second, scale, bias, **keywords).y) * x


def plain_block(x: Any, scale: Any, bias: Any) -> Any:
    first, second = tensors(x, scale)
    return jnp.cos(unfused(first, second, scale, bias).y) * x


@one_or_two_inputs
@pytest.mark.parametrize(
    ("save", "names", "vectors", "masks"),
    [("mask", NAMES, 2, 1), ("mask", NAMES[:1], 2, 0), ("y", NAMES, 2, 0), ("mask", (), 0, 0)],
    ids=["statistics-and-mask", "statistics", "statistics-y", "nothing"],
)
def test_residual_bytes(
    form: Form, save: Save, names: tuple[str, ...], vectors: int, masks: int
) -> None:
    """`vectors` are the statistics of each input."""
    given = jax.tree.map(jnp.asarray, operands_of_block(form))
    policy = jax.checkpoint_policies.save_only_these_names(*names)
    function = jax.checkpoint(lambda *given: block(*given, save=save), policy=policy)
    expected = [CHANNELS * 4] * (vectors * inputs_of(form)) + [SIZE // 8] * masks
    assert saved_bytes(function, *given) == sorted(expected)


@pytest.mark.parametrize("implementation", ["ffi", "xla"])
@one_or_two_inputs
@saves
def test_gradients(implementation: Implementation, form: Form, save: Save) -> None:
    given = operands_of_block(form)

    def loss(function: Any) -> Any:
        return jax.jit(jax.grad(lambda *given: function(*given).sum(), (0, 1, 2)))

    def ours_block(*given: Any) -> Any:
        return block(*given, save=save, implementation=implementation)

    actual = loss(jax.checkpoint(ours_block, policy=NAMED))(*given)
    assert_trees_close(actual, loss(plain_block)(*given), tolerance=1e-4)


@one_or_two_inputs
@saves
def test_statistics_run_once_in_the_compiled_program(form: Form, save: Save) -> None:
    """Forward runs once; backward recomputes only y, from the saved statistics."""
    function = jax.checkpoint(lambda *given: block(*given, save=save), policy=NAMED)
    gradient = jax.grad(lambda *given: function(*given).sum(), (0, 1, 2))
    assert hlo_calls(gradient, *operands_of_block(form)) == {
        f"jax_bnar_{name}_v1": count for name, count in normalised(form).items()
    }


@one_or_two_inputs
def test_mask_saved_is_not_computed_again(form: Form) -> None:
    x, scale, bias = operands_of_block(form)
    function = jax.checkpoint(lambda *given: block(*given, save="mask"), policy=NAMED)
    jaxpr = str(jax.make_jaxpr(jax.grad(lambda x: function(x, scale, bias).sum()))(x))
    _, again = jaxpr.split("normalise")
    assert "save_mask=False" in again.split("]")[0]


@one_or_two_inputs
@saves
@pytest.mark.parametrize("saved", ["all but elementwise", "forward"])
def test_policy_that_saves_y(saved: str, form: Form, save: Save) -> None:
    """If y is saved, nothing runs again."""

    def policy(primitive: Any, *_: Any, **__: Any) -> bool:
        if saved == "forward":
            return primitive.name in ("bnar_forward", "bnar_dual_forward")
        return primitive.name not in ("sin", "cos", "mul")

    x, scale, bias = operands_of_block(form)
    function = jax.checkpoint(lambda *given: block(*given, save=save), policy=policy)
    assert ours(jax.grad(lambda x: function(x, scale, bias).sum()), x) == once(form)


def test_policy_that_offloads_other_names() -> None:
    """A policy may return other values than True and False."""
    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=list(NAMES),
        names_which_can_be_offloaded=["other"],
        offload_src="device",
        offload_dst="pinned_host",
    )
    x, _, scale, bias = operands(CASE)
    function = jax.checkpoint(lambda *given: block(*given, save="mask"), policy=policy)
    assert ours(jax.grad(lambda x: function(x, scale, bias).sum()), x) == normalised()


@pytest.mark.parametrize("where", ["inside", "outside"])
def test_scan_over_layers(where: str) -> None:
    """Each layer keeps statistics and mask, and x if the checkpoint is around the layer."""
    x, _, scale, bias = map(jnp.asarray, operands(CASE))
    layers = 3
    scales, biases = jnp.stack([scale, scale / 2, -scale]), jnp.stack([bias, bias + 1, bias])

    def layer(function: Any) -> Any:
        return lambda x, parameters: (function(x, *parameters), None)

    def stack(function: Any, checkpoint: Any) -> Any:
        one = layer(function)
        if where == "inside":
            one = checkpoint(one)

        def whole(x: Any, scales: Any, biases: Any) -> Any:
            return jax.lax.scan(one, x, (scales, biases))[0]

        return checkpoint(whole) if where == "outside" else whole

    fused = stack(
        lambda *given: block(*given, save="mask"), lambda f: jax.checkpoint(f, policy=NAMED)
    )
    plain = stack(plain_block, lambda f: f)
    given = (x, scales, biases)

    def gradient(function: Any) -> Any:
        return jax.grad(lambda *given: function(*given).sum(), (0, 1, 2))

    actual, expected = jax.jit(gradient(fused))(*given), jax.jit(gradient(plain))(*given)
    assert_trees_close(actual, expected, tolerance=1e-3)
    sizes = saved_bytes(fused, *given)
    each = [layers * CHANNELS * 4] * 2 + [layers * SIZE // 8]
    if where == "inside":
        assert sizes == sorted([*each, layers * SIZE * 4])
        assert ours(gradient(fused), *given) == normalised()
    else:
        # The layers' inputs are recomputed too, by one more scan of normalise.
        assert sizes == sorted(each)
        assert ours(gradient(fused), *given)["forward"] == 1


@one_or_two_inputs
def test_vmap_of_checkpoint_and_checkpoint_of_vmap(form: Form) -> None:
    x, scale, bias = operands_of_block(form)
    xs = np.stack([x, x + 1])

    def one(x: Any, scale: Any, bias: Any) -> Any:
        return block(x, scale, bias, save="mask")

    axes = (0, None, None)
    outside = jax.vmap(jax.checkpoint(one, policy=NAMED), axes)
    inside = jax.checkpoint(jax.vmap(one, axes), policy=NAMED)
    plain = jax.vmap(plain_block, axes)
    expected = jax.grad(lambda *given: plain(*given).sum(), (0, 1, 2))(xs, scale, bias)
    for function in (outside, inside):
        gradient = jax.grad(lambda *given, f=function: f(*given).sum(), (0, 1, 2))
        assert_trees_close(gradient(xs, scale, bias), expected, tolerance=1e-4)
        assert ours(gradient, xs, scale, bias) == normalised(form)


@one_or_two_inputs
def test_forward_mode_and_second_order_of_checkpoint(form: Form) -> None:
    x, scale, bias = operands_of_block(form, shape=(4, 3, 2), seed=3, **FLOAT64)

    def product(function: Any) -> Any:
        gradient = jax.grad(lambda x: function(x, scale, bias).sum())
        return jax.jit(lambda: jax.jvp(gradient, (x,), (x,)))()

    fused = jax.checkpoint(lambda *given: block(*given, save="mask"), policy=NAMED)
    assert_trees_close(product(fused), product(plain_block), tolerance=1e-9)
    assert_trees_close(
        jax.jvp(lambda x: fused(x, scale, bias), (x,), (x,)),
        jax.jvp(lambda x: plain_block(x, scale, bias), (x,), (x,)),
        tolerance=1e-10,
    )


@saves
def test_bottleneck(save: Save) -> None:
    """A checkpoint around a block that saves convolutions keeps them, statistics and a mask.

    This is less than half of what the block keeps without checkpoint.
    """
    filters, shape = 4, (2, 6, 6, 16)
    norm = functools.partial(BatchNorm, save=save, use_running_average=False)
    layer = FusedBottleneck(filters, norm=norm)
    x = normal(0, shape)
    variables = init(layer, x)
    policy = jax.checkpoint_policies.save_from_both_policies(
        jax.checkpoint_policies.dots_saveable, NAMED
    )

    def train(parameters: Any, x: Any) -> Any:
        given = {**variables, "params": parameters}
        y, _ = layer.apply(given, x, mutable=["batch_stats"])
        return y

    def gradient(function: Any) -> Any:
        return jax.jit(jax.grad(lambda p, x: jnp.sin(function(p, x)).sum(), (0, 1)))

    parameters = variables["params"]
    remat = jax.checkpoint(train, policy=policy)
    assert_trees_close(gradient(remat)(parameters, x), gradient(train)(parameters, x))
    pixels = 2 * 6 * 6
    convolutions = [pixels * filters * 4] * 2 + [pixels * 4 * filters * 4]
    statistics = [filters * 4] * 4 + [4 * filters * 4] * 2
    masks = [pixels * 4 * filters // 8] if save == "mask" else []
    expected = convolutions + statistics + masks
    sizes = saved_bytes(remat, parameters, x)
    assert sizes == sorted(expected)
    assert sum(sizes) < 0.5 * sum(saved_bytes(train, parameters, x))
    # The two inner outputs are inputs of convolutions, so they are recomputed from the statistics.
    # So is the last one if backward reads the ReLU's sign from it.
    again = 2 if save == "mask" else 3
    counted = ours(gradient(remat), parameters, x)
    assert counted == {"forward": 3, "normalise": again, "backward": 3}
