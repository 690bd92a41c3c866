"""How far property tests look."""

import os


def example_count(count: int) -> int:
    """So many random examples, times JAX_BNAR_TEST_EXAMPLES: CI looks further than `make test`."""
    return count * int(os.environ.get("JAX_BNAR_TEST_EXAMPLES", "1"))
