"""`BenchmarkReport`: an 80-column table, plain values, and a figure; `html.py` has the table."""

import dataclasses
import pathlib
from typing import Any, Final, Literal

from jax_bnar._benchmark import html
from jax_bnar._benchmark.difference import Difference

Pass = Literal["forward", "forward + backward"]

MIB: Final = 2**20
# Okabe and Ito's palette, safe for colour-blind readers.
_COLOURS: Final = {"plain": "#E69F00", "fused": "#0072B2"}


@dataclasses.dataclass(frozen=True)
class Measurement:
    """The measurement of one program: the plain or fused function, forward or with backward.

    Attributes:
        name: "plain" or "fused".
        what: "forward" or "forward + backward".
        samples_ms: milliseconds per call, one sample from each round.
        median_ms: the median of the samples.
        min_ms: the minimum of the samples.
        peak_bytes: arguments, results and temporaries, as XLA has planned them; None if the
            platform does not report them.
        temporary_bytes: the temporaries among them.
        residual_bytes: what forward keeps for backward in addition to its arguments, counted in the
            jaxpr; None for forward alone.
    """

    name: str
    what: Pass
    samples_ms: tuple[float, ...]
    median_ms: float
    min_ms: float
    peak_bytes: int | None
    temporary_bytes: int | None
    residual_bytes: int | None


@dataclasses.dataclass(frozen=True, repr=False)
class BenchmarkReport:
    """What `benchmark` has measured; `print` and notebooks show a table, and `plot` draws it.

    Attributes:
        function: name of the function.
        measurements: plain and fused, first forward, then forward and backward.
        matched: how many places `fuse` has fused; None if the fused function was passed in.
        refused: how many places it refused, or None like `matched`; `jax_bnar.explain` says why.
        differences: how far the results, and if they were measured the gradients, of the plain and
            of the fused function are apart. The fused one is no less accurate, so this is the
            rounding error of both.
        device: the kind of the device.
        kernels: whether this build has kernels for the platform; otherwise both ran in pure JAX.
    """

    function: str
    measurements: tuple[Measurement, ...]
    matched: int | None
    refused: int | None
    differences: tuple[Difference, ...]
    device: str
    kernels: bool

    @property
    def difference(self) -> float:
        """The larger of the relative differences of all results, and of all gradients."""
        return max((each.relative for each in self.differences), default=0.0)

    def speedup(self, what: str) -> float:
        """How many times as fast the fused function is, by the medians of the pass `what`.

        Raises:
            ValueError: this pass was not measured; or nothing was fused, so that both programs are
                the same, and the ratio would only show how much the measurement scatters.
        """
        if self.matched == 0:
            raise ValueError(
                "speedup: nothing was fused, so both programs are the same;"
                " jax_bnar.explain(fun)(*args) says why."
            )
        plain, fused = (self._of(name, what) for name in ("plain", "fused"))
        return plain.median_ms / fused.median_ms

    def to_json(self) -> dict[str, Any]:
        """Plain values, for `json.dump`."""
        return {**dataclasses.asdict(self), "difference": self.difference}

    def plot(self, path: str | pathlib.Path) -> pathlib.Path:
        """Draws times and memory to a file, whose suffix chooses the format, such as .png or .svg.

        Returns:
            The path.

        Raises:
            ImportError: matplotlib is not installed.
        """
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise ImportError(
                "BenchmarkReport.plot draws with matplotlib: pip install matplotlib."
            ) from error
        path = pathlib.Path(path)
        figure = Figure(figsize=(8, 3.6), layout="constrained")
        left, right = figure.subplots(1, 2)
        panels = (
            (left, "ms a call", [(m.name, m.what, m.median_ms) for m in self.measurements]),
            (
                right,
                "MiB",
                [
                    (m.name, kind, value / MIB)
                    for m in self.measurements
                    if m.what == self.measurements[-1].what
                    for kind, value in (
                        ("peak", m.peak_bytes),
                        ("temporary", m.temporary_bytes),
                        ("residuals", m.residual_bytes),
                    )
                    if value is not None
                ],
            ),
        )
        for axes, unit, values in panels:
            groups = list(dict.fromkeys(group for _, group, _ in values))
            for offset, (name, colour) in zip((-0.2, 0.2), _COLOURS.items(), strict=True):
                heights = {group: value for n, group, value in values if n == name}
                bars = axes.bar(
                    [groups.index(group) + offset for group in heights],
                    list(heights.values()),
                    0.4,
                    color=colour,
                    label=name,
                )
                axes.bar_label(bars, [f"{value:.3g}" for value in heights.values()])
            axes.set_xticks(range(len(groups)), groups)
            axes.set_ylabel(unit)
            axes.margins(y=0.12)
            axes.spines[["top", "right"]].set_visible(False)
        left.legend(frameon=False)
        figure.suptitle(f"{self.function} on {self.device}", fontsize=10)
        figure.savefig(path, dpi=150)
        return path

    def __str__(self) -> str:
        lines = [f"{self.function[:50]} on {self.device[:24]}"]
        lines.append(_row("", "median ms", "min ms", "peak MiB", "temp MiB", "resid. MiB"))
        for what in dict.fromkeys(m.what for m in self.measurements):
            lines.append(what)
            for name in ("plain", "fused"):
                m = self._of(name, what)
                sizes = (m.peak_bytes, m.temporary_bytes, m.residual_bytes)
                lines.append(
                    _row(
                        f"  {name}",
                        _time(m.median_ms),
                        _time(m.min_ms),
                        *("" if size is None else f"{size / MIB:.4g}" for size in sizes),
                    )
                )
            if self.matched != 0:
                lines.append(f"  fused is {self.speedup(what):.2f} times as fast")
        return "\n".join([*lines, *self.notes])

    # A report that an interactive session shows reads like a printed one.
    __repr__ = __str__

    def _repr_html_(self) -> str:
        return html.fragment(self)

    @property
    def notes(self) -> tuple[str, ...]:
        """What the printed report says below the table, line by line."""
        lines = []
        for each in self.differences:
            lines.append(
                f"{each.what} differ by {each.relative:.1e} of their norm, {each.norm:.1e}"
            )
            if each.relative:
                lines.append(_cut(f"  most in {each.worst or 'the only one'}"))
                lines.append(
                    f"    by {each.worst_difference:.1e}; its norm is {each.worst_norm:.1e}"
                )
        if self.matched == 0:
            lines.append("NOTHING was fused: jax_bnar.explain(fun)(*args) says why")
        elif self.matched is not None:
            places = "place" if self.matched == 1 else "places"
            lines.append(
                f"fused: {self.matched} {places}; refused: {self.refused} (explain says why)"
            )
        if not self.kernels:
            lines.append("NO KERNELS for this platform in this build: both are pure JAX")
        return tuple(lines)

    def _of(self, name: str, what: str) -> Measurement:
        for measurement in self.measurements:
            if (measurement.name, measurement.what) == (name, what):
                return measurement
        raise ValueError(f"{what!r} was not measured; measured were {self._measured()}.")

    def _measured(self) -> str:
        return ", ".join(repr(what) for what in dict.fromkeys(m.what for m in self.measurements))


def _row(head: str, *cells: str) -> str:
    return f"{head:<14}" + "".join(f"{cell:>12}" for cell in cells)


def _cut(line: str) -> str:
    """The line within 80 columns, without the middle of a long path."""
    return line if len(line) <= 80 else f"{line[:30]}...{line[-47:]}"


def _time(ms: float) -> str:
    return f"{ms:.4g}" if ms < 1000 else f"{ms:.0f}"
