"""Orbax checkpoints that are written completely or not at all; the last good one is read back.

Saving is synchronous: it costs about a second of the minutes between checkpoints, and errors are
raised where they happen.
"""

import pathlib
import shutil
from typing import Any, Final, NamedTuple

import jax
import orbax.checkpoint as ocp
from absl import logging

from resnet50.config import model_from_json
from resnet50.display import Display
from resnet50.errors import UserError, first_line
from resnet50.train_state import TrainState

FORMAT: Final = 1
# The network's fields that determine whether its variables fit and what they mean.
_ARCHITECTURE: Final = ("stage_sizes", "num_filters", "stem", "padding")


class Restored(NamedTuple):
    step: int
    state: TrainState
    data: dict[str, Any]
    """The state of the pipeline."""


class Checkpoints:
    """The checkpoints of a run, in `folder`/checkpoints.

    Args:
        folder: the output folder of the run.
        keep: how many checkpoints to keep; None opens them read-only.
        about: what eval.py and others need to know about the run, as plain values.
    """

    def __init__(
        self, folder: pathlib.Path, keep: int | None = None, about: dict[str, Any] | None = None
    ) -> None:
        self._root = folder.absolute() / "checkpoints"
        self._damaged = folder.absolute() / "damaged"
        self._about = {"format": FORMAT, **(about or {})}
        # orbax logs warnings about options that are set here on purpose.
        logging.set_verbosity(logging.ERROR)
        self._manager: Any = ocp.CheckpointManager(
            self._root,
            options=ocp.CheckpointManagerOptions(
                max_to_keep=keep,
                enable_async_checkpointing=False,
                cleanup_tmp_directories=keep is not None,
                read_only=keep is None,
                create=keep is not None,
            ),
        )

    def steps(self) -> list[int]:
        return sorted(self._manager.all_steps())

    def save(self, step: int, state: TrainState, data: dict[str, Any]) -> str | None:
        """Saves a checkpoint and returns None, or a sentence that says why it could not be saved.

        Earlier checkpoints are not affected by a failure.
        """
        args = ocp.args.Composite(
            state=ocp.args.PyTreeSave(state),
            data=ocp.args.JsonSave(data),
            about=ocp.args.JsonSave(self._about),
        )
        try:
            self._manager.save(step, args=args, force=True)
        # Whatever went wrong, hours of training must not be lost because of one checkpoint.
        except Exception as error:
            self._remove_unfinished(step)
            return (
                f"the checkpoint of step {step} could not be saved: {_reason(error)};"
                f" {self._last_good()}"
            )
        return None

    def restore(self, target: TrainState, display: Display) -> Restored | None:
        """The last checkpoint that can be read, or None if there are no checkpoints.

        Args:
            target: shapes, dtypes and shardings of the state.
            display: shows messages about unreadable checkpoints, which are moved aside.

        Raises:
            UserError: a checkpoint belongs to another network, or none of them can be read.
        """
        steps = self.steps()
        for step in reversed(steps):
            about = self.about(step)
            if about is not None:
                self._require_same_network(step, about)
                try:
                    restored = self._manager.restore(
                        step,
                        args=ocp.args.Composite(
                            state=_restore_args(target), data=ocp.args.JsonRestore()
                        ),
                    )
                    return Restored(step, TrainState(*restored.state), restored.data)
                # orbax and tensorstore raise many kinds of exceptions for a damaged file.
                except Exception as error:
                    reason = first_line(error)
            else:
                reason = "its description is missing"
            display.warn(
                f"the checkpoint of step {step} cannot be read ({reason}); it is moved to"
                f" {self._damaged}, and the previous one is used"
            )
            self._put_aside(step)
        if steps:
            raise UserError(
                f"none of the {len(steps)} checkpoints in {self._root} can be read; they were moved"
                f" to {self._damaged}, so that a new run can begin."
            )
        return None

    def variables(self, step: int, target: dict[str, Any]) -> dict[str, Any]:
        """Reads only a part of the state, such as {"params": ..., "batch_stats": ...}."""
        try:
            restored = self._manager.restore(
                step, args=ocp.args.Composite(state=_restore_args(target, partial=True))
            )
        except Exception as error:
            raise UserError(
                f"the checkpoint of step {step} in {self._root} cannot be read"
                f" ({first_line(error)}); choose another with --step, from {self.steps()}."
            ) from error
        return restored.state

    def about(self, step: int) -> dict[str, Any] | None:
        """The description of the run, or None if it cannot be read."""
        try:
            restored = self._manager.restore(
                step, args=ocp.args.Composite(about=ocp.args.JsonRestore())
            )
        except Exception:
            return None
        about = restored.about
        if about.get("format") != FORMAT:
            raise UserError(
                f"the checkpoint of step {step} in {self._root} has format {about.get('format')},"
                f" but this program reads format {FORMAT}."
            )
        return about

    def close(self) -> None:
        self._manager.close()

    def _require_same_network(self, step: int, about: dict[str, Any]) -> None:
        here, there = (
            {
                **{name: getattr(network, name) for name in _ARCHITECTURE},
                "classes": len(a["dataset"]["classes"]),
                "image channels": a["dataset"]["image_shape"][-1],
                "moving average": a["config"]["training"]["ema_decay"] > 0,
            }
            # `model_from_json` fills in the defaults of fields that old checkpoints lack.
            for a in (self._about, about)
            for network in (model_from_json(a["config"]["model"]),)
        )
        for name, value in here.items():
            if there[name] != value:
                raise UserError(
                    f"the checkpoint of step {step} in {self._root} is of another network: its"
                    f" {name} is {there[name]}, and {value} was asked for; use the same value, or"
                    " choose another --output."
                )

    def _last_good(self) -> str:
        steps = self.steps()
        return f"the last good one is of step {steps[-1]}" if steps else "there is no other"

    def _remove_unfinished(self, step: int) -> None:
        """Deletes what a failed save has written, to free the disk."""
        if jax.process_index() == 0:
            for path in self._root.glob(f"{step}.*tmp*"):
                shutil.rmtree(path, ignore_errors=True)
        self._manager.reload()

    def _put_aside(self, step: int) -> None:
        if jax.process_index() == 0:
            self._damaged.mkdir(exist_ok=True)
            goal = self._damaged / str(step)
            shutil.rmtree(goal, ignore_errors=True)
            (self._root / str(step)).rename(goal)
        self._manager.reload()


def finished_steps(folder: pathlib.Path) -> list[int]:
    """The steps of the finished checkpoints of the run in `folder`, in which nothing is changed.

    A process asks for itself: opening checkpoints would wait for all processes of the job, of which
    one may have made the folder in the meantime.
    """
    root = folder.absolute() / "checkpoints"
    return sorted(ocp.utils.checkpoint_steps(root)) if root.is_dir() else []


def open_for_reading(path: pathlib.Path, step: int | None) -> tuple[Checkpoints, int]:
    """The checkpoints of the run in `path`, and the step to read (the last if `step` is None)."""
    folder = path.parent if path.name == "checkpoints" else path
    if not (folder / "checkpoints").is_dir():
        raise UserError(f"{path} is not an output folder of train.py: it has no checkpoints.")
    checkpoints = Checkpoints(folder)
    steps = checkpoints.steps()
    if not steps:
        raise UserError(f"{folder / 'checkpoints'} holds no finished checkpoint.")
    if step is not None and step not in steps:
        raise UserError(f"{folder / 'checkpoints'} has no step {step}; it has {steps}.")
    return checkpoints, steps[-1] if step is None else step


def _restore_args(target: Any, partial: bool = False) -> Any:
    return ocp.args.PyTreeRestore(
        item=target,
        restore_args=ocp.checkpoint_utils.construct_restore_args(target),
        partial_restore=partial,
    )


def _reason(error: Exception) -> str:
    """A short reason: tensorstore's errors fill a page and mention ENOSPC in the middle of it."""
    if "No space left on device" in str(error):
        return "no space left on the disk"
    return first_line(error)
