"""Tests, without a GPU, what `make gpu` measures besides the sites, and how it shows results."""

import json
import sys
import types
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.common.hlo_text import layout_changes
from benchmarks.gpu import inference_joins
from benchmarks.gpu.chain import chain, make_operands


@pytest.fixture
def default_promotion():
    """Benchmarks run with JAX's default promotion."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def test_layout_changes_are_copies_and_transposes_of_large_arrays() -> None:
    copy = "%copy.1 = bf16[8,4,4,16]{3,2,1,0} copy(bf16[8,4,4,16]{2,1,3,0} %x)"
    turned = "ROOT %t = f32[16,8,16]{2,1,0} transpose(%x), dimensions={2,0,1}"
    started = "%c = (bf16[2048]{0}, bf16[2048]{0}, u32[]) copy-start(%x)"
    program = "\n".join(
        [
            f"  {copy}",
            f"  {turned}",
            f"  {started}",
            "  %bitcast.2 = bf16[8,4,4,16]{3,2,1,0} bitcast(%x)",
            "  %copied = bf16[8,4,4,16]{3,2,1,0} add(%x, %y)",
            "  %small = bf16[3,3,4,4]{3,2,1,0} copy(%w)",
            "  %scalar = f32[] copy(%s)",
        ]
    )
    assert layout_changes(program, 2048) == [copy, turned, started]
    assert len(layout_changes(program, 1)) == 5


def test_a_transpose_that_xla_makes_is_found() -> None:
    def turned(x: jax.Array) -> jax.Array:
        return jnp.transpose(x, (1, 0)) * 2.0

    def straight(x: jax.Array) -> jax.Array:
        return x * 2.0

    x = jnp.ones((64, 32), jnp.float32)
    programs = [jax.jit(f).lower(x).compile().as_text() or "" for f in (turned, straight)]
    assert layout_changes(programs[0], x.size)
    assert not layout_changes(programs[1], x.size)


def test_chain_gives_what_each_step_gives() -> None:
    def step(x: jax.Array, z: jax.Array | None, scale: jax.Array) -> jax.Array:
        return x * scale if z is None else x * scale + z

    x = jax.ShapeDtypeStruct((3, 5), jnp.float32)
    sets, scale = make_operands(([(x, x), (x, None), (x, x)], jax.ShapeDtypeStruct((), x.dtype)))
    results = jax.jit(chain(step))(sets, scale)
    assert len({np.asarray(x).tobytes() for x, _ in sets}) == 3
    for (x, z), result in zip(sets, results, strict=True):
        np.testing.assert_allclose(result, step(x, z, scale), rtol=1e-6)


# Shortened output of XLA:GPU, for two kernels and for one.
TWO_KERNELS = """
%fused_computation (p: f32[2,8,4,4]) -> f32[2,8,4,4] {
  ROOT %a = f32[2,8,4,4]{3,2,1,0} add(%p, %p)
}

ENTRY %main (x: f32[2,8,4,4], z: f32[2,8,4,4], bias: f32[8]) -> f32[2,8,4,4] {
  %x = f32[2,8,4,4]{3,2,1,0} parameter(0)
  %z = f32[2,8,4,4]{3,2,1,0} parameter(1)
  %bias = f32[8]{0} parameter(2)
  %wrapped_add = f32[2,8,4,4]{3,2,1,0} fusion(%x, %z), kind=kLoop, calls=%wrapped_add_computation
  ROOT %fusion = f32[2,8,4,4]{3,2,1,0} fusion(%bias, %wrapped_add), kind=kLoop, calls=%fused
}
"""
ONE_CALL = """
ENTRY %main (x: f32[2,8,4,4], z: f32[2,8,4,4], bias: f32[8]) -> (f32[2,8,4,4]) {
  %x = f32[2,8,4,4]{3,2,1,0} parameter(0)
  %b = f32[2,8,16]{2,1,0} bitcast(%x)
  %ones = f32[8]{0} broadcast(%one), dimensions={}
  %call = (f32[2,8,16]{2,1,0}, s8[0]{0}) custom-call(%b, %z, %bias), custom_call_target="ours"
  %gte = f32[2,8,16]{2,1,0} get-tuple-element(%call), index=0
  ROOT %tuple = (f32[2,8,16]{2,1,0}) tuple(%gte)
}
"""


GRAPH = """
%command_buffer (p: f32[2,8,4,4], p.1: f32[2,8,4,4]) -> f32[2,8,4,4] {
  %p = f32[2,8,4,4]{3,2,1,0} parameter(0)
  %p.1 = f32[2,8,4,4]{3,2,1,0} parameter(1)
  %wrapped_add = f32[2,8,4,4]{3,2,1,0} fusion(%p, %p.1), kind=kLoop, calls=%add
  ROOT %fusion = f32[2,8,4,4]{3,2,1,0} fusion(%wrapped_add), kind=kLoop, calls=%fused
}

ENTRY %main (x: f32[2,8,4,4], z: f32[2,8,4,4]) -> f32[2,8,4,4] {
  %x = f32[2,8,4,4]{3,2,1,0} parameter(0)
  %z = f32[2,8,4,4]{3,2,1,0} parameter(1)
  ROOT %call = f32[2,8,4,4]{3,2,1,0} call(%x, %z), to_apply=%command_buffer
}
"""


def test_kernels_of_a_join_are_counted() -> None:
    assert inference_joins.passes(GRAPH, 256) == 2
    assert inference_joins.passes(TWO_KERNELS, 256) == 2
    assert inference_joins.passes(ONE_CALL, 256) == 1
    assert inference_joins.passes("", 256) == 0


@pytest.mark.usefixtures("default_promotion")
def test_a_join_that_computes_something_else_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(x: jax.Array, z: jax.Array, bias: jax.Array) -> jax.Array:
        return inference_joins.ours(x, z, bias + 1e-3)

    arguments = ["--platform", "cpu", "--output", str(tmp_path / "joins.json")]
    monkeypatch.setitem(inference_joins.PEERS, "ours", wrong)
    assert inference_joins.main(arguments) == 1
    (error,) = json.loads((tmp_path / "joins.json").read_text())["errors"]
    assert "ours differs from two_passes" in error["error"]


def test_the_joins_are_those_of_the_profile() -> None:
    assert sum(inference_joins.JOINS.values()) == 16
    tensors = {"one": 3, "two": 5}  # that one pass moves, and two
    moved = {
        name: sum(
            count * (tensors_moved * 10 * c * h * w * 4)
            for (c, h, w), count in inference_joins.JOINS.items()
        )
        for name, tensors_moved in tensors.items()
    }
    # These are the profile's numbers, without the biases.
    assert moved["two"] == pytest.approx(1_103_932_416, rel=1e-3)
    assert moved["one"] == pytest.approx(662_383_616, rel=1e-3)


@pytest.mark.slow
def test_resnet50_under_pytorch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Uses a small stand-in for torchvision: a shallower network with the same modules."""
    pytest.importorskip("torch")
    import torch_resnet

    models = types.SimpleNamespace(
        resnet50=lambda num_classes: torch_resnet.ResNet((1, 1), num_classes, width=4)
    )
    stand_in: Any = types.ModuleType("torchvision")
    stand_in.models, stand_in.__version__ = models, "stand-in"
    monkeypatch.setitem(sys.modules, "torchvision", stand_in)
    from benchmarks.gpu import resnet50_torch

    output = tmp_path / "torch.json"
    assert resnet50_torch.main(["--platform", "cpu", "--output", str(output)]) == 0
    document = json.loads(output.read_text())
    network = document["networks"]["torch"]
    assert network["first_loss"] == pytest.approx(np.log(1000), rel=0.1)
    assert network["images_per_s"] == pytest.approx(2e3 / network["median_ms"])
    assert document["dry_run"]
