"""The canonical shape (G, N, C, S), which all kernels work on.

G is the number of statistics groups, N the number of elements before the channel axis, C the number
of channels, and S the number of elements after it. An array of any rank and channel axis can be
reshaped to it in row-major order, without moving data: NHWC is (1, N*H*W, C, 1) and NCHW is
(1, N, C, H*W). `num_groups` and `vmap` multiply G.
"""

from typing import NamedTuple


class CanonicalShape(NamedTuple):
    groups: int
    rows: int
    channels: int
    inner: int


def mask_bytes(rows: int, channels: int, inner: int) -> int:
    """Bytes of one group's bit mask: one bit per element, padded to a whole byte."""
    return -(-rows * channels * inner // 8)
