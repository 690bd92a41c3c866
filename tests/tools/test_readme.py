"""The Python code in the README runs unchanged."""

import re

import pytest
from checkout import ROOT
from subprocesses import run_python

README = ROOT / "README.md"


@pytest.mark.slow
def test_snippets_run() -> None:
    snippets = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert len(snippets) == 3
    ends = "print(y.shape, dx.shape)"
    report, advice, shapes = run_python("\n".join([*snippets, ends]), timeout=300).splitlines()
    assert advice.startswith("next: ")
    assert "bn_add_relu [float64[16,56,56,256]]" in report  # float64, as conftest enables x64
    assert shapes == "(16, 56, 56, 256) (16, 56, 56, 256)"
