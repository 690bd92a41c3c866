"""The primitives of one input: kernels against reference and oracle, halves against the whole."""

import functools
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from cases import all_dtypes, as_dtype, both_implementations
from tiers import slow_except

from jax_bnar import dual_reference, reference
from jax_bnar._kernels import dual, kernel_call

SHAPES = [(1, 6, 5, 1), (2, 35, 19, 1), (3, 4, 65, 9), (1, 3, 2, 49), (2, 1, 17, 1), (1, 200, 3, 1)]
few_shapes = pytest.mark.parametrize("shape", SHAPES[1:4], ids=str)
canonical_shapes = pytest.mark.parametrize("shape", SHAPES, ids=str)
few_dtypes = pytest.mark.parametrize(
    "dtype", slow_except({"bfloat16", "float32"}, ["float16", "bfloat16", "float32", "float64"])
)
EPSILON = 1e-3

Implementation = Literal["ffi", "xla"]


class Canonical(NamedTuple):
    """Operands of every primitive in canonical form."""

    x: Any
    z: Any
    dy: Any
    scale: Any  # (1, C) or (G, C)
    bias: Any
    dmean: Any  # (G, C)
    dvar: Any


def canonical_operands(
    shape: tuple[int, ...], dtype: str, *, grouped_scale: bool = False, seed: int = 7
) -> Canonical:
    random = np.random.default_rng(seed)
    groups, _, channels, _ = shape
    wide = "float64" if dtype == "float64" else "float32"
    x, z, dy = as_dtype(random.standard_normal((3, *shape)) + 0.5, dtype)
    vectors = (groups if grouped_scale else 1, channels)
    scale, bias = as_dtype(random.uniform(0.5, 2, (2, *vectors)), wide)
    dmean, dvar = as_dtype(random.standard_normal((2, groups, channels)), wide)
    return Canonical(*map(jnp.asarray, (x, z, dy - 1, scale, bias, dmean, dvar)))


def assert_close(actual: Any, expected: Any, *, vectors: bool) -> None:
    """Vectors agree to a few units of float32, tensors to a few roundings of their dtype."""
    got, want = np.asarray(actual), np.asarray(expected)
    assert got.dtype == want.dtype
    assert got.shape == want.shape
    if want.dtype == np.float64:
        unit = 1e-14
    elif vectors or want.dtype == np.float32:
        unit = 4e-6
    else:
        unit = 4 * oracle.unit_roundoff(want.dtype)
    wide = want.astype(np.float64)
    np.testing.assert_allclose(got.astype(np.float64), wide, rtol=unit, atol=4 * unit)


@both_implementations
@canonical_shapes
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
def test_statistics(implementation: Implementation, shape: tuple[int, ...], dtype: str) -> None:
    given = canonical_operands(shape, dtype)
    statistics = functools.partial(kernel_call.statistics, implementation=implementation)
    mean, var = jax.jit(statistics)(given.x)
    x = np.asarray(given.x).astype(np.float64)
    assert mean.shape == var.shape == (shape[0], shape[2])
    np.testing.assert_allclose(mean, x.mean((1, 3)), rtol=2e-6, atol=2e-6)
    np.testing.assert_allclose(var, x.var((1, 3)), rtol=2e-6, atol=1e-12)


FLAGS = [
    # z, scale, bias, one scale per group, activation, mask
    (True, True, True, False, "relu", False),
    (True, True, True, True, "relu", True),
    (False, True, True, False, "relu", True),
    (True, False, False, False, "relu", True),
    (True, True, False, False, "none", False),
    (False, False, True, False, "none", False),
    (False, False, False, False, "relu", True),
]
flags = pytest.mark.parametrize(
    ("has_z", "has_scale", "has_bias", "grouped", "activation", "save_mask"), FLAGS
)


@few_dtypes
@few_shapes
@flags
def test_forward_kernels_against_reference(
    shape: tuple[int, ...],
    dtype: str,
    has_z: bool,
    has_scale: bool,
    has_bias: bool,
    grouped: bool,
    activation: str,
    save_mask: bool,
) -> None:
    given = canonical_operands(shape, dtype, grouped_scale=grouped)
    tensors = given.x, given.z if has_z else None
    vectors = given.scale if has_scale else None, given.bias if has_bias else None
    statics: dict[str, Any] = {
        "epsilon": EPSILON,
        "activation": activation,
        "save_mask": save_mask,
    }

    @jax.jit
    def kernels(*operands: Any) -> Any:
        whole = kernel_call.forward(*operands, implementation="ffi", **statics)
        half = kernel_call.normalise(*operands, *whole[1:3], implementation="ffi", **statics)
        return whole, half

    @jax.jit
    def references(statistics: Any, *operands: Any) -> Any:
        whole = reference.forward(*operands, **statics)
        half = reference.normalise(*operands, *statistics, **statics)
        return whole, half

    (y, mean, var, *mask), (y_half, *mask_half) = kernels(*tensors, *vectors)
    whole, half = references((mean, var), *tensors, *vectors)
    assert_close(mean, whole[1], vectors=True)
    assert_close(var, whole[2], vectors=True)
    assert_close(y, whole[0], vectors=False)
    assert_close(y_half, half[0], vectors=False)
    assert len(mask) == len(mask_half) == save_mask
    for saved, output in zip(mask + mask_half, (y, y_half), strict=False):
        assert_packs(saved, output)


def assert_packs(mask: Any, y: Any) -> None:
    """The mask has one bit per element, lowest bit first; each group is padded to a byte with 0."""
    positive = (np.asarray(y) > 0).reshape(y.shape[0], -1)
    assert mask.dtype == np.uint8
    assert mask.shape == (y.shape[0], -(-positive.shape[1] // 8))
    np.testing.assert_array_equal(mask, np.packbits(positive, axis=1, bitorder="little"))


@both_implementations
@all_dtypes
@pytest.mark.parametrize(
    "shape", [(1, 1, 1, 1), (3, 1, 7, 1), (2, 3, 3, 1), (2, 8, 4, 2), (1, 5, 13, 5)]
)
def test_mask_is_one_bit_an_element(
    implementation: Implementation, dtype: str, shape: tuple[int, ...]
) -> None:
    given = canonical_operands(shape, dtype)
    forward = functools.partial(
        kernel_call.forward,
        implementation=implementation,
        epsilon=EPSILON,
        activation="relu",
        save_mask=True,
    )
    y, _, _, mask = jax.jit(forward)(given.x, given.z, None, None)
    assert_packs(mask, y)


@few_dtypes
@few_shapes
@pytest.mark.parametrize("gate", ["none", "x", "y", "mask"])
@pytest.mark.parametrize(
    ("has_scale", "grouped", "has_z"),
    [(False, False, True), (True, False, False), (True, True, True)],
)
def test_backward_kernels_against_reference(
    shape: tuple[int, ...],
    dtype: str,
    gate: Literal["none", "x", "y", "mask"],
    has_scale: bool,
    grouped: bool,
    has_z: bool,
) -> None:
    given = canonical_operands(shape, dtype, grouped_scale=grouped)
    mean, var = jax.jit(reference.statistics)(given.x)
    # Any values will do, negative ones and -0.0 included: the kernels only check y > 0.
    y = np.array(given.z)
    y[:, 0] = -0.0
    positive = (y > 0).reshape(len(y), -1)
    mask = np.packbits(positive, axis=1, bitorder="little")
    saved = {"y": jnp.asarray(y), "mask": jnp.asarray(mask)}.get(gate)
    scale, bias = given.scale if has_scale else None, given.bias if has_z else None
    tensors = given.dy, given.x, saved, mean
    vectors = var, scale, bias, given.dmean, given.dvar
    statics: dict[str, Any] = {"gate": gate, "epsilon": EPSILON}

    def passes(of: Any, tensors: Any, vectors: Any, **use: Any) -> Any:
        var, scale, bias, dmean, dvar = vectors
        of_gate = (var, scale, bias) if gate == "x" else (None, None, None)
        return (
            of.backward(*tensors, *vectors, has_z=has_z, **use),
            of.backward_reduce(*tensors, *of_gate, has_z=has_z, **use),
            of.backward_apply(*tensors, var, scale, bias, dmean, dvar, **use),
        )

    kernels = jax.jit(functools.partial(passes, kernel_call, implementation="ffi", **statics))
    whole, reduced, applied = kernels(tensors, vectors)
    expected = jax.jit(functools.partial(passes, reference, **statics))(tensors, vectors)
    expected_whole, expected_reduced, expected_applied = expected
    check_backward(whole, expected_whole, first_tensors=1)
    check_backward(reduced, expected_reduced, first_tensors=0)
    assert_close(applied[0], expected_applied[0], vectors=False)


def check_backward(actual: Any, expected: Any, *, first_tensors: int) -> None:
    """Compares (dx,) if any, two vectors, and (dz,) if any; dz is a copy and must be exact."""
    assert len(actual) == len(expected)
    for i, (got, want) in enumerate(zip(actual, expected, strict=True)):
        if i == first_tensors + 2:
            np.testing.assert_array_equal(got, want)
        else:
            assert_close(got, want, vectors=i >= first_tensors)


@both_implementations
@canonical_shapes
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_halves_compose_to_the_whole(
    implementation: Implementation, shape: tuple[int, ...], dtype: str
) -> None:
    given = canonical_operands(shape, dtype)
    use: dict[str, Any] = {"implementation": implementation}
    options: dict[str, Any] = {"epsilon": EPSILON, "activation": "relu", "save_mask": False}
    operands = given.x, given.z, given.scale, given.bias

    @jax.jit
    def forward_in_halves(*operands: Any) -> Any:
        mean, var = kernel_call.statistics(operands[0], **use)
        (y,) = kernel_call.normalise(*operands, mean, var, **use, **options)
        return y, mean, var

    y, mean, var = jax.jit(functools.partial(kernel_call.forward, **use, **options))(*operands)
    y_half, mean_half, var_half = forward_in_halves(*operands)
    assert_close(mean_half, mean, vectors=True)
    assert_close(var_half, var, vectors=True)
    assert_close(y_half, y, vectors=False)

    statics: dict[str, Any] = {**use, "gate": "y", "epsilon": EPSILON}

    @jax.jit
    def backward_in_halves(tensors: Any, var: Any, scale: Any, cotangents: Any) -> Any:
        absent = (None, None, None)
        sum_e, sum_ec, dz = kernel_call.backward_reduce(*tensors, *absent, **statics, has_z=True)
        rstd = reference.reciprocal_std(var, EPSILON)
        a, dscale = reference.scaled_rstd(rstd, scale), rstd * sum_ec
        coefficients = reference.backward_coefficients(
            a * sum_e, a * dscale, rstd, *cotangents, count=shape[1] * shape[3]
        )
        affine = (scale, None)
        (dx,) = kernel_call.backward_apply(*tensors, var, *affine, *coefficients, **statics)
        return dx, dscale, sum_e, dz

    tensors = given.dy, given.x, y, mean
    cotangents = given.dmean, given.dvar
    backward = functools.partial(kernel_call.backward, **statics, has_z=True)
    whole = jax.jit(backward)(*tensors, var, given.scale, given.bias, *cotangents)
    halves = backward_in_halves(tensors, var, given.scale, cotangents)
    check_backward(halves, whole, first_tensors=1)


@both_implementations
@canonical_shapes
def test_groups_are_independent(implementation: Implementation, shape: tuple[int, ...]) -> None:
    """Group g of a call equals a call on group g alone, up to a few roundings."""
    given = canonical_operands(shape, "float32", grouped_scale=True)
    statics: dict[str, Any] = {"epsilon": EPSILON, "activation": "relu", "save_mask": False}

    @jax.jit
    def forward(x: Any, z: Any, scale: Any, bias: Any) -> Any:
        return kernel_call.forward(x, z, scale, bias, implementation=implementation, **statics)

    operands = given.x, given.z, given.scale, given.bias
    together = forward(*operands)
    for g in range(shape[0]):
        alone = forward(*(operand[g : g + 1] for operand in operands))
        for name, left, right in zip(("y", "mean", "var"), alone, together, strict=True):
            np.testing.assert_allclose(
                np.asarray(left)[0], np.asarray(right)[g], rtol=1e-6, atol=1e-6, err_msg=name
            )


def dual_operands(shape: tuple[int, ...], dtype: str) -> tuple[Any, ...]:
    """(dy, x1, x2) and the vectors (mean1, var1, mean2, var2), (scale1, ...), (dmean1, ...)."""
    first, second = canonical_operands(shape, dtype), canonical_operands(shape, dtype, seed=1)
    x2 = second.x
    statistics = (*jax.jit(reference.statistics)(first.x), *jax.jit(reference.statistics)(x2))
    affine = (first.scale, first.bias, second.scale, second.bias)
    cotangents = (first.dmean, first.dvar, second.dmean, second.dvar)
    return (first.dy, first.x, x2), statistics, affine, cotangents


@canonical_shapes
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("gate", ["x", "y", "mask"])
def test_dual_kernels_against_reference(shape: tuple[int, ...], dtype: str, gate: str) -> None:
    """Whole passes and halves, with the gate that the kernels' own forward leaves."""
    (dy, x1, x2), statistics, affine, cotangents = dual_operands(shape, dtype)
    ffi: Any = {"implementation": "ffi"}
    forward: Any = {"epsilon": EPSILON, "save_mask": True}
    y, *own, mask = jax.jit(functools.partial(dual.forward, **forward, **ffi))(x1, x2, *affine)
    expected = jax.jit(functools.partial(dual_reference.forward, **forward))(x1, x2, *affine)
    for got, want in zip((y, *own), expected[:5], strict=True):
        assert_close(got, want, vectors=got.ndim == 2)
    assert_packs(mask, y)
    normalise = jax.jit(functools.partial(dual.normalise, **forward, **ffi))
    half = normalise(x1, x2, *affine, *own)
    np.testing.assert_array_equal(half[0], y)
    np.testing.assert_array_equal(half[1], mask)

    saved = {"x": None, "y": y, "mask": mask}[gate]
    tensors = (dy, x1, x2, saved)
    backward = jax.jit(functools.partial(dual.backward, epsilon=EPSILON, gate=gate, **ffi))
    whole = backward(*tensors, *statistics, *affine, *cotangents)
    # The reference with the sign that the kernels stored: its own may differ where y is about 0.
    reference_backward = functools.partial(dual_reference.backward, epsilon=EPSILON, gate="y")
    exact = jax.jit(reference_backward)(dy, x1, x2, y, *statistics, *affine, *cotangents)
    for got, want in zip(whole, exact, strict=True):
        assert_close(got, want, vectors=got.ndim == 2)
