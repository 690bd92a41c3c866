"""Facts of the project that stand in two of its files agree, and files that are named exist."""

import pathlib
import re
import tomllib

import pytest

from jax_bnar._base import startup

ROOT = pathlib.Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
FOLDERS = ("jax_bnar", "cpu", "cuda", "native", "tests", "benchmarks", "examples", "cmake", ".ci")
NATIVE = {".cc", ".h", ".cu", ".cuh"}
SOURCES = sorted(
    path
    for folder in FOLDERS
    for path in (ROOT / folder).rglob("*")
    if path.suffix in NATIVE | {".py", ".pyi", ".cmake"}
)


def specifiers(requirements: list[str]) -> dict[str, str]:
    found = {}
    for requirement in requirements:
        match = re.fullmatch(r"([\w-]+)(?:\[[\w,]+\])?(.*)", requirement)
        assert match is not None, requirement
        found[match[1]] = match[2]
    return found


def test_oldest_jax() -> None:
    oldest = ">=" + ".".join(map(str, startup.OLDEST_JAX))
    required = specifiers(PROJECT["project"]["dependencies"])
    assert required["jax"] == required["jaxlib"] == oldest
    # The headers are the oldest ones, too: newer ones are refused by older runtimes.
    built_with = specifiers(PROJECT["build-system"]["requires"])["jaxlib"]
    assert built_with.replace("==", ">=") == oldest


@pytest.mark.parametrize("extra", PROJECT["project"]["optional-dependencies"])
def test_extras_ask_for_what_the_build_needs(extra: str) -> None:
    """An older nanobind in the environment would be the one that its builds find."""
    build = specifiers(PROJECT["build-system"]["requires"])
    found = specifiers(PROJECT["project"]["optional-dependencies"][extra])
    for name in build.keys() & found.keys():
        assert found[name] == build[name], name


def test_tools_that_judge_are_pinned() -> None:
    """Else a new release of one turns the lint of an old commit red."""
    tools = specifiers(PROJECT["project"]["optional-dependencies"]["lint"])
    for name in ("ruff", "pyright", "clang-format"):
        assert tools[name].startswith("=="), f"{name}{tools[name]}"


def test_the_hook_formats_what_lint_checks() -> None:
    text = (ROOT / ".pre-commit-config.yaml").read_text()
    pattern = re.search(r"id: clang-format\n(?:.*\n)*?\s+files: (.*)\n", text)
    assert pattern is not None
    sources = [path.relative_to(ROOT).as_posix() for path in SOURCES if path.suffix in NATIVE]
    assert {name.split("/")[0] for name in sources} == {"cpu", "cuda", "native", "tests"}
    assert [name for name in sources if not re.search(pattern[1], name)] == []


def test_files_that_sources_name_exist() -> None:
    """Documents anywhere, and paths from the root of the checkout."""
    folders = "|".join(map(re.escape, FOLDERS))
    named = re.compile(rf"\b[\w./-]+\.md\b|(?<![\w/.])(?:{folders})/[\w./-]+\.(?:py|cc|cuh?|h)\b")
    documents = {path.name for path in ROOT.glob("*.md")} | {
        path.name for folder in (*FOLDERS, "docs") for path in (ROOT / folder).rglob("*.md")
    }
    missing = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in SOURCES
        for name in named.findall(path.read_text())
        if not (
            pathlib.Path(name).name in documents if name.endswith(".md") else (ROOT / name).exists()
        )
    ]
    assert missing == []
