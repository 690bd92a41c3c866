"""Communication in compiled HLO: one small all-reduce each way, and never an activation.

    forward     2 * inputs * groups * C float64      mean and var + mean^2 of each device
    backward    (1 + inputs) * groups * C float32    sum(e), and sum(e*(x-mean)) of each input

C is the number of channels on a device, and groups the number of statistics groups that span
devices.
"""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from cases import Case, Form, call, cotangents, inputs_of, one_or_two_inputs, operands, operation_of
from jax.sharding import PartitionSpec as P
from programs import hlo_calls
from sharding_tools import Collective, MeshKind, collectives, make_mesh, put, total_bytes, use_mesh

import jax_bnar

pytestmark = pytest.mark.quick


def target_of(form: Form, name: str) -> str:
    """The target of the custom call of an operation."""
    return f"jax_bnar_{operation_of(form, name)}_v1"


def halves(form: Form) -> dict[str, int]:
    """The calls of a step whose groups span devices."""
    names = ("normalise", "backward_reduce", "backward_apply")
    own = {target_of(form, name): 1 for name in names}
    return {"jax_bnar_statistics_v1": inputs_of(form)} | own


def whole(form: Form) -> dict[str, int]:
    """The calls of a step whose groups do not."""
    return {target_of(form, name): 1 for name in ("forward", "backward")}


def step(form: Form = "bn_add_relu", **keywords: Any) -> Any:
    """A function from given cotangents to results and gradients; it reduces nothing else."""

    def function(x: Any, z: Any, scale: Any, bias: Any, dy: Any, dmean: Any, dvar: Any) -> Any:
        def forward(*given: Any) -> Any:
            return tuple(call(form, *given, **keywords))

        results, vjp = jax.vjp(forward, x, z, scale, bias)
        return results, vjp((dy, dmean, dvar))

    return function


def placed(case: Case, mesh: Any, spec: P, *, statistic: P | None = None) -> list[Any]:
    """Operands and cotangents on the mesh; vectors are sharded like the channels."""
    along = [*spec, *[None] * (len(case.shape) - len(spec))]
    channels = P(along[case.axis])
    of_statistics = channels if statistic is None else statistic
    specs = (spec, spec, channels, channels, spec, of_statistics, of_statistics)
    return [
        jax.tree.map(lambda array, own=own: put(array, mesh, own), tree)
        for tree, own in zip((*operands(case), *cotangents(case)), specs, strict=True)
    ]


def summed(groups: int, channels: int, inputs: int = 1) -> list[list[Collective]]:
    """The formula above, as the collectives of a step."""
    return [
        [Collective("all-reduce", "f64", (groups, 2 * inputs * channels))],
        [Collective("all-reduce", "f32", (groups, (1 + inputs) * channels))],
    ]


BATCH = (
    ((16, 3, 2, 24), -1, {"d": 8}, P("d")),
    ((8, 24, 3, 2), 1, {"d": 8}, P("d")),
    ((8, 3, 2, 16), -1, {"d": 4, "c": 2}, P("d", None, None, "c")),
    ((8, 16, 3, 2), 1, {"d": 4, "c": 2}, P("d", "c")),
    ((8, 4, 3, 24), -1, {"d": 4, "s": 2}, P("d", "s")),
    ((3, 24, 8, 8), 1, {"d": 8}, P(None, None, "d")),
)


def layouts() -> Iterator[Any]:
    """Each layout on both kinds of mesh, with one input and, in three of them, with two."""
    names = (
        "batch",
        "batch nchw",
        "data x channels",
        "data x channels nchw",
        "data x rows",
        "rows",
    )
    for name, (shape, axis, sizes, spec) in zip(names, BATCH, strict=True):
        for kind in ("auto", "explicit"):
            for form in ("bn_add_relu", "dual_bn_add_relu"):
                first = form == "bn_add_relu" or name in ("batch", "data x channels", "rows")
                marks = () if first else pytest.mark.slow
                case = Case(shape, axis, form=form)
                yield pytest.param(
                    case, kind, sizes, spec, id=f"{name}-{kind}-{case.inputs}", marks=marks
                )


@pytest.mark.parametrize("save", ["y", "mask"])
@pytest.mark.parametrize(("case", "kind", "sizes", "spec"), list(layouts()))
def test_one_small_all_reduce_each_way(
    case: Case, kind: MeshKind, sizes: dict[str, int], spec: P, save: str
) -> None:
    mesh = make_mesh(kind, **sizes)
    given = placed(case, mesh, spec)
    with use_mesh(mesh):
        function = step(case.form, axis=case.axis, save=save, implementation="ffi")
        found = collectives(function, *given)
        called = hlo_calls(function, *given)
    channels = case.channels // sizes.get("c", 1)
    assert found == summed(1, channels, case.inputs)
    assert total_bytes(found) == (20 * case.inputs + 4) * channels
    assert called == halves(case.form)


def test_one_all_reduce_of_forward_alone() -> None:
    mesh = make_mesh("auto", d=8)
    x, z, scale, bias, *_ = placed(Case((16, 3, 24)), mesh, P("d"))
    assert collectives(jax_bnar.bn_add_relu, x, z, scale, bias) == summed(1, 24)[:1]


@pytest.mark.parametrize("form", ["bn_relu", "batch_norm"])
def test_other_forms(form: Form) -> None:
    """Recovering the ReLU's sign from x takes neither another kernel call nor a collective."""
    mesh = make_mesh("auto", d=8)
    given = placed(Case((16, 3, 24), form=form), mesh, P("d"))
    assert collectives(step(form), *given) == summed(1, 24)
    assert hlo_calls(step(form), *given) == halves(form)


@one_or_two_inputs
def test_float64_takes_two_forward(form: Form) -> None:
    mesh = make_mesh("auto", d=8)
    inputs = inputs_of(form)
    given = placed(Case((16, 3, 24), dtype="float64", form=form), mesh, P("d"))
    assert collectives(step(form, save="mask"), *given) == [
        [Collective("all-reduce", "f64", (1, 24 * inputs))],
        [Collective("all-reduce", "f64", (1, 24 * inputs))],
        [Collective("all-reduce", "f64", (1, 24 * (1 + inputs)))],
    ]


@pytest.mark.parametrize(
    ("kind", "form"),
    [("auto", "bn_add_relu"), ("explicit", "bn_add_relu"), ("auto", "dual_bn_add_relu")],
)
@pytest.mark.parametrize("save", ["y", "mask"])
def test_channels_never_meet(save: str, kind: MeshKind, form: Form) -> None:
    mesh = make_mesh(kind, d=8)
    given = placed(Case((4, 3, 64), form=form), mesh, P(None, None, "d"))
    with use_mesh(mesh):
        assert collectives(step(form, save=save), *given) == []
        assert hlo_calls(step(form, save=save), *given) == whole(form)


@pytest.mark.parametrize(
    ("kind", "form"),
    [("auto", "bn_add_relu"), ("explicit", "bn_add_relu"), ("auto", "dual_bn_add_relu")],
)
@pytest.mark.parametrize("save", ["y", "mask"])
def test_groups_that_fit_a_device_stay_on_it(save: str, kind: MeshKind, form: Form) -> None:
    mesh = make_mesh(kind, d=8)
    case = Case((32, 3, 24), form=form, num_groups=16)
    given = placed(case, mesh, P("d"), statistic=P("d"))
    function = step(form, save=save, num_groups=16)
    with use_mesh(mesh):
        found = collectives(function, *given)
        assert hlo_calls(function, *given) == whole(form)
    # The groups share scale and bias, whose gradients are summed outside the kernels. There is one
    # gradient of all biases.
    sums = [(24,)] * (1 + case.inputs)
    assert [[each.shape for each in operation] for operation in found] == [sums]


@one_or_two_inputs
def test_groups_that_span_devices_get_a_slot_each(form: Form) -> None:
    mesh = make_mesh("auto", d=8)
    case = Case((24, 3, 24), form=form, num_groups=6)
    given = placed(case, mesh, P("d"), statistic=P())
    assert collectives(step(form, num_groups=6), *given) == summed(6, 24, case.inputs)


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
