"""Metrics as JSON lines and TensorBoard events. A full disk loses lines, but not the run."""

import contextlib
import json
import os
import pathlib
import time
from typing import Any, Final

from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto import event_pb2
from tensorboardX.summary import scalar

from resnet50.display import Display
from resnet50.errors import first_line

# Its members are created at import time, so type checkers do not know them.
_PROTO: Final[Any] = event_pb2
FILE: Final = "metrics.jsonl"


class Recorder:
    """Writes `metrics.jsonl` and TensorBoard events; `step` is where the run starts or resumes.

    Lines of later steps, which a killed run may have left, are deleted, so that each step appears
    only once.
    """

    def __init__(self, folder: pathlib.Path, step: int, display: Display) -> None:
        self._path = folder / FILE
        self._display = display
        self._failed = False
        kept = [line for line in read(self._path) if line["step"] <= step] if step else []
        temporary = self._path.with_suffix(".tmp")
        temporary.write_text("".join(json.dumps(line) + "\n" for line in kept))
        temporary.replace(self._path)
        # Not SummaryWriter: its thread dies on a full disk, and training then waits for it forever.
        events = folder / "tensorboard"
        events.mkdir(exist_ok=True)
        self._events = EventsWriter(str(events / "events"), f".{step}.{os.getpid()}")
        # This makes TensorBoard drop what an earlier process has written from this step on. The
        # first step of this process is the next one, so that the points of `step` itself are kept.
        start = _PROTO.SessionLog(status=_PROTO.SessionLog.START)
        self._event(step=step + 1 if step else 0, session_log=start)

    def write(self, step: int, kind: str, values: dict[str, float]) -> None:
        line = {"step": step, "kind": kind, **values}
        try:
            with self._path.open("a") as file:
                # A write that failed may have left a part of its line.
                file.write(("\n" if self._failed else "") + json.dumps(line) + "\n")
            for name, value in values.items():
                self._event(step=step, summary=scalar(f"{kind}/{name}", value))
            self._events.flush()
            self._failed = False
        except OSError as error:
            if not self._failed:
                self._display.warn(
                    f"metrics cannot be written ({first_line(error)}); training continues without"
                    " them"
                )
            self._failed = True

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._events.close()

    def _event(self, **fields: Any) -> None:
        self._events.write_event(_PROTO.Event(wall_time=time.time(), **fields))


def was_evaluated(path: pathlib.Path, step: int) -> bool:
    """Whether a metrics file has the results of an evaluation after this step."""
    return any(line["step"] == step and line["kind"].startswith("val_") for line in read(path))


def read(path: pathlib.Path) -> list[dict[str, Any]]:
    """The lines of a metrics file, without those that a full disk or a killed run truncated."""
    lines = []
    if path.exists():
        for line in path.read_text().splitlines():
            with contextlib.suppress(json.JSONDecodeError):
                lines.append(json.loads(line))
    return lines
