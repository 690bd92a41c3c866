"""What users see of a name: its module, its types, its documentation, and pickles of it."""

import inspect
import io
import json
import pickle
import pydoc
import shutil
import subprocess
import sys
import tempfile
import typing
from typing import Any, get_args

import jax
import native_build
import numpy as np
import pytest
from checkout import ROOT

import jax_bnar
import jax_bnar.checkpoint_policies
import jax_bnar.equinox_layers
import jax_bnar.flax_layers
import jax_bnar.haiku_layers
import jax_bnar.nnx_layers
import jax_bnar.ops
import jax_bnar.torch_weights
from jax_bnar._base.config import Save
from jax_bnar._base.implementation import Implementation

MODULES = (
    jax_bnar,
    jax_bnar.ops,
    jax_bnar.flax_layers,
    jax_bnar.nnx_layers,
    jax_bnar.equinox_layers,
    jax_bnar.haiku_layers,
    jax_bnar.torch_weights,
    jax_bnar.checkpoint_policies,
)
OPTIONS = {"save": Save, "implementation": Implementation}


def definitions(module: Any) -> dict[str, Any]:
    """The functions and classes of a public module by name."""
    named = {name: getattr(module, name) for name in module.__all__}
    return {n: o for n, o in named.items() if inspect.isfunction(o) or inspect.isclass(o)}


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_names_are_at_home_in_the_public_module(module: Any) -> None:
    found = definitions(module)
    assert found
    assert {name: o.__module__ for name, o in found.items()} == dict.fromkeys(
        found, module.__name__
    )
    assert sorted(module.__all__) == list(dict.fromkeys(sorted(module.__all__)))


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_nothing_public_is_left_out(module: Any) -> None:
    """A name without an underscore is listed, or is a module or an import for annotations."""
    ours = {
        name
        for name, o in vars(module).items()
        if not name.startswith("_") and str(getattr(o, "__module__", "")).startswith("jax_bnar")
    }
    assert ours <= set(module.__all__)


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_pickles_name_the_public_module(module: Any) -> None:
    for name, definition in definitions(module).items():
        pickled = pickle.dumps(definition, protocol=0)
        assert f"c{module.__name__}\n{name}\n".encode() in pickled
        assert pickle.loads(pickled) is definition


def test_results_survive_a_pickle() -> None:
    result = jax_bnar.bn_relu(np.ones((2, 3), np.float32), None, None)
    again = pickle.loads(pickle.dumps(jax.device_get(result)))
    assert type(again) is jax_bnar.BatchNormResult
    np.testing.assert_array_equal(again.mean, np.ones(3))


def test_help_lists_the_operators() -> None:
    text = pydoc.plain(pydoc.render_doc(jax_bnar))
    functions = text[text.index("FUNCTIONS") :]
    for name in ("bn_add_relu", "batch_norm_inference", "fuse", "explain", "benchmark"):
        assert f"\n    {name}(" in functions, name
    assert "show_public_names" not in text
    out = io.StringIO()
    pydoc.Helper(output=out).help(jax_bnar.bn_add_relu)
    assert "function bn_add_relu in module jax_bnar" in pydoc.plain(out.getvalue())


def test_options_have_the_types_of_their_values() -> None:
    """Type checkers and editors then know the values that an option takes."""
    assert get_args(Save) == ("y", "mask")
    seen = set()
    for module in MODULES:
        for name, definition in definitions(module).items():
            for option, annotation in typing.get_type_hints(
                definition.__init__ if inspect.isclass(definition) else definition
            ).items():
                if option in OPTIONS:
                    assert annotation == OPTIONS[option], f"{module.__name__}.{name}: {option}"
                    seen.add((module, option))
    assert {(jax_bnar, "save"), (jax_bnar.nnx_layers, "save")} <= seen
    assert {(module, "implementation") for module in MODULES[:6]} <= seen


@pytest.mark.slow
def test_type_checkers_know_which_names_there_are() -> None:
    """They would believe in every name if they saw the module's `__getattr__`."""
    pyright = shutil.which("pyright", path=native_build.PATH)
    if pyright is None:
        pytest.skip("pyright is not installed")
    # In the checkout, so that its sources are found.
    with tempfile.NamedTemporaryFile("w", suffix=".py", dir=ROOT / "tests") as file:
        file.write(
            "import jax_bnar\n"
            "jax_bnar.flax_layers.BatchNorm(use_running_average=False)\n"
            "jax_bnar.bn_ad_relu\n"
            'jax_bnar.bn_relu(1.0, None, None, save="yes")\n'
        )
        file.flush()
        command = [pyright, "--pythonpath", sys.executable, "--outputjson", file.name]
        finished = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    found = json.loads(finished.stdout)["generalDiagnostics"]
    assert [(one["range"]["start"]["line"], one["rule"]) for one in found] == [
        (2, "reportAttributeAccessIssue"),
        (3, "reportArgumentType"),
    ], found
