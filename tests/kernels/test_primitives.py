"""The primitives: kernels against the reference, and the reference against the oracle."""

import functools
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from cases import all_dtypes, as_dtype, both_implementations
from tiers import slow_except

from jax_bnar import reference
from jax_bnar._base.gates import Gate
from jax_bnar._base.inputs import Affine, Coefficients, Statistics
from jax_bnar._kernels.kernel_call import CANONICAL

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
    statistics = functools.partial(CANONICAL[1].statistics, implementation=implementation)
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
    tensors = (given.x,), given.z if has_z else None
    affine = Affine(given.scale if has_scale else None, given.bias if has_bias else None)
    statics: dict[str, Any] = {
        "epsilon": EPSILON,
        "activation": activation,
        "save_mask": save_mask,
    }

    @jax.jit
    def kernels(*operands: Any) -> Any:
        whole = CANONICAL[1].forward(*operands, implementation="ffi", **statics)
        half = CANONICAL[1].normalise(*operands, whole[1], implementation="ffi", **statics)
        return whole, half

    @jax.jit
    def references(statistics: Any, x: Any, z: Any, affine: Any) -> Any:
        whole = reference.forward(x, z, affine, **statics)
        half = reference.normalise(x, z, affine, statistics, **statics)
        return whole, half

    (y, statistics, mask), (y_half, mask_half) = kernels(*tensors, (affine,))
    whole, half = references(statistics, *tensors, (affine,))
    assert_close(statistics[0].mean, whole[1][0].mean, vectors=True)
    assert_close(statistics[0].var, whole[1][0].var, vectors=True)
    assert_close(y, whole[0], vectors=False)
    assert_close(y_half, half[0], vectors=False)
    for saved, output in ((mask, y), (mask_half, y_half)):
        assert (saved is not None) == save_mask
        if save_mask:
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
        CANONICAL[1].forward,
        implementation=implementation,
        epsilon=EPSILON,
        activation="relu",
        save_mask=True,
    )
    y, _, mask = jax.jit(forward)((given.x,), given.z, (Affine(None, None),))
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
    statistics = (jax.jit(reference.statistics)(given.x),)
    # Any values will do, negative ones and -0.0 included: the kernels only check y > 0.
    y = np.array(given.z)
    y[:, 0] = -0.0
    positive = (y > 0).reshape(len(y), -1)
    mask = np.packbits(positive, axis=1, bitorder="little")
    saved = {"y": jnp.asarray(y), "mask": jnp.asarray(mask)}.get(gate)
    affine = Affine(given.scale if has_scale else None, given.bias if has_z else None)
    vectors = statistics, (affine,), (Statistics(given.dmean, given.dvar),)
    statics: dict[str, Any] = {"gate": gate, "epsilon": EPSILON}

    def passes(of: Any, dy: Any, x: Any, saved: Any, vectors: Any, **use: Any) -> Any:
        statistics, affine, cotangents = vectors
        of_gate = statistics, affine
        if gate != "x":
            of_gate = (Statistics(statistics[0].mean, None),), (Affine(None, None),)
        coefficients = (Coefficients(*cotangents[0]),)
        return (
            of.backward(dy, x, saved, *vectors, has_z=has_z, **use),
            of.backward_reduce(dy, x, saved, *of_gate, has_z=has_z, **use),
            of.backward_apply(dy, x, saved, statistics, affine, coefficients, **use),
        )

    given_all = (given.dy, (given.x,), saved, vectors)
    kernels = jax.jit(functools.partial(passes, CANONICAL[1], implementation="ffi", **statics))
    whole, reduced, applied = kernels(*given_all)
    expected = jax.jit(functools.partial(passes, reference, **statics))(*given_all)
    expected_whole, expected_reduced, expected_applied = expected
    check_backward(whole, expected_whole, first_tensors=1)
    check_backward(reduced, expected_reduced, first_tensors=0)
    assert_close(applied[0], expected_applied[0], vectors=False)


def check_backward(actual: Any, expected: Any, *, first_tensors: int) -> None:
    """Compares (dx,) if any, two vectors, and (dz,) if any; dz is a copy and must be exact."""
    actual, expected = jax.tree.leaves(actual), jax.tree.leaves(expected)
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
    operands = (given.x,), given.z, (Affine(given.scale, given.bias),)

    @jax.jit
    def forward_in_halves(x: Any, *others: Any) -> Any:
        statistics = CANONICAL[1].statistics(x[0], **use)
        y, _ = CANONICAL[1].normalise(x, *others, (statistics,), **use, **options)
        return y, statistics

    forward = jax.jit(functools.partial(CANONICAL[1].forward, **use, **options))
    y, statistics, _ = forward(*operands)
    y_half, (mean_half, var_half) = forward_in_halves(*operands)
    assert_close(mean_half, statistics[0].mean, vectors=True)
    assert_close(var_half, statistics[0].var, vectors=True)
    assert_close(y_half, y, vectors=False)

    statics: dict[str, Any] = {**use, "gate": "y", "epsilon": EPSILON}

    @jax.jit
    def backward_in_halves(tensors: Any, statistics: Any, scale: Any, cotangents: Any) -> Any:
        operations, ((mean, var),) = CANONICAL[1], statistics
        absent = (Statistics(mean, None),), (Affine(None, None),)
        sum_e, (sum_ec,), dz = operations.backward_reduce(*tensors, *absent, **statics, has_z=True)
        rstd = reference.reciprocal_std(var, EPSILON)
        a, dscale = reference.scaled_rstd(rstd, scale), rstd * sum_ec
        coefficients = reference.backward_coefficients(
            a * sum_e,
            a * dscale,
            rstd,
            *cotangents,
            count=jnp.asarray(shape[1] * shape[3], rstd.dtype),
        )
        affine = (Affine(scale, None),)
        (dx,) = operations.backward_apply(*tensors, statistics, affine, (coefficients,), **statics)
        return dx, dscale, sum_e, dz

    tensors = given.dy, (given.x,), y
    cotangents = Statistics(given.dmean, given.dvar)
    backward = functools.partial(CANONICAL[1].backward, **statics, has_z=True)
    affine = (Affine(given.scale, given.bias),)
    whole = jax.jit(backward)(*tensors, statistics, affine, (cotangents,))
    halves = backward_in_halves(tensors, statistics, given.scale, cotangents)
    check_backward(halves, whole, first_tensors=1)


@both_implementations
@canonical_shapes
def test_groups_are_independent(implementation: Implementation, shape: tuple[int, ...]) -> None:
    """Group g of a call equals a call on group g alone, up to a few roundings."""
    given = canonical_operands(shape, "float32", grouped_scale=True)
    statics: dict[str, Any] = {"epsilon": EPSILON, "activation": "relu", "save_mask": False}

    @jax.jit
    def forward(x: Any, z: Any, scale: Any, bias: Any) -> Any:
        y, statistics, _ = CANONICAL[1].forward(
            *((x,), z, (Affine(scale, bias),)), implementation=implementation, **statics
        )
        return y, *statistics[0]

    operands = given.x, given.z, given.scale, given.bias
    together = forward(*operands)
    for g in range(shape[0]):
        alone = forward(*(operand[g : g + 1] for operand in operands))
        for name, left, right in zip(("y", "mean", "var"), alone, together, strict=True):
            np.testing.assert_allclose(
                np.asarray(left)[0], np.asarray(right)[g], rtol=1e-6, atol=1e-6, err_msg=name
            )


class Operands(NamedTuple):
    """Operands of the operations on several inputs."""

    dy: Any
    x: tuple[Any, ...]
    affine: tuple[Affine, ...]
    cotangents: tuple[Statistics, ...]


def operands_of(inputs: int, shape: tuple[int, ...], dtype: str) -> Operands:
    each = [canonical_operands(shape, dtype, seed=seed) for seed in (7, 1, 4)[:inputs]]
    return Operands(
        each[0].dy,
        tuple(given.x for given in each),
        tuple(Affine(given.scale, given.bias) for given in each),
        tuple(Statistics(given.dmean, given.dvar) for given in each),
    )


@canonical_shapes
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("gate", ["x", "y", "mask"])
def test_dual_kernels_against_reference(shape: tuple[int, ...], dtype: str, gate: str) -> None:
    """Whole passes and halves, with the gate that the kernels' own forward leaves."""
    dy, x, affine, cotangents = operands_of(2, shape, dtype)
    ffi: Any = {"implementation": "ffi"}
    forward: Any = {"epsilon": EPSILON, "save_mask": True}
    operations = CANONICAL[2]
    y, own, mask = jax.jit(functools.partial(operations.forward, **forward, **ffi))(x, None, affine)
    expected = jax.jit(functools.partial(reference.forward, **forward))(x, None, affine)
    for got, want in zip(jax.tree.leaves((y, own)), jax.tree.leaves(expected[:2]), strict=True):
        assert_close(got, want, vectors=got.ndim == 2)
    assert_packs(mask, y)
    normalise = jax.jit(functools.partial(operations.normalise, **forward, **ffi))
    half = normalise(x, None, affine, own)
    np.testing.assert_array_equal(half[0], y)
    np.testing.assert_array_equal(half[1], mask)

    saved = {"x": None, "y": y, "mask": mask}[gate]
    statistics = tuple(map(jax.jit(reference.statistics), x))
    vectors = (statistics, affine, cotangents)
    backward = jax.jit(functools.partial(operations.backward, epsilon=EPSILON, gate=gate, **ffi))
    whole = jax.tree.leaves(backward(dy, x, saved, *vectors))
    # The reference with the sign that the kernels stored: its own may differ where y is about 0.
    reference_backward = functools.partial(reference.backward, epsilon=EPSILON, gate="y")
    exact = jax.tree.leaves(jax.jit(reference_backward)(dy, x, y, *vectors))
    for got, want in zip(whole, exact, strict=True):
        assert_close(got, want, vectors=got.ndim == 2)


@pytest.mark.parametrize("inputs", [1, 2, 3])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(
    ("gate", "has_z"),
    # With a residual, y > 0 does not follow from the inputs alone.
    [("x", False), ("y", False), ("y", True), ("mask", False), ("mask", True)],
)
def test_reference_against_oracle(inputs: int, dtype: str, gate: Gate, has_z: bool) -> None:
    """For any number of inputs: there are kernels for one and two, but the mathematics is one."""
    shape = (1, 35, channels := 19, 2)
    dy, x, affine, cotangents = operands_of(inputs, shape, dtype)
    z = canonical_operands(shape, dtype, seed=3).z if has_z else None
    forward = functools.partial(reference.forward, epsilon=EPSILON, save_mask=True)
    y, statistics, mask = jax.jit(forward)(x, z, affine)
    assert_packs(mask, y)

    def wide(arrays: Any) -> Any:
        """What belongs to the inputs, as the oracle takes it."""
        own = tuple(np.asarray(array) for array in arrays)
        return own if inputs > 1 else own[0]

    def flat(arrays: Any) -> Any:
        return wide(array.reshape(channels) for array in arrays)

    tensors = wide(array[0] for array in x), None if z is None else np.asarray(z)[0]
    scale, bias = (flat(own) for own in zip(*affine, strict=True))
    exact = oracle.forward(*tensors, scale, bias, epsilon=EPSILON, axis=1)
    mean, var = (flat(own) for own in zip(*statistics, strict=True))
    oracle.assert_within("y", y[0], exact.y, exact.y_allowance)
    oracle.assert_within("mean", mean, exact.mean, exact.mean_allowance)
    oracle.assert_within("var", var, exact.var, exact.var_allowance)

    saved = {"x": None, "y": y, "mask": mask}[gate]
    backward = functools.partial(reference.backward, epsilon=EPSILON, gate=gate, has_z=has_z)
    given = (dy, x, saved, statistics, affine, cotangents)
    dx, dscale, dbias, dz = jax.jit(backward)(*given)
    dmean, dvar = (flat(own) for own in zip(*cotangents, strict=True))
    gradients = oracle.backward(
        *(np.asarray(dy)[0], tensors[0], np.asarray(y)[0], scale, dmean, dvar),
        epsilon=EPSILON,
        axis=1,
        parameter_dtype=np.asarray(dbias).dtype,
    )
    of_inputs = wide(array[0] for array in dx), flat(dscale), flat([dbias] * inputs)
    for name, got in zip(("dx", "dscale", "dbias"), of_inputs, strict=True):
        want, allowance = (getattr(gradients, each) for each in (name, f"{name}_allowance"))
        oracle.assert_within(name, got, want, allowance)
    if has_z:
        np.testing.assert_array_equal(np.asarray(dz)[0], gradients.dz)
