"""Operators on an array whose reshape has divided a mesh axis over two array axes."""

import functools
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P
from sharding_tools import collectives, make_mesh, put, relative_difference

import jax_bnar
from jax_bnar._sharding.parts_of_axes import parts_of_axes

pytestmark = pytest.mark.quick


@st.composite
def shardings(draw: st.DrawFn) -> tuple[list[int], np.ndarray]:
    """Tiles and devices of a random sharding over a mesh of up to four axes."""
    sizes = draw(st.lists(st.sampled_from([2, 3, 4]), min_size=1, max_size=4))
    order = draw(st.permutations(range(len(sizes))))
    ends = sorted(draw(st.lists(st.integers(0, len(sizes)), max_size=3)))
    bounds = [0, *ends, len(sizes)]
    tiles = [
        math.prod(sizes[axis] for axis in order[first:last])
        for first, last in itertools.pairwise(bounds)
    ]
    return tiles, np.arange(math.prod(sizes)).reshape(sizes).transpose(order).reshape(-1)


@given(sharding=shardings())
def test_every_sharding_by_whole_axes_is_found(sharding: Any) -> None:
    tiles, devices = sharding
    parts = parts_of_axes(tiles, devices)
    assert parts is not None
    sizes, axes = parts
    mesh = np.arange(math.prod(sizes)).reshape(sizes)
    assert tiles == [math.prod(sizes[i] for i in own) for own in axes]
    permutation = [i for own in axes for i in own]
    np.testing.assert_array_equal(mesh.transpose(permutation).reshape(-1), devices)


def test_shardings_that_no_mesh_in_order_has() -> None:
    assert parts_of_axes([4, 2, 1], range(8)) == ((4, 2), ((0,), (1,), ()))
    assert parts_of_axes([2, 2], [0, 1, 3, 2]) is None
    assert parts_of_axes([4], [0, 1, 3, 2]) is None
    assert parts_of_axes([3], [0, 2, 1]) is None


def of_each(form: str, save: Any) -> Any:
    """The gradient step of a norm of each of four examples of four rows."""

    def norm(x: jax.Array) -> tuple[jax.Array, ...]:
        if form == "bn_add_relu":
            return tuple(jax_bnar.bn_add_relu(x, -x, None, None, save=save))
        if form == "dual_bn_add_relu":
            return tuple(jax_bnar.dual_bn_add_relu(x, -x, *[None] * 4, save=save))
        return tuple(jax_bnar.batch_statistics(x))

    def loss(x: jax.Array) -> jax.Array:
        results = jax.vmap(norm)(x.reshape(4, 4, *x.shape[1:]))
        weights = np.cos(np.arange(x.shape[-1], dtype=np.float32))
        products = [jnp.sin(r) * jnp.broadcast_to(weights, r.shape) for r in results]
        return functools.reduce(jnp.add, [product.sum() for product in products])

    return jax.jit(jax.value_and_grad(loss))


@pytest.mark.parametrize("save", ["y", "mask"])
@pytest.mark.parametrize("form", ["bn_add_relu", "dual_bn_add_relu", "batch_statistics"])
@pytest.mark.parametrize(
    ("sizes", "spec"),
    [({"d": 8}, P("d")), ({"c": 2, "d": 4}, P(("d", "c"))), ({"c": 4, "d": 2}, P(("d", "c")))],
    ids=["one axis", "4 by 2", "2 by 4"],
)
def test_examples_on_two_devices_each(sizes: dict[str, int], spec: P, form: str, save: str) -> None:
    """Statistics are merged between these two, and no array is gathered."""
    x = jnp.asarray(np.random.default_rng(0).standard_normal((16, 5, 8)), jnp.float32)
    placed = put(x, make_mesh("auto", **sizes), spec)
    step = of_each(form, save)
    assert relative_difference(step(placed), step(x)) < 5e-6
    found = [each for operation in collectives(step, placed) for each in operation]
    assert {each.opcode for each in found} == {"all-reduce"}
