"""Walks, as the search for a plan sees them: whole, or in segments whose Phase I is run again."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ..network.cutting import Network
from ..segments.base import Offer, Priced, Proposer, Realised
from ..segments.fusion import workspace_bytes
from ..segments.loop import TiledWalkExecutor, tile_bytes, tiled_walk
from ..segments.scan_step import ScanStep
from ..segments.seconds import node_seconds
from ..segments.steps import Step
from ..segments.walk import WalkExecutor
from .cotangents import GainTable, Growth, Options, evenly, least_bytes, period_for, plan_walk
from .plain import Stretches


@dataclass(frozen=True)
class Walks:
    """What walking costs, node by node."""

    network: Network
    options: Options
    gains: GainTable
    live: Sequence[int]  # bytes of the states alive before each node

    @functools.cached_property
    def steps(self) -> Sequence[Step]:
        """The steps of a walk over the whole network."""
        return self.plan(0, len(self.network.nodes)).steps if self.network.nodes else []

    @property
    def never(self) -> list[bool]:
        """The nodes that no walk may go through.

        A scan whose layers are not walked would be run again and stored, all of it, in Phase II.
        """
        return [(s.node.calls_once or s.node.is_scan) and not s.is_loop for s in self.steps]

    @functools.cached_property
    def bytes(self) -> list[float]:
        """What a walk keeps of each node."""
        pairs = zip(self.steps, self.never, strict=True)
        return [math.inf if never else s.kept_bytes + s.memo_bytes for s, never in pairs]

    def scan(self, i: int) -> ScanStep | None:
        """The step of node i if that is a scan whose layers are walked."""
        step = self.steps[i]
        return step if isinstance(step, ScanStep) and step.source != "none" else None

    @property
    def _envs(self) -> list[Any] | None:
        return None if self.gains.values is None else [self.gains.values]

    def plan(self, start: int, stop: int) -> WalkExecutor:
        about = {"table": self.gains, "envs": self._envs}
        return plan_walk(self.network, start, stop, self.options, **about)[0]

    def least_bytes(self, *, light: bool) -> list[int]:
        """Lower bounds of `bytes` that are found sooner: only what every walk must keep.

        `light`: count light nodes as well, whose rules take a trace.
        """
        return least_bytes(self.network, self.options, self.gains, self._envs, light=light)

    @functools.cached_property
    def forward(self) -> list[float]:
        """Seconds of each node's forward pass."""
        return [n.forward for n in node_seconds(self.network)]

    def start_bytes(self, start: int) -> int:
        """Bytes of the state that a walk starts from; the first one is an argument and costs nothing."""
        return self.live[start] if start else 0


class WalkProposer(Proposer):
    """Walks that keep what Phase I and Phase II keep."""

    def __init__(self, walks: Walks):
        self.walks, self.bytes = walks, walks.bytes

    def limits(self) -> set[int]:
        return set()

    def begin(self, limit: int, worth: float) -> None:
        del limit
        self.worth = worth
        # The least cost of the nodes so far if the last one is walked, where that walk starts, and what
        # it keeps and takes.
        self.walking, self.walk_start, self.kept, self.seconds = math.inf, 0, 0.0, 0.0

    def ending_at(self, stop: int, best: Sequence[float]) -> Iterable[Offer]:
        i = stop - 1
        fresh = best[i] + self.walks.start_bytes(i)
        if fresh < self.walking:
            self.walking, self.walk_start = fresh, i
            self.kept, self.seconds = float(self.walks.start_bytes(i)), 0.0
        again = 2 * self.walks.forward[i]  # x once more, and a vijp
        self.kept, self.seconds = self.kept + self.bytes[i], self.seconds + again
        self.walking += self.bytes[i] + self.worth * again
        if self.walking < math.inf:
            # At the end of Phase II, all that a walk keeps is alive.
            yield Offer(self.walk_start, stop, self.kept, seconds=self.seconds, at_once=self.kept)

    def realise(self, offer: Offer) -> Realised:
        walk = self.walks.plan(offer.start, offer.stop)
        return Realised([walk], walk.kept_bytes + self.walks.start_bytes(offer.start))


@dataclass(eq=False)
class WalkBound(Priced):
    """A lower bound of a walk: the state that it starts from, and in Phase II part of what it keeps."""

    start: int
    stop: int
    bytes: Sequence[int]  # a lower bound of what is kept of each node

    def held(self, timeline: Any) -> int:
        return timeline.start(self)

    def forward_peak(self, timeline: Any) -> int:
        return timeline.forward(self, [0] * len(self.bytes))

    def backward_peak(self, timeline: Any) -> int:
        top = after = 0
        for i, own in zip(reversed(range(self.start, self.stop)), reversed(self.bytes), strict=True):
            workspace = workspace_bytes(timeline.nodes[i], timeline.network)
            top = max(top, after + timeline.states(i) + workspace)
            after += own
        return self.held(timeline) + max(top, after)


class WalkBoundProposer(WalkProposer):
    """Proposes lower bounds of walks, which are cheap to find and cannot be run."""

    def __init__(self, walks: Walks, *, light: bool):
        self.walks, self.bytes = walks, walks.least_bytes(light=light)

    def realise(self, offer: Offer) -> Realised:
        own = [int(size) for size in self.bytes[offer.start : offer.stop]]
        return Realised([WalkBound(offer.start, offer.stop, own)], offer.kept)


class RerunProposer(Proposer):
    """Walks that keep the state at their start, and run Phase I again."""

    def __init__(self, walks: Walks):
        self.walks = walks
        # A scan is never part of a longer segment.
        self.sizes = [
            math.inf if s.is_loop else b for s, b in zip(walks.steps, walks.bytes, strict=True)
        ]

    def limits(self) -> set[int]:
        found: set[int] = set()
        sizes = [b for b in self.sizes if 0 < b < math.inf]
        total = sum(sizes)
        limit = float(max(sizes, default=0))
        while sizes and limit < 2 * total:
            found.add(int(limit))
            limit *= 1.25
        return found

    def begin(self, limit: int, worth: float) -> None:
        again = [3 * seconds for seconds in self.walks.forward]  # Phase I, x in Phase III, and a vijp
        self.stretches = Stretches(self.sizes, self.walks.live, again, limit, worth)

    def ending_at(self, stop: int, best: Sequence[float]) -> Iterable[Offer]:
        return self.stretches.ending_at(stop, best)

    def realise(self, offer: Offer) -> Realised:
        walk = self.walks.plan(offer.start, offer.stop)
        walk.recomputed = True
        return Realised([walk], self.walks.start_bytes(offer.start), walk.kept_bytes)


class TileProposer(Proposer):
    """Scans that are walked in tiles; an offer's setting is the tile's length."""

    def __init__(self, walks: Walks):
        self.walks, self.limit = walks, 0

    def limits(self) -> set[int]:
        found: set[int] = set()
        for i in range(len(self.walks.steps)):
            step = self.walks.scan(i)
            if step is not None:
                layer = (step.kept_bytes + step.layers_memo_bytes) / step.length
                whole = range(1, step.length + 1)
                found.update(math.ceil(layer * k) for k in whole if step.length % k == 0)
        return found

    def begin(self, limit: int, worth: float) -> None:
        del worth
        self.limit = limit

    def ending_at(self, stop: int, best: Sequence[float]) -> Iterable[Offer]:
        del best
        step = self.walks.scan(stop - 1)
        if step is None:
            return
        layer = max(1.0, (step.kept_bytes + step.layers_memo_bytes) / step.length)
        every = evenly(step.length, max(1, min(step.length, int(self.limit / layer))))
        # A single tile saves nothing, and XLA would make room for those of several scans at once.
        if every < step.length:
            again = 3 * self.walks.forward[stop - 1]
            yield Offer(stop - 1, stop, *tile_bytes(step, every), again, every)

    def realise(self, offer: Offer) -> Realised:
        walk = self.walks.plan(offer.start, offer.stop)
        walk.recomputed = True
        (step,) = walk.steps
        if offer.setting >= step.length:  # one tile: a walk like any other
            return Realised([walk], self.walks.start_bytes(offer.start), walk.kept_bytes)
        tiled = in_tiles(walk, offer.setting, self.walks.options)
        return Realised([tiled], tiled.start_bytes, tiled.kept_bytes)


def in_tiles(walk: WalkExecutor, every: int, options: Options) -> TiledWalkExecutor:
    """A scan walked in tiles, each from an exact cotangent."""
    (step,) = walk.steps
    layer = step.gain
    if options.anchor_every is None:
        step.period = period_for(layer, Growth(), every, options.limit)
    span = min(every, step.period or every)
    grown = Growth().times(layer.over(span)).factor
    inside = Growth(step.walk.growth, layer.mixes).factor
    walk.growth = max(grown, inside)
    return tiled_walk(walk, every)


def cut_evenly(
    walker: WalkProposer, chosen: Sequence[tuple[Proposer, Offer]], count: int | str
) -> list[tuple[Proposer, Offer]]:
    """The chosen offers, with those of `walker` cut into `count` segments of equally many layers."""
    walks = walker.walks
    layers = [s.length if isinstance(s, ScanStep) else int(s.node.is_heavy) for s in walks.steps]
    depth = sum(layers)
    names = {"sqrt": math.ceil(math.sqrt(depth)), "block": depth}
    segments = names[count] if isinstance(count, str) else count
    if segments > depth:
        raise ValueError(
            f"Moonwalk(checkpoint={count}): the network has {depth} layers, too few for {segments} "
            "segments; ask for fewer, or for checkpoint='auto'"
        )
    every = -(-depth // max(1, segments))
    rerun, tiles = RerunProposer(walks), TileProposer(walks)
    result: list[tuple[Proposer, Offer]] = []

    def add(by: Proposer, start: int, stop: int, setting: Any = None) -> None:
        if start < stop:
            result.append((by, Offer(start, stop, 0, setting=setting)))

    for by, offer in chosen:
        if by is not walker:
            result.append((by, offer))
            continue
        start, taken = offer.start, 0
        for i in range(offer.start, offer.stop):
            is_scan = walks.scan(i) is not None
            if is_scan or taken + layers[i] > every:
                add(rerun, start, i)
                start, taken = i, 0
            taken += layers[i]
            if is_scan:
                add(tiles, i, i + 1, evenly(layers[i], min(every, layers[i])))
                start, taken = i + 1, 0
        add(rerun, start, offer.stop)
    return result
