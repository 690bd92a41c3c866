"""Folded inference of the Linen ResNet; import it from `jax_bnar.flax_layers`."""

import functools
from collections.abc import Mapping
from typing import Any, cast

from flax import linen as nn

from jax_bnar._base.implementation import Implementation
from jax_bnar._layers.fold import fold
from jax_bnar._layers.linen.folded_norm import FoldedBatchNorm
from jax_bnar._layers.linen.resnet import ResNet
from jax_bnar._layers.resnet_options import NAMES, arguments_of, choice, norm_class


def fold_batch_norms(
    net: ResNet, variables: Mapping[str, Any], *, implementation: Implementation = None
) -> tuple[ResNet, dict[str, Any]]:
    """A ResNet for inference whose BatchNorms are folded into the convolutions.

        folded, variables = fold_batch_norms(net, variables)
        logits = folded.apply(variables, images, train=False)

    Each kernel is multiplied by scale/sqrt(var + epsilon) of its channels. The rest is a bias,
    which one pass (our kernel on CPUs, a loop of XLA's elsewhere) adds together with the residual
    and the ReLU. A shortcut with a BatchNorm needs no pass, because its bias is added to that of
    the last convolution. The result equals that of the unfolded network up to rounding in `dtype`,
    because kernels are rounded after they are scaled. `jax_bnar.fold_batch_norms` folds any other
    network.

    Args:
        net: `ResNet` or `ResNet50` with our BatchNorm or `flax.linen.BatchNorm`.
        variables: the trained `params` and `batch_stats`.
        implementation: implementation of the pass, as in `jax_bnar.bn_add_relu_inference`.

    Returns:
        The network and its variables, which are `params` only, still float32, and without boxes
        such as `nn.Partitioned`.

    Raises:
        TypeError: net is not a `ResNet`, or its norm is not one of these two.
        ValueError: the variables are not those of net.
    """
    if not isinstance(net, ResNet):
        raise TypeError(
            f"fold_batch_norms: net must be a jax_bnar.flax_layers.ResNet, got"
            f" {type(net).__name__}."
        )
    kind = norm_class(net.norm)
    if not (isinstance(kind, type) and issubclass(kind, nn.BatchNorm)):
        raise TypeError(
            f"fold_batch_norms: the norm of the network must be a BatchNorm, got {kind!r}."
        )
    own = arguments_of(net.norm)
    names = choice("ResNet", "naming", net.naming, NAMES)
    blocks = [f"BottleneckResNetBlock_{i}" for i in range(sum(net.stage_sizes))]
    _require_modules(variables, {names.stem_conv, "Dense_0", *blocks}, {names.stem_norm})
    variables = nn.unbox(variables)
    params, statistics = variables["params"], variables["batch_stats"]

    def folded(path: tuple[str, ...], conv: str, norm: str, more_bias: Any = None) -> Any:
        module, state = params, statistics
        for key in path:
            module, state = module[key], state[key]
        affine = module.get(norm, {})  # Absent if the norm has neither scale nor bias.
        return fold(
            module[conv]["kernel"],
            affine.get("scale"),
            affine.get("bias"),
            state[norm]["mean"],
            state[norm]["var"],
            epsilon=own.get("epsilon", net.epsilon),
            more_bias=more_bias,
        )

    stem = folded((), names.stem_conv, names.stem_norm)
    result: dict[str, Any] = {
        names.stem_conv: {"kernel": stem.kernel},
        names.stem_norm: {"bias": stem.bias},
        "Dense_0": dict(params["Dense_0"]),
    }
    for block in blocks:
        result[block] = {}
        more_bias = None
        if names.shortcut_conv in params[block]:
            shortcut = folded((block,), names.shortcut_conv, names.shortcut_norm)
            result[block][names.shortcut_conv] = {"kernel": shortcut.kernel}
            more_bias = shortcut.bias
        for i in range(3):
            norm_name = f"{kind.__name__}_{i}"
            conv = folded((block,), f"Conv_{i}", norm_name, more_bias if i == 2 else None)
            result[block][f"Conv_{i}"] = {"kernel": conv.kernel}
            result[block][f"FoldedBatchNorm_{i}"] = {"bias": conv.bias}
    kept = {"dtype": own["dtype"]} if "dtype" in own else {}
    norm = functools.partial(FoldedBatchNorm, implementation=implementation, **kept)
    return cast(ResNet, net.clone(norm=norm)), {"params": result}


def _require_modules(variables: Any, needed: set[str], optional: set[str]) -> None:
    """Raises ValueError unless these are the modules that the parameters belong to."""
    collections = set(variables) if isinstance(variables, Mapping) else set()
    if missing := sorted({"params", "batch_stats"} - collections):
        raise ValueError(
            "fold_batch_norms: variables must have the collections params and batch_stats, as"
            f" net.init returns them; there is no {' and no '.join(missing)}."
        )
    found = set(variables["params"])
    problems = {"missing": needed - found, "unexpected": found - needed - optional}
    if any(problems.values()):
        listed = (
            f"{what}: {', '.join(sorted(names))}" for what, names in problems.items() if names
        )
        raise ValueError(
            f"fold_batch_norms: the variables are not those of the network; {'; '.join(listed)}."
        )
