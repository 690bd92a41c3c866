"""What the measuring programs of `make gpu` have in common: options, and the file they write."""

import argparse
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from benchmarks.common.json_file import write_json

SCHEMA: Final = 1


def make_parser(description: str | None, **more: Any) -> argparse.ArgumentParser:
    """Makes a parser of the options that every step passes; a program may add its own."""
    parser = argparse.ArgumentParser(description=description, **more)
    parser.add_argument(
        "--platform", choices=("cuda", "cpu"), default="cuda",
        help="cpu: a dry run with tiny shapes, which says nothing of a GPU",
    )  # fmt: skip
    parser.add_argument("--output", type=Path, required=True, help="JSON file")
    parser.add_argument(
        "--seconds", type=float, default=1e9, help="begin nothing after so many seconds"
    )
    return parser


def make_document(family: str, platform: str, **about: Any) -> dict[str, Any]:
    """Makes an empty result. `summary` is for lines of text, which the table shows."""
    return {
        "schema": SCHEMA,
        "family": family,
        "platform": platform,
        "dry_run": platform == "cpu",
        **about,
        "complete": False,
        "errors": [],
        "summary": [],
    }


def complete(document: dict[str, Any], output: Path, measure: Callable[[], None]) -> int:
    """Calls measure(), which adds to the document; writes this and returns the exit status.

    What goes wrong in a program, a file or an argument is told in `errors`.
    """
    try:
        measure()
        document["complete"] = True
    except (RuntimeError, ValueError, OSError, subprocess.SubprocessError) as error:
        document["errors"].append(f"{type(error).__name__}: {error}")
    write_json(output, document)
    print(*document["summary"], *document["errors"], sep="\n")
    return 1 if document["errors"] else 0
