"""Huge pages for results in fresh memory change where the results lie and nothing else."""

import ctypes
import json
import pathlib

import pytest
from subprocesses import run_python

from jax_bnar._kernels import targets

pytestmark = pytest.mark.one_python

# A step with one input and one with two. Each array has 34 MiB, which glibc always maps afresh.
PROGRAM = """
import hashlib
import json
import pathlib

import jax
import jax.numpy as jnp
import jax_bnar


@jax.jit
def steps(x, z):
    joined, vjp, _ = jax.vjp(
        lambda x, z: jax_bnar.bn_add_relu(x, z, None, None)[::2], x, z, has_aux=True
    )
    dual, dual_vjp, _ = jax.vjp(
        lambda x, z: jax_bnar.dual_bn_add_relu(x, z, None, None, None, None)[:2], x, z, has_aux=True
    )
    return joined, *vjp(z), dual, *dual_vjp(x)


def is_advised(array):
    middle = array.unsafe_buffer_pointer() + array.nbytes // 2
    here = False
    for line in pathlib.Path("/proc/self/smaps").read_text().splitlines():
        name, *fields = line.split()
        if not name.endswith(":"):
            begin, end = (int(bound, 16) for bound in name.split("-"))
            here = begin <= middle < end
        elif here and name == "VmFlags:":
            return "hg" in fields
    raise AssertionError("the array is in no mapping")


x, z = (jax.random.normal(jax.random.key(i), (2176, 64, 64), jnp.float32) for i in range(2))
results = steps(x, z)
print(json.dumps({
    "digests": [hashlib.sha256(memoryview(result)).hexdigest() for result in results],
    "advised": [is_advised(result) for result in results],
}))
"""


def run(setting: str) -> dict[str, list[str | bool]]:
    prelude = f"import os\nos.environ['JAX_BNAR_HUGE_PAGES'] = {setting!r}\n"
    return json.loads(run_python(PROGRAM, timeout=300, prelude=prelude))


@pytest.mark.slow
@pytest.mark.skipif(not pathlib.Path("/proc/self/smaps").exists(), reason="needs Linux")
@pytest.mark.skipif(hasattr(ctypes.CDLL(None), "mallctl"), reason="jemalloc advises as well")
def test_results_are_the_same_on_huge_pages() -> None:
    on, off = run("1"), run("0")
    assert len(on["digests"]) == 6
    assert on["digests"] == off["digests"]
    # Where Linux has no huge pages on request, nobody asks for them.
    assert on["advised"] == [targets.huge_pages()] * 6
    assert off["advised"] == [False] * 6
