"""Convolutions: drawn at random, against the definition in NumPy; verdicts; pivots."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import conv
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from marks import slow
from reference import conv_vjp
from weights import general, kernel, normal

import moonwalk as mw
from moonwalk.rules.windows import Axis, plan_axis


@st.composite
def axes(draw):
    """(n, n', k, s, p_low, p_high, r) of one axis, of every family and of none."""
    family = draw(st.sampled_from(["lemma", "causal", "anti-causal", "patchify", "valid", "any"]))
    k = draw(st.integers(1, 4))
    r = draw(st.integers(1, 2))
    reach = r * (k - 1)
    low = high = 0
    if family == "lemma":
        r, reach = 1, k - 1
        low = draw(st.integers(0, k - 1))
        s = draw(st.integers(low + 1, low + 3))
        high = draw(st.integers(0, k))
    elif family == "causal":
        s, low = 1, reach
    elif family == "anti-causal":
        s, high = 1, reach
    elif family == "patchify":
        r, reach = 1, k - 1
        s = draw(st.integers(k, k + 1))
    elif family == "valid":
        s = draw(st.integers(1, 3))
    else:
        s, low, high = draw(st.integers(1, 3)), draw(st.integers(0, 3)), draw(st.integers(0, 3))
    n = draw(st.integers(max(1, reach + 1 - low - high), reach + 5))
    out = (n + low + high - reach - 1) // s + 1
    return n, out, k, s, low, high, r


@st.composite
def convolutions(draw):
    """A convolution's geometry, layout and mode."""
    d = draw(st.integers(1, 3))
    chosen = [draw(axes()) for _ in range(d)]
    groups, m, m_out = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 3))
    layouts = [draw(st.permutations(range(d + 2))) for _ in range(3)]
    mode = draw(st.sampled_from(["jit", "jit", "vmap", "vmap", "eager"]))
    return chosen, groups, m, m_out, layouts, mode, draw(st.integers(0, 1000))


def _lemma_holds(chosen, m, m_out):
    return m_out <= m and all(
        s > low and k > low and n > s * (out - 1) and r == 1 for n, out, k, s, low, _, r in chosen
    )


def _run(fun, x, h, mode):
    recover = lambda x, h: mw.vijp(fun, x)[1](h)
    if mode == "vmap":
        return jax.jit(jax.vmap(recover))(jnp.stack([x, x]), jnp.stack([h, -h]))[1] * -1
    return (jax.jit(recover) if mode == "jit" else recover)(x, h)


@pytest.mark.parametrize("draws", [8, slow(200)])
def test_drawn_convolutions(draws):
    """At least half of them must be such as can be recovered."""
    outcomes = {"recovered": 0, "refused": 0}

    @given(convolutions())
    @settings(max_examples=draws)
    def run(drawn):
        outcomes[_one_convolution(drawn)] += 1

    run()
    assert outcomes["recovered"] >= 0.5 * sum(outcomes.values()), outcomes


def _one_convolution(drawn):
    chosen, groups, m, m_out, layouts, mode, seed = drawn
    d = len(chosen)
    sizes, outs, taps, strides, lows, highs, dilations = zip(*chosen, strict=True)
    rng = np.random.default_rng(seed)
    # Small taps everywhere, and well-conditioned ones where a pivot can be.
    w = 0.1 * rng.standard_normal((*taps, groups, m, m_out)) / np.prod(taps)
    plans = [plan_axis(Axis(n, out, k, s, low, r), single=False) for n, out, k, s, low, _, r in chosen]
    if all(plans):
        pivots = np.ix_(*(p.taps for p in plans))
        count = int(np.prod([len(p.taps) for p in plans]))
        if count * m >= m_out:
            blocks = [np.asarray(general(count * m, m_out, seed=seed + g)) for g in range(groups)]
            shape = (*(len(p.taps) for p in plans), m, m_out)
            w[pivots] = np.stack([b.reshape(shape) for b in blocks], axis=-3)

    numbers = lax.ConvDimensionNumbers(*(tuple(spec) for spec in layouts))
    lhs_spec, rhs_spec, out_spec = numbers
    place = lambda a, spec: jnp.asarray(np.transpose(a, np.argsort([spec[0], spec[1], *spec[2:]])))

    flat_w = np.moveaxis(w.transpose(*range(d), d + 1, d, d + 2).reshape(*taps, m, -1), (-1, -2), (0, 1))
    kernel_ = place(flat_w, rhs_spec)
    h_out = rng.standard_normal((2, *outs, groups, m_out))
    h = conv_vjp(h_out, w, sizes, strides, lows, dilations)
    channels_second = lambda a: np.moveaxis(a.reshape(*a.shape[: d + 1], -1), -1, 1)
    truth, h = place(channels_second(h_out), out_spec), place(channels_second(h), lhs_spec)
    x = jnp.asarray(rng.standard_normal(h.shape))

    def fun(x):
        return lax.conv_general_dilated(
            x, kernel_, strides, list(zip(lows, highs, strict=True)), rhs_dilation=dilations,
            dimension_numbers=numbers, feature_group_count=groups,
        )  # fmt: skip

    try:
        found = _run(fun, x, h, mode)
    except mw.NotSubmersiveError:
        assert not _lemma_holds(chosen, m, m_out), "the paper's lemma promises this one"
        return "refused"
    assert np.linalg.norm(found - truth) <= 1e-9 * np.linalg.norm(truth)
    return "recovered"


@pytest.mark.parametrize(
    ("axis", "taps", "direction"),
    [
        (Axis(9, 5, 3, 2, 1), (1,), 0),  # the lemma, k ≤ p + s
        (Axis(9, 4, 4, 2, 1), (1,), 1),  # the lemma, k > p + s
        (Axis(9, 4, 3, 2, 0), (1,), 0),  # the wider condition beats the lemma's tap 0
        (Axis(8, 4, 2, 2, 0), (0, 1), 0),  # patchify: the whole window
        (Axis(9, 9, 3, 1, 2), (2,), -1),  # causal: from the end
        (Axis(9, 9, 3, 1, 0), (0,), 1),  # anti-causal: from the start
        (Axis(9, 9, 3, 1, 4, 2), (2,), -1),  # causal and dilated
        (Axis(9, 9, 3, 1, 1), None, None),  # same padding, stride 1
        (Axis(8, 4, 3, 2, 2), (2,), -1),  # stride = padding, but q + s ≥ k: from the end
        (Axis(7, 4, 5, 2, 2), None, None),  # stride = padding, and no tap fits
    ],
)
def test_pivots(axis, taps, direction):
    plan = plan_axis(axis, single=False)
    assert (plan and plan.taps, plan and plan.direction) == (taps, direction)


def test_a_declared_pivot_is_the_lemmas_tap():
    plan = plan_axis(Axis(9, 4, 3, 2, 0), single=True)
    assert (plan.taps, plan.direction) == ((0,), 1)


def test_patchify_expands_up_to_the_patch():
    x = normal(1, 4, 4, 3)
    w = general(12, 12).reshape(2, 2, 3, 12)
    mw.testing.check_vijp(conv(w, 2, (0, 0)), x)
    too_wide = normal(2, 2, 3, 13)
    with pytest.raises(mw.NotSubmersiveError, match="channels expand: 13 outputs"):
        mw.vijp(conv(too_wide, 2, (0, 0)), x)


def test_long_causal_convolution_is_stable():
    """docs/numerics.md §5: Σ‖T_a‖ < 1 suffices at every length."""
    w = kernel((3,), 4, 4, (2,), "orthogonal", others=0.5)
    x = normal(1, 512, 4)
    y, vjp = jax.vjp(conv(w, 1, (2, 0)), x)
    truth = normal(*y.shape, seed=1)
    found = mw.vijp(conv(w, 1, (2, 0)), x)[1](*vjp(truth))
    assert float(jnp.linalg.norm(found - truth) / jnp.linalg.norm(truth)) < 1e-12
