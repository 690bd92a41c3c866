"""The NNX networks against the same ones with `flax.nnx.BatchNorm`, and against Linen's."""

import functools
import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax_tools import (
    apply,
    as_flax_needs_it,
    assert_close,
    normal,
    tolerance,
    trained_looking,
    trained_model,
)
from programs import ours

from jax_bnar import flax_layers, torch_weights
from jax_bnar.nnx_layers import (
    BatchNorm,
    FusedBottleneck,
    ResNet,
    ResNet50,
    Shortcut,
    convert_batch_norms,
)

PLAIN = functools.partial(nnx.BatchNorm, use_fast_variance=False)


@nnx.jit
def step(model: Any, x: jax.Array) -> Any:
    """(y, gradients); this updates the running statistics."""

    def loss(model: Any) -> Any:
        y = model(x)
        return jnp.square(y).sum(), y

    gradients, y = nnx.grad(loss, has_aux=True)(model)
    return y, gradients


def outcome(model: Any, x: jax.Array) -> Any:
    y, gradients = step(model, x)
    return y, nnx.to_pure_dict(gradients), nnx.to_pure_dict(nnx.state(model))


@pytest.mark.parametrize(
    ("in_features", "strides", "padding"),
    [(8, 1, "torch"), (4, 1, "SAME"), (8, 2, "SAME")],
)
def test_bottleneck_equals_nnx(in_features: int, strides: int, padding: Any) -> None:
    x = normal(0, (3, 6, 6, in_features)) - 3
    make = functools.partial(FusedBottleneck, in_features, 2, strides=strides, padding=padding)
    with as_flax_needs_it():
        expected = outcome(trained_model(functools.partial(make, norm=PLAIN)), x)
        converted = convert_batch_norms(trained_model(functools.partial(make, norm=PLAIN)))
        assert_close(outcome(converted, x), expected, 64 * tolerance(x.dtype))
    assert_close(outcome(trained_model(make), x), expected, 64 * tolerance(x.dtype))


def test_bottleneck_is_three_operators_and_starts_as_its_shortcut() -> None:
    x = normal(0, (3, 6, 6, 8)) - 3

    def forward(block: Any) -> Any:
        block.set_attributes(update_batch_stats=False)
        return lambda x: block(x)

    block = FusedBottleneck(8, 2, rngs=nnx.Rngs(0))
    assert ours(forward(block), x) == {"forward": 3}
    assert "max" not in str(jax.make_jaxpr(forward(block))(x))
    np.testing.assert_array_equal(block(x), nnx.relu(x))
    strided = trained_model(functools.partial(FusedBottleneck, 8, 2, strides=2))
    assert ours(forward(strided), x) == {"forward": 2, "dual_forward": 1}
    for act, name in ((nnx.silu, "silu"), (nnx.celu, "none")):
        other = trained_model(functools.partial(FusedBottleneck, 8, 2, act=act))
        assert ours(forward(other), x) == {"forward": 3}
        assert other.bn0.activation == name
    strided = trained_model(functools.partial(FusedBottleneck, 8, 2, strides=2, act=nnx.silu))
    assert ours(forward(strided), x) == {"forward": 2, "dual_forward": 1}


def test_a_layer_that_takes_another_ones_call() -> None:
    """It is one call where it can be, and with a mask, or another epsilon, the sum of two."""
    x1, x2 = normal(0, (6, 5, 8)), normal(1, (6, 5, 8)) * 2
    last = BatchNorm(8, activation="relu", rngs=nnx.Rngs(0))
    same, other = (BatchNorm(8, epsilon=epsilon, rngs=nnx.Rngs(0)) for epsilon in (1e-5, 1e-3))
    mask = np.arange(6)[:, None, None] < 4
    for layer in (last, same, other):
        layer.set_attributes(update_batch_stats=False)

    def run(shortcut: BatchNorm, **options: Any) -> Any:
        return lambda x1, x2: last(x1, residual=Shortcut(shortcut, x2), **options)

    assert ours(run(same), x1, x2) == {"dual_forward": 1}
    assert ours(run(other), x1, x2) == {"forward": 2}
    # As many elements in another shape are no residual.
    with pytest.raises(ValueError, match=r"shortcut's norm must have the shape of x, \(6, 5, 8\)"):
        run(same)(x1, x2.reshape(5, 6, 8))
    cases: list[tuple[BatchNorm, dict[str, Any]]] = [
        (same, {}),
        (other, {}),
        (same, {"mask": mask}),
    ]
    for shortcut, options in cases:
        expected = last(x1, residual=shortcut(x2, **options), **options)
        np.testing.assert_allclose(run(shortcut, **options)(x1, x2), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("activation", ["none", nnx.celu])
def test_a_join_whose_operator_applies_no_activation(activation: Any) -> None:
    """It is one call, but for inputs that two calls read as they are stored."""
    x1, x2 = normal(0, (6, 5, 8)), normal(1, (6, 5, 8)) * 2
    last, shortcut = (
        BatchNorm(8, activation=own, rngs=nnx.Rngs(0)) for own in (activation, "none")
    )
    for layer in (last, shortcut):
        layer.set_attributes(update_batch_stats=False)

    def run(x1: Any, x2: Any) -> Any:
        return last(x1, residual=Shortcut(shortcut, x2))

    assert ours(run, x1, x2) == {"dual_forward": 1}
    np.testing.assert_allclose(run(x1, x2), last(x1, residual=shortcut(x2)), rtol=1e-5, atol=1e-5)
    narrow = [jnp.asarray(x, jnp.bfloat16) for x in (x1, x2)]
    assert run(*narrow).dtype == jnp.float32
    assert ours(run, *narrow) == {"forward": 2}


def test_a_shortcut_has_the_mode_and_the_mask_of_the_call() -> None:
    x, mask = normal(0, (6, 5, 8)), np.arange(6)[:, None, None] < 4
    last, shortcut = (BatchNorm(8, rngs=nnx.Rngs(0)) for _ in range(2))
    last(x, use_running_average=True, residual=Shortcut(shortcut, x))
    np.testing.assert_array_equal(shortcut.mean[...], np.zeros(8))
    last(x, residual=Shortcut(shortcut, x), mask=mask)
    np.testing.assert_array_equal(shortcut.mean[...], last.mean[...])
    np.testing.assert_allclose(shortcut.mean[...], x[:4].mean((0, 1)) / 100, rtol=1e-5, atol=1e-7)
    plain: Any = nnx.BatchNorm(8, rngs=nnx.Rngs(0))
    with pytest.raises(
        TypeError, match=r"norm of a Shortcut must be .* got a flax\.nnx.*\.BatchNorm; pass its"
    ):
        last(x, residual=Shortcut(plain, x))

    class Doubled(BatchNorm):
        def __call__(self, *args: Any, **keywords: Any) -> Any:
            return 2 * super().__call__(*args, **keywords)

    with pytest.raises(TypeError, match=r"Shortcut must not have a __call__ of its own"):
        last(x, residual=Shortcut(Doubled(8, rngs=nnx.Rngs(0)), x))


def test_a_join_takes_integer_parameters_as_a_single_layer_does() -> None:
    x1, x2 = normal(0, (6, 5, 8)), normal(1, (6, 5, 8))
    last, shortcut = (
        BatchNorm(8, activation=activation, param_dtype=jnp.int32, rngs=nnx.Rngs(0))
        for activation in ("relu", "none")
    )
    for layer in (last, shortcut):
        layer.set_attributes(update_batch_stats=False)
    for mode in ({"use_running_average": False}, {"use_running_average": True}):
        y = last(x1, **mode, residual=Shortcut(shortcut, x2))
        expected = last(x1, **mode, residual=shortcut(x2, **mode))
        np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-5)


def test_tabulate_leaves_the_classes_as_they_were() -> None:
    """`nnx.tabulate` jits every public method of every class, and leaves them so if it fails."""
    classes = (BatchNorm, nnx.BatchNorm, FusedBottleneck, nnx.Conv)

    def methods() -> list[Any]:
        return [inspect.getmembers(kind, inspect.isfunction) for kind in classes]

    before = methods()
    model = ResNet((1, 1), 5, num_filters=4, stem="small", rngs=nnx.Rngs(0))
    table = nnx.tabulate(model, normal(0, (2, 8, 8, 3)), console_kwargs={"width": 200})
    assert methods() == before
    for row in ("stem/bn", "layer0/blocks/0/bn2", "layer1/blocks/0/downsample/conv", "fc"):
        assert row in table
    layer = BatchNorm(3, rngs=nnx.Rngs(0))
    x = normal(0, (2, 8, 8, 3))
    assert "BatchNorm Summary" in nnx.tabulate(layer, x, residual=x, mask=jnp.ones((2, 8, 8, 1)))
    assert methods() == before


def test_resnet50_has_the_state_of_bonsai() -> None:
    model: Any = nnx.eval_shape(lambda: ResNet50(1000, rngs=nnx.Rngs(0)))
    assert sum(v.size for v in jax.tree.leaves(nnx.state(model, nnx.Param))) == 25_557_032
    paths = {".".join(map(str, path)) for path, _ in nnx.to_flat_state(nnx.state(model))}
    norm = ["scale", "bias", "mean", "var"]
    expected = {"stem.conv.kernel", *(f"stem.bn.{v}" for v in norm), "fc.kernel", "fc.bias"}
    for stage, size in enumerate((3, 4, 6, 3)):
        for index in range(size):
            block = f"layer{stage}.blocks.{index}"
            names = [f"{block}.{{}}{i}" for i in range(3)]
            names += [f"{block}.downsample.{{}}"] if index == 0 else []
            for name in names:
                expected.add(name.format("conv") + ".kernel")
                expected |= {f"{name.format('bn')}.{v}" for v in norm}
    assert paths == expected
    images = jax.ShapeDtypeStruct((2, 224, 224, 3), jnp.float32)
    logits = nnx.eval_shape(lambda model, x: model(x), model, images)
    assert (logits.shape, logits.dtype) == ((2, 1000), jnp.float32)


@pytest.mark.parametrize("padding", ["torch", "SAME"])
def test_resnet_equals_linen(padding: Any) -> None:
    """With the same weights, logits in both modes and running statistics agree."""
    x = normal(0, (4, 36, 36, 3)) - 3
    linen = flax_layers.ResNet((1, 1), 5, num_filters=4, padding=padding)
    variables = trained_looking(jax.eval_shape(linen.init, jax.random.key(0), x))
    for dtype, rtol in ((jnp.float32, 1e-5), (jnp.bfloat16, 0.1)):
        net = linen.clone(dtype=dtype)

        @jax.jit
        def run(variables: Any, x: jax.Array, net: Any = net) -> Any:
            evaluated = apply(net, variables, x, train=False)
            return evaluated, apply(net, variables, x, mutable=["batch_stats"])

        evaluated, (trained, updated) = run(variables, x)
        make = functools.partial(ResNet, (1, 1), 5, num_filters=4, dtype=dtype)
        # Weights of torchvision are for networks that pad as it does. The variables are the same.
        of_torch, model = (
            nnx.eval_shape(lambda make=make, p=p: make(padding=p, rngs=nnx.Rngs(0)))
            for p in ("torch", padding)
        )
        as_torch = linen.clone(padding="torch")
        torch_weights.to_nnx(torch_weights.from_linen(as_torch, variables), of_torch)
        nnx.update(model, nnx.state(of_torch))
        forward = nnx.jit(lambda model, x: model(x))
        model.eval()
        assert_close(forward(model, x), evaluated, rtol)
        model.train()
        assert_close(forward(model, x), trained, rtol)
        nnx.update(of_torch, nnx.state(model))
        expected = torch_weights.from_linen(as_torch, {**variables, **updated})
        assert_close(torch_weights.from_nnx(of_torch), expected, rtol)


def test_small_stem_and_partials() -> None:
    model: Any = nnx.eval_shape(
        lambda: ResNet(
            (1,),
            5,
            num_filters=4,
            in_features=1,
            stem="small",
            padding="SAME",
            norm=functools.partial(BatchNorm, scale_metadata={"note": "norm"}, save="mask"),
            conv=functools.partial(nnx.Conv, kernel_metadata={"note": "conv"}),
            rngs=nnx.Rngs(0),
        )
    )
    images = jax.ShapeDtypeStruct((2, 8, 8, 1), jnp.float32)
    assert nnx.eval_shape(lambda model, x: model(x), model, images).shape == (2, 5)
    notes = {
        path[-1]: variable.note
        for path, variable in nnx.to_flat_state(nnx.state(model))
        if "note" in variable.get_metadata()
    }
    assert notes == {"scale": "norm", "kernel": "conv"}
    assert model.stem.bn.save == "mask"


@pytest.mark.parametrize("field", [{"stem": "tiny"}, {"padding": "VALID"}], ids=["stem", "padding"])
def test_unknown_options(field: dict[str, Any]) -> None:
    (name, value), *_ = field.items()
    with pytest.raises(ValueError, match=f"{name} must be .* got '{value}'"):
        ResNet((1,), 2, rngs=nnx.Rngs(0), **field)
