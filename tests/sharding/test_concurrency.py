"""No deadlock and no cross-talk with many devices and many Python threads, each with a timeout.

A CPU handler that schedules work on XLA's pool and waits for it would hang as soon as the handlers
of several devices occupy every thread of the pool.
"""

import pytest
from subprocesses import IN_THREADS, run_python
from tiers import slow_except

# A step is forward and backward on arrays that are large enough for several threads.
SETUP = """
import sys
import jax.numpy as jnp
import numpy as np
import jax_bnar

implementation, axis = {implementation!r}, {axis}
shape = (16, 28, 28, 64) if axis == -1 else (16, 64, 28, 28)

def step(x, z, scale, bias):
    def loss(x, z, scale, bias):
        result = jax_bnar.bn_add_relu(
            x, z, scale, bias, axis=axis, save="mask", implementation=implementation)
        return jnp.square(result.y).sum() + result.var.sum()
    return jax.value_and_grad(loss, (0, 1, 2, 3))(x, z, scale, bias)

random = np.random.default_rng(0)
operands = [random.standard_normal(s).astype(np.float32) for s in (shape, shape, (64,), (64,))]
jitted = jax.jit(step)
expected = [np.asarray(leaf) for leaf in jax.tree.leaves(jitted(*operands))]

def check(results):
    for left, right in zip(jax.tree.leaves(results), expected, strict=True):
        np.testing.assert_array_equal(np.asarray(left), right)
"""

EIGHT_DEVICES = """
assert jax.device_count() == 8
placed = [[jax.device_put(a, device) for a in operands] for device in jax.devices()]
for _ in range(5):
    for results in [jitted(*given) for given in placed]:
        check(results)
"""

SHARD_MAP = """
from jax.sharding import PartitionSpec as P
mesh = jax.make_mesh((8,), ("d",))
sharding = jax.sharding.NamedSharding(mesh, P("d"))
together = [jax.device_put(np.concatenate([a] * 8), sharding) for a in operands]
mapped = jax.jit(jax.shard_map(
    lambda *given: jax.tree.map(lambda leaf: leaf.reshape(1, *leaf.shape), step(*given)),
    mesh=mesh, in_specs=(P("d"),) * 4, out_specs=P("d")))
for _ in range(3):
    results = mapped(*together)
    for d in range(8):
        check(jax.tree.map(lambda leaf: np.asarray(leaf)[d], results))
"""

# A device that waits for the others in an all-reduce must not keep them from running their kernels.
SHARDED = """
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,))
placed = [jax.device_put(a, NamedSharding(mesh, P("d") if a.ndim > 1 else P())) for a in operands]
for _ in range(5):
    for results in [jitted(*placed) for _ in range(4)]:
        for left, right in zip(jax.tree.leaves(results), expected, strict=True):
            np.testing.assert_allclose(np.asarray(left), right, rtol=1e-3, atol=1e-3)
"""

THREADS = """
def work(i):
    # Half of the threads compile their own function, the others share one.
    function = jax.jit(lambda *given: step(*given)) if i % 2 else jitted
    for _ in range(10):
        check(function(*operands))
in_threads(work, range(12))
"""

THREADS_AND_DEVICES = """
def work(device):
    given = [jax.device_put(a, device) for a in operands]
    for results in [jitted(*given) for _ in range(5)]:
        check(results)
in_threads(work, jax.devices() * 2)
"""

PROGRAMS = {
    "eight devices": EIGHT_DEVICES,
    "shard_map": SHARD_MAP,
    "sharded": SHARDED,
    "threads": THREADS,
    "threads and devices": THREADS_AND_DEVICES,
}


@pytest.mark.parametrize("axis", slow_except({-1}, [-1, 1]))
@pytest.mark.parametrize("program", slow_except({"sharded", "threads"}, PROGRAMS))
def test_finishes(program: str, axis: int) -> None:
    code = SETUP.format(implementation="ffi", axis=axis) + PROGRAMS[program]
    output = run_python(IN_THREADS + code + "\nprint('finished')\n", timeout=240)
    assert output.split() == ["finished"]
