"""docs/notebooks/quickstart.ipynb runs from top to bottom, and shows what its text promises."""

import sys
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
