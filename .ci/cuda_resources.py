"""Prints the registers and shared memory that each CUDA kernel uses: cuda_resources.py BUILD-LOG.

The build logs them (-Xptxas=-v in cmake/CudaKernels.cmake) and rejects any kernel that spills
registers; this table shows how close the others come to spilling.
"""

import pathlib
import re
import sys

_ELEMENTS = {"6__half": "f16", "13__nv_bfloat16": "bf16", "f": "f32", "d": "f64"}
_GATES = ("none", "y", "mask", "x", "z")
_FRAME = re.compile(r"bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")


def form_of(name: str) -> str:
    """What a mangled name says of its form, such as "z relu mask", "plain", "mask dz" or "x curve".

    It is empty for a kernel that serves all forms.
    """
    if forward := re.search(r"ForwardFormILb([01])ELb([01])ELb([01])ELb([01])E", name):
        words = zip(("z", "relu", "mask", "curve"), forward.groups(), strict=True)
        return " ".join(word for word, on in words if on == "1") or "plain"
    if backward := re.search(r"BackwardFormIL\S*?GateE(\d)ELb([01])ELb([01])E", name):
        words = zip(("dz", "curve"), backward.groups()[1:], strict=True)
        return " ".join([_GATES[int(backward[1])], *(word for word, on in words if on == "1")])
    if "AnyCurve" in name:
        return "curve"
    return ""


def rows(text: str) -> list[tuple[str, int, int, int]]:
    """Rows of architecture and kernel, registers, bytes of spills, and bytes of shared memory."""
    found = []
    for block in text.split("Compiling entry function")[1:]:
        name = re.search(r"4cuda\d+(\w+?)KernelI(6__half|13__nv_bfloat16|f|d)(\S*)", block)
        assert name is not None, block
        layout = re.search(r"LayoutE(\d)E", name[3])
        width = re.search(r"Li(\d+)E", name[3])
        # The block may end with a warning of the next compilation, about a kernel of that one.
        spilled = sum(map(int, _FRAME.findall(block)[0]))
        registers = int(re.findall(r"Used (\d+) registers", block)[0])
        shared = sum(map(int, re.findall(r"(\d+) bytes smem", block)))
        (architecture,) = re.findall(r"for '(sm_\w+)'", block)
        words = [
            architecture, name[1], _ELEMENTS[name[2]],
            ("last", "first")[int(layout[1])] if layout else "",
            width[1] if width else "", form_of(name[3]),
        ]  # fmt: skip
        found.append((" ".join(filter(None, words)), registers, spilled, shared))
    return found


def main(log: str) -> int:
    found = rows(pathlib.Path(log).read_text())
    print("architecture, kernel, dtype, where the channels are, elements at once, form")
    print(f"{'':44} registers  spilled bytes  static shared bytes")
    for label, registers, spilled, shared in sorted(found):
        print(f"{label:44} {registers:9}  {spilled:13}  {shared:19}")
    if not found:
        print(f"{log} does not mention any compiled CUDA kernel")
        return 1
    if any(spilled for _, _, spilled, _ in found):
        print("a kernel spills registers to memory")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
