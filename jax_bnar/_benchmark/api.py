"""`benchmark`."""

import contextlib
import functools
import math
import numbers
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_bnar._base.array_leaves import is_array, split_arrays
from jax_bnar._benchmark.difference import Difference, difference, is_real
from jax_bnar._benchmark.interrupt import Interrupts, noticed_interrupts
from jax_bnar._benchmark.memory import planned_memory, residual_bytes
from jax_bnar._benchmark.report import BenchmarkReport, Measurement, Pass
from jax_bnar._benchmark.timing import Timing, interleave
from jax_bnar._fuse import explain, fuse
from jax_bnar._fuse.differentiated import ContainsGradientError
from jax_bnar._kernels import targets


def benchmark(
    fun: Callable[..., Any],
    *,
    fused: Callable[..., Any] | None = None,
    gradient: bool = True,
    rounds: int = 9,
    min_sample_ms: float = 20.0,
    progress: bool = True,
) -> Callable[..., BenchmarkReport]:
    """Compares `fun` with `fuse(fun)`: time and memory, forward alone and with backward.

        report = jax_bnar.benchmark(loss)(params, images)
        print(report)
        report.plot("loss.png")

    Both are jitted and take turns in one process, so that other load on the machine affects both:
    each round takes one sample of every program, in an order that rotates. The results of a call
    are freed before the next call. The memory is what XLA has planned. Residuals are what forward
    keeps for backward; each array counts once, and arguments do not count.

    Backward is that of `jax.vjp` with respect to every floating-point array among the arguments.
    Its cotangents are 1 for a scalar result and random numbers for other results.

    Args:
        fun: a function of arrays, such as a block, a network's loss or an evaluation step. It is
            jitted and differentiated here, so pass it before applying `jax.grad`. Pass a Flax model
            as a function of its variables, and split an NNX module into graphdef and state.
        fused: the function to compare with, which takes the same arguments; None means `fuse(fun)`.
        gradient: whether to measure backward as well.
        rounds: the number of samples of each program.
        min_sample_ms: calls shorter than this are repeated within a sample.
        progress: whether to report progress on standard error.

    Returns:
        A function of the arguments of `fun` (arrays, pytrees of arrays, and other values, which
        stay constant), which measures and returns a `BenchmarkReport`.

    Raises:
        TypeError: `fun` or `fused` is not callable, or `rounds` or `min_sample_ms` is no number.
            The returned function raises it if there is no array among the arguments, or if one of
            them is a `jax.ShapeDtypeStruct` instead of an array, or an NNX module that was not
            split.
        ValueError: `rounds` is below 1, or `min_sample_ms` is negative or not finite. The returned
            function raises it if there is nothing to differentiate, or if `fun` already contains
            the gradient of what is to be fused.

    Examples:
        >>> import jax, jax.numpy as jnp, jax_bnar
        >>> def block(x, z):
        ...     mean, var = x.mean(0, keepdims=True), x.var(0, keepdims=True)
        ...     y = (x - mean) * jax.lax.rsqrt(var + 1e-5)
        ...     return jax.nn.relu(y + z)
        >>> x = jnp.arange(6.0).reshape(3, 2)
        >>> measure = jax_bnar.benchmark(block, rounds=1, min_sample_ms=0, progress=False)
        >>> report = measure(x, x)
        >>> report.matched
        1
        >>> report.difference < 1e-6
        True
    """
    for name, value in (("fun", fun), ("fused", fused)):
        if not callable(value) and not (name == "fused" and value is None):
            raise TypeError(
                f"benchmark: {name} must be callable, got {type(value).__name__}; pass the"
                " function itself, benchmark(fun)(*args), not its result."
            )
    _check_numbers(rounds, min_sample_ms)
    functions = {"plain": fun, "fused": fuse(fun) if fused is None else fused}

    @functools.wraps(fun)
    def benchmarked(*args: Any, **kwargs: Any) -> BenchmarkReport:
        given, say = _split(args, kwargs), _speaker(progress)
        with noticed_interrupts() as interrupts:
            found = None if fused is not None else explain(fun)(*args, **kwargs)
            try:
                measurements, differences = _measured(
                    functions, given, gradient, rounds, min_sample_ms, interrupts, say
                )
            except ContainsGradientError:
                raise ValueError(
                    "benchmark: fun contains the gradient of what is to be fused; pass the loss"
                    " itself, benchmark(loss)(*args), which is differentiated here, or pass"
                    " fused=, the same function with jax.grad(fuse(loss)) in it."
                ) from None
        device = next(iter(given.arrays[0].devices()))
        return BenchmarkReport(
            function=getattr(fun, "__name__", type(fun).__name__),
            measurements=tuple(measurements),
            matched=None if found is None else len(found.matched),
            refused=None if found is None else len(found.refused),
            differences=tuple(differences),
            device=device.device_kind,
            kernels=targets.has_kernel("forward", targets.mlir_platform(device.platform)),
        )

    return benchmarked


def _check_numbers(rounds: Any, min_sample_ms: Any) -> None:
    if not isinstance(rounds, numbers.Integral) or isinstance(rounds, bool):
        raise TypeError(f"benchmark: rounds must be an int, got {rounds!r}.")
    if rounds < 1:
        raise ValueError(f"benchmark: rounds must be at least 1, got {rounds}.")
    if not isinstance(min_sample_ms, numbers.Real):
        raise TypeError(f"benchmark: min_sample_ms must be a number, got {min_sample_ms!r}.")
    if not 0 <= float(min_sample_ms) < math.inf:
        raise ValueError(
            f"benchmark: min_sample_ms must be finite and at least 0, got {min_sample_ms}."
        )


class _Arguments(NamedTuple):
    """The arrays among the arguments, their paths, and what calls a function with arrays.

    Attributes:
        arrays: the arrays, those of keyword arguments last.
        paths: where each is, such as "0/params/scale".
        call: takes a function and arrays in place of `arrays`, and calls the function.
    """

    arrays: list[jax.Array]
    paths: list[str]
    call: Callable[..., Any]


def _measured(
    functions: Mapping[str, Callable[..., Any]],
    given: _Arguments,
    gradient: bool,
    rounds: int,
    min_sample_ms: float,
    interrupts: Interrupts,
    say: Callable[[str], None],
) -> tuple[list[Measurement], list[Difference]]:
    flat = {
        name: functools.partial(_on_arrays, given, function) for name, function in functions.items()
    }
    result = jax.eval_shape(functools.partial(_numbers, given, functions["plain"]), *given.arrays)
    passes: list[Pass] = ["forward"]
    if gradient:
        passes.append("forward + backward")
    measurements: list[Measurement] = []
    differences: list[Difference | None] = []
    for what in passes:
        operands, programs, residuals = _compiled(flat, given.arrays, what, say)
        outcomes = [program(*operands) for program in programs.values()]
        if what == "forward":
            differences.append(difference("results", _paths(result), *outcomes))
        else:
            pairs = zip(given.paths, given.arrays, strict=True)
            paths = [path for path, array in pairs if is_real(array)]
            differences.append(difference("gradients", paths, *(step[1] for step in outcomes)))
        del outcomes
        say(f"timing {what}, {rounds} rounds")
        timings = interleave(
            {
                name: functools.partial(_run, program, operands, interrupts)
                for name, program in programs.items()
            },
            rounds=rounds,
            min_sample_ms=min_sample_ms,
        )
        measurements += [
            _measurement(name, what, timings[name], program, residuals.get(name))
            for name, program in programs.items()
        ]
    return measurements, [each for each in differences if each is not None]


def _split(args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Arguments:
    # A call of an NNX module writes to it, which a jitted function of plain arrays may not do.
    module = getattr(sys.modules.get("flax.nnx"), "Module", ())

    def is_module(node: Any) -> bool:
        return isinstance(node, module)

    if any(map(is_module, jax.tree.leaves((args, kwargs), is_leaf=is_module))):
        raise TypeError(
            "benchmark: an argument is an NNX module, which changes when it is called; split it,"
            " graphdef, state = nnx.split(model), and measure a function of state that calls"
            " nnx.merge(graphdef, state)."
        )
    leaves, tree = jax.tree.flatten((args, kwargs))
    paths = [*_paths(args), *_paths(kwargs)]
    for leaf in leaves:
        if isinstance(leaf, jax.ShapeDtypeStruct):
            raise TypeError(
                f"benchmark: it runs the function, so it needs arrays; got {leaf}. Without running"
                " anything, jax_bnar.explain(fun)(*args) says what would be fused."
            )
    arrays, with_arrays = split_arrays(leaves)
    if not arrays:
        raise TypeError(
            "benchmark: there is no array among the arguments of the function, which follow in a"
            " second call: benchmark(fun)(*args)."
        )

    def call(function: Callable[..., Any], *arrays: Any) -> Any:
        given_args, given_kwargs = jax.tree.unflatten(tree, with_arrays(arrays))
        return function(*given_args, **given_kwargs)

    return _Arguments(
        [jax.device_put(array) for array in arrays],
        [path for path, leaf in zip(paths, leaves, strict=True) if is_array(leaf)],
        call,
    )


def _paths(tree: Any) -> list[str]:
    """The path of every leaf, such as "0/params/BatchNorm_0/bias"."""
    return [
        jax.tree_util.keystr(path, simple=True, separator="/")
        for path, _ in jax.tree.flatten_with_path(tree)[0]
    ]


def _numbers(given: _Arguments, function: Callable[..., Any], *arrays: Any) -> Any:
    """The results of a function, with None in place of what is static, such as a string."""

    def number(leaf: Any) -> Any:
        return leaf if is_array(leaf) or isinstance(leaf, numbers.Number) else None

    return jax.tree.map(number, given.call(function, *arrays))


def _on_arrays(given: _Arguments, function: Callable[..., Any], *arrays: Any) -> list[jax.Array]:
    return [jnp.asarray(leaf) for leaf in jax.tree.leaves(_numbers(given, function, *arrays))]


def _compiled(
    flat: Mapping[str, Callable[..., list[jax.Array]]],
    arrays: Sequence[jax.Array],
    what: Pass,
    say: Callable[[str], None],
) -> tuple[tuple[Any, ...], dict[str, jax.stages.Compiled], dict[str, int]]:
    """The operands, a compiled program for each function, and the bytes of their residuals."""
    if what == "forward":
        programs = {}
        for name, function in flat.items():
            say(f"compiling {what}, {name}")
            programs[name] = jax.jit(function).lower(*arrays).compile()
        return tuple(arrays), programs, {}

    to_differentiate = [index for index, array in enumerate(arrays) if is_real(array)]
    results = [
        index
        for index, result in enumerate(jax.eval_shape(flat["plain"], *arrays))
        if is_real(result)
    ]
    if not to_differentiate or not results:
        missing = "results" if to_differentiate else "arguments"
        raise ValueError(
            f"benchmark: none of the {missing} is a floating-point array, so there is nothing to"
            " differentiate; pass gradient=False."
        )

    def real_results(
        function: Callable[..., list[jax.Array]], others: Sequence[jax.Array], *chosen: Any
    ) -> list[jax.Array]:
        given = list(others)
        for index, array in zip(to_differentiate, chosen, strict=True):
            given.insert(index, array)
        found = function(*given)
        return [found[index] for index in results]

    def step(
        function: Callable[..., list[jax.Array]], chosen: Any, others: Any, cotangents: Any
    ) -> Any:
        found, vjp = jax.vjp(functools.partial(real_results, function, others), *chosen)
        # The two functions may round their results to different dtypes.
        given = [c.astype(f.dtype) for c, f in zip(cotangents, found, strict=True)]
        return found, vjp(given)

    chosen = [array for array in arrays if is_real(array)]
    others = [array for array in arrays if not is_real(array)]
    shapes = jax.eval_shape(functools.partial(real_results, flat["plain"], others), *chosen)
    operands = (chosen, others, _cotangents(shapes))
    programs, residuals = {}, {}
    for name, function in flat.items():
        say(f"compiling {what}, {name}")
        forward = functools.partial(real_results, function, others)
        residuals[name] = residual_bytes(forward, *chosen)
        programs[name] = jax.jit(functools.partial(step, function)).lower(*operands).compile()
    return operands, programs, residuals


def _cotangents(shapes: Sequence[jax.ShapeDtypeStruct]) -> list[jax.Array]:
    generator = np.random.default_rng(0)
    return [
        jnp.ones((), shape.dtype)
        if shape.shape == ()
        else jnp.asarray(generator.standard_normal(shape.shape, np.float32), shape.dtype)
        for shape in shapes
    ]


def _run(program: jax.stages.Compiled, operands: tuple[Any, ...], interrupts: Interrupts) -> Any:
    interrupts.check()
    return jax.block_until_ready(program(*operands))


def _measurement(
    name: str, what: Pass, timing: Timing, program: jax.stages.Compiled, residuals: int | None
) -> Measurement:
    memory = planned_memory(program)
    return Measurement(
        name=name,
        what=what,
        samples_ms=tuple(timing.samples_ms),
        median_ms=timing.median_ms,
        min_ms=timing.min_ms,
        peak_bytes=None if memory is None else memory.peak,
        temporary_bytes=None if memory is None else memory.temporary,
        residual_bytes=residuals,
    )


def _speaker(progress: bool) -> Callable[[str], None]:
    def say(sentence: str) -> None:
        if progress:
            # A full disk or a closed descriptor is no reason to lose the measurements.
            with contextlib.suppress(OSError, ValueError):
                print(f"jax_bnar.benchmark: {sentence}", file=sys.stderr, flush=True)

    return say
