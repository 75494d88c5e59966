"""Reversible networks: couplings, and segments whose states are had again from their outputs."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from marks import slow

import moonwalk as mw
from moonwalk.nn import Coupling

WIDTH, ROWS = 6, 16


class Mixer(eqx.Module):
    """Nothing about it is submersive."""

    w: jax.Array
    v: jax.Array

    def __init__(self, key, scale=0.3, width=WIDTH):
        self.w, self.v = (scale * jax.random.normal(k, (width, width)) for k in jax.random.split(key))

    def __call__(self, x, *, key=None):
        x = jax.nn.relu(x @ self.w)
        if key is not None:
            x = x * jax.random.bernoulli(key, 0.5, x.shape)
        return x @ self.v


def layer(key):
    f, g = jax.random.split(key)
    return Coupling(Mixer(f), Mixer(g))


DEPTH = 5
LAYERS = eqx.filter_vmap(layer)(jax.random.split(jax.random.key(0), DEPTH))
PARAMS, STATIC = eqx.partition(LAYERS, eqx.is_array)
STEM = jax.random.normal(jax.random.key(1), (3, 2 * WIDTH)) / 2
X = jax.random.normal(jax.random.key(2), (ROWS, 3))


def at(params, i):
    return eqx.combine(jax.tree.map(lambda a: a[i], params), STATIC)


def scanned(params, stem, x):
    x, _ = jax.lax.scan(lambda x, p: (eqx.combine(p, STATIC)(x), None), jnp.sin(x @ stem), params)
    return jnp.mean(x**3)


def scanned_backwards(params, stem, x):
    step = lambda x, p: (eqx.combine(p, STATIC)(x), None)
    return jnp.mean(jax.lax.scan(step, jnp.sin(x @ stem), params, reverse=True)[0] ** 3)


def looped(params, stem, x):
    x = jnp.sin(x @ stem)
    for i in range(DEPTH):
        x = at(params, i)(x)
    return jnp.mean(x**3)


def pairs(params, stem, x):
    x = jnp.split(jnp.sin(x @ stem), 2, -1)
    x, _ = jax.lax.scan(lambda x, p: (eqx.combine(p, STATIC)(tuple(x)), None), tuple(x), params)
    return jnp.mean(x[0] ** 3 + x[1])


def both_streams(params, stem, x):
    """One state starts both carries."""
    x = jnp.sin(x @ stem[:, :WIDTH])
    x, _ = jax.lax.scan(lambda x, p: (eqx.combine(p, STATIC)(x), None), (x, x), params)
    return jnp.mean(x[0] ** 3 + x[1])


def mapped(params, stem, x):
    def one(x):
        x = jnp.sin(x @ stem)
        return jax.lax.scan(lambda x, p: (eqx.combine(p, STATIC)(x), None), x, params)[0]

    return jnp.mean(jax.vmap(one)(x) ** 3)


def from_data(params, stem, x):
    x = jnp.tile(x, (1, 4))
    x, _ = jax.lax.scan(lambda x, p: (eqx.combine(p, STATIC)(x), None), x, params)
    return jnp.mean(x**3) + jnp.sum(stem)


def with_closures(params, stem, x):
    """Plain functions that close over what is differentiated."""
    x = jnp.sin(x @ stem)

    def step(x, p):
        f, g = p.f, p.g
        layer = Coupling(lambda x: jnp.tanh(x @ f.w) @ f.v, lambda x: jnp.tanh(x @ g.w) @ g.v)
        return layer(x), None

    return jnp.mean(jax.lax.scan(step, x, params)[0] ** 3)


def with_keys(params, stem, x):
    keys = jax.random.split(jax.random.key(7), DEPTH)
    step = lambda x, pair: (eqx.combine(pair[0], STATIC)(x, key=pair[1]), None)
    return jnp.mean(jax.lax.scan(step, jnp.sin(x @ stem), (params, keys))[0] ** 3)


def one_half(params, stem, x):
    """Of the last pair, one array alone is read."""
    x = tuple(jnp.split(jnp.sin(x @ stem), 2, -1))
    x, _ = jax.lax.scan(lambda x, p: (eqx.combine(p, STATIC)(x), None), x, params)
    return jnp.mean(x[0] ** 3)


def one_half_weighed(params, stem, x):
    x = tuple(jnp.split(jnp.sin(x @ stem), 2, -1))
    x, _ = jax.lax.scan(lambda x, p: (eqx.combine(p, STATIC)(x), None), x, params)
    return jnp.mean(x[0] ** 3 * jax.lax.stop_gradient(x[1]))


def empty_stream(params, stem, x):
    """One of the arrays starts at zero, where relative errors mean nothing."""
    x = jnp.sin(x @ stem[:, :WIDTH])
    x, _ = jax.lax.scan(lambda x, p: (eqx.combine(p, STATIC)(x), None), (x, jnp.zeros_like(x)), params)
    return jnp.mean(x[0] ** 3 + x[1])


def modules_that_close_over(params, stem, x):
    x = jnp.sin(x @ stem)
    for i in range(DEPTH):
        w = params.f.w[i]
        f = eqx.nn.Lambda(lambda b, w=w: jnp.tanh(b @ w))
        x = Coupling(f, f)(x)
    return jnp.mean(x**3)


def inverses_that_close_over(params, stem, x):
    s = jnp.exp(params.f.w[0, 0, 0] / 4)

    @mw.custom_vijp
    def scaled(x):
        return jnp.arcsinh(x) * s

    scaled.definverse(lambda y: jnp.sinh(y / s))
    x = x @ stem
    for _ in range(6):
        x = scaled(x)
    return jnp.mean(x**3)


def nested(params, stem, x):
    def inner(x, p):
        return eqx.combine(p, STATIC)(x), None

    twice = jax.tree.map(lambda a: jnp.stack([a, 0.5 * a]), params)
    x, _ = jax.lax.scan(lambda x, p: (jax.lax.scan(inner, x, p)[0], None), jnp.sin(x @ stem), twice)
    return jnp.mean(x**3)


NETWORKS = [
    scanned, scanned_backwards, looped, pairs, both_streams, mapped, from_data, with_closures, with_keys, nested,
    one_half, one_half_weighed, empty_stream, modules_that_close_over, inverses_that_close_over,
]  # fmt: skip


def inverting(loss, *args, **settings):
    """The loss by inversion, however small the network is, and the plan."""
    plan = mw.plan(loss, *args, argnums=(0, 1), method=mw.Moonwalk(**settings))
    assert plan.inverted, plan
    return jax.jit(mw.value_and_grad(loss, (0, 1), method=plan, certify=True)), plan


def relative(a, b):
    a, b = (np.concatenate([np.ravel(x) for x in jax.tree.leaves(t)]) for t in (a, b))
    return np.linalg.norm(a - b) / np.linalg.norm(b)


SLOW = {
    scanned_backwards,
    mapped,
    with_keys,
    from_data,
    both_streams,
    one_half,
    one_half_weighed,
    modules_that_close_over,
}


@pytest.mark.parametrize(
    "loss", [slow(f) if f in SLOW else f for f in NETWORKS], ids=lambda f: f.__name__
)
def test_gradients_are_exact(loss):
    run, plan = inverting(loss, PARAMS, STEM, X)
    value, g, certificate = run(PARAMS, STEM, X)
    truth, expected = jax.value_and_grad(loss, (0, 1))(PARAMS, STEM, X)
    assert abs(value - truth) < 1e-12 * abs(truth)
    assert relative(g, expected) < 1e-10
    assert 0 < certificate.error < 1e-11
    assert plan.checked


def test_memory_does_not_grow_with_the_depth():
    def temporaries(depth, transform):
        params, static = eqx.partition(
            eqx.filter_eval_shape(eqx.filter_vmap(layer), jax.random.split(jax.random.key(0), depth)),
            lambda a: hasattr(a, "shape"),
        )

        def loss(params, stem, x):
            step = lambda x, p: (eqx.combine(p, static)(x), None)
            return jnp.mean(jax.lax.scan(step, x @ stem, params)[0] ** 2)

        x = jax.ShapeDtypeStruct((4096, 3), jnp.float32)
        params = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, jnp.float32), params)
        stem = jax.ShapeDtypeStruct(STEM.shape, jnp.float32)
        lowered = jax.jit(transform(loss)).lower(params, stem, x)
        return lowered.compile().memory_analysis().temp_size_in_bytes

    few, many = temporaries(16, mw.grad), temporaries(128, mw.grad)
    assert many < 1.05 * few
    assert many < 0.05 * temporaries(128, jax.grad)


def test_float32_is_about_as_exact_as_backpropagation():
    args = jax.tree.map(lambda a: a.astype(jnp.float32), (PARAMS, STEM, X))
    run, _ = inverting(scanned, *args)
    truth = jax.grad(scanned, (0, 1))(PARAMS, STEM, X)
    value, g, certificate = run(*args)
    assert relative(g, truth) < 10 * relative(jax.grad(scanned, (0, 1))(*args), truth) < 1e-4
    assert certificate.error < 1e-5


@pytest.mark.parametrize("loss", [scanned, slow(looped)], ids=lambda f: f.__name__)
def test_fused_updates(loss):
    optimizer = optax.adam(1e-2)
    fun = lambda both, x: loss(*both, x)
    step = jax.jit(mw.fused_update(fun, optimizer))
    params = expected = (PARAMS, STEM)
    state, expected_state = optimizer.init(params), optimizer.init(params)
    for _ in range(3):
        value, params, state = step(params, state, X)
        g = jax.grad(fun)(expected, X)
        updates, expected_state = optimizer.update(g, expected_state)
        expected = optax.apply_updates(expected, updates)
    assert relative(params, expected) < 1e-10


def test_a_devices_batch_is_divided():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    run, _ = inverting(scanned, PARAMS, STEM, X)
    _, g, _ = run(PARAMS, STEM, jax.device_put(X, rows))
    assert relative(g, jax.grad(scanned, (0, 1))(PARAMS, STEM, X)) < 1e-10


# --- what cannot be inverted, or not exactly -------------------------------------------------------


def test_an_inverse_that_is_none_is_noticed():
    @mw.custom_vijp
    def bent(x, w):
        return jnp.tanh(x * w)

    bent.definverse(lambda y, w: y / w)

    def loss(w, stem, x):
        x = x @ stem
        for i in range(6):
            x = bent(x, w[i])
        return jnp.sum(x**2)

    args = jnp.full(6, 0.5), STEM, X
    with pytest.raises(
        mw.InexactError,
        match="did not arrive at the state that they started from.* wrap some of them in jax.checkpoint",
    ):
        mw.grad(loss, (0, 1))(*args)
    plan = mw.plan(loss, *args, argnums=(0, 1), method=mw.Moonwalk(on_inexact="nan"))
    assert plan.inverted
    g = jax.jit(mw.grad(loss, (0, 1), method=plan))(*args)
    assert all(jnp.isnan(a).all() for a in g)


def test_half_precision_is_not_inverted():
    args = jax.tree.map(lambda a: a.astype(jnp.bfloat16), (PARAMS, STEM, X))
    assert not mw.plan(scanned, *args, argnums=(0, 1)).inverted


def test_functions_in_half_precision_are_not_inverted():
    """A float32 state that they round: a difference in its last place is one in the eighth bit of theirs."""

    def loss(params, stem, x):
        half = lambda w: (
            lambda b: jnp.tanh(b.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)).astype(b.dtype)
        )
        step = lambda x, p: (Coupling(half(p.f.w), half(p.g.w))(x), None)
        return jnp.mean(jax.lax.scan(step, jnp.sin(x @ stem), params)[0] ** 3)

    args = jax.tree.map(lambda a: a.astype(jnp.float32), (PARAMS, STEM, X))
    assert not mw.plan(loss, *args, argnums=(0, 1)).inverted


def test_anchors_by_number_are_not_inverted():
    method = mw.Moonwalk(anchor_every=1)
    assert not mw.plan(scanned, PARAMS, STEM, X, argnums=(0, 1), method=method).inverted


def test_what_the_user_checkpointed_is_not_inverted():
    wrapped = jax.checkpoint(lambda params, x: at(params, 0)(at(params, 1)(x)))
    loss = lambda params, stem, x: jnp.sum(wrapped(params, x @ stem) ** 2)
    assert not mw.plan(loss, PARAMS, STEM, X, argnums=(0, 1)).inverted


def test_a_scan_that_is_neither_walked_nor_inverted_is_no_step_of_a_walk():
    """Its layers would all be stored in Phase II, which no plan counts."""

    def loss(ws, x):
        x = jnp.abs(x @ mw.declare(ws[0], "orthogonal"))
        # the second carry is data: the state enters as a constant
        _, ys = jax.lax.scan(lambda c, w: (c + 1, jnp.tanh(x @ w) * c), 1.0, ws)
        return jnp.sum(ys**2)

    ws = jax.random.orthogonal(jax.random.key(0), 32, shape=(64,))
    plan = mw.plan(loss, ws, jnp.ones((256, 32)))
    assert {row.mode for row in plan.rows if row.block.startswith("scan")} <= {"store", "recompute"}


def test_plans_say_so():
    text = mw.plan(scanned, PARAMS, STEM, X, argnums=(0, 1)).table()
    assert "2 blocks inverted" in text
    assert "5 layers, each from the one after it" in text
    assert "inverse given by the author of `shear`" in text


# --- the layer -------------------------------------------------------------------------------------


def test_vijp_and_inverse():
    x = jax.random.normal(jax.random.key(3), (ROWS, 2 * WIDTH))
    coupling = at(PARAMS, 0)
    mw.testing.check_vijp(coupling, x)
    np.testing.assert_allclose(coupling.inverse(coupling(x)), x, atol=1e-12)
    pair = tuple(jnp.split(x, 2, -1))
    np.testing.assert_allclose(jnp.concatenate(coupling(pair), -1), coupling(x), atol=1e-12)
    f, g = coupling.f, coupling.g
    first = pair[0] + f(pair[1])
    np.testing.assert_allclose(coupling(pair)[1], pair[1] + g(first), atol=1e-12)
    batched = jax.vmap(coupling)(x)
    np.testing.assert_allclose(batched, coupling(x), atol=1e-12)
    keyed = coupling(x, key=jax.random.key(0))
    np.testing.assert_allclose(coupling.inverse(keyed, key=jax.random.key(0)), x, atol=1e-12)


def test_messages():
    coupling = at(PARAMS, 0)
    with pytest.raises(ValueError, match="an even number of channels, or a pair of arrays"):
        coupling(jnp.ones((2, 7)))
    with pytest.raises(TypeError, match="the state is a pair of arrays.* got tuple of 3"):
        coupling((1.0, 2.0, 3.0))
    with pytest.raises(ValueError, match=r"of shape \(2, 6\), but returned \(2, 1\)"):
        Coupling(lambda x: x[:, :1], jnp.sin)(jnp.ones((2, 12)))

    @mw.custom_vijp
    def shifted(x, w):
        return jnp.sin(x) + w

    with pytest.raises(TypeError, match="definverse takes a function"):
        shifted.definverse(3)
    shifted.definverse(lambda y, w: y - w)
    with pytest.raises(mw.DuplicateRuleError, match="already has an inverse"):
        shifted.definverse(jnp.sin)
    with pytest.raises(mw.NotSubmersiveError, match="it can only be inverted"):
        mw.vijp(functools.partial(shifted, w=1.0), jnp.ones(3))

    @mw.custom_vijp
    def shear(x, w):
        return jnp.sin(x) + w

    shear.definverse(lambda y, w: (y, w))

    def loss(w, x, shear=shear):
        for i in range(8):
            x = shear(x, w[i])
        return jnp.sum(x**2)

    with pytest.raises(TypeError, match="must return a state with the structure of the first argument"):
        jax.jit(mw.grad(loss))(jnp.ones(8), jnp.ones((64, 8)))

    @mw.custom_vijp
    def cut(x, w):
        return jnp.sin(x) + w

    cut.definverse(lambda y, w: y[:3] - w)
    with pytest.raises(
        TypeError, match=r"must return a state of shape \(64, 8\), but returned \(3, 8\)"
    ):
        jax.jit(mw.grad(lambda w, x: loss(w, x, cut)))(jnp.ones(8), jnp.ones((64, 8)))
