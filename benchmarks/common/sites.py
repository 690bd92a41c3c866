"""The BatchNorm sites of ResNet-50 v1.5 and the bytes that each has to move.

ResNet-50 (He et al., arXiv:1512.03385, table 1) on 224x224 images, in the v1.5 variant, where the
stride of a stage's first block sits in its 3x3 convolution and not in its first 1x1 convolution.
So the first BatchNorm of stages 2 to 4 still sees the spatial size of the stage before.

53 BatchNorms: the stem; in each of the 16 bottlenecks (3, 4, 6, 3) two followed by a ReLU and one
that joins the residual before its ReLU; and one without activation on the shortcut of each of the 4
stages. That makes 49 ReLUs, 16 of which join a residual.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal

Form = Literal["bn_relu", "bn_add_relu", "batch_norm"]

_STAGES: Final = ((3, 64), (4, 128), (6, 256), (3, 512))  # (blocks, width of the bottleneck)
_EXPANSION: Final = 4


@dataclass(frozen=True)
class Site:
    """A BatchNorm with what follows it, and how often it occurs in one training step."""

    height: int
    width: int
    channels: int
    form: Form
    count: int = 1

    @property
    def label(self) -> str:
        return f"{self.height}x{self.width}x{self.channels} {self.form}"

    def shape(self, batch: int) -> tuple[int, int, int, int]:
        return (batch, self.height, self.width, self.channels)

    def elements(self, batch: int) -> int:
        return batch * self.height * self.width * self.channels


def _walk(image_size: int) -> Iterator[Site]:
    size = image_size // 2  # the stem's 7x7 convolution, stride 2
    yield Site(size, size, 64, "bn_relu")
    size //= 2  # max pooling
    for stage, (blocks, width) in enumerate(_STAGES):
        for block in range(blocks):
            yield Site(size, size, width, "bn_relu")
            if block == 0 and stage > 0:
                size //= 2
            yield Site(size, size, width, "bn_relu")
            yield Site(size, size, _EXPANSION * width, "bn_add_relu")
            if block == 0:
                yield Site(size, size, _EXPANSION * width, "batch_norm")


def _distinct(sites: Iterator[Site]) -> tuple[Site, ...]:
    return tuple(
        Site(site.height, site.width, site.channels, site.form, count)
        for site, count in Counter(sites).items()
    )


RESNET50_SITES: Final = _distinct(_walk(image_size=224))

# Times that a tensor of x's size crosses memory in one step, forward + backward.
# The scheme of save="y": forward reads x for the statistics, reads x and [z] and writes y; backward
# reduces over dy, x and y and writes [dz], then applies from dz (or dy and y), x and writes dx.
_PASSES_SAVING_Y: Final[dict[Form, int]] = {
    "bn_relu": 3 + 3 + 4,
    "bn_add_relu": 4 + 4 + 3,
    "batch_norm": 3 + 2 + 3,
}
# The same where backward does not read y: without a residual the gate can be recomputed from x,
# with one a bit mask takes its place (not counted here: 1/16 or 1/32 of a tensor, twice).
_PASSES_WITHOUT_Y: Final[dict[Form, int]] = {
    "bn_relu": 3 + 2 + 3,
    "bn_add_relu": 4 + 3 + 3,
    "batch_norm": 3 + 2 + 3,
}


def two_read_bytes(site: Site, batch: int, itemsize: int) -> int:
    """Bytes of the two-read scheme at one occurrence, with the sign of the ReLU read from y."""
    return _PASSES_SAVING_Y[site.form] * site.elements(batch) * itemsize


def two_read_bytes_without_y(site: Site, batch: int, itemsize: int) -> int:
    """Bytes of the two-read scheme at one occurrence, where backward does not read y."""
    return _PASSES_WITHOUT_Y[site.form] * site.elements(batch) * itemsize


# The least: x is read once forward, x and dy once backward, and the statistics wait on chip.
_PASSES_READING_ONCE: Final[dict[Form, int]] = {
    "bn_relu": 2 + 3,
    "bn_add_relu": 3 + 4,
    "batch_norm": 2 + 3,
}


def one_read_bytes(site: Site, batch: int, itemsize: int) -> int:
    """Bytes that any scheme moves at one occurrence; a join keeps a bit mask."""
    elements = site.elements(batch)
    mask = 2 * (elements // 8) if site.form == "bn_add_relu" else 0
    return _PASSES_READING_ONCE[site.form] * elements * itemsize + mask
