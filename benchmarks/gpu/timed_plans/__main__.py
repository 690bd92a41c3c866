"""The command `python -m benchmarks.gpu.timed_plans`: times the kernels with many plans each.

At 12 sites of ResNet-50, forward and backward, it asks for each strategy with slabs of several
widths and several numbers of teams. main.cu is compiled and linked with the kernels that `make gpu`
has built for this machine, and calls them without JAX, on operands that exceed L2 together: the
time is the median of five samples of 6 ms. `python -m benchmarks.gpu.model.choices --measured FILE`
compares the planner's choices with the times. The kernels of sums alone, which synchronised
statistics consist of, are timed as they are. `--platform cpu` only checks that there is a compiler.
"""

import itertools
import json
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks.common.json_file import write_json
from benchmarks.common.sites import Site
from benchmarks.gpu.micro.build import ROOT, compile_program, find_nvcc, require_nvcc
from benchmarks.gpu.program import complete, make_document, make_parser
from benchmarks.gpu.timed_plans.cases import BATCHES, SITES, asked_plans, name_of

_LONGEST_SITE_S: Final = 60.0
_PLAN: Final = ("direction", "strategy", "slab_channels", "team", "teams", "tiles_kept")


def built_kernels() -> Path:
    """The library of the newest build in this checkout.

    Raises:
        RuntimeError: there is none.
    """
    found = sorted(ROOT.glob("build/*/libbnar_cuda.a"), key=lambda path: path.stat().st_mtime)
    if not found:
        raise RuntimeError(
            "no CUDA kernels are built in this checkout: run `make gpu GPU_ARGS='--only build'`"
        )
    return found[-1]


def compile_timed_plans(nvcc: str, program: Path, architecture: str, library: Path | None) -> None:
    """Compiles main.cu and links it with the kernels; without them it is compiled to an object.

    Raises:
        RuntimeError: nvcc failed; the message is what it printed.
    """
    source = Path(__file__).with_name("main.cu")
    inputs = [source] if library is None else [source, library]
    compile_program(nvcc, inputs, program, architecture, link=library is not None)


def time_site(
    program: Path, dtype: str, batch: int, site: Site, seconds: float
) -> list[dict[str, Any]]:
    """A row for each plan that the planner makes of what it is asked for, and for the sums alone.

    Raises:
        RuntimeError: the program failed, or did not come to its end.
    """
    size = (batch, site.height, site.width, site.channels, int(site.form == "bn_add_relu"))
    argv = [str(program), dtype, *map(str, size), *asked_plans()]
    where = f"{name_of(site)} at batch {batch}"
    try:
        finished = subprocess.run(argv, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"{where}: no end within {seconds:.0f} s") from None
    if finished.returncode != 0:
        raise RuntimeError(f"{where}: exit status {finished.returncode}: {finished.stderr[-2000:]}")
    rows: dict[tuple[Any, ...], dict[str, Any]] = {}
    for line in finished.stdout.splitlines():
        row = json.loads(line)
        # The same plan, asked for in two ways, was timed twice.
        rows.setdefault(
            tuple(row[name] for name in _PLAN),
            {"site": name_of(site), "batch": batch, **row},
        )
    return list(rows.values())


def main(arguments: Sequence[str] | None = None) -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--batch", type=int, nargs="+", default=BATCHES)
    options = parser.parse_args(arguments)
    document = make_document("timed_plans", options.platform, dtype=options.dtype, rows=[])
    end = time.monotonic() + options.seconds

    def fill() -> None:
        nvcc = require_nvcc(find_nvcc())
        if options.platform != "cuda":
            return
        with tempfile.TemporaryDirectory() as directory:
            program = Path(directory) / "timed_plans"
            compile_timed_plans(nvcc, program, "native", built_kernels())
            for batch, site in itertools.product(options.batch, SITES):
                left = end - time.monotonic()
                if left < 1:
                    raise RuntimeError(f"no time was left for {name_of(site)} at {batch}")
                document["rows"] += time_site(
                    program, options.dtype, batch, site, min(left, _LONGEST_SITE_S)
                )
                write_json(options.output, document)
        document["summary"].append(f"{len(document['rows'])} plans were timed")

    return complete(document, options.output, fill)


if __name__ == "__main__":
    raise SystemExit(main())
