"""Gains follow docs/numerics.md §1, and predict the error that a walk really has."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import conv, declared_conv, max_min
from jax import lax
from weights import diagonal, general, kernel, lower, normal, orthogonal

import moonwalk as mw
from moonwalk.rules import chain
from moonwalk.trace import graph, staging

X = normal(3, 6)


def gains(fun, x, measured=False):
    staged = staging.stage(fun, x)
    known = dict(zip(staged.jaxpr.constvars, staged.consts, strict=True))
    cut = graph.build(staged.jaxpr, staged.jaxpr.invars, staged.jaxpr.outvars, consts=known)
    composed = chain.build(cut)
    env, _ = composed.forward({**known, staged.jaxpr.invars[0]: x})
    return [
        link.rule.gain(link.block, [env[v] for v in link.block.operands] if measured else None)
        for link in composed.links
    ]


@pytest.mark.parametrize("alpha", [0.01, 0.05, 0.1, 0.3, 0.5])
def test_leaky_relu(alpha):
    (gain,) = gains(lambda x: jax.nn.leaky_relu(x, alpha), X)
    assert gain.factor == pytest.approx((1 + alpha**2) / (2 * alpha), rel=1e-6)
    assert not gain.mixes


@pytest.mark.parametrize(
    "fun",
    [
        jnp.abs,
        mw.nn.MaxMin(),
        lambda x: x.T,
        lambda x: jnp.sort(x),
        lambda x: -x,
        lambda x: x + 1,
        lambda x: x.sum(0),
    ],
)
def test_isometries_and_means_have_gain_one(fun):
    assert [g.factor for g in gains(fun, X)] == pytest.approx([1.0] * len(gains(fun, X)))


def test_what_is_singular_at_ties_has_no_bounded_gain():
    worst = max(gains(max_min, X), key=lambda g: g.factor)
    assert worst.factor == np.inf
    assert worst.reason.startswith("at a tie of two values JAX averages their derivatives")


@pytest.mark.parametrize(
    "name", ["tanh", "sigmoid", "softplus", "elu", "gelu", "silu", "soft_sign", "exp"]
)
def test_derivatives_that_can_vanish_have_no_bounded_gain(name):
    fun = getattr(jax.nn, name, None) or getattr(jnp, name)
    assert max(g.factor for g in gains(fun, X)) == np.inf


def test_bounded_smooth_derivatives_have_a_gain():
    (gain,) = gains(lambda x: x + jnp.sin(x) / 2, X)  # between 1/2 and 3/2
    assert gain.factor == pytest.approx((1 / 9 + 1) / (2 / 3), rel=0.02)


def test_undeclared_weights_are_unknown_until_measured():
    w = general(6)
    assert gains(lambda x: x @ w, X)[0].factor == np.inf
    (gain,) = gains(lambda x: x @ w, X, measured=True)
    s = np.linalg.svd(w, compute_uv=False)
    assert gain.factor == pytest.approx(np.sqrt(np.mean(s**2) * np.mean(s**-2.0)), rel=1e-6)
    assert gain.mixes


def test_declared_weights():
    static = lambda w, s: gains(lambda x: x @ mw.declare(w, s), X)[0]
    assert (static(orthogonal(6), "orthogonal").factor, static(orthogonal(6), "orthogonal").mixes) == (
        1.0,
        True,
    )
    assert (static(diagonal(6), "diagonal").factor, static(diagonal(6), "diagonal").mixes) == (
        1.0,
        False,
    )
    assert static(lower(6), "lower").factor == np.inf
    (gain,) = gains(lambda x: x @ mw.declare(lower(6), "lower"), X, measured=True)
    p = np.asarray(lower(6))
    assert gain.factor == pytest.approx(
        np.linalg.norm(p) * np.linalg.norm(np.linalg.inv(p)) / 6, rel=1e-6
    )


def test_convolutions():
    k = kernel((3,), 4, 4, (1,), "diagonal")
    (gain,) = gains(declared_conv(k, "diagonal", 2, (1, 1)), normal(1, 9, 4))
    assert (gain.factor, gain.mixes) == (1.0, False)
    k = kernel((3,), 4, 4, (1,), "lower")
    (gain,) = gains(declared_conv(k, "lower", 2, (1, 1)), normal(1, 9, 4), measured=True)
    p = np.asarray(k[1])
    assert gain.factor == pytest.approx(
        np.linalg.norm(p) * np.linalg.norm(np.linalg.inv(p)) / 4, rel=1e-6
    )
    # an unstable recursion shows: He-scaled causal taps, ρ > 1
    wild = kernel((3,), 4, 4, (2,), "orthogonal", others=9.0)
    tame = kernel((3,), 4, 4, (2,), "orthogonal", others=0.3)
    long = normal(1, 40, 4)
    measured = [gains(conv(w, 1, (2, 0)), long, measured=True)[0].factor for w in (wild, tame)]
    assert measured[0] > 1e3
    assert measured[1] < 1.5


def test_cumsum():
    (gain,) = gains(lambda x: jnp.cumsum(x, 1), X)
    p = np.tril(np.ones((6, 6)))
    assert gain.factor == pytest.approx(np.linalg.norm(p) * np.linalg.norm(np.linalg.inv(p)) / 6)


def test_scan_multiplies():
    ws = jnp.stack([orthogonal(6)] * 3)
    body = lambda c, w: (jax.nn.leaky_relu(c @ mw.declare(w, "orthogonal"), 0.5), None)
    (gain,) = gains(lambda x: lax.scan(body, x, ws)[0], X)
    assert gain.factor == pytest.approx(1.25**3)


def test_the_gain_of_a_scan_may_overflow():
    """400 layers of gain 50: no float holds the product."""

    def layers(x):
        w = mw.declare(orthogonal(6), "orthogonal")
        return lax.scan(lambda c, _: (jax.nn.leaky_relu(c @ w, 0.01), None), x, length=400)[0]

    opaque = jax.custom_jvp(layers)
    opaque.defjvp(lambda primals, tangents: jax.jvp(layers, primals, tangents))
    for fun in (layers, opaque):
        (gain,) = gains(fun, X)
        assert (gain.factor, gain.mixes) == (np.inf, True)
    mw.plan(lambda w, x: jnp.sum(opaque(x * w) ** 2), jnp.ones(6), X)


def test_the_formula_predicts_the_error_of_a_walk():
    """float32, orthogonal pivots, LeakyReLU: error after i layers ≈ 1e-7 · gain^(i-1), docs/numerics.md §1."""
    alpha, depth, n = 0.2, 8, 64
    ws = [orthogonal(n, seed=s).astype(jnp.float32) for s in range(depth)]

    def net(x):
        for w in ws:
            x = jax.nn.leaky_relu(x @ mw.declare(w, "orthogonal"), alpha)
        return x

    x = normal(32, n, dtype=jnp.float32)
    y, vjp_fun = jax.vjp(net, x)
    truth = normal(*y.shape, seed=1, dtype=jnp.float32)
    found = mw.vijp(net, x)[1](*vjp_fun(truth))
    error = float(jnp.linalg.norm(found - truth) / jnp.linalg.norm(truth))
    factor = float(np.prod([g.factor for g in gains(net, x)[:-1]]))
    assert 0.1 < error / (1e-7 * factor) < 10
