"""`Moonwalk(checkpoint=...)`: walks in segments, over a thousand layers and more.

Isometric convolutions are run, and their certificates recorded (`extra`); for orthogonal dense layers
only the memory is read. Both are compared with `jax.checkpoint` written by hand around runs of layers.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..tasks import Record, Request, Table, Task
from . import common

TITLE = "Walks in segments over a thousand layers"


def tasks(request: Request) -> list[Task]:
    if request.on_gpu and not request.quick:
        sizes, layers, runs = common.Sizes(width=256, length=2048, batch=128), 1024, 32
    elif request.quick:
        sizes, layers, runs = common.Sizes(width=8, length=32, batch=2), 32, 4
    else:
        sizes, layers, runs = common.Sizes(width=16, length=64, batch=4), 64, 8
    make = common.maker("segments", "isometric", sizes, request)
    methods = [f"jax-checkpoint-{runs}", "moonwalk", "moonwalk-certified"]
    methods += [f"moonwalk-checkpoint-{runs}", "moonwalk-checkpoint", "moonwalk-checkpoint-certified"]
    if request.on_gpu:
        methods.append("moonwalk-checkpoint-certified-highest")
    # A network that fills a card is compared with a reference that fits beside it.
    kind = "same" if request.on_gpu else "float64"
    found = [make("", m, depth=layers, reference=kind, repeats=3) for m in methods]
    dense = common.Sizes(width=16, batch=256) if request.quick else common.Sizes(width=256, batch=2**14)
    make = common.maker("segments", "dense", dense, request)
    for count in (64, 256) if request.quick else (1024, 4096):
        found += [make("abs", m, depth=count, run=False) for m in ("moonwalk", "moonwalk-checkpoint")]
        if count == 1024:
            by_hand = [f"jax-checkpoint-{count // every}" for every in (16, 32, 64)]
            found += [make("abs", m, depth=count, run=False) for m in by_hand]
    return found


def summary(records: Sequence[Record]) -> list[Table]:
    return common.by_variant(records, extra={"certificate": "certificate, error"})
