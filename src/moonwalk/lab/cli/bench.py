"""`moonwalk bench`: its screen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table as RichTable

from ..bench import command, text
from ..bench.tasks import Record, Table, Task

STYLES = {"ok": "", "oom": "yellow", "refused": "yellow", "timeout": "red", "error": "red"}


def run(options: command.Options, console: Console | None = None) -> None:
    """Measure with a bar for each experiment, and a line for each record."""
    with Screen(console or Console()) as screen:
        command.run(options, screen)


class Screen:
    """A bar with the task that runs; records as they come; tables at an experiment's end."""

    def __init__(self, console: Console):
        self.console = console
        self.progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[now]}"),
            console=console,
            transient=True,
        )
        self.bar: Any = None
        self.total = 0

    def __enter__(self) -> Screen:
        self.progress.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self.progress.stop()

    def say(self, line: str) -> None:
        self.console.print(line, highlight=False, soft_wrap=True, markup=False)

    def begin(self, name: str, title: str, total: int) -> None:
        self.console.print(title, style="bold", highlight=False)
        self.total = total
        self.bar = self.progress.add_task(name, total=total, now="")

    def start(self, task: Task) -> None:
        self.progress.update(self.bar, now=str(task).partition(": ")[2])

    def done(self, record: Record, is_new: bool) -> None:
        self.progress.advance(self.bar)
        count = self.progress.tasks[self.progress.task_ids.index(self.bar)].completed
        self.total = max(self.total, int(count))  # a search may add tasks
        self.progress.update(self.bar, total=self.total, now="")
        style = STYLES[record["status"]] if is_new else "dim"
        line = text.line(record).partition(": ")[2]
        self.console.print(line, style=style, highlight=False, soft_wrap=True, markup=False)

    def end(self, tables: Sequence[Table]) -> None:
        self.progress.remove_task(self.bar)
        for table in map(text.compact, tables):
            plain = text.lines(table)
            if max(map(len, plain)) + 2 * len(table.columns) <= self.console.width:
                self.console.print(as_rich(table))
            else:  # a narrow terminal wraps lines, since truncated figures would be useless
                self.say("\n".join(["", *plain]))


def as_rich(table: Table) -> RichTable:
    notes = "\n".join(table.notes) or None
    found = RichTable(
        title=table.title,
        title_justify="left",
        box=box.SIMPLE_HEAD,
        caption=notes,
        caption_justify="left",
    )
    for i, column in enumerate(table.columns):
        worded = i > 0 and any(isinstance(row[i], str) for row in table.rows)
        found.add_column(column, justify="left" if i == 0 or worded else "right", no_wrap=not worded)
    for row in table.rows:
        found.add_row(*(text.cell(c, v) for c, v in zip(table.columns, row, strict=True)))
    return found
