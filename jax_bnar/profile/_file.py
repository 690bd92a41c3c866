"""Reads and validates a profile in MegEngine's JSON.

The schema is that of MegEngine's `GraphProfiler::to_json_full`
(`src/plugin/include/megbrain/plugin/profiler.h`). This module reads

    graph_exec.comp_seq             operators in the order in which they ran
    graph_exec.operator[id]         type, name, input and output (names of variables)
    profiler.opr_footprint[id]      memory, computation, in_shapes, out_shapes, param
    profiler.device[id][node]       start, kern and end, in seconds; may be missing

and, in files that `--emit` has written, device and copy_bytes_per_s in the section "jax_bnar".
"""

import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# The types whose operators are distinguished by the parameter "mode".
_TYPES_WITH_MODE = ("Elemwise", "FusedBatchNorm")
_LARGEST = 1e18


class ProfileError(ValueError):
    """A file is not a valid profile; the message is one sentence with the file's name."""


@dataclasses.dataclass(frozen=True)
class Operator:
    """One operator that ran.

    Attributes:
        identifier: its key in the file.
        name: its name for display.
        kind: its type, with the mode if that says what it does, as in "Elemwise ADD".
        inputs: the variables that it reads.
        outputs: the variables that it writes.
        in_shapes: the shapes of the inputs, in order.
        out_shapes: the shapes of the outputs, in order.
        bytes: the bytes of all inputs and outputs.
        computation: the number of arithmetic operations, or None if the file does not give it.
        start: the time in seconds at which the kernel started, or None if there is no time.
        end: the time in seconds at which it ended.
    """

    identifier: str
    name: str
    kind: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    in_shapes: tuple[tuple[int, ...], ...]
    out_shapes: tuple[tuple[int, ...], ...]
    bytes: int
    computation: float | None
    start: float | None
    end: float | None

    @property
    def seconds(self) -> float | None:
        return None if self.start is None or self.end is None else self.end - self.start


@dataclasses.dataclass(frozen=True)
class Profile:
    """The contents of a file.

    Attributes:
        title: the file's name.
        operators: the operators, in the order in which they ran.
        device: where they ran, if the file says so.
        copy_bytes_per_s: bandwidth of a copy on that device, or None if it was not measured.
    """

    title: str
    operators: tuple[Operator, ...]
    device: str | None
    copy_bytes_per_s: float | None


def read(path: Path) -> Profile:
    """Reads a profile; raises ProfileError, with one sentence, if the file is not a valid one."""
    try:
        # Editors on Windows begin a file with a byte order mark, which is no JSON.
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise ProfileError(f"{path}: the file cannot be read ({reason}).") from None
    except UnicodeDecodeError:
        raise ProfileError(f"{path}: the file is not text in UTF-8, so it is no profile.") from None
    return _Reader(path).profile(_document(path, text))


def _document(path: Path, text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        if not text.strip():
            raise ProfileError(f"{path}: the file is empty.") from None
        if error.pos >= len(text.rstrip()) or error.msg.startswith("Unterminated string"):
            raise ProfileError(
                f"{path}: the file ends in the middle of its JSON, after {len(text):,} characters;"
                " it is truncated."
            ) from None
        raise ProfileError(
            f"{path}: the file is not JSON: {error.msg} at line {error.lineno}, column"
            f" {error.colno}."
        ) from None
    except (RecursionError, ValueError):  # nested too deeply, or an integer of thousands of digits
        raise ProfileError(f"{path}: unexpected JSON structure.") from None


class _Reader:
    """Parses a document; every error names the place at which something is wrong."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def profile(self, document: Any) -> Profile:
        top = self._mapping("the file", document)
        execution = self._mapping("graph_exec", top.get("graph_exec"))
        profiler = self._mapping("profiler", top.get("profiler"))
        sequence = execution.get("comp_seq")
        if not isinstance(sequence, list) or not sequence:
            raise self._error("graph_exec.comp_seq", "a list of operators", sequence)
        operators = self._mapping("graph_exec.operator", execution.get("operator"))
        footprints = self._mapping("profiler.opr_footprint", profiler.get("opr_footprint"))
        times = self._mapping("profiler.device", profiler.get("device", {}))
        ours = self._mapping("jax_bnar", top.get("jax_bnar", {}))
        bandwidth = ours.get("copy_bytes_per_s")
        if bandwidth is not None:
            bandwidth = self._number("jax_bnar.copy_bytes_per_s", bandwidth)
        device = ours.get("device")
        if device is not None and not isinstance(device, str):
            raise self._error("jax_bnar.device", "a string", device)
        return Profile(
            _printable(self._path.name),
            tuple(self._operator(key, operators, footprints, times) for key in sequence),
            _printable(device or self._nodes(times)) or None,
            bandwidth or None,
        )

    def _operator(
        self,
        key: Any,
        operators: Mapping[str, Any],
        footprints: Mapping[str, Any],
        times: Mapping[str, Any],
    ) -> Operator:
        if not isinstance(key, str):
            raise self._error("an entry of graph_exec.comp_seq", "a string", key)
        where = f"graph_exec.operator[{_short(key)}]"
        operator = self._mapping(where, operators.get(key))
        of_footprint = f"profiler.opr_footprint[{_short(key)}]"
        footprint = self._mapping(of_footprint, footprints.get(key))
        names = {}
        for field in ("type", "name"):
            names[field] = operator.get(field)
            if not isinstance(names[field], str):
                raise self._error(f"{where}.{field}", "a string", names[field])
        parameters = footprint.get("param")
        mode = parameters.get("mode") if isinstance(parameters, dict) else None
        kind = names["type"]
        if kind in _TYPES_WITH_MODE and isinstance(mode, str):
            kind = f"{kind} {mode}"
        computation = footprint.get("computation")
        if computation is not None:
            computation = self._number(f"{of_footprint}.computation", computation)
        start, end = self._times(key, times.get(key))
        return Operator(
            identifier=key,
            name=_printable(names["name"]),
            kind=_printable(kind),
            inputs=self._strings(f"{where}.input", operator.get("input", [])),
            outputs=self._strings(f"{where}.output", operator.get("output", [])),
            in_shapes=self._shapes(f"{of_footprint}.in_shapes", footprint.get("in_shapes", [])),
            out_shapes=self._shapes(f"{of_footprint}.out_shapes", footprint.get("out_shapes", [])),
            bytes=int(self._number(f"{of_footprint}.memory", footprint.get("memory"))),
            computation=computation,
            start=start,
            end=end,
        )

    def _times(self, key: str, found: Any) -> tuple[float | None, float | None]:
        """The start and end on the device that finished last, if there are several."""
        if found is None:
            return None, None
        where = f"profiler.device[{_short(key)}]"
        latest: tuple[float | None, float | None] = None, None
        for node, record in self._mapping(where, found).items():
            place = f"{where}[{_short(node)}]"
            record = self._mapping(place, record)
            kern, end = (self._number(f"{place}.{f}", record.get(f)) for f in ("kern", "end"))
            if end < kern:
                raise self._error(f"{place}.end", f"at least kern, {kern:g},", end)
            if latest[1] is None or end > latest[1]:
                latest = kern, end
        return latest

    def _nodes(self, times: Mapping[str, Any]) -> str:
        nodes = {node for record in times.values() if isinstance(record, dict) for node in record}
        return ", ".join(sorted(nodes)[:8])

    def _number(self, where: str, value: Any) -> float:
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not 0 <= value <= _LARGEST or not math.isfinite(value):
            raise self._error(where, f"a number from 0 to {_LARGEST:g}", value)
        return value

    def _strings(self, where: str, value: Any) -> tuple[str, ...]:
        if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
            raise self._error(where, "a list of strings", value)
        return tuple(value)

    def _shapes(self, where: str, value: Any) -> tuple[tuple[int, ...], ...]:
        def is_shape(shape: Any) -> bool:
            return isinstance(shape, list) and all(
                isinstance(n, int) and not isinstance(n, bool) and 0 <= n <= 2**31 for n in shape
            )

        if not isinstance(value, list) or not all(map(is_shape, value)):
            raise self._error(where, "a list of shapes", value)
        return tuple(map(tuple, value))

    def _mapping(self, where: str, value: Any) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise self._error(where, "an object", value)
        return value

    def _error(self, where: str, expected: str, got: Any) -> ProfileError:
        found = "nothing" if got is None else _short(got)
        return ProfileError(f"{self._path}: {where} must be {expected}, got {found}.")


def _printable(text: str) -> str:
    """The text without control characters, and without characters that cannot be encoded."""
    return "".join(c if c.isprintable() else "?" for c in text)


def _short(value: Any) -> str:
    """The value as JSON, shortened to fit into a sentence."""
    try:
        text = json.dumps(value)
    except (ValueError, RecursionError):
        text = type(value).__name__
    return text if len(text) <= 60 else f"{text[:57]}..."
