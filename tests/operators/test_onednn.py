"""oneDNN Graph's BatchNorm operators, checked as oneDNN's benchdnn would check them."""

import functools
from typing import Any

import benchdnn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from benchdnn import DTYPES, EPSILON, FLAG_SETS, Data, Problem
from cases import Case, both_implementations, operands
from programs import hlo_calls, ours
from tiers import slow_except

from benchmarks.common.sites import RESNET50_SITES
from jax_bnar import ops

MOMENTUM = 0.25
# (N, C, ...) with ranks 2 to 5, one element per channel, odd counts, few and many channels.
SHAPES = [
    (1, 1),
    (1, 17),
    (5, 3),
    (301, 251),
    (2, 1, 9),
    (3, 7, 5),
    (1, 33, 6),
    (3, 3, 2, 2),  # from oneDNN's unit test
    (1, 33, 1, 1),
    (2, 17, 8, 8),
    (3, 251, 7, 5),
    (4, 1, 64, 33),
    (2, 7, 3, 4, 5),
    (1, 251, 2, 3, 2),
]
EXAMPLE = (3, 3, 227, 227)  # oneDNN's example; channels this long must have mean 0
RESNET50 = sorted({(2, s.channels, s.height, s.width) for s in RESNET50_SITES})
FORM_FLAGS = {"bn_relu": "CHR", "bn_add_relu": "CHA", "batch_norm": "CH"}

formats = pytest.mark.parametrize("data_format", ["NXC", "NCX"])
dtype_pairs = pytest.mark.parametrize(
    ("dtype", "parameter_dtype"), DTYPES, ids=["f32-f32", "bf16-f32", "bf16-bf16", "f16-f32"]
)


def statics(problem: Problem, flags: str, implementation: str) -> dict[str, Any]:
    return {
        "epsilon": EPSILON,
        "data_format": problem.data_format,
        "fuse_norm_relu": "R" in flags,
        "fuse_norm_add_relu": "A" in flags,
        "implementation": implementation,
    }


def run_forward(problem: Problem, data: Data, flags: str, implementation: str) -> Any:
    return ops.batch_norm_forward_training(
        data.src,
        data.running_mean,
        data.running_variance,
        data.gamma if "C" in flags else None,
        data.beta if "H" in flags else None,
        data.src_1 if "A" in flags else None,
        momentum=MOMENTUM,
        use_global_stats="G" in flags,
        **statics(problem, flags, implementation),
    )


def run_inference(problem: Problem, data: Data, flags: str, implementation: str) -> Any:
    return ops.batch_norm_inference(
        data.src,
        data.gamma if "C" in flags else None,
        data.beta if "H" in flags else None,
        data.running_mean,
        data.running_variance,
        data.src_1 if "A" in flags else None,
        **statics(problem, flags, implementation),
    )


def run_backward(problem: Problem, data: Data, flags: str, implementation: str, **gate: Any) -> Any:
    mean, variance = data[5:7] if "G" in flags else data[7:9]
    return ops.batch_norm_training_backward(
        data.src,
        data.diff_dst,
        mean,
        variance,
        data.gamma if "C" in flags else None,
        # benchdnn always checks the gradients of both, even if only one of C and H is set.
        diff_gamma_and_beta=True,
        use_global_stats="G" in flags,
        **gate,
        **statics(problem, flags, implementation),
    )


@functools.cache
def compiled(problem: Problem, flag_sets: tuple[str, ...], implementation: str) -> Any:
    """All flag sets in one program, which takes little longer to compile than one of them."""

    def everything(data: Data, references: Any) -> Any:
        results = {}
        for flags in flag_sets:
            forward = run_forward(problem, data, flags, implementation)
            inference = None
            if "G" in flags:
                inference = run_inference(problem, data, flags, implementation)
            gates = [{}]
            if forward.workspace is not None:
                gates = [{"workspace": forward.workspace}, {"dst": references[flags]}]
            backward = [run_backward(problem, data, flags, implementation, **g) for g in gates]
            results[flags] = forward, inference, backward
        return results

    return jax.jit(everything)


def check(problem: Problem, flag_sets: list[str], implementation: str = "ffi") -> None:
    data = benchdnn.fill(problem)
    exact = {flags: benchdnn.forward(problem, data, flags) for flags in flag_sets}
    # The reference's dst is a gate that does not come from our forward.
    references = {
        flags: problem.arranged(forward.dst).astype(data.src.dtype)
        for flags, forward in exact.items()
    }
    function = compiled(problem, tuple(flag_sets), implementation)
    results = jax.tree.map(np.asarray, function(data, references))
    for flags in flag_sets:
        forward, inference, backward = results[flags]
        check_forward(problem, data, flags, implementation, forward, exact[flags])
        if inference is not None:
            np.testing.assert_array_equal(inference, forward.dst)
        for found in backward:
            gate = problem.columns(forward.dst if found is backward[0] else references[flags])
            check_backward(problem, data, flags, found, gate)


def check_forward(
    problem: Problem, data: Data, flags: str, implementation: str, found: Any, exact: Any
) -> None:
    benchdnn.assert_dst(problem, found.dst, exact, f"dst {flags}")
    assert found.dst.dtype == data.src.dtype
    given = data.running_mean, data.running_variance
    assert [a.dtype for a in found[1:5]] == [a.dtype for a in given] * 2
    if "G" in flags:
        for got, expected in zip(found[1:5], given * 2, strict=True):
            np.testing.assert_array_equal(got, expected)
    else:
        # Mean and variance have threshold 0. But XLA replaces division by n with a product by 1/n.
        ulp = 0 if implementation == "ffi" else 4
        for got, expected in zip(found[3:5], data[7:9], strict=True):
            if ulp and got.dtype == np.float32:
                np.testing.assert_array_max_ulp(got, expected, maxulp=ulp)
            elif not ulp:
                np.testing.assert_array_equal(got, expected)
        wide = [
            (g.astype(np.float64), b.astype(np.float64))
            for g, b in zip(given, data[7:9], strict=True)
        ]
        for got, (old, batch) in zip(found[1:3], wide, strict=True):
            moved = MOMENTUM * old + (1 - MOMENTUM) * batch
            tolerance = 1e-6 if got.dtype == np.float32 else 2.0**-7
            np.testing.assert_allclose(got.astype(np.float64), moved, rtol=tolerance, atol=1e-6)
    if "R" in flags or "A" in flags:
        bits = np.unpackbits(found.workspace.ravel(), bitorder="little")[: found.dst.size]
        np.testing.assert_array_equal(bits, (found.dst > 0).ravel())
    else:
        assert found.workspace is None


def check_backward(problem: Problem, data: Data, flags: str, found: Any, gate: Any) -> None:
    exact = benchdnn.backward(problem, data, flags, gate)
    name = f"diff_src {flags}"
    benchdnn.assert_norm(problem.columns(found.diff_src), exact.diff_src, 6e-7, problem.dtype, name)
    for vector in ("diff_gamma", "diff_beta"):
        got = getattr(found, vector)
        assert got.dtype == data.gamma.dtype
        benchdnn.assert_norm(
            got, getattr(exact, vector), 5e-6, problem.parameter_dtype, f"{vector} {flags}"
        )
    if "A" in flags:
        np.testing.assert_array_equal(problem.columns(found.diff_src_1), exact.diff_src_1)
    else:
        assert found.diff_src_1 is None


@pytest.mark.quick
@formats
@dtype_pairs
@pytest.mark.parametrize("shape", [(3, 7, 5), (2, 33, 4, 6)])
def test_every_flag_set(
    shape: tuple[int, ...], dtype: str, parameter_dtype: str, data_format: str
) -> None:
    check(Problem(shape, dtype, parameter_dtype, data_format), FLAG_SETS)


# Two shapes of each dtype; `make check` takes all.
@formats
@pytest.mark.parametrize("shape", slow_except([*SHAPES[:4], *SHAPES[8:12]], SHAPES))
def test_every_shape(shape: tuple[int, ...], data_format: str) -> None:
    dtypes = DTYPES[SHAPES.index(shape) % len(DTYPES)]
    check(Problem(shape, *dtypes, data_format), FLAG_SETS)


@formats
def test_long_channels(data_format: str) -> None:
    check(Problem(EXAMPLE, data_format=data_format), ["CHR", "GCHA"])


@pytest.mark.parametrize("site", RESNET50_SITES, ids=lambda site: site.label)
def test_resnet50(site: Any) -> None:
    """Checks each BatchNorm of the network with its flags, in float32."""
    shape = (2, site.channels, site.height, site.width)
    check(Problem(shape, data_format="NCX"), [FORM_FLAGS[site.form]])


@pytest.mark.slow
@formats
@dtype_pairs
@pytest.mark.parametrize("shape", [*SHAPES, EXAMPLE, *RESNET50], ids=str)
def test_the_whole_grid(
    shape: tuple[int, ...], dtype: str, parameter_dtype: str, data_format: str
) -> None:
    """Checks every flag set with every shape, pair of dtypes and layout."""
    check(Problem(shape, dtype, parameter_dtype, data_format), FLAG_SETS)
    compiled.cache_clear()


@pytest.mark.slow
@dtype_pairs
def test_every_flag_set_in_pure_jax(dtype: str, parameter_dtype: str) -> None:
    check(Problem((3, 7, 5), dtype, parameter_dtype), FLAG_SETS, "xla")


@formats
def test_relu_with_a_slope_after_inference(data_format: str) -> None:
    """benchdnn's post-op relu:-1, which XLA applies to dst; it only changes signs."""
    problem = Problem((3, 17, 5), data_format=data_format)
    data = benchdnn.fill(problem)

    @jax.jit
    def function(data: Data) -> Any:
        dst = run_inference(problem, data, "GCH", "ffi")
        return jax.nn.leaky_relu(dst, -1.0)

    exact = benchdnn.forward(problem, data, "GCH")
    sloped = benchdnn.Forward(np.abs(exact.dst), exact.scaled)
    benchdnn.assert_dst(problem, function(data), sloped, "dst")


@pytest.mark.quick
def test_the_data_tells_flags_apart() -> None:
    """Each flag changes dst by more than the threshold, so that a missing effect is noticed."""
    problem = Problem((3, 7, 5))
    data = benchdnn.fill(problem)
    dsts = {flags: benchdnn.forward(problem, data, flags) for flags in FLAG_SETS}
    for flags, exact in dsts.items():
        for other, forward in dsts.items():
            if other == flags:
                continue
            with pytest.raises(AssertionError):
                benchdnn.assert_dst(problem, problem.arranged(forward.dst), exact, other)


def backward_calls(**keywords: Any) -> dict[str, int]:
    x, vector = jnp.ones((3, 5, 8), jnp.float32), jnp.ones(8, jnp.float32)
    gamma = keywords.pop("gamma", None)

    def function(x: Any, vector: Any) -> Any:
        return ops.batch_norm_training_backward(
            x, x, vector, vector, gamma, epsilon=1e-5, implementation="ffi", **keywords
        )

    calls = hlo_calls(function, x, vector)
    return {name.removeprefix("jax_bnar_").removesuffix("_v1"): n for name, n in calls.items()}


@pytest.mark.quick
def test_calls() -> None:
    x, vector = jnp.ones((3, 5, 8), jnp.float32), jnp.ones(8, jnp.float32)
    workspace = jnp.zeros((3, 5, 1), jnp.uint8)
    relu = {"fuse_norm_relu": True, "workspace": workspace}
    add = {"fuse_norm_add_relu": True, "dst": x}
    assert backward_calls() == {"backward": 1}
    assert backward_calls(gamma=vector, **relu) == {"backward": 1}
    assert backward_calls(gamma=vector, **add) == {"backward": 1}
    assert backward_calls(use_global_stats=True) == {"backward_apply": 1}
    both = {"backward_reduce": 1, "backward_apply": 1}
    assert backward_calls(use_global_stats=True, gamma=vector) == both
    assert backward_calls(use_global_stats=True, **add) == both

    def forward(**flags: Any) -> Any:
        return hlo_calls(
            lambda x: ops.batch_norm_forward_training(
                x, vector, vector, epsilon=1e-5, implementation="ffi", **flags
            ),
            x,
        )

    assert forward(fuse_norm_add_relu=True, src_1=x) == {"jax_bnar_forward_v1": 1}
    assert forward(use_global_stats=True, fuse_norm_relu=True) == {"jax_bnar_normalise_v1": 1}
    assert ours(
        lambda x: ops.batch_norm_inference(x, None, None, vector, vector, epsilon=1e-5), x
    ) == {"inference": 1}


@pytest.mark.quick
def test_one_result_or_three() -> None:
    """diff_gamma and diff_beta are returned together or not at all."""
    x, vector = jnp.ones((3, 5, 8), jnp.float32), jnp.ones(8, jnp.bfloat16)
    run = functools.partial(ops.batch_norm_training_backward, epsilon=1e-5)
    assert run(x, x, vector, vector)[1:] == (None, None, None)
    both = run(x, x, vector, vector, vector)
    assert both.diff_gamma is not None
    assert both.diff_beta is not None
    assert both.diff_gamma.dtype == both.diff_beta.dtype == jnp.bfloat16
    without_gamma = run(x, x, vector, vector, diff_gamma_and_beta=True)
    assert without_gamma.diff_beta is not None
    with pytest.raises(ValueError, match="oneDNN ignores gamma"):
        run(x, x, vector, vector, vector, diff_gamma_and_beta=False)


@pytest.mark.quick
@both_implementations
@pytest.mark.parametrize("flags", ["CH", "CHR", "CHA", "GCH", "GCHR", "GCHA"])
def test_backward_is_the_gradient_of_forward(flags: str, implementation: str) -> None:
    """`jax.grad` of the forward operator gives the same as the backward operator."""
    problem = Problem((3, 17, 5))
    data = benchdnn.fill(problem)

    def dst(src: Any, gamma: Any, beta: Any, src_1: Any) -> Any:
        data_ = data._replace(src=src, gamma=gamma, beta=beta, src_1=src_1)
        result = run_forward(problem, data_, flags, implementation)
        return result.dst, result.workspace

    tensors = data.src, data.gamma, data.beta, data.src_1

    @jax.jit
    def gradient(*tensors: Any) -> Any:
        _, vjp, workspace = jax.vjp(dst, *tensors, has_aux=True)
        return vjp(data.diff_dst), workspace

    (dsrc, dgamma, dbeta, dsrc_1), workspace = gradient(*tensors)
    gate = {} if workspace is None else {"workspace": workspace}
    found = run_backward(problem, data, flags, implementation, **gate)
    np.testing.assert_allclose(found.diff_src, dsrc, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found.diff_gamma, dgamma, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found.diff_beta, dbeta, rtol=1e-6)
    if "A" in flags:
        np.testing.assert_array_equal(found.diff_src_1, dsrc_1)


def named() -> dict[str, Any]:
    x, _, scale, bias = operands(Case((3, 5, 8)))
    return {"src": x, "mean": bias, "variance": scale, "epsilon": 1e-5}


@pytest.mark.quick
@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"src": 1.0}, TypeError, "src must be an array, got float"),
        ({"src": jnp.ones(8, jnp.float32)}, ValueError, "src must have at least 2 dimensions"),
        ({"mean": None}, TypeError, "mean must be an array"),
        ({"gamma": jnp.ones(3, jnp.float32)}, ValueError, r"gamma must have shape \(8,\).* of src"),
        ({"data_format": "NHWC"}, ValueError, "data_format must be 'NXC' or 'NCX', got 'NHWC'"),
        ({"epsilon": -1.0}, ValueError, "epsilon must be finite and > 0"),
        ({"fuse_norm_relu": "false"}, TypeError, "fuse_norm_relu must be True or False, got 'fal"),
        ({"use_global_stats": "yes"}, TypeError, "use_global_stats must be True or False, got 'y"),
        ({"momentum": -0.1}, ValueError, "momentum is the weight of the old running value"),
        ({"fuse_norm_add_relu": True}, TypeError, "adds src_1, which must be an array"),
        ({"src_1": jnp.ones((3, 5, 8), jnp.float32)}, ValueError, "src_1 is added with"),
        ({"fuse_norm_relu": True, "fuse_norm_add_relu": True}, ValueError, "exclude each other"),
        (
            {"fuse_norm_add_relu": True, "src_1": jnp.ones((3, 5, 1), jnp.float32)},
            ValueError,
            r"src_1 must have the shape of src, \(3, 5, 8\), got \(3, 5, 1\)",
        ),
    ],
)
def test_forward_refuses(change: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^batch_norm_forward_training: .*{message}"):
        ops.batch_norm_forward_training(**named() | change)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"diff_dst": None}, TypeError, "diff_dst must be an array"),
        ({"fuse_norm_relu": True}, TypeError, "one of workspace and dst must be an array"),
        ({"workspace": jnp.ones((3, 5, 1), jnp.uint8)}, ValueError, "are read with fuse_norm_relu"),
        (
            {"workspace": jnp.ones((3, 5, 8), jnp.uint8), "fuse_norm_relu": True},
            ValueError,
            r"workspace must have shape \(3, 5, 1\)",
        ),
        (
            {"dst": jnp.ones((3, 5, 8), jnp.bfloat16), "fuse_norm_relu": True},
            TypeError,
            "dst must have the dtype of src",
        ),
        (
            {
                "workspace": jnp.ones((3, 5, 1), jnp.uint8),
                "dst": jnp.ones((7, 9), jnp.float32),
                "fuse_norm_relu": True,
            },
            ValueError,
            "dst must have the shape of src",
        ),
    ],
)
def test_backward_refuses(change: dict[str, Any], error: type[Exception], message: str) -> None:
    given = named()
    given["diff_dst"] = given["src"]
    with pytest.raises(error, match=f"^batch_norm_training_backward: .*{message}"):
        ops.batch_norm_training_backward(**given | change)


def test_epsilon_is_required() -> None:
    given = named()
    del given["epsilon"]
    with pytest.raises(TypeError, match="epsilon"):
        ops.batch_norm_forward_training(**given)
