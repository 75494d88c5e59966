"""`Checkpoint` against `jax.checkpoint` written by hand in the same places: temporaries and time.

"checkpoint-8" has eight segments; "jax-checkpoint-8" has `jax.checkpoint` around each of eight runs of
layers (for a scan: a scan over checkpointed scans). "block": around every layer, which is a product and
its activation if layers are dense, and otherwise a block of the network. "sqrt": about the root of the
depth.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .. import networks
from ..judgement import verdict
from ..tasks import Record, Request, Table, Task
from . import common

TITLE = "Checkpointing by a plan, beside jax.checkpoint written by hand"
DENSE = {"depth": 64, "width": 256, "batch": 2**14}
SEGMENTS = {"dense": (4, 8, 16), "gpt": (3, 4, 6), "resnet": (2, 4, 8)}


def tasks(request: Request) -> list[Task]:
    sizes: dict[str, dict[str, Any]]
    if request.quick:
        sizes = {"dense": {"depth": 16, "width": 16, "batch": 256}}
        sizes |= {n: networks.SIZES[n]["tiny"] for n in ("gpt", "resnet")}
        segments, words = {"dense": (4,), "gpt": (2,), "resnet": (2,)}, {"gpt": "tiny", "resnet": "tiny"}
    elif request.on_gpu:
        sizes = {"dense": DENSE} | {n: networks.SIZES[n]["full"] for n in ("gpt", "resnet")}
        segments, words = SEGMENTS, {"gpt": "bfloat16", "resnet": "bfloat16"}
    else:  # networks that people train, at sizes that a CPU runs in seconds
        sizes = {"dense": DENSE}
        sizes |= {"gpt": {"depth": 12, "width": 64, "length": 256, "batch": 8}}
        sizes |= {"resnet": {"depth": 16, "width": 8, "length": 64, "batch": 16}}
        segments, words = SEGMENTS, {"gpt": "tiny", "resnet": ""}
    kinds = [("dense", "relu"), ("dense", "relu, looped")]
    kinds += [("gpt", f"scanned, {words['gpt']}"), ("gpt", words["gpt"]), ("resnet", words["resnet"])]
    named: tuple[str, ...] = ("block", "sqrt")
    if request.quick:
        kinds, named = kinds[:3], named[:1]
    found = []
    for network, variant in kinds:
        places = (*named, *map(str, segments[network]))
        methods = [
            "backprop",
            *(f"{kind}-{p}" for p in places for kind in ("checkpoint", "jax-checkpoint")),
        ]
        settings = common.settings(request, reference="same", repeats=3)
        found += [
            Task("checkpoint", network, m, variant, settings=settings, **sizes[network]) for m in methods
        ]
    return found


def summary(records: Sequence[Record]) -> list[Table]:
    columns = ("places", "gradient", "by a plan, bytes", "by hand, bytes", "ratio")
    columns += ("by a plan, s", "by hand, s", "ratio of times")
    groups: dict[str, dict[str, Record]] = {}
    for record in records:
        task = record["task"]
        name = ", ".join(filter(None, (task["network"], task["variant"])))
        groups.setdefault(f"{name}, {task['depth']} layers", {})[task["method"]] = record
    tables = []
    for title, group in groups.items():
        rows = []
        for method, record in group.items():
            if not method.startswith("checkpoint-"):
                continue
            places = method.removeprefix("checkpoint-")
            both = [record, group.get(f"jax-{method}", {})]
            rows.append(
                [places, verdict(record, records), *_beside(both, _bytes), *_beside(both, _time)]
            )
        plain = group.get("backprop", {})
        notes = [f"Backpropagation: {_bytes(plain):,} bytes"] if _bytes(plain) is not None else []
        if notes and (took := _time(plain)) is not None:
            notes = [f"{notes[0]}, {1e3 * took:.3g} ms."]
        tables.append(Table(title, columns, rows, notes))
    return tables


def _bytes(record: Any) -> int | None:
    return record.get("temp_bytes")


def _time(record: Any) -> float | None:
    return (record.get("seconds") or {}).get("median")


def _beside(both: Sequence[Any], figure: Any) -> list[Any]:
    """Ours, theirs, and the ratio of ours to theirs."""
    ours, theirs = map(figure, both)
    return [ours, theirs, ours / theirs if ours is not None and theirs else None]
