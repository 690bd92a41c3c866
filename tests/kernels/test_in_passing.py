"""On GPUs, a norm of what an activation has made is left to XLA, which makes it while it reads."""

import functools
import math
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import Case, Operands, Outcome, call, call_on_a_product, cotangents, operands, outcome
from convolved import CHANNELS, PICTURE, convolution, with_gradient
from jax import export
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from outcomes import check_outcome

import jax_bnar
from jax_bnar._kernels import targets
from jax_bnar._kernels.kernel_call import Operation

pytestmark = pytest.mark.quick


def lowered(
    forward: Callable[[jax.Array], Any],
    platforms: tuple[str, ...] = ("cuda",),
    transform: Callable[..., Any] = lambda step: step,
) -> str:
    """A program with forward and backward, which may be transformed."""
    step = functools.partial(with_gradient, forward)
    x = jax.ShapeDtypeStruct(PICTURE, "bfloat16")
    return jax.jit(transform(step)).trace(x).lower(lowering_platforms=platforms).as_text()


def calls_of(*program: Any, **options: Any) -> list[str]:
    """The operations of ours in such a program."""
    lines = lowered(*program, **options).splitlines()
    found = [line.split("@jax_bnar_")[1] for line in lines if "@jax_bnar_" in line]
    return [line.split("_v1")[0] for line in found]


def normalised(x: jax.Array, **options: Any) -> jax.Array:
    return jax_bnar.batch_norm(x, None, None, **options).y


def dropped(x: jax.Array) -> jax.Array:
    keeps = jax.random.bernoulli(jax.random.key(0), 0.5, x.shape)
    return jnp.where(keeps, x / 0.5, jnp.zeros_like(x))


def with_bias(x: jax.Array) -> jax.Array:
    return x + jnp.ones(CHANNELS, x.dtype)[None, None, None]


def constrained(x: jax.Array) -> jax.Array:
    mesh = jax.make_mesh((1,), ("data",), (AxisType.Auto,))
    sharding = NamedSharding(mesh, PartitionSpec("data"))
    return jax.lax.with_sharding_constraint(jax.nn.silu(x), sharding)


COMPUTED = {
    "ReLU": jax.nn.relu,
    "GELU": jax.nn.gelu,
    "exact GELU": functools.partial(jax.nn.gelu, approximate=False),
    "SiLU": jax.nn.silu,
    "ELU": jax.nn.elu,
    "leaky ReLU": jax.nn.leaky_relu,
    "hard tanh": jax.nn.hard_tanh,
    "softplus": jax.nn.softplus,
    "tanh": jnp.tanh,
    "dropout": lambda x: dropped(jax.nn.relu(x)),
    "with a bias": lambda x: with_bias(jax.nn.relu(x)),
    "a jitted function": jax.jit(lambda x: with_bias(jax.nn.gelu(x))),
    "computed in float32": lambda x: jax.nn.silu(x.astype(jnp.float32)).astype(x.dtype),
    "reshaped": lambda x: jax.nn.relu(x.reshape(-1, CHANNELS)).reshape(x.shape),
    "a sharding": constrained,
}
STORED = {
    "an argument": lambda x: x,
    "a convolution": convolution,
    "a jitted convolution": jax.jit(convolution),
    "a bias": lambda x: with_bias(convolution(x)),
    "a residual": lambda x: convolution(x) + x,
    "a pool": lambda x: jax.lax.reduce_window(
        x, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 1, 1, 1), "SAME"
    ),
    "a barrier": lambda x: jax.lax.optimization_barrier(jax.nn.relu(x)),
    "a concatenation": lambda x: jnp.concatenate([jax.nn.relu(x), x], 0),
    "a scan": lambda x: jax.lax.scan(lambda x, _: (jax.nn.relu(x), None), x, None, length=2)[0],
}


@pytest.mark.parametrize("made_by", COMPUTED)
def test_left_to_xla(made_by: str) -> None:
    assert calls_of(lambda x: normalised(COMPUTED[made_by](convolution(x)))) == []


@pytest.mark.parametrize("made_by", STORED)
def test_what_is_in_memory_anyway_has_a_kernel(made_by: str) -> None:
    assert calls_of(lambda x: normalised(STORED[made_by](x))) == ["forward", "backward"]


def test_what_a_convolution_has_read_has_a_kernel() -> None:
    """As in the third branch of RepVGG."""

    def forward(x: jax.Array) -> jax.Array:
        x = jax.nn.relu(x)
        return convolution(x) + normalised(x)

    assert calls_of(forward) == ["forward", "backward"]


def test_with_a_residual_and_no_activation() -> None:
    """What the layers and `fuse` make of `batch_norm(x) + z`."""

    def forward(x: jax.Array) -> jax.Array:
        return jax_bnar.bn_act(jax.nn.relu(x), None, None, "none", z=x).y

    assert calls_of(forward) == []


@pytest.mark.parametrize(
    "forward",
    [
        lambda x: normalised(jax.nn.relu(x)),
        lambda x: jax_bnar.bn_relu(x, None, None, out_dtype="float32").y,
    ],
    ids=["left to XLA", "without a kernel"],
)
def test_pure_jax_has_its_order_in_memory_given(forward: Callable[[jax.Array], Any]) -> None:
    """Without that, XLA would transpose whole arrays beside custom calls."""
    count = math.prod(PICTURE[:-1])
    pinned = re.findall(r"@LayoutConstraint\(.*-> tensor<([\dx]*)x[bf]", lowered(forward))
    # x, and in backward dy and x.
    assert pinned == [f"1x{count}x{CHANNELS}x1"] * 3
    for platforms in (("cpu",), ("tpu",), ("cpu", "cuda")):
        assert "LayoutConstraint" not in lowered(forward, platforms)


def test_symbolic_shapes() -> None:
    step = functools.partial(with_gradient, lambda x: normalised(with_bias(jax.nn.silu(x))))
    shape = export.symbolic_shape(f"n, h, w, {CHANNELS}")
    exported = export.export(jax.jit(step), platforms=["cuda"])
    assert "@jax_bnar" not in exported(jax.ShapeDtypeStruct(shape, "float32")).mlir_module()


@pytest.mark.parametrize("axis_name", ["data", None])
def test_inside_a_shard_map(axis_name: str | None) -> None:
    mesh = jax.make_mesh((1,), ("data",), (AxisType.Auto,))
    spec = PartitionSpec("data")

    def forward(x: jax.Array) -> jax.Array:
        return normalised(jax.nn.relu(x), axis_name=axis_name)

    mapped = functools.partial(jax.shard_map, mesh=mesh, in_specs=spec, out_specs=spec)
    assert calls_of(forward, transform=lambda step: mapped(step)) == []


BOTH = ["forward", "backward"]


@pytest.mark.parametrize(
    ("forward", "platforms", "expected"),
    [
        (lambda x: jax_bnar.bn_relu(x, None, None).y, ("cuda",), BOTH),
        (lambda x: jax_bnar.bn_add_relu(x, x, None, None).y, ("cuda",), BOTH),
        (functools.partial(normalised, implementation="ffi"), ("cuda",), BOTH),
        (normalised, ("cpu",), BOTH),
        (normalised, ("cpu", "cuda"), BOTH),
    ],
    ids=["an activation", "an activation of a sum", "implementation", "a CPU", "two platforms"],
)
def test_kernels_all_the_same(
    forward: Callable[[jax.Array], Any], platforms: tuple[str, ...], expected: list[str]
) -> None:
    assert set(calls_of(lambda x: forward(jax.nn.relu(x)), platforms)) == set(expected)


@pytest.fixture
def left(like_a_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU leaves to XLA what a GPU does; no kernel may run."""
    del like_a_gpu

    def refused(*_: Any, **__: Any) -> Any:
        raise AssertionError("a kernel is called")

    monkeypatch.setattr(Operation, "_call_kernel", refused)


@pytest.mark.parametrize("num_groups", [1, 2])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize(
    ("shape", "axis"),
    [(PICTURE, -1), ((4, CHANNELS, 3, 5), 1), ((6, CHANNELS), -1), ((4, CHANNELS, 3), 1)],
)
@pytest.mark.usefixtures("left")
def test_results_and_gradients(
    shape: tuple[int, ...], axis: int, dtype: str, num_groups: int
) -> None:
    case = Case(shape, axis, dtype, "batch_norm", num_groups=num_groups)
    given, dout = operands(case), cotangents(case)
    check_outcome(case, given, dout, outcome(call_on_a_product(case), given, dout))


@pytest.mark.parametrize("save", ["y", "mask"])
@pytest.mark.parametrize(
    ("form", "out_dtype"),
    [("bn_add_relu", "float32"), ("bn_relu", "float32"), ("dual_bn_add_relu", None)],
)
@pytest.mark.usefixtures("left")
def test_pure_jax_in_the_other_order(
    form: Any, save: str, out_dtype: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a GPU has no kernel for a call, such as one from bfloat16 to float32."""
    monkeypatch.setattr(targets, "has_kernel", lambda *_: False)
    case = Case((3, 3, 5, 7), -1, "bfloat16", form, save=save, out_dtype=out_dtype)
    given, dout = operands(case), cotangents(case)
    function = functools.partial(call, case.form, **case.keywords)
    check_outcome(case, given, dout, outcome(function, given, dout))


@pytest.mark.usefixtures("left")
def test_results_on_eight_devices() -> None:
    mesh = jax.make_mesh((8,), ("data",), (AxisType.Auto,))
    case = Case((16, 3, 5, CHANNELS), form="batch_norm")
    given, dout = operands(case), cotangents(case)
    rows = NamedSharding(mesh, PartitionSpec("data"))
    sharded = given._replace(x=jax.device_put(given.x, rows))

    @jax.jit
    def program(given: Operands, dout: Any) -> Any:
        results, vjp = jax.vjp(lambda given: tuple(call_on_a_product(case)(*given)), given)
        return results, vjp(dout)[0]

    compiled = program.lower(sharded, tuple(dout)).compile()
    results, gradients = jax.tree.map(np.asarray, compiled(sharded, tuple(dout)))
    check_outcome(case, given, dout, Outcome(*results, *gradients))
    gathered = re.findall(r"= \w+\[([\d,]*)\]\S* all-gather\(", compiled.as_text() or "")
    assert all(math.prod(map(int, shape.split(","))) <= 8 * CHANNELS for shape in gathered)
