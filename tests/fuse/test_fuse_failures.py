"""An analysis never breaks a program: what it cannot cope with stays as it is, with a warning."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fuse_operands import BIAS, SCALE, X, Z, batch_norm
from fuse_tools import assert_fused, kernels
from jax import lax

import jax_bnar
from jax_bnar._fuse import find, plan, training_match


def _join(x: Any, z: Any, scale: Any, bias: Any) -> jax.Array:
    return jax.nn.relu(batch_norm(x, scale, bias) + z)


class UnforeseenError(Exception):
    pass


def _raises(*args: Any, **options: Any) -> Any:
    raise UnforeseenError("boom")


_PARTS = (
    *("fold", "inlinable"),
    *(
        "summed_array",
        "training_candidates",
        "Match.node",
        "chains",
        "duals",
        "affine_candidate",
        "unexplained",
    ),
    *("Rewrite.nodes", "bodies.bodies_of", "bn_add_relu"),
    *("boundaries.opened", "boundaries.across_checkpoints"),
)


@pytest.mark.parametrize("part", _PARTS)
def test_unforeseen_errors(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever part of the recognition raises, results stay, and there is one warning."""
    from jax_bnar._fuse import graph

    modules: dict[str, Any] = {"fold": graph, "inlinable": graph, "bn_add_relu": training_match}
    target, _, name = part.rpartition(".")
    owner = modules.get(part, plan if target in ("bodies", "boundaries") else find)
    monkeypatch.setattr(getattr(owner, target) if target else owner, name, _raises)
    expected = jax.jit(_join)(X, Z, SCALE, BIAS)
    with pytest.warns(RuntimeWarning, match=r"UnforeseenError: boom.*please report") as warned:
        given = jax.jit(jax_bnar.fuse(_join))(X, Z, SCALE, BIAS)
    assert len(warned) == 1
    np.testing.assert_allclose(given, expected, rtol=1e-5, atol=1e-5)
    text = str(jax_bnar.explain(_join)(X, Z, SCALE, BIAS))
    assert "UnforeseenError: boom" in text


def test_a_fused_program_with_other_results(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rewritten program is compared with the original one before it runs."""

    def wrong(*args: Any, **options: Any) -> Any:
        y, mean, var = jax_bnar.bn_add_relu(*args, **options)
        return y.astype(jnp.float16), mean, var

    monkeypatch.setattr(training_match, "bn_add_relu", wrong)
    with pytest.warns(RuntimeWarning, match="float16"):
        given = jax.jit(jax_bnar.fuse(_join))(X, Z, SCALE, BIAS)
    np.testing.assert_array_equal(given, jax.jit(_join)(X, Z, SCALE, BIAS))
    assert not jax_bnar.explain(_join)(X, Z, SCALE, BIAS).matched


def test_the_warning_names_the_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training_match, "bn_add_relu", _raises)

    def program(*args: Any) -> Any:
        with jax.named_scope("the_block"):
            return lax.scan(lambda c, _: (_join(c, *args[1:]), None), args[0], length=2)[0]

    with pytest.warns(RuntimeWarning, match=rf"the_block.* at .*{re.escape('.py')}:\d+: "):
        jax_bnar.fuse(program)(X, Z, SCALE, BIAS)


def _without_results(x: jax.Array) -> tuple[()]:
    del x
    return ()


def _with_a_callback(x: jax.Array) -> jax.Array:
    jax.debug.callback(lambda value: None, x[0, 0, 0, 0])
    return jnp.maximum(x, 0)


@pytest.mark.quick
@pytest.mark.parametrize("body", [_without_results, _with_a_callback])
def test_custom_rules(body: Any) -> None:
    rule = jax.custom_jvp(body)
    rule.defjvp(lambda primals, tangents: (body(*primals), jax.jvp(body, primals, tangents)[1]))

    def program(x: Any, z: Any, scale: Any, bias: Any) -> Any:
        y = batch_norm(x, scale, bias)
        return y, rule(y), jax.nn.relu(batch_norm(z, bias, scale))

    assert_fused(program, X, Z, SCALE, BIAS, batch_norm=1, bn_relu=1)


@pytest.mark.quick
@pytest.mark.parametrize(
    "side",
    [
        lambda: jax.debug.print("step {}", 3),
        lambda: lax.cond(jnp.array(True), lambda: (), lambda: ()),
        lambda: lax.cond(jnp.array(True), lambda: (1, 2.0), lambda: (3, 4.0)),
    ],
    ids=["print", "no results", "two results"],
)
def test_constants_whose_results_are_none_or_many(side: Any) -> None:
    def program(*args: Any) -> Any:
        side()
        return _join(*args)

    assert_fused(program, X, Z, SCALE, BIAS, bn_add_relu=1)


def test_tokens() -> None:
    def program(token: Any, *args: Any) -> Any:
        return lax.after_all(token), _join(*args)

    token = lax.create_token()
    fused = jax.jit(jax_bnar.fuse(program))
    after, given = fused(token, X, Z, SCALE, BIAS)
    assert type(after) is type(token)
    assert kernels(jax_bnar.fuse(program), token, X, Z, SCALE, BIAS) == 1
    np.testing.assert_allclose(given, _join(X, Z, SCALE, BIAS), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("call", [jax_bnar.fuse, jax_bnar.explain])
def test_a_setting_of_the_user_is_no_failure(call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_BNAR_IMPLEMENTATION", "fii")
    with pytest.raises(ValueError, match=f"{call.__name__}: .*JAX_BNAR_IMPLEMENTATION must be"):
        call(_join)(X, Z, SCALE, BIAS)


def test_the_table_of_what_was_not_analysed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(find, "training_candidates", _raises)
    report = jax_bnar.explain(_join)(X, Z, SCALE, BIAS)
    assert "<td>not analysed</td>" in report.html()
    assert "<td>[]</td>" not in report.html()
