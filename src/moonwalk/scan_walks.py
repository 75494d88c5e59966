"""A scan whose Phase I is run again, some layers at a time: "Moonwalk + checkpoint" over stacked layers.

    forward   run all layers, keep the carry at the start of every segment of K
    reverse   segment by segment, the last first: Phase I from the kept carry, Phase II, Phase III

L layers that keep r each (a 32nd of a state, where signs are enough), in segments of K, take L/K states
and K·r: least, 2 √(L r) states, at K = √(L/r). `jax.checkpoint` has r ≥ 1 state in the same formula.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from . import compat
from .certificate import Measured, Place
from .ledger import Ledger
from .residuals import nbytes
from .scale import Cotangents, shifted
from .scans import ScanStep, Sums
from .walks import Env, Walk, hold


@dataclass(eq=False, repr=False)
class ScanWalk(Walk):
    """A walk over one scan, in segments of `every` layers."""

    every: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        (step,) = self.steps
        assert isinstance(step, ScanStep)
        self.scan, self.recomputed = step, True

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
        found = (v for v in (*consts, *xs) if not isinstance(v, compat.Literal))
        return [v for v in dict.fromkeys(found) if v not in self.trunk.fixed]

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

    def phase_one(
        self,
        fixed: Env,
        x: Env,
        retain: frozenset[Any] = frozenset(),
        *,
        keep: bool = True,
        again: bool = False,
    ) -> Any:
        """Forward: the carries at the starts of segments."""
        del keep
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
        self._drop(x, 0, retain)
        kept = {"starts": starts, "rest": rest, "moving": moving}
        hold((x, list(x)), (kept, list(kept)))
        return kept

    def back_and_forth(self, fixed: Env, kept: Any, h: Cotangents, out: Ledger) -> list[Measured]:
        """Phases I, II and III, segment by segment."""
        step = self.scan
        # Outside a loop, as the shorter segment is (and, to XLA, a loop that runs once), nothing but a
        # barrier keeps Phase I from being run again at once.
        kept = dict(kept)
        hold((h, list(h)), (kept, list(kept)))
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
        zero = compat.varying_zero((operands[:3], h_last, h_ys, starts), jnp.float32)
        carry = (h_last, in_back.start(), in_sweep.start(), step.worst.start(zero))
        if short:
            carry = segment(carry, (rest_start, short), rest)
            box = {"carry": carry, "starts": starts}
            hold((box, list(box)))
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
