"""The Q of A = Q R with a positive diagonal of R, and its derivative by products alone.

With M = dA R⁻¹, from dA = dQ R + Q dR and dQᵀQ + QᵀdQ = 0,

    QᵀM = Ω + dR R⁻¹,    Ω = QᵀdQ antisymmetric, dR R⁻¹ upper triangular    ⇒    Ω = L - Lᵀ,
    dQ = (M - Q QᵀM) + Q Ω,

where L is QᵀM strictly below its diagonal. JAX's own derivative is this too, with a triangular solve for
M; here R⁻¹ is made by products, all layers of a stack and all diagonal blocks of a size side by side:

    [A B]⁻¹   [A⁻¹  -A⁻¹ B D⁻¹]
    [0 D]   = [0         D⁻¹  ],        blocks of 1, 2, 4, …

The reason: on a CPU, JAX's decompositions and solves of a *stack* occupy a thread of XLA's pool while
they wait for other threads of that pool. If as many run at once as there are threads, they wait for
ever, as two stacks of QR decompositions in one gradient did on two cores (JAX 0.10). So on a CPU a stack
is decomposed one matrix at a time, which was not slower, and nothing else here calls LAPACK.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap
from jaxtyping import Array, Float

_HIGHEST = lax.Precision.HIGHEST


@jax.custom_jvp
def q_factor(a: Float[Array, "*stack n m"]) -> Float[Array, "*stack n m"]:
    """Orthonormal columns, m ≤ n, that span what the first columns of `a` span, one after the other."""
    return _each(a.reshape((-1, *a.shape[-2:]))).reshape(a.shape)


@custom_vmap
def _each(a: Float[Array, "stack n m"]) -> Float[Array, "stack n m"]:
    return lax.platform_dependent(a, cpu=lambda a: lax.map(_signed, a), default=_signed)


@_each.def_vmap
def _each_vmap(size: int, batched: Any, a: Array) -> tuple[Array, bool]:
    """Under `vmap`, treat a stack of stacks as one longer stack, so that no batched call comes back."""
    del batched
    return _each(a.reshape((-1, *a.shape[-2:]))).reshape(a.shape), True


def _signed(a: Array) -> Array:
    q, r = jnp.linalg.qr(a)
    sign = jnp.where(jnp.diagonal(r, axis1=-2, axis2=-1) < 0, -1, 1).astype(a.dtype)
    return q * sign[..., None, :]


@q_factor.defjvp
def _q_factor_jvp(primals: Any, tangents: Any) -> tuple[Array, Array]:
    (a,), (da,) = primals, tangents
    # For second derivatives, R = QᵀA has the derivative of Q above.
    q = q_factor(a)
    r = jnp.triu(_product(q.mT, a))
    moved = _product(da, inverse_upper(r))
    inside = _product(q.mT, moved)
    below = jnp.tril(inside, -1)
    return q, moved + _product(q, below - below.mT - inside)


def inverse_upper(r: Float[Array, "*stack m m"]) -> Float[Array, "*stack m m"]:
    """The inverse of an upper triangular matrix, in ⌈log₂ m⌉ rounds of products."""
    m = r.shape[-1]
    size = 1 << max(m - 1, 0).bit_length()
    # Padded to a power of two with ones on the diagonal, which change nothing.
    r = jnp.zeros((*r.shape[:-2], size, size), r.dtype).at[..., :m, :m].set(r)
    r = r + jnp.diag((jnp.arange(size) >= m).astype(r.dtype))
    found = 1 / jnp.diagonal(r, axis1=-2, axis2=-1)[..., None, None]
    width = 1
    while width < size:
        upper, lower = found[..., ::2, :, :], found[..., 1::2, :, :]
        pairs = size // (2 * width)
        blocks = r.reshape((*r.shape[:-2], pairs, 2, width, pairs, 2, width))
        beside = jnp.einsum("...iaib->...iab", blocks[..., :, 0, :, :, 1, :])
        corner = -_product(_product(upper, beside), lower)
        found = jnp.concatenate(
            [
                jnp.concatenate([upper, corner], -1),
                jnp.concatenate([jnp.zeros_like(corner), lower], -1),
            ],
            -2,
        )
        width *= 2
    return found[..., 0, :m, :m]


def _product(a: Array, b: Array) -> Array:
    return jnp.matmul(a, b, precision=_HIGHEST)
