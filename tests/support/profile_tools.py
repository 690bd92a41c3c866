"""What the tests of `python -m jax_bnar.profile` share."""

import json
import pathlib
from typing import Any

import pytest

from jax_bnar.profile import __main__ as command
from jax_bnar.profile._analysis import Summary, summarise
from jax_bnar.profile._file import read

# MegEngine's profile of ResNet-50 (float32, NCHW, batch 10), without the parts that are not read.
DATA = pathlib.Path(__file__).parents[1] / "data" / "megengine_resnet50_profile.json"


def summary(path: pathlib.Path, **keywords: Any) -> Summary:
    return summarise(read(path), top=10, **keywords)


def written(folder: pathlib.Path, document: Any) -> pathlib.Path:
    path = folder / "profile.json"
    path.write_text(document if isinstance(document, str) else json.dumps(document))
    return path


def failure(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Runs a call that fails, and returns the one sentence that it prints."""
    assert command.main(list(arguments)) == 1
    shown = capsys.readouterr()
    assert shown.out == ""
    (line,) = shown.err.splitlines()
    assert line.endswith((".", ")", "'"))
    return line
