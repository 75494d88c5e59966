"""The paper's Fig. 4: does the constraint that makes convolutions submersive cost accuracy?

With images (`--data`) it trains the residual CNN of ten layers; without, a small stand-in that needs no
download: the 1D network on MNIST-1D, for a few hundred steps. That does not measure the accuracy of Fig.
4, only answers the same question. A record's `extra` has the `data` set, the `curve` as pairs of (epoch
or step, test accuracy), its `axis` (which of the two), and the last `test_accuracy`.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from .... import models
from ... import data, training
from .. import accuracy
from ..tasks import Record, Request, Table, Task

TITLE = "Fig. 4: accuracy with constrained convolutions (without --data: a stand-in on MNIST-1D)"
STAND_IN = "conv1d_cnn"
EVERY = 25  # steps between evaluations on the test signals


def tasks(request: Request) -> list[Task]:
    pivots: Sequence[str] = accuracy.PIVOTS
    seeds = range(request.seed, request.seed + (1 if request.quick else 3))
    settings: dict[str, Any]
    if request.data is not None:
        network, depth, width, batch = "residual_cnn", 10, 0, 128
        settings = {"data": str(Path(request.data).resolve())}
        if request.quick:
            settings |= {"epochs": 2, "widths": [8, 16], "examples": [2000, 1000]}
    else:
        network, depth, width, batch = STAND_IN, 6, 16, 128
        settings = {"steps": 300}
        if request.quick:
            depth, width, settings, pivots = 4, 16, {"steps": 100}, ("free", "lower")
    return [
        Task(
            "fig4",
            network,
            "backprop",
            pivot,
            depth,
            width,
            0,
            batch,
            settings=settings | {"seed": seed},
        )
        for seed in seeds
        for pivot in pivots
    ]


def measure(task: Task) -> dict[str, Any]:
    """One network, trained."""
    begun = time.perf_counter()
    found = _on_signals(task) if task.network == STAND_IN else _on_images(task)
    extra = {**found.pop("extra"), "seconds": time.perf_counter() - begun}
    return {**found, "extra": {**extra, "test_accuracy": extra["curve"][-1][1]}}


def _on_signals(task: Task) -> dict[str, Any]:
    dataset, seed, steps = data.mnist1d(), task.settings["seed"], task.settings["steps"]
    model = models.conv1d_cnn(
        dataset.in_shape,
        len(dataset.classes),
        key=jax.random.key(seed),
        width=task.width,
        depth=task.depth,
        pivot=task.variant,
    )
    found = training.fit(
        model,
        dataset,
        optimizer=training.optimizer("adam", 3e-3, "warmup-cosine", steps),
        steps=steps,
        method=task.method,
        batch=task.batch,
        seed=seed,
        evaluate_every=EVERY,
    )
    looked = [r for r in found.records if r.test_accuracy is not None]
    curve = [(r.step, r.test_accuracy) for r in looked]
    losses = [r.loss for r in looked]
    return {
        "temp_bytes": found.temp_bytes,
        "extra": {"data": dataset.name, "axis": "step", "curve": curve, "loss": losses},
    }


def _on_images(task: Task) -> dict[str, Any]:
    asked, path = task.settings, Path(task.settings["data"])
    dataset = data.load(path) if path.suffix == ".npz" else data.fashion_mnist(path)
    if "examples" in asked:
        dataset = dataset.take(*asked["examples"])
    settings = {
        **accuracy.recipe(dataset),
        "widths": (),
        "batch": task.batch,
        "method": task.method,
        **{k: v for k, v in asked.items() if k in ("epochs", "widths")},
    }
    run = accuracy.Run(dataset, task.variant, asked["seed"], settings)
    curve, losses = [], []
    for number in range(settings["epochs"]):
        loss, found = run.epoch(number)
        curve.append((number + 1, found))
        losses.append(loss)
    return {
        "parameters": run.parameters,
        "extra": {"data": dataset.name, "axis": "epoch", "curve": curve, "loss": losses},
    }


def summary(records: Sequence[Record]) -> list[Table]:
    groups: dict[str, dict[str, list[Record]]] = {}
    for record in records:
        task = record["task"]
        name = f"{task['network']} on {record['extra'].get('data', 'its data')}"
        groups.setdefault(name, {}).setdefault(task["variant"], []).append(record)
    return [
        Table(
            f"{name}: test accuracy, %",
            ("pivot", "mean", "lowest", "highest", "seeds"),
            [[pivot, *_spread(group)] for pivot, group in pivots.items()],
        )
        for name, pivots in groups.items()
    ]


def _spread(records: Sequence[Record]) -> list[Any]:
    found = [100 * r["extra"]["test_accuracy"] for r in records if r["status"] == "ok"]
    return [statistics.mean(found), min(found), max(found), len(found)] if found else [None] * 3 + [0]
