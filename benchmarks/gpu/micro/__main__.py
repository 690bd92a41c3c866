"""The command `python -m benchmarks.gpu.micro`: measures the constants of cuda/host/cost.h.

It compiles main.cu for the GPU of this machine, runs it, which takes a few seconds, and writes the
constants with everything that was measured. `python -m benchmarks.gpu.model --measured-constants
FILE` takes them. `--platform cpu` only checks that there is a compiler.
"""

import json
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks.common.json_file import write_json
from benchmarks.gpu.micro.build import compile_micro, find_nvcc
from benchmarks.gpu.micro.constants import constants_of, findings
from benchmarks.gpu.program import make_document, make_parser

_LONGEST_RUN_S: Final = 30.0


def measure(nvcc: str, seconds: float) -> dict[str, Any]:
    """What main.cu prints.

    Raises:
        RuntimeError: it could not be compiled, or failed.
    """
    with tempfile.TemporaryDirectory() as directory:
        program = Path(directory) / "micro"
        compile_micro(nvcc, program, "native")
        finished = subprocess.run(
            [str(program)], capture_output=True, text=True, timeout=min(seconds, _LONGEST_RUN_S)
        )
    if finished.returncode != 0:
        raise RuntimeError(
            f"exit status {finished.returncode}: {finished.stderr}{finished.stdout[-2000:]}"
        )
    return json.loads(finished.stdout)


def main(arguments: Sequence[str] | None = None) -> int:
    options = make_parser(__doc__).parse_args(arguments)
    document = make_document("micro", options.platform)
    nvcc = find_nvcc()
    try:
        if nvcc is None:
            raise RuntimeError("nvcc is neither on PATH, nor in CUDA_HOME, nor in a wheel")
        if options.platform == "cuda":
            document |= measure(nvcc, options.seconds)
            document["constants"] = constants_of(document)
            numbers = (f"{name}={value:.3g}" for name, value in document["constants"].items())
            document["summary"] = [f"constants: {' '.join(numbers)}", *findings(document)]
        document["complete"] = True
    except (RuntimeError, ValueError, OSError, subprocess.TimeoutExpired) as error:
        document["errors"].append(f"{type(error).__name__}: {error}")
    write_json(options.output, document)
    print(*document["summary"], *document["errors"], sep="\n")
    return 1 if document["errors"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
