"""docs/numerics.md §7: the corrected formulas hold, the printed ones do not.

w[j, c, c'] is a kernel with input channel c and output channel c'. Every truth is the convolution's own
definition (tests/reference.py); nothing here uses the library's rules, except to confirm them.
"""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest
from cases import conv
from reference import conv_vjp
from weights import kernel, lower

import moonwalk as mw

RNG = np.random.default_rng(0)


def _problem(k, s, p, m=4, n=9, seed=0):
    """A lower-triangular-pivot kernel [k, m, m'], h' and h = h' J in one dimension."""
    w = np.asarray(kernel((k,), m, m, (p,), "lower", others=1.0, seed=seed))
    out = (n + 2 * p - k) // s + 1
    h_out = RNG.standard_normal((1, out, 1, m))
    h = conv_vjp(h_out, w[:, None], [n], [s], [p], [1])
    return w, h_out[0, :, 0], h[0, :, 0]


def _corrected(w, h, s, p, out):
    """h'[i',c'] = (h[s·i',c'] - Σ_{c''<c'} w[p,c',c''] h'[i',c'']) / w[p,c',c']."""
    m = w.shape[-1]
    found = np.zeros((out, m))
    for i, c in itertools.product(range(out), range(m)):
        found[i, c] = (h[s * i, c] - w[p, c, :c] @ found[i, :c]) / w[p, c, c]
    return found


def _as_printed(w, h, s, p, out):
    """Algorithm 2 of the paper, in one dimension: reads w[p, c'', c] with c over C_in, no division."""
    m = w.shape[-1]
    found = np.zeros((out, m))
    for i in range(out):
        for c in range(m):
            for c1 in range(1, m):  # channel 0 is never assigned
                v = h[s * i, c1]
                for c2 in range(c1):
                    v -= w[p, c2, c] * found[i, c2]
                found[i, c1] = v
    return found


def _off(found, truth):
    return np.linalg.norm(found - truth) / np.linalg.norm(truth)


def test_1_parallel_formula():
    w, truth, h = _problem(k=3, s=2, p=1)
    assert _off(_corrected(w, h, 2, 1, len(truth)), truth) < 1e-12
    assert _off(_as_printed(w, h, 2, 1, len(truth)), truth) > 0.1


@pytest.mark.parametrize(("k", "s", "p"), [(3, 2, 0), (4, 2, 1), (5, 2, 1)])
def test_1_the_lemma_alone_is_not_parallel(k, s, p):
    """These satisfy the lemma (s > p) but not k ≤ p + s: they need a spatial recursion."""
    w, truth, h = _problem(k, s, p)
    assert _off(_corrected(w, h, s, p, len(truth)), truth) > 1e-3
    # eliminating forward, with the earlier windows' share taken off first, is right
    m, found = w.shape[-1], np.zeros_like(truth)
    for i in range(len(truth)):
        rest = h[s * i].copy()
        for j in range(p + s, k, s):
            if i - (j - p) // s >= 0:
                rest -= w[j] @ found[i - (j - p) // s]
        found[i] = np.linalg.solve(w[p], rest)
    assert _off(found, truth) < 1e-12
    assert m == found.shape[1]
    fun = conv(jnp.asarray(w), s, (p, p))
    recovered = mw.vijp(lambda x: fun(x), jnp.zeros((1, 9, 4)))[1](jnp.asarray(h)[None])
    assert _off(np.asarray(recovered[0]), truth) < 1e-9


def test_2_the_index_sum_is_not_an_order():
    """Σi' + c' must grow with what is needed: a later channel of an earlier window breaks it."""
    w, truth, h = _problem(k=5, s=2, p=1)
    out, m = truth.shape
    known = np.full((out, m), np.nan)
    for t in range(out + m - 1):
        wave = [(i, t - i) for i in range(out) if 0 <= t - i < m]
        new = {}
        for i, c in wave:
            value = h[2 * i, c] - w[1, c, :c] @ known[i, :c]
            for j in range(3, 5, 2):
                if i - (j - 1) // 2 >= 0:
                    value -= w[j, c] @ known[i - (j - 1) // 2]  # all channels: some are not known yet
            new[i, c] = value / w[1, c, c]
        for place, value in new.items():
            known[place] = value
    assert np.isnan(known).any()


def test_3_fragmental_formula():
    """h'[i',c'] = (h[i'-p,c'] - Σ_{c<c'} w[0,c',c] h'[i',c] - Σ_{j≥1} Σ_c w[j,c',c] h'[i'-j,c]) / w[0,c',c']."""
    k, m, n, p = 3, 4, 12, 1
    w = np.asarray(kernel((k,), m, m, (0,), "lower", others=1.0))
    truth = RNG.standard_normal((n, m))
    h = conv_vjp(truth[None, :, None], w[:, None], [n], [1], [p], [1])[0, :, 0]
    found, printed = truth.copy(), truth.copy()
    found[k - 1 :], printed[k - 1 :] = np.nan, np.nan  # only the first k - 1 slices are stored
    for i in range(k - 1, n):
        for c in range(m):
            value = h[i - p, c] - w[0, c, :c] @ found[i, :c]
            value -= sum(w[j, c] @ found[i - j] for j in range(1, k))
            found[i, c] = value / w[0, c, c]
            # as printed in the text: h'_{i',c'} on the right, and only channels c ≥ c' of the other taps
            printed[i, c] = h[i - 1, c] - sum(
                w[j, c1, c] * printed[i - j, c] for j in range(1, k) for c1 in range(c, m)
            )
    assert _off(found, truth) < 1e-10
    assert _off(printed, truth) > 0.1


def test_4_the_pivot_is_lower_in_in_out():
    """w[p, c, c'] = 0 for c < c' is lower triangular in [in, out]; an upper one breaks the elimination."""
    w, truth, h = _problem(k=3, s=2, p=1)
    assert np.allclose(w[1], np.tril(w[1]))
    flipped = w.copy()
    flipped[1] = w[1].T
    h_flipped = conv_vjp(truth[None, :, None], flipped[:, None], [9], [2], [1], [1])[0, :, 0]
    assert _off(_corrected(flipped, h_flipped, 2, 1, len(truth)), truth) > 1e-2


def test_4_the_spatial_bound_is_not_automatic():
    """n > s(n'-1) fails for (n, k, s, p) = (4, 3, 3, 2 at the end …): the pivot row is missing."""
    n, k, s, low, high = 3, 3, 2, 1, 3
    out = (n + low + high - k) // s + 1
    assert s > low and k > low and not n > s * (out - 1)
    w = np.asarray(kernel((k,), 2, 2, (1,), "lower"))
    jacobian = np.stack(
        [
            conv_vjp(row.reshape(1, out, 1, 2), w[:, None], [n], [s], [low], [1]).ravel()
            for row in np.eye(out * 2)
        ]
    )
    assert np.linalg.matrix_rank(jacobian) < out * 2
    with pytest.raises(mw.NotSubmersiveError, match="no pivot tap"):
        mw.vijp(conv(jnp.asarray(w), s, (low, high)), jnp.zeros((1, n, 2)))


@pytest.mark.parametrize("k", range(1, 6))
def test_4_the_wider_condition(k):
    """A tap q ≥ p with s(n'-1)+q-p < n and q < s or q+s ≥ k makes the convolution submersive."""
    n = 9
    for s, p, q in itertools.product(range(1, 4), range(k), range(k)):
        if (n + 2 * p - k) < 0:
            continue
        out = (n + 2 * p - k) // s + 1
        if not (q >= p and s * (out - 1) + q - p < n and (q < s or q + s >= k)):
            continue
        w = np.asarray(kernel((k,), 2, 2, (q,), "lower", seed=k))[:, None]
        jacobian = np.stack(
            [
                conv_vjp(row.reshape(1, out, 1, 2), w, [n], [s], [p], [1]).ravel()
                for row in np.eye(out * 2)
            ]
        )
        assert np.linalg.matrix_rank(jacobian) == out * 2, (s, p, q)


def test_5_a_residual_sum_is_not_submersive_because_its_branch_is():
    branch = lambda x: x @ -jnp.eye(3)  # 1×1 convolution with w = -1: orthogonal
    x = jnp.ones((2, 3))
    mw.testing.check_vijp(branch, x)
    with pytest.raises(
        mw.NotSubmersiveError, match="x \\+ f\\(x\\) is not submersive just because f is"
    ):
        mw.vijp(lambda x: x + branch(x), x)


def test_6_the_conditions_are_not_necessary():
    """A same-shape convolution (p = s = 1) is generically invertible: solved on request."""
    w = jnp.asarray(kernel((3,), 2, 2, (1,), "general", others=0.5))
    x = jnp.zeros((1, 6, 2))
    with pytest.raises(mw.NotSubmersiveError, match="stride > padding"):
        mw.vijp(conv(w, 1, (1, 1)), x)
    mw.testing.check_vijp(conv(w, 1, (1, 1)), x, fallback=mw.MatrixFree())


def test_lower_helper_is_what_it_says():
    assert np.allclose(lower(5), np.tril(lower(5)))
