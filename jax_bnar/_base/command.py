"""Runs a command, whose standard output may end early or be full."""

import os
import sys
from collections.abc import Callable


def run(name: str, command: Callable[[], int]) -> int:
    """The exit code of a command, which is 1 if what it prints cannot be written."""
    try:
        code = command()
        if sys.stdout is not None:
            sys.stdout.flush()
        return code
    except BrokenPipeError:
        # What reads standard output has had enough, such as `head`. Python would complain once
        # more when it flushes the rest at its end (docs.python.org, note on SIGPIPE).
        if sys.stdout is not None:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        if error.filename is not None:
            raise
        print(f"{name}: standard output cannot be written ({error.strerror}).", file=sys.stderr)
        return 1
