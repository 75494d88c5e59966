"""Isometric networks on MNIST-1D: do they train by Moonwalk as they do by backpropagation?

Both methods train 100 layers from the same seeds with the same batches. That takes several seeds,
because even two runs of one method on a GPU end a point apart. A few steps with 1,000 layers, also by
checkpointing, measure the memory of a training step. Records are those of `fig4`.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any

import jax

from .... import models
from ... import data, training
from ..tasks import Record, Request, Table, Task

TITLE = "Isometric networks on MNIST-1D, trained by Moonwalk and by backpropagation"
METHODS = ("moonwalk", "backprop")
DEEP = ("moonwalk", "backprop", "checkpoint")


def tasks(request: Request) -> list[Task]:
    if request.on_gpu and not request.quick:
        depth, width, steps, seeds, rate = 100, 32, 3000, 6, 1e-3
    elif request.quick:
        depth, width, steps, seeds, rate = 10, 4, 20, 1, 3e-3
    else:
        depth, width, steps, seeds, rate = 100, 16, 300, 2, 3e-3

    def make(method: str, depth: int, width: int, seed: int, steps: int, rate: float) -> Task:
        settings = {"steps": steps, "rate": rate, "seed": seed, "every": max(1, steps // 10)}
        return Task("isometric", "isometric_cnn", method, "", depth, width, 0, 64, settings=settings)

    runs = [(m, request.seed + i) for i in range(seeds) for m in METHODS]
    found = [make(m, depth, width, seed, steps, rate) for m, seed in runs]
    if request.quick:
        return found
    return found + [make(m, 1000, 16, request.seed, 50, 1e-3) for m in DEEP]


def measure(task: Task) -> dict[str, Any]:
    """One network, trained."""
    asked, dataset = task.settings, data.mnist1d()
    model = models.isometric_cnn(
        dataset.in_shape,
        len(dataset.classes),
        key=jax.random.key(asked["seed"]),
        channels=task.width,
        depth=task.depth,
    )
    begun = time.perf_counter()
    found = training.fit(
        model,
        dataset,
        optimizer=training.optimizer("adam", asked["rate"], "warmup-cosine", asked["steps"]),
        steps=asked["steps"],
        method=task.method,
        batch=task.batch,
        seed=asked["seed"],
        evaluate_every=asked["every"],
    )
    looked = [r for r in found.records if r.test_accuracy is not None]
    curve = [(r.step, r.test_accuracy) for r in looked]
    extra = {"data": dataset.name, "axis": "step", "curve": curve, "loss": [r.loss for r in looked]}
    extra |= {"test_accuracy": curve[-1][1], "seconds": time.perf_counter() - begun}
    return {"temp_bytes": found.temp_bytes, "extra": extra}


def summary(records: Sequence[Record]) -> list[Table]:
    groups: dict[tuple[int, int], dict[str, list[Record]]] = {}
    for record in records:
        task = record["task"]
        place = task["depth"], task["settings"]["steps"]
        groups.setdefault(place, {}).setdefault(task["method"], []).append(record)
    tables = []
    for (depth, steps), methods in groups.items():
        rows = [[method, *_figures(group)] for method, group in methods.items()]
        columns = ("method", "accuracy, %", "lowest", "highest", "seeds", "temporaries, bytes")
        tables.append(Table(f"{depth} layers, {steps} steps", columns, rows, _apart(methods)))
    return tables


def _figures(group: Sequence[Record]) -> list[Any]:
    found = [100 * r["extra"]["test_accuracy"] for r in group if r["status"] == "ok"]
    memory = next((r["temp_bytes"] for r in group if r["temp_bytes"] is not None), None)
    spread = [statistics.mean(found), min(found), max(found)] if found else [None] * 3
    return [*spread, len(found), memory]


def _apart(methods: dict[str, list[Record]]) -> list[str]:
    """How far apart the two methods end, seed by seed."""
    ends = [
        {
            r["task"]["settings"]["seed"]: 100 * r["extra"]["test_accuracy"]
            for r in group
            if r["status"] == "ok"
        }
        for group in (methods.get(m, []) for m in METHODS)
    ]
    apart = [ends[0][seed] - ends[1][seed] for seed in ends[0] if seed in ends[1]]
    if len(apart) < 2:
        return []
    error = statistics.stdev(apart) / len(apart) ** 0.5
    return [f"Moonwalk ends {statistics.mean(apart):+.2f} ± {error:.2f} points beside backpropagation."]
