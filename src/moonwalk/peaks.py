"""When memory is greatest: the phases in time.

What is kept, and what is worked on, are not at their most at once. In a network whose states shrink,
what the later layers keep is gone when the first ones' cotangents, the largest, arrive. So the passes
are gone through node by node. With aᵢ the bytes of the state before node i, and cotangents as large as
states,

    Phase I, or forward    kept so far + aᵢ + aᵢ₊₁
    reverse                kept by the nodes up to i + aᵢ + aᵢ₊₁; a product needs what it keeps for its
                           weights alone, and that is gone before its state's cotangent is made
    Phase II               kept in Phase I + anchors of the nodes after i + aᵢ + aᵢ₊₁
    Phase III              what the nodes from i on have kept + both states and both cotangents

Loops are single nodes here; inside, both states and both cotangents of a layer are alive.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from .costs import NodeCost, carry_bytes, in_periods
from .inversion import Inverted
from .residuals import nbytes
from .scan_walks import ScanWalk
from .scans import ScanStep
from .segments import Nested, Plain, is_one_product, live_bytes, passing_bytes
from .trunk import Trunk
from .walks import Walk

Segment = Walk | Plain | Nested | Inverted


def peak(trunk: Trunk, segments: Sequence[Segment], costs: Sequence[NodeCost]) -> int:
    """The most bytes alive at once, beside arguments and results."""
    return _Passes(trunk, costs).through(segments)


def backprop_peak(trunk: Trunk, costs: Sequence[NodeCost]) -> int:
    """The same of plain reverse mode, which keeps everything."""
    passes = _Passes(trunk, costs)
    kept = list(itertools.accumulate((c.backprop for c in costs), initial=0))
    n = len(costs)
    return max((passes.reverse(i, kept[i], kept[i + 1]) for i in range(n)), default=0)


class _Passes:
    def __init__(self, trunk: Trunk, costs: Sequence[NodeCost]):
        self.nodes, self.costs = trunk.nodes, costs
        self.live = live_bytes(trunk)
        self.passing = passing_bytes(trunk)

    def through(self, segments: Sequence[Segment]) -> int:
        """Forward over the segments, and back."""
        top = kept = 0
        for segment in segments:
            top = max(top, kept + self.forward(segment))
            kept += self.kept(segment)
        for segment in reversed(segments):
            kept -= self.kept(segment)
            top = max(top, kept + self.back(segment))
        return top

    # -- one node --------------------------------------------------------------------------------
    def states(self, i: int) -> int:
        """Before and after node i, what passes it by once; of a loop, its carry inside."""
        around = self.live[i] + self.live[i + 1] - self.passing[i]
        return max(around, 2 * carry_bytes(self.nodes[i])) if self.nodes[i].is_scan else around

    def reverse(self, i: int, before: int, kept: int) -> int:
        """Of one node by itself: `before`, what those before it keep; `kept`, that and its own."""
        node, cost = self.nodes[i], self.costs[i]
        if node.is_scan:
            return kept + 2 * self.states(i) + cost.gradients
        if is_one_product(node):
            return max(kept + self.live[i + 1], before + self.states(i))
        return kept + self.states(i)

    def inverted(self, i: int) -> int:
        """Both cotangents, and the state that is had again: the one it is had from is gone by then."""
        states, gradients = self.states(i), self.costs[i].gradients
        if self.nodes[i].is_scan:
            return 2 * states + gradients
        return states + max(self.live[i], self.live[i + 1]) + gradients

    # -- one segment -----------------------------------------------------------------------------
    def kept(self, segment: Segment) -> int:
        """From Phase I until its turn in the reverse pass."""
        if isinstance(segment, ScanWalk):
            return segment.start_bytes
        if isinstance(segment, Walk):
            residuals = 0 if segment.recomputed else sum(s.kept_bytes for s in segment.steps)
            return residuals + self._start(segment)
        return segment.kept_bytes

    def _start(self, segment: Segment) -> int:
        return self.live[segment.start] if segment.start else 0

    def forward(self, segment: Segment) -> int:
        places = range(segment.start, segment.stop)
        if isinstance(segment, Walk) and not segment.recomputed:
            own = [s.kept_bytes for s in segment.steps]
        elif isinstance(segment, Plain) and not segment.recomputed:
            own = segment.kept_by_node
        else:
            own = [0] * len(places)
        before = itertools.accumulate(own, initial=self.kept(segment) - sum(own))
        return max((b + self.states(i) for b, i in zip(before, places, strict=False)), default=0)

    def back(self, segment: Segment) -> int:
        """In the reverse pass, with what it keeps."""
        if isinstance(segment, ScanWalk):
            return segment.start_bytes + segment.kept_bytes + 2 * self.states(segment.start)
        if isinstance(segment, Walk):
            return self._back_and_forth(segment)
        if isinstance(segment, Inverted):
            return segment.transient_bytes + max(map(self.inverted, range(segment.start, segment.stop)))
        arriving = self.live[segment.stop]
        if isinstance(segment, Nested):
            return segment.kept_bytes + arriving + self.through(segment.parts)
        return self._plain(segment, arriving)

    def _plain(self, segment: Plain, arriving: int) -> int:
        start = segment.kept_bytes if segment.recomputed else 0
        kept = list(itertools.accumulate(segment.kept_by_node, initial=0))
        top = 0
        for k, i in enumerate(range(segment.start, segment.stop)):
            if segment.recomputed:
                top = max(top, kept[k] + self.states(i) + arriving)
            inside = 0
            if i in segment.periods:
                inside = in_periods(self.nodes[i], self.costs[i].backprop, segment.periods[i])[1]
            top = max(top, self.reverse(i, kept[k], kept[k + 1]) + inside)
        return start + top

    def _back_and_forth(self, walk: Walk) -> int:
        steps, start = walk.steps, self._start(walk)
        residuals = sum(s.kept_bytes for s in steps)
        memos = [s.memo_bytes for s in steps]
        top, after = 0, 0
        if walk.recomputed:  # Phase I once more
            last = walk.stop - 1
            top = residuals + self.states(last) + self.live[walk.stop]
        for k in reversed(range(len(steps))):  # Phase II
            top = max(top, residuals + after + self.states(walk.start + k))
            after += memos[k]
        for k, step in enumerate(steps[: walk.end]):  # Phase III
            i = walk.start + k
            has_h = k > 0 and steps[k - 1].source != "none" and not steps[k - 1].is_stem
            seeded = k == 0 and bool(walk.seeds)
            h_in = nbytes(*(v.aval for v in step.block.inputs)) if has_h or seeded else 0
            # An anchor is a memo already.
            h_out = nbytes(*(v.aval for v in step.block.outputs)) if step.is_walked else 0
            working = self.states(i) + h_in + h_out
            if isinstance(step, ScanStep):
                # Its seed is the h that Phase II ends with, which is one of the two.
                working = 2 * self.states(i) - nbytes(*(step.ins[j].aval for j in step.seeded))
            top = max(top, residuals + after + working)
            residuals -= step.kept_bytes
            after -= memos[k]
        return start + top
