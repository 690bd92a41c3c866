"""The operands and results of each operation, as Python knows them.

An operation takes and returns what belongs to the inputs of the operator in tuples with one entry
for each (`jax_bnar._base.inputs`). A primitive takes and returns the same arrays as a flat list.
These tables hold both: the structure of the arguments and, flattened, the operands in order. They
determine the abstract evaluation of both layers of primitives, the shapes of operands on each
device, the attributes of the custom calls, and the batching rules. The C++ handlers read the same
operands, in `native/ffi_operations.h`.
"""

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, Generic, Literal, TypeVar

import jax
import numpy as np

from jax_bnar._base.dtypes import accumulation_dtype
from jax_bnar._base.inputs import PREFIXES, Affine, Coefficients, Statistics, numbered

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
        dtype_of: the operand whose dtype a tensor has; None for y, whose dtype is the static
            parameter `out_dtype`, or that of x without one.
        depends_on: "all" if it depends on all operands, "e" if it depends on those that the gated
            cotangent e depends on, else the name of the one operand that it depends on.
    """

    name: str
    kind: OperandKind
    present_if: str | None = None
    dtype_of: str | None = None
    depends_on: str = "all"

    def is_present(self, statics: Mapping[str, Any]) -> bool:
        return self.present_if is None or bool(statics[self.present_if])


@dataclasses.dataclass(frozen=True)
class Signature:
    """Arguments and results of one operation, with an `Operand` or a `Result` for each array.

    Attributes:
        name: the name of the operation, which is also part of the name of its custom call.
        arguments: the arguments; None for one that the operation does not have for so many inputs.
        outputs: the results.
        sums: the number of inputs that it reduces per channel, for which a kernel may need a
            workspace.
        x: the operand that decides the shapes and shardings of the others, and the dtype of all
            that is not named after y or z.
        inputs: how many arrays are normalised and added.
        has_activation: whether the static parameters `activation` and `negative_slope` exist.
    """

    name: str
    arguments: tuple[Any, ...]
    outputs: tuple[Any, ...]
    sums: int = 0
    x: str = "x"
    inputs: int = 1
    has_activation: bool = False

    @functools.cached_property
    def operands(self) -> tuple[Operand, ...]:
        """The operands, in order."""
        return tuple(jax.tree.leaves(self.arguments))

    @functools.cached_property
    def results(self) -> tuple[Result, ...]:
        """The results, in order."""
        return tuple(jax.tree.leaves(self.outputs))

    def flat(self, arguments: tuple[Any, ...]) -> list[Any]:
        """The operands in order, with None for those that are absent."""
        return jax.tree.structure(self.arguments).flatten_up_to(arguments)

    def structured(self, operands: Sequence[Any]) -> tuple[Any, ...]:
        """The inverse of `flat`."""
        return jax.tree.unflatten(jax.tree.structure(self.arguments), operands)

    def returned(self, results: Sequence[Any], statics: Mapping[str, Any]) -> Any:
        """The structured results, with None for those that are absent."""
        rest = iter(results)
        return jax.tree.map(lambda r: next(rest) if r.is_present(statics) else None, self.outputs)

    def pack(self, operands: Sequence[Any]) -> tuple[list[Any], tuple[bool, ...]]:
        """The operands that are not None, and the static parameter `present`."""
        given = [operand for operand in operands if operand is not None]
        return given, tuple(operand is not None for operand in operands)

    def pack_structured(self, arguments: tuple[Any, ...]) -> tuple[list[Any], tuple[bool, ...]]:
        """The same for the arguments."""
        return self.pack(self.flat(arguments))

    def unpack(self, given: Sequence[Any], present: tuple[bool, ...]) -> dict[str, Any]:
        """All operands by name, with None for those that are absent."""
        rest = iter(given)
        pairs = zip(self.operands, present, strict=True)
        return {operand.name: next(rest) if there else None for operand, there in pairs}

    def unpack_structured(self, given: Sequence[Any], present: tuple[bool, ...]) -> tuple[Any, ...]:
        """The inverse of `pack_structured`."""
        return self.structured(list(self.unpack(given, present).values()))

    def operand_kinds(self, statics: Mapping[str, Any]) -> dict[str, OperandKind]:
        saved: OperandKind = "mask" if statics.get("gate") == "mask" else "tensor"
        return {
            operand.name: saved if operand.kind == "saved" else operand.kind
            for operand in self.operands
        }

    def results_with(self, statics: Mapping[str, Any]) -> list[Result]:
        """The results that are present with these static parameters."""
        return [result for result in self.results if result.is_present(statics)]

    def result_kinds(self, statics: Mapping[str, Any]) -> list[OperandKind]:
        return [result.kind for result in self.results_with(statics)]

    def result_dtypes(self, named: Mapping[str, Any], statics: Mapping[str, Any]) -> list[Any]:
        """The dtypes of the results, for operands by name."""
        of_x = named[self.x].dtype
        of_kind = {"vector": accumulation_dtype(of_x), "mask": np.dtype(np.uint8)}
        return [
            of_kind[result.kind]
            if result.kind != "tensor"
            else statics.get("out_dtype", of_x)
            if result.dtype_of is None
            else named[result.dtype_of].dtype
            for result in self.results_with(statics)
        ]

    def dependencies(self, result: Result, statics: Mapping[str, Any]) -> frozenset[str]:
        """The operands that the value of a result depends on."""
        everything = frozenset(operand.name for operand in self.operands)
        if result.depends_on in everything:
            return frozenset({result.depends_on})
        if result.depends_on == "all":
            return everything
        # e = dy*act'(u); u depends on all operands of forward.
        by_gate = {"none": {"dy"}, "y": {"dy", "saved"}, "mask": {"dy", "saved"}}
        return everything & by_gate.get(statics["gate"], everything)


_T = TypeVar("_T")


@dataclasses.dataclass(frozen=True)
class PerOperation(Generic[_T]):
    """One object for each operation of an operator, in the order of `native/operations.h`."""

    forward: _T
    backward: _T
    statistics: _T
    normalise: _T
    backward_reduce: _T
    backward_apply: _T

    def by_name(self) -> dict[str, _T]:
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(PerOperation)}

    def __iter__(self) -> Iterator[_T]:
        return iter(self.by_name().values())


STATISTICS: Final = Signature(
    "statistics",
    (Operand("x", "tensor"),),
    Statistics(Result("mean", "vector", depends_on="x"), Result("var", "vector", depends_on="x")),
    sums=1,
)


@functools.cache
def signatures(inputs: int) -> PerOperation[Signature]:
    """The operations on so many inputs; `statistics` takes one of them at a time."""

    def vectors(name: str, *, optional: bool = False) -> tuple[Operand, ...]:
        return tuple(Operand(own, "vector", optional) for own in numbered(name, inputs))

    def each_result(name: str, kind: OperandKind) -> tuple[Result, ...]:
        owners = numbered("x", inputs) if kind == "tensor" else [None] * inputs
        return tuple(
            Result(own, kind, dtype_of=x)
            for own, x in zip(numbered(name, inputs), owners, strict=True)
        )

    dy, saved = Operand("dy", "tensor"), Operand("saved", "saved")
    y, mask = Result("y", "tensor"), Result("mask", "mask", present_if="save_mask")
    x = tuple(Operand(name, "tensor") for name in numbered("x", inputs))
    parameters = vectors("scale", optional=True), vectors("bias", optional=True)
    affine = tuple(map(Affine, *parameters))
    statistics = tuple(map(Statistics, vectors("mean"), vectors("var")))
    cotangents = tuple(map(Statistics, vectors("dmean"), vectors("dvar")))
    coefficients = tuple(map(Coefficients, vectors("b"), vectors("k")))
    computed = tuple(
        Statistics(*(Result(vector.name, "vector", depends_on=own.name) for vector in pair))
        for own, pair in zip(x, statistics, strict=True)
    )
    # The kernels of several inputs take no residual, because no network has one there.
    z = Operand("z", "tensor", optional=True) if inputs == 1 else None
    dz = (
        Result("dz", "tensor", present_if="has_z", dtype_of="dy", depends_on="e")
        if inputs == 1
        else None
    )
    # All biases have the one gradient dbias.
    gradients = (
        each_result("dx", "tensor"),
        each_result("dscale", "vector"),
        Result("dbias", "vector", depends_on="e"),
        dz,
    )
    sums = (
        Result("sum_e", "vector", depends_on="e"),
        each_result("sum_e_centred", "vector"),
        dz,
    )
    of_gate = (dy, x, saved, statistics, affine)

    def signature(name: str, *sides: tuple[Any, ...], sums: int = 0) -> Signature:
        return Signature(
            PREFIXES[inputs] + name,
            *sides,
            sums=sums,
            x=x[0].name,
            inputs=inputs,
            has_activation=True,
        )

    return PerOperation(
        forward=signature("forward", (x, z, affine), (y, computed, mask), sums=inputs),
        backward=signature("backward", (*of_gate, cotangents), gradients, sums=inputs),
        statistics=STATISTICS,
        normalise=signature("normalise", (x, z, affine, statistics), (y, mask)),
        # The halves of backward compute a = scale/sqrt(var+epsilon) themselves, as forward does:
        # gate "x" needs the same bits. For gates that do not recompute, backward_reduce is given no
        # var, scale or bias, because its results do not depend on them.
        backward_reduce=signature("backward_reduce", of_gate, sums, sums=inputs),
        backward_apply=signature("backward_apply", (*of_gate, coefficients), gradients[0]),
    )
