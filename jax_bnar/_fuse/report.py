"""`FusionReport`: what was fused in a program, what was refused, and why."""

import collections
import dataclasses

from jax_bnar._base import jax_compat
from jax_bnar._fuse import advice, html, paddle_form
from jax_bnar._fuse.candidate import Candidate
from jax_bnar._fuse.differentiated import HINT, needs_fuse_inside_grad
from jax_bnar._fuse.failures import Failure
from jax_bnar._fuse.match import Match, RefusedMatch
from jax_bnar._fuse.nodes import Node
from jax_bnar._fuse.plan import Plan
from jax_bnar._fuse.sizes import of_each_symbol_one

_NO_LINE = "an unknown line"  # that of jax_compat.source_line


@dataclasses.dataclass(frozen=True, repr=False)
class FusionReport:
    """What `fuse` does to a function for some arguments.

    `print` shows a line for each place and then what to do next; so does an interactive session,
    and a notebook shows a table.

    Attributes:
        candidates: in the order of the program.
        own_calls: how many calls of this package's operators the function contains by itself.
    """

    candidates: tuple[Candidate, ...]
    own_calls: int = 0

    @property
    def matched(self) -> tuple[Candidate, ...]:
        """The places where an operator is called."""
        return tuple(c for c in self.candidates if c.is_matched)

    @property
    def refused(self) -> tuple[Candidate, ...]:
        """The places that stay as they are, each with its reason."""
        return tuple(c for c in self.candidates if not c.is_matched)

    @property
    def bytes_saved(self) -> int:
        """The sum over all places; each is computed from shapes, as the guide says."""
        return sum(candidate.bytes_saved for candidate in self.candidates)

    def count(self, operator: str) -> int:
        """How often the program runs this operator."""
        return sum(c.calls for c in self.candidates if c.operator == operator)

    @property
    def next_steps(self) -> tuple[str, ...]:
        """What to do now, a sentence each; the printed report ends with them."""
        return tuple(advice.next_steps(self.candidates, self.own_calls))

    def __str__(self) -> str:
        places = [str(candidate) for candidate in self.candidates] or ["nothing to fuse"]
        return "\n".join([*places, *(f"next: {step}" for step in self.next_steps)])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return html.fragment(self.candidates, self.next_steps)

    def summary(self) -> str:
        """A table of how often each operator is called and how often each refusal occurs."""
        rows = collections.Counter[str]()
        saved = collections.Counter[str]()
        for candidate in self.candidates:
            name = candidate.operator or f"refused: {candidate.reason}"
            rows[name] += candidate.calls
            saved[name] += candidate.bytes_saved
        width = max([len(name) for name in rows] + [len("operator")])
        lines = [f"{'operator':<{width}}  {'calls':>6}  {'bytes saved':>15}"]
        for name, calls in sorted(
            rows.items(), key=lambda row: (row[0].startswith("refused"), row)
        ):
            lines.append(f"{name:<{width}}  {calls:>6}  {saved[name]:>15,}")
        return "\n".join(lines)

    def graphs(self) -> str:
        """The source and result graphs of the matched patterns, in the format of Paddle's pass."""
        operators = dict.fromkeys(c.operator for c in self.candidates if c.operator is not None)
        return paddle_form.text(list(operators))

    def html(self) -> str:
        """A self-contained page: the table of candidates, and the graphs of the patterns."""
        return html.page(self.candidates, self.next_steps, self.graphs())


def report(plan: Plan) -> FusionReport:
    """The report on a function, from its plan."""
    calls: dict[int, int] = collections.Counter()
    found: dict[int, tuple[Match | RefusedMatch, str]] = {}
    for one, times, around in plan.walk():
        matches = (_without_hidden_hint(match, around) for match in one.matches)
        places = sorted((*matches, *one.refused), key=lambda place: _node(place).order)
        for place in places:
            calls[id(place)] += times
            found.setdefault(id(place), (place, around))
    return FusionReport(
        (
            *(_candidate(place, calls[id(place)], around) for place, around in found.values()),
            *map(_failed, plan.all_failures()),
        ),
        advice.own_calls(plan),
    )


def _failed(failure: Failure) -> Candidate:
    return Candidate(str(failure.name_stack), None, failure.reason, failure.line, (), "", 1, 0)


def _candidate(place: Match | RefusedMatch, calls: int, around: str) -> Candidate:
    module = f"{around}{_node(place).name_stack}".rstrip("/")
    if isinstance(place, RefusedMatch):
        (x, *_) = place.node.outputs
        return Candidate(
            module,
            None,
            HINT if needs_fuse_inside_grad(place, around) else place.reason,
            _line(place.node),
            x.shape,
            str(x.dtype),
            calls,
            0,
        )
    result = place.result.producer
    assert result is not None
    x = place.x
    size = of_each_symbol_one(x.shape) * x.dtype.itemsize
    return Candidate(
        module,
        place.operator,
        place.reason,
        _line(result),
        x.shape,
        str(x.dtype),
        calls,
        calls * size * place.moves_spared,
    )


def _without_hidden_hint(match: Match, around: str) -> Match | RefusedMatch:
    """The match, or the refusal that it carries if `fuse` makes an error of that."""
    refusal = match.refusal
    return refusal if refusal and needs_fuse_inside_grad(refusal, around) else match


def _line(node: Node) -> str:
    """The line of the user's program: that of the node, or of the innermost call around it.

    JAX knows no line for what is in its own jitted functions, such as `jnp.var`.
    """
    lines = map(jax_compat.source_line, (node.equation, *reversed(node.calls)))
    return next((line for line in lines if line != _NO_LINE), _NO_LINE)


def _node(place: Match | RefusedMatch) -> Node:
    """The node that normalises the array; its name stack is the path of the module."""
    if isinstance(place, RefusedMatch):
        return place.node
    producer = place.normalised.producer
    assert producer is not None
    return producer
