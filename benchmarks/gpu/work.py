"""What both families of peers measure, in which order and until when, and how results are kept."""

import argparse
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final, get_args

from benchmarks.common.json_file import write_json
from benchmarks.common.sites import RESNET50_SITES, Site, one_read_bytes, two_read_bytes_without_y
from benchmarks.gpu.program import make_document, make_parser
from benchmarks.sites.problem import DType, itemsize

_TENSORS_OF_A_SET: Final = 6  # x, z, dy, y, dx, dz at most
_MOST_SETS: Final = 48
# This guess only determines how many rounds fill a sample.
_GUESSED_BYTES_PER_S: Final = 2.5e12
# The error of a result in L2 norm. Near 0, rounding opens a gate for one peer and shuts it for
# another, which alone is 0.05 in bfloat16. A peer that computes something else is off by about 1;
# how accurately each rounds is tested in tests/.
ERROR_ALLOWED: Final = 0.15


# The sites at which the planner's choice of slabs depends most on the constants of a device: labels
# begin with one of these.
DECISIVE_SITES: Final = ("56x56x256", "28x28x128", "14x14x256")


@dataclass(frozen=True)
class Wave:
    """Sites at one batch size and dtype, for a group of peers: all sites, or the decisive ones."""

    batch: int
    dtype: DType
    peers: tuple[str, ...]
    decisive: bool = False


@dataclass(frozen=True)
class Work:
    """The options of a benchmark.

    Attributes:
        rotate_bytes: the sets of operands hold at least this much together, so that what one call
            left in L2 is gone when its turn comes again.
        sample_s: the device time that one sample is meant to take.
    """

    platform: str
    waves: tuple[Wave, ...]
    sites: tuple[Site, ...]
    rotate_bytes: int
    samples: int
    sample_s: float
    end: float
    output: Path

    def sites_of(self, wave: Wave) -> tuple[Site, ...]:
        if not wave.decisive:
            return self.sites
        return tuple(site for site in self.sites if site.label.startswith(DECISIVE_SITES))

    def time_is_up(self) -> bool:
        return time.monotonic() > self.end

    def sets(self, site: Site, wave: Wave) -> int:
        """The number of sets of operands to rotate among, at least two."""
        one = _TENSORS_OF_A_SET * site.elements(wave.batch) * itemsize(wave.dtype)
        return min(_MOST_SETS, max(2, math.ceil(self.rotate_bytes / one)))

    def rounds(self, site: Site, wave: Wave) -> int:
        """The number of passes through all sets in one sample."""
        step = two_read_bytes_without_y(site, wave.batch, itemsize(wave.dtype))
        one = self.sets(site, wave) * step / _GUESSED_BYTES_PER_S
        return min(1000, max(2, round(self.sample_s / one)))


def parse(
    description: str | None,
    arguments: Sequence[str] | None,
    main_peers: tuple[str, ...],
    more_peers: tuple[str, ...],
    decisive_peers: tuple[str, ...] = (),
) -> Work:
    """Returns the work that the options ask for.

    The main peers run at every combination of batch size and dtype, and the others only at the
    first one: first `decisive_peers`, which are among them, at the decisive sites. `--part first`
    asks for that first combination alone, and `--part rest` for all others.
    """
    parser = make_parser(description)
    parser.add_argument("--part", choices=("all", "first", "rest"), default="all")
    parser.add_argument("--batch", type=int, nargs="+", default=[256, 64, 32])
    dtypes = get_args(DType)
    parser.add_argument("--dtype", nargs="+", choices=dtypes, default=list(dtypes[1:] + dtypes[:1]))
    parser.add_argument("--peers", nargs="+", choices=main_peers + more_peers, default=None)
    parser.add_argument("--sites", nargs="+", default=[""], help="labels start with one of these")
    parser.add_argument("--samples", type=int, default=5)
    parser.add_argument("--sample-ms", type=float, default=20)
    parser.add_argument("--rotate-mib", type=int, default=384, help="several times the L2")
    options = parser.parse_args(arguments)
    end = time.monotonic() + options.seconds
    if options.platform == "cpu":
        options.batch, options.dtype = [2], ["bfloat16", "float32"]
        options.sites = ["7x7x2048 bn_add_relu"]
        options.samples, options.sample_ms, options.rotate_mib = 2, 0, 0
    sites = [s for s in RESNET50_SITES if s.label.startswith(tuple(options.sites))]
    if not sites:
        labels = ", ".join(site.label for site in RESNET50_SITES)
        parser.error(f"--sites {' '.join(options.sites)} fits none of: {labels}")
    # The heaviest come first, so that a deadline cuts off what counts least.
    sites.sort(key=lambda site: -site.count * one_read_bytes(site, 1, 2))
    waves = tuple(
        wave for wave in _waves(options, main_peers, more_peers, decisive_peers) if wave.peers
    )
    return Work(
        platform=options.platform,
        waves=waves,
        sites=tuple(sites),
        rotate_bytes=options.rotate_mib << 20,
        samples=options.samples,
        sample_s=options.sample_ms / 1e3,
        end=end,
        output=options.output,
    )


def _waves(
    options: argparse.Namespace,
    main_peers: tuple[str, ...],
    more_peers: tuple[str, ...],
    decisive_peers: tuple[str, ...],
) -> Iterator[Wave]:
    def asked(peers: tuple[str, ...]) -> tuple[str, ...]:
        return peers if options.peers is None else tuple(p for p in peers if p in options.peers)

    first, *rest = ((b, d) for b in options.batch for d in options.dtype)
    if options.part != "rest":
        yield Wave(*first, asked(main_peers))
        yield Wave(*first, asked(decisive_peers), decisive=True)
        yield Wave(*first, asked(more_peers))
    if options.part != "first":
        for batch, dtype in rest:
            yield Wave(batch, dtype, asked(main_peers))


class Results:
    """Rows, written after each of them, because the process may be killed."""

    def __init__(self, work: Work, family: str, device: dict[str, Any]) -> None:
        self._work = work
        self.document = make_document(family, work.platform, device=device, rows=[], refused=[])

    def fill(self, waves: Sequence[Wave], run_wave: Callable[[Wave], None]) -> int:
        """Runs the waves while there is time; the exit status."""
        for wave in waves:
            if self._work.time_is_up():
                break
            run_wave(wave)
            print(f"{wave}: {len(self.document['rows'])} rows", flush=True)
        self.write(complete=not self._work.time_is_up())
        return 1 if self.document["errors"] else 0

    def left(self, site: Site, wave: Wave) -> tuple[str, ...]:
        """The peers of a wave that no earlier one has measured at the site."""
        done = {
            row["peer"]
            for row in self.document["rows"]
            if (row["site"], row["batch"], row["dtype"]) == (site.label, wave.batch, wave.dtype)
        }
        return tuple(peer for peer in wave.peers if peer not in done)

    def add(
        self, site: Site, wave: Wave, peer: str, samples_ms: Sequence[float], **more: Any
    ) -> None:
        size = itemsize(wave.dtype)
        if peer == "copy":
            more["bytes"] = 2 * site.elements(wave.batch) * size
        self.document["rows"].append(
            {
                "site": site.label,
                "count": site.count,
                "batch": wave.batch,
                "dtype": wave.dtype,
                "peer": peer,
                "median_ms": median(samples_ms),
                "min_ms": min(samples_ms),
                "samples_ms": list(samples_ms),
                "one_read_bytes": one_read_bytes(site, wave.batch, size),
                "two_read_bytes": two_read_bytes_without_y(site, wave.batch, size),
                **more,
            }
        )
        self.write()

    def fail(
        self, site: Site, wave: Wave, peer: str, error: BaseException, *, refused: bool = False
    ) -> None:
        """Notes that a peer failed at a site, or (`refused`) does not offer what was asked for."""
        text = f"{type(error).__name__}: {str(error)[:2000]}"
        where = {"site": site.label, "batch": wave.batch, "dtype": wave.dtype, "peer": peer}
        print(f"{'REFUSED' if refused else 'FAILED'} {where}: {text}", flush=True)
        self.document["refused" if refused else "errors"].append({**where, "error": text})
        self.write()

    def write(self, complete: bool = False) -> None:
        self.document["complete"] = complete
        write_json(self._work.output, self.document)
