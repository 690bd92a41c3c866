"""Which convolution an array comes from, in the program that is being lowered."""

from collections.abc import Iterator
from typing import Any, Final, NamedTuple

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import stablehlo

# Of the operations before an array, so many are looked at.
_MOST: Final = 64
_DTYPES: Final = {"f16": "float16", "bf16": "bfloat16", "f32": "float32", "f64": "float64"}
# Loops and branches, whose results are made inside of them.
_CONTROL: Final = ("stablehlo.while", "stablehlo.case", "stablehlo.if")
_PRODUCT: Final = "stablehlo.dot_general"


class Convolution(NamedTuple):
    """The result of a convolution: the number of its axes, the one of its channels, its dtype.

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
    waiting, seen = [x], {x}
    least = (_elements(x) or 0) // 8  # What is broadcast (a gate, a bias) is smaller than that.
    is_known = True
    for value in waiting:
        operation = value.owner
        if isinstance(operation, ir.Block):
            is_known &= _is_of_program(operation)
            continue
        if operation.name == "stablehlo.convolution":
            return _described(operation)
        if operation.name == _PRODUCT:
            return None
        if operation.name in _CONTROL or len(waiting) > _MOST:
            is_known = False
            break
        for operand in operation.operands:
            elements = _elements(operand)
            if elements is not None and elements >= least and operand not in seen:
                seen.add(operand)
                waiting.append(operand)
    return None if is_known else _last_convolution(ctx, least)


def _described(operation: Any) -> Convolution:
    result = ir.RankedTensorType(operation.results[0].type)
    numbers = stablehlo.ConvDimensionNumbers(operation.attributes["dimension_numbers"])
    dtype = _DTYPES.get(str(result.element_type))
    return Convolution(result.rank, numbers.output_feature_dimension, dtype)


def _elements(value: ir.Value) -> int | None:
    """The number of elements of an array, or None for what is no array, such as a token."""
    shape, count = value.type, 1
    if not isinstance(shape, ir.RankedTensorType):
        return None
    for axis in range(shape.rank):
        # A symbolic size (jax.export) may be large.
        count *= 1 << 40 if shape.is_dynamic_dim(axis) else shape.get_dim_size(axis)
    return count


def _is_of_program(block: ir.Block) -> bool:
    """Whether the arguments of a block are those of the program."""
    function = block.owner.operation
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
