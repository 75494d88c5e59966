"""Records of a run as a table (CSV) and as a picture (PNG)."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from ...errors import DataError
from .. import files
from .records import Record

COLUMNS = tuple(f.name for f in fields(Record))


def write_csv(path: str | Path, records: Sequence[Record]) -> None:
    """One line per step; the file is replaced as a whole."""
    with files.whole(path, newline="") as file:
        csv.writer(file).writerow(COLUMNS)
        csv.writer(file).writerows(map(_cells, records))


def read_csv(path: str | Path) -> list[Record]:
    """Read what `write_csv` or a `Log` wrote, except an incomplete last line; nothing without a file.

    Any other content is an error, because the file may belong to something else and must not be
    replaced.
    """
    path = Path(path)
    if not path.exists():
        return []
    try:
        lines = path.read_bytes().decode().splitlines(keepends=True)
    except (OSError, UnicodeDecodeError) as error:
        raise _not_ours(path, str(error)) from error
    head = ",".join(COLUMNS)
    if lines and lines[0].rstrip("\r\n") != head and (len(lines) > 1 or not head.startswith(lines[0])):
        raise _not_ours(path, f"line 1 is not {head}")
    records = []
    for number, cells in enumerate(csv.reader(li for li in lines[1:] if li.endswith("\n")), 2):
        try:
            step, loss, accuracy, certificate, seconds, *tested = cells
            test_loss, test_accuracy = (float(cell) if cell else None for cell in tested)
            records.append(
                Record(
                    int(step),
                    float(loss),
                    float(accuracy),
                    float(certificate),
                    float(seconds),
                    test_loss,
                    test_accuracy,
                )
            )
        except ValueError as error:
            raise _not_ours(path, f"line {number} is {','.join(cells)[:80]!r}") from error
    return records


def _not_ours(path: Path, why: str) -> DataError:
    return DataError(
        f"{path} is not a table of steps that training wrote ({why}); move it away, or name another "
        "folder"
    )


class Log:
    """A CSV file that grows by a line per step, and continues with a resumed run.

    **Arguments:**

    - `path`: of the file.
    - `until`: the step after which a run resumes; later lines are dropped, as their steps are taken
        again.
    """

    def __init__(self, path: str | Path, until: int = 0):
        self.records = [r for r in read_csv(path) if r.step <= until]
        self.path = Path(path)
        write_csv(path, self.records)

    def add(self, record: Record) -> None:
        self.records.append(record)
        with files.writing(self.path), self.path.open("a", newline="") as file:
            csv.writer(file).writerow(_cells(record))


def _cells(record: Record) -> list[str]:
    return ["" if v is None else repr(v) for v in asdict(record).values()]


def plot(path: str | Path, runs: Mapping[str, Sequence[Record]], memory: Mapping[str, int]) -> None:
    """Draw loss and accuracy of some runs over their steps, and the memory that each took."""
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError("curves are drawn by Matplotlib: pip install 'moonwalk-jax[plots]'") from error
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 3, figsize=(12, 3.6), layout="constrained")
    colours = dict(zip(runs, plt.rcParams["axes.prop_cycle"].by_key()["color"], strict=False))
    styles = dict(zip(runs, ("-", "--", "-.", ":"), strict=False))  # curves may coincide
    for name, records in runs.items():
        look: dict[str, Any] = {"color": colours[name], "ls": styles[name]}
        loss = _smooth([r.loss for r in records])
        axes[0].plot([r.step for r in records], loss, label=name, **look)
        tested = [r for r in records if r.test_accuracy is not None]
        axes[1].plot(
            [r.step for r in records], _smooth([r.accuracy for r in records]), alpha=0.35, **look
        )
        axes[1].plot(
            [r.step for r in tested], [r.test_accuracy for r in tested], marker="o", ms=3, **look
        )
    axes[0].set(title="loss of the batch", xlabel="step")
    axes[0].set_ylim(bottom=0)
    axes[0].legend(frameon=False)
    axes[1].set(title="accuracy (dots: test examples)", xlabel="step", ylim=(0, 1))
    mib = [size / 2**20 for size in memory.values()]
    bars = axes[2].bar(list(memory), mib, color=[colours.get(name, "0.7") for name in memory], width=0.6)
    axes[2].bar_label(bars, [f"{m:.1f}" for m in mib])
    axes[2].set(title="temporaries of a step, MiB")
    axes[2].margins(y=0.15)
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
    with files.writing(path):
        figure.savefig(path, dpi=130)
    plt.close(figure)


def _smooth(values: Sequence[float]) -> list[float]:
    """A running mean over a fiftieth of the run: single batches are noisy."""
    width = max(1, len(values) // 50)
    found, total = [], 0.0
    for i, value in enumerate(values):
        total += value - (values[i - width] if i >= width else 0.0)
        found.append(total / min(i + 1, width))
    return found
