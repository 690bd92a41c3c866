"""`FoldingReport`: which BatchNorms were folded, which were not, and why."""

import collections
import dataclasses
import html
import operator
from collections.abc import Collection, Iterator

from jax_bnar._base import jax_compat
from jax_bnar._fold.chain import ARITHMETIC, MOVES, follow
from jax_bnar._fold.network import Fold, Network
from jax_bnar._fold.producers import weighted_sum
from jax_bnar._fuse.candidate import described
from jax_bnar._fuse.dtypes import is_real
from jax_bnar._fuse.graph import Graph
from jax_bnar._fuse.nodes import Node, Operand, Value, is_broadcast, source, values_of
from jax_bnar._fuse.own import own_call


@dataclasses.dataclass(frozen=True)
class FoldedLayer:
    """One BatchNorm of a network.

    Attributes:
        module: path of the module, from the name stack; "" if the program has no names.
        folded_into: "convolution" or "matrix product"; None if it was not folded.
        reason: why it was not folded; "" if it was.
        line: where the user's program computes it.
        shape: shape of the array that is normalised.
        dtype: its dtype.
    """

    module: str
    folded_into: str | None
    reason: str
    line: str
    shape: tuple[int, ...]
    dtype: str

    def __str__(self) -> str:
        result = f"folded into the {self.folded_into}" if self.folded_into else "not folded: "
        array = described(self.shape, self.dtype)
        return f"{self.module or '(no module)'}: {result}{self.reason} [{array}] at {self.line}"


@dataclasses.dataclass(frozen=True, repr=False)
class FoldingReport:
    """What `fold_batch_norms` did to a network; `print` shows a line for each BatchNorm.

    Attributes:
        layers: in the order of the program.
    """

    layers: tuple[FoldedLayer, ...]

    @property
    def folded(self) -> tuple[FoldedLayer, ...]:
        return tuple(layer for layer in self.layers if layer.folded_into)

    @property
    def refused(self) -> tuple[FoldedLayer, ...]:
        return tuple(layer for layer in self.layers if not layer.folded_into)

    def __str__(self) -> str:
        return "\n".join(map(str, self.layers)) or "no BatchNorm in evaluation was found"

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"


def report(network: Network) -> FoldingReport:
    """The report on a network."""
    layers = [
        *((fold.sum.node.order, _folded(fold)) for fold in network.folds),
        *((node.order, _layer(node, None, reason)) for node, reason in _left(network)),
    ]
    return FoldingReport(tuple(layer for _, layer in sorted(layers, key=operator.itemgetter(0))))


_KINDS = {"conv_general_dilated": "convolution", "dot_general": "matrix product"}
# How far back from a vector a square root is searched that makes it the factor of a normalisation.
_FARTHEST = 40


def _folded(fold: Fold) -> FoldedLayer:
    last = fold.chain.end.producer
    assert last is not None
    return _layer(last, _KINDS[fold.sum.node.name], "")


def _layer(node: Node, folded_into: str | None, reason: str) -> FoldedLayer:
    (x, *_) = node.outputs
    return FoldedLayer(
        str(node.name_stack),
        folded_into,
        reason,
        jax_compat.source_line(node.equation),
        x.shape,
        str(x.dtype),
    )


def _left(network: Network) -> Iterator[tuple[Node, str]]:
    """The nodes that still normalise an array, with the reason why."""
    graph, given = network.graph, network.given
    folded = {value for fold in network.folds for value in _values_of_chain(graph, fold)}
    for node in graph.nodes:
        if not node.outputs or node.outputs[0] in folded or node.outputs[0] in given:
            continue
        if (own := own_call(node)) is not None and own.is_inference:
            yield node, 'implementation="ffi" asks for the kernel'
        elif (array := _normalised(node, given)) is not None:
            yield node, _reason(network, array)
        elif _normalises_by_itself(node):
            yield (
                node,
                "its statistics are those of the batch; call the network in evaluation, with"
                " running statistics",
            )


def _values_of_chain(graph: Graph, fold: Fold) -> Iterator[Value]:
    value = fold.chain.start
    while value is not fold.chain.end:
        (reader,) = graph.readers(value)
        (value,) = reader.outputs
        yield value


def _normalised(node: Node, given: set[Value]) -> Value | None:
    """The array that a node multiplies by a given vector with a reciprocal root in it."""
    if node.name not in ("mul", "div") or len(node.inputs) != 2:
        return None
    for array, vector in (node.inputs, node.inputs[::-1]):
        origin, _ = source(vector)
        if not isinstance(array, Value) or array in given or origin not in given:
            continue
        if _root_behind(origin) is not None and len(array.shape) >= 2:
            return array
    return None


def _normalises_by_itself(node: Node) -> bool:
    """Whether a node is BatchNorm by batch statistics of this package, or looks like one of any."""
    if (own := own_call(node)) is not None:
        return not own.is_inference
    if node.name.startswith(("bnar_", "jax_bnar_named")):
        return True
    if node.name != "mul" or len(node.inputs) != 2:
        return False
    for array, vector in (node.inputs, node.inputs[::-1]):
        origin, _ = source(vector)
        if not isinstance(array, Value) or not is_broadcast(vector, node.outputs[0]):
            continue
        root = _root_behind(origin)
        if root is not None and _behind(root, ("reduce_sum",)) is not None:
            return True
    return False


def _root_behind(vector: Operand) -> Value | None:
    """The square root from which the vector is computed, if only elementwise operations follow."""
    return _behind(vector, ("rsqrt", "sqrt"), (*_KINDS, "reduce_sum", "reduce_max"))


def _behind(operand: Operand, names: Collection[str], stops: Collection[str] = ()) -> Value | None:
    """The nearest result of one of these primitives from which an operand is computed."""
    waiting = collections.deque([operand])
    seen: set[Value] = set()
    while waiting and len(seen) < _FARTHEST:
        value = waiting.popleft()
        if not isinstance(value, Value) or value in seen or value.producer is None:
            continue
        seen.add(value)
        if value.producer.name in names:
            return value
        if value.producer.name not in stops:
            waiting.extend(values_of(value.producer.inputs))
    return None


def _reason(network: Network, array: Value) -> str:
    """Why a normalisation of this array was not folded."""
    graph, given = network.graph, network.given
    value: Operand = array
    while isinstance(value, Value) and (node := value.producer) is not None:
        found = weighted_sum(node, given)
        if node.order in network.left:
            return "the folded weight would leave the range of its dtype"
        if found is not None:
            chain = follow(graph, found.result, found.channels, given)
            if graph.sole_reader(chain.end) is None:
                return "an array between the convolution and its result is used elsewhere as well"
            return "its vectors do not run along the channels of the convolution before it"
        if node.name in _KINDS:
            for operand in node.operands:
                if not is_real(operand.dtype):
                    return f"{operand.dtype} weights or inputs cannot hold its factor"
            return "the weight of the convolution before it is not one of the variables"
        arrays = [v for v in values_of(node.inputs) if v not in given]
        if len(arrays) != 1 or node.name not in _PASSED:
            return f"its input comes from {_name(node)}, not from a convolution or a matrix product"
        (value,) = arrays
    return "its input is not the result of a convolution or a matrix product"


_PASSED = frozenset([*ARITHMETIC, *MOVES, "convert_element_type", "copy"])


def _name(node: Node) -> str:
    if node.name == "custom_jvp_call":
        return jax_compat.function_name(node.params["call_jaxpr"].jaxpr) or "an activation"
    return node.name
