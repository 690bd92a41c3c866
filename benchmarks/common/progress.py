"""Lines of progress on standard error, for steps that take more than a moment."""

import sys


def say(sentence: str) -> None:
    """Prints what is under way, at once; results alone go to standard output."""
    print(sentence, file=sys.stderr, flush=True)
