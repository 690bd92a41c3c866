"""The command `python -m benchmarks.gpu.micro`: measures constants of cuda/host/cost.h.

It compiles main.cu for the GPU of this machine, runs it, which takes a few seconds, and writes the
constants with everything that was measured. `python -m benchmarks.gpu.model --measured-constants
FILE` takes them. `--platform cpu` only checks that there is a compiler.
"""

import contextlib
import json
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks.gpu.micro.build import compile_micro, find_nvcc, require_nvcc
from benchmarks.gpu.micro.constants import constants_of, findings
from benchmarks.gpu.program import complete, make_document, make_parser

_LONGEST_RUN_S: Final = 30.0


def measure(nvcc: str, seconds: float) -> dict[str, Any]:
    """What main.cu prints, with "stopped" if it did not come to its end.

    Raises:
        RuntimeError: it could not be compiled.
    """
    with tempfile.TemporaryDirectory() as directory:
        program = Path(directory) / "micro"
        compile_micro(nvcc, program, "native")
        return run(program, min(seconds, _LONGEST_RUN_S))


def run(program: Path, seconds: float) -> dict[str, Any]:
    """What a program prints like main.cu; what it had measured when it was killed or failed too."""
    with tempfile.TemporaryFile("w+") as printed, tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen([str(program)], stdout=printed, stderr=errors)
        try:
            status = process.wait(seconds)
            stopped = None if status == 0 else f"exit status {status}"
        except subprocess.TimeoutExpired:
            stopped = f"no end within {seconds:.0f} s"
            process.kill()
            # One that waits in the driver may not even die.
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(5)
        for file in (printed, errors):
            file.seek(0)
        document = parse(printed.read())
        if stopped is not None:
            document["stopped"] = f"{stopped}: {errors.read()[-2000:]}"
    return document


def parse(printed: str) -> dict[str, Any]:
    """The document, or as much of it as was printed: a line for each measurement."""
    try:
        return json.loads(printed)
    except ValueError:
        pass
    head, _, rest = printed.partition('"measured": [')
    document: dict[str, Any] = {"measured": []}
    with contextlib.suppress(ValueError):
        document |= json.loads(f"{head.strip().rstrip(',')}}}")
    for line in rest.splitlines():
        with contextlib.suppress(ValueError):  # the last one may be cut
            document["measured"].append(json.loads(line.rstrip(",")))
    return document


def main(arguments: Sequence[str] | None = None) -> int:
    options = make_parser(__doc__).parse_args(arguments)
    document = make_document("micro", options.platform)

    def fill() -> None:
        nvcc = require_nvcc(find_nvcc())
        if options.platform == "cuda":
            document.update(measure(nvcc, options.seconds))
            if "stopped" in document:
                raise RuntimeError(
                    f"{document['stopped']}; {len(document['measured'])} measurements are kept"
                )
            document["constants"] = constants_of(document)
            numbers = (f"{name}={value:.3g}" for name, value in document["constants"].items())
            document["summary"] = [f"constants: {' '.join(numbers)}", *findings(document)]

    return complete(document, options.output, fill)


if __name__ == "__main__":
    raise SystemExit(main())
