"""`Moonwalk(checkpoint=...)`: walks in segments whose Phase I is run again."""

import dataclasses
import functools
import itertools
import json
import re

import jax
import jax.numpy as jnp
import memory
import numpy as np
import pytest
from jax import lax
from networks import KEY, NETWORKS, leaky, square, turn
from test_engine import EXACT, arrays, compare, error, reference, some, under_jit
from test_gradient import Counter
from weights import normal, orthogonal

import moonwalk as mw
from moonwalk.segments.store import Recompute

pytestmark = pytest.mark.filterwarnings("ignore::moonwalk.PlanWarning")

VARIANTS = ("auto", "sqrt", "block", 3)


def types(tree):
    """Arrays as shapes and dtypes."""
    return jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype) if hasattr(a, "dtype") else a, tree
    )


# --- the table of networks ------------------------------------------------------------------------------

FLAT = """MLP, MLP with biases, MLP with anchors, MaxMin, patchify, average pooling, two towers,
embedding stem; tied head, cond, tied weights, frozen layers, weight decay, biases times data, None leaves,
aux, keywords, gradient of the input, stop_gradient on one way"""
SCANNED = """scan, scan with biases; between layers, scan; shared weights, scan; reversed, scan over data,
scan; counter and key, scan; a weight times the counter, scan; a last period that is shorter,
scan; reversed; a last period that is shorter, scans in a Python loop, scan of scans, fori_loop,
scan with small outputs, scan; residual inside, scan; noise through a weight"""
NAMES = [n.strip().replace(";", ",") for n in f"{FLAT}, {SCANNED}".replace("\n", " ").split(",")]
CASES = {f"{name}: {checkpoint}": (name, checkpoint) for name in NAMES for checkpoint in VARIANTS}
UNDER_JIT = {
    "MLP: sqrt",
    "cond: auto",
    "MLP with anchors: sqrt",
    "two towers: 3",
    "gradient of the input: sqrt",
    "average pooling: block",
    "scan with biases, between layers: 3",
    "scan, counter and key: sqrt",
    "scan, reversed, a last period that is shorter: auto",
    "scan with small outputs: auto",
    "scans in a Python loop: sqrt",
    "scan of scans: block",
}
# What other networks, or other tests, have in segments.
LATER = {
    "MLP: sqrt",
    "scan, counter and key: sqrt",
    "scans in a Python loop: sqrt",
}
EAGERLY = {
    "gradient of the input: auto",
    "scan, reversed, a last period that is shorter: 3",
    "scan of scans: sqrt",
}


def planned(case):
    name, checkpoint = CASES[case]
    n = NETWORKS[name]
    method = dataclasses.replace(n.method, checkpoint=checkpoint, walk="always")
    return mw.plan(n.loss, *types(n.args), method=method, **n.options, **types(n.kwargs))


@pytest.mark.parametrize("case", some(CASES, UNDER_JIT - LATER))
def test_gradient_under_jit(case):
    """The plan that is used was made from types alone."""
    n, plan = NETWORKS[CASES[case][0]], planned(case)
    assert plan.rerun or case not in UNDER_JIT
    fun = mw.value_and_grad(n.loss, method=plan, **n.options)
    compare(under_jit(fun, *n.args, **n.kwargs), reference(n.name))


@pytest.mark.parametrize("case", some(CASES, EAGERLY))
def test_gradient_eagerly(case):
    name, checkpoint = CASES[case]
    n = NETWORKS[name]
    method = dataclasses.replace(n.method, checkpoint=checkpoint)
    found = mw.value_and_grad(n.loss, method=method, **n.options)(*n.args, **n.kwargs)
    compare(arrays(found), reference(n.name))


# --- segments of scans ----------------------------------------------------------------------------------

ROWS, WIDTH, DEPTH = 64, 8, 7
X = normal(ROWS, WIDTH, seed=1)
LAYERS = [orthogonal(WIDTH, seed=i) for i in range(DEPTH)]
STACK = jnp.stack(LAYERS)


def scanned(ws, x):
    return square(lax.scan(lambda c, w: (turn(c, w), None), x, ws)[0])


def looped(ws, x):
    for w in ws:
        x = turn(x, w)
    return square(x)


def walking(**options):
    """Everything is walked, whatever it costs, in the segments that are asked for."""
    return mw.Moonwalk(walk="always", **options)


def check(loss, *args, method, certify=False, **options):
    """Everything walked, under jit; returns the plan and the certificate."""
    plan = mw.plan(loss, *types(args), method=method, **options)
    fun = mw.value_and_grad(loss, method=method, certify=certify, **options)
    found = jax.jit(fun)(*args)
    expected = jax.jit(jax.value_and_grad(loss, **options))(*args)
    compare(arrays(found[:2]), arrays(expected))
    return plan, found[2] if certify else None


def busy(p, x, key, reverse=False):
    """Stacked outputs with and without a derivative, a counter, a key, a shared and a stacked bias."""

    def step(carry, layer):
        x, count, key = carry
        w, b = layer
        key, own = jax.random.split(key)
        x = turn(x, w) + 0.1 * count * b + p["shared"] * jax.random.normal(own, (WIDTH,))
        return (x, count + 1, key), (x.mean(0), count)

    start = (x @ p["stem"], 0, key)
    (x, count, _), (ys, counts) = lax.scan(step, start, (p["w"], p["b"]), reverse=reverse)
    return square(x) + square(ys, 0.2), {"count": count, "counts": counts, "means": ys}


BUSY = {
    "w": STACK,
    "b": normal(DEPTH, WIDTH, seed=2),
    "shared": normal(WIDTH),
    "stem": orthogonal(WIDTH, seed=9),
}


@pytest.mark.parametrize(
    ("checkpoint", "anchor_every", "text", "reverse"),
    [
        pytest.param(2, None, "2 segments of 4", True, marks=pytest.mark.slow),  # of 4 layers and of 3
        (3, 2, "an anchor every 2, 3 segments of 3", False),  # a segment ends in a shorter period
        pytest.param(2, 3, "an anchor every 3, 2 segments of 4", True, marks=pytest.mark.slow),
        pytest.param(8, None, "7 segments of 1", False, marks=pytest.mark.slow),
        pytest.param(1, 2, "7 layers, an anchor every 2", True, marks=pytest.mark.slow),
    ],
)
def test_lengths_that_segments_do_not_divide(checkpoint, anchor_every, text, reverse):
    method = walking(checkpoint=checkpoint, anchor_every=anchor_every)
    loss = functools.partial(busy, reverse=reverse)
    plan, certificate = check(loss, BUSY, X, KEY, method=method, certify=True, has_aux=True)
    (scan,) = (r for r in plan.rows if r.block.startswith("scan"))
    assert text in scan.why
    assert certificate.error <= 1e-11


def test_anchors_for_accuracy_inside_segments():
    """Each segment starts from an exact cotangent: one of 8 layers needs an anchor, one of 4 none."""
    ws = jnp.stack([orthogonal(WIDTH, seed=i) for i in range(16)])
    for checkpoint, text in ((2, "an anchor every 4, 2 segments of 8"), (4, "16 layers, 4 segments")):
        method = walking(checkpoint=checkpoint, tolerance=1e-13, on_inexact="ignore")
        plan, _ = check(scanned, ws, X, method=method)
        assert text in plan.rows[0].why


@pytest.mark.parametrize("checkpoint", [2, pytest.param("block", marks=pytest.mark.slow)])
def test_segments_between_the_ways_of_forks(checkpoint):
    """A skip across segments, one inside a segment, a late reader of the state without a derivative."""

    def loss(ws, x):
        first = turn(x, ws[0])
        x = turn(first, ws[1])
        x = x + turn(turn(x, ws[2]), ws[3])
        x = turn(x, ws[4]) + first
        return square(jnp.where(first > 0, turn(x, ws[5]), x))

    check(loss, LAYERS, X, method=walking(checkpoint=checkpoint, on_inexact="ignore"))


def test_a_weight_that_a_scan_shares_with_the_layers_around_it():
    def loss(w, x):
        x = turn(turn(x, w), w)
        x = lax.scan(lambda c, _: (turn(c, w), None), x, None, length=5)[0]
        return square(turn(x, w)) + 0.1 * jnp.sum(w**2)

    check(loss, LAYERS[0], X, method=walking(checkpoint=4))


@pytest.mark.parametrize("loss", [scanned, looped])
def test_derivatives_of_the_gradient_and_batches_of_it(loss):
    ws = STACK if loss is scanned else LAYERS
    fun = mw.grad(loss, method=walking(checkpoint=3))

    def size(grad):
        return lambda ws, x: sum(jnp.sum(g**2) for g in jax.tree.leaves(grad(loss)(ws, x)))

    ours = jax.grad(size(lambda _: fun))
    second = jax.jit(ours)(ws, X)
    several = jax.jit(jax.vmap(lambda ws, x: jax.jit(fun)(ws, x), (None, 0)))(ws, X[:, None])
    assert error(second, jax.jit(jax.grad(size(jax.grad)))(ws, X)) <= EXACT
    assert error(several, jax.jit(jax.vmap(jax.grad(loss), (None, 0)))(ws, X[:, None])) <= EXACT


def test_a_plan_with_measured_gains_goes_into_jit():
    """Nothing is declared; the plan has measured, and its walks in segments carry their check."""

    def loss(ws, x):
        return square(lax.scan(lambda c, w: (leaky(c @ w), None), x, ws)[0])

    plan = mw.plan(loss, STACK, X, method=mw.Moonwalk(checkpoint=2))
    assert plan.measured and plan.checked and plan.rerun == 2
    found = jax.jit(mw.value_and_grad(loss, method=plan))(STACK, X)
    compare(arrays(found), arrays(jax.jit(jax.value_and_grad(loss))(STACK, X)))
    drifted = STACK * jnp.logspace(0, -3, WIDTH)
    with pytest.raises(Exception, match="certificate exceeds the tolerance"):
        jax.block_until_ready(jax.jit(mw.grad(loss, method=plan))(drifted, X))


@pytest.mark.parametrize("checkpoint", VARIANTS)
def test_nothing_to_walk(checkpoint):
    """No rows; no layers."""
    for ws, x in ((STACK, X[:0]), (STACK[:0], X)):
        loss = lambda ws, x: square(x) + lax.scan(lambda c, w: (turn(c, w), None), x, ws)[0].sum()
        if checkpoint == 3 and not len(ws):
            with pytest.raises(ValueError, match="too few for 3 segments"):
                mw.plan(loss, ws, x, method=mw.Moonwalk(checkpoint=checkpoint))
            continue
        found = jax.jit(mw.grad(loss, method=mw.Moonwalk(checkpoint=checkpoint)))(ws, x)
        np.testing.assert_array_equal(found, jax.grad(loss)(ws, x))


# --- memory ---------------------------------------------------------------------------------------------

LARGE = 16384


def temp(loss, args, checkpoint):
    """(MiB, MiB predicted)"""
    method = mw.Moonwalk(checkpoint=checkpoint)
    plan = mw.plan(loss, *args, method=method)
    return memory.temp(mw.value_and_grad(loss, method=method), *args), plan.peak_bytes / memory.MIB


def test_a_thousand_layers():
    args = memory.dense_types(1024, LARGE)
    default, _ = temp(memory.scanned, args, None)
    found, predicted = temp(memory.scanned, args, "auto")
    best = min(
        memory.temp(jax.value_and_grad(functools.partial(memory.segmented, every=k)), *args)
        for k in (16, 32, 64)
    )
    more, more_predicted = temp(memory.scanned, memory.dense_types(4096, LARGE), "auto")
    assert found <= default / 2
    assert found <= best / 4
    assert more <= 2.2 * found
    assert abs(predicted / found - 1) <= 0.25 and abs(more_predicted / more - 1) <= 0.25


def test_segments_of_a_python_loop_wait_for_each_other():
    """Phase III of one, and all phases of the one before it, once ran side by side: +2 activations."""
    found, predicted = temp(memory.looped, memory.dense_types(8, LARGE, loop=True), 2)
    assert abs(predicted / found - 1) <= 0.05


@pytest.mark.slow
def test_a_python_loop():
    # At other depths XLA packs buffers with holes: of 96 layers 103.5 MiB are alive at once, in 112.5.
    args = memory.dense_types(112, LARGE, loop=True)
    default, _ = temp(memory.looped, args, None)
    found, predicted = temp(memory.looped, args, "auto")
    assert found <= default
    assert abs(predicted / found - 1) <= 0.05


def scans(ws, x, t):
    for w in ws:
        x = lax.scan(lambda x, w: (memory.layer(x, w), None), x, w)[0]
    return memory.head(x, t)


def test_scans_in_a_row():
    """No state of one is held while the others run, and "auto" is never above the default."""
    args = memory.dense_types(3, LARGE)
    few, many = (([memory.struct(n, *memory.struct(256, 256).shape)] * 3, *args[1:]) for n in (64, 256))
    assert temp(scans, few, "auto")[0] <= temp(scans, few, None)[0]
    found, predicted = temp(scans, many, "auto")
    assert found <= 0.6 * temp(scans, many, None)[0]
    assert abs(predicted / found - 1) <= 0.25


# --- what is said ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("checkpoint", [0, -1, True, 2.0, "root", ""])
def test_bad_values(checkpoint):
    text = (
        "Moonwalk: checkpoint must be None, a number of segments, or one of 'auto', 'sqrt', 'block', "
        f"got {checkpoint!r}"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        mw.Moonwalk(checkpoint=checkpoint)


@pytest.mark.parametrize(("loss", "ws"), [(scanned, STACK), (looped, LAYERS)])
def test_more_segments_than_layers(loss, ws):
    text = (
        "Moonwalk(checkpoint=8): the network has 7 layers, too few for 8 segments; ask for fewer, or "
        "for checkpoint='auto'"
    )
    for run in (mw.plan, lambda *a, method: mw.value_and_grad(loss, method=method)(*a[1:])):
        with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
            run(loss, ws, X, method=mw.Moonwalk(checkpoint=8))


def test_the_plan_tells_of_segments():
    plan = mw.plan(scanned, *types((STACK, X)), method=mw.Moonwalk(checkpoint=2))
    assert plan.rerun == 2
    assert "; 2 segments run again" in plan.table().splitlines()[0]
    assert any("7 layers, 2 segments of 4" in line for line in plan.table().splitlines())
    assert json.loads(json.dumps(plan.to_dict(), allow_nan=False))["rerun"] == 2
    flat = mw.plan(looped, *types((LAYERS, X)), method=mw.Moonwalk(checkpoint=2))
    assert flat.rerun == 2
    assert sum("; Phase I run again" in r.why for r in flat.rows) >= 2 * DEPTH - 2
    none = mw.plan(scanned, *types((STACK, X)))
    assert none.rerun == 0 and "segment" not in str(none)
    assert mw.Moonwalk(checkpoint=2) == mw.Moonwalk(checkpoint=2) != mw.Moonwalk(checkpoint="sqrt")


@pytest.mark.parametrize("is_loop", [True, False])
def test_layers_tell_of_themselves_once(is_loop):
    """Though Phase I is run twice, and everything swept."""
    counter = Counter()

    def layer(x, w):
        x = turn(x, w)
        counter.count(x.sum())
        return x

    def loss(ws, x):
        if is_loop:
            for w in ws:
                x = layer(x, w)
        else:
            x = lax.scan(lambda c, w: (layer(c, w), None), x, ws)[0]
        counter.count(-1.0)
        return square(x)

    ws = LAYERS if is_loop else STACK
    jax.block_until_ready(jax.jit(mw.grad(loss, method=walking(checkpoint=3)))(ws, X))
    calls = [float(c[0]) for c in counter.settled()]
    x, expected = X, [-1.0]
    for w in LAYERS:
        x = turn(x, w)
        expected.append(float(x.sum()))
    np.testing.assert_allclose(sorted(calls), sorted(expected), rtol=1e-10)


def two_states(ws, x):
    """Blocks that read and return two states; no place between them has one state alone."""
    a, b = x @ ws[0], jnp.sin(x @ ws[1])
    for i in range(2, 14, 2):
        a, b = a + jnp.tanh(a @ ws[i] + b), b + jnp.tanh(b @ ws[i + 1] * a)
    return jnp.mean(a * b)


def test_blocks_with_several_states_between_them():
    ws, x = [normal(8, 8, seed=i) / 3 for i in range(14)], normal(64, 8, seed=20)
    plan = mw.plan(two_states, ws, x, method=mw.Checkpoint("block"))
    starts = [segment.start for segment in plan.segments if isinstance(segment, Recompute)]
    lengths = {b - a for a, b in itertools.pairwise(starts)}
    assert len(starts) >= 5 and len(lengths) == 1, plan.segments
    found = jax.jit(mw.value_and_grad(two_states, method=plan))(ws, x)
    expected = jax.value_and_grad(two_states)(ws, x)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-10, atol=1e-12)
