"""With weights under torchvision's names, the networks agree with PyTorch's in both modes."""

import functools
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from flax_tools import apply, assert_close, normal, trained_looking, trained_model

from jax_bnar import flax_layers, nnx_layers, torch_weights

torch = pytest.importorskip("torch", reason="the oracle of these tests is PyTorch")
import torch_resnet  # noqa: E402

pytestmark = pytest.mark.one_python

UNBIASED = functools.partial(flax_layers.BatchNorm, unbiased_running_var=True)
UNBIASED_NNX = functools.partial(nnx_layers.BatchNorm, unbiased_running_var=True)


@functools.cache
def small() -> tuple[Any, torch_weights.Weights]:
    net = torch_resnet.randomised(torch_resnet.ResNet((2, 1), 5, width=4)).double()
    return net, torch_weights_of(net)


def torch_weights_of(net: Any) -> torch_weights.Weights:
    return {n: v.astype(np.float32) for n, v in torch_resnet.weights_of(net).items()}


def small_linen(**fields: Any) -> Any:
    return flax_layers.ResNet((2, 1), 5, num_filters=4, **{"padding": "torch", **fields})


def small_nnx(**fields: Any) -> Any:
    make = functools.partial(nnx_layers.ResNet, (2, 1), 5, num_filters=4, **fields)
    return trained_model(make)


def assert_like_torch(actual: Any, expected: Any, rtol: float) -> None:
    scale = np.max(np.abs(expected))
    np.testing.assert_allclose(actual, expected, rtol=rtol, atol=rtol * float(scale))


@pytest.mark.slow
def test_resnet50_equals_torch() -> None:
    """Compares logits in evaluation and training, and the running statistics after training."""
    images = normal(0, (4, 96, 96, 3)) - 3
    oracle = torch_resnet.randomised(torch_resnet.ResNet((3, 4, 6, 3), 1000)).double()
    assert sum(p.numel() for p in oracle.parameters()) == 25_557_032
    weights = torch_weights_of(oracle)
    oracle.load_state_dict({n: torch.from_numpy(v) for n, v in weights.items()})

    net = flax_layers.ResNet50(num_classes=1000, padding="torch", norm=UNBIASED)
    variables = torch_weights.to_linen(weights, net)

    @jax.jit
    def both(variables: Any, images: Any) -> Any:
        evaluated = apply(net, variables, images, train=False)
        return evaluated, apply(net, variables, images, train=True, mutable=["batch_stats"])

    evaluated, (trained, updated) = both(variables, images)
    assert_like_torch(evaluated, torch_resnet.logits(oracle.eval(), images), 1e-4)
    assert_like_torch(trained, torch_resnet.logits(oracle.train(), images), 1e-3)
    exported = torch_weights.from_linen(net, {**variables, **updated})
    for name, expected in torch_resnet.weights_of(oracle).items():
        if not name.endswith("num_batches_tracked"):
            assert_like_torch(exported[name], expected, 1e-3)


@pytest.mark.parametrize("size", [(33, 46), (64, 64)], ids=["odd", "even"])
def test_nnx_equals_torch(size: tuple[int, int]) -> None:
    images = normal(0, (4, *size, 3)) - 3
    oracle, weights = small()
    oracle.load_state_dict({n: torch.from_numpy(v) for n, v in weights.items()})
    model = small_nnx(norm=UNBIASED_NNX)
    assert torch_weights.to_nnx(weights, model) is model
    run = nnx.jit(lambda model, images: model(images))
    model.eval()
    assert_like_torch(run(model, images), torch_resnet.logits(oracle.eval(), images), 1e-4)
    model.train()
    assert_like_torch(run(model, images), torch_resnet.logits(oracle.train(), images), 1e-4)
    exported = torch_weights.from_nnx(model)
    # PyTorch's network loads what ours exports.
    oracle.load_state_dict({name: torch.from_numpy(value) for name, value in exported.items()})
    model.eval()
    assert_like_torch(run(model, images), torch_resnet.logits(oracle.eval(), images), 1e-4)


@pytest.mark.parametrize("naming", ["flax", "algoperf"])
def test_round_trip_through_linen(naming: Any) -> None:
    _, weights = small()
    net = small_linen(naming=naming)
    variables = torch_weights.to_linen(weights, net)
    expected = jax.eval_shape(net.init, jax.random.key(0), jnp.zeros((1, 64, 64, 3), jnp.float32))
    assert jax.tree.structure(variables) == jax.tree.structure(expected)
    tracked = {n: v for n, v in weights.items() if not n.endswith("num_batches_tracked")}
    assert_close(torch_weights.from_linen(net, variables), tracked, 0)
    random = trained_looking(expected)
    assert_close(torch_weights.to_linen(torch_weights.from_linen(net, random), net), random, 0)


def test_an_unknown_naming_is_refused() -> None:
    _, weights = small()
    net = small_linen(naming="torch")
    with pytest.raises(ValueError, match="naming must be 'flax' or 'algoperf', got 'torch'"):
        torch_weights.to_linen(weights, net)


def test_abstract_nnx_model_takes_weights() -> None:
    _, weights = small()
    abstract = nnx.eval_shape(lambda: nnx_layers.ResNet((2, 1), 5, num_filters=4, rngs=nnx.Rngs(0)))
    model = torch_weights.to_nnx(weights, abstract)
    assert_close(
        nnx.to_pure_dict(nnx.state(model)),
        nnx.to_pure_dict(nnx.state(torch_weights.to_nnx(weights, small_nnx()))),
        0,
    )


@pytest.mark.parametrize("suffix", [".safetensors", ".pth", ".pt"])
def test_files(tmp_path: Path, suffix: str) -> None:
    _, weights = small()
    path = tmp_path / f"resnet{suffix}"
    tensors = {name: torch.from_numpy(value) for name, value in weights.items()}
    if suffix == ".safetensors":
        pytest.importorskip("safetensors.numpy").save_file(weights, path)
    elif suffix == ".pth":
        torch.save(tensors, path)
    else:
        torch.save({"epoch": 3, "state_dict": {f"module.{n}": v for n, v in tensors.items()}}, path)
    assert_close(torch_weights.read(path), weights, 0)


def test_bfloat16_files(tmp_path: Path) -> None:
    path = tmp_path / "half.pth"
    torch.save({"fc.bias": torch.tensor([1.5, -2.0], dtype=torch.bfloat16)}, path)
    np.testing.assert_array_equal(torch_weights.read(path)["fc.bias"], [1.5, -2.0])


def altered(**changes: Any) -> torch_weights.Weights:
    """The small network's weights with some replaced, or left out if they are None."""
    weights = {**small()[1], **{name.replace("__", "."): v for name, v in changes.items()}}
    return {name: value for name, value in weights.items() if value is not None}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"fc__bias": None}, r"missing: fc\.bias\.$"),
        ({"bn1__running_var": None, "fc__bias": None}, r"missing: bn1\.running_var, fc\.bias\.$"),
        ({"layer3__0__conv1__weight": np.zeros(3)}, r"unexpected: layer3\.0\.conv1\.weight\.$"),
        (
            {"fc__weight": np.zeros((7, 32))},
            r"fc\.weight has shape \(7, 32\), expected \(5, 32\)\.$",
        ),
        (
            {"conv1__weight": np.zeros((4, 3, 3, 3))},
            r"conv1\.weight has shape \(4, 3, 3, 3\), expected \(4, 3, 7, 7\)\.$",
        ),
        ({"conv1__weight": None}, r"missing: conv1\.weight\.$"),
        ({"conv1__weight": np.zeros(4)}, r"conv1\.weight has shape \(4,\), expected"),
        ({"conv1__weight": np.zeros((4, 0, 7, 7))}, r"conv1\.weight has shape \(4, 0, 7, 7\)"),
        ({"bn1__weight": np.ones(4) * 1j}, r"bn1\.weight has dtype complex128, expected real"),
        ({"bn1__weight": np.array(["a"] * 4)}, r"bn1\.weight has dtype <U1, expected real"),
    ],
    ids=[
        *("missing", "two missing", "unexpected", "classes", "stem", "no stem"),
        *("vector for a kernel", "no channels", "complex", "text"),
    ],
)
def test_weights_that_do_not_fit(changes: dict[str, Any], words: str) -> None:
    model = small_nnx()
    before = nnx.to_pure_dict(nnx.state(model))
    for load in (
        lambda weights: torch_weights.to_linen(weights, small_linen()),
        lambda weights: torch_weights.to_nnx(weights, model),
    ):
        with pytest.raises(ValueError, match=words):
            load(altered(**changes))
    assert_close(nnx.to_pure_dict(nnx.state(model)), before, 0)


def test_many_problems_are_summed_up() -> None:
    with pytest.raises(ValueError, match=r"missing: .* and \d+ more; unexpected: weight\.$"):
        torch_weights.to_linen({"weight": np.zeros(3)}, small_linen())


def test_padding_of_flax_is_refused() -> None:
    with pytest.raises(ValueError, match="padding='SAME'; construct it with padding='torch'"):
        torch_weights.to_linen(small()[1], small_linen(padding="SAME"))
    with pytest.raises(ValueError, match="padding='torch'"):
        torch_weights.to_nnx(small()[1], small_nnx(padding="SAME"))
    there = "torchvision's network runs with one pixel of padding"
    variables = torch_weights.to_linen(small()[1], small_linen())
    with pytest.raises(ValueError, match=there):
        torch_weights.from_linen(small_linen(padding="SAME"), variables)
    with pytest.raises(ValueError, match=there):
        torch_weights.from_nnx(small_nnx(padding="SAME"))


def test_variables_of_a_deeper_network_are_refused() -> None:
    net = small_linen()
    variables = torch_weights.to_linen(small()[1], net)
    shallower = net.clone(stage_sizes=(*net.stage_sizes[:-1], net.stage_sizes[-1] - 1))
    with pytest.raises(ValueError, match="of the network, which has no BottleneckResNetBlock_"):
        torch_weights.from_linen(shallower, variables)


@pytest.mark.parametrize(
    ("others", "words"),
    [
        ({"num_classes": 7}, r"params\.Dense_0\.kernel of shape \(32, 5\) instead of \(32, 7\)"),
        ({"num_filters": 8}, r"params\.conv_init\.kernel of shape \(7, 7, 3, 4\) instead of"),
        ({"stage_sizes": (2, 2)}, "of which they lack BottleneckResNetBlock_3"),
    ],
    ids=["classes", "filters", "blocks"],
)
def test_variables_of_another_network_are_refused(others: dict[str, Any], words: str) -> None:
    net = small_linen()
    variables = torch_weights.to_linen(small()[1], net)
    with pytest.raises(ValueError, match=f"are not those of the network.* {words}"):
        torch_weights.from_linen(net.clone(**others), variables)


def test_bfloat16_in_safetensors(tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    values = np.arange(4).astype(jnp.bfloat16)
    pytest.importorskip("safetensors.numpy").save_file({"a": values}, path)
    (read,) = torch_weights.read(path).values()
    assert read.dtype == np.float32
    np.testing.assert_array_equal(read, np.arange(4))


def test_networks_that_do_not_fit() -> None:
    _, weights = small()
    linen = small_linen(norm=functools.partial(flax_layers.BatchNorm, use_bias=False))
    with pytest.raises(ValueError, match=r"the network has no params\.bn_init\.bias"):
        torch_weights.to_linen(weights, linen)
    folded = nnx_layers.fold_batch_norms(small_nnx())
    with pytest.raises(ValueError, match=r"the network has no stem\.bn\.scale"):
        torch_weights.from_nnx(folded)
    with pytest.raises(TypeError, match=r"must be a jax_bnar\.flax_layers\.ResNet, got ResNet"):
        torch_weights.to_linen(weights, small_nnx())
    with pytest.raises(TypeError, match=r"must be a jax_bnar\.nnx_layers\.ResNet, got dict"):
        torch_weights.to_nnx(weights, {})
    with pytest.raises(TypeError, match=r"must be a jax_bnar\.nnx_layers\.ResNet, got ResNet"):
        torch_weights.from_nnx(small_linen())
    with pytest.raises(TypeError, match=r"must be a jax_bnar\.flax_layers\.ResNet, got dict"):
        torch_weights.from_linen({}, {})
    for no_weights in ([1], None, {3: 1}):
        with pytest.raises(TypeError, match="weights must be a mapping from torchvision's names"):
            torch_weights.to_linen(no_weights, small_linen())  # pyright: ignore[reportArgumentType]


def test_a_kernel_in_the_order_of_jax_is_refused() -> None:
    _, weights = small()
    name = "conv1.weight"
    transposed = weights | {name: np.transpose(weights[name], (2, 3, 1, 0))}
    with pytest.raises(ValueError, match=r"shape \(7, 7, 3, 4\), expected \(4, 3, 7, 7\)"):
        torch_weights.to_linen(transposed, small_linen())


def test_boxed_variables() -> None:
    """Annotations of shardings are left out, both ways, and when a network is folded."""
    scale_init = nn.with_partitioning(nn.initializers.ones, ("features",))
    boxed = small_linen(norm=functools.partial(flax_layers.BatchNorm, scale_init=scale_init))
    _, weights = small()
    unboxed = torch_weights.to_linen(weights, small_linen())
    assert_close(torch_weights.to_linen(weights, boxed), unboxed, 0)
    with_boxes = boxed.init(jax.random.key(0), jnp.ones((1, 32, 32, 3)), train=False)
    assert isinstance(with_boxes["params"]["bn_init"]["scale"], nn.Partitioned)
    found = torch_weights.from_linen(boxed, with_boxes)
    np.testing.assert_array_equal(found["bn1.weight"], np.ones(4))
    _, folded = flax_layers.fold_batch_norms(boxed, with_boxes)
    _, expected = flax_layers.fold_batch_norms(small_linen(), nn.unbox(with_boxes))
    assert_close(folded, expected, 0)


def test_files_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FileNotFoundError, match="there is no file"):
        torch_weights.read(tmp_path / "nowhere.pth")
    with pytest.raises(ValueError, match=r"must end in one of \.safetensors, \.pth, \.pt"):
        torch_weights.read(tmp_path / "weights.npz")
    for suffix, words in ((".safetensors", "is not a safetensors file"), (".pth", "cannot read")):
        damaged = tmp_path / f"damaged{suffix}"
        damaged.write_bytes(b"\xff" * 100)
        with pytest.raises(ValueError, match=words):
            torch_weights.read(damaged)
    torch.save([1, 2], tmp_path / "list.pth")
    with pytest.raises(ValueError, match="does not hold a state dict"):
        torch_weights.read(tmp_path / "list.pth")
    for module, suffix, words in (
        ("safetensors", ".safetensors", "pip install safetensors"),
        ("torch", ".pth", r"requires PyTorch"),
    ):
        monkeypatch.setitem(sys.modules, module, None)
        with pytest.raises(ImportError, match=words):
            torch_weights.read(tmp_path / f"damaged{suffix}")
