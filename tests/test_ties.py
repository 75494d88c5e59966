"""Bits that are kept of piecewise linear blocks, and what happens where two values are equal.

The oracle is JAX's own pullback, at every input: also at ties, where JAX takes the mean of both sides.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from marks import slow, some, some_cases
from weights import normal, orthogonal

import moonwalk as mw
from moonwalk import nn
from moonwalk.rules.elementwise import Elementwise
from moonwalk.trace import graph, staging

RULE = Elementwise()


def pointwise_blocks(fun, *x):
    """(block, its inputs, its operands), in order, of what a function consists of."""
    staged = staging.stage(lambda *x: fun(*x), *x)
    env = dict(zip(staged.jaxpr.constvars, staged.consts, strict=True))
    cut = graph.build(staged.jaxpr, staged.jaxpr.invars, staged.jaxpr.outvars, consts=env)
    env.update(zip(staged.jaxpr.invars, x, strict=True))
    graph.run(staged.jaxpr.eqns, env)
    for block in cut.blocks:
        if RULE.matches(block):
            yield block, [env[v] for v in block.inputs], [env[v] for v in block.operands]


def check_kept_pullback(fun, *x, at_least=1):
    """What is kept of every pointwise block is JAX's pullback; returns how many bits an entry they keep."""
    bits, seen = 0, 0
    for block, inputs, operands in pointwise_blocks(fun, *x):
        seen += 1
        (_, kept), (_, pullback) = (
            f(block, tuple(inputs), operands) for f in (RULE.keep, RULE.linearize)
        )
        keys = jax.random.split(jax.random.key(1), len(block.outputs))
        h = tuple(
            jax.random.normal(k, v.aval.shape, v.aval.dtype)
            for k, v in zip(keys, block.outputs, strict=True)
        )
        for got, want in zip(kept(h), pullback(h), strict=True):
            rounding = 64 * float(jnp.finfo(want.dtype).eps)
            size = float(np.max(np.abs(want), initial=1e-30))
            np.testing.assert_allclose(got, want, rtol=rounding, atol=rounding * size)
        bits += sum(a.dtype == bool for a in jax.tree.leaves(kept))
        # Where a gain is promised, cotangents come back: at ties, and between knots that no probe hits.
        if RULE.verdict(block) and (factor := RULE.gain(block).factor) < np.inf:
            for got, want in zip(RULE.vijp(block, (), kept, kept(h)), h, strict=True):
                rounding = 64 * factor * float(jnp.finfo(want.dtype).eps)
                np.testing.assert_allclose(got, want, rtol=1e3 * rounding, atol=64 * rounding)
    assert seen >= at_least
    return bits


# --- functions drawn at random ----------------------------------------------------------------------

COMPARISONS = [jnp.greater, jnp.greater_equal, jnp.less, jnp.less_equal, jnp.equal, jnp.not_equal]


class Drawn:
    """A piecewise linear function of some states, with knots in the units of the data."""

    def __init__(self, seed, unit):
        self.rng = np.random.default_rng(seed)
        self.unit = unit
        self.states = int(self.rng.integers(1, 4))
        self.seed = int(self.rng.integers(2**32))

    def __call__(self, *x):
        self.rng = np.random.default_rng(self.seed)  # the same function at every trace
        pool = list(x)
        for _ in range(int(self.rng.integers(1, 7))):
            pool.append(self.step(pool))
        out = [x[i] + 0.25 * self.pick(pool[self.states :]) for i in range(self.states)]
        return tuple(out[: int(self.rng.integers(1, self.states + 1))])

    def pick(self, pool):
        return pool[int(self.rng.integers(len(pool)))]

    def knot(self):
        return float(self.rng.choice([-2, -1, -0.5, 0, 0.5, 1, 1.5, 3]) * self.unit)

    def operand(self, pool):
        return self.pick(pool) if self.rng.random() < 0.5 else self.knot()

    def boolean(self, pool, depth=0):
        kind = self.rng.integers(5) if depth < 2 else 0
        if kind == 1:
            return ~self.boolean(pool, depth + 1)
        if kind == 2:
            combine = [jnp.logical_and, jnp.logical_or, jnp.logical_xor][int(self.rng.integers(3))]
            return combine(self.boolean(pool, depth + 1), self.boolean(pool, depth + 1))
        compare = COMPARISONS[int(self.rng.integers(len(COMPARISONS)))]
        a, b = self.pick(pool), self.operand(pool)
        return compare(a, b) if self.rng.random() < 0.5 else compare(b, a)

    def step(self, pool):
        a, b = self.pick(pool), self.operand(pool)
        full = jnp.full_like(a, b) if isinstance(b, float) else b
        low, high = sorted([self.knot(), self.knot()])
        return [
            lambda: jnp.maximum(a, b),
            lambda: jnp.minimum(b, a),
            lambda: lax.max(a, full),
            lambda: lax.min(full, a),
            lambda: jnp.clip(a, low, high),
            lambda: lax.clamp(a.dtype.type(low), a, a.dtype.type(high)),
            lambda: jnp.where(self.boolean(pool), a, full),
            lambda: jnp.where(self.boolean(pool), a - low, 0.0),
            lambda: jax.nn.relu(a - low),
            lambda: jnp.abs(a - b),
            lambda: -a,
            lambda: a * float(self.rng.choice([-1.5, 0.5, 2.0])) + low,
            lambda: jax.nn.leaky_relu(a, 0.25),
            lambda: jax.nn.hard_tanh(a),
        ][int(self.rng.integers(14))]()


DATA = {
    "continuous": lambda rng, shape: 2 * rng.standard_normal(shape),
    "integers": lambda rng, shape: rng.integers(-3, 4, shape),
    "ties": lambda rng, shape: rng.choice([-1.0, -0.5, 0.0, 0.5, 1.0], shape),
    "far": lambda rng, shape: rng.uniform(0, 100, shape),
}


def check_drawn(seed):
    rng = np.random.default_rng(seed)
    kind = list(DATA)[seed % len(DATA)]
    dtype, reach = (jnp.float64, 30) if seed % 3 else (jnp.float32, 15)
    unit = 1.0 if seed % 2 else 10.0 ** int(rng.integers(-reach, reach + 1))
    fun = Drawn(seed, unit)
    x = [jnp.asarray(DATA[kind](rng, (64,)) * unit, dtype) for _ in range(fun.states)]
    check_kept_pullback(fun, *x, at_least=0)


@pytest.mark.parametrize(("start", "count"), [(0, 15), slow(15, 15), slow(1000, 700)])
def test_the_kept_pullback_is_jax_s(start, count):
    for seed in range(start, start + count):
        try:
            check_drawn(seed)
        except Exception as error:
            raise AssertionError(f"seed {seed}") from error


# --- through the engine -------------------------------------------------------------------------------

ALWAYS = mw.Moonwalk(walk="always")


def check_gradient(layer, x, depth=4, method=ALWAYS, width=8):
    """A stem, layers x ↦ layer(x) W with orthogonal W, against JAX; returns the plan."""
    ws = [orthogonal(width, seed=s) for s in range(depth)]

    def loss(ws, x):
        for w in ws:
            # Rounding to quarters: every layer sees ties, if the first one does.
            x = layer(x) @ mw.declare(w, "orthogonal")
            x = x + lax.stop_gradient(jnp.round(4 * x) / 4 - x)
        return jnp.sum(jnp.sin(x))

    plan = mw.plan(loss, ws, x, method=method)
    got, want = (jax.jit(f(loss))(ws, x) for f in (lambda f: mw.grad(f, method=method), jax.grad))
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-9 * float(jnp.max(jnp.abs(b))))
    return plan


PIECEWISE = {
    "a knot beyond the probes": lambda x: (
        x + 0.5 * jnp.where(x > 50, x - 50, 0) - 0.5 * jnp.where(x > 51.5, x - 51.5, 0)
    ),
    "clip": lambda x: jnp.clip(x, -1, 1) + 0.5 * x,
    "two ramps": lambda x: jnp.maximum(x - 1, 0) - 0.3 * jnp.maximum(1 - x, 0),
    "minimum": lambda x: jnp.minimum(x, 0.5 * x + 0.5),
    "leaky by maximum": lambda x: jnp.maximum(x, 0.1 * x),
    "nearly two sides": lambda x: jnp.where(x > 0, x, 0) + 0.5 * jnp.where(x <= 0, x, 0),
}


# Integers and ties both lie on every knot but one.
FAST = {
    ("a knot beyond the probes", "far"),
    ("clip", "ties"),
    ("two ramps", "ties"),
    ("minimum", "integers"),
    ("leaky by maximum", "ties"),
    ("nearly two sides", "integers"),
}


@pytest.mark.parametrize(
    ("name", "data"), some_cases(itertools.product(PIECEWISE, ["integers", "ties", "far"]), FAST)
)
def test_piecewise_layers(name, data):
    x = jnp.asarray(DATA[data](np.random.default_rng(0), (64, 8)), jnp.float64)
    check_kept_pullback(PIECEWISE[name], x)
    check_gradient(PIECEWISE[name], x)


def by_maximum(x):
    a, b = x[..., ::2], x[..., 1::2]
    return jnp.concatenate([jnp.maximum(a, b), jnp.minimum(a, b)], -1)


def by_reductions(x):
    pairs = x.reshape(*x.shape[:-1], -1, 2)
    return jnp.concatenate([pairs.max(-1), pairs.min(-1)], -1)


SINGULAR = {
    "MaxMin by maximum": by_maximum,
    "MaxMin by reductions": by_reductions,
    "|x| by maximum": lambda x: jnp.maximum(x, -x),
    "two strict sides": lambda x: jnp.where(x > 0, x, 0) + jnp.where(x < 0, x, 0),
    "ties of two kinds at once": lambda x: jnp.maximum(x, 0) + 0.5 * jnp.maximum(2 * x, 0) - x,
}


@pytest.mark.parametrize("name", some(SINGULAR, set(SINGULAR) - {"|x| by maximum"}))
def test_what_is_singular_at_ties_is_not_walked(name):
    x = jnp.asarray(np.random.default_rng(0).integers(-2, 3, (64, 8)), jnp.float64)
    plan = check_gradient(SINGULAR[name], x)
    reasons = [row.why for row in plan.rows if "at a tie" in row.why]
    assert reasons
    assert "jnp.where on one comparison" in reasons[0]
    assert "moonwalk.nn.MaxMin" in reasons[0]
    # Off ties the operator serves it, and at ties it raises.
    mw.testing.check_vijp(SINGULAR[name], normal(3, 6))
    _, vijp_fun = mw.vijp(SINGULAR[name], jnp.zeros((2, 4)))
    with pytest.raises(mw.SingularError, match="tie"):
        vijp_fun(jnp.ones((2, 4)))


SERVED = {
    "nn.MaxMin": nn.MaxMin(),
    "nn.Abs": nn.Abs(),
    "nn.LeakyReLU": nn.LeakyReLU(),
    "sorted pairs": lambda x: jnp.sort(x.reshape(*x.shape[:-1], -1, 2), -1).reshape(x.shape),
    "sorted fours": lambda x: jnp.sort(x.reshape(*x.shape[:-1], -1, 4), -1).reshape(x.shape),
    "sorted, and not stable": lambda x: lax.sort(x, is_stable=False),
    "top k": lambda x: lax.top_k(x, x.shape[-1])[0],
}


@pytest.mark.parametrize("name", some(SERVED, set(SERVED) - {"sorted fours"}))
def test_what_is_walked_through_ties(name):
    x = jnp.asarray(np.random.default_rng(0).integers(-2, 3, (64, 8)), jnp.float64)
    plan = check_gradient(SERVED[name], x)
    assert plan.anchors == 0
    walked = [row for row in plan.rows if row.mode == "walk" and row.gain == 1.0]
    assert walked


def test_maxmin_keeps_a_bit_per_pair():
    assert check_kept_pullback(nn.MaxMin(), jnp.zeros((3, 8))) == 1
    assert check_kept_pullback(by_maximum, jnp.zeros((3, 8))) == 2


POOLED = {
    "nn.MaxPool": lambda x: nn.MaxPool(2, dims=1)(x),
    "nn.GlobalMax": lambda x: nn.GlobalMax(1)(x),
    "max": lambda x: jnp.max(x, -1),
    "min": lambda x: jnp.min(x, -1),
    "min pooling": lambda x: -nn.MaxPool(2, dims=1)(-x),
}


@pytest.mark.parametrize("name", POOLED)
@pytest.mark.parametrize("data", ["integers", slow("relu")])
def test_pooling_of_ties(name, data):
    x = jnp.asarray(np.random.default_rng(0).integers(-1, 2, (16, 8, 8)), jnp.float64)
    x = jax.nn.relu(normal(16, 8, 8)) if data == "relu" else x
    mw.testing.check_vijp(POOLED[name], x)
    ws = [orthogonal(8, seed=s) for s in range(3)]

    def loss(ws, x):
        for w in ws[:-1]:
            x = nn.Abs()(x @ mw.declare(w, "orthogonal"))
            x = x + lax.stop_gradient(jnp.round(x) - x)
        x = POOLED[name](x)
        return jnp.sum(jnp.sin(x @ mw.declare(ws[-1], "orthogonal")))

    got, want = (jax.jit(f(loss))(ws, x) for f in (lambda f: mw.grad(f, method=ALWAYS), jax.grad))
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-9 * float(jnp.max(jnp.abs(b))))
