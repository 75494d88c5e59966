"""The search for a plan: which nodes become which segments.

The search does not know the kinds of segments. Proposers offer segments that end at a node, each with
the bytes it keeps and the further bytes it takes while it is differentiated. For each of several limits
on the latter, a dynamic program over the nodes finds the sequence of offers that keeps least. Of these
sequences, the one with the lowest peak (`timeline`) is chosen.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..network.cutting import Network
from ..segments.base import Executor, Offer, Proposer
from ..segments.costs import NodeCost
from . import timeline

Chosen = Sequence[tuple[Proposer, Offer]]


@dataclass
class Choice:
    """A way to cut the network into segments, with the bytes it keeps and its peak."""

    segments: list[Executor]
    kept: int
    peak: int  # by `timeline`
    transient: int = 0  # the most bytes that one segment takes besides while it is differentiated
    chosen: Chosen = ()  # the offers that it is made of

    @property
    def recovers(self) -> bool:
        """Whether its walks, if any, recover a cotangent: between anchors, recomputing does as well."""
        facts = [s.facts for s in self.segments]
        return not any(f.walks for f in facts) or any(f.recovers for f in facts)


def choose(
    network: Network,
    costs: Sequence[NodeCost],
    proposers: Sequence[Proposer],
    *,
    best: Choice | None = None,
    thorough: bool = True,
    recovers: bool = True,
) -> Choice | None:
    """The choice with the lowest peak, `best` if none is lower.

    `thorough`: evaluate every choice found, even if by its estimate it takes no less than an earlier
    one. Planning walks takes time, so they are searched without this. `recovers`: leave out walks that
    recover nothing.
    """
    least: float = math.inf
    seen: list[Chosen] = []
    for limit in _limits(proposers):
        found = _least(len(network.nodes), proposers, limit)
        if found is None or found[1] in seen:
            continue
        estimate, chosen = found
        seen.append(chosen)
        if best is not None and _at_once(chosen) >= best.peak:
            continue
        if not thorough and estimate >= least:
            continue
        choice = realise(network, costs, chosen)
        least = min(least, choice.kept + choice.transient)
        if recovers and not choice.recovers:
            continue
        if best is None or choice.peak < best.peak:
            best = choice
    return best


def may_choose(
    network: Network,
    costs: Sequence[NodeCost],
    proposers: Sequence[Proposer],
    wanted: Proposer,
    below: float,
) -> bool:
    """Whether a choice with offers of `wanted`, which are lower bounds, stays below some peak."""
    seen: list[Chosen] = []
    for limit in _limits(proposers):
        found = _least(len(network.nodes), proposers, limit)
        if found is None or found[1] in seen:
            continue
        chosen = found[1]
        seen.append(chosen)
        if not any(proposer is wanted for proposer, _ in chosen) or _at_once(chosen) >= below:
            continue
        if realise(network, costs, chosen).peak < below:
            return True
    return False


def _at_once(chosen: Chosen) -> float:
    """A lower bound of a choice's peak.

    The sum of what is kept would be none: what several segments keep in the reverse pass is not alive at
    once, and neighbours may keep the same state.
    """
    return max((offer.at_once for _, offer in chosen), default=0)


def _limits(proposers: Sequence[Proposer]) -> list[int]:
    return sorted(set().union(*(p.limits() for p in proposers)))


def _least(
    n: int, proposers: Sequence[Proposer], limit: int
) -> tuple[float, list[tuple[Proposer, Offer]]] | None:
    """(an estimate of its bytes, the offers that keep least together); None if none cover all nodes."""
    best = [0.0] + [math.inf] * n  # at i: the least bytes kept for the first i nodes
    back: list[tuple[Proposer, Offer] | None] = []
    for proposer in proposers:
        proposer.begin(limit)
    for stop in range(1, n + 1):
        last = None
        for proposer in proposers:
            for offer in proposer.ending_at(stop, best):
                if best[offer.start] + offer.kept < best[stop]:
                    best[stop], last = best[offer.start] + offer.kept, (proposer, offer)
        back.append(last)
    if math.isinf(best[n]):
        return None
    chosen: list[tuple[Proposer, Offer]] = []
    stop = n
    while stop:
        found = back[stop - 1]
        assert found is not None
        proposer, offer = found
        stop = offer.start
        if chosen and proposer.joins and chosen[-1][0] is proposer:
            later = chosen.pop()[1]
            transient = max(offer.transient, later.transient)
            at_once = max(offer.at_once, later.at_once)
            kept = offer.kept + later.kept
            offer = Offer(offer.start, later.stop, kept, transient, offer.setting, at_once)
        chosen.append((proposer, offer))
    return best[n] + max((offer.transient for _, offer in chosen), default=0), chosen[::-1]


def realise(network: Network, costs: Sequence[NodeCost], chosen: Chosen) -> Choice:
    """The offers as executors, with their true bytes."""
    realised = [proposer.realise(offer) for proposer, offer in chosen]
    segments = [executor for r in realised for executor in r.executors]
    kept = sum(int(r.kept) for r in realised)
    transient = max((int(r.transient) for r in realised), default=0)
    return Choice(segments, kept, timeline.peak(network, segments, costs), transient, chosen)
