"""The command: `python -m jax_bnar.doctor [--json]`."""

import argparse
import dataclasses
import functools
import json
import math
import sys

from jax_bnar._base import command
from jax_bnar.doctor._diagnosis import report
from jax_bnar.doctor._examination import examine_in_process
from jax_bnar.doctor._report import render

_NAME = "python -m jax_bnar.doctor"


def main(arguments: list[str] | None = None) -> int:
    return command.run(_NAME, lambda: _main(arguments))


def _main(arguments: list[str] | None) -> int:
    parser = argparse.ArgumentParser(
        prog=_NAME,
        description="Checks whether the kernels of jax_bnar work here; if not, says why and what to"
        " do. The exit code is 0 if they work on JAX's default platform, and 1 otherwise.",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--timeout",
        type=_seconds,
        default=300,
        metavar="SECONDS",
        help="give up on a platform after this long (default: %(default)s)",
    )
    options = parser.parse_args(arguments)
    found = report(functools.partial(examine_in_process, timeout=options.timeout))
    if options.json:
        print(json.dumps(dataclasses.asdict(found), indent=2, allow_nan=False))
    else:
        print(render(found), end="")
    return 0 if found.works else 1


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number of seconds, got {text!r}") from None
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"must be finite and above 0, got {text}")
    return seconds


if __name__ == "__main__":
    sys.exit(main())
