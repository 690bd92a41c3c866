"""Rematerialisation: y again from the statistics that a `jax.checkpoint` policy saved.

Under a policy that saves the statistics and not y, JAX computes y again where backward needs it.
Left to itself it would run the whole forward kernel, statistics included, for it cannot look inside
a primitive. `recomputable` stands between forward and the users of y. It is the identity, unless
its results are rematerialised and the statistics are not: then it is the `normalise` primitive,
which reads x once. Where the statistics are rematerialised as well, one whole forward is cheapest.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.ad_checkpoint import Recompute, checkpoint_name
from jax.extend.core import Primitive, Var

from jax_bnar import primitive
from jax_bnar._base import jax_compat
from jax_bnar._base.implementation import Implementation
from jax_bnar._base.layout import Layout
from jax_bnar._kernels import kernel_call

# Names for jax.checkpoint policies such as save_only_these_names.
STATISTICS_NAME = "bnar_statistics"
MASK_NAME = "bnar_mask"


@dataclasses.dataclass(frozen=True)
class _Recomputable(primitive.ArrayOperation):
    """An operation without a kernel, which batches as the others do."""

    @functools.cached_property
    def primitive(self) -> Primitive:
        new = Primitive("jax_bnar_recomputable")
        new.multiple_results = True
        new.def_impl(self._reference)
        new.def_abstract_eval(self._abstract)
        jax_compat.register_lowering(
            new, jax_compat.lower_fun(self._reference, multiple_results=True)
        )
        jax_compat.primitive_batchers[new] = self._batch
        jax_compat.primitive_jvps[new] = self._jvp
        jax_compat.partial_eval_jaxpr_custom_rules[new] = self._partial_eval
        return new

    def __call__(
        self,
        *operands: jax.Array | None,
        layout: Layout,
        implementation: Implementation,
        **statics: Any,
    ) -> tuple[jax.Array, ...]:
        """(y,) or (y, mask)."""
        if implementation == "xla":
            # JAX can look into this one, and XLA merges it with y as it was.
            inputs = operands[2:]
            return primitive.normalise(*inputs, layout=layout, implementation="xla", **statics)
        return super().__call__(*operands, layout=layout, implementation=implementation, **statics)

    def _abstract(self, *avals: Any, present: tuple[bool, ...], **_: Any) -> list[Any]:
        named = self._named(avals, present)
        return [named[name] for name in ("y", "mask") if name in named]

    def _reference(
        self, *given: jax.Array, present: tuple[bool, ...], **_: Any
    ) -> tuple[jax.Array, ...]:
        named = self._named(given, present)
        return tuple(named[name] for name in ("y", "mask") if name in named)

    def _bind_batched(
        self, leading: Sequence[jax.Array], *, present: tuple[bool, ...], **params: Any
    ) -> list[jax.Array]:
        # Under vmap these are new arrays, which would be rematerialised and look as if the
        # statistics were.
        named = self._named(leading, present)
        for name in {"mean", "var"} & named.keys():
            named[name] = checkpoint_name(named[name], STATISTICS_NAME)
        return self.primitive.bind(*named.values(), present=present, **params)

    def _partial_eval(
        self,
        policy: Callable[..., Any],
        unknown: Sequence[bool],
        available: Sequence[bool],
        equation: Any,
    ) -> tuple[Any, Any, list[bool], list[bool], list[Var]]:
        """What to compute now and what in the backward pass, and what to carry between them.

        `available` says of each operand whether the backward pass has it without saving it here.
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
        position = self._named(range(len(equation.invars)), equation.params["present"])
        has = {name: available[at] for name, at in position.items()}
        # What is not available was saved: y needs no work then, or statistics make the difference.
        if has["y"] and "mean" in has and not (has["mean"] or has["var"]):
            again, names = primitive.normalise, kernel_call.normalise.operands
        else:
            again, names = self, ("y", "mask")
        kept = [at for name, at in position.items() if name in names]
        staged = equation.replace(
            primitive=again.primitive,
            invars=[equation.invars[at] for at in kept],
            params={
                **equation.params,
                "present": tuple(n in names and n in position for n in again.canonical.operands),
            },
        )
        residuals = to_save(staged.invars, [available[at] for at in kept])
        return equation, staged, [False] * count, [True] * count, residuals


def _not_canonical(*_: Any, **__: Any) -> Any:
    raise AssertionError("recomputable has no kernel, and no canonical form")


recomputable = _Recomputable(
    kernel_call.Operation(
        "recomputable",
        ("y", "mask", *kernel_call.normalise.operands),
        _not_canonical,
        _not_canonical,
    )
)


def drop_unused_mask(used: Sequence[bool], equation: Any) -> tuple[list[bool], Any]:
    """A kernel whose mask nobody reads writes none (dead code in what is rematerialised)."""
    if not any(used):
        return [False] * len(equation.invars), None
    if equation.params["save_mask"] and not used[-1]:
        equation = equation.replace(
            outvars=equation.outvars[:-1], params={**equation.params, "save_mask": False}
        )
        return [True] * len(equation.invars), equation
    return [True] * len(equation.invars), equation


for _operation in (primitive.forward, primitive.normalise):
    jax_compat.register_dce_rule(_operation.primitive, drop_unused_mask)
