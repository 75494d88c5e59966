"""Bits that are kept of piecewise linear blocks, and what happens where two values are equal.

The oracle is JAX's own pullback, at every input: also at ties, where JAX takes the mean of both sides.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from marks import slow

from moonwalk import graph, staging
from moonwalk.rules.elementwise import Elementwise

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


@pytest.mark.parametrize(("start", "count"), [(0, 80), slow(1000, 3000)])
def test_the_kept_pullback_is_jax_s(start, count):
    for seed in range(start, start + count):
        try:
            check_drawn(seed)
        except Exception as error:
            raise AssertionError(f"seed {seed}") from error
