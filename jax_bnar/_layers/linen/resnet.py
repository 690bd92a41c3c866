"""ResNet v1.5 in Linen; import it from `jax_bnar.flax_layers`."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Final, Literal

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.linen import module as linen_module

from jax_bnar._layers.activation import ActivationLike, layer_activation
from jax_bnar._layers.linen.batch_norm import BatchNorm, JoinedBatchNorm
from jax_bnar._layers.linen.folded_norm import FoldedBatchNorm
from jax_bnar._layers.resnet_options import (
    NAMES,
    PADDINGS,
    Naming,
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


class FusedBottleneck(nn.Module):
    """Bottleneck block of ResNet v1.5: 1x1, 3x3 (strided) and 1x1 convolution.

        y = relu(bn(conv3(relu(bn(conv2(relu(bn(conv1(x)))))))) + shortcut(x))

    Each ReLU and the addition of the shortcut are fused into the preceding BatchNorm, so there are
    three operator calls instead of three BatchNorms, three ReLUs and an addition. The last scale
    starts at 0, so a new block computes relu(shortcut(x)). If the block changes shape, the shortcut
    is a convolution with a BatchNorm, and the block ends like `jax_bnar.dual_bn_act`. (In
    `tabulate`, with `capture_intermediates` and within `nn.intercept_methods`, the shortcut's norm
    runs by itself, so that its result can be seen; only rounding differs.)

    Fields and variables are those of `BottleneckResNetBlock` in Flax's ImageNet example (`Conv_0`
    to `Conv_2`, `BatchNorm_0` to `BatchNorm_2`, `conv_proj`, `norm_proj`), so it can be used there
    as `block_cls`, with our BatchNorm as `norm`. Linen names blocks after their class, so to load
    old checkpoints, pass a subclass called `BottleneckResNetBlock`. With a `norm` other than ours,
    or an `act` that the operators do not have, the same block runs unfused, which is useful for
    comparison. If our norms have a narrower `dtype` than x, so has the result, the shortcut
    included; what an unfused block adds to x has the wider of the two.

    Attributes:
        filters: channels of the first two convolutions; the block has 4*filters.
        conv: convolution class, or partial of one.
        norm: normalisation class, or partial of one. Ours is fused and takes its activation from
            `act`.
        act: activation, as in `BatchNorm`.
        strides: strides of the 3x3 convolution and of the shortcut.
        padding: padding of the 3x3 convolution. "SAME" is Flax's, which with strides 2 and an even
            size pads at the end only. "torch" pads one pixel on every side, for PyTorch's weights.
        naming: names of the shortcut's modules, "flax" or "algoperf" (`Conv_proj`,
            `BatchNorm_proj`).
    """

    filters: int
    conv: ModuleFactory = functools.partial(nn.Conv, use_bias=False)
    norm: ModuleFactory = BatchNorm
    act: ActivationLike = nn.relu
    strides: tuple[int, int] = (1, 1)
    padding: Padding = "SAME"
    naming: Naming = "flax"

    @nn.compact
    def __call__(self, x: jax.Array, use_running_average: bool | None = None) -> jax.Array:
        """Applies the block.

        Args:
            x: shape (N, H, W, C).
            use_running_average: passed on to every `norm` unless it is None.

        Returns:
            y, shape (N, ceil(H/stride), ceil(W/stride), 4*filters).

        Raises:
            ValueError: `norm` is a partial with an activation, or a field has an unknown value.
        """
        names = choice("FusedBottleneck", "naming", self.naming, NAMES)
        padding = choice("FusedBottleneck", "padding", self.padding, PADDINGS)
        # "SAME" is the default of nn.Conv. It is not passed, because `conv` may not accept it.
        padded = {} if padding == "SAME" else {"padding": padding}
        norm_act = _NormAct(self.norm, self.act, use_running_average)
        y = self.conv(self.filters, (1, 1))(x)
        y = norm_act(y)
        y = self.conv(self.filters, (3, 3), self.strides, **padded)(y)
        y = norm_act(y)
        y = self.conv(4 * self.filters, (1, 1))(y)
        last = {"scale_init": nn.initializers.zeros_init()}
        if x.shape == y.shape:
            return norm_act(y, residual=x, **last)
        shortcut = self.conv(4 * self.filters, (1, 1), self.strides, name=names.shortcut_conv)(x)
        return norm_act.join(y, shortcut, shortcut_fields={"name": names.shortcut_norm}, **last)


class ResNet(nn.Module):
    """ResNet v1.5 of `FusedBottleneck` blocks, with the variables of Flax's ImageNet example.

    Attributes:
        stage_sizes: blocks in each stage; every stage but the first halves height and width.
        num_classes: number of classes.
        num_filters: channels of the stem and of the first stage's inner convolutions.
        dtype: dtype of the computation and the result; parameters are float32.
        stem: "imagenet" (7x7 convolution and max pool, 4x smaller) or "small" (3x3 convolution at
            full size, for images of a few pixels).
        norm: `jax_bnar.flax_layers.BatchNorm`, or another class for comparison (which is not
            fused), or a partial of either, whose arguments (`epsilon`, `dtype`, ...) come before
            those of the network.
        momentum: momentum of the running statistics.
        epsilon: epsilon of the normalisation, also of a `BatchRenorm`, which has another default.
        padding: "SAME", as in Flax's example, or "torch", which pads one pixel on every side of the
            3x3 convolutions and of the pool, for PyTorch's weights. The two differ if strides are
            2.
        naming: names of the modules: "flax" for those of the ImageNet example, or "algoperf" for
            those of the AlgoPerf benchmark (`Conv_init`, `BatchNorm_init`, `Conv_proj`,
            `BatchNorm_proj`). "algoperf" also pads the pool on every side, whatever `padding` says.
    """

    stage_sizes: Sequence[int]
    num_classes: int
    num_filters: int = 64
    dtype: Any = jnp.float32
    stem: Literal["imagenet", "small"] = "imagenet"
    norm: ModuleFactory = BatchNorm
    momentum: float = 0.9
    epsilon: float = 1e-5
    padding: Padding = "SAME"
    naming: Naming = "flax"

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = True) -> jax.Array:
        """Computes class logits.

        Args:
            x: images, shape (N, H, W, channels).
            train: whether to use batch statistics (True) or running statistics (False).

        Returns:
            Logits, shape (N, num_classes), dtype `dtype`.

        Raises:
            ValueError, TypeError: a field of the network is invalid.
        """
        check_sizes(self.stage_sizes, self.num_classes, self.num_filters)
        check_norm(self.norm)
        conv = functools.partial(nn.Conv, use_bias=False, dtype=self.dtype)
        norm = with_defaults(
            self.norm,
            use_running_average=not train,
            momentum=self.momentum,
            epsilon=self.epsilon,
            dtype=self.dtype,
        )
        names = choice("ResNet", "naming", self.naming, NAMES)
        if self.stem == "imagenet":
            x = conv(self.num_filters, (7, 7), (2, 2), padding=[(3, 3)] * 2, name=names.stem_conv)(
                x
            )
        elif self.stem == "small":
            x = conv(self.num_filters, (3, 3), name=names.stem_conv)(x)
        else:
            raise ValueError(f"ResNet: stem must be 'imagenet' or 'small', got {self.stem!r}.")
        x = _NormAct(norm, nn.relu)(x, name=names.stem_norm)
        if self.stem == "imagenet":
            padding = "torch" if self.naming == "algoperf" else self.padding
            ends = choice("ResNet", "padding", padding, PADDINGS)
            x = nn.max_pool(x, (3, 3), strides=(2, 2), padding=ends)
        block = 0
        for stage, size in enumerate(self.stage_sizes):
            for position in range(size):
                x = FusedBottleneck(
                    self.num_filters * 2**stage,
                    conv=conv,
                    norm=norm,
                    strides=(2, 2) if stage > 0 and position == 0 else (1, 1),
                    padding=self.padding,
                    naming=self.naming,
                    # The block's name in checkpoints of the Flax example.
                    name=f"BottleneckResNetBlock_{block}",
                )(x)
                block += 1
        x = x.mean(axis=(1, 2))
        x = nn.Dense(self.num_classes, dtype=self.dtype, name="Dense_0")(x)
        return x.astype(self.dtype)


ResNet50: Final = functools.partial(ResNet, stage_sizes=(3, 4, 6, 3))
"""`ResNet` with the stages (3, 4, 6, 3); pass `num_classes`."""


class _NormAct:
    """Normalisation and activation, in a single call if `norm` supports that."""

    def __init__(
        self,
        norm: ModuleFactory,
        act: ActivationLike,
        use_running_average: bool | None = None,
    ) -> None:
        ours = _is_a(norm, BatchNorm, FoldedBatchNorm)
        if ours:
            require_no_activation(norm)
        self._norm = norm
        self._given = act
        self._act = layer_activation("FusedBottleneck", "act", act)
        self._mode = (
            {} if use_running_average is None else {"use_running_average": use_running_average}
        )
        self._fused = ours and self._act.is_fused

    def normalise(self, x: jax.Array, **fields: Any) -> jax.Array:
        return self._norm(**fields)(x, **self._mode)

    def join(
        self, x: jax.Array, shortcut: jax.Array, shortcut_fields: dict[str, Any], **fields: Any
    ) -> jax.Array:
        """act(norm(x) + norm(shortcut)), as `jax_bnar.dual_bn_act` computes it."""
        if _is_a(self._norm, FoldedBatchNorm):
            # Folding turned the shortcut's norm into a bias and added it to the other norm's bias.
            return self(x, residual=shortcut, **fields)
        if self._fused and _is_ours_as_it_is(self._norm) and not _is_watched():
            joined = _with_class(self._norm, JoinedBatchNorm)(**shortcut_fields)
            return self(x, residual=joined.prepare(shortcut, **self._mode), **fields)
        return self(x, residual=self.normalise(shortcut, **shortcut_fields), **fields)

    def __call__(self, x: jax.Array, residual: jax.Array | None = None, **fields: Any) -> jax.Array:
        if self._fused:
            return self._norm(activation=self._given, **fields)(x, residual=residual, **self._mode)
        y = self.normalise(x, **fields)
        return self._act.unfused(y if residual is None else residual + y)


def _is_watched() -> bool:
    """Whether Linen shows each method and its result to others, who expect arrays.

    They are `tabulate`, which also compiles and differentiates each method, `capture_intermediates`
    and `nn.intercept_methods`. A shortcut's norm that is joined to another one has no array.
    """
    context = getattr(linen_module, "_context", None)
    stacks = [getattr(context, name, ()) for name in ("call_info_stack", "capture_stack")]
    is_intercepted = bool(getattr(linen_module, "_global_interceptor_stack", ()))
    return is_intercepted or any(stack and stack[-1] for stack in stacks)


def _is_ours_as_it_is(norm: ModuleFactory) -> bool:
    """Whether a norm is our class itself, and neither a subclass nor a transformation of it."""
    return norm_class(norm) is BatchNorm


def _with_class(norm: ModuleFactory, new: type) -> ModuleFactory:
    """The norm, which is a class or a partial of one, with another class."""
    if isinstance(norm, functools.partial):
        return functools.partial(_with_class(norm.func, new), *norm.args, **norm.keywords)
    return new


def _is_a(norm: ModuleFactory, *classes: type) -> bool:
    kind = norm_class(norm)
    return isinstance(kind, type) and issubclass(kind, classes)
