"""`fuse` with jit, grad, vmap, loops, remat, sharding, effects and names, on either side."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fuse_tools import array, assert_fused, assert_no_worse, kernels, operators
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jax_bnar

X = array((8, 5, 4, 3))
Z = array((8, 5, 4, 3), 1)
SCALE = array((3,), 2)
BIAS = array((3,), 3)
KERNEL = array((1, 1, 3, 3), 4)
ARRAYS = (X, Z, SCALE, BIAS)
AXES = (0, 1, 2)


def _join(x: Any, z: Any, scale: Any, bias: Any, axis_name: Any = None) -> jax.Array:
    mean, squares = x.mean(AXES), (x * x).mean(AXES)
    if axis_name is not None:
        mean, squares = lax.pmean(mean, axis_name), lax.pmean(squares, axis_name)
    var = jnp.maximum(squares - mean * mean, 0)
    mean, var, scale, bias = (v.reshape(1, 1, 1, -1) for v in (mean, var, scale, bias))
    return jax.nn.relu((x - mean) * lax.rsqrt(var + 1e-3) * scale + bias + z)


def _conv(x: Any, kernel: Any) -> jax.Array:
    return lax.conv_general_dilated(
        x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def _block(x: Any, kernel: Any, scale: Any, bias: Any) -> jax.Array:
    return _join(_conv(x, kernel), x, scale, bias)


ARGUMENTS = (X, KERNEL, SCALE, BIAS)


def jitted(x: Any, *parameters: Any) -> Any:
    return jax.jit(_block)(x, *parameters)


def shared(x: Any, *parameters: Any) -> Any:
    block = jax.jit(_block)
    for _ in range(3):
        x = block(x, *parameters)
    return x


def rematerialised(x: Any, *parameters: Any) -> Any:
    policy = jax.checkpoint_policies.dots_saveable
    return jax.checkpoint(_block, policy=policy, prevent_cse=False)(x, *parameters)


def scanned(x: Any, *parameters: Any) -> Any:
    return lax.scan(lambda c, _: (_block(c, *parameters), c.mean()), x, None, length=3)


def looped(x: Any, *parameters: Any) -> Any:
    return lax.fori_loop(0, 3, lambda _, c: _block(c, *parameters), x)


def branched(x: Any, *parameters: Any) -> Any:
    return lax.cond(
        x[0, 0, 0, 0] > 0, lambda c: _block(c, *parameters), lambda c: _conv(c, parameters[0]), x
    )


def while_looped(x: Any, *parameters: Any) -> Any:
    return lax.while_loop(
        lambda c: c[1] < 2, lambda c: (_block(c[0], *parameters), c[1] + 1), (x, 0)
    )[0]


def nested(x: Any, *parameters: Any) -> Any:
    def body(c: Any, _: Any) -> Any:
        return jax.checkpoint(jax.jit(_block))(c, *parameters), None

    return jax.jit(lambda x: lax.scan(body, x, None, length=2)[0])(x)


@pytest.mark.parametrize(
    ("function", "calls"),
    list(
        zip(
            (jitted, shared, rematerialised, scanned, looped, branched, nested),
            (1, 3, 1, 3, 3, 1, 2),
            strict=True,
        )
    ),
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_bodies(function: Callable[..., Any], calls: int) -> None:
    assert_fused(function, *ARGUMENTS, bn_add_relu=calls)


def test_while_loops() -> None:
    """While loops have no reverse-mode gradient, so only values are compared."""
    assert operators(while_looped, *ARGUMENTS) == {"bn_add_relu": 1}
    given = jax.jit(jax_bnar.fuse(while_looped))(*ARGUMENTS)
    np.testing.assert_allclose(given, while_looped(*ARGUMENTS), rtol=1e-4, atol=1e-4)


def test_a_shared_body_is_rewritten_once() -> None:
    equations = jax.make_jaxpr(jax_bnar.fuse(shared))(*ARGUMENTS).jaxpr.eqns
    bodies = [equation.params["jaxpr"] for equation in equations]
    assert [equation.params["name"] for equation in equations] == ["_block"] * 3
    assert len({id(body) for body in bodies}) == 1


def test_parameters_of_calls_stay() -> None:
    """A call with a new body keeps its other parameters, such as donation, policy and unroll."""

    def program(x: Any, *parameters: Any) -> Any:
        step = jax.jit(_block, donate_argnums=0, inline=False)
        y = jax.checkpoint(step, policy=jax.checkpoint_policies.nothing_saveable)(x, *parameters)
        return lax.scan(lambda c, _: (_block(c, *parameters), None), y, None, length=4, unroll=2)[0]

    before = jax.make_jaxpr(program)(*ARGUMENTS).jaxpr.eqns
    after = jax.make_jaxpr(jax_bnar.fuse(program))(*ARGUMENTS).jaxpr.eqns
    assert [e.primitive.name for e in after] == [e.primitive.name for e in before]
    for old, new in zip(before, after, strict=True):
        for name in old.params:
            if name != "jaxpr":
                assert new.params[name] == old.params[name], name
    (old,), (new,) = (
        [e.params["jaxpr"].eqns[0] for e in es if "policy" in e.params] for es in (before, after)
    )
    assert new.params["donated_invars"] == old.params["donated_invars"]


@pytest.mark.parametrize(
    "wrap",
    [
        lambda f: jax.jit(jax_bnar.fuse(f)),
        lambda f: jax_bnar.fuse(jax.jit(f)),
        lambda f: jax.checkpoint(jax_bnar.fuse(f)),
        lambda f: jax_bnar.fuse(jax_bnar.fuse(f)),
        lambda f: jax_bnar.fuse(f),
    ],
)
def test_on_either_side(wrap: Any) -> None:
    def loss(*args: Any) -> Any:
        return jnp.sum(_block(*args) ** 2)

    expected, gradients = jax.value_and_grad(loss, argnums=(0, 1, 2, 3))(*ARGUMENTS)
    given, fused_gradients = jax.value_and_grad(wrap(loss), argnums=(0, 1, 2, 3))(*ARGUMENTS)
    np.testing.assert_allclose(given, expected, rtol=1e-5)
    for a, b in zip(fused_gradients, gradients, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-3)
    assert kernels(wrap(loss), *ARGUMENTS) == 1


def test_inside_a_scan() -> None:
    fused = jax_bnar.fuse(_block)

    def program(x: Any, *parameters: Any) -> Any:
        return lax.scan(lambda c, _: (fused(c, *parameters), None), x, None, length=3)[0]

    np.testing.assert_allclose(program(*ARGUMENTS), scanned(*ARGUMENTS)[0], rtol=1e-4, atol=1e-4)
    assert kernels(program, *ARGUMENTS) == 1


@pytest.mark.slow
def test_forward_mode_and_second_derivatives() -> None:
    def loss(scale: Any) -> Any:
        return jnp.sum(_join(X, Z, scale, BIAS) ** 3)

    fused = jax_bnar.fuse(loss)
    np.testing.assert_allclose(jax.jacfwd(fused)(SCALE), jax.jacfwd(loss)(SCALE), rtol=1e-4)
    np.testing.assert_allclose(
        jax.hessian(fused)(SCALE), jax.hessian(loss)(SCALE), rtol=1e-3, atol=1e-2
    )


def test_vmap_of_a_fused_function() -> None:
    """Each member of an ensemble has its own statistics, scale and bias."""
    arguments = tuple(jnp.stack([a, 0.5 * a]) for a in (X, Z, SCALE, BIAS))
    given = jax.vmap(jax_bnar.fuse(_join))(*arguments)
    np.testing.assert_allclose(given, jax.vmap(_join)(*arguments), rtol=1e-4, atol=1e-4)
    assert kernels(jax.vmap(jax_bnar.fuse(_join)), *arguments) == 1


def test_vmap_of_examples() -> None:
    """As in Equinox, each example is handled separately, with means of means over a mapped axis."""

    def example(x: Any, z: Any, scale: Any, bias: Any) -> Any:
        mean = lax.pmean(x.mean((0, 1)), "batch")
        var = lax.pmean(((x - mean[None, None]) ** 2).mean((0, 1)), "batch")
        mean, var, scale, bias = (v[None, None] for v in (mean, var, scale, bias))
        return jax.nn.relu((x - mean) / jnp.sqrt(var + 1e-3) * scale + bias + z)

    def batch(x: Any, z: Any, scale: Any, bias: Any) -> Any:
        return jax.vmap(example, in_axes=(0, 0, None, None), axis_name="batch")(x, z, scale, bias)

    assert_fused(batch, X, Z, SCALE, BIAS, bn_add_relu=1)


def test_under_two_vmaps() -> None:
    def pixel(x: Any, z: Any, scale: Any, bias: Any) -> Any:
        """A batch of vectors for each of two mapped axes."""
        mean = lax.pmean(x.mean(0), ("i", "j"))
        squares = lax.pmean((x * x).mean(0), ("i", "j"))
        slope = scale * lax.rsqrt(squares - mean * mean + 1e-3)
        return jax.nn.relu(x * slope[None] + (bias - mean * slope)[None] + z)

    def batch(x: Any, z: Any, scale: Any, bias: Any) -> Any:
        inner = jax.vmap(pixel, in_axes=(1, 1, None, None), out_axes=1, axis_name="j")
        outer = jax.vmap(inner, in_axes=(1, 1, None, None), out_axes=1, axis_name="i")
        return outer(x, z, scale, bias)

    assert_fused(batch, X, Z, SCALE, BIAS, bn_add_relu=1)


def _stacked(x: Any, z: Any, scale: Any, bias: Any) -> Any:
    """Takes both statistics in one psum, as Flax does."""
    both = lax.pmean(jnp.stack([x.mean(AXES), (x * x).mean(AXES)]), "data")
    mean, squares = both[0], both[1]
    var = jnp.maximum(0.0, squares - mean * mean)
    vectors = (v.reshape(1, 1, 1, -1) for v in (mean, var, scale, bias))
    m, v, s, b = vectors
    return jax.nn.relu((x - m) * (lax.rsqrt(v + 1e-3) * s) + b + z), mean, var


def _own(x: Any, z: Any, scale: Any, bias: Any) -> Any:
    return _join(x, z, scale, bias, "data"), x.mean(AXES)[None]


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("inside", [True, False])
def test_shard_map(check_vma: bool, inside: bool) -> None:
    mesh = Mesh(np.array(jax.devices()[:4]), ("data",))
    body = jax_bnar.fuse(_stacked) if inside else _stacked

    def program(*args: Any) -> Any:
        return jax.shard_map(
            body,
            mesh=mesh,
            in_specs=(P("data"), P("data"), P(), P()),
            out_specs=(P("data"), P(), P()),
            check_vma=check_vma,
        )(*args)

    fused = program if inside else jax_bnar.fuse(program)
    assert kernels(fused, X, Z, SCALE, BIAS) == 1
    text = str(jax.make_jaxpr(fused)(X, Z, SCALE, BIAS))
    assert "reduce_sum" not in text, "the program's own statistics are left over"
    shards: Any = [a.reshape(4, 2, 5, 4, 3) for a in (X, Z)]
    whole: Any = jax.vmap(_stacked, in_axes=(0, 0, None, None), axis_name="data")
    expected = whole(*shards, SCALE, BIAS)
    given = jax.jit(fused)(X, Z, SCALE, BIAS)
    np.testing.assert_allclose(given[0], expected[0].reshape(X.shape), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(given[1], expected[1][0], rtol=1e-5)
    np.testing.assert_allclose(given[2], expected[2][0], rtol=1e-5)

    def loss(f: Any) -> Any:
        return lambda *args: jnp.sum(f(*args)[0] ** 2)

    gradients = jax.jit(jax.grad(loss(fused), argnums=(0, 1, 2, 3)))(X, Z, SCALE, BIAS)
    unsharded = jax.grad(loss(lambda x, z, s, b: (_join(x, z, s, b),)), argnums=(0, 1, 2, 3))(
        X, Z, SCALE, BIAS
    )
    for a, b in zip(gradients, unsharded, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-3)


def test_local_statistics_in_shard_map() -> None:
    """Each shard normalises by its own statistics; the mean over shards is for the running ones."""
    mesh = Mesh(np.array(jax.devices()[:4]), ("data",))

    def local(x: Any, z: Any, scale: Any, bias: Any) -> Any:
        return _join(x, z, scale, bias), lax.pmean(x.mean(AXES), "data")

    def program(*args: Any) -> Any:
        specs = (P("data"), P("data"), P(), P())
        out_specs = (P("data"), P())
        return jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=out_specs)(*args)

    assert_fused(program, X, Z, SCALE, BIAS, bn_add_relu=1)


def test_pmap() -> None:
    def program(*args: Any) -> Any:
        return jax.pmap(_stacked, axis_name="data", in_axes=(0, 0, None, None))(*args)

    split: Any = tuple(a.reshape(4, 2, 5, 4, 3) for a in (X, Z))
    assert operators(program, *split, SCALE, BIAS) == {"bn_add_relu": 1}
    given = jax_bnar.fuse(program)(*split, SCALE, BIAS)
    for a, b in zip(given, program(*split, SCALE, BIAS), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_effects_stay_in_order() -> None:
    seen: list[str] = []

    def note(text: str) -> Any:
        return lambda value: seen.append(text)

    def program(x: Any, z: Any, scale: Any, bias: Any) -> Any:
        jax.debug.callback(note("first"), x[0, 0, 0, 0], ordered=True)
        mean = x.mean(AXES, keepdims=True)
        jax.debug.callback(note("second"), mean[0, 0, 0, 0], ordered=True)
        y = (x - mean) * lax.rsqrt(x.var(AXES, keepdims=True) + 1e-3)
        jax.debug.callback(note("third"), z[0, 0, 0, 0], ordered=True)
        z = z + scale.reshape(1, 1, 1, -1)
        y = jax.nn.relu(y + z)
        jax.debug.callback(note("fourth"), y[0, 0, 0, 0], ordered=True)
        return y

    assert operators(program, X, Z, SCALE, BIAS) == {"bn_add_relu": 1}
    jax.jit(jax_bnar.fuse(program))(X, Z, SCALE, BIAS).block_until_ready()
    jax.effects_barrier()
    assert seen == ["first", "second", "third", "fourth"]


def test_checkpoint_names_and_metadata_stay() -> None:
    def program(x: Any, z: Any, scale: Any, bias: Any) -> Any:
        with jax.named_scope("the_block"):
            x = checkpoint_name(_conv(x, KERNEL), "conv_out")
            return checkpoint_name(_join(x, z, scale, bias), "join_out")

    fused = jax_bnar.fuse(program)
    text = str(jax.make_jaxpr(fused)(X, Z, SCALE, BIAS))
    assert "name=conv_out" in text
    assert "name=join_out" in text
    lowered = jax.jit(fused).lower(X, Z, SCALE, BIAS).as_text(debug_info=True)
    assert "the_block/conv_general_dilated" in lowered
    assert "the_block/bn_add_relu" in lowered


def test_static_arguments_and_trees() -> None:
    """Flags, functions and strings are passed to the function and returned unchanged."""

    def layer(tree: dict[str, Any], train: bool, activation: Any, *, name: str = "") -> Any:
        x = tree["x"]
        y = tree["z"] + _join(x, tree["z"], tree["v"][0], tree["v"][1]) if train else x
        return {"y": activation(y), "name": name, "train": train, "none": None, "n": 3}

    tree = {"x": X, "z": Z, "v": (SCALE, BIAS)}
    fused = jax_bnar.fuse(layer)
    given = fused(tree, True, jnp.sin, name="abc")
    expected = layer(tree, True, jnp.sin, name="abc")
    assert {k: v for k, v in given.items() if k != "y"} == {
        k: v for k, v in expected.items() if k != "y"
    }
    np.testing.assert_allclose(given["y"], expected["y"], rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(fused(tree, False, jnp.sin)["y"], jnp.sin(X))
    assert fused.__name__ == "layer"


def test_closures_over_tracers() -> None:
    def loss(scale: Any) -> Any:
        return jax_bnar.fuse(lambda x: jnp.sum(_join(x, Z, scale, BIAS) ** 2))(X)

    def plain(scale: Any) -> Any:
        return jnp.sum(_join(X, Z, scale, BIAS) ** 2)

    np.testing.assert_allclose(jax.grad(loss)(SCALE), jax.grad(plain)(SCALE), rtol=1e-4)


def test_numpy_arguments() -> None:
    arguments = tuple(map(np.asarray, (X, Z, SCALE, BIAS)))
    np.testing.assert_allclose(
        jax_bnar.fuse(_join)(*arguments), _join(*map(jnp.asarray, arguments)), rtol=1e-4, atol=1e-5
    )


def test_numpy_arguments_that_jax_does_not_take() -> None:
    """The function gets them as they are, as every other leaf that is no array."""
    when = np.array(["2026-01-01"], "datetime64[D]")

    def function(x: Any, when: Any) -> Any:
        assert when.dtype.kind == "M"
        return _join(x, Z, SCALE, BIAS)

    np.testing.assert_allclose(
        jax_bnar.fuse(function)(X, when), _join(*ARRAYS), rtol=1e-4, atol=1e-5
    )
    assert len(jax_bnar.explain(function)(X, when).matched) == 1


def test_errors_of_the_function_are_its_own() -> None:
    def broken(x: Any) -> Any:
        raise KeyError("weights")

    with pytest.raises(KeyError, match="weights"):
        jax_bnar.fuse(broken)(X)


def test_sharded_arrays_under_jit() -> None:
    mesh = Mesh(np.array(jax.devices()[:4]), ("data",))
    sharding = jax.NamedSharding(mesh, P("data"))
    x, z = (jax.device_put(a, sharding) for a in (X, Z))
    given = jax.jit(jax_bnar.fuse(_join))(x, z, SCALE, BIAS)
    np.testing.assert_allclose(given, _join(X, Z, SCALE, BIAS), rtol=1e-4, atol=1e-5)
    assert given.sharding.is_equivalent_to(sharding, 4)


def test_own_statistics_are_also_returned() -> None:
    assert_no_worse(lambda x, z, s, b: (_join(x, z, s, b), x.mean(AXES)), X, Z, SCALE, BIAS)
