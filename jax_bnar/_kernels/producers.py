"""Which convolution an array comes from, in the program that is being lowered."""

import math
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import stablehlo

# Of the operations before an array, so many are looked at.
_MOST: Final = 64
_DTYPES: Final = {"f16": "float16", "bf16": "bfloat16", "f32": "float32", "f64": "float64"}
# Loops, branches and `shard_map`, whose results are made inside of them.
_CONTROL: Final = (
    "stablehlo.while",
    "stablehlo.case",
    "stablehlo.if",
    "sdy.manual_computation",
)
# For an array of symbolic size (jax.export), which may be large.
_MANY: Final = 1 << 62
CALL: Final = "func.call"
_PRODUCT: Final = "stablehlo.dot_general"


class Convolution(NamedTuple):
    """The result of a convolution: the number of its axes, the one of its channels, its dtype.

    Where the array has been transposed since, the channels are on the axis that they have there.
    The dtype is None if it is no floating-point type of 16 bits or more.
    """

    axes: int
    channel_axis: int
    dtype: str | None


def convolution_before(ctx: Any, x: ir.Value) -> Convolution | None:
    """The convolution whose result x is, but for operations that keep its elements where they are.

    Where something else begins what makes x (a matrix product, an argument of the program), there
    is none. Where that is not known, because x is an argument of a function or comes out of a loop,
    it is the last one of the program so far, if no matrix product comes after it. (An operator that
    is not differentiated is an argument of a function: JAX lowers a `custom_jvp` by itself.)
    """
    # Each with its axes, as axes of x, or of what it is reshaped to.
    waiting, seen = [(x, tuple(range(_rank(x))))], {x}
    least = (_elements(x) or 0) // 8  # What is broadcast (a gate, a bias) is smaller than that.
    entered: set[Any] = set()
    is_known = True
    for value, axes in waiting:
        operation = value.owner
        if isinstance(operation, ir.Block):
            function = operation.owner.operation
            # The operands of calls are looked at, too.
            is_known &= function in entered or _is_program(function)
            continue
        if operation.name == "stablehlo.convolution":
            return _described(operation, axes)
        if operation.name == _PRODUCT:
            return None
        if operation.name in _CONTROL or len(waiting) > _MOST:
            is_known = False
            break
        before = list(operation.operands)
        if operation.name == CALL:
            entered.add(called_by(ctx, operation))
            before.append(returned_by(ctx, value))
        elif operation.name == "stablehlo.transpose":
            permutation = list(ir.DenseI64ArrayAttr(operation.attributes["permutation"]))
            axes = tuple(axes[permutation.index(axis)] for axis in range(len(axes)))
        for operand in before:
            elements = _elements(operand)
            if elements is not None and elements >= least and operand not in seen:
                seen.add(operand)
                own = tuple(range(_rank(operand)))
                is_other = operation.name == "stablehlo.reshape" or len(own) != len(axes)
                waiting.append((operand, own if is_other else axes))
    return None if is_known else _last_convolution(ctx, least)


def called_by(ctx: Any, call: Any) -> Any:
    """The function that is called."""
    return ctx.module_context.symbol_table[call.attributes["callee"].value].operation


def returned_by(ctx: Any, result: ir.Value) -> ir.Value:
    """What a called function returns as this result of the call."""
    *_, returned = called_by(ctx, result.owner).regions[0].blocks[0].operations
    return returned.operands[ir.OpResult(result).result_number]


def _described(operation: Any, axes: tuple[int, ...] | None = None) -> Convolution:
    result = ir.RankedTensorType(operation.results[0].type)
    numbers = stablehlo.ConvDimensionNumbers(operation.attributes["dimension_numbers"])
    channel_axis = numbers.output_feature_dimension
    dtype = _DTYPES.get(str(result.element_type))
    return Convolution(result.rank, channel_axis if axes is None else axes[channel_axis], dtype)


def _rank(value: ir.Value) -> int:
    return ir.RankedTensorType(value.type).rank


def _elements(value: ir.Value) -> int | None:
    """The number of elements of an array, or None for what is no array, such as a token."""
    shape = value.type
    if not isinstance(shape, ir.RankedTensorType):
        return None
    sizes = range(shape.rank)
    if any(shape.is_dynamic_dim(axis) for axis in sizes):
        return _MANY
    return math.prod(shape.get_dim_size(axis) for axis in sizes)


def _is_program(function: Any) -> bool:
    """Whether the arguments of a function are those of the program."""
    return function.name == "func.func" and str(function.attributes["sym_name"]) == '"main"'


def _roots(ctx: Any) -> Iterator[Any]:
    """The program, and what is outermost of the place where operations are added to it.

    JAX makes the body of a loop, a `shard_map` or a `jax.checkpoint` before it has a place in the
    program.
    """
    module = ctx.module_context.module.operation
    yield module
    current: Any = ir.InsertionPoint.current
    operation = current.block.owner
    while True:
        try:
            parent = operation.parent
        except ValueError:  # It has none yet.
            break
        if parent is None:
            break
        operation = parent
    if operation != module:
        yield operation


def _last_convolution(ctx: Any, least: int) -> Convolution | None:
    """The last one in the text of the program, unless a product of `least` elements follows it."""
    last = None

    def visit(operation: Any) -> Any:
        nonlocal last
        if operation.name == "stablehlo.convolution":
            last = operation
        elif operation.name == _PRODUCT and (_elements(operation.results[0]) or 0) >= least:
            last = None
        return ir.WalkResult.ADVANCE

    for root in _roots(ctx):
        root.operation.walk(visit, ir.WalkOrder.PRE_ORDER)
    return None if last is None else _described(last)
