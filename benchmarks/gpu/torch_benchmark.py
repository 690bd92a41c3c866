"""PyTorch's BatchNorm, add and ReLU at the sites of ResNet-50, channels_last, beside a copy.

The step is that of benchmarks.gpu.jax_benchmark: forward and backward on several sets of operands
in turn, which together are several times as large as L2. PyTorch launches each kernel from Python,
which takes longer than the kernel at small sites. So the passes through all sets are captured once
in a CUDA graph, and CUDA events time its replays. This is PyTorch's device time, which is better
than what its eager users see. `graph` says whether the capture worked; if not, the passes are timed
as they are. `torch` is eager, with add and ReLU in place; `torch_compile` goes through Inductor;
`cudnn` calls cuDNN's own fused kernels directly, if they support the dtype. `errors` are those of
y, dx, [dz], dscale and dbias against eager PyTorch, in the L2 norm.
"""

import functools
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any, Final, get_args

import torch  # pyright: ignore[reportMissingImports]
from torch.nn import functional  # pyright: ignore[reportMissingImports]

from benchmarks.common.environment import describe_environment
from benchmarks.common.sites import FormOfOneInput, Site
from benchmarks.gpu import cudnn_peer
from benchmarks.gpu import work as work_module
from benchmarks.gpu.cudnn import CudnnError
from benchmarks.gpu.work import ERROR_ALLOWED, Results, Wave, Work
from benchmarks.sites.problem import EPSILON, MOMENTUM

MAIN_PEERS: Final = ("copy", "torch", "cudnn")
MORE_PEERS: Final = ("torch_compile",)
# A graph has several short passes, but not so many that capturing takes long.
_MOST_STEPS_OF_A_GRAPH: Final = 64


def forward(
    form: str, x: torch.Tensor, z: torch.Tensor | None, *vectors: torch.Tensor, in_place: bool
) -> torch.Tensor:
    scale, bias, running_mean, running_var = vectors
    y = functional.batch_norm(
        x, running_mean, running_var, scale, bias, True, 1 - MOMENTUM, EPSILON
    )
    if z is not None:
        y = y.add_(z) if in_place else y + z
    if form == "batch_norm":
        return y
    return y.relu_() if in_place else functional.relu(y)


def make_sets(site: Site, wave: Wave, sets: int, device: str) -> tuple[list[Any], list[Any]]:
    if site.form not in get_args(FormOfOneInput):
        raise ValueError(
            f"{site.label} has two inputs, expected one of {', '.join(get_args(FormOfOneInput))}."
        )
    generator = torch.Generator(device).manual_seed(0)

    def tensor(gradient: bool = True) -> torch.Tensor:
        nhwc = torch.randn(site.shape(wave.batch), generator=generator, device=device)
        nchw = nhwc.to(getattr(torch, wave.dtype)).permute(0, 3, 1, 2)
        return nchw.requires_grad_(gradient)

    has_z = site.form == "bn_add_relu"
    activations = [(tensor(), tensor() if has_z else None, tensor(False)) for _ in range(sets)]
    ones = torch.ones(site.channels, device=device)
    vectors = [ones.clone().requires_grad_(), torch.zeros_like(ones).requires_grad_()]
    return activations, [*vectors, torch.zeros_like(ones), ones.clone()]


def make_pass(
    peer: str, site: Site, activations: list[Any], vectors: list[Any]
) -> Callable[[], Any]:
    """Goes through all sets once, and returns the results of each."""
    if peer == "copy":
        # Each set has a target of its own, because every step has its own results.
        targets = [torch.empty_like(x) for x, _, _ in activations]

        def copy() -> Any:
            for (x, _, _), target in zip(activations, targets, strict=True):
                target.copy_(x)

        return torch.no_grad()(copy)
    if peer == "cudnn":
        return cudnn_peer.make_pass(site, activations, vectors)

    function: Any = functools.partial(forward, site.form, in_place=peer == "torch")
    if peer == "torch_compile":
        torch.compiler.reset()  # The compiler gives up on a function after a few shapes.
        function = torch.compile(function, dynamic=False, fullgraph=True)

    def run() -> Any:
        kept = []
        for x, z, dy in activations:
            y = function(x, z, *vectors)
            inputs = [operand for operand in (x, z, *vectors[:2]) if operand is not None]
            kept.append((y, torch.autograd.grad(y, inputs, dy)))
        return kept

    return run


def capture(run: Callable[[], Any], passes: int) -> Callable[[], None]:
    """Captures passes in a CUDA graph, after a warm-up on another stream, as PyTorch asks."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(passes):
            run()
    return graph.replay


def seconds(run: Callable[[], Any], repetitions: int, device: str) -> float:
    if device == "cpu":
        start = perf_counter()
        for _ in range(repetitions):
            run()
        return perf_counter() - start
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(repetitions):
        run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def measure(
    run: Callable[[], Any], work: Work, sets: int, rounds: int, device: str
) -> tuple[list[float], str]:
    """Returns the milliseconds of a step in each sample, and how its kernels were launched."""
    run()
    passes, graph = 1, "none, on the CPU"
    if device == "cuda":
        passes = max(1, min(rounds, _MOST_STEPS_OF_A_GRAPH // sets))
        try:
            run = capture(run, passes)
            graph = "captured"
        except RuntimeError as error:
            torch.cuda.synchronize()
            passes, graph = 1, f"not captured: {error}"[:500]
    repetitions = max(1, rounds // passes)
    seconds(run, 1, device)
    steps = repetitions * passes * sets
    times = [seconds(run, repetitions, device) * 1e3 / steps for _ in range(work.samples)]
    return times, graph


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    wide = expected.float()
    return float((got.float() - wide).norm() / wide.norm())


def check(got: Any, expected: Any) -> list[float]:
    """Returns the errors of y, dx, [dz], dscale and dbias; ValueError if one is too large."""
    pairs = zip((got[0], *got[1]), (expected[0], *expected[1]), strict=True)
    with torch.no_grad():
        errors = [relative_error(a, b) for a, b in pairs]
    if not all(error <= ERROR_ALLOWED for error in errors):
        raise ValueError(f"y, dx, [dz], dscale, dbias differ from PyTorch by {errors} in norm")
    return errors


def run_wave(work: Work, wave: Wave, results: Results, device: str) -> None:
    for site in work.sites:
        sets, rounds = work.sets(site, wave), work.rounds(site, wave)
        operands = make_sets(site, wave, sets, device)
        expected = make_pass("torch", site, *operands)()[0]
        for peer in wave.peers:
            if work.time_is_up():
                return
            if peer == "cudnn" and device == "cpu":
                continue
            try:
                run = make_pass(peer, site, *operands)
                more = {} if peer == "copy" else {"errors": check(run()[0], expected)}
                times, graph = measure(run, work, sets, rounds, device)
                results.add(site, wave, peer, times, sets=sets, rounds=rounds, graph=graph, **more)
            except CudnnError as error:
                results.fail(site, wave, peer, error, refused=error.is_not_supported)
            except Exception as error:
                results.fail(site, wave, peer, error)
            finally:
                run = None
                if device == "cuda":
                    torch.cuda.empty_cache()
        del operands, expected


def describe(device: str) -> dict[str, Any]:
    about: dict[str, Any] = {
        "environment": describe_environment(),
        "torch_cuda": torch.version.cuda,
    }
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        about |= {
            "name": properties.name,
            "multiprocessors": properties.multi_processor_count,
            "l2_bytes": properties.L2_cache_size,
            "cudnn": torch.backends.cudnn.version(),
        }
    return about


def main(arguments: Sequence[str] | None = None) -> int:
    work = work_module.parse(__doc__, arguments, MAIN_PEERS, MORE_PEERS)
    device = work.platform
    if device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("PyTorch sees no GPU.")
    results = Results(work, "torch", describe(device))
    # Peers that take long to compile come last.
    waves = sorted(work.waves, key=lambda wave: "torch_compile" in wave.peers)
    return results.fill(waves, lambda wave: run_wave(work, wave, results, device))


if __name__ == "__main__":
    raise SystemExit(main())
