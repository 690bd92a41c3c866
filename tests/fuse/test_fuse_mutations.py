"""Mutants, which differ from a BatchNorm-Add-ReLU in one equation, always keep their results.

Most mutants are no longer a BatchNorm, but some are. Whatever `fuse` does with one, its values and
gradients must stay those of the mutant. This is tested in float64, where rounding hides nothing.
"""

from collections.abc import Callable
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest
from fuse_tools import array, operators
from jax import lax
from property_tests import example_count

import jax_bnar

SHAPE = (4, 3, 2, 3)
ARGUMENTS = tuple(
    array(shape, seed).astype(jnp.float64) for seed, shape in enumerate((SHAPE, SHAPE, (3,), (3,)))
)
AXES = (0, 1, 2)


def two_pass(x: Any, z: Any, scale: Any, bias: Any) -> Any:
    mean = x.sum(AXES, keepdims=True) / 24.0
    centred = x - mean
    var = jnp.square(centred).sum(AXES, keepdims=True) / 24.0
    y = centred * lax.rsqrt(var + 1e-3) * scale.reshape(1, 1, 1, 3) + bias.reshape(1, 1, 1, 3)
    return jax.nn.relu(y + z), 0.9 * scale + 0.1 * mean.reshape(3), var.reshape(3)


def fast_and_folded(x: Any, z: Any, scale: Any, bias: Any) -> Any:
    mean = x.sum(AXES) / 24.0
    var = lax.max(0.0, (x * x).sum(AXES) / 24.0 - mean * mean)
    slope = scale * lax.rsqrt(var + 1e-3)
    y = x * slope.reshape(1, 1, 1, 3) + (bias - mean * slope).reshape(1, 1, 1, 3)
    return jax.nn.relu(z + y), mean, 0.9 * bias + 0.1 * var


def evaluation(x: Any, z: Any, scale: Any, bias: Any) -> Any:
    inv = lax.rsqrt(jnp.square(scale) + 1e-3) * scale
    y = (x - bias.reshape(1, 1, 1, 3)) * inv.reshape(1, 1, 1, 3) + scale.reshape(1, 1, 1, 3)
    return jax.nn.relu(y + z), inv


def with_bias_before(x: Any, z: Any, scale: Any, bias: Any) -> Any:
    x = x + bias.reshape(1, 1, 1, 3)
    mean = x.sum(AXES, keepdims=True) / 24.0
    var = (x * x).sum(AXES, keepdims=True) / 24.0 - mean * mean
    y = (x - mean) / lax.sqrt(var + 1e-3) * scale.reshape(1, 1, 1, 3)
    return jax.nn.relu(y + z), 0.9 * scale + 0.1 * mean.reshape(3), var.reshape(3)


BASES = (two_pass, fast_and_folded, evaluation, with_bias_before)


def _flip(value: Any) -> Any:
    return lax.rev(value, tuple(range(value.ndim)))


# Each mutation takes the primitive's result, a function that binds the primitive, and its operands.
MUTATIONS: dict[str, Callable[..., Any]] = {
    "scaled": lambda out, bind, args: out * 1.25,
    "shifted": lambda out, bind, args: out + 0.125,
    "negated": lambda out, bind, args: -out,
    "flipped": lambda out, bind, args: _flip(out),
    "stopped": lambda out, bind, args: lax.stop_gradient(out),
    "rounded": lambda out, bind, args: out.astype(jnp.float32).astype(jnp.float64),
    "swapped": lambda out, bind, args: bind(*args[::-1]) if len(args) == 2 else out,
    "clamped": lambda out, bind, args: lax.max(out, jnp.full_like(out, 0.25)),
    "positive": lambda out, bind, args: lax.max(out, jnp.zeros_like(out)),
    "of neighbours": lambda out, bind, args: jnp.roll(out, 1, -1),
    "doubled operand": lambda out, bind, args: bind(*(2.0 * a for a in args)),
    "own operand": lambda out, bind, args: (
        bind(args[0], args[0]) if len(args) == 2 and args[0].shape == out.shape else out
    ),
    "returned": lambda out, bind, args: out,
}


def mutant(base: Callable[..., Any], index: int, mutation: str) -> Callable[..., Any]:
    jaxpr = jax.make_jaxpr(base)(*ARGUMENTS).jaxpr

    def program(*args: Any) -> Any:
        env = dict(zip(jaxpr.invars, args, strict=True))

        def read(atom: Any) -> Any:
            return jnp.asarray(atom.val) if hasattr(atom, "val") else env[atom]

        more = []
        for number, equation in enumerate(jaxpr.eqns):
            params = equation.primitive.get_bind_params(equation.params)

            def bind(*operands: Any, equation: Any = equation, params: Any = params) -> Any:
                out = equation.primitive.bind(*operands, **params)
                return out[0] if equation.primitive.multiple_results else out

            operands = [read(atom) for atom in equation.invars]
            out = bind(*operands)
            if number == index % len(jaxpr.eqns):
                changed = MUTATIONS[mutation](out, bind, operands)
                if changed.shape == out.shape:
                    out = changed
                if mutation == "returned":
                    more.append(out)
            env[equation.outvars[0]] = out
        return [read(atom) for atom in jaxpr.outvars] + more

    return program


def _with_gradients(function: Callable[..., Any]) -> Callable[..., Any]:
    def loss(*args: Any) -> Any:
        results = function(*args)
        weights = [jnp.cos(jnp.arange(r.size, dtype=jnp.float64)) for r in results]
        total = sum(jnp.sum(r.reshape(-1) * w) for r, w in zip(results, weights, strict=True))
        return total, results

    return jax.value_and_grad(loss, argnums=(0, 1, 2, 3), has_aux=True)


def test_the_bases_are_taken() -> None:
    assert operators(two_pass, *ARGUMENTS) == {"bn_add_relu": 1}
    assert operators(fast_and_folded, *ARGUMENTS) == {"bn_add_relu": 1}
    assert operators(with_bias_before, *ARGUMENTS) == {"bn_add_relu": 1}
    assert operators(evaluation, *ARGUMENTS) == {"bn_add_relu_inference": 1}


@hypothesis.given(
    base=st.sampled_from(BASES),
    index=st.integers(0, 40),
    mutation=st.sampled_from(sorted(MUTATIONS)),
)
@hypothesis.settings(max_examples=example_count(60))
def test_mutants_compute_the_same(base: Callable[..., Any], index: int, mutation: str) -> None:
    require_equal(mutant(base, index, mutation))


@pytest.mark.slow
@pytest.mark.parametrize("base", BASES, ids=lambda f: f.__name__)
def test_every_mutant_computes_the_same(base: Callable[..., Any]) -> None:
    for index in range(len(jax.make_jaxpr(base)(*ARGUMENTS).jaxpr.eqns)):
        for mutation in MUTATIONS:
            try:
                require_equal(mutant(base, index, mutation))
            except Exception as error:
                raise AssertionError(f"{mutation} at equation {index}") from error


def require_equal(program: Callable[..., Any]) -> None:
    fused = jax_bnar.fuse(program)
    if not operators(program, *ARGUMENTS):
        untouched = str(jax.make_jaxpr(program)(*ARGUMENTS))
        assert str(jax.make_jaxpr(fused)(*ARGUMENTS)) == untouched
        return
    expected = jax.jit(_with_gradients(program))(*ARGUMENTS)
    given = jax.jit(_with_gradients(fused))(*ARGUMENTS)
    for a, b in zip(jax.tree.leaves(given), jax.tree.leaves(expected), strict=True):
        scale = 1 + np.max(np.abs(b), initial=0.0, where=np.isfinite(b))
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-9 * float(scale))
