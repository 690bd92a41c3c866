"""Conversion of an NNX model; import it from `jax_bnar.nnx_layers`."""

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, cast

from flax import nnx

from jax_bnar._layers.checks import check_options, described_type
from jax_bnar._layers.nnx.batch_norm import BatchNorm, stored_activation
from jax_bnar._layers.nnx.sequential import FusedSequential, fused_pairs
from jax_bnar._operators.validation import check_flag

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
    `__call__`. An `nnx.Sequential` in which an activation follows such a layer, and
    `jax_bnar.bn_act` takes it, becomes a subclass of `nnx.Sequential` whose call computes both in
    one operation; its `layers` remain what they were. All other activations and additions are not
    fused, because the code that calls the layer computes them: `report` names these layers.

    Args:
        model: an NNX module, or any tree of modules that NNX can traverse.
        only: an NNX filter that selects the layers to convert, such as a path or a predicate of
            (path, layer).
        raise_if_not_found: whether it is an error if the model has no such layer.
        report: is called with a text that says which layers take an activation with them and which
            were only swapped, such as `report=print`.
        **options: the options that our BatchNorm adds: `num_groups`, `save`,
            `unbiased_running_var`, `implementation`, `update_batch_stats`; and `activation`, if
            the code that calls the layers does not apply it. If `activation` is given, no
            `nnx.Sequential` is changed.

    Returns:
        The model.

    Raises:
        TypeError: an option is unknown or has the wrong type, or `report` is not a function.
        ValueError: there is nothing to convert, or an option has a value that does not exist. The
            model is then unchanged.
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
    options = _checked(options)
    is_given = "activation" in options
    if is_given:
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
            f"convert_batch_norms: {_why_nothing(model, only)}; if that is intended, pass"
            " raise_if_not_found=False."
        )
    for _, layer in found:
        # Changing the class in place keeps references valid; ours only adds attributes.
        object.__setattr__(layer, "__class__", BatchNorm)
        for name, value in {**_DEFAULTS, **options}.items():
            setattr(cast(BatchNorm, layer), name, value)
    fused = [] if is_given else _fuse_sequentials(model, [layer for _, layer in found])
    if report is not None:
        report(_conversion_text(found, fused, options.get("activation", "none")))
    return model


def _checked(options: dict[str, Any]) -> dict[str, Any]:
    """Refuses, before anything is changed, values that a layer's constructor refuses."""
    name = "convert_batch_norms"
    checked = dict(options)
    checked["num_groups"] = check_options(
        name, *({**_DEFAULTS, **options}[key] for key in ("save", "implementation", "num_groups"))
    )
    for option, value in options.items():
        if isinstance(_DEFAULTS[option], bool):
            checked[option] = check_flag(name, option, value)
    return checked


def _why_nothing(model: Any, only: Any) -> str:
    modules = [module for _, module in nnx.iter_modules(model)]
    if any(type(module) is nnx.BatchNorm for module in modules):
        return (
            f"only={only!r} selects none of the model's flax.nnx.BatchNorm layers (a string selects"
            " a tag; a path is nnx.PathContains(name))"
        )
    if not modules:
        is_class = isinstance(model, type)
        kind = f"the class {model.__name__}" if is_class else described_type(model)
        return f"model must be an NNX module or a tree of them, got {kind}"
    if any(isinstance(module, BatchNorm) for module in modules):
        return "the BatchNorms of the model are those of jax_bnar already"
    return "the model has no flax.nnx.BatchNorm to convert"


def _fuse_sequentials(model: Any, layers: Iterable[Any]) -> list[Any]:
    """Lets each `nnx.Sequential` compute the activation after one of these layers with the layer.

    Returns:
        These layers.
    """
    converted = {id(layer) for layer in layers}
    fused = []
    for _, module in nnx.iter_modules(model):
        # A subclass by someone else may override `__call__`.
        if type(module) not in (nnx.Sequential, FusedSequential):
            continue
        pairs = fused_pairs(cast(nnx.Sequential, module).layers)
        found = [layer for _, layer in pairs if id(layer) in converted]
        if found:
            object.__setattr__(module, "__class__", FusedSequential)
            fused.extend(found)
    return fused


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
