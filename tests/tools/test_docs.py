"""The pages in docs/: their code runs, what they name exists, a strict build has no warnings."""

import pathlib
import re
import shutil
import subprocess
import sys
import tomllib

import gpu_compiler
import pytest
from checkout import FOLDERS, ROOT, TESTS
from subprocesses import run_python

DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
GUIDE = sorted((DOCS / "guide").glob("*.md"))
NAMED = (*FOLDERS, "docs")
VARIABLE = re.compile(r"JAX_BNAR_\w*\w")


def snippets(page: pathlib.Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


def table_rows(page: pathlib.Path) -> list[str]:
    return [line for line in page.read_text().splitlines() if line.startswith("|")]


@pytest.mark.slow
@pytest.mark.parametrize("page", GUIDE, ids=lambda page: page.stem)
def test_guide_runs(page: pathlib.Path) -> None:
    """Each page is one program, from top to bottom, with eight CPU devices."""
    blocks = snippets(page)
    if page.stem == "gpu":
        assert blocks == []  # there is nothing to run without a GPU
        return
    prelude = 'import jax\njax.config.update("jax_num_cpu_devices", 8)\n'
    if page.stem == "ahead_of_time":
        gpu_compiler.require()
        prelude = gpu_compiler.ON_THE_PATH + prelude
    assert blocks
    ends = "print('done')"
    printed = run_python("\n".join([*blocks, ends]), timeout=300, prelude=prelude)
    assert printed.endswith("done\n")


def test_snippets_of_other_pages_are_in_the_guide() -> None:
    """Code on pages that no test runs would go stale."""
    assert [page.name for page in PAGES if page not in GUIDE and snippets(page)] == []


def test_paths_exist() -> None:
    """Files and folders that the README and the pages name in backticks exist.

    A name with a folder is a path from the root of the checkout; one without may be anywhere.
    """
    folders = "|".join(NAMED)
    suffixes = "md|toml|yml|py|cc|h|cuh?"
    quoted = re.compile(rf"`((?:{folders})/[\w./*-]*|[\w-]+\.(?:{suffixes})|Makefile)`")
    files = {path.name for folder in NAMED for path in (ROOT / folder).rglob("*.*")}
    files |= {path.name for path in ROOT.iterdir()}
    names = [
        (page, name)
        for page in (ROOT / "README.md", *PAGES)
        for name in quoted.findall(page.read_text())
    ]
    assert len(names) > 100
    missing = [
        f"{page.relative_to(ROOT)}: {name}"
        for page, name in names
        if not (any(ROOT.glob(name.rstrip("/"))) if "/" in name else name in files)
    ]
    assert missing == []


def test_tests_in_tables_exist() -> None:
    """Tests named in the tables of the README and docs/ exist.

    They are written `test_file` or `test_file.py::test_name`.
    """
    named = re.compile(r"`(?:tests/\w+/)?(test_\w+)(?:\.py)?(?:::(test_\w+))?`")
    found = 0
    missing = []
    for page in (ROOT / "README.md", *PAGES):
        for file, function in named.findall("\n".join(table_rows(page))):
            paths = list(TESTS.glob(f"*/{file}.py"))
            found += 1
            if file.endswith("_"):  # test_resnet50_example_*
                continue
            if not paths or (function and f"\ndef {function}(" not in f"\n{paths[0].read_text()}"):
                missing.append(f"{page.relative_to(ROOT)}: {file}::{function}")
    assert missing == []
    assert found > 50


def test_every_variable_is_in_the_table() -> None:
    """The table lists all environment variables and build options in the sources, and no others."""
    suffixes = {".py", ".cc", ".h", ".cu", ".cuh", ".cmake", ".toml"}
    places = [ROOT / name for name in ("CMakeLists.txt", "Makefile", "pyproject.toml")]
    places += [path for path in (ROOT / ".ci").iterdir() if path.is_file()]
    for folder in (*NAMED, ".ci"):
        places += [p for p in (ROOT / folder).rglob("*") if p.suffix in suffixes]
        places += (ROOT / folder).rglob("CMakeLists.txt")
    in_sources = {
        name
        for path in places
        if path.name != pathlib.Path(__file__).name
        for name in VARIABLE.findall(path.read_text())
        if not name.endswith("_")  # include guards and prefixes
    }
    rows = table_rows(DOCS / "architecture.md")
    in_table = {row.split("`")[1] for row in rows if row.startswith("| `JAX_BNAR_")}
    assert in_table == in_sources


def test_rooms_are_in_the_diagram() -> None:
    """The layers that import-linter checks are those on the architecture page, in order."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    rooms, *_ = project["tool"]["importlinter"]["contracts"]
    layers = [name for layer in rooms["layers"] for name in layer.split(" | ")]
    diagram = re.findall(r"```text\n(.*?)```", (DOCS / "architecture.md").read_text(), re.DOTALL)[0]
    above = diagram.split("XLA FFI")[0]
    assert [name for name in re.findall(r"\b(\w+)(?:/|\.py)", above) if name in layers] == layers


@pytest.mark.slow
def test_builds_strictly(tmp_path: pathlib.Path) -> None:
    """A broken link, an unknown anchor or a docstring that does not parse is an error."""
    for package in ("mkdocs", "material", "mkdocstrings"):
        pytest.importorskip(package, reason="the pages need what jax-bnar[docs] installs")
    finished = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert finished.returncode == 0, finished.stderr
    site = tmp_path / "site"
    html = {path.relative_to(site).as_posix(): path.read_text() for path in site.rglob("*.html")}
    for page in PAGES:
        assert page.relative_to(DOCS).with_suffix(".html").as_posix() in html
    for name in ("jax_bnar.bn_add_relu", "jax_bnar.flax_layers.BatchNorm"):
        assert f'id="{name}"' in html["api.html"]
    # The pages load nothing from other sites, neither fonts nor scripts.
    loaded = re.compile(r"""<(?:script|link|img)[^>]+(?:src|href)="?(?:https?:)?//[^">\s]+""")
    for name, text in html.items():
        assert loaded.findall(text) == [], name
    shutil.rmtree(site)
