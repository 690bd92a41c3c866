"""The command: `python -m jax_bnar.profile [FILE ...] [--emit FILE]`."""

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jax_bnar._base import command
from jax_bnar.profile._analysis import Summary, summarise
from jax_bnar.profile._file import ProfileError, read

_EXTRA = "pip install flax matplotlib rich"


def main(arguments: Sequence[str] | None = None) -> int:
    return command.run(_NAME, lambda: _main(arguments))


def _main(arguments: Sequence[str] | None) -> int:
    parser = _parser()
    options = parser.parse_args(arguments)
    idle = [name for name in _OF_EMIT if getattr(options, name) != parser.get_default(name)]
    if idle and options.emit is None:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in idle)
        print(f"{_NAME}: without --emit FILE there is no use for {flags}.", file=sys.stderr)
        return 2
    if not options.files and options.emit is None:
        print(f"{_NAME}: give a profile to show, or --emit FILE to write one.", file=sys.stderr)
        return 2
    try:
        if options.picture is not None:
            _check_picture(options.picture)
        files = list(options.files)
        if options.emit is not None:
            _emit(options)
            files.append(options.emit)
        bandwidth = None if options.bandwidth is None else options.bandwidth * 1e9
        summaries = [summarise(read(f), top=options.top, bytes_per_s=bandwidth) for f in files]
        if options.picture is not None:
            _draw(summaries, options.picture)
        _show(summaries, as_json=options.json)
    except ProfileError as error:
        return _failed(str(error))
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("jax_bnar"):
            raise
        return _failed(f"the package {error.name} is missing: {_EXTRA}")
    return 0


_NAME = "python -m jax_bnar.profile"
# The options that say what to run.
_OF_EMIT = ("batch", "size", "dtype", "train", "norm", "steps", "stage_sizes")
_PICTURES = (".svg", ".png", ".pdf")


def _failed(sentence: str) -> int:
    print(f"{_NAME}: {sentence}", file=sys.stderr)
    return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=_NAME,
        description="Shows which operators of a network take its time and move its bytes. It reads"
        " profiles in the JSON format of MegEngine's GraphProfiler, and shows several files side by"
        " side. With --emit it first runs ResNet-50 with the kernels of this package and writes a"
        " profile of it.",
    )
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE", help="profiles to show")
    parser.add_argument(
        "--top",
        type=_count,
        default=10,
        metavar="N",
        help="how many of the longest operators to list (%(default)s)",
    )
    parser.add_argument(
        "--bandwidth",
        type=_gigabytes_per_s,
        metavar="GB/S",
        help="memory bandwidth of the device; the default is that in the file, or else that of the"
        " fastest operator",
    )
    parser.add_argument("--json", action="store_true", help="print the summaries as one JSON array")
    parser.add_argument(
        "--picture",
        type=Path,
        metavar="FILE",
        help="also draw the summary; the suffix selects svg, png or pdf",
    )
    emit = parser.add_argument_group("to write a profile")
    emit.add_argument(
        "--emit", type=Path, metavar="FILE", help="run ResNet-50 and write its profile"
    )
    emit.add_argument("--batch", type=_count, default=10, help="images per batch (%(default)s)")
    emit.add_argument(
        "--size", type=_count, default=224, help="height and width of the images (%(default)s)"
    )
    emit.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    emit.add_argument(
        "--train", action="store_true", help="profile a training step instead of inference"
    )
    emit.add_argument(
        "--norm",
        choices=("fused", "flax"),
        default="fused",
        help="the layers of this package (folded for inference), or flax.linen.BatchNorm",
    )
    emit.add_argument(
        "--steps",
        type=_count,
        default=5,
        help="number of runs, whose median time is stored (%(default)s)",
    )
    emit.add_argument(
        "--stage-sizes",
        type=_count,
        nargs="+",
        default=[3, 4, 6, 3],
        metavar="N",
        help="number of blocks in each stage (3 4 6 3)",
    )
    return parser


def _check_folder(path: Path) -> None:
    """Refuses a file that cannot be written, before minutes are spent on what would be in it."""
    folder = path.absolute().parent
    if not folder.is_dir():
        raise ProfileError(f"{path}: the folder {folder} does not exist.")


def _check_picture(path: Path) -> None:
    _check_folder(path)
    if path.suffix.lower() not in _PICTURES:
        raise ProfileError(
            f"{path}: the suffix of a picture must be one of {', '.join(_PICTURES)}, got"
            f" {path.suffix!r}."
        )


def _emit(options: argparse.Namespace) -> None:
    _check_folder(options.emit)
    from jax_bnar.profile._emit import emit
    from jax_bnar.profile._resnet50 import Settings

    settings = Settings(
        batch=options.batch,
        size=options.size,
        dtype=options.dtype,
        train=options.train,
        norm=options.norm,
        steps=options.steps,
        stage_sizes=tuple(options.stage_sizes),
    )
    emit(settings, options.emit)


def _show(summaries: Sequence[Summary], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps([_plain(summary) for summary in summaries], indent=1, allow_nan=False))
        return
    from rich.console import Console

    from jax_bnar.profile._tables import show

    console = Console()
    if not console.is_terminal:
        console = Console(width=max(200, console.width))
    show(summaries, console)


def _plain(summary: Summary) -> dict[str, Any]:
    """The summary as plain values, without the details of single operators."""
    plain = dataclasses.asdict(dataclasses.replace(summary, reached=()))
    del plain["reached"]
    plain["pairs"] = [[pair.first.identifier, pair.second.identifier] for pair in summary.pairs]
    plain["longest"] = [operator.identifier for operator, _, _ in summary.longest]
    return plain


def _draw(summaries: Sequence[Summary], path: Path) -> None:
    from jax_bnar.profile._picture import draw

    try:
        draw(summaries, path)
    except OSError as error:
        raise ProfileError(f"{path}: the picture cannot be written ({error.strerror}).") from None


def _count(text: str) -> int:
    value = int(text) if text.isdecimal() else 0
    if not 1 <= value <= 1_000_000:
        raise argparse.ArgumentTypeError(f"expected a number from 1 to 1000000, got {text}")
    return value


def _gigabytes_per_s(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e9:
        raise argparse.ArgumentTypeError(f"expected a number above 0 and below 1e9, got {text}")
    return value


if __name__ == "__main__":
    sys.exit(main())
