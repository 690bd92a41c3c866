"""The command `python -m benchmarks.gpu.counters`: hardware counters of our CUDA kernels.

It starts `counters_program` under ncu (Nsight Compute) and writes what ncu counted for each kernel.
Failures are reported next to the results, in ncu's own words. `--platform cpu` is the dry run: the
same program without ncu, and rows without counters.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks.common.json_file import write_json
from benchmarks.gpu import ncu, ncu_csv
from benchmarks.gpu.counter_rows import make_rows, rows_without_kernels, summarise
from benchmarks.gpu.program import make_document, make_parser

_PROGRAM: Final = "benchmarks.gpu.counters_program"
# The share of a run's time after which no further site begins. In the rest, ncu writes its results.
_LAST_SITE: Final = 0.6
# ncu is not started again if less than this is left.
_LEAST_SECONDS: Final = 15.0
_TAIL_CHARACTERS: Final = 2000


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = make_parser(
        "Hardware counters of our CUDA kernels at the heaviest sites of ResNet-50, by Nsight"
        " Compute.",
        prog="python -m benchmarks.gpu.counters",
        epilog=f"All others are options of {_PROGRAM}: --batch, --dtype, --sites, --strategy,"
        " --save.",
        allow_abbrev=False,
    )
    options, program_options = parser.parse_known_args(arguments)
    options.program_options = program_options
    return options


class Session:
    """A folder for the files of the programs, and the time until which they may run."""

    def __init__(self, options: argparse.Namespace, directory: Path) -> None:
        self._options = options
        self._end = time.monotonic() + options.seconds
        self.directory = directory
        self.log = directory / "ncu.log"
        self.sites = directory / "sites.json"

    def left(self) -> float:
        return self._end - time.monotonic()

    def run(self, path: str | None, metrics: Sequence[str] = ()) -> tuple[ncu.Finished, str]:
        """Runs the program, under ncu if it has a path, and returns its end and all its output."""
        for file in (self.log, self.sites):
            file.unlink(missing_ok=True)
        argv = (
            sys.executable, "-m", _PROGRAM, "--platform", self._options.platform,
            "--output", str(self.sites), "--seconds", f"{_LAST_SITE * self.left():.1f}",
            *self._options.program_options,
        )  # fmt: skip
        if path is not None:
            argv = ncu.command_line(path, argv, metrics, self.log)
        finished = ncu.run(argv, self.directory / "console.txt", self.left())
        words = "\n".join((finished.console, self.read_log()))
        print(words, flush=True)
        return finished, words

    def read_log(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""


def record_dry_run(session: Session, document: dict[str, Any]) -> None:
    finished, words = session.run(None)
    _record_end(finished, words, document)
    document["rows"] = rows_without_kernels(_read_sites(session, document))


def record(session: Session, path: str, document: dict[str, Any]) -> None:
    """Fills the document step by step, so that it has everything up to the first failure."""
    document["ncu"] = ncu.version(path, session.directory)
    query = ncu.query(path, session.directory, session.left() / 4)
    document["warnings"] += [] if query.problem is None else [query.problem]
    metrics, unknown = query.known, query.unknown
    finished, words = session.run(path, metrics)
    while (refused := ncu.refused(words, metrics)) and session.left() > _LEAST_SECONDS:
        unknown += refused
        metrics = tuple(metric for metric in metrics if metric not in refused)
        finished, words = session.run(path, metrics)
    document["metrics_unknown"] = list(unknown)
    _record_end(finished, words, document)
    kernels: list[ncu_csv.Kernel] = []
    try:
        kernels = ncu_csv.parse(session.read_log())
    except ValueError as error:
        document["errors"].append(str(error))
    valued = {metric for kernel in kernels for metric in kernel.metrics}
    document["metrics_without_value"] = [m for m in metrics if kernels and m not in valued]
    document["rows"], problems = make_rows(_read_sites(session, document), kernels)
    document["errors"] += problems


def _record_end(finished: ncu.Finished, words: str, document: dict[str, Any]) -> None:
    document["warnings"] += ncu.said(words, "WARNING")
    document["errors"] += ncu.said(words, "ERROR")
    if finished.exit_status != 0:
        how = "no end in time" if finished.exit_status is None else f"exit {finished.exit_status}"
        document["errors"].append(f"{how}, after: {words.strip()[-_TAIL_CHARACTERS:]}")


def _read_sites(session: Session, document: dict[str, Any]) -> list[dict[str, Any]]:
    """Reads what the program wrote before it ended."""
    if not session.sites.exists():
        document["errors"].append(f"{_PROGRAM} ended before it reached the first site")
        return []
    written = json.loads(session.sites.read_text())
    document["errors"] += written.pop("errors")
    sites = written.pop("sites")
    document.update(written)
    return sites


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    document = make_document("counters", options.platform, rows=[], warnings=[])
    path = ncu.find_ncu()
    with tempfile.TemporaryDirectory() as directory:
        session = Session(options, Path(directory))
        try:
            if options.platform == "cpu":
                record_dry_run(session, document)
            elif path is not None:
                record(session, path, document)
            else:
                document["errors"].append(
                    "ncu was found neither on PATH, nor in the CUDA toolkit, nor in"
                    " /opt/nvidia/nsight-compute; install Nsight Compute"
                )
        except Exception as error:
            document["errors"].append(f"{type(error).__name__}: {error}")
    document["summary"] = list(summarise(document["rows"]))
    write_json(options.output, document)
    print(*document["summary"], *document["errors"], sep="\n")
    return 1 if document["errors"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
