"""Where the first variables may come from, other than chance.

One function for each kind of file: from a path to {"params", "batch_stats"} with the names of
`jax_bnar.flax_layers.ResNet`. Another kind (torchvision's .safetensors) is a line in `READERS`.
"""

import pathlib
from collections.abc import Callable
from typing import Any, Final

import jax
import networks
from errors import UserError

Reader = Callable[[pathlib.Path], dict[str, Any]]
HEAD: Final = "Dense_0"

# By suffix; a folder is that of a run.
READERS: Final[dict[str, Reader]] = {"": lambda path: networks.load(path).variables}


def begin_with(variables: dict[str, Any], path: pathlib.Path) -> tuple[dict[str, Any], bool]:
    """`variables` with the values in `path`, and whether the head (of as many classes) is of there.

    Raises UserError where the file is of another network.
    """
    if path.suffix not in READERS:
        known = ", ".join(suffix or "an output folder of train.py" for suffix in READERS)
        raise UserError(f"--init-from {path}: weights can come from {known}.")
    if not path.exists():
        raise UserError(f"--init-from {path}: there is no such file or folder.")
    loaded = READERS[path.suffix](path)
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


def _shapes(tree: Any) -> dict[str, tuple[int, ...]]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): v.shape for path, v in leaves}
