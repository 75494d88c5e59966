"""The paper's Fig. 2: memory and time of a 2D pyramid over its depth.

The network as printed (triangular pivots; slopes are not given) is compared with a stable one, whose
pivots are identities. "moonwalk-as-printed" walks over everything without anchors, as the paper does; if
rounding error grows, the gradient's error shows it. "moonwalk" plans and stays within its tolerance; on
this network it may find that walking does not pay.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..tasks import Record, Request, Table, Task
from . import common

TITLE = "Fig. 2: a 2D pyramid, memory and time over depth"
STABLE = "identity, slope 0.25"
PRINTED = ("lower, slope 0.01", "lower, slope 0.1", "lower, slope 0.3")


def tasks(request: Request) -> list[Task]:
    others: tuple[str, ...] = ("checkpoint", "checkpoint-block", "checkpoint-sqrt")
    others += ("checkpoint-recursive", "accumulate-4")
    printed = PRINTED
    if request.on_gpu:
        sizes, depths = common.Sizes(width=128, length=256, batch=128), (1, 4, 8)
    elif request.quick:
        sizes, depths = common.Sizes(width=16, length=64, batch=8), (2, 6)
        others, printed = ("checkpoint",), PRINTED[:1]
    else:
        sizes, depths = common.Sizes(width=32, length=64, batch=16), (1, 2, 3, 4, 6)
        others += ("moonwalk-checkpoint",)
    variant = STABLE + ", residual" if request.residual else STABLE
    make = common.maker("fig2", "pyramid", sizes, request)
    over_depth = ("backprop", "moonwalk", "moonwalk-as-printed")
    found = [make(variant, method, depth=depth) for depth in depths for method in over_depth]
    found += [make(variant, method, depth=depths[-1]) for method in others]
    if request.residual:
        return found
    # In TF32 backpropagation is off, too, and methods are judged by what they add.
    beside = ("moonwalk-as-printed", "backprop") if request.on_gpu else ("moonwalk-as-printed",)
    found += [make(kind, method, depth=depths[-1]) for kind in printed for method in beside]
    return [*found, make(printed[0], "moonwalk", depth=depths[-1])]


def summary(records: Sequence[Record]) -> list[Table]:
    return common.by_variant(records)
