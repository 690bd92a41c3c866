"""`fold_batch_norms`."""

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from jax_bnar._base.array_leaves import is_array
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

    def __repr__(self) -> str:
        # That of a tuple would print every weight.
        count = len(self.variables)
        return f"FoldedNetwork with {count} arrays of variables and this report:\n{self.report}"


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
    product or `Dense`, or several of them concatenated, is read from its arithmetic, so any
    library's layers will do: of Linen, NNX, Haiku, Equinox, Keras on JAX or none. jit and
    `jax.checkpoint` within it are no boundary; the bodies of loops and the branches of `cond` are
    left as they are, and the report says so. Everything that depends on the variables alone, such
    as their conversion to bfloat16, is computed here, once. The rest is left to XLA.

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
        to rounding: a kernel is rounded to its dtype after the multiplication, and is not folded if
        that leaves the range of float16, or its factor is infinite or NaN. (While `variables` are
        traced, in `jax.jit`, neither is known: kernels in float16 are then not folded, and factors
        count as finite.) Sums in float16 are those of the folded kernels, which may overflow where
        the network subtracts means of hundreds of deviations. `apply` may be called with another
        batch size, but not with 0 where our layers are folded. It traces `fun` in each call, so
        call it in `jax.jit`. What `fun` changes in NNX modules is not kept. BatchNorms that are not
        folded are left to XLA; `jax_bnar.fuse(apply)` runs them by our kernels on CPUs.

    Raises:
        TypeError: `fun` is not callable or a class, or there are no variables among the arguments,
            or they are no arrays, or there is no array after them.
        ValueError: `apply` is called with the variables that were given here, or with arguments for
            which the network is another program or has other constants, for example in training.

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
    old = Variables.of(variables)
    _require_arrays(old.arrays)
    _require_inputs((inputs, kwargs))
    first = trace(function, old, old.arrays, inputs, kwargs)
    weights = tuple(first.network.fold(first.variables))
    left = first.network.refused
    if left:
        first = trace(function, old, old.arrays, inputs, kwargs, left)
        weights = tuple(first.network.fold(first.variables))
    # The function holds its constants anyway, but for those that NumPy computes in each call.
    constants = first.constants
    needed, recipe = _described(weights), first.network.recipe
    shapes = [jax.eval_shape(lambda a: a, array) for array in old.arrays]
    structure, options = old.without_arrays(), kwargs

    def apply(variables: Sequence[jax.Array], /, *args: Any, **kwargs: Any) -> Any:
        """What the network computes, from its folded variables: see `FoldedNetwork`."""
        _require_folded(_described(variables), needed)
        program = trace(function, structure, shapes, args, {**options, **kwargs}, left)
        _require_same(_described(program.network.new_variables), needed)
        if program.network.recipe != recipe:
            raise ValueError(
                "folded network: with these arguments the network is another program, whose"
                " variables are computed otherwise from those that were folded. Fold again with"
                " arguments like these."
            )
        if not _are_same(program.constants, constants):
            raise ValueError(
                "folded network: with these arguments the network has other constants (arrays that"
                " are not among its variables) than when it was folded. Fold again with arguments"
                " like these, or compute them by jax.numpy."
            )
        return program.run(variables)

    return FoldedNetwork(apply, weights, report(first.network))


def _separated(fun: Any, args: tuple[Any, ...]) -> tuple[Callable[..., Any], Any, tuple[Any, ...]]:
    """A function of variables and inputs, the variables, and the inputs."""
    if nnx_state.is_module(fun):
        return _call, fun, args
    function: Any = fun
    # While another thread imports Linen, there is none.
    if isinstance(fun, getattr(sys.modules.get("flax.linen"), "Module", ())):
        function = fun.apply
        if args and not isinstance(args[0], Mapping):
            raise TypeError(
                "fold_batch_norms: the variables of a Linen module are a dict such as {'params':"
                f" ..., 'batch_stats': ...}}, got {_described([args[0]])[0]}. Pass"
                " fold_batch_norms(module, variables, *args); where a module is bound, module,"
                " variables = module.unbind()."
            )
    if isinstance(fun, type):
        raise TypeError(
            f"fold_batch_norms: fun is the class {fun.__name__}; pass a module or a function."
        )
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


def _described(arrays: Any) -> list[str]:
    if not isinstance(arrays, (tuple, list)):
        return [f"a {type(arrays).__name__}"]
    return [
        described(array.shape, array.dtype)
        if hasattr(array, "shape") and hasattr(array, "dtype")
        else f"a {type(array).__name__}"
        for array in arrays
    ]


def _require_arrays(variables: Sequence[Any]) -> None:
    if not variables:
        raise TypeError(
            "fold_batch_norms: there is no array among the variables of the network, which are the"
            " first argument after the function."
        )
    for array in variables:
        if isinstance(array, jax.ShapeDtypeStruct):
            raise TypeError(
                "fold_batch_norms: the variables must be arrays, whose values are folded, got"
                f" {array}; only the arguments after them may be jax.ShapeDtypeStruct."
            )


def _require_inputs(given: Any) -> None:
    if not any(map(is_array, jax.tree.leaves(given))):
        raise TypeError(
            "fold_batch_norms: there is no array after the variables, so nothing would be left to"
            " compute. The variables are the first argument of the function, not a part of it:"
            " fold_batch_norms(lambda variables, x: ..., variables, x), and with an NNX module"
            " fold_batch_norms(module, x)."
        )


def _are_same(found: Sequence[Any], expected: Sequence[Any]) -> bool:
    return len(found) == len(expected) and all(map(_is_same, found, expected))


def _is_same(found: Any, expected: Any) -> bool:
    """Whether two arrays are one, or have the same bits; a tracer is equal to itself only."""
    if found is expected:
        return True
    if isinstance(found, jax.core.Tracer) or isinstance(expected, jax.core.Tracer):
        return False
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return False
    if jnp.issubdtype(found.dtype, jax.dtypes.prng_key):
        found, expected = jax.random.key_data(found), jax.random.key_data(expected)
    return np.asarray(found).tobytes() == np.asarray(expected).tobytes()


def _require_folded(found: list[str], needed: list[str]) -> None:
    if found != needed:
        raise ValueError(
            "folded network: the variables must be the arrays that fold_batch_norms returned (not"
            f" the variables that it was given), {', '.join(needed)}; got {', '.join(found)}."
        )


def _require_same(found: list[str], needed: list[str]) -> None:
    if found != needed:
        raise ValueError(
            "folded network: with these arguments the network is another program, with the"
            f" variables [{', '.join(found)}] where [{', '.join(needed)}] were folded. An argument"
            " that was a number when it was folded may be an array now. Fold again with arguments"
            " like these, in evaluation."
        )
