"""The networks that are measured: losses of (params, x, target), shapes, and an initialiser.

Parameters are the layers' weights themselves, declared where they have a structure, so that what is
measured is the gradient and not a parametrisation. Losses are means over the examples of a batch.

- `dense`: orthogonal layers [width, width], scanned. Variants: "abs", "maxmin", "slope 0.25".
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
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..declare import declare
from ..training.names import nearest
from .tasks import Task

_TAPS = 0.7  # of the standard deviation by He
_DIMS = {1: ("NHC", "HIO", "NHC"), 2: ("NHWC", "HWIO", "NHWC")}


@dataclass(frozen=True)
class Network:
    """A stem, layers of one kind, a head.

    **Arguments:**

    - `init`: key -> {"layers": weights, …}; the weights are stacked where layers are scanned over, and a
        list otherwise.
    - `x`, `target`: shapes.
    - `layer`: (x, w) -> x
    - `stem`: (params, x) -> x
    - `head`: (params, x, target) -> loss
    """

    init: Callable[[Any], dict[str, Any]]
    x: tuple[int, ...]
    target: tuple[int, ...]
    layer: Callable[[Any, Any], Any]
    stem: Callable[[Any, Any], Any]
    head: Callable[[Any, Any, Any], Any]

    def loss(self, params: Any, x: Any, target: Any) -> Any:
        return self._loss(self.layer, params, x, target)

    def checkpointed(self, params: Any, x: Any, target: Any) -> Any:
        """The same loss with `jax.checkpoint` around every layer, and around about √depth of a scan."""
        layer, layers = jax.checkpoint(self.layer), params["layers"]
        if isinstance(layers, list):
            return self._loss(layer, params, x, target)
        count = len(layers)
        every = min(
            (k for k in range(1, count + 1) if count % k == 0), key=lambda k: abs(k - count**0.5)
        )
        folded = {**params, "layers": layers.reshape((-1, every, *layers.shape[1:]))}

        @jax.checkpoint
        def several(x: Any, ws: Any) -> Any:
            return lax.scan(lambda x, w: (layer(x, w), None), x, ws)[0]

        return self._loss(several, folded, x, target)

    def _loss(self, layer: Callable[[Any, Any], Any], params: Any, x: Any, target: Any) -> Any:
        x, layers = self.stem(params, x), params["layers"]
        if isinstance(layers, list):
            for w in layers:
                x = layer(x, w)
        else:
            x, _ = lax.scan(lambda x, w: (layer(x, w), None), x, layers)
        return self.head(params, x, target)

    def types(self) -> tuple[Any, Any, Any]:
        """Shapes of (params, x, target)."""
        params = jax.eval_shape(self.init, _key(0))
        x, target = (jax.ShapeDtypeStruct(s, jnp.float32) for s in (self.x, self.target))
        return params, x, target

    def arguments(self, seed: int) -> tuple[Any, Any, Any]:
        """(params, x, target), the same ones for the same seed."""

        def draw(key: Any) -> tuple[Any, Any, Any]:
            weights, one, two = jax.random.split(key, 3)
            x = jax.random.normal(one, self.x, jnp.float32)
            return self.init(weights), x, jax.random.normal(two, self.target, jnp.float32)

        return jax.jit(draw)(_key(seed))


def _key(seed: int) -> Any:
    """Of the generator that takes least to compile; the same numbers on the same device."""
    return jax.random.key(seed, impl="rbg")


def make(task: Task) -> Network:
    """The network that a task names."""
    if task.network not in NETWORKS:
        raise ValueError(nearest("network", task.network, NETWORKS))
    return NETWORKS[task.network](task)


# --- variants -----------------------------------------------------------------------------------------


def _words(task: Task, *flags: str) -> tuple[set[str], float | None]:
    """'identity, slope 0.25' -> ({'identity'}, 0.25)."""
    words, slope = set(), None
    for part in filter(None, (p.strip() for p in task.variant.split(","))):
        if part.startswith("slope "):
            slope = float(part.removeprefix("slope "))
        elif part in flags:
            words.add(part)
        else:
            raise ValueError(nearest(f"variant of {task.network}", part, (*flags, "slope 0.25")))
    return words, slope


def _leaky(slope: float) -> Callable[[Any], Any]:
    return functools.partial(jax.nn.leaky_relu, negative_slope=slope)


def _maxmin(x: Any) -> Any:
    a, b = x[..., 0::2], x[..., 1::2]
    in_order = a >= b
    return jnp.concatenate([jnp.where(in_order, a, b), jnp.where(in_order, b, a)], -1)


# --- heads and initialisers ---------------------------------------------------------------------------


def _as_it_is(params: Any, x: Any) -> Any:
    del params
    return x


def _distance(params: Any, x: Any, target: Any) -> Any:
    del params
    return jnp.mean((x - target) ** 2)


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


def _turned(key: Any, base: Any) -> Any:
    """Another orthogonal matrix: rows and signs of `base` shuffled. A QR per layer would take longer."""
    order, signs = jax.random.split(key)
    n = base.shape[0]
    flips = jax.random.rademacher(signs, (n, 1), base.dtype)
    return flips * base[jnp.argsort(jax.random.bits(order, (n,)))]


def _orthogonal(key: Any, width: int, count: int) -> Any:
    return jnp.linalg.qr(jax.random.normal(key, (count, width, width), jnp.float32))[0]


# --- the networks -------------------------------------------------------------------------------------


def dense(task: Task) -> Network:
    words, slope = _words(task, "abs", "maxmin")
    activation = _leaky(slope) if slope is not None else _maxmin if "maxmin" in words else jnp.abs

    def init(key: Any) -> dict[str, Any]:
        base, each = jax.random.split(key)
        turn = functools.partial(_turned, base=_orthogonal(base, task.width, 1)[0])
        return {"layers": lax.map(turn, jax.random.split(each, task.depth))}

    def layer(x: Any, w: Any) -> Any:
        return activation(x @ declare(w, "orthogonal"))

    shape = (task.batch, task.width)
    return Network(init, shape, shape, layer, _as_it_is, _distance)


def pyramid(task: Task) -> Network:
    words, slope = _words(task, "identity", "lower", "residual")
    lower, residual, act = "lower" in words, "residual" in words, _leaky(slope or 0.25)

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
    return Network(init, shape, (task.batch, 1), layer, _widened, _scalar)


def signal(task: Task) -> Network:
    words, slope = _words(task, "looped")
    act = _leaky(slope or 0.3)

    def init(key: Any) -> dict[str, Any]:
        ends, body = jax.random.split(key)
        one = functools.partial(_kernel, width=task.width, dims=1, pivot=(0,), lower=True)
        layers = lax.map(one, jax.random.split(body, task.depth))
        looped = list(layers) if "looped" in words else layers
        return {"layers": looped, **_ends(ends, task.width, 1)}

    def layer(x: Any, w: Any) -> Any:
        w = declare(w, "lower")
        return act(lax.conv_general_dilated(x, w, (1,), [(1, 1)], dimension_numbers=_DIMS[1]))

    return Network(init, (task.batch, task.length, 3), (task.batch, 1), layer, _widened, _scalar)


def isometric(task: Task) -> Network:
    _words(task)
    width = task.width

    def init(key: Any) -> dict[str, Any]:
        """Kernels of three taps: an orthogonal matrix, times P + (I − P) z, twice, P projections."""
        base, each = jax.random.split(key)
        bases = _orthogonal(base, width, 3)

        def one(key: Any) -> Any:
            q, a, b = jax.vmap(_turned)(jax.random.split(key, 3), bases)
            p1, p2 = (u[:, : width // 2] @ u[:, : width // 2].T for u in (a, b))
            i = jnp.eye(width, dtype=q.dtype)
            return jnp.stack([q @ p1 @ p2, q @ (p1 @ (i - p2) + (i - p1) @ p2), q @ (i - p1) @ (i - p2)])

        with jax.default_matmul_precision("highest"):
            return {"layers": lax.map(one, jax.random.split(each, task.depth))}

    def layer(x: Any, w: Any) -> Any:
        wrapped = jnp.concatenate([x[:, -1:], x, x[:, :1]], 1)
        w = declare(w, "isometric")
        return jnp.abs(lax.conv_general_dilated(wrapped, w, (1,), "VALID", dimension_numbers=_DIMS[1]))

    shape = (task.batch, task.length, width)
    return Network(init, shape, shape, layer, _as_it_is, _distance)


NETWORKS: dict[str, Callable[[Task], Network]] = {
    "dense": dense,
    "pyramid": pyramid,
    "signal": signal,
    "isometric": isometric,
}
