"""The script that counts instructions of the kernels' inner loops, on loops made up for it."""

import json
import pathlib
import subprocess
import sys

import pytest
from checkout import ROOT

pytestmark = pytest.mark.one_python

FORWARD = (
    "_ZN8jax_bnar4cuda13ForwardKernelI13__nv_bfloat16LNS0_6LayoutE0ELi8ENS0_11ForwardForm"
    "ILb0ELb1ELb0ELb0EEEEEvNS0_17ForwardParametersE"
)
LOAD = ["LDG.E.128 R4, desc[UR4][R2.64]"]
KEPT = ["LDS.128 R4, [R2]"]
COPY = ["@!PT LDS RZ, [RZ]", "@P0 LDGSTS.E.BYPASS.128 [R2], desc[UR4][R4.64]", "LDGDEPBAR"]
STORE = ["F2FP.BF16.F32.PACK_AB R4, R5, R4"] * 4 + ["STG.E.EF.128 desc[UR4][R2.64], R4"]


def loop(label: int, *instructions: str) -> list[str]:
    body = [*instructions, f"@P0 BRA `(.L_x_{label})"]
    lines = [f"        /*{16 * i:04x}*/                   {text} ;" for i, text in enumerate(body)]
    return [f".L_x_{label}:", *lines]


def run(path: pathlib.Path, *loops: list[str]) -> tuple[int, str]:
    path.write_text("\n".join([f".text.{FORWARD}:", *(line for lines in loops for line in lines)]))
    finished = subprocess.run(
        [sys.executable, ROOT / ".ci/cuda_instructions.py", path], capture_output=True, text=True
    )
    assert finished.stderr == ""
    return finished.returncode, finished.stdout


def test_loops_are_told_apart_and_counted(tmp_path: pathlib.Path) -> None:
    _, printed = run(
        tmp_path / "a.sass",
        loop(1, *LOAD, *["FADD R4, R4, R5"] * 30),
        loop(2, *LOAD, *STORE, *["FFMA R4, R4, R5, R6"] * 33),
        loop(3, *KEPT, *STORE, *["FFMA R4, R4, R5, R6"] * 32),
        # Sums of what copies have brought: a branch waits for them.
        loop(4, "BSSY B0, `(.L_x_9)", "DEPBAR.LE SB0, 0x4", *KEPT * 2, *["FADD R4, R4, R5"] * 67),
        # The same, with copies in the places of what has been used.
        loop(5, "DEPBAR.LE SB0, 0x4", *KEPT, *COPY, *["FADD R4, R4, R5"] * 43),
        loop(6, "DEPBAR.LE SB0, 0x4", *KEPT, *COPY, *STORE, *["FFMA R4, R4, R5, R6"] * 42),
        # Tiles that were kept, for which it need not wait.
        loop(7, *KEPT, *COPY, *STORE, *["FFMA R4, R4, R5, R6"] * 40),
    )
    assert "Forward relu sums                  32.0 \n" in printed
    assert "Forward relu kept sums             36.0 40\n" in printed
    assert "Forward relu memory                40.0 44\n" in printed
    assert "Forward relu shared                39.0 42\n" in printed
    assert "Forward relu copied sums           49.0 51\n" in printed
    assert "Forward relu copied                53.0 54\n" in printed
    assert "Forward relu memory:" not in printed


@pytest.mark.parametrize(
    ("instructions", "fault"),
    [
        (["FFMA R4, R4, R5, R6"] * 43, "Forward relu memory: 50.0 instructions, above 44"),
        (["LDL R4, [R1]"], "spills"),
        (["BSSY B0, `(.L_x_9)"], "no loop without a divergent branch: Forward relu memory"),
    ],
)
def test_faults_are_reported(tmp_path: pathlib.Path, instructions: list[str], fault: str) -> None:
    status, printed = run(tmp_path / "a.sass", loop(1, *LOAD, *STORE, *instructions))
    assert status == 1
    assert fault in printed


def test_counts_are_written_and_compared(tmp_path: pathlib.Path) -> None:
    sass, counts = tmp_path / "a.sass", tmp_path / "counts.json"
    run(sass, loop(1, *LOAD, *STORE, *["FFMA R4, R4, R5, R6"] * 33))
    script = [sys.executable, ROOT / ".ci/cuda_instructions.py", sass]
    subprocess.run([*script, "--output", counts], stdout=subprocess.DEVNULL)
    document = json.loads(counts.read_text())
    assert document["architecture"] == "sm_90"
    assert document["loops"] == {"bfloat16": {"Forward relu memory": 40.0}}

    def compared(count: float) -> str:
        document["loops"]["bfloat16"]["Forward relu memory"] = count
        counts.write_text(json.dumps(document))
        return subprocess.run([*script, "--compare", counts], capture_output=True, text=True).stdout

    assert "counts.json has" not in compared(41.0)
    assert "bfloat16 Forward relu memory: 40.0 instructions, counts.json has 44.0" in compared(44.0)


def test_loops_of_float32_are_told_apart(tmp_path: pathlib.Path) -> None:
    """There are no conversions, and a vector of eight takes two accesses."""
    name = (
        "_ZN8jax_bnar4cuda14BackwardKernelIfLNS0_6LayoutE0ELi8ENS0_12BackwardForm"
        "ILNS_4GateE0ELb1ELb0EEEEEvNS0_18BackwardParametersE"
    )
    stores = ["STG.E.EF.128 desc[UR4][R2.64], R4"] * 2
    sums = [*LOAD * 4, *stores, *["FFMA R4, R4, R5, R6"] * 8, *["FADD R4, R4, R5"] * 20]
    gradient = [*LOAD * 4, *stores, *["FFMA R4, R4, R5, R6"] * 16, *["FADD R4, R4, R5"] * 8]
    sass, counts = tmp_path / "a.sass", tmp_path / "counts.json"
    run(sass, loop(1, *sums), loop(2, *gradient))
    sass.write_text(sass.read_text().replace(FORWARD, name))
    script = [sys.executable, ROOT / ".ci/cuda_instructions.py", sass, "--output", counts]
    subprocess.run(script, stdout=subprocess.DEVNULL)
    assert json.loads(counts.read_text())["loops"] == {
        "float32": {"Backward none dz memory": 31.0, "Backward none dz sums": 35.0}
    }
