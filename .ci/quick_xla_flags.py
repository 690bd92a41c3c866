"""Prints the XLA_FLAGS with which the installed JAX compiles fastest for the CPU.

The tests spend half of their time in XLA, compiling programs that then run once. An unknown flag
aborts the process, and the set of flags differs between JAX versions, so flags that this version
rejects are left out.
"""

import os
import subprocess
import sys

FLAGS = (
    # LLVM's optimisation takes a third of the compile time.
    "--xla_backend_optimization_level=0",
    # jaxlib 0.10 still has the old emitters, which take 35 ms where the new ones take 80.
    "--xla_cpu_use_fusion_emitters=false",
    # A module that is not split for several threads takes 3 to 8 % less, and the workers of pytest
    # keep the cores busy anyway.
    "--xla_cpu_parallel_codegen_split_count=1",
    # MLIR verifies the module after each pass, which takes a tenth of the compile time on jaxlib
    # 0.12.
    "--xla_cpu_emitter_verification_level=0",
)


def known(*flags: str) -> bool:
    return (
        subprocess.run(
            [sys.executable, "-c", "import jax; jax.devices('cpu')"],
            env=os.environ | {"XLA_FLAGS": " ".join(flags)},
            capture_output=True,
        ).returncode
        == 0
    )


def quick_flags() -> str:
    return " ".join(FLAGS if known(*FLAGS) else filter(known, FLAGS))


if __name__ == "__main__":
    print(quick_flags())
