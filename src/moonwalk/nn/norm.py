"""Normalisation."""

from __future__ import annotations

import equinox as eqx
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from .. import _jax, settings
from .inputs import checked


class GroupNorm(eqx.Module):
    """Mean 0 and variance 1 over each group of channels and the `dims` axes before the last.

    A walk keeps two numbers per group of the output's cotangent, and the input unless that is
    recomputed.

    **Arguments:**

    - `groups`: how many; 1 is LayerNorm over everything.
    - `channels`
    - `dims`: how many spatial axes there are.
    - `eps`: added to the variance.
    """

    scale: Float[Array, "channels"]
    bias: Float[Array, "channels"]
    groups: int = eqx.field(static=True)
    dims: int = eqx.field(static=True)
    eps: float = eqx.field(static=True)

    def __init__(self, groups: int, channels: int, dims: int = 2, eps: float = 1e-5):
        settings.counts("GroupNorm", groups=groups, channels=channels)
        settings.count("GroupNorm", "dims", dims, 0)
        rule = "is added to a variance, and is no negative number"
        eps = settings.number("GroupNorm", "eps", eps, rule, lambda v: 0 <= v < float("inf"))
        if channels % groups:
            raise ValueError(f"GroupNorm: {channels} channels do not divide into {groups} groups")
        self.scale, self.bias = jnp.ones(channels), jnp.zeros(channels)
        self.groups, self.dims, self.eps = groups, dims, eps

    def __call__(self, x: Float[Array, "..."], *, key: Array | None = None) -> Float[Array, "..."]:
        checked("GroupNorm", x, self.dims, self.scale.size)
        grouped = x.reshape((*x.shape[:-1], self.groups, -1)).astype(_jax.working_dtype(x.dtype))
        axes = (*range(-2 - self.dims, -2), -1)
        centred = grouped - jnp.mean(grouped, axes, keepdims=True)
        variance = jnp.mean(centred**2, axes, keepdims=True)
        normal = (centred * lax.rsqrt(variance + self.eps)).reshape(x.shape).astype(x.dtype)
        return normal * self.scale.astype(x.dtype) + self.bias.astype(x.dtype)
