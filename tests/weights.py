"""Well-conditioned weights and other inputs for tests, each from a seed."""

import jax
import jax.numpy as jnp
import numpy as np


def normal(*shape, seed=0, dtype=jnp.float64):
    return jax.random.normal(jax.random.key(seed), shape, dtype)


def orthogonal(n_in, n_out=None, seed=0):
    """[in, out] with orthonormal columns (rows, if it is wide)."""
    n_out = n_in if n_out is None else n_out
    q = jnp.linalg.qr(normal(max(n_in, n_out), max(n_in, n_out), seed=seed))[0]
    return q[:n_in, :n_out]


def general(n_in, n_out=None, seed=0):
    """A full-rank matrix of no structure, condition number about 2."""
    n_out = n_in if n_out is None else n_out
    noise = normal(n_in, n_out, seed=seed + 1)
    return orthogonal(n_in, n_out, seed) + 0.2 * noise / jnp.sqrt(n_in)


def lower(n_in, n_out=None, seed=0):
    """Lower triangular in [in, out], its diagonal away from zero."""
    n_out = n_in if n_out is None else n_out
    eye = jnp.eye(n_in, n_out)
    return jnp.tril(normal(n_in, n_out, seed=seed), -1) / jnp.sqrt(n_in) + eye * (1.5 + 0.5 * eye)


def upper(n_in, n_out=None, seed=0):
    n_out = n_in if n_out is None else n_out
    return jnp.triu(normal(n_in, n_out, seed=seed), 1) / jnp.sqrt(n_in) + 1.5 * jnp.eye(n_in, n_out)


def diagonal(n_in, n_out=None, seed=0):
    n_out = n_in if n_out is None else n_out
    d = 1.5 + 0.5 * jnp.tanh(normal(min(n_in, n_out), seed=seed))
    return jnp.eye(n_in, n_out) * jnp.pad(d, (0, n_out - d.size))


STRUCTURED = {
    "orthogonal": orthogonal,
    "diagonal": diagonal,
    "lower": lower,
    "upper": upper,
    "general": general,
}


def kernel(taps, m, m_out, pivot, structure="general", groups=1, others=0.1, seed=0):
    """A kernel [k…, m/g, m'] (channels last) with a pivot of the given structure at tap `pivot`.

    The other taps are small, so that eliminating one window after the other is stable.
    """
    mg, og = m // groups, m_out // groups
    scale = others / np.prod(taps) / np.sqrt(mg)
    w = scale * normal(*taps, mg, groups, og, seed=seed)
    blocks = [STRUCTURED[structure](mg, og, seed=seed + 7 * g) for g in range(groups)]
    w = w.at[tuple(pivot)].set(jnp.stack(blocks, axis=1))
    return w.reshape(*taps, mg, m_out)
