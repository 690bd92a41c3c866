"""Random calls under JAX's transformations give the same for the operator and for its formula.

In float64 the results agree to eight digits, including third derivatives.
"""

from collections.abc import Callable, Iterable
from typing import Any, Final

import hypothesis
import jax
import numpy as np
import pytest
from hypothesis import strategies as st
from property_tests import example_count
from tiers import slow_except
from transformation_cases import KINDS, Call, calls, formula, ours, values
from transformation_families import (
    ENCLOSED,
    NAMED_AXIS,
    POLICIES,
    WRAPPERS,
    checkpoint,
    composition,
    named_axis,
)
from transformations import COMPILED, OUTSIDE_JIT, Transformation

TOLERANCE: Final = 1e-8


def assert_equal_trees(actual: Any, expected: Any) -> None:
    """Compares leaf by leaf, relative to the largest value of the leaf (or 1)."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert (a.shape, a.dtype) == (e.shape, e.dtype)
        magnitude = float(np.max(np.abs(e), initial=1.0))
        np.testing.assert_allclose(a, e, rtol=0, atol=TOLERANCE * magnitude)


def examples(count: int) -> hypothesis.settings:
    """Settings for `count` examples without shrinking, which would compile every attempt."""
    return hypothesis.settings(
        max_examples=example_count(count),
        phases=[hypothesis.Phase.explicit, hypothesis.Phase.reuse, hypothesis.Phase.generate],
        suppress_health_check=[hypothesis.HealthCheck.too_slow],
    )


# The first kind of operator has all of them in `make test`. With two inputs a program is twice as
# large, and XLA takes twice as long. The ones that are not slow for the other kinds show each rule
# of theirs: both modes up to the third order, and what a policy may save.
SLOW_WITH_OTHERS: Final = {
    "jacfwd_of_jacfwd",
    "jacfwd_of_jacrev",
    "jacrev_of_jacrev",
    "grad_of_forward_along_of_forward_along",
    "grad_of_forward_along_of_reverse_along",
    "grad_of_reverse_along_of_reverse_along",
    "forward_over_forward_over_reverse",
    "cond_and_switch",
    "while_loop",
    "custom_rules_around",
    "everything",
    "nothing",
    "dots",
    "dots without batch",
    "dots offloaded",
    "anything but statistics",
    "any name but mask",
    "others offloaded",
}


def numbered(names: Iterable[str]) -> Callable[[Any], Any]:
    """Parametrizes with each name, its number, and the kind of operator."""
    return pytest.mark.parametrize(
        ("number", "name", "kind"),
        [
            pytest.param(
                number,
                name,
                kind,
                id=f"{name}-{kind}",
                marks=pytest.mark.slow if kind != "1" and name in SLOW_WITH_OTHERS else (),
            )
            for number, name in enumerate(names)
            for kind in KINDS
        ],
    )


def check_compiled(transformation: Transformation, call: Call, **keywords: Any) -> None:
    actual, expected = (
        jax.jit(lambda at, f=f: transformation(f, call, at))(values(call))
        for f in (ours(call, **keywords), formula(call, **keywords))
    )
    assert_equal_trees(actual, expected)


@numbered(OUTSIDE_JIT)
@examples(1)
@hypothesis.given(data=st.data())
def test_outside_jit(data: st.DataObject, number: int, name: str, kind: str) -> None:
    call = data.draw(calls(number, kind=kind))
    transformation, at = OUTSIDE_JIT[name], values(call)
    expected = transformation(jax.jit(formula(call)), call, at)
    assert_equal_trees(transformation(ours(call), call, at), expected)


@numbered(COMPILED)
@examples(1)
@hypothesis.given(data=st.data())
def test_compiled(data: st.DataObject, number: int, name: str, kind: str) -> None:
    check_compiled(COMPILED[name], data.draw(calls(number, kind=kind)))


@numbered(POLICIES)
@examples(1)
@hypothesis.given(data=st.data())
def test_checkpoint(data: st.DataObject, number: int, name: str, kind: str) -> None:
    call = data.draw(calls(number, kind=kind, training_only=True))
    check_compiled(checkpoint(POLICIES[name]), call)


@numbered(NAMED_AXIS)
@examples(1)
@hypothesis.given(data=st.data())
def test_named_axis(data: st.DataObject, number: int, name: str, kind: str) -> None:
    """All examples share the statistics, which none could compute alone."""
    call = data.draw(calls(number, kind=kind, training_only=True))
    check_compiled(NAMED_AXIS[name], call, axis_name="i")


@numbered(ENCLOSED)
@examples(1)
@hypothesis.given(data=st.data())
def test_named_axis_within(data: st.DataObject, number: int, name: str, kind: str) -> None:
    """The mapped function is traced first, and then differentiated from outside."""
    call = data.draw(calls(number, kind=kind, training_only=True))
    check_compiled(named_axis(name, own_parameters=False), call, axis_name="i")


@pytest.mark.parametrize("kind", slow_except({"1"}, list(KINDS)))
@examples(2)
@hypothesis.given(
    data=st.data(), around=st.lists(st.sampled_from(sorted(WRAPPERS)), min_size=2, max_size=3)
)
def test_transformations_of_transformations(
    data: st.DataObject, around: list[str], kind: str
) -> None:
    check_compiled(composition(around), data.draw(calls(kind=kind)))
