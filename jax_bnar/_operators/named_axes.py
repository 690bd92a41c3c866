"""Checks of named axes (`shard_map`, `pmap`, `vmap`), and what JAX's errors about them mean."""

import contextlib
import operator
from collections.abc import Iterator
from typing import Any


def check_named_axes(
    function: str, axis_name: Any, axis_index_groups: Any, argument: str = "axis_name"
) -> tuple[tuple[Any, ...], tuple[tuple[int, ...], ...] | None]:
    """The named axes as a flat tuple, empty for None, and the groups as tuples.

    `argument` is what the caller calls `axis_name`.
    """
    of_groups = f"{argument.removesuffix('_name')}_index_groups"
    names = tuple(_flat_names(axis_name))
    for name in names:
        if name.__hash__ is None or isinstance(name, int):
            raise TypeError(
                f"{function}: {argument} must be the name of an axis (of shard_map, pmap or vmap)"
                f" or a tuple of names, got {axis_name!r}."
            )
    if len(set(names)) != len(names):
        raise ValueError(f"{function}: {argument} names an axis twice, got {axis_name!r}.")
    if axis_index_groups is None:
        return names, None
    if not names:
        raise ValueError(
            f"{function}: {of_groups}={axis_index_groups!r} groups the indices of a named axis, but"
            f" {argument} is None; pass the name of that axis."
        )
    try:
        groups = tuple(tuple(operator.index(i) for i in group) for group in axis_index_groups)
    except TypeError:
        raise TypeError(
            f"{function}: {of_groups} must be a list of lists of integers, got"
            f" {axis_index_groups!r}."
        ) from None
    indices = sorted(index for group in groups for index in group)
    if not all(groups) or indices != list(range(len(indices))):
        raise ValueError(
            f"{function}: {of_groups} must hold each index of the axis exactly once, got"
            f" {axis_index_groups!r}."
        )
    return names, groups


@contextlib.contextmanager
def names_in_scope(
    function: str, axis_name: Any, argument: str = "axis_name", *, is_optional: bool = True
) -> Iterator[None]:
    """Turns JAX's bare errors about a named axis into ones that say what to do.

    `argument` is what the caller calls `axis_name`, and `is_optional` whether it may be None.
    """
    try:
        yield
    except NotImplementedError as error:
        if "vmap collectives" in str(error):
            raise NotImplementedError(
                f"{function}: JAX does not support groups of the indices of a vmap's axis,"
                f" {argument}={axis_name!r}; use pmap, or shard_map with check_vma=False."
            ) from error
        if str(error):
            raise
        # Collectives over groups of indices raise this in a shard_map that checks varying axes.
        raise NotImplementedError(
            f"{function}: JAX does not support axis_index_groups in a shard_map with"
            " check_vma=True; pass check_vma=False to it."
        ) from error
    except (ValueError, AssertionError) as error:
        # Collectives over the axis of a vmap inside of such a shard_map raise these.
        if str(error) and "corresponds to one of varying" not in str(error):
            raise
        raise ValueError(
            f"{function}: JAX does not support {argument}={axis_name!r} with the axis of a vmap in"
            " a shard_map with check_vma=True; pass check_vma=False to it."
        ) from error
    except NameError as error:
        if "unbound axis name" not in str(error):
            raise
        instead = (
            f", or leave {argument} out: under jit alone, statistics are those of the whole array,"
            " however it is sharded"
        )
        raise NameError(
            f"{function}: {argument}={axis_name!r} does not name a mapped axis here ({error}). Call"
            " it in a function mapped by shard_map, pmap or"
            f" vmap(axis_name=...){instead if is_optional else ''}."
        ) from error


def _flat_names(axis_name: Any) -> Iterator[Any]:
    if axis_name is None:
        return
    if not isinstance(axis_name, (tuple, list)):
        yield axis_name
        return
    for name in axis_name:
        yield from _flat_names(name)
