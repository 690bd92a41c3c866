"""Wrong buffers and attributes passed directly to the FFI targets give an error, never a crash.

Exported programs and hand-written `ffi_call`s reach the targets without our Python checks.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from subprocesses import run_python
from tiers import slow_except

import jax_bnar
from jax_bnar import reference
from jax_bnar._base.canonical import CanonicalShape
from jax_bnar._kernels import kernel_call, targets

GROUPS, ROWS, CHANNELS, INNER = SHAPE = (2, 3, 5, 7)
OPTIONAL = ("z", "scale", "bias", "scale1", "bias1", "scale2", "bias2")
RELU: dict[str, Any] = {"activation": "relu", "negative_slope": np.float64(0)}
STATICS: dict[str, dict[str, Any]] = {
    "forward": {"epsilon": np.float64(1e-5), **RELU, "save_mask": True},
    "backward": {"epsilon": np.float64(1e-5), **RELU, "gate": "mask", "has_z": True},
    "statistics": {},
    "normalise": {"epsilon": np.float64(1e-5), **RELU, "save_mask": True},
    "backward_reduce": {"epsilon": np.float64(1e-5), **RELU, "gate": "x", "has_z": True},
    "backward_apply": {"epsilon": np.float64(1e-5), **RELU, "gate": "y"},
    "dual_forward": {"epsilon": np.float64(1e-5), **RELU, "save_mask": True},
    "dual_backward": {"epsilon": np.float64(1e-5), **RELU, "gate": "mask"},
    "dual_normalise": {"epsilon": np.float64(1e-5), **RELU, "save_mask": True},
    "dual_backward_reduce": {"epsilon": np.float64(1e-5), **RELU, "gate": "x"},
    "dual_backward_apply": {"epsilon": np.float64(1e-5), **RELU, "gate": "y"},
}


class Call(NamedTuple):
    """A custom call: its operation, operands, results and attributes."""

    operation: str
    operands: dict[str, Any]
    results: list[jax.ShapeDtypeStruct]
    attributes: dict[str, Any]

    def run(self) -> Any:
        target = f"jax_bnar_{self.operation}_v1"
        call = jax.ffi.ffi_call(target, self.results, vmap_method="sequential")
        return jax.block_until_ready(call(*self.operands.values(), **self.attributes))


def good_call(operation: kernel_call.Operation) -> Call:
    tensor = jnp.ones(SHAPE, jnp.float32)
    statics = STATICS[operation.name]
    names = [operand.name for operand in operation.signature.operands]
    saved = {"mask": reference.pack_mask(tensor > 0), "y": tensor, "x": None}
    operands = {}
    for name in names:
        if name in ("x", "z", "dy", "x1", "x2"):
            operands[name] = tensor
        elif name == "saved":
            operands[name] = saved[statics["gate"]]
        else:
            rows = 1 if name in OPTIONAL else GROUPS
            operands[name] = jnp.ones((rows, CHANNELS), jnp.float32)
    results = jax.eval_shape(
        lambda *given: operation.bind(given, implementation=None, **statics), *operands.values()
    )
    operands = {name: operand for name, operand in operands.items() if operand is not None}
    results = [
        jax.ShapeDtypeStruct((aval.size,), aval.dtype) if aval.shape == SHAPE else aval
        for aval in results
    ]
    present = {f"has_{name}": True for name in names if name in OPTIONAL}
    dimensions = {"has_groups": True, "has_inner": True}
    return Call(operation.name, operands, list(results), present | dimensions | statics)


# The results of these are like y, and not like x.
NARROW_X = ("forward", "normalise", "backward_reduce")
# These have no operand or no result that is a vector.
WITHOUT_VECTORS_OF_BOTH = (
    "statistics",
    "normalise",
    "backward_apply",
    "dual_normalise",
    "dual_backward_apply",
)
OPERATIONS = kernel_call.ALL
every_operation = pytest.mark.parametrize("operation", OPERATIONS, ids=[o.name for o in OPERATIONS])
SPOILERS = {
    "rank": lambda shape, dtype: ((*shape, 1), dtype),
    "flat": lambda shape, dtype: ((int(np.prod(shape)),), dtype),
    "scalar": lambda shape, dtype: ((), dtype),
    "last axis": lambda shape, dtype: ((*shape[:-1], shape[-1] + 1), dtype),
    "first axis": lambda shape, dtype: ((shape[0] + 2, *shape[1:]), dtype),
    "empty": lambda shape, dtype: ((0, *shape[1:]), dtype),
    "integer": lambda shape, dtype: (shape, jnp.int32),
    "float8": lambda shape, dtype: (shape, jnp.float8_e4m3fn),
    "float64": lambda shape, dtype: (shape, jnp.float64),
    "bfloat16": lambda shape, dtype: (shape, jnp.bfloat16),
}
every_spoiler = pytest.mark.parametrize(
    "spoiler", slow_except({"rank", "last axis", "empty", "integer"}, SPOILERS)
)


def refusal(call: Call) -> str | None:
    try:
        call.run()
    except jax.errors.JaxRuntimeError as error:
        return str(error)
    return None


def assert_refused(call: Call, what: str) -> None:
    message = refusal(call)
    assert message is not None, f"{call.operation} accepted {what}"
    # NOT_FOUND does not count, because a missing target would prove nothing.
    assert message.startswith(("INVALID_ARGUMENT", "UNIMPLEMENTED")), message


@every_operation
def test_good_call_runs(operation: kernel_call.Operation) -> None:
    call = good_call(operation)
    for result, expected in zip(call.run(), call.results, strict=True):
        assert (result.shape, result.dtype) == (expected.shape, expected.dtype)


@every_operation
@every_spoiler
def test_spoiled_operand(operation: kernel_call.Operation, spoiler: str) -> None:
    call = good_call(operation)
    for name, operand in call.operands.items():
        if operation.name == "statistics" and spoiler in ("last axis", "bfloat16"):
            continue  # this is just another valid call: nothing else in it contradicts the operand
        if name == "x" and spoiler == "bfloat16" and operation.name in NARROW_X:
            continue  # a valid call with float32 outputs, because no result is like x
        shape, dtype = SPOILERS[spoiler](operand.shape, operand.dtype)
        spoiled = call.operands | {name: jnp.ones(shape, dtype)}
        assert_refused(call._replace(operands=spoiled), f"{name} of {dtype}{shape}")


@every_operation
@every_spoiler
def test_spoiled_result(operation: kernel_call.Operation, spoiler: str) -> None:
    call = good_call(operation)
    for i, result in enumerate(call.results):
        if spoiler == "empty" and len(call.results) == 1:
            continue  # XLA drops a call whose only result has no elements
        shape, dtype = SPOILERS[spoiler](result.shape, result.dtype)
        if shape == result.shape and dtype == result.dtype:
            shape = SHAPE  # a result that is flat already
        spoiled = list(call.results)
        spoiled[i] = jax.ShapeDtypeStruct(shape, dtype)
        assert_refused(call._replace(results=spoiled), f"result {i} of {dtype}{shape}")


@every_operation
def test_a_result_in_the_memory_of_an_operand(operation: kernel_call.Operation) -> None:
    """The kernels read operands after they have written results."""
    call = good_call(operation)
    # Vectors of each group, as the results are, in place of those that groups share.
    of_groups = jnp.ones((GROUPS, CHANNELS), jnp.float32)
    operands = [of_groups if a.shape == (1, CHANNELS) else a for a in call.operands.values()]
    tried = 0
    for i, result in enumerate(call.results):
        for j, operand in enumerate(operands):
            if (operand.shape, operand.dtype) != (result.shape, result.dtype):
                continue  # JAX refuses these.
            aliased = jax.ffi.ffi_call(
                f"jax_bnar_{call.operation}_v1", call.results, input_output_aliases={j: i}
            )
            words = rf"result {i} must not be in the memory of operand {j}"
            with pytest.raises(jax.errors.JaxRuntimeError, match=words):
                jax.block_until_ready(aliased(*operands, **call.attributes))
            tried += 1
    # Tensors are flat as results, and not as operands.
    assert tried > 0 or call.operation in WITHOUT_VECTORS_OF_BOTH


def test_masks_in_another_order_are_refused_where_no_kernel_takes_them() -> None:
    if targets.mask_channels("cpu", CanonicalShape(1, 6, 64, 1)) > 0:
        pytest.skip("these kernels take them")
    x = jnp.ones((6, 64), jnp.float32)
    vector = jnp.ones((1, 64), jnp.float32)
    mask = jax.ShapeDtypeStruct((1, 6, 2, 4), jnp.uint8)
    call = Call(
        "normalise",
        {"x": x, "mean": vector, "var": vector},
        [jax.ShapeDtypeStruct((x.size,), x.dtype), mask],
        {
            **STATICS["normalise"],
            **{f"has_{name}": False for name in ("groups", "inner", "z", "scale", "bias")},
        },
    )
    assert_refused(call, "a mask with an axis for channels")
    whole = jax.ShapeDtypeStruct((1, 48), jnp.uint8)
    assert refusal(call._replace(results=[call.results[0], whole])) is None


@every_operation
def test_missing_and_surplus_buffers(operation: kernel_call.Operation) -> None:
    call = good_call(operation)
    for name in call.operands:
        rest = {n: operand for n, operand in call.operands.items() if n != name}
        assert_refused(call._replace(operands=rest), f"a call without {name}")
    surplus = call.operands | {"surplus": jnp.ones(SHAPE, jnp.float32)}
    assert_refused(call._replace(operands=surplus), "a surplus operand")
    if len(call.results) > 1:  # XLA drops a call without results
        assert_refused(call._replace(results=call.results[:-1]), "a missing result")
    more = [*call.results, jax.ShapeDtypeStruct(SHAPE, jnp.float32)]
    assert_refused(call._replace(results=more), "a surplus result")
    assert_refused(call._replace(operands={}), "no operand at all")


@every_operation
def test_wrong_attributes(operation: kernel_call.Operation) -> None:
    call = good_call(operation)
    # 2 rather than 1: in JAX's trace cache 1 equals True, so the good call would be used.
    spoiled: list[tuple[str, Any]] = [
        (name, value)
        for name, values in {
            "epsilon": [np.float32(1e-5), 1, "1e-5"],
            "activation": ["celu", "", 1],
            "negative_slope": [np.float32(0.5), 1, np.float64(1.0), np.float64(-0.5)],
            "gate": ["z", "", 0, "none"],
            "save_mask": [2, "true", False],
            "has_z": [2, False],
        }.items()
        if name in STATICS[operation.name]
        for value in values
    ]
    # The flags must agree with the buffers that are present.
    spoiled += [(name, False) for name in call.attributes if name.startswith("has_")]
    spoiled.append(("surplus", 1.0))
    for name, value in spoiled:
        attributes = call.attributes | {name: value}
        assert_refused(call._replace(attributes=attributes), f"{name}={value!r}")
    for name in call.attributes:
        rest = {n: value for n, value in call.attributes.items() if n != name}
        assert_refused(call._replace(attributes=rest), f"a call without the attribute {name}")


@pytest.mark.parametrize("operation", ["forward", "normalise", "backward", "backward_apply"])
def test_a_smooth_activation_follows_from_neither_y_nor_a_mask(operation: str) -> None:
    """Forward is asked for a mask, and backward is to find the derivative in a mask or in y."""
    call = good_call(getattr(kernel_call.CANONICAL[1], operation))
    attributes = call.attributes | {"activation": "silu"}
    assert_refused(call._replace(attributes=attributes), "silu")


WITH_ACTIVATION = [each for each in OPERATIONS if each.name != "statistics"]


@pytest.mark.parametrize("operation", WITH_ACTIVATION, ids=[o.name for o in WITH_ACTIVATION])
def test_without_an_activation_there_is_neither_a_mask_nor_a_gate(
    operation: kernel_call.Operation,
) -> None:
    call = good_call(operation)
    attributes = call.attributes | {"activation": "none"}
    message = str(refusal(call._replace(attributes=attributes)))
    assert "without an activation" in message


def _of_dtypes(operation: str, x: Any, like_y: dict[str, Any], result: Any) -> Call:
    """A call with x of the dtype x, others of theirs, and a first result of the dtype `result`."""
    call = good_call(next(each for each in OPERATIONS if each.name == operation))
    operands = {
        name: operand.astype(x if name == "x" else like_y.get(name, operand.dtype))
        for name, operand in call.operands.items()
    }
    first, *others = call.results
    return call._replace(
        operands=operands, results=[jax.ShapeDtypeStruct(first.shape, result), *others]
    )


@pytest.mark.parametrize("x", ["float16", "bfloat16"])
def test_outputs_of_float32(x: str) -> None:
    """z, y, dy and dz are float32 here, as in `good_call`, and dx is like x."""
    _of_dtypes("forward", x, {}, "float32").run()
    _of_dtypes("normalise", x, {}, "float32").run()
    _of_dtypes("backward", x, {}, x).run()
    _of_dtypes("backward_reduce", x, {}, "float32").run()
    _of_dtypes("backward_apply", x, {}, x).run()


@pytest.mark.parametrize(
    ("operation", "x", "like_y", "result", "message"),
    [
        ("forward", "bfloat16", {}, "float16", "y must be BF16, as x is, or F32, got F16"),
        ("forward", "bfloat16", {"z": "bfloat16"}, "float32", r"z must be F32\[.*got BF16"),
        ("forward", "float32", {}, "float16", r"y must be F32\[210\], got F16"),
        ("backward", "float16", {"dy": "bfloat16"}, "float16", "dy must be F16, as x is, or F32"),
        ("backward", "bfloat16", {}, "float32", r"dx must be BF16\[.*got F32"),
        ("backward_apply", "float16", {"saved": "float16"}, "float16", r"must be F32\[.*got F16"),
    ],
)
def test_other_dtypes_of_outputs(
    operation: str, x: str, like_y: dict[str, Any], result: str, message: str
) -> None:
    with pytest.raises(Exception, match=message):
        _of_dtypes(operation, x, like_y, result).run()


def test_short_buffers_do_not_crash() -> None:
    """Reading or writing past their end would fault: the sizes differ by a factor of 2^18."""
    output = run_python(
        """
        import math
        import jax.numpy as jnp
        import numpy as np
        import jax_bnar

        big, small = (1, 1 << 18, 64, 1), (1, 1, 64, 1)
        flags = {f"has_{name}": True for name in ("z", "scale", "bias", "groups", "inner")}
        relu = {"activation": "relu", "negative_slope": np.float64(0)}
        statics = {"epsilon": np.float64(1e-5), **relu, "save_mask": False}
        vector = jnp.ones((1, 64), jnp.float32)
        refused = 0
        for x, z, y in [(big, small, big), (big, big, small), (small, small, big)]:
            shapes = ((math.prod(y),), (1, 64), (1, 64))
            results = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
            call = jax.ffi.ffi_call("jax_bnar_forward_v1", results)
            try:
                jax.block_until_ready(
                    call(jnp.ones(x), jnp.ones(z), vector, vector, **flags, **statics)
                )
            except jax.errors.JaxRuntimeError as error:
                refused += "NOT_FOUND" not in str(error)
        print(refused)
        """,
        timeout=120,
        prelude="import jax\n",
    )
    assert output.split() == ["3"]


def test_the_process_survives_a_refusal() -> None:
    call = good_call(kernel_call.CANONICAL[1].forward)
    assert_refused(call._replace(results=call.results[:-1]), "a missing result")
    x = jnp.ones((2, 3), jnp.float32)
    np.testing.assert_array_equal(jax_bnar.bn_relu(x, None, None, implementation="ffi").var, 0)
