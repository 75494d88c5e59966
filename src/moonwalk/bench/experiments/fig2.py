"""The paper's Fig. 2: memory and time of a 2D pyramid over its depth.

Beside the network as printed (triangular pivots, no word on slopes) stands the stable one, whose pivots
are identities. "moonwalk-as-printed" walks over everything without anchors, as the paper does: where
rounding error grows, the gradient's error says so. "moonwalk" plans, and keeps within its tolerance.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..tasks import Record, Request, Table, Task
from . import common

TITLE = "Fig. 2: a 2D pyramid, memory and time over depth"
STABLE = "identity, slope 0.25"
PRINTED = ("lower, slope 0.01", "lower, slope 0.1", "lower, slope 0.3")


def tasks(request: Request) -> list[Task]:
    if request.on_gpu:
        sizes = common.Sizes(width=128, length=256, batch=128)
        depths, deepest, printed = (1, 2, 4, 8), 8, PRINTED
    elif request.quick:
        sizes = common.Sizes(width=16, length=32, batch=8)
        depths, deepest, printed = (1, 4), 4, PRINTED[:1]
    else:
        sizes = common.Sizes(width=32, length=64, batch=16)
        depths, deepest, printed = (1, 2, 3, 4, 5), 5, PRINTED
    variant = STABLE + ", residual" if request.residual else STABLE
    make = common.maker("fig2", "pyramid", sizes, request)
    found = [
        make(variant, method, depth=depth)
        for depth in depths
        for method in ("backprop", "checkpoint", "moonwalk")
    ]
    if request.quick:
        others: tuple[str, ...] = ()
    else:
        others = ("checkpoint-block", "checkpoint-recursive", "accumulate-4", "moonwalk-checkpoint")
    found += [make(variant, method, depth=deepest) for method in others]
    if request.residual:
        return found
    return found + [
        make(kind, method, depth=deepest)
        for kind in printed
        for method in ("moonwalk-as-printed", "moonwalk")
    ]


def summary(records: Sequence[Record]) -> list[Table]:
    return common.by_variant(records)
