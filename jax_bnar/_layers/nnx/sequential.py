"""`FusedSequential`, which `convert_batch_norms` puts in the place of `nnx.Sequential`."""

import functools
import itertools
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from flax import nnx

from jax_bnar._base.activations import fused_activation
from jax_bnar._layers.nnx.batch_norm import BatchNorm, stored_activation

# `nnx.tabulate` puts another method in this place for as long as it runs, which takes modules only.
_call_layers: Callable[..., Any] = nnx.Sequential.__call__


class FusedSequential(nnx.Sequential):
    """`nnx.Sequential` in which a `BatchNorm` and the activation after it are one operation.

    Only the call fuses. `layers` holds what was given, so code that runs the layers one by one, a
    part of them, or other layers in their places gets the same results as from `nnx.Sequential`.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As in `nnx.Sequential`."""
        fused = types.SimpleNamespace(layers=_fused(self.layers))
        return _call_layers(fused, *args, **kwargs)


def fused_pairs(layers: Sequence[Any]) -> Iterator[tuple[int, BatchNorm]]:
    """The position of each activation that the layer before it can compute, and this layer."""
    for index, (layer, following) in enumerate(itertools.pairwise(layers), start=1):
        # A subclass may override `__call__`.
        is_plain = type(layer) is BatchNorm and layer.activation in ("none", None)
        if is_plain and callable(following) and fused_activation(following) is not None:
            yield index, layer


def _fused(layers: Sequence[Any]) -> list[Any]:
    """The layers, in which a norm computes the activation after it, and this one nothing."""
    result = list(layers)
    for index, layer in fused_pairs(layers):
        result[index - 1] = _with_activation(layer, layers[index])
        result[index] = _identity
    return result


def _with_activation(layer: BatchNorm, activation: Any) -> Callable[..., Any]:
    # The signature stays, by which `nnx.Sequential` chooses the keyword arguments of a layer.
    @functools.wraps(layer.__call__)
    def call(*args: Any, **kwargs: Any) -> Any:
        return layer._run(*args, **kwargs, activation=stored_activation(activation))

    return call


def _identity(x: Any) -> Any:
    return x
