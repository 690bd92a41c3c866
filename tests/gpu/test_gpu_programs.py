"""Separate processes on a GPU: CUDA graphs, several streams and threads, a full card.

`make gpu` runs these. They need separate processes because XLA's flags and JAX's share of the
memory are fixed when a process starts.
"""

import os
import pathlib

import pytest
from gpu_cases import DRY_RUN, PLATFORM, STRATEGIES, calls_outside_graphs, only_on_gpu
from subprocesses import IN_THREADS, run_python

pytestmark = pytest.mark.gpu
SECONDS = 120
SHAPE = (4, 5, 5, 24) if DRY_RUN else (32, 28, 28, 128)
REPLAYS = 3 if DRY_RUN else 50
# XLA records even a single call of ours.
IN_A_GRAPH = "--xla_gpu_enable_command_buffer=FUSION,CUSTOM_CALL --xla_gpu_graph_min_graph_size=1"

SETUP = f"""
import threading
import jax
import jax.numpy as jnp
import numpy as np
import jax_bnar

assert jax.default_backend() == {PLATFORM!r}
shape, replays = {SHAPE}, {REPLAYS}

def step(x, z, scale, bias, dy, implementation="ffi"):
    def forward(x, z, scale, bias):
        return jax_bnar.bn_add_relu(x, z, scale, bias, save="mask", implementation=implementation)
    result, vjp = jax.vjp(forward, x, z, scale, bias)
    zeros = jax.tree.map(jnp.zeros_like, result)
    return result, vjp(zeros._replace(y=dy))

def make(seed):
    random = np.random.default_rng(seed)
    x, z, dy = (jnp.asarray(random.standard_normal(shape), jnp.bfloat16) for _ in range(3))
    scale, bias = (jnp.asarray(random.standard_normal(shape[-1]), jnp.float32) for _ in range(2))
    return x, z, scale, bias, dy

def host(tree):
    return [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]

def check(got, expected):
    for left, right in zip(host(got), expected, strict=True):
        np.testing.assert_array_equal(left, right)
"""

# Elementwise operations before, between and after ours, as in a network, and then the same program
# on other buffers. The expected values come from separate calls, which launch only our kernels.
GRAPH = """
jitted = jax.jit(step)

def network(x, z, scale, bias, dy):
    (y, mean, var), gradients = step(x * 2, z, scale + 1, bias, dy)
    return (y + 1, mean, var), gradients

network = jax.jit(network)
inputs = [make(seed) for seed in range(3)]
expected = []
for x, z, scale, bias, dy in inputs:
    (y, mean, var), gradients = jitted(x * 2, z, scale + 1, bias, dy)
    expected.append(host(((y + 1, mean, var), gradients)))
for replay in range(replays):
    check(network(*inputs[replay % 3]), expected[replay % 3])
"""

THREADS = """
expected = [host(jax.jit(step)(*make(seed))) for seed in range(4)]

def work(seed):
    function, given = jax.jit(lambda *given: step(*given)), make(seed)
    for _ in range(replays):
        check(function(*given), expected[seed])

in_threads(work, range(4))
"""

# Two norms that do not depend on each other, in one program.
TWO_AT_ONCE = """
inputs = make(0), make(1)
expected = [host(jax.jit(step)(*given)) for given in inputs]
both = jax.jit(both)
for _ in range(replays):
    for got, wanted in zip(both(*inputs), expected, strict=True):
        check(got, wanted)
"""

# XLA runs operations with this annotation on separate streams.
TWO_STREAMS = """
from jax.experimental import compute_on

# The newest JAX has renamed compute_on2 to compute_on.
annotate = getattr(compute_on, "compute_on2", compute_on.compute_on)

def on_stream(number):
    space = jax.memory.Space.Device
    return annotate(step, compute_type=f"gpu_stream:{number}", out_memory_spaces=space)

def both(first, second):
    return on_stream(1)(*first), on_stream(2)(*second)
"""

TWO_IN_ONE_GRAPH = """
def both(first, second):
    return step(*first), step(*second)
"""

# Another library's blocks occupy multiprocessors while our blocks wait at a barrier.
BESIDE_TORCH = """
import torch

expected, function, given = host(jax.jit(step)(*make(0))), jax.jit(step), make(0)
matrix, stop = torch.randn(2048, 2048, device="cuda"), threading.Event()

def multiply():
    with torch.cuda.stream(torch.cuda.Stream()):
        while not stop.is_set():
            for _ in range(20):
                matrix @ matrix
            torch.cuda.current_stream().synchronize()

thread = threading.Thread(target=multiply)
thread.start()
try:
    for _ in range(replays):
        check(function(*given), expected)
finally:
    stop.set()
    thread.join()
"""

# This process may use 2 to 3 GB of the card: there is room for x, but then none for y.
FULL_CARD = """
x = jnp.ones((1 << 20, 100), jnp.bfloat16).block_until_ready()
held = []
for mebibytes in 256, 64:
    try:
        while True:
            held.append(jnp.zeros((mebibytes << 20,), jnp.uint8).block_until_ready())
    except jax.errors.JaxRuntimeError as error:
        assert "RESOURCE_EXHAUSTED" in str(error), error
try:
    jax.block_until_ready(jax_bnar.bn_relu(x, None, None, implementation="ffi"))
except jax.errors.JaxRuntimeError as error:
    assert "RESOURCE_EXHAUSTED" in str(error), error
else:
    raise AssertionError("the allocation succeeded on a full card")
held.clear()
result = jax_bnar.bn_relu(x, None, None, implementation="ffi")
assert not np.asarray(result.y).any()
"""


def start(program: str, **variables: str) -> None:
    # Warnings from other versions of JAX and PyTorch are not the subject of these tests.
    prelude = "import os, warnings\nwarnings.simplefilter('default')\n"
    prelude += "".join(f"os.environ[{k!r}] = {v!r}\n" for k, v in variables.items())
    prelude += IN_THREADS + SETUP
    output = run_python(program + "\nprint('finished')\n", timeout=SECONDS, prelude=prelude)
    assert output.split()[-1] == "finished"


def with_flags(flags: str) -> str:
    """The caller's XLA_FLAGS, except those about command buffers, and `flags`."""
    kept = [
        flag
        for flag in os.environ.get("XLA_FLAGS", "").split()
        if "command_buffer" not in flag and "graph_min" not in flag
    ]
    return " ".join([*kept, flags])


@pytest.mark.parametrize("strategy", STRATEGIES[:1] if DRY_RUN else STRATEGIES)
def test_cuda_graph(strategy: str, tmp_path: pathlib.Path) -> None:
    start(
        GRAPH,
        JAX_BNAR_CUDA_STRATEGY=strategy,
        XLA_FLAGS=with_flags(f"{IN_A_GRAPH} --xla_dump_to={tmp_path}"),
    )
    if DRY_RUN:
        return
    # Our calls must be inside the command buffers that XLA executes, not next to them.
    sequences = [
        path.read_text()
        for path in tmp_path.glob("*jit_network*thunk_sequence_after_thunk_passes*.txt")
    ]
    assert sequences, sorted(path.name for path in tmp_path.iterdir())
    for text in sequences:
        assert "kCommandBuffer" in text, text
        assert "kCustomCall" in text, text
        assert not calls_outside_graphs(text), text


@pytest.mark.parametrize("strategy", STRATEGIES[:1] if DRY_RUN else STRATEGIES)
def test_two_norms_that_one_graph_runs_at_once(strategy: str) -> None:
    """XLA records them without an order, so blocks of both may wait for messages at once."""
    start(
        TWO_IN_ONE_GRAPH + TWO_AT_ONCE,
        JAX_BNAR_CUDA_STRATEGY=strategy,
        XLA_FLAGS=with_flags(f"{IN_A_GRAPH} --xla_gpu_command_buffer_scheduling_mode=CONCURRENT"),
    )


def test_threads() -> None:
    start(THREADS)


def test_two_streams() -> None:
    start(TWO_STREAMS + TWO_AT_ONCE)


@only_on_gpu
def test_beside_torch_on_another_stream() -> None:
    pytest.importorskip("torch")
    start(BESIDE_TORCH, XLA_PYTHON_CLIENT_PREALLOCATE="false")


@only_on_gpu
def test_full_card() -> None:
    start(FULL_CARD, XLA_PYTHON_CLIENT_MEM_FRACTION="0.02")
