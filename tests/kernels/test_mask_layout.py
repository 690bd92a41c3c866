"""Masks are in the order of the elements for everyone, however kernels lay them out in memory.

tests/kernels/test_emulated_cuda.py runs this file again, on the CUDA kernels in the host emulation,
which want the bits of a few channels of neighbouring rows together.
"""

import functools
import math
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_bnar
from jax_bnar._base.canonical import CanonicalShape
from jax_bnar._kernels import targets

# With 384, 96, 80 and 24 channels, 128, 32, 16 and 8 bits of a row lie together; the others have no
# layout of their own. The last one has its channels first.
SHAPES = [(4, 3, 2, 384), (4, 3, 2, 96), (4, 3, 2, 80), (8, 5, 24), (4, 3, 2, 36), (4, 96, 3, 2)]
shapes = pytest.mark.parametrize("shape", SHAPES, ids=str)
dtypes = pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
HAS_OWN_LAYOUT = ("forward", "cpu") in targets.kernels and (
    targets.mask_channels("cpu", CanonicalShape(1, 24, 96, 1)) > 0
)


def axis_of(shape: tuple[int, ...]) -> int:
    return 1 if shape == SHAPES[-1] else -1


def arrays(shape: tuple[int, ...], dtype: str, number: int) -> list[jax.Array]:
    generator = np.random.default_rng(5)
    return [
        jnp.asarray(generator.integers(-8, 9, shape) / 4, jnp.dtype(dtype)) for _ in range(number)
    ]


def forward(x: jax.Array, z: jax.Array, data_format: Any) -> Any:
    channels = x.shape[-1 if data_format == "NHWC" else 1]
    zero, one = jnp.zeros(channels), jnp.ones(channels)
    return jax_bnar.ops.fused_bn_add_activation(x, z, one, zero, zero, one, data_format=data_format)


def backward(x: jax.Array, mask: jax.Array, dy: jax.Array, data_format: Any) -> Any:
    channels = x.shape[-1 if data_format == "NHWC" else 1]
    zero, one = jnp.zeros(channels), jnp.ones(channels)
    return jax_bnar.ops.fused_bn_add_activation_grad(
        x, one, zero, None, zero, one, mask, dy, data_format=data_format
    )


def both(shape: tuple[int, ...]) -> tuple[Callable[..., Any], Callable[..., Any]]:
    data_format = "NHWC" if axis_of(shape) == -1 else "NCHW"
    return (
        jax.jit(functools.partial(forward, data_format=data_format)),
        jax.jit(functools.partial(backward, data_format=data_format)),
    )


def where_positive(y: Any, dy: Any) -> np.ndarray:
    return np.where(np.asarray(y) > 0, np.asarray(dy), 0)


@shapes
@dtypes
def test_caller_sees_the_bits_in_the_order_of_the_elements(
    shape: tuple[int, ...], dtype: str
) -> None:
    result = both(shape)[0](*arrays(shape, dtype, 2))
    expected = np.packbits(np.asarray(result.relu_out) > 0, bitorder="little")
    np.testing.assert_array_equal(np.asarray(result.reserve_space).ravel(), expected)


@shapes
@dtypes
def test_kernel_reads_a_mask_that_a_caller_made(shape: tuple[int, ...], dtype: str) -> None:
    y, x, dy = arrays(shape, dtype, 3)
    made = np.packbits(np.asarray(y) > 0, bitorder="little")
    like = jax.eval_shape(both(shape)[0], x, x).reserve_space
    result = both(shape)[1](x, jnp.asarray(made).reshape(like.shape), dy)
    np.testing.assert_array_equal(np.asarray(result.z_grad), where_positive(y, dy))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (P("d"), P()),
        (P(), P("d")),
        (P("d"), P(None, None, None, "c")),
        (P(None, None, None, "c"), P("d", None, None, "c")),
    ],
    ids=str,
)
def test_mask_goes_to_another_sharding(before: P, after: P) -> None:
    """The kernels of each device have their own shapes, and so would a layout of theirs."""
    shape = (4, 3, 2, 128)
    x, z, dy = arrays(shape, "bfloat16", 3)
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("d", "c"))
    first, second = (NamedSharding(mesh, spec) for spec in (before, after))
    result = both(shape)[0](*jax.device_put((x, z), first))
    moved = jax.device_put((x, dy), second)
    given = jax.device_put(result.reserve_space, NamedSharding(mesh, after))
    gradient = both(shape)[1](moved[0], given, moved[1])
    np.testing.assert_array_equal(np.asarray(gradient.z_grad), where_positive(result.relu_out, dy))


def block(save: Any, z: jax.Array, x: jax.Array) -> jax.Array:
    return jax_bnar.bn_add_relu(x, z, None, None, save=save).y


def derivative(save: Any, z: jax.Array, x: jax.Array, dy: jax.Array) -> jax.Array:
    (dz,) = jax.vjp(functools.partial(block, save, x=x), z)[1](dy)
    return dz


def scanned(save: Any, z: jax.Array, x: jax.Array, dy: jax.Array) -> jax.Array:
    def loss(z: jax.Array) -> jax.Array:
        last, _ = jax.lax.scan(lambda y, _: (block(save, y, x), None), z, None, length=3)
        return (last * dy).sum()

    return jax.grad(loss)(z)


def checkpointed(save: Any, z: jax.Array, x: jax.Array, dy: jax.Array) -> jax.Array:
    policy = jax.checkpoint_policies.save_only_these_names("bnar_statistics", "bnar_mask")
    function = jax.checkpoint(functools.partial(block, save, x=x), policy=policy)
    (dz,) = jax.vjp(function, z)[1](dy)
    return dz


def in_groups(save: Any, z: jax.Array, x: jax.Array, dy: jax.Array) -> jax.Array:
    def of_groups(z: jax.Array) -> jax.Array:
        return jax_bnar.bn_add_relu(x, z, None, None, save=save, num_groups=2).y

    (dz,) = jax.vjp(of_groups, z)[1](dy)
    return dz


def forward_mode(save: Any, z: jax.Array, x: jax.Array, dy: jax.Array) -> jax.Array:
    """Pure JAX reads the mask that the kernel wrote."""
    return jax.jvp(functools.partial(block, save, x=x), (z,), (dy,))[1]


def mapped(save: Any, z: jax.Array, x: jax.Array, dy: jax.Array) -> jax.Array:
    return jax.vmap(functools.partial(derivative, save), in_axes=2, out_axes=2)(z, x, dy)


@pytest.mark.parametrize(
    "function",
    [derivative, scanned, checkpointed, in_groups, forward_mode, mapped],
    ids=lambda function: function.__name__,
)
@pytest.mark.parametrize("under_jit", [True, False])
def test_gradient_is_that_of_y(function: Callable[..., jax.Array], under_jit: bool) -> None:
    z, x, dy = arrays((4, 3, 5, 96), "bfloat16", 3)
    transform = jax.jit if under_jit else lambda function: function
    from_mask, from_y = (
        np.asarray(transform(functools.partial(function, save))(z, x, dy)) for save in ("mask", "y")
    )
    assert 0.2 < np.mean(from_mask == 0) < 0.98
    np.testing.assert_array_equal(from_mask, from_y)


@pytest.mark.skipif(not HAS_OWN_LAYOUT, reason="these kernels have no layout of their own")
def test_mask_is_not_copied_between_forward_and_backward() -> None:
    shape = (4, 3, 5, 96)
    function = jax.jit(functools.partial(derivative, "mask"))
    text = str(function.lower(*arrays(shape, "bfloat16", 3)).compile().as_text())
    made = re.findall(r"= u8\[([\d,]+)\]\S* ([\w-]+)\(", text)
    masks = {opcode for sizes, opcode in made if math.prod(map(int, sizes.split(","))) == 720}
    assert masks <= {"get-tuple-element", "bitcast"}, text
    assert "u8[1,60,3,4]{3,1,2,0}" in text
