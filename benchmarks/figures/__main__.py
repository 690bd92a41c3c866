"""Draws all figures of the README and docs from the results in benchmarks/results.

python -m benchmarks.figures
"""

import functools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import tyro

from benchmarks.figures import gpu_compiled, gpu_model, network, passes, sizes, theme
from benchmarks.sites import plot

ROOT: Final = Path(__file__).parents[2]
RESULTS: Final = ROOT / "benchmarks" / "results"
IMAGES: Final = ROOT / "docs" / "images"


def draw_all(folder: Path) -> Iterator[Path]:
    """Draws all figures and yields their paths."""
    sites = _read("cpu-zen4-2core-avx512bf16-jemalloc.json")
    step = _read("resnet50-step-cpu-zen4-2core-default.json")
    compile_time = _read("compile-time-cpu-xeon-2core-default.json")
    by_size = _read("sizes-cpu-xeon-2core-default.json")
    on_a_gpu = _read("gpu-model-h200.json")
    for_a_gpu = _read("gpu-compiled.json")
    pictures: tuple[tuple[str, tuple[float, float], theme.Draw], ...] = (
        ("passes", (7, 4), passes.draw),
        ("sites", (9, 7.5), lambda figure: plot.draw(figure, sites["runs"], _machine(sites))),
        ("sizes", (9, 6), functools.partial(sizes.draw, document=by_size)),
        ("step", (9.5, 3.4), functools.partial(network.draw_step, document=step)),
        (
            "compile-time",
            (5, 3),
            functools.partial(network.draw_compile_time, document=compile_time),
        ),
        ("gpu-model", (10, 4.5), functools.partial(gpu_model.draw, document=on_a_gpu)),
        ("gpu-compiled", (11, 3.6), functools.partial(gpu_compiled.draw, document=for_a_gpu)),
    )
    for name, size, draw in pictures:
        yield from theme.save(folder, name, size, draw)


def _read(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / name).read_text())


def _machine(document: dict[str, Any]) -> str:
    return theme.machine_of(document["environment"])


def main(arguments: Sequence[str] | None = None) -> None:
    tyro.cli(_draw, args=arguments, description=__doc__)


def _draw(folder: Path = IMAGES) -> None:
    for path in draw_all(folder):
        print(f"wrote {path.relative_to(ROOT) if path.is_relative_to(ROOT) else path}")


if __name__ == "__main__":
    main()
