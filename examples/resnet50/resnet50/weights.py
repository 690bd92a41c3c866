"""Initial variables from another run or from a file of weights.

There is one function for each kind of file. It takes a path and the network that the variables are
for, and returns {"params", "batch_stats"} with the names of `jax_bnar.flax_layers.ResNet`. To
support another kind, add it to `READERS`.
"""

import pathlib
from collections.abc import Callable
from typing import Any, Final

import jax
import numpy as np

from jax_bnar import torch_weights
from jax_bnar.flax_layers import ResNet
from resnet50 import runs
from resnet50.errors import UserError, first_line

Reader = Callable[[pathlib.Path, ResNet], dict[str, Any]]
HEAD: Final = "Dense_0"


def begin_with(
    variables: dict[str, Any], path: pathlib.Path, net: ResNet
) -> tuple[dict[str, Any], bool]:
    """The `variables` of `net` with the values in `path`, and whether these include the head.

    If the head in `path` is missing or has another size, the one in `variables` is kept.

    Raises UserError if the file cannot be read or belongs to another network.
    """
    # A folder is a run's output, even if its name has a dot.
    kind = "" if path.is_dir() else path.suffix
    if kind not in READERS:
        known = ", ".join(suffix or "an output folder of train.py" for suffix in READERS)
        raise UserError(f"--init-from {path}: weights can come from {known}.")
    if not path.exists():
        raise UserError(f"--init-from {path}: there is no such file or folder.")
    loaded = READERS[kind](path, net)
    head, new_head = loaded["params"].get(HEAD), variables["params"][HEAD]
    same_head = head is not None and _shapes(head) == _shapes(new_head)
    if not same_head:
        loaded = {**loaded, "params": {**loaded["params"], HEAD: new_head}}
    here, there = _shapes(variables), _shapes(loaded)
    for name in sorted(here.keys() | there.keys()):
        if here.get(name) != there.get(name):
            raise UserError(
                f"--init-from {path} is of another network: {name} is"
                f" {there.get(name, 'missing')} there and {here.get(name, 'missing')} here."
            )
    return loaded, same_head


def _of_a_run(path: pathlib.Path, net: ResNet) -> dict[str, Any]:
    trained = runs.load(path)
    if trained.model.padding != net.padding:
        raise UserError(
            f"--init-from {path} was trained with --padding {trained.model.padding}; use the same"
            " here."
        )
    return trained.variables


def _of_torch(path: pathlib.Path, net: ResNet) -> dict[str, Any]:
    """Reads weights under torchvision's names, which most ResNets use."""
    if net.padding != "torch":
        raise UserError(
            f"--init-from {path}: weights from PyTorch were trained with padding on every side;"
            " give --padding torch."
        )
    try:
        read = torch_weights.read(path)
        head = read.get("fc.bias")
        # to_linen checks all shapes, but the head may have another number of classes.
        if head is not None:
            net = net.clone(num_classes=np.size(head))
        return torch_weights.to_linen(read, net)
    except OSError as error:
        raise UserError(f"--init-from {path} cannot be read ({first_line(error)}).") from error
    except (ImportError, ValueError) as error:
        sentence = str(error).partition("\n")[0].removeprefix("torch_weights: ").rstrip(".")
        raise UserError(f"--init-from {path}: {sentence}.") from error


# The keys are suffixes of files; a folder has none.
READERS: Final[dict[str, Reader]] = {
    "": _of_a_run,
    ".safetensors": _of_torch,
    ".pth": _of_torch,
    ".pt": _of_torch,
}


def _shapes(tree: Any) -> dict[str, tuple[int, ...]]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): v.shape for path, v in leaves}
