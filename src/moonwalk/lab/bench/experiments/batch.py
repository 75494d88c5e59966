"""The largest batch that fits: the twin of `depth`."""

from __future__ import annotations

from collections.abc import Sequence

from ..tasks import Record, Request, Table, Task
from . import common

TITLE = "The largest batch within a memory limit"
METHODS = ("backprop", "checkpoint", "accumulate-4", "moonwalk", "moonwalk-checkpoint")


def tasks(request: Request) -> list[Task]:
    methods = METHODS
    if request.on_gpu:
        sizes, depth, limit = common.Sizes(width=256, length=2048, batch=0), 64, 24 * 10**9
        asked = {"over": "batch", "step": 4, "most": 4096}
    elif request.quick:
        sizes, depth, limit = common.Sizes(width=8, length=64, batch=0), 32, 2 * 2**20
        asked = {"over": "batch", "step": 4, "most": 256}
        methods = ("backprop", "moonwalk")
    else:
        sizes, depth, limit = common.Sizes(width=8, length=128, batch=0), 32, 4 * 2**20
        asked = {"over": "batch", "step": 4, "most": 1024}
    limit = request.limit_bytes or limit
    make = common.maker("batch", "isometric", sizes, request)
    return [make("", m, depth=depth, search=asked, limit_bytes=limit) for m in methods]


def search(request: Request, run: common.Run) -> None:
    for task in filter(request.wants, tasks(request)):
        common.run_largest(task, run, reference="same" if request.on_gpu else "float64")


def summary(records: Sequence[Record]) -> list[Table]:
    return common.largest(records, "batch")
