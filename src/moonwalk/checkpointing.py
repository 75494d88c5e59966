"""Checkpointed backpropagation: the trunk in segments that are run again, as many as one asks for.

A layer is a heavy node (a product, a convolution) and the light ones up to the next, or one turn of a
scan. Segments are cut in front of layers, where the state alone is alive in most networks; a scan is a
segment of its own, a scan of checkpointed scans. "recursive" cuts the layers into quarters, those into
quarters, and so on: a forward pass more for every level, and no level keeps more than three states
beside the one it starts from. Halves would keep one, on twice the levels: two thirds of the states, for
twice the passes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from . import engine, peaks
from .costs import NodeCost
from .engine import Circumstances, Engine, Staging
from .methods import Checkpoint
from .planning import Choice
from .plans import Plan
from .segments import Nested, Plain
from .trunk import Node, Trunk

Segment = Plain | Nested


def plan(
    staging: Staging,
    method: Checkpoint,
    call: Circumstances,
) -> tuple[Engine, Plan]:
    """As `engine.plan`; nothing is walked, so there is nothing to measure."""
    made = engine.draft(staging, method, gains=call.gains, fused=call.fused)
    choice = made.plain
    if method.segments is not None:
        choice = in_segments(made.cut, made.costs, method.segments)
    described = made.describe(choice, method, call.signature)
    described = replace(described, segments=_count(choice))
    return Engine(staging, made.cut, choice.segments), described


class Unit(NamedTuple):
    """Consecutive nodes that no cut divides: a layer, or a scan over some."""

    start: int
    stop: int
    layers: int


def in_segments(cut: Trunk, costs: Sequence[NodeCost], asked: int | str) -> Choice:
    """Segments of equally many layers, or quarters of quarters."""
    units = _units(cut)
    depth = sum(u.layers for u in units)
    if asked == "recursive":
        segments = _quarters(cut, units) if units else []
    else:
        count = {"sqrt": round(math.sqrt(depth)), "block": depth}.get(asked, asked)  # type: ignore[call-overload]
        if count > max(1, depth):
            raise ValueError(
                f"Checkpoint(segments={asked}): the network has {depth} layers, too few for {count} "
                "segments; ask for fewer, or for segments=None (a scan that prints is one layer; a "
                "network whose input is differentiated is one only if that is named in inputs=)"
            )
        segments = _evenly(cut, units, -(-depth // max(1, count)))
    kept = sum(s.kept_bytes for s in segments)
    return Choice(list(segments), kept, peaks.peak(cut, segments, costs))


def _units(cut: Trunk) -> list[Unit]:
    """The nodes, cut in front of every layer; what precedes the first belongs to it."""
    starts = [i for i, node in enumerate(cut.nodes) if node.is_heavy]
    after = [i + 1 for i in starts if _is_loop(cut.nodes[i]) and i + 1 < len(cut.nodes)]
    starts = sorted({*starts, *after})
    if starts and not _is_loop(cut.nodes[starts[0]]):
        starts[0] = 0
    bounds = sorted({0, *starts, len(cut.nodes)})
    return [
        Unit(i, j, sum(_layers(cut.nodes[k]) for k in range(i, j)))
        for i, j in itertools.pairwise(bounds)
    ]


def _is_loop(node: Node) -> bool:
    return node.is_scan and not node.effects and not node.calls_once


def _layers(node: Node) -> int:
    return node.block.eqns[0].params["length"] if _is_loop(node) else int(node.is_heavy)


def _evenly(cut: Trunk, units: Sequence[Unit], every: int) -> list[Segment]:
    """Segments of so many layers; what stands alone between scans is a segment as it is."""
    result: list[Segment] = []
    open_: list[Unit] = []

    def close() -> None:
        if open_:
            result.append(Plain(cut, open_[0].start, open_[-1].stop))
            open_.clear()

    for unit in units:
        node = cut.nodes[unit.start]
        if _is_loop(node):
            close()
            # A scan that keeps its periods' starts is a stored one; one that is a single segment is not.
            periods = (every,) if every < unit.layers else ()
            keeps = {unit.start: periods} if periods else None
            result.append(Plain(cut, unit.start, unit.stop, keeps, recomputed=not periods))
            continue
        if sum(u.layers for u in open_) + unit.layers > every:
            close()
        open_.append(unit)
    close()
    return result


def _quarters(cut: Trunk, units: Sequence[Unit]) -> list[Segment]:
    """Four segments, each quartered in turn until single layers are left."""
    if len(units) == 1:
        (unit,) = units
        if not _is_loop(cut.nodes[unit.start]):
            return [Plain(cut, unit.start, unit.stop)]
        periods = _periods(unit.layers)
        keeps = {unit.start: periods} if periods else None
        return [Plain(cut, unit.start, unit.stop, keeps, recomputed=False)]
    result: list[Segment] = []
    for part in (quarter for half in _halves(units) for quarter in _halves(half)):
        parts = _quarters(cut, part)
        once = any(n.calls_once for n in cut.nodes[part[0].start : part[-1].stop])
        result += parts if once or len(parts) == 1 else [Nested(parts)]
    return result


def _halves(units: Sequence[Unit]) -> list[Sequence[Unit]]:
    """Two runs of about as many layers; one, of a single unit."""
    if len(units) == 1:
        return [units]
    before = list(itertools.accumulate(u.layers for u in units))
    middle = 1 + min(range(len(before) - 1), key=lambda i: abs(2 * before[i] - before[-1]))
    return [units[:middle], units[middle:]]


def _periods(layers: int) -> tuple[int, ...]:
    """Of a scan's levels: quarters, and what they leave over in one more; code grows with the levels.

    **Example:**

    >>> _periods(64), _periods(9), _periods(1)
    ((16, 4, 1), (3, 1), ())
    """
    found = []
    while layers > 1:
        layers = -(-layers // 4)
        found.append(layers)
    return tuple(found)


def _count(choice: Choice) -> int:
    """Segments that are run again, the innermost of nested ones."""
    result = 0
    for segment in choice.segments:
        assert isinstance(segment, Segment)
        for leaf in segment.leaves:
            loops = [
                -(-leaf.trunk.nodes[i].block.eqns[0].params["length"] // periods[-1])
                for i, periods in leaf.periods.items()
            ]
            result += sum(loops) or int(leaf.recomputed or isinstance(segment, Nested))
    return result
