"""`dual_bn_add_relu` on eight devices: results of one device, and one all-reduce each way.

forward     4 * groups * C float64      mean and var + mean^2 of each device, of x1 and of x2
backward    3 * groups * C float32      sum(e), sum(e*(x1-mean1)) and sum(e*(x2-mean2))
"""

import functools
from typing import Any

import jax
import numpy as np
import pytest
from cases import Case, operands
from jax.sharding import PartitionSpec as P
from programs import hlo_calls
from sharding_tools import (
    Collective,
    MeshKind,
    collectives,
    make_mesh,
    put,
    relative_difference,
    use_mesh,
)

import jax_bnar

pytestmark = pytest.mark.quick

LAYOUTS = {
    "batch": ((16, 3, 2, 24), -1, {"d": 8}, P("d")),
    "batch nchw": ((8, 24, 3, 2), 1, {"d": 8}, P("d")),
    "data x channels": ((8, 3, 2, 16), -1, {"d": 4, "c": 2}, P("d", None, None, "c")),
    "data x rows": ((8, 4, 3, 24), -1, {"d": 4, "s": 2}, P("d", "s")),
    "rows nchw": ((3, 24, 8, 8), 1, {"d": 8}, P(None, None, "d")),
}
HALVES = {
    "jax_bnar_statistics_v1": 2,
    "jax_bnar_dual_normalise_v1": 1,
    "jax_bnar_dual_backward_reduce_v1": 1,
    "jax_bnar_dual_backward_apply_v1": 1,
}
WHOLE = {"jax_bnar_dual_forward_v1": 1, "jax_bnar_dual_backward_v1": 1}
kinds = pytest.mark.parametrize("kind", ["auto", "explicit"])
saves = pytest.mark.parametrize("save", ["y", "mask"])


@functools.cache
def step(**keywords: Any) -> Any:
    def function(arrays: Any, dout: Any) -> Any:
        results, vjp = jax.vjp(lambda *a: tuple(jax_bnar.dual_bn_add_relu(*a, **keywords)), *arrays)
        return results, vjp(dout)

    return function


def made(shape: tuple[int, ...], axis: int, num_groups: int = 1) -> tuple[Any, Any]:
    """(x1, x2, scale1, bias1, scale2, bias2) and the cotangents of the results."""
    first, second = (operands(Case(shape, axis, seed=seed)) for seed in (1, 2))
    random = np.random.default_rng(3)
    statistic = (shape[axis],) if num_groups == 1 else (num_groups, shape[axis])
    dout = (
        random.standard_normal(shape).astype(np.float32),
        *(random.standard_normal(statistic).astype(np.float32) for _ in range(4)),
    )
    return (first.x, second.x, first.scale, first.bias, second.scale, second.bias), dout


def placed(
    arrays: Any, dout: Any, axis: int, mesh: Any, spec: P, statistic: P | None = None
) -> tuple[Any, Any]:
    along = [*spec, *[None] * (arrays[0].ndim - len(spec))]
    channels = P(along[axis])
    specs = [spec, spec, *[channels] * 4]
    of_results = [spec, *[channels if statistic is None else statistic] * 4]
    return (
        tuple(put(a, mesh, s) for a, s in zip(arrays, specs, strict=True)),
        tuple(put(a, mesh, s) for a, s in zip(dout, of_results, strict=True)),
    )


@kinds
@saves
@pytest.mark.parametrize("name", LAYOUTS)
def test_as_on_one_device_with_one_all_reduce_each_way(
    name: str, save: str, kind: MeshKind
) -> None:
    shape, axis, sizes, spec = LAYOUTS[name]
    arrays, dout = made(shape, axis)
    mesh = make_mesh(kind, **sizes)
    function = step(axis=axis, save=save, implementation="ffi")
    expected = jax.tree.map(np.asarray, jax.jit(function)(arrays, dout))
    given = placed(arrays, dout, axis, mesh, spec)
    with use_mesh(mesh):
        actual = jax.jit(function)(*given)
        found = collectives(function, *given)
        calls = hlo_calls(function, *given)
    for array in (actual[0][0], actual[1][0], actual[1][1]):
        assert array.sharding.is_equivalent_to(given[0][0].sharding, array.ndim)
    assert relative_difference(actual, expected) < 2e-6
    channels = shape[axis] // sizes.get("c", 1)
    assert found == [
        [Collective("all-reduce", "f64", (1, 4 * channels))],
        [Collective("all-reduce", "f32", (1, 3 * channels))],
    ]
    # The sign of the ReLU from x1 and x2: one tiny kernel call more, and no collective.
    assert calls == HALVES | ({"jax_bnar_normalise_v1": 1} if save == "y" else {})


@saves
def test_channels_never_meet(save: str) -> None:
    arrays, dout = made((4, 3, 64), -1)
    given = placed(arrays, dout, -1, make_mesh("auto", d=8), P(None, None, "d"))
    assert collectives(step(save=save), *given) == []
    assert hlo_calls(step(save=save), *given) == WHOLE


@saves
@pytest.mark.parametrize("num_groups", [16, 4], ids=["whole", "spanning"])
def test_ghost_groups(num_groups: int, save: str) -> None:
    """Groups that fit a device stay on it; others have a slot each in the one all-reduce."""
    arrays, dout = made((32, 3, 24), -1, num_groups)
    whole = num_groups == 16
    mesh = make_mesh("auto", d=8)
    given = placed(arrays, dout, -1, mesh, P("d"), statistic=P("d") if whole else P())
    function = step(save=save, num_groups=num_groups)
    expected = jax.tree.map(np.asarray, jax.jit(function)(arrays, dout))
    assert relative_difference(jax.jit(function)(*given), expected) < 2e-6
    found = collectives(function, *given)
    assert {each.opcode for operation in found for each in operation} == {"all-reduce"}
    if whole:
        assert hlo_calls(function, *given) == WHOLE
    else:
        assert [[each.shape for each in operation] for operation in found] == [
            [(num_groups, 4 * 24)],
            [(num_groups, 3 * 24)],
        ]


def test_pure_jax_on_a_mesh() -> None:
    arrays, dout = made((16, 3, 24), -1)
    function = step(implementation="xla", save="mask")
    expected = jax.tree.map(np.asarray, jax.jit(function)(arrays, dout))
    for kind in ("auto", "explicit"):
        mesh = make_mesh(kind, d=8)
        with use_mesh(mesh):
            actual = jax.jit(function)(*placed(arrays, dout, -1, mesh, P("d")))
        assert relative_difference(actual, expected) < 2e-6
