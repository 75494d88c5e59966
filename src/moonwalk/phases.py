"""The algorithm on one page.

Phase I    forward over the segments: keep what each needs
then, segment by segment in reverse:
  walk     Phase II  h only, keep anchors;  Phase III  sweep x and h forward, hand out g
           (with checkpoint=, Phase I once more before that: its start alone was kept)
  store, recompute   JAX's own pullback, h and g at once
  invert   the same, each state from the one after it
last       the weight side turns gradients of operands into gradients of parameters
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from .certificate import Measured
from .ledger import Ledger
from .planning import Segment
from .scale import Cotangents
from .scan_walks import ScanWalk
from .segments import Stretch
from .walks import Env, Step, Walk, as_cotangent, hold


def forward(
    segments: Sequence[Segment], fixed: Env, x: Env, results: frozenset[Any], *, again: bool = False
) -> list[Any]:
    """Phase I. `x` holds, at the end, whatever of `results` the trunk makes.

    `again`: another pass prints and calls back.
    """
    saved: list[Any] = []
    with jax.named_scope("phase_1"):
        for number, segment in enumerate(segments):
            with jax.named_scope(f"segment_{number}"):
                start = {v: x[v] for v in _start_state(segment) if v in x}
                if isinstance(segment, Walk):
                    kept = segment.phase_one(fixed, x, results, keep=not segment.recomputed, again=again)
                else:
                    kept = segment.phase_one(fixed, x, results, again=again)
                saved.append((kept, start))
    return saved


def _start_state(segment: Segment) -> tuple[Any, ...]:
    """The activations that a walk's sweep starts from; they are kept from Phase I."""
    if isinstance(segment, Stretch | ScanWalk):
        return ()
    made = {v for s in segment.steps for v in (*s.block.outputs, *s.block.exports)}
    swept = segment.steps if segment.recomputed else segment.steps[: segment.end]
    reads = dict.fromkeys(v for s in swept for v in (*s.block.inputs, *s.block.operands))
    return tuple(v for v in reads if v not in made)


def reverse(
    segments: Sequence[Segment], fixed: Env, saved: list[Any], h: Env, out: Ledger
) -> list[Measured]:
    """Phases II and III: the errors that were measured.

    `h` holds the outputs' cotangents, and at the end those of the trunk's entry. Gradients go to `out`.
    """
    errors: list[Measured] = []
    for number in reversed(range(len(segments))):
        segment, (kept, start) = segments[number], saved.pop()
        with jax.named_scope(f"segment_{number}"):
            if isinstance(segment, Stretch):
                with jax.named_scope("phase_2"):
                    errors += segment.reverse(fixed, kept, h, out)
                continue
            errors += walk_back_and_forth(segment, fixed, kept, start, h, out)
            if number:
                # What precedes waits for the sweep: nothing else keeps XLA from doing both side by side.
                hold((h, list(h)), *out.parts([v for s in segment.steps for v in s.node.weights]))
    return errors


def walk_back_and_forth(
    walk: Walk, fixed: Env, kept: Any, start: Env, h: Env, out: Ledger
) -> list[Measured]:
    """One walk: down with h alone, and up again with x and h side by side."""
    scaled = Cotangents({v: as_cotangent(v, a) for v, a in h.items()})
    if isinstance(walk, ScanWalk):
        errors = walk.back_and_forth(fixed, kept, scaled, out)
        _replace(h, scaled.unscaled())
        return errors
    if walk.recomputed:
        with jax.named_scope("phase_1"):
            kept = _again(walk, fixed, start, scaled)
    with jax.named_scope("phase_2"):
        memos, sketches, scales = walk.phase_two(fixed, kept, scaled, out)
    with jax.named_scope("phase_3"):
        x = dict(start)
        state = Cotangents({v: scaled[v] for v in walk.seeds if v in scaled}, scaled.exponents)
        _replace(h, scaled.unscaled())
        box: dict[Any, Any] = {"kept": kept, "memos": memos, "sketches": sketches}
        fixed = dict(fixed)
        # Nothing of the sweep may be merged with Phase I: it starts from barred copies of everything.
        data = _data_read(walk.steps[: walk.end], walk, fixed)
        if walk.end:
            # The stem's gradients are found in Phase II: or their cotangent would lie beside the state.
            found = out.parts([v for s in walk.steps if s.is_stem for v in s.node.weights])
            hold((x, list(x)), (state, list(state)), (box, list(box)), (fixed, data), *found)
        factors = walk.prepare(fixed)
        saved = (box["kept"], box["memos"], box["sketches"], scales)
        return walk.phase_three(fixed, *saved, factors, x, state, out)


def _replace(env: Env, new: Env) -> None:
    env.clear()
    env.update(new)


def _again(walk: Walk, fixed: Env, start: Env, h: Env) -> list[Any]:
    """Phase I once more, from the state at the walk's start, once h has arrived at its end."""
    x, fixed = dict(start), dict(fixed)
    hold((x, list(x)), (h, list(h)), (fixed, _data_read(walk.steps, walk, fixed)))
    return walk.phase_one(fixed, x, again=True)


def _data_read(steps: Sequence[Step], walk: Walk, fixed: Env) -> list[Any]:
    """The data among the operands: a forward pass from the very start begins with them."""
    reads = dict.fromkeys(v for s in steps for v in s.block.operands)
    return [v for v in reads if v in fixed and v not in walk.trunk.weights]
