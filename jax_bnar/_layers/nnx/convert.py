"""Conversion of an NNX model; import it from `jax_bnar.nnx_layers`."""

import inspect
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, cast

import jax
from flax import nnx

from jax_bnar._base.activations import fused_activation
from jax_bnar._layers.nnx.batch_norm import BatchNorm, stored_activation
from jax_bnar._operators.validation import check_count, check_save

# The options that our BatchNorm adds, with their defaults. Initializers are not options of a layer
# that exists already.
_DEFAULTS: Final[dict[str, Any]] = {
    name: parameter.default
    for name, parameter in inspect.signature(BatchNorm.__init__).parameters.items()
    if parameter.default is not parameter.empty and not name.endswith("_init")
}


def convert_batch_norms(
    model: Any,
    *,
    only: Any = ...,
    raise_if_not_found: bool = True,
    report: Callable[[str], object] | None = None,
    **options: Any,
) -> Any:
    """Turns every `flax.nnx.BatchNorm` in a model into ours, in place.

    Parameters, statistics, metadata and flags do not change. Each layer remains the same object
    with the same variables, so optimizers, shared layers and other references stay valid. Layers of
    a subclass of `nnx.BatchNorm` (including ours) are left alone, because they may override
    `__call__`. In an `nnx.Sequential`, a layer computes the activation that follows it if
    `jax_bnar.bn_act` takes that, unless `activation` is given or the layer is used in several
    places. All other activations and additions are not fused, because the code that calls the layer
    computes them: `report` names these layers.

    Args:
        model: an NNX module, or any tree of modules that NNX can traverse.
        only: an NNX filter that selects the layers to convert, such as a path or a predicate of
            (path, layer).
        raise_if_not_found: whether it is an error if the model has no such layer.
        report: is called with a text that says which layers take an activation with them and which
            were only swapped, such as `report=print`.
        **options: the options that our BatchNorm adds: `num_groups`, `save`,
            `unbiased_running_var`, `implementation`, `update_batch_stats`; and `activation`, if
            the code that calls the layers does not apply it.

    Returns:
        The model.

    Raises:
        TypeError: an option is unknown, or the activation or `report` is not a function.
        ValueError: there is nothing to convert, or the activation has an unknown name.
    """
    if unknown := sorted(options.keys() - _DEFAULTS.keys()):
        raise TypeError(
            f"convert_batch_norms: unknown options {unknown}; the options are {sorted(_DEFAULTS)}."
        )
    if report is not None and not callable(report):
        raise TypeError(
            "convert_batch_norms: report must be a function of a text, such as print, got"
            f" {report!r}."
        )
    check_save("convert_batch_norms", options.get("save", "y"))
    check_count("convert_batch_norms", "num_groups", options.get("num_groups", 1))
    takes_activation = "activation" not in options
    if not takes_activation:
        options["activation"] = stored_activation(options["activation"])
    chosen = nnx.filterlib.to_predicate(only)
    # Collected into a list first, because layers must not change during the traversal.
    found = [
        (path, layer)
        for path, layer in nnx.iter_modules(model)
        if type(layer) is nnx.BatchNorm and chosen(path, layer)
    ]
    if not found and raise_if_not_found:
        raise ValueError(
            "convert_batch_norms: the model has no flax.nnx.BatchNorm to convert; if that is"
            " intended, pass raise_if_not_found=False."
        )
    for _, layer in found:
        # Changing the class in place keeps references valid; ours only adds attributes.
        object.__setattr__(layer, "__class__", BatchNorm)
        for name, value in {**_DEFAULTS, **options}.items():
            setattr(cast(BatchNorm, layer), name, value)
    fused = _take_activations(model, [layer for _, layer in found]) if takes_activation else []
    if report is not None:
        report(_conversion_text(found, fused, options.get("activation", "none")))
    return model


def _identity(x: Any) -> Any:
    """Takes the place of an activation in `nnx.Sequential` that the layer before now computes."""
    return x


def _take_activations(model: Any, layers: Iterable[Any]) -> list[Any]:
    """Moves activations of an `nnx.Sequential` into the layers before them.

    `_identity` replaces each of them, so that the other layers keep their indices. A layer that
    occurs in several places is left alone, because an activation may follow it in only some of
    them.

    Returns:
        The layers that now compute an activation.
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
            fused = fused_activation(following) if callable(following) else None
            if id(layer) in converted and places[id(layer)] == 1 and fused is not None:
                layer.activation = stored_activation(following)
                module.layers[index + 1] = _identity
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


def _conversion_text(
    found: Sequence[tuple[Any, Any]], fused: Sequence[Any], activation: Any
) -> str:
    """Which layers now compute an activation, and which were only swapped."""
    taken = {id(layer) for layer in fused}
    with_activation, swapped = [], []
    for path, layer in found:
        name = ".".join(map(str, path)) or "(the model)"
        (with_activation if id(layer) in taken else swapped).append(name)
    lines = [f"convert_batch_norms: {len(found)} BatchNorm layers"]
    if with_activation:
        names = ", ".join(with_activation)
        lines.append(f"  {len(with_activation)} with the activation that follows: {names}")
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
