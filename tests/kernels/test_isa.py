"""Every instruction set of this processor agrees with pure JAX."""

import itertools
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkout import TESTS
from subprocesses import run_python
from tiers import slow_except

import jax_bnar
from jax_bnar._base.config import Save
from jax_bnar._base.implementation import Implementation
from jax_bnar._kernels import targets

pytestmark = pytest.mark.one_python

TOLERANCES = {"float32": 1e-4, "bfloat16": 5e-2, "float16": 1e-2}
# These cover both layouts, and widths that do not fill a vector.
SHAPES = (((5, 6, 7, 19), -1), ((8, 4, 4, 64), -1), ((3, 5, 9, 7), 1))
CASES = tuple(itertools.product(TOLERANCES, SHAPES))


def results(
    implementation: Implementation, dtype: str, shape: tuple[int, ...], axis: int
) -> list[Any]:
    """Results of forward and backward, with each value of `save`."""
    random = np.random.default_rng(0)
    channels = (shape[axis],)
    operands = [
        random.standard_normal(s).astype(jnp.dtype(d))
        for s, d in ((shape, dtype), (shape, dtype), (channels, "float32"), (channels, "float32"))
    ]

    def loss(save: Save, *operands: jax.Array) -> Any:
        result = jax_bnar.bn_add_relu(
            *operands, axis=axis, save=save, implementation=implementation
        )
        return jnp.square(result.y.astype("float32")).sum() + result.var.sum(), result

    @jax.jit
    def both(*operands: jax.Array) -> Any:
        gradient = jax.grad(loss, (1, 2, 3, 4), has_aux=True)
        return [gradient(save, *operands) for save in ("y", "mask")]

    return [np.asarray(leaf, np.float32) for leaf in jax.tree.leaves(both(*operands))]


def test_variance_of_long_planes_is_accurate() -> None:
    """Float sums of many squares of bfloat16 elements would be rounded down again and again."""
    for mean in (0.0, 1.0):
        x = np.random.default_rng(0).normal(mean, size=(1, 32, 2048)).astype(jnp.bfloat16)
        var = jax_bnar.batch_statistics(x, axis=1, implementation="ffi").var
        exact = x.astype(np.float64).var((0, 2))
        assert np.abs(np.float64(var) / exact - 1).max() < 10 * 2.0**-24


PRELUDE = """
import os
os.environ["JAX_BNAR_CPU_ISA"] = {isa!r}
import sys
sys.path[:0] = {folders!r}
"""

PROGRAM = """
import numpy as np
import test_isa
from jax_bnar._kernels import targets
try:
    targets.cpu_isa()
except ValueError as error:
    assert "of which this processor runs" in str(error), error
    print("refused")
    raise SystemExit
for i, (dtype, shape) in enumerate(test_isa.CASES):
    expected = np.load({expected!r} + f"/{{i}}.npz").values()
    for ours, theirs in zip(test_isa.results("ffi", dtype, *shape), expected, strict=True):
        # Relative to the array, because small elements of a sum result from cancellation.
        tolerance = test_isa.TOLERANCES[dtype] * np.abs(theirs).max()
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=tolerance)
test_isa.test_variance_of_long_planes_is_accurate()
print(targets.cpu_isa())
"""


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("expected")
    for i, (dtype, shape) in enumerate(CASES):
        np.savez(folder / f"{i}.npz", *results("xla", dtype, *shape))
    return folder


# All other tests run the best set that the processor has.
ISAS = ("avx512bf16", "avx512", "avx2", "baseline")


@pytest.mark.parametrize("isa", slow_except({"avx2", "baseline"}, ISAS))
def test_agrees_with_pure_jax(isa: str, expected: pathlib.Path) -> None:
    used = run_python(
        PROGRAM.format(expected=str(expected)),
        timeout=300,
        prelude=PRELUDE.format(isa=isa, folders=[str(TESTS / "kernels"), str(TESTS / "support")]),
    ).split()[-1]
    if used == "refused":
        assert isa != "baseline"
        pytest.skip(f"this processor does not run {isa}")
    assert used == isa


@pytest.mark.slow
def test_empty_value_is_as_good_as_none() -> None:
    program = "from jax_bnar._kernels import targets\nprint(targets.cpu_isa())"
    prelude = "import os\nos.environ['JAX_BNAR_CPU_ISA'] = ''\n"
    used = run_python(program, timeout=300, prelude=prelude).split()[-1]
    assert used == targets.cpu_isa()
