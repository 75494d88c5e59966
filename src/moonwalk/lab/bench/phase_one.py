"""What Phase I keeps: M_x and M_θ of networks, compared with what backpropagation keeps; and when it
pays.

M_x are the bytes that ∂y/∂x needs, M_θ those that ∂y/∂θ needs besides, as a plan counts them. What
backpropagation keeps is read off JAX: the leaves of `jax.vjp`'s pullback that grow with the batch, which
excludes weights.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ... import preview
from ...trace.declare import declare
from . import measuring, methods, networks
from .growth import roughly
from .tasks import Task


def residuals(task: Task) -> dict[str, Any]:
    """Residuals of all layers of a network; nothing is compiled or run."""
    network = networks.make(task)
    plan = preview.plan(network.loss, *network.types())
    rows = list(plan.rows)
    inner = [
        r
        for r, after in zip(rows, [*rows[1:], None], strict=True)
        if after is None or after.depth <= r.depth
    ]  # the row of a scan sums up those of its body
    # A rule may keep less than JAX does for ∂y/∂x: for MaxMin, a bit per pair.
    own = sum((min(r.m_x, r.bytes) if r.mode == "walk" else r.m_x) * r.times for r in inner)
    double = networks.make(replace(task, batch=2 * task.batch))
    return {
        "network": task.network,
        "variant": task.variant,
        "depth": task.depth,
        "m_x_bytes": own,
        "m_theta_bytes": sum(r.m_theta * r.times for r in inner),
        "backprop_bytes": _pullback(double) - _pullback(network),
    }


def _pullback(network: networks.Network) -> int:
    """Bytes that `jax.vjp` keeps, weights included."""

    def kept(params: Any, *data: Any) -> Any:
        return jax.vjp(lambda params: network.loss(params, *data), params)[1]

    leaves = jax.tree.leaves(jax.eval_shape(kept, *network.types()))
    return sum(a.size * a.dtype.itemsize for a in leaves)


# --- M_θ / M_x ----------------------------------------------------------------------------------------

RATIOS = {0.25: (1, 4), 1.0: (1, 1), 4.0: (4, 1), 16.0: (16, 1), 32.0: (1, 0)}
"""M_θ / M_x: (dense layers, smooth activations after each; 0 for |x| instead, which keeps a bit)."""


def smooth(x: Any) -> Any:
    """An activation that keeps a number per entry, because its derivative varies between 0.9 and 1.1."""
    return x + 0.1 * jnp.sin(x)


def ratio_loss(ratio: float) -> Any:
    """A loss of orthogonal layers; `params`: [depth, n, n]."""
    layers, smooths = RATIOS[ratio]

    def loss(ws: Any, x: Any, target: Any) -> Any:
        def group(x: Any, ws: Any) -> Any:
            for w in ws:
                x = x @ declare(w, "orthogonal")
            for _ in range(smooths):
                x = smooth(x)
            return (x if smooths else jnp.abs(x)), None

        x, _ = lax.scan(group, x, ws.reshape((-1, layers, *ws.shape[1:])))
        return jnp.mean((x - target) ** 2)

    return loss


def at_ratio(ratio: float, method: str, depth: int, width: int, batch: int) -> int:
    """Bytes of temporaries of the compiled program."""
    like = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    args = like(depth, width, width), like(batch, width), like(batch, width)
    fun = methods.differentiate(method, ratio_loss(ratio), args)
    return measuring.memory(roughly(fun, *args))["temp_bytes"]
