"""What compute-sanitizer watches: every strategy on a few shapes. `make gpu` starts it.

    XLA_PYTHON_CLIENT_ALLOCATOR=platform XLA_FLAGS=--xla_gpu_enable_command_buffer= \
        compute-sanitizer --tool memcheck --error-exitcode 9 python tests/gpu_sanitize.py

Each buffer is an allocation of its own then, and not a piece of JAX's pool, within which no access
is out of bounds. Values are checked too, and a wrong one ends the program with status 1.
"""

import sys

import conftest  # noqa: F401  JAX as the tests have it
from cases import Case
from gpu_cases import DRY_RUN, STRATEGIES, check, strategy

CASES = [
    Case((8, 14, 14, 136), -1, "bfloat16", save="mask"),
    Case((1031, 72), -1, "float32"),
    Case((5, 3, 7, 65), -1, "float16", save="mask"),
    Case((4, 24, 16, 16), 1, "bfloat16", save="mask", num_groups=2),
    Case((3, 17, 5, 7), 1, "float32"),
    Case((3, 5, 7, 9), -1, "float64"),
]


def main() -> int:
    for case in CASES[-1:] if DRY_RUN else CASES:
        for name in STRATEGIES:
            with strategy(name):
                check(case)
            print(name, case, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
