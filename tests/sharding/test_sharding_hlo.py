"""Communication in compiled HLO: one small all-reduce each way, and never an activation.

    forward     2 * groups * C float64      mean and var + mean^2 of each device
    backward    2 * groups * C float32      sum(e) and sum(e*(x-mean))

C is the number of channels on a device, and groups the number of statistics groups that span
devices.
"""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from cases import Case, cotangents, operands
from jax.sharding import PartitionSpec as P
from programs import hlo_calls
from sharding_tools import Collective, MeshKind, collectives, make_mesh, put, total_bytes, use_mesh

import jax_bnar

pytestmark = pytest.mark.quick

HALVES = {
    "jax_bnar_statistics_v1": 1,
    "jax_bnar_normalise_v1": 1,
    "jax_bnar_backward_reduce_v1": 1,
    "jax_bnar_backward_apply_v1": 1,
}
WHOLE = {"jax_bnar_forward_v1": 1, "jax_bnar_backward_v1": 1}


def step(form: str = "bn_add_relu", **keywords: Any) -> Any:
    """A function from given cotangents to results and gradients; it reduces nothing else."""

    def function(x: Any, z: Any, scale: Any, bias: Any, dy: Any, dstatistic: Any) -> Any:
        def forward(x: Any, z: Any, scale: Any, bias: Any) -> Any:
            tensors = (x, z) if form == "bn_add_relu" else (x,)
            return tuple(getattr(jax_bnar, form)(*tensors, scale, bias, **keywords))

        results, vjp = jax.vjp(forward, x, z, scale, bias)
        return results, vjp((dy, dstatistic, dstatistic))

    return function


def placed(case: Case, mesh: Any, spec: P, *, statistic: P | None = None) -> list[Any]:
    """Operands and cotangents on the mesh; vectors are sharded like the channels."""
    given, dout = operands(case), cotangents(case)
    along = [*spec, *[None] * (len(case.shape) - len(spec))]
    channels = P(along[case.axis])
    return [
        put(given.x, mesh, spec),
        put(given.x if given.z is None else given.z, mesh, spec),
        put(given.scale, mesh, channels),
        put(given.bias, mesh, channels),
        put(dout.y, mesh, spec),
        put(dout.mean, mesh, channels if statistic is None else statistic),
    ]


def summed(groups: int, channels: int) -> list[list[Collective]]:
    """The formula above, as the collectives of a step."""
    return [
        [Collective("all-reduce", "f64", (groups, 2 * channels))],
        [Collective("all-reduce", "f32", (groups, 2 * channels))],
    ]


BATCH = (
    ((16, 3, 2, 24), -1, {"d": 8}, P("d")),
    ((8, 24, 3, 2), 1, {"d": 8}, P("d")),
    ((8, 3, 2, 16), -1, {"d": 4, "c": 2}, P("d", None, None, "c")),
    ((8, 16, 3, 2), 1, {"d": 4, "c": 2}, P("d", "c")),
    ((8, 4, 3, 24), -1, {"d": 4, "s": 2}, P("d", "s")),
    ((3, 24, 8, 8), 1, {"d": 8}, P(None, None, "d")),
)


@pytest.mark.parametrize("kind", ["auto", "explicit"])
@pytest.mark.parametrize("save", ["y", "mask"])
@pytest.mark.parametrize(
    ("shape", "axis", "sizes", "spec"),
    BATCH,
    ids=["batch", "batch nchw", "data x channels", "data x channels nchw", "data x rows", "rows"],
)
def test_one_small_all_reduce_each_way(
    shape: tuple[int, ...],
    axis: int,
    sizes: dict[str, int],
    spec: P,
    save: str,
    kind: MeshKind,
) -> None:
    case, mesh = Case(shape, axis), make_mesh(kind, **sizes)
    given = placed(case, mesh, spec)
    with use_mesh(mesh):
        function = step(axis=axis, save=save, implementation="ffi")
        found = collectives(function, *given)
        assert hlo_calls(function, *given) == HALVES
    channels = case.channels // sizes.get("c", 1)
    assert found == summed(1, channels)
    assert total_bytes(found) == 24 * channels


def test_one_all_reduce_of_forward_alone() -> None:
    mesh = make_mesh("auto", d=8)
    x, z, scale, bias, *_ = placed(Case((16, 3, 24)), mesh, P("d"))
    assert collectives(jax_bnar.bn_add_relu, x, z, scale, bias) == summed(1, 24)[:1]


@pytest.mark.parametrize("form", ["bn_relu", "batch_norm"])
def test_other_forms(form: str) -> None:
    """Recovering the ReLU's sign from x takes one tiny kernel call and no collective."""
    mesh = make_mesh("auto", d=8)
    given = placed(Case((16, 3, 24)), mesh, P("d"))
    assert collectives(step(form), *given) == summed(1, 24)
    more = {"jax_bnar_normalise_v1": 2} if form == "bn_relu" else {}
    assert hlo_calls(step(form), *given) == HALVES | more


def test_float64_takes_two_forward() -> None:
    mesh = make_mesh("auto", d=8)
    given = placed(Case((16, 3, 24), dtype="float64"), mesh, P("d"))
    assert collectives(step(), *given) == [
        [Collective("all-reduce", "f64", (1, 24))],
        [Collective("all-reduce", "f64", (1, 24))],
        [Collective("all-reduce", "f64", (1, 48))],
    ]


@pytest.mark.parametrize("kind", ["auto", "explicit"])
@pytest.mark.parametrize("save", ["y", "mask"])
def test_channels_never_meet(save: str, kind: MeshKind) -> None:
    mesh = make_mesh(kind, d=8)
    given = placed(Case((4, 3, 64)), mesh, P(None, None, "d"))
    with use_mesh(mesh):
        assert collectives(step(save=save), *given) == []
        assert hlo_calls(step(save=save), *given) == WHOLE


@pytest.mark.parametrize("kind", ["auto", "explicit"])
@pytest.mark.parametrize("save", ["y", "mask"])
def test_groups_that_fit_a_device_stay_on_it(save: str, kind: MeshKind) -> None:
    mesh = make_mesh(kind, d=8)
    given = placed(Case((32, 3, 24), num_groups=16), mesh, P("d"), statistic=P("d"))
    function = step(save=save, num_groups=16)
    with use_mesh(mesh):
        found = collectives(function, *given)
        assert hlo_calls(function, *given) == WHOLE
    # The groups share scale and bias, whose gradients are summed outside the kernels.
    assert [[each.shape for each in operation] for operation in found] == [[(24,), (24,)]]


def test_groups_that_span_devices_get_a_slot_each() -> None:
    mesh = make_mesh("auto", d=8)
    case = Case((24, 3, 24), num_groups=6)
    given = placed(case, mesh, P("d"), statistic=P())
    assert collectives(step(num_groups=6), *given) == summed(6, 24)


def test_vmapped_over_the_sharded_axis_nothing_crosses() -> None:
    mesh = make_mesh("auto", d=8)
    x = put(operands(Case((16, 4, 3, 8))).x, mesh, P("d"))

    def loss(x: Any) -> Any:
        return jnp.square(jax_bnar.bn_relu(x, None, None).y).sum()

    assert collectives(jax.vmap(jax.grad(loss)), x) == []


def test_cotangent_that_comes_replicated() -> None:
    """The gradient of a sum is a broadcast; it must not cause x to be gathered."""
    mesh = make_mesh("auto", d=8)
    x, z, scale, bias, *_ = placed(Case((16, 3, 24)), mesh, P("d"))

    def loss(*given: Any) -> Any:
        return jax_bnar.bn_add_relu(*given).y.sum()

    assert collectives(jax.grad(loss, (0, 1, 2, 3)), x, z, scale, bias) == summed(1, 24)


def test_replicated_residual_is_cut_where_it_lies() -> None:
    mesh = make_mesh("auto", d=8)
    x, z, *rest = placed(Case((16, 3, 24)), mesh, P("d"))
    z = put(z, mesh, P())
    assert (
        collectives(lambda x, z: jax_bnar.bn_add_relu(x, z, *rest[:2]), x, z) == summed(1, 24)[:1]
    )


def test_mask_whose_bytes_the_shards_would_break_gathers_and_says_so() -> None:
    """A shard has 45 bits. This documented case is correct but costs an all-gather; save="y" does
    not.
    """
    mesh = make_mesh("auto", d=8)
    given = placed(Case((8, 9, 5)), mesh, P("d"))
    assert "all-gather" in {c.opcode for o in collectives(step(save="mask"), *given) for c in o}
    assert collectives(step(save="y"), *given) == summed(1, 5)
