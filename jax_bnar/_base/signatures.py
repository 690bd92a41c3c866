"""The operands and results of each operation, as Python knows them.

These tables determine the abstract evaluation of both layers of primitives, the shapes of operands
on each device, the attributes of the custom calls, and the batching rules. The C++ handlers read
the same operands, in `native/ffi_operations.h` and `native/ffi_dual_operations.h`.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

# A tensor has one element per element of x, a vector one per channel of each group, and a mask one
# bit per element of x. `jax_bnar._base.layout` defines their shapes.
OperandKind = Literal["tensor", "vector", "mask"]


@dataclasses.dataclass(frozen=True)
class Operand:
    """One operand.

    Attributes:
        name: the name, as in `jax_bnar.reference`.
        kind: the kind of array; "saved" is a mask if the gate is "mask", and a tensor otherwise.
        optional: whether it may be None regardless of the static parameters. The attribute
            has_<name> tells the kernel.
    """

    name: str
    kind: OperandKind | Literal["saved"]
    optional: bool = False


@dataclasses.dataclass(frozen=True)
class Result:
    """One result.

    Attributes:
        name: the name, as in `jax_bnar.reference`.
        kind: the kind of array.
        present_if: the static parameter that requests it, or None if it is always present.
        depends_on: "all" if it depends on all operands, "e" if it depends on those that the gated
            cotangent e depends on, else the name of the one operand that it depends on.
    """

    name: str
    kind: OperandKind
    present_if: str | None = None
    depends_on: str = "all"


@dataclasses.dataclass(frozen=True)
class Signature:
    """Operands and results of one operation, in order.

    Attributes:
        name: the name of the operation, which is also part of the name of its custom call.
        operands: the operands.
        results: the results.
        sums: the number of inputs that it reduces per channel, for which a kernel may need a
            workspace.
        x: the operand that decides the shapes, dtypes and shardings of the others.
    """

    name: str
    operands: tuple[Operand, ...]
    results: tuple[Result, ...]
    sums: int = 0
    x: str = "x"

    def bind(self, operands: Sequence[Any]) -> tuple[list[Any], tuple[bool, ...]]:
        """The operands that are not None, and the static parameter `present`."""
        assert len(operands) == len(self.operands), self.name
        given = [operand for operand in operands if operand is not None]
        return given, tuple(operand is not None for operand in operands)

    def unbind(self, given: Sequence[Any], present: tuple[bool, ...]) -> dict[str, Any]:
        """All operands by name, with None for those that are absent."""
        rest = iter(given)
        pairs = zip(self.operands, present, strict=True)
        return {operand.name: next(rest) if there else None for operand, there in pairs}

    def operand_kinds(self, statics: Mapping[str, Any]) -> dict[str, OperandKind]:
        saved: OperandKind = "mask" if statics.get("gate") == "mask" else "tensor"
        return {
            operand.name: saved if operand.kind == "saved" else operand.kind
            for operand in self.operands
        }

    def results_with(self, statics: Mapping[str, Any]) -> list[Result]:
        """The results that are present with these static parameters."""
        return [r for r in self.results if r.present_if is None or statics[r.present_if]]

    def result_kinds(self, statics: Mapping[str, Any]) -> list[OperandKind]:
        return [result.kind for result in self.results_with(statics)]

    def dependencies(self, result: Result, statics: Mapping[str, Any]) -> frozenset[str]:
        """The operands that the value of a result depends on."""
        everything = frozenset(operand.name for operand in self.operands)
        if result.depends_on in everything:
            return frozenset({result.depends_on})
        if result.depends_on == "all":
            return everything
        # e = dy where y > 0, else 0.
        by_gate = {"none": {"dy"}, "y": {"dy", "saved"}, "mask": {"dy", "saved"}}
        return everything & by_gate.get(statics["gate"], everything)


_X = Operand("x", "tensor")
_Z = Operand("z", "tensor", optional=True)
_DY = Operand("dy", "tensor")
_SAVED = Operand("saved", "saved")
_SCALE = Operand("scale", "vector", optional=True)
_BIAS = Operand("bias", "vector", optional=True)
_MEAN, _VAR, _DMEAN, _DVAR, _B, _K = (
    Operand(name, "vector") for name in ("mean", "var", "dmean", "dvar", "b", "k")
)

_STATISTICS = (
    Result("mean", "vector", depends_on="x"),
    Result("var", "vector", depends_on="x"),
)
_MASK = Result("mask", "mask", present_if="save_mask")
_DZ = Result("dz", "tensor", present_if="has_z", depends_on="e")

FORWARD: Final = Signature(
    "forward",
    (_X, _Z, _SCALE, _BIAS),
    (Result("y", "tensor"), *_STATISTICS, _MASK),
    sums=1,
)
BACKWARD: Final = Signature(
    "backward",
    (_DY, _X, _SAVED, _MEAN, _VAR, _SCALE, _BIAS, _DMEAN, _DVAR),
    (
        Result("dx", "tensor"),
        Result("dscale", "vector"),
        Result("dbias", "vector", depends_on="e"),
        _DZ,
    ),
    sums=1,
)
STATISTICS: Final = Signature("statistics", (_X,), _STATISTICS, sums=1)
NORMALISE: Final = Signature(
    "normalise", (_X, _Z, _SCALE, _BIAS, _MEAN, _VAR), (Result("y", "tensor"), _MASK)
)
# The halves of backward compute a = scale/sqrt(var+epsilon) themselves, as forward does: gate "x"
# needs the same bits. For the other gates, backward_reduce is given no var, scale or bias, because
# its results do not depend on them.
BACKWARD_REDUCE: Final = Signature(
    "backward_reduce",
    (_DY, _X, _SAVED, _MEAN, _VAR, _SCALE, _BIAS),
    (
        Result("sum_e", "vector", depends_on="e"),
        Result("sum_e_centred", "vector"),
        _DZ,
    ),
    sums=1,
)
BACKWARD_APPLY: Final = Signature(
    "backward_apply",
    (_DY, _X, _SAVED, _MEAN, _VAR, _SCALE, _BIAS, _B, _K),
    (Result("dx", "tensor"),),
)

# --- y = relu(batch_norm(x1) + batch_norm(x2)) ---


def _vectors(*names: str) -> tuple[Operand, ...]:
    return tuple(Operand(name, "vector") for name in names)


_BOTH_X = (Operand("x1", "tensor"), Operand("x2", "tensor"))
_BOTH_AFFINE = tuple(
    Operand(name, "vector", optional=True) for name in ("scale1", "bias1", "scale2", "bias2")
)
_BOTH_STATISTICS = ("mean1", "var1", "mean2", "var2")

DUAL_FORWARD: Final = Signature(
    "dual_forward",
    (*_BOTH_X, *_BOTH_AFFINE),
    (
        Result("y", "tensor"),
        Result("mean1", "vector", depends_on="x1"),
        Result("var1", "vector", depends_on="x1"),
        Result("mean2", "vector", depends_on="x2"),
        Result("var2", "vector", depends_on="x2"),
        _MASK,
    ),
    sums=2,
    x="x1",
)
# Both biases have the one gradient dbias.
DUAL_BACKWARD: Final = Signature(
    "dual_backward",
    (
        _DY,
        *_BOTH_X,
        _SAVED,
        *_vectors(*_BOTH_STATISTICS),
        *_BOTH_AFFINE,
        *_vectors("dmean1", "dvar1", "dmean2", "dvar2"),
    ),
    (
        Result("dx1", "tensor"),
        Result("dx2", "tensor"),
        Result("dscale1", "vector"),
        Result("dscale2", "vector"),
        Result("dbias", "vector", depends_on="e"),
    ),
    sums=2,
    x="x1",
)
DUAL_NORMALISE: Final = Signature(
    "dual_normalise",
    (*_BOTH_X, *_BOTH_AFFINE, *_vectors(*_BOTH_STATISTICS)),
    (Result("y", "tensor"), _MASK),
    x="x1",
)
DUAL_BACKWARD_REDUCE: Final = Signature(
    "dual_backward_reduce",
    (_DY, *_BOTH_X, _SAVED, *_vectors(*_BOTH_STATISTICS), *_BOTH_AFFINE),
    (
        Result("sum_e", "vector", depends_on="e"),
        Result("sum_e_centred1", "vector"),
        Result("sum_e_centred2", "vector"),
    ),
    sums=2,
    x="x1",
)
DUAL_BACKWARD_APPLY: Final = Signature(
    "dual_backward_apply",
    (
        _DY,
        *_BOTH_X,
        _SAVED,
        *_vectors(*_BOTH_STATISTICS),
        *_BOTH_AFFINE,
        *_vectors("b1", "k1", "b2", "k2"),
    ),
    (Result("dx1", "tensor"), Result("dx2", "tensor")),
    x="x1",
)
