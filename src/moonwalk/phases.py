"""The algorithm on one page.

Phase I    forward over the segments: keep what each needs
then, segment by segment in reverse:
  walk     Phase II  h only, keep anchors;  Phase III  sweep x and h forward, hand out g
  store, recompute   JAX's own pullback, h and g at once
last       the weight side turns gradients of operands into gradients of parameters
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from .planning import Segment
from .segments import Plain
from .walks import Env, Gradients, Walk, add_gradients, as_cotangent, hold


def forward(segments: Sequence[Segment], fixed: Env, x: Env, results: frozenset[Any]) -> list[Any]:
    """Phase I. `x` holds, at the end, whatever of `results` the trunk makes."""
    saved: list[Any] = []
    with jax.named_scope("phase_1"):
        for number, segment in enumerate(segments):
            with jax.named_scope(f"segment_{number}"):
                start = {v: x[v] for v in _start_state(segment) if v in x}
                kept = segment.phase_one(fixed, x, results)
                saved.append((kept, start))
    return saved


def _start_state(segment: Segment) -> tuple[Any, ...]:
    """The activations that a walk's sweep starts from; they are kept from Phase I."""
    if isinstance(segment, Plain):
        return ()
    made = {v for s in segment.steps for v in (*s.block.outputs, *s.block.exports)}
    swept = segment.steps[: segment.end]
    reads = dict.fromkeys(v for s in swept for v in (*s.block.inputs, *s.block.operands))
    return tuple(v for v in reads if v not in made)


def reverse(
    segments: Sequence[Segment], fixed: Env, saved: list[Any], h: Env
) -> tuple[Gradients, tuple[list[Any], list[Any]]]:
    """Phases II and III: (gradients, (sampled errors, those at the ends of walks)).

    `h` holds the outputs' cotangents, and at the end those of the trunk's entry.
    """
    gradients: Gradients = {}
    errors: list[Any] = []
    closures: list[Any] = []
    for number in reversed(range(len(segments))):
        segment, (kept, start) = segments[number], saved.pop()
        with jax.named_scope(f"segment_{number}"):
            if isinstance(segment, Plain):
                with jax.named_scope("phase_2"):
                    add_gradients(gradients, segment.reverse(fixed, kept, h))
                continue
            found, own = walk_back_and_forth(segment, fixed, kept, start, h)
            add_gradients(gradients, found)
            errors += own
            closures += own[-1:]
    return gradients, (errors, closures)


def walk_back_and_forth(
    walk: Walk, fixed: Env, kept: list[Any], start: Env, h: Env
) -> tuple[Gradients, list[Any]]:
    """One walk: down with h alone, and up again with x and h side by side."""
    h.update((v, as_cotangent(v, a)) for v, a in h.items())
    with jax.named_scope("phase_2"):
        memos, samples, gradients = walk.phase_two(fixed, kept, h)
    if not walk.end:
        return gradients, []
    with jax.named_scope("phase_3"):
        x = dict(start)
        state = {v: h[v] for v in walk.seeds if v in h}
        box: dict[Any, Any] = {"kept": kept, "memos": memos, "samples": samples}
        fixed = dict(fixed)
        # Nothing of the sweep may be merged with Phase I: it starts from barred copies of everything.
        data = [v for v in _read_in_sweep(walk) if v in fixed and v not in walk.trunk.weights]
        hold((x, list(x)), (state, list(state)), (box, ["kept", "memos", "samples"]), (fixed, data))
        factors = walk.prepare(fixed)
        found, errors = walk.phase_three(
            fixed, box["kept"], box["memos"], box["samples"], factors, x, state
        )
    add_gradients(gradients, found)
    return gradients, errors


def _read_in_sweep(walk: Walk) -> list[Any]:
    return list(dict.fromkeys(v for s in walk.steps[: walk.end] for v in s.block.operands))
