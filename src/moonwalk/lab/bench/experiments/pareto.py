"""Memory against time: every method and setting on one network of orthogonal layers and |x|.

Methods that take one pass per number (of the parameters, or of the first state) only run where the
network is small; otherwise they would not end. |x| has no inverse, so `Reversible` is measured on the
same layers with a leaky ReLU, together with the two methods it is compared with.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..tasks import Record, Request, Table, Task
from . import common

TITLE = "Memory against time, every method on one network"
METHODS = (
    "backprop",
    "checkpoint",
    "checkpoint-block",
    "checkpoint-sqrt",
    "checkpoint-recursive",
    "accumulate-4",
    "projected-forward",
    "reversible",
    "pure-forward-per-example",
    "moonwalk",
    "moonwalk-checkpoint",
)
INVERTIBLE, BESIDE = "slope 0.9", ("backprop", "reversible", "moonwalk")


def tasks(request: Request) -> list[Task]:
    methods: tuple[str, ...] = METHODS
    if request.on_gpu:
        sizes, depth = common.Sizes(width=256, batch=2**17), 64
    elif request.quick:
        sizes, depth = common.Sizes(width=8, batch=128), 32
        methods = ("backprop", "checkpoint", "accumulate-4", "reversible", "moonwalk", "forward")
    else:
        sizes, depth = common.Sizes(width=32, batch=1024), 64
        methods += ("accumulate-16",)
    make = common.maker("pareto", "dense", sizes, request)
    kind = "same" if request.on_gpu else "float64"
    every = [("abs", method) for method in methods]
    every += [(INVERTIBLE, method) for method in (() if request.quick else BESIDE)]
    return [make(variant, method, depth=depth, reference=kind) for variant, method in every]


def summary(records: Sequence[Record]) -> list[Table]:
    best = sorted(records, key=lambda r: (r["temp_bytes"] is None, r["temp_bytes"]))
    return common.by_variant(best)
