"""How far apart the code of one call lies."""

import count_hops
import pytest

# Before the package had rooms, jit crossed 78 borders between files, and its gradient 165.
MOST = {"forward": 52, "grad": 110}


@pytest.mark.one_python
def test_a_call_stays_in_few_files() -> None:
    hops = count_hops.hops()
    for name, most in MOST.items():
        assert hops[name]["switches"] <= most, (
            f"{name}: python tests/support/count_hops.py follows a call through the package: put"
            " what is asked of one file next to each other"
        )
