"""Layers whose vijp and vjp are timed, one or more for each family of rules.

    vjp:   h' ↦ h = h' J          vijp:   h ↦ h' = h J⁺

Both get what a forward pass kept, and weights only as arguments, so that nothing is folded into
constants. `whole` times a call that gets x, the weights and the cotangent, and computes everything from
them: bits, an inverse, a factorisation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ...operator.vijp import vijp
from ...trace.declare import declare
from ..training.names import lookup
from . import measuring

TOLERANCE = 1e-2
"""The error beyond which a recovered h' counts as wrong; products may be in TF32."""


@dataclass(frozen=True)
class Sizes:
    """Rows and features of dense layers; images of side × side with channels; signals of `length`."""

    rows: int
    features: int
    images: int
    side: int
    channels: int
    length: int


@dataclass(frozen=True)
class Layer:
    """`fun(x, w)`, with the shapes of x and w at given sizes; `weight` makes w from a random one."""

    rule: str
    fun: Callable[[Any, Any], Any]
    x: Callable[[Sizes], tuple[int, ...]]
    w: Callable[[Sizes], tuple[int, ...]] = lambda sizes: ()
    weight: Callable[[Any], Any] = lambda w: w


def _rows(s: Sizes) -> tuple[int, ...]:
    return s.rows, s.features


def _square(s: Sizes) -> tuple[int, ...]:
    return s.features, s.features


def _images(s: Sizes) -> tuple[int, ...]:
    return s.images, s.side, s.side, s.channels


def _signals(s: Sizes) -> tuple[int, ...]:
    return s.images, s.length, s.channels


def _taps(*window: int) -> Callable[[Sizes], tuple[int, ...]]:
    return lambda s: (*window, s.channels, s.channels)


def _unit_lower(w: Any) -> Any:
    """Unit lower triangular; off-diagonals of standard deviation 1/√m keep it well conditioned."""
    return np.tril(w, -1) / np.sqrt(w.shape[-1]) + np.eye(w.shape[-1], dtype=w.dtype)


def _kernel(tap: tuple[int, ...], pivot: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A kernel of small taps, with `pivot` applied to the one at `tap`."""

    def make(w: Any) -> Any:
        w = w / np.sqrt(2 * np.prod(w.shape[:-1]))
        w[tap] = pivot(w[tap])
        return w

    return make


def _conv(w: Any, x: Any, stride: int, padding: Any) -> Any:
    dims = ("NHWC", "HWIO", "NHWC") if x.ndim == 4 else ("NHC", "HIO", "NHC")
    return lax.conv_general_dilated(x, w, (stride,) * (x.ndim - 2), padding, dimension_numbers=dims)


def _strided(structure: str | None) -> Callable[[Any, Any], Any]:
    """The paper's: 3×3, stride 2, padding 1."""
    return lambda x, w: _conv(declare(w, structure) if structure else w, x, 2, [(1, 1)] * 2)


def _paraunitary(w: Any) -> Any:
    """Three taps [in, out] whose circular convolution is an isometry."""
    n = w.shape[-1]
    q, a, b = (np.linalg.qr(tap)[0] for tap in w)
    p1, p2 = (u[:, : n // 2] @ u[:, : n // 2].T for u in (a, b))
    i = np.eye(n, dtype=w.dtype)
    return np.stack([q @ p1 @ p2, q @ (p1 @ (i - p2) + (i - p1) @ p2), q @ (i - p1) @ (i - p2)])


def _circular(x: Any, w: Any) -> Any:
    wrapped = jnp.concatenate([x[:, -1:], x, x[:, :1]], 1)
    return _conv(declare(w, "isometric"), wrapped, 1, "VALID")


def _maxmin(x: Any, w: Any) -> Any:
    del w
    a, b = x[..., 0::2], x[..., 1::2]
    in_order = a >= b
    return jnp.concatenate([jnp.where(in_order, a, b), jnp.where(in_order, b, a)], -1)


def _pooled(x: Any, w: Any) -> Any:
    del w
    return lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")


def _deep(x: Any, ws: Any) -> Any:
    return lax.scan(lambda x, w: (jnp.abs(x @ declare(w, "orthogonal")), None), x, ws)[0]


_orthogonal = lambda w: np.linalg.qr(w)[0]
_eye = lambda w: np.eye(w.shape[-1], dtype=w.dtype)
_near = lambda w: np.eye(w.shape[-1], dtype=w.dtype) + 0.3 * w

LAYERS: dict[str, Layer] = {
    "dense, orthogonal": Layer(
        "dense", lambda x, w: x @ declare(w, "orthogonal"), _rows, _square, _orthogonal
    ),
    "dense, triangular": Layer(
        "dense", lambda x, w: x @ declare(w, "lower"), _rows, _square, _unit_lower
    ),
    "dense, free": Layer("dense", lambda x, w: x @ w, _rows, _square, _orthogonal),
    "convolution, identity pivot": Layer(
        "convolution", _strided("diagonal"), _images, _taps(3, 3), _kernel((1, 1), _eye)
    ),
    "convolution, triangular pivot": Layer(
        "convolution", _strided("lower"), _images, _taps(3, 3), _kernel((1, 1), _unit_lower)
    ),
    "convolution, free pivot": Layer(
        "convolution", _strided(None), _images, _taps(3, 3), _kernel((1, 1), _near)
    ),
    "patches of 2×2": Layer(
        "convolution",
        lambda x, w: _conv(w, x, 2, "VALID"),
        _images,
        _taps(2, 2),
        lambda w: _orthogonal(w.reshape(-1, w.shape[-1])).reshape(w.shape),
    ),
    "convolution, circular and isometric": Layer(
        "isometry", _circular, _signals, _taps(3), _paraunitary
    ),
    "causal convolution": Layer(
        "elimination",
        lambda x, w: _conv(declare(w, "lower", taps=(2,)), x, 1, [(2, 0)]),
        _signals,
        _taps(3),
        _kernel((2,), _eye),
    ),
    "LeakyReLU": Layer("pointwise", lambda x, w: jax.nn.leaky_relu(x, 0.25), _rows),
    "|x|": Layer("pointwise", lambda x, w: jnp.abs(x), _rows),
    "MaxMin": Layer("pointwise", _maxmin, _rows),
    "maximum over 2×2": Layer("pooling", _pooled, _images),
    "transpose and slice": Layer("structural", lambda x, w: x.T[::2], _rows),
    "cumulative sum": Layer("structural", lambda x, w: jnp.cumsum(x, 1), _rows),
    "scan of 8 dense layers and |x|": Layer(
        "scan", _deep, _rows, lambda s: (8, *_square(s)), _orthogonal
    ),
}
QUICK = (
    "dense, orthogonal",
    "dense, triangular",
    "convolution, identity pivot",
    "convolution, triangular pivot",
    "convolution, free pivot",
    "LeakyReLU",
    "|x|",
)


def measure(name: str, sizes: Sizes, repeats: int, whole: bool) -> dict[str, Any]:
    """{"name", "rule", "vjp", "vijp", "error", "tolerance"}, and "whole_vjp", "whole_vijp" if asked."""
    layer = lookup("layer", name, LAYERS)
    random = np.random.default_rng(0)
    x = jnp.asarray(random.standard_normal(layer.x(sizes), np.float32))
    raw = random.standard_normal(layer.w(sizes), np.float32) if layer.w(sizes) else None
    w = None if raw is None else jnp.asarray(layer.weight(raw).astype(np.float32))

    def linearised(x: Any, w: Any) -> Any:
        return jax.vjp(lambda x: layer.fun(x, w), x)[1]

    def inverse(x: Any, w: Any) -> Any:
        return vijp(lambda x: layer.fun(x, w), x)[1]

    pullback, recover = jax.jit(linearised)(x, w), jax.jit(inverse)(x, w)
    shape = jax.eval_shape(layer.fun, x, w).shape
    h_out = jnp.asarray(random.standard_normal(shape, np.float32))
    apply = lambda fun, h: fun(h)
    (h_in,), vjp_time = measuring.timed(jax.jit(apply), (pullback, h_out), repeats)
    h_in = jnp.asarray(h_in)
    found, vijp_time = measuring.timed(jax.jit(apply), (recover, h_in), repeats)
    result = {
        "name": name,
        "rule": layer.rule,
        "vjp": vjp_time,
        "vijp": vijp_time,
        "error": measuring.error(found, h_out),
        "tolerance": TOLERANCE,
    }
    if whole:
        forth = jax.jit(lambda x, w, h: linearised(x, w)(h))
        back = jax.jit(lambda x, w, h: inverse(x, w)(h))
        result["whole_vjp"] = measuring.timed(forth, (x, w, h_out), repeats)[1]
        result["whole_vijp"] = measuring.timed(back, (x, w, h_in), repeats)[1]
    return result
