"""Facts stated in two files of the project agree, and files that are named exist."""

import email
import email.message
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tomllib

import pytest
from checkout import FOLDERS, ROOT
from native_build import PATH

import jax_bnar
from jax_bnar._base import jax_compat, startup

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
BUILD_REQUIRES = [
    *PROJECT["build-system"]["requires"],
    *PROJECT["tool"]["jax-bnar"]["build-requires"],
]
NAMED = (*FOLDERS, ".ci")
NATIVE = {".cc", ".h", ".cu", ".cuh"}
SOURCES = sorted(
    path
    for folder in NAMED
    for path in (ROOT / folder).rglob("*")
    if path.suffix in NATIVE | {".py", ".pyi", ".cmake"}
)


def specifiers(requirements: list[str]) -> dict[str, str]:
    found = {}
    for requirement in requirements:
        match = re.fullmatch(r"([\w-]+)(?:\[[\w,-]+\])?(.*)", requirement)
        assert match is not None, requirement
        found[match[1]] = match[2]
    return found


def test_oldest_jax() -> None:
    oldest = ">=" + ".".join(map(str, startup.OLDEST_JAX))
    required = specifiers(PROJECT["project"]["dependencies"])
    assert required["jax"] == required["jaxlib"] == oldest
    # The headers must be the oldest ones too, because older runtimes reject newer headers.
    built_with = specifiers(BUILD_REQUIRES)["jaxlib"]
    assert built_with.replace("==", ">=") == oldest


def test_newest_jax() -> None:
    assert f"0.10.2 and {startup.NEWEST_TESTED_JAX}" in (jax_compat.__doc__ or "")


@pytest.mark.parametrize("extra", PROJECT["project"]["optional-dependencies"])
def test_extras_ask_for_what_the_build_needs(extra: str) -> None:
    """Without isolation, a build would use an older nanobind that an extra has installed."""
    build = specifiers(BUILD_REQUIRES)
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
    folders = {name.split("/")[0] for name in sources}
    assert folders == {"benchmarks", "cpu", "cuda", "native", "python_module", "tests"}
    assert [name for name in sources if not re.search(pattern[1], name)] == []


def test_files_that_sources_name_exist() -> None:
    """Checks names of documents anywhere, and paths from the root of the checkout."""
    folders = "|".join(map(re.escape, NAMED))
    named = re.compile(rf"\b[\w./-]+\.md\b|(?<![\w/.])(?:{folders})/[\w./-]+\.(?:py|cc|cuh?|h)\b")
    documents = {path.name for path in ROOT.glob("*.md")} | {
        path.name for folder in (*NAMED, "docs") for path in (ROOT / folder).rglob("*.md")
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


def make(*arguments: str, directory: pathlib.Path, architectures: str = "90-real") -> str:
    finished = subprocess.run(
        ["make", "-f", str(ROOT / "Makefile"), *arguments],
        cwd=directory,
        env=os.environ | {"CUDAARCHS": architectures},
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
        (tmp_path / ".venv" / name).write_text("90-real\n")
        os.utime(tmp_path / ".venv" / name, (seconds, seconds))
    # Installing more packages later does not rebuild the module.
    for target in ("demo", "test"):
        assert "pip install" not in make("-n", target, directory=tmp_path)
    assert "--editable ." in make("-n", "test", directory=tmp_path, architectures="100-real")
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


def test_all_parts_of_the_cuda_compiler_have_one_version() -> None:
    """Without it, the newest front end and optimiser would go with an older nvcc."""
    versions = {requirement.partition("==")[2] for requirement in requirements("cuda-compiler")}
    (version,) = versions
    assert re.fullmatch(r"13\.\d+\.\*", version)


def test_requirements_of_the_build_and_of_extras() -> None:
    needed = {*requirements("build-tools"), *requirements("build-headers")}
    assert set(BUILD_REQUIRES) <= needed
    (headers,) = requirements("build-headers")
    assert headers.startswith("jaxlib==")
    extras = PROJECT["project"]["optional-dependencies"]
    both = requirements("demo,test")
    assert {*PROJECT["project"]["dependencies"], *extras["demo"], *extras["test"]} == set(both)
    assert len(both) == len(set(both))


def test_every_mark_is_one_that_a_target_runs() -> None:
    """Tests in a tier that no target selects would never run."""
    marks = {text.split(":")[0] for text in PROJECT["tool"]["pytest"]["ini_options"]["markers"]}
    assert marks == {"quick", "slow", "weekly", "one_python", "large", "gpu"}
    makefile = (ROOT / "Makefile").read_text()
    selected = re.findall(r'\$\(PYTEST\) -m (?:"(.*)"|(\w+))', makefile)
    assert [a or b for a, b in selected] == [
        "quick and not slow",
        "not (slow or large or gpu)",
        "$(SLOW_TESTS)",
    ]
    assert re.search(r"^SLOW_TESTS \?= slow$", makefile, re.MULTILINE)
    assert re.search(r"^check: lint test slow pythons$", makefile, re.MULTILINE)
    assert "make check" in (ROOT / ".ci/run").read_text()


CUDA_DISTRIBUTION = ROOT / "distributions/cuda13"


def test_the_version_is_written_once(tmp_path: pathlib.Path) -> None:
    """Both distributions take it from there, and the CUDA kernels require it of the package."""
    pytest.importorskip("scikit_build_core", reason="only a build needs it")
    checkout = tmp_path / "checkout"
    for folder in (".", "distributions/cuda13"):
        (checkout / folder).mkdir(parents=True, exist_ok=True)
        for name in ("pyproject.toml", "README.md", "LICENSE", "AUTHORS"):
            if (ROOT / folder / name).exists():
                shutil.copy(ROOT / folder / name, checkout / folder)
    (checkout / "jax_bnar").mkdir()
    text = (ROOT / "jax_bnar/__init__.py").read_text()
    bumped, places = re.subn(
        r'^__version__ = ".*"$', '__version__ = "7.8.9"', text, flags=re.MULTILINE
    )
    assert places == 1
    (checkout / "jax_bnar/__init__.py").write_text(bumped)
    package, cuda = (metadata_of(checkout / folder) for folder in (".", "distributions/cuda13"))
    assert package["Version"] == cuda["Version"] == "7.8.9"
    assert cuda.get_all("Requires-Dist") == ["jax-bnar==7.8.9"]
    extra = [line for line in package.get_all("Requires-Dist", []) if "cuda13" in line]
    assert any(line.startswith("jax-bnar-cuda13;") for line in extra)


def test_a_release_has_the_version_of_its_tag() -> None:
    finished = subprocess.run(
        [sys.executable, ROOT / ".ci/make_dist.py", "--tag", "v7.8.9"],
        capture_output=True,
        text=True,
    )
    assert finished.returncode == 1
    version = jax_bnar.__version__
    assert f"tag is v7.8.9, but jax_bnar/__init__.py says version {version}" in finished.stderr
    assert f"tag v{version}" in finished.stderr


def metadata_of(checkout: pathlib.Path) -> email.message.Message:
    """What a wheel built there would say of itself."""
    program = """
import sys
from scikit_build_core.build import prepare_metadata_for_build_wheel
prepare_metadata_for_build_wheel(sys.argv[1])
"""
    output = checkout / "metadata"
    output.mkdir()
    subprocess.run([sys.executable, "-c", program, output], cwd=checkout, check=True)
    (metadata,) = output.glob("*.dist-info/METADATA")
    return email.message_from_string(metadata.read_text())


def test_distributions_are_built_alike() -> None:
    cuda = tomllib.loads((CUDA_DISTRIBUTION / "pyproject.toml").read_text())
    assert cuda["build-system"]["requires"] == BUILD_REQUIRES
    for key in ("requires-python", "license"):
        assert cuda["project"][key] == PROJECT["project"][key]
    assert (CUDA_DISTRIBUTION / "LICENSE").read_text() == (ROOT / "LICENSE").read_text()
    assert cuda["project"]["authors"] == PROJECT["project"]["authors"]


def test_ci_compiles_for_what_a_release_holds() -> None:
    """A kernel that spills registers on one architecture only would otherwise stop a release."""

    def found(pattern: str, path: str) -> str:
        match = re.search(pattern, (ROOT / path).read_text())
        assert match is not None, path
        return match[1]

    released = found(r"set\(CMAKE_CUDA_ARCHITECTURES (.*)\)", "cmake/CudaKernels.cmake").split()
    each_week = found(r"CUDAARCHS: (.*)", ".github/workflows/check.yml").split(";")
    each_change = found(r'CUDAARCHS="\$\{CUDAARCHS:-(.*)\}"', ".ci/run").split(";")
    assert each_week == released
    assert {each.removesuffix("-real") for each in each_change} == {"80", "90"}


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
    assert pythons == ["3.11", "3.12", "3.13", "3.14"]
    workflow = (ROOT / ".github/workflows/ci.yml").read_text()
    assert re.search(r"python: \[(.*)\]", workflow)[1].replace('"', "") == ", ".join(pythons)  # type: ignore[index]
    assert "urls" not in project


def test_no_message_installs_a_name_of_an_index() -> None:
    """The project is published nowhere yet, so its names on an index are anyone's."""
    # After a slash, it is the name of a file.
    named = re.compile(r"pip install [^`#\n]*(?<!/)\bjax[-_]bnar")
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
    workflows = (ROOT / ".github/workflows").glob("*.yml")
    commands = {
        path.stem: re.findall(r"^ +(?:- )?run: (.*)$", path.read_text(), re.MULTILINE)
        for path in workflows
    }
    assert {"make test", "make lint", "make docs"} <= set(commands["ci"])
    gate, *others = commands["check"]
    assert gate == ".ci/run"  # the gate of a change, as CONTRIBUTING.md says
    for line in [*others, *commands["ci"], *commands["release"]]:
        target = re.match(r"make (\w+)(?: |$)", line)
        assert target is not None, line
        assert re.search(rf"^{target[1]}:", makefile, re.MULTILINE), line


def test_make_does_not_run_another_python_than_it_is_told(tmp_path: pathlib.Path) -> None:
    for name, version in ((".venv/bin/python", "3.11"), ("same", "3.11"), ("newer", "3.13")):
        fake = tmp_path / name
        fake.parent.mkdir(parents=True, exist_ok=True)
        fake.write_text(f"#!/bin/sh\necho {version}\n")
        fake.chmod(0o755)

    def make(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["make", "-f", str(ROOT / "Makefile"), "--dry-run", *arguments],
            cwd=tmp_path, capture_output=True, text=True,
        )  # fmt: skip

    refused = make("venv", "PYTHON=./newer")
    assert refused.returncode == 2
    assert ".venv has Python 3.11, which ./newer is not" in refused.stderr
    assert make("venv", "PYTHON=./same").returncode == 0
    assert make("clean", "PYTHON=./newer").returncode == 0


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


def asked_for_requirements(
    path: pathlib.Path, before: str = "", settings: str = "", **variables: str
) -> subprocess.CompletedProcess[str]:
    """What the build backend answers pip, with `path` as PATH."""
    pytest.importorskip("scikit_build_core", reason="the backend wraps it")
    question = (
        f"{before}\nimport jax_bnar_build\n"
        f"print(jax_bnar_build.get_requires_for_build_wheel({settings}))"
    )
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("CMAKE", "CXX"))}
    return subprocess.run(
        [sys.executable, "-c", question],
        cwd=ROOT,
        env=inherited | {"PATH": str(path), "PYTHONPATH": str(ROOT / "cmake")} | variables,
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_a_missing_compiler_is_told_before_anything_is_downloaded(tmp_path: pathlib.Path) -> None:
    """pip asks the backend what else a build needs before it downloads jaxlib."""
    assert [specifiers([r]).keys() for r in PROJECT["build-system"]["requires"]] == [
        {"scikit-build-core"}
    ]
    without = asked_for_requirements(tmp_path)
    assert without.returncode != 0
    assert "a C++17 compiler, and none was found. Install g++" in without.stderr
    assert "Traceback" not in without.stderr
    named = asked_for_requirements(tmp_path, CXX="no-compiler -O2")
    assert "and CXX names no-compiler, which does not exist" in named.stderr

    compiler = tmp_path / "g++"
    compiler.write_text("#!/bin/sh\n")
    compiler.chmod(0o755)
    for answer in (
        asked_for_requirements(tmp_path),
        asked_for_requirements(tmp_path / "nothing", CMAKE_ARGS="-DCMAKE_CXX_COMPILER=/opt/c++"),
    ):
        assert answer.returncode == 0, answer.stderr
        assert all(repr(each) in answer.stdout for each in BUILD_REQUIRES[1:])


def test_missing_headers_of_python_are_told_before_anything_is_downloaded(
    tmp_path: pathlib.Path,
) -> None:
    """Debian's python3 comes without them, and `apt install g++` does not bring them."""
    path = pathlib.Path(PATH.split(os.pathsep)[0])
    compiler = {"CXX": sys.executable}  # any program that exists
    elsewhere = f"import sysconfig; sysconfig.get_config_var = lambda _: {str(tmp_path)!r}"
    elsewhere += f"; sysconfig.get_path = lambda *_: {str(tmp_path)!r}"
    without = asked_for_requirements(path, elsewhere, **compiler)
    assert without.returncode != 0
    message = f"needs Python's headers, and there is no Python.h in {tmp_path}. Install them"
    assert message in without.stderr
    assert "apt install python3-dev" in without.stderr
    assert "Traceback" not in without.stderr

    named = "{'cmake.define.Python_INCLUDE_DIR': '/opt/include'}"
    for answer in (
        asked_for_requirements(path, elsewhere, named, **compiler),
        asked_for_requirements(path, elsewhere, CMAKE_ARGS="-DPython_ROOT_DIR=/opt", **compiler),
        asked_for_requirements(path, **compiler),
    ):
        assert answer.returncode == 0, answer.stderr
