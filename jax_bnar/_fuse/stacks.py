"""Several statistics in one array, so that one psum sums them all, as Flax's own BatchNorm does.

They are stacked along an axis of their own, or concatenated along one of theirs. The label of that
axis begins with STACK, and the axes of x that each of them runs along there follow.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from jax_bnar._fuse.axes import STACK
from jax_bnar._fuse.sizes import Size, is_long
from jax_bnar._fuse.term import Term


def stacked(terms: Sequence[Term], axis: int) -> Term | None:
    """Terms with the same labels along a new axis."""
    labels = terms[0].labels
    return _joined(terms, (*labels[:axis], (), *labels[axis:]), axis)


def concatenated(terms: Sequence[Term], axis: int, sizes: Sequence[Size]) -> Term | None:
    """Terms with the same labels, one behind the other along an axis of theirs."""
    labels = terms[0].labels
    # An axis along which a value repeats has no label, so nothing would say where the next begins.
    repeats = not labels[axis] and any(is_long(size) for size in sizes)
    if repeats or any(size != sizes[0] for size in sizes):
        return None
    return _joined(terms, labels, axis)


def _joined(terms: Sequence[Term], labels: tuple[Any, ...], axis: int) -> Term | None:
    if any(term.polynomial is None or term.labels != terms[0].labels for term in terms):
        return None
    if len(terms) > 1:
        labels = (*labels[:axis], (STACK, *labels[axis]), *labels[axis + 1 :])
    return Term(tuple(p for term in terms for p in term.polynomials), labels)


def part(term: Term, axis: int, start: Size, limit: Size, sizes: Mapping[Any, Size]) -> Term | None:
    """Those of the stacked values that lie between two positions along an axis."""
    label = term.labels[axis]
    if label[:1] != (STACK,):
        return None
    length = math.prod(sizes[each] for each in label[1:])
    bounds = [length * number for number in range(len(term.polynomials) + 1)]
    if start not in bounds or limit not in bounds:
        return None
    kept = term.polynomials[bounds.index(start) : bounds.index(limit)]
    if not kept:
        return None
    label = label if len(kept) > 1 else label[1:]
    return Term(kept, (*term.labels[:axis], label, *term.labels[axis + 1 :]))


def unstacked(term: Term, axis: int) -> list[Term] | None:
    """Each of the stacked values, without the axis along which they are stacked."""
    if term.labels[axis] != (STACK,):
        return None
    labels = (*term.labels[:axis], *term.labels[axis + 1 :])
    return [Term((polynomial,), labels) for polynomial in term.polynomials]


def is_ambiguous(term: Term) -> bool:
    """Whether values are stacked along two axes, as in an outer product of two stacks."""
    return sum(label.count(STACK) for label in term.labels) > 1
