"""Who may import what is not public: one file for JAX, and no example for the package."""

import ast
import pathlib

from checkout import ROOT

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


def test_examples_import_what_users_can() -> None:
    """Users copy the examples, so these need nothing but installed packages and their public names.

    `primitive`, `reference` and `plain_inference` have public-looking names but are internal.
    """
    internal = ("jax_bnar.primitive", "jax_bnar.reference", "jax_bnar.plain_inference")
    found = {
        f"{path.relative_to(ROOT)}: {name}"
        for path in (ROOT / "examples").rglob("*.py")
        for name in imported(path)
        if name.startswith(("benchmarks", "tests", *internal))
        or (name.startswith("jax_bnar.") and "._" in name)
    }
    assert found == set()
