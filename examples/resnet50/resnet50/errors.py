"""Errors that the user can fix are reported in one sentence, without a traceback."""

import sys
from collections.abc import Callable


class UserError(Exception):
    """An error whose text says in one sentence what is wrong and how to fix it."""


def run(main: Callable[[], object]) -> int:
    """Runs `main` and returns the exit status: 0, or 2 after a `UserError`."""
    try:
        main()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def first_line(error: BaseException) -> str:
    """The error's type and the first line of its text, to quote inside a sentence."""
    text = str(error).strip().partition("\n")[0].strip().rstrip(".")
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
