"""The one shape that kernels and rules know: (G, N, C, S).

G statistics groups, N elements before the channel axis, C channels, S elements after it. Any rank
and axis reach it by a row-major reshape, which moves no data: NHWC is (1, N*H*W, C, 1), NCHW is
(1, N, C, H*W), `num_groups` and `vmap` multiply G.
"""

from typing import NamedTuple


class CanonicalShape(NamedTuple):
    groups: int
    rows: int
    channels: int
    inner: int


def mask_bytes(rows: int, channels: int, inner: int) -> int:
    """Bytes of one group's bit mask: one bit an element, padded to a whole byte."""
    return -(-rows * channels * inner // 8)
