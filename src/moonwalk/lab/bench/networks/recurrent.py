"""A recurrent language model: LSTM layers, or GRU layers, and a dense layer to the vocabulary.

`depth` layers of `width` features, each a scan over the `length` tokens of `batch` texts. A step does
the product with its input itself: all steps' products at once would be faster, but keep four times the
input. `jax.checkpoint` by hand stands around runs of steps. Variants: "gru", "bfloat16" (computed in,
from parameters that stay float32), "tiny" (a small vocabulary, short runs).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ..tasks import Task
from .base import Network, Wrap, identity, linear, normal, scan, stacked, words
from .gpt import cross_entropy, dense

SIZES = {
    "full": {"depth": 2, "width": 1024, "length": 512, "batch": 128},
    "tiny": {"depth": 2, "width": 8, "length": 16, "batch": 4},
}
VOCABULARY = {"full": 10_000, "tiny": 32}
RUN = {"full": 16, "tiny": 4}  # steps in a `jax.checkpoint` by hand


def lstm(state: tuple[Any, Any], x: Any, p: Any) -> tuple[tuple[Any, Any], Any]:
    """One step: ((h, c), x) -> ((h, c), h)."""
    h, c = state
    gates = dense(x, p["input"]) + dense(h, p["hidden"])
    i, f, g, o = jnp.split(gates, 4, axis=-1)
    c = jax.nn.sigmoid(f + 1) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
    h = jax.nn.sigmoid(o) * jnp.tanh(c)
    return (h, c), h


def gru(state: Any, x: Any, p: Any) -> tuple[Any, Any]:
    """One step: (h, x) -> (h, h)."""
    r, z, n = jnp.split(dense(x, p["input"]), 3, axis=-1)
    r_h, z_h, n_h = jnp.split(dense(state, p["hidden"]), 3, axis=-1)
    z = jax.nn.sigmoid(z + z_h)
    n = jnp.tanh(n + jax.nn.sigmoid(r + r_h) * n_h)
    h = (1 - z) * n + z * state
    return h, h


def recurrent(task: Task) -> Network:
    found, _ = words(task, "gru", "bfloat16", "tiny")
    size = "tiny" if "tiny" in found else "full"
    vocabulary, width, gates = VOCABULARY[size], task.width, 3 if "gru" in found else 4

    def init_layer(key: Any) -> dict[str, Any]:
        one, two = jax.random.split(key)
        return {"input": linear(one, width, gates * width), "hidden": linear(two, width, gates * width)}

    def init(key: Any) -> dict[str, Any]:
        tokens, layers, head = jax.random.split(key, 3)
        return {
            "tokens": normal(tokens, (vocabulary, width), 1),
            "layers": stacked(init_layer, layers, task.depth, scan=False),
            "head": linear(head, width, vocabulary),
        }

    def model(
        params: Any,
        tokens: Any,
        following: Any,
        *,
        wrap: Wrap = identity,
        every: int = 1,
        inner: Wrap = identity,
    ) -> Any:
        x = params["tokens"][tokens.T]  # [length, batch, width]
        x = x.astype(jnp.bfloat16) if "bfloat16" in found else x
        zero = jnp.zeros_like(x[0])
        for p in params["layers"]:
            cell = lambda state, x, p=p: gru(state, x, p) if "gru" in found else lstm(state, x, p)
            start = zero if "gru" in found else (zero, zero)
            _, x = scan(cell, start, x, wrap=wrap, every=every, inner=inner)
        return cross_entropy(dense(x, params["head"]), following.T)

    shape = jax.ShapeDtypeStruct((task.batch, task.length), jnp.int32)
    return Network(
        init, shape, shape, model, task.length, scanned=True, classes=vocabulary, block=RUN[size]
    )
