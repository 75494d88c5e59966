"""Pooling over disjoint windows, and rearrangements of space and channels; channels last."""

from __future__ import annotations

import math
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from .. import settings
from .inputs import checked


class MeanPool(eqx.Module):
    """The mean over disjoint windows of the `dims` axes before the last.

    **Arguments:**

    - `window`: its size, one number for all axes; positions that fill no window are left out.
    - `dims`: how many spatial axes there are.
    - `orthonormal`: divide by √size instead of the size, which makes it an isometry.

    **Example:**

    >>> import jax.numpy as jnp, moonwalk as mw
    >>> mw.nn.MeanPool(2)(jnp.ones((4, 8, 8, 3))).shape
    (4, 4, 4, 3)
    """

    window: int = eqx.field(static=True)
    dims: int = eqx.field(static=True)
    orthonormal: bool = eqx.field(static=True)

    def __init__(self, window: int, dims: int = 2, orthonormal: bool = False):
        self.window, self.dims = _window("MeanPool", window), _dims("MeanPool", dims)
        self.orthonormal = settings.flag("MeanPool", "orthonormal", orthonormal)

    def __call__(self, x: Float[Array, "..."], *, key: Array | None = None) -> Float[Array, "..."]:
        size = self.window**self.dims
        summed = _reduce("MeanPool", lax.add, 0.0, x, self.window, self.dims)
        return summed / (math.sqrt(size) if self.orthonormal else size)


class MaxPool(eqx.Module):
    """The largest entry of disjoint windows of the `dims` axes before the last.

    **Arguments:** `window`, `dims`: as of `MeanPool`.
    """

    window: int = eqx.field(static=True)
    dims: int = eqx.field(static=True)

    def __init__(self, window: int, dims: int = 2):
        self.window, self.dims = _window("MaxPool", window), _dims("MaxPool", dims)

    def __call__(self, x: Float[Array, "..."], *, key: Array | None = None) -> Float[Array, "..."]:
        return _reduce("MaxPool", lax.max, -jnp.inf, x, self.window, self.dims)


class GlobalMean(eqx.Module):
    """The mean over the `dims` axes before the last: [..., h, w, c] -> [..., c]."""

    dims: int = eqx.field(static=True)

    def __init__(self, dims: int = 2):
        self.dims = _dims("GlobalMean", dims)

    def __call__(self, x: Float[Array, "..."], *, key: Array | None = None) -> Float[Array, "..."]:
        checked("GlobalMean", x, self.dims)
        return jnp.mean(x, axis=tuple(range(-1 - self.dims, -1)))


class GlobalMax(eqx.Module):
    """The maximum over the `dims` axes before the last: [..., h, w, c] -> [..., c]."""

    dims: int = eqx.field(static=True)

    def __init__(self, dims: int = 2):
        self.dims = _dims("GlobalMax", dims)

    def __call__(self, x: Float[Array, "..."], *, key: Array | None = None) -> Float[Array, "..."]:
        checked("GlobalMax", x, self.dims)
        return jnp.max(x, axis=tuple(range(-1 - self.dims, -1)))


class Unshuffle(eqx.Module):
    """Pixel-unshuffling, space to depth: [..., h, w, c] -> [..., h/f, w/f, f²·c]. A permutation.

    It halves the size of an image without losing anything, and multiplies the channels for layers that
    must not expand them.

    **Arguments:** `factor`, `dims`.

    **Example:**

    >>> import jax.numpy as jnp, moonwalk as mw
    >>> mw.nn.Unshuffle(2)(jnp.ones((4, 8, 8, 3))).shape
    (4, 4, 4, 12)
    """

    factor: int = eqx.field(static=True)
    dims: int = eqx.field(static=True)

    def __init__(self, factor: int = 2, dims: int = 2):
        self.factor = settings.count("Unshuffle", "factor", factor)
        self.dims = _dims("Unshuffle", dims)

    def __call__(self, x: Float[Array, "..."], *, key: Array | None = None) -> Float[Array, "..."]:
        size, f, d = checked("Unshuffle", x, self.dims), self.factor, self.dims
        if any(n % f for n in size):
            raise ValueError(
                f"Unshuffle: a factor of {f} does not divide the spatial shape {tuple(size)}; pad or "
                "crop the input first"
            )
        batch = x.shape[: x.ndim - d - 1]
        split = [part for n in size for part in (n // f, f)]
        x = x.reshape((*batch, *split, x.shape[-1]))
        b = len(batch)
        order = [*range(b), *range(b, b + 2 * d, 2), *range(b + 1, b + 2 * d, 2), b + 2 * d]
        x = x.transpose(order)
        return x.reshape((*batch, *(n // f for n in size), f**d * x.shape[-1]))


def _window(name: str, window: int) -> int:
    if not settings.is_count(window):
        raise ValueError(f"{name}: a window's size is a positive number, got {window!r}")
    return int(window)


def _dims(name: str, dims: int) -> int:
    return settings.count(name, "dims", dims, what="counts spatial axes")


def _reduce(name: str, reducer: Any, start: float, x: Array, window: int, dims: int) -> Array:
    checked(name, x, dims)
    shape = (1,) * (x.ndim - dims - 1) + (window,) * dims + (1,)
    # With a concrete initial value JAX recognises the reduction and knows its derivative.
    return lax.reduce_window(x, np.asarray(start, x.dtype), reducer, shape, shape, "VALID")
