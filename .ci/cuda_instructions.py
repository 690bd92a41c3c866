"""Counts the instructions of the kernels' inner loops: cuda_instructions.py FILE...

FILE is an object, a module or a wheel with CUDA code, or the output of `nvdisasm -c` (.sass). The
kernels that read and write eight bfloat16 at once must not take more instructions for them than
here, hold no memory of a thread's own (registers that spilled), and have no divergent branch where
channels come last. Of a file for several architectures, sm_90 counts.

--output writes the counts of all dtypes to a JSON file, for `python -m benchmarks.gpu.model`, and
--compare fails if they are not those of such a file.
"""

import argparse
import collections
import dataclasses
import json
import pathlib
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from collections.abc import Iterator

# Instructions for a vector of eight bfloat16, by (kernel, form, where the vector comes from). Those
# of normalise are about 1.15 times what a loop takes that is compiled alone, by hand for one form:
# 37, 57 and 74. The others are a little above what sm_90 takes with CUDA 13.0. Where copies go on
# in the places of used tiles ("copied"), a loop has some ten to twenty instructions more; memory
# takes longer all the same.
BOUNDS = {
    ("Forward", "statistics", "sums"): 40,
    ("Forward", "relu", "kept sums"): 40,
    ("Forward", "relu", "copied sums"): 51,
    ("Forward", "relu", "shared"): 42,
    ("Forward", "relu", "copied"): 54,
    ("Forward", "relu", "memory"): 44,
    ("Forward", "z relu", "shared"): 65,
    ("Forward", "z relu", "copied"): 75,
    ("Forward", "z relu", "memory"): 65,
    ("Forward", "z relu mask", "shared"): 85,
    ("Forward", "z relu mask", "copied"): 93,
    ("Forward", "z relu mask", "memory"): 85,
    ("Backward", "none", "sums"): 54,
    ("Backward", "mask dz", "sums"): 78,
    ("Backward", "y dz", "sums"): 70,
    ("Backward", "x", "sums"): 75,
    ("Backward", "none", "kept sums"): 54,
    ("Backward", "mask dz", "kept sums"): 77,
    ("Backward", "y dz", "kept sums"): 75,
    ("Backward", "x", "kept sums"): 76,
    ("Backward", "none", "copied sums"): 73,
    ("Backward", "mask dz", "copied sums"): 94,
    ("Backward", "y dz", "copied sums"): 89,
    ("Backward", "x", "copied sums"): 94,
    ("Backward", "none", "shared"): 55,
    ("Backward", "none", "copied"): 80,
    ("Backward", "mask", "copied"): 98,
    ("Backward", "y", "copied"): 93,
    ("Backward", "x", "copied"): 109,
    ("Backward", "none", "memory"): 64,
    ("Backward", "x", "memory"): 84,
    ("DualForward", "statistics", "sums"): 80,
    ("DualForward", "z", "memory"): 72,
    ("DualForward", "z relu", "memory"): 76,
    ("DualForward", "z relu mask", "memory"): 92,
    ("DualBackward", "none", "sums"): 83,
    ("DualBackward", "mask", "sums"): 100,
    ("DualBackward", "x", "sums"): 112,
    ("DualBackward", "none", "memory"): 109,
    ("DualBackward", "mask", "memory"): 127,
    ("DualBackward", "x", "memory"): 140,
}

ARCHITECTURE = "sm_90"
# Another version of ptxas may schedule a loop with a few instructions more or less.
TOLERANCE = 0.05


@dataclasses.dataclass(frozen=True)
class Loop:
    dtype: str
    kernel: str
    form: str
    source: str
    instructions: int
    vectors: int
    spills: int
    branches: int

    @property
    def per_vector(self) -> float:
        return self.instructions / self.vectors


def tool(name: str) -> str | None:
    """On PATH, beside this Python, or in the wheel of that name."""
    scripts = sysconfig.get_path("scripts")
    wheels = pathlib.Path(sysconfig.get_path("purelib"), "nvidia", "cu13", "bin")
    return shutil.which(name) or shutil.which(name, path=f"{scripts}:{wheels}")


def disassembled(path: pathlib.Path) -> Iterator[str]:
    if path.suffix == ".sass":
        yield path.read_text()
        return
    if path.suffix == ".whl":
        with tempfile.TemporaryDirectory() as directory, zipfile.ZipFile(path) as wheel:
            for member in wheel.namelist():
                if pathlib.Path(member).name.startswith("_cuda"):
                    yield from disassembled(pathlib.Path(wheel.extract(member, directory)))
        return
    cuobjdump, nvdisasm = tool("cuobjdump"), tool("nvdisasm")
    assert cuobjdump is not None
    assert nvdisasm is not None
    with tempfile.TemporaryDirectory() as directory:
        subprocess.run(
            [cuobjdump, "--extract-elf", "all", path.resolve()],
            cwd=directory, check=True, stdout=subprocess.DEVNULL,
        )  # fmt: skip
        for cubin in sorted(pathlib.Path(directory).glob(f"*{ARCHITECTURE}*.cubin")):
            command = [nvdisasm, "-c", cubin]
            yield subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def functions(text: str) -> Iterator[tuple[str, list[str]]]:
    """(mangled name, its instructions and labels)."""
    name, lines = "", []
    for line in text.splitlines():
        if begin := re.match(r"\.text\.(\S+):$", line):
            if name:
                yield name, lines
            name, lines = begin[1], []
        elif label := re.match(r"(\.L_x_\d+):", line):
            lines.append(label[1] + ":")
        elif instruction := re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(.*?);", line):
            lines.append(instruction[1].strip())
    if name:
        yield name, lines


def innermost_loops(lines: list[str]) -> list[list[str]]:
    labels = {line[:-1]: i for i, line in enumerate(lines) if line.endswith(":")}
    loops = []
    for i, line in enumerate(lines):
        jump = re.search(r"\bBRA\b.*?(\.L_x_\d+)", line)
        if jump and labels.get(jump[1], i) < i:
            loops.append((labels[jump[1]], i))
    inner = [a for a in loops if not any(a != b and a[0] <= b[0] and b[1] <= a[1] for b in loops)]
    return [[x for x in lines[a : b + 1] if not x.endswith(":")] for a, b in inner]


_DTYPES = {"13__nv_bfloat16": "bfloat16", "6__half": "float16", "f": "float32"}
# Channels last, eight at once: (kernel, dtype, form). Those with two inputs have a kernel for each
# pass, and x2 in the place of z. Kernels with another activation than ReLU, of whose branches a
# loop takes one, are not counted.
_TYPE = rf"KernelI({'|'.join(_DTYPES)})LNS\S*?LayoutE0ELi8E"
_FORWARD = re.compile(
    rf"4cuda\d+(Forward|Normalise|DualNormalise){_TYPE}NS\S*?ForwardFormILb([01])ELb([01])ELb([01])ELb0E"
)
_BACKWARD = re.compile(
    rf"4cuda\d+(Backward|Reduce|Apply|DualReduce|DualApply){_TYPE}NS\S*?BackwardFormIL\S*?GateE(\d)ELb([01])ELb0E"
)
_STATISTICS = re.compile(rf"4cuda\d+(Dual)?Statistics{_TYPE}")


def kernel_of(name: str) -> tuple[str, str, str] | None:
    if forward := _FORWARD.search(name):
        words = zip(("z", "relu", "mask"), forward.groups()[2:], strict=True)
        form = " ".join(word for word, on in words if on == "1") or "none"
        return _DTYPES[forward[2]], forward[1].replace("Normalise", "Forward"), form
    if backward := _BACKWARD.search(name):
        gate = ("none", "y", "mask", "x")[int(backward[3])]
        form = gate + (" dz" if backward[4] == "1" else "")
        return _DTYPES[backward[2]], re.sub("Reduce|Apply", "Backward", backward[1]), form
    if statistics := _STATISTICS.search(name):
        return _DTYPES[statistics[2]], f"{statistics[1] or ''}Forward", "statistics"
    return None


def is_elementwise(
    dtype: str, is_backward: bool, count: collections.Counter[str], wide: collections.Counter[str]
) -> bool:
    """Whether a loop computes what it stores, y or dx; one of sums may store e at most.

    `count` has how often each instruction occurs, and `wide` how often with 16 bytes.
    """
    if wide["STS"] > 0:
        return False
    if dtype == "float32":
        # The elementwise pass of backward has two multiply-adds an element, its sums have one.
        least = 16 if is_backward else 8
        return wide["STG"] > 0 and count["FFMA"] * 2 >= least * wide["STG"]
    return count["F2FP"] >= 4 * wide["STG"] > 0


def loops_of(name: str, lines: list[str]) -> Iterator[Loop]:
    """The loops of a kernel that read or write vectors; none of other functions."""
    kernel = kernel_of(name)
    if kernel is None:
        return
    dtype, direction, form = kernel
    is_dual, is_backward = direction.startswith("Dual"), direction.endswith("Backward")
    # Accesses of 16 bytes to a vector of eight elements.
    words = 2 if dtype == "float32" else 1
    for loop in innermost_loops(lines):
        names = [re.sub(r"^@!?U?P\w+\s+", "", line).split()[0] for line in loop]
        count = collections.Counter(name.split(".")[0] for name in names)
        wide = collections.Counter(name.split(".")[0] for name in names if ".128" in name)
        waits = any(".STRONG" in name for name in names)
        if wide["LDG"] + wide["LDS"] + wide["STG"] == 0 or count["DADD"] > 0 or waits:
            continue  # the merge of partial sums
        elementwise = is_elementwise(dtype, is_backward, count, wide)
        # Copies have brought the tiles, and bring others in their places.
        copies = count["LDGSTS"] > 0
        if not elementwise and wide["LDS"] > 0:
            # e and x, or x.
            arrays = 2 if is_backward else 1
            source = "copied sums" if copies else "kept sums"
            vectors = wide["LDS"] / (words * arrays)
        elif elementwise:
            # dx1 and dx2.
            arrays = 2 if is_dual and is_backward else 1
            source = "memory" if wide["LDS"] == 0 else "copied" if copies else "shared"
            if copies and count["DEPBAR"] == 0:
                continue  # tiles that were kept, and need no gate
            vectors = wide["STG"] / (words * arrays)
        else:
            # e and x, and y, in backward. The statistics of two inputs have a loop for each.
            arrays = (2 + is_dual + form.startswith("y")) if is_backward else 1 + is_dual
            source, vectors = "sums", wide["LDG"] / (words * arrays)
        if vectors == 0:
            continue
        # A wait for copies branches, once for several vectors.
        branches = max(0, count["BSSY"] - (count["DEPBAR"] > 0))
        yield Loop(
            dtype, direction, form, source, len(loop), vectors, count["LDL"] + count["STL"],
            branches,
        )  # fmt: skip


def document_of(best: dict[tuple[str, str, str, str], Loop]) -> dict[str, object]:
    """What benchmarks.gpu.model reads: instructions for a vector, by dtype, kernel and source."""
    loops: dict[str, dict[str, float]] = collections.defaultdict(dict)
    for (dtype, *key), loop in sorted(best.items()):
        loops[dtype][" ".join(key)] = round(loop.per_vector, 2)
    git = subprocess.run(
        ["git", "rev-parse", "--short=12", "HEAD"],
        cwd=pathlib.Path(__file__).parent, stdout=subprocess.PIPE, text=True, check=True,
    )  # fmt: skip
    return {"architecture": ARCHITECTURE, "commit": git.stdout.strip(), "loops": loops}


def differences(best: dict[tuple[str, str, str, str], Loop], path: pathlib.Path) -> Iterator[str]:
    expected = json.loads(path.read_text())["loops"]
    for (dtype, *key), loop in sorted(best.items()):
        name = " ".join(key)
        there = expected.get(dtype, {}).get(name)
        if there is None or abs(loop.per_vector - there) > TOLERANCE * there:
            yield (
                f"{dtype} {name}: {loop.per_vector:.1f} instructions, {path.name} has {there};"
                " write it again with --output"
            )


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description="Counts the instructions of inner loops.")
    parser.add_argument("paths", nargs="+")
    parser.add_argument("--output", type=pathlib.Path, help="JSON file for the counts")
    parser.add_argument("--compare", type=pathlib.Path, help="JSON file that must have these")
    options = parser.parse_args(arguments)
    paths = options.paths
    if not all(path.endswith(".sass") for path in paths):
        missing = [name for name in ("cuobjdump", "nvdisasm") if tool(name) is None]
        if missing:
            print(
                f"instructions were not counted: {' and '.join(missing)} not found on PATH; "
                "`pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm`"
            )
            return 0
    loops = [
        loop
        for path in paths
        for text in disassembled(pathlib.Path(path))
        for name, lines in functions(text)
        for loop in loops_of(name, lines)
    ]
    # The loop without a question for each vector; the one that ends it is not counted.
    fastest: dict[tuple[str, str, str, str], Loop] = {}
    for loop in loops:
        name = loop.dtype, loop.kernel, loop.form, loop.source
        if loop.branches == 0 and (
            name not in fastest or loop.per_vector < fastest[name].per_vector
        ):
            fastest[name] = loop
    best = {key[1:]: loop for key, loop in fastest.items() if key[0] == "bfloat16"}
    wrong = [f"{loop} spills" for loop in loops if loop.spills]
    print("instructions for eight bfloat16, channels last, and the most that they may be")
    for key in sorted({*best, *BOUNDS}):
        loop, bound = best.get(key), BOUNDS.get(key)
        counted = f"{loop.per_vector:6.1f}" if loop else "     -"
        print(f"  {' '.join(key):32} {counted} {bound or ''}")
        if bound is not None and loop is None:
            wrong.append(f"no loop without a divergent branch: {' '.join(key)}")
        elif bound is not None and loop is not None and loop.per_vector > bound:
            wrong.append(f"{' '.join(key)}: {loop.per_vector:.1f} instructions, above {bound}")
    if options.output is not None:
        options.output.write_text(json.dumps(document_of(fastest), indent=1) + "\n")
    if options.compare is not None:
        wrong += differences(fastest, options.compare)
    for line in wrong:
        print(line)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
