"""The script that reads registers and spills from the log of a build, on a log made up for it."""

import pathlib
import subprocess
import sys

import pytest
from checkout import ROOT

pytestmark = pytest.mark.one_python

KERNEL = (
    "_ZN8jax_bnar4cuda14BackwardKernelI{element}LNS0_6LayoutE0ELi8ENS0_12BackwardForm"
    "ILNS_4GateE3ELb0ELb{curve}EEEEEvNS0_18BackwardParametersE"
)
BFLOAT16, FLOAT32 = (
    KERNEL.format(element=element, curve=curve)
    for element, curve in (("13__nv_bfloat16", 1), ("f", 0))
)
# ptxas has warnings before all else that it says of a source.
WARNING = (
    "ptxas warning : Registers are spilled to local memory in function '{name}', 96 bytes spill"
    " stores, 64 bytes spill loads\n"
)


def properties(name: str, registers: int, stores: int = 0, loads: int = 0) -> str:
    return (
        f"ptxas info    : Compiling entry function '{name}' for 'sm_100'\n"
        f"ptxas info    : Function properties for {name}\n"
        f"    0 bytes stack frame, {stores} bytes spill stores, {loads} bytes spill loads\n"
        f"ptxas info    : Used {registers} registers, used 1 barriers\n"
    )


def run(path: pathlib.Path, log: str) -> tuple[int, list[list[str]]]:
    """The exit status, and the words of the lines that are about sm_100 or that end it."""
    path.write_text(log)
    script = [sys.executable, ROOT / ".ci/cuda_resources.py", path]
    finished = subprocess.run(script, capture_output=True, text=True)
    assert finished.stderr == ""
    return finished.returncode, [line.split() for line in finished.stdout.splitlines()[2:]]


def test_registers_of_each_kernel_are_listed(tmp_path: pathlib.Path) -> None:
    status, lines = run(tmp_path / "log", properties(BFLOAT16, 99) + properties(FLOAT32, 128))
    assert status == 0
    assert lines == [
        ["sm_100", "Backward", "bf16", "last", "8", "x", "curve", "99", "0", "0"],
        ["sm_100", "Backward", "f32", "last", "8", "x", "128", "0", "0"],
    ]


def test_a_spill_belongs_to_the_kernel_that_has_it(tmp_path: pathlib.Path) -> None:
    second = WARNING.format(name=FLOAT32) + properties(FLOAT32, 128, 96, 64)
    status, lines = run(tmp_path / "log", properties(BFLOAT16, 99) + second)
    assert status == 1
    assert lines[0][-3:] == ["99", "0", "0"]
    assert lines[1][-3:] == ["128", "160", "0"]


def test_a_log_without_kernels_is_an_error(tmp_path: pathlib.Path) -> None:
    status, _ = run(tmp_path / "log", "ninja: no work to do.\n")
    assert status == 1
