"""The programs: a training step and the evaluation of ResNet-50, a block, and single operators.

Each is a function of what every device has as a whole (parameters, running statistics) and of what
is divided over the devices (images, activations). They are built from shapes, so nothing runs.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, Final, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from flax import linen as nn

import jax_bnar
from benchmarks.common.sites import Site
from benchmarks.network import step_program
from benchmarks.sites.peers import flax_linen, ours
from benchmarks.sites.problem import MOMENTUM, DType
from jax_bnar.checkpoint_policies import dots_and_statistics_saveable
from jax_bnar.flax_layers import BatchNorm, FusedBottleneck

ProgramName = Literal["step", "evaluation", "block", "operator", "silu", "frozen", "volumes"]
Norm = Literal["ours", "ours_mask", "ours_xla", "fuse", "flax"]
Remat = Literal["ours_remat", "flax_remat"]
Variant = Norm | Remat
PROGRAMS: Final[tuple[ProgramName, ...]] = get_args(ProgramName)
NORMS: Final[tuple[Norm, ...]] = get_args(Norm)
# The variants of the training step whose backward computes y again, by what they are otherwise.
REMAT: Final[dict[Variant, Norm]] = {"ours_remat": "ours", "flax_remat": "flax"}

# Images on a device. ResNet-50 is served at smaller batches than it is trained at.
BATCHES: Final[dict[ProgramName, int]] = {
    "step": 256,
    "evaluation": 32,
    "block": 256,
    "operator": 256,
    "silu": 256,
    "frozen": 256,
    "volumes": 8,
}
# The heaviest site of ResNet-50, and the input of the block.
SITE: Final = Site(56, 56, 256, "bn_add_relu")
# The heaviest of EfficientNet-B0, where SiLU follows: the expansion of its second stage.
SILU_SITE: Final = Site(112, 112, 96, "batch_norm")
_IMAGE: Final = (224, 224, 3)
# Sixteen frames of a video.
_VOLUME: Final = (16, 56, 56)
_VOLUME_CHANNELS: Final = 64
_SMALLEST_ACTIVATION: Final = 7 * 7 * 512

_LAYERS: Final[dict[Variant, Any]] = {
    "ours": BatchNorm,
    "ours_mask": functools.partial(BatchNorm, save="mask"),
    "ours_xla": functools.partial(BatchNorm, implementation="xla"),
    "fuse": nn.BatchNorm,
    "flax": nn.BatchNorm,
    "ours_remat": BatchNorm,
    "flax_remat": nn.BatchNorm,
}


class Program(NamedTuple):
    """A program and the shapes of its arguments.

    Attributes:
        function: takes `whole` and `divided`.
        whole: a tree of shapes that every device has.
        divided: a tree of shapes whose first axis is divided over the devices.
        donated: whether the results take the memory of `whole`.
        least_activation: the elements of the smallest activation on a device.
    """

    function: Callable[[Any, Any], Any]
    whole: Any
    divided: Any
    donated: bool
    least_activation: int

    def weight_sizes(self) -> frozenset[int]:
        """The numbers of elements of the parameters."""
        return frozenset(math.prod(leaf.shape) for leaf in jax.tree.leaves(self.whole))


def check_variant(name: ProgramName, variant: Variant) -> None:
    """Refuses a variant that a program does not have.

    Raises:
        ValueError: this is one.
    """
    if variant in REMAT and name != "step":
        raise ValueError(
            f"only the program step computes y again: got the variant {variant} of the program"
            f" {name}; leave it out, or give {REMAT[variant]}."
        )


def build(
    name: ProgramName, variant: Variant, dtype: DType, batch: int, devices: int = 1
) -> Program:
    """A program with `batch` images on each of `devices`.

    Raises:
        ValueError: this program has no such variant.
    """
    check_variant(name, variant)
    if name == "operator":
        return operator(SITE, variant, dtype, batch, devices)
    if name == "silu":
        return _program(SILU_SITE, _with_silu(variant, dtype), dtype, batch, devices)
    if name == "volumes":
        return convolutions(_VOLUME, variant, dtype, batch, devices)
    builders = {"step": _step, "evaluation": _evaluation, "block": _block, "frozen": _frozen}
    return builders[name](variant, dtype, batch, devices)


def _step(variant: Variant, dtype: DType, batch: int, devices: int) -> Program:
    net = step_program.resnet50(_LAYERS[variant], dtype)
    loss_of = _fused(variant, step_program.loss_function(net))
    if variant in REMAT:
        loss_of = jax.checkpoint(loss_of, policy=dots_and_statistics_saveable)
    images = _images(batch * devices)
    variables = jax.eval_shape(net.init, jax.random.key(0), images)
    labels = jax.ShapeDtypeStruct((batch * devices,), jnp.int32)
    return Program(
        step_program.sgd_step(loss_of),
        jax.eval_shape(step_program.initial_state, variables),
        (images, labels),
        donated=True,
        least_activation=batch * _SMALLEST_ACTIVATION,
    )


def _evaluation(variant: Variant, dtype: DType, batch: int, devices: int) -> Program:
    net = step_program.resnet50(_LAYERS[variant], dtype)

    def evaluate(variables: Any, images: jax.Array) -> Any:
        return net.apply(variables, images, train=False)

    images = _images(batch * devices)
    variables = jax.eval_shape(net.init, jax.random.key(0), images)
    return Program(
        _fused(variant, evaluate),
        variables,
        images,
        donated=False,
        least_activation=batch * _SMALLEST_ACTIVATION,
    )


def _block(variant: Variant, dtype: DType, batch: int, devices: int) -> Program:
    """The second block of ResNet-50, forward and backward."""
    block = _bottleneck(variant, dtype)

    def forward(params: Any, batch_stats: Any, x: jax.Array) -> Any:
        variables = {"params": params, "batch_stats": batch_stats}
        y, updated = block.apply(variables, x, False, mutable=["batch_stats"])
        return y, updated["batch_stats"]

    return _of_block(block, step_of(_fused(variant, forward)), dtype, batch, devices)


def step_of(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Forward and backward of a function of parameters, statistics and x."""

    def step(variables: Any, divided: Any) -> Any:
        x, dy = divided
        stats = variables.get("batch_stats", {})
        y, pullback, stats = jax.vjp(
            lambda params, x: forward(params, stats, x), variables["params"], x, has_aux=True
        )
        return y, stats, pullback(dy)

    return step


def _frozen(variant: Variant, dtype: DType, batch: int, devices: int) -> Program:
    """The same block as a detector trains it: norms are frozen, and only convolutions learn."""
    block = _bottleneck(variant, dtype)

    def forward(params: Any, batch_stats: Any, x: jax.Array) -> Any:
        return block.apply({"params": params, "batch_stats": batch_stats}, x, True)

    forward = _fused(variant, forward)

    def step(variables: Any, divided: Any) -> Any:
        x, dy = divided
        params, stats = variables["params"], variables["batch_stats"]
        learned = {name: own for name, own in params.items() if name.startswith("Conv")}
        y, pullback = jax.vjp(
            lambda learned, x: forward({**params, **learned}, stats, x), learned, x
        )
        return y, pullback(dy)

    return _of_block(block, step, dtype, batch, devices)


def _bottleneck(variant: Variant, dtype: DType) -> FusedBottleneck:
    return FusedBottleneck(
        SITE.channels // 4,
        conv=functools.partial(nn.Conv, use_bias=False, dtype=jnp.dtype(dtype)),
        norm=functools.partial(_LAYERS[variant], dtype=jnp.dtype(dtype)),
    )


def _of_block(
    block: FusedBottleneck, step: Callable[..., Any], dtype: DType, batch: int, devices: int
) -> Program:
    x = jax.ShapeDtypeStruct(SITE.shape(batch * devices), jnp.dtype(dtype))
    init = functools.partial(block.init, use_running_average=False)
    return Program(
        step,
        jax.eval_shape(init, jax.random.key(0), x),
        (x, x),
        donated=False,
        least_activation=SITE.elements(batch) // 4,
    )


def convolve(x: jax.Array, kernel: jax.Array, channel_axis: int = -1) -> jax.Array:
    """A convolution over all axes but the first and the channels, which are on axis 1 or last.

    The kernel has the spatial axes, then the channels of x, then those of the result.
    """
    spatial = "DHW"[: x.ndim - 2]
    axes = f"NC{spatial}" if channel_axis == 1 else f"N{spatial}C"
    return jax.lax.conv_general_dilated(
        x, kernel, (1,) * len(spatial), "SAME", dimension_numbers=(axes, f"{spatial}IO", axes)
    )


class _Convolutions(nn.Module):
    """Two convolutions, each with a norm and a ReLU, and a residual around both."""

    variant: Variant
    channel_axis: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return self._layer(self._layer(x, "first"), "second", residual=x)

    def _layer(self, x: jax.Array, name: str, residual: jax.Array | None = None) -> jax.Array:
        # nn.Conv has its channels last.
        shape = (3,) * (x.ndim - 2) + (x.shape[self.channel_axis],) * 2
        kernel = self.param(name, nn.initializers.lecun_normal(), shape, x.dtype)
        x = convolve(x, kernel, self.channel_axis)
        options = {"use_running_average": False, "axis": self.channel_axis, "dtype": x.dtype}
        if self.variant in ("flax", "fuse"):
            y = nn.BatchNorm(**options)(x)
            return nn.relu(y if residual is None else y + residual)
        return _LAYERS[self.variant](activation="relu", **options)(x, residual=residual)


def convolutions(
    spatial: tuple[int, ...],
    variant: Variant,
    dtype: DType,
    batch: int,
    devices: int = 1,
    *,
    channel_axis: int = -1,
) -> Program:
    """Two convolutions of 64 channels over these spatial axes, forward and backward."""
    block = _Convolutions(variant, channel_axis)
    beside = (_VOLUME_CHANNELS, *spatial) if channel_axis == 1 else (*spatial, _VOLUME_CHANNELS)
    x = jax.ShapeDtypeStruct((batch * devices, *beside), jnp.dtype(dtype))

    def forward(params: Any, batch_stats: Any, x: jax.Array) -> Any:
        variables = {"params": params, "batch_stats": batch_stats}
        y, updated = block.apply(variables, x, mutable=["batch_stats"])
        return y, updated["batch_stats"]

    return Program(
        step_of(_fused(variant, forward)),
        jax.eval_shape(block.init, jax.random.key(0), x),
        (x, x),
        donated=False,
        least_activation=math.prod(x.shape) // devices,
    )


def operator(site: Site, variant: Variant, dtype: DType, batch: int, devices: int = 1) -> Program:
    """A BatchNorm and what is fused into it, forward and backward in one program."""
    if variant in ("flax", "fuse"):
        apply = _fused(variant, flax_linen.forward(site, dtype))
    else:
        apply = _ours(
            ours.operator(
                site,
                save="mask" if variant == "ours_mask" else "y",
                implementation="xla" if variant == "ours_xla" else None,
            )
        )
    return _program(site, apply, dtype, batch, devices)


def _with_silu(variant: Variant, dtype: DType) -> Callable[..., Any]:
    """What SiLU makes of a BatchNorm. Its derivative is found in x, so the mask has no variant."""
    if variant in ("flax", "fuse"):
        norm = flax_linen.forward(SILU_SITE, dtype)

        def apply(*arguments: Any) -> Any:
            y, updated = norm(*arguments)
            return jax.nn.silu(y), updated

        return _fused(variant, apply)
    implementation = "xla" if variant == "ours_xla" else None
    return _ours(ours.silu(implementation))


def _program(
    site: Site, apply: Callable[..., Any], dtype: DType, batch: int, devices: int
) -> Program:
    def step(whole: Any, divided: Any) -> Any:
        params, stats = whole
        x, z, dy = divided
        y, pullback, stats = jax.vjp(
            lambda x, z, params: apply(x, z, params, stats), x, z, params, has_aux=True
        )
        return y, stats, pullback(dy)

    vector = jax.ShapeDtypeStruct((site.channels,), jnp.float32)
    tensor = jax.ShapeDtypeStruct(site.shape(batch * devices), jnp.dtype(dtype))
    return Program(
        step,
        ({"scale": vector, "bias": vector}, {"mean": vector, "var": vector}),
        (tensor, tensor if site.form == "bn_add_relu" else None, tensor),
        donated=False,
        least_activation=site.elements(batch),
    )


def _ours(operator: ours.Operator) -> Callable[..., Any]:
    """An operator with the arguments of Flax's layer, running statistics included."""

    def apply(x: Any, z: Any, params: Any, stats: Any) -> Any:
        y, (mean, var) = operator(x, z, params["scale"], params["bias"])
        new = {"mean": mean, "var": var}
        updated = jax.tree.map(lambda old, new: MOMENTUM * old + (1 - MOMENTUM) * new, stats, new)
        return y, updated

    return apply


def _fused(variant: Variant, function: Callable[..., Any]) -> Callable[..., Any]:
    return jax_bnar.fuse(function) if variant == "fuse" else function


def _images(batch: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((batch, *_IMAGE), jnp.float32)
