"""Prints the registers and shared memory that each CUDA kernel uses: cuda_resources.py BUILD-LOG.

The build logs them (-Xptxas=-v in cmake/CudaKernels.cmake) and rejects any kernel that spills
registers; this table shows how close the others come to spilling.
"""

import pathlib
import re
import sys


def rows(text: str) -> list[tuple[str, int, int, int]]:
    """Rows of architecture and kernel, registers, bytes of spills, and bytes of shared memory."""
    found = []
    for block in text.split("Compiling entry function")[1:]:
        name = re.search(r"4cuda\d+(\w+?)Kernel(\S*?)EEvN", block) or re.search(
            r"4cuda\d+(\w+?)Kernel(\S*?)EEvPK", block
        )
        assert name is not None, block
        element = {"6__half": "f16", "13__nv_bfloat16": "bf16", "f": "f32", "d": "f64"}
        kind = re.match(r"I(6__half|13__nv_bfloat16|f|d)((?:Li\d+E)*)", name[2])
        assert kind is not None, name[2]
        numbers = re.findall(r"Li(\d+)E", kind[2] + "E")
        spilled = sum(map(int, re.findall(r"(\d+) bytes spill", block)))
        registers = int(re.findall(r"Used (\d+) registers", block)[0])
        shared = sum(map(int, re.findall(r"(\d+) bytes smem", block)))
        (architecture,) = re.findall(r"for '(sm_\w+)'", block)
        label = f"{architecture} {name[1]} {element[kind[1]]} {' '.join(numbers)}".strip()
        found.append((label, registers, spilled, shared))
    return found


def main(log: str) -> int:
    found = rows(pathlib.Path(log).read_text())
    print("architecture, kernel, dtype, elements at once, tiles in registers")
    print(f"{'':36} registers  spilled bytes  static shared bytes")
    for label, registers, spilled, shared in sorted(found):
        print(f"{label:36} {registers:9}  {spilled:13}  {shared:19}")
    if not found:
        print(f"{log} does not mention any compiled CUDA kernel")
        return 1
    if any(spilled for _, _, spilled, _ in found):
        print("a kernel spills registers to memory")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
