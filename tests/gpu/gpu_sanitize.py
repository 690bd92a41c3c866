"""The program that compute-sanitizer watches: every strategy on a few shapes.

    XLA_PYTHON_CLIENT_ALLOCATOR=platform XLA_FLAGS=--xla_gpu_enable_command_buffer= \
        compute-sanitizer --tool memcheck --error-exitcode 9 python tests/gpu/gpu_sanitize.py

With the argument "few" it runs only one shape of each layout. With these variables each buffer is a
separate allocation; in JAX's memory pool, the sanitizer would miss accesses out of bounds. Values
are checked too, and a wrong one ends the program with status 1. `make gpu` starts it.
"""

import dataclasses
import sys

import conftest  # noqa: F401  JAX as the tests have it
from cases import Case
from gpu_cases import DRY_RUN, STRATEGIES, check, launched, strategy

CASES = [
    Case((8, 14, 14, 136), -1, "bfloat16", save="mask"),
    Case((1031, 72), -1, "float32"),
    Case((5, 3, 7, 65), -1, "float16", save="mask"),
    Case((4, 24, 16, 16), 1, "bfloat16", save="mask", num_groups=2),
    Case((3, 17, 5, 7), 1, "float32"),
    Case((3, 5, 7, 9), -1, "float64"),
]


def main() -> int:
    cases = [CASES[0], CASES[3]] if sys.argv[1:] == ["few"] else CASES
    for case in CASES[-1:] if DRY_RUN else cases:
        for name in STRATEGIES:
            # Kernels need more registers under the sanitizer, so another strategy may be chosen.
            with strategy(name), launched() as kernels:
                check(case)
                check(dataclasses.replace(case, form="dual_bn_add_relu"))
            print(name, case, *sorted(kernels), sep="; ", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
