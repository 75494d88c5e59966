"""Well-conditioned weights and other inputs for tests, each from a seed.

Made by NumPy: JAX would compile every operation for every shape, and where a test makes its weights
inside the function that it traces, compile them with it.
"""

import functools

import jax.numpy as jnp
import numpy as np


def by_numpy(make):
    """A maker of JAX arrays; `__wrapped__` makes NumPy's."""
    return functools.wraps(make)(lambda *args, **options: jnp.asarray(make(*args, **options)))


@by_numpy
def normal(*shape, seed=0, dtype=np.float64):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


@by_numpy
def orthogonal(n_in, n_out=None, seed=0):
    """[in, out] with orthonormal columns (rows, if it is wide)."""
    n_out = n_in if n_out is None else n_out
    q = np.linalg.qr(normal.__wrapped__(max(n_in, n_out), max(n_in, n_out), seed=seed))[0]
    return q[:n_in, :n_out]


@by_numpy
def general(n_in, n_out=None, seed=0):
    """A full-rank matrix of no structure, condition number about 2."""
    n_out = n_in if n_out is None else n_out
    noise = normal.__wrapped__(n_in, n_out, seed=seed + 1)
    return orthogonal.__wrapped__(n_in, n_out, seed) + 0.2 * noise / np.sqrt(n_in)


@by_numpy
def lower(n_in, n_out=None, seed=0):
    """Lower triangular in [in, out], its diagonal away from zero."""
    n_out = n_in if n_out is None else n_out
    eye = np.eye(n_in, n_out)
    below = np.tril(normal.__wrapped__(n_in, n_out, seed=seed), -1)
    return below / np.sqrt(n_in) + eye * (1.5 + 0.5 * eye)


@by_numpy
def upper(n_in, n_out=None, seed=0):
    n_out = n_in if n_out is None else n_out
    above = np.triu(normal.__wrapped__(n_in, n_out, seed=seed), 1)
    return above / np.sqrt(n_in) + 1.5 * np.eye(n_in, n_out)


@by_numpy
def diagonal(n_in, n_out=None, seed=0):
    n_out = n_in if n_out is None else n_out
    d = 1.5 + 0.5 * np.tanh(normal.__wrapped__(min(n_in, n_out), seed=seed))
    return np.eye(n_in, n_out) * np.pad(d, (0, n_out - d.size))


STRUCTURED = {
    "orthogonal": orthogonal,
    "diagonal": diagonal,
    "lower": lower,
    "upper": upper,
    "general": general,
}


@by_numpy
def kernel(taps, m, m_out, pivot, structure="general", groups=1, others=0.1, seed=0):
    """A kernel [k…, m/g, m'] (channels last) with a pivot of the given structure at tap `pivot`.

    The other taps are small, so that eliminating one window after the other is stable.
    """
    mg, og = m // groups, m_out // groups
    scale = others / np.prod(taps) / np.sqrt(mg)
    w = scale * normal.__wrapped__(*taps, mg, groups, og, seed=seed)
    make = STRUCTURED[structure].__wrapped__
    w[tuple(pivot)] = np.stack([make(mg, og, seed + 7 * g) for g in range(groups)], axis=1)
    return w.reshape(*taps, mg, m_out)
