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
from jax import lax

from .ledger import Ledger
from .residuals import nbytes
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
    def segments(self) -> int:
        return -(-self.scan.length // self.every)

    @property
    def start_bytes(self) -> int:
        """What is kept at the starts of segments, and of what all of them read."""
        step = self.scan
        carry = nbytes(*(v.aval for v in step.ins))
        return self.segments * carry + step.memo_bytes - step.layers_memo_bytes

    @property
    def kept_bytes(self) -> int:
        """What a segment keeps while it is walked."""
        step = self.scan
        return -(-(step.kept_bytes + step.layers_memo_bytes) * self.every // step.length)

    def _firsts(self) -> Any:
        """((segments, their first layers), (the shorter last one, its first layer))."""
        segments, short = divmod(self.scan.length, self.every)
        start = short if self.scan.reverse else 0
        firsts = start + self.every * jnp.arange(segments)
        return (segments, firsts), (short, 0 if self.scan.reverse else segments * self.every)

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
        del keep, again
        step = self.scan
        operands, carry = step.operands_of(fixed, x)
        (segments, firsts), (short, first) = self._firsts()

        def segment(carry: Any, first: Any) -> Any:
            last, ys, _ = step.forward(operands, carry, (first, self.every), keep=False)
            return last, (carry, ys)

        rest = rest_ys = None
        last, (starts, ys) = step.scan(segment, carry, firsts, length=segments)
        if short:
            rest = last
            last, rest_ys, _ = step.forward(operands, last, (first, short), keep=False)
        x.update(zip(step.eqn.outvars, (*last, *step.joined(ys, rest_ys)), strict=True))
        self._drop(x, 0, retain)
        kept = {"starts": starts, "rest": rest}
        hold((x, list(x)), (kept, list(kept)))
        return kept

    def back_and_forth(self, fixed: Env, kept: Any, h: Env, out: Ledger) -> list[Any]:
        """Phases I, II and III, segment by segment."""
        step = self.scan
        operands, _ = step.operands_of(fixed, {})
        # Outside a loop, as the shorter segment is (and, to XLA, a loop that runs once), nothing but a
        # barrier keeps Phase I from being run again at once.
        kept = dict(kept)
        hold((h, list(h)), (kept, list(kept)))
        starts, rest = kept["starts"], kept["rest"]
        h_last, h_ys = step.arriving(h)
        in_back = Sums(step, operands, step.inner_in_back)
        in_sweep = Sums(step, operands, step.inner_in_sweep, out, apart=step.weights_in_back)
        factors = [None] * len(step.walk.steps)  # made in the loop: for all layers they are weight-sized

        def segment(carry: Any, layers: Any, start: Any) -> Any:
            h, back, swept, worst = carry
            # A layer's weights may be updated once it is swept, and never read again.
            now = operands._replace(newer=(in_sweep, swept))
            with jax.named_scope("phase_1"):
                _, _, held = step.forward(now, start, layers, again=True)
            with jax.named_scope("phase_2"):
                h, back, memo = step.backward(now, held, h, h_ys, layers, in_back, back)
            with jax.named_scope("phase_3"):
                _, _, swept, worst, _ = step.onward(
                    *(now, held, memo, factors, start, h, h_ys, layers, in_sweep, swept, worst)
                )
            return h, back, swept, worst

        (segments, firsts), (short, first) = self._firsts()
        carry = (h_last, in_back.start(), in_sweep.start(), jnp.zeros((), jnp.float32))
        if short:
            carry = segment(carry, (first, short), rest)
            carry, starts = lax.optimization_barrier((carry, starts))

        def whole(carry: Any, inputs: Any) -> Any:
            first, start = inputs
            return segment(carry, (first, self.every), start), None

        carry, _ = step.scan(whole, carry, (firsts, starts), backward=True, length=segments)
        h_first, back, swept, worst = carry
        step.leaving(h, h_first)
        out.add(in_back.finish(back))
        out.add(in_sweep.finish(swept))
        out.close(step.node.weights)
        return [worst] if step.certify else []
