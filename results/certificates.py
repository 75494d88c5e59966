"""What certificates cost: `python results/certificates.py --out build/certificates.json`.

Networks of 64 layers whose time is bound by memory traffic, where a certificate's own passes over the
cotangents weigh most. Memory is `memory_analysis().temp_size_in_bytes` of the compiled program; time is
the median of interleaved runs in one process. With `on_inexact="ignore"` cotangents are still rescaled
but nothing is compared, so the difference to "nan" is the price of looking, and that between "nan" and
"raise" the price of an error at run time.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import warnings
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import moonwalk as mw

LAYERS, WIDTH = 64, 256


def dense(ws: Any, x: Any, t: Any) -> Any:
    def layer(x: Any, w: Any) -> Any:
        return jnp.abs(x @ mw.declare(w, "orthogonal")), None

    return jnp.sum(lax.scan(layer, x, ws)[0] * t)


def looped(ws: Any, x: Any, t: Any) -> Any:
    for w in ws:
        x = jnp.abs(x @ mw.declare(w, "orthogonal"))
    return jnp.sum(x * t)


def preactivated(ws: Any, x: Any, t: Any) -> Any:
    def layer(x: Any, w: Any) -> Any:
        return jnp.abs(x) @ mw.declare(w, "orthogonal"), None

    return jnp.sum(lax.scan(layer, x, ws)[0] * t)


def isometric(ws: Any, x: Any, t: Any) -> Any:
    """Circular convolutions with paraunitary kernels of three taps."""

    def layer(x: Any, w: Any) -> Any:
        wrapped = jnp.concatenate([x[:, -1:], x, x[:, :1]], 1)
        dims = ("NHC", "HIO", "NHC")
        w = mw.declare(w, "isometric")
        return jnp.abs(lax.conv_general_dilated(wrapped, w, (1,), "VALID", dimension_numbers=dims)), None

    return jnp.sum(lax.scan(layer, x, ws)[0] * t)


def paraunitary(layers: int) -> Any:
    """An orthogonal matrix times two factors P + (I − P) z, with projectors P."""
    q, a, b = (orthogonal(layers, seed) for seed in range(3))
    half = WIDTH // 2
    with jax.default_matmul_precision("highest"):
        p1, p2 = (u[..., :half] @ jnp.swapaxes(u[..., :half], -1, -2) for u in (a, b))
        i = jnp.eye(WIDTH)
        taps = [p1 @ p2, p1 @ (i - p2) + (i - p1) @ p2, (i - p1) @ (i - p2)]
        return jnp.stack([q @ tap for tap in taps], 1)


def orthogonal(layers: int, seed: int = 0) -> Any:
    return jnp.linalg.qr(jax.random.normal(jax.random.key(seed), (layers, WIDTH, WIDTH)))[0]


def networks(rows: int) -> dict[str, tuple[Any, tuple[Any, ...]]]:
    ws = orthogonal(LAYERS)
    x, t = (jax.random.normal(jax.random.key(i), (rows, WIDTH)) for i in (1, 2))
    grid = (128, rows // 128, WIDTH)
    return {
        "dense, scanned": (dense, (ws, x, t)),
        "dense, as a loop": (looped, (list(ws), x, t)),
        "dense, activation first": (preactivated, (ws, x, t)),
        "isometric convolutions": (isometric, (paraunitary(LAYERS), x.reshape(grid), t.reshape(grid))),
    }


def measure(rows: int, repeats: int) -> dict[str, Any]:
    actions = ("ignore", "nan", "raise")
    result = {}
    for name, (loss, args) in networks(rows).items():
        programs = {"backprop": jax.jit(jax.value_and_grad(loss)).lower(*args).compile()}
        for action in actions:
            method = mw.Moonwalk(on_inexact=action, walk="always")
            run = jax.jit(mw.value_and_grad(loss, method=method))
            programs[action] = run.lower(*args).compile()
        times: dict[str, list[float]] = {k: [] for k in programs}
        for program in programs.values():
            jax.block_until_ready(program(*args))
        for _ in range(repeats):
            for key, program in programs.items():
                start = time.perf_counter()
                jax.block_until_ready(program(*args))
                times[key].append(time.perf_counter() - start)
        rows_of = {
            key: {
                "mib": program.memory_analysis().temp_size_in_bytes / 2**20,
                "ms": 1e3 * statistics.median(times[key]),
            }
            for key, program in programs.items()
        }
        result[name] = rows_of
        print(name, json.dumps(rows_of), flush=True)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rows", type=int)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--commit", default="")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    device = jax.devices()[0]
    rows = options.rows or (262_144 if device.platform == "gpu" else 4_096)
    found = {
        "device": device.device_kind,
        "jax": jax.__version__,
        "commit": options.commit,
        "rows": rows,
        "layers": LAYERS,
        "networks": measure(rows, options.repeats),
    }
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
