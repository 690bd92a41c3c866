"""Exports a trained network to one file that runs without this program, Flax or the checkpoint.

    python examples/resnet50/export.py runs/resnet50 resnet50.jax

BatchNorm is folded into the convolutions, unless --no-fold is given. The program prints the lines
of Python that run the file.
"""

import dataclasses
import json
import pathlib
import sys

import jax
import numpy as np
import tyro
from jax import export
from resnet50 import devices, errors, runs
from resnet50.config import OptionalInt, OptionalNorm, Platform

import jax_bnar


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Export a trained network with its variables to one file for jax.export.deserialize."""

    run: tyro.conf.Positional[pathlib.Path]
    """Output folder of train.py."""
    output: tyro.conf.Positional[pathlib.Path]
    """File to write; OUTPUT.json next to it describes its classes and the shape of its images."""
    platforms: tuple[str, ...] = ("cpu",)
    """Platforms that the file can run on: cpu, cuda, rocm, tpu."""
    norm: OptionalNorm = None
    """Use another BatchNorm than in training; with "flax" the file runs without jax_bnar."""
    fold: bool = True
    """Fold BatchNorm into the convolutions: equal up to rounding."""
    step: OptionalInt = None
    """Step of the checkpoint; the last one by default."""
    platform: Platform = "auto"
    """Platform to check the file on, if it is one of --platforms."""


_PLATFORMS = ("cpu", "cuda", "rocm", "tpu")


def main(arguments: Arguments) -> None:
    unknown = [name for name in arguments.platforms if name not in _PLATFORMS]
    if unknown or not arguments.platforms:
        raise errors.UserError(
            f"--platforms must be some of {', '.join(_PLATFORMS)}, got"
            f" {', '.join(unknown) or 'none'}."
        )
    devices.start(arguments.platform)
    trained = runs.load(arguments.run, arguments.step, arguments.norm)
    exported = trained.folded() if arguments.fold else trained
    logits_function = exported.logits_function()

    @jax.jit
    def logits(images: jax.Array) -> jax.Array:
        return logits_function(exported.variables, images)

    height, width, channels = trained.image_shape
    images = jax.ShapeDtypeStruct(
        export.symbolic_shape(f"batch, {height}, {width}, {channels}"), np.uint8
    )
    try:
        program = export.export(
            logits,
            platforms=arguments.platforms,
            disabled_checks=jax_bnar.DISABLED_EXPORT_CHECKS,
        )(images)
    except (ValueError, NotImplementedError) as error:
        raise errors.UserError(
            f"the network cannot be exported for {', '.join(arguments.platforms)}"
            f" ({errors.first_line(error)})."
        ) from error
    try:
        _write(arguments.output, bytes(program.serialize()), trained)
    except OSError as error:
        raise errors.UserError(
            f"{arguments.output} cannot be written ({error.strerror})."
        ) from error
    size = arguments.output.stat().st_size / 2**20
    text = f"wrote {arguments.output} ({size:.1f} MiB, {', '.join(arguments.platforms)})"
    here = "cuda" if jax.default_backend() == "gpu" else jax.default_backend()
    if here in arguments.platforms:
        difference, largest = _difference(arguments.output, trained)
        text += (
            f"; on {here} its logits differ by at most {difference:.2g} (the largest is"
            f" {largest:.2g}) from those of the network as trained"
        )
    print(f"{text}\n\n{how_to_run(arguments.output, trained)}")


def how_to_run(path: pathlib.Path, trained: runs.Trained) -> str:
    """A program that loads the file and calls it."""
    kernels = "" if trained.model.norm == "flax" else "import jax_bnar  # brings the kernels\n"
    shape = (1, *trained.image_shape)
    return (
        "To run it:\n\n"
        "import pathlib\n"
        "import numpy as np\n"
        "from jax import export\n"
        f"{kernels}"
        f"program = export.deserialize(bytearray(pathlib.Path({str(path)!r}).read_bytes()))\n"
        f"images = np.zeros({shape}, np.uint8)  # any number of them\n"
        "logits = program.call(images)"
    )


def _write(path: pathlib.Path, program: bytes, trained: runs.Trained) -> None:
    """Writes atomically: a file truncated by a full disk would otherwise replace a good one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    try:
        temporary.write_bytes(program)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    about = {"classes": trained.classes, "image_shape": trained.image_shape, "step": trained.step}
    path.with_name(path.name + ".json").write_text(json.dumps(about, indent=1) + "\n")


def _difference(path: pathlib.Path, trained: runs.Trained) -> tuple[float, float]:
    """The largest difference between the file's logits and the network's, and the largest logit.

    Both are for noise as input.
    """
    images = np.random.default_rng(0).integers(0, 256, (3, *trained.image_shape), np.uint8)
    program = export.deserialize(bytearray(path.read_bytes()))
    logits = jax.jit(trained.logits_function())(trained.variables, images)
    return float(abs(program.call(images) - logits).max()), float(abs(logits).max())


if __name__ == "__main__":
    sys.exit(errors.run(lambda: main(tyro.cli(Arguments))))
