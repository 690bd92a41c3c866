"""Writes what the model predicts for the tree as it stands, for the figures and the tests.

python -m benchmarks.gpu.model.write
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import tyro

from benchmarks.common.json_file import write_json
from benchmarks.gpu.model.devices import DEVICES
from benchmarks.gpu.model.kinds import Save
from benchmarks.gpu.model.predict import predict
from benchmarks.gpu.model.range import over_the_range
from benchmarks.sites.problem import DType

RESULTS: Final = Path(__file__).parents[2] / "results" / "gpu-model-h200.json"
# The sites are written for the first of them.
CASES: Final[tuple[tuple[int, DType, Save], ...]] = (
    (256, "bfloat16", "mask"),
    (256, "bfloat16", "y"),
    (256, "float16", "mask"),
    (256, "float32", "mask"),
    (32, "bfloat16", "mask"),
)


def predictions() -> dict[str, Any]:
    runs = []
    for batch, dtype, save in CASES:
        document = _rounded(predict(DEVICES["h200"], batch, dtype, save))
        if runs:
            # They would be the same again.
            for name in ("sites", "constants", "instructions"):
                del document[name]
        runs.append(document)
    batch, dtype, save = CASES[0]
    rows = _rounded(over_the_range(DEVICES["h200"], batch, dtype, save))
    return {"schema": 1, "modelled": True, "runs": runs, "range": rows}


def _rounded(value: Any) -> Any:
    """Numbers that do not depend on how the sums were ordered."""
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


def main(arguments: Sequence[str] | None = None) -> None:
    tyro.cli(_write, args=arguments, description=__doc__)


def _write(output: Path = RESULTS) -> None:
    write_json(output, predictions())
    print(f"wrote {output}")


if __name__ == "__main__":
    main()
