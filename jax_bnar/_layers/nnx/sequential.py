"""What the structure of an NNX model shows: a ReLU that follows a BatchNorm in `nnx.Sequential`."""

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, Final

import jax
from flax import nnx

_RELUS: Final = (nnx.relu, jax.nn.relu)


def identity(x: Any) -> Any:
    """Stands in `nnx.Sequential` where a ReLU was that the layer before it computes now."""
    return x


def take_relus(model: Any, layers: Iterable[Any]) -> list[Any]:
    """Lets each of the layers that a ReLU follows in an `nnx.Sequential` compute that ReLU.

    The function in the Sequential becomes `identity`, so that the places of all others stay. A
    layer that stands at several places keeps its ReLUs, for not all of its calls need have one.

    Returns:
        The layers that compute a ReLU now.
    """
    modules = [module for _, module in nnx.iter_modules(model)]
    places = Counter(id(child) for module in modules for child in _children(module))
    converted = {id(layer) for layer in layers}
    taken = []
    for module in modules:
        if type(module) is not nnx.Sequential:
            continue
        inside: list[Any] = list(module.layers)
        for index, (layer, following) in enumerate(itertools.pairwise(inside)):
            if id(layer) in converted and places[id(layer)] == 1 and following in _RELUS:
                layer.activation = "relu"
                module.layers[index + 1] = identity
                taken.append(layer)
    return taken


def _children(module: Any) -> list[Any]:
    """The modules in the attributes of a module, containers included, with repetitions."""
    return [
        leaf
        for value in vars(module).values()
        for leaf in jax.tree.leaves(value, is_leaf=lambda node: isinstance(node, nnx.Module))
        if isinstance(leaf, nnx.Module)
    ]


def conversion_text(found: Sequence[tuple[Any, Any]], fused: Sequence[Any], activation: Any) -> str:
    """Which layers compute an activation now, and which were only swapped."""
    taken = {id(layer) for layer in fused}
    with_relu, swapped = [], []
    for path, layer in found:
        name = ".".join(map(str, path)) or "(the model)"
        (with_relu if id(layer) in taken else swapped).append(name)
    lines = [f"convert_batch_norms: {len(found)} BatchNorm layers"]
    if with_relu:
        lines.append(f"  {len(with_relu)} with the ReLU that follows: {', '.join(with_relu)}")
    if swapped and activation == "none":
        lines.append(f"  {len(swapped)} only swapped: {', '.join(swapped)}")
        lines.append(
            "  A layer that is only swapped fuses neither the ReLU nor the addition, which are in"
            " the code that calls it: pass activation= and residual= there, or wrap that code in"
            " jax_bnar.fuse."
        )
    elif swapped:
        lines.append(f"  {len(swapped)} with the given activation: {', '.join(swapped)}")
    return "\n".join(lines)
