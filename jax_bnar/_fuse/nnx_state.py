"""NNX modules as arguments: a traced function gets copies, whose new state is written back.

A plain trace would leave the running statistics as they were, without an error: the copies that it
works on would take the new ones with them.
"""

import contextlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import jax

_WAY_OUT = (
    "fuse: the function changes an NNX module that is not among its arguments. Pass the module:"
    " fuse(lambda model, x: model(x))(model, x)."
)


def _nnx() -> Any:
    """Flax NNX where the program has imported it: without it there are no modules."""
    return sys.modules.get("flax.nnx")


def is_module(leaf: Any) -> bool:
    nnx = _nnx()
    return nnx is not None and isinstance(leaf, nnx.Pytree | nnx.Variable)


class Modules:
    """The modules among a function's arguments.

    Attributes:
        state: their arrays, in an order of their own.
    """

    def __init__(self, modules: Sequence[Any]) -> None:
        self._modules = tuple(modules)
        self.state: list[Any] = []
        if self._modules:
            self._definition, state = _nnx().split(self._modules)
            self.state, self._tree = jax.tree.flatten(state)

    def copies(self, arrays: Sequence[Any]) -> Sequence[Any]:
        """The modules again, with these arrays in them."""
        if not self._modules:
            return ()
        return _nnx().merge(self._definition, jax.tree.unflatten(self._tree, arrays))

    def state_of(self, copies: Sequence[Any]) -> list[Any]:
        if not self._modules:
            return []
        arrays, tree = jax.tree.flatten(_nnx().split(copies)[1])
        if tree != self._tree:
            raise ValueError(
                "fuse: the function gives an NNX module variables that it did not have, or takes"
                " some away. Create them before: run the model once, or build it with all of them."
            )
        return arrays

    def update(self, arrays: Sequence[Any]) -> None:
        """Writes the new state into the modules themselves."""
        if self._modules:
            _nnx().update(self._modules, jax.tree.unflatten(self._tree, arrays))


@contextlib.contextmanager
def explained_errors() -> Iterator[None]:
    """NNX's refusal to change a module from inside another trace, with the way out."""
    try:
        yield
    except Exception as error:
        if type(error).__name__ == "TraceContextError":
            raise ValueError(_WAY_OUT) from error
        raise
