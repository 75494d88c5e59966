"""A physics-informed network (Raissi et al. 2019) for Burgers' equation, u_t + u u_x = ν u_xx.

The network u(t, x) has `depth` hidden layers of `width` features and tanh. The loss holds its first and
second derivatives with respect to t and x, at `batch` points inside, and its values at as many points of
the border. Variants: "scanned" (hidden layers are stacked; otherwise a Python loop), "tiny".
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from ..tasks import Task
from .base import Network, Wrap, chain, identity, linear, stacked, words
from .gpt import dense

SIZES = {
    "full": {"depth": 8, "width": 512, "length": 0, "batch": 2**17},
    "tiny": {"depth": 3, "width": 8, "length": 0, "batch": 8},
}
VISCOSITY = 0.01 / math.pi


def pinn(task: Task) -> Network:
    found, _ = words(task, "scanned", "tiny")
    scanned, width = "scanned" in found, task.width

    def init(key: Any) -> dict[str, Any]:
        stem, layers, head = jax.random.split(key, 3)
        one = lambda key: linear(key, width, width)
        return {
            "stem": linear(stem, 2, width),
            "layers": stacked(one, layers, task.depth, scan=scanned),
            "head": linear(head, width, 1),
        }

    def model(
        params: Any,
        points: Any,
        values: Any,
        *,
        wrap: Wrap = identity,
        every: int = 1,
        inner: Wrap = identity,
    ) -> Any:
        inside, border = points

        def u(point: Any) -> Any:
            h = jnp.tanh(dense(point, params["stem"]))
            layer = lambda h, p: jnp.tanh(dense(h, p))
            h = chain(layer, h, params["layers"], wrap=wrap, every=every, inner=inner)
            return dense(h, params["head"])[0]

        def residual(point: Any) -> Any:
            along_x = jnp.array([0, 1], point.dtype)
            gradient = jax.value_and_grad(u)
            (value, (u_t, u_x)), (_, (_, u_xx)) = jax.jvp(gradient, (point,), (along_x,))
            return u_t + value * u_x - VISCOSITY * u_xx

        off = jax.vmap(residual)(inside), jax.vmap(u)(border) - values
        return sum(jnp.mean(each**2) for each in off)

    point = jax.ShapeDtypeStruct((task.batch, 2), jnp.float32)
    values = jax.ShapeDtypeStruct((task.batch,), jnp.float32)
    return Network(init, (point, point), values, model, task.depth, scanned)
