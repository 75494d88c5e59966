"""Activations whose derivative stays away from zero, so that a walk passes them."""

from __future__ import annotations

import math

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from .. import settings


class LeakyReLU(eqx.Module):
    """x where x is positive, slope · x elsewhere; a walk keeps one bit per entry.

    The smaller the slope, the faster error grows where a walk mixes channels: by
    (1 + slope²) / (2 slope) a layer. With a power of two and identity pivots nothing is rounded.

    **Arguments:** `slope`: between 0 and 1, 1/4 by default.
    """

    slope: float = eqx.field(static=True)

    def __init__(self, slope: float = 0.25):
        rule = "is a number between 0 and 1"
        if not 0 < settings.number("LeakyReLU", "slope", slope, rule, lambda v: v == v) <= 1:
            raise ValueError(
                f"LeakyReLU: the slope must lie in (0, 1], got {slope}; with 0 it is ReLU, which loses "
                "cotangents: use jax.nn.relu, and the plan keeps them"
            )
        self.slope = float(slope)

    def __call__(self, x: Float[Array, "..."], *, key: Array | None = None) -> Float[Array, "..."]:
        return jax.nn.leaky_relu(x, self.slope)


class Abs(eqx.Module):
    """|x|: an isometry; a walk keeps one bit per entry and loses no accuracy."""

    def __call__(self, x: Float[Array, "..."], *, key: Array | None = None) -> Float[Array, "..."]:
        return jnp.abs(x)


class MaxMin(eqx.Module):
    """The larger and the smaller of every two neighbouring channels: an isometry, one bit per pair.

    All the larger ones come first, then all the smaller ones. One comparison decides, so equal channels
    stay in their order, and the derivative at a tie is one-sided, in JAX and in a walk. `jnp.maximum`
    and `jnp.minimum` would make it the mean of both sides, which is singular: no walk passes that.

    **Example:**

    >>> import jax.numpy as jnp, moonwalk as mw
    >>> mw.nn.MaxMin()(jnp.array([1.0, 2.0, 5.0, 4.0])).tolist()
    [2.0, 5.0, 1.0, 4.0]
    """

    def __call__(
        self, x: Float[Array, "*batch c"], *, key: Array | None = None
    ) -> Float[Array, "*batch c"]:
        if x.ndim == 0 or x.shape[-1] % 2:
            raise ValueError(
                f"MaxMin: channels come in pairs, but the input has shape {x.shape}; take an even "
                "number of channels"
            )
        a, b = x[..., ::2], x[..., 1::2]
        in_order = a >= b
        return jnp.concatenate([jnp.where(in_order, a, b), jnp.where(in_order, b, a)], -1)


class PReLU(eqx.Module):
    """LeakyReLU with trainable slopes, which stay between 1/8 and 1 whatever an optimizer does.

    slope = 1/8 + 7/8 · sigmoid(raw). A trace does not see that bound; a plan made from concrete
    arguments does, and walks it with one bit per entry; under `jit` alone its cotangent is kept.

    **Arguments:**

    - `channels`: one slope per channel; None (the default): one slope for all.
    - `slope`: to start with.
    """

    raw: Float[Array, "*channels"]

    def __init__(self, channels: int | None = None, slope: float = 0.25):
        if channels is not None:
            settings.count("PReLU", "channels", channels)
        if not _LEAST < settings.finite("PReLU", "slope", slope) < 1:
            raise ValueError(f"PReLU: the slope starts between {_LEAST} and 1, got {slope}")
        share = (slope - _LEAST) / (1 - _LEAST)
        self.raw = jnp.full(() if channels is None else (channels,), math.log(share / (1 - share)))

    @property
    def slope(self) -> Float[Array, "*channels"]:
        """The slopes."""
        return _LEAST + (1 - _LEAST) * jax.nn.sigmoid(self.raw)

    def __call__(self, x: Float[Array, "..."], *, key: Array | None = None) -> Float[Array, "..."]:
        if self.raw.ndim and x.shape[-1:] != self.raw.shape:
            raise ValueError(
                f"PReLU: {self.raw.size} slopes, but the input has shape {x.shape}; channels come last"
            )
        return jnp.where(x >= 0, x, self.slope.astype(x.dtype) * x)


_LEAST = 1 / 8
