"""`fuse` and `explain`."""

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from jax_bnar._base.implementation import from_environment
from jax_bnar._fuse.differentiated import require_undifferentiated
from jax_bnar._fuse.report import FusionReport, report
from jax_bnar._fuse.trace import trace

_Function = TypeVar("_Function", bound=Callable[..., Any])


def fuse(fun: _Function) -> _Function:
    """`fun`, with each BatchNorm(-Add)(-ReLU) in it replaced by the fused operator.

        step = jax.jit(jax.value_and_grad(jax_bnar.fuse(loss)))

    The function is traced. Code that normalises an array by its own statistics is recognised from
    the arithmetic alone, whatever library or spelling it comes from, and becomes `batch_norm`,
    `bn_relu`, `bn_add_relu` or `dual_bn_add_relu`, and with another activation `bn_act` or
    `dual_bn_act`. `relu(scale * (x - mean) + bias + z)` with given vectors, as in evaluation,
    becomes one of the `*_inference` operators. A `batch_norm` of this package becomes one operator
    with the addition or the activation that follows it. Where only the mean and the variance are
    those of a BatchNorm, they become `batch_statistics`. Everything else runs unchanged, and a
    function with nothing to fuse keeps its jaxpr. Results and gradients are those of `fun` up to
    rounding (docs/guide/fuse.md). If the analysis fails, there is a RuntimeWarning, and the program
    stays as it is.

    Apply it inside the transformation that differentiates: `jax.grad(fuse(loss))`. It may stand on
    either side of `jit`, `vmap`, `scan`, `shard_map` and `jax.checkpoint`; it looks into their
    bodies, but leaves those of `custom_jvp` and `custom_vjp` alone.

    It accepts: a variance computed as E[x^2] - E[x]^2 or as E[(x - mean)^2], clamped at 0 or not;
    means computed from sums and counts, over several axes at once or one after another, also over
    mapped axes by `psum`, with `axis_index_groups` of equal size or without, each statistic by
    itself or several stacked in one array; any algebraic form of the normalisation; running
    averages of any kind, because they only read the statistics; ghost batches made by a reshape;
    InstanceNorm, whose statistics are those of each example (at least 32 elements of a channel);
    one residual or a sum of up to three, on either side of the add; any single channel axis except
    the first; float16, bfloat16, float32, float64, and results that are wider than x.

    It refuses the following, of which it may still take the statistics alone, and `explain` gives
    the reason for each: an array between x and the result that is used elsewhere or returned; a
    residual that is broadcast or has another dtype; masks; an epsilon that is not a constant; a
    variance with ddof, another floor or another centre; a different scale for each example;
    LayerNorm, GroupNorm.
    Only `jax.nn.relu` counts as ReLU: `jnp.maximum(a, 0)` and other spellings differ in their
    derivative at 0 or in how they treat NaN, so they stay as they are, after a fused BatchNorm.

    It does not yet recognise statistics computed by a matrix product, by `lax.reduce_window` or in
    a loop; groups of devices that differ in size; or a normalisation that crosses the boundary of a
    loop. What crosses that of `jax.checkpoint` is refused, and what crosses that of a jitted
    function is fused: this call is inlined, and all others stay calls.

    Args:
        fun: any function of arrays, pytrees of arrays, and other values. Arrays are traced; other
            leaves (flags, functions, Python numbers) are passed to `fun` unchanged. NNX modules may
            be arguments: what it changes in them is written back.

    Returns:
        A function with the signature and the results of `fun`.

    Raises:
        TypeError: `fun` is not callable.
        ValueError: when it is called, if `fun` contains the gradient of all that is to be fused
            (swap the two: `jax.grad(fuse(loss))`), or changes an NNX module that is no argument.

    Examples:
        >>> import jax, jax.numpy as jnp, jax_bnar
        >>> def block(x, z):
        ...     mean, var = x.mean(0, keepdims=True), x.var(0, keepdims=True)
        ...     y = (x - mean) * jax.lax.rsqrt(var + 1e-5)
        ...     return jax.nn.relu(y + z)
        >>> x = jnp.arange(6.0).reshape(3, 2)
        >>> y = jax.jit(jax_bnar.fuse(block))(x, jnp.ones_like(x))
        >>> [round(float(value), 3) for value in y[:, 0]]
        [0.0, 1.0, 2.225]

    The idea comes from PaddlePaddle's pass FusedBnAddActPattern.
    """
    _require_callable("fuse", fun)

    @functools.wraps(fun)
    def fused(*args: Any, **kwargs: Any) -> Any:
        # A wrong value would raise within the operators, where an error counts as ours.
        from_environment("fuse")
        program = trace(fun, args, kwargs)
        require_undifferentiated(program.plan)
        return program.run()

    return fused  # type: ignore[return-value]


def explain(fun: Callable[..., Any]) -> Callable[..., FusionReport]:
    """What `fuse` makes of `fun`: `print(explain(fun)(*args))`.

    Args:
        fun: a function that `fuse` takes, not one that `fuse` has returned.

    Returns:
        A function of the arguments of `fun` (arrays may be `jax.ShapeDtypeStruct`s, because nothing
        is run), which returns a `FusionReport`. This prints as one line for each place where an
        array is normalised: the module, the operator or the reason for the refusal, the line of the
        program, and the bytes saved.

    Raises:
        TypeError: `fun` is not callable.

    Examples:
        >>> import jax, jax.numpy as jnp, jax_bnar
        >>> def block(x, z):
        ...     mean, var = x.mean(0, keepdims=True), x.var(0, keepdims=True)
        ...     y = (x - mean) * jax.lax.rsqrt(var + 1e-5)
        ...     return jax.nn.relu(y + z)
        >>> x = jnp.arange(6.0).reshape(3, 2)
        >>> len(jax_bnar.explain(block)(x, x).matched)
        1
    """
    _require_callable("explain", fun)

    @functools.wraps(fun)
    def explained(*args: Any, **kwargs: Any) -> FusionReport:
        from_environment("explain")
        return report(trace(fun, args, kwargs).plan)

    return explained


def _require_callable(name: str, fun: Any) -> None:
    if not callable(fun):
        raise TypeError(
            f"{name}: fun must be callable, got {type(fun).__name__}; pass the function itself,"
            f" {name}(fun)(*args), not its result."
        )
    for is_kind, kind in (
        (inspect.isgeneratorfunction, "generator"),
        (inspect.iscoroutinefunction, "coroutine"),
        (inspect.isasyncgenfunction, "asynchronous generator"),
    ):
        if is_kind(fun) or is_kind(type(fun).__call__):
            raise TypeError(
                f"{name}: fun must be a function that returns arrays, got a {kind} function, which"
                " runs after its call has ended; pass what computes one result."
            )
