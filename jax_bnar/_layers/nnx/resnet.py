"""ResNet v1.5 in NNX; import it from `jax_bnar.nnx_layers`."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Final, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from jax_bnar._base.activations import fused_activation
from jax_bnar._layers.activation import ActivationLike, layer_activation
from jax_bnar._layers.nnx.batch_norm import BatchNorm, Shortcut
from jax_bnar._layers.resnet_options import (
    PADDINGS,
    Padding,
    check_norm,
    check_sizes,
    choice,
    norm_class,
    require_no_activation,
    with_defaults,
)

# A module class, or a functools.partial of one.
ModuleFactory = Callable[..., Any]

_Conv = functools.partial(nnx.Conv, use_bias=False)


class Downsample(nnx.Module):
    """The shortcut of a block that changes shape: a convolution and its BatchNorm."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        strides: int,
        conv: ModuleFactory,
        norm: ModuleFactory,
        rngs: nnx.Rngs,
    ) -> None:
        self.conv = conv(in_features, out_features, (1, 1), strides=strides, rngs=rngs)
        self.bn = norm(out_features, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps (N, H, W, in_features) to (N, ceil(H/strides), ceil(W/strides), out_features)."""
        x = self.conv(x)
        return x if self.bn is None else self.bn(x)


class FusedBottleneck(nnx.Module):
    """Bottleneck block of ResNet v1.5: 1x1, 3x3 (strided) and 1x1 convolution.

        y = relu(bn2(conv2(relu(bn1(conv1(relu(bn0(conv0(x)))))))) + shortcut(x))

    Each ReLU and the addition of the shortcut are fused into the preceding BatchNorm. The last
    scale starts at 0, so a new block computes relu(shortcut(x)). If the block changes shape, the
    shortcut is `downsample.conv` and `downsample.bn`, and the block ends like
    `jax_bnar.dual_bn_act`.

    With a `norm` other than ours, or an `act` that the operators do not have, the same block runs
    unfused. If our norms have a narrower `dtype` than x, so has the result, the shortcut included;
    what an unfused block adds to x has the wider of the two.

    Args:
        in_features: channels of x.
        filters: channels of the first two convolutions; the block has 4*filters.
        strides: strides of the 3x3 convolution and of the shortcut.
        padding: padding of the 3x3 convolution: "torch" (one pixel on every side) or "SAME" (with
            strides 2 and an even size, at the end only).
        conv: convolution class, or partial of one.
        norm: normalisation class, or partial of one. Ours is fused and takes its activation from
            `act`.
        act: activation, as in `BatchNorm`.
        rngs: random number generators for the parameters.

    Raises:
        ValueError: `norm` is a partial with an activation, or an option has an unknown value.
    """

    def __init__(
        self,
        in_features: int,
        filters: int,
        *,
        strides: int = 1,
        padding: Padding = "torch",
        conv: ModuleFactory = _Conv,
        norm: ModuleFactory = BatchNorm,
        act: ActivationLike = nnx.relu,
        rngs: nnx.Rngs,
    ) -> None:
        ends = choice("FusedBottleneck", "padding", padding, PADDINGS)
        norm_act = _with_activation(norm, act)
        self.conv0 = conv(in_features, filters, (1, 1), rngs=rngs)
        self.bn0 = norm_act(filters, rngs=rngs)
        self.conv1 = conv(filters, filters, (3, 3), strides=strides, padding=ends, rngs=rngs)
        self.bn1 = norm_act(filters, rngs=rngs)
        self.conv2 = conv(filters, 4 * filters, (1, 1), rngs=rngs)
        self.bn2 = norm_act(4 * filters, scale_init=nnx.initializers.zeros_init(), rngs=rngs)
        self.act: ActivationLike = act
        changes_shape = strides != 1 or in_features != 4 * filters
        self.downsample = (
            Downsample(in_features, 4 * filters, strides=strides, conv=conv, norm=norm, rngs=rngs)
            if changes_shape
            else None
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        """Applies the block.

        Args:
            x: shape (N, H, W, in_features).

        Returns:
            y, shape (N, ceil(H/strides), ceil(W/strides), 4*filters).
        """
        y = _norm_act(self.bn0, self.act, self.conv0(x))
        y = _norm_act(self.bn1, self.act, self.conv1(y))
        y = self.conv2(y)
        if self.downsample is None:
            return _norm_act(self.bn2, self.act, y, x)
        # Exactly our class: a subclass may be called in another way.
        if type(self.bn2) is type(self.downsample.bn) is BatchNorm and (
            _takes_in_activation(self.bn2)
        ):
            shortcut = Shortcut(self.downsample.bn, self.downsample.conv(x))
            return self.bn2(y, residual=shortcut)
        return _norm_act(self.bn2, self.act, y, self.downsample(x))


class Stem(nnx.Module):
    """Convolution, BatchNorm and ReLU, followed by a max pool for ImageNet."""

    def __init__(
        self,
        in_features: int,
        filters: int,
        *,
        kind: Literal["imagenet", "small"],
        padding: Padding,
        conv: ModuleFactory,
        norm: ModuleFactory,
        rngs: nnx.Rngs,
    ) -> None:
        if kind == "imagenet":
            ends = ((3, 3), (3, 3))
            self.conv = conv(in_features, filters, (7, 7), strides=2, padding=ends, rngs=rngs)
        elif kind == "small":
            self.conv = conv(in_features, filters, (3, 3), rngs=rngs)
        else:
            raise ValueError(f"ResNet: stem must be 'imagenet' or 'small', got {kind!r}.")
        self.bn = _with_activation(norm, nnx.relu)(filters, rngs=rngs)
        self.kind = kind
        self.padding = padding

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps (N, H, W, in_features) to (N, H/4, W/4, filters), or to (N, H, W, filters)."""
        x = _norm_act(self.bn, nnx.relu, self.conv(x))
        if self.kind == "small":
            return x
        ends = choice("ResNet", "padding", self.padding, PADDINGS)
        return nnx.max_pool(x, (3, 3), strides=(2, 2), padding=ends)


class Stage(nnx.Module):
    """Blocks of equal size; the first one applies the strides."""

    def __init__(
        self,
        in_features: int,
        filters: int,
        size: int,
        *,
        strides: int,
        rngs: nnx.Rngs,
        **fields: Any,
    ) -> None:
        self.blocks = nnx.List()
        for position in range(size):
            self.blocks.append(
                FusedBottleneck(
                    4 * filters if position else in_features,
                    filters,
                    strides=1 if position else strides,
                    rngs=rngs,
                    **fields,
                )
            )

    def __call__(self, x: jax.Array) -> jax.Array:
        for block in self.blocks:
            x = block(x)
        return x


class ResNet(nnx.Module):
    """ResNet v1.5 of `FusedBottleneck` blocks, with the state of Bonsai's NNX ResNet.

    Its modules are `stem.{conv, bn}`, `layer0` to `layer3` with
    `blocks[i].{conv0, bn0, conv1, bn1, conv2, bn2}` and `blocks[0].downsample.{conv, bn}`, and
    `fc`. Switch modes as in any NNX model: `model.train()`, `model.eval()`, or `nnx.view`.

    Args:
        stage_sizes: blocks in each stage; every stage but the first halves height and width.
        num_classes: number of classes.
        num_filters: channels of the stem and of the first stage's inner convolutions.
        in_features: channels of the images.
        dtype: dtype of the computation and the result; parameters are float32.
        stem: "imagenet" (7x7 convolution and max pool, 4x smaller) or "small" (3x3 convolution at
            full size, for images of a few pixels).
        norm: `jax_bnar.nnx_layers.BatchNorm`, or another class for comparison (which is not fused),
            or a partial of either, such as one with `scale_metadata`, whose arguments come before
            those of the network.
        conv: convolution class, or partial of one, such as one with `kernel_metadata`.
        momentum: momentum of the running statistics.
        epsilon: epsilon of the normalisation, also of a `BatchRenorm`, which has another default.
        padding: "torch", which pads one pixel on every side of the 3x3 convolutions and of the
            pool, as in Bonsai and PyTorch, or "SAME", as in Flax's ImageNet example. The two differ
            if strides are 2.
        rngs: random number generators for the parameters.

    Raises:
        ValueError, TypeError: an argument is invalid.
    """

    def __init__(
        self,
        stage_sizes: Sequence[int],
        num_classes: int,
        *,
        num_filters: int = 64,
        in_features: int = 3,
        dtype: Any = jnp.float32,
        stem: Literal["imagenet", "small"] = "imagenet",
        norm: ModuleFactory = BatchNorm,
        conv: ModuleFactory = nnx.Conv,
        momentum: float = 0.9,
        epsilon: float = 1e-5,
        padding: Padding = "torch",
        rngs: nnx.Rngs,
    ) -> None:
        check_sizes(stage_sizes, num_classes, num_filters)
        check_norm(norm)
        fields: dict[str, Any] = {
            "conv": functools.partial(conv, use_bias=False, dtype=dtype),
            "norm": with_defaults(norm, momentum=momentum, epsilon=epsilon, dtype=dtype),
            "padding": padding,
        }
        self.stage_sizes = tuple(stage_sizes)
        self.stem = Stem(in_features, num_filters, kind=stem, rngs=rngs, **fields)
        features = num_filters
        for index, size in enumerate(stage_sizes):
            filters = num_filters * 2**index
            stage = Stage(features, filters, size, strides=2 if index else 1, rngs=rngs, **fields)
            setattr(self, f"layer{index}", stage)
            features = 4 * filters
        self.fc = nnx.Linear(features, num_classes, dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Computes class logits.

        Args:
            x: images, shape (N, H, W, in_features).

        Returns:
            Logits, shape (N, num_classes), dtype `dtype`.
        """
        x = self.stem(x)
        for index in range(len(self.stage_sizes)):
            x = getattr(self, f"layer{index}")(x)
        return self.fc(x.mean(axis=(1, 2)))


ResNet50: Final = functools.partial(ResNet, (3, 4, 6, 3))
"""`ResNet` with the stages (3, 4, 6, 3); pass `num_classes` and `rngs`."""


def _with_activation(norm: ModuleFactory, act: ActivationLike) -> ModuleFactory:
    """The norm with the activation fused into it, if it supports that."""
    fuses = layer_activation("FusedBottleneck", "act", act).is_fused
    kind = norm_class(norm)
    ours = isinstance(kind, type) and issubclass(kind, BatchNorm)
    if ours:
        require_no_activation(norm)
    return functools.partial(norm, activation=act) if ours and fuses else norm


def _norm_act(norm: Any, act: Any, x: jax.Array, residual: jax.Array | None = None) -> jax.Array:
    """act(norm(x) + residual). Checks the layer itself, which may have been converted since."""
    if _takes_in_activation(norm):
        return norm(x, residual=residual)
    y = norm(x)
    activation = layer_activation("FusedBottleneck", "act", act)
    return activation.unfused(y if residual is None else residual + y)


def _takes_in_activation(norm: Any) -> bool:
    """Whether the norm itself applies the activation.

    In a norm of another class, only "relu" means that.
    """
    given = getattr(norm, "activation", "none")
    if not isinstance(norm, BatchNorm) and not getattr(norm, "is_folded", False):
        return isinstance(given, str) and given == "relu"
    fused = fused_activation(given)
    return fused is not None and fused.name != "none"
