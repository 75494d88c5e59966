"""Fragments of cotangents on the paper's 1D network, looped and scanned, against `jax.checkpoint`.

Spans walk over the whole network, even if a plan would find another way cheaper. Products of the walk
use true float32 where that is needed; "-default" leaves them in the device's default precision (TF32),
and "-aligned" uses the paper's grids, which do not move from layer to layer. `fig3` varies the depth of
the same network.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..tasks import Record, Request, Table, Task
from . import common

TITLE = "Fragments of cotangents on a 1D network of 20 layers"
SPANS = (4, 8, 16)


def tasks(request: Request) -> list[Task]:
    depth, spans, runs = 20, SPANS, ("block", "10", "5", "4", "2")
    if request.on_gpu and not request.quick:
        sizes = common.Sizes(width=256, length=2048, batch=128)
    elif request.quick:
        sizes, depth, spans, runs = common.Sizes(width=8, length=64, batch=2), 8, (4,), ("4",)
    else:
        sizes = common.Sizes(width=32, length=512, batch=4)
    make = common.maker("fragments", "signal", sizes, request)
    names = [f"moonwalk-fragment-{b}{end}" for b in spans for end in ("", "-default")]
    aligned = [] if request.quick else [f"moonwalk-fragment-{b}-aligned" for b in spans]
    planned = ["moonwalk"] if request.quick else ["moonwalk", "moonwalk-checkpoint"]
    by_hand = [f"jax-checkpoint-{n}" for n in runs]
    looped = ["backprop", *by_hand, *names, *aligned, *planned]
    found = [make("slope 0.3, looped", m, depth=depth) for m in looped]
    return found + [make("slope 0.3", m, depth=depth) for m in ("backprop", *names, *planned)]


def summary(records: Sequence[Record]) -> list[Table]:
    return common.by_variant(records)
