"""One line of the report."""

import dataclasses
from collections.abc import Sequence
from typing import Any


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One place where a program normalises an array.

    Attributes:
        module: path of the module, from the name stack; "" if the program has no names.
        operator: the public operator that it becomes, such as "bn_add_relu"; None if refused.
        reason: why it is refused, or why the operator covers less than it might ("" otherwise).
            For batch_statistics, it is why the normalisation is refused.
        line: where the user's program computes it.
        shape: shape of x.
        dtype: dtype of x; "" if the analysis failed here.
        calls: how often the program runs it (a jitted function called again, a scan).
        bytes_saved: the bytes that one training step no longer moves, over all calls: the
            normalised array and the pre-activation, if the operator computes them, each written
            once and read once; for batch_statistics one read of x, if the program takes the
            variance around the mean, or else none. They are counted from shapes, not measured: XLA
            may already have avoided some of them. Symbolic sizes (jax.export) count as 1.
    """

    module: str
    operator: str | None
    reason: str
    line: str
    shape: tuple[int, ...]
    dtype: str
    calls: int
    bytes_saved: int

    @property
    def is_matched(self) -> bool:
        return self.operator is not None

    def __str__(self) -> str:
        where = self.module or "(no module)"
        times = f" x{self.calls}" if self.calls > 1 else ""
        array = described(self.shape, self.dtype)
        if not self.dtype:
            return f"{where}{times}: {self.reason}, at {self.line}"
        if self.operator is None:
            return f"{where}{times}: refused: {self.reason} [{array}] at {self.line}"
        note = f" ({self.reason})" if self.reason else ""
        saved = f"{self.bytes_saved:,} bytes saved"
        return f"{where}{times}: {self.operator}{note} [{array}] {saved} at {self.line}"


def described(shape: Sequence[Any], dtype: Any) -> str:
    """The type of an array as reports and errors name it, such as float32[2,3]."""
    return f"{dtype}[{','.join(map(str, shape))}]"
