"""What experiments share: sizes, settings of a measurement, tables of records."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..tasks import Record, Request, Table, Task

COLUMNS = (
    "method",
    "depth",
    "status",
    "temporaries, bytes",
    "peak, bytes",
    "seconds",
    "low",
    "high",
    "compile, s",
    "gradient error",
)


@dataclass(frozen=True)
class Sizes:
    width: int
    batch: int
    length: int = 0


def settings(request: Request, **more: Any) -> dict[str, Any]:
    """Of a measurement that runs, beside its reference."""
    found: dict[str, Any] = {"reference": "highest" if request.on_gpu else "float64"}
    found["repeats"] = 3 if request.quick else 5
    if request.seed:
        found["seed"] = request.seed
    return found | more


def maker(experiment: str, network: str, sizes: Sizes, request: Request) -> Callable[..., Task]:
    """(variant, method, depth=…, …) -> task."""

    def make(variant: str, method: str, *, depth: int, **more: Any) -> Task:
        return Task(
            experiment,
            network,
            method,
            variant,
            depth,
            sizes.width,
            sizes.length,
            sizes.batch,
            settings=settings(request, **more),
        )

    return make


def row(record: Record) -> list[Any]:
    """A record under `COLUMNS`."""
    task, seconds = record["task"], record["seconds"] or {}
    times = [seconds.get(name) for name in ("median", "low", "high")]
    return [
        task["method"],
        task["depth"],
        record["status"],
        record["temp_bytes"],
        record["peak_bytes"],
        *times,
        record["compile_seconds"],
        record["gradient_error"],
    ]


def by_variant(records: Sequence[Record]) -> list[Table]:
    """A table for every network and variant."""
    groups: dict[str, list[Record]] = {}
    for record in records:
        task = record["task"]
        groups.setdefault(", ".join(filter(None, (task["network"], task["variant"]))), []).append(record)
    return [Table(name, COLUMNS, [row(r) for r in group]) for name, group in groups.items()]
