"""Well-conditioned weights and other inputs for tests, each from a seed.

Made by NumPy: JAX would compile every operation for every shape, and where a test makes its weights
inside the function that it traces, compile them with it.
"""

import jax.numpy as jnp
import numpy as np


def _normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape)


def _orthogonal(n_in, n_out=None, seed=0):
    n_out = n_in if n_out is None else n_out
    q = np.linalg.qr(_normal(max(n_in, n_out), max(n_in, n_out), seed=seed))[0]
    return q[:n_in, :n_out]


def _general(n_in, n_out=None, seed=0):
    n_out = n_in if n_out is None else n_out
    noise = _normal(n_in, n_out, seed=seed + 1)
    return _orthogonal(n_in, n_out, seed) + 0.2 * noise / np.sqrt(n_in)


def _lower(n_in, n_out=None, seed=0):
    n_out = n_in if n_out is None else n_out
    eye = np.eye(n_in, n_out)
    return np.tril(_normal(n_in, n_out, seed=seed), -1) / np.sqrt(n_in) + eye * (1.5 + 0.5 * eye)


def _upper(n_in, n_out=None, seed=0):
    n_out = n_in if n_out is None else n_out
    return np.triu(_normal(n_in, n_out, seed=seed), 1) / np.sqrt(n_in) + 1.5 * np.eye(n_in, n_out)


def _diagonal(n_in, n_out=None, seed=0):
    n_out = n_in if n_out is None else n_out
    d = 1.5 + 0.5 * np.tanh(_normal(min(n_in, n_out), seed=seed))
    return np.eye(n_in, n_out) * np.pad(d, (0, n_out - d.size))


_STRUCTURED = {
    "orthogonal": _orthogonal,
    "diagonal": _diagonal,
    "lower": _lower,
    "upper": _upper,
    "general": _general,
}


def normal(*shape, seed=0, dtype=jnp.float64):
    return jnp.asarray(_normal(*shape, seed=seed), dtype)


def orthogonal(n_in, n_out=None, seed=0):
    """[in, out] with orthonormal columns (rows, if it is wide)."""
    return jnp.asarray(_orthogonal(n_in, n_out, seed))


def general(n_in, n_out=None, seed=0):
    """A full-rank matrix of no structure, condition number about 2."""
    return jnp.asarray(_general(n_in, n_out, seed))


def lower(n_in, n_out=None, seed=0):
    """Lower triangular in [in, out], its diagonal away from zero."""
    return jnp.asarray(_lower(n_in, n_out, seed))


def upper(n_in, n_out=None, seed=0):
    return jnp.asarray(_upper(n_in, n_out, seed))


def diagonal(n_in, n_out=None, seed=0):
    return jnp.asarray(_diagonal(n_in, n_out, seed))


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
    w = scale * _normal(*taps, mg, groups, og, seed=seed)
    w[tuple(pivot)] = np.stack(
        [_STRUCTURED[structure](mg, og, seed + 7 * g) for g in range(groups)], axis=1
    )
    return jnp.asarray(w.reshape(*taps, mg, m_out))
