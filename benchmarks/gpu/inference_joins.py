"""The residual joins of ResNet-50's inference: one pass against an add and a fused add-ReLU.

A profile of MegEngine (batch 10, float32, NCHW, BatchNorm folded into the convolutions) has 16
joins, each in two passes: `t = conv + shortcut`, then `relu(t + bias)`. They move five tensors
where one pass moves three. Here all run on the same device. `ours` is bn_add_relu_inference
without scale, with mean 0 and variance 1, which is that sum; `two_passes` are two kernels of XLA,
kept apart by a barrier; `xla` is the sum as XLA compiles it by itself. `passes` is the number of
kernels of a step, in the compiled program, that write an array of x's size.

python -m benchmarks.gpu.inference_joins --output benchmarks/results/NAME.json
"""

import math
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any, Final

import jax
import jax.numpy as jnp

import jax_bnar
from benchmarks.common.hlo_text import entry, instructions
from benchmarks.common.json_file import write_json
from benchmarks.gpu.chain import chain, make_operands, measure, relative_error
from benchmarks.gpu.device import describe_device
from benchmarks.gpu.launches import launched
from benchmarks.gpu.program import make_document, make_parser

# (C, H, W) of the joins, and how many each stage has.
JOINS: Final = {
    (256, 56, 56): 3,
    (512, 28, 28): 4,
    (1024, 14, 14): 6,
    (2048, 7, 7): 3,
}
_ROTATE_BYTES: Final = 384 << 20
_MOST_SETS: Final = 48
_GUESSED_BYTES_PER_S: Final = 2.5e12
_ERROR_ALLOWED: Final = 1e-6
# Negligible next to the variance of 1.
_EPSILON: Final = 1e-12


def ours(x: jax.Array, z: jax.Array, bias: jax.Array) -> jax.Array:
    mean, var = jnp.zeros_like(bias), jnp.ones_like(bias)
    return jax_bnar.bn_add_relu_inference(
        x, z, None, bias, mean, var, epsilon=_EPSILON, axis=1, implementation="ffi"
    )


def two_passes(x: jax.Array, z: jax.Array, bias: jax.Array) -> jax.Array:
    total = jax.lax.optimization_barrier(x + z)
    return jax.nn.relu(total + bias[:, None, None])


def xla(x: jax.Array, z: jax.Array, bias: jax.Array) -> jax.Array:
    return jax.nn.relu(x + z + bias[:, None, None])


PEERS: Final[dict[str, Callable[..., jax.Array]]] = {
    "two_passes": two_passes,
    "ours": ours,
    "xla": xla,
}
_PASSES: Final = {"two_passes": 2, "ours": 1, "xla": 1}

_FREE: Final = ("parameter", "bitcast", "get-tuple-element", "tuple", "opt-barrier", "call")


def passes(program: str, elements: int) -> int:
    """Counts the kernels and calls of a compiled program that write an array of this size."""
    return sum(
        instruction.elements == elements and instruction.opcode not in _FREE
        for instruction in instructions(entry(program))
    )


def measure_join(
    platform: str, shape: tuple[int, ...], rotate_bytes: int, samples: int, sample_s: float
) -> dict[str, Any]:
    elements = math.prod(shape)
    sets = min(_MOST_SETS, max(2, math.ceil(rotate_bytes / (3 * 4 * elements))))
    rounds = max(2, round(sample_s * _GUESSED_BYTES_PER_S / (sets * 5 * 4 * elements)))
    x = jax.ShapeDtypeStruct(shape, jnp.float32)
    bias = jax.ShapeDtypeStruct(shape[1:2], jnp.float32)
    shapes = [(x, x)] * sets, bias
    programs = {name: jax.jit(chain(step)).lower(*shapes).compile() for name, step in PEERS.items()}
    found = {
        name: passes(program.as_text() or "", elements) / sets for name, program in programs.items()
    }
    # XLA:CPU of jaxlib 0.10 drops barriers before it fuses.
    found_two = found | ({"two_passes": 2} if platform == "cpu" else {})
    if found_two != _PASSES:
        raise ValueError(f"passes of the compiled programs: {found}, expected {_PASSES}.")
    operands = make_operands(shapes)
    expected = programs["two_passes"](*operands)[0]
    rows: dict[str, Any] = {}
    with launched() as kernels:
        for name, program in programs.items():
            error = float(relative_error(program(*operands)[0], expected))
            if not error <= _ERROR_ALLOWED:
                raise ValueError(f"{name} differs from two_passes by {error} in norm.")
    for name, program in programs.items():
        times, share = measure(program, operands, samples, sets, rounds)
        rows[name] = {
            "median_ms": median(times),
            "samples_ms": times,
            "host_share": round(share, 3),
            "passes": found[name],
        }
    return {"shape": shape, "sets": sets, "rounds": rounds, "kernels": sorted(kernels), **rows}


def summarise(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Returns the sums over the 16 joins as text."""

    def total(peer: str) -> float:
        return sum(row["count"] * row[peer]["median_ms"] for row in rows)

    ours_ms = total("ours")
    lines = [
        f"inference joins, batch {rows[0]['shape'][0]}, float32, NCHW: sum in ms, ours over it"
    ]
    lines += [f"  {total(name):9.3f}  {name}  {ours_ms / total(name):.3f}" for name in PEERS]
    for row in rows:
        ratio = row["ours"]["median_ms"] / row["two_passes"]["median_ms"]
        lines.append(f"  {ratio:9.3f}  ours over two_passes at {'x'.join(map(str, row['shape']))}")
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--batch", type=int, default=10)
    parser.add_argument("--samples", type=int, default=7)
    parser.add_argument("--sample-ms", type=float, default=20)
    options = parser.parse_args(arguments)
    end = time.monotonic() + options.seconds
    joins = dict(JOINS)
    rotate_bytes = _ROTATE_BYTES
    if options.platform == "cpu":
        joins = {(2048, 7, 7): 3}
        options.batch, options.samples, options.sample_ms, rotate_bytes = 2, 2, 0, 0
    document = make_document(
        "inference_joins", options.platform, device=describe_device(), joins=[]
    )
    for channels_and_plane, count in joins.items():
        if time.monotonic() > end:
            break
        shape = (options.batch, *channels_and_plane)
        try:
            row = measure_join(
                options.platform, shape, rotate_bytes, options.samples, options.sample_ms / 1e3
            )
        except Exception as error:
            document["errors"].append(
                {"shape": shape, "error": f"{type(error).__name__}: {str(error)[:2000]}"}
            )
            print("FAILED", document["errors"][-1], flush=True)
        else:
            document["joins"].append({**row, "count": count})
            document["summary"] = summarise(document["joins"])
        write_json(options.output, document)
    document["complete"] = len(document["joins"]) == len(joins)
    write_json(options.output, document)
    print("\n".join(document["summary"]))
    return 1 if document["errors"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
