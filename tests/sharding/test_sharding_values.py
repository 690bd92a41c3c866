"""jit with sharded arrays: statistics, outputs and gradients against the oracle's."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from cases import (
    Case,
    Cotangents,
    Operands,
    Outcome,
    cotangents,
    operands,
    operator,
    with_gradients,
)
from gradients import check_gradients
from jax.sharding import PartitionSpec as P
from sharding_tools import MeshKind, make_mesh, put, relative_difference, use_mesh
from subprocesses import run_python

import jax_bnar

pytestmark = pytest.mark.quick

kinds = pytest.mark.parametrize("kind", ["auto", "explicit"])

# Shape, channel axis, mesh, and the sharding of x.
LAYOUTS: dict[str, tuple[tuple[int, ...], int, dict[str, int], P]] = {
    "batch": ((16, 3, 2, 24), -1, {"d": 8}, P("d")),
    "batch-nchw": ((8, 24, 3, 2), 1, {"d": 8}, P("d")),
    "channels": ((5, 3, 2, 64), -1, {"d": 8}, P(None, None, None, "d")),
    "channels-nchw": ((5, 16, 2, 2), 1, {"d": 8}, P(None, "d")),
    "data x channels": ((8, 3, 2, 16), -1, {"d": 4, "c": 2}, P("d", None, None, "c")),
    "data x channels nchw": ((8, 16, 3, 2), 1, {"d": 4, "c": 2}, P("d", "c")),
    "rows of the image": ((3, 8, 2, 24), -1, {"d": 8}, P(None, "d")),
    "rows of the image nchw": ((3, 24, 8, 2), 1, {"d": 8}, P(None, None, "d")),
    "data x rows": ((8, 4, 3, 24), -1, {"d": 4, "s": 2}, P("d", "s")),
    "two axes on one": ((16, 3, 24), -1, {"d": 4, "s": 2}, P(("s", "d"))),
    "replicated": ((6, 3, 24), -1, {"d": 8}, P()),
    "odd": ((8, 3, 3, 5), -1, {"d": 8}, P("d")),
}


def outcome_on(
    case: Case,
    kind: MeshKind,
    sizes: dict[str, int],
    spec: P,
    implementation: str,
    given: Operands,
    dout: Cotangents,
) -> Outcome:
    mesh = make_mesh(kind, **sizes)
    along = [*spec, *[None] * (given.x.ndim - len(spec))]
    # On Explicit meshes a cotangent must be sharded like its result: mean and var like the
    # channels, and also like the batch if each device has whole groups.
    groups = [along[0] if case.num_groups % mesh.size == 0 else None]
    statistic = P(*(groups if case.num_groups > 1 else []), along[case.axis])
    place = functools.partial(put, mesh=mesh)
    placed = Operands(
        place(given.x, spec=spec),
        place(given.z, spec=spec),
        place(given.scale, spec=P()),
        place(given.bias, spec=P()),
    )
    function = operator(case.form, implementation=implementation, **case.keywords)
    with use_mesh(mesh):
        results, gradients = with_gradients(function)(
            placed,
            Cotangents(
                place(dout.y, spec=spec),
                place(dout.mean, spec=statistic),
                place(dout.var, spec=statistic),
            ),
        )
    # A gathered result would have the right values too, so check its sharding.
    if implementation == "ffi":
        for array in (results[0], gradients.x):
            assert array.sharding.is_equivalent_to(placed.x.sharding, array.ndim)
    return Outcome(*jax.tree.map(np.asarray, (*results, *gradients)))


def check(
    case: Case, kind: MeshKind, sizes: dict[str, int], spec: P, implementation: str = "ffi"
) -> None:
    given, dout = operands(case), cotangents(case)
    actual = outcome_on(case, kind, sizes, spec, implementation, given, dout)
    expected = oracle.forward(
        *given, epsilon=case.epsilon, axis=case.axis, num_groups=case.num_groups, relu=case.relu
    )
    for name in ("mean", "var", "y"):
        oracle.assert_within(
            name,
            getattr(actual, name),
            getattr(expected, name),
            getattr(expected, f"{name}_allowance"),
        )
    check_gradients(case, given, dout, actual)


@kinds
@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts(kind: MeshKind, name: str) -> None:
    shape, axis, sizes, spec = LAYOUTS[name]
    save = "y" if name in ("batch", "odd") else "mask"
    check(Case(shape, axis, save=save), kind, sizes, spec)


@kinds
@pytest.mark.parametrize("name", ["batch", "data x channels", "rows of the image"])
def test_pure_jax(kind: MeshKind, name: str) -> None:
    shape, axis, sizes, spec = LAYOUTS[name]
    check(Case(shape, axis, save="mask"), kind, sizes, spec, "xla")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
@pytest.mark.parametrize("name", ["batch", "data x channels"])
def test_dtypes(dtype: str, name: str) -> None:
    shape, axis, sizes, spec = LAYOUTS[name]
    check(Case(shape, axis, dtype, save="mask"), "auto", sizes, spec)


@pytest.mark.parametrize("save", ["y", "mask"])
@pytest.mark.parametrize("form", ["bn_relu", "batch_norm"])
def test_forms(form: Any, save: str) -> None:
    """With bn_relu, backward recovers the sign of the ReLU from x."""
    shape, axis, sizes, spec = LAYOUTS["batch"]
    check(Case(shape, axis, form=form, save=save, bias_dtype=None), "auto", sizes, spec)


@pytest.mark.parametrize("how", ["jit", "vmap"])
def test_sign_found_in_x_is_that_of_forward(how: str) -> None:
    """Without a residual, backward recomputes y and must get the same sign.

    The bias moves one y of each channel to 0, where the last bit of scale*rstd decides. With dy = 1
    the gradient of the bias counts the open gates.
    """
    x, _, scale, _ = operands(Case((16, 3, 512)))
    mesh = make_mesh("auto", d=8)

    def forward(x: Any, bias: Any) -> Any:
        if how == "jit":
            return jax_bnar.bn_relu(x, scale, bias).y
        mapped = jax.vmap(
            lambda x: jax_bnar.bn_relu(x, scale, bias, axis_name="d").y, axis_name="d"
        )
        return mapped(x.reshape(8, 2, 3, -1)).reshape(x.shape)

    x = put(x, mesh, P("d")) if how == "jit" else x
    without_bias = jax.jit(lambda x: jax_bnar.batch_norm(x, scale, None).y)(x)
    both = jax.jit(
        lambda x, bias: jax.value_and_grad(_sum_and_y(forward), 1, has_aux=True)(x, bias)
    )
    (_, y), counted = both(x, -np.asarray(without_bias)[0, 0])
    np.testing.assert_array_equal(counted, (np.asarray(y) > 0).sum((0, 1)))


def _sum_and_y(forward: Any) -> Any:
    def function(x: Any, bias: Any) -> Any:
        y = forward(x, bias)
        return y.sum(), y

    return function


# On 8 devices a group is one device, half a device, two devices, or crosses their boundaries.
GROUPS = {"whole": (16, 8), "several": (32, 16), "spanning": (16, 4), "straddling": (24, 6)}


@kinds
@pytest.mark.parametrize("save", ["y", "mask"])
@pytest.mark.parametrize("name", GROUPS)
def test_ghost_batch(kind: MeshKind, name: str, save: str) -> None:
    batch, num_groups = GROUPS[name]
    check(Case((batch, 3, 8), num_groups=num_groups, save=save), kind, {"d": 8}, P("d"))


def test_ghost_batch_on_a_plane() -> None:
    """The mesh axis over the rows splits every group, the one over the batch none."""
    case = Case((8, 4, 3, 8), num_groups=4, save="mask")
    check(case, "auto", {"d": 4, "s": 2}, P("d", "s"))


@pytest.mark.parametrize("ratio", [1e4, 1e6])
def test_variance_far_below_the_mean(ratio: float) -> None:
    """E[x^2]-E[x]^2 in float32 has no correct digits beyond a ratio of a few thousand."""
    case = Case((64, 8, 24), ratio=ratio, form="batch_norm")
    x = operands(case).x
    mesh = make_mesh("auto", d=8)
    result = jax.jit(lambda x: jax_bnar.batch_norm(x, None, None))(put(x, mesh, P("d")))
    exact = x.astype(np.float64).var((0, 1))
    # Each device's mean is float32, which limits the accuracy of the variance at 1e6.
    assert np.abs(np.asarray(result.var) / exact - 1).max() < 1e-3 * (ratio / 1e4)
    unit = np.spacing(np.abs(np.asarray(result.mean)))
    assert (np.abs(np.asarray(result.mean) - x.astype(np.float64).mean((0, 1))) <= unit).all()


def test_constant_channels_have_no_variance() -> None:
    x = np.broadcast_to(np.array([3.7, -1e4, 0, 1e-20], np.float32), (16, 5, 4))
    mesh = make_mesh("auto", d=8)
    result = jax.jit(lambda x: jax_bnar.batch_norm(x, None, None))(put(x, mesh, P("d")))
    np.testing.assert_array_equal(result.var, np.zeros(4))
    np.testing.assert_array_equal(result.mean, x[0, 0])


def test_special_values_stay_in_their_channel() -> None:
    x = operands(Case((16, 3, 8))).x.copy()
    x[3, 0, 1], x[9, 2, 5] = np.nan, np.inf
    mesh = make_mesh("auto", d=8)
    function = jax.jit(lambda x: jax_bnar.bn_relu(x, None, None, num_groups=2))
    for left, right in zip(function(put(x, mesh, P("d"))), function(x), strict=True):
        np.testing.assert_array_equal(np.isnan(left), np.isnan(right))
        np.testing.assert_allclose(left, right, rtol=1e-5, atol=1e-5)


def loss(x: Any, z: Any, scale: Any, bias: Any, **keywords: Any) -> Any:
    result = jax_bnar.bn_add_relu(x, z, scale, bias, **keywords)
    return (result.y * jnp.cos(result.y)).sum() + (result.mean * result.var).sum()


gradients = jax.value_and_grad(loss, (0, 1, 2, 3))
CASE = Case((16, 4, 16))
PLACES = {
    "z replicated": (P("d"), P(), P(), P()),
    "x replicated": (P(), P("d"), P(), P()),
    "z by channels": (P("d"), P(None, None, "d"), P(), P()),
    "vectors sharded": (P("d"), P("d"), P("d"), P("d")),
    "vectors sharded with x": (P(None, None, "d"), P(None, None, "d"), P("d"), P()),
}


@kinds
@pytest.mark.parametrize("name", PLACES)
def test_operands_that_lie_elsewhere(kind: MeshKind, name: str) -> None:
    given, mesh = operands(CASE), make_mesh(kind, d=8)
    placed = [put(a, mesh, spec) for a, spec in zip(given, PLACES[name], strict=True)]
    with use_mesh(mesh):
        actual = jax.jit(gradients)(*placed)
    assert relative_difference(actual, jax.jit(gradients)(*given)) < 5e-6


def test_eager() -> None:
    given, mesh = operands(CASE), make_mesh("auto", d=8)
    placed = [put(a, mesh, P("d") if np.ndim(a) > 1 else P()) for a in given]
    assert relative_difference(gradients(*placed), gradients(*given)) < 5e-6
    result = jax_bnar.bn_add_relu(*placed)
    assert result.y.sharding.is_equivalent_to(placed[0].sharding, 3)


def test_uneven_shards() -> None:
    """With four rows on eight devices XLA pads, and the padding must not count."""
    given, mesh = operands(CASE), make_mesh("auto", d=8)

    def function(x: Any, *rest: Any) -> Any:
        sharding = jax.sharding.NamedSharding(mesh, P(None, "d"))
        return loss(jax.lax.with_sharding_constraint(x, sharding), *rest)

    actual = jax.jit(jax.value_and_grad(function, (0, 1, 2, 3)))(*given)
    assert relative_difference(actual, jax.jit(gradients)(*given)) < 5e-6


def test_inference() -> None:
    x, z, scale, bias = operands(CASE)
    mean, var = x.mean((0, 1)), x.var((0, 1))

    def function(*given: Any) -> Any:
        return jnp.square(jax_bnar.bn_add_relu_inference(*given)).sum()

    mesh = make_mesh("auto", d=8)
    both = jax.jit(jax.value_and_grad(function, tuple(range(6))))
    placed = (put(x, mesh, P("d")), put(z, mesh, P("d")), scale, bias, mean, var)
    assert relative_difference(both(*placed), both(x, z, scale, bias, mean, var)) < 5e-6


@pytest.mark.parametrize("spec", [P("d"), P(None, "d"), P("s", "d")], ids=["0", "1", "2"])
def test_vmap_of_sharded(spec: P) -> None:
    """vmap over the sharded axis, over another one, and with both sharded."""
    x, z, scale, bias = operands(Case((8, 16, 3, 8)))
    mesh = make_mesh("auto", d=8) if spec != P("s", "d") else make_mesh("auto", d=4, s=2)
    both = jax.jit(jax.vmap(gradients, (0, 0, None, None)))
    actual = both(put(x, mesh, spec), put(z, mesh, spec), scale, bias)
    assert relative_difference(actual, both(x, z, scale, bias)) < 5e-6


def test_scan_of_remat() -> None:
    given, mesh = operands(CASE), make_mesh("auto", d=8)

    def function(x: Any, z: Any, scale: Any, bias: Any) -> Any:
        @jax.checkpoint
        def block(x: Any, _: Any) -> Any:
            return jax_bnar.bn_add_relu(x, z, scale, bias, save="mask").y, None

        y, _ = jax.lax.scan(block, x, None, length=3)
        return jnp.square(y).sum()

    both = jax.jit(jax.value_and_grad(function, (0, 1, 2, 3)))
    placed = [put(a, mesh, P("d") if np.ndim(a) > 1 else P()) for a in given]
    assert relative_difference(both(*placed), both(*given)) < 2e-5


@kinds
def test_second_order(kind: MeshKind) -> None:
    x, z, scale, bias = operands(CASE)
    mesh = make_mesh(kind, d=8)
    hessian = jax.jit(jax.hessian(loss, 2))
    expected = hessian(x, z, scale, bias)
    with use_mesh(mesh):
        actual = hessian(put(x, mesh, P("d")), put(z, mesh, P("d")), scale, bias)
    assert relative_difference(actual, expected) < 1e-5


WITHOUT_X64 = """
import jax
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_dtype_promotion", "strict")
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
import jax_bnar

random = np.random.default_rng(0)
x = (random.standard_normal((64, 16, 8)) + 1e4).astype(np.float32)
exact = x.astype(np.float64).var((0, 1))
mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,))

def loss(x, **keywords):
    y, mean, var = jax_bnar.bn_relu(x, None, None, **keywords)
    return (y * y).sum() + var.sum(), var

def check(gradient, var):
    assert gradient.dtype == var.dtype == np.float32
    assert np.abs(np.asarray(var) / exact - 1).max() < 1e-3

both = jax.grad(loss, has_aux=True)
check(*jax.jit(both)(jax.device_put(x, NamedSharding(mesh, P("d")))))
check(*both(jax.device_put(x, NamedSharding(mesh, P("d")))))
named = jax.shard_map(lambda x: both(x, axis_name="d"), mesh=mesh, in_specs=P("d"),
                      out_specs=(P("d"), P()))
check(*jax.jit(named)(x))
check(*named(x))
gradient, var = jax.vmap(lambda x: both(x, axis_name="d"), axis_name="d")(x.reshape(8, 8, 16, 8))
check(gradient, var[3])
assert not jax.config.jax_enable_x64
"""


def test_without_x64() -> None:
    """By default x64 is off: only the all-reduce uses float64, and there is no warning."""
    run_python(WITHOUT_X64, timeout=300, prelude="")
