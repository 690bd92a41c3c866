"""ResNet weights under torchvision's names, to and from the Linen and NNX networks.

    weights = torch_weights.read("resnet50.safetensors")                        # or .pth
    net = flax_layers.ResNet50(num_classes=1000, padding="torch")
    variables = torch_weights.to_linen(weights, net)
    model = torch_weights.to_nnx(weights, nnx_layers.ResNet50(1000, rngs=nnx.Rngs(0)))

Convolution kernels are transposed from (out, in, H, W) to (H, W, in, out), and so is the matrix of
`fc`; `num_batches_tracked` is dropped. `from_linen` and `from_nnx` convert back. To continue
training as in PyTorch, which stores the unbiased running variance, construct the network with
`norm=functools.partial(BatchNorm, unbiased_running_var=True)`. PyTorch's momentum 0.1 is our 0.9.
Weights do not say which epsilon they were trained with; both libraries' networks have 1e-5.

Reading `.safetensors` requires the package safetensors, and reading `.pth` requires PyTorch.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_bnar._layers import resnet_options

__all__ = ["Weights", "from_linen", "from_nnx", "read", "to_linen", "to_nnx"]

Array = np.ndarray[Any, np.dtype[Any]]
Weights = dict[str, Array]

_TRANSPOSED: Final = {"conv": (2, 3, 1, 0), "linear": (1, 0)}
_TORCH_NAMES: Final = {
    "conv": {"kernel": "weight"},
    "linear": {"kernel": "weight", "bias": "bias"},
    "norm": {"scale": "weight", "bias": "bias", "mean": "running_mean", "var": "running_var"},
}
_STATISTICS: Final = ("mean", "var")


class _Module(NamedTuple):
    """One layer: torchvision's name, the paths in the Linen and NNX networks, and the kind."""

    torch: str
    linen: tuple[str, ...]
    nnx: tuple[str | int, ...]
    kind: str


def read(path: str | Path) -> Weights:
    """Reads the state dict in a file as NumPy arrays.

    Args:
        path: a `.safetensors` file, or a `.pth` or `.pt` file written by `torch.save` that holds a
            state dict or a checkpoint with one under "state_dict" or "model".

    Returns:
        Arrays by torchvision's names, without DistributedDataParallel's prefix "module.". bfloat16
        is converted to float32.

    Raises:
        FileNotFoundError: there is no such file.
        ImportError: the package that reads this format is not installed.
        ValueError: the file has another format, is damaged, or does not hold a state dict.
    """
    path = Path(path)
    readers = {".safetensors": _read_safetensors, ".pth": _read_torch, ".pt": _read_torch}
    if path.suffix not in readers:
        raise ValueError(
            f"torch_weights: {path} must end in one of {', '.join(readers)}, got {path.suffix!r}."
        )
    if not path.is_file():
        raise FileNotFoundError(f"torch_weights: there is no file {path}.")
    weights = readers[path.suffix](path)
    return {name.removeprefix("module."): value for name, value in weights.items()}


def to_linen(weights: Mapping[str, Any], net: Any) -> dict[str, Any]:
    """Converts weights under torchvision's names to the variables of a Linen `ResNet`.

    Args:
        weights: arrays by name, as returned by `read` (or a `state_dict()` of NumPy arrays).
        net: the `jax_bnar.flax_layers.ResNet` that they are for.

    Returns:
        `{"params": ..., "batch_stats": ...}` in the dtypes of the network, as arrays without boxes
        such as `nn.Partitioned`.

    Raises:
        TypeError: net is not a ResNet, or weights are no mapping from names.
        ValueError: weights are missing, unexpected, not real or of another shape (the message lists
            them), or the network pads differently from PyTorch, or it lacks a parameter that
            torchvision's network has.
    """
    _require_resnet(net, "flax_layers")
    _require_padding(net.padding, _HERE)
    _require_weights(weights)
    shape = np.shape(weights.get("conv1.weight", ()))
    # A kernel in another order, whose second axis is no number of channels, is refused below.
    is_square = len(shape) == 4 and shape[2] == shape[3]
    expected = _variables_of(net, shape[1] if is_square else 0)
    leaves = _linen_leaves(expected, _modules(net.stage_sizes, net.naming))
    _check(weights, {name: (leaf.kind, leaf.value.shape) for name, leaf in leaves.items()})
    variables: dict[str, Any] = {}
    for name, leaf in leaves.items():
        *parents, last = leaf.path
        node = variables
        for key in parents:
            node = node.setdefault(key, {})
        node[last] = _to_jax(weights[name], leaf.kind, leaf.value.dtype)
    return variables


def to_nnx(weights: Mapping[str, Any], model: Any) -> Any:
    """Loads weights under torchvision's names into an NNX `ResNet`, in place.

    Args:
        weights: as in `to_linen`.
        model: a `jax_bnar.nnx_layers.ResNet`, or one created by `nnx.eval_shape`.

    Returns:
        The model.

    Raises:
        TypeError, ValueError: as for `to_linen`; the model is then unchanged.
    """
    _require_resnet(model, "nnx_layers")
    _require_padding(model.stem.padding, _HERE)
    _require_weights(weights)
    leaves = dict(_nnx_leaves(model))
    _check(weights, {name: (kind, v.shape) for name, (kind, v) in leaves.items()})
    for name, (kind, variable) in leaves.items():
        variable.set_value(_to_jax(weights[name], kind, variable.dtype))
    return model


def from_linen(net: Any, variables: Mapping[str, Any]) -> Weights:
    """The weights of a Linen `ResNet` under torchvision's names: the inverse of `to_linen`.

    Apply `torch.from_numpy` to each for PyTorch's `load_state_dict`, or write them to a file with
    `safetensors.numpy.save_file`.

    Raises:
        TypeError: net is not a ResNet.
        ValueError: the network lacks a parameter that torchvision's network has, or pads
            differently, or the variables are those of another network.
    """
    _require_resnet(net, "flax_layers")
    _require_padding(net.padding, _THERE)
    variables = _unboxed(variables)
    modules = list(_modules(net.stage_sizes, net.naming))
    known, given = {module.linen[0] for module in modules}, variables.get("params", {}).keys()
    for these, words in (
        (given - known, "which has no"),
        (known - given, "of which they lack"),
    ):
        if these:
            raise ValueError(
                "torch_weights: the variables are not those of the network,"
                f" {words} {_some(sorted(these))}."
            )
    leaves = _linen_leaves(variables, modules)
    shape = np.shape(leaves["conv1.weight"].value)
    likes = _linen_leaves(_variables_of(net, shape[2] if len(shape) == 4 else 0), modules)
    others = [
        f"{'.'.join(leaf.path)} of shape {np.shape(leaf.value)} instead of {like.value.shape}"
        for leaf, like in zip(leaves.values(), likes.values(), strict=True)
        if np.shape(leaf.value) != like.value.shape
    ]
    if others:
        raise ValueError(
            f"torch_weights: the variables are not those of the network: {_some(others)}."
        )
    return {name: _to_torch(leaf.value, leaf.kind) for name, leaf in leaves.items()}


def from_nnx(model: Any) -> Weights:
    """The weights of an NNX `ResNet` under torchvision's names: the inverse of `to_nnx`.

    Raises:
        TypeError, ValueError: as for `from_linen`.
    """
    _require_resnet(model, "nnx_layers")
    _require_padding(model.stem.padding, _THERE)
    return {name: _to_torch(v.get_value(), kind) for name, (kind, v) in _nnx_leaves(model)}


def _modules(stage_sizes: Sequence[int], naming: str = "flax") -> Iterator[_Module]:
    names = resnet_options.choice("ResNet", "naming", naming, resnet_options.NAMES)
    yield _Module("conv1", (names.stem_conv,), ("stem", "conv"), "conv")
    yield _Module("bn1", (names.stem_norm,), ("stem", "bn"), "norm")
    blocks = ((s, i) for s, size in enumerate(stage_sizes) for i in range(size))
    for number, (stage, index) in enumerate(blocks):
        torch = f"layer{stage + 1}.{index}"
        linen = f"BottleneckResNetBlock_{number}"
        nnx = (f"layer{stage}", "blocks", index)
        for i in range(3):
            yield _Module(f"{torch}.conv{i + 1}", (linen, f"Conv_{i}"), (*nnx, f"conv{i}"), "conv")
            yield _Module(f"{torch}.bn{i + 1}", (linen, f"BatchNorm_{i}"), (*nnx, f"bn{i}"), "norm")
        if index == 0:
            shortcut, nnx = f"{torch}.downsample", (*nnx, "downsample")
            yield _Module(f"{shortcut}.0", (linen, names.shortcut_conv), (*nnx, "conv"), "conv")
            yield _Module(f"{shortcut}.1", (linen, names.shortcut_norm), (*nnx, "bn"), "norm")
    yield _Module("fc", ("Dense_0",), ("fc",), "linear")


def _torch_name(module: _Module, leaf: str) -> str:
    return f"{module.torch}.{_TORCH_NAMES[module.kind][leaf]}"


class _LinenLeaf(NamedTuple):
    """A variable of a Linen network, and the kind of module that has it."""

    path: tuple[str, ...]
    kind: str
    value: Any


def _linen_leaves(variables: Any, modules: Iterable[_Module]) -> dict[str, _LinenLeaf]:
    """The leaves of these modules, by torchvision's names."""
    leaves = {}
    for module in modules:
        for leaf in _TORCH_NAMES[module.kind]:
            path = ("batch_stats" if leaf in _STATISTICS else "params", *module.linen, leaf)
            node = variables
            for key in path:
                if key not in node:
                    raise _lacks(path)
                node = node[key]
            leaves[_torch_name(module, leaf)] = _LinenLeaf(path, module.kind, node)
    return leaves


def _nnx_leaves(model: Any) -> Iterator[tuple[str, tuple[str, Any]]]:
    """Yields (torch name, (kind, variable)) for each leaf of a model."""
    for module in _modules(model.stage_sizes):
        node = model
        for key in module.nnx:
            node = node[key] if isinstance(key, int) else getattr(node, key)
        for leaf in _TORCH_NAMES[module.kind]:
            variable = getattr(node, leaf, None)
            if variable is None:
                raise _lacks((*module.nnx, leaf))
            yield _torch_name(module, leaf), (module.kind, variable)


def _variables_of(net: Any, channels: int) -> Any:
    """The variables of a Linen network as shapes, for images with so many channels (0: any)."""
    images = jax.ShapeDtypeStruct((1, 64, 64, channels or 3), jnp.float32)
    return _unboxed(
        jax.eval_shape(lambda key, x: net.init(key, x, train=False), jax.random.key(0), images)
    )


def _unboxed(variables: Any) -> Any:
    from flax.core import meta

    return meta.unbox(variables)


def _to_jax(value: Any, kind: str, dtype: Any) -> jax.Array:
    array = np.asarray(value)
    if array.ndim > 1:
        array = array.transpose(_TRANSPOSED[kind])
    # jnp.array copies, because the array may share its memory with PyTorch, which may write to it.
    return jnp.array(array, dtype)


def _to_torch(value: Any, kind: str) -> Array:
    array = np.asarray(value)
    if array.ndim > 1:
        array = array.transpose(np.argsort(_TRANSPOSED[kind]))
    # np.array copies, because PyTorch does not accept read-only arrays.
    return np.array(array, order="C")


def _lacks(path: Sequence[str | int]) -> ValueError:
    return ValueError(
        f"torch_weights: the network has no {'.'.join(map(str, path))}, but torchvision's network"
        " has one; use BatchNorms with scale, bias and running statistics under the names that"
        " jax_bnar's own get (Linen names a subclass or a transformed class otherwise), and do not"
        " fold them."
    )


def _require_resnet(net: Any, layers: str) -> None:
    # The stem of the NNX network is a module, and that of the Linen network is the name of one.
    stem = getattr(net, "stem", None)
    is_linen = isinstance(stem, str)
    if not hasattr(net, "stage_sizes") or stem is None or is_linen != (layers == "flax_layers"):
        raise TypeError(
            f"torch_weights: the network must be a jax_bnar.{layers}.ResNet, got"
            f" {type(net).__name__}."
        )


_HERE: Final = "these weights were trained"
_THERE: Final = "torchvision's network runs"


def _require_padding(padding: str, whose: str) -> None:
    if padding != "torch":
        raise ValueError(
            f"torch_weights: {whose} with one pixel of padding on every side, but the network has"
            f" padding={padding!r}; construct it with padding='torch'."
        )


def _require_weights(weights: Any) -> None:
    if not isinstance(weights, Mapping) or not all(isinstance(name, str) for name in weights):
        raise TypeError(
            "torch_weights: weights must be a mapping from torchvision's names to arrays, as `read`"
            f" returns it, got {type(weights).__name__}."
        )


def _check(weights: Mapping[str, Any], expected: Mapping[str, tuple[str, tuple[int, ...]]]) -> None:
    """Raises an error that names the weights that do not fit, with shapes as in PyTorch."""
    given = {n: v for n, v in weights.items() if not n.endswith(".num_batches_tracked")}
    problems = []
    if missing := [name for name in expected if name not in given]:
        problems.append(f"missing: {_some(missing)}")
    if unexpected := [name for name in given if name not in expected]:
        problems.append(f"unexpected: {_some(unexpected)}")
    unfit = []
    for name, (kind, shape) in expected.items():
        if name not in given:
            continue
        if len(shape) > 1:
            shape = tuple(shape[i] for i in np.argsort(_TRANSPOSED[kind]))
        array = np.asarray(given[name])
        if array.shape != shape:
            unfit.append(f"{name} has shape {array.shape}, expected {shape}")
        if not any(jnp.issubdtype(array.dtype, real) for real in (jnp.floating, jnp.integer)):
            unfit.append(f"{name} has dtype {array.dtype}, expected real numbers")
    if unfit:
        problems.append(_some(unfit))
    if problems:
        raise ValueError(
            f"torch_weights: the weights do not fit the network; {'; '.join(problems)}."
        )


def _some(names: Sequence[str], limit: int = 6) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


def _read_safetensors(path: Path) -> Weights:
    try:
        import safetensors  # pyright: ignore[reportMissingImports]
        import safetensors.numpy  # pyright: ignore[reportMissingImports]
    except ModuleNotFoundError as error:
        raise ImportError(
            f"torch_weights: reading {path} requires safetensors: pip install safetensors"
        ) from error
    try:
        loaded = safetensors.numpy.load_file(path)
    except safetensors.SafetensorError as error:
        raise ValueError(f"torch_weights: {path} is not a safetensors file: {error}") from error
    return {n: a.astype(np.float32) if a.dtype == jnp.bfloat16 else a for n, a in loaded.items()}


def _read_torch(path: Path) -> Weights:
    try:
        import torch  # pyright: ignore[reportMissingImports]
    except ModuleNotFoundError as error:
        raise ImportError(
            f"torch_weights: reading {path} requires PyTorch; without it, use a .safetensors file"
        ) from error
    try:
        # weights_only, because unpickling an arbitrary file could run code.
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise ValueError(f"torch_weights: PyTorch cannot read {path}: {error}") from error
    for key in ("state_dict", "model"):
        if isinstance(loaded, dict) and isinstance(loaded.get(key), dict):
            loaded = loaded[key]
    if not isinstance(loaded, dict) or not all(
        isinstance(v, torch.Tensor) for v in loaded.values()
    ):
        raise ValueError(f"torch_weights: {path} does not hold a state dict of tensors.")
    tensors = {n: t.float() if t.dtype == torch.bfloat16 else t for n, t in loaded.items()}
    return {name: tensor.detach().numpy() for name, tensor in tensors.items()}
