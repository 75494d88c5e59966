"""An inverted reversible transformer: memory and time against backpropagation and `jax.checkpoint`.

On a GPU the sizes are those of a small vision transformer; on a CPU they are tiny, and only the memory
is meaningful. Certificates of the inverted states are in the records' `extra`.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..tasks import Record, Request, Table, Task
from . import common

TITLE = "A reversible transformer, inverted"
METHODS = ("backprop", "jax-checkpoint-block", "jax-checkpoint-sqrt", "moonwalk-certified")


def tasks(request: Request) -> list[Task]:
    depths, variant = (16, 64), "tiny"
    if request.on_gpu and not request.quick:
        sizes, variant = common.Sizes(width=384, length=128, batch=64), ""
    elif request.quick:
        sizes, depths = common.Sizes(width=16, length=8, batch=2), (8,)
    else:
        sizes = common.Sizes(width=32, length=32, batch=16)
    make = common.maker("reversible", "reversible", sizes, request)
    return [make(variant, m, depth=d, reference="same", repeats=5) for d in depths for m in METHODS]


def summary(records: Sequence[Record]) -> list[Table]:
    return common.by_variant(records, extra={"certificate": "certificate, error"})
