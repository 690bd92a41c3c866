"""Traces a function of variables and inputs to a `Network`."""

import dataclasses
import itertools
import sys
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax

from jax_bnar._base.array_leaves import split_arrays
from jax_bnar._fold.inlined import inlined
from jax_bnar._fold.network import Network
from jax_bnar._fuse import nnx_state


@dataclasses.dataclass(frozen=True)
class Variables:
    """The variables of a network: a pytree of arrays, other leaves and NNX modules.

    Attributes:
        arrays: the arrays in it, those of modules included.
        rebuild: the same pytree with other arrays.
    """

    arrays: list[Any]
    rebuild: Callable[[Sequence[Any]], Any]

    @classmethod
    def of(cls, tree: Any) -> "Variables":
        leaves, structure = jax.tree.flatten(tree, is_leaf=nnx_state.is_module)
        are_modules = [nnx_state.is_module(leaf) for leaf in leaves]
        if not any(are_modules):
            return cls(*_split(leaves, structure.unflatten))
        nnx: Any = sys.modules["flax.nnx"]
        # All at once, because they may share variables.
        definition, state = nnx.split(list(itertools.compress(leaves, are_modules)))
        states, of_state = jax.tree.flatten(state)
        others = [leaf for leaf, is_one in zip(leaves, are_modules, strict=True) if not is_one]
        count = len(states)

        # It holds neither a module nor an array, so that the network does not keep its old weights.
        def unflatten(given: Sequence[Any]) -> Any:
            copies = iter(nnx.merge(definition, of_state.unflatten(given[:count])))
            rest = iter(given[count:])
            return structure.unflatten([next(copies if one else rest) for one in are_modules])

        return cls(*_split([*states, *others], unflatten))

    def without_arrays(self) -> "Variables":
        """The same structure, which keeps no array alive."""
        return dataclasses.replace(self, arrays=[])


def _split(
    leaves: Sequence[Any], unflatten: Callable[[Sequence[Any]], Any]
) -> tuple[list[Any], Callable[[Sequence[Any]], Any]]:
    """The arrays among the leaves, and what builds the pytree with others in their place."""
    arrays, with_arrays = split_arrays(leaves)
    return arrays, lambda given: unflatten(with_arrays(given))


@dataclasses.dataclass(frozen=True)
class Program:
    """A traced call.

    Attributes:
        network: its program.
        variables: the arrays on which the new variables depend.
        constants: those of them, and of the arrays within functions that compute the new ones,
            that are in the function itself.
        inputs: the other arrays.
        finish: builds the function's result from the results of the program.
    """

    network: Network
    variables: list[Any]
    constants: list[Any]
    inputs: list[Any]
    finish: Callable[[Sequence[Any]], Any]

    def run(self, variables: Sequence[Any]) -> Any:
        """The result of the call, from the new variables."""
        return self.finish(self.network.run(variables, self.inputs))


def trace(
    function: Callable[..., Any],
    variables: Variables,
    arrays: Sequence[Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    left: Mapping[int, str] = MappingProxyType({}),
) -> Program:
    """Traces a call, in which the variables are these arrays or have these shapes.

    `left` holds the positions of sums that are not to be folded, with the reasons.
    """
    inputs, rebuild = _split(*_flattened((tuple(args), kwargs)))
    fixed: dict[str, Any] = {}

    def flat(given: Sequence[Any], inputs: Sequence[Any]) -> list[Any]:
        called_args, called_kwargs = rebuild(inputs)
        result = function(variables.rebuild(given), *called_args, **called_kwargs)
        results, fixed["finish"] = _split(*_flattened(result))
        return results

    with nnx_state.explained_errors():
        closed: Any = jax.make_jaxpr(flat)(list(arrays), inputs)
    closed = inlined(closed, [*arrays, *inputs])
    given = [*closed.consts, *arrays]
    network = Network(closed.jaxpr, len(given), left)
    constants = [*closed.consts, *network.constants]
    return Program(network, given, constants, inputs, fixed["finish"])


def _flattened(tree: Any) -> tuple[list[Any], Callable[[Sequence[Any]], Any]]:
    leaves, structure = jax.tree.flatten(tree)
    return leaves, structure.unflatten
