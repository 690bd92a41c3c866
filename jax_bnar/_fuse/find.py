"""What is fused in one graph: the matches that go together, and what is refused."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jax_bnar._fuse.affine import affine_candidate
from jax_bnar._fuse.chains import chains
from jax_bnar._fuse.dual import duals
from jax_bnar._fuse.failures import Failure, caught
from jax_bnar._fuse.graph import Graph
from jax_bnar._fuse.match import Match, RefusedMatch
from jax_bnar._fuse.nodes import Node, Value, values_of
from jax_bnar._fuse.own import own_candidates
from jax_bnar._fuse.region import Region
from jax_bnar._fuse.rewrite import CycleError, Rewrite
from jax_bnar._fuse.search import between, hidden_of, summed_array, training_candidates
from jax_bnar._fuse.statistics_match import StatisticsMatch
from jax_bnar._fuse.statistics_search import is_tiny, populations, statistics_candidates
from jax_bnar._fuse.training_match import TrainingMatch
from jax_bnar._fuse.unexplained import unexplained


def find_matches(
    graph: Graph, axis_sizes: Mapping[Any, int], failures: list[Failure]
) -> tuple[list[Match], list[RefusedMatch]]:
    """The matches, none of which makes a cycle with those before it, and the refusals.

    Training forms come first. Statistics alone come last, because there an operator computes least.
    """
    training: list[TrainingMatch] = []
    refused: list[RefusedMatch] = []
    taken: set[Value] = set()
    inside: set[Value] = set()
    hidden: set[Value] = set()
    rewrite = Rewrite(graph)
    examined: set[Value] = set()
    rest: list[tuple[Node, Region]] = []
    for node in graph.nodes:
        with caught(failures, node):
            x = summed_array(node)
            if x is None or x in examined or x in hidden:
                continue
            examined.add(x)
            region = Region(graph, x, axis_sizes)
            before = len(training)
            for candidate in training_candidates(region, taken, inside):
                if isinstance(candidate, RefusedMatch):
                    refused.append(candidate)
                elif rewrite.add(candidate.node()):
                    training.append(candidate)
                    taken.update(candidate.taken)
                    used = between(candidate.region, candidate.normalised)
                    inside |= used
                    hidden |= hidden_of(candidate.region, used - {candidate.normalised})
            if len(training) == before and populations(region):
                rest.append((node, region))
    # A part of a normalisation, such as x minus its mean, may look like an array that is normalised
    # by other statistics than its own.
    refused = [one for one in refused if inside.isdisjoint(one.node.outputs)]
    with caught(failures):
        for chain in chains(training):
            if all(rewrite.add(new.node()) for _, new in chain):
                instead = dict(chain)
                training = [instead.get(match, match) for match in training]
            else:
                for old, _ in chain:
                    rewrite.add(old.node())
    matches: list[Match] = list(training)
    with caught(failures):
        for dual in duals(training):
            if rewrite.add(dual.node()):
                matches[matches.index(dual.first)] = dual
                matches.remove(dual.second)
    for node in graph.nodes:
        with caught(failures, node):
            found = affine_candidate(graph, node, taken)
            if isinstance(found, RefusedMatch):
                refused.append(found)
            elif found is not None and rewrite.add(found.node()):
                matches.append(found)
                taken.update(found.taken)
    for node in graph.nodes:
        with caught(failures, node):
            for candidate in own_candidates(graph, node, taken):
                if isinstance(candidate, RefusedMatch):
                    refused.append(candidate)
                elif rewrite.add(candidate.node()):
                    matches.append(candidate)
                    taken.update(candidate.taken)
                    break
    regions = [r for one in (*training, *refused) if (r := one.region) is not None]
    known = {value.producer for region in regions for value in region.terms}
    with caught(failures):
        known_nodes = {node for node in known if node is not None}
        refused.extend(unexplained(graph, known_nodes, axis_sizes))
    with caught(failures):
        matches.extend(_statistics(rewrite, rest, taken, refused, failures))
    return matches, refused


def _statistics(
    rewrite: Rewrite,
    rest: Sequence[tuple[Node, Region]],
    taken: set[Value],
    refused: list[RefusedMatch],
    failures: list[Failure],
) -> Iterator[StatisticsMatch]:
    """The statistics alone, in the regions of which nothing else is fused.

    What is refused of the same normalisation is taken out of `refused`, so that the report has one
    line for each place.
    """
    running = rewrite.running() if rest else set()
    for node, region in rest:
        for over in populations(region):
            with caught(failures, node):
                for candidate in statistics_candidates(region, over, running, taken):
                    whole = next((r for r in refused if _is_of(r, region, candidate)), None)
                    if isinstance(candidate, StatisticsMatch):
                        if not rewrite.add(candidate.node()):
                            continue
                        taken.update(candidate.taken)
                        if whole is not None:
                            refused.remove(whole)
                        yield dataclasses.replace(candidate, refused=whole)
                        break
                    if whole is not None:
                        reason = f"{whole.reason}; {candidate.reason}"
                        refused[refused.index(whole)] = dataclasses.replace(whole, reason=reason)
                    elif not is_tiny(region.x):
                        refused.append(candidate)


def _is_of(
    refused: RefusedMatch, region: Region, candidate: StatisticsMatch | RefusedMatch
) -> bool:
    """Whether a refused normalisation is one by these statistics."""
    variance = (
        candidate.result.producer if isinstance(candidate, StatisticsMatch) else candidate.node
    )
    if refused.region is not region:
        return variance in refused.nodes
    return any(value.producer is variance for value in between(region, refused.node.outputs[0]))


def rewritten(graph: Graph, matches: Sequence[Match]) -> tuple[list[Match], list[Node]]:
    """The matches that are kept, and the nodes to run.

    While the matches together make a cycle, the last one is dropped.
    """
    matches = list(matches)
    while True:
        rewrite = Rewrite(graph)
        added = [(match, node) for match in matches if rewrite.add(node := match.node())]
        try:
            nodes = rewrite.nodes()
        except CycleError:
            matches = [match for match, _ in added[:-1]]
            continue
        read = {*values_of(graph.outputs), *(v for n in nodes for v in values_of(n.operands))}
        final = {node: match.node(read) for match, node in added}
        return [match for match, _ in added], [final.get(node, node) for node in nodes]
