"""The pictures in docs/images are those that `make figures` draws from the committed results."""

import re
from pathlib import Path

import pytest
from checkout import ROOT

for _package in ("flax", "matplotlib", "rich", "tyro"):
    pytest.importorskip(_package)

from benchmarks.figures.__main__ import draw_all  # noqa: E402
from benchmarks.figures.passes import FUSED, LAYERS, count  # noqa: E402

pytestmark = pytest.mark.one_python

IMAGES = ROOT / "docs" / "images"


def texts(picture: Path) -> list[str]:
    """The texts in a picture, which Matplotlib writes as comments next to the glyphs."""
    return re.findall(r"<!-- (.*?) -->", picture.read_text())


@pytest.mark.slow
def test_committed_pictures_are_drawn_from_the_committed_results(tmp_path: Path) -> None:
    """Compares numbers and labels only, because glyphs depend on the version of Matplotlib."""
    drawn = list(draw_all(tmp_path))
    assert {path.name for path in drawn} == {path.name for path in IMAGES.glob("*-*.svg")}
    for path in drawn:
        assert texts(path) == texts(IMAGES / path.name), path.name
        assert texts(path)


def test_every_picture_is_shown_somewhere() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    shown = {
        name for page in pages for name in re.findall(r"images/([\w-]+\.svg)", page.read_text())
    }
    assert shown == {path.name for path in IMAGES.glob("*.svg")}


def test_tensors_that_cross_memory() -> None:
    assert {name: count(kernels) for name, kernels in LAYERS.items()} == {
        "forward": 8,
        "backward": 8,
    }
    assert {name: count(kernels) for name, kernels in FUSED.items()} == {
        "forward": 4,
        "backward": 7,
    }
