"""Proposers for what JAX differentiates: stored nodes, recomputed stretches, checkpointed scans."""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ..network.cutting import Network
from ..segments.base import Offer, Proposer, Realised
from ..segments.costs import NodeCost
from ..segments.loop import TiledExecutor
from ..segments.reruns import spared_by_end
from ..segments.seconds import node_seconds
from ..segments.store import (
    NestedExecutor,
    StoreExecutor,
    may_run_again,
    store_or_recompute,
    stored_sizes,
)
from .timeline import fresh_bytes


class Plain:
    """The costs of nodes that JAX differentiates.

    `live`: bytes of the states alive before each node. `free`: the nodes that may be stored or
    recomputed; others must be walked.
    """

    def __init__(
        self,
        network: Network,
        costs: Sequence[NodeCost],
        live: Sequence[int],
        free: Sequence[bool],
    ):
        self.network, self.costs, self.live = network, costs, live
        self.fresh = fresh_bytes(network)
        self.forward = [n.forward for n in node_seconds(network)]
        self.spared = spared_by_end(network, self.forward)
        self.sizes = stored_sizes(network, costs)
        sizes = [size if f else math.inf for size, f in zip(self.sizes, free, strict=True)]
        # A node that calls back runs once, even if the user wrapped it in `jax.checkpoint`.
        asked = [node.checkpointed and not node.calls_once for node in network.nodes]
        self.stored = [math.inf if a else size for size, a in zip(sizes, asked, strict=True)]
        # What calls back must run once. A scan in periods is a checkpoint by itself: run again, it would
        # keep the same states a second time.
        once = [
            node.calls_once or (cost.period is not None and not a)
            for node, cost, a in zip(network.nodes, costs, asked, strict=True)
        ]
        self.recomputed = [math.inf if o else size for size, o in zip(sizes, once, strict=True)]

    def realise(self, offer: Offer) -> Realised:
        """Stored or recomputed, whichever keeps less. Scans that are cheaper in tiles are segments of
        their own."""
        key = ("plain", offer.start, offer.stop)  # the same in many choices
        memory = self.network.memory
        if key not in memory:
            memory[key] = self._executors(offer.start, offer.stop)
        found = memory[key]
        taken = []
        for executor in found:
            own = self.costs[executor.start : executor.stop]
            inner = max(c.gradients for c in own) + max(c.transient for c in own)
            taken.append(executor.transient_bytes + inner)
        return Realised(found, sum(e.kept_bytes for e in found), max(taken))

    def _executors(self, start: int, stop: int) -> list[Any]:
        network, costs = self.network, self.costs
        nodes = network.nodes[start:stop]
        tiled = [i for i in range(start, stop) if costs[i].period is not None]
        if not tiled:
            # The reverse pass begins with the last segment. Recomputing it would need at once what
            # storing it keeps, and that is freed before any other segment needs memory.
            if stop == len(network.nodes) and not any(n.checkpointed for n in nodes):
                return [StoreExecutor(network, start, stop)]
            return [store_or_recompute(network, start, stop)]
        parts: list[Any] = []
        for i in tiled:
            if start < i:
                parts.append(StoreExecutor(network, start, i))
            period = costs[i].period
            assert period is not None
            parts.append(TiledExecutor(network, i, i + 1, (period,)))
            start = i + 1
        if start < stop:
            parts.append(StoreExecutor(network, start, stop))
        asked = any(n.checkpointed for n in nodes) and may_run_again(nodes)
        return [NestedExecutor(parts)] if asked else parts


class StoreProposer(Proposer):
    """Single nodes, stored; neighbours are one segment."""

    joins = True

    def __init__(self, plain: Plain):
        self.plain = plain

    def limits(self) -> set[int]:
        return set()

    def begin(self, limit: int, worth: float) -> None:
        del limit, worth  # a stored node takes nothing besides what it keeps

    def ending_at(self, stop: int, best: Sequence[float]) -> Iterable[Offer]:
        del best
        i = stop - 1
        again = self.plain.forward[i] if self.plain.costs[i].period is not None else 0.0
        yield Offer(i, stop, self.plain.stored[i], seconds=again)

    def realise(self, offer: Offer) -> Realised:
        return self.plain.realise(offer)


class RecomputeProposer(Proposer):
    """Stretches that run again from the state at their start."""

    def __init__(self, plain: Plain):
        self.plain = plain

    def limits(self) -> set[int]:
        kept = sorted({size for size in self.plain.sizes if size})
        total = sum(self.plain.sizes)
        found = {0, total, *kept[:: max(1, len(kept) // 8)], *kept[-1:]}
        limit = float(kept[-1]) if kept else 0.0
        while kept and limit < total:
            found.add(int(limit))
            limit *= 1.5
        return found

    def begin(self, limit: int, worth: float) -> None:
        plain = self.plain
        # Where time counts, cuts are many, and what passes over several of them is kept only once.
        starts, spared = (plain.fresh, plain.spared) if worth else (plain.live, None)
        self.stretches = Stretches(
            plain.recomputed, plain.live, plain.forward, limit, worth, starts=starts, spared=spared
        )

    def ending_at(self, stop: int, best: Sequence[float]) -> Iterable[Offer]:
        return self.stretches.ending_at(stop, best)

    def realise(self, offer: Offer) -> Realised:
        return self.plain.realise(offer)


class Stretches:
    """For each node, the recomputed stretch that ends there, takes at most a limit, and is cheapest.

    `sizes`: what each node takes; infinite if it may not be recomputed. `again`: seconds that each node
    takes if it runs once more, of which one is `worth` so many bytes. `starts`: bytes kept at each
    start, by default all that is `live`. `spared`: (start, stop) -> seconds of nodes that need not run
    again: they count once a start is chosen, and do not choose it.

    The starts within the limit form a window that slides over the nodes. It holds only starts that are
    cheaper than every later one, so each start enters and leaves once.
    """

    def __init__(
        self,
        sizes: Sequence[float],
        live: Sequence[int],
        again: Sequence[float],
        limit: int,
        worth: float,
        *,
        starts: Sequence[int] | None = None,
        spared: Callable[[int, int], float] | None = None,
    ):
        never = 1 << 62
        whole = [never if math.isinf(b) else int(b) for b in sizes]
        self.prefix = list(itertools.accumulate(whole, initial=0))
        self.seconds = list(itertools.accumulate(again, initial=0.0))
        self.limit, self.worth, self.spared = limit, worth, spared
        self.starts = live if starts is None else starts
        n = len(sizes)
        self.narrow = {
            i
            for i in range(n + 1)
            if worth or i in (0, n) or (live[i] <= live[i - 1] or live[i] <= live[min(i + 1, n)])
        }
        # A stretch must be able to begin right after a node that cannot be part of one.
        self.narrow |= {i + 1 for i, size in enumerate(sizes) if math.isinf(size)}
        self.window: deque[tuple[float, int]] = deque()  # (cost, start), both growing

    def ending_at(self, stop: int, best: Sequence[float]) -> Iterable[Offer]:
        """The best offer that ends at a node; to be called for every node in turn."""
        window, prefix = self.window, self.prefix
        if stop - 1 in self.narrow:
            # What later nodes take if they run once more is the same for all starts.
            cost = best[stop - 1] + self._start_bytes(stop - 1) - self.worth * self.seconds[stop - 1]
            while window and window[-1][0] > cost:
                window.pop()
            window.append((cost, stop - 1))
        while window and prefix[stop] - prefix[window[0][1]] > self.limit:
            window.popleft()
        if window:
            start = window[0][1]
            transient = prefix[stop] - prefix[start]
            again = self.seconds[stop] - self.seconds[start]
            if self.spared is not None:
                again -= self.spared(start, stop)
            yield Offer(start, stop, self._start_bytes(start), transient, again)

    def _start_bytes(self, start: int) -> int:
        """Bytes of the state that a stretch starts from; the first is an argument and costs nothing."""
        return self.starts[start] if start else 0
