"""Peak memory: the bytes alive at each moment of the phases.

Stored residuals and working memory do not peak at the same time. In a network whose states shrink, what
later layers keep has been freed when the first layers' cotangents, the largest ones, arrive. So the
passes are simulated node by node. With aᵢ the bytes of the state before node i, and cotangents as large
as states,

    Phase I, or forward    kept so far + aᵢ + aᵢ₊₁
    reverse                kept by the nodes up to i + aᵢ + aᵢ₊₁; a product keeps its input only for the
                           gradient of its weights, and frees it before its state's cotangent is made
    Phase II               kept in Phase I + anchors of the nodes after i + aᵢ + aᵢ₊₁
    Phase III              what the nodes from i on have kept + both states and both cotangents

Loops are single nodes here; inside, both states and both cotangents of a layer are alive.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from ..execute.residuals import nbytes
from ..network.cutting import Network
from ..segments.base import Executor, Priced
from ..segments.costs import NodeCost, carry_bytes
from ..segments.fusion import fusion_of, layer_bytes
from ..segments.seconds import NodeSeconds, device_kind, node_seconds, rates_of
from ..segments.store import StoreExecutor, is_one_product


def peak(network: Network, segments: Sequence[Priced], costs: Sequence[NodeCost]) -> int:
    """The most bytes alive at once, besides arguments and results."""
    return timeline_of(network, costs).through(segments)


def backprop_peak(network: Network, costs: Sequence[NodeCost]) -> int:
    """`peak` for plain reverse mode, which keeps everything, and Booleans as bytes."""
    whole = StoreExecutor(network, 0, len(network.nodes))
    whole.packs = False
    return peak(network, [whole], costs)


def backprop_seconds(network: Network) -> float:
    """What plain reverse mode takes."""
    return sum(n.forward + n.backward for n in node_seconds(network))


def timeline_of(network: Network, costs: Sequence[NodeCost]) -> Timeline:
    """The one timeline of a network with these costs: it remembers what segments take."""
    found = network.memory.get("timeline")
    if found is None or found.costs is not costs:
        found = network.memory["timeline"] = Timeline(network, costs)
    return found


class _Taken(NamedTuple):
    """What one segment takes, wherever it stands."""

    peak: int  # of both passes
    held: int
    states: Mapping[Any, Any]  # those among what is held


class Timeline:
    """Bytes alive while the passes go over the nodes; segments ask it for what single nodes take."""

    seconds: Sequence[NodeSeconds]

    def __init__(self, network: Network, costs: Sequence[NodeCost]):
        self.network, self.nodes, self.costs = network, network.nodes, costs
        self.seconds = node_seconds(network)
        self.live = live_bytes(network)
        self.passing = passing_bytes(network)
        self.fresh = fresh_bytes(network)
        self.fusion, self.given = fusion_of(network), network.state
        self.written, self.written_through = _written_bytes(network)
        self._taken: dict[Priced, _Taken] = {}  # many choices have the same segments

    def through(self, segments: Sequence[Priced], *, beside: Iterable[Any] = ()) -> int:
        """The peak of a forward pass over the segments and the reverse pass.

        `beside`: states that are there anyway, and not counted.
        """
        return max(self._peaks(segments, beside), default=0)

    def busiest(self, segments: Sequence[Priced]) -> Any:
        """The segment in which the peak lies; None if there are none."""
        peaks = self._peaks(segments)
        return segments[peaks.index(max(peaks))] if peaks else None

    def _peaks(self, segments: Sequence[Priced], beside: Iterable[Any] = ()) -> list[int]:
        """The peak within each segment, of both passes."""
        peaks, before = [], 0
        held: set[Any] = {self.fusion.of(v) for v in (*self.given, *beside)}
        for segment in segments:
            # What an earlier segment holds, or the caller, is there anyway.
            own = self._takes(segment)
            twice = nbytes(*(v.aval for v in held & own.states.keys()))
            held |= own.states.keys()
            peaks.append(before + own.peak - twice)
            before += own.held - twice
        return peaks

    def _takes(self, segment: Priced) -> _Taken:
        if segment not in self._taken:
            peak = max(segment.forward_peak(self), segment.backward_peak(self))
            states = {self.fusion.of(v): v for v in segment.held_states()}
            self._taken[segment] = _Taken(peak, segment.held(self), states)
        return self._taken[segment]

    def lasts(self, segments: Sequence[Executor]) -> float:
        """Seconds of both passes over the segments.

        A state between two segments is written to memory and read again, where a compiler might have
        fused what makes it with what reads it. What products make is written in any case.
        """
        rates = rates_of(device_kind())
        fused = (self.fresh[s.start] for s in segments[1:] if not self.nodes[s.start - 1].is_heavy)
        between = 2 * sum(fused) / rates.bandwidth + rates.launch * len(segments[1:])
        return between + sum(segment.seconds(self) for segment in segments)

    def states(self, i: int, *, fused: bool = False) -> int:
        """The states before and after node i, passing ones once; of a loop, at least twice its carry.

        `fused`: without those that a compiler does not write to memory, where it sees the nodes around.
        """
        if fused:
            around = self.written[i] + self.written[i + 1] - self.written_through[i]
        else:
            around = self.live[i] + self.live[i + 1] - self.passing[i]
        return max(around, 2 * carry_bytes(self.nodes[i])) if self.nodes[i].is_scan else around

    def start(self, segment: Priced) -> int:
        """Bytes of the state that a segment starts from; the first is an argument and costs nothing."""
        return self.live[segment.start] if segment.start else 0

    def forward(
        self,
        segment: Priced,
        own: Sequence[int],
        twice: Sequence[int] | None = None,
        *,
        fused: bool = False,
    ) -> int:
        """The peak of a forward pass over a segment whose nodes keep `own` bytes.

        `twice`: of what was kept before each node, bytes that are among the states around it.
        """
        kept = itertools.accumulate(own, initial=segment.held(self) - sum(own))
        twice = [0] * len(own) if twice is None else twice
        places = range(segment.start, segment.stop)
        around = (self.states(i, fused=fused) - t for i, t in zip(places, twice, strict=True))
        return max((k + a for k, a in zip(kept, around, strict=False)), default=0)

    def reverse(
        self, i: int, before: int, kept: int, *, ordered: bool = True, fused: bool = False
    ) -> int:
        """The peak of one node's reverse step.

        `before`: what earlier nodes keep; `kept`: that and what the node keeps. `ordered`: the gradient
        of a product's weights is computed before its state's cotangent. `fused`: see `states`.
        """
        node, cost = self.nodes[i], self.costs[i]
        if node.is_scan:
            working = layer_bytes(node, self.network)
            return kept + 2 * self.states(i, fused=fused) + working + cost.gradients
        if ordered and is_one_product(node):
            after = self.written if fused else self.live
            return max(kept + after[i + 1], before + self.states(i, fused=fused))
        return kept + self.states(i, fused=fused)

    def inverted(self, i: int) -> int:
        """Both cotangents plus the reconstructed input; the output it comes from is gone by then."""
        states, gradients = self.states(i), self.costs[i].gradients
        if self.nodes[i].is_scan:
            return 2 * states + gradients
        return states + max(self.live[i], self.live[i + 1]) + gradients


def live_bytes(network: Network) -> list[int]:
    """Bytes of the activations alive before each node (and after the last)."""
    if "live" not in network.memory:
        network.memory["live"] = _overlaps(network, lambda first, last: (first, last + 1))
    return network.memory["live"]


def passing_bytes(network: Network) -> list[int]:
    """Bytes of the activations alive both before and after each node, such as a skip over it."""
    if "passing" not in network.memory:
        network.memory["passing"] = _overlaps(network, lambda first, last: (first, last))[:-1]
    return network.memory["passing"]


def fresh_bytes(network: Network) -> list[int]:
    """Bytes of the activations alive before each node that the node before it has made."""
    passing = [0, *passing_bytes(network)]
    return [live - over for live, over in zip(live_bytes(network), passing, strict=True)]


def _written_bytes(network: Network) -> tuple[list[int], list[int]]:
    """`live_bytes` and `passing_bytes` of what a compiler writes to memory."""
    if "written" not in network.memory:
        fusion = fusion_of(network)
        spans = (lambda first, last: (first, last + 1)), (lambda first, last: (first, last))
        live, through = (_overlaps(network, s, fusion.written, fusion.last_read) for s in spans)
        network.memory["written"] = live, through[:-1]
    return network.memory["written"]


def _overlaps(
    network: Network,
    span: Callable[[int, int], tuple[int, int]],
    among: Collection[Any] | None = None,
    read: Mapping[Any, int] | None = None,
) -> list[int]:
    """Bytes of activations by place; `span` maps the places where one is made and last read to a range.

    The copies that a fork makes are one array. `among`: the activations that count. `read`: the last
    node that reads each.
    """
    born: dict[Any, int] = {v: 0 for v in network.state}
    last: dict[Any, int] = {}
    of = fusion_of(network).of
    for i, n in enumerate(network.nodes):
        if not n.is_fork:
            born.update((v, i + 1) for v in (*n.block.outputs, *n.block.exports))
    for v, i in (network.last_read if read is None else read).items():
        last[of(v)] = max(i, last.get(of(v), -1))
    change = [0] * (len(network.nodes) + 2)
    for v, first in born.items():
        if last.get(v, -1) >= first and (among is None or v in among):
            start, stop = span(first, last[v])
            change[start] += nbytes(v.aval)
            change[stop] -= nbytes(v.aval)
    return list(itertools.accumulate(change[:-1]))
