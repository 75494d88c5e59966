"""Isometric networks on MNIST-1D: 100 layers trained by Moonwalk and by backpropagation; 1,000 layers.

The first part trains the same networks from the same seeds with the same batches, differentiated by
either method, and compares their accuracies on the 1,000 test signals: over several seeds, side by side
(`vmap`), since two runs of one method on a GPU already end a point apart. The second takes 50 steps
through 1,000 layers and compares the temporaries of the compiled gradient (`memory_analysis()`):
Moonwalk, `jax.grad`, and `jax.checkpoint` every so many layers.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import engine as base
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

import moonwalk as mw

BATCH = 64
DIFFERENTIATE: dict[str, Callable[..., Any]] = {
    "moonwalk": mw.value_and_grad,
    "backprop": jax.value_and_grad,
}


def cross_entropy(logits: Any, labels: Any) -> Any:
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, labels))


def split(model: Any) -> tuple[Any, Callable[..., Any]]:
    """(parameters, loss(parameters, x, labels))."""
    params, static = eqx.partition(model, eqx.is_inexact_array)
    return params, lambda p, x, labels: cross_entropy(eqx.combine(p, static)(x), labels)


def batches(data: Any, steps: int, seed: int) -> Iterator[tuple[Any, Any]]:
    rng = np.random.default_rng(seed)
    for _ in range(steps):
        chosen = rng.integers(0, len(data.train_x), BATCH)
        yield jnp.asarray(data.train_x[chosen]), jnp.asarray(data.train_y[chosen])


def optimiser(rate: float, steps: int) -> Any:
    """Adam, warmed up for 50 steps, down to zero by a cosine."""
    schedule = optax.warmup_cosine_decay_schedule(0.0, rate, min(50, steps // 2), steps)
    return optax.adam(schedule)


def train(model: Any, data: Any, method: str, rate: float, steps: int, seed: int = 0) -> dict[str, Any]:
    """One run: losses, accuracy on the test signals, seconds a step."""
    params, loss = split(model)
    optimizer = optimiser(rate, steps)
    differentiate = DIFFERENTIATE[method](loss)

    def step(params: Any, state: Any, x: Any, labels: Any) -> Any:
        value, gradients = differentiate(params, x, labels)
        updates, state = optimizer.update(gradients, state, params)
        return value, optax.apply_updates(params, updates), state

    state = optimizer.init(params)
    x, labels = next(batches(data, 1, seed))
    program = base.compiled(step, params, state, x, labels)
    losses: list[float] = []
    start = time.perf_counter()
    for x, labels in batches(data, steps, seed):
        value, params, state = program(params, state, x, labels)
        losses.append(float(value))
    took = time.perf_counter() - start
    model = eqx.combine(params, model)
    logits = eqx.filter_jit(model)(jnp.asarray(data.test_x))
    return {
        "accuracy": float(jnp.mean(jnp.argmax(logits, -1) == jnp.asarray(data.test_y))),
        "first_loss": losses[0],
        "last_loss": float(np.mean(losses[-20:])),
        "seconds_per_step": took / steps,
        "temporaries_mib": program.memory_analysis().temp_size_in_bytes / base.MIB,
    }


def train_many(
    models: Any, data: Any, method: str, rate: float, steps: int, seeds: int
) -> dict[str, Any]:
    """One run of every seed's network, all in one program: accuracies and last losses."""
    params, loss = split(models)
    optimizer = optimiser(rate, steps)
    differentiate = DIFFERENTIATE[method](loss)
    train_x, train_y = jnp.asarray(data.train_x), jnp.asarray(data.train_y)

    def step(params: Any, state: Any, chosen: Any) -> Any:
        value, gradients = differentiate(params, train_x[chosen], train_y[chosen])
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, value

    def several(params: Any, state: Any, chosen: Any) -> Any:
        """Steps of all seeds: chosen[step, seed, example]."""

        def one(carry: Any, chosen: Any) -> Any:
            params, state, values = jax.vmap(step)(*carry, chosen)
            return (params, state), values

        return lax.scan(one, (params, state), chosen)

    drawn = [np.random.default_rng(s).integers(0, len(train_x), (steps, BATCH)) for s in range(seeds)]
    chunks = jnp.asarray(np.stack(drawn, 1)).reshape((-1, min(100, steps), seeds, BATCH))
    state = jax.vmap(optimizer.init)(params)
    program = base.compiled(several, params, state, chunks[0])
    start = time.perf_counter()
    values = jnp.zeros(())
    for number, chunk in enumerate(chunks):
        (params, state), values = program(params, state, chunk)
        if number % 5 == 4:
            mean = float(jnp.mean(values[-20:]))
            took = time.perf_counter() - start
            print(
                f"{method} {(number + 1) * len(chunk)} steps, {took:.0f} s, loss {mean:.3f}", flush=True
            )
    jax.block_until_ready(params)
    took = time.perf_counter() - start
    _, static = eqx.partition(models, eqx.is_inexact_array)
    test = jax.jit(jax.vmap(lambda p: eqx.combine(p, static)(jnp.asarray(data.test_x))))(params)
    right = jnp.argmax(test, -1) == jnp.asarray(data.test_y)
    return {
        "accuracies": [float(a) for a in jnp.mean(right, 1)],
        "last_losses": [float(v) for v in jnp.mean(values[-20:], 0)],
        "seconds_per_step": took / steps,
    }


def accuracy(
    data: Any, channels: int, depth: int, steps: int, rate: float, seeds: int
) -> dict[str, Any]:
    """The same networks, differentiated in both ways."""

    def network(key: Any) -> Any:
        return mw.models.isometric_cnn((40, 1), 10, key=key, channels=channels, depth=depth)

    models = eqx.filter_vmap(network)(jax.vmap(jax.random.key)(jnp.arange(seeds)))
    result: dict[str, Any] = dict(channels=channels, depth=depth, steps=steps, rate=rate, seeds=seeds)
    for method in DIFFERENTIATE:
        result[method] = train_many(models, data, method, rate, steps, seeds)
        print(method, json.dumps(result[method]), flush=True)
    apart = 100 * (
        np.array(result["moonwalk"]["accuracies"]) - np.array(result["backprop"]["accuracies"])
    )
    result["points_apart"] = {
        "mean": float(apart.mean()),
        "standard_error": float(apart.std(ddof=1) / np.sqrt(seeds)) if seeds > 1 else None,
    }
    print("points apart", json.dumps(result["points_apart"]), flush=True)
    return result


def checkpointed(model: Any, every: int) -> Callable[..., Any]:
    """The loss of an `isometric_cnn` whose layers are recomputed, so many at a time."""
    _, static = eqx.partition(model, eqx.is_inexact_array)

    def loss(params: Any, x: Any, labels: Any) -> Any:
        stem, stack, last, dense = eqx.combine(params, static).layers
        arrays, rest = eqx.partition(stack.layer, eqx.is_array)
        arrays = jax.tree.map(lambda a: a.reshape((-1, every, *a.shape[1:])), arrays)

        @jax.checkpoint
        def segment(x: Any, several: Any) -> Any:
            return lax.scan(lambda x, one: (eqx.combine(one, rest)(x), None), x, several)

        return cross_entropy(dense(last(lax.scan(segment, stem(x), arrays)[0])), labels)

    return loss


def deep(data: Any, channels: int, depth: int, steps: int, rate: float) -> dict[str, Any]:
    """So many layers: the loss over some steps, and what each method takes."""
    key = jax.random.key(0)
    model = mw.models.isometric_cnn((40, 1), 10, key=key, channels=channels, depth=depth)
    result: dict[str, Any] = dict(channels=channels, depth=depth, steps=steps, rate=rate, batch=BATCH)
    params, loss = split(model)
    args = (params, *next(batches(data, 1, 0)))
    memory = {
        "moonwalk": base.temp(mw.value_and_grad(loss), *args),
        "backprop": base.temp(jax.value_and_grad(loss), *args),
        "checkpoint": {
            every: base.temp(jax.value_and_grad(checkpointed(model, every)), *args)
            for every in (10, 20, 50)
            if depth % every == 0
        },
    }
    result["temporaries_mib"] = memory
    print("memory", json.dumps(memory), flush=True)
    result["training"] = train(model, data, "moonwalk", rate, steps)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    parser.add_argument("--commit", default="", help="the commit, where git is not at hand")
    parser.add_argument("--steps", type=int, default=1500, help="a multiple of 100")
    parser.add_argument("--channels", type=int, default=16)
    parser.add_argument("--rate", type=float, default=3e-3)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--only", choices=("accuracy", "deep"))
    arguments = parser.parse_args()
    if arguments.steps % 100:
        parser.error(f"--steps is a multiple of 100, got {arguments.steps}")
    warnings.simplefilter("ignore", mw.PlanWarning)
    data = mw.data.mnist1d()
    record = base.recorder(arguments)
    if arguments.only != "accuracy":
        record("deep", deep(data, arguments.channels, 1000, 50, 1e-3))
    if arguments.only != "deep":
        settings = (arguments.channels, 100, arguments.steps, arguments.rate, arguments.seeds)
        record("accuracy", accuracy(data, *settings))


if __name__ == "__main__":
    main()
