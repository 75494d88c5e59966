"""Records and tables as plain lines."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

from ...planning.report import format_bytes
from .tasks import Record, Table, Task


def cell(column: str, value: Any) -> str:
    """A number as people read it: bytes with a unit, times in s or ms, else three digits."""
    if value is None:
        return "–"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if "bytes" in column:
        return format_bytes(value)
    if "error" in column:
        return f"{value:.1e}"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.3g}"


def line(record: Record) -> str:
    """A record in a line."""
    task = Task.from_dict(record["task"])
    found = [] if record["status"] == "ok" else [record["status"]]
    if "largest" in record["extra"]:
        found.append(f"{record['task']['settings']['search']['over']} {record['extra']['largest']}")
    if "test_accuracy" in record["extra"]:
        found.append(f"accuracy {100 * record['extra']['test_accuracy']:.1f} %")
    if record["temp_bytes"] is not None:
        found.append(format_bytes(record["temp_bytes"]))
    if record["seconds"]:
        found.append(f"{1e3 * record['seconds']['median']:.3g} ms")
    if record["gradient_error"] is not None:
        found.append(f"error {record['gradient_error']:.0e}")
    for way, timed in record["extra"].get("ways", {}).items():
        found.append(f"{way} {timed['seconds']['median']:.3g} s")
    if record["status"] != "ok" and record["message"]:
        found.append(textwrap.shorten(record["message"].splitlines()[0], 120, placeholder=" …"))
    return f"{task}: {', '.join(found)}"


def compact(table: Table) -> Table:
    """The table without empty columns."""
    kept = [i for i in range(len(table.columns)) if any(row[i] is not None for row in table.rows)]
    return Table(
        table.title, [table.columns[i] for i in kept], [[r[i] for i in kept] for r in table.rows]
    )


def lines(table: Table) -> list[str]:
    """A table with aligned columns, and its notes."""
    rows = [[cell(c, v) for c, v in zip(table.columns, row, strict=True)] for row in table.rows]
    widths = [max(map(len, column)) for column in zip(table.columns, *rows, strict=True)]

    def aligned(cells: Sequence[str]) -> str:
        return "  ".join(c.ljust(w) for c, w in zip(cells, widths, strict=True)).rstrip()

    return [table.title, aligned(table.columns), *map(aligned, rows), *table.notes]


class Lines:
    """A screen that prints a line for everything."""

    def say(self, line: str) -> None:
        print(line, flush=True)

    def begin(self, name: str, title: str, total: int) -> None:
        self.number, self.total = 0, total
        self.say(f"{name}: {title}")

    def start(self, task: Task) -> None:
        pass

    def done(self, record: Record, is_new: bool) -> None:
        self.number += 1
        of = max(self.number, self.total)
        self.say(f"[{self.number}/{of}] {line(record)}" + ("" if is_new else " (had)"))

    def end(self, tables: Sequence[Table]) -> None:
        for table in map(compact, tables):
            self.say("\n".join(["", *lines(table), ""]))
