"""Rematerialisation of y from the statistics that a `jax.checkpoint` policy saved.

Under a policy that saves the statistics but not y, JAX recomputes y for backward. By default it
would run the whole forward kernel, statistics included, because it cannot look inside a primitive.
`recomputable` is applied to y before anything else uses it. It is the identity unless its results
are rematerialised while the statistics are saved; then it becomes the `normalise` primitive, which
reads x once. If the statistics are rematerialised as well, one whole forward pass is cheapest.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import jax
from jax.ad_checkpoint import Recompute, checkpoint_name
from jax.extend.core import Primitive, Var

from jax_bnar import primitive
from jax_bnar._array_primitive import ArrayPrimitive
from jax_bnar._base import jax_compat
from jax_bnar._base.implementation import Implementation
from jax_bnar._base.inputs import PREFIXES
from jax_bnar._base.layout import ChannelLayout
from jax_bnar._base.signatures import Operand, Signature

# Names that jax.checkpoint policies such as save_only_these_names can refer to.
STATISTICS_NAME = "bnar_statistics"
MASK_NAME = "bnar_mask"


def named_mask(mask: jax.Array | None) -> jax.Array | None:
    """The mask under that name, if there is one."""
    return None if mask is None else checkpoint_name(mask, MASK_NAME)


@dataclasses.dataclass(frozen=True)
class _Recomputable(ArrayPrimitive):
    """The identity on y and mask, which can also recompute them from its other operands.

    Attributes:
        name: of the primitive.
        normalise: what makes them again.
    """

    name: str
    normalise: primitive.ArrayOperation

    @functools.cached_property
    def signature(self) -> Signature:  # type: ignore[override]
        of_normalise = self.normalise.signature
        arguments = (Operand("y", "tensor"), Operand("mask", "mask"), *of_normalise.arguments)
        return dataclasses.replace(of_normalise, name=self.name, arguments=arguments)

    @functools.cached_property
    def statistics(self) -> frozenset[str]:
        """The operands that are means and variances."""
        return frozenset(operand.name for operand in jax.tree.leaves(self.signature.arguments[-1]))

    def create(self) -> Primitive:
        new = Primitive(self.name)
        new.multiple_results = True
        new.def_impl(self._results)
        new.def_abstract_eval(self._results)
        rule = jax_compat.lower_fun(self._results, multiple_results=True)
        jax_compat.register_lowering(new, rule)
        jax_compat.primitive_batchers[new] = self.batch
        jax_compat.primitive_jvps[new] = self._jvp
        jax_compat.partial_eval_jaxpr_custom_rules[new] = self._partial_eval
        return new

    def __call__(
        self,
        *arguments: Any,
        layout: ChannelLayout,
        implementation: Implementation,
        **statics: Any,
    ) -> tuple[jax.Array, jax.Array | None]:
        """(y, mask)."""
        options: dict[str, Any] = {"layout": layout, "implementation": implementation, **statics}
        if implementation == "xla":
            # JAX can look inside this one, and XLA merges it with the computation of y.
            return self.normalise(*arguments[2:], **options)
        return self.bind(*arguments, **options)

    def _results(self, *given: Any, present: tuple[bool, ...], **_: Any) -> list[Any]:
        named = self.named(given, present)
        return [named[name] for name in ("y", "mask") if name in named]

    def _jvp(
        self, primals: Sequence[Any], tangents: Sequence[Any], **params: Any
    ) -> tuple[list[Any], list[Any]]:
        moved = [jax_compat.instantiate_zeros(t) for t in tangents]
        return self.primitive.bind(*primals, **params), self._results(*moved, **params)

    def bind_batched(self, leading: Mapping[str, jax.Array], **params: Any) -> list[jax.Array]:
        # vmap makes new arrays of these. Unnamed, they would be rematerialised, and it would look
        # as if the statistics were.
        named = {
            name: checkpoint_name(array, STATISTICS_NAME) if name in self.statistics else array
            for name, array in leading.items()
        }
        return super().bind_batched(named, **params)

    def _partial_eval(
        self,
        policy: Callable[..., Any],
        unknown: Sequence[bool],
        available: Sequence[bool],
        equation: Any,
    ) -> tuple[Any, Any, list[bool], list[bool], list[Var]]:
        """What to compute now, what to compute in the backward pass, and what to save for it.

        `available` says for each operand whether the backward pass already has it, so that it need
        not be saved here.
        """
        count = len(equation.outvars)

        def to_save(variables: Sequence[Any], available: Sequence[bool]) -> list[Var]:
            pairs = zip(variables, available, strict=True)
            return [v for v, has in pairs if isinstance(v, Var) and not has]

        if any(unknown):
            residuals = to_save(equation.invars, available)
            return None, equation, [True] * count, [True] * count, residuals
        avals = [v.aval for v in equation.invars]
        decision = policy(equation.primitive, *avals, **equation.params)
        if decision is not False and decision is not Recompute:
            return equation, None, [False] * count, [False] * count, []
        position = self.named(range(len(equation.invars)), equation.params["present"])
        has = {name: available[at] for name, at in position.items()}
        # An operand that is not available is one that the policy saves. A saved y needs no
        # recomputation; saved statistics make `normalise` enough.
        statistics = self.statistics & has.keys()
        if has["y"] and statistics and not any(has[name] for name in statistics):
            again = self.normalise
            names = {operand.name for operand in again.signature.operands}
        else:
            again, names = self, {"y", "mask"}
        kept = [at for name, at in position.items() if name in names]
        is_kept = tuple(o.name in names & position.keys() for o in again.signature.operands)
        staged = equation.replace(
            primitive=again.primitive,
            invars=[equation.invars[at] for at in kept],
            params={**equation.params, "present": is_kept},
        )
        residuals = to_save(staged.invars, [available[at] for at in kept])
        return equation, staged, [False] * count, [True] * count, residuals


# By the number of inputs.
recomputable: Final = {
    inputs: _Recomputable(
        f"jax_bnar_{PREFIXES[inputs]}recomputable", primitive.OPERATIONS[inputs].normalise
    )
    for inputs in PREFIXES
}
