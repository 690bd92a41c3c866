"""A y of float32 for an x of 16 bits: against the oracle, under transformations, without copies.

The transformations are compared with those of the operator on an x that was widened before, which
the other tests hold to the oracle and to formulas.
"""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import (
    CORNER_SHAPES,
    RESNET_SHAPES,
    Case,
    Form,
    both_implementations,
    call,
    cotangents,
    layouts,
    operands,
    run,
)
from flax_tools import as_flax_needs_it
from jax.ad_checkpoint import checkpoint_policies
from jax.sharding import PartitionSpec as P
from outcomes import check_outcome
from programs import hlo_calls
from residuals import saved_bytes
from sharding_tools import MeshKind, compiled_collectives, make_mesh, put, use_mesh

import jax_bnar
from jax_bnar import flax_layers
from jax_bnar._base.config import Save
from jax_bnar._base.implementation import Implementation
from jax_bnar._benchmark.memory import planned_memory

pytestmark = pytest.mark.quick

NARROW = ("float16", "bfloat16")
OF_ONE: tuple[Form, ...] = ("bn_add_relu", "bn_relu", "batch_norm")
narrow = pytest.mark.parametrize("dtype", NARROW)
every_form = pytest.mark.parametrize("form", OF_ONE)
every_save = pytest.mark.parametrize("save", ["y", "mask"])


def check(case: Case, implementation: Implementation) -> None:
    given, dout = operands(case), cotangents(case)
    check_outcome(case, given, dout, run(case, implementation, given, dout))


@pytest.mark.parametrize(
    ("form", "dtype", "save"),
    [
        ("bn_add_relu", "bfloat16", "y"),
        ("bn_add_relu", "float16", "mask"),
        ("bn_relu", "bfloat16", "mask"),
        ("bn_relu", "float16", "y"),
    ],
)
@layouts(CORNER_SHAPES | RESNET_SHAPES)
def test_shapes(form: Form, dtype: str, save: Save, shape: tuple[int, ...], axis: int) -> None:
    check(Case(shape, axis, dtype, form, save=save, out_dtype="float32"), "ffi")


@both_implementations
@narrow
@every_form
@every_save
@pytest.mark.parametrize("layout", [{}, {"axis": 1}, {"num_groups": 3}], ids=["nhwc", "nchw", "g3"])
def test_every_flag(
    implementation: Implementation, dtype: str, form: Form, save: Save, layout: dict[str, Any]
) -> None:
    case = Case((6, 40, 9, 40), dtype=dtype, form=form, save=save, out_dtype="float32", **layout)
    check(case, implementation)


@pytest.mark.slow
@narrow
@every_form
@pytest.mark.parametrize(("shape", "axis"), [((28, 56, 56, 40), -1), ((16, 64, 56, 57), 1)])
def test_larger_than_the_cache(dtype: str, form: Form, shape: tuple[int, ...], axis: int) -> None:
    """Results that bypass the caches, and a backward that reads dy and y again, or dz."""
    x = jax.random.normal(jax.random.key(0), shape, dtype)
    z, dy = (jax.random.normal(jax.random.key(k), shape, np.float32) for k in (1, 2))
    scale, bias = (
        jnp.linspace(0.5, 1.5, shape[axis], dtype=np.float32),
        jnp.linspace(-1, 1, shape[axis], dtype=np.float32),
    )

    def step(implementation: Any, x: Any, *given: Any) -> Any:
        options = {"axis": axis, "out_dtype": "float32", "implementation": implementation}
        y, vjp = jax.vjp(lambda *a: call(form, *a, **options).y, x, *given)
        return y, vjp(dy)

    ours, expected = (
        jax.tree.leaves(jax.jit(functools.partial(step, each))(x, z, scale, bias))
        for each in ("ffi", "xla")
    )
    for got, wanted in zip(ours, expected, strict=True):
        assert got.dtype == wanted.dtype
        error = np.abs(np.asarray(got, np.float32) - np.asarray(wanted, np.float32))
        unit = float(jnp.finfo(got.dtype).eps) + (1e-5 if got.ndim > 1 else 1e-4)
        # A gate next to 0 may be open in one of them only: three elements of millions were.
        wrong = np.count_nonzero(~(error <= unit * float(jnp.abs(wanted).max())))
        assert wrong <= 1e-5 * error.size


# --- transformations ----------------------------------------------------------

SHAPE = (8, 3, 3, 16)


def arrays(dtype: str = "bfloat16", shape: tuple[int, ...] = SHAPE) -> tuple[Any, ...]:
    given = operands(Case(shape, dtype=dtype, out_dtype="float32", seed=3))
    return tuple(map(jnp.asarray, given))


def loss_of(form: Form, **options: Any) -> Any:
    """A loss of every result; with `out_dtype`, or with an x that is widened before the call."""

    def loss(widen_before: bool, x: Any, *given: Any) -> Any:
        keywords = dict(options)
        if widen_before:
            x = x.astype(jnp.float32)
        else:
            keywords["out_dtype"] = jnp.float32
        y, mean, var = call(form, x, *given, **keywords)
        return (jnp.sin(y) * jnp.cos(jnp.arange(y.size, dtype=y.dtype).reshape(y.shape))).sum() + (
            mean * var
        ).sum()

    return loss


def assert_close(left: Any, right: Any) -> None:
    for got, wanted in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        assert got.dtype == wanted.dtype
        tolerance = 2 * float(jnp.finfo(got.dtype).eps) + 2e-5
        wide = np.asarray(wanted, np.float32)
        np.testing.assert_allclose(
            np.asarray(got, np.float32), wide, rtol=tolerance, atol=tolerance * np.abs(wide).max()
        )


def both_ways(transformed: Any, *given: Any) -> None:
    """Checks that a transformation gives the same for the two losses."""
    assert_close(*(jax.jit(functools.partial(transformed, flag))(*given) for flag in (False, True)))


# Not computed in the program, where XLA may leave out that a cosine is rounded to bfloat16.
DIRECTION = tuple(jnp.cos(each) for each in arrays())
TRANSFORMATIONS: dict[str, Any] = {
    "value_and_grad": lambda loss: (
        lambda flag, *a: jax.value_and_grad(functools.partial(loss, flag), (0, 1, 2, 3))(*a)
    ),
    "jvp": lambda loss: lambda flag, *a: jax.jvp(functools.partial(loss, flag), a, DIRECTION),
    "second derivative": lambda loss: (
        lambda flag, *a: jax.jvp(
            jax.grad(functools.partial(loss, flag), (0, 1, 2, 3)), a, DIRECTION
        )[1]
    ),
    "vmap": lambda loss: (
        lambda flag, x, z, *rest: jax.vmap(
            jax.value_and_grad(functools.partial(loss, flag), (0, 1, 2, 3)),
            in_axes=(0, 0, None, None),
        )(jnp.stack([x, -x]), jnp.stack([z, z + 1]), *rest)
    ),
    "vmap of z": lambda loss: (
        lambda flag, x, z, *rest: jax.vmap(
            jax.grad(functools.partial(loss, flag), (0, 1)), in_axes=(None, 0, None, None)
        )(x, jnp.stack([z, z + 1]), *rest)
    ),
    "remat": lambda loss: (
        lambda flag, *a: jax.grad(
            jax.checkpoint(
                functools.partial(loss, flag),
                policy=checkpoint_policies.save_only_these_names("bnar_statistics"),
            ),
            (0, 1, 2, 3),
        )(*a)
    ),
    "scan": lambda loss: (
        lambda flag, *a: jax.lax.scan(
            lambda total, _: (
                total + jax.value_and_grad(functools.partial(loss, flag))(*a)[0],
                None,
            ),
            jnp.float32(0),
            length=2,
        )[0]
    ),
}


@both_implementations
@every_form
@every_save
@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_transformations(implementation: Implementation, form: Form, save: Save, name: str) -> None:
    loss = loss_of(form, save=save, implementation=implementation)
    both_ways(TRANSFORMATIONS[name](loss), *arrays())


@both_implementations
@every_form
@every_save
def test_named_axis(implementation: Implementation, form: Form, save: Save) -> None:
    """Statistics over the examples of a vmap, and over the devices of a shard_map."""
    options: dict[str, Any] = {"save": save, "implementation": implementation}
    loss = loss_of(form, axis_name="batch", **options)
    x, z, scale, bias = arrays()
    axes = (0, 0, None, None)

    def of_examples(flag: bool, *given: Any) -> Any:
        def total(*given: Any) -> Any:
            own = functools.partial(loss, flag)
            return jax.vmap(own, in_axes=axes, axis_name="batch")(*given).sum()

        return jax.value_and_grad(total, (0, 1, 2, 3))(*given)

    both_ways(of_examples, jnp.stack([x, -x]), jnp.stack([z, z + 1]), scale, bias)

    mesh = make_mesh("auto", batch=8)

    def on_devices(flag: bool, *given: Any) -> Any:
        def part(*given: Any) -> Any:
            return jax.lax.psum(loss(flag, *given), "batch")

        specs = (P("batch"), P("batch"), P(), P())
        whole = jax.shard_map(part, mesh=mesh, in_specs=specs, out_specs=P())
        return jax.value_and_grad(whole, (0, 1, 2, 3))(*given)

    both_ways(on_devices, x, z, scale, bias)


@pytest.mark.parametrize("kind", ["auto", "explicit"])
@every_save
def test_sharded_arrays(kind: MeshKind, save: Save) -> None:
    """Nothing is gathered, and y and dx are sharded like x."""
    x, z, scale, bias = arrays(shape=(16, 3, 3, 16))
    mesh = make_mesh(kind, data=8)

    def step(*given: Any) -> Any:
        options = {"save": save, "out_dtype": "float32", "implementation": "ffi"}
        y, vjp = jax.vjp(lambda *a: jax_bnar.bn_add_relu(*a, **options).y, *given)
        return y, vjp(jnp.cos(y))

    expected = jax.jit(step)(x, z, scale, bias)
    with use_mesh(mesh):
        placed = [put(each, mesh, P("data")) for each in (x, z)]
        placed += [put(each, mesh, P()) for each in (scale, bias)]
        compiled = jax.jit(step).lower(*placed).compile()
        actual = compiled(*placed)
    assert_close(actual, expected)
    assert {each.opcode for each, *_ in compiled_collectives(compiled)} == {"all-reduce"}
    for array in (actual[0], actual[1][0]):
        assert array.sharding.is_equivalent_to(placed[0].sharding, 4)


@every_form
@narrow
def test_inference(form: Form, dtype: str) -> None:
    """Values and gradients; `test_inference.py` holds them to the oracle."""
    x, z, scale, bias = arrays(dtype)
    tensors = (x, z) if form == "bn_add_relu" else (x,)
    function = getattr(jax_bnar, f"{form}_inference")
    mean, var = jnp.linspace(-1, 1, 16), jnp.linspace(0.5, 2, 16)

    def step(widen: bool, implementation: Any, x: Any, *given: Any) -> Any:
        x = x.astype(jnp.float32) if widen else x
        y = function(x, *given, mean, var, out_dtype="float32", implementation=implementation)
        return (y * jnp.cos(y)).sum()

    grads = [
        jax.jit(jax.value_and_grad(functools.partial(step, *each), tuple(range(len(tensors)))))(
            *tensors, scale, bias
        )
        for each in ((True, None), (False, None), (False, "xla"), (False, "ffi"))
    ]
    for each in grads[1:]:
        assert_close(each, grads[0])


@pytest.mark.parametrize("axis", [-1, 1])
@pytest.mark.parametrize("bits", [0x7FC00000, 0x7FFFFFFF, 0xFFFFFFFF])
def test_every_nan_remains_one(bits: int, axis: int) -> None:
    """A cotangent of float32 may be a NaN that rounding to bfloat16 would carry into the sign."""
    x, z = (jnp.ones((2, 16, 16, 16), dtype) for dtype in ("bfloat16", "float32"))
    vector = jnp.ones(16, jnp.float32)
    dy = np.ones(z.shape, np.float32)
    dy.view(np.uint32)[1, 2, 3, 4] = bits

    def function(x: jax.Array, z: jax.Array) -> jax.Array:
        return jax_bnar.bn_add_relu_inference(
            *(x, z, vector, vector, vector, vector), axis=axis, out_dtype="float32"
        )

    _, vjp = jax.vjp(function, x, z)
    for gradient in vjp(jnp.asarray(dy)):
        np.testing.assert_array_equal(np.isnan(gradient.astype(np.float32)), np.isnan(dy))


# --- no copies ----------------------------------------------------------------


@both_implementations
@every_save
def test_no_wide_x_is_saved(implementation: Implementation, save: Save) -> None:
    """Backward keeps x in its 16 bits, y or its mask, and vectors."""
    x, z, scale, bias = arrays()
    options = {"save": save, "out_dtype": "float32", "implementation": implementation}
    saved = saved_bytes(lambda *a: jax_bnar.bn_add_relu(*a, **options).y, x, z, scale, bias)
    elements = x.size
    of_x = 2 * elements
    assert sum(saved) < of_x + {"y": 4 * elements, "mask": elements // 8}[save] + 1000


@every_save
def test_no_wide_x_is_computed(save: Save) -> None:
    """One call each way, with x and dx of 16 bits; nothing converts an array."""
    x, z, scale, bias = arrays()

    def step(*given: Any) -> Any:
        y, vjp = jax.vjp(
            lambda *a: jax_bnar.bn_add_relu(*a, save=save, out_dtype="float32").y, *given
        )
        return y, vjp(y)

    calls = {"jax_bnar_forward_v1": 1, "jax_bnar_backward_v1": 1}
    assert hlo_calls(step, x, z, scale, bias) == calls
    compiled = jax.jit(step).lower(x, z, scale, bias).compile()
    assert " convert(" not in (compiled.as_text() or "")
    memory = planned_memory(compiled)
    assert memory is not None
    assert memory.temporary < 2 * x.size


class Block(nn.Module):
    """A convolution in bfloat16 and a norm that keeps float32, as mixed precision often has it."""

    fused: bool
    train: bool = True

    @nn.compact
    def __call__(self, x: Any, residual: Any) -> Any:
        y = nn.Conv(16, (1, 1), use_bias=False, dtype=jnp.bfloat16)(x)
        if self.fused:
            norm = flax_layers.BatchNorm(not self.train, activation="relu", name="norm")
            return norm(y, residual=residual)
        return nn.relu(nn.BatchNorm(not self.train, name="norm")(y) + residual)


@pytest.mark.parametrize("by", ["layer", "fuse"])
def test_layers_and_fuse_make_no_wide_copy(by: str) -> None:
    """Flax promotes a bfloat16 x with float32 parameters; only the residual is wide before that."""
    x, residual, *_ = arrays("float32")
    x = x.astype(jnp.bfloat16).astype(jnp.float32)
    plain, fused = Block(fused=False), Block(fused=True)
    with as_flax_needs_it():
        variables: Any = plain.init(jax.random.key(0), x, residual)
    # The convolution returns x, because XLA leaves out its rounding where no call of ours follows.
    variables["params"]["Conv_0"]["kernel"] = jnp.eye(16, dtype=np.float32).reshape(1, 1, 16, 16)

    def loss(net: Any, params: Any, x: Any, residual: Any) -> Any:
        y, _ = net.apply(variables | {"params": params}, x, residual, mutable=["batch_stats"])
        assert y.dtype == jnp.float32
        return (y * jnp.cos(y)).sum()

    expected_loss = functools.partial(loss, plain)
    actual_loss = functools.partial(loss, fused) if by == "layer" else jax_bnar.fuse(expected_loss)
    given = variables["params"], x, residual
    actual, expected = (
        jax.jit(jax.value_and_grad(each, (0, 1, 2))) for each in (actual_loss, expected_loss)
    )
    with as_flax_needs_it():
        text = actual.lower(*given).as_text()
        results = actual(*given), expected(*given)
    for got, wanted in zip(*map(jax.tree.leaves, results), strict=True):
        np.testing.assert_allclose(got, wanted, atol=0.01 * float(jnp.abs(wanted).max()))
    forward, backward = (line for line in text.splitlines() if "custom_call @jax_bnar_" in line)
    narrow, wide = (f"tensor<72x16x{dtype}>" for dtype in ("bf16", "f32"))
    assert f"({narrow}, {wide}" in forward  # x, z
    assert f"({wide}, {narrow}, {wide}" in backward  # dy, x, y


@pytest.mark.parametrize("fused", [False, True])
def test_folding_keeps_the_dtype(fused: bool) -> None:
    """A norm in evaluation that widens becomes a bfloat16 convolution and an offset in float32."""
    x, residual, *_ = arrays("float32")
    net = Block(fused=fused, train=False)
    with as_flax_needs_it():
        variables = net.init(jax.random.key(0), x, residual)
        folded = jax_bnar.fold_batch_norms(net.apply, variables, x, residual)
        y = folded.apply(folded.variables, x, residual)
        expected: Any = net.apply(variables, x, residual)
    assert len(folded.report.folded) == 1
    assert y.dtype == jnp.float32
    np.testing.assert_allclose(y, expected, atol=0.05)


def test_cuda_runs_pure_jax() -> None:
    """There is no CUDA kernel for it, and a program that demands one is refused."""
    given = arrays()

    def loss(implementation: Any, *given: Any) -> Any:
        options = {"out_dtype": "float32", "implementation": implementation}
        return jax_bnar.bn_add_relu(*given, **options).y.sum()

    def lowered(implementation: Any) -> str:
        step = jax.jit(jax.grad(functools.partial(loss, implementation), (0, 1)))
        return step.trace(*given).lower(lowering_platforms=("cuda",)).as_text()

    assert "jax_bnar" not in lowered(None)
    with pytest.raises(NotImplementedError, match="none from bfloat16 to float32"):
        lowered("ffi")


# --- bad input ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("x_dtype", "out_dtype", "message"),
    [
        ("float32", "bfloat16", "out_dtype must be the dtype of x, float32, got bfloat16"),
        ("float32", "float64", "out_dtype must be the dtype of x, float32, got float64"),
        ("bfloat16", "float16", "the dtype of x, bfloat16, or float32, got float16"),
        ("float16", "float64", "the dtype of x, float16, or float32, got float64"),
        ("float16", "int32", "the dtype of x, float16, or float32, got int32"),
        ("float16", "wide", "out_dtype must be a dtype, got 'wide'"),
    ],
)
@every_form
def test_other_dtypes_are_refused(form: Form, x_dtype: str, out_dtype: str, message: str) -> None:
    x = jnp.ones((4, 8), x_dtype)
    with pytest.raises(TypeError, match=f"{form}: .*{message}"):
        call(form, x, x, None, None, out_dtype=out_dtype)


def test_residual_has_the_dtype_of_y() -> None:
    x = jnp.ones((4, 8), jnp.bfloat16)
    with pytest.raises(TypeError, match=r"z must have the dtype of y, float32 .*got bfloat16"):
        jax_bnar.bn_add_relu(x, x, None, None, out_dtype="float32")


def test_the_dtype_of_x_may_be_named() -> None:
    x = jnp.ones((4, 8), jnp.bfloat16)
    assert jax_bnar.bn_relu(x, None, None, out_dtype=jnp.bfloat16).y.dtype == jnp.bfloat16
