"""Dense layers: `dot_general` drawn at random, against NumPy's einsum; structures; gains."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from marks import slow
from weights import STRUCTURED, general, normal

import moonwalk as mw


@st.composite
def products(draw):
    """Axes in any number and order: which are batch, contracted and free, and on which side."""
    batch = [draw(st.integers(1, 3)) for _ in range(draw(st.integers(0, 2)))]
    inner = [draw(st.integers(1, 3)) for _ in range(draw(st.integers(1, 2)))]
    free = [draw(st.integers(1, 3)) for _ in range(draw(st.integers(0, 2)))]
    out = [draw(st.integers(1, 3)) for _ in range(draw(st.integers(0, 2)))]
    x_order = draw(st.permutations(range(len(batch) + len(free) + len(inner))))
    w_order = draw(st.permutations(range(len(batch) + len(inner) + len(out))))
    mode = draw(st.sampled_from(["jit", "jit", "vmap", "vmap", "eager"]))
    return batch, inner, free, out, x_order, w_order, draw(st.booleans()), mode, draw(st.integers(0, 99))


@pytest.mark.parametrize("draws", [8, slow(200)])
def test_drawn_products(draws):
    given(products())(settings(max_examples=draws)(_one_product))()


def _one_product(drawn):
    batch, inner, free, out, x_order, w_order, state_first, mode, seed = drawn
    n, n_out = math.prod(inner), math.prod(out)
    rng = np.random.default_rng(seed)
    if n_out <= n:
        stack = [np.asarray(general(n, n_out, seed=seed + b)) for b in range(math.prod(batch))]
        w = np.stack(stack).reshape((*batch, *inner, *out))
    else:
        w = rng.standard_normal((*batch, *inner, *out))
    h_out = rng.standard_normal((*batch, *free, *out))
    # h[b, f, i] = Σ_o h'[b, f, o] w[b, i, o], in letters
    letters = iter("abcdefghijklmnop")
    b, i, f, o = ("".join(next(letters) for _ in group) for group in (batch, inner, free, out))
    h = np.einsum(f"{b}{f}{o},{b}{i}{o}->{b}{f}{i}", h_out, w)

    x_axes, w_axes = np.argsort(x_order), np.argsort(w_order)
    nb, nf, ni = len(batch), len(free), len(inner)
    h, w = jnp.asarray(h.transpose(x_order)), jnp.asarray(w.transpose(w_order))
    x = jnp.asarray(rng.standard_normal(h.shape))
    x_batch, x_in = x_axes[:nb].tolist(), x_axes[nb + nf :].tolist()
    w_batch, w_in = w_axes[:nb].tolist(), w_axes[nb : nb + ni].tolist()
    # the output: batch axes, then the free axes of either side in the order in which they lie there
    free_axes = [nb + int(a) for a in np.argsort(x_axes[nb : nb + nf])]
    out_axes = [nb + nf + int(a) for a in np.argsort(w_axes[nb + ni :])]
    if state_first:
        fun = lambda x: lax.dot_general(x, w, ((x_in, w_in), (x_batch, w_batch)))
        truth = h_out.transpose([*range(nb), *free_axes, *out_axes])
    else:
        fun = lambda x: lax.dot_general(w, x, ((w_in, x_in), (w_batch, x_batch)))
        truth = h_out.transpose([*range(nb), *out_axes, *free_axes])

    if n_out > n:
        with pytest.raises(mw.NotSubmersiveError, match=f"{n} features become {n_out}"):
            mw.vijp(fun, x)
        return
    recover = lambda x, h: mw.vijp(fun, x)[1](h)
    if mode == "vmap":
        found = jax.jit(jax.vmap(recover))(jnp.stack([x, x]), jnp.stack([h, 2 * h]))[1] / 2
    else:
        found = (jax.jit(recover) if mode == "jit" else recover)(x, h)
    assert found.shape == truth.shape
    assert np.linalg.norm(found - truth) <= 1e-9 * np.linalg.norm(truth)


@pytest.mark.parametrize("structure", ["orthogonal", "lower", "upper", "diagonal"])
def test_a_declared_structure_is_used(structure):
    """Each structure solves by its own formula: the program has the operations it should."""
    w = STRUCTURED[structure](5)
    fun = lambda x: x @ mw.declare(w, structure)
    text = str(jax.make_jaxpr(lambda x: mw.vijp(fun, x)[1](x))(normal(2, 5)))
    assert ("triangular_solve" in text) == (structure in ("lower", "upper"))
    assert "householder_product" not in text  # no QR
    assert "geqrf" not in text


def test_undeclared_weights_are_solved_by_qr():
    text = str(jax.make_jaxpr(lambda x: mw.vijp(lambda x: x @ general(5), x)[1](x))(normal(2, 5)))
    assert "householder_product" in text or "qr" in text
