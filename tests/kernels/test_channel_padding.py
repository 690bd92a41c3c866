"""Arrays of few rows and many channels run with whole vectors, at the price of copies.

`CORNER_SHAPES` has two of them, so other tests compare their results with the oracle.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import Case, all_dtypes, operands
from jax import export

import jax_bnar
from jax_bnar._base.canonical import CanonicalShape
from jax_bnar._kernels.channel_padding import padded_channels

pytestmark = pytest.mark.quick


@pytest.mark.parametrize(
    ("shape", "kinds", "expected"),
    [
        ((1, 17, 8191, 1), ("tensor", "vector"), 8192),
        ((3, 128, 8191, 1), ("tensor",), 8192),
        ((1, 4, 1001, 6), ("tensor",), 1008),
        ((1, 17, 8191, 1), ("tensor", "mask"), None),
        ((1, 129, 8191, 1), ("tensor",), None),  # enough rows
        ((1, 17, 8192, 1), ("tensor",), None),  # whole vectors
        ((1, 17, 127, 1), ("tensor",), None),  # little work in any case
        ((1, 4, 1001, 49), ("tensor",), None),  # planes
    ],
)
def test_when_there_are_more_channels(
    shape: tuple[int, int, int, int], kinds: tuple[str, ...], expected: int | None
) -> None:
    assert padded_channels(CanonicalShape(*shape), kinds) == expected


def of_case(case: Case) -> jax.Array:
    return jnp.asarray(operands(case).x)


def compiled(function: Any, *given: Any) -> str:
    text = jax.jit(function).lower(*given).compile().as_text()
    assert text is not None
    return text


@all_dtypes
def test_programs_have_one_call_each_way_on_whole_vectors(dtype: str) -> None:
    x = of_case(Case((17, 259), dtype=dtype))

    def step(x: Any) -> Any:
        y, vjp = jax.vjp(lambda x: jax_bnar.bn_relu(x, None, None).y, x)
        return vjp(y)

    text = compiled(step, x)
    calls = [line for line in text.splitlines() if 'custom_call_target="jax_bnar_' in line]
    assert len(calls) == 2
    assert all(f"[{17 * 272}]" in line for line in calls)


def test_of_groups_and_of_a_vmap() -> None:
    x = of_case(Case((6, 2, 259)))
    of_groups = jax_bnar.bn_relu(x, None, None, num_groups=3)
    of_vmap = jax.vmap(lambda x: jax_bnar.bn_relu(x, None, None))(x.reshape(3, 2, 2, 259))
    np.testing.assert_array_equal(of_groups.y, of_vmap.y.reshape(x.shape))
    exact = np.asarray(x, np.float64).reshape(3, 4, 259)
    np.testing.assert_allclose(of_groups.mean, exact.mean(1), rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(of_groups.var, exact.var(1), rtol=1e-5)


def test_programs_of_any_number_of_channels_have_none() -> None:
    (channels,) = export.symbolic_shape("c")
    shape = jax.ShapeDtypeStruct((17, channels), jnp.float32)
    function = jax.jit(lambda x: jax_bnar.bn_relu(x, None, None).y)
    checks = jax_bnar.DISABLED_EXPORT_CHECKS
    program = export.export(function, disabled_checks=checks)(shape)
    x = of_case(Case((17, 259)))
    np.testing.assert_allclose(
        program.call(x), jax_bnar.bn_relu(x, None, None).y, rtol=1e-5, atol=1e-6
    )
