"""A scan in tiles that run again: a scan over checkpointed scans, walked or differentiated by JAX.

    forward   run all layers, keep the carry at the start of every tile of K
    reverse   tile by tile, the last first: its layers once more from the kept carry, then backward

L layers that keep r each, in tiles of K, take L/K states and K·r: least, 2 √(L r) states, at
K = √(L/r). JAX's pullback has r ≥ 1 state; a walk keeps a 32nd of one, where signs are enough. Tiles may
be tiled in turn (`Checkpoint("recursive")`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from .. import _jax
from ..execute.barriers import Env, barrier
from ..execute.certificate import Measured, Place
from ..execute.residuals import nbytes
from ..execute.scale import Cotangents, shifted
from ..execute.sinks import GradientSink
from ..network.cutting import Network
from .base import Facts, Row, Segment
from .codec import in_plans
from .costs import NodeCost
from .scan_step import ScanStep, Sums
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
        if self.walk is None:
            return TiledExecutor(network, self.start, self.stop, self.tile)
        return tiled_walk(self.walk.bind(network), *self.tile)


class TiledExecutor(StoreExecutor):
    """Tiles that JAX differentiates."""

    @property
    def data(self) -> Segment:
        return Loop(self.start, self.stop, self.tile)

    def row(self, cost: NodeCost, *, first: bool) -> tuple[int, str]:
        del cost, first
        return self.kept_bytes, f"segments of {' of '.join(map(str, self.tile))} layers, run again"


def tiled_walk(walk: WalkExecutor, every: int) -> TiledWalkExecutor:
    """A walk over one scan, in tiles of so many layers."""
    tiled = TiledWalkExecutor(
        walk.network, walk.start, walk.stop, walk.steps, walk.given, walk.growth, every=every
    )
    tiled.precision = walk.precision
    tiled.hold_to(walk.limit)
    return tiled


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
        """What is kept at the starts of segments, and of what all of them read."""
        step = self.scan
        carry = nbytes(*(v.aval for v in step.ins))
        moving = nbytes(*(v.aval for v in self._moving))
        return self.segments * carry + moving + step.memo_bytes - step.layers_memo_bytes

    @property
    def _moving(self) -> list[Any]:
        """What all layers read and only a forward pass has: keys that an earlier loop has split."""
        consts, _, xs = self.scan.body.counts.groups(self.scan.eqn.invars)
        found = (v for v in (*consts, *xs) if not isinstance(v, _jax.Literal))
        return [v for v in dict.fromkeys(found) if v not in self.network.fixed]

    @property
    def kept_bytes(self) -> int:
        """What a segment keeps while it is walked."""
        step = self.scan
        return -(-(step.kept_bytes + step.layers_memo_bytes) * self.every // step.length)

    def _firsts(self) -> tuple[int, int, int, int]:
        """(whole segments, layers of the shorter last one, first layer of the former, of the latter)."""
        segments, short = divmod(self.scan.length, self.every)
        if self.scan.reverse:
            return segments, short, short, 0
        return segments, short, 0, self.scan.length - short

    def forward(self, fixed: Env, x: Env, results: frozenset[Any], *, again: bool = False) -> Any:
        """The carries at the starts of segments."""
        step = self.scan
        operands, carry = step.operands_of(fixed, x)
        moving = [x[v] for v in self._moving]
        segments, short, start, rest_start = self._firsts()

        def segment(carry: Any, number: Any, _: Any) -> Any:
            first = start + number * self.every
            last, ys, _ = step.forward(operands, carry, (first, self.every), keep=False, again=again)
            return last, (carry, ys)

        rest = rest_ys = None
        last, (starts, ys) = step.scan(segment, carry, length=segments)
        if short:
            rest = last
            last, rest_ys, _ = step.forward(operands, last, (rest_start, short), keep=False, again=again)
        x.update(zip(step.eqn.outvars, (*last, *step.joined(ys, rest_ys)), strict=True))
        self._drop(x, 0, results)
        kept = {"starts": starts, "rest": rest, "moving": moving}
        barrier((x, list(x)), (kept, list(kept)))
        return kept

    def down_and_up(
        self, fixed: Env, saved: Any, h: Env, scaled: Cotangents, out: GradientSink
    ) -> list[Measured]:
        """Phases I, II and III, segment by segment."""
        errors = self._segment_by_segment(fixed, saved, scaled, out)
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

    def _segment_by_segment(
        self, fixed: Env, kept: Any, h: Cotangents, out: GradientSink
    ) -> list[Measured]:
        step = self.scan
        # Outside a loop, as the shorter segment is (and, to XLA, a loop that runs once), nothing but a
        # barrier keeps Phase I from being run again at once.
        kept = dict(kept)
        barrier((h, list(h)), (kept, list(kept)))
        starts, rest = kept["starts"], kept["rest"]
        operands, _ = step.operands_of(fixed, dict(zip(self._moving, kept["moving"], strict=True)))
        h_last, h_ys = step.arriving(h)
        in_back = Sums(step, operands, step.inner_in_back)
        in_sweep = Sums(step, operands, step.inner_in_sweep, out, apart=step.weights_in_back)
        factors = [None] * len(step.walk.steps)  # made in the loop: for all layers they are weight-sized

        def segment(carry: Any, layers: Any, state: Any) -> Any:
            h, back, swept, worst = carry
            # A layer's weights may be updated once it is swept, and never read again.
            now = operands._replace(newer=(in_sweep, swept))
            with jax.named_scope("phase_1"):
                _, _, held = step.forward(now, state, layers, again=True)
            with jax.named_scope("phase_2"):
                h, exponent, back, memo = step.backward(now, held, h, h_ys, layers, in_back, back)
            with jax.named_scope("phase_3"):
                _, _, swept, worst, _ = step.onward(
                    *(now, held, memo, factors, state, h, exponent, h_ys),
                    *(layers, in_sweep, swept, worst),
                )
            # The next segment starts from the cotangent itself, as it would in backpropagation.
            return [shifted(a, exponent) for a in h], back, swept, worst

        segments, short, start, rest_start = self._firsts()
        zero = _jax.varying_zero((operands[:3], h_last, h_ys, starts), jnp.float32)
        carry = (h_last, in_back.start(), in_sweep.start(), step.worst.start(zero))
        if short:
            carry = segment(carry, (rest_start, short), rest)
            box = {"carry": carry, "starts": starts}
            barrier((box, list(box)))
            carry, starts = box["carry"], box["starts"]

        def whole(carry: Any, number: Any, state: Any) -> Any:
            return segment(carry, (start + number * self.every, self.every), state), None

        carry, _ = step.scan(whole, carry, starts, backward=True, length=segments)
        h_first, back, swept, worst = carry
        for v, value in step.leaving(h_first):
            h.add(v, value)
        out.add(in_back.finish(back))
        out.add(in_sweep.finish(swept))
        out.close(step.node.weights)
        return [*step.probe_all(operands), *step.worst.finish(worst)]
