"""Trainable kernels of orthogonal convolutions.

A convolution of stride 1 on an endless (or circular) axis is orthogonal if its kernel w[j] [in, out] is
*paraunitary*: rows of windows d apart have the products Σ_j w[j]ᵀ w[j+d] = I for d = 0, and 0 for all
others. A composition of such layers is such a layer, and the smallest one that spans two positions takes
some directions from one position and the others from its neighbour. With P a symmetric projector, P² = P
= Pᵀ, and P̄ = I - P, the kernel of two taps

    P + P̄ z        (z: one position on)

has w[0]ᵀw[0] + w[1]ᵀw[1] = P + P̄ = I and w[0]ᵀw[1] = P P̄ = 0. So k-1 of them along an axis, and an
orthogonal matrix Q for the channels, make a kernel of k taps. Along several axes factors for all of
them take turns: a pair (P + P̄ z₁)(R + R̄ z₂) is a kernel of 2 × 2 taps, P R, P R̄, P̄ R, P̄ R̄, and k-1
such pairs one of k × k. That is the block convolution of [1, 2], where kernels of this kind are
described.

**Projectors** are U Uᵀ with U from the QR of an unconstrained matrix [c, r], r = ⌊c/2⌋. All have this
rank, because no continuous path changes it; and since half of the channels move in each factor, the
kernel is centred on average.

**Centre.** Every second factor is P̄ + P z, with the axes in opposite order, because

    (P + P̄ z₁)(R + R̄ z₂) · (R̄ + R z₂)(P̄ + P z₁) = z₁ z₂:

two factors with equal projectors only shift by one position along each axis. A kernel of odd size
whose projectors are equal in pairs is Q at its centre tap and zero elsewhere, so training can start from
layers that do not mix positions (`paraunitary_init`); its taps lie symmetrically around that one.

**Accuracy.** K P = (K U) Uᵀ and K P̄ = K - K P, in float32 at least and without reduced products. If
rounding moves UᵀU away from I, the kernel's products move by as much, once for each factor. The error
depends only on the present raw arrays, so it does not accumulate in training.

1. Xiao, Bahri, Sohl-Dickstein, Schoenholz, Pennington: Dynamical isometry and a mean field theory of
   CNNs (ICML 2018).
2. Li, Haque, Anil, Lucas, Grosse, Jacobsen: Preventing gradient attenuation in Lipschitz constrained
   convolutional networks (NeurIPS 2019).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from .. import settings
from ..trace.declare import declare
from .constraints import orthogonal
from .inputs import checked_raw

_HIGHEST = lax.Precision.HIGHEST


class Raw(NamedTuple):
    """What a paraunitary kernel is made from: arrays that any optimizer may change."""

    projectors: Float[Array, "*stack k-1 dims c r"]
    matrix: Float[Array, "*stack c c"]


def paraunitary_init(key: Array, channels: int, taps: int, dims: int = 1, *, spread: float = 1.0) -> Raw:
    """Raw arrays of a random kernel.

    **Arguments:**

    - `channels`, `taps`, `dims`: the kernel will have `taps` taps along each of `dims` axes, and
        `channels` channels in and out.
    - `spread`: how far the kernel is from the identity. 0: the identity at the centre tap (for odd
        `taps`), zero elsewhere; 1: independent random projectors and matrix.
    """
    settings.counts("paraunitary_init", channels=channels)
    spread = settings.finite("paraunitary_init", "spread", spread)
    if channels < 2:
        raise ValueError(
            f"paraunitary_init: {channels} channel cannot be divided between neighbouring positions; "
            "take at least 2"
        )
    if not settings.is_count(taps) or not settings.is_count(dims):
        raise ValueError(
            f"paraunitary_init: a kernel has taps and axes, got {taps!r} taps, {dims!r} axes"
        )
    shared_key, own_key, matrix_key = jax.random.split(key, 3)
    # QR ignores the scale, but an optimizer's steps are relative to it, so columns have length one.
    std, shape = 1 / math.sqrt(channels), (dims, channels, channels // 2)
    shared = std * jax.random.normal(shared_key, (taps // 2, *shape))
    shared = jnp.repeat(shared, 2, axis=0)[: taps - 1]
    own = std * jax.random.normal(own_key, shared.shape)
    matrix = std * jax.random.normal(matrix_key, (channels, channels))
    eye = jnp.eye(channels)
    return Raw((1 - spread) * shared + spread * own, (1 - spread) * eye + spread * matrix)


def paraunitary_kernel(raw: Raw) -> Float[Array, "*stack *taps c c"]:
    """The kernel [taps…, in, out] of an orthogonal convolution, declared `"isometric"`.

    Stacked raw arrays give a stack of kernels. Use the kernel with circular or zero padding that keeps
    the size; with zeros, the edges of the output's cotangent leave no trace in the input's, and walks
    keep them.

    **Example:**

    >>> import jax, moonwalk as mw
    >>> raw = mw.nn.paraunitary_init(jax.random.key(0), channels=4, taps=3)
    >>> mw.nn.paraunitary_kernel(raw).shape
    (3, 4, 4)
    """
    if not isinstance(raw, Raw):
        raise TypeError(
            "paraunitary_kernel: takes what paraunitary_init returns, projectors and a matrix, got "
            f"{type(raw).__name__}"
        )
    checked_raw("paraunitary_kernel", raw.projectors, 4, shape="[..., taps - 1, dims, c, c // 2]")
    *stack, _, _, channels, rank = raw.projectors.shape
    if rank != channels // 2 or raw.matrix.shape != (*stack, channels, channels):
        raise ValueError(
            "paraunitary_kernel: raw arrays have the shapes [..., taps - 1, dims, c, c // 2] and "
            f"[..., c, c], got {raw.projectors.shape} and {raw.matrix.shape}; see paraunitary_init"
        )
    make = _kernel
    for _ in stack:  # vmap knows which axes are taps
        make = jax.vmap(make)
    return make(raw)


def _kernel(raw: Raw) -> Array:
    matrix, u = orthogonal(raw.matrix), orthogonal(raw.projectors)
    factors, dims, channels, _ = u.shape
    kernel = matrix.reshape((*[1] * dims, channels, channels))
    for i in range(factors):
        for axis in range(dims) if i % 2 == 0 else reversed(range(dims)):
            kernel = _times(kernel, u[i, axis], axis, complement=i % 2 == 1)
    return declare(kernel, "isometric")


def _times(kernel: Array, u: Array, axis: int, complement: bool) -> Array:
    """K · (P + P̄ z), or K · (P̄ + P z), with P = U Uᵀ and z along the axis."""
    here = jnp.matmul(jnp.matmul(kernel, u, precision=_HIGHEST), u.T, precision=_HIGHEST)
    on = kernel - here
    here, on = (on, here) if complement else (here, on)

    def padded(taps: Array, low: int, high: int) -> Array:
        return jnp.pad(taps, [(low, high) if a == axis else (0, 0) for a in range(taps.ndim)])

    return padded(here, 0, 1) + padded(on, 1, 0)
