"""Mutants, which differ from a BatchNorm-Add-ReLU in one equation, always keep their results.

Most mutants are no longer a BatchNorm, but some are. Whatever `fuse` does with one, its values and
gradients must stay those of the mutant. This is tested in float64, where rounding hides nothing.
"""

from collections.abc import Callable, Sequence
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
ANOTHER = array(SHAPE, len(ARGUMENTS)).astype(jnp.float64)
AXES = (0, 1, 2)


def _normalised(x: Any, scale: Any, bias: Any) -> Any:
    mean = x.sum(AXES, keepdims=True) / 24.0
    centred = x - mean
    var = jnp.square(centred).sum(AXES, keepdims=True) / 24.0
    y = centred * lax.rsqrt(var + 1e-3) * scale.reshape(1, 1, 1, 3) + bias.reshape(1, 1, 1, 3)
    return y, mean, var


def two_pass(x: Any, z: Any, scale: Any, bias: Any) -> Any:
    y, mean, var = _normalised(x, scale, bias)
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


def ensemble(x: Any, z: Any, scale: Any, bias: Any) -> Any:
    """Each of four members has its own statistics and its own scale."""
    mean = x.sum((1, 2), keepdims=True) / 6.0
    centred = x - mean
    var = jnp.square(centred).sum((1, 2), keepdims=True) / 6.0
    scales = z[:, :1, :1] * scale.reshape(1, 1, 1, 3)
    y = centred * lax.rsqrt(var + 1e-3) * scales + bias.reshape(1, 1, 1, 3)
    return jax.nn.relu(y + z), mean, var


def examples(x: Any, z: Any, scale: Any, bias: Any) -> Any:
    """An InstanceNorm; each of four examples has 36 elements of a channel."""
    x = jnp.concatenate([x, z, x * z, x + z, x - z, 2.0 * x], 1)
    mean = x.sum((1, 2), keepdims=True) / 36.0
    var = (x * x).sum((1, 2), keepdims=True) / 36.0 - mean * mean
    y = (x - mean) * lax.rsqrt(var + 1e-3) * scale.reshape(1, 1, 1, 3) + bias.reshape(1, 1, 1, 3)
    return jax.nn.relu(y), mean, var


BASES = (two_pass, fast_and_folded, evaluation, with_bias_before, ensemble, examples)


# The activations of `jax.nn`, without the jitted functions in which some are.
ACTIVATIONS: dict[str, Callable[[Any], Any]] = {
    "leaky_relu": lambda u: lax.select(u >= 0.0, u, 0.25 * u),
    "silu": lambda u: u * lax.logistic(u),
    "hard_silu": lambda u: u * (jax.nn.relu6(u + 3.0) / 6.0),
    "elu": lambda u: lax.select(
        u > 0.0, u, lax.expm1(lax.select(u > 0.0, lax.full_like(u, 0.0), u))
    ),
    "gelu": lambda u: u * (0.5 * (1.0 + lax.tanh(_GELU * (u + 0.044715 * lax.integer_pow(u, 3))))),
    "exact_gelu": lambda u: 0.5 * u * lax.erfc(-u * np.sqrt(0.5)),
    "mish": lambda u: u * lax.tanh(jnp.logaddexp(u, 0.0)),
}
_GELU = np.sqrt(2 / np.pi)


def with_activation(name: str) -> Callable[..., Any]:
    def program(x: Any, z: Any, scale: Any, bias: Any) -> Any:
        y, _, _ = _normalised(x, scale, bias)
        return (ACTIVATIONS[name](3.0 * z + y),)

    return program


def _rolled(value: Any) -> Any:
    return jnp.roll(value, 1, -1) if value.ndim else value


def _another(value: Any) -> Any:
    return ANOTHER if value.shape == SHAPE and value.dtype == ANOTHER.dtype else value


def _doubled(value: Any) -> Any:
    return value if value.dtype == bool else 2.0 * value


def _flip(value: Any) -> Any:
    return lax.rev(value, tuple(range(value.ndim)))


# Each mutation takes a function that binds the primitive, and its operands. It does not bind it
# without need: an equation whose result nobody reads would keep `fuse` from other matches.
MUTATIONS: dict[str, Callable[..., Any]] = {
    "scaled": lambda bind, *args: bind(*args) * 1.25,
    "shifted": lambda bind, *args: bind(*args) + 0.125,
    "negated": lambda bind, *args: -bind(*args),
    "flipped": lambda bind, *args: _flip(bind(*args)),
    "stopped": lambda bind, *args: lax.stop_gradient(bind(*args)),
    "rounded": lambda bind, *args: bind(*args).astype(jnp.float32).astype(jnp.float64),
    "swapped": lambda bind, *args: bind(*_swapped(args)),
    "clamped": lambda bind, *args: jnp.maximum(bind(*args), 0.25),
    "positive": lambda bind, *args: jnp.maximum(bind(*args), 0.0),
    "of neighbours": lambda bind, *args: _rolled(bind(*args)),
    "doubled operand": lambda bind, *args: bind(*map(_doubled, args)),
    "operand of neighbours": lambda bind, *args: bind(_rolled(args[0]), *args[1:]),
    "another operand": lambda bind, *args: bind(_another(args[0]), *args[1:]),
    "another last operand": lambda bind, *args: bind(*args[:-1], _another(args[-1])),
    "own operand": lambda bind, *args: bind(args[0], args[0]) if len(args) == 2 else bind(*args),
    "returned": lambda bind, *args: bind(*args),
}
# Those of a result that is true or false.
OF_CONDITIONS = frozenset(
    ["flipped", "swapped", "of neighbours", "operand of neighbours", "another operand", "returned"]
)


def _swapped(operands: Sequence[Any]) -> list[Any]:
    """The last two, of which a selection has the one first that it takes where false."""
    return [*operands[:-2], *reversed(operands[-2:])]


def _is_possible(mutation: str, equation: Any) -> bool:
    if equation.outvars[0].aval.dtype == bool:
        return mutation in OF_CONDITIONS
    # The body of a function with its own derivative knows the shapes of its operands.
    has_body = equation.primitive.name == "custom_jvp_call"
    return not has_body or mutation not in ("swapped", "own operand")


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
            result = equation.outvars[0].aval
            mutated = number == index % len(jaxpr.eqns) and _is_possible(mutation, equation)
            out = MUTATIONS[mutation](bind, *operands) if mutated else bind(*operands)
            if out.shape != result.shape:
                out = bind(*operands)
            if mutated and mutation == "returned":
                more.append(out.astype(jnp.float64))
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


@pytest.mark.slow
@hypothesis.given(
    base=st.sampled_from((*BASES, *map(with_activation, ACTIVATIONS))),
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


@pytest.mark.slow
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_every_mutant_of_an_activation_computes_the_same(name: str) -> None:
    base = with_activation(name)
    assert operators(base, *ARGUMENTS) == {"bn_act": 1}
    equations = len(jax.make_jaxpr(ACTIVATIONS[name])(ARGUMENTS[0]).jaxpr.eqns)
    for index in range(-equations, 0):
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
    (_, results), _ = expected
    if not all(np.isfinite(result).all() for result in results):
        # The gradient of an infinity is NaN in one form of a derivative, and infinite in another.
        given, expected = given[0][1], results
    for a, b in zip(jax.tree.leaves(given), jax.tree.leaves(expected), strict=True):
        scale = 1 + np.max(np.abs(b), initial=0.0, where=np.isfinite(b))
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-9 * float(scale))
