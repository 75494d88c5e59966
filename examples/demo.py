"""One network, trained twice on MNIST-1D: by backpropagation and by Moonwalk.

A convolutional network of 24 isometric layers: in each, an orthogonal matrix mixes the channels, MaxMin
sorts them in pairs, and some of them move one place to the left or to the right. Of such a layer
Moonwalk keeps one bit per pair, where backpropagation keeps its input and more. Both runs start from the
same weights and see the same batches; what differs is how the gradient is had, and what that takes.

The gradients differ by rounding, and training amplifies that: after some dozens of steps the two curves
part as two runs of backpropagation do whose first weights differ by 1e-7.

Run it with `make demo`. It leaves a picture in build/demo.png.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import Array
from rich.console import Console
from rich.progress import track
from rich.table import Table

import moonwalk as mw
from moonwalk import data, nn, training
from moonwalk.lab.training import Record, stepping

METHODS = ("backprop", "moonwalk")


class Shift(eqx.Module):
    """A quarter of the channels one place to the right, a quarter to the left: a permutation."""

    def __call__(self, x: Array, *, key: Array | None = None) -> Array:
        right, left, rest = jnp.split(x, [x.shape[-1] // 4, x.shape[-1] // 2], axis=-1)
        return jnp.concatenate([jnp.roll(right, 1, -2), jnp.roll(left, -1, -2), rest], axis=-1)


def network(key: Array, depth: int, width: int) -> nn.Sequential:
    """A stem, `depth` isometric layers under one scan, the largest value of each channel, a head."""
    stem, body, head = jax.random.split(key, 3)

    def layer(key: Array) -> nn.Sequential:
        mix = nn.Linear(width, width, kind="orthogonal", key=key)
        return nn.Sequential([mix, nn.MaxMin(), Shift()])

    return nn.Sequential(
        [
            nn.Conv1d(1, width, 5, padding=2, pivot="free", key=stem),
            nn.Stack(layer, depth, key=body),
            nn.GlobalMax(1),
            nn.Linear(width, 10, kind="free", slope=1.0, key=head),
        ]
    )


def difference(model: Any, dataset: data.Dataset, batch: int) -> float:
    """The largest ‖a − b‖ / ‖b‖ over all parameters, a by Moonwalk, b by backpropagation."""
    params, static = eqx.partition(model, eqx.is_inexact_array)
    loss = stepping.loss_of(static)
    x, y = next(data.batches(dataset, batch, seed=1))
    found, truth = (
        jax.jit(grad)(params, x, y)[0]
        for grad in (mw.grad(loss, has_aux=True), jax.grad(loss, has_aux=True))
    )
    off = jax.tree.map(lambda a, b: jnp.linalg.norm(a - b) / jnp.linalg.norm(b), found, truth)
    return max(map(float, jax.tree.leaves(off)))


def train(method: str, model: Any, dataset: data.Dataset, steps: int, batch: int) -> training.Result:
    bar = iter(track(range(steps), description=f"{method:<9}", transient=True))

    def advance(record: Record) -> None:
        next(bar, None)

    found = training.fit(
        model,
        dataset,
        method=method,
        optimizer=training.optimizer("adam", 3e-3, "warmup-cosine", steps),
        steps=steps,
        batch=batch,
        evaluate_every=max(1, steps // 10),
        callbacks=[advance],
    )
    next(bar, None)  # beyond the last: the bar goes
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--depth", type=int, default=24)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--out", type=Path, default=Path("build/demo.png"))
    given = parser.parse_args()

    console, begun = Console(), time.perf_counter()
    dataset = data.mnist1d()
    model = network(jax.random.key(0), given.depth, given.width)
    console.print(
        f"{given.depth} isometric layers of {given.width} channels on {dataset.name}, "
        f"{given.steps} steps of {given.batch} examples, by backpropagation and by Moonwalk"
    )
    runs = {m: train(m, model, dataset, given.steps, given.batch) for m in METHODS}
    off = [difference(m, dataset, given.batch) for m in (model, runs["moonwalk"].model)]

    table = Table(title=f"after {given.steps} steps")
    for name in ("method", "loss", "test accuracy", "temporaries", "seconds", "gradient off by"):
        table.add_column(name, justify="left" if name == "method" else "right")
    for method, run in runs.items():
        last = run.records[-1]
        table.add_row(
            method,
            f"{last.test_loss:.3f}",
            f"{last.test_accuracy:.1%}",
            f"{run.temp_bytes / 2**20:.1f} MiB",
            f"{last.seconds:.1f}",
            "" if method == "backprop" else f"{max(off):.0e}",
        )
    console.print(table)
    given.out.parent.mkdir(parents=True, exist_ok=True)
    training.plot(
        given.out,
        {m: run.records for m, run in runs.items()},
        {m: run.temp_bytes for m, run in runs.items()},
    )
    worst = max(r.certificate for r in runs["moonwalk"].records)
    console.print(
        f"The gradient is off by {off[0]:.0e} at the first weights and by {off[1]:.0e} at the last, the "
        f"worst certificate on the way was {worst:.0e}.\n"
        f"{given.out} shows both runs. {time.perf_counter() - begun:.0f} s in all.",
        highlight=False,
    )


if __name__ == "__main__":
    main()
