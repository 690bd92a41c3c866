"""The JSON of compiled programs: rows, and what they depend on."""

from typing import Any, Final

from benchmarks.common.environment import describe_environment
from benchmarks.gpu.compiled import compiler

SCHEMA: Final = 1


def make_document(**content: Any) -> dict[str, Any]:
    """A document that says that nothing ran, with versions and commit."""
    return {
        "schema": SCHEMA,
        "compiled_not_run": True,
        "environment": describe_environment() | {"compiler": compiler.versions()},
        **content,
    }
