"""Small programs that are compiled for GPUs that are not there, and what is found in them.

A process of its own compiles them (`gpu_compiler.run_with_gpu_compiler`), because JAX must be set
up for it before it is used. Each function returns what JSON can hold.
"""

import functools
import itertools
import json
import math
import pathlib
import re
import tempfile
from collections.abc import Callable
from typing import Any, Final
from unittest import mock

import jax
import jax.numpy as jnp
from convolution_programs import among_convolutions, convolution_layouts
from flax import linen as nn
from jax.sharding import NamedSharding, PartitionSpec

import jax_bnar
from benchmarks.common.hlo_text import layout_changes
from benchmarks.common.sites import Site
from benchmarks.gpu.compiled import compiler, programs, targets
from benchmarks.gpu.compiled.programs import BATCHES, Variant
from benchmarks.gpu.compiled.row import Case, compile_program, count, measure
from benchmarks.sharding.hlo_collectives import compiled_collectives
from benchmarks.sites.peers import ours
from benchmarks.sites.problem import DType
from jax_bnar import reference
from jax_bnar._benchmark.memory import planned_memory
from jax_bnar._kernels import targets as kernels
from jax_bnar.flax_layers import BatchNorm

# A function from (x, z, scale, bias) to (y, what else it returns).
Operator = Callable[..., tuple[jax.Array, Any]]

DTYPES: Final = ("bfloat16", "float16", "float32", "float64")
LAYOUTS: Final = {"NHWC": -1, "NCHW": 1}
SAVES: Final = ("y", "mask")
FUNCTIONS: Final = ("bn_relu", "bn_add_relu", "dual_bn_add_relu")
_CHANNELS: Final = 64
_SHAPES: Final = {"NHWC": (64, 14, 14, _CHANNELS), "NCHW": (64, _CHANNELS, 14, 14)}


@functools.cache
def mesh_of(devices: int) -> jax.sharding.Mesh:
    """H200s. JAX takes the devices of two meshes of the same description for different ones."""
    return targets.mesh_of("h200", devices)


def operator(function: str, layout: str, save: Any) -> Operator:
    """One of the operators of training; bn_relu leaves z alone."""
    axis = LAYOUTS[layout]

    def apply(x: Any, z: Any, scale: Any, bias: Any) -> tuple[jax.Array, Any]:
        if function == "bn_relu":
            y, *statistics = jax_bnar.bn_relu(x, scale, bias, axis=axis, save=save)
        elif function == "bn_add_relu":
            y, *statistics = jax_bnar.bn_add_relu(x, z, scale, bias, axis=axis, save=save)
        else:
            y, *statistics = jax_bnar.dual_bn_add_relu(
                x, z, scale, bias, scale, bias, axis=axis, save=save
            )
        return y, statistics

    return apply


def compiled(
    apply: Operator,
    layout: str,
    dtype: str,
    devices: int = 1,
    compiler_options: Any = None,
) -> jax.stages.Compiled:
    """Forward and backward of an operator, with the activations divided over the devices."""

    def step(x: Any, z: Any, scale: Any, bias: Any, dy: Any) -> Any:
        y, pullback, others = jax.vjp(apply, x, z, scale, bias, has_aux=True)
        return y, others, pullback(dy)

    mesh = mesh_of(devices)

    def on(spec: PartitionSpec, shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    x = on(PartitionSpec("data"), _SHAPES[layout], dtype)
    wide = jnp.float64 if dtype == "float64" else jnp.float32
    vector = on(PartitionSpec(), (_CHANNELS,), wide)
    return jax.jit(step).lower(x, x, vector, vector, x).compile(compiler_options)


def found_in(program: jax.stages.Compiled, devices: int = 1) -> dict[str, Any]:
    """Our calls, the lines that copy or transpose an activation or a mask, and the collectives."""
    text = program.as_text() or ""
    # A mask has a byte for eight elements, and every other array far fewer.
    elements = math.prod(_SHAPES["NHWC"]) // devices // 8
    return {
        "calls": re.findall(r'custom_call_target="(jax_bnar_\w+)"', text),
        "copies": layout_changes(text, elements),
        "collectives": sorted(each[0].opcode for each in compiled_collectives(program)),
    }


def on_one_device() -> dict[str, Any]:
    """Every operator in every dtype and layout, by name."""
    return {
        " ".join(names): found_in(compiled(operator(*names[:3]), names[1], names[3]))
        for names in itertools.product(FUNCTIONS, LAYOUTS, SAVES, DTYPES)
    }


def transposed_before() -> dict[str, Any]:
    """An operator whose input must be transposed: a program in which an activation is moved."""

    def apply(x: Any, z: Any, scale: Any, bias: Any) -> tuple[jax.Array, Any]:
        x, z = (jnp.transpose(array, (0, 2, 3, 1)) for array in (x, z))
        y, others = operator("bn_add_relu", "NHWC", "mask")(x, z, scale, bias)
        return jnp.transpose(y, (0, 3, 1, 2)), others

    return found_in(compiled(apply, "NCHW", "bfloat16"))


def in_pure_jax() -> dict[str, Any]:
    """An operator without our calls."""

    def apply(x: Any, z: Any, scale: Any, bias: Any) -> tuple[jax.Array, Any]:
        y, *others = jax_bnar.bn_add_relu(x, z, scale, bias, implementation="xla")
        return y, others

    return found_in(compiled(apply, "NHWC", "bfloat16"))


def activated(activation: str, second: str, layout: str) -> Operator:
    """Another activation than ReLU, with z as "residual" or "input" or not at all ("none")."""
    axis = LAYOUTS[layout]

    def apply(x: Any, z: Any, scale: Any, bias: Any) -> tuple[jax.Array, Any]:
        if second == "input":
            y, *statistics = jax_bnar.dual_bn_act(
                x, z, scale, bias, scale, bias, activation, axis=axis
            )
        else:
            residual = z if second == "residual" else None
            y, *statistics = jax_bnar.bn_act(x, scale, bias, activation, z=residual, axis=axis)
        return y, statistics

    return apply


def other_activations() -> dict[str, Any]:
    """Activations whose derivative follows from y and from x, by name; on eight devices too."""
    found = {
        " ".join((activation, second, layout, dtype)): found_in(
            compiled(activated(activation, second, layout), layout, dtype)
        )
        for activation, second, layout, dtype in itertools.product(
            ("silu", "leaky_relu"),
            ("none", "residual", "input"),
            LAYOUTS,
            ("bfloat16", "float32"),
        )
    }
    sharded = compiled(activated("silu", "residual", "NHWC"), "NHWC", "bfloat16", 8)
    return found | {"eight devices": found_in(sharded, 8)}


def widened() -> dict[str, dict[str, Any]]:
    """A float32 y of a bfloat16 x, by `out_dtype` and by kernels on an x that is widened first."""
    site = Site(56, 56, 256, "bn_add_relu")

    def described(apply: Operator) -> dict[str, Any]:
        step = ours.gradient_step(apply)

        def on(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
            sharding = NamedSharding(mesh_of(1), PartitionSpec())
            return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

        shape = site.shape(32)
        wide, vector = on(shape, jnp.float32), on((site.channels,), jnp.float32)
        program = jax.jit(step).lower(on(shape, jnp.bfloat16), wide, vector, vector, wide).compile()
        memory = planned_memory(program)
        assert memory is not None
        elements = math.prod(shape)
        return {**found_in(program), "temporary_bytes": memory.temporary, "elements": elements}

    return {
        "out_dtype": described(ours.operator(site, out_dtype=jnp.float32)),
        "widened before": described(ours.on_widened(ours.operator(site))),
    }


def on_eight_devices() -> dict[str, Any]:
    """Every operator in two dtypes, with statistics over all devices."""
    return {
        " ".join((function, save, dtype)): found_in(
            compiled(operator(function, "NHWC", save), "NHWC", dtype, 8), 8
        )
        for function, save, dtype in itertools.product(FUNCTIONS, SAVES, ("bfloat16", "float32"))
    }


def flax_operator(**options: Any) -> Operator:
    """Flax's BatchNorm with an addition and a ReLU."""
    layer = nn.BatchNorm(use_running_average=False, dtype=jnp.bfloat16, **options)

    def apply(x: Any, z: Any, scale: Any, bias: Any) -> tuple[jax.Array, Any]:
        vector = jnp.zeros_like(scale)
        variables = {
            "params": {"scale": scale, "bias": bias},
            "batch_stats": {"mean": vector, "var": vector},
        }
        y, updated = layer.apply(variables, x, mutable=["batch_stats"])
        return nn.relu(y + z), updated

    return apply


def accurate_flax_on_eight_devices() -> dict[str, Any]:
    """Flax's BatchNorm with the accurate variance, which needs the mean first."""
    apply = flax_operator(use_fast_variance=False)
    return found_in(compiled(apply, "NHWC", "bfloat16", 8), 8)


def gathered_after() -> dict[str, Any]:
    """An operator whose result every device wants as a whole."""

    def apply(x: Any, z: Any, scale: Any, bias: Any) -> tuple[jax.Array, Any]:
        y, others = operator("bn_add_relu", "NHWC", "y")(x, z, scale, bias)
        whole = NamedSharding(mesh_of(8), PartitionSpec())
        return jax.lax.with_sharding_constraint(y, whole), others

    return found_in(compiled(apply, "NHWC", "bfloat16", 8), 8)


def recorded(apply: Operator) -> dict[str, int]:
    """How many calls XLA records in a command buffer, that is, a CUDA graph, and how many not.

    XLA decides when it has made thunks of the program, and dumps what they are: in the dump, the
    thunks of a command buffer are indented. Buffers of any size are made, because this program is
    smaller than those that XLA finds worth it (five thunks).
    """
    with tempfile.TemporaryDirectory() as folder:
        options = {
            "xla_gpu_graph_min_graph_size": 1,
            "xla_dump_to": folder,
            "xla_dump_hlo_as_text": True,
        }
        compiled(apply, "NHWC", "bfloat16", compiler_options=options)
        (path,) = pathlib.Path(folder).glob("*thunk_sequence_after_thunk_passes.txt")
        calls = re.findall(r"^( *)\d+: kCustomCall", path.read_text(), re.MULTILINE)
    return {"inside": sum(map(bool, calls)), "outside": sum(not call for call in calls)}


def command_buffers() -> dict[str, Any]:
    """For each operator, how many of its calls XLA records."""
    return {
        " ".join((function, save)): recorded(operator(function, "NHWC", save))
        for function, save in itertools.product(FUNCTIONS, SAVES)
    }


def call_that_may_not_be_recorded() -> dict[str, int]:
    """An operator, and a call whose handler does not have the trait that ours have."""
    assert kernels.native is not None
    jax.ffi.register_ffi_target("not_recorded", kernels.native.ffi_api_probe(), platform="CUDA")

    def apply(x: Any, z: Any, scale: Any, bias: Any) -> tuple[jax.Array, Any]:
        y, others = operator("bn_add_relu", "NHWC", "y")(x, z, scale, bias)
        call = jax.ffi.ffi_call("not_recorded", jax.ShapeDtypeStruct(bias.shape, bias.dtype))
        return y, (others, call(jax.lax.stop_gradient(bias)))

    return recorded(apply)


def steps_bfloat16() -> dict[str, Any]:
    """The rows of ResNet-50's training step."""
    return _steps("bfloat16", "ours", "ours_xla", "flax")


def steps_float32() -> dict[str, Any]:
    return _steps("float32", "ours", "flax")


def _steps(dtype: Any, *variants: Variant) -> dict[str, Any]:
    return {
        variant: measure(Case("h200", "step", variant, dtype, 1, BATCHES["step"]))
        for variant in variants
    }


def frozen() -> dict[str, Any]:
    """The rows of a block with frozen norms, by variant and dtype."""
    return {variant: _frozen(variant) for variant in ("ours", "flax")}


def frozen_with_kernels() -> dict[str, Any]:
    """The same by our calls, which layers leave to XLA on GPUs."""
    norm = functools.partial(BatchNorm, implementation="ffi")
    with mock.patch.dict(programs._LAYERS, ours=norm):
        return _frozen("ours")


def _frozen(variant: Variant) -> dict[str, Any]:
    dtypes: tuple[DType, ...] = ("bfloat16", "float32")
    return {dtype: measure(Case("h200", "frozen", variant, dtype, 1, 16)) for dtype in dtypes}


def masked() -> dict[str, Any]:
    """The bytes of BatchNorm over selected examples, forward and backward, ours and Flax's."""
    return {name: _masked(norm) for name, norm in (("ours", BatchNorm), ("flax", nn.BatchNorm))}


def masked_with_kernels() -> dict[str, Any]:
    return {"ours": _masked(functools.partial(BatchNorm, implementation="ffi"))}


def _masked(norm: Any) -> int:
    layer = norm(use_running_average=False, dtype=jnp.bfloat16)
    x = jax.ShapeDtypeStruct((64, 28, 28, 128), jnp.bfloat16)
    mask = jax.ShapeDtypeStruct((64, 1, 1, 1), bool)
    variables = jax.eval_shape(layer.init, jax.random.key(0), x)

    def step(variables: Any, divided: Any) -> Any:
        x, mask, dy = divided

        def apply(params: Any, x: jax.Array) -> Any:
            whole = {**variables, "params": params}
            return layer.apply(whole, x, mask=mask, mutable=["batch_stats"])

        y, pullback, updated = jax.vjp(apply, variables["params"], x, has_aux=True)
        return y, updated, pullback(dy)

    program = programs.Program(step, dict(variables), (x, mask, x), False, math.prod(x.shape))
    found = count(program, compile_program(program, targets.mesh_of("h200", 1)).program)
    return found["bytes_outside_convolutions"]


def hessian_vector_product() -> dict[str, float]:
    """The arrays of x that it moves, by variant: `jax.jvp` of `jax.grad` of an operator."""
    ours = operator("bn_add_relu", "NHWC", "y")
    return {
        "ours": _hessian_vector_product(ours),
        "flax": _hessian_vector_product(flax_operator()),
    }


def hessian_vector_product_with_single_sums() -> dict[str, float]:
    """The same where the sums of a pair are operations of their own, as in plain JAX."""

    def single_sums(first: jax.Array, second: jax.Array, axes: Any) -> Any:
        return first.sum(axis=axes), second.sum(axis=axes)

    with mock.patch.object(reference, "paired_sums", single_sums):
        return {"ours": _hessian_vector_product(operator("bn_add_relu", "NHWC", "y"))}


def _hessian_vector_product(apply: Operator) -> float:
    def loss(*operands: Any) -> jax.Array:
        y, _ = apply(*operands)
        return jnp.square(y.astype(jnp.float32)).sum()

    def step(vectors: Any, arrays: Any) -> Any:
        gradient = jax.grad(loss, argnums=(0, 1, 2, 3))
        (x, z, *dots), (scale, bias) = arrays, vectors
        return jax.jvp(gradient, (x, z, scale, bias), (*dots, bias, scale))

    x = jax.ShapeDtypeStruct((64, 28, 28, 128), jnp.bfloat16)
    vector = jax.ShapeDtypeStruct((128,), jnp.float32)
    size = math.prod(x.shape)
    program = programs.Program(step, (vector, vector), (x, x, x, x), False, size)
    found = count(program, compile_program(program, mesh_of(1)).program)
    return found["bytes_outside_convolutions"] / (size * 2)


_FACTS: Final = {
    function.__name__: function
    for function in (
        on_one_device,
        transposed_before,
        in_pure_jax,
        other_activations,
        widened,
        on_eight_devices,
        accurate_flax_on_eight_devices,
        gathered_after,
        command_buffers,
        call_that_may_not_be_recorded,
        steps_bfloat16,
        steps_float32,
        frozen,
        frozen_with_kernels,
        masked,
        masked_with_kernels,
        hessian_vector_product,
        hessian_vector_product_with_single_sums,
        convolution_layouts,
        among_convolutions,
    )
}


_IN_FLOAT64: Final = {"on_one_device", "convolution_layouts"}


def main(*names: str) -> None:
    """Prints what the functions of these names return, as one JSON object."""
    compiler.prepare()
    jax.config.update("jax_enable_x64", not _IN_FLOAT64.isdisjoint(names))
    print(json.dumps({name: _FACTS[name]() for name in names}))
