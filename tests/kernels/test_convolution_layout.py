"""Calls for CUDA get arrays in the order in which XLA has the results of convolutions there."""

import functools
import re
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import Case, Cotangents, Form, Operands, Outcome, cotangents, operands, operator, outcome
from convolved import CHANNELS, PICTURE, SEQUENCE, VOLUME, convolution, with_gradient
from jax import export
from outcomes import check_outcome

import jax_bnar
from jax_bnar._base import jax_compat
from jax_bnar._base.layout import ChannelLayout
from jax_bnar._kernels.kernel_call import Operation
from jax_bnar.ops import onednn

pytestmark = pytest.mark.quick

AMPERE, HOPPER = (8, 0), (9, 0)


def channels_first(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (shape[0], shape[-1], *shape[1:-1])


def calls_of(function: Callable[..., Any], shape: tuple[int, ...], dtype: str) -> list[str]:
    """The types of x in the calls of a program that is lowered for CUDA."""
    x = jax.ShapeDtypeStruct(shape, dtype)
    # JAX keeps what a function was lowered to, and another test may lower it for another GPU.
    jitted = jax.jit(lambda x: function(x))
    text = jitted.trace(x).lower(lowering_platforms=("cuda",)).as_text()
    found = re.findall(r"custom_call @jax_bnar_\w+\(.*?: \(tensor<([\dx]*)x\w+>", text)
    assert found
    return found


def step(x: jax.Array, axis: int = -1, axis_name: str | None = None) -> Any:
    def forward(x: jax.Array) -> jax.Array:
        y = convolution(x, axis)
        return jax_bnar.bn_add_relu(y, x, None, None, axis=axis, axis_name=axis_name).y

    return with_gradient(forward, x)


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch) -> Callable[[tuple[int, int] | None], None]:
    """Lowers for a GPU of this compute capability."""

    def of_capability(capability: tuple[int, int] | None) -> None:
        monkeypatch.setattr(jax_compat, "gpu_capability_of_program", lambda _: capability)

    return of_capability


@pytest.mark.parametrize(
    ("capability", "dtype", "shape", "is_first"),
    [
        (AMPERE, "float32", PICTURE, True),
        (AMPERE, "bfloat16", PICTURE, False),
        (AMPERE, "bfloat16", SEQUENCE, True),
        (HOPPER, "float32", PICTURE, False),
        (HOPPER, "float32", SEQUENCE, False),
        (HOPPER, "float64", PICTURE, True),
        (HOPPER, "bfloat16", VOLUME, True),
        (HOPPER, "float32", VOLUME, True),
        (None, "float32", PICTURE, None),
        (None, "float16", VOLUME, True),
    ],
)
def test_calls_have_the_order_of_convolutions(
    capability: tuple[int, int] | None,
    dtype: str,
    shape: tuple[int, ...],
    is_first: bool | None,
    on: Callable[[tuple[int, int] | None], None],
) -> None:
    on(capability)
    pixels = int(np.prod(shape[1:-1]))
    first, last = f"4x{CHANNELS}x{pixels}", f"{4 * pixels}x{CHANNELS}"
    of_first = functools.partial(step, axis=1)
    if is_first is None:
        assert calls_of(step, shape, dtype) == [last] * 2
        assert calls_of(of_first, channels_first(shape), dtype) == [first] * 2
        return
    expected = first if is_first else last
    assert calls_of(step, shape, dtype) == [expected] * 2
    assert calls_of(of_first, channels_first(shape), dtype) == [expected] * 2


def in_a_checkpoint(x: jax.Array) -> Any:
    first = convolution(x)
    return jax.grad(jax.checkpoint(lambda x: step(x)[0].sum()))(first)


def in_a_scan(x: jax.Array) -> Any:
    first = convolution(x)
    return jax.lax.scan(lambda x, _: (step(x)[1][0], None), first, None, length=2)


def in_a_scan_alone(x: jax.Array) -> Any:
    return jax.lax.scan(lambda x, _: (step(x)[1][0], None), x, None, length=2)


def in_a_differentiated_checkpoint(x: jax.Array) -> Any:
    def forward(x: jax.Array) -> jax.Array:
        return jax_bnar.bn_add_relu(convolution(x), x, None, None).y.sum()

    return jax.grad(jax.checkpoint(forward))(x)


def in_a_jitted_function(x: jax.Array) -> Any:
    return jax.jit(step)(x)


def after_a_jitted_convolution(x: jax.Array) -> Any:
    return jax_bnar.bn_relu(jax.jit(convolution)(x), None, None).y


def sharded(function: Callable[..., Any]) -> Callable[..., Any]:
    mesh = jax.make_mesh((1,), ("data",), (jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("data")
    return jax.shard_map(function, mesh=mesh, in_specs=spec, out_specs=spec)


def in_a_shard_map(x: jax.Array) -> Any:
    return sharded(step)(x)


def synchronised_in_a_shard_map(x: jax.Array) -> Any:
    return sharded(functools.partial(step, axis_name="data"))(x)


def after_a_jitted_convolution_in_training(x: jax.Array) -> Any:
    def forward(x: jax.Array) -> jax.Array:
        return jax_bnar.bn_relu(jax.jit(convolution)(x), None, None).y

    return with_gradient(forward, x)


def after_a_shard_map(x: jax.Array) -> Any:
    convolved = sharded(convolution)
    return with_gradient(lambda x: jax_bnar.bn_relu(convolved(x), None, None).y, x)


def after_a_convolution_between_transposes(x: jax.Array) -> Any:
    def forward(x: jax.Array) -> jax.Array:
        first = jnp.transpose(x, (0, 3, 1, 2))
        y = jnp.transpose(jax.nn.relu(convolution(first, 1)), (0, 2, 3, 1))
        return jax_bnar.bn_relu(y, None, None).y

    return with_gradient(forward, x)


def after_another_norm(x: jax.Array) -> Any:
    def forward(x: jax.Array) -> jax.Array:
        y = jax_bnar.bn_relu(convolution(x), None, None).y
        return jax_bnar.bn_relu(y, None, None).y

    return with_gradient(forward, x)


def after_pooling_and_concatenation(x: jax.Array) -> Any:
    pooled = jax.lax.reduce_window(
        convolution(x), -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 1, 1, 1), "SAME"
    )
    both = jnp.concatenate([jax.nn.silu(pooled), x], 0)[:4]
    return jax_bnar.bn_relu(both, None, None).y


def with_a_norm_before_the_first_convolution(x: jax.Array) -> Any:
    """Calls are lowered each for itself: those of one shape may come from different places."""
    y = jax_bnar.bn_relu(x, None, None).y
    return step(y)


WHEREVER = [
    in_a_checkpoint, in_a_differentiated_checkpoint, in_a_scan, in_a_scan_alone, in_a_shard_map,
    synchronised_in_a_shard_map, in_a_jitted_function, after_a_jitted_convolution,
    after_a_jitted_convolution_in_training, after_a_shard_map,
    after_a_convolution_between_transposes, after_another_norm, after_pooling_and_concatenation,
]  # fmt: skip


@pytest.mark.parametrize("program", WHEREVER)
def test_wherever_the_convolution_is(
    program: Callable[..., Any], on: Callable[[tuple[int, int] | None], None]
) -> None:
    on(AMPERE)
    assert set(calls_of(program, PICTURE, "float32")) == {f"4x{CHANNELS}x15"}


def test_calls_before_the_first_convolution_stay_as_they_are(
    on: Callable[[tuple[int, int] | None], None],
) -> None:
    on(AMPERE)
    found = calls_of(with_a_norm_before_the_first_convolution, PICTURE, "float32")
    assert found == [f"60x{CHANNELS}", *[f"4x{CHANNELS}x15"] * 2]


def test_members_of_a_vmap(on: Callable[[tuple[int, int] | None], None]) -> None:
    on(AMPERE)

    def of_members(x: jax.Array) -> Any:
        return jax.vmap(step)(jnp.stack([x, x]))

    assert set(calls_of(of_members, PICTURE, "float32")) == {f"2x4x{CHANNELS}x15"}


def product(x: jax.Array) -> jax.Array:
    return x @ jnp.ones((CHANNELS,) * 2, x.dtype)


def without_a_convolution(x: jax.Array) -> Any:
    return jax_bnar.bn_relu(product(x), None, None).y


def after_a_product(x: jax.Array) -> Any:
    def forward(x: jax.Array) -> jax.Array:
        return jax_bnar.bn_relu(product(convolution(x)), None, None).y

    return with_gradient(forward, x)


def after_one_in_another_dtype(x: jax.Array) -> Any:
    def forward(x: jax.Array) -> jax.Array:
        narrow = convolution(convolution(x).astype(jnp.bfloat16))
        return jax_bnar.bn_relu(narrow.astype(x.dtype), None, None).y

    return with_gradient(forward, x)


def after_one_of_integers(x: jax.Array) -> Any:
    whole = convolution(x.astype(jnp.int8))
    return jax_bnar.bn_relu(whole.astype(x.dtype), None, None).y


def after_one_with_other_axes(x: jax.Array) -> Any:
    flat = convolution(x.reshape(4, 15, CHANNELS))
    return jax_bnar.bn_relu(flat.reshape(x.shape), None, None).y


def of_an_argument(x: jax.Array) -> Any:
    def forward(x: jax.Array) -> jax.Array:
        return convolution(jax_bnar.bn_relu(x, None, None).y)

    return with_gradient(forward, x)


OTHERS = [
    without_a_convolution, after_a_product, after_one_in_another_dtype, after_one_of_integers,
    after_one_with_other_axes, of_an_argument,
]  # fmt: skip


@pytest.mark.parametrize("program", OTHERS)
def test_other_arrays_stay_as_they_are(
    program: Callable[..., Any], on: Callable[[tuple[int, int] | None], None]
) -> None:
    on(AMPERE)
    assert set(calls_of(program, PICTURE, "float32")) == {f"60x{CHANNELS}"}


def test_where_a_flag_forces_the_layout_nothing_is_expected(
    on: Callable[[tuple[int, int] | None], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    on(AMPERE)
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_force_conv_nhwc=true")
    assert set(calls_of(step, PICTURE, "float32")) == {f"60x{CHANNELS}"}


@pytest.mark.parametrize(("axis", "expected"), [(1, "4x3x40"), (2, "12x5x8")])
def test_other_channels_than_the_convolutions_stay_as_they_are(
    axis: int, expected: str, on: Callable[[tuple[int, int] | None], None]
) -> None:
    on(HOPPER)

    def program(x: jax.Array) -> jax.Array:
        return jax_bnar.bn_relu(convolution(x), None, None, axis=axis).y

    assert calls_of(program, PICTURE, "float32") == [expected]


def test_channels_that_were_pixels_stay_as_they_are(
    on: Callable[[tuple[int, int] | None], None],
) -> None:
    on(AMPERE)

    def forward(x: jax.Array) -> jax.Array:
        turned = jnp.transpose(convolution(x), (0, 1, 3, 2))
        return jax_bnar.bn_relu(turned, None, None).y

    program = functools.partial(with_gradient, forward)
    assert calls_of(program, PICTURE, "float32") == [f"{4 * 3 * CHANNELS}x5"] * 2


@pytest.mark.parametrize(
    ("layout", "shape", "expected"),
    [
        (ChannelLayout(3), PICTURE, (3, 5)),
        (ChannelLayout(3, num_groups=2), PICTURE, (3, 5)),
        (ChannelLayout(3, leading=1), (2, *PICTURE), (3, 5)),
        (ChannelLayout(1), PICTURE, (5, CHANNELS)),
        (ChannelLayout(2), PICTURE, ()),
        (ChannelLayout(1), (4, CHANNELS), ()),
    ],
)
def test_spatial_sizes(
    layout: ChannelLayout, shape: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    assert layout.spatial_sizes(shape) == expected


def test_spatial_sizes_that_are_symbols_are_unknown() -> None:
    batch, height = cast(Any, export.symbolic_shape("n, h"))
    assert ChannelLayout(3).spatial_sizes((batch, 3, 5, CHANNELS)) == (3, 5)
    assert ChannelLayout(3).spatial_sizes((4, height, 5, CHANNELS)) == ()


@pytest.fixture
def moved(like_a_gpu: None, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The CPU kernels get the other order; the list has the operations that did."""
    del like_a_gpu
    call, names = Operation._call_swapped, []

    def noted(self: Operation, *args: Any, **params: Any) -> Any:
        names.append(self.name)
        return call(self, *args, **params)

    monkeypatch.setattr(Operation, "_call_swapped", noted)
    return names


def compiled(case: Case, given: Operands, dout: Cotangents) -> Outcome:
    """Not the function of another test, which may have been lowered already."""
    function = operator(case.form, implementation="ffi", **case.keywords)
    return outcome(lambda *given: function(*given), given, dout)


@pytest.mark.parametrize("form", ["bn_add_relu", "bn_relu", "dual_bn_add_relu"])
@pytest.mark.parametrize("save", ["y", "mask"])
@pytest.mark.parametrize(
    ("shape", "axis", "dtype", "num_groups"),
    [
        (PICTURE, -1, "float32", 1),
        (PICTURE, -1, "float64", 2),
        (channels_first(PICTURE), 1, "float32", 2),
        (VOLUME, -1, "bfloat16", 2),
        (channels_first(VOLUME), 1, "float16", 1),
        ((3, 3, 5, 7), -1, "float32", 1),
        ((3, 7, 3, 5), 1, "float32", 1),
    ],
)
def test_results_and_gradients(
    form: Form,
    save: Any,
    shape: tuple[int, ...],
    axis: int,
    dtype: str,
    num_groups: int,
    moved: list[str],
) -> None:
    case = Case(shape, axis, dtype, form, num_groups=num_groups, save=save)
    given, dout = operands(case), cotangents(case)
    check_outcome(case, given, dout, compiled(case, given, dout))
    prefix = "dual_" if form.startswith("dual") else ""
    assert set(moved) == {f"{prefix}forward", f"{prefix}backward"}


@pytest.mark.parametrize("save", ["y", "mask"])
@pytest.mark.parametrize(("shape", "axis"), [((16, 3, 5, CHANNELS), -1), ((16, CHANNELS, 3, 5), 1)])
def test_results_on_eight_devices(
    shape: tuple[int, ...], axis: int, save: Any, moved: list[str]
) -> None:
    mesh = jax.make_mesh((8,), ("data",), (jax.sharding.AxisType.Auto,))
    case = Case(shape, axis, save=save)
    given, dout = operands(case), cotangents(case)
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    sharded = given._replace(x=jax.device_put(given.x, rows), z=jax.device_put(given.z, rows))
    check_outcome(case, given, dout, compiled(case, sharded, dout))
    assert set(moved) == {"statistics", "normalise", "backward_reduce", "backward_apply"}


@pytest.mark.parametrize("shape", [PICTURE, (3, 3, 5, 7)])
@pytest.mark.parametrize("data_format", ["NXC", "NCX"])
def test_the_bits_of_a_mask_keep_their_order(
    shape: tuple[int, ...], data_format: Any, moved: list[str]
) -> None:
    """Whoever reads a mask finds the elements in the order of the program."""
    vector = jnp.ones(shape[-1])
    shape = channels_first(shape) if data_format == "NCX" else shape

    def forward(x: jax.Array) -> onednn.ForwardTraining:
        return onednn.batch_norm_forward_training(
            x, vector, vector, epsilon=1e-5, data_format=data_format, fuse_norm_relu=True
        )

    found = jax.jit(forward)(jnp.asarray(operands(Case(shape)).x))
    assert found.workspace is not None
    expected = jnp.packbits(found.dst.ravel() > 0, bitorder="little")
    np.testing.assert_array_equal(found.workspace.ravel(), expected)
    assert moved == ["forward"]
