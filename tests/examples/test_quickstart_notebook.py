"""docs/notebooks/quickstart.ipynb runs from top to bottom, and shows what its text promises."""

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from checkout import ROOT

nbclient = pytest.importorskip("nbclient", reason="the notebook needs what jax-bnar[test] installs")
nbformat = pytest.importorskip("nbformat")
pytest.importorskip("ipykernel")

NOTEBOOK = ROOT / "docs" / "notebooks" / "quickstart.ipynb"


# Jupyter's client and the event loop of its kernel warn about each other; none of it is ours.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.slow
def test_the_notebook_runs() -> None:
    notebook: Any = nbformat.read(NOTEBOOK, as_version=4)
    assert all(not cell.get("outputs") for cell in notebook.cells), "commit it without outputs"
    from jupyter_client.kernelspec import KernelSpec
    from jupyter_client.manager import AsyncKernelManager

    class ThisPython(AsyncKernelManager):
        """The kernel of the Python that runs the tests, whatever is registered on the machine."""

        @property
        def kernel_spec(self) -> KernelSpec:
            command = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
            return KernelSpec(argv=command, language="python", display_name="tests")

    client = nbclient.NotebookClient(
        notebook, timeout=300, kernel_manager_class=ThisPython, resources={}
    )
    client.execute()
    texts = [
        "".join(
            output.get("text", "") + str(output.get("data", {}).get("text/plain", ""))
            for output in cell.get("outputs", [])
        )
        for cell in notebook.cells
    ]
    printed = "\n".join(texts)
    assert "(8, 16, 16, 32), (32,)" in printed
    assert "bn_add_relu [float32[8,16,16,32]]" in printed
    assert "fused: 1 place; refused: 0" in printed
    assert "residual" in texts[-1] or "z" in texts[-1]


@pytest.fixture
def install_cell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The cell that installs the package, in an empty folder of a machine that does not have it."""
    notebook: Any = nbformat.read(NOTEBOOK, as_version=4)
    (cell,) = (cell for cell in notebook.cells if "pip" in cell.source and cell.cell_type == "code")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    return cell.source


def test_it_says_what_to_upload(install_cell: str) -> None:
    with pytest.raises(FileNotFoundError, match="make dist"):
        exec(install_cell, {})


BUILT = "jax_bnar-1-cp312-abi3-linux.whl", "jax_bnar-1-cp311-cp311-linux.whl", "jax_bnar-1.tar.gz"


@pytest.mark.parametrize(
    ("names", "python", "chosen"),
    [
        (BUILT, (3, 11), "cp311-cp311-linux.whl"),
        (BUILT, (3, 13), "cp312-abi3-linux.whl"),
        (BUILT[1:], (3, 12), "jax_bnar-1.tar.gz"),
    ],
)
def test_it_installs_what_was_uploaded(
    install_cell: str,
    monkeypatch: pytest.MonkeyPatch,
    names: tuple[str, ...],
    python: tuple[int, ...],
    chosen: str,
) -> None:
    for name in names:
        Path(name).touch()
    monkeypatch.setattr(sys, "version_info", python)
    commands: list[list[str]] = []
    monkeypatch.setattr(subprocess, "run", lambda command, check: commands.append(command))
    exec(install_cell, {})
    ((*pip, archive),) = commands
    assert pip[:4] == [sys.executable, "-m", "pip", "install"]
    assert archive.startswith("./")
    assert archive.endswith(f"{chosen}[flax]")
