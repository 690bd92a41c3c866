"""Decodes a picture file to the square crop that the network sees, with Pillow."""

import io
import math
import pathlib
import struct
from typing import Final

import numpy as np
from PIL import Image

from resnet50.data.pictures import UnreadablePictureError

Box = tuple[float, float, float, float]

# Fraction of the shorter side. Published accuracies at 224 resize to 256 and crop 224.
CENTRE_CROP: Final = 224 / 256
_AREA: Final = (0.08, 1.0)
_LOG_RATIO: Final = (math.log(3 / 4), math.log(4 / 3))
_ATTEMPTS: Final = 10
# What Pillow raises for files that are truncated, damaged, not pictures at all, or absurdly large.
_DAMAGE: Final = (
    OSError,
    SyntaxError,
    ValueError,
    EOFError,
    IndexError,
    struct.error,
    Image.DecompressionBombError,
    Image.DecompressionBombWarning,
)


def random_resized_crop(
    path: pathlib.Path, size: int, generator: np.random.Generator
) -> np.ndarray:
    """A random crop of the picture, flipped with probability 1/2: Inception's augmentation.

    The crop has 8 % to 100 % of the area and an aspect ratio of 3:4 to 4:3 (Szegedy et al. 2015;
    sampled as in torchvision).

    Returns:
        uint8, (size, size, 3).
    """
    square = _read(path, size, lambda width, height: random_box(width, height, generator))
    return np.ascontiguousarray(square[:, ::-1]) if generator.random() < 0.5 else square


def centre_crop(path: pathlib.Path, size: int) -> np.ndarray:
    """The centre of the picture, uint8, (size, size, 3)."""
    return _read(path, size, centre_box)


def random_box(width: int, height: int, generator: np.random.Generator) -> Box:
    for _ in range(_ATTEMPTS):
        area = width * height * generator.uniform(*_AREA)
        ratio = math.exp(generator.uniform(*_LOG_RATIO))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            left, top = generator.integers(width - w + 1), generator.integers(height - h + 1)
            return float(left), float(top), float(left + w), float(top + h)
    # No crop fits into an extremely long picture: take its middle, with the nearest allowed ratio.
    ratio = min(max(width / height, 3 / 4), 4 / 3)
    return _middle(width, height, min(width, height * ratio), min(height, width / ratio))


def centre_box(width: int, height: int) -> Box:
    side = min(width, height) * CENTRE_CROP
    return _middle(width, height, side, side)


def _middle(width: int, height: int, w: float, h: float) -> Box:
    left, top = (width - w) / 2, (height - h) / 2
    return left, top, left + w, top + h


def _with_bytes(image: Image.Image) -> Image.Image:
    """The picture in 8 bits. Pillow clips greyscale of 16 bits to white instead of scaling it."""
    if not image.mode.startswith("I"):
        return image
    return Image.fromarray((np.asarray(image).clip(0, 65535) >> 8).astype(np.uint8))


def _read(path: pathlib.Path, size: int, choose_box) -> np.ndarray:
    try:
        # Read the file in one go, so that there is one request to a slow file system.
        with Image.open(io.BytesIO(path.read_bytes())) as image:
            width, height = image.size
            box = choose_box(width, height)
            # Decoding a JPEG at 1/2, 1/4 or 1/8 is cheaper; Pillow never goes below this size.
            scale = max(size / (box[2] - box[0]), size / (box[3] - box[1]))
            image.draft("RGB", (math.ceil(width * scale), math.ceil(height * scale)))
            shrunk = (image.width / width, image.height / height) * 2
            box = tuple(edge * factor for edge, factor in zip(box, shrunk, strict=True))
            rgb = _with_bytes(image).convert("RGB")
            square = rgb.resize((size, size), Image.Resampling.BILINEAR, box=box)
            return np.asarray(square, np.uint8)
    except _DAMAGE as error:
        reason = str(error).partition("\n")[0].partition(" <_io")[0]
        raise UnreadablePictureError(
            f"the picture {path} cannot be read ({type(error).__name__}: {reason})"
        ) from error
