"""Mutation tests: the kernels' tests must fail on each deliberately broken CUDA kernel.

The kernels run in the host emulation (tests/cuda_emulation) and are tested by
tests/native/cuda_kernels_test.cc, but here a copy of their sources has one mistake.
"""

import concurrent.futures
import os
import pathlib
import shutil
import subprocess
import sys

import pytest
from checkout import ROOT
from cuda_mutations import MUTATIONS
from tiers import covering

pytestmark = pytest.mark.one_python
slow = pytest.mark.slow

FLAGS = ("-std=c++17", "-fno-strict-aliasing", "-w")
INCLUDE = ("-I", str(ROOT), "-I", str(ROOT / "tests/cuda_emulation/include"))
KERNELS = tuple(
    f"cuda/launch/{direction}_{element}.cu"
    for direction in ("forward", "backward", "dual")
    for element in ("f16", "bf16", "f32", "f64")
)
OTHERS = (
    "cuda/launch/backward.cu",
    "cuda/launch/forward.cu",
    "cuda/launch/launch.cu",
    "cuda/launch/launch_counts.cc",
    "cuda/host/cost.cc",
    "cuda/host/known_plans.cc",
    "cuda/host/plan.cc",
    "cuda/host/settings.cc",
    "cuda/host/tiling.cc",
    "cuda/host/workspace.cc",
    "tests/native/cuda_kernels_test.cc",
    "tests/native/expectations.cc",
    "tests/native/operation_checks.cc",
)
# A mutant takes a quarter of a minute, so before each change only a sample is compiled, which has
# all pairs of what they differ in.
_VARIED = ("header", "kernels", "strategy", "shapes", "element")
SAMPLE = covering(
    [{name: sys.intern(getattr(each, name)) for name in _VARIED} for each in MUTATIONS.values()], 2
)
SEEDS = ("0", "1")  # the two run in opposite orders: one may show what the other hides


def compile_source(source: pathlib.Path, target: pathlib.Path, *include: str) -> None:
    compiler = os.environ.get("CXX", "g++")
    # Kernels take longer to compile than to run, unlike what emulates and checks them.
    optimise = "-O0" if source.suffix == ".cu" else "-O1"
    options = (*FLAGS, optimise, *include, *INCLUDE)
    command = [compiler, "-x", "c++", *options, "-c", str(source), "-o", str(target)]
    finished = subprocess.run(command, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr


def link(objects: list[pathlib.Path], program: pathlib.Path) -> None:
    compiler = os.environ.get("CXX", "g++")
    command = [compiler, *map(str, objects), "-o", str(program), "-lpthread"]
    finished = subprocess.run(command, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr


def passes(program: pathlib.Path, strategy: str, shapes: str) -> bool:
    return all(
        subprocess.run(
            [program, strategy, shapes],
            env=os.environ | {"JAX_BNAR_EMULATION_SEED": seed},
            capture_output=True,
            timeout=300,
        ).returncode
        == 0
        for seed in SEEDS
    )


@pytest.fixture(scope="module")
def objects(tmp_path_factory: pytest.TempPathFactory) -> dict[str, pathlib.Path]:
    """Object files of the correct program, by source."""
    directory = tmp_path_factory.mktemp("objects")
    emulation = sorted((ROOT / "tests/cuda_emulation").glob("*.cc"))
    sources = [ROOT / name for name in (*KERNELS, *OTHERS)] + emulation
    targets = {str(s.relative_to(ROOT)): directory / f"{i}.o" for i, s in enumerate(sources)}
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda name: compile_source(ROOT / name, targets[name]), targets))
    return targets


@pytest.mark.parametrize("name", MUTATIONS)
def test_the_mistake_has_one_place(name: str) -> None:
    mutation = MUTATIONS[name]
    text = (ROOT / "cuda/device" / mutation.header).read_text()
    assert text.count(mutation.right) == 1, "the sources have changed: adapt the mutation"


@slow
# With all shapes, the native tests run them (test_native.py).
@pytest.mark.parametrize(
    ("strategy", "shapes"),
    [("auto", "few"), ("on_chip", "few"), ("on_chip", "stream"), ("on_chip", "many"),
     ("cluster", "all"), ("two_kernels", "few")],
)  # fmt: skip
def test_unbroken_kernels_pass(
    strategy: str, shapes: str, objects: dict[str, pathlib.Path], tmp_path: pathlib.Path
) -> None:
    program = tmp_path / "unbroken"
    link(list(objects.values()), program)
    assert passes(program, strategy, shapes)


@slow
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if index in SAMPLE else pytest.mark.weekly)
        for index, name in enumerate(MUTATIONS)
    ],
)
def test_broken_kernels_are_caught(
    name: str, objects: dict[str, pathlib.Path], tmp_path: pathlib.Path
) -> None:
    mutation = MUTATIONS[name]
    shutil.copytree(ROOT / "cuda", tmp_path / "cuda")
    header = tmp_path / "cuda/device" / mutation.header
    header.write_text(header.read_text().replace(mutation.right, mutation.wrong))

    source = f"cuda/launch/{mutation.kernels}_{mutation.element}.cu"
    broken = tmp_path / "broken.o"
    compile_source(tmp_path / source, broken, "-I", str(tmp_path))
    program = tmp_path / "broken"
    # It comes first, because of functions that several objects have the linker takes the first.
    others = [path for name, path in objects.items() if name != source]
    link([broken, *others], program)
    assert not passes(program, mutation.strategy, mutation.shapes)
