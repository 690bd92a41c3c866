"""Compares pytrees of arrays."""

from typing import Any

import jax
import numpy as np


def assert_trees_close(left: Any, right: Any, *, tolerance: float = 2e-5) -> None:
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)
