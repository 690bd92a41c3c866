"""Every strategy of the CUDA kernels on a GPU: oracle, exact fill, repeatability.

`make gpu` runs these. By hand: XLA_FLAGS=--xla_gpu_enable_command_buffer= pytest -m gpu. Without
that flag XLA would replay launches that it captured with the previous strategy.
"""

import os
from typing import Any

import activation_cases
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from cases import (
    Case,
    Form,
    Operands,
    Outcome,
    call_on_a_product,
    cotangents,
    operands,
    operator,
    outcome,
    with_gradients,
)
from exact_fill import arrange, exact_fill
from gpu_cases import (
    CUDA_KERNELS,
    DRY_RUN,
    LARGEST,
    PLATFORM,
    SHAPES,
    STRATEGIES,
    WIDEST,
    check,
    check_strategy,
    flag_cases,
    launched,
    only_on_gpu,
    shape_cases,
    size,
    strategy,
)
from outcomes import check_gradients, check_outcome, check_results, expected_results

import jax_bnar
from benchmarks.common.cuda_settings import cuda_settings
from benchmarks.gpu.compiled.programs import convolve
from jax_bnar._base.config import Save

pytestmark = pytest.mark.gpu
NO_GRAPHS = "--xla_gpu_enable_command_buffer="
RUNS = 3 if DRY_RUN else 100
# The shapes for activations other than ReLU, which share their kernels with each other.
ACTIVATED = SHAPES if DRY_RUN else ("nhwc-28", "nhwc-odd", "nchw-28")

all_strategies = pytest.mark.parametrize("name", STRATEGIES)


def each(cases: Any) -> pytest.MarkDecorator:
    """Runs all strategies of a case in one worker, to share compiled programs and expectations."""
    return pytest.mark.parametrize(
        "case",
        [pytest.param(case, id=key, marks=pytest.mark.xdist_group(key)) for key, case in cases],
    )


def test_device_and_flags() -> None:
    assert jax.default_backend() == PLATFORM
    flags = os.environ.get("XLA_FLAGS", "").split()
    assert NO_GRAPHS in flags, f"set XLA_FLAGS={NO_GRAPHS}, or one strategy is tested five times"


@all_strategies
@each(shape_cases())
def test_shapes(case: Case, name: str) -> None:
    with strategy(name), launched() as kernels:
        check(case)
    if CUDA_KERNELS:
        check_strategy(kernels, case, name)


@all_strategies
@each(flag_cases())
def test_flags(case: Case, name: str) -> None:
    with strategy(name):
        check(case)


@all_strategies
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("shape_name", SHAPES)
def test_masks_without_a_residual(shape_name: str, dtype: str, name: str) -> None:
    """oneDNN's workspace is a mask where `bn_relu` needs none."""
    shape, axis = SHAPES[shape_name]
    case = Case(shape, axis, dtype, "bn_relu")
    given, dout = operands(case), cotangents(case)
    # The operator gives no cotangents to the statistics.
    dout = dout._replace(mean=np.zeros_like(dout.mean), var=np.zeros_like(dout.var))
    statics: dict[str, Any] = {
        "epsilon": case.epsilon, "data_format": "NXC" if axis == -1 else "NCX",
        "fuse_norm_relu": True, "implementation": "ffi",
    }  # fmt: skip

    @jax.jit
    def function(x: Any, scale: Any, bias: Any, dy: Any) -> Any:
        none = jnp.zeros_like(scale)
        forward = jax_bnar.ops.batch_norm_forward_training(x, none, none, scale, bias, **statics)
        statistics = forward.batch_mean, forward.batch_variance
        backward = jax_bnar.ops.batch_norm_training_backward(
            x, dy, *statistics, scale, workspace=forward.workspace, **statics
        )
        return forward, backward

    with strategy(name):
        results = function(given.x, given.scale, given.bias, dout.y)
    forward, backward = jax.tree.map(np.asarray, results)
    dst, mean, var = forward.dst, forward.batch_mean, forward.batch_variance
    check_results(case, dst, mean, var, expected_results(case, given))
    dscale, dbias = backward.diff_gamma, backward.diff_beta
    got = Outcome(dst, mean, var, backward.diff_src, None, dscale, dbias)
    check_gradients(case, given, dout, got)
    bits = np.packbits(dst.astype(np.float32).ravel() > 0, bitorder="little")
    np.testing.assert_array_equal(forward.workspace.ravel(), bits)


@pytest.mark.parametrize("save", ["y", "mask"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("shape", [(2, 4, 6, 5, 64), (3, 4, 3, 5, 7)])
def test_after_a_convolution_of_volumes(shape: tuple[int, ...], dtype: str, save: Save) -> None:
    """There, calls for CUDA get arrays whose channels come before the voxels."""
    case = Case(shape, dtype=dtype, save=save)
    given, dout = operands(case), cotangents(case)
    function = operator(case.form, implementation="ffi", **case.keywords)
    # The identity, which XLA does not know: its results are those of the oracle's x.
    kernel = jnp.zeros((3, 3, 3, shape[-1], shape[-1]), dtype)
    kernel = kernel.at[1, 1, 1].set(jnp.eye(shape[-1], dtype=dtype))

    @jax.jit
    def program(kernel: jax.Array, given: Operands, dout: Any) -> Any:
        x = convolve(given.x, kernel)
        results, vjp = jax.vjp(lambda given: tuple(function(*given)), given._replace(x=x))
        return x, results, vjp(tuple(dout))[0]

    x, results, gradients = jax.tree.map(np.asarray, program(kernel, given, dout))
    check_outcome(case, given._replace(x=x), dout, Outcome(*results, *gradients))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_of_what_an_operation_has_made(dtype: str) -> None:
    """XLA computes these, in the loops that make x."""
    case = Case((8, 12, 12, 64), dtype=dtype, form="batch_norm")
    given, dout = operands(case), cotangents(case)
    check_outcome(case, given, dout, outcome(call_on_a_product(case), given, dout))


@all_strategies
@pytest.mark.parametrize("shape_name", ACTIVATED)
@pytest.mark.parametrize("form", ["bn_relu", "bn_add_relu", "dual_bn_add_relu"])
@pytest.mark.parametrize(
    ("activation", "dtype"),
    [
        *((activation, "bfloat16") for activation in activation_cases.ACTIVATIONS),
        ("silu", "float32"),
        ("hard_silu", "float16"),
        ("identity", "bfloat16"),
        ("identity", "float32"),
    ],
)
def test_activations(activation: str, dtype: str, form: Form, shape_name: str, name: str) -> None:
    shape, axis = SHAPES[shape_name]
    with strategy(name):
        activation_cases.check(Case(shape, axis, dtype, form), activation, "ffi")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("shape_name", SHAPES)
def test_statistics_are_exact(dtype: str, shape_name: str) -> None:
    shape, axis = SHAPES[shape_name]
    channels = shape[axis]
    axis %= len(shape)
    fill = exact_fill(size(shape) // channels, channels, dtype)
    x, axis = arrange(fill.x, shape[:axis], shape[axis + 1 :])
    x = jnp.asarray(x)
    function = jax.jit(
        lambda x: jax_bnar.batch_norm(x, None, None, axis=axis, implementation="ffi")
    )
    for name in STRATEGIES:
        with strategy(name):
            result = function(x)
            mean, var = np.asarray(result.mean), np.asarray(result.var)
        np.testing.assert_array_equal(mean, fill.mean, err_msg=f"mean, {name}")
        np.testing.assert_array_equal(var, fill.var, err_msg=f"var, {name}")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("axis", [-1, 1])
def test_inference(dtype: str, axis: int) -> None:
    case = Case((6, 40, 7, 40), axis, dtype)
    x, z, scale, bias = operands(case)
    mean, var = np.abs(np.stack(cotangents(case)[1:]))
    y = jax_bnar.bn_add_relu_inference(
        *map(jnp.asarray, (x, z, scale, bias, mean, var)),
        epsilon=case.epsilon,
        axis=axis,
        implementation="ffi",
    )
    expected, allowance = oracle.inference(
        x, z, scale, bias, mean, var, epsilon=case.epsilon, axis=axis
    )
    oracle.assert_within("y", y, expected, allowance)


@only_on_gpu
def test_kernels_are_those_of_cuda() -> None:
    """Triggers an error that only the CUDA code raises."""
    x = jnp.ones((4, 8), jnp.float32)
    with (
        cuda_settings(JAX_BNAR_CUDA_STRATEGY="fastest"),
        pytest.raises(Exception, match="JAX_BNAR_CUDA_STRATEGY must be"),
    ):
        jax_bnar.batch_norm(x, None, None, implementation="ffi").y.block_until_ready()


@all_strategies
def test_margin(name: str) -> None:
    shape, axis = SHAPES[LARGEST]
    with strategy(name), cuda_settings(JAX_BNAR_CUDA_SM_MARGIN="32"):
        check(Case(shape, axis, "bfloat16", save="mask"))


@all_strategies
@pytest.mark.parametrize("channels", ["8", "32", "256"])
@pytest.mark.parametrize("shape_name", dict.fromkeys((LARGEST, WIDEST)))
def test_slab_channels(name: str, channels: str, shape_name: str) -> None:
    shape, axis = SHAPES[shape_name]
    with strategy(name), cuda_settings(JAX_BNAR_CUDA_SLAB_CHANNELS=channels):
        check(Case(shape, axis, "bfloat16", save="mask"))


@pytest.mark.parametrize("teams", ["1", "3", "1000"])
def test_teams(teams: str) -> None:
    """One team, a few that have several slabs each, and as many as there are slabs or blocks."""
    shape, axis = SHAPES[WIDEST]
    variables = {"JAX_BNAR_CUDA_SLAB_CHANNELS": "16", "JAX_BNAR_CUDA_TEAMS": teams}
    with strategy("on_chip"), cuda_settings(**variables):
        check(Case(shape, axis, "bfloat16", save="mask"))


def bits(array: jax.Array) -> jax.Array:
    unsigned = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint64}
    return jax.lax.bitcast_convert_type(array, unsigned[array.dtype.itemsize])


@jax.jit
def differ(left: Any, right: Any) -> jax.Array:
    pairs = zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True)
    return jnp.stack([(bits(a) != bits(b)).any() for a, b in pairs]).any()


def repeats(function: Any, *given: Any) -> bool:
    first = function(*given)
    different = [differ(first, function(*given)) for _ in range(RUNS - 1)]
    return not np.asarray(jnp.stack(different)).any()


@all_strategies
@pytest.mark.parametrize(
    ("form", "save"),
    [("bn_add_relu", "mask"), ("dual_bn_add_relu", "mask"), ("dual_bn_add_relu", "y")],
)
@pytest.mark.parametrize("shape_name", [LARGEST, "nhwc-odd"])
def test_repeats_bit_for_bit(name: str, shape_name: str, form: Form, save: str) -> None:
    shape, axis = SHAPES[shape_name]
    case = Case(shape, axis, "bfloat16", form, save=save)
    given = jax.tree.map(jnp.asarray, (operands(case), cotangents(case)))
    function = with_gradients(operator(case.form, implementation="ffi", **case.keywords))
    with strategy(name):
        assert repeats(function, *given)
