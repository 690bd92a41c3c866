"""Whether the kernels run at all: one shape, every strategy, both directions, and a CUDA graph.

This takes one process about 10 seconds. Each strategy runs its kernels alone, then on four
multiprocessors, where a block has more tiles than it keeps (FEW_BLOCKS), and then in a program of
several steps, which XLA captures in a CUDA graph under the flags that `make gpu` sets
(plan.SMOKE_FLAGS). The last two run a thousand times, and the results must be equal bit for bit:
a message between blocks that relies on an order of memory that the GPU does not keep would be
wrong in few of them. The emulation on the CPU (tests/cuda_emulation) cannot show that. The join of
two batch norms, whose kernels have one strategy, runs once. Each part is named in the file before
it begins, so that a kernel that hangs is known by name after the process was killed.
"""

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

import jax_bnar
from benchmarks.common.cuda_settings import cuda_settings
from benchmarks.common.json_file import write_json
from benchmarks.gpu.chain import relative_error
from benchmarks.gpu.device import describe_device
from benchmarks.gpu.launches import launched
from benchmarks.gpu.program import make_document, make_parser

# Those whose blocks wait for each other come last, so that a hang leaves the others known.
STRATEGIES: Final = ("two_kernels", "cluster", "on_chip", "auto")
SHAPE: Final = (16, 28, 28, 128)
_MULTIPROCESSORS: Final = 4
# With eight blocks, `on_chip` does at SHAPE what it does at large arrays: two teams take four slabs
# each, of which a block has more tiles than slots, so that slots are filled anew in both passes.
# tests/gpu/test_gpu_smoke.py asks the planner.
FEW_BLOCKS: Final = {"JAX_BNAR_CUDA_SLAB_CHANNELS": "16", "JAX_BNAR_CUDA_TEAMS": "2"}
_RESULTS: Final = "y, mean, var, dx, dz, dscale, dbias"
_DUAL_RESULTS: Final = "y, mean1, var1, mean2, var2, dx1, dx2, dscale1, dbias1, dscale2, dbias2"
_STEPS_OF_A_GRAPH: Final = 4
# XLA captures again where its buffers lie elsewhere, so the first few may launch kernels.
_REPLAYS: Final = 8
_RUNS: Final = 1000
_DRY_RUNS: Final = 10  # on a CPU
# The host waits for the device after so many, so that results do not pile up.
_RUNS_AT_ONCE: Final = 50
# In L2 norm, against pure JAX in float32: a few roundings of bfloat16, and gates near 0.
_ERROR_ALLOWED: Final = 0.02

Operands = tuple[jax.Array, ...]


def forward(x: Any, z: Any, scale: Any, bias: Any, implementation: Any = "ffi") -> Any:
    return jax_bnar.bn_add_relu(x, z, scale, bias, save="mask", implementation=implementation)


def step(x: Any, z: Any, scale: Any, bias: Any, dy: Any, implementation: Any = "ffi") -> Any:
    """(y, mean, var) and the gradients of x, z, scale and bias."""
    function = functools.partial(forward, implementation=implementation)
    result, vjp = jax.vjp(function, x, z, scale, bias)
    zeros = jax.tree.map(jnp.zeros_like, result)
    return tuple(result), vjp(zeros._replace(y=dy))


def dual_step(x1: Any, x2: Any, scale: Any, bias: Any, dy: Any, implementation: Any = "ffi") -> Any:
    """y and the statistics of relu(bn(x1) + bn(x2)), and the gradients of all operands."""
    function = functools.partial(
        jax_bnar.dual_bn_add_relu, save="mask", implementation=implementation
    )
    result, vjp = jax.vjp(function, x1, x2, scale, bias, bias, scale)
    zeros = jax.tree.map(jnp.zeros_like, result)
    return tuple(result), vjp(zeros._replace(y=dy))


def chain(x: Any, z: Any, scale: Any, bias: Any, dy: Any) -> Any:
    """Several steps, each on the gradient of the one before; the first one's results come too."""
    results = step(x, z, scale, bias, dy)
    _, (dx, *_) = results
    for _ in range(_STEPS_OF_A_GRAPH - 1):
        _, (dx, *_) = step(x, z, scale, bias, dx)
    return results, dx


def make_operands(shape: tuple[int, ...]) -> Operands:
    random = np.random.default_rng(0)
    x, z, dy = (jnp.asarray(random.standard_normal(shape), jnp.bfloat16) for _ in range(3))
    scale, bias = (jnp.asarray(random.standard_normal(shape[-1]), jnp.float32) for _ in range(2))
    return x, z, scale, bias, dy


def errors_of(got: Any, expected: Any, names: str = _RESULTS) -> list[float]:
    """Errors in L2 norm; raises ValueError where one is too large."""
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True)
    errors = [float(relative_error(a, b)) for a, b in pairs]
    if not all(error <= _ERROR_ALLOWED for error in errors):
        raise ValueError(
            f"{names} differ from pure JAX by {errors} in norm, and {_ERROR_ALLOWED} is allowed"
        )
    return errors


def run_alone(operands: Operands, expected: Any, entry: dict[str, Any]) -> Any:
    """Forward, which has its kernels to itself, and then forward and backward."""
    x, z, scale, bias, _ = operands
    with launched() as kernels:
        jax.block_until_ready(jax.jit(lambda *given: forward(*given))(x, z, scale, bias))
        entry["forward_ran"] = True
        got = jax.block_until_ready(jax.jit(lambda *given: step(*given))(*operands))
    entry["kernels"] = sorted(kernels)
    entry["errors"] = errors_of(got, expected)
    return got


def require_equal_runs(function: Callable[..., Any], operands: Operands, first: Any) -> int:
    """Runs `function` many times and returns how many; raises ValueError if results differ."""
    runs = _DRY_RUNS if jax.default_backend() == "cpu" else _RUNS
    different = 0
    for begin in range(0, runs, _RUNS_AT_ONCE):
        results = (function(*operands) for _ in range(begin, min(begin + _RUNS_AT_ONCE, runs)))
        different += sum(jax.device_get([_differs(result, first) for result in results]))
    if different:
        raise ValueError(f"{different} of {runs} runs have other results than the first one")
    return runs


@jax.jit
def _differs(got: Any, wanted: Any) -> jax.Array:
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True)
    return ~jnp.stack([jnp.array_equal(a, b) for a, b in pairs]).all()


def run_few_blocks(operands: Operands, expected: Any, entry: dict[str, Any]) -> None:
    """The same on four multiprocessors; `expected` is what more blocks have computed."""
    # An H200 has 132; JAX says how many a GPU has, but not of a CPU.
    margin = max(0, getattr(jax.devices()[0], "core_count", 132) - _MULTIPROCESSORS)
    variables = {**FEW_BLOCKS, "JAX_BNAR_CUDA_SM_MARGIN": str(margin)}
    program = jax.jit(lambda *given: step(*given))
    # The kernels ask for them when they are launched, and one step is not captured in a graph.
    with cuda_settings(**variables):
        got = jax.block_until_ready(program(*operands))
        entry["few_blocks_errors"] = errors_of(got, expected)
        entry["few_blocks_runs"] = require_equal_runs(program, operands, got)


def run_graph(operands: Operands, expected: Any, entry: dict[str, Any]) -> None:
    """The same in a chain, several times. The results must be equal bit for bit."""
    program = jax.jit(lambda *given: chain(*given))
    first = jax.block_until_ready(program(*operands))
    entry["replayed"] = None if not entry["kernels"] else False
    for _ in range(_REPLAYS):
        with launched() as kernels:
            jax.block_until_ready(program(*operands))
        # A graph that is replayed launches nothing that is counted.
        if entry["kernels"] and not kernels:
            entry["replayed"] = True
    if _differs(first[0], expected):
        raise ValueError("in a program of several steps the results are others than alone")
    entry["graph_runs"] = require_equal_runs(program, operands, first)


def run_dual(operands: Operands, expected: Any, entry: dict[str, Any]) -> None:
    """The join of two batch norms, forward and backward."""
    del expected
    got = jax.block_until_ready(jax.jit(lambda *given: dual_step(*given))(*operands))
    wide = [operand.astype(jnp.float32) for operand in operands]
    compare = jax.jit(functools.partial(dual_step, implementation="xla"))
    entry["dual_errors"] = errors_of(got, compare(*wide), _DUAL_RESULTS)


def summarise(document: dict[str, Any]) -> list[str]:
    lines = [f"smoke on {document['device']['kind']}, {document['shape']}:"]
    for name, entry in document["strategies"].items():
        how = {True: "in a CUDA graph", False: "in a chain, but XLA captured NO CUDA graph"}
        works = f"works alone and {how.get(entry.get('replayed'), 'in a chain')}"
        result = entry.get("error") or works
        lines.append(f"  {name:12} {entry['seconds']:5.1f} s  {result}")
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    parser = make_parser(__doc__)
    options = parser.parse_args(arguments)
    begin = time.monotonic()
    shape = (2, 5, 5, 24) if options.platform == "cpu" else SHAPE
    document = make_document(
        "smoke",
        options.platform,
        device=describe_device(),
        shape=list(shape),
        running=None,
        strategies={},
    )
    parts: tuple[tuple[str, Callable[..., Any]], ...] = (
        ("alone", run_alone), ("few blocks", run_few_blocks), ("graph", run_graph)
    )  # fmt: skip
    operands = make_operands(shape)
    compare = jax.jit(functools.partial(step, implementation="xla"))
    wide = [operand.astype(jnp.float32) for operand in operands]
    expected = jax.block_until_ready(compare(*wide))
    for name in STRATEGIES:
        if time.monotonic() - begin > options.seconds:
            break
        entry: dict[str, Any] = {"seconds": 0.0}
        document["strategies"][name] = entry
        start = time.monotonic()
        result = expected
        of_dual = (("dual", run_dual),) if name == STRATEGIES[0] else ()
        for part, run in (*parts, *of_dual):
            document["running"] = f"{name}, {part}"
            write_json(options.output, document)
            try:
                # Each strategy compiles its own programs: a graph keeps what it has captured.
                with cuda_settings(JAX_BNAR_CUDA_STRATEGY=name):
                    result = run(operands, result, entry) or result
            except Exception as error:
                entry["error"] = f"{part}: {type(error).__name__}: {str(error)[:2000]}"
                document["errors"].append(f"{name}, {entry['error']}")
                break
            finally:
                entry["seconds"] = round(time.monotonic() - start, 2)
        document["running"] = None
        document["summary"] = summarise(document)
        document["complete"] = len(document["strategies"]) == len(STRATEGIES)
        write_json(options.output, document)
        print(document["summary"][-1], flush=True)
    return 1 if document["errors"] or not document["complete"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
