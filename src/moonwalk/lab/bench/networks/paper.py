"""The paper's convolutional networks, and an isometric one.

- `pyramid`: the paper's 2D network (its Fig. 2). An image of length × length × 3 is taken to `width`
  channels by a 1×1 convolution; `depth` convolutions of 3×3, stride 2, padding 1, LeakyReLU after each;
  the maximum over positions, and a dense layer to one number. Variants: the pivot tap ("identity" or
  "lower", which is the paper's), "slope 0.25", "residual" (x[::2, ::2] is added to every layer).
- `signal`: the paper's 1D network (its Fig. 3). Signals of length × 3 to `width` channels, then `depth`
  convolutions of three taps, stride 1, padding 1, scanned; head as above. The pivot is the first tap,
  unit lower triangular. Variants: "slope 0.3", "looped" (layer after layer, without a scan).
- `isometric`: signals of length × width; circular convolutions with paraunitary kernels of three taps,
  and |x|, scanned: nothing grows, whatever the depth.

The paper gives neither slopes nor initialisations. Here taps other than the pivot have 0.7 times the
standard deviation by He.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ....trace.declare import declare
from ..tasks import Task
from .base import Layer, Network, chain, words
from .dense import distance, leaky, orthogonal, turned

_TAPS = 0.7  # times He's standard deviation
_DIMS = {1: ("NHC", "HIO", "NHC"), 2: ("NHWC", "HWIO", "NHWC")}


# --- heads and initialisers ---------------------------------------------------------------------------


def _scalar(params: Any, x: Any, target: Any) -> Any:
    """The paper's head: "max pooling and projects the feature map to a scalar"."""
    pooled = jnp.max(x, axis=tuple(range(1, x.ndim - 1)))
    return jnp.mean((pooled @ params["head"] - target) ** 2)


def _widened(params: Any, x: Any) -> Any:
    """The paper's stem: "first upsampled to … channels"; here by a 1×1 convolution, and nothing else."""
    return lax.conv_general_dilated(
        x, params["stem"], (1,) * (x.ndim - 2), "VALID", dimension_numbers=_DIMS[x.ndim - 2]
    )


def _ends(key: Any, width: int, dims: int) -> dict[str, Any]:
    stem, head = jax.random.split(key)
    return {
        "stem": jax.random.normal(stem, (1,) * dims + (3, width), jnp.float32) / math.sqrt(3),
        "head": jax.random.normal(head, (width, 1), jnp.float32) / math.sqrt(width),
    }


def _kernel(key: Any, width: int, dims: int, pivot: tuple[int, ...], lower: bool) -> Any:
    """A kernel [3, …, in, out] whose pivot tap is unit lower triangular, or the identity."""
    deviation = _TAPS * math.sqrt(2 / (3**dims * width))
    w = jax.random.normal(key, (3,) * dims + (width, width), jnp.float32) * deviation
    tap = jnp.eye(width, dtype=w.dtype) + (jnp.tril(w[pivot], -1) if lower else 0)
    return w.at[pivot].set(tap)


def _pooled(task: Task, init: Any, x: tuple[int, ...], layer: Layer, *, scanned: bool) -> Network:
    """A model between the paper's stem and head."""

    def model(params: Any, x: Any, target: Any, **cuts: Any) -> Any:
        x = chain(layer, _widened(params, x), params["layers"], **cuts)
        return _scalar(params, x, target)

    return Network(init, x, (task.batch, 1), model, task.depth, scanned, layer=layer)


# --- the networks -------------------------------------------------------------------------------------


def pyramid(task: Task) -> Network:
    found, slope = words(task, "identity", "lower", "residual")
    lower, residual, act = "lower" in found, "residual" in found, leaky(slope or 0.25)

    def init(key: Any) -> dict[str, Any]:
        ends, body = jax.random.split(key)
        one = functools.partial(_kernel, width=task.width, dims=2, pivot=(1, 1), lower=lower)
        layers = lax.map(one, jax.random.split(body, task.depth))
        return {"layers": list(layers), **_ends(ends, task.width, 2)}

    def layer(x: Any, w: Any) -> Any:
        w = declare(w, "lower" if lower else "diagonal")
        y = lax.conv_general_dilated(x, w, (2, 2), [(1, 1)] * 2, dimension_numbers=_DIMS[2])
        return act(y) + x[:, ::2, ::2] if residual else act(y)

    shape = (task.batch, task.length, task.length, 3)
    return _pooled(task, init, shape, layer, scanned=False)


def signal(task: Task) -> Network:
    found, slope = words(task, "looped")
    act = leaky(slope or 0.3)

    def init(key: Any) -> dict[str, Any]:
        ends, body = jax.random.split(key)
        one = functools.partial(_kernel, width=task.width, dims=1, pivot=(0,), lower=True)
        layers = lax.map(one, jax.random.split(body, task.depth))
        looped = list(layers) if "looped" in found else layers
        return {"layers": looped, **_ends(ends, task.width, 1)}

    def layer(x: Any, w: Any) -> Any:
        w = declare(w, "lower")
        return act(lax.conv_general_dilated(x, w, (1,), [(1, 1)], dimension_numbers=_DIMS[1]))

    shape = (task.batch, task.length, 3)
    return _pooled(task, init, shape, layer, scanned="looped" not in found)


def isometric(task: Task) -> Network:
    words(task)
    width = task.width

    def init(key: Any) -> dict[str, Any]:
        """Kernels of three taps: an orthogonal matrix, times P + (I − P) z, twice, P projections."""
        base, each = jax.random.split(key)
        bases = orthogonal(base, width, 3)

        def one(key: Any) -> Any:
            q, a, b = jax.vmap(turned)(jax.random.split(key, 3), bases)
            p1, p2 = (u[:, : width // 2] @ u[:, : width // 2].T for u in (a, b))
            i = jnp.eye(width, dtype=q.dtype)
            return jnp.stack([q @ p1 @ p2, q @ (p1 @ (i - p2) + (i - p1) @ p2), q @ (i - p1) @ (i - p2)])

        with jax.default_matmul_precision("highest"):
            return {"layers": lax.map(one, jax.random.split(each, task.depth))}

    def layer(x: Any, w: Any) -> Any:
        wrapped = jnp.concatenate([x[:, -1:], x, x[:, :1]], 1)
        w = declare(w, "isometric")
        return jnp.abs(lax.conv_general_dilated(wrapped, w, (1,), "VALID", dimension_numbers=_DIMS[1]))

    def model(params: Any, x: Any, target: Any, **cuts: Any) -> Any:
        return distance(chain(layer, x, params["layers"], **cuts), target)

    shape = (task.batch, task.length, width)
    return Network(init, shape, shape, model, task.depth, scanned=True, layer=layer)
