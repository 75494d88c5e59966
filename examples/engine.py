"""One network, differentiated twice: by `jax.value_and_grad` and by `moonwalk.value_and_grad`.

A dense stem, 32 orthogonal layers with MaxMin under one `scan`, and a linear head. The parameters of the
layers are free matrices; a QR makes them orthogonal, on the weight side, so that any optimiser may
move them. Memory is what XLA allocates for temporaries; both programs are compiled, and both run.

Run it with `python examples/engine.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

import moonwalk as mw

LAYERS, WIDTH, ROWS = 32, 128, 4096


def max_min(x: Array) -> Array:
    """The larger of each pair, then the smaller: a permutation, kept as one bit per pair."""
    a, b = jnp.split(x, 2, axis=-1)
    in_order = a >= b
    return jnp.concatenate([jnp.where(in_order, a, b), jnp.where(in_order, b, a)], axis=-1)


def layer(x: Array, theta: dict[str, Array]) -> tuple[Array, None]:
    w = mw.declare(jnp.linalg.qr(theta["free"])[0], "orthogonal")
    return max_min(x @ w + theta["bias"]), None


def loss(params: dict[str, Any], x: Array, y: Array) -> Array:
    x, _ = lax.scan(layer, x @ params["stem"], params["layers"])
    return jnp.mean((x @ params["head"] - y) ** 2)


def make(key: Array) -> tuple[dict[str, Any], Array, Array]:
    k = jax.random.split(key, 6)
    layers = {
        "free": jax.random.normal(k[0], (LAYERS, WIDTH, WIDTH)),
        "bias": 0.1 * jax.random.normal(k[1], (LAYERS, WIDTH)),
    }
    stem = jax.random.normal(k[2], (32, WIDTH)) / 32**0.5
    head = jax.random.normal(k[3], (WIDTH, 10)) / WIDTH**0.5
    x, y = jax.random.normal(k[4], (ROWS, 32)), jax.random.normal(k[5], (ROWS, 10))
    return {"stem": stem, "layers": layers, "head": head}, x, y


def measure(name: str, fun: Callable[..., Any], args: Any) -> Any:
    """Compile, say what memory it takes, and run."""
    compiled = jax.jit(fun).lower(*args).compile()
    memory = compiled.memory_analysis().temp_size_in_bytes / 2**20
    print(f"{name:<10}{memory:8.1f} MiB of temporaries")
    return compiled(*args)


def main() -> None:
    args = make(jax.random.key(0))
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), args)
    plan = mw.plan(loss, *shapes)  # declared weights need no values
    print(f"{LAYERS} layers of width {WIDTH}, {ROWS} rows, {args[1].dtype}\n")
    for row in plan.rows:
        print(f"{row.mode:<10}{'  ' * row.depth}{row.block}")
    print(plan.table().splitlines()[-1], end="\n\n")

    _, truth = measure("backprop", jax.value_and_grad(loss), args)
    _, g, certificate = measure("moonwalk", mw.value_and_grad(loss, certify=True), args)

    def off(a: Array, b: Array) -> Array:
        return jnp.linalg.norm(a - b) / jnp.linalg.norm(b)

    worst = max(map(float, jax.tree.leaves(jax.tree.map(off, g, truth))))
    print(f"\nlargest relative difference of a gradient: {worst:.0e}")
    print(f"certificate, the error of a swept cotangent: {float(certificate.error):.0e}")


if __name__ == "__main__":
    main()
