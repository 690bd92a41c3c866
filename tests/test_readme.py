"""The README's Python runs as it stands there."""

import pathlib
import re

from subprocesses import run_python

README = pathlib.Path(__file__).parent.parent / "README.md"


def test_snippets_run() -> None:
    snippets = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert len(snippets) == 2
    ends = "print(y.shape, dx.shape)"
    assert run_python("\n".join([*snippets, ends]), timeout=300) == (
        "(2, 56, 56, 256) (16, 56, 56, 256)\n"
    )
