"""Lowers programs for a GPU, on a machine without one, and checks what XLA is asked to run."""

import functools
import os
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jax_bnar
from jax_bnar._base.config import Save
from jax_bnar._kernels import cuda_driver, targets

REQUIRE_CUDA = "JAX_BNAR_REQUIRE_CUDA"
if os.environ.get(REQUIRE_CUDA):
    has_cuda = ("forward", "cuda") in targets.kernels
    assert has_cuda, f"{REQUIRE_CUDA} is set, but {targets.why_no_kernel('forward')}"
# Where there is no GPU, what is lowered for one calls the kernels, be they installed or not.
pytestmark = pytest.mark.skipif(
    bool(cuda_driver.devices()) and not targets.has_kernel("forward", "cuda"),
    reason="the GPUs of this machine have no kernels in this build",
)

NHWC = (4, 7, 7, 64)
NCHW = (4, 64, 7, 7)
C = 64
ABI = f"{targets.cuda_abi()} : i64"
# The types of masks, by channel axis: where channels come last, the bits of up to 128 of them
# lie together.
MASKS = {-1: "1x196x1x8xui8", 1: f"1x{196 * 64 // 8}xui8"}


def calls(function: Callable[..., Any], *operands: Any) -> dict[str, str]:
    """Our custom calls in the module lowered for cuda: from the target to the line of text."""
    lowered = jax.jit(function).trace(*operands).lower(lowering_platforms=("cuda",))
    found = re.findall(r"custom_call @(jax_bnar_\w+)(\(.*)", lowered.as_text())
    assert len(found) == len(dict(found)), "a target is called twice"
    return dict(found)


def attributes(call: str) -> dict[str, str]:
    (text,) = re.findall(r"mhlo\.backend_config = \{(.*?)\}", call)
    return dict(item.split(" = ", 1) for item in text.split(", "))


def result_types(call: str) -> list[str]:
    return re.findall(r"tensor<([^>]*)>", call.rsplit("->", 1)[1])


def operand_types(call: str) -> list[str]:
    return re.findall(r"tensor<([^>]*)>", call.rsplit(" : (", 1)[1].split("->")[0])


def loss(x: Any, z: Any, scale: Any, bias: Any, **options: Any) -> jax.Array:
    result = jax_bnar.bn_add_relu(x, z, scale, bias, **options)
    return result.y.astype(jnp.float32).sum() + result.mean.sum() + result.var.sum()


def operands(shape: tuple[int, ...], dtype: Any) -> tuple[jax.ShapeDtypeStruct, ...]:
    x = jax.ShapeDtypeStruct(shape, dtype)
    vector = jax.ShapeDtypeStruct((C,), jnp.float32)
    return x, x, vector, vector


@pytest.mark.parametrize(
    ("shape", "axis", "canonical"), [(NHWC, -1, "196x64"), (NCHW, 1, "4x64x49")]
)
@pytest.mark.parametrize("save", ["y", "mask"])
def test_forward_and_backward(
    shape: tuple[int, ...], axis: int, canonical: str, save: Save
) -> None:
    function = functools.partial(loss, axis=axis, save=save)
    found = calls(jax.grad(function, argnums=(0, 1, 2, 3)), *operands(shape, jnp.bfloat16))
    assert set(found) == {"jax_bnar_forward_v1", "jax_bnar_backward_v1"}
    array, flat = f"{canonical}xbf16", f"{196 * 64}xbf16"
    mask = MASKS[axis]
    has_inner = "true" if axis == 1 else "false"

    forward = found["jax_bnar_forward_v1"]
    assert operand_types(forward) == [array, array, "1x64xf32", "1x64xf32"]
    *results, workspace = result_types(forward)
    assert results == [flat, "1x64xf32", "1x64xf32", *([mask] if save == "mask" else [])]
    assert attributes(forward) == {
        "abi": ABI,
        "activation": '"relu"',
        "epsilon": "1.000000e-05 : f64",
        "has_bias": "true",
        "has_groups": "false",
        "has_inner": has_inner,
        "has_scale": "true",
        "has_z": "true",
        "negative_slope": "0.000000e+00 : f64",
        "save_mask": "true" if save == "mask" else "false",
    }
    rows_channels_inner = (4, 64, 49) if axis == 1 else (196, 64, 1)
    expected = targets.workspace_bytes("cuda", 1, *rows_channels_inner)
    assert workspace == f"{expected}xui8"

    backward = found["jax_bnar_backward_v1"]
    saved = mask if save == "mask" else array
    assert operand_types(backward) == [array, array, saved, *["1x64xf32"] * 6]
    *results, workspace = result_types(backward)
    assert results == [flat, "1x64xf32", "1x64xf32", flat]
    assert workspace == f"{expected}xui8"
    assert attributes(backward) == {
        "abi": ABI,
        "activation": '"relu"',
        "epsilon": "1.000000e-05 : f64",
        "gate": f'"{save}"',
        "has_bias": "true",
        "has_groups": "false",
        "has_inner": has_inner,
        "has_z": "true",
        "has_scale": "true",
        "negative_slope": "0.000000e+00 : f64",
    }
    for call in found.values():
        # Every other operand and result is row-major: the last dimension varies fastest. Those 32
        # bits of a row are followed by those of the next row.
        stated = re.findall(r"dense<(\[[\d, ]*\]|\d+)> : tensor<(\d+)xindex>", call)
        types = operand_types(call) + result_types(call)
        assert len(stated) == len(types)
        for (order, _), of_type in zip(stated, types, strict=True):
            row_major = list(reversed(range(of_type.count("x"))))
            expected = [3, 1, 2, 0] if of_type == MASKS[-1] else row_major
            assert [int(i) for i in re.findall(r"\d+", order)] == expected


def test_inference_has_no_workspace() -> None:
    def infer(x: Any, z: Any, scale: Any, bias: Any) -> jax.Array:
        given = (x, z, scale, bias, jnp.zeros(C), jnp.ones(C))
        return jax_bnar.bn_add_relu_inference(*given, implementation="ffi")

    found = calls(infer, *operands(NHWC, jnp.float16))
    assert set(found) == {"jax_bnar_normalise_v1"}
    assert result_types(found["jax_bnar_normalise_v1"]) == [f"{196 * 64}xf16"]


def test_vmap_is_one_call_with_groups() -> None:
    batched = jax.vmap(loss, in_axes=(0, 0, None, None))
    x, z, scale, bias = operands((3, *NHWC), jnp.float32)
    found = calls(batched, x, z, scale, bias)
    (call,) = found.values()
    assert attributes(call)["has_groups"] == "true"
    assert operand_types(call)[0] == "3x196x64xf32"


def test_cpu_and_cuda_from_one_trace() -> None:
    lowered = jax.jit(loss).trace(*operands(NHWC, jnp.float32))
    text = lowered.lower(lowering_platforms=("cpu", "cuda")).as_text()
    # There is a branch for each platform; only the GPU's has a workspace.
    found = re.findall(r"custom_call @jax_bnar_forward_v1(\(.*)", text)
    assert sorted(len(result_types(call)) for call in found) == [3, 4]


def test_workspace_of_symbolic_sizes_is_a_bound() -> None:
    bound = functools.partial(targets.workspace_bytes, "cuda")
    (rows,) = jax.export.symbolic_shape("n")
    for groups, channels in [(1, 1), (1, 64), (2, 251), (64, 2048), (1, 1 << 20)]:
        symbolic = bound(groups, rows, channels, 1)
        for size in [1, 31, 4096, 1 << 22]:
            assert symbolic >= bound(groups, size, channels, 1)
            assert symbolic >= bound(groups, size, channels, 49)


def test_exports_for_cuda_with_a_symbolic_batch() -> None:
    (n,) = jax.export.symbolic_shape("n")
    x = jax.ShapeDtypeStruct((n, 7, 7, C), jnp.bfloat16)
    vector = jax.ShapeDtypeStruct((C,), jnp.float32)
    exported = jax.export.export(
        jax.jit(jax.grad(functools.partial(loss, implementation="ffi"), argnums=(0, 1))),
        platforms=("cuda",),
        disabled_checks=jax_bnar.DISABLED_EXPORT_CHECKS,
    )(x, x, vector, vector)
    text = exported.mlir_module()
    assert "jax_bnar_forward_v1" in text
    assert "jax_bnar_backward_v1" in text


def loss_of_both(*arrays: Any, **options: Any) -> jax.Array:
    result = jax_bnar.dual_bn_add_relu(*arrays, implementation="ffi", **options)
    return sum(part.astype(jnp.float32).sum() for part in result)  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("shape", "axis", "canonical"), [(NHWC, -1, "196x64"), (NCHW, 1, "4x64x49")]
)
@pytest.mark.parametrize("save", ["y", "mask"])
def test_two_inputs_are_one_call_each_way(
    shape: tuple[int, ...], axis: int, canonical: str, save: Save
) -> None:
    x, _, *vectors = operands(shape, jnp.bfloat16)
    function = functools.partial(loss_of_both, axis=axis, save=save)
    gradient = jax.grad(function, argnums=tuple(range(6)))
    found = calls(gradient, x, x, *vectors, *vectors)
    assert set(found) == {"jax_bnar_dual_forward_v1", "jax_bnar_dual_backward_v1"}
    array, flat, vector = f"{canonical}xbf16", f"{196 * 64}xbf16", "1x64xf32"
    mask = MASKS[axis]
    rows_channels_inner = (4, 64, 49) if axis == 1 else (196, 64, 1)
    # The sums of two inputs take as much workspace as those of two groups.
    expected = targets.workspace_bytes("cuda", 2, *rows_channels_inner)

    forward = found["jax_bnar_dual_forward_v1"]
    assert operand_types(forward) == [array, array, *[vector] * 4]
    *results, workspace = result_types(forward)
    assert results == [flat, *[vector] * 4, *([mask] if save == "mask" else [])]
    assert workspace == f"{expected}xui8"
    assert attributes(forward) == {
        "abi": ABI,
        "epsilon": "1.000000e-05 : f64",
        **{f"has_{name}{i}": "true" for name in ("scale", "bias") for i in (1, 2)},
        "has_groups": "false",
        "has_inner": "true" if axis == 1 else "false",
        "save_mask": "true" if save == "mask" else "false",
        "activation": '"relu"',
        "negative_slope": "0.000000e+00 : f64",
    }

    backward = found["jax_bnar_dual_backward_v1"]
    # Without the mask, the sign of the ReLU is found in x1 and x2, which are read anyway.
    saved = [mask] if save == "mask" else []
    assert operand_types(backward) == [array, array, array, *saved, *[vector] * 12]
    *results, workspace = result_types(backward)
    assert results == [flat, flat, vector, vector, vector]
    assert workspace == f"{expected}xui8"
    assert attributes(backward)["gate"] == ('"mask"' if save == "mask" else '"x"')


def test_inference_of_two_inputs_is_one_call_without_workspace() -> None:
    def infer(x1: Any, x2: Any, scale: Any, bias: Any) -> jax.Array:
        given = (x1, x2, *(scale, bias) * 2, *(jnp.zeros(C), jnp.ones(C)) * 2)
        return jax_bnar.dual_bn_add_relu_inference(*given, implementation="ffi")

    found = calls(infer, *operands(NHWC, jnp.float16))
    assert set(found) == {"jax_bnar_dual_normalise_v1"}
    assert result_types(found["jax_bnar_dual_normalise_v1"]) == [f"{196 * 64}xf16"]


def test_vmap_of_two_inputs_is_one_call_with_groups() -> None:
    x, _, *vectors = operands((3, *NHWC), jnp.float32)
    batched = jax.vmap(loss_of_both, in_axes=(0, 0, None, None, None, None))
    (call,) = calls(batched, x, x, *vectors, *vectors).values()
    assert attributes(call)["has_groups"] == "true"
    assert operand_types(call)[:2] == ["3x196x64xf32"] * 2
