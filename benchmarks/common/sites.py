"""The BatchNorm sites of ResNet-50 v1.5, and the bytes that each has to move.

This is ResNet-50 (He et al., arXiv:1512.03385, table 1) on 224x224 images, in the v1.5 variant,
where a stage's first block has its stride in the 3x3 convolution and not in the first 1x1
convolution. The first BatchNorm of stages 2 to 4 therefore still has the spatial size of the
previous stage.

There are 53 BatchNorms: the stem's; in each of the 16 bottlenecks (3, 4, 6, 3) two followed by a
ReLU and one followed by the addition of the residual and a ReLU; and one without activation on the
shortcut of each of the 4 stages. That makes 49 ReLUs, 16 of which follow a residual addition.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final, Literal

FormOfOneInput = Literal["bn_relu", "bn_add_relu", "batch_norm"]
Form = Literal[FormOfOneInput, "dual_bn_add_relu"]

_STAGES: Final = ((3, 64), (4, 128), (6, 256), (3, 512))  # (blocks, width of the bottleneck)
_EXPANSION: Final = 4


@dataclass(frozen=True)
class Site:
    """A BatchNorm and what follows it, with the number of times it occurs in a training step."""

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


def _joined(sites: tuple[Site, ...]) -> Iterator[Site]:
    shortcuts = {site.label.split()[0]: site for site in sites if site.form == "batch_norm"}
    for site in sites:
        shortcut = shortcuts.get(site.label.split()[0])
        if site.form == "bn_add_relu" and shortcut is not None:
            yield replace(shortcut, form="dual_bn_add_relu")
            yield replace(site, count=site.count - shortcut.count)
        elif site.form != "batch_norm":
            yield site


# The same network where the BatchNorm of a shortcut and the addition that follows it are one
# operation with two inputs, which occurs once in each stage.
RESNET50_SITES_WITH_DUAL_JOINS: Final = tuple(_joined(RESNET50_SITES))

# How many tensors of x's size are read from or written to memory in one step, forward + backward.
# If backward reads y at every site, forward reads x for the statistics, then reads x and [z] and
# writes y; backward reads dy, x and y for the sums and writes [dz], then reads dz (or dy and y) and
# x and writes dx.
# Two inputs are both read where x is, and both have a dx.
_PASSES_SAVING_Y: Final[dict[Form, int]] = {
    "bn_relu": 3 + 3 + 4,
    "bn_add_relu": 4 + 4 + 3,
    "batch_norm": 3 + 2 + 3,
    "dual_bn_add_relu": 5 + 4 + 6,
}
# The same where backward does not read y: without a residual, or with two inputs, it recomputes the
# gate from x; with a residual it reads a bit mask, which is not counted (1/16 or 1/32 of a tensor,
# twice).
_PASSES_WITHOUT_Y: Final[dict[Form, int]] = {
    "bn_relu": 3 + 2 + 3,
    "bn_add_relu": 4 + 3 + 3,
    "batch_norm": 3 + 2 + 3,
    "dual_bn_add_relu": 5 + 3 + 5,
}


def two_read_bytes(site: Site, batch: int, itemsize: int) -> int:
    """Bytes that the two-read scheme moves at one occurrence, with the ReLU's gate read from y."""
    return _PASSES_SAVING_Y[site.form] * site.elements(batch) * itemsize


def two_read_bytes_without_y(site: Site, batch: int, itemsize: int) -> int:
    """Bytes that the two-read scheme moves at one occurrence if backward does not read y."""
    return _PASSES_WITHOUT_Y[site.form] * site.elements(batch) * itemsize


# The minimum: forward reads x once, backward reads x and dy once, and both keep them on chip until
# the sums are known.
_PASSES_READING_ONCE: Final[dict[Form, int]] = {
    "bn_relu": 2 + 3,
    "bn_add_relu": 3 + 4,
    "batch_norm": 2 + 3,
    "dual_bn_add_relu": 3 + 5,
}


def one_read_bytes(site: Site, batch: int, itemsize: int) -> int:
    """Bytes that any scheme must move at one occurrence; with a residual this includes the mask."""
    elements = site.elements(batch)
    mask = 2 * (elements // 8) if site.form == "bn_add_relu" else 0
    return _PASSES_READING_ONCE[site.form] * elements * itemsize + mask
