"""Memory and time of the engine beside backpropagation and checkpointing: `make bench-engine`.

Memory is `memory_analysis().temp_size_in_bytes` of the compiled program, time the median of several runs
in one process, given as a ratio. Baselines are as a user would write them: `jax.value_and_grad`, and
`jax.checkpoint` around segments of K layers, the best K of 1 … 32. On a GPU the sizes are those of the
design notes (a million rows); on a CPU memory is measured at 16,384 rows (nothing needs to run for it)
and time at 4,096.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import subprocess
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import moonwalk as mw
from moonwalk.bench.measuring import compiled as compiled

MIB = 2**20
WIDTH = 256


def struct(*shape: int) -> Any:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def temp(fun: Any, *args: Any) -> float:
    """MiB of temporaries."""
    return compiled(fun, *args).memory_analysis().temp_size_in_bytes / MIB


def seconds(program: Any, args: Any, repeats: int) -> float:
    jax.block_until_ready(program(*args))
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(program(*args))
        times.append(time.perf_counter() - start)
    return statistics.median(times)


# --- 64 orthogonal dense layers ----------------------------------------------------------------------


def layer(x: Any, w: Any, activation: Any = jnp.abs) -> Any:
    return activation(x @ mw.declare(w, "orthogonal"))


def head(x: Any, t: Any) -> Any:
    return jnp.sum(x * t)


def scanned(ws: Any, x: Any, t: Any, activation: Any = jnp.abs) -> Any:
    return head(lax.scan(lambda x, w: (layer(x, w, activation), None), x, ws)[0], t)


def looped(ws: Any, x: Any, t: Any) -> Any:
    for w in ws:
        x = layer(x, w)
    return head(x, t)


def segmented(ws: Any, x: Any, t: Any, every: int) -> Any:
    """One level of checkpoints, a scan of `every` layers in each."""

    def segment(x: Any, ws: Any) -> Any:
        return lax.scan(lambda x, w: (layer(x, w), None), x, ws)

    ws = ws.reshape((-1, every, *ws.shape[1:]))
    return head(lax.scan(jax.checkpoint(segment, prevent_cse=False), x, ws)[0], t)


def maxmin(x: Any) -> Any:
    a, b = x[..., 0::2], x[..., 1::2]
    in_order = a >= b
    return jnp.concatenate([jnp.where(in_order, a, b), jnp.where(in_order, b, a)], -1)


def dense_types(layers: int, rows: int, loop: bool = False) -> tuple[Any, ...]:
    w = [struct(WIDTH, WIDTH)] * layers if loop else struct(layers, WIDTH, WIDTH)
    return w, struct(rows, WIDTH), struct(rows, WIDTH)


def dense_memory(rows: int, layers: int = 64) -> dict[str, Any]:
    activation = rows * WIDTH * 4 / MIB
    args = dense_types(layers, rows)
    ours = temp(mw.value_and_grad(scanned), *args)
    more = temp(mw.value_and_grad(scanned), *dense_types(2 * layers, rows))
    segments = {
        k: temp(jax.value_and_grad(functools.partial(segmented, every=k)), *args)
        for k in (1, 2, 4, 8, 16, 32)
    }
    few = dense_types(32, rows)  # loops of tiles in either
    many = dense_types(64, rows)
    with_maxmin = functools.partial(scanned, activation=maxmin)
    slope = [temp(mw.value_and_grad(with_maxmin), *a) for a in (few, many)]
    plans = [mw.plan(scanned, *dense_types(n, rows)) for n in (layers, 2 * layers)]
    return {
        "layers": layers,
        "rows": rows,
        "activation_mib": activation,
        "moonwalk_mib": ours,
        "moonwalk_certified_mib": temp(mw.value_and_grad(scanned, certify=True), *args),
        "backprop_mib": temp(jax.value_and_grad(scanned), *args),
        "checkpoint_mib": segments,
        "activations_per_added_layer": (more - ours) / layers / activation,
        "predicted_activations_per_added_layer": (plans[1].peak_bytes - plans[0].peak_bytes)
        / MIB
        / layers
        / activation,
        "predicted_mib": plans[0].peak_bytes / MIB,
        "maxmin_activations_per_added_layer": (slope[1] - slope[0]) / 32 / activation,
    }


def loop_memory(rows: int, layers: int = 64) -> dict[str, Any]:
    args = dense_types(layers, rows, loop=True)
    return {
        "moonwalk_mib": temp(mw.value_and_grad(looped), *args),
        "backprop_mib": temp(jax.value_and_grad(looped), *args),
    }


# --- the U-Net ---------------------------------------------------------------------------------------


def unet(ws: Any, x: Any, t: Any, checkpoint: bool = False, levels: int = 3, deep: int = 6) -> Any:
    """Isometric layers; rows halve by taking every other, and double by repetition."""
    step = jax.checkpoint(layer) if checkpoint else layer
    weights, skips = iter(ws), []
    for _ in range(levels):
        for _ in range(deep):
            x = step(x, next(weights))
        skips.append(x)
        x = x.reshape(x.shape[0] // 2, 2, -1)[:, 0]
    for _ in range(deep):
        x = step(x, next(weights))
    for _ in range(levels):
        x = jnp.repeat(x, 2, axis=0) + skips.pop()
        for _ in range(deep):
            x = step(x, next(weights))
    return head(x, t)


def unet_memory(rows: int) -> dict[str, Any]:
    args = dense_types(6 * 7, rows, loop=True)
    return {
        "moonwalk_mib": temp(mw.value_and_grad(unet), *args),
        "backprop_mib": temp(jax.value_and_grad(unet), *args),
        "checkpoint_mib": temp(jax.value_and_grad(functools.partial(unet, checkpoint=True)), *args),
        "predicted_mib": mw.plan(unet, *args).peak_bytes / MIB,
    }


# --- networks that cannot be walked ------------------------------------------------------------------


def layer_norm(x: Any) -> Any:
    centred = x - x.mean(-1, keepdims=True)
    return centred / jnp.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5)


def transformer(x: Any, p: Any) -> Any:
    wq, wk, wv, wo, w1, w2 = p
    z = layer_norm(x)
    scores = jnp.einsum("bqd,bkd->bqk", z @ wq, z @ wk) / WIDTH**0.5
    x = x + jnp.einsum("bqk,bkd->bqd", jax.nn.softmax(scores), z @ wv) @ wo
    return x + jax.nn.gelu(layer_norm(x) @ w1) @ w2


_PLAIN = {
    "relu": (lambda x, p: jax.nn.relu(x @ p[0]), 24, [(WIDTH, WIDTH)], (4096, WIDTH)),
    "residual": (
        lambda x, p: x + jax.nn.relu(x @ p[0]) @ p[1],
        12,
        [(WIDTH, WIDTH)] * 2,
        (4096, WIDTH),
    ),
    "tanh": (lambda x, p: jnp.tanh(x @ p[0]), 24, [(WIDTH, WIDTH)], (4096, WIDTH)),
    "transformer": (
        transformer,
        6,
        [(WIDTH, WIDTH)] * 4 + [(WIDTH, 4 * WIDTH), (4 * WIDTH, WIDTH)],
        (16, 128, WIDTH),
    ),
}


def plain(name: str, timed: bool = True) -> dict[str, Any]:
    """Memory, and time, where no block can be walked."""
    block, layers, shapes, shape = _PLAIN[name]

    def loss(ps: Any, x: Any, t: Any, checkpoint: bool = False) -> Any:
        step = jax.checkpoint(block) if checkpoint else block
        for p in ps:
            x = step(x, p)
        return jnp.mean((x - t) ** 2)

    types = [tuple(struct(*s) for s in shapes)] * layers, struct(*shape), struct(*shape)
    programs = {
        "moonwalk": compiled(mw.value_and_grad(loss), *types),
        "checkpoint": compiled(jax.value_and_grad(functools.partial(loss, checkpoint=True)), *types),
        "backprop": compiled(jax.value_and_grad(loss), *types),
    }
    memory = {k: p.memory_analysis().temp_size_in_bytes / MIB for k, p in programs.items()}
    result = {
        "mib": memory,
        "largest_activation_mib": _largest(loss, types),
        "predicted_mib": mw.plan(loss, *types).peak_bytes / MIB,
    }
    if timed:
        keys = iter(jax.random.split(jax.random.key(0), layers * len(shapes) + 2))
        ps = [
            tuple(jax.random.normal(next(keys), s, jnp.float32) / s[0] ** 0.5 for s in shapes)
            for _ in range(layers)
        ]
        args = ps, *(jax.random.normal(next(keys), shape, jnp.float32) for _ in range(2))
        times = {k: seconds(p, args, 7) for k, p in programs.items()}
        result["time_over_checkpoint"] = times["moonwalk"] / times["checkpoint"]
    return result


def _largest(loss: Any, args: Any) -> float:
    jaxpr = jax.make_jaxpr(loss)(*args)
    return max(v.aval.size * 4 for e in jaxpr.eqns for v in e.outvars) / MIB


# --- time --------------------------------------------------------------------------------------------


def orthogonal(layers: int) -> Any:
    keys = jax.random.split(jax.random.key(0), layers)
    return jnp.stack([jnp.linalg.qr(jax.random.normal(k, (WIDTH, WIDTH)))[0] for k in keys])


def dense_time(rows: int, layers: int, repeats: int) -> dict[str, Any]:
    keys = jax.random.split(jax.random.key(1), 2)
    args = (orthogonal(layers), *(jax.random.normal(k, (rows, WIDTH)) for k in keys))
    result: dict[str, Any] = {"rows": rows, "layers": layers}
    programs = {
        "moonwalk": mw.value_and_grad(scanned),
        "certified": mw.value_and_grad(scanned, certify=True),
        "backprop": jax.value_and_grad(scanned),
    }
    for name, fun in programs.items():
        program = compiled(fun, *args)
        result[f"{name}_gib"] = program.memory_analysis().temp_size_in_bytes / 2**30
        result[f"{name}_ms"] = 1e3 * seconds(program, args, repeats)
    result["over_backprop"] = result["moonwalk_ms"] / result["backprop_ms"]
    result["certified_over_moonwalk"] = result["certified_ms"] / result["moonwalk_ms"]
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    parser.add_argument("--commit", default="", help="the commit, where git is not at hand")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore", mw.PlanWarning)
    on_gpu = jax.default_backend() == "gpu"
    record = recorder(arguments)
    record("dense_time", dense_time(*((2**20, 64, 10) if on_gpu else (4096, 64, 9))))
    record("dense_memory", dense_memory(16384))
    record("loop_memory", loop_memory(16384))
    record("unet_memory", unet_memory(16384))
    for name in _PLAIN:
        record(f"plain_{name}", plain(name))


def recorder(arguments: argparse.Namespace, **more: Any) -> Callable[[str, Any], None]:
    """A function that prints a figure, and writes all so far to `--out`: a run may be cut off."""
    figures: dict[str, Any] = {
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "commit": arguments.commit or _commit(),
        **more,
    }

    def record(name: str, value: Any) -> None:
        figures[name] = value
        print(name, json.dumps(value, indent=2), flush=True)
        if arguments.out:
            arguments.out.write_text(json.dumps(figures, indent=2) + "\n")

    return record


def _commit() -> str:
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    return done.stdout.strip()


if __name__ == "__main__":
    main()
