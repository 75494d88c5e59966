"""A language model of bytes by linear recurrent units (Orvieto et al. 2023), a state-space model.

`depth` layers of `width` features, with as many complex states, over `length` bytes of `batch` texts:
normalisation, a diagonal linear recurrence by `lax.associative_scan`, a gated linear unit, and a
residual. Variants: "scanned" (layers are stacked; otherwise a Python loop), "tiny" (few bytes).
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..tasks import Task
from .base import Network, Wrap, affine, chain, identity, linear, normal, stacked, words
from .gpt import cross_entropy, dense, layer_norm

SIZES = {
    "full": {"depth": 8, "width": 512, "length": 4096, "batch": 16},
    "tiny": {"depth": 3, "width": 8, "length": 16, "batch": 4},
}
VOCABULARY = {"full": 256, "tiny": 16}
RADII = (0.9, 0.999)  # of the eigenvalues at first


def recurrence(u: Any, p: Any) -> Any:
    """s_t = λ s_(t−1) + γ B u_t, then Re(C s_t) + D u_t, where λ = exp(−exp ν + i exp θ).

    B and C are complex, in products of real parts: u is real, and of C s only the real part is read.
    """
    eigenvalues = jnp.exp(lax.complex(-jnp.exp(p["nu"]), jnp.exp(p["theta"])))
    driven = lax.complex(u @ p["b_re"], u @ p["b_im"]) * jnp.exp(p["gamma"])
    decays = jnp.broadcast_to(eigenvalues, (1, *driven.shape[1:]))

    def combine(one: Any, two: Any) -> Any:
        return two[0] * one[0], two[0] * one[1] + two[1]

    _, states = lax.associative_scan(combine, (decays, driven), axis=1)
    return states.real @ p["c_re"] - states.imag @ p["c_im"] + p["d"] * u


def layer(x: Any, p: Any) -> Any:
    y = jax.nn.gelu(recurrence(layer_norm(x, p["norm"]), p))
    return x + dense(y, p["out"]) * jax.nn.sigmoid(dense(y, p["gate"]))


def init_layer(key: Any, width: int) -> dict[str, Any]:
    keys = iter(jax.random.split(key, 9))
    uniform = lambda low, high: jax.random.uniform(next(keys), (width,), jnp.float32, low, high)
    radius, angle = uniform(*RADII), uniform(0.01, math.pi / 10)
    matrix = lambda: normal(next(keys), (width, width), 2 * width)
    return {
        "norm": affine(width),
        "nu": jnp.log(-jnp.log(radius)),
        "theta": jnp.log(angle),
        "gamma": jnp.log(1 - radius**2) / 2,
        "b_re": matrix(),
        "b_im": matrix(),
        "c_re": matrix(),
        "c_im": matrix(),
        "d": normal(next(keys), (width,), 1),
        "out": linear(next(keys), width, width),
        "gate": linear(next(keys), width, width),
    }


def lru(task: Task) -> Network:
    found, _ = words(task, "scanned", "tiny")
    vocabulary = VOCABULARY["tiny" if "tiny" in found else "full"]
    scanned, width = "scanned" in found, task.width
    one = functools.partial(init_layer, width=width)

    def init(key: Any) -> dict[str, Any]:
        tokens, layers, head = jax.random.split(key, 3)
        return {
            "tokens": normal(tokens, (vocabulary, width), 1),
            "layers": stacked(one, layers, task.depth, scan=scanned),
            "norm": affine(width),
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
        x = params["tokens"][tokens]
        x = chain(layer, x, params["layers"], wrap=wrap, every=every, inner=inner)
        return cross_entropy(dense(layer_norm(x, params["norm"]), params["head"]), following)

    shape = jax.ShapeDtypeStruct((task.batch, task.length), jnp.int32)
    return Network(init, shape, shape, model, task.depth, scanned, classes=vocabulary)
