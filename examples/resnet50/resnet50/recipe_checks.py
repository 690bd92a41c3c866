"""Refuses options whose values make no sense, before any time is spent on them."""

import math
import pathlib
from typing import Any

from resnet50.config import Config
from resnet50.errors import UserError

_AT_LEAST = {
    "image_size": 1,
    "synthetic_images": 1,
    "synthetic_classes": 1,
    "seed": 0,
    "workers": 0,
    "warmup_epochs": 0.0,
    "weight_decay": 0.0,
    "checkpoint_every": 1,
    "keep_checkpoints": 1,
    "log_every": 1,
    "profile_at": 0,
    "profile_steps": 1,
}
_POSITIVE = ("epochs", "learning_rate")
_UP_TO_ONE = ("bn_momentum",)
_BELOW_ONE = ("momentum", "label_smoothing", "ema_decay")


def check(config: Config) -> None:
    """Refuses a number outside of its range, and a folder of pictures for another source.

    Raises:
        UserError: names the option, the range and the value.
    """
    check_images(config.source, config.data.images)
    groups: tuple[Any, ...] = (config.data, config.model, config.training, config.run)
    given = {name: value for group in groups for name, value in vars(group).items()}
    for name, least in _AT_LEAST.items():
        if given[name] is not None and not least <= given[name] < math.inf:
            _refuse(name, f"be at least {least:g}", given[name])
    for name in _POSITIVE:
        if not 0 < given[name] < math.inf:
            _refuse(name, "be positive", given[name])
    # Infinity means that only the end is evaluated.
    if not given["evaluate_every"] > 0:
        _refuse("evaluate_every", "be positive", given["evaluate_every"])
    for name in _UP_TO_ONE:
        if not 0 <= given[name] <= 1:
            _refuse(name, "be from 0 to 1", given[name])
    for name in _BELOW_ONE:
        if not 0 <= given[name] < 1:
            _refuse(name, "be at least 0 and below 1", given[name])
    output = str(config.run.output.absolute())
    if "[" in output:
        raise UserError(
            f"the path of --output must not contain '[', got {output}: orbax, which writes the"
            " checkpoints, takes it for a pattern, and they could not be read."
        )


def check_images(source: str, images: pathlib.Path | None) -> None:
    """Refuses a folder that would be ignored."""
    if images is not None and source != "folder":
        raise UserError(
            f"--images {images} can only be used with pictures in a folder; the source is {source}."
        )


def _refuse(name: str, must: str, value: float) -> None:
    raise UserError(f"--{name.replace('_', '-')} must {must}, got {value:g}.")
