"""The names under which users know what private modules define."""

import types
from collections.abc import Mapping
from typing import Any


def show_public_names(namespace: Mapping[str, Any]) -> None:
    """Makes what a public module lists in `__all__` name this module as its home.

    help(), representations, tracebacks of pickles and documentation tools all read `__module__`.
    Pickles so made load after the private modules have moved. A public module passes its own
    `globals()`, after `__all__`.
    """
    for name in namespace["__all__"]:
        if isinstance(namespace[name], (type, types.FunctionType)):
            namespace[name].__module__ = namespace["__name__"]
