"""The engine against backpropagation and handwritten `jax.checkpoint`, network by network.

The networks are orthogonal dense layers, scanned and in a loop; the same with twice the layers, to see
what one more layer costs; MaxMin, which keeps a bit per pair; a U-Net of such layers; and networks that
cannot be walked, for which a plan should take no more than checkpointing. Memory is read without
running, at 16,384 rows, or 131,072 on a GPU: there XLA joins products smaller than 32 MB into one over a
copy of both operands, and each library call has a workspace of 32 MiB, which with states of 16 MiB would
be a third of the figure. Times on a CPU are for 4,096 rows. Moonwalk's records have the plan's rows and
`predicted_bytes`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..judgement import verdict
from ..tasks import Record, Request, Table, Task
from . import common

TITLE = "Moonwalk beside backpropagation and jax.checkpoint by hand"
WALKED = ("backprop", "jax-checkpoint-block", "moonwalk")
KEPT = ("backprop", "jax-checkpoint-block", "moonwalk")


def tasks(request: Request) -> list[Task]:
    rows, width, depth = (256, 16, 16) if request.quick else (2**14, 256, 64)
    rows = 2**17 if request.on_gpu and not request.quick else rows
    timed = 256 if request.quick else 2**20 if request.on_gpu else 2**12
    runs = [str(depth // every) for every in (2, 4, 8, 16, 32) if every < depth]

    def make(network: str, variant: str, method: str, layers: int, run: bool = False) -> Task:
        settings = common.settings(request, reference="same") if run else {"run": False}
        settings |= {"plan": True} if method == "moonwalk" else {}
        batch = timed if run else rows
        return Task("engine", network, method, variant, layers, width, 0, batch, settings=settings)

    ways = (*WALKED, "moonwalk-certified", *(f"jax-checkpoint-{n}" for n in runs))
    found = [make("dense", "abs", m, depth) for m in ways]
    found += [
        make("dense", "abs", m, depth, True) for m in ("backprop", "moonwalk", "moonwalk-certified")
    ]
    found += [
        make("dense", v, "moonwalk", n) for v in ("abs", "maxmin") for n in (depth // 2, 2 * depth)
    ]
    if request.quick:
        return found
    found += [make("dense", "abs, looped", m, depth) for m in ("backprop", "moonwalk")]
    found += [make("skips", "", m, 6) for m in WALKED]
    for variant, layers in (("relu, looped", 24), ("residual, looped", 12), ("tanh, looped", 24)):
        found += [make("dense", variant, m, layers, True) for m in KEPT]
    settings = common.settings(request, reference="same")
    sizes: dict[str, Any] = {"depth": 6, "width": 64, "length": 128, "batch": 16}
    return found + [Task("engine", "gpt", m, "tiny", settings=settings, **sizes) for m in KEPT]


def summary(records: Sequence[Record]) -> list[Table]:
    columns = ("method", "layers", "rows", "gradient", "temporaries, bytes", "predicted, bytes")
    columns += ("seconds", "over backprop")
    groups: dict[str, list[Record]] = {}
    for record in records:
        task = record["task"]
        groups.setdefault(", ".join(filter(None, (task["network"], task["variant"]))), []).append(record)
    tables = []
    for title, group in groups.items():
        plain = {_place(r): r["seconds"]["median"] for r in group if _is_backprop(r) and r["seconds"]}
        rows = []
        for r in group:
            took, beside = (r["seconds"] or {}).get("median"), plain.get(_place(r))
            ratio = took / beside if took is not None and beside else None
            predicted, judged = r["extra"].get("predicted_bytes"), verdict(r, records)
            shown = [r["task"]["method"], *_place(r), judged, r["temp_bytes"], predicted, took, ratio]
            rows.append(shown)
        tables.append(Table(title, columns, rows, _added(group)))
    return tables


def _is_backprop(record: Record) -> bool:
    return record["task"]["method"] == "backprop"


def _place(record: Record) -> tuple[int, int]:
    return record["task"]["depth"], record["task"]["batch"]


def _added(group: Sequence[Record]) -> list[str]:
    """What one more layer costs, if Moonwalk was measured at several depths."""
    found: dict[int, list[tuple[int, int]]] = {}
    for r in group:
        task: Any = r["task"]
        if task["method"] == "moonwalk" and r["temp_bytes"] is not None and not r["seconds"]:
            found.setdefault(4 * task["batch"] * task["width"], []).append(
                (task["depth"], r["temp_bytes"])
            )
    notes = []
    for state, points in found.items():
        (few, less), (many, more) = min(points), max(points)
        if many > few:
            share = (more - less) / (many - few) / state
            notes.append(f"One more layer costs Moonwalk {share:.3f} of a layer's output.")
    return notes
