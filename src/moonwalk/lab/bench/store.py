"""Records on disk: one JSON file per experiment, written as a whole after every record, and a CSV."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

from .. import files
from .tasks import Record, Task

# All records of a file must come from one device, one compiler and one set of sizes.
SAME = ("platform", "device", "jax", "jaxlib", "quick")
_SIZES = ("network", "variant", "method", "depth", "width", "length", "batch", "precision")
_FIGURES = (
    "status",
    "temp_bytes",
    "argument_bytes",
    "output_bytes",
    "peak_bytes",
    "compile_seconds",
    "gradient_error",
    "reference",
    "parameters",
    "message",
)


class Store:
    """The records of one experiment, in `folder/<experiment>.json`.

    **Arguments:**

    - `folder`: made if it is not there.
    - `experiment`
    - `header`: device, versions, commit, …; `SAME` must agree with the file's, if there is one.
    - `fresh`: discard what the file has.
    """

    def __init__(self, folder: Path, experiment: str, header: dict[str, Any], *, fresh: bool = False):
        self.path = folder / f"{experiment}.json"
        self.experiment, self.header = experiment, dict(header)
        self.records: list[Record] = []
        files.folder(folder)
        if self.path.is_file() and not fresh:
            old = load(self.path)
            for name in SAME:
                if old["header"].get(name) != header.get(name):
                    raise ValueError(
                        f"{self.path} was measured with {name} = {old['header'].get(name)!r}, not "
                        f"{header.get(name)!r}; name another --out, or begin anew with --fresh"
                    )
            self.header, self.records = old["header"], old["records"]
        self.commit = header.get("commit")
        self._numbers = {Task.from_dict(r["task"]).key: i for i, r in enumerate(self.records)}

    def find(self, task: Task) -> Record | None:
        number = self._numbers.get(task.key)
        return None if number is None else self.records[number]

    def add(self, record: Record) -> None:
        """Add a record, or replace the one of the same task, and write the files."""
        if self.commit != self.header.get("commit"):  # another commit began the file
            record = {**record, "extra": {**record["extra"], "commit": self.commit}}
        key = Task.from_dict(record["task"]).key
        if key in self._numbers:
            self.records[self._numbers[key]] = record
        else:
            self._numbers[key] = len(self.records)
            self.records.append(record)
        self.write()

    def write(self) -> None:
        data = {"experiment": self.experiment, "header": self.header, "records": self.records}
        replace(self.path, json.dumps(data, indent=1) + "\n")
        replace(self.path.with_suffix(".csv"), as_csv(self.records))


def load(path: Path) -> dict[str, Any]:
    """A file of records: {"experiment", "header", "records"}."""
    try:
        data = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not JSON ({error}); remove it, or name another folder") from error
    missing = {"experiment", "header", "records"} - (data.keys() if isinstance(data, dict) else set())
    if missing:
        raise ValueError(
            f"{path} has no {', '.join(sorted(missing))}: it is no file of `moonwalk bench`"
        )
    return data


def as_csv(records: list[Record]) -> str:
    """The records as CSV, with the columns that all experiments share."""
    sink = io.StringIO()
    writer = csv.writer(sink, lineterminator="\n")
    writer.writerow([*_SIZES, *_FIGURES, "seconds", "seconds_low", "seconds_high", "runs"])
    for record in records:
        seconds = record["seconds"] or {}
        times = [seconds.get(name) for name in ("median", "low", "high", "runs")]
        writer.writerow([record["task"][n] for n in _SIZES] + [record[n] for n in _FIGURES] + times)
    return sink.getvalue()


def replace(path: Path, text: str) -> None:
    """Replace a file as a whole: readers and crashes find the old one or the new one."""
    with files.whole(path) as file:
        file.write(text)
