"""The devices that the model knows, as their drivers describe them.

Latencies and shares are the planner's own (cuda/host/cost.h) and the same for all devices. Here are
only attributes, from NVIDIA's data sheets and tuning guides; the memory rate is what the driver's
clock and bus width come to.
"""

from dataclasses import dataclass
from typing import Final, Literal

DeviceName = Literal["h200", "h100", "a100", "l4"]

_KIB: Final = 1024
_MIB: Final = 1024 * _KIB


@dataclass(frozen=True)
class Device:
    """The attributes of a device.

    Attributes:
        compute_capability: times 10.
        memory_mhz: the memory clock; data come at both of its edges.
        memory_bits: the width of the memory bus.
        clock_ghz: the highest clock of the multiprocessors, at which instructions are priced.
        single_to_double: the rate of float over that of double.
    """

    title: str
    compute_capability: int
    multiprocessors: int
    shared_kib: int
    l2_mib: int
    memory_mhz: int
    memory_bits: int
    clock_ghz: float
    single_to_double: int

    @property
    def bytes_per_us(self) -> float:
        return 2 * self.memory_mhz * self.memory_bits / 8

    def attributes(self) -> dict[str, float]:
        """What the planner reads from a driver (QueryDevice in cuda/launch/launch.cu)."""
        return {
            "multiprocessors": self.multiprocessors,
            "shared_bytes_per_multiprocessor": self.shared_kib * _KIB,
            "shared_bytes_per_block": (self.shared_kib - 1) * _KIB,
            "reserved_shared_bytes_per_block": _KIB,
            "l2_bytes": self.l2_mib * _MIB,
            "cooperative": 1,
            "clusters": int(self.compute_capability >= 90),
            "memory_bytes_per_microsecond": self.bytes_per_us,
            "single_to_double_ratio": self.single_to_double,
        }


DEVICES: Final[dict[DeviceName, Device]] = {
    "h200": Device("H200 SXM", 90, 132, 228, 60, 3201, 6016, 1.98, 2),
    "h100": Device("H100 SXM", 90, 132, 228, 50, 2619, 5120, 1.98, 2),
    "a100": Device("A100 80GB SXM", 80, 108, 164, 40, 1593, 5120, 1.41, 2),
    "l4": Device("L4", 89, 58, 100, 48, 6251, 192, 2.04, 64),
}
