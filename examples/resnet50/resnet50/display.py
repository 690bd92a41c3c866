"""Shows progress: as a bar on a terminal, as lines of text elsewhere."""

import contextlib
from collections.abc import Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from resnet50.accuracy import Result


class Display:
    """What a run prints on the console."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._progress: Progress | None = None

    @contextlib.contextmanager
    def training(self, step: int, total: int) -> Iterator[None]:
        if not self.console.is_terminal:
            yield
            return
        columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, TextColumn("{task.description}"), console=self.console) as progress:
            self._progress = progress
            self._task = progress.add_task("first step: compiling", total=total, completed=step)
            yield
        self._progress = None

    def metrics(self, step: int, total: int, values: dict[str, float]) -> None:
        text = (
            f"epoch {values['epoch']:.2f}  loss {values['loss']:.4f}"
            f"  top-1 {values['top1']:.1%}  lr {values['learning_rate']:.3g}"
        )
        if "images_per_second" in values:
            text += (
                f"  {values['images_per_second']:.0f} images/s"
                f"  waiting for data {values['data_wait']:.0%}"
            )
        if self._progress is None:
            self.console.print(f"step {step}/{total}  {text}", soft_wrap=True, highlight=False)
        else:
            self._progress.update(self._task, completed=step, description=text)

    def evaluation(self, step: int, name: str, result: Result) -> None:
        self.console.print(
            f"step {step}: {name} top-1 {result.top1:.2%}, top-5 {result.top5:.2%}, loss"
            f" {result.loss:.4f} on {result.images} held-out pictures",
            soft_wrap=True,
            highlight=False,
        )

    def say(self, sentence: str) -> None:
        self.console.print(sentence, soft_wrap=True, highlight=False)

    def warn(self, sentence: str) -> None:
        self.console.print(sentence, soft_wrap=True, highlight=False, style="bold red")
