"""A normalisation that is partly inside of a jitted function or of `jax.checkpoint`."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fuse_tools import array, assert_fused, assert_no_worse, assert_untouched, kernels, operators
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from property_tests import example_count
from test_fuse_mutations import ARGUMENTS as OF_MUTANTS
from test_fuse_mutations import (
    MUTATIONS,
    fast_and_folded,
    mutant,
    require_equal,
    two_pass,
    with_bias_before,
)

import jax_bnar
from jax_bnar._fuse import boundaries

ARGUMENTS = array((32, 4)), array((32, 4), 1), array((4, 4), 2), array((4,), 3)


def _apply(array_and_moments: Any, z: Any, scale: Any) -> jax.Array:
    y, mean, var = array_and_moments
    return jax.nn.relu((y - mean) * lax.rsqrt(var + 1e-3) * scale[None] + z)


def _moments(y: Any) -> tuple[jax.Array, jax.Array]:
    return y.mean(0, keepdims=True), y.var(0, keepdims=True)


_jit: Any = jax.jit


# A matrix product makes a jitted function large: it stays a call if nothing crosses its boundary.


@_jit
def _moments_of_product(x: Any, w: Any) -> Any:
    y = x @ w
    return y, *_moments(y)


@_jit
def _normalised_product(x: Any, w: Any) -> Any:
    y, mean, var = _moments_of_product(x, w)
    return (y - mean) * lax.rsqrt(var + 1e-3)


@_jit
def _applied_product(y: Any, mean: Any, var: Any, z: Any, scale: Any, w: Any) -> Any:
    return _apply((y, mean, var), z, scale) @ w


@_jit
def _block(x: Any, z: Any, w: Any, scale: Any) -> Any:
    y = x @ w
    return _apply((y, *_moments(y)), z, scale) + x


def statistics_in_a_jit(x: Any, z: Any, w: Any, scale: Any) -> Any:
    return _apply(_moments_of_product(x, w), z, scale)


def relu_outside(x: Any, z: Any, w: Any, scale: Any) -> Any:
    return jax.nn.relu(_normalised_product(x, w) * scale[None] + z)


def statistics_outside(x: Any, z: Any, w: Any, scale: Any) -> Any:
    return _applied_product(x, *_moments(x), z, scale, w)


def from_one_jit_to_another(x: Any, z: Any, w: Any, scale: Any) -> Any:
    return _applied_product(*_moments_of_product(x, w), z, scale, w)


def within_another_jit(x: Any, z: Any, w: Any, scale: Any) -> Any:
    return jax.jit(lambda x: jnp.sin(statistics_in_a_jit(x @ w, z, w, scale)) @ w)(x)


def within_a_checkpoint(x: Any, z: Any, w: Any, scale: Any) -> Any:
    return jax.checkpoint(statistics_in_a_jit)(x, z, w, scale)


def own_operator_in_a_jit(x: Any, z: Any, w: Any, scale: Any) -> Any:
    norm = jax.jit(lambda x: jax_bnar.batch_norm(x @ w, scale, None).y)
    return jax.nn.relu(norm(x) + z)


@pytest.mark.parametrize(
    "function",
    [
        statistics_in_a_jit,
        relu_outside,
        statistics_outside,
        from_one_jit_to_another,
        within_another_jit,
        within_a_checkpoint,
    ],
    ids=lambda f: f.__name__,
)
def test_jitted_parts(function: Callable[..., Any]) -> None:
    assert_fused(function, *ARGUMENTS, bn_add_relu=1)


def test_our_own_operator_in_a_jitted_part() -> None:
    assert operators(own_operator_in_a_jit, *ARGUMENTS) == {"bn_add_relu": 1}
    assert_no_worse(own_operator_in_a_jit, *ARGUMENTS)


def test_a_join_of_two_jitted_parts() -> None:
    def join(x: Any, z: Any, w: Any, scale: Any) -> Any:
        other = _normalised_product(z, w + 1.0)
        return jax.nn.relu(_normalised_product(x, w) * scale[None] + other)

    assert_fused(join, *ARGUMENTS, dual_bn_add_relu=1)


def test_in_a_scan() -> None:
    def program(x: Any, z: Any, w: Any, scale: Any) -> Any:
        step = lambda c, _: (statistics_in_a_jit(c, z, w, scale), None)  # noqa: E731
        return lax.scan(step, x, None, length=3)[0]

    assert_fused(program, *ARGUMENTS, bn_add_relu=3)


@pytest.mark.parametrize("check_vma", [True, False])
def test_in_shard_map(check_vma: bool) -> None:
    @jax.jit
    def moments(x: Any, w: Any) -> Any:
        y = x @ w
        mean, squares = lax.pmean(jnp.stack([y.mean(0), (y * y).mean(0)]), "data")
        return y, mean[None], (squares - mean * mean)[None]

    mesh = Mesh(np.array(jax.devices()[:4]), ("data",))
    program: Any = jax.shard_map(
        lambda x, z, w, scale: _apply(moments(x, w), z, scale),
        mesh=mesh,
        in_specs=(P("data"), P("data"), P(), P()),
        out_specs=P("data"),
        check_vma=check_vma,
    )
    assert_fused(program, *ARGUMENTS, bn_add_relu=1)


def _names(function: Callable[..., Any], *args: Any) -> list[str]:
    """The names of the jitted functions that a program calls."""
    equations = jax.make_jaxpr(function)(*args).jaxpr.eqns
    return [e.params["name"] for e in equations if e.primitive.name in ("jit", "pjit")]


def test_only_what_is_crossed_is_opened() -> None:
    def program(x: Any, z: Any, w: Any, scale: Any) -> Any:
        x = _block(x, z, w, scale)
        x = statistics_in_a_jit(x, z, w, scale)
        x = _block(x, z, w, scale)
        return _normalised_product(x, w), _applied_product(x, scale[None], scale[None], z, scale, w)

    before, after = (_names(f, *ARGUMENTS) for f in (program, jax_bnar.fuse(program)))
    assert before == [
        "_block",
        "_moments_of_product",
        "_block",
        "_normalised_product",
        "_applied_product",
    ]
    before.remove("_moments_of_product")
    assert after == before
    assert_no_worse(program, *ARGUMENTS)


def test_a_shared_part_is_opened_wherever_it_is_crossed() -> None:
    def program(x: Any, z: Any, w: Any, scale: Any) -> Any:
        y, mean, _ = _moments_of_product(x, w)
        x = statistics_in_a_jit(x, z, w, scale) + mean * y
        x = statistics_in_a_jit(x, z, w, scale)
        return statistics_in_a_jit(x, z, w, scale)

    assert _names(jax_bnar.fuse(program), *ARGUMENTS) == ["_moments_of_product"]
    assert_fused(program, *ARGUMENTS, bn_add_relu=3)


def test_blocks_that_nothing_crosses_stay_shared() -> None:
    """The next block takes a sum of what this one returns, so it is looked into."""

    def program(x: Any, z: Any, w: Any, scale: Any) -> Any:
        for _ in range(3):
            x = _block(x, z, w, scale)
        return x

    equations = jax.make_jaxpr(jax_bnar.fuse(program))(*ARGUMENTS).jaxpr.eqns
    assert [equation.params["name"] for equation in equations] == ["_block"] * 3
    assert len({id(equation.params["jaxpr"]) for equation in equations}) == 1


def test_jitted_functions_with_options_stay_calls() -> None:
    def with_effect(x: Any, w: Any) -> Any:
        jax.debug.callback(lambda y: None, x[0, 0])
        return _moments_of_product(x, w)

    def program(part: Callable[..., Any]) -> Callable[..., Any]:
        return lambda x, z, w, scale: _apply(part(x, w), z, scale)

    for part in (
        jax.jit(_moments_of_product.__wrapped__, donate_argnums=0),
        jax.jit(_moments_of_product.__wrapped__, keep_unused=True),
        jax.jit(with_effect),
    ):
        function = program(part)
        text = str(jax.make_jaxpr(function)(*ARGUMENTS))
        assert not operators(function, *ARGUMENTS)
        assert str(jax.make_jaxpr(jax_bnar.fuse(function))(*ARGUMENTS)) == text


def swapped(x: Any, z: Any, w: Any, scale: Any) -> Any:
    y, mean, var = _moments_of_product(x, w)
    return _apply((y, var, mean), z, scale)


def of_another_array(x: Any, z: Any, w: Any, scale: Any) -> Any:
    y, mean, _ = _moments_of_product(x, w)
    return _apply((y, mean, _moments_of_product(z, w)[2]), z, scale)


def of_another_call(x: Any, z: Any, w: Any, scale: Any) -> Any:
    """The bodies are the same, and the arrays are not."""
    return _apply((_moments_of_product(x, w)[0], *_moments_of_product(x + 1.0, w)[1:]), z, scale)


def another_count(x: Any, z: Any, w: Any, scale: Any) -> Any:
    y, mean, var = _moments_of_product(x, w)
    return _apply((y, mean, var * (32 / 31)), z, scale)


def centred_array_is_returned(x: Any, z: Any, w: Any, scale: Any) -> Any:
    y, mean, var = _moments_of_product(x, w)
    centred = y - mean
    return jax.nn.relu(centred * lax.rsqrt(var + 1e-3)), centred


def stopped(x: Any, z: Any, w: Any, scale: Any) -> Any:
    y, *statistics = _moments_of_product(x, w)
    return _apply((y, *map(lax.stop_gradient, statistics)), z, scale)


@pytest.mark.parametrize(
    "function",
    [swapped, of_another_array, of_another_call, another_count, centred_array_is_returned, stopped],
    ids=lambda f: f.__name__,
)
def test_lookalikes(function: Callable[..., Any]) -> None:
    assert_untouched(function, *ARGUMENTS)


def test_large_programs_are_not_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(boundaries, "_MOST_EQUATIONS", 3)
    assert_untouched(statistics_in_a_jit, *ARGUMENTS)


def test_errors_leave_the_calls_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("broken on purpose")

    def program(*args: Any) -> Any:
        return statistics_in_a_jit(_block(*args), *args[1:])

    monkeypatch.setattr(boundaries, "opened", broken)
    with pytest.warns(RuntimeWarning, match="broken on purpose"):
        given = jax_bnar.fuse(program)(*ARGUMENTS)
    np.testing.assert_allclose(given, program(*ARGUMENTS), rtol=1e-4, atol=1e-4)


# jax.checkpoint


def _checkpointed(part: Any) -> Callable[..., Any]:
    return jax.checkpoint(part.__wrapped__, policy=jax.checkpoint_policies.dots_saveable)


def statistics_in_a_checkpoint(x: Any, z: Any, w: Any, scale: Any) -> Any:
    return _apply(_checkpointed(_moments_of_product)(x, w), z, scale)


def statistics_before_a_checkpoint(x: Any, z: Any, w: Any, scale: Any) -> Any:
    centred = x - x.mean(0, keepdims=True)
    variance = jnp.square(centred).mean(0, keepdims=True)

    @jax.checkpoint
    def rest(centred: Any) -> Any:
        return (centred * lax.rsqrt(variance + 1e-3)) @ w

    return rest(centred)


def statistics_in_a_checkpoint_in_a_jit(x: Any, z: Any, w: Any, scale: Any) -> Any:
    part = jax.jit(lambda x: _checkpointed(_moments_of_product)(x @ w, w))
    return _apply(part(x), z, scale)


@pytest.mark.parametrize(
    "function",
    [
        statistics_in_a_checkpoint,
        statistics_before_a_checkpoint,
        statistics_in_a_checkpoint_in_a_jit,
    ],
    ids=lambda f: f.__name__,
)
def test_checkpoints_are_not_crossed(function: Callable[..., Any]) -> None:
    assert_untouched(function, *ARGUMENTS, reason="a part of it is inside of a jax.checkpoint")
    (candidate,) = jax_bnar.explain(function)(*ARGUMENTS).candidates
    assert "put all of it, from the mean to the ReLU, on one side" in candidate.reason
    assert "test_fuse_boundaries.py:" in candidate.line


def test_a_relu_outside_of_a_checkpoint() -> None:
    """The BatchNorm in it is fused, and the program still keeps and computes again what it says."""

    def program(x: Any, z: Any, w: Any, scale: Any) -> Any:
        return jax.nn.relu(_checkpointed(_normalised_product)(x, w) + z) @ jnp.diag(scale)

    report = jax_bnar.explain(program)(*ARGUMENTS)
    assert [candidate.operator for candidate in report.matched] == ["batch_norm"]
    (refused,) = report.refused
    assert "on the other side of the boundary of a jax.checkpoint" in refused.reason
    before, after = (
        [e.primitive.name for e in jax.make_jaxpr(f)(*ARGUMENTS).jaxpr.eqns]
        for f in (program, jax_bnar.fuse(program))
    )
    assert before == after
    assert_no_worse(program, *ARGUMENTS)


def test_checkpoints_that_hold_all_of_it_are_not_refused() -> None:
    def program(x: Any, z: Any, w: Any, scale: Any) -> Any:
        y = x
        for _ in range(2):
            y = _checkpointed(_block)(y, z, w, scale)
        return y

    assert jax_bnar.explain(program)(*ARGUMENTS).refused == ()
    assert_fused(program, *ARGUMENTS, bn_add_relu=2)


# Programs that are cut anywhere


def in_pieces(function: Callable[..., Any], cuts: Sequence[int]) -> Callable[..., Any]:
    """The function with its equations in several jitted functions, which are called in turn."""
    closed = jax.make_jaxpr(function)(*OF_MUTANTS)
    jaxpr = closed.jaxpr
    bounds = [0, *sorted({cut % len(jaxpr.eqns) for cut in cuts}), len(jaxpr.eqns)]

    def program(*args: Any) -> Any:
        env = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*closed.consts, *args), strict=True))
        extra = args[-1]
        for start, stop in itertools.pairwise(bounds):
            equations, later = jaxpr.eqns[start:stop], jaxpr.eqns[stop:]
            read_later = {
                *(id(v) for e in later for v in e.invars),
                *map(id, jaxpr.outvars),
            }
            results = [v for e in equations for v in e.outvars if id(v) in read_later]
            known = [v for v in env if any(v is a for e in equations for a in e.invars)]

            @jax.jit
            def piece(
                values: Any,
                extra: Any,
                equations: Any = equations,
                known: Any = known,
                results: Any = results,
            ) -> Any:
                env = dict(zip(known, values, strict=True))
                for equation in equations:
                    operands = [a.val if hasattr(a, "val") else env[a] for a in equation.invars]
                    params = equation.primitive.get_bind_params(equation.params)
                    out = equation.primitive.bind(*operands, **params)
                    out = out if equation.primitive.multiple_results else [out]
                    env.update(zip(equation.outvars, out, strict=True))
                # A flip is no arithmetic, so the piece is a large function.
                return [env[v] for v in results], lax.rev(extra, (0,))

            values, extra = piece([env[v] for v in known], extra)
            env.update(zip(results, values, strict=True))
        return [v.val if hasattr(v, "val") else env[v] for v in jaxpr.outvars] + [extra]

    return program


CUTS = st.lists(st.integers(0, 40), min_size=1, max_size=3)


@hypothesis.given(base=st.sampled_from([two_pass, fast_and_folded, with_bias_before]), cuts=CUTS)
@hypothesis.settings(max_examples=example_count(5))
def test_programs_in_pieces_are_fused(base: Callable[..., Any], cuts: list[int]) -> None:
    program = in_pieces(base, cuts)
    assert operators(program, *OF_MUTANTS) == operators(base, *OF_MUTANTS)
    assert kernels(jax_bnar.fuse(program), *OF_MUTANTS) == 1
    require_equal(program)


@pytest.mark.slow
@hypothesis.given(
    base=st.sampled_from([two_pass, fast_and_folded, with_bias_before]),
    cuts=CUTS,
    index=st.integers(0, 40),
    mutation=st.sampled_from(sorted(MUTATIONS)),
)
@hypothesis.settings(max_examples=example_count(8))
def test_mutants_in_pieces_compute_the_same(
    base: Callable[..., Any], cuts: list[int], index: int, mutation: str
) -> None:
    require_equal(in_pieces(mutant(base, index, mutation), cuts))
