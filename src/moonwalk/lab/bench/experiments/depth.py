"""The deepest network that fits: found over compiled programs' memory, then run.

A program fits if its arguments, results and temporaries together are within the limit: parameters and
gradients count. The paper's limit is a card of 24 GB, its network the 1D one of Fig. 3. Searches stop at
a maximal depth; a method that reaches it may go deeper.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..tasks import Record, Request, Table, Task
from . import common

TITLE = "The deepest network within a memory limit"
ISOMETRIC = ("backprop", "checkpoint", "checkpoint-recursive", "moonwalk", "moonwalk-checkpoint")
SIGNAL = ("backprop", "checkpoint-block", "checkpoint", "moonwalk-fragment-16", "moonwalk")


def tasks(request: Request) -> list[Task]:
    isometric, signal = ISOMETRIC, SIGNAL
    if request.on_gpu:
        sizes, limit = common.Sizes(width=256, length=2048, batch=128), 24 * 10**9
        steps = {"isometric": (32, 2048), "signal": (2, 1024)}
    elif request.quick:
        sizes, limit = common.Sizes(width=8, length=64, batch=8), 2**19
        steps = {"isometric": (4, 256), "signal": (1, 64)}
        isometric, signal = ("backprop", "checkpoint", "moonwalk"), ()
    else:
        sizes, limit = common.Sizes(width=8, length=128, batch=16), 2 * 2**20
        steps = {"isometric": (8, 1024), "signal": (2, 512)}
    limit = request.limit_bytes or limit
    found = []
    for network, variant, names in (("isometric", "", isometric), ("signal", "slope 0.3", signal)):
        make = common.maker("depth", network, sizes, request)
        step, most = steps[network]
        asked = {"over": "depth", "step": step, "most": most}
        found += [make(variant, m, depth=0, search=asked, limit_bytes=limit) for m in names]
    return found


def search(request: Request, run: common.Run) -> None:
    for task in filter(request.wants, tasks(request)):
        common.run_largest(task, run, reference="same" if request.on_gpu else "float64")


def summary(records: Sequence[Record]) -> list[Table]:
    return common.largest(records, "depth")
