"""With the persistent compilation cache, a second process does not compile our programs again.

Programs that JAX partitions through `custom_partitioning` are an exception. Their cache key
contains the address of a Python object, so they miss in every new process (jax issue 21159), unless
`jax_remove_custom_partitioning_ptr_from_cache_key` is set, as it is below.
"""

import json
from pathlib import Path

import pytest
from subprocesses import run_python

_PROGRAMS = """
import collections, json, sys
import jax
jax.config.update("jax_num_cpu_devices", 2)
jax.config.update("jax_compilation_cache_dir", {directory!r})
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
jax.config.update("jax_remove_custom_partitioning_ptr_from_cache_key", True)
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
import jax_bnar

events = collections.Counter()
jax.monitoring.register_event_listener(lambda name, **_: events.update([name.split("/")[-1]]))
rng = np.random.default_rng(0)
x, z = jnp.asarray(rng.standard_normal((2, 8, 3, 4)), np.float32)
scale = bias = jnp.ones(4, np.float32)

def loss(x, z, scale, bias):
    y, mean, var = jax_bnar.bn_add_relu(x, z, scale, bias, save="mask")
    return (y**2).sum() + (mean * var).sum()

gradient = jax.value_and_grad(loss, (0, 1, 2, 3))
mesh = Mesh(np.array(jax.devices()), ("data",))
rows, whole = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())
mapped = jax.shard_map(
    lambda *given: jax.lax.psum(loss(*given), "data"),
    mesh=mesh, in_specs=(P("data"), P("data"), P(), P()), out_specs=P(),
)
programs = {{
    "one device": jax.jit(gradient),
    "shard_map": jax.jit(jax.value_and_grad(mapped, (0, 1, 2, 3))),
    "sharded jit": jax.jit(gradient, in_shardings=(rows, rows, whole, whole)),
}}
report = {{}}
for name, program in programs.items():
    lowered = program.lower(x, z, scale, bias)
    events.clear()
    compiled = lowered.compile()
    found = {{k: events[k] for k in ("cache_hits", "cache_misses")}}
    given = x, z, scale, bias
    if name != "one device":
        given = [jax.device_put(a, s) for a, s in zip(given, (rows, rows, whole, whole))]
    results = jax.tree.leaves(compiled(*given))
    found["sums"] = [np.asarray(result).tobytes().hex()[:64] for result in results]
    report[name] = found
print(json.dumps(report))
"""


@pytest.mark.slow
def test_second_process_hits(tmp_path: Path) -> None:
    program = _PROGRAMS.format(directory=str(tmp_path))
    first, second = (json.loads(run_python(program, timeout=300, prelude="")) for _ in range(2))
    assert set(first) == {"one device", "shard_map", "sharded jit"}
    for name, cold in first.items():
        warm = second[name]
        assert (cold["cache_hits"], cold["cache_misses"]) == (0, 1), name
        assert (warm["cache_hits"], warm["cache_misses"]) == (1, 0), name
        assert warm["sums"] == cold["sums"], name
