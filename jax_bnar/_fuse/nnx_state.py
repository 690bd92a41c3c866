"""NNX modules as arguments: a traced function gets copies, whose new state is written back.

A plain trace would work on copies and discard them, and so leave the running statistics as they
were, without an error.
"""

import contextlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax

_WAY_OUT = (
    "fuse: the function changes an NNX module that is not among its arguments. Pass the module:"
    " fuse(lambda model, x: model(x))(model, x)."
)


def _nnx() -> Any:
    """Flax NNX if the program has imported it; otherwise there can be no modules."""
    return sys.modules.get("flax.nnx")


def is_module(leaf: Any) -> bool:
    nnx = _nnx()
    return nnx is not None and isinstance(leaf, nnx.Pytree | nnx.Variable)


class Modules:
    """The modules among a function's arguments.

    Attributes:
        state: their arrays, in the order of the flattened NNX state.
    """

    def __init__(self, modules: Sequence[Any]) -> None:
        self._modules = tuple(modules)
        self.state: list[Any] = []
        if self._modules:
            self._definition, state = _nnx().split(self._modules)
            self.state, self._tree = jax.tree.flatten(state)

    def copies(self, arrays: Sequence[Any]) -> Sequence[Any]:
        """Copies of the modules that hold these arrays."""
        if not self._modules:
            return ()
        return _nnx().merge(self._definition, jax.tree.unflatten(self._tree, arrays))

    def changes(self, copies: Sequence[Any], given: Sequence[Any]) -> dict[int, Any]:
        """The arrays that differ from those given to `copies`, by their index in `state`."""
        if not self._modules:
            return {}
        arrays, tree = jax.tree.flatten(_nnx().split(copies)[1])
        if tree != self._tree:
            raise ValueError(
                "fuse: the function gives an NNX module variables that it did not have, or removes"
                " some. Create them beforehand: run the model once, or build it with all of them."
            )
        pairs = enumerate(zip(arrays, given, strict=True))
        return {place: array for place, (array, before) in pairs if array is not before}

    def update(self, changes: Mapping[int, Any]) -> None:
        """Writes new arrays into the modules themselves.

        Variables that did not change are not touched, because NNX forbids writing to variables of
        an outer trace, which the parameters of a loss are inside `jax.grad`.
        """
        if not changes:
            return
        places = jax.tree.unflatten(self._tree, range(len(self.state)))
        changed = [
            (path, jax.tree.map(lambda place: changes.get(place, self.state[place]), variable))
            for path, variable in _nnx().to_flat_state(places)
            if not changes.keys().isdisjoint(jax.tree.leaves(variable))
        ]
        _nnx().update(self._modules, _nnx().from_flat_state(changed))


@contextlib.contextmanager
def explained_errors() -> Iterator[None]:
    """Explains NNX's error about changing a module from inside another trace, with the way out."""
    try:
        yield
    except Exception as error:
        if type(error).__name__ == "TraceContextError":
            raise ValueError(_WAY_OUT) from error
        raise
