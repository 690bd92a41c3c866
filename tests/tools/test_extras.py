"""Each extra, installed alone, brings what its part of the project imports.

Nothing is installed for that. A process hides every package that the extra, and what it depends on,
would not have brought, and then imports all modules of that part.
"""

import ast
import importlib.metadata
import json
import pathlib
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable

import pytest
from checkout import ROOT
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

pytestmark = [pytest.mark.one_python, pytest.mark.slow]

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]

# What uses an extra: packages of the project, and folders of programs with their search path.
FOLDERS = {
    "demo": ["examples/digits"],
    "resnet50": ["examples/resnet50"],
    "bench": ["benchmarks/common", "benchmarks/figures", "benchmarks/network", "benchmarks/sites"],
    "profile": ["jax_bnar/profile"],
    "weights": [],
    "flax": [],
    "equinox": [],
    "haiku": [],
}
# Imported by programs only if the user asks for what they do, or has them anyway.
OPTIONAL = {
    "torch": "a peer, or the format of PyTorch's weights",
    "torchvision": "a peer",
    "haiku": "a model of benchmarks that says how to install it",
    "equinox": "a model of benchmarks that says how to install it",
    "keras": "a model of benchmarks that says how to install it, and a peer",
    "tensorflow": "a peer",
    "paddle": "a peer",
}
PROGRAMS = {
    "flax": """
        import jax_bnar.flax_layers, jax_bnar.nnx_layers
    """,
    "equinox": "import jax_bnar.equinox_layers",
    "haiku": "import jax_bnar.haiku_layers",
    "weights": """
        import numpy as np, tempfile
        from safetensors.numpy import save_file
        from jax_bnar import torch_weights
        with tempfile.NamedTemporaryFile(suffix=".safetensors") as file:
            save_file({"fc.bias": np.ones(3, np.float32)}, file.name)
            assert torch_weights.read(file.name).keys() == {"fc.bias"}
    """,
    "resnet50": """
        import jax, jax.export
        # As export.py does: JAX imports flatbuffers only then.
        program = jax.export.export(jax.jit(lambda x: 2 * x))(jax.ShapeDtypeStruct((2,), "float32"))
        assert jax.export.deserialize(program.serialize()).in_avals
    """,
}
HIDE = """
import importlib, importlib.util, json, runpy, sys, textwrap
hidden, path, modules, program = json.loads(sys.argv[1])

# None in sys.modules would hide a module, too, but some packages look there to see whether PyTorch
# has been loaded, and use what they find.
class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in hidden:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

# Packages that ask whether another one is there expect an answer, not an error.
find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: (
    None if name.partition(".")[0] in hidden else find_spec(name, package)
)
sys.meta_path.insert(0, Hidden())
sys.path[:0] = path
for name in modules:
    importlib.import_module(name)
exec(textwrap.dedent(program))
"""


def brought_by(requirements: Iterable[str]) -> set[str]:
    """The distributions that are installed with these requirements."""
    brought: set[str] = set()
    seen: set[tuple[str, str]] = set()
    due = [(Requirement(text), "") for text in requirements]
    while due:
        requirement, extra = due.pop()
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
            continue
        name = canonicalize_name(requirement.name)
        brought.add(name)
        try:
            needs = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            pytest.skip(f"{name} is not installed")
        for extra_of_it in {"", *requirement.extras} - {e for n, e in seen if n == name}:
            seen.add((name, extra_of_it))
            due += [(Requirement(text), extra_of_it) for text in needs]
    return brought


def visible_modules(extra: str) -> tuple[set[str], set[str]]:
    """The top-level modules that are there with the extra alone, and all others."""
    brought = brought_by([*PROJECT["dependencies"], *EXTRAS[extra]]) | {"jax-bnar"}
    there, hidden = set(), set()
    for module, owners in importlib.metadata.packages_distributions().items():
        owned = {canonicalize_name(owner) for owner in owners}
        (there if owned & brought else hidden).add(module)
    return there, hidden - {"jax_bnar", "_distutils_hack", "distutils-precedence"}


def sources(extra: str) -> list[pathlib.Path]:
    return sorted(path for folder in FOLDERS[extra] for path in (ROOT / folder).rglob("*.py"))


def modules(extra: str) -> tuple[list[str], list[str]]:
    """The search path, and the names of the modules in the folders, of an extra."""
    path, names = [str(ROOT)], []
    for source in sources(extra):
        if source.relative_to(ROOT).parts[0] == "examples":
            root = ROOT / "examples" / source.relative_to(ROOT).parts[1]
            path += [str(root)] if str(root) not in path else []
        else:
            root = ROOT
        parts = source.relative_to(root).with_suffix("").parts
        # __main__ runs when it is imported, and the peers of a benchmark are optional.
        if parts[-1] != "__main__" and not needs_optional(source):
            names.append(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    return path, names


def needs_optional(source: pathlib.Path) -> bool:
    """Whether a file, or one beside it that it imports, imports an optional package at its top."""
    beside = {path.stem: path for path in source.parent.glob("*.py")}
    nodes = [
        node for node in ast.parse(source.read_text()).body if isinstance(node, ast.ImportFrom)
    ]
    names = {alias.name for node in nodes for alias in node.names}
    names |= {(node.module or "").rpartition(".")[2] for node in nodes}
    files = [source, *(beside[name] for name in names & beside.keys())]
    return any(OPTIONAL.keys() & imported(path, at_top=True) for path in files)


def imported(source: pathlib.Path, at_top: bool = False) -> set[str]:
    """The top-level modules that a file imports, in functions too unless `at_top`."""
    tree = ast.parse(source.read_text())
    found = set()
    for node in tree.body if at_top else ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.split(".")[0])
    return found


def test_every_extra_of_users_is_tried() -> None:
    others = {
        "cuda13": "its kernels need a GPU; .ci/version_matrix installs the distribution",
        "gpu-compiler": "XLA calls it; the tests have it from make .venv/gpu-compiler",
        "test": "the tests import all of it; .ci/run runs them with it alone",
        "dist": "programs that .ci/make_dist.py calls",
        "docs": "the program that make docs calls",
        "lint": "the programs that make lint calls",
    }
    assert {*FOLDERS, *others} == set(EXTRAS)


@pytest.mark.parametrize("extra", FOLDERS)
def test_modules_load_with_the_extra_alone(extra: str) -> None:
    _, hidden = visible_modules(extra)
    path, names = modules(extra)
    given = json.dumps([sorted(hidden), path, names, PROGRAMS.get(extra, "")])
    finished = subprocess.run(
        [sys.executable, "-c", HIDE, given], capture_output=True, text=True, timeout=300
    )
    assert finished.returncode == 0, f"pip install 'jax-bnar[{extra}]' alone: {finished.stderr}"


@pytest.mark.parametrize("extra", [name for name in FOLDERS if FOLDERS[name]])
def test_what_functions_import_comes_with_the_extra(extra: str) -> None:
    there, _ = visible_modules(extra)
    local = {path.stem for path in sources(extra)} | {path.parent.name for path in sources(extra)}
    known = there | local | OPTIONAL.keys() | sys.stdlib_module_names
    known |= {"jax_bnar", "benchmarks"}
    missing = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in sources(extra)
        for name in sorted(imported(path) - known)
    ]
    assert missing == []


def test_a_missing_requirement_is_noticed() -> None:
    """flatbuffers is imported by JAX, and only when a program is serialised."""
    _, hidden = visible_modules("resnet50")
    given = json.dumps([[*hidden, "flatbuffers"], [], [], PROGRAMS["resnet50"]])
    finished = subprocess.run([sys.executable, "-c", HIDE, given], capture_output=True, text=True)
    assert finished.returncode != 0
    assert re.search(r"flatbuffers", finished.stderr)
