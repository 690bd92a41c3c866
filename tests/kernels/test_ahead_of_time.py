"""Programs for GPUs that other machines have: lowered, compiled and refused, without a GPU here."""

import hashlib
import itertools
import pathlib
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import gpu_compiler
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cuda_stand_ins import LOWER, STAND_IN, driver, install, run
from jax import export
from jax.experimental import serialize_executable
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from subprocesses import run_python

import jax_bnar
from jax_bnar._base.implementation import Implementation
from jax_bnar._kernels import ahead_of_time, cuda_driver, targets

assert targets.native is not None
native = targets.native

WITHOUT_KERNELS = "import sys\nsys.modules['jax_bnar_cuda13'] = None\n"
# A stand-in for jax-bnar-cuda13 with the planner of the real kernels.
SAME_PLANNER = re.sub(r"return (12345, 0, 0|12345|0)\n", "return PLAN\n", STAND_IN)
for name, arguments in [
    ("workspace_bytes", "platform, groups, rows, channels, inner"),
    ("workspace_bound", "platform"),
    ("mask_channels", "platform, groups, rows, channels, inner"),
]:
    SAME_PLANNER = SAME_PLANNER.replace("PLAN", f"_native.{name}({arguments})", 1)

# A training step with a mask, whose loss needs everything that the kernels return.
STEP = """
def loss(x, z, scale, bias):
    result = jax_bnar.bn_add_relu(x, z, scale, bias, save="mask")
    return jnp.square(result.y.astype(jnp.float32)).sum() + (result.mean * result.var).sum()

step = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2, 3)))
"""


def lowered_step(folder: pathlib.Path, before: str = "") -> str:
    code = """
import jax.numpy as jnp
x = jax.ShapeDtypeStruct((8, 14, 14, 64), jnp.bfloat16)
vector = jax.ShapeDtypeStruct((64,), jnp.float32)
"""
    show = 'print(step.trace(x, x, vector, vector).lower(lowering_platforms=("cuda",)).as_text())'
    finished = run(folder, before + LOWER + code + STEP + show, "-W", "error")
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


@pytest.mark.slow
def test_a_program_is_the_same_with_and_without_the_kernels(tmp_path: pathlib.Path) -> None:
    without = lowered_step(tmp_path, WITHOUT_KERNELS)
    assert without.count("custom_call @jax_bnar_") == 2
    assert without.count("abi = ") == 2
    install(tmp_path, jax_bnar.__version__, SAME_PLANNER)
    assert lowered_step(tmp_path) == without


SHAPES = list(
    itertools.product((1, 2, 64), (1, 392, 802816, 1 << 22), (1, 8, 96, 251, 2048), (1, 49))
)


def planned(module: Any) -> list[Any]:
    """What a module says that calls of the CUDA kernels take."""
    return [
        module.workspace_bound("CUDA"),
        *(module.workspace_bytes("CUDA", *shape) for shape in SHAPES),
        *(module.mask_channels("CUDA", *shape) for shape in SHAPES),
    ]


def test_the_planner_of_the_cpu_module_is_that_of_the_kernels() -> None:
    if targets.cuda is None:
        pytest.skip("this build has no CUDA kernels")
    assert planned(native) == planned(targets.cuda)
    assert native.cuda_abi() == targets.cuda.cuda_abi()


# By version, what calls take. A program that is compiled for one version is refused by others. (The
# digest of version 1 may change until there is a release, before which nobody has such programs.)
CALLS = {1: "77c673a9cfee0bb1"}


def test_calls_that_change_have_a_new_version() -> None:
    digest = hashlib.sha256(repr(planned(native)).encode()).hexdigest()[:16]
    assert CALLS.get(native.cuda_abi()) == digest, (
        "the calls of the CUDA kernels take other workspaces or masks than before, so programs that"
        " were compiled before must be refused: increase kCudaAbi in native/cuda_abi.h, and enter"
        f" {digest} for it in CALLS"
    )


def call_on_the_cpu(name: str, handlers: Any, **attributes: Any) -> Callable[[], Any]:
    """A call of handlers for CUDA. They need no GPU, so they are registered for the CPU."""
    jax.ffi.register_ffi_target(name, handlers, platform="cpu")
    call = jax.ffi.ffi_call(name, jax.ShapeDtypeStruct((3,), jnp.float32))
    compiled = jax.jit(lambda x: call(x, **attributes)).lower(jnp.ones(3, jnp.float32)).compile()
    return lambda: jax.block_until_ready(compiled(jnp.ones(3, jnp.float32)))


@pytest.mark.parametrize("operation", ["forward", "dual_backward"])
def test_a_program_for_missing_kernels_compiles_and_does_not_run(operation: str) -> None:
    handlers = native.missing_cuda_kernels("they are on the moon. Way out: fetch them")
    assert list(handlers) == list(native.registrations()["cpu"])
    call = call_on_the_cpu(f"missing_{operation}", handlers[operation], abi=np.int64(1))
    for _ in range(2):  # The process survives.
        with pytest.raises(jax.errors.JaxRuntimeError) as caught:
            call()
        message = str(caught.value)
        assert message.startswith("FAILED_PRECONDITION: jax_bnar: this program was compiled for")
        assert message.endswith("be loaded here: they are on the moon. Way out: fetch them")


@pytest.mark.slow
def test_the_error_says_why_kernels_are_missing_and_the_way_out(tmp_path: pathlib.Path) -> None:
    code = "print(targets._why_cuda_is_missing())"
    finished = run(tmp_path, WITHOUT_KERNELS + LOWER + code)
    assert "this installation has no CUDA kernels" in finished.stdout
    assert "install the wheel of jax-bnar-cuda13 of the same version" in finished.stdout
    install(tmp_path, jax_bnar.__version__, STAND_IN)
    assert "no NVIDIA driver was found" in run(tmp_path, LOWER + code).stdout


def checked_call(**attributes: Any) -> Callable[[], Any]:
    """A call that is checked as those of the CUDA kernels are, and computes nothing."""
    check = native.missing_cuda_kernels("")["forward"]["instantiate"]
    handlers = {"instantiate": check, "execute": native.ffi_api_probe()}
    return call_on_the_cpu("checked_call", handlers, **attributes)


def test_calls_of_this_version_are_accepted() -> None:
    if native.cpu_isa() == "emulation of CUDA":
        pytest.skip("the emulated module has no handler that computes nothing")
    assert checked_call(abi=np.int64(native.cuda_abi()), gate="x")().shape == (3,)
    # They were compiled before calls had a version.
    assert checked_call(gate="x")().shape == (3,)


@pytest.mark.parametrize("version", [0, 2, 1 << 40])
def test_calls_of_another_version_are_refused_when_they_are_loaded(version: int) -> None:
    if native.cpu_isa() == "emulation of CUDA":
        pytest.skip("the emulated module has no handler that computes nothing")
    with pytest.raises(jax.errors.JaxRuntimeError) as caught:
        checked_call(abi=np.int64(version))
    message = str(caught.value)
    ours = jax_bnar.__version__
    assert f"compiled for version {version} of the calls of the CUDA kernels" in message
    assert f"this installation, jax_bnar {ours}, has version {native.cuda_abi()}" in message
    assert f"compile it again with jax_bnar {ours}" in message
    with pytest.raises(jax.errors.JaxRuntimeError, match="abi must be an integer of 64 bits"):
        checked_call(abi="1")


STORED = """
import pickle
import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import serialize_executable
from jax_bnar import _native

check = _native.missing_cuda_kernels("")["forward"]["instantiate"]

def register(**stages):
    execute = _native.ffi_api_probe()
    jax.ffi.register_ffi_target("stored_call", {"execute": execute, **stages}, platform="cpu")
"""
STORE = """
register()
call = jax.ffi.ffi_call("stored_call", jax.ShapeDtypeStruct((3,), jnp.float32))
program = jax.jit(lambda x: call(x, abi=np.int64(2))).lower(jnp.ones(3, jnp.float32)).compile()
with open(PATH, "wb") as file:
    pickle.dump(serialize_executable.serialize(program), file)
"""
LOAD = """
register(instantiate=check)
with open(PATH, "rb") as file:
    stored = pickle.load(file)
try:
    serialize_executable.deserialize_and_load(*stored)
except jax.errors.JaxRuntimeError as error:
    print(error)
"""


@pytest.mark.slow
def test_a_stored_program_of_another_version_is_refused_when_it_is_loaded(
    tmp_path: pathlib.Path,
) -> None:
    """By the runtime of the CPU, as there is no GPU."""
    path = f"PATH = {str(tmp_path / 'program')!r}\n"
    run_python(path + STORED + STORE, timeout=120)
    printed = run_python(path + STORED + LOAD, timeout=120)
    assert "compiled for version 2 of the calls of the CUDA kernels" in printed


def test_the_kernels_take_calls_with_and_without_a_version() -> None:
    """The attribute is for the check alone, and is taken off before the kernels read the others."""
    if native.cpu_isa() != "emulation of CUDA":
        pytest.skip("only emulated CUDA kernels run here")
    x = jnp.asarray(np.random.default_rng(0).standard_normal((6, 64), np.float32))
    results = [
        jax.ShapeDtypeStruct((1, 64), jnp.float32),
        jax.ShapeDtypeStruct((1, 64), jnp.float32),
        jax.ShapeDtypeStruct((native.workspace_bytes("cpu", 1, 6, 64, 1),), jnp.uint8),
    ]
    for attributes in ({}, {"abi": np.int64(native.cuda_abi())}):
        call = jax.ffi.ffi_call("jax_bnar_statistics_v1", results)
        mean, _, _ = call(x, has_groups=False, has_inner=False, **attributes)
        np.testing.assert_allclose(mean[0], x.mean(0), rtol=1e-5, atol=1e-6)
    call = jax.ffi.ffi_call("jax_bnar_statistics_v1", results)
    with pytest.raises(jax.errors.JaxRuntimeError, match="compiled for version 9 of the calls"):
        call(x, has_groups=False, has_inner=False, abi=np.int64(9))
    with pytest.raises(jax.errors.JaxRuntimeError, match="number of attributes"):
        call(x, has_groups=False, has_inner=False, surplus=True)


FOR_A_TOPOLOGY = """
from jax_bnar._base import jax_compat
jax_compat.has_gpu_of_program = lambda ctx: False
assert "custom_call @jax_bnar_forward_v1" in lowered("cuda")
"""


@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize(("cuda", "gpus"), [("13.0", "7.5"), ("12.4", "9.0")])
def test_a_topology_is_not_this_machine(
    tmp_path: pathlib.Path,
    stand_in_driver: pathlib.Path,
    kernels: bool,
    cuda: str,
    gpus: str,
) -> None:
    """A GPU or a driver here that cannot load the kernels says nothing about other machines."""
    if kernels:
        install(tmp_path, jax_bnar.__version__, STAND_IN)
    environment = driver(stand_in_driver, cuda, gpus)
    code = ("" if kernels else WITHOUT_KERNELS) + LOWER + FOR_A_TOPOLOGY
    finished = run(tmp_path, code, "-W", "error", environment=environment)
    assert finished.returncode == 0, finished.stderr


def exported_text(implementation: Implementation) -> str:
    def forward(x: Any) -> jax.Array:
        return jax_bnar.bn_relu(x, None, None, implementation=implementation).y

    program = export.export(
        jax.jit(forward), platforms=("cuda",), disabled_checks=jax_bnar.DISABLED_EXPORT_CHECKS
    )(jax.ShapeDtypeStruct((8, 5), jnp.float32))
    return program.mlir_module()


def test_an_exported_program_calls_missing_kernels_only_if_told_to() -> None:
    if ("forward", "cuda") in targets.kernels or cuda_driver.devices():
        pytest.skip("the kernels are here, or programs for CUDA run here")
    assert "jax_bnar_forward" not in exported_text(None)
    assert "jax_bnar_forward_v1" in exported_text("ffi")


class CompileOnlyPyClient:
    """What JAX calls the backend of a topology."""

    platform = "gpu"


H200 = cuda_driver.Device("H200", (9, 0))


@pytest.mark.parametrize(
    ("backend", "devices", "elsewhere"),
    [
        (CompileOnlyPyClient(), (H200,), True),
        # JAX has a GPU, whatever the driver told us.
        (SimpleNamespace(platform="gpu"), (), False),
        (SimpleNamespace(platform="cpu"), (), True),
        (SimpleNamespace(platform="cpu"), (H200,), False),
        (None, (), True),
    ],
)
def test_where_a_program_for_cuda_runs(
    monkeypatch: pytest.MonkeyPatch,
    backend: Any,
    devices: tuple[cuda_driver.Device, ...],
    elsewhere: bool,
) -> None:
    monkeypatch.setattr(cuda_driver, "devices", lambda: devices)
    context = SimpleNamespace(module_context=SimpleNamespace(backend=backend))
    assert ahead_of_time.runs_elsewhere(context) == elsewhere


def test_a_program_for_several_devices_is_serialised() -> None:
    """JAX keeps with it what XLA asked while it was compiled, which cannot be stored."""
    mesh = Mesh(np.array(jax.devices()), ("data",))
    array = np.random.default_rng(0).standard_normal((16, 3, 24), np.float32)
    x = jax.device_put(array, NamedSharding(mesh, PartitionSpec("data")))
    gradient = jax.jit(jax.grad(lambda x: jnp.square(jax_bnar.bn_relu(x, None, None).y).sum()))
    compiled = gradient.lower(x).compile()
    stored = serialize_executable.serialize(compiled)
    loaded = serialize_executable.deserialize_and_load(*stored)
    np.testing.assert_array_equal(loaded(x), compiled(x))


COMPILED = """
def compiled(devices):
    if len(devices) == 1:
        tensors = vectors = SingleDeviceSharding(devices[0])
    else:
        mesh = jax.sharding.Mesh(np.array(devices), ("data",))
        tensors, vectors = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())
    x = jax.ShapeDtypeStruct((32, 28, 28, 128), jnp.bfloat16, sharding=tensors)
    vector = jax.ShapeDtypeStruct((128,), jnp.float32, sharding=vectors)
    return step.lower(x, x, vector, vector).compile()

for number in (1, 8):
    program = compiled(h200s(number))
    text = program.as_text()
    print(*re.findall(r'custom_call_target="(jax_bnar_\\w+)"', text))
    print(len(re.findall(r"abi = 1", text)), text.count("all-gather("))
    print(len(serialize_executable.serialize(program)[0]) > 1000)
"""

OF_ANOTHER_VERSION = """
call = jax.ffi.ffi_call("jax_bnar_statistics_v1", [jax.ShapeDtypeStruct((1, 8), jnp.float32)] * 2)
x = jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=SingleDeviceSharding(h200s(1)[0]))
try:
    jax.jit(lambda x: call(x, abi=np.int64(2))).lower(x).compile()
except jax.errors.JaxRuntimeError as error:
    print(error)
"""


@pytest.mark.slow
def test_compiled_for_gpus_by_xla() -> None:
    gpu_compiler.require()
    printed = gpu_compiler.run_with_gpu_compiler(STEP + COMPILED + OF_ANOTHER_VERSION, timeout=300)
    one, checks, stored, eight, more_checks, more_stored, *refusal = printed.splitlines()
    assert one.split() == ["jax_bnar_forward_v1", "jax_bnar_backward_v1"]
    halves = ["statistics", "normalise", "backward_reduce", "backward_apply"]
    assert set(eight.split()) == {f"jax_bnar_{half}_v1" for half in halves}
    assert checks == "2 0"
    assert int(more_checks.split()[0]) == len(eight.split())
    assert more_checks.endswith(" 0")
    assert stored == more_stored == "True"
    # XLA asks the handler when it compiles, and would when it loads.
    assert "compiled for version 2 of the calls of the CUDA kernels" in "\n".join(refusal)


# Of eight layers, backward needs sixteen arrays; with the policy, eight of them wait for it.
PEAKS = """
policy = jax_bnar.checkpoint_policies.dots_and_statistics_saveable
size = 256 * 28 * 28 * 128 * 2

def network(x, kernels):
    for kernel in kernels:
        x = jax.lax.conv_general_dilated(
            x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        x = jax_bnar.bn_relu(x, None, None).y
    return jnp.sin(x).sum()

device = SingleDeviceSharding(h200s(1)[0])
x = jax.ShapeDtypeStruct((256, 28, 28, 128), jnp.bfloat16, sharding=device)
kernels = jax.ShapeDtypeStruct((8, 3, 3, 128, 128), jnp.bfloat16, sharding=device)
for function in (network, jax.checkpoint(network, policy=policy)):
    program = jax.jit(jax.grad(function, 1)).lower(x, kernels).compile()
    print(program.memory_analysis().temp_size_in_bytes / size)
"""


@pytest.mark.slow
def test_a_policy_lowers_the_planned_peak() -> None:
    """XLA:CPU undoes `jax.checkpoint`, so only a program for another platform shows it."""
    gpu_compiler.require()
    printed = gpu_compiler.run_with_gpu_compiler(PEAKS, timeout=300)
    without, with_policy = map(float, printed.split())
    assert 15.5 < without < 18
    assert with_policy < 0.75 * without


# Two residual blocks in pure JAX. What is stored in float32 and as large as an activation?
PURE = """
def conv(x, kernel):
    return jax.lax.conv_general_dilated(
        x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )

def network(x, kernels):
    for first, second in (kernels[:2], kernels[2:]):
        y = jax_bnar.bn_relu(conv(x, first), None, None, implementation="xla").y
        x = jax_bnar.bn_add_relu(conv(y, second), x, None, None, implementation="xla").y
    return (x * x).astype(jnp.float32).sum()

device = SingleDeviceSharding(h200s(1)[0])
x = jax.ShapeDtypeStruct((256, 28, 28, 128), jnp.bfloat16, sharding=device)
kernels = jax.ShapeDtypeStruct((4, 3, 3, 128, 128), jnp.bfloat16, sharding=device)
text = jax.jit(jax.grad(network, (0, 1))).lower(x, kernels).compile().as_text()
entry = text[text.index("\\nENTRY"):]
shapes = re.findall(r"(bf16|f32)\\[([\\d,]+)\\]", " ".join(
    line.split(" = ")[1].split("(%")[0] for line in entry.splitlines() if " fusion(" in line
))
large = [dtype for dtype, size in shapes if np.prod([int(n) for n in size.split(",")]) >= 2**24]
print(large.count("bf16"), large.count("f32"))
"""


@pytest.mark.slow
def test_pure_jax_stores_activations_in_their_own_dtype() -> None:
    gpu_compiler.require()
    printed = gpu_compiler.run_with_gpu_compiler(PURE, timeout=300)
    in_bfloat16, in_float32 = map(int, printed.split())
    assert in_float32 == 0
    # Each norm stores y and dx, the two joins dz, and XLA may store e of the others.
    assert 10 <= in_bfloat16 <= 14
