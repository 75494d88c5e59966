"""Planning traces every distinct block once, however many there are; held by counting, not by timing."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import moonwalk as mw
from moonwalk import _jax
from moonwalk.execute import residuals, shared
from moonwalk.segments import linearised, steps, store
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
    made, own = [], steps.linearised
    monkeypatch.setattr(steps, "linearised", lambda *args: made.append(args) or own(*args))

    def normalised(params, x):
        for w in params:
            x = jax.nn.relu((x - x.mean(0)) / jnp.sqrt(x.var(0) + 1e-5) @ w)
        return jnp.mean(x**2)

    def count(depth):
        made.clear()
        mw.plan(normalised, [jax.ShapeDtypeStruct((8, 8), jnp.float32)] * depth, types(1)[1])
        return len(made)

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


def walked_network(params, x):
    for w in params:
        x = jnp.abs(x @ mw.declare(w, "orthogonal"))
    return jnp.mean(x**2)


def orthogonal(depth, width=WIDTH):
    drawn = np.random.default_rng(0).normal(size=(depth, width, width))
    return [jnp.asarray(np.linalg.qr(w)[0], jnp.float32) for w in drawn]


def test_walked_blocks_that_compute_the_same_share_programs(monkeypatch):
    """The same for a walk: each phase of a distinct block is traced once, and lowered once."""
    traced = []
    for name in ("forward", "pull_back", "prepare", "probe", "recover", "gradients"):
        own = getattr(linearised.Linearised, name)

        def spied(self, *args, own=own, name=name):
            if jax.tree.leaves(args):  # |x| has no operands to prepare anything of
                traced.append(name)
            return own(self, *args)

        monkeypatch.setattr(linearised.Linearised, name, spied)
    fun = mw.value_and_grad(walked_network, method=mw.Moonwalk(walk="always"))

    def count(depth):
        traced.clear()
        args = orthogonal(depth), jax.ShapeDtypeStruct((64, WIDTH), jnp.float32)
        text = jax.jit(fun).lower(*args).as_text()
        return len(traced), text.count("stablehlo.dot_general")

    (few_traces, few), (many_traces, many) = count(8), count(24)
    assert "probe" in traced and "recover" in traced
    assert (many_traces, many) == (few_traces, few)


def test_stretches_that_differ_share_units(monkeypatch):
    """Stretches of two and of three equal layers are different, and made of the same layers."""
    runs, own = [], store.Piece._run

    def spied(self, *args, **kwargs):
        runs.append(len(self.nodes))
        return own(self, *args, **kwargs)

    monkeypatch.setattr(store.Piece, "_run", spied)
    args = types(10)
    count = len(mw.plan(residual_network, *args, method=mw.Checkpoint("block")).nodes)
    every = count // 10
    bounds = [0, 2 * every, 5 * every, 8 * every, count]
    made = mw.plan(residual_network, *args, method=mw.Checkpoint("block"))
    segments = tuple(store.Recompute(i, j) for i, j in itertools.pairwise(bounds))
    plan = dataclasses.replace(made, segments=segments)
    fun = mw.value_and_grad(residual_network, method=plan)
    jax.jit(fun).trace(*args)
    # Two products a layer: the first and the last layer have units of their own, those between share.
    assert len(runs) <= 8, runs
    params, x = jax.tree.map(lambda s: jnp.full(s.shape, 0.1, s.dtype), args)
    expected = jax.value_and_grad(residual_network)(params, x)
    for found in (fun(params, x), jax.jit(fun)(params, x)):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), found, expected)


def test_a_shared_function_hands_through_what_it_is_given():
    """Arguments and doubles come out as the very same tracers, and are no results of the call."""

    def fun(x, options):
        y = jnp.sin(x)
        return {"x": x, "y": y, "again": y, "none": options["none"], "sum": y + options["by"]}

    both = shared.Shared(fun)

    @jax.jit
    def run(x, by):
        outs = [both(x, {"none": None, "by": by}), both(by, {"none": None, "by": x})]
        for out, own in zip(outs, (x, by), strict=True):
            assert out["x"] is own and out["y"] is out["again"] and out["none"] is None
        return outs

    x, by = jnp.arange(3.0), jnp.ones(3)
    for found, args in zip(run(x, by), ((x, by), (by, x)), strict=True):
        jax.tree.map(np.testing.assert_array_equal, found, fun(args[0], {"none": None, "by": args[1]}))
    text = jax.jit(run).lower(x, by).as_text()
    assert text.count("stablehlo.sine") == 1


def test_a_shared_function_takes_other_types_and_runs_eagerly():
    calls = []
    double = shared.Shared(lambda x: calls.append(x.dtype) or (2 * x, x))
    for x in (jnp.ones(2), jnp.ones(3), jnp.arange(3)):
        np.testing.assert_array_equal(jax.jit(lambda x: double(x))(x)[0], 2 * x)
        assert double(x)[1] is x  # nothing is staged
    assert len(calls) == 6
