"""What `PureForward` once got wrong, each as small as it gets, and losses that `per_example` must read."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from marks import slow, some
from networks import max_min, square, turn
from test_engine import EXACT, arrays, compare, error
from test_gradient import Counter
from weights import general, normal, orthogonal

import moonwalk as mw

pytestmark = pytest.mark.filterwarnings("ignore::moonwalk.PlanWarning")

ROWS, WIDTH, DEPTH = 6, 4, 3
X = normal(ROWS, WIDTH, seed=1)
STACK = jnp.stack([orthogonal(WIDTH, seed=i) for i in range(DEPTH)])
BOTH = [mw.PureForward(), mw.PureForward(chunk=3, per_example=True)]


def layers(ws, x):
    return lax.scan(lambda c, w: (turn(c, w), None), x, ws)[0]


def check(loss, *args, method, **options):
    found = jax.jit(mw.value_and_grad(loss, method=method, **options))(*args)
    compare(arrays(found), arrays(jax.jit(jax.value_and_grad(loss, **options))(*args)))


# --- sums over examples -----------------------------------------------------------------------------------

SUMS = {
    "an axis is left": lambda y: jnp.sum(jnp.sum(y**2, 1, keepdims=True), 0)[0],
    "sums of sums": lambda y: jnp.mean(y.sum(1)),
    "a sum that is read twice": lambda y: (lambda s: s * s + jnp.sin(s))(jnp.mean(y**2)),
    "summands inside a block": lambda y: jnp.mean(y**2) + jnp.sum(jnp.abs(y).sum(1) ** 2) * jnp.mean(y),
    "a weighted mean": lambda y: jnp.sum(y**2 * jnp.arange(ROWS)[:, None]) / jnp.sum(jnp.arange(ROWS)),
    "chosen by a sum": lambda y: jnp.where(jnp.mean(y) > 0, jnp.sum(y**2), jnp.sum(y)),
    "times a number": lambda y: jnp.mean(y**2) * lax.stop_gradient(jnp.mean(jnp.abs(y))),
}


@pytest.mark.parametrize("name", some(SUMS, set(SUMS) - {"a weighted mean", "times a number"}))
def test_what_is_a_function_of_sums(name):
    check(lambda ws, x: SUMS[name](layers(ws, x)), STACK, X, method=BOTH[1])


NO_SUMS = {
    "dot_general": lambda y: y.sum(1) @ jnp.arange(float(ROWS)),
    "reduce_max": jnp.max,
    "cond": lambda y: lax.cond(jnp.mean(y) > 0, lambda: jnp.sum(y**2), lambda: jnp.sum(y)),
}


@pytest.mark.parametrize("name", NO_SUMS)
def test_what_is_not_is_refused_while_planning(name):
    text = (
        f"PureForward(per_example=True): the loss is made of `{name}` of an array, not of sums over the "
        "examples; let the loss end in a sum or a mean over the examples, along axis 0, or leave "
        "per_example out"
    )
    loss = lambda ws, x: NO_SUMS[name](layers(ws, x))
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        mw.plan(loss, STACK, X, method=BOTH[1])


def test_examples_along_another_axis_are_refused():
    vmapped = lambda ws, x: square(jax.vmap(lambda x: mw.declare(ws[1], "orthogonal").T @ x)(x @ ws[0]))
    transposed = lambda ws, x: vmapped(ws, (ws[2] @ x.T).T)
    with pytest.raises(ValueError, match=r"what the loss sums is f64\[6,4\], and the examples are 4"):
        mw.plan(transposed, STACK, X, method=BOTH[1])

    def two_stems(ws, x):
        return square(turn(x @ ws[0], ws[1]) + jnp.sum(x, 0) @ ws[2])

    with pytest.raises(ValueError, match=r"axis 0 of every state that the sweep starts from, but these"):
        mw.plan(two_stems, STACK, X, method=BOTH[1])
    check(two_stems, STACK, X, method=BOTH[0])


def test_interaction_is_caught_under_jit():
    loss = lambda ws, x: jnp.std(layers(ws, x))
    check(loss, STACK, X, method=BOTH[0])
    with pytest.raises(Exception, match="the examples are not independent"):
        jax.block_until_ready(jax.jit(mw.grad(loss, method=BOTH[1]))(STACK, X))


# --- scans ------------------------------------------------------------------------------------------------


def test_a_scan_that_starts_from_data_in_every_layer():
    """No seed brings its cotangent: it was an IndexError."""

    def step(c, w):
        own = lax.scan(lambda a, _: (turn(a, w), None), X, None, length=2)[0]
        return turn(c, w) + own, None

    with pytest.raises(mw.NotSubmersiveError) as raised:
        mw.plan(lambda ws, x: square(lax.scan(step, x, ws)[0]), STACK, X, method=BOTH[0])
    assert "in its body, scan" in raised.value.reason
    assert "it starts from data in every layer" in raised.value.reason


def test_a_scan_that_starts_from_a_weight():
    """It was differentiated in reverse, all of it, as if it were a stem."""
    loss = lambda p, x: square(lax.scan(lambda c, w: (turn(c, w) + x, None), p["start"], p["w"])[0])
    with pytest.raises(
        mw.NotSubmersiveError, match="differentiated as a whole, which keeps every layer"
    ):
        mw.plan(loss, {"start": X, "w": STACK}, X, method=BOTH[0])


def test_a_scan_without_layers():
    loss = lambda p, x: square(layers(p[0], x @ p[1]))
    with pytest.raises(mw.NotSubmersiveError, match="PureForward cannot walk it: it has no layers"):
        mw.plan(loss, (STACK[:0], STACK[0]), X, method=BOTH[0])


@pytest.mark.parametrize("method", BOTH)
def test_no_rows(method):
    loss = lambda ws, x: jnp.sum(layers(ws, x) ** 2) + jnp.sum(ws)
    check(loss, STACK, X[:0], method=method)


def test_a_term_of_weights_after_a_scan():
    """What follows the last scan need not be walkable: it is the head."""
    loss = lambda ws, x: square(layers(ws, x)) + 0.1 * jnp.sum(ws**2)
    for method in BOTH:
        check(loss, STACK, X, method=method)


# --- effects ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", BOTH)
def test_layers_tell_of_themselves_once(method):
    """Though jvps go through all of them for every number of the seed, and the sweep once more."""
    counter = Counter()

    def step(x, w):
        x = turn(x, w)
        counter.count(x.sum())
        return x, None

    def loss(ws, x):
        x = lax.scan(step, x @ ws[0], ws)[0]
        lax.cond(x[0, 0] > 0, lambda: counter.count(-1.0), lambda: counter.count(-1.0))
        return square(x)

    found = jax.jit(mw.grad(loss, method=method))(STACK, X)
    calls = [float(c[0]) for c in counter.settled()]
    x, expected = X @ STACK[0], [-1.0]
    for w in STACK:
        x = turn(x, w)
        expected.append(float(x.sum()))
    np.testing.assert_allclose(sorted(calls), sorted(expected), rtol=1e-10)
    silent = lambda ws, x: square(layers(ws, x @ ws[0]))
    assert error(found, jax.jit(jax.grad(silent))(STACK, X)) <= EXACT


# --- gains and precision ------------------------------------------------------------------------------------


def test_a_plan_with_measured_gains_goes_into_jit():
    ws = [general(WIDTH, seed=i) for i in range(DEPTH)]

    def loss(ws, x):
        for w in ws:
            x = jnp.abs(x @ w)
        return square(x)

    with pytest.raises(mw.NotSubmersiveError, match="plan with concrete arguments"):
        jax.jit(mw.grad(loss, method=BOTH[0]))(ws, X)
    plan = mw.plan(loss, ws, X, method=BOTH[0])
    assert plan.measured and plan.checked
    check(loss, ws, X, method=plan)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, slow(jnp.float16)])
def test_half_precision(dtype):
    """Rounding block by block is no reason to raise; it is a part of what backpropagation is off by."""
    ws = jnp.stack([orthogonal(16, seed=i) for i in range(24)])
    loss = lambda ws, x: square(
        lax.scan(lambda c, w: (jnp.abs(c @ mw.declare(w, "orthogonal")), None), x @ ws[0], ws)[0].astype(
            jnp.float32
        )
    )
    run = jax.jit(mw.grad(loss, method=mw.PureForward(per_example=True)))
    backprop = jax.jit(jax.grad(loss))
    for seed in range(4):
        x = normal(32, 16, seed=seed)
        half = ws.astype(dtype), x.astype(dtype)
        truth = backprop(ws, x)
        ours, theirs = (error(f(*half).astype(truth.dtype), truth) for f in (run, backprop))
        assert ours <= 3 * theirs
    given = mw.PureForward(per_example=True, tolerance=1e-2)
    assert mw.plan(loss, *half, method=given).tolerance == 1e-2


# --- transformations ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", BOTH)
def test_derivatives_of_the_gradient_and_batches_of_it(method):
    loss = lambda ws, x: square(max_min(layers(ws, x)))
    fun = mw.grad(loss, method=method)
    size = lambda grad: lambda ws, x: jnp.sum(grad(ws, x) ** 2)
    second, expected = (jax.jit(jax.grad(size(g))) for g in (fun, jax.grad(loss)))
    assert error(second(STACK, X), expected(STACK, X)) <= EXACT
    batched = lambda grad: jax.jit(jax.vmap(lambda ws, x: jax.jit(grad)(ws, x), (None, 0)))
    xs = X.reshape(2, 3, WIDTH)
    assert error(batched(fun)(STACK, xs), batched(jax.grad(loss))(STACK, xs)) <= EXACT


@pytest.mark.parametrize("chunk", [1, 5, 1000])
def test_chunks(chunk):
    """More jvps than one chunk, and fewer."""
    check(lambda ws, x: square(layers(ws, x)), STACK, X, method=mw.PureForward(chunk=chunk))


@pytest.mark.parametrize("chunk", [0, -3, 1.5, "all"])
def test_bad_chunks(chunk):
    text = f"PureForward: chunk counts jvps side by side, at least 1, got {chunk!r}"
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        mw.PureForward(chunk=chunk)


def test_both_ends_of_an_input():
    """Its cotangent is the seed itself."""
    loss = functools.partial(lambda ws, x, y: square(layers(ws, x), y), y=0.2)
    for method in (mw.PureForward(inputs=1), mw.PureForward(inputs=(1,), per_example=True)):
        check(loss, STACK, X, method=method, argnums=(0, 1))
