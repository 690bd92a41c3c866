"""NNX modules as arguments: a traced function gets copies, whose changes are written back.

A plain trace would work on copies and discard them, and so leave the running statistics and every
other attribute as they were, without an error.
"""

import contextlib
import dataclasses
import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax

_WAY_OUT = (
    "fuse: the function changes an NNX module that is not among its arguments. Pass the module:"
    " fuse(lambda model, x: model(x))(model, x)."
)
_NEW_VARIABLES = (
    "fuse: the function gives an NNX module variables or submodules that it did not have, or"
    " removes some. Create them beforehand: run the model once, or build it with all of them."
)


def _nnx() -> Any:
    """Flax NNX if the program has imported it; otherwise there can be no modules."""
    return sys.modules.get("flax.nnx")


def is_module(leaf: Any) -> bool:
    nnx = _nnx()
    # While another thread imports it, it has not got all of its names.
    kinds = getattr(nnx, "Pytree", None), getattr(nnx, "Variable", None)
    return None not in kinds and isinstance(leaf, kinds)  # pyright: ignore[reportArgumentType]


@dataclasses.dataclass(frozen=True)
class Copies:
    """Copies of the modules, for the traced function.

    Attributes:
        modules: the copies.
        nodes: every submodule and variable of the modules themselves, with its copy.
    """

    modules: Sequence[Any]
    nodes: Sequence[tuple[Any, Any]]


@dataclasses.dataclass(frozen=True)
class Changes:
    """What a function has changed in the copies of the modules.

    Attributes:
        arrays: the new arrays, by their index in `Modules.state`.
        attributes: for each change of an attribute that is not an array, a function that makes the
            same change in the modules themselves.
    """

    arrays: Mapping[int, Any]
    attributes: Sequence[Callable[[], None]]


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
            self._paths = _paths(state)

    def copies(self, arrays: Sequence[Any]) -> Copies:
        """Copies of the modules that hold these arrays."""
        if not self._modules:
            return Copies((), ())
        copies = _nnx().merge(self._definition, jax.tree.unflatten(self._tree, arrays))
        both = zip(_nodes(self._modules), _nodes(copies), strict=True)
        return Copies(copies, tuple(both))

    def changes(self, copies: Copies, given: Sequence[Any]) -> Changes:
        """What differs from the modules, and from the arrays given to the copies."""
        if not self._modules:
            return Changes({}, ())
        state = _nnx().split(copies.modules)[1]
        if _paths(state) != self._paths:
            raise ValueError(_NEW_VARIABLES)
        pairs = enumerate(zip(jax.tree.leaves(state), given, strict=True))
        arrays = {place: array for place, (array, before) in pairs if array is not before}
        return Changes(arrays, tuple(_attribute_changes(copies.nodes)))

    def update(self, places: Sequence[int], arrays: Sequence[Any]) -> None:
        """Writes new arrays into the modules themselves, at these indices in `state`.

        Variables that did not change are not touched, because NNX forbids writing to variables of
        an outer trace, which the parameters of a loss are inside `jax.grad`.
        """
        if not places:
            return
        changes = dict(zip(places, arrays, strict=True))
        indices = jax.tree.unflatten(self._tree, range(len(self.state)))
        changed = [
            (path, jax.tree.map(lambda place: changes.get(place, self.state[place]), variable))
            for path, variable in _nnx().to_flat_state(indices)
            if not changes.keys().isdisjoint(jax.tree.leaves(variable))
        ]
        _nnx().update(self._modules, _nnx().from_flat_state(changed))


def _paths(state: Any) -> list[Any]:
    return [path for path, _ in jax.tree.flatten_with_path(state)[0]]


def _nodes(modules: Any) -> list[Any]:
    """Every submodule and variable, once each, in an order that copies share."""
    return [node for _, node in _nnx().iter_graph(modules) if is_module(node)]


def _attribute_changes(nodes: Sequence[tuple[Any, Any]]) -> Iterator[Callable[[], None]]:
    """The changes of attributes that are not arrays: static values, references and metadata."""
    originals = {id(copy): node for node, copy in nodes}

    def outside(leaf: Any) -> Any:
        if is_module(leaf) and id(leaf) not in originals:
            raise ValueError(_NEW_VARIABLES)
        return originals.get(id(leaf), leaf)

    for node, copy in nodes:
        if isinstance(node, _nnx().Variable):
            metadata = copy.get_metadata()
            if not _same(node.get_metadata(), metadata):
                yield functools.partial(node.set_metadata, metadata)
            continue
        before, after = _attributes(node), _attributes(copy)
        for name in before.keys() - after.keys():
            yield functools.partial(delattr, node, name)
        for name, value in after.items():
            if name in before and before[name] is value:
                continue
            value = jax.tree.map(outside, value, is_leaf=is_module)
            if name not in before or not _same(before[name], value):
                yield functools.partial(setattr, node, name, value)


def _attributes(module: Any) -> dict[str, Any]:
    """The attributes that a program sets, without NNX's own records of them."""
    return {name: value for name, value in vars(module).items() if not name.startswith("_pytree__")}


def _same(before: Any, after: Any) -> bool:
    """Whether two values are the same, apart from arrays, which are part of the state."""
    (old, old_tree), (new, new_tree) = (
        jax.tree.flatten(value, is_leaf=is_module) for value in (before, after)
    )
    return old_tree == new_tree and all(
        a is b or isinstance(b, jax.Array) for a, b in zip(old, new, strict=True)
    )


@contextlib.contextmanager
def explained_errors() -> Iterator[None]:
    """Explains NNX's error about changing a module from inside another trace, with the way out."""
    try:
        yield
    except Exception as error:
        kind = type(error)
        # Other libraries have an error of the same name, which says what they know better.
        if kind.__name__ == "TraceContextError" and kind.__module__.startswith("flax."):
            raise ValueError(_WAY_OUT) from error
        raise
