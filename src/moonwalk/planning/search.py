"""Blocks become segments: what is walked, what is stored or recomputed.

`cotangents` says what a walk over some nodes would keep. Here the segments are chosen: walking a node
costs what ∂y/∂x needs and its anchor, storing it costs all its residuals, recomputing a stretch costs
the state at its start, once, and all its residuals while it is differentiated; with `checkpoint=`, a
walk may be recomputed likewise; inverting a run of blocks costs the state at its end, and one block
while it is differentiated. A dynamic program over the nodes finds the least sum, once for each of a few
limits on what a recomputed stretch may take; of what it finds, the lowest peak (`timeline`) is chosen.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from .. import _jax
from ..execute.twins import PRODUCTS, cotangent_dtype
from ..network.cutting import Network
from ..segments import invert
from ..segments.costs import NodeCost
from ..segments.invert import InvertExecutor
from ..segments.loop import TiledExecutor, TiledWalkExecutor, tiled_walk
from ..segments.scan_step import ScanStep
from ..segments.store import (
    NestedExecutor,
    RecomputeExecutor,
    StoreExecutor,
    may_run_again,
    store_or_recompute,
)
from ..segments.walk import Step, WalkExecutor
from . import timeline
from .cotangents import MARGIN, GainTable, Growth, Options, evenly, period_for, plan_walk
from .methods import Checkpoint, Moonwalk, PureForward, Reversible
from .timeline import Executor, live_bytes

Planned = Moonwalk | PureForward | Checkpoint | Reversible  # methods that a plan is made for


@dataclass
class Choice:
    """A way to cut the trunk into segments, what it keeps, and what it takes at once."""

    segments: list[Executor]
    kept: int
    peak: int  # by `timeline`
    transient: int = 0  # while one of them is differentiated
    pieces: Sequence[Piece] = ()  # that the search made it of

    @property
    def total(self) -> int:
        return self.kept + self.transient

    @property
    def recovers(self) -> bool:
        """Whether its walks recover a cotangent anywhere."""
        facts = [s.facts for s in self.segments]
        return not any(f.walks for f in facts) or any(f.recovers for f in facts)


def choose_segments(
    network: Network,
    options: Options,
    costs: Sequence[NodeCost],
    book: GainTable,
    plain: Choice | None = None,
) -> Choice:
    """The cheapest way found.

    `plain`: the cheapest mixture of storing and recomputing. Without it, that is what is looked for.
    """
    walks = plain is not None
    envs = None if book.values is None else [book.values]
    n = len(network.nodes)
    steps: list[Step] = []
    if n and walks:
        steps = plan_walk(network, 0, n, options, book=book, envs=envs)[0].steps
    best: Choice | None = None
    # `anchor_every` requests stored states, so inversion is disabled.
    may_invert = walks and options.anchor_every is None and not options.always
    reversible = _Reversible(network) if may_invert else None
    reversible = reversible if reversible is not None and reversible.limits() else None
    if plain is not None and reversible is None and not options.always:
        best = plain  # without walks there is nothing new
    for allowed in (False,) if not walks else (True,) if options.always or best else (True, False):
        walked = _Walked(steps, options) if allowed else None
        least, seen = math.inf, []
        for limit in _transients(costs, walked, reversible):
            found = _segments(network, costs, walked, reversible, limit)
            if found is None or found[1] in seen:
                continue
            estimate, pieces = found
            seen.append(pieces)
            # Walks take time to plan: one that keeps more than another is not looked at.
            if allowed and estimate >= least:
                continue
            choice = _realise(network, pieces, costs, options, book)
            least = min(least, choice.total)
            if allowed and not options.always and not choice.recovers:
                continue
            if best is None or choice.peak < best.peak:
                best = choice
    assert best is not None
    if walks and options.checkpoint not in (None, "auto"):
        return _realise(
            network, _cut_walks(steps, best.pieces, options.checkpoint), costs, options, book
        )
    return best


def _cut_walks(steps: Sequence[Step], pieces: Sequence[Piece], count: int | str) -> list[Piece]:
    """Walks in as many segments as the user asked for, of equally many layers."""
    layers = [s.length if isinstance(s, ScanStep) else int(s.node.is_heavy) for s in steps]
    depth = sum(layers)
    names = {"sqrt": math.ceil(math.sqrt(depth)), "block": depth}
    segments = names[count] if isinstance(count, str) else count
    if segments > depth:
        raise ValueError(
            f"Moonwalk(checkpoint={count}): the network has {depth} layers, too few for {segments} "
            "segments; ask for fewer, or for checkpoint='auto'"
        )
    every = -(-depth // max(1, segments))
    result: list[Piece] = []
    for piece in pieces:
        if piece.kind != "walk":
            result.append(piece)
            continue
        start, taken = piece.start, 0
        for i in range(piece.start, piece.stop):
            is_scan = isinstance(steps[i], ScanStep) and steps[i].source != "none"
            if (is_scan or taken + layers[i] > every) and start < i:
                result.append(Piece("rewalk", start, i))
                start, taken = i, 0
            taken += layers[i]
            if is_scan:
                result.append(Piece("rewalk", i, i + 1, evenly(layers[i], min(every, layers[i]))))
                start, taken = i + 1, 0
        if start < piece.stop:
            result.append(Piece("rewalk", start, piece.stop))
    return result


class _Walked:
    """What walking costs, node by node."""

    def __init__(self, steps: Sequence[Step], options: Options):
        self.steps = steps
        self.again = options.checkpoint == "auto"  # Phase I, from the state at a segment's start
        # A scan whose layers are not walked would be run again and stored, all of it, in Phase II.
        self.never = [
            (s.node.calls_once or s.node.is_scan) and not isinstance(s, ScanStep) for s in steps
        ]
        self.must = [options.always and not never for never in self.never]
        self.bytes: list[float] = [
            math.inf if never else s.kept_bytes + s.memo_bytes
            for s, never in zip(steps, self.never, strict=True)
        ]
        # A scan is a segment, or several, by itself.
        self.inner = [math.inf if isinstance(s, ScanStep) else b for s, b in self._pairs()]

    def _pairs(self) -> Iterable[tuple[Step, float]]:
        return zip(self.steps, self.bytes, strict=True)

    def scan(self, i: int, limit: int) -> TiledWalkExecutor | None:
        """A scan in segments that take no more than the limit while they are walked."""
        step = self.steps[i]
        if not isinstance(step, ScanStep) or step.source == "none":
            return None
        layer = max(1.0, (step.kept_bytes + step.layers_memo_bytes) / step.length)
        every = evenly(step.length, max(1, min(step.length, int(limit / layer))))
        if every == step.length:
            # One segment saves nothing alone; of several scans, XLA would make room for all at once.
            return None
        return TiledWalkExecutor(step.network, i, i + 1, [step], every=every)

    def limits(self) -> set[int]:
        """Sizes of segments worth trying."""
        if not self.again:
            return set()
        found: set[int] = set()
        for step in self.steps:
            if isinstance(step, ScanStep) and step.source != "none":
                layer = (step.kept_bytes + step.layers_memo_bytes) / step.length
                whole = range(1, step.length + 1)
                found.update(math.ceil(layer * k) for k in whole if step.length % k == 0)
        sizes = [b for b in self.inner if 0 < b < math.inf]
        total = sum(sizes)
        limit = float(max(sizes, default=0))
        while sizes and limit < 2 * total:
            found.add(int(limit))
            limit *= 1.25
        return found


class _Reversible:
    """Runs of blocks that have an inverse."""

    def __init__(self, network: Network):
        # The longest that ends before each node.
        self.runs = [
            InvertExecutor(network, start, stop) if start < stop else None
            for stop, start in enumerate(invert.runs(network))
        ]

    def limits(self) -> set[int]:
        return {run.transient_bytes for run in self.runs if run is not None}


def _transients(
    costs: Sequence[NodeCost], walked: _Walked | None, reversible: _Reversible | None
) -> list[int]:
    """Limits to try on what a recomputed stretch may take."""
    kept = sorted({c.full for c in costs if c.full})
    total = sum(c.full for c in costs)
    limits = {0, total, *kept[:: max(1, len(kept) // 8)], *kept[-1:]}
    limit = float(kept[-1]) if kept else 0.0
    while kept and limit < total:
        limits.add(int(limit))
        limit *= 1.5
    if walked is not None:
        limits |= walked.limits()
    if reversible is not None:
        limits |= reversible.limits()
    return sorted(limits)


class Piece(NamedTuple):
    """Consecutive nodes that become a segment."""

    kind: str  # "walk", "store", "recompute", "invert", or "rewalk": a walk whose Phase I is run again
    start: int
    stop: int
    every: int = 0  # of a scan in segments: their layers


def _segments(
    network: Network,
    costs: Sequence[NodeCost],
    walked: _Walked | None,
    reversible: _Reversible | None,
    limit: int,
) -> tuple[float, list[Piece]] | None:
    """Dynamic program: (bytes, pieces)."""
    n = len(costs)
    live = live_bytes(network)
    infinite = math.inf
    must = [False] * n if walked is None else walked.must
    store = [infinite if m else c.full for c, m in zip(costs, must, strict=True)]
    # What prints or calls back runs once, though the user may have wrapped it in `jax.checkpoint`.
    must_recompute = [node.checkpointed and not node.calls_once for node in network.nodes]
    best = [infinite] * (n + 1)  # least bytes for the nodes before
    best[0] = 0
    walking = [infinite] * (n + 1)  # the same, inside a walk
    walk_start = [0] * (n + 1)
    back: list[Piece | None] = [None] * (n + 1)
    # What calls back must run once: it is stored, unless its scan is walked.
    # A scan in periods is a checkpoint of its own: run again it would keep the same once more.
    once = [
        node.calls_once or (cost.period is not None and not again)
        for node, cost, again in zip(network.nodes, costs, must_recompute, strict=True)
    ]
    full = [infinite if o else b for b, o in zip(store, once, strict=True)]
    stretches = _Stretches(network, full, live, limit)
    again = (
        _Stretches(network, walked.inner, live, limit) if walked is not None and walked.again else None
    )
    spent: dict[int, int] = {}  # what a segment of a scan takes, or a run that is inverted
    for j in range(1, n + 1):
        i = j - 1
        # store one node
        if not must_recompute[i] and best[i] + store[i] < best[j]:
            best[j], back[j] = best[i] + store[i], Piece("store", i, j)
        # walk it, going on or starting here
        if walked is not None:
            fresh = best[i] + (live[i] if i else 0)
            if fresh < walking[i]:
                walking_here, start = fresh, i
            else:
                walking_here, start = walking[i], walk_start[i]
            walking[j], walk_start[j] = walking_here + walked.bytes[i], start
            if walking[j] < best[j]:
                best[j], back[j] = walking[j], Piece("walk", start, j)
            scan = walked.scan(i, limit) if walked.again else None
            if scan is not None and best[i] + scan.start_bytes < best[j]:
                best[j] = best[i] + scan.start_bytes
                back[j] = Piece("rewalk", i, j, scan.every)
                spent[j] = scan.kept_bytes
        # invert the blocks that lead here
        run = None if reversible is None else reversible.runs[j]
        if run is not None and run.transient_bytes <= limit:
            cost = best[run.start] + run.kept_bytes
            if cost < best[j]:
                best[j], back[j] = cost, Piece("invert", run.start, j)
                spent[j] = run.transient_bytes
        # recompute a stretch that ends here, or walk it after running it again
        for kind, found in (("recompute", stretches), ("rewalk", again)):
            for s in found.starts(j) if found is not None else ():
                cost = best[s] + (live[s] if s else 0)
                if cost < best[j]:
                    best[j], back[j] = cost, Piece(kind, s, j)
    if math.isinf(best[n]):
        return None
    pieces: list[Piece] = []
    j = n
    while j:
        piece = back[j]
        assert piece is not None
        pieces.append(piece)
        j = piece.start
    merged: list[Piece] = []
    for piece in reversed(pieces):
        if merged and piece.kind == "store" == merged[-1].kind:
            merged[-1] = Piece("store", merged[-1].start, piece.stop)
        else:
            merged.append(piece)
    taken = [stretches.size(p.start, p.stop) for p in merged if p.kind == "recompute"]
    taken += [spent[p.stop] for p in merged if p.kind == "invert"]
    if again is not None:
        walks = [p for p in merged if p.kind == "rewalk"]
        taken += [spent[p.stop] if p.every else again.size(p.start, p.stop) for p in walks]
    return best[n] + max(taken, default=0), merged


class _Stretches:
    """Where stretches may begin that end at a node and take no more than a limit."""

    def __init__(self, network: Network, sizes: Sequence[float], live: Sequence[int], limit: int):
        never = 1 << 62
        whole = [never if math.isinf(b) else int(b) for b in sizes]
        self.prefix = list(itertools.accumulate(whole, initial=0))
        self.limit = limit
        n = len(network.nodes)
        self.narrow = {
            i
            for i in range(n + 1)
            if i in (0, n) or (live[i] <= live[i - 1] or live[i] <= live[min(i + 1, n)])
        }
        # Where no stretch may reach further back, one has to begin.
        self.narrow |= {i + 1 for i, size in enumerate(sizes) if math.isinf(size)}
        self.window: list[int] = [0]

    def size(self, start: int, stop: int) -> int:
        return self.prefix[stop] - self.prefix[start]

    def starts(self, stop: int) -> list[int]:
        """Ask for every node in turn."""
        while self.window and self.size(self.window[0], stop) > self.limit:
            self.window.pop(0)
        found = list(self.window)
        if stop in self.narrow:
            self.window.append(stop)
        return found


def _realise(
    network: Network,
    pieces: Sequence[Piece],
    costs: Sequence[NodeCost],
    options: Options,
    book: GainTable,
) -> Choice:
    """Segments with their true sizes."""
    envs = None if book.values is None else [book.values]
    segments: list[Executor] = []
    kept = transient = 0
    n = len(network.nodes)
    live = live_bytes(network)
    for kind, i, j, every in pieces:
        if kind in ("walk", "rewalk"):
            walk, _ = plan_walk(network, i, j, options, book=book, envs=envs)
            walk.recomputed = kind == "rewalk"
            # A scan in one tile is a walk like any other.
            walk = _in_tiles(walk, every, options) if 0 < every < walk.steps[0].length else walk
            segments.append(walk)
            start = live[i] if i else 0
            if walk.recomputed:
                transient = max(transient, walk.kept_bytes)
                kept += walk.start_bytes if isinstance(walk, TiledWalkExecutor) else start
            else:
                kept += walk.kept_bytes + start
        elif kind == "invert":
            run = InvertExecutor(network, i, j)
            segments.append(run)
            kept += run.kept_bytes
            gradients = max(c.gradients for c in costs[i:j])
            transient = max(transient, run.transient_bytes + gradients)
        else:
            key = ("plain", i, j)  # the same in many choices
            if key not in network.memory:
                network.memory[key] = _plain(network, i, j, costs)
            found = network.memory[key]
            transient = max(0, transient - sum(s.kept_bytes for s in found)) if j == n else transient
            for plain in found:
                segments.append(plain)
                kept += plain.kept_bytes
                own = costs[plain.start : plain.stop]
                inner = max(c.gradients for c in own) + max((c.transient for c in own), default=0)
                transient = max(transient, plain.transient_bytes + inner)
    return Choice(segments, kept, timeline.peak(network, segments, costs), transient, pieces)


def _plain(
    network: Network, start: int, stop: int, costs: Sequence[NodeCost]
) -> list[StoreExecutor | RecomputeExecutor | NestedExecutor]:
    """Nodes that JAX differentiates. Scans that are cheaper in tiles are segments of their own."""
    nodes = network.nodes[start:stop]
    tiled = [i for i in range(start, stop) if costs[i].period is not None]
    if not tiled:
        # The reverse pass begins with the last segment: run again, it would take at once what it had
        # better keep, and what it keeps is gone before any other segment takes anything.
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


def _in_tiles(walk: WalkExecutor, every: int, options: Options) -> TiledWalkExecutor:
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


def default_tolerance(dtype: Any) -> float:
    """1e-11 in float64, 1e-4 in float32, 1e-2 in half precision."""
    bits = jnp.finfo(dtype).bits
    return {64: 1e-11, 32: 1e-4}.get(bits, 1e-2)


def state_dtype(network: Network) -> Any:
    """The least precise dtype that cotangents of the trunk have."""
    states = (v for n in network.nodes for v in (*n.block.inputs, *n.block.outputs))
    dtypes = {v.aval.dtype for v in states if v.aval.size > 1}
    found = [d for d in dtypes if jnp.issubdtype(d, jnp.floating)]
    return max(found, key=lambda d: float(jnp.finfo(d).eps), default=jnp.dtype(jnp.float32))


def runs_in_tf32(network: Network) -> bool:
    """Whether products of float32 run in TF32: by default they do, on a GPU."""
    if jax.default_backend() != "gpu" or state_dtype(network) != jnp.float32:
        return False
    products = [
        e for n in network.nodes for e in _flat_equations(n.block.eqns) if e.primitive in PRODUCTS
    ]
    return any(e.params["precision"] in (None, (lax.Precision.DEFAULT,) * 2) for e in products)


def _flat_equations(eqns: Iterable[Any]) -> Iterable[Any]:
    for e in eqns:
        yield e
        if e.primitive is lax.scan_p:
            yield from _flat_equations(_jax.open_jaxpr(e.params["jaxpr"])[0].eqns)


_TF32 = 1e-2  # what walks are held to whose products run in TF32, as everything around them does


def ambient_growth(network: Network, method: Planned) -> float:
    """Up to which growth of error walks run in the ambient precision, which may be TF32."""
    if method.tolerance is not None or not runs_in_tf32(network):
        return 1.0
    return _TF32 / MARGIN / 2.0**-11


def tolerance_of(
    network: Network, method: Planned, segments: Sequence[Executor], planned: float
) -> float:
    """What certificates are held to.

    A walk that loses little runs in the ambient precision, and is held to that. `math.inf` places no
    anchors, but a wrong gradient is still reported: only `on_inexact="ignore"` lets it pass.
    """
    if math.isinf(planned):
        return default_tolerance(state_dtype(network))
    limit = ambient_growth(network, method)
    faithful = all(s.facts.growth <= limit for s in segments)
    if method.tolerance is None and method.walk_precision is None and faithful and runs_in_tf32(network):
        return max(planned, _TF32)
    return planned


def hold_to(tolerance: float, network: Network, method: Planned, segments: Sequence[Executor]) -> float:
    """Say how large the certificates of segments may be, and return the largest such limit.

    It is the tolerance, or what rounding alone explains; a tolerance that the user has set is final.
    """
    by_default = method.tolerance is None or math.isinf(method.tolerance)
    # A seed's closure is computed in the dtype of the activations, not in that of a walk's cotangents.
    dtype = state_dtype(network) if isinstance(method, PureForward) else None
    least = max((rounding(network, s, dtype) for s in segments), default=0.0) if by_default else 0.0
    for segment in segments:
        segment.hold_to(max(tolerance, least) if segment.blocks_walked else tolerance)
    return max(tolerance, least)


def rounding(network: Network, segment: Executor, dtype: Any = None) -> float:
    """A bound of what rounding in every block, down and up again, makes of a cotangent: ε √(2 · blocks).

    Walks through isometries measure a fifth of it in bfloat16 and half in float32, at any depth. In
    bfloat16 it exceeds a tolerance of 1e-2 after one block. `dtype`: None for that of the cotangents
    in a walk.
    """
    dtype = cotangent_dtype(state_dtype(network)) if dtype is None else dtype
    eps = 2.0**-10 if runs_in_tf32(network) else float(jnp.finfo(dtype).eps)
    return eps * math.sqrt(2 * segment.blocks_walked)


def options_for(network: Network, method: Planned) -> tuple[Options, float]:
    """A method's settings on this network, and its tolerance."""
    dtype = state_dtype(network)
    tolerance = default_tolerance(dtype) if method.tolerance is None else method.tolerance
    limit = max(1.0, tolerance / MARGIN / float(jnp.finfo(cotangent_dtype(dtype)).eps))
    options = Options(limit, precision=method.walk_precision, fragments=False)
    options.ambient = ambient_growth(network, method)
    options.anchors = not isinstance(method, PureForward)
    if isinstance(method, Moonwalk):
        options.fragments, options.requested = True, method.fragment
        options.anchor_every, options.checkpoint = method.anchor_every, method.checkpoint
        options.always = method.walk == "always"
    return options, tolerance
