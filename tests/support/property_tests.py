"""The number of examples in property tests."""

import os


def example_count(count: int) -> int:
    """`count` times JAX_BNAR_TEST_EXAMPLES, which `make check` sets to try more examples."""
    return count * int(os.environ.get("JAX_BNAR_TEST_EXAMPLES", "1"))
