"""What custom_partitioning cannot do in this JAX. In each case pure JAX works instead.

If one of these calls no longer raises, the limit is gone and the README has to be updated.
"""

import functools
from typing import Any

import jax
import numpy as np
import pytest
from cases import Case, operands
from jax import export
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from sharding_tools import make_mesh, put

import jax_bnar
from jax_bnar._base.implementation import Implementation

pytestmark = pytest.mark.quick

X = operands(Case((8, 4, 16))).x


def y(x: Any, implementation: Implementation = None) -> Any:
    return jax_bnar.bn_relu(x, None, None, implementation=implementation).y


def test_two_meshes_in_one_program() -> None:
    one, other = make_mesh("auto", d=8), make_mesh("auto", a=4, b=2)

    def function(x: Any, implementation: Implementation) -> Any:
        sharding = NamedSharding(other, P("a", "b"))
        return jax.lax.with_sharding_constraint(y(x, implementation), sharding)

    run = jax.jit(function, static_argnums=1)
    with pytest.raises(ValueError, match="mesh should be the same across the entire program"):
        run(put(X, one, P("d")), None)
    np.testing.assert_allclose(run(put(X, one, P("d")), "xla"), y(X), rtol=1e-5, atol=1e-5)


def test_lowering_without_devices() -> None:
    mesh = AbstractMesh((8,), ("d",), axis_types=(AxisType.Auto,))
    shape = jax.ShapeDtypeStruct(X.shape, X.dtype, sharding=NamedSharding(mesh, P("d")))

    def lower(implementation: Implementation) -> Any:
        traced = jax.jit(functools.partial(y, implementation=implementation)).trace(shape)
        return traced.lower(lowering_platforms=("cuda",))

    with pytest.raises(ValueError, match="AbstractMesh cannot be used"):
        lower(None)
    lower("xla")


def test_export_for_several_devices_is_pure_jax() -> None:
    mesh = make_mesh("auto", d=8)

    def exported(implementation: Implementation) -> Any:
        function = functools.partial(y, implementation=implementation)
        sharded = jax.jit(function, in_shardings=NamedSharding(mesh, P("d")))
        checks = jax_bnar.DISABLED_EXPORT_CHECKS
        return export.export(sharded, disabled_checks=checks)(X)

    program = export.deserialize(exported(None).serialize())
    assert program.nr_devices == 8
    assert "custom_call @jax_bnar" not in program.mlir_module()
    actual = jax.jit(program.call)(put(X, mesh, P("d")))
    np.testing.assert_allclose(actual, y(X), rtol=1e-5, atol=1e-5)
    with pytest.raises(NotImplementedError, match="exported for several devices"):
        exported("ffi")


def test_gspmd_partitions_too() -> None:
    """Tests the partitioner before Shardy, for as long as JAX has it."""
    mesh = make_mesh("auto", d=8)
    jax.config.update("jax_use_shardy_partitioner", False)
    try:
        text = jax.jit(y).lower(put(X, mesh, P("d"))).compile().as_text()
    finally:
        jax.config.update("jax_use_shardy_partitioner", True)
    assert text is not None
    assert "all-gather" not in text
    assert "jax_bnar_statistics_v1" in text
