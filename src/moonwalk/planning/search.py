"""The search for a plan: which nodes become which segments.

The search does not know the kinds of segments. Proposers offer segments that end at a node, each with
the bytes it keeps, the further bytes it takes while it is differentiated, and its seconds. For each of
several limits on the transient bytes, and for several numbers of bytes that a second is worth, a dynamic
program over the nodes finds the sequence of offers that is cheapest. What these take is then priced by
the timeline; those that no other is both smaller and faster than are the *frontier*.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ..network.cutting import Network
from ..segments.base import Executor, Offer, Proposer
from ..segments.costs import NodeCost
from ..segments.store import stored_sizes
from .timeline import timeline_of

Chosen = Sequence[tuple[Proposer, Offer]]


@dataclass
class Choice:
    """A way to cut the network into segments, with the bytes it keeps, its peak and its seconds."""

    segments: list[Executor]
    kept: int
    peak: int  # by `timeline`
    seconds: float = 0.0
    transient: int = 0  # the most bytes that one segment takes besides while it is differentiated
    chosen: Chosen = ()  # the offers that it is made of

    @property
    def walks(self) -> bool:
        """Whether any of its segments is walked."""
        return any(s.facts.walks for s in self.segments)

    @property
    def recovers(self) -> bool:
        """Whether its walks, if any, recover a cotangent: between anchors, recomputing does as well."""
        return not self.walks or any(s.facts.recovers for s in self.segments)


def priced(
    network: Network,
    costs: Sequence[NodeCost],
    segments: Sequence[Executor],
    kept: int | None = None,
    transient: int = 0,
    chosen: Chosen = (),
) -> Choice:
    """Segments with what they take, by the timeline."""
    timeline = timeline_of(network, costs)
    kept = sum(s.held(timeline) for s in segments) if kept is None else kept
    peak, seconds = timeline.through(segments), timeline.lasts(segments)
    return Choice(list(segments), kept, peak, seconds, transient, chosen)


def choose(
    network: Network,
    costs: Sequence[NodeCost],
    proposers: Sequence[Proposer],
    *,
    best: Choice | None = None,
    thorough: bool = True,
    recovers: bool = True,
    seen: list[Choice] | None = None,
) -> Choice | None:
    """The choice with the lowest peak, `best` if none is lower.

    `thorough`: evaluate every choice found, even if by its estimate it takes no less than an earlier
    one. Planning walks takes time, so they are searched without this. `recovers`: leave out walks that
    recover nothing. `seen`: takes all choices that were evaluated.
    """
    least: float = math.inf
    for estimate, chosen in _distinct(network, proposers, _limits(proposers), (0.0,)):
        if best is not None and _at_once(chosen) >= best.peak:
            continue
        if not thorough and estimate >= least:
            continue
        choice = realise(network, costs, chosen)
        least = min(least, choice.kept + choice.transient)
        if recovers and not choice.recovers:
            continue
        if seen is not None:
            seen.append(choice)
        if best is None or choice.peak < best.peak:
            best = choice
    return best


def faster(
    network: Network,
    costs: Sequence[NodeCost],
    proposers: Sequence[Proposer],
    *,
    below: float,
    count: int,
    worths: Sequence[float],
    recovers: bool = True,
) -> Iterator[Choice]:
    """Choices that may take longer or shorter, as a second is worth few bytes or many.

    `below`: leave out choices that are sure to have a higher peak. `count`: how many limits to try.
    `worths`: bytes that a second may be worth.
    """
    limits = [limit for limit in _limits(proposers) if limit < below]
    some = limits[:: max(1, len(limits) // count)] if limits else []
    some = sorted({*some, *limits[-1:]})
    for _, chosen in _distinct(network, proposers, some, worths):
        if _at_once(chosen) >= below:
            continue
        choice = realise(network, costs, chosen)
        if choice.recovers or not recovers:
            yield choice


def worths(network: Network, costs: Sequence[NodeCost], powers: Sequence[int]) -> list[float]:
    """Bytes that a second may be worth: `powers` of four times what backpropagation keeps for each
    second of the forward pass, which a checkpoint saves and spends."""
    seconds = sum(n.forward for n in timeline_of(network, costs).seconds)
    kept = sum(stored_sizes(network, costs))
    if not seconds or not kept:
        return []
    return [kept / seconds * 4.0**k for k in powers]


def between(
    network: Network,
    costs: Sequence[NodeCost],
    small: Choice,
    fast: Choice,
    count: int | None = None,
) -> Iterator[Choice]:
    """Choices that differentiate the first nodes as `small` does, and the others as `fast` does.

    The dynamic program stores all of several equal blocks, or none. Choices that store some of them are
    found here, the fewest first; the later ones, because what they keep is freed before the others run
    again. `count`: at most so many choices.
    """
    places = _starts(small)
    every = 1 if count is None else max(1, -(-len(places) // count))
    for place in places[::every]:
        found = _joined_at(place, network, costs, small, fast)
        if found is not None:
            yield found


def largest_between(
    network: Network, costs: Sequence[NodeCost], small: Choice, fast: Choice, limit: float
) -> Choice | None:
    """Of the choices `between` two, the one that differentiates most nodes as `fast` does, with a peak
    within the limit. Peaks grow with their number, so few choices are priced."""
    places = _starts(small)
    best: Choice | None = None
    first, last = 0, len(places)
    while first < last:
        middle = (first + last) // 2
        found = _joined_at(places[middle], network, costs, small, fast)
        if found is not None and found.peak <= limit:
            best, first = found, middle + 1
        else:
            last = middle
    return best


def _starts(choice: Choice) -> list[int]:
    """Where its segments start, the last first."""
    return [segment.start for segment in reversed(choice.segments[1:])]


def _joined_at(
    place: int, network: Network, costs: Sequence[NodeCost], small: Choice, fast: Choice
) -> Choice | None:
    """The nodes before a place as `small` has them, the others as `fast` has; None if that cannot be."""
    later = _from(fast.segments, place, network)
    if later is None:
        return None
    first = [segment for segment in small.segments if segment.stop <= place]
    return priced(network, costs, [*first, *later])


def _from(segments: Sequence[Executor], place: int, network: Network) -> list[Executor] | None:
    """The segments of the nodes from `place` on; None if one of them cannot be cut there."""
    found: list[Executor] = []
    for segment in segments:
        if segment.start >= place:
            found.append(segment)
        elif segment.stop > place:
            cut = segment.data.cut(place)
            if cut is None:
                return None
            found.append(cut.bind(network))
    return found


def frontier(choices: Iterable[Choice]) -> list[Choice]:
    """The choices that no other is both as small and as fast as, the smallest first."""
    found: list[Choice] = []
    for choice in sorted(choices, key=lambda c: (c.peak, c.seconds)):
        if not found or choice.seconds < found[-1].seconds:
            found.append(choice)
    return found


def may_choose(
    network: Network,
    costs: Sequence[NodeCost],
    proposers: Sequence[Proposer],
    wanted: Proposer,
    below: float,
) -> bool:
    """Whether a choice with offers of `wanted`, which are lower bounds, stays below some peak."""
    timeline = timeline_of(network, costs)
    for _, chosen in _distinct(network, proposers, _limits(proposers), (0.0,)):
        if not any(proposer is wanted for proposer, _ in chosen) or _at_once(chosen) >= below:
            continue
        bound: list[Any] = [e for r in _realised(chosen) for e in r.executors]
        if timeline.through(bound) < below:
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


def _distinct(
    network: Network, proposers: Sequence[Proposer], limits: Sequence[int], worths: Sequence[float]
) -> Iterator[tuple[float, Chosen]]:
    """(an estimate of its bytes, offers) for every limit and worth, without repetitions."""
    seen: list[Chosen] = []
    for worth in worths:
        for limit in limits:
            found = _cheapest(len(network.nodes), proposers, limit, worth)
            if found is not None and found[1] not in seen:
                seen.append(found[1])
                yield found


def _cheapest(
    n: int, proposers: Sequence[Proposer], limit: int, worth: float
) -> tuple[float, Chosen] | None:
    """(an estimate of its bytes, the cheapest offers together); None if no offers cover all nodes."""
    best = [0.0] + [math.inf] * n  # at i: the least that the first i nodes cost
    back: list[tuple[Proposer, Offer] | None] = []
    for proposer in proposers:
        proposer.begin(limit, worth)
    for stop in range(1, n + 1):
        last = None
        for proposer in proposers:
            for offer in proposer.ending_at(stop, best):
                cost = best[offer.start] + offer.kept + worth * offer.seconds
                if cost < best[stop]:
                    best[stop], last = cost, (proposer, offer)
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
            offer = _joined(offer, chosen.pop()[1])
        chosen.append((proposer, offer))
    kept = sum(offer.kept for _, offer in chosen)
    return kept + max((offer.transient for _, offer in chosen), default=0), chosen[::-1]


def _joined(first: Offer, second: Offer) -> Offer:
    return Offer(
        first.start,
        second.stop,
        kept=first.kept + second.kept,
        transient=max(first.transient, second.transient),
        seconds=first.seconds + second.seconds,
        setting=first.setting,
        at_once=max(first.at_once, second.at_once),
    )


def realise(network: Network, costs: Sequence[NodeCost], chosen: Chosen) -> Choice:
    """The offers as executors, with their true bytes and seconds."""
    realised = _realised(chosen)
    segments = [executor for r in realised for executor in r.executors]
    kept = sum(int(r.kept) for r in realised)
    transient = max((int(r.transient) for r in realised), default=0)
    return priced(network, costs, segments, kept, transient, chosen)


def _realised(chosen: Chosen) -> list[Any]:
    return [proposer.realise(offer) for proposer, offer in chosen]
