"""`fold_batch_norms`."""

import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from jax_bnar._fold.report import FoldingReport, report
from jax_bnar._fold.trace import Variables, trace
from jax_bnar._fuse import nnx_state
from jax_bnar._fuse.candidate import described


class FoldedNetwork(NamedTuple):
    """A network for inference, and its variables.

    Attributes:
        apply: `apply(variables, *args, **kwargs)` is what `fun` of the old variables and the same
            arguments was.
        variables: the arrays that it reads: folded weights, offsets, and whatever else of the old
            variables it needs.
        report: what was folded and what was not.
    """

    apply: Callable[..., Any]
    variables: tuple[jax.Array, ...]
    report: FoldingReport


def fold_batch_norms(fun: Callable[..., Any], *args: Any, **kwargs: Any) -> FoldedNetwork:
    """A network in evaluation whose BatchNorms are folded into its convolutions.

        apply, weights, report = jax_bnar.fold_batch_norms(net.apply, variables, images)
        logits = jax.jit(apply)(weights, images)

    With given statistics BatchNorm is `scale * (x - mean) / sqrt(var + epsilon) + bias`, a factor
    and an offset for each channel. If x is a convolution with a kernel, the factor belongs into the
    kernel, and only the offset remains, which XLA adds in the convolution or in the loop behind it:

        factor = scale / sqrt(var + epsilon)
        conv(x, kernel) * factor + offset = conv(x, kernel * factor) + offset

    The function is traced, and what follows each convolution (transposed, grouped, dilated), matrix
    product or `Dense` is read from its arithmetic, so any library's layers will do: of Linen, NNX,
    Haiku, Equinox, Keras on JAX or none. jit and `jax.checkpoint` within it are no boundary.
    Everything that depends on the variables alone, such as their conversion to bfloat16, is
    computed here, once. The rest is left to XLA.

    Args:
        fun: a function of variables and other arguments, which must run in evaluation; or a Linen
            module (its `apply` is taken); or an NNX module after `eval()`.
        *args: the variables of the network (a pytree that may contain NNX modules), then the
            arguments of one call, of which only shapes and dtypes matter. An NNX module as `fun`
            contains its variables, so these are arguments only.
        **kwargs: further arguments, which `apply` takes as its defaults. Leaves that are no arrays
            (flags, strings) are static.

    Returns:
        The function, its variables, and a report of what was folded. Results are those of `fun` up
        to rounding: a kernel is rounded to its dtype after the multiplication. `apply` may be
        called with another batch size. It traces `fun` in each call, so call it in `jax.jit`. What
        `fun` changes in NNX modules is not kept. BatchNorms that are not folded are left to XLA;
        `jax_bnar.fuse(apply)` runs them by our kernels on CPUs.

    Raises:
        TypeError: `fun` is not callable, or there are no variables among the arguments.
        ValueError: `apply` is called with arguments for which the network is another program, for
            example in training.

    Examples:
        >>> import jax, jax.numpy as jnp, jax_bnar
        >>> def net(w, x):
        ...     y = x @ w["kernel"]
        ...     y = (y - w["mean"]) * jax.lax.rsqrt(w["var"] + 1e-5) * w["scale"] + w["bias"]
        ...     return jax.nn.relu(y)
        >>> w = {"kernel": jnp.ones((2, 3)), "mean": jnp.ones(3), "var": jnp.full(3, 4.0)}
        >>> w |= {"scale": jnp.ones(3), "bias": jnp.zeros(3)}
        >>> apply, weights, report = jax_bnar.fold_batch_norms(net, w, jnp.ones((1, 2)))
        >>> len(report.folded), [array.shape for array in weights]
        (1, [(2, 3), (3,)])

    oneDNN Graph does this by its pattern "Convolution + BatchNormInference", and PyTorch's
    `fuse_conv_bn_eval` for a pair of modules.
    """
    function, variables, inputs = _separated(fun, args)
    network = Variables.of(variables)
    first = trace(function, network, network.arrays, inputs, kwargs)
    weights = tuple(first.network.fold(first.variables))
    needed, recipe = _described(weights), first.network.recipe
    shapes = [jax.eval_shape(lambda a: a, array) for array in network.arrays]
    network, options = network.without_arrays(), kwargs

    def apply(variables: Sequence[jax.Array], /, *args: Any, **kwargs: Any) -> Any:
        _require("the variables", _described(variables), needed)
        program = trace(function, network, shapes, args, {**options, **kwargs})
        _require("what these arguments need", _described(program.network.variables), needed)
        if program.network.recipe != recipe:
            raise ValueError(
                "folded network: with these arguments the network is another program, whose"
                " variables are computed otherwise from those that were folded. Fold again with"
                " arguments like these."
            )
        return program.run(variables)

    return FoldedNetwork(apply, weights, report(first.network))


def _separated(fun: Any, args: tuple[Any, ...]) -> tuple[Callable[..., Any], Any, tuple[Any, ...]]:
    """A function of variables and inputs, the variables, and the inputs."""
    if nnx_state.is_module(fun):
        return _call, fun, args
    linen = sys.modules.get("flax.linen")
    function = fun.apply if linen is not None and isinstance(fun, linen.Module) else fun
    if not callable(function):
        raise TypeError(
            "fold_batch_norms: fun must be a function of variables and inputs, a Linen module or an"
            f" NNX module, got {type(fun).__name__}."
        )
    if not args:
        raise TypeError(
            "fold_batch_norms: there are no variables; pass them and the arguments of one call:"
            " fold_batch_norms(fun, variables, x)."
        )
    return function, args[0], args[1:]


def _call(model: Any, *args: Any, **kwargs: Any) -> Any:
    return model(*args, **kwargs)


def _described(arrays: Sequence[Any]) -> list[str]:
    return [described(array.shape, array.dtype) for array in arrays]


def _require(what: str, found: list[str], needed: list[str]) -> None:
    if found != needed:
        raise ValueError(
            f"folded network: {what} must be the arrays that fold_batch_norms returned,"
            f" {', '.join(needed)}; got {', '.join(found)}. Fold again with arguments like these,"
            " in evaluation."
        )
