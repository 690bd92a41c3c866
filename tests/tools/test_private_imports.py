"""Only one file imports modules of JAX that are not public API."""

import ast
import pathlib

import jax_bnar

PACKAGE = pathlib.Path(jax_bnar.__file__).parent


def imported(path: pathlib.Path) -> set[str]:
    """Every module that a file imports, and every name that it imports from a module."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def test_private_modules_of_jax_are_imported_in_one_place() -> None:
    private = {
        path.relative_to(PACKAGE).as_posix()
        for path in PACKAGE.rglob("*.py")
        for name in imported(path)
        if name.startswith(("jax.", "jaxlib.")) and "._" in name
    }
    assert private == {"_base/jax_compat.py"}
