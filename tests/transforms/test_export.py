"""jax.export on one device: serialisation, gradients, symbolic shapes, platforms not present."""

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import (
    Case,
    Form,
    all_dtypes,
    both_implementations,
    call,
    one_or_two_inputs,
    operands,
    product_of_statistics,
)
from jax import export
from subprocesses import run_python

import jax_bnar
from jax_bnar._base.config import Save
from jax_bnar._base.implementation import Implementation
from jax_bnar._kernels import targets

CASE = Case((4, 5, 6, 17))
TRAINING = ["jax_bnar_forward_v1", "jax_bnar_backward_v1"]


def y_and_statistics(
    implementation: Implementation, save: Save = "mask", form: Form = "bn_add_relu"
) -> Any:
    def function(*given: Any) -> Any:
        return call(form, *given, save=save, implementation=implementation)

    return function


def exported(function: Any, *arguments: Any, platforms: tuple[str, ...] = ("cpu",)) -> Any:
    """Exports, serialises and deserialises the function, as a user would store it."""
    program = export.export(
        jax.jit(function), platforms=platforms, disabled_checks=jax_bnar.DISABLED_EXPORT_CHECKS
    )(*arguments)
    return export.deserialize(program.serialize(vjp_order=1))


def loss(implementation: Implementation, save: Save, form: Form = "bn_add_relu") -> Any:
    def function(*given: Any) -> Any:
        y, mean, var = y_and_statistics(implementation, save, form)(*given)
        weights = jnp.linspace(-1, 1, y.size).astype(y.dtype).reshape(y.shape)
        return (y * weights).sum() + product_of_statistics(mean, var).astype(y.dtype)

    return function


def shapes(*arrays: Any) -> list[Any]:
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), list(arrays))


def with_symbolic_batch(form: Form) -> list[Any]:
    """The shapes of CASE's operands in float64, for any batch size."""
    given = operands(Case(CASE.shape, dtype="float64", form=form))
    batch = export.symbolic_shape("batch, 5, 6, 17")
    return jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(batch if a.ndim > 1 else a.shape, a.dtype), list(given)
    )


@pytest.fixture(autouse=True, scope="module")
def _result_type_is_serialisable() -> None:
    export.register_namedtuple_serialization(
        jax_bnar.BatchNormResult, serialized_name="jax_bnar.BatchNormResult"
    )


@both_implementations
@all_dtypes
@pytest.mark.parametrize("save", ["y", "mask"])
def test_round_trip(implementation: Implementation, dtype: str, save: Save) -> None:
    given = operands(Case(CASE.shape, dtype=dtype))
    function = y_and_statistics(implementation, save)
    program = exported(function, *shapes(*given))
    expected = jax.jit(function)(*given)
    for left, right in zip(program.call(*given), expected, strict=True):
        np.testing.assert_array_equal(left, right)


@both_implementations
@pytest.mark.parametrize("save", ["y", "mask"])
def test_gradient_of_an_exported_program(implementation: Implementation, save: Save) -> None:
    given = operands(CASE)
    function = loss(implementation, save)
    program = exported(function, *shapes(*given))
    everything = (0, 1, 2, 3)
    expected = jax.jit(jax.grad(function, everything))
    actual = jax.jit(jax.grad(program.call, everything))(*given)
    for left, right in zip(actual, expected(*given), strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-5, atol=1e-5)


@both_implementations
def test_exported_training_step(implementation: Implementation) -> None:
    given = operands(CASE)
    step = jax.jit(jax.value_and_grad(loss(implementation, "mask"), (0, 1, 2, 3)))
    program = exported(step, *shapes(*given))
    called = [name for name in TRAINING if name in program.mlir_module()]
    assert called == (TRAINING if implementation == "ffi" else [])
    actual, expected = jax.tree.leaves(program.call(*given)), jax.tree.leaves(step(*given))
    for left, right in zip(actual, expected, strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-5, atol=1e-5)


@both_implementations
@one_or_two_inputs
@pytest.mark.parametrize("save", ["y", "mask"])
def test_symbolic_batch(implementation: Implementation, form: Form, save: Save) -> None:
    """One stored program works for every batch size, including its gradients."""
    step = jax.jit(jax.value_and_grad(loss(implementation, save, form), (0, 1, 2, 3)))
    program = exported(step, *with_symbolic_batch(form))
    for size in (1, 3, 8):
        given = operands(Case((size, 5, 6, 17), dtype="float64", form=form))
        actual, expected = jax.tree.leaves(program.call(*given)), jax.tree.leaves(step(*given))
        for left, right in zip(actual, expected, strict=True):
            np.testing.assert_allclose(left, right, rtol=1e-6, atol=1e-10)


@pytest.mark.parametrize("platform", ["cpu", "cuda", "tpu"])
def test_every_platform_lowers_from_this_build(platform: str) -> None:
    """A program has the kernels if this build has them for the platform, otherwise pure JAX."""
    step = jax.value_and_grad(loss(None, "mask"), (0, 1, 2, 3))
    program = exported(step, *shapes(*operands(CASE)), platforms=(platform,))
    called = [name for name in TRAINING if name in program.mlir_module()]
    registered = targets.kernels
    assert called == (TRAINING if ("forward", platform) in registered else [])
    if platform == "cpu":
        assert called
    if platform == "tpu":
        assert not called


def test_one_program_for_three_platforms() -> None:
    given = operands(CASE)
    step = jax.jit(jax.value_and_grad(loss(None, "mask"), (0, 1, 2, 3)))
    program = exported(step, *shapes(*given), platforms=("cpu", "cuda", "tpu"))
    assert set(program.platforms) == {"cpu", "cuda", "tpu"}
    # The module has a branch for each platform; the CPU's calls must be there.
    assert all(name in program.mlir_module() for name in TRAINING)
    actual, expected = jax.tree.leaves(program.call(*given)), jax.tree.leaves(step(*given))
    for left, right in zip(actual, expected, strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-5, atol=1e-5)


@both_implementations
@one_or_two_inputs
@pytest.mark.parametrize("save", ["y", "mask"])
def test_gradient_of_an_exported_program_with_symbolic_batch(
    implementation: Implementation, form: Form, save: Save
) -> None:
    """The stored VJP is symbolic too, with its residuals and the number of bytes of the mask."""
    function = loss(implementation, save, form)
    program = exported(function, *with_symbolic_batch(form))
    everything = (0, 1, 2, 3)
    expected = jax.jit(jax.grad(function, everything))
    for size in (1, 6):
        given = operands(Case((size, 5, 6, 17), dtype="float64", form=form))
        actual = jax.tree.leaves(jax.jit(jax.grad(program.call, everything))(*given))
        for left, right in zip(actual, jax.tree.leaves(expected(*given)), strict=True):
            np.testing.assert_allclose(left, right, rtol=1e-6, atol=1e-10)


_RELOAD = """
import numpy as np
import jax
jax.config.update("jax_enable_x64", True)
import jax_bnar  # for the custom calls
from jax import export

program = export.deserialize(open({program!r}, "rb").read())
assert program.platforms == ("cpu", "cuda"), program.platforms
assert program.has_vjp()
given = np.load({given!r})
given = [given[name] for name in ("x", "z", "scale", "bias")]
value, gradients = jax.jit(jax.value_and_grad(program.call, (0, 1, 2, 3)))(*given)
np.savez({results!r}, value, *gradients)
"""


@pytest.mark.slow
def test_reload_in_a_fresh_process(tmp_path: Path) -> None:
    """One differentiable file works for cpu and cuda, and for every batch size."""
    tensor = jax.ShapeDtypeStruct(export.symbolic_shape("batch, 5, 6, 17"), np.float32)
    vector = jax.ShapeDtypeStruct((17,), np.float32)
    function = loss(None, "mask")
    program = export.export(
        jax.jit(function),
        platforms=("cpu", "cuda"),
        disabled_checks=jax_bnar.DISABLED_EXPORT_CHECKS,
    )(tensor, tensor, vector, vector)
    stored, given_file, results = (tmp_path / n for n in ("program", "given.npz", "results.npz"))
    stored.write_bytes(program.serialize(vjp_order=1))
    given = operands(CASE)
    np.savez(given_file, **given._asdict())
    names = {"program": stored, "given": given_file, "results": results}
    run_python(
        _RELOAD.format(**{name: str(path) for name, path in names.items()}),
        timeout=300,
        prelude="",
    )
    with np.load(results) as saved:
        actual = [saved[name] for name in saved.files]
    expected = jax.tree.leaves(jax.jit(jax.value_and_grad(function, (0, 1, 2, 3)))(*given))
    for left, right in zip(actual, expected, strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-5, atol=1e-5)


def test_asking_for_a_kernel_that_is_not_there_names_it() -> None:
    program = functools.partial(exported, y_and_statistics("ffi"), platforms=("tpu",))
    with pytest.raises(NotImplementedError, match=r"implementation='ffi'.*forward kernel on tpu"):
        program(*shapes(*operands(CASE)))


def test_refused_without_the_constant() -> None:
    """Without it, export fails because of our calls; the tests above show that it is sufficient."""
    given = shapes(*operands(CASE))
    with pytest.raises(ValueError, match="jax_bnar_forward_v1"):
        export.export(jax.jit(y_and_statistics("ffi")), platforms=("cpu",))(*given)


def test_constant_covers_every_primitive() -> None:
    assert len(jax_bnar.DISABLED_EXPORT_CHECKS) == 11
    expected = {
        export.DisabledSafetyCheck.custom_call(f"jax_bnar_{operation}_v1")
        for operation in (
            "forward",
            "backward",
            "statistics",
            "normalise",
            "backward_reduce",
            "backward_apply",
            "dual_forward",
            "dual_backward",
            "dual_normalise",
            "dual_backward_reduce",
            "dual_backward_apply",
        )
    }
    assert set(jax_bnar.DISABLED_EXPORT_CHECKS) == expected
