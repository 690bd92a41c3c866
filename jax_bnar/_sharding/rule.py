"""The Shardy rule of an operation: which axes of its operands and results correspond.

Axes that share a factor are sharded alike. The rule only guides sharding propagation;
`jax_bnar._sharding.partitioning` decides what the operation does with the resulting sharding.
"""

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

from jax_bnar._base.jax_compat import ArrayMapping, CompoundFactor, SdyShardingRule
from jax_bnar._base.layout import ChannelLayout
from jax_bnar._base.signatures import OperandKind

# One array axis as the (name, size) pairs of its factors, major factor first.
_Factors = list[tuple[str, int]]


def _product(*factors: tuple[str, int]) -> _Factors:
    """An axis composed of factors. Shardy rejects compound axes with a factor of size 1."""
    return [f for f in factors if f[1] > 1] or [factors[0]]


def _splits_evenly(size: int, mesh_sizes: Sequence[int]) -> bool:
    """Whether any mesh axes, in their order, fit an axis of this size wholly or not at all.

    Otherwise Shardy would shard it over part of a mesh axis, and the operation could then only
    replicate.
    """
    for number in range(1, len(mesh_sizes) + 1):
        for chosen in itertools.combinations(mesh_sizes, number):
            rest = size
            for mesh_size in chosen:
                if rest % mesh_size:
                    if math.gcd(rest, mesh_size) > 1:
                        return False
                    break
                rest //= mesh_size
    return True


class _Rule:
    def __init__(
        self,
        layout: ChannelLayout,
        shape: tuple[int, ...],
        mesh_sizes: Sequence[int],
        has_mask: bool,
    ) -> None:
        self._layout = layout
        self._shape = shape
        self._singles = 0
        self._axes: list[_Factors] = [[(f"x{i}", n)] for i, n in enumerate(shape)]
        first, groups = layout.leading, layout.num_groups
        self._has_groups = groups > 1 and _splits_evenly(groups, mesh_sizes)
        if self._has_groups:
            self._axes[first] = _product(("groups", groups), ("rows", shape[first] // groups))
        split = layout.mask_split(shape) if has_mask else None
        self._packed: _Factors | None = None
        if split is not None and not (split == first and groups > 1):
            tail = math.prod(shape[split + 1 :])
            minor = 8 // math.gcd(8, tail)
            major = shape[split] // minor
            self._axes[split] = _product(("bytes", major), ("bits", minor))
            self._packed = _product(("bytes", major), ("tail", minor * tail // 8))

    def _single(self, size: int) -> _Factors:
        """A fresh factor, which no other axis shares."""
        self._singles += 1
        return [(f"own{self._singles}", size)]

    def operand(self, kind: OperandKind, shape: tuple[int, ...]) -> list[_Factors]:
        leading, channel = self._layout.leading, self._layout.channel_axis()
        if kind == "tensor":
            return self._axes
        if kind == "vector":
            groups = [("groups", self._layout.num_groups)] if self._has_groups else []
            axes = [*self._axes[:leading], groups, self._axes[channel]]
            return [
                a if a and math.prod(n for _, n in a) == size else self._single(size)
                for a, size in zip(axes, shape, strict=True)
            ]
        split = self._layout.mask_split(self._shape)
        if split is None:
            groups = [("groups", shape[leading])] if self._has_groups else None
            rest = groups or self._single(shape[leading])
            return [*self._axes[:leading], rest, self._single(shape[-1])]
        return [*self._axes[:split], self._packed or self._single(shape[-1])]


def _mapping(axes: list[_Factors]) -> ArrayMapping:
    names = [[name for name, _ in axis] for axis in axes]
    return ArrayMapping(*(n[0] if len(n) == 1 else CompoundFactor(*n) for n in names))


def sharding_rule(
    layout: ChannelLayout,
    shape: tuple[int, ...],
    operands: Sequence[tuple[OperandKind, tuple[int, ...]]],
    results: Sequence[tuple[OperandKind, tuple[int, ...]]],
    mesh_sizes: Sequence[int],
) -> SdyShardingRule:
    """The rule for operands and results of these kinds and shapes; `shape` is that of x."""
    has_mask = any(kind == "mask" for kind, _ in (*operands, *results))
    rule = _Rule(layout, shape, mesh_sizes, has_mask)
    axes = [[rule.operand(*each) for each in side] for side in (operands, results)]
    sizes = {name: n for side in axes for array in side for axis in array for name, n in axis}
    alone = Counter(
        axis[0][0] for side in axes for array in side for axis in array if len(axis) == 1
    )
    in_compounds: Any = {name: n for name, n in sizes.items() if not alone[name]}
    return SdyShardingRule(
        tuple(_mapping(array) for array in axes[0]),
        tuple(_mapping(array) for array in axes[1]),
        **in_compounds,
    )
