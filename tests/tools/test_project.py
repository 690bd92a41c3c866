"""Facts stated in two files of the project agree, and files that are named exist."""

import os
import pathlib
import re
import shutil
import subprocess
import sys
import tomllib

import pytest
from checkout import ROOT
from native_build import PATH

from jax_bnar._base import startup

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
    # The headers must be the oldest ones too, because older runtimes reject newer headers.
    built_with = specifiers(PROJECT["build-system"]["requires"])["jaxlib"]
    assert built_with.replace("==", ">=") == oldest


@pytest.mark.parametrize("extra", PROJECT["project"]["optional-dependencies"])
def test_extras_ask_for_what_the_build_needs(extra: str) -> None:
    """Without isolation, a build would use an older nanobind that an extra has installed."""
    build = specifiers(PROJECT["build-system"]["requires"])
    found = specifiers(PROJECT["project"]["optional-dependencies"][extra])
    for name in build.keys() & found.keys():
        assert found[name] == build[name], name


def test_tools_that_judge_are_pinned() -> None:
    """Otherwise a new release of a tool could make lint fail on an old commit."""
    tools = specifiers(PROJECT["project"]["optional-dependencies"]["lint"])
    for name in ("ruff", "clang-format", "vulture"):
        assert tools[name].startswith("=="), f"{name}{tools[name]}"
    # Every release of pyright increments the third number and may report new errors.
    assert re.fullmatch(r"==1\.1\.\d+", tools["pyright"])


def test_the_hook_formats_what_lint_checks() -> None:
    text = (ROOT / ".pre-commit-config.yaml").read_text()
    pattern = re.search(r"id: clang-format\n(?:.*\n)*?\s+files: (.*)\n", text)
    assert pattern is not None
    sources = [path.relative_to(ROOT).as_posix() for path in SOURCES if path.suffix in NATIVE]
    assert {name.split("/")[0] for name in sources} == {"cpu", "cuda", "native", "tests"}
    assert [name for name in sources if not re.search(pattern[1], name)] == []


def test_files_that_sources_name_exist() -> None:
    """Checks names of documents anywhere, and paths from the root of the checkout."""
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


def make(*arguments: str, directory: pathlib.Path) -> str:
    finished = subprocess.run(
        ["make", "-f", str(ROOT / "Makefile"), *arguments],
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


def test_make_clean_leaves_what_users_made(tmp_path: pathlib.Path) -> None:
    """The ResNet-50 example writes to `runs`, which may hold days of training."""
    users = ("runs/resnet50", "dist", "data")
    for folder in (*users, ".venv", "build/develop", "demo_output", ".pytest_cache"):
        (tmp_path / folder).mkdir(parents=True)
    make("clean", directory=tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"runs", "dist", "data"}
    assert (tmp_path / "runs/resnet50").is_dir()


def test_make_help_lists_the_targets(tmp_path: pathlib.Path) -> None:
    shown = make("help", directory=tmp_path)
    assert make(directory=tmp_path) == shown
    for target in (
        "demo",
        "quick",
        "test",
        "check",
        "lint",
        "benchmark",
        "gpu",
        "dist",
        "docs",
        "clean",
    ):
        assert re.search(rf"^ +make {target} +\w", shown, re.MULTILINE), target


@pytest.mark.parametrize(
    ("touched", "remade"),
    [("cpu/operations.cc", ["module"]), ("pyproject.toml", ["build-requirements", "module"])],
)
def test_make_installs_what_depends_on_a_file(
    tmp_path: pathlib.Path, touched: str, remade: list[str]
) -> None:
    """The stamps have a fixed order, so `make test` after `make demo` compiles nothing."""
    for name in ("pyproject.toml", "CMakeLists.txt", "cpu/operations.cc", ".ci/requirements.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (0, 0))
    stamps = ("created", "build-requirements", "module", "installed-demo", "installed-test")
    (tmp_path / ".venv").mkdir()
    for seconds, name in enumerate(stamps, 1):
        (tmp_path / ".venv" / name).touch()
        os.utime(tmp_path / ".venv" / name, (seconds, seconds))
    # Installing more packages later does not rebuild the module.
    for target in ("demo", "test"):
        assert "pip install" not in make("-n", target, directory=tmp_path)
    (tmp_path / touched).touch()
    commands = make("-n", "test", directory=tmp_path)
    assert ("--editable ." in commands) == ("module" in remade)
    assert ("build-headers" in commands) == ("build-requirements" in remade)
    assert ("requirements.py 'demo,resnet50,test'" in commands) == (touched == "pyproject.toml")


def requirements(what: str) -> list[str]:
    finished = subprocess.run(
        [sys.executable, ROOT / ".ci/requirements.py", what],
        capture_output=True,
        text=True,
        check=True,
    )
    return finished.stdout.splitlines()


def test_requirements_of_the_build_and_of_extras() -> None:
    build = PROJECT["build-system"]["requires"]
    assert set(build) <= {*requirements("build-tools"), *requirements("build-headers")}
    (headers,) = requirements("build-headers")
    assert headers.startswith("jaxlib==")
    extras = PROJECT["project"]["optional-dependencies"]
    both = requirements("demo,test")
    assert {*PROJECT["project"]["dependencies"], *extras["demo"], *extras["test"]} == set(both)
    assert len(both) == len(set(both))


def test_every_mark_is_one_that_a_target_runs() -> None:
    """Tests in a tier that no target selects would never run."""
    marks = {text.split(":")[0] for text in PROJECT["tool"]["pytest"]["ini_options"]["markers"]}
    assert marks == {"quick", "slow", "one_python", "large", "gpu"}
    makefile = (ROOT / "Makefile").read_text()
    selected = re.findall(r'\$\(PYTEST\) -m (?:"(.*)"|(\w+))', makefile)
    assert [a or b for a, b in selected] == [
        "quick and not slow",
        "not (slow or large or gpu)",
        "slow",
    ]
    assert re.search(r"^check: lint test slow pythons$", makefile, re.MULTILINE)
    assert "make check" in (ROOT / ".ci/run").read_text()


CUDA_DISTRIBUTION = ROOT / "distributions/cuda13"


def test_versions_agree() -> None:
    """The two distributions name each other in one version, and so do their packages."""
    version = PROJECT["project"]["version"]
    cuda = tomllib.loads((CUDA_DISTRIBUTION / "pyproject.toml").read_text())
    assert cuda["project"]["version"] == version
    assert cuda["project"]["dependencies"] == [f"jax-bnar=={version}"]
    assert f"jax-bnar-cuda13=={version}" in PROJECT["project"]["optional-dependencies"]["cuda13"]
    for package in (ROOT / "jax_bnar", CUDA_DISTRIBUTION / "jax_bnar_cuda13"):
        text = (package / "__init__.py").read_text()
        assert re.findall(r'^__version__ = "(.*?)"', text, re.MULTILINE) == [version], package


def test_distributions_are_built_alike() -> None:
    cuda = tomllib.loads((CUDA_DISTRIBUTION / "pyproject.toml").read_text())
    assert cuda["build-system"] == PROJECT["build-system"]
    for key in ("requires-python", "license"):
        assert cuda["project"][key] == PROJECT["project"][key]
    assert (CUDA_DISTRIBUTION / "LICENSE").read_text() == (ROOT / "LICENSE").read_text()
    assert cuda["project"]["authors"] == PROJECT["project"]["authors"]


def test_ci_compiles_for_what_a_release_holds() -> None:
    """A kernel that spills registers on one architecture only would otherwise stop a release."""
    defaults = re.search(
        r"set\(CMAKE_CUDA_ARCHITECTURES (.*)\)", (ROOT / "cmake/CudaKernels.cmake").read_text()
    )
    tried = re.search(r'CUDAARCHS="\$\{CUDAARCHS:-(.*)\}"', (ROOT / ".ci/run").read_text())
    assert defaults is not None
    assert tried is not None
    assert tried[1].split(";") == defaults[1].split()


def test_the_authors_are_named() -> None:
    (author,) = PROJECT["project"]["authors"]
    assert author == {"name": "The jax_bnar authors"}
    assert (ROOT / "AUTHORS").read_text().startswith(author["name"])
    assert PROJECT["project"]["license-files"] == ["LICENSE", "AUTHORS"]


def test_metadata_claims_what_is_tested() -> None:
    """Platforms and Pythons that CI runs; no addresses, for the project has none yet."""
    project = PROJECT["project"]
    systems = {c for c in project["classifiers"] if c.startswith("Operating System")}
    assert systems == {"Operating System :: POSIX :: Linux"}
    pythons = [c.rsplit(" ", 1)[1] for c in project["classifiers"] if "Python :: 3." in c]
    assert pythons == ["3.11", "3.12", "3.13"]
    workflow = (ROOT / ".github/workflows/ci.yml").read_text()
    assert re.search(r"python: \[(.*)\]", workflow)[1].replace('"', "") == ", ".join(pythons)  # type: ignore[index]
    assert "urls" not in project


def test_no_message_installs_a_name_of_an_index() -> None:
    """The project is published nowhere yet, so its names on an index are anyone's."""
    named = re.compile(r"pip install [^`#\n]*\bjax[-_]bnar")
    places = [ROOT / folder for folder in ("jax_bnar", "benchmarks", "examples", "docs")]
    texts = [
        p for place in places for p in place.rglob("*") if p.suffix in {".py", ".md", ".ipynb"}
    ]
    found = [
        f"{path.relative_to(ROOT)}: {match[0]}"
        for path in [*texts, ROOT / "README.md"]
        for match in named.finditer(path.read_text())
        if "--no-index" not in match[0] and "uninstall" not in match[0]
    ]
    assert found == []


def test_workflow_runs_make_targets_alone() -> None:
    """What CI does can be done, and was tried, on any machine."""
    makefile = (ROOT / "Makefile").read_text()
    workflow = (ROOT / ".github/workflows/ci.yml").read_text()
    commands = re.findall(r"^ +- run: (.*)$|^ +run: (.*)$", workflow, re.MULTILINE)
    lines = [first or second for first, second in commands]
    assert {"make test", "make lint", "make docs"} <= set(lines)
    for line in lines:
        target = re.match(r"make (\w+)(?: |$)", line)
        assert target is not None, line
        assert re.search(rf"^{target[1]}:", makefile, re.MULTILINE), line


def test_make_names_the_python_that_it_needs(tmp_path: pathlib.Path) -> None:
    """pip's own words about an old Python fill a screen."""
    old = tmp_path / "python3.10"
    old.write_text(
        f"#!/bin/sh\nexec {sys.executable} -c"
        " \"import sys; sys.version_info = (3, 10, 1); sys.version = '3.10.1 (main)'; $2\"\n"
    )
    old.chmod(0o755)
    finished = subprocess.run(
        ["make", "-f", str(ROOT / "Makefile"), "venv", f"PYTHON={old}"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert finished.returncode != 0
    assert f"jax_bnar needs Python 3.11 or newer, and {old} is 3.10.1" in finished.stderr
    assert "make PYTHON=python3.12 venv" in finished.stderr
    assert not (tmp_path / ".venv").exists()


def test_a_build_without_compiler_says_so(tmp_path: pathlib.Path) -> None:
    cmake = shutil.which("cmake", path=PATH)
    if cmake is None or shutil.which("ninja", path=PATH) is None:
        pytest.skip("cmake or ninja is missing")
    finished = subprocess.run(
        [cmake, "-S", ROOT, "-B", tmp_path, "-G", "Ninja"],
        env=os.environ | {"PATH": PATH, "CXX": str(tmp_path / "no-compiler")},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert finished.returncode != 0
    message = " ".join(finished.stderr.split())
    assert "building from the sources needs a C++17 compiler, and none was found" in message
    assert "apt install g++" in message
