"""Checkpointed backpropagation: the network in a requested number of segments that run again.

A *block* is what a good engineer would wrap in `jax.checkpoint`: consecutive nodes with one state in and
one out, around at least one product, convolution or loop, so that a skip and its branch stay together.
Where such pieces repeat in a pattern (attention, feed-forward, attention, …), a block is the whole
pattern. What comes before the first block and after the last (an embedding, a classifier and the loss)
is stored. A scan is a segment of its own, a scan of checkpointed scans.

"recursive" cuts the blocks into quarters, each quarter into quarters, and so on. Every level costs one
more forward pass and keeps at most three states besides the one it starts from. Cutting into halves
would keep one state per level on twice as many levels: two thirds of the states for twice the passes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from ..execute.residuals import nbytes
from ..network.cutting import Network, Node
from ..segments.costs import NodeCost
from ..segments.loop import TiledExecutor
from ..segments.store import NestedExecutor, RecomputeExecutor, StoreExecutor, store_or_recompute
from . import draft, search
from .draft import PlanRequest
from .methods import Checkpoint
from .report import Plan
from .search import Choice


def plan(network: Network, method: Checkpoint, call: PlanRequest) -> Plan:
    """Like `moonwalk.plan`; nothing is walked, so there is nothing to measure."""
    made = draft.draft(network, method, gains=call.gains, fused=call.fused)
    choice = made.plain
    if method.segments is not None:
        choice = in_segments(made.network, made.costs, method.segments)
    described = made.describe(choice, method, call)
    return replace(described, rerun=sum(s.rerun for s in choice.segments))


def by_hand(network: Network, costs: Sequence[NodeCost]) -> list[Choice]:
    """What an engineer would try first: a checkpoint around every block, or around √depth of them."""
    depth = sum(u.layers for u in _units(network))
    return [in_segments(network, costs, asked) for asked in ("block", "sqrt")] if depth else []


class Unit(NamedTuple):
    """Consecutive nodes that no cut divides."""

    start: int
    stop: int
    layers: int  # 1 for a block, its length for a scan, 0 for what comes before and after the blocks


def in_segments(network: Network, costs: Sequence[NodeCost], asked: int | str) -> Choice:
    """Segments with equal numbers of blocks, or ("recursive") quarters of quarters."""
    units = _units(network)
    depth = sum(u.layers for u in units)
    if asked == "recursive":
        segments = _quarters(network, units) if units else []
    else:
        # Rounded up: one more layer in a segment keeps more than the state of one more segment.
        count = {"sqrt": math.ceil(math.sqrt(depth)), "block": depth}.get(asked, asked)  # type: ignore[call-overload]
        if count > max(1, depth):
            raise ValueError(
                f"Checkpoint(segments={asked}): the network has {depth} layers, too few for {count} "
                "segments; ask for fewer, or for segments=None (a stem and a head beside repeated "
                "layers or a scan are not counted; a scan that prints is one layer; a "
                "network whose input is differentiated is one only if that is named in inputs=)"
            )
        segments = _evenly(network, units, -(-depth // max(1, count)), may_divide=asked == "sqrt")
    return search.priced(network, costs, segments, sum(s.kept_bytes for s in segments))


def _units(network: Network) -> list[Unit]:
    """The nodes, cut in front of every block."""
    if "units" not in network.memory:
        network.memory["units"] = _cut_into_units(network)
    return network.memory["units"]


def _cut_into_units(network: Network) -> list[Unit]:
    nodes = network.nodes
    blocks = _blocks(network)
    repeats = len({_key(network, b) for b in blocks}) < len(blocks)
    repeats |= any(_is_loop(node) for node in nodes)
    result = []
    for k, block in enumerate(blocks):
        layers = sum(_layers(nodes[i]) for i in block if _is_loop(nodes[i]))
        heavy = any(nodes[i].is_heavy for i in block)
        # What comes before or after a repeated pattern or a loop is a stem or a head.
        outer = repeats and k in (0, len(blocks) - 1) and _is_alone(network, blocks, k)
        result.append(Unit(block.start, block.stop, layers or int(heavy and not outer)))
    return result


def _blocks(network: Network) -> list[range]:
    """The pieces, with those that form one period of a repeated pattern joined."""
    pieces = _pieces(network)
    starts = [p.start for p in pieces]
    # Leave out nodes without a derivative, which may be shared: the first block makes a mask for all.
    carrying = [i for i, n in enumerate(network.nodes) if not n.is_aside]
    places = {i: place for place, i in enumerate(carrying)}
    models = [id(network.nodes[i].model) for i in carrying]
    period, first, count = _pattern(models, [places[s] for s in starts if s in places])
    if 2 * period * count < len(carrying):
        # Blocks with several states between them (a graph's nodes and edges) are no pieces.
        heavy = [place for place, i in enumerate(carrying) if network.nodes[i].is_heavy]
        alive = _alive(network, lambda v: nbytes(v.aval))
        wide = _shifted(_pattern(models, heavy), models, [alive[i] for i in carrying])
        if wide[0] * wide[2] > 2 * period * count:
            period, first, count = wide
    if not count:
        return pieces
    ends = [*carrying, len(network.nodes)]
    inside = [ends[first + k * period] for k in range(count + 1)]
    stop = inside[-1]
    after = [s for s in starts if s > stop]
    # Nodes between the last block and the next product join that: a final norm joins the head.
    if after and not any(network.nodes[i].is_heavy for i in range(stop, after[0])):
        after = after[1:]
    before = [s for s in starts if s < inside[0]]
    # A loop is a segment by itself, even where it repeats together with what surrounds it.
    loops = {j for i, n in enumerate(network.nodes) if _is_loop(n) for j in (i, i + 1)}
    bounds = sorted({*before, *inside, *after, *loops, len(network.nodes)})
    return [range(i, j) for i, j in itertools.pairwise(bounds)]


def _is_alone(network: Network, blocks: Sequence[range], k: int) -> bool:
    """Whether no other block has the same equations, whatever these read (a first layer reads data)."""

    def equations(block: range) -> tuple[str, ...]:
        nodes = (network.nodes[i] for i in block)
        return tuple(e.primitive.name for n in nodes if not n.is_aside for e in n.block.eqns)

    own = equations(blocks[k])
    return sum(equations(b) == own for b in blocks) == 1


def _pieces(network: Network) -> list[range]:
    """The finest pieces with one state in and one out, each around something heavy."""
    nodes = network.nodes
    narrow = _narrow(network)
    starts = {0}
    before = -1
    for i, node in enumerate(nodes):
        if not node.is_heavy:
            continue
        if _is_loop(node):
            starts.update((i, i + 1))
        else:
            # The latest place before it where one state is alive, behind the last heavy node.
            found = [j for j in range(before + 1, i + 1) if j in narrow]
            starts.update(found[-1:])
        before = i
    bounds = sorted({*(s for s in starts if s < len(nodes)), len(nodes)})
    return [range(i, j) for i, j in itertools.pairwise(bounds)]


def _narrow(network: Network) -> set[int]:
    """Places between nodes where at most one state that carries a cotangent is alive."""
    return {i for i, n in enumerate(_alive(network, lambda v: 1)) if n <= 1}


def _alive(network: Network, weigh: Callable[[Any], int]) -> list[int]:
    """The weight of the states that carry a cotangent and are alive before each node."""
    change = [0] * (len(network.nodes) + 2)
    born = {v: 0 for v in network.state}
    for i, node in enumerate(network.nodes):
        born.update((v, i + 1) for v in node.block.outputs)
    for v, i in born.items():
        last = network.last_read.get(v, -1)
        if last >= i:
            change[i] += weigh(v)
            change[last + 1] -= weigh(v)
    return list(itertools.accumulate(change[:-1]))


def _key(network: Network, piece: range) -> tuple[Any, ...]:
    """Equal for pieces that compute the same."""
    nodes = (network.nodes[i] for i in piece)
    return tuple(id(n.model) for n in nodes if not n.is_aside)


def _pattern(models: Sequence[Any], starts: Sequence[int]) -> tuple[int, int, int]:
    """(period, first, count) of the repeated pattern that covers most of the sequence. It begins and
    ends at `starts`; count is 0 if nothing repeats.

    **Example:**

    >>> _pattern("eamamamh", [0, 1, 2, 3, 4, 5, 6, 7])
    (2, 1, 3)
    >>> _pattern("abcd", [0, 1, 2])
    (0, 0, 0)
    """
    best = (0, 0, 0)
    for k, first in enumerate(starts):
        for second in starts[k + 1 :]:
            period, count = second - first, 1
            pattern = models[first:second]
            while models[first + count * period : first + (count + 1) * period] == pattern:
                count += 1
            if count > 1 and count * period > best[0] * best[2]:
                best = (period, first, count)
    return best


def _shifted(
    pattern: tuple[int, int, int], models: Sequence[Any], alive: Sequence[int]
) -> tuple[int, int, int]:
    """The same pattern, begun at the place of its period before which fewest bytes are alive.

    **Example:**

    >>> _shifted((2, 1, 3), "eamamamh", [9, 9, 5, 9, 5, 9, 5, 9])
    (2, 2, 2)
    """
    period, first, count = pattern
    stop = first + period * count
    if not count:
        return pattern
    while first and models[first - 1] == models[first + period - 1]:
        first -= 1
    while stop < len(models) and models[stop] == models[stop - period]:
        stop += 1
    # The least that is alive before any repetition: the first one may read fewer states.
    within = range(first, min(first + period, stop - 2 * period + 1))
    start = min(within, key=lambda i: max(alive[i:stop:period]), default=first)
    return period, start, (stop - start) // period


def _is_loop(node: Node) -> bool:
    return node.is_scan and not node.effects and not node.calls_once


def _layers(node: Node) -> int:
    return node.block.eqns[0].params["length"] if _is_loop(node) else int(node.is_heavy)


def _evenly(network: Network, units: Sequence[Unit], every: int, *, may_divide: bool) -> list[Any]:
    """Segments of `every` blocks. Scans are segments by themselves; the last segment is stored.

    `may_divide`: the segments of a scan may be somewhat shorter, so that they divide its layers. Layers
    left over would need a second loop, with a copy of what all layers read.
    """
    result: list[Any] = []
    open_: list[Unit] = []

    def close() -> None:
        if not open_:
            return
        start, stop = open_[0].start, open_[-1].stop
        # The reverse pass begins with the last segment, and stems and heads are no blocks: stored,
        # unless the user asked for a checkpoint there.
        last, asked = stop == len(network.nodes), any(n.checkpointed for n in network.nodes[start:stop])
        stored = (last or not any(u.layers for u in open_)) and not asked
        made = StoreExecutor if stored else store_or_recompute
        result.append(made(network, start, stop))
        open_.clear()

    for unit in units:
        node = network.nodes[unit.start]
        if _is_loop(node):
            close()
            whole = RecomputeExecutor(network, unit.start, unit.stop)
            shorter = (k for k in range(every, every // 2, -1) if may_divide and unit.layers % k == 0)
            tile = next(shorter, every)
            tiled = TiledExecutor(network, unit.start, unit.stop, (tile,))
            result.append(tiled if tile < unit.layers else whole)
            continue
        heavy = any(network.nodes[i].is_heavy for i in range(unit.start, unit.stop))
        stem = bool(open_) and not any(u.layers for u in open_)
        if stem or sum(u.layers for u in open_) + max(int(heavy), unit.layers) > every:
            close()
        open_.append(unit)
    close()
    return result


def _quarters(network: Network, units: Sequence[Unit]) -> list[Any]:
    """Four segments, each quartered in turn until single layers are left."""
    if len(units) == 1:
        (unit,) = units
        if not _is_loop(network.nodes[unit.start]):
            return [store_or_recompute(network, unit.start, unit.stop)]
        tile = _periods(unit.layers)
        if not tile:
            return [StoreExecutor(network, unit.start, unit.stop)]
        return [TiledExecutor(network, unit.start, unit.stop, tile)]
    result: list[Any] = []
    for part in (quarter for half in _halves(units) for quarter in _halves(half)):
        parts = _quarters(network, part)
        once = any(n.calls_once for n in network.nodes[part[0].start : part[-1].stop])
        result += parts if once or len(parts) == 1 else [NestedExecutor(parts)]
    return result


def _halves(units: Sequence[Unit]) -> list[Sequence[Unit]]:
    """Two runs with about equally many layers, or one if there is a single unit."""
    if len(units) == 1:
        return [units]
    before = list(itertools.accumulate(u.layers for u in units))
    middle = 1 + min(range(len(before) - 1), key=lambda i: abs(2 * before[i] - before[-1]))
    return [units[:middle], units[middle:]]


def _periods(layers: int) -> tuple[int, ...]:
    """The periods of a scan's levels: each a quarter of the one before. Code grows with their number.

    **Example:**

    >>> _periods(64), _periods(9), _periods(1)
    ((16, 4, 1), (3, 1), ())
    """
    found = []
    while layers > 1:
        layers = -(-layers // 4)
        found.append(layers)
    return tuple(found)
