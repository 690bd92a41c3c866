"""The microbenchmark of `make gpu` without a GPU: what follows from times, and that it compiles."""

import json
from pathlib import Path
from typing import Any

import pytest

for _package in ("flax", "rich", "tyro"):
    pytest.importorskip(_package)

from benchmarks.common.kernels import planner  # noqa: E402
from benchmarks.gpu.micro import __main__ as command  # noqa: E402
from benchmarks.gpu.micro import build  # noqa: E402
from benchmarks.gpu.micro.constants import constants_of, findings  # noqa: E402
from benchmarks.gpu.model import __main__ as model  # noqa: E402

pytestmark = pytest.mark.one_python

MIB = 2**20


def measured() -> dict[str, Any]:
    """A made-up device of 100 multiprocessors that moves 1000 bytes a nanosecond at most.

    A copy by the driver reaches 0.9 of that, and ours 0.9 of the driver's. Lines that lie apart are
    read as fast, and copied at 0.95 of that rate; halves of them are read and copied at 0.8 of the
    rate of lines. L2 has 40 MiB, keeps 24 MiB of whole lines, and answers four times as fast as
    memory.
    """
    rows: list[dict[str, Any]] = [{"what": "memcpy", "bytes": 9e8, "us": 1e3}]
    for stride in (128, 512, 2048):
        for piece in (64, 128, 256):
            if piece <= stride:
                for what in ("read", "copy"):
                    rate = 810e3 * (0.8 if piece == 64 else 1)
                    if what == "copy" and piece < 256 and stride > 128:
                        rate *= 0.95
                    rows.append(
                        {
                            "what": what,
                            "piece": piece,
                            "stride": stride,
                            "bytes": 8e8,
                            "us": 8e8 / rate,
                        }
                    )
    # A load takes 0.8 us: 100 multiprocessors with 4096 bytes in flight read 512 kB in a us.
    for flight, rate in ((4096, 512e3), (8192, 790e3), (32768, 810e3)):
        rows.append(
            {"what": "in_flight", "bytes_in_flight": flight, "bytes": 8e8, "us": 8e8 / rate}
        )
    rows.append({"what": "spread", "late_us": 0.6, "us": 12.0})
    for cooperative in (0, 1):
        for shared, alternating, us in ((0, 0, 1.0), (115712, 0, 1.2), (115712, 1, 2.0)):
            rows.append(
                {
                    "what": "kernel",
                    "cooperative": cooperative,
                    "shared_bytes": shared,
                    "alternating": alternating,
                    "us": us + 2 * cooperative,
                }
            )
    for name, us in (("warm", 1.6), ("cold", 3.0), ("prefetched", 1.7)):
        rows.append({"what": f"messages_{name}", "team": 198, "us": us})
    for piece, kept in ((64, 12 * MIB), (128, 24 * MIB)):
        for mib in (8, 16, 32):
            size = mib * MIB
            cold = size / 810e3
            hit = min(1, kept / size)
            rows.append(
                {
                    "what": "again",
                    "piece": piece,
                    "bytes": size,
                    "cold_us": 2 + cold,
                    "us": 2 + cold * (1 - hit) + cold / 4 * hit,
                }
            )
    rows += [{"what": "launch", "us": 2.0}, {"what": "attribute MemoryClockRate", "us": 40.0}]
    device = {"name": "made up", "multiprocessors": 100, "l2_bytes": 40 * MIB, "bytes_per_us": 1e6}
    return {"device": device, "measured": rows}


def test_constants_follow_from_times() -> None:
    constants = constants_of(measured())
    assert constants == pytest.approx(
        {
            "copy_share": 0.9,
            "kernel_share": 0.9,
            "line_share": 0.95,
            "narrow_share": 0.8 * 0.95,
            "memory_latency": 0.8,
        }
    )
    # The planner has all of them.
    assert set(constants) <= set(planner().cuda_cost_model())


def test_what_is_no_constant_is_told() -> None:
    text = "\n".join(findings(measured()))
    assert "read, GB/s by bytes of a piece, a piece in 512: 64: 648, 128: 810, 256: 810" in text
    assert "copy, GB/s by bytes of a piece, a piece in 512: 64: 616, 128: 770, 256: 810" in text
    assert "4 KB: 512, 8 KB: 790, 32 KB: 810" in text
    assert "warm 1.60, cold 3.00, prefetched 1.70" in text
    assert "the last of blocks with equal shares, us after their median: 0.60 of 12.0" in text
    assert "L2 keeps 24 MiB of whole lines and 12 MiB of half lines" in text
    assert "cooperative 113 KB in turn with a plain one 4.00" in text
    assert "MemoryClockRate 40.0" in text


def test_the_model_takes_what_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "find_nvcc", lambda: "nvcc")
    monkeypatch.setattr(command, "measure", lambda nvcc, seconds: measured())
    output = tmp_path / "micro.json"
    assert command.main(["--output", str(output)]) == 0
    document = json.loads(output.read_text())
    assert document["complete"]
    assert document["summary"][0].startswith("constants: copy_share=0.9 ")
    assert document["summary"][0] in capsys.readouterr().out
    given = model.main(["--measured-constants", str(output), "--constants", "barrier=2"])
    assert given["constants"]["narrow_share"] == pytest.approx(0.8 * 0.95)
    assert given["constants"]["barrier"] == 2
    other = tmp_path / "other.json"
    other.write_text("{}")
    with pytest.raises(SystemExit, match="has no `constants`: expected what the step `micro`"):
        model.main(["--measured-constants", str(other)])


def test_failures_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = tmp_path / "micro.json"
    monkeypatch.setattr(command, "find_nvcc", lambda: None)
    assert command.main(["--output", str(output)]) == 1
    assert "nvcc is neither on PATH" in json.loads(output.read_text())["errors"][0]
    monkeypatch.setattr(command, "find_nvcc", lambda: "/no/such/nvcc")
    assert command.main(["--output", str(output)]) == 1
    assert "FileNotFoundError" in json.loads(output.read_text())["errors"][0]


@pytest.mark.parametrize(
    ("end", "stopped"),
    [("sleep 60", "no end within 1 s"), ("echo no message >&2; exit 3", "exit status 3: no mess")],
)
def test_what_was_measured_before_the_end_is_kept(
    end: str, stopped: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program that prints as main.cu does, and comes to its end while it prints the third row."""
    program, output = tmp_path / "micro", tmp_path / "micro.json"
    whole = measured()
    rows = ",\n".join(json.dumps(row) for row in whole["measured"][:3])
    head = json.dumps({"device": whole["device"]}).removesuffix("}")
    (tmp_path / "printed").write_text(f'{head},\n"measured": [\n{rows[:-9]}')
    program.write_text(f"#!/bin/sh\ncat '{tmp_path / 'printed'}'\n{end}\n")
    program.chmod(0o755)
    monkeypatch.setattr(command, "find_nvcc", lambda: "nvcc")
    monkeypatch.setattr(command, "measure", lambda nvcc, seconds: command.run(program, 1))
    assert command.main(["--output", str(output)]) == 1
    document = json.loads(output.read_text())
    assert document["device"] == whole["device"]
    assert document["measured"] == whole["measured"][:2]
    assert stopped in document["errors"][0]
    assert "2 measurements are kept" in document["errors"][0]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_it_compiles_without_warnings(tmp_path: Path) -> None:
    nvcc = build.find_nvcc()
    if nvcc is None:
        pytest.skip("nvcc is not installed")
    program = tmp_path / "micro"
    build.compile_micro(nvcc, program, "sm_90")
    assert program.stat().st_size > 100_000
