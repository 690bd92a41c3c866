"""What no match replaces runs as the program wrote it: the same bits, dtypes, weak types and lines.

The programs stand beside a BatchNorm that is fused, and read its result, their arguments and
literals. They run one operation at a time, so XLA has no choice of roundings.
"""

import operator
import re
from collections.abc import Callable, Sequence
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import jax.core
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest
from fuse_tools import array, kernels
from jax import lax
from property_tests import example_count

import jax_bnar

X = array((6, 4))


def _bn(x: jax.Array) -> jax.Array:
    return (x - x.mean(0, keepdims=True)) * lax.rsqrt(x.var(0, keepdims=True) + 1e-5)


def assert_preserved(rest: Callable[..., Any], *args: Any) -> None:
    """`rest` takes the normalised array and other arguments; its results stay the same bits."""

    def program(x: Any, *args: Any) -> Any:
        y = _bn(x)
        return y, rest(y, *args)

    fused = jax_bnar.fuse(program)
    assert kernels(fused, X, *args) == 1
    y, given = fused(X, *args)
    expected = jax.extend.core.jaxpr_as_fun(jax.make_jaxpr(rest)(y, *args))(y, *args)
    for a, b in zip(jax.tree.leaves(given), expected, strict=True):
        assert jax.typeof(a) == jax.typeof(b)
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes(), (a, b)
    before, after = (jax.eval_shape(f, X, *args) for f in (program, fused))
    assert _types(after) == _types(before)


def _types(tree: Any) -> list[Any]:
    return [(leaf.shape, leaf.dtype, leaf.weak_type) for leaf in jax.tree.leaves(tree)]


# With the folded value in place of the equation, each of these gave another result.
FOLDED_WRONGLY: dict[str, Callable[[jax.Array], Any]] = {
    "bits of an integer": lambda y: (y * 10).astype(jnp.int32) & ~jnp.int32(3),
    "not of an unsigned integer": lambda y: ~jnp.uint32(0),
    "truncated mantissa": lambda y: lax.bitcast_convert_type(
        lax.bitcast_convert_type(y, jnp.uint32) & ~jnp.uint32(0xFFFF), jnp.float32
    ),
    "comparison with a Python float": lambda y: lax.eq(jnp.float32(0.1), 0.1),
    "integer from a large float": lambda y: (
        (jnp.asarray(2.0) * 150).astype(jnp.int8),
        (jnp.asarray(-1.0) * 5).astype(jnp.uint8),
        (jnp.asarray(2.0) * 1e30).astype(jnp.int32),
    ),
    "index below the cases": lambda y: lax.select_n(jnp.int32(-1), y, y + 1, y + 2),
    "index above the cases": lambda y: lax.select_n(jnp.int32(3), y, y + 1, y + 2),
    "literals as results": lambda y: (jnp.asarray(True), jnp.asarray(2.0), jnp.asarray(-3)),
    "weak type of a constant": lambda y: jnp.asarray(2.0) * 3,
}


@pytest.mark.quick
@pytest.mark.parametrize("name", FOLDED_WRONGLY)
def test_constants_are_computed_by_the_program(name: str) -> None:
    with jax.enable_x64(False):  # Python floats are then of float32.
        assert_preserved(FOLDED_WRONGLY[name])


_DTYPES = (
    *(jnp.bool_, jnp.int8, jnp.uint8, jnp.int32, jnp.uint32, jnp.int64),
    *(jnp.bfloat16, jnp.float16, jnp.float32, jnp.float64, jnp.complex64),
)


def _cast(dtype: Any) -> Callable[[Any], Any]:
    def cast(a: Any) -> Any:
        a = a.real if jnp.iscomplexobj(a) and not jnp.issubdtype(dtype, jnp.complexfloating) else a
        return lax.convert_element_type(a, dtype)

    return cast


def _bits_of(a: Any) -> Any:
    sizes = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint64}
    return lax.bitcast_convert_type(a, sizes[a.dtype.itemsize])


def _integer(a: Any) -> Any:
    return _cast(jnp.int32)(jnp.sum(a))


_UNARY: tuple[Callable[[Any], Any], ...] = (
    *map(_cast, _DTYPES),
    *(operator.neg, operator.invert, jnp.abs, jnp.square, jnp.sqrt, jnp.sign, jnp.exp, jnp.floor),
    *(lax.clz, lax.population_count, _bits_of, jnp.real, jnp.conj, jnp.isfinite, lax.rsqrt),
    *(jnp.sum, jnp.max, jnp.cumsum, jnp.ravel, jnp.flip, lax.stop_gradient),
    lambda a: lax.integer_pow(a, 3),
    lambda a: a.shape[0] * jnp.ones((), a.dtype),
    lambda a: lax.dynamic_index_in_dim(a, _integer(a) % 3, keepdims=False),
    lambda a: jax.random.bits(jax.random.key(_integer(a)), (2,), "uint8"),
    lambda a: jax.random.uniform(jax.random.fold_in(jax.random.key(0), _integer(a)), (3,)),
)
_BINARY: tuple[Callable[[Any, Any], Any], ...] = (
    *(operator.add, operator.sub, operator.mul, operator.truediv, operator.floordiv, operator.mod),
    *(operator.and_, operator.or_, operator.xor, operator.lshift, operator.rshift),
    *(operator.lt, operator.ge, operator.eq, operator.ne, lax.max, lax.min, lax.rem, lax.div),
    *(jnp.maximum, jnp.minimum, jnp.arctan2, jnp.power, lax.shift_right_logical, lax.nextafter),
    lambda a, b: lax.select_n(_integer(b), a, a + a, a * a),
    lambda a, b: jnp.where(a > b, a, b),
    lambda a, b: jnp.clip(a, b, b + b),
    lambda a, b: jnp.take(a, _integer(b), mode="clip"),
    lambda a, b: lax.cond(_integer(b) > 0, jnp.square, jnp.negative, a),
    lambda a, b: lax.fori_loop(0, 3, lambda i, c: c + a, a) - b,
)
_LITERALS: tuple[Callable[[], Any], ...] = (
    *(lambda dtype=dtype: _cast(dtype)(jnp.float32(3.7)) for dtype in _DTYPES),
    *(lambda value=value: jnp.asarray(value) for value in (2.0, -3, True, 0.1, 1e30, -1.5, 2j)),
    lambda: jnp.uint32(0xFFFFFFFF),
    lambda: jnp.arange(4),
    lambda: jnp.linspace(-1.0, 1.0, 4),
)
_ARGUMENTS = (
    np.array([3, -4, 0, 127], np.int8),
    np.array([0.1, -0.0, np.inf, np.nan], np.float32),
    np.array([1e-40, 300.5, -2.5, 7.0], jnp.bfloat16),
    np.array([6e-8, 65504, -2.5, 7.0], np.float16),
    np.array([1 + 2j, -1j, 0, 3], np.complex64),
    np.array([True, False, True, True]),
)


def _operations() -> st.SearchStrategy[Any]:
    place = st.integers(0, 10**6)
    return st.lists(
        st.one_of(
            st.tuples(st.sampled_from(_UNARY), place),
            st.tuples(st.sampled_from(_BINARY), place, place),
            st.tuples(st.sampled_from(_LITERALS)),
        ),
        min_size=1,
        max_size=12,
    )


def _program(operations: Sequence[Any]) -> Callable[..., Any]:
    """Applies the operations, each to earlier results, where their dtypes and shapes allow it."""

    def rest(y: Any, *args: Any) -> Any:
        pool = [y, *map(jnp.asarray, args)]
        for operation, *places in operations:
            operands = [pool[place % len(pool)] for place in places]
            if len(operands) == 2 and operands[0].dtype != operands[1].dtype:
                operands[1] = _cast(operands[0].dtype)(operands[1])
            if len(operands) == 2 and operands[0].ndim != operands[1].ndim:
                operands[1] = jnp.sum(operands[1]).astype(operands[0].dtype)
            try:
                pool.append(operation(*operands))
            except (TypeError, ValueError, IndexError):
                continue
        return pool[1:]

    return rest


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::numpy.exceptions.ComplexWarning")
@hypothesis.settings(max_examples=example_count(25))
@hypothesis.given(operations=_operations())
def test_programs_beside_a_match(operations: Sequence[Any]) -> None:
    with jax.numpy_rank_promotion("allow"):
        assert_preserved(_program(operations), *_ARGUMENTS)


def test_source_lines_stay() -> None:
    def program(x: Any) -> Any:
        return _bn(x), lax.sin(jnp.float32(2) * 3)

    line = program.__code__.co_firstlineno + 1
    text = str(jax.make_jaxpr(jax_bnar.fuse(program))(X).pretty_print(source_info=True))
    assert re.search(rf"= sin .*test_fuse_preserves\.py:{line}:", text), text


@pytest.mark.parametrize("name", ["bool", "bfloat16", "float8_e4m3b11fnuz", "float8_e3m4", "int4"])
def test_arrays_of_numpy_are_traced_as_jit_traces_them(name: str) -> None:
    seen = []

    def program(a: Any) -> Any:
        seen.append(isinstance(a, jax.core.Tracer))
        return a

    jax_bnar.fuse(program)(np.zeros(3, jnp.dtype(name)))
    assert all(seen)
    assert seen


def _transposed_first(array: Any) -> jax.Array:
    return lax.reshape(array, array.shape, dimensions=(1, 0))


def _x(x: Any, scale: Any) -> jax.Array:
    return _normalised(_transposed_first(x), x.mean(0, keepdims=True), x.var(0, keepdims=True))


def _scale(x: Any, scale: Any) -> jax.Array:
    y = _normalised(x, x.mean(0, keepdims=True), x.var(0, keepdims=True))
    return y * _transposed_first(jnp.broadcast_to(scale, x.shape))


def _mean_and_var(x: Any, scale: Any) -> jax.Array:
    mean, var = (
        _transposed_first(jnp.broadcast_to(moment(x, 0, keepdims=True), x.shape))
        for moment in (jnp.mean, jnp.var)
    )
    return _normalised(x, mean, var) * scale


def _column_major(x: Any, scale: Any) -> jax.Array:
    y = x.reshape(4, 16, order="F").reshape(x.shape)
    return _normalised(y, y.mean(0, keepdims=True), y.var(0, keepdims=True)) * scale


def _normalised(x: Any, mean: Any, var: Any) -> jax.Array:
    return (x - mean) * lax.rsqrt(var + 1e-3)


@pytest.mark.parametrize("norm", [_x, _scale, _mean_and_var, _column_major])
def test_a_reshape_that_transposes_first_moves_elements(norm: Callable[..., jax.Array]) -> None:
    """Where all axes have one length, its shapes are those of no reshape at all."""
    x = jax.random.normal(jax.random.key(0), (8, 8), jnp.float32)
    scale = jnp.arange(1.0, 9.0, dtype=jnp.float32)[None]

    def program(x: Any, scale: Any) -> jax.Array:
        return jax.nn.relu(norm(x, scale) + 1)

    np.testing.assert_allclose(
        jax_bnar.fuse(program)(x, scale), program(x, scale), rtol=1e-4, atol=1e-4
    )
