"""What experiments share: sizes, settings of a measurement, tables of records."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ....planning.report import format_bytes
from ..judgement import verdict
from ..tasks import Record, Request, Table, Task

Run = Callable[[Task], Record]

COLUMNS = (
    "method",
    "depth",
    "gradient",
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
    """Settings of a measurement that runs, and of its reference."""
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


def row(record: Record, records: Sequence[Record]) -> list[Any]:
    """A record as a row under `COLUMNS`; its gradient is judged against the other records."""
    task, seconds = record["task"], record["seconds"] or {}
    times = [seconds.get(name) for name in ("median", "low", "high")]
    return [
        task["method"],
        task["depth"],
        verdict(record, records),
        record["temp_bytes"],
        record["peak_bytes"],
        *times,
        record["compile_seconds"],
        record["gradient_error"],
    ]


def by_variant(records: Sequence[Record], extra: Mapping[str, str] = {}) -> list[Table]:
    """A table for every network and variant; `extra`: figures of `extra`, and their columns."""
    groups: dict[str, list[Record]] = {}
    for record in records:
        task = record["task"]
        groups.setdefault(", ".join(filter(None, (task["network"], task["variant"]))), []).append(record)
    columns = (*COLUMNS, *extra.values())
    shown = lambda r: [*row(r, records), *(r["extra"].get(name) for name in extra)]
    return [Table(name, columns, [shown(r) for r in group]) for name, group in groups.items()]


# --- the largest size within a limit ------------------------------------------------------------------


def run_largest(task: Task, run: Run, reference: str) -> Record | None:
    """Search, then run what was found; None if nothing fits."""
    found = run(task)
    over, size = task.settings["search"]["over"], found["extra"].get("largest")
    if not size:
        return None
    settings = {k: v for k, v in task.settings.items() if k != "search"}
    settings |= {"reference": reference, "repeats": 2}  # networks that fill a card take seconds
    return run(replace(task, **{over: size}, settings=settings))


def largest(records: Sequence[Record], over: str) -> list[Table]:
    """A table for every network: the size that each method reaches, and its figures there."""
    searches = [r for r in records if "search" in r["task"]["settings"]]
    runs = {_place(r["task"], r["task"][over]): r for r in records if r not in searches}
    columns = ("method", over, "in all, bytes", "seconds", "low", "high", "gradient error", "gradient")
    groups: dict[str, list[list[Any]]] = {}
    for record in searches:
        task, size = record["task"], record["extra"].get("largest", 0)
        ran = runs.get(_place(task, size))
        limit = task["settings"]["limit_bytes"]
        name = ", ".join(filter(None, (task["network"], task["variant"])))
        title = f"{name}: the largest {over} within {format_bytes(limit)}"
        at_most = size == record["extra"].get("most")
        row = [task["method"], f"{size} (as far as was tried)" if at_most else size]
        if ran is None:
            row += [None] * 5 + [record["status"]]
        else:
            times = ran["seconds"] or {}
            total = [ran[k] for k in ("temp_bytes", "argument_bytes", "output_bytes")]
            row += [None if None in total else sum(total)]
            row += [times.get("median"), times.get("low"), times.get("high")]
            row += [ran["gradient_error"], verdict(ran, records)]
        groups.setdefault(title, []).append(row)
    return [Table(title, columns, rows) for title, rows in groups.items()]


def _place(task: dict[str, Any], size: int) -> tuple[Any, ...]:
    limit = task["settings"].get("limit_bytes")
    return task["network"], task["variant"], task["method"], limit, size
