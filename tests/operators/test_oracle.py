"""The oracle against itself: its gradients are the slopes of its forward, for any number of inputs.

It computes float64 data in long double. All other tests of the operators rely on it.
"""

from typing import Any

import numpy as np
import oracle
import pytest

pytestmark = pytest.mark.quick

SHAPE, EPSILON, STEP = (4, 2, 3), 1e-3, 2.0**-22
inputs = pytest.mark.parametrize("count", [1, 2, 3])
Wide = list[oracle.Array]


def pack(arrays: Wide) -> oracle.PerInput:
    """As the oracle takes what belongs to inputs."""
    return arrays[0] if len(arrays) == 1 else tuple(arrays)


def slopes(function: Any, arrays: Wide) -> Wide:
    """The gradient of a scalar function by central differences."""
    results = []
    for array in arrays:
        slope = np.zeros(array.shape, np.longdouble)
        for at in np.ndindex(array.shape):
            before = array[at]
            array[at] = before + STEP
            above = function()
            array[at] = before - STEP
            slope[at] = (above - function()) / (2 * STEP)
            array[at] = before
        results.append(slope)
    return results


def assert_slopes(function: Any, arrays: Wide, gradients: oracle.PerInput) -> None:
    expected = slopes(function, arrays)
    for (gradient,), slope in zip(oracle.each_input(gradients), expected, strict=True):
        np.testing.assert_allclose(
            gradient.astype(np.float64), slope.astype(np.float64), rtol=1e-6, atol=1e-6
        )


def draw(count: int) -> tuple[Wide, Wide, Wide, Wide, Wide]:
    """x, scale, bias, and two vectors for each input."""
    random = np.random.default_rng(count)

    def each(shape: tuple[int, ...]) -> Wide:
        return [random.standard_normal(shape) for _ in range(count)]

    return each(SHAPE), each((3,)), each((3,)), each((3,)), each((3,))


@inputs
def test_gradients_are_slopes(count: int) -> None:
    x, scale, bias, dmean, dvar = draw(count)
    z = np.random.default_rng(9).standard_normal(SHAPE)
    dy = np.cos(np.arange(24)).reshape(SHAPE)

    def forward(*, relu: bool = True) -> oracle.Forward:
        given = (pack(x), z, pack(scale), pack(bias))
        return oracle.forward(*given, epsilon=EPSILON, relu=relu)

    def loss() -> Any:
        result = forward()
        each = oracle.each_input(result.mean, result.var)
        pairs = zip(each, dmean, dvar, strict=True)
        return (result.y * dy).sum() + sum((m * a + v * b).sum() for (m, v), a, b in pairs)

    y = forward().y
    assert np.abs(forward(relu=False).y).min() > 1e-3  # no difference crosses the kink
    gradients = oracle.backward(
        dy, pack(x), y, pack(scale), pack(dmean), pack(dvar), epsilon=EPSILON
    )
    assert_slopes(loss, x, gradients.dx)
    assert_slopes(loss, [z], gradients.dz)
    assert_slopes(loss, scale, gradients.dscale)
    assert_slopes(loss, bias, gradients.dbias)


@inputs
def test_inference_gradients_are_slopes(count: int) -> None:
    x, scale, bias, mean, root = draw(count)
    var = [r**2 + 1 for r in root]
    dy = np.cos(np.arange(24)).reshape(SHAPE)

    def forward() -> oracle.Array:
        given = map(pack, (scale, bias, mean, var))
        return oracle.inference(pack(x), None, *given, epsilon=EPSILON)[0]

    gradients = oracle.inference_backward(
        dy, pack(x), forward(), pack(scale), pack(mean), pack(var), epsilon=EPSILON
    ).gradients
    for arrays, gradient in zip(
        (x, scale, bias, mean, var), (gradients[i] for i in (0, 2, 3, 4, 5)), strict=True
    ):
        assert_slopes(lambda: (forward() * dy).sum(), arrays, gradient)
