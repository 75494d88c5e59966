"""A scan in tiles that run again: a scan over checkpointed scans, walked or differentiated by JAX.

    forward   run all layers, keep the carry at the start of every tile of K
    reverse   tile by tile, the last first: its layers once more from the kept carry, then backward

L layers that keep r each, in tiles of K, take L/K states and K·r: least, 2 √(L r) states, at
K = √(L/r). JAX's pullback has r ≥ 1 state; a walk keeps a 32nd of one, where signs are enough. Tiles may
be tiled in turn (`Checkpoint("recursive")`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from .. import _jax
from ..errors import PlanMismatchError
from ..execute.barriers import Env, barrier
from ..execute.certificate import Measured, Place
from ..execute.loops import InPieces, Level, Piece
from ..execute.residuals import nbytes
from ..execute.scale import Cotangents, shifted
from ..execute.sinks import GradientSink
from ..network.cutting import Network
from ..settings import is_count
from .base import Facts, Row, Segment, check_in_a_row
from .codec import in_plans
from .costs import NodeCost
from .layers import LayerGradients
from .scan_step import ScanStep
from .store import StoreExecutor
from .walk import Walk, WalkExecutor, replace_all


@in_plans
@dataclass(frozen=True)
class Loop(Segment):
    """One scan, in tiles of `tile[0]` layers, those in tiles of `tile[1]`, and so on.

    `walk`: how a tile's layers are walked; None: JAX differentiates them.
    """

    tile: tuple[int, ...] = ()
    walk: Walk | None = None

    def bind(self, network: Network) -> TiledExecutor | TiledWalkExecutor:
        self._check(network)
        if self.walk is None:
            return TiledExecutor(network, self.start, self.stop, self.tile)
        return tiled_walk(self.walk.bind(network), *self.tile)

    def _check(self, network: Network) -> None:
        nodes = network.nodes[self.start : self.stop]
        if [node.is_scan for node in nodes] != [True]:
            found = ", ".join(node.describe() for node in nodes) or "nothing"
            raise PlanMismatchError(
                f"method=: Loop(start={self.start}, stop={self.stop}) is for one scan, and these nodes "
                f"are {found}. Make the plan anew with moonwalk.plan(fun, *args)."
            )
        wanted, most = ("lengths", math.inf) if self.walk is None else ("one length", 1)
        if not 1 <= len(self.tile) <= most or not all(map(is_count, self.tile)):
            raise PlanMismatchError(
                f"method=: Loop(tile={self.tile}) needs {wanted} of at least one layer, the longest "
                "first; for a scan in one piece take Store or Walk."
            )
        if self.walk is not None:
            check_in_a_row([self.walk], self.start, self.stop)


class TiledExecutor(StoreExecutor):
    """Tiles that JAX differentiates. They keep carries, and what the layers read: no masks to pack."""

    kind = "recompute"

    @functools.cached_property
    def packs(self) -> bool:
        return False

    @functools.cached_property
    def again(self) -> tuple[int, ...]:
        return ()

    @property
    def data(self) -> Segment:
        return Loop(self.start, self.stop, self.tile)

    def row(self, cost: NodeCost, *, first: bool) -> tuple[int, str]:
        del cost, first
        return self.kept_bytes, "run again"

    def rows(self, costs: Sequence[NodeCost], *, chosen: bool) -> list[Row]:
        tiles = f"segments of {' of '.join(map(str, self.tile))} layers"
        return [replace(r, why=f"{r.why}; {tiles}") for r in super().rows(costs, chosen=chosen)]


def tiled_walk(walk: WalkExecutor, every: int) -> TiledWalkExecutor:
    """A walk over one scan, in tiles of so many layers."""
    tiled = TiledWalkExecutor(
        walk.network, walk.start, walk.stop, walk.steps, walk.given, walk.growth, every=every
    )
    tiled.precision = walk.precision
    tiled.hold_to(walk.limit)
    return tiled


def tile_bytes(scan: ScanStep, every: int) -> tuple[int, int]:
    """Of a scan that is walked in tiles: (what is kept at their starts, what one keeps in turn)."""
    carry = nbytes(*(v.aval for v in scan.layers.ins))
    moving = nbytes(*(v.aval for v in moving_operands(scan)))
    starts = -(-scan.length // every) * carry + moving + scan.memo_bytes - scan.layers_memo_bytes
    return starts, -(-(scan.kept_bytes + scan.layers_memo_bytes) * every // scan.length)


def moving_operands(scan: ScanStep) -> list[Any]:
    """What all layers read and only a forward pass has: keys that an earlier loop has split."""
    consts, _, xs = scan.body.counts.groups(scan.layers.eqn.invars)
    found = (v for v in (*consts, *xs) if not isinstance(v, _jax.Literal))
    return [v for v in dict.fromkeys(found) if v not in scan.network.fixed]


@dataclass(eq=False, repr=False)
class TiledWalkExecutor(WalkExecutor):
    """A walk over one scan, in segments of `every` layers."""

    every: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        (step,) = self.steps
        assert isinstance(step, ScanStep)
        self.scan, self.recomputed = step, True

    @property
    def data(self) -> Segment:
        (source,) = (step.data for step in self.steps)
        walk = Walk(self.start, self.stop, (source,), True, self.precision, self.growth, self.limit)
        return Loop(self.start, self.stop, (self.every,), walk)

    @property
    def places(self) -> list[Place]:
        return self.scan.places(self.limit)

    @property
    def segments(self) -> int:
        return -(-self.scan.length // self.every)

    @property
    def start_bytes(self) -> int:
        """What is kept at the starts of tiles, and of what all of them read."""
        return tile_bytes(self.scan, self.every)[0]

    @property
    def kept_bytes(self) -> int:
        """What a tile keeps while it is walked."""
        return tile_bytes(self.scan, self.every)[1]

    @property
    def _moving(self) -> list[Any]:
        return moving_operands(self.scan)

    def forward(self, fixed: Env, x: Env, results: frozenset[Any], *, again: bool = False) -> Any:
        """The carries at the starts of tiles."""
        step, loop = self.scan, self.scan.layers.loop
        operands, carry = step.operands_of(fixed, x)
        moving = [x[v] for v in self._moving]

        def tile(_: Any, carry: Any, kept: Any, piece: Piece) -> Any:
            layers = piece.first, piece.count
            last, ys, _ = step.forward(operands, carry, layers, keep=False, again=again)
            return last, (carry, ys)

        def joined(whole: Any, rest: Any) -> Any:
            (starts, ys), (start, rest_ys) = whole, (None, None) if rest is None else rest
            return InPieces(starts, start), loop.joined(ys, rest_ys)

        last, (starts, ys) = loop.visit(None, carry, levels=[Level(self.every, tile)], join=joined)
        x.update(zip(step.layers.eqn.outvars, (*last, *ys), strict=True))
        self._drop(x, 0, results)
        kept = {"starts": starts, "moving": moving}
        barrier((x, list(x)), (kept, list(kept)))
        return kept

    def down_and_up(
        self, fixed: Env, saved: Any, h: Env, scaled: Cotangents, out: GradientSink
    ) -> list[Measured]:
        """Phases I, II and III, tile by tile."""
        errors = self._tile_by_tile(fixed, saved, scaled, out)
        replace_all(h, scaled.unscaled())
        return errors

    def held(self, timeline: Any) -> int:
        del timeline
        return self.start_bytes

    def forward_peak(self, timeline: Any) -> int:
        return timeline.forward(self, [0])

    def backward_peak(self, timeline: Any) -> int:
        return self.start_bytes + self.kept_bytes + 2 * timeline.states(self.start)

    @property
    def facts(self) -> Facts:
        return super().facts._replace(rerun=self.segments)

    def rows(self, costs: Sequence[NodeCost], *, chosen: bool) -> list[Row]:
        first, *rest = super().rows(costs, chosen=chosen)
        why = f"{first.why}, {self.segments} segments of {self.every}"
        return [replace(first, bytes=self.start_bytes, why=why), *rest]

    def _tile_by_tile(self, fixed: Env, kept: Any, h: Cotangents, out: GradientSink) -> list[Measured]:
        step, layers = self.scan, self.scan.layers
        # Outside a loop, as the shorter tile is (and, to XLA, a loop that runs once), nothing but a
        # barrier keeps Phase I from being run again at once.
        kept = dict(kept)
        barrier((h, list(h)), (kept, list(kept)))
        starts = kept["starts"]
        operands, _ = step.operands_of(fixed, dict(zip(self._moving, kept["moving"], strict=True)))
        h_last, h_ys = layers.arriving(h)
        in_back = LayerGradients(layers, operands, step.inner_in_back)
        in_sweep = LayerGradients(layers, operands, step.inner_in_sweep, out, step.weights_in_back)
        factors = [None] * len(step.walk.steps)  # made in the loop: for all layers they are weight-sized

        def tile(_: Any, carry: Any, start: Any, piece: Piece) -> Any:
            h, back, swept, worst = carry
            where = piece.first, piece.count
            # A layer's weights may be updated once it is swept, and never read again.
            now = operands._replace(newer=(in_sweep, swept))
            with jax.named_scope("phase_1"):
                _, _, held = step.forward(now, start, where, again=True)
            with jax.named_scope("phase_2"):
                h, exponent, back, memo = step.backward(now, held, h, h_ys, where, in_back, back)
            with jax.named_scope("phase_3"):
                _, _, swept, worst, _ = step.onward(
                    *(now, held, memo, factors, start, h, exponent, h_ys),
                    *(where, in_sweep, swept, worst),
                )
            # The next tile starts from the cotangent itself, as it would in backpropagation.
            return ([shifted(a, exponent) for a in h], back, swept, worst), None

        zero = _jax.varying_zero((operands[:3], h_last, h_ys, starts), jnp.float32)
        carry = (h_last, in_back.start(), in_sweep.start(), step.worst.start(zero))
        levels = [Level(self.every, tile, barred=True)]
        carry, _ = layers.loop.visit(None, carry, starts, levels, backward=True)
        h_first, back, swept, worst = carry
        for v, value in layers.leaving(h_first):
            h.add(v, value)
        out.add(in_back.finish(back))
        out.add(in_sweep.finish(swept))
        out.close(step.node.weights)
        return [*step.probe_all(operands), *step.worst.finish(worst)]
