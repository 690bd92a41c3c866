"""jit with sharded arrays: statistics, outputs and gradients against the oracle's."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import (
    Case,
    Cotangents,
    Form,
    Operands,
    Outcome,
    call,
    call_inference,
    cotangents,
    one_or_two_inputs,
    operands,
    operator,
    product_of_statistics,
    with_gradients,
)
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from outcomes import check_outcome
from sharding_tools import MeshKind, make_mesh, put, relative_difference, use_mesh
from subprocesses import run_python

import jax_bnar

pytestmark = pytest.mark.quick

kinds = pytest.mark.parametrize("kind", ["auto", "explicit"])
kinds_and_inputs = pytest.mark.parametrize(
    ("kind", "form"),
    [
        ("auto", "bn_add_relu"),
        ("explicit", "bn_add_relu"),
        ("auto", "dual_bn_add_relu"),
        pytest.param("explicit", "dual_bn_add_relu", marks=pytest.mark.slow),
    ],
)

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
    along = [*spec, *[None] * (len(case.shape) - len(spec))]
    # On Explicit meshes a cotangent must be sharded like its result: mean and var like the
    # channels, and also like the batch if each device has whole groups.
    groups = [along[0] if case.num_groups % mesh.size == 0 else None]
    statistic = P(*(groups if case.num_groups > 1 else []), along[case.axis])

    def place(tree: Any, spec: P) -> Any:
        return jax.tree.map(lambda array: put(array, mesh, spec), tree)

    placed = Operands(
        place(given.x, spec), place(given.z, spec), place(given.scale, P()), place(given.bias, P())
    )
    function = operator(case.form, implementation=implementation, **case.keywords)
    with use_mesh(mesh):
        results, gradients = with_gradients(function)(
            placed,
            Cotangents(
                place(dout.y, spec), place(dout.mean, statistic), place(dout.var, statistic)
            ),
        )
    # A gathered result would have the right values too, so check its sharding.
    if implementation == "ffi":
        sharding = jax.tree.leaves(placed.x)[0].sharding
        for array in jax.tree.leaves((results[0], gradients.x)):
            assert array.sharding.is_equivalent_to(sharding, array.ndim)
    return Outcome(*jax.tree.map(np.asarray, (*results, *gradients)))


def check(
    case: Case, kind: MeshKind, sizes: dict[str, int], spec: P, implementation: str = "ffi"
) -> None:
    given, dout = operands(case), cotangents(case)
    actual = outcome_on(case, kind, sizes, spec, implementation, given, dout)
    check_outcome(case, given, dout, actual)


@kinds_and_inputs
@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts(kind: MeshKind, form: Form, name: str) -> None:
    shape, axis, sizes, spec = LAYOUTS[name]
    save = "y" if name in ("batch", "data x rows", "odd") else "mask"
    check(Case(shape, axis, form=form, save=save), kind, sizes, spec)


@kinds_and_inputs
@pytest.mark.parametrize("name", ["batch", "data x channels", "rows of the image"])
def test_pure_jax(kind: MeshKind, form: Form, name: str) -> None:
    shape, axis, sizes, spec = LAYOUTS[name]
    check(Case(shape, axis, form=form, save="mask"), kind, sizes, spec, "xla")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
@pytest.mark.parametrize(
    ("form", "name"),
    [
        ("bn_add_relu", "batch"),
        ("bn_add_relu", "data x channels"),
        ("dual_bn_add_relu", "data x channels"),
    ],
)
def test_dtypes(dtype: str, form: Form, name: str) -> None:
    shape, axis, sizes, spec = LAYOUTS[name]
    check(Case(shape, axis, dtype, form, save="mask"), "auto", sizes, spec)


@pytest.mark.parametrize("save", ["y", "mask"])
@pytest.mark.parametrize("form", ["bn_relu", "batch_norm", "dual_bn_add_relu"])
def test_forms(form: Form, save: str) -> None:
    """Without a residual, backward recovers the sign of the ReLU from x."""
    shape, axis, sizes, spec = LAYOUTS["batch"]
    check(Case(shape, axis, form=form, save=save, bias_dtype=None), "auto", sizes, spec)


@pytest.mark.parametrize("how", ["jit", "vmap"])
@pytest.mark.parametrize("form", ["bn_relu", "dual_bn_add_relu"])
def test_sign_found_in_x_is_that_of_forward(form: Form, how: str) -> None:
    """Without a residual, backward recomputes y and must get the same sign.

    The bias moves one y of each channel to 0, where the last bit of scale*rstd decides. With dy = 1
    the gradient of the bias counts the open gates.
    """
    x, _, scale, _ = operands(Case((16, 3, 512), form=form))
    mesh = make_mesh("auto", d=8)

    def forward(x: Any, scale: Any, bias: Any) -> Any:
        biases = (bias, None) if isinstance(x, tuple) else bias
        if how == "jit":
            return call(form, x, None, scale, biases).y
        mapped = jax.vmap(
            lambda x: call(form, x, None, scale, biases, axis_name="d").y, axis_name="d"
        )
        return mapped(jax.tree.map(lambda x: x.reshape(8, 2, 3, -1), x)).reshape(16, 3, -1)

    if how == "jit":
        x = jax.tree.map(lambda x: put(x, mesh, P("d")), x)
    # The batch norm of a negated scale is exactly the negative one, so this is it without a ReLU.
    of_either_sign = jax.jit(functools.partial(forward, bias=None))
    pre = of_either_sign(x, scale) - of_either_sign(x, jax.tree.map(np.negative, scale))

    def sum_and_y(bias: Any, x: Any) -> Any:
        y = forward(x, scale, bias)
        return y.sum(), y

    both = jax.jit(jax.value_and_grad(sum_and_y, has_aux=True))
    (_, y), counted = both(-np.asarray(pre)[0, 0], x)
    np.testing.assert_array_equal(counted, (np.asarray(y) > 0).sum((0, 1)))


# On 8 devices a group is one device, half a device, two devices, or crosses their boundaries.
GROUPS = {"whole": (16, 8), "several": (32, 16), "spanning": (16, 4), "straddling": (24, 6)}


@kinds_and_inputs
@pytest.mark.parametrize("save", ["y", "mask"])
@pytest.mark.parametrize("name", GROUPS)
def test_ghost_batch(kind: MeshKind, form: Form, name: str, save: str) -> None:
    batch, num_groups = GROUPS[name]
    case = Case((batch, 3, 8), form=form, num_groups=num_groups, save=save)
    check(case, kind, {"d": 8}, P("d"))


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


def loss(x: Any, z: Any, scale: Any, bias: Any, form: Form = "bn_add_relu", **keywords: Any) -> Any:
    y, mean, var = call(form, x, z, scale, bias, **keywords)
    return (y * jnp.cos(y)).sum() + product_of_statistics(mean, var)


@functools.cache
def gradients(form: Form) -> Any:
    return jax.value_and_grad(functools.partial(loss, form=form), (0, 1, 2, 3))


def of(form: Form, shape: tuple[int, ...] = (16, 4, 16)) -> Operands:
    return operands(Case(shape, form=form))


def placed_at(given: Operands, mesh: Any, spec: P) -> Operands:
    """The tensors sharded like this, and the vectors replicated."""
    return Operands(
        *jax.tree.map(lambda a: put(a, mesh, spec if np.ndim(a) > 1 else P()), tuple(given))
    )


# Where x, z, scale and bias lie. A second x lies where z would.
PLACES = {
    "z replicated": (P("d"), P(), P(), P()),
    "x replicated": (P(), P("d"), P(), P()),
    "z by channels": (P("d"), P(None, None, "d"), P(), P()),
    "vectors sharded": (P("d"), P("d"), P("d"), P("d")),
    "vectors alone": (P(), P(), P("d"), P("d")),
    "vectors sharded with x": (P(None, None, "d"), P(None, None, "d"), P("d"), P()),
}


@kinds_and_inputs
@pytest.mark.parametrize("name", PLACES)
def test_operands_that_lie_elsewhere(kind: MeshKind, form: Form, name: str) -> None:
    given, mesh = of(form), make_mesh(kind, d=8)
    x, z, scale, bias = PLACES[name]
    if isinstance(given.x, tuple):
        places: Any = Operands((x, z), None, (scale, scale), (bias, bias))
    else:
        places = Operands(x, z, scale, bias)
    placed = jax.tree.map(lambda a, spec: put(a, mesh, spec), given, places)
    with use_mesh(mesh):
        actual = jax.jit(gradients(form))(*placed)
    assert relative_difference(actual, jax.jit(gradients(form))(*given)) < 5e-6


@one_or_two_inputs
@pytest.mark.parametrize("spec", [P(("a", "e")), P(None, None, ("a", "e")), P("e", "a")])
def test_mesh_of_auto_and_explicit_axes(form: Form, spec: P) -> None:
    """Results have the shardings that their types name, which leave out the Auto axis."""
    types = (AxisType.Auto, AxisType.Explicit)
    mesh = jax.make_mesh((2, 4), ("a", "e"), axis_types=types)
    given = of(form)
    with jax.set_mesh(mesh):
        placed = placed_at(given, mesh, spec)
        in_jit, eager = (f(*placed) for f in (jax.jit(gradients(form)), gradients(form)))
    expected = jax.jit(gradients(form))(*given)
    for actual in (in_jit, eager):
        assert relative_difference(actual, expected) < 5e-6
        for dx, x in zip(*(map(jax.tree.leaves, (actual[1][0], placed.x))), strict=True):
            assert jax.typeof(dx) == jax.typeof(x)


@pytest.mark.parametrize("implementation", ["ffi", "xla"])
def test_a_single_channel_on_an_axis_of_one_device(implementation: Any) -> None:
    """The types of vectors name that axis, and so must those of their cotangents."""
    mesh = make_mesh("explicit", d=8, m=1)
    x = np.random.default_rng(0).standard_normal((16, 1)).astype(np.float32)
    given = (x, np.full(1, 2, np.float32), np.ones(1, np.float32))

    def gradient(*given: Any) -> Any:
        def of_square(*given: Any) -> jax.Array:
            return jnp.square(jax_bnar.bn_relu(*given, implementation=implementation).y).sum()

        return jax.grad(of_square, (0, 1, 2))(*given)

    with jax.set_mesh(mesh):
        placed = [put(a, mesh, P("d", "m") if a.ndim == 2 else P("m")) for a in given]
        actual = jax.jit(gradient)(*placed)
    assert relative_difference(actual, jax.jit(gradient)(*given)) < 5e-6
    assert list(map(jax.typeof, actual)) == list(map(jax.typeof, placed))


def test_eager() -> None:
    given, mesh = of("bn_add_relu"), make_mesh("auto", d=8)
    placed = placed_at(given, mesh, P("d"))
    function = gradients("bn_add_relu")
    assert relative_difference(function(*placed), function(*given)) < 5e-6
    result = jax_bnar.bn_add_relu(*placed)
    assert result.y.sharding.is_equivalent_to(placed.x.sharding, 3)


@one_or_two_inputs
def test_uneven_shards(form: Form) -> None:
    """With four rows on eight devices XLA pads, and the padding must not count."""
    given, mesh = of(form), make_mesh("auto", d=8)
    sharding = jax.sharding.NamedSharding(mesh, P(None, "d"))

    def function(x: Any, *rest: Any) -> Any:
        x = jax.tree.map(lambda x: jax.lax.with_sharding_constraint(x, sharding), x)
        return loss(x, *rest, form=form)

    actual = jax.jit(jax.value_and_grad(function, (0, 1, 2, 3)))(*given)
    assert relative_difference(actual, jax.jit(gradients(form))(*given)) < 5e-6


@one_or_two_inputs
def test_inference(form: Form) -> None:
    given, mesh = of(form), make_mesh("auto", d=8)
    mean = jax.tree.map(lambda x: x.mean((0, 1)), given.x)
    var = jax.tree.map(lambda x: x.var((0, 1)), given.x)

    def function(*given: Any) -> Any:
        return jnp.square(call_inference(form, *given)).sum()

    both = jax.jit(jax.value_and_grad(function, tuple(range(6))))
    actual = both(*placed_at(given, mesh, P("d")), mean, var)
    assert relative_difference(actual, both(*given, mean, var)) < 5e-6


@one_or_two_inputs
@pytest.mark.parametrize("spec", [P("d"), P(None, "d"), P("s", "d")], ids=["0", "1", "2"])
def test_vmap_of_sharded(form: Form, spec: P) -> None:
    """vmap over the sharded axis, over another one, and with both sharded."""
    given = of(form, (8, 16, 3, 8))
    mesh = make_mesh("auto", d=8) if spec != P("s", "d") else make_mesh("auto", d=4, s=2)
    both = jax.jit(jax.vmap(gradients(form), (0, 0, None, None)))
    actual = both(*placed_at(given, mesh, spec))
    assert relative_difference(actual, both(*given)) < 5e-6


@one_or_two_inputs
def test_scan_of_remat(form: Form) -> None:
    given, mesh = of(form), make_mesh("auto", d=8)

    def function(x: Any, z: Any, scale: Any, bias: Any) -> Any:
        def others(y: Any) -> Any:
            return (y, *x[1:]) if isinstance(x, tuple) else y

        @jax.checkpoint
        def block(y: Any, _: Any) -> Any:
            return call(form, others(y), z, scale, bias, save="mask").y, None

        y, _ = jax.lax.scan(block, jax.tree.leaves(x)[0], None, length=3)
        return jnp.square(y).sum()

    both = jax.jit(jax.value_and_grad(function, (0, 1, 2, 3)))
    assert relative_difference(both(*placed_at(given, mesh, P("d"))), both(*given)) < 2e-5


@kinds_and_inputs
def test_second_order(kind: MeshKind, form: Form) -> None:
    given = of(form)
    mesh = make_mesh(kind, d=8)
    hessian = jax.jit(jax.hessian(functools.partial(loss, form=form), 2))
    expected = hessian(*given)
    with use_mesh(mesh):
        placed = placed_at(given, mesh, P("d"))._replace(scale=given.scale, bias=given.bias)
        actual = hessian(*placed)
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


@pytest.mark.slow
def test_without_x64() -> None:
    """By default x64 is off: only the all-reduce uses float64, and there is no warning."""
    run_python(WITHOUT_X64, timeout=300, prelude="")
