"""Analyses a profile: totals by type, the longest operators, and pairs that could be one pass."""

import dataclasses
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence

from jax_bnar.profile._file import Operator, Profile

ADD, ADD_RELU = "Elemwise ADD", "Elemwise FUSE_ADD_RELU"
FUSED_JOIN = "FusedBatchNorm ADD_RELU"  # also the join of two BatchNorms
# An operator that moves fewer bytes says nothing about the bandwidth of a device.
_LEAST_BYTES = 1_000_000


@dataclasses.dataclass(frozen=True)
class Total:
    """The totals of several operators.

    Attributes:
        kind: their type.
        count: how many there are.
        seconds: kernel time of those that have a time, or None if none has.
        share: `seconds` divided by the kernel time of all operators, or None if there is no time.
        bytes: the bytes of their inputs and outputs.
        computation: arithmetic operations, of those for which the file gives the number.
        bytes_per_s: bandwidth, of those that have a time.
        operations_per_s: arithmetic operations per second, of those that have a time.
        roof: bandwidth divided by that of the device, or None if either is unknown.
    """

    kind: str
    count: int
    seconds: float | None
    share: float | None
    bytes: int
    computation: float
    bytes_per_s: float | None
    operations_per_s: float | None
    roof: float | None


@dataclasses.dataclass(frozen=True)
class Pair:
    """`t = a + b`, then `relu(t + c)`, if nothing else reads t.

    Attributes:
        first: the addition of two arrays.
        second: the addition of a vector, with ReLU.
        bytes: the bytes that the two move.
        fused_bytes: the bytes that one pass over a, b and c would move, without writing or reading
            t.
        seconds: kernel time of the two, or None if it is unknown.
    """

    first: Operator
    second: Operator
    bytes: int
    fused_bytes: int
    seconds: float | None


@dataclasses.dataclass(frozen=True)
class Saving:
    """The totals of all pairs, and what one pass per pair would save at the pairs' bandwidth."""

    count: int
    seconds: float | None
    share: float | None
    bytes: int
    fused_bytes: int
    bytes_per_s: float | None
    fused_seconds: float | None
    saved_seconds: float | None
    saved_share: float | None


@dataclasses.dataclass(frozen=True)
class Summary:
    """Everything that is printed about one file.

    Attributes:
        title: the file's name.
        device: where it ran.
        operators: how many operators ran.
        seconds: kernel time of all of them, or None if there is none.
        span: the time from the start of the first kernel to the end of the last one.
        roof_bytes_per_s: bandwidth of the device.
        roof_source: the origin of that bandwidth: "given", "copy" (measured along with the
            profile), or "operator" (the highest among operators that move a megabyte or more).
        kinds: totals by type, the longest first.
        longest: the operators that took longest, each with the cumulative share of the time.
        pairs: the pairs that could be one pass.
        saving: the totals of all pairs.
        fused_joins: the number of BatchNorm-Add-ReLU joins that are one pass already.
        reached: for each operator that has a time, its type, its bytes, and its bandwidth divided
            by that of the device.
    """

    title: str
    device: str | None
    operators: int
    seconds: float | None
    span: float | None
    roof_bytes_per_s: float | None
    roof_source: str | None
    kinds: tuple[Total, ...]
    longest: tuple[tuple[Operator, Total, float | None], ...]
    pairs: tuple[Pair, ...]
    saving: Saving
    fused_joins: int
    reached: tuple[tuple[str, int, float], ...]


def summarise(profile: Profile, *, top: int, bytes_per_s: float | None = None) -> Summary:
    """Summarises a profile; `bytes_per_s` is the bandwidth of the device if the caller gives it."""
    operators = profile.operators
    timed = [o for o in operators if o.seconds is not None]
    seconds = _sum_of_seconds(operators)
    roof, source = _roof(profile, bytes_per_s)
    by_kind: dict[str, list[Operator]] = defaultdict(list)
    for operator in operators:
        by_kind[operator.kind].append(operator)
    kinds = [_total(kind, members, seconds, roof) for kind, members in by_kind.items()]
    pairs = find_pairs(operators)
    return Summary(
        title=profile.title,
        device=profile.device,
        operators=len(operators),
        seconds=seconds,
        span=max(o.end or 0 for o in timed) - min(o.start or 0 for o in timed) if timed else None,
        roof_bytes_per_s=roof,
        roof_source=source,
        kinds=tuple(sorted(kinds, key=lambda t: (-(t.seconds or 0), -t.bytes, t.kind))),
        longest=_longest(operators, top, seconds, roof),
        pairs=pairs,
        saving=_saving(pairs, seconds),
        fused_joins=sum(len(by_kind[kind]) for kind in by_kind if kind.startswith(FUSED_JOIN)),
        reached=tuple(
            (operator.kind, operator.bytes, operator.bytes / operator.seconds / roof)
            for operator in timed
            if operator.in_shapes and operator.bytes and operator.seconds and roof
        ),
    )


def find_pairs(operators: Sequence[Operator]) -> tuple[Pair, ...]:
    readers: dict[str, list[Operator]] = defaultdict(list)
    for operator in operators:
        for variable in operator.inputs:
            readers[variable].append(operator)
    pairs = []
    for first in operators:
        if first.kind != ADD or not first.outputs or not first.out_shapes:
            continue
        # A shortcut has the shape of the other operand, whereas a bias does not.
        shape = first.out_shapes[0]
        if len(first.in_shapes) != 2 or any(s != shape for s in first.in_shapes):
            continue
        behind = [reader for variable in first.outputs for reader in readers[variable]]
        if len(behind) != 1 or behind[0].kind != ADD_RELU or behind[0].out_shapes[:1] != (shape,):
            continue
        pairs.append(_pair(first, behind[0]))
    return tuple(pairs)


def _pair(first: Operator, second: Operator) -> Pair:
    elements = sum(map(math.prod, first.in_shapes + first.out_shapes))
    between = first.bytes * math.prod(first.out_shapes[0]) // max(elements, 1)
    together = first.bytes + second.bytes
    return Pair(
        first, second, together, max(together - 2 * between, 0), _sum_of_seconds([first, second])
    )


def _saving(pairs: Sequence[Pair], seconds: float | None) -> Saving:
    own = [pair.seconds for pair in pairs if pair.seconds is not None]
    taken = sum(own) if own and len(own) == len(pairs) else None
    moved, fused = sum(p.bytes for p in pairs), sum(p.fused_bytes for p in pairs)
    fused_seconds = taken * fused / moved if taken is not None and moved else None
    saved = taken - fused_seconds if taken is not None and fused_seconds is not None else None
    return Saving(
        count=len(pairs),
        seconds=taken,
        share=_ratio(taken, seconds),
        bytes=moved,
        fused_bytes=fused,
        bytes_per_s=_ratio(moved, taken),
        fused_seconds=fused_seconds,
        saved_seconds=saved,
        saved_share=_ratio(saved, seconds),
    )


def _longest(
    operators: Sequence[Operator], top: int, seconds: float | None, roof: float | None
) -> tuple[tuple[Operator, Total, float | None], ...]:
    """The longest operators by time, or the largest by bytes if there is no time."""
    ranked = sorted(operators, key=lambda o: (-(o.seconds or 0), -o.bytes))[:top]
    rows = []
    passed = 0.0
    for operator in ranked:
        passed += operator.seconds or 0
        row = _total(operator.kind, [operator], seconds, roof)
        rows.append((operator, row, None if operator.seconds is None else _ratio(passed, seconds)))
    return tuple(rows)


def _total(
    kind: str, members: Sequence[Operator], seconds: float | None, roof: float | None
) -> Total:
    timed = [operator for operator in members if operator.seconds is not None]
    own = _sum_of_seconds(members)
    # A constant has bytes but moves none of them.
    moved = sum(o.bytes for o in timed if o.in_shapes)
    bandwidth = _ratio(moved, own) if moved else None
    return Total(
        kind=kind,
        count=len(members),
        seconds=own,
        share=_ratio(own, seconds),
        bytes=sum(o.bytes for o in members),
        computation=sum(o.computation or 0 for o in members),
        bytes_per_s=bandwidth,
        operations_per_s=_ratio(sum(o.computation or 0 for o in timed), own),
        roof=_ratio(bandwidth, roof),
    )


def _roof(profile: Profile, given: float | None) -> tuple[float | None, str | None]:
    if given is not None:
        return given, "given"
    if profile.copy_bytes_per_s is not None:
        return profile.copy_bytes_per_s, "copy"
    reached = [
        operator.bytes / operator.seconds
        for operator in profile.operators
        if operator.seconds and operator.in_shapes and operator.bytes >= _LEAST_BYTES
    ]
    return (max(reached), "operator") if reached else (None, None)


def _sum_of_seconds(operators: Iterable[Operator]) -> float | None:
    times = [operator.seconds for operator in operators if operator.seconds is not None]
    return sum(times) if times else None


def _ratio(part: float | None, whole: float | None) -> float | None:
    return None if part is None or not whole else part / whole
