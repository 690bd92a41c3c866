"""The kernels' C++ tests, which only the slow tests build, still fit the kernels' interfaces."""

import pytest
from checkout import ROOT
from native_build import optional_tool, run


@pytest.mark.slow
@pytest.mark.one_python
def test_the_native_tests_compile() -> None:
    run(
        optional_tool("g++", "g++", "CI"), "-std=c++17", "-Wall", "-Wextra", "-Werror",
        "-fsyntax-only", "-DBNAR_ISA=baseline",
        f"-I{ROOT}", f"-I{ROOT}/tests/cuda_emulation/include",
        *sorted((ROOT / "tests/native").glob("*.cc")),
    )  # fmt: skip
