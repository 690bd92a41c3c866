"""The training loop."""

import dataclasses
import math
import pathlib
from typing import Any

import jax
import numpy as np
from rich.console import Console

from resnet50 import (
    accuracy,
    devices,
    metrics,
    model,
    optimizer,
    programs,
    recipe_checks,
    steps,
    summary,
    train_state,
    weights,
)
from resnet50.checkpoints import Checkpoints, finished_steps
from resnet50.config import Config, to_json
from resnet50.data import pipeline, sources
from resnet50.data.pictures import Pictures
from resnet50.display import Display
from resnet50.errors import UserError
from resnet50.instruments import Profile, Stop, Watch
from resnet50.metrics import Recorder
from resnet50.train_state import TrainState


def train(
    config: Config, console: Console | None = None, on: list[Any] | None = None
) -> dict[str, accuracy.Result]:
    """Trains as configured; returns the last evaluation of "network" and, with an EMA, "average".

    Args:
        config: all options.
        console: for progress and messages.
        on: the devices to use instead of those that the configuration names.

    Raises:
        UserError: something that the user can fix.
    """
    on = on or devices.start(config.run.platform, config.run)
    trainer = Trainer(
        config, devices.data_mesh(on), console or Console(quiet=jax.process_index() != 0)
    )
    trainer.display.say(
        f"{trainer.dataset.description}: {len(trainer.dataset.train)} pictures to train on,"
        f" {len(trainer.dataset.val)} held out, {len(trainer.dataset.classes)} classes;"
        f" {model.describe_norm(config.model.norm)}, {config.model.dtype},"
        f" on {devices.describe(on)}"
    )
    try:
        return trainer.run()
    finally:
        trainer.close()


class Trainer:
    """A training run: its parts, and the loop."""

    def __init__(self, config: Config, mesh: Any, console: Console) -> None:
        self.config, self.mesh, self.display = config, mesh, Display(console)
        recipe, options = config.training, config.run
        recipe_checks.check(config)
        devices.check_batch(recipe.batch_size, recipe.accumulate, mesh)
        self.dataset = sources.open_dataset(config)
        self.steps_per_epoch = len(self.dataset.train) / recipe.batch_size
        self.total_steps = steps.whole_steps(recipe.epochs * self.steps_per_epoch)
        if self.total_steps < 1:
            raise UserError(f"--epochs {recipe.epochs:g} are less than a step.")
        if options.profile_at is not None and options.profile_at >= self.total_steps:
            raise UserError(
                f"--profile-at must be before the last step, got {options.profile_at}:"
                f" --epochs {recipe.epochs:g} are {self.total_steps} steps, which count from 0."
            )
        warmup = optimizer.warmup_epochs(recipe)
        if warmup != recipe.warmup_epochs:
            self.display.say(
                f"--warmup-epochs {recipe.warmup_epochs:g} is not shorter than the training: the"
                f" learning rate warms up for {warmup:g} epochs, half of it"
            )
        self.evaluation_steps = steps.evaluation_steps(
            options.evaluate_every * self.steps_per_epoch, self.total_steps
        )
        self.learning_rate = optimizer.schedule(recipe, self.steps_per_epoch, self.total_steps)
        self.net = model.build(config.model, len(self.dataset.classes))
        self.programs = programs.build(self.net, recipe, self.dataset, self.learning_rate, mesh)

        shard = (jax.process_index(), jax.process_count())
        workers = config.data.workers
        self.workers = pipeline.default_workers(config.source) if workers is None else workers
        self.local_batch = recipe.batch_size // shard[1]
        self.batches = pipeline.TrainingBatches(
            self.dataset, self.local_batch, recipe.seed, self.workers, shard
        )
        self._shard = shard
        self._results: dict[str, accuracy.Result] = {}
        self._stopped = False
        self.recorder: Recorder | None = None
        self._open_output()

    def _open_output(self) -> None:
        options = self.config.run
        about = {"config": to_json(self.config), "dataset": self.dataset.to_json()}
        try:
            options.output.mkdir(parents=True, exist_ok=True)
            # Before anything is opened for writing: that run may be saving at this moment.
            saved = [] if options.resume else finished_steps(options.output)
            if saved:
                raise UserError(
                    f"{options.output} holds a run that reached step {saved[-1]}: continue it with"
                    " --resume, or choose another --output."
                )
            self.checkpoints = Checkpoints(options.output, options.keep_checkpoints, about)
        except OSError as error:
            raise UserError(
                f"the folder --output {options.output} cannot be used ({error.strerror})."
            ) from error

    def close(self) -> None:
        self.batches.close()
        self.checkpoints.close()
        if self.recorder is not None:
            self.recorder.close()

    def run(self) -> dict[str, accuracy.Result]:
        state, step = self.first_state()
        # A checkpoint is saved before the evaluation of its step, so a stopped run may have ended
        # between the two.
        self._evaluated = devices.as_process_0_knows(
            metrics.was_evaluated(self.config.run.output / metrics.FILE, step)
        )
        if jax.process_index() == 0:
            output = self.config.run.output
            try:
                self.recorder = Recorder(output, step, self.display)
            except OSError as error:
                raise UserError(f"metrics cannot be written in {output} ({error}).") from error
        with Stop.on_signals() as stop, self.display.training(step, self.total_steps):
            state, step = self._loop(state, step, stop)
        if self._stopped:
            self.display.say(f"stopped after step {step}; --resume continues from there")
        elif self.recorder is not None:
            for line in summary.report(self.config, self.config.run.output / metrics.FILE):
                self.display.say(line)
        return self._results

    def first_state(self) -> tuple[TrainState, int]:
        """Where to start: a checkpoint's state and step, or new variables and step 0."""
        key = jax.random.key(self.config.training.seed)
        everywhere = devices.replicated(self.mesh)
        target = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=everywhere),
            jax.eval_shape(self.programs.initial, key),
        )
        if self.config.run.resume:
            restored = self.checkpoints.restore(target, self.display)
            if restored is not None:
                # Whether it is the same run comes first: its steps depend on batch and pictures.
                self.batches.restore(restored.data)
                if restored.step > self.total_steps:
                    raise UserError(
                        f"the run has reached step {restored.step}, and --epochs"
                        f" {self.config.training.epochs:g} are {self.total_steps} steps, so nothing"
                        " is left to train; choose more --epochs."
                    )
                self.display.say(f"resuming after step {restored.step}")
                return restored.state, restored.step
        state = self.programs.initial(key)
        source = self.config.training.init_from
        if source is not None:
            variables, with_head = weights.begin_with(
                state.variables, pathlib.Path(source), self.net
            )
            begun = train_state.begin(
                variables, self.programs.optimizer, self.config.training.ema_decay > 0
            )
            state = jax.device_put(begun, everywhere)
            self.display.say(
                f"starting from {source}" + ("" if with_head else "; the head is newly initialised")
            )
        return state, 0

    def _loop(self, state: TrainState, step: int, stop: Stop) -> tuple[TrainState, int]:
        options = self.config.run
        profile = Profile(options.output / "profile", options.profile_at, options.profile_steps)
        if options.profile_at is not None and options.profile_at < step:
            self.display.warn(
                f"no profile is written: --profile-at {options.profile_at} is before step {step},"
                " where this run begins"
            )
        watch = Watch()
        first = step
        due = step in self.evaluation_steps and not self._evaluated
        if due or step == self.total_steps:
            self._evaluate(state, step, stop)
        while step < self.total_steps and not self._stopped:
            # Meanwhile the device still computes the previous step.
            with watch.waiting():
                batch = next(self.batches)
            self._report_unreadable(batch, self.dataset.train, "the next one replaces it")
            given = {name: batch[name] for name in ("image", "label")}
            profile.before(step)
            with jax.profiler.StepTraceAnnotation("train", step_num=step):
                state = self.programs.step(state, devices.put_batch(given, self.mesh))
            step += 1
            self._evaluated = False
            profile.after(step, state)
            if step == first + 1:
                # The first step includes compilation, which is not part of the speed.
                jax.block_until_ready(state.step)
                self.display.first_step(step, self.total_steps)
                watch.restart()

            done = step == self.total_steps
            if step % options.log_every == 0 or done:
                state = self._log(state, step, watch)
            self.display.step(step, self.total_steps)
            self._stopped = stop.requested(step, options.log_every)
            save = step % options.checkpoint_every == 0 or done or self._stopped
            evaluate = step in self.evaluation_steps and not self._stopped
            if save or evaluate:
                # The steps that the device has still to compute are no pause.
                jax.block_until_ready(state.step)
            with watch.paused():
                # The checkpoint comes first, because whoever asks a run to stop may not wait for
                # an evaluation.
                if save:
                    self._save(state, step, done or self._stopped)
                if evaluate:
                    self._evaluate(state, step, stop)
                    if self._stopped and not save:
                        self._save(state, step, last=True)
        profile.stop(state)
        return state, step

    def _log(self, state: TrainState, step: int, watch: Watch) -> TrainState:
        window = jax.device_get(state.window)
        values = {
            "epoch": step / self.steps_per_epoch,
            "loss": float(window.loss) / int(window.steps),
            "top1": int(window.correct) / int(window.images),
            "learning_rate": float(np.asarray(self.learning_rate(step - 1))),
            **watch.read(self.config.training.batch_size),
        }
        watch.restart()
        if not math.isfinite(values["loss"]):
            self._fail_not_finite(step)
        self._record(step, "train", values)
        self.display.metrics(step, self.total_steps, values)
        return state._replace(window=self.programs.empty_window())

    def _save(self, state: TrainState, step: int, last: bool) -> None:
        # A checkpoint with NaN in it is useless.
        if not self.programs.all_finite(state):
            self._fail_not_finite(step)
        problem = self.checkpoints.save(step, state, self.batches.state)
        if problem is not None and last:
            raise UserError(problem)
        if problem is not None:
            self.display.warn(f"{problem}; training continues")

    def _evaluate(self, state: TrainState, step: int, stop: Stop) -> None:
        """Evaluates, and sets `_stopped` if the run is asked to stop before the evaluation ends."""
        if self.config.source == "synthetic":
            return  # the accuracy on noise means nothing
        networks = {"network": state.variables}
        if state.ema:
            networks["average"] = state.ema
        count = -(-len(self.dataset.val) // (self.local_batch * self._shard[1]))
        advance = self.display.evaluating(count)

        def on_batch(batch: pipeline.Batch) -> None:
            self._report_unreadable(batch, self.dataset.val, "it is left out")
            advance()

        results = accuracy.evaluate(
            self.programs.sums,
            networks,
            pipeline.evaluation_batches(self.dataset, self.local_batch, self.workers, self._shard),
            self.mesh,
            on_batch,
            stop.requested_alone,
        )
        if results is None:
            self._stopped = True
            return
        for name, result in results.items():
            self.display.evaluation(step, name, result, len(self.dataset.classes))
            if not self._evaluated:
                self._record(step, f"val_{name}", dataclasses.asdict(result))
        self._results = results

    def _report_unreadable(self, batch: pipeline.Batch, pictures: Pictures, action: str) -> None:
        for index in batch["unreadable"][batch["unreadable"] >= 0]:
            self.display.unreadable(pictures.name(int(index)), action)

    def _record(self, step: int, kind: str, values: dict[str, float]) -> None:
        if self.recorder is not None:
            self.recorder.write(step, kind, values)

    def _fail_not_finite(self, step: int) -> None:
        saved = self.checkpoints.steps()
        good = f"the checkpoint of step {saved[-1]} is good" if saved else "no checkpoint was saved"
        raise UserError(
            f"the loss is not finite at step {step}; {good}. A lower --learning-rate or a longer"
            " --warmup-epochs usually helps."
        )
