"""Planning traces every distinct block once, however many there are; held by counting, not by timing."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import moonwalk as mw
from moonwalk import _jax
from moonwalk.execute import residuals
from moonwalk.segments import store, walk
from moonwalk.trace import facts, fingerprint

pytestmark = pytest.mark.filterwarnings("ignore::moonwalk.PlanWarning")

WIDTH = 8


def residual_network(params, x):
    for p in params:
        y = (x - x.mean(-1, keepdims=True)) * p["scale"]
        x = x + jax.nn.gelu(y @ p["up"]) @ p["down"]
    return jnp.mean(x**2)


def types(depth):
    struct = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    layer = {"scale": struct(WIDTH), "up": struct(WIDTH, 4 * WIDTH), "down": struct(4 * WIDTH, WIDTH)}
    return [layer] * depth, struct(64, WIDTH)


@pytest.mark.parametrize(
    "method",
    [mw.Moonwalk(), mw.Moonwalk(walk="always"), mw.Checkpoint(), mw.Checkpoint("block")],
    ids=str,
)
def test_residuals_are_traced_once_for_blocks_that_compute_the_same(method, monkeypatch):
    traced, own = [], residuals.Residual.__init__

    def spied(self, *args, **kwargs):
        traced.append(self)
        own(self, *args, **kwargs)

    monkeypatch.setattr(residuals.Residual, "__init__", spied)

    def count(depth):
        traced.clear()
        mw.plan(residual_network, *types(depth), method=method)
        return len(traced)

    few, many = count(8), count(24)
    assert many <= few + 2, (few, many)


def test_a_given_plan_traces_what_runs_and_no_more(monkeypatch):
    args = types(12)
    plan = mw.plan(residual_network, *args)
    made, own = [], residuals.Residual.__init__

    def spied(self, *args, **kwargs):
        made.append(self)
        own(self, *args, **kwargs)

    monkeypatch.setattr(residuals.Residual, "__init__", spied)
    jax.make_jaxpr(mw.value_and_grad(residual_network, method=plan))(*args)
    given = len(made)
    made.clear()
    jax.make_jaxpr(mw.value_and_grad(residual_network))(*args)
    assert given <= len(made)


def test_a_walk_is_linearised_once_for_blocks_that_compute_the_same(monkeypatch):
    """Many walks are planned over the same nodes, each with rules of its own for some of them."""
    linearised, own = [], walk._linearised
    monkeypatch.setattr(walk, "_linearised", lambda *args: linearised.append(args) or own(*args))

    def normalised(params, x):
        for w in params:
            x = jax.nn.relu((x - x.mean(0)) / jnp.sqrt(x.var(0) + 1e-5) @ w)
        return jnp.mean(x**2)

    def count(depth):
        linearised.clear()
        mw.plan(normalised, [jax.ShapeDtypeStruct((8, 8), jnp.float32)] * depth, types(1)[1])
        return len(linearised)

    few, many = count(6), count(18)
    assert many <= few + 2, (few, many)


def test_stretches_that_compute_the_same_share_a_program(monkeypatch):
    """Differentiated once, and lowered once, in a program; run one by one where nothing is staged."""
    runs, own = [], store.Piece._run

    def spied(self, *args, **kwargs):
        runs.append(self)
        return own(self, *args, **kwargs)

    monkeypatch.setattr(store.Piece, "_run", spied)
    fun = mw.value_and_grad(residual_network, method=mw.Checkpoint("block"))

    def count(depth):
        runs.clear()
        text = jax.jit(fun).lower(*types(depth)).as_text()
        return len(runs), text.count("stablehlo.dot_general")

    (traced, few), (again, more) = count(8), count(24)
    assert again <= traced + 2, (traced, again)
    # The forward pass has all layers, two products each; the reverse pass those of one stretch.
    assert more - few <= 2 * 16 + 2
    params, x = jax.tree.map(lambda s: jnp.ones(s.shape, s.dtype), types(3))
    expected = jax.value_and_grad(residual_network)(params, x)
    for found in (fun(params, x), jax.jit(fun)(params, x)):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), found, expected)


def test_values_of_constants_are_computed_when_they_are_asked_for(monkeypatch):
    evaluated, own = [], facts._evaluated
    monkeypatch.setattr(facts, "_evaluated", lambda *args: evaluated.append(args) or own(*args))

    def fun():
        n = jnp.arange(6)
        for _ in range(3000):  # longer than a recursion may be deep
            n = n + 1
        return n, jnp.arange(6) * 2, jnp.arange(6) * 2, jnp.arange(6) * 3

    jaxpr, consts = _jax.open_jaxpr(jax.make_jaxpr(fun)())
    known = facts.Constants(jaxpr.eqns, dict(zip(jaxpr.constvars, consts, strict=True)))
    last, a, b, c = jaxpr.outvars
    assert {last, a, b, c} <= set(known) and not evaluated
    assert known.key(a) == known.key(b) != known.key(c)
    np.testing.assert_array_equal(known[c], 3 * np.arange(6))
    assert len(evaluated) <= 3
    np.testing.assert_array_equal(known[last], np.arange(6) + 3000)
    assert len(known) == len(list(known))


@pytest.mark.parametrize("kind", ["jvp", "vjp"])
def test_calls_with_different_derivatives_are_different(kind):
    """Whether they differ in what the derivative computes, or in what the rule returns as the value."""

    def call(slope, value):
        fun = jax.custom_jvp(jnp.sin) if kind == "jvp" else jax.custom_vjp(jnp.sin)
        if kind == "jvp":
            fun.defjvp(lambda x, t: ((jnp.sin(x[0]), jnp.cos(x[0]))[value], slope * t[0]))
        else:
            both = lambda x: (jnp.sin(x), jnp.cos(x))
            fun.defvjp(
                lambda x: (both(x)[value], both(x)), lambda kept, h: (slope * h * kept[0] * kept[1],)
            )
        (eqn,) = jax.make_jaxpr(fun)(jnp.ones(3)).eqns
        return fingerprint.of_equations([eqn], {v: i for i, v in enumerate(eqn.invars)})

    assert call(1.0, 0) == call(1.0, 0)
    assert len({call(1.0, 0), call(2.0, 0), call(1.0, 1)}) == 3
