"""Dense layers [width, width]: scanned, in a Python loop, or with skips across.

- `dense`: `depth` of them. Variants: "abs", "maxmin", "slope 0.25": orthogonal weights, declared, which
  can be walked; "relu", "tanh", "residual" (x + relu(x w₁) w₂): free weights, which cannot. "first":
  activations come before products. "looped": layer after layer, without a scan.
- `skips`: an isometric U-Net of rows. `depth` layers on each of three levels down, below, and up again;
  rows halve by taking every other one and double by repetition.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ....trace.declare import declare
from ..tasks import Task
from .base import Network, Wrap, chain, identity, stacked, words

LEVELS = 3


def leaky(slope: float) -> Callable[[Any], Any]:
    return functools.partial(jax.nn.leaky_relu, negative_slope=slope)


def maxmin(x: Any) -> Any:
    a, b = x[..., 0::2], x[..., 1::2]
    in_order = a >= b
    return jnp.concatenate([jnp.where(in_order, a, b), jnp.where(in_order, b, a)], -1)


def distance(x: Any, target: Any) -> Any:
    return jnp.mean((x - target) ** 2)


def orthogonal(key: Any, width: int, count: int) -> Any:
    return jnp.linalg.qr(jax.random.normal(key, (count, width, width), jnp.float32))[0]


def turned(key: Any, base: Any) -> Any:
    """Another orthogonal matrix: shuffled rows and signs of `base`. A QR per layer would take longer."""
    order, signs = jax.random.split(key)
    n = base.shape[0]
    flips = jax.random.rademacher(signs, (n, 1), base.dtype)
    return flips * base[jnp.argsort(jax.random.bits(order, (n,)))]


def several(key: Any, width: int, count: int) -> Any:
    """Orthogonal matrices [count, width, width]."""
    base, each = jax.random.split(key)
    turn = functools.partial(turned, base=orthogonal(base, width, 1)[0])
    return lax.map(turn, jax.random.split(each, count))


# --- the networks -------------------------------------------------------------------------------------

ACTIVATIONS: dict[str, Callable[[Any], Any]] = {
    "abs": jnp.abs,
    "maxmin": maxmin,
    "relu": jax.nn.relu,
    "tanh": jnp.tanh,
}
FREE = ("relu", "tanh", "residual")


def dense(task: Task) -> Network:
    found, slope = words(task, *ACTIVATIONS, "residual", "first", "looped")
    named = next((ACTIVATIONS[name] for name in ACTIVATIONS if name in found), jnp.abs)
    activation = leaky(slope) if slope is not None else named
    free, looped = not found.isdisjoint(FREE), "looped" in found
    residual, first = "residual" in found, "first" in found

    def init(key: Any) -> dict[str, Any]:
        if residual:
            one = lambda key: several(key, task.width, 2)
            return {"layers": stacked(one, key, task.depth, scan=not looped)}
        layers = several(key, task.width, task.depth)
        return {"layers": list(layers) if looped else layers}

    def product(x: Any, w: Any) -> Any:
        return x @ (w if free else declare(w, "orthogonal"))

    def layer(x: Any, w: Any) -> Any:
        if residual:
            return x + jax.nn.relu(x @ w[0]) @ w[1]
        return product(activation(x), w) if first else activation(product(x, w))

    def model(params: Any, x: Any, target: Any, **cuts: Any) -> Any:
        return distance(chain(layer, x, params["layers"], **cuts), target)

    shape = (task.batch, task.width)
    return Network(init, shape, shape, model, task.depth, not looped, layer=layer)


def skips(task: Task) -> Network:
    words(task)

    def init(key: Any) -> dict[str, Any]:
        return {"layers": list(several(key, task.width, (2 * LEVELS + 1) * task.depth))}

    def layer(x: Any, w: Any) -> Any:
        return jnp.abs(x @ declare(w, "orthogonal"))

    def model(
        params: Any,
        x: Any,
        target: Any,
        *,
        wrap: Wrap = identity,
        every: int = 1,
        inner: Wrap = identity,
    ) -> Any:
        cuts: Any = {"wrap": wrap, "every": every, "inner": inner}
        weights, kept, deep = params["layers"], [], task.depth
        levels = [weights[i : i + deep] for i in range(0, len(weights), deep)]
        for _ in range(LEVELS):
            x = chain(layer, x, levels.pop(0), **cuts)
            kept.append(x)
            x = x.reshape(x.shape[0] // 2, 2, -1)[:, 0]
        x = chain(layer, x, levels.pop(0), **cuts)
        for _ in range(LEVELS):
            x = jnp.repeat(x, 2, axis=0) + kept.pop()
            x = chain(layer, x, levels.pop(0), **cuts)
        return distance(x, target)

    shape = (task.batch, task.width)
    return Network(init, shape, shape, model, task.depth, layer=layer)
