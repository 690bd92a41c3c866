"""Shows progress: as a bar on a terminal, as lines of text elsewhere."""

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Final

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column

from resnet50.accuracy import Result

# Where there is no bar, a line appears at least this often, so that a log shows a living run.
HEARTBEAT_SECONDS: Final = 30.0


class Display:
    """What a run prints on the console.

    Args:
        console: where it is printed.
        clock: gives seconds.
    """

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self.console = console
        self._clock = clock
        self._progress: Progress | None = None
        self._unreadable: set[str] = set()

    @contextlib.contextmanager
    def training(self, step: int, total: int) -> Iterator[None]:
        self._begin = self._last_line = self._clock()
        if not self.console.is_terminal:
            self.say(f"compiling; {total - step} steps follow")
            yield
            return
        # In a narrow window the description is cut off, rather than the step or the remaining time.
        whole = Column(no_wrap=True)
        columns = (
            MofNCompleteColumn(table_column=whole),
            BarColumn(20, table_column=whole),
            TimeRemainingColumn(table_column=whole),
            TextColumn(
                "{task.description}",
                table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis"),
            ),
        )
        with Progress(*columns, console=self.console, expand=True) as progress:
            self._progress = progress
            self._task = progress.add_task("first step: compiling", total=total, completed=step)
            try:
                yield
            finally:
                self._progress = None

    def first_step(self, step: int, total: int) -> None:
        """The first step of this process is done, and with it the compilation."""
        if self._progress is None:
            seconds = self._clock() - self._begin
            self._line(f"step {step}/{total}  compiled and done after {seconds:.0f} s")

    def step(self, step: int, total: int) -> None:
        """Another step is done."""
        if self._progress is not None:
            self._progress.update(self._task, completed=step)
        elif self._clock() - self._last_line >= HEARTBEAT_SECONDS:
            self._line(f"step {step}/{total}")

    def metrics(self, step: int, total: int, values: dict[str, float]) -> None:
        text = f"epoch {values['epoch']:.2f}  loss {values['loss']:.4f}"
        if "images_per_second" in values:
            text += f"  {values['images_per_second']:.0f} images/s"
        text += f"  top-1 {values['top1']:.1%}  lr {values['learning_rate']:.3g}"
        if "data_wait" in values:
            text += f"  waiting for data {values['data_wait']:.0%}"
        if self._progress is None:
            self._line(f"step {step}/{total}  {text}")
        else:
            self._progress.update(self._task, completed=step, description=text)

    def evaluating(self, batches: int) -> Callable[[], None]:
        """Returns a function to call after each batch of an evaluation."""
        done = 0

        def advance() -> None:
            nonlocal done
            done += 1
            if self._progress is not None:
                self._progress.update(
                    self._task, description=f"evaluating, batch {done} of {batches}"
                )
            elif self._clock() - self._last_line >= HEARTBEAT_SECONDS:
                self._line(f"evaluating, batch {done} of {batches}")

        return advance

    def evaluation(self, step: int, name: str, result: Result, classes: int) -> None:
        self._line(f"step {step}: {name} {result.text(classes)}")

    def say(self, sentence: str) -> None:
        self._print(sentence)

    def warn(self, sentence: str) -> None:
        self._print(sentence, style="bold red")

    def unreadable(self, picture: str, action: str) -> None:
        """Reports a picture once, however many epochs come past it."""
        if picture not in self._unreadable:
            self._unreadable.add(picture)
            self.warn(f"the picture {picture} cannot be read; {action}")

    def _print(self, sentence: str, style: str | None = None) -> None:
        # Names of folders and classes may look like rich's markup.
        self.console.print(
            sentence, soft_wrap=True, highlight=False, markup=False, emoji=False, style=style
        )

    def _line(self, sentence: str) -> None:
        self._last_line = self._clock()
        self.say(sentence)
