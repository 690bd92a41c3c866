"""Checkpoints through orbax: written whole or not at all, and read back from the last good one.

Saving waits until all is on disk: about a second of the minutes between checkpoints, and an error
appears where it happens.
"""

import pathlib
import shutil
from typing import Any, Final, NamedTuple

import jax
import orbax.checkpoint as ocp
from absl import logging
from rich.console import Console

from resnet50.config import model_from_json
from resnet50.errors import UserError, first_line
from resnet50.train_state import TrainState

FORMAT: Final = 1
# The fields of the network without which its variables do not fit, or mean something else.
_ARCHITECTURE: Final = ("stage_sizes", "num_filters", "stem", "padding")


class Restored(NamedTuple):
    step: int
    state: TrainState
    data: dict[str, Any]
    """State of the pipeline."""


class Checkpoints:
    """The checkpoints of a run, in `folder`/checkpoints.

    Args:
        folder: of the run.
        keep: how many to keep; None opens them for reading alone.
        about: what eval.py and others need to know about the run (plain values).
    """

    def __init__(
        self, folder: pathlib.Path, keep: int | None = None, about: dict[str, Any] | None = None
    ) -> None:
        self._root = folder.absolute() / "checkpoints"
        self._damaged = folder.absolute() / "damaged"
        self._about = {"format": FORMAT, **(about or {})}
        # orbax warns of the very options that it was given.
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
        """Saves, or says in a sentence why that was not possible; the others stay as they are."""
        args = ocp.args.Composite(
            state=ocp.args.PyTreeSave(state),
            data=ocp.args.JsonSave(data),
            about=ocp.args.JsonSave(self._about),
        )
        try:
            self._manager.save(step, args=args, force=True)
        # Whatever went wrong, hours of training are worth more than one of their checkpoints.
        except Exception as error:
            self._remove_unfinished(step)
            return (
                f"the checkpoint of step {step} could not be saved: {_reason(error)};"
                f" {self._last_good()}"
            )
        return None

    def restore(self, target: TrainState, console: Console) -> Restored | None:
        """The last checkpoint that can be read, or None where there is none.

        Args:
            target: shapes, dtypes and shardings.
            console: told about checkpoints that cannot be read; they are put aside.

        Raises:
            UserError: a checkpoint of another network, or none of several can be read.
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
                # orbax and tensorstore raise many kinds for a damaged file.
                except Exception as error:
                    reason = first_line(error)
            else:
                reason = "its description is missing"
            console.print(
                f"[bold red]the checkpoint of step {step} cannot be read ({reason}); it is put"
                f" aside in {self._damaged}, and the one before it taken"
            )
            self._put_aside(step)
        if steps:
            raise UserError(
                f"none of the {len(steps)} checkpoints in {self._root} can be read; they are in"
                f" {self._damaged} now, and a new run may begin."
            )
        return None

    def variables(self, step: int, target: dict[str, Any]) -> dict[str, Any]:
        """A part of the state, such as {"params": ..., "batch_stats": ...}, without the rest."""
        try:
            restored = self._manager.restore(
                step, args=ocp.args.Composite(state=_restore_args(target, partial=True))
            )
        except Exception as error:
            raise UserError(
                f"the checkpoint of step {step} in {self._root} cannot be read"
                f" ({first_line(error)}); --step names another, of {self.steps()}."
            ) from error
        return restored.state

    def about(self, step: int) -> dict[str, Any] | None:
        """The description of the run, or None where that cannot be read."""
        try:
            restored = self._manager.restore(
                step, args=ocp.args.Composite(about=ocp.args.JsonRestore())
            )
        except Exception:
            return None
        about = restored.about
        if about.get("format") != FORMAT:
            raise UserError(
                f"the checkpoint of step {step} in {self._root} has the format"
                f" {about.get('format')}, and this program reads format {FORMAT}."
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
            # Through the configuration, which knows the fields that old checkpoints lack.
            for a in (self._about, about)
            for network in (model_from_json(a["config"]["model"]),)
        )
        for name, value in here.items():
            if there[name] != value:
                raise UserError(
                    f"the checkpoint of step {step} in {self._root} is of another network: its"
                    f" {name} is {there[name]}, and {value} was asked for; ask for the same, or"
                    " choose another --output."
                )

    def _last_good(self) -> str:
        steps = self.steps()
        return f"the last good one is of step {steps[-1]}" if steps else "there is no other"

    def _remove_unfinished(self, step: int) -> None:
        """Gives the disk back what a failed save has written."""
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


def open_for_reading(path: pathlib.Path, step: int | None) -> tuple[Checkpoints, int]:
    """The checkpoints of the run in `path`, and the step that is meant (None: the last)."""
    folder = path.parent if path.name == "checkpoints" else path
    if not (folder / "checkpoints").is_dir():
        raise UserError(f"{path} is no output folder of train.py: it has no checkpoints.")
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
    """The words that matter: tensorstore's errors fill a page, and say ENOSPC in the midst."""
    if "No space left on device" in str(error):
        return "no space left on the disk"
    return first_line(error)
