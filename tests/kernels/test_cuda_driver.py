"""The CUDA kernels are used only if the driver and every GPU can load them; otherwise, pure JAX.

The answers of the driver come from a stand-in for it, as the tests run without a GPU.
"""

import json
import pathlib
import re

import jax
import pytest
from checkout import ROOT
from cuda_stand_ins import LOWER, STAND_IN, driver, install, run

import jax_bnar
from jax_bnar._kernels import cuda_images, targets
from jax_bnar._kernels.cuda_driver import Device, Version
from jax_bnar._kernels.cuda_images import CudaBuild

# As the wheels are built.
BUILD = CudaBuild((13, 0), ((8, 0), (9, 0), (10, 0), (12, 0)), ((12, 0),))


def devices(*capabilities: Version) -> list[Device]:
    return [Device(f"GPU {i}", capability) for i, capability in enumerate(capabilities)]


@pytest.mark.parametrize(
    ("build", "supported", "capability"),
    [
        (BUILD, (13, 0), (8, 0)),
        (BUILD, (13, 0), (8, 6)),  # machine code of the same major version
        (BUILD, (13, 0), (9, 0)),
        (BUILD, (13, 0), (10, 3)),
        (BUILD, (13, 2), (12, 1)),
        (BUILD, (14, 0), (13, 0)),  # PTX
        (BUILD, (13, 0), (13, 0)),
        # Any driver for CUDA 13 loads machine code of any CUDA 13.
        (CudaBuild((13, 1), ((9, 0),), ()), (13, 0), (9, 0)),
    ],
)
def test_devices_that_load_the_kernels(
    build: CudaBuild, supported: Version, capability: Version
) -> None:
    assert cuda_images.driver_obstacle(build, supported) is None
    assert cuda_images.devices_obstacle(build, supported, devices(capability)) is None


@pytest.mark.parametrize(
    ("build", "supported", "capability", "reason", "way_out"),
    [
        (BUILD, (13, 0), (7, 5), "compute capability 7.5, and the CUDA kernels need 8.0", "pure"),
        (BUILD, (13, 0), (11, 0), "for sm_80, sm_90, sm_100, sm_120", "ARCHITECTURES=native"),
        (CudaBuild((13, 0), ((9, 0),), ()), (13, 0), (8, 6), "of this build are for sm_90", "pip"),
        # Older than the machine code of the same major version.
        (CudaBuild((13, 0), ((8, 6),), ()), (13, 0), (8, 0), "are for sm_86", "pip install"),
        # An older driver does not read the newer PTX.
        (CudaBuild((13, 1), BUILD.architectures, BUILD.ptx), (13, 0), (13, 0), "PTX for 12.0 and"
         " newer, which a driver for CUDA 13.0 cannot compile", "a driver for CUDA 13.1"),
    ],
)  # fmt: skip
def test_devices_that_do_not(
    build: CudaBuild, supported: Version, capability: Version, reason: str, way_out: str
) -> None:
    assert cuda_images.driver_obstacle(build, supported) is None
    found = cuda_images.devices_obstacle(build, supported, devices(capability))
    assert found is not None
    assert reason in found.reason
    assert way_out in found.way_out


def test_one_device_of_several_that_does_not() -> None:
    """JAX may run a program on any of them."""
    found = cuda_images.devices_obstacle(BUILD, (13, 0), devices((9, 0), (7, 5)))
    assert found is not None
    assert found.reason.startswith("GPU 1 has compute capability 7.5")
    assert found.way_out.startswith("hide this GPU with CUDA_VISIBLE_DEVICES, or ")
    both = cuda_images.devices_obstacle(BUILD, (13, 0), devices((6, 1), (7, 5)))
    assert both is not None
    assert "CUDA_VISIBLE_DEVICES" not in both.way_out


@pytest.mark.parametrize(
    ("supported", "reason", "way_out"),
    [
        (None, "no NVIDIA driver was found", "install its driver"),
        ((12, 8), "supports CUDA 12.8, but the kernels are compiled with CUDA 13.0", "580 or"),
    ],
)  # fmt: skip
def test_drivers_that_do_not(supported: Version | None, reason: str, way_out: str) -> None:
    found = cuda_images.driver_obstacle(BUILD, supported)
    assert found is not None
    assert reason in found.reason
    assert way_out in found.way_out


def lowered(
    folder: pathlib.Path, code: str, environment: dict[str, str], *options: str
) -> str:  # fmt: skip
    install(folder, jax_bnar.__version__, STAND_IN)
    finished = run(folder, LOWER + code, *options, environment=environment)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return finished.stdout


USED = """
assert ("forward", "cuda") in targets.registered
assert "custom_call @jax_bnar_forward_v1" in lowered("cuda")
assert targets.has_kernel("forward", "cuda")
"""


def test_a_device_that_loads_them(tmp_path: pathlib.Path, stand_in_driver: pathlib.Path) -> None:
    """The driver is not initialised by the import, but when a program is lowered for CUDA."""
    ask_later = 'print("imported"); lowered("cpu"); print("lowered for the CPU")\n'
    environment = driver(stand_in_driver, "13.0", "9.0 12.0")
    printed = lowered(tmp_path, ask_later + USED, environment, "-W", "error")
    assert printed.splitlines() == ["imported", "lowered for the CPU", "the driver was initialised"]


NOT_USED = """
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    assert "custom_call @jax_bnar_forward_v1" in lowered("cpu")
    assert caught == []
    for _ in range(2):
        assert "custom_call @jax_bnar" not in lowered("cuda")
        dual = jax.jit(lambda x: jax_bnar.dual_bn_add_relu(x, x, None, None, None, None).y)
        assert "@jax_bnar" not in dual.trace(x).lower(lowering_platforms=("cuda",)).as_text()
(warning,) = caught
assert warning.filename == "<string>", warning  # where the user's line is
print(warning.category.__name__, warning.message)
assert not targets.has_kernel("forward", "cuda")
try:
    jax.jit(lambda x: jax_bnar.bn_relu(x, None, None, implementation="ffi").y).trace(x).lower(
        lowering_platforms=("cuda",)
    )
except NotImplementedError as error:
    print(error)
else:
    raise AssertionError("lowered")
print("registered" if ("forward", "cuda") in targets.registered else "not registered")
"""


@pytest.mark.parametrize(
    ("cuda", "gpus", "reason", "way_out", "registered"),
    [
        ("13.0", "7.5", "Stand-in GPU 0 has compute capability 7.5", "leave it as it is", True),
        ("12.4", "9.0", "the NVIDIA driver supports CUDA 12.4", "install a driver for", False),
    ],
    ids=["old GPU", "old driver"],
)
def test_one_warning_where_they_do_not_load(
    tmp_path: pathlib.Path,
    stand_in_driver: pathlib.Path,
    cuda: str,
    gpus: str,
    reason: str,
    way_out: str,
    registered: bool,
) -> None:
    printed = lowered(tmp_path, NOT_USED, driver(stand_in_driver, cuda, gpus))
    warning, error, known = [line for line in printed.splitlines() if "initialised" not in line]
    assert warning.startswith("RuntimeWarning jax_bnar falls back to pure JAX, without its CUDA ")
    assert f"because {reason}" in warning
    assert f"Way out: {way_out}" in warning
    assert "JAX_BNAR_IMPLEMENTATION=xla" in warning
    assert "requires the forward kernel on cuda, but" in error
    assert reason in error
    assert way_out in error
    assert known == ("registered" if registered else "not registered")


@pytest.mark.slow
@pytest.mark.parametrize("cuda", ["13.0", "12.4"])
def test_a_program_for_another_machine(
    tmp_path: pathlib.Path, stand_in_driver: pathlib.Path, cuda: str
) -> None:
    """Without a GPU, what is lowered for CUDA is exported, to a machine that nobody here knows."""
    code = 'assert "custom_call @jax_bnar_forward_v1" in lowered("cuda")'
    lowered(tmp_path, code, driver(stand_in_driver, cuda, ""), "-W", "error")


@pytest.mark.slow
def test_the_doctor_says_why_and_what_to_do(
    tmp_path: pathlib.Path, stand_in_driver: pathlib.Path
) -> None:
    install(tmp_path, jax_bnar.__version__, STAND_IN)
    environment = driver(stand_in_driver, "13.0", "9.0 7.5")
    finished = run(tmp_path, "", "-m", "jax_bnar.doctor", "--json", environment=environment)
    assert finished.returncode == 0, finished.stdout + finished.stderr  # the CPU is the default
    problems = json.loads(finished.stdout)["platforms"]["cuda"]["problems"]
    (found,) = [p for p in problems if "compute capability" in p["reason"]]
    assert found["reason"].startswith("Stand-in GPU 1 has compute capability 7.5")
    assert found["way_out"].startswith("hide this GPU with CUDA_VISIBLE_DEVICES")

    environment = driver(stand_in_driver, "12.4", "9.0")
    finished = run(tmp_path, "", "-m", "jax_bnar.doctor", environment=environment)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert "supports CUDA 12.4, but the kernels are compiled with CUDA 13.0" in finished.stdout
    assert "way out   install a driver for CUDA 13 (version 580 or newer)" in finished.stdout


def test_wheels_contain_ptx_for_newer_devices() -> None:
    """CMake writes PTX for an architecture without the suffix -real; the newest must have it."""
    text = (ROOT / "cmake" / "CudaKernels.cmake").read_text()
    (listed,) = re.findall(r"set\(CMAKE_CUDA_ARCHITECTURES (.*)\)", text)
    *older, newest = listed.split()
    assert newest.isdigit()
    assert all(architecture.endswith("-real") for architecture in older)
    assert [int(a.removesuffix("-real")) for a in older] == [80, 90, 100]
    # make dist leaves the choice to CMake.
    assert "CMAKE_CUDA_ARCHITECTURES" not in (ROOT / ".ci" / "make_dist.py").read_text()


def test_this_build() -> None:
    if targets.cuda is None:
        pytest.skip("this build has no CUDA kernels")
    assert targets.cuda_build == CudaBuild.of(targets.cuda)
    assert targets.cuda_build is not None
    assert set(targets.cuda_build.ptx) <= set(targets.cuda_build.architectures)
    assert jax.default_backend() != "gpu" or targets.has_kernel("forward", "cuda")
