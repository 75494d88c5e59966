"""Blocks become segments: what is walked, what is stored or recomputed.

`sources` says what a walk over some nodes would keep. Here the segments are chosen: walking a node costs
what ∂y/∂x needs and its anchor, storing it costs all its residuals, recomputing a stretch costs the
state at its start, once, and all its residuals while it is differentiated; with `checkpoint=`, a walk
may be recomputed likewise; inverting a run of blocks costs the state at its end, and one block while it
is differentiated. A dynamic program over the nodes finds the least sum, once for each of a few limits on
what a recomputed stretch may take; of what it finds, that is chosen which `peaks` says takes least.
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

from . import compat, inversion, peaks
from .costs import NodeCost
from .inversion import Inverted
from .methods import Checkpoint, Moonwalk, PureForward, Reversible
from .peaks import Segment
from .scan_walks import ScanWalk
from .scans import ScanStep
from .segments import Plain, live_bytes
from .sources import MARGIN, Book, Growth, Options, evenly, period_for, plan_walk
from .trunk import Trunk
from .twins import PRODUCTS, cotangent_dtype
from .walks import Step, Walk

Planned = Moonwalk | PureForward | Checkpoint | Reversible  # methods that a plan is made for


@dataclass
class Choice:
    """A way to cut the trunk into segments, what it keeps, and what it takes at once."""

    segments: list[Segment]
    kept: int
    peak: int  # by `peaks`
    transient: int = 0  # while one of them is differentiated

    @property
    def total(self) -> int:
        return self.kept + self.transient


def choose_segments(
    cut: Trunk, options: Options, costs: Sequence[NodeCost], book: Book, *, walks: bool = True
) -> Choice:
    """The cheapest way found; without `walks`, the cheapest mixture of storing and recomputing."""
    envs = None if book.values is None else [book.values]
    n = len(cut.nodes)
    steps: list[Step] = []
    if n and walks:
        steps = plan_walk(cut, 0, n, options, book=book, envs=envs)[0].steps
    best: Choice | None = None
    chosen: list[Piece] = []
    # Whoever asks for anchors by number asks for states that are kept, not had by an inverse.
    may_invert = walks and options.anchor_every is None and not options.always
    reversible = _Reversible(cut) if may_invert else None
    for allowed in (False,) if not walks else (True,) if options.always else (True, False):
        walked = _Walked(steps, options) if allowed else None
        least, seen = math.inf, []
        for limit in _transients(costs, walked, reversible):
            found = _segments(cut, costs, walked, reversible, limit)
            if found is None or found[1] in seen:
                continue
            estimate, pieces = found
            seen.append(pieces)
            # Walks take time to plan: one that keeps more than another is not looked at.
            if allowed and estimate >= least:
                continue
            choice = _realise(cut, pieces, costs, options, book)
            least = min(least, choice.total)
            if allowed and not options.always and not _recovers(choice):
                continue
            if best is None or choice.peak < best.peak:
                best, chosen = choice, pieces
    assert best is not None
    if walks and options.checkpoint not in (None, "auto"):
        return _realise(cut, _cut_walks(steps, chosen, options.checkpoint), costs, options, book)
    return best


def _recovers(choice: Choice) -> bool:
    """Whether its walks recover a cotangent anywhere: between anchors, recomputing does as well."""
    walks = [s for s in choice.segments if isinstance(s, Walk)]
    return not walks or any(map(_walk_recovers, walks))


def _walk_recovers(walk: Walk) -> bool:
    loops = [s.walk for s in walk.steps if isinstance(s, ScanStep) and s.source != "none"]
    return any(s.is_walked for s in walk.steps) or any(map(_walk_recovers, loops))


def _cut_walks(steps: Sequence[Step], pieces: Sequence[Piece], count: int | str) -> list[Piece]:
    """Walks in as many segments as the user asked for, of equally many layers."""
    layers = [s.length if isinstance(s, ScanStep) else int(s.node.is_heavy) for s in steps]
    depth = sum(layers)
    names = {"sqrt": round(math.sqrt(depth)), "block": depth}
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

    def scan(self, i: int, limit: int) -> ScanWalk | None:
        """A scan in segments that take no more than the limit while they are walked."""
        step = self.steps[i]
        if not isinstance(step, ScanStep) or step.source == "none":
            return None
        layer = max(1.0, (step.kept_bytes + step.layers_memo_bytes) / step.length)
        every = evenly(step.length, max(1, min(step.length, int(limit / layer))))
        if every == step.length:
            # One segment saves nothing alone; of several scans, XLA would make room for all at once.
            return None
        return ScanWalk(step.trunk, i, i + 1, [step], every=every)

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

    def __init__(self, cut: Trunk):
        self.cut = cut
        self.starts = inversion.runs(cut)

    def __bool__(self) -> bool:
        return any(start < stop for stop, start in enumerate(self.starts))

    def run(self, stop: int) -> Inverted | None:
        """The longest that ends there."""
        start = self.starts[stop]
        return Inverted(self.cut, start, stop) if start < stop else None

    def limits(self) -> set[int]:
        found = [self.run(stop) for stop in range(len(self.starts))]
        return {run.transient_bytes for run in found if run is not None}


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
    if reversible:
        limits |= reversible.limits()
    return sorted(limits)


class Piece(NamedTuple):
    """Consecutive nodes that become a segment."""

    kind: str  # "walk", "store", "recompute", "invert", or "rewalk": a walk whose Phase I is run again
    start: int
    stop: int
    every: int = 0  # of a scan in segments: their layers


def _segments(
    cut: Trunk,
    costs: Sequence[NodeCost],
    walked: _Walked | None,
    reversible: _Reversible | None,
    limit: int,
) -> tuple[float, list[Piece]] | None:
    """Dynamic program: (bytes, pieces)."""
    n = len(costs)
    live = live_bytes(cut)
    infinite = math.inf
    must = [False] * n if walked is None else walked.must
    store = [infinite if m else c.full for c, m in zip(costs, must, strict=True)]
    # What prints or calls back runs once, though the user may have wrapped it in `jax.checkpoint`.
    must_recompute = [node.checkpointed and not node.calls_once for node in cut.nodes]
    best = [infinite] * (n + 1)  # least bytes for the nodes before
    best[0] = 0
    walking = [infinite] * (n + 1)  # the same, inside a walk
    walk_start = [0] * (n + 1)
    back: list[Piece | None] = [None] * (n + 1)
    # What calls back must run once: it is stored, unless its scan is walked.
    # A scan in periods is a checkpoint of its own: run again it would keep the same once more.
    once = [
        node.calls_once or (cost.period is not None and not again)
        for node, cost, again in zip(cut.nodes, costs, must_recompute, strict=True)
    ]
    full = [infinite if o else b for b, o in zip(store, once, strict=True)]
    stretches = _Stretches(cut, full, live, limit)
    again = _Stretches(cut, walked.inner, live, limit) if walked is not None and walked.again else None
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
        run = reversible.run(j) if reversible else None
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

    def __init__(self, cut: Trunk, sizes: Sequence[float], live: Sequence[int], limit: int):
        never = 1 << 62
        whole = [never if math.isinf(b) else int(b) for b in sizes]
        self.prefix = list(itertools.accumulate(whole, initial=0))
        self.limit = limit
        n = len(cut.nodes)
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
    cut: Trunk, pieces: Sequence[Piece], costs: Sequence[NodeCost], options: Options, book: Book
) -> Choice:
    """Segments with their true sizes."""
    envs = None if book.values is None else [book.values]
    segments: list[Segment] = []
    kept = transient = 0
    live = live_bytes(cut)
    for kind, i, j, every in pieces:
        if kind in ("walk", "rewalk"):
            walk, _ = plan_walk(cut, i, j, options, book=book, envs=envs)
            walk.recomputed = kind == "rewalk"
            # A scan in one segment is a walk like any other.
            walk = _in_segments(walk, every, options) if 0 < every < walk.steps[0].length else walk
            segments.append(walk)
            start = live[i] if i else 0
            if walk.recomputed:
                transient = max(transient, walk.kept_bytes)
                kept += walk.start_bytes if isinstance(walk, ScanWalk) else start
            else:
                kept += walk.kept_bytes + start
        elif kind == "invert":
            run = Inverted(cut, i, j)
            segments.append(run)
            kept += run.kept_bytes
            gradients = max(c.gradients for c in costs[i:j])
            transient = max(transient, run.transient_bytes + gradients)
        else:
            periods = {k: (c.period,) for k, c in enumerate(costs) if i <= k < j and c.period}
            plain = Plain(cut, i, j, periods, recomputed=False if periods else None)
            inner = max((costs[k].transient for k in periods), default=0)
            inner += max(c.gradients for c in costs[i:j])
            if j == len(cut.nodes) and plain.recomputed and not any(n.checkpointed for n in plain.nodes):
                # The reverse pass begins with the last segment: run again, it would take at once what
                # it had better keep, and what it keeps is gone before any other segment takes anything.
                plain = Plain(cut, i, j, periods, recomputed=False)
                transient = max(0, transient - plain.kept_bytes)
            segments.append(plain)
            kept += plain.kept_bytes
            transient = max(transient, plain.transient_bytes + inner)
    return Choice(segments, kept, peaks.peak(cut, segments, costs), transient)


def _in_segments(walk: Walk, every: int, options: Options) -> ScanWalk:
    """A scan walked in segments, each from an exact cotangent."""
    (step,) = walk.steps
    layer = step.gain
    if options.anchor_every is None:
        step.period = period_for(layer, Growth(), every, options.limit)
    span = min(every, step.period or every)
    grown = Growth().times(layer.over(span)).factor
    inside = Growth(step.walk.growth, layer.mixes).factor
    return ScanWalk(
        walk.trunk,
        walk.start,
        walk.stop,
        [step],
        walk.given,
        max(grown, inside),
        every=every,
    )


def default_tolerance(dtype: Any) -> float:
    """1e-11 in float64, 1e-4 in float32, 1e-2 in half precision."""
    bits = jnp.finfo(dtype).bits
    return {64: 1e-11, 32: 1e-4}.get(bits, 1e-2)


def state_dtype(cut: Trunk) -> Any:
    """The least precise dtype that cotangents of the trunk have."""
    states = (v for n in cut.nodes for v in (*n.block.inputs, *n.block.outputs))
    dtypes = {v.aval.dtype for v in states if v.aval.size > 1}
    found = [d for d in dtypes if jnp.issubdtype(d, jnp.floating)]
    return max(found, key=lambda d: float(jnp.finfo(d).eps), default=jnp.dtype(jnp.float32))


def runs_in_tf32(cut: Trunk) -> bool:
    """Whether products of float32 run in TF32: by default they do, on a GPU."""
    if jax.default_backend() != "gpu" or state_dtype(cut) != jnp.float32:
        return False
    products = [e for n in cut.nodes for e in _flat_equations(n.block.eqns) if e.primitive in PRODUCTS]
    return any(e.params["precision"] in (None, (lax.Precision.DEFAULT,) * 2) for e in products)


def _flat_equations(eqns: Iterable[Any]) -> Iterable[Any]:
    for e in eqns:
        yield e
        if e.primitive is lax.scan_p:
            yield from _flat_equations(compat.open_jaxpr(e.params["jaxpr"])[0].eqns)


_TF32 = 1e-2  # what walks are held to whose products run in TF32, as everything around them does


def ambient_growth(cut: Trunk, method: Planned) -> float:
    """Up to which growth of error walks run in the ambient precision, which may be TF32."""
    if method.tolerance is not None or not runs_in_tf32(cut):
        return 1.0
    return _TF32 / MARGIN / 2.0**-11


def tolerance_of(cut: Trunk, method: Planned, segments: Sequence[Segment], planned: float) -> float:
    """What certificates are held to.

    A walk that loses little runs in the ambient precision, and is held to that. `math.inf` places no
    anchors, but a wrong gradient is still reported: only `on_inexact="ignore"` lets it pass.
    """
    if math.isinf(planned):
        return default_tolerance(state_dtype(cut))
    limit = ambient_growth(cut, method)
    faithful = all(s.growth <= limit for s in segments if isinstance(s, Walk))
    if method.tolerance is None and method.walk_precision is None and faithful and runs_in_tf32(cut):
        return max(planned, _TF32)
    return planned


def hold_to(tolerance: float, cut: Trunk, method: Planned, segments: Sequence[Segment]) -> float:
    """Say how large the certificates of segments may be, and return the largest such limit.

    It is the tolerance, or what rounding alone explains; a tolerance that the user has set is final.
    """
    by_default = method.tolerance is None or math.isinf(method.tolerance)
    walks = [s for s in segments if isinstance(s, Walk)]
    least = max((rounding(cut, w) for w in walks), default=0.0) if by_default else 0.0
    for segment in segments:
        if isinstance(segment, Walk):
            segment.hold_to(max(tolerance, least))
        elif isinstance(segment, Inverted):
            segment.hold_to(tolerance)
    return max(tolerance, least)


def rounding(cut: Trunk, walk: Walk, dtype: Any = None) -> float:
    """A bound of what rounding in every block, down and up again, makes of a cotangent: ε √(2 · blocks).

    Walks through isometries measure a fifth of it in bfloat16 and half in float32, at any depth. In
    bfloat16 it exceeds a tolerance of 1e-2 after one block. `dtype`: None for that of the cotangents
    in a walk.
    """

    def blocks(walk: Walk) -> int:
        return sum(
            s.length * blocks(s.walk) if isinstance(s, ScanStep) else 1
            for s in walk.steps
            if s.is_walked
        )

    dtype = cotangent_dtype(state_dtype(cut)) if dtype is None else dtype
    eps = 2.0**-10 if runs_in_tf32(cut) else float(jnp.finfo(dtype).eps)
    return eps * math.sqrt(2 * blocks(walk))


def options_for(cut: Trunk, method: Planned) -> tuple[Options, float]:
    """A method's settings on this network, and its tolerance."""
    dtype = state_dtype(cut)
    tolerance = default_tolerance(dtype) if method.tolerance is None else method.tolerance
    limit = max(1.0, tolerance / MARGIN / float(jnp.finfo(cotangent_dtype(dtype)).eps))
    options = Options(limit, precision=method.walk_precision, fragments=False)
    options.ambient = ambient_growth(cut, method)
    options.anchors = not isinstance(method, PureForward)
    if isinstance(method, Moonwalk):
        options.fragments, options.wish = True, method.fragment
        options.anchor_every, options.checkpoint = method.anchor_every, method.checkpoint
        options.always = method.walk == "always"
    return options, tolerance
