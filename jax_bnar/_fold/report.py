"""`FoldingReport`: which BatchNorms were folded, which were not, and why."""

import dataclasses
import html
import operator

from jax_bnar._base import jax_compat
from jax_bnar._fold.network import Fold, Network
from jax_bnar._fold.producers import WEIGHTED_SUMS
from jax_bnar._fold.unfolded import unfolded
from jax_bnar._fuse.candidate import described
from jax_bnar._fuse.nodes import Node, Value


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
    """What `fold_batch_norms` did to a network; `print` shows a line for each fold and refusal.

    Attributes:
        layers: in the order of the program.
    """

    layers: tuple[FoldedLayer, ...]

    @property
    def folded(self) -> tuple[FoldedLayer, ...]:
        """What was folded, an entry for each convolution or product.

        Two norms in a row are one entry, and one norm behind a concatenation is several.
        """
        return tuple(layer for layer in self.layers if layer.folded_into)

    @property
    def refused(self) -> tuple[FoldedLayer, ...]:
        """The BatchNorms that are still there, each with its reason."""
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
        *(
            (left.order, _layer(left.node, left.node.outputs[0], None, left.reason, left.around))
            for left in unfolded(network)
        ),
    ]
    return FoldingReport(tuple(layer for _, layer in sorted(layers, key=operator.itemgetter(0))))


def _folded(fold: Fold) -> FoldedLayer:
    last = fold.end.producer
    assert last is not None
    return _layer(last, fold.sum.result, WEIGHTED_SUMS[fold.sum.node.name], "")


def _layer(
    node: Node, x: Value, folded_into: str | None, reason: str, around: str = ""
) -> FoldedLayer:
    return FoldedLayer(
        f"{around}{node.name_stack}".rstrip("/"),
        folded_into,
        reason,
        jax_compat.source_line(node.equation),
        x.shape,
        str(x.dtype),
    )
