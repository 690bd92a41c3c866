"""Prints the XLA_FLAGS with which this JAX compiles for the CPU in the least time.

Half of the tests' time is XLA compiling programs that then run once. An unknown flag ends the
process, and each JAX knows others: those that it refuses are left out.
"""

import os
import subprocess
import sys

FLAGS = (
    # A third of compiling is LLVM's optimisation.
    "--xla_backend_optimization_level=0",
    # jaxlib 0.10 has its older emitters still: 35 ms where the newer ones take 80.
    "--xla_cpu_use_fusion_emitters=false",
    # MLIR checks itself after each pass: a tenth of compiling on jaxlib 0.12.
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
