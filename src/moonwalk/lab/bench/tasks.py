"""Requests, tasks, records and tables: plain data that the whole bench shares.

An experiment (`experiments/<name>.py`) is a module with

- `TITLE`: one line;
- `tasks(request) -> list[Task]`: what to measure, each in a process of its own;
- `search(request, run) -> None`, if what to measure next depends on what was found: called after the
  tasks. `run(task) -> Record` measures, or finds the record that there is already;
- `summary(records) -> list[Table]`: what was found, as tables;
- `measure(task) -> dict`, if it measures something other than a gradient: runs in the task's process and
  returns fields of the record. By default that is `measuring.measure`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

STATUSES = ("ok", "oom", "refused", "timeout", "error")

Record = dict[str, Any]


@dataclass(frozen=True)
class Request:
    """What a user asked for.

    **Arguments:**

    - `platform`: "cpu" or "gpu"; a GPU gets the paper's sizes.
    - `quick`: the smallest sizes that still show something.
    - `residual`: `fig2` with skips.
    - `limit_bytes`: the limit for `depth` and `batch`; None: the experiment's default for the platform.
    - `seed`: of weights and data.
    - `data`: a folder, or a `.npz` file, with the images of `fig4`.
    - `only`: words, one of which must occur in a task's description.
    """

    platform: str = "cpu"
    quick: bool = False
    residual: bool = False
    limit_bytes: int | None = None
    seed: int = 0
    data: str | None = None
    only: tuple[str, ...] = ()

    @property
    def on_gpu(self) -> bool:
        return self.platform == "gpu"

    def wants(self, task: Task) -> bool:
        return not self.only or any(word in str(task) for word in self.only)


@dataclass(frozen=True)
class Task:
    """One measurement.

    **Arguments:**

    - `experiment`, `network`, `variant`, `method`: names; `networks.NETWORKS` has the networks with
        their variants, `methods` the methods.
    - `depth`, `width`, `length`, `batch`: layers, channels, positions along an axis, examples.
    - `precision`: of products: "default", "highest", ….
    - `settings`: all else, as JSON has it. Known to `measuring`: `seed`; `run` (False: memory alone);
        `repeats`; `reference` ("float64", "highest", "same" or None); `limit_bytes`; `plan` (True: the
        plan's rows go to the record, "summary": what it prints); `search` ({"over": "depth" or "batch",
        "step", "most"}: the largest such size within `limit_bytes`).
    """

    experiment: str
    network: str
    method: str
    variant: str = ""
    depth: int = 0
    width: int = 0
    length: int = 0
    batch: int = 0
    precision: str = "default"
    settings: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, found: dict[str, Any]) -> Task:
        return cls(**found)

    @property
    def key(self) -> str:
        """A key that is equal for equal tasks, also after a round trip through JSON."""
        return json.dumps(self.to_dict(), sort_keys=True)

    def with_settings(self, **more: Any) -> Task:
        return replace(self, settings={**self.settings, **more})

    def __str__(self) -> str:
        sizes = (("depth", self.depth), ("width", self.width), ("length", self.length))
        text = ", ".join(f"{name} {size}" for name, size in (*sizes, ("batch", self.batch)) if size)
        variant = f" ({self.variant})" if self.variant else ""
        return f"{self.experiment}: {self.network}{variant}, {self.method}, {text}".rstrip(", ")


def record(task: Task, **found: Any) -> Record:
    """The record of a task, with the given fields and None for the rest."""
    result: Record = {
        "task": task.to_dict(),
        "status": "ok",
        "message": "",
        "temp_bytes": None,
        "argument_bytes": None,
        "output_bytes": None,
        "peak_bytes": None,
        "seconds": None,
        "compile_seconds": None,
        "gradient_error": None,
        "reference": None,
        "parameters": 0,
        "extra": {},
    }
    unknown = found.keys() - result.keys()
    if unknown:
        raise ValueError(f"a record has no {', '.join(sorted(unknown))}; other figures go to extra")
    if found.get("status", "ok") not in STATUSES:
        raise ValueError(f"status is one of {', '.join(STATUSES)}, got {found['status']!r}")
    return result | found


@dataclass(frozen=True)
class Table:
    """Figures for people: cells are numbers, strings or None; `notes` are sentences below."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]
    notes: Sequence[str] = ()

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(
                    f"table {self.title!r}: a row of {len(row)}, {len(self.columns)} columns"
                )
