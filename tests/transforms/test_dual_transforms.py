"""Transformations of `dual_bn_add_relu`, against plain JAX in float64."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import PartitionSpec as P
from programs import hlo_calls, opcodes_of_size, ours
from sharding_tools import make_mesh, relative_difference

import jax_bnar

pytestmark = pytest.mark.quick

SHAPE, CHANNELS = (8, 3, 2, 6), 6
EVERY = tuple(range(6))
NAMES = ("bnar_statistics", "bnar_mask")
saves = pytest.mark.parametrize("save", ["y", "mask"])
both = pytest.mark.parametrize("implementation", ["ffi", "xla"])


def made(dtype: str = "float64", shape: tuple[int, ...] = SHAPE, seed: int = 0) -> tuple[Any, ...]:
    random = np.random.default_rng(seed)
    tensors = [random.standard_normal(shape) * 2 + 1 for _ in range(2)]
    vectors = [random.standard_normal(shape[-1]) for _ in range(4)]
    return tuple(jnp.asarray(array, dtype) for array in (*tensors, *vectors))


def plain(x1: Any, x2: Any, scale1: Any, bias1: Any, scale2: Any, bias2: Any) -> Any:
    def normalised(x: Any, scale: Any, bias: Any) -> Any:
        axes = tuple(range(x.ndim - 1))
        mean, var = x.mean(axes), x.var(axes)
        wide = [jnp.broadcast_to(v, x.shape) for v in (mean, var, scale, bias)]
        return (x - wide[0]) / jnp.sqrt(wide[1] + 1e-5) * wide[2] + wide[3], mean, var

    y1, mean1, var1 = normalised(x1, scale1, bias1)
    y2, mean2, var2 = normalised(x2, scale2, bias2)
    return jax.nn.relu(y1 + y2), mean1, var1, mean2, var2


def fused(*arrays: Any, **keywords: Any) -> Any:
    return tuple(jax_bnar.dual_bn_add_relu(*arrays, **keywords))


def total(results: Any) -> Any:
    """Depends on each result, on none of them linearly."""
    return sum((i + 1) * jnp.sin(result + 0.1 * i).sum() for i, result in enumerate(results))


def close(actual: Any, expected: Any, tolerance: float = 1e-9) -> None:
    assert relative_difference(actual, expected) < tolerance


@both
@saves
def test_gradients_through_all_results(implementation: str, save: str) -> None:
    keywords = {"implementation": implementation, "save": save}
    gradient = jax.jit(jax.grad(lambda *a: total(fused(*a, **keywords)), EVERY))
    expected = jax.jit(jax.grad(lambda *a: total(plain(*a)), EVERY))
    close(gradient(*made()), expected(*made()))


@both
@saves
def test_forward_mode(implementation: str, save: str) -> None:
    keywords = {"implementation": implementation, "save": save}
    primals, tangents = made(), made(seed=1)

    def products(function: Any) -> Any:
        def along(moved: int) -> Any:
            def of_one(value: Any) -> Any:
                return function(*primals[:moved], value, *primals[moved + 1 :])

            return jax.jvp(of_one, (primals[moved],), (tangents[moved],))

        # Some operands alone: a tangent that is zero is not computed.
        return [jax.jvp(function, primals, tangents), *map(along, range(6))]

    ours_too = jax.jit(lambda: products(functools.partial(fused, **keywords)))()
    expected = jax.jit(lambda: products(plain))()
    for one, other in zip(ours_too, expected, strict=True):
        close(one, other)


@saves
def test_second_derivatives(save: str) -> None:
    primals, tangents = made(shape=(4, 2, 3)), made(shape=(4, 2, 3), seed=1)

    def hessian_products(function: Any) -> Any:
        gradient = jax.grad(lambda *a: total(function(*a)), EVERY)
        reverse_over_reverse = jax.grad(
            lambda *a: sum((g * t).sum() for g, t in zip(gradient(*a), tangents, strict=True)),
            EVERY,
        )
        return jax.jit(
            lambda: (jax.jvp(gradient, primals, tangents), reverse_over_reverse(*primals))
        )()

    close(hessian_products(functools.partial(fused, save=save)), hessian_products(plain), 1e-8)


def test_derivatives_of_inference() -> None:
    *statistics, _ = (jnp.abs(v) + 0.5 for v in made()[2:])
    mean, var, other = statistics
    arrays = (*made(), mean, var, other, var)

    def plain_inference(x1: Any, x2: Any, s1: Any, b1: Any, s2: Any, b2: Any, *given: Any) -> Any:
        def normalised(x: Any, scale: Any, bias: Any, mean: Any, var: Any) -> Any:
            wide = [jnp.broadcast_to(v, x.shape) for v in (mean, var, scale, bias)]
            return (x - wide[0]) / jnp.sqrt(wide[1] + 1e-5) * wide[2] + wide[3]

        return jax.nn.relu(normalised(x1, s1, b1, *given[:2]) + normalised(x2, s2, b2, *given[2:]))

    every = tuple(range(10))
    for mode in (jax.grad, jax.jacfwd):
        ours_too, expected = (
            jax.jit(mode(lambda *a, f=f: jnp.sin(f(*a)).sum(), every[2:]))(*arrays)
            for f in (jax_bnar.dual_bn_add_relu_inference, plain_inference)
        )
        close(ours_too, expected)
    tangents = tuple(np.cos(a) for a in arrays)
    products = [
        jax.jit(functools.partial(jax.jvp, jax.grad(lambda *a, f=f: jnp.sin(f(*a)).sum(), every)))(
            arrays, tangents
        )
        for f in (jax_bnar.dual_bn_add_relu_inference, plain_inference)
    ]
    close(products[0], products[1])


@saves
@pytest.mark.parametrize("mapped", [(0,), (1,), (0, 1), (2, 5), (0, 1, 2, 3, 4, 5)], ids=str)
def test_vmap(mapped: tuple[int, ...], save: str) -> None:
    """One call each way; what depends on nothing that is mapped comes back once."""
    arrays = [np.stack([a, a * 2 - 1, np.cos(a)]) if i in mapped else a
              for i, a in enumerate(map(np.asarray, made()))]  # fmt: skip
    in_axes = tuple(0 if i in mapped else None for i in range(6))
    of_x1, of_x2 = (0 if i in mapped else None for i in (0, 1))
    out_axes = (0, of_x1, of_x1, of_x2, of_x2)
    function = functools.partial(fused, save=save)
    results = jax.jit(jax.vmap(function, in_axes, out_axes))
    close(results(*arrays), jax.jit(jax.vmap(plain, in_axes, out_axes))(*arrays))
    assert ours(results, *arrays) == {"dual_forward": 1}

    def gradient(function: Any) -> Any:
        return jax.jit(jax.vmap(jax.grad(lambda *a: total(function(*a)), EVERY), in_axes))

    close(gradient(function)(*arrays), gradient(plain)(*arrays))
    assert ours(gradient(function), *arrays) == {"dual_forward": 1, "dual_backward": 1}


@saves
@pytest.mark.parametrize("check_vma", [True, False])
def test_shard_map(check_vma: bool, save: str) -> None:
    mesh = make_mesh("auto", d=8)
    mapped = jax.shard_map(
        functools.partial(fused, axis_name="d", save=save),
        mesh=mesh,
        in_specs=(P("d"), P("d"), P(), P(), P(), P()),
        out_specs=(P("d"), P(), P(), P(), P()),
        check_vma=check_vma,
    )
    value = jax.jit(jax.value_and_grad(lambda *a: total(mapped(*a)), EVERY))
    expected = jax.jit(jax.value_and_grad(lambda *a: total(plain(*a)), EVERY))
    close(value(*made()), expected(*made()))
    x, dots = made("float32"), made("float32", seed=1)
    compiled = jax.jit(lambda *a: jax.jvp(mapped, a, dots)).lower(*x).compile()
    assert compiled.as_text() is not None


@saves
def test_shard_map_crosses_once_each_way(save: str) -> None:
    mapped = jax.shard_map(
        functools.partial(fused, axis_name="d", save=save),
        mesh=make_mesh("auto", d=8),
        in_specs=(P("d"), P("d"), P(), P(), P(), P()),
        out_specs=(P("d"), P(), P(), P(), P()),
    )
    arrays = made("float32")
    text = jax.jit(mapped).lower(*arrays).compile().as_text()
    assert text is not None
    assert text.count(" all-reduce(") == 1
    assert " all-gather(" not in text


@saves
def test_vmap_with_axis_name(save: str) -> None:
    arrays = made()

    def mapped(x1: Any, x2: Any, *vectors: Any) -> Any:
        split = [x.reshape(4, 2, *x.shape[1:]) for x in (x1, x2)]
        function = jax.vmap(
            lambda a, b: fused(a, b, *vectors, axis_name="b", save=save),
            axis_name="b",
            out_axes=(0, None, None, None, None),
        )
        y, *statistics = jax.jit(function)(*split)
        return y.reshape(x1.shape), *statistics

    value = jax.value_and_grad(lambda *a: total(mapped(*a)), EVERY)
    close(value(*arrays), jax.value_and_grad(lambda *a: total(plain(*a)), EVERY)(*arrays))
    tangents = made(seed=1)
    close(jax.jvp(mapped, arrays, tangents), jax.jvp(plain, arrays, tangents))


def test_synchronised_inside_another_vmap() -> None:
    """x1 alone is mapped: the statistics of both come from one merge."""
    x1, x2, *vectors = made()
    many = jnp.stack([x1, 2 * x1])

    def local(x1: Any) -> Any:
        split = [x.reshape(4, 2, *x.shape[1:]) for x in (x1, x2)]
        run = jax.vmap(lambda a, b: fused(a, b, *vectors, axis_name="b"), axis_name="b")
        return run(*split)[0].reshape(x1.shape)

    def gradient(function: Any) -> Any:
        return jax.jit(jax.vmap(jax.grad(lambda x: jnp.sin(function(x)).sum())))(many)

    close(gradient(local), gradient(lambda x: plain(x, x2, *vectors)[0]))


@saves
def test_checkpoint_runs_the_statistics_once(save: str) -> None:
    policy = jax.checkpoint_policies.save_only_these_names(*NAMES)
    arrays = made()

    def block(*a: Any) -> Any:
        x1, *rest = a
        return jnp.cos(fused(jnp.sin(x1), *rest, save=save)[0]) * x1

    def plain_block(*a: Any) -> Any:
        x1, *rest = a
        return jnp.cos(plain(jnp.sin(x1), *rest)[0]) * x1

    def gradient(function: Any) -> Any:
        return jax.grad(lambda *a: function(*a).sum(), EVERY)

    again = gradient(jax.checkpoint(block, policy=policy))
    close(jax.jit(again)(*arrays), jax.jit(gradient(plain_block))(*arrays))
    assert hlo_calls(again, *arrays) == {
        "jax_bnar_dual_forward_v1": 1,
        "jax_bnar_dual_normalise_v1": 1,
        "jax_bnar_dual_backward_v1": 1,
    }


def test_one_custom_call_each_way_and_no_array_between() -> None:
    arrays = made("bfloat16", (8, 8, 8, 64))

    def step(*a: Any) -> Any:
        (y, *statistics), vjp = jax.vjp(fused, *a)
        return y, vjp((y, *statistics))

    assert hlo_calls(step, *arrays) == {
        "jax_bnar_dual_forward_v1": 1,
        "jax_bnar_dual_backward_v1": 1,
    }
    assert opcodes_of_size(8**3 * 64, step, *arrays) <= {
        "custom-call", "get-tuple-element", "parameter", "tuple", "bitcast",
    }  # fmt: skip


def test_export_with_a_symbolic_batch() -> None:
    (batch,) = export.symbolic_shape("b")
    *_, scale1, bias1, scale2, bias2 = made("float32")
    x = jax.ShapeDtypeStruct((batch, *SHAPE[1:]), jnp.float32)
    function = jax.jit(lambda a, b: fused(a, b, scale1, bias1, scale2, bias2))
    exported = export.export(function, disabled_checks=jax_bnar.DISABLED_EXPORT_CHECKS)(x, x)
    again = export.deserialize(exported.serialize())
    x1, x2, *_ = made("float32")
    close(again.call(x1, x2), function(x1, x2), 1e-6)
