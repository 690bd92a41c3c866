"""The document of a benchmark: what all of them have in common, and where it is written."""

import dataclasses
from collections.abc import Collection
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

    If the options name an instruction set, this limits all libraries to it, so it must come before
    any of them starts.

    Args:
        options: a dataclass. Its field `isa`, if it has one, is an instruction set or None.
        peers: the names of the libraries that are measured.
        allow_fallback: whether jax_bnar may run in pure JAX.

    Raises:
        SystemExit: jax_bnar has no kernels here, or `isa` cannot be had.
    """
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
        "settings": settings,
    }


def finish(document: dict[str, Any], options: Any, console: Console) -> None:
    """Writes the document to `options.output`, unless that is None."""
    if options.output is not None:
        write_json(options.output, document)
        console.print(f"wrote {options.output}")
