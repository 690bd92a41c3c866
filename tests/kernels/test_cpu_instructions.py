"""Vectors and pointers stay in registers in the inner loops of the CPU kernels.

And the script that asks llvm-mca how long these loops take.
"""

import pathlib
import shutil
import subprocess
import sys
from collections.abc import Callable

import pytest
from checkout import ROOT
from native_build import PATH, build, check_vectors, run

pytestmark = pytest.mark.one_python

SCRIPT = ROOT / ".ci" / "cpu_instructions.py"
AVX2 = ("-mavx2", "-mfma", "-mf16c", "-DBNAR_ISA=avx2")
KERNEL = """
#include <cstdint>
#include "cpu/isa/simd_memory.h"
namespace jax_bnar::cpu::avx2 {
%s
}
"""


# Those for aarch64 are among what test_native.py builds.
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("compiler", ["g++", pytest.param("clang++", marks=pytest.mark.weekly)])
def test_every_kernel_keeps_its_vectors_in_registers(compiler: str) -> None:
    if shutil.which(compiler, path=PATH) is None:
        pytest.skip(f"{compiler} is missing")
    isas = ["baseline", "avx2", "avx512", "avx512bf16"]
    options = [f"-DCMAKE_CXX_COMPILER={compiler}"]
    targets = [f"bnar_tiles_{isa}" for isa in isas]
    check_vectors(build(f"objects-{compiler.rstrip('+')}", options, targets), isas)


@pytest.mark.slow
@pytest.mark.weekly
@pytest.mark.timeout(1800)
def test_clang_builds_the_module() -> None:
    """macOS has no other compiler; what only GCC accepts would be found there first."""
    if shutil.which("clang++", path=PATH) is None:
        pytest.skip("clang++ is missing")
    pytest.importorskip("nanobind")
    options = ["-DCMAKE_CXX_COMPILER=clang++", "-DJAX_BNAR_MODULE=ON", "-DJAX_BNAR_CUDA=OFF"]
    directory = build(
        "objects-clang", [*options, f"-DPython_EXECUTABLE={sys.executable}"], ["_native"]
    )
    assert list(directory.glob("_native*.so"))


def compiled_for_avx2(directory: pathlib.Path, source: pathlib.Path, *options: str) -> pathlib.Path:
    compiled = directory / f"{source.stem}.o"
    run(
        "g++", "-std=c++17", "-O3", "-fPIC", "-fno-loop-unroll-and-jam", *AVX2, *options,
        "-I", ROOT, "-c", source, "-o", compiled,
    )  # fmt: skip
    return compiled


def judged(directory: pathlib.Path, source: pathlib.Path, *options: str) -> tuple[int, str]:
    """What the script says of a source."""
    compiled = compiled_for_avx2(directory, source, *options)
    finished = subprocess.run([sys.executable, SCRIPT, compiled], capture_output=True, text=True)
    assert finished.stderr == ""
    return finished.returncode, finished.stdout


@pytest.fixture
def kernel(tmp_path: pathlib.Path) -> Callable[[str], tuple[int, str]]:
    def judge(body: str) -> tuple[int, str]:
        source = tmp_path / "made_up.cc"
        source.write_text(KERNEL % body)
        return judged(tmp_path, source)

    return judge


def test_a_plain_loop_is_right(kernel: Callable[[str], tuple[int, str]]) -> None:
    status, printed = kernel(
        """void Double(float* x, int64_t n) {
          for (int64_t i = 0; i < n; i += 16) Store(x + i, Round<float>(Load(x + i) + Load(x + i)));
        }"""
    )
    assert (status, printed) == (
        0,
        "avx2: 1 loops; 0 move vectors to or from the stack; 0 wrong\n",
    )


def test_an_object_without_loops_is_an_error(kernel: Callable[[str], tuple[int, str]]) -> None:
    assert kernel("int Nothing() { return 0; }")[0] == 1


def test_a_vector_in_pieces_is_found(kernel: Callable[[str], tuple[int, str]]) -> None:
    status, printed = kernel(
        """void Pieces(float* x, int64_t n) {
          for (int64_t i = 0; i < n; i += 8) {
            volatile double halves[4];
            halves[0] = x[i];
            __m256 v;
            asm volatile("vmovups %1, %0" : "=x"(v) : "m"(halves));
            asm volatile("vmovaps %%xmm1, %0" : "=m"(halves));
            _mm256_storeu_ps(x + i, v);
          }
        }"""
    )
    assert status == 1
    assert "1 loads of pieces" in printed


def test_a_pointer_that_is_loaded_again_is_found(
    kernel: Callable[[str], tuple[int, str]],
) -> None:
    status, printed = kernel(
        """struct Arrays { float* volatile x; };
        void Again(const Arrays& arrays, int64_t n) {
          for (int64_t i = 0; i < n; i += 16) {
            float* x = arrays.x;
            Store(x + i, Round<float>(Load(x + i) + Load(x + i)));
          }
        }"""
    )
    assert status == 1
    assert "1 loads of pointers, 0 calls" in printed


def test_a_call_for_each_vector_is_found(kernel: Callable[[str], tuple[int, str]]) -> None:
    status, printed = kernel(
        """void Other(float*);
        void Calls(float* x, int64_t n) {
          for (int64_t i = 0; i < n; i += 16) {
            Store(x + i, Round<float>(Load(x + i) + Load(x + i)));
            Other(x + i);
          }
        }"""
    )
    assert status == 1
    assert "1 calls" in printed


@pytest.mark.slow
def test_vectors_that_are_copied_whole_are_found(tmp_path: pathlib.Path) -> None:
    """The header as it was once: GCC moved each vector through the stack in pieces of 16 bytes."""
    header = (ROOT / "cpu" / "isa" / "simd_memory.h").read_text()
    begin = header.index("template <typename T>\nBNAR_INLINE Stored<T> LoadStored(")
    end = header.index("\n}\n", begin) + 3
    whole = """template <typename T>
BNAR_INLINE Stored<T> LoadStored(const T* p) {
  Stored<T> r;
  std::memcpy(static_cast<void*>(&r), p, sizeof(r));
  return r;
}
"""
    changed = tmp_path / "cpu" / "isa" / "simd_memory.h"
    changed.parent.mkdir(parents=True)
    changed.write_text(header[:begin] + whole + header[end:])
    # A quoted include looks beside the source first, and this kernel names the whole path.
    for name in ("rows_normalise.cc", "rows.h", "elements.h", "inputs.h"):
        shutil.copy(ROOT / "cpu" / "isa" / name, changed.parent)
    source = changed.parent / "rows_normalise.cc"
    status, printed = judged(tmp_path, source, "-I", str(tmp_path))
    assert status == 1
    assert "loads of pieces" in printed
    assert judged(tmp_path, ROOT / "cpu" / "isa" / "rows_normalise.cc")[0] == 0


@pytest.mark.parametrize(
    ("value", "is_slower"),
    [("Load(x + i)", False), ("Load(x + i) * a * a * a * a * a * a * a * a", True)],
)
def test_arithmetic_is_told_from_loads_and_stores(
    tmp_path: pathlib.Path, value: str, is_slower: bool
) -> None:
    tool = next((t for t in ("llvm-mca-19", "llvm-mca") if shutil.which(t, path=PATH)), None)
    if tool is None:
        pytest.skip("llvm-mca is missing (Debian: llvm-19)")
    source = tmp_path / "made_up.cc"
    loop = """void Loop(float* y, const float* x, const Vec<float>& factor, int64_t n) {
      const Vec<float> a = factor;
      for (int64_t i = 0; i < n; i += 16) Store(y + i, Round<float>(%s));
    }"""
    source.write_text(KERNEL % (loop % value))
    compiled = compiled_for_avx2(tmp_path, source)
    script = (sys.executable, ROOT / ".ci" / "cpu_cycles.py", "--cpu", "znver3", "--tool", tool)
    finished = subprocess.run([*script, compiled], capture_output=True, text=True)
    assert finished.stderr == ""
    isa, kernel, _, loops, cycles, memory, *_ = finished.stdout.splitlines()[1].split()
    assert (isa, kernel, loops) == ("avx2", "made_up", "1")
    assert (float(cycles) > 1.5 * float(memory)) == is_slower
