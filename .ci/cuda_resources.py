"""Prints what each CUDA kernel takes of a multiprocessor, for one architecture.

The build itself refuses a kernel that spills registers (cmake/CudaKernels.cmake); this shows how
far the others are from it.
"""

import concurrent.futures
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).parents[1]
SOURCES = ("cuda/forward.cu", "cuda/backward.cu")


def compile_verbosely(source: str, architecture: str, directory: str) -> str:
    nvcc = os.environ.get("CUDACXX") or shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    command = [nvcc, "-std=c++17", "-O3", f"-arch=sm_{architecture}", "-I", str(ROOT), "-cubin"]
    output = f"{directory}/{pathlib.Path(source).stem}.cubin"
    command += ["-Xptxas=-v", str(ROOT / source), "-o", output]
    finished = subprocess.run(command, capture_output=True, text=True)
    if finished.returncode != 0:
        sys.exit(f"{' '.join(command)}\n{finished.stdout}{finished.stderr}")
    return finished.stdout + finished.stderr


def rows(text: str) -> list[tuple[str, int, int, int]]:
    """(kernel, registers, bytes of spill stores and loads, static shared memory)."""
    found = []
    for block in text.split("Compiling entry function")[1:]:
        name = re.search(r"gpu\d+(\w+?)Kernel(\S*?)EEvN", block) or re.search(
            r"gpu\d+(\w+?)Kernel(\S*?)EEvPK", block
        )
        assert name is not None, block
        element = {"6__half": "f16", "13__nv_bfloat16": "bf16", "f": "f32", "d": "f64"}
        kind = re.match(r"I(6__half|13__nv_bfloat16|f|d)((?:Li\d+E)*)", name[2])
        assert kind is not None, name[2]
        numbers = re.findall(r"Li(\d+)E", kind[2] + "E")
        spilled = sum(map(int, re.findall(r"(\d+) bytes spill", block)))
        registers = int(re.findall(r"Used (\d+) registers", block)[0])
        shared = sum(map(int, re.findall(r"(\d+) bytes smem", block)))
        label = f"{name[1]} {element[kind[1]]} {' '.join(numbers)}".strip()
        found.append((label, registers, spilled, shared))
    return found


def main() -> None:
    architecture = os.environ.get("CUDAARCHS", "90").partition("-")[0]
    print(f"sm_{architecture}: kernel, dtype, elements at once, tiles in registers")
    print(f"{'':32} registers  spilled bytes  static shared bytes")
    total = 0
    with (
        tempfile.TemporaryDirectory() as directory,
        concurrent.futures.ThreadPoolExecutor(len(SOURCES)) as pool,
    ):
        texts = list(pool.map(lambda s: compile_verbosely(s, architecture, directory), SOURCES))
    for text in texts:
        for label, registers, spilled, shared in rows(text):
            print(f"{label:32} {registers:9}  {spilled:13}  {shared:19}")
            total += spilled
    if total:
        sys.exit("a kernel spills registers to memory")


if __name__ == "__main__":
    main()
