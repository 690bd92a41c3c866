"""Options of a ResNet that do not depend on the neural-network library."""

from collections.abc import Mapping
from typing import Any, Final, Literal

Padding = Literal["SAME", "torch"]

# Of 3x3 windows. With strides 2 and an even size "SAME" pads at the end only.
PADDINGS: Final[Mapping[str, Any]] = {"SAME": "SAME", "torch": ((1, 1), (1, 1))}


def choice(field: str, value: Any, choices: Mapping[str, Any]) -> Any:
    """What the value of a field stands for; ValueError for an unknown one."""
    if value not in choices:
        allowed = " or ".join(repr(choice) for choice in choices)
        raise ValueError(f"ResNet: {field} must be {allowed}, got {value!r}.")
    return choices[value]
