"""Which sites are timed, and with which plans."""

import itertools
from collections.abc import Iterator
from typing import Final

from benchmarks.common.sites import RESNET50_SITES, Site

# A norm without an activation takes as long as one with a ReLU.
SITES: Final = tuple(site for site in RESNET50_SITES if site.form != "batch_norm")
BATCHES: Final = (256, 64, 32)
_SLABS: Final = {"cluster": (32, 64, 128), "on_chip": (32, 64, 128, 256)}
_TEAMS: Final = (1, 2, 4, 8, 16, 32)


def name_of(site: Site) -> str:
    """The site in the results."""
    residual = " add" if site.form == "bn_add_relu" else ""
    return f"{site.height}x{site.width}x{site.channels}{residual}"


def asked_plans() -> Iterator[str]:
    """What the planner is asked for, as main.cu reads it: STRATEGY:COLUMNS:TEAMS."""
    yield "auto:0:0"
    yield "two_kernels:0:0"
    for columns in _SLABS["cluster"]:
        yield f"cluster:{columns}:0"
    for columns, teams in itertools.product(_SLABS["on_chip"], _TEAMS):
        yield f"on_chip:{columns}:{teams}"
