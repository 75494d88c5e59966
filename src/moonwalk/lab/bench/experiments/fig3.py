"""The paper's Fig. 3: memory and time of a 1D network of stride 1 over its depth, with fragments.

Spans of 4, 8 and 16 in grids that move from layer to layer, compared with the paper's ("aligned"), which
do not move. All of them walk over the whole network, whatever the error; "moonwalk" plans from types
alone, and "moonwalk-measured" from the weights.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..tasks import Record, Request, Table, Task
from . import common

TITLE = "Fig. 3: a 1D network of stride 1, memory and time over depth and span"
SLOPES = ("slope 0.01", "slope 0.1", "slope 0.3")
STABLE = "slope 0.3"
SPANS = (4, 8, 16)


def tasks(request: Request) -> list[Task]:
    others: tuple[str, ...] = ("moonwalk-fragment-8", "checkpoint", "checkpoint-block")
    others += (
        "checkpoint-sqrt",
        "checkpoint-recursive",
        "accumulate-4",
        "moonwalk",
        "moonwalk-measured",
    )
    spans, slopes, aligned = (4, 16), SLOPES, (16,)
    if request.on_gpu:
        sizes, depths = common.Sizes(width=256, length=2048, batch=128), (6, 14, 22)
    elif request.quick:
        sizes, depths = common.Sizes(width=16, length=128, batch=4), (4, 12)
        others, spans, slopes = ("checkpoint",), (4,), SLOPES[1:2]
    else:
        sizes, depths = common.Sizes(width=16, length=256, batch=8), (6, 14, 22)
        aligned = SPANS
    make = common.maker("fig3", "signal", sizes, request)
    over_depth = ("backprop", *(f"moonwalk-fragment-{span}" for span in spans))
    found = [make(STABLE, method, depth=depth) for depth in depths for method in over_depth]
    found += [make(STABLE, method, depth=depths[-1]) for method in others]
    found += [
        make(slope, f"moonwalk-fragment-{span}-aligned", depth=depths[-1])
        for slope in slopes
        for span in aligned
    ]
    if request.on_gpu:  # in TF32 backpropagation is off, too, and methods are judged by what they add
        found += [make(s, "backprop", depth=depths[-1]) for s in slopes if s != STABLE]
    return [*found, make(slopes[0], "moonwalk", depth=depths[-1])]


def summary(records: Sequence[Record]) -> list[Table]:
    return common.by_variant(records)
