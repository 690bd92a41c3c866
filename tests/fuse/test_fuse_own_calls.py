"""`fuse` of a model that calls `batch_norm` of jax_bnar and leaves addition and ReLU outside."""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from fuse_operands import BIAS, SCALE, X, Z
from fuse_tools import assert_no_worse, operators
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jax_bnar
from jax_bnar import flax_layers, nnx_layers

relu = jax.nn.relu


def _own(x: Any, scale: Any, bias: Any, **options: Any) -> jax.Array:
    return jax_bnar.batch_norm(x, scale, bias, **options)[0]


def _given(x: Any, scale: Any, bias: Any) -> jax.Array:
    return jax_bnar.batch_norm_inference(x, scale, bias, bias, jnp.square(scale))


def _with_statistics(x: Any, z: Any, scale: Any, bias: Any) -> Any:
    y, mean, var = jax_bnar.batch_norm(x, scale, bias, num_groups=2)
    return relu(z + y), mean, var


PROGRAMS: dict[str, tuple[Any, str]] = {
    "ReLU": (lambda x, z, s, b: relu(_own(x, s, b)), "bn_relu"),
    "Add-ReLU": (lambda x, z, s, b: relu(_own(x, s, b) + z), "bn_add_relu"),
    "no vectors": (lambda x, z, s, b: relu(z + _own(x, None, b, epsilon=0.1)), "bn_add_relu"),
    "NCHW": (lambda x, z, s, b: relu(_own(x, None, None, axis=1) + z), "bn_add_relu"),
    "three residuals": (lambda x, z, s, b: relu(_own(x, s, b) + z + x + z), "bn_add_relu"),
    "ghost batches": (_with_statistics, "bn_add_relu"),
    "join": (lambda x, z, s, b: relu(_own(x, s, b) + _own(z, b, s)), "dual_bn_add_relu"),
    "join before SiLU": (
        lambda x, z, s, b: jax.nn.silu(_own(x, s, b) + _own(z, b, s)),
        "dual_bn_act",
    ),
    "join without an activation": (lambda x, z, s, b: _own(x, s, b) + _own(z, b, s), "dual_bn_act"),
    "unlike join": (
        lambda x, z, s, b: relu(_own(x, s, b) + _own(z, b, s, epsilon=0.1)),
        "bn_add_relu",
    ),
    "evaluation": (lambda x, z, s, b: relu(_given(x, s, b)), "bn_relu_inference"),
    "evaluation with Add": (lambda x, z, s, b: relu(_given(x, s, b) + z), "bn_add_relu_inference"),
    "join of evaluations": (
        lambda x, z, s, b: relu(_given(x, s, b) + _given(z, s, b)),
        "bn_add_relu_inference",
    ),
}


@pytest.mark.quick
@pytest.mark.parametrize("name", PROGRAMS)
def test_taken_in(name: str) -> None:
    program, operator = PROGRAMS[name]
    assert operators(program, X, Z, SCALE, BIAS) == {operator: 1}
    assert_no_worse(program, X, Z, SCALE, BIAS)
    text = str(jax.make_jaxpr(jax_bnar.fuse(program))(X, Z, SCALE, BIAS))
    ours = [line for line in text.splitlines() if "name=relu" in line]
    assert not ours, "the ReLU is still outside"


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        (lambda x, z, s, b: jnp.sin(_own(x, s, b)), "sin follows, which is not fused"),
        (lambda x, z, s, b: (y := _own(x, s, b), relu(y)), "the normalised array is also returned"),
    ],
)
def test_not_taken_in(program: Any, reason: str) -> None:
    (line,) = jax_bnar.explain(program)(X, Z, SCALE, BIAS).refused
    assert line.reason == f"it is an operator of jax_bnar already; {reason}"


@pytest.mark.parametrize("check_vma", [True, False])
def test_synchronised(check_vma: bool) -> None:
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))

    def local(x: Any, z: Any, scale: Any, bias: Any) -> Any:
        y, mean, _ = jax_bnar.batch_norm(x, scale, bias, axis_name="data")
        return relu(y + z), mean

    program: Any = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(P("data"), P("data"), P(), P()),
        out_specs=(P("data"), P()),
        check_vma=check_vma,
    )
    assert operators(program, X, Z, SCALE, BIAS) == {"bn_add_relu": 1}
    assert_no_worse(program, X, Z, SCALE, BIAS)


def test_linen_after_a_swap_of_the_import() -> None:
    class Block(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            y = flax_layers.BatchNorm(use_running_average=False)(nn.Dense(3)(x))
            return nn.relu(y + x)

    variables = Block().init(jax.random.key(0), X)

    def program(variables: Any, x: Any) -> Any:
        return Block().apply(variables, x, mutable=["batch_stats"])

    assert operators(program, variables, X) == {"bn_add_relu": 1}
    assert "Block/BatchNorm_0/BatchNorm: bn_add_relu" in str(
        jax_bnar.explain(program)(variables, X)
    )
    given, expected = (jax.jit(f)(variables, X) for f in (jax_bnar.fuse(program), program))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), given, expected)


def test_nnx_after_convert_batch_norms() -> None:
    class Block(nnx.Module):
        def __init__(self) -> None:
            self.bn = nnx.BatchNorm(3, rngs=nnx.Rngs(0))

        def __call__(self, x: jax.Array) -> jax.Array:
            return jax.nn.relu(self.bn(x) + x)

    model = nnx_layers.convert_batch_norms(Block())
    assert operators(lambda model, x: model(x), model, X) == {"bn_add_relu": 1}


def test_a_renorm_over_a_named_axis() -> None:
    """Its call has given statistics, which `fuse` leaves alone, and its result is a residual."""
    renorm = functools.partial(flax_layers.BatchRenorm, use_running_average=False)
    variables = renorm().init(jax.random.key(0), X)

    def member(x: Any, z: Any, scale: Any, bias: Any) -> Any:
        z, _ = renorm(axis_name="half").apply(variables, z, mutable=["batch_stats"])
        return relu(_own(x, scale, bias, axis_name="half") + z)

    program = jax.vmap(member, (0, 0, None, None), axis_name="half")
    halves = (a.reshape(2, -1, *a.shape[1:]) for a in (X, Z))
    assert operators(program, *halves, SCALE, BIAS) == {"bn_add_relu": 1}
