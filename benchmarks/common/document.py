"""The document of a benchmark: what all of them have in common, and where it is written."""

import dataclasses
import json
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, Final

import jax
from rich.console import Console

from benchmarks.common import isa
from benchmarks.common.environment import describe_environment
from benchmarks.common.json_file import write_json
from benchmarks.common.kernels import require_kernels

SCHEMA: Final = 1


def begin(
    options: Any, peers: Collection[str] = (), *, allow_fallback: bool = False
) -> dict[str, Any]:
    """The document of a benchmark with these options, without its results.

    JAX is to use the CPU, also on a machine with a GPU. If the options name an instruction set,
    this limits all libraries to it. So it must come before any of them starts.

    Args:
        options: a dataclass. Its field `isa`, if it has one, is an instruction set or None.
        peers: the names of the libraries that are measured.
        allow_fallback: whether jax_bnar may run in pure JAX.

    Raises:
        SystemExit: jax_bnar has no kernels here, or `isa` cannot be had.
    """
    jax.config.update("jax_platforms", "cpu")
    if (limit := getattr(options, "isa", None)) is not None:
        isa.limit(limit)
    if not allow_fallback:
        require_kernels()
    settings = dataclasses.asdict(options)
    settings.pop("output", None)
    return {
        "schema": SCHEMA,
        "environment": describe_environment() | isa.describe(peers),
        "device": jax.devices()[0].device_kind,
        "settings": json.loads(json.dumps(settings)),  # with lists, as they are in the file
    }


def finish(
    document: dict[str, Any],
    options: Any,
    console: Console,
    plot: Callable[[dict[str, Any], Path], None] | None = None,
) -> None:
    """Writes the document to `options.output`, unless that is None, and what `plot` draws of it."""
    if options.output is None:
        return
    write_json(options.output, document)
    if plot is None:
        console.print(f"wrote {options.output}")
        return
    picture = options.output.with_suffix(".svg")
    plot(document, picture)
    console.print(f"wrote {options.output} and {picture}", soft_wrap=True)
