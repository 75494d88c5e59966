"""Right or loud: cotangents keep their scale, certificates see every entry, errors say where and how much."""

import dataclasses
import itertools
import math

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import strategies as st
from jax import lax
from marks import slow, some, some_cases

import moonwalk as mw
from moonwalk.execute import certificate
from moonwalk.execute.certificate import BUCKETS
from moonwalk.execute.scale import Cotangents, shifted

pytestmark = pytest.mark.filterwarnings("ignore::moonwalk.PlanWarning")

WIDTH, ROWS = 16, 8
ALWAYS = mw.Moonwalk(walk="always")


def orthogonal(depth, *, width=WIDTH, seed=0, dtype=jnp.float32):
    drawn = jax.random.normal(jax.random.key(seed), (depth, width, width), jnp.float64)
    return jnp.linalg.qr(drawn)[0].astype(dtype)


def rows(seed=1, dtype=jnp.float32, width=WIDTH):
    return jax.random.normal(jax.random.key(seed), (ROWS, width), jnp.float64).astype(dtype)


def scanned(layer):
    def loss(params, x):
        return jnp.mean(lax.scan(lambda x, p: (layer(x, p), None), x, params)[0] ** 2)

    return loss


def looped(layer):
    def loss(params, x):
        for i in range(len(jax.tree.leaves(params)[0])):
            x = layer(x, jax.tree.map(lambda a, i=i: a[i], params))
        return jnp.mean(x**2)

    return loss


def scaled_layer(factor):
    def layer(x, p):
        w, b = p
        return factor * jnp.abs(x @ mw.declare(w, "orthogonal")) + b

    return layer


def leaky_diagonal(x, p):
    """Diagonal pivots with LeakyReLU(.01): loses two digits of the cotangent's size in every layer."""
    w, b = p
    return jax.nn.leaky_relu(x @ mw.declare(w * jnp.eye(WIDTH, dtype=w.dtype), "diagonal") + b, 0.01)


def error(found, truth):
    """‖found − truth‖ / ‖truth‖ over all leaves."""
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(truth), strict=True)
    pairs = [(np.asarray(a, np.float64), np.asarray(b, np.float64)) for a, b in pairs]
    size = math.sqrt(sum(np.sum(b**2) for _, b in pairs))
    return math.sqrt(sum(np.sum((a - b) ** 2) for a, b in pairs)) / size


def as_exact_as_backprop(loss, args, method=ALWAYS, factor=10):
    """In the dtype at hand no worse than ten times backpropagation, both against float64.

    Or than the rounding of all layers: where cotangents shrink, the gradient is that of the last layers,
    which backpropagation comes to first and a walk last.
    """
    wide = jax.tree.map(lambda a: a.astype(jnp.float64), args)
    truth = jax.jit(jax.grad(loss))(*wide)
    theirs = error(jax.jit(jax.grad(loss))(*args), truth)
    gradient, found = jax.jit(mw.grad(loss, method=method, certify=True))(*args)
    depth = len(jax.tree.leaves(args[0])[0])
    rounding = float(jnp.finfo(args[1].dtype).eps) * math.sqrt(depth)
    assert error(gradient, truth) <= factor * max(theirs, rounding)
    return found


def biased(depth, scale=0.1, dtype=jnp.float32):
    b = scale * jax.random.normal(jax.random.key(2), (depth, WIDTH))
    return orthogonal(depth, dtype=dtype), b.astype(dtype)


# --- scale ------------------------------------------------------------------------------------------


DEPTHS = [(0.5, 140), (0.1, 40), (0.5, 400), (0.01, 100), (2.0, 60)]


@pytest.mark.parametrize(
    ("checkpoint", "factor", "depth"),
    some_cases(
        [(checkpoint, *scale) for scale in DEPTHS for checkpoint in (None, "auto", "block")],
        {(None, 0.1, 40), ("auto", 0.5, 140)},
    ),
)
def test_cotangents_that_leave_the_range_of_float32(factor, depth, checkpoint):
    method = mw.Moonwalk(walk="always", checkpoint=checkpoint)
    as_exact_as_backprop(scanned(scaled_layer(factor)), (biased(depth), rows()), method)


def test_the_default_plan_keeps_the_scale_too():
    loss, args = scanned(scaled_layer(0.5)), (biased(140), jnp.tile(rows(), (512, 1)))
    assert mw.plan(loss, *args).walks
    as_exact_as_backprop(loss, args, mw.Moonwalk())


@pytest.mark.parametrize("depth", [24, slow(60)])
def test_cotangents_that_leave_the_range_in_a_loop(depth):
    as_exact_as_backprop(looped(scaled_layer(0.02)), (biased(depth), rows()))


@pytest.mark.parametrize("form", [scanned, slow(looped)])
def test_diagonal_pivots_behind_small_slopes(form):
    """24 layers of slope .01 take a cotangent down by 1e-48 where it is always on the flat side."""
    w = 1 + 0.1 * jax.random.normal(jax.random.key(3), (24, WIDTH), jnp.float32)
    b = -jnp.ones((24, WIDTH), jnp.float32)
    found = as_exact_as_backprop(form(leaky_diagonal), ((w, b), rows()))
    assert 0 <= float(found.error) <= 1e-4


@pytest.mark.slow
def test_float64_at_1120_layers():
    args = (biased(1120, dtype=jnp.float64), rows(dtype=jnp.float64))
    truth = jax.jit(jax.grad(scanned(scaled_layer(0.5))))(*args)
    found = jax.jit(mw.grad(scanned(scaled_layer(0.5)), method=ALWAYS))(*args)
    assert error(found, truth) <= 1e-10


SCALES = (
    st.floats(-1.5, 0.5),
    st.integers(1, 48),
    st.sampled_from([-30, -10, 0, 10, 30]),
    st.booleans(),
)


@hypothesis.settings(max_examples=3)
@hypothesis.given(*SCALES)
def test_scales_drawn_at_random(order, depth, loss_scale, by_loop):
    check_scales(order, depth, loss_scale, by_loop)


@pytest.mark.slow
@hypothesis.settings(max_examples=20)
@hypothesis.given(*SCALES)
def test_more_scales_drawn_at_random(order, depth, loss_scale, by_loop):
    check_scales(order, depth, loss_scale, by_loop)


def check_scales(order, depth, loss_scale, by_loop):
    """Layers of any scale under a loss of any scale: the gradient is right wherever JAX's is finite."""
    depth = min(depth, 10) if by_loop else depth
    layer = scaled_layer(10.0**order)
    inner = (looped if by_loop else scanned)(layer)

    def loss(params, x):
        return jnp.asarray(10.0**loss_scale, x.dtype) * inner(params, x)

    args = (biased(depth), rows())
    truth = jax.jit(jax.grad(loss))(*jax.tree.map(lambda a: a.astype(jnp.float64), args))
    theirs = jax.jit(jax.grad(loss))(*args)
    hypothesis.assume(all(bool(jnp.all(jnp.isfinite(a))) for a in theirs))
    ours = jax.jit(mw.grad(loss, method=ALWAYS))(*args)
    assert error(ours, truth) <= 10 * max(error(theirs, truth), 1.2e-7)


def test_a_backward_pass_that_clips_sees_the_cotangent_itself():
    """A custom_vjp need not be linear: it is never handed a cotangent that was rescaled."""

    @jax.custom_vjp
    def clipped(x):
        return x

    clipped.defvjp(lambda x: (x, None), lambda _, h: (jnp.clip(h, -1e-3, 1e-3),))

    def layer(x, p):
        w, b = p
        return clipped(0.5 * jnp.abs(x @ mw.declare(w, "orthogonal")) + b)

    for form, depth in ((scanned, 40), (looped, 6)):
        args = (biased(depth), rows())
        expected = jax.jit(jax.grad(form(layer)))(*args)
        assert error(jax.jit(mw.grad(form(layer), method=ALWAYS))(*args), expected) <= 1e-5


METHODS = {
    "always": ALWAYS,
    "anchors": mw.Moonwalk(walk="always", anchor_every=3),
    "segments": mw.Moonwalk(walk="always", checkpoint=3),
}


@pytest.mark.parametrize("backward", ["sign", slow("clip")])
def test_a_backward_pass_that_is_not_linear_around_a_nested_scan(backward):
    """The inner scan may not rescale what the outer one's backward pass looks at."""
    act = {"sign": jnp.sign, "clip": lambda h: jnp.clip(h, -0.01, 0.01)}[backward]
    gate = jax.custom_vjp(lambda x: x)
    gate.defvjp(lambda x: (x, None), lambda _, h: (act(h),))
    ws = orthogonal(6, width=6, dtype=jnp.float64).reshape(3, 2, 6, 6)

    def loss(ws, x):
        inner = lambda x, w: (0.1 * jnp.abs(x @ mw.declare(w, "orthogonal")), None)
        outer = lambda x, w: (gate(lax.scan(inner, x, w)[0]), None)
        return 1e3 * jnp.sum(lax.scan(outer, x, ws)[0])

    x = rows(width=6, dtype=jnp.float64)
    expected = jax.jit(jax.grad(loss))(ws, x)
    for method in METHODS.values():
        assert error(jax.jit(mw.grad(loss, method=method))(ws, x), expected) <= 1e-12


@pytest.mark.parametrize("method", some(METHODS, ["always", "segments"]))
def test_a_backward_pass_that_clips_beside_large_outputs(method):
    """Outputs of layers with huge cotangents do not rescale what a clipping backward pass sees."""
    gate = jax.custom_vjp(lambda x: x)
    gate.defvjp(lambda x: (x, None), lambda _, h: (jnp.clip(h, -1.0, 1.0),))

    def loss(ws, x):
        def layer(x, w):
            y = gate(jnp.abs(x @ mw.declare(w, "orthogonal")))
            return y, y[:, 0]

        y, ys = lax.scan(layer, x, ws)
        return jnp.sum(y) + 1e9 * jnp.sum(ys)

    args = orthogonal(6, dtype=jnp.float64), rows(dtype=jnp.float64)
    quiet = dataclasses.replace(METHODS[method], on_inexact="ignore")
    found = jax.jit(mw.grad(loss, method=quiet))(*args)
    assert error(found, jax.grad(loss)(*args)) <= 1e-5


@pytest.mark.parametrize(
    ("size", "loss_scale", "by_loop", "method"),
    some_cases(
        itertools.product((1e37,), (1e-30,), (False, True), METHODS),
        {(1e37, 1e-30, False, "always"), (1e37, 1e-30, True, "segments")},
    )
    + some_cases(
        itertools.product((1e-30,), (1e28,), (False, True), METHODS),
        {(1e-30, 1e28, True, "always"), (1e-30, 1e28, False, "anchors")},
    ),
)
def test_activations_that_are_huge_or_tiny(size, loss_scale, by_loop, method):
    """A rescaled cotangent times a huge activation leaves the range, though the gradient does not."""

    def loss(ws, x):
        layer = lambda x, w: jnp.abs(x @ mw.declare(w, "orthogonal"))
        if by_loop:
            for w in ws:
                x = layer(x, w)
        else:
            x, _ = lax.scan(lambda x, w: (layer(x, w), None), x, ws)
        return jnp.sum(x) * jnp.asarray(loss_scale, x.dtype)

    args = orthogonal(5), rows() * jnp.float32(size)
    truth = jax.jit(jax.grad(loss))(*jax.tree.map(lambda a: a.astype(jnp.float64), args))
    assert error(jax.jit(mw.grad(loss, method=METHODS[method]))(*args), truth) <= 1e-5


OTHER_SCALES = [
    (1.0, 20, 1e-20, 1e25, 0),  # a walk says that it cannot
    (0.1, 60, 1.0, 1.0, 0),
    (0.1, 80, 0.0, 1.0, -1),
    (0.1, 45, 1.0, 1e-8, 3),  # it can
]


@pytest.mark.parametrize(
    ("factor", "depth", "carry", "output", "place", "reverse", "method"),
    some_cases(
        [
            (*scale, *rest)
            for scale in OTHER_SCALES
            for rest in itertools.product((False, True), METHODS)
        ],
        {(*OTHER_SCALES[0], True, "anchors"), (*OTHER_SCALES[3], True, "segments")},
    ),
)
def test_outputs_of_layers_on_another_scale(factor, depth, carry, output, place, reverse, method):
    """Cotangents that layers bring of their own, far larger or smaller than the carry's."""

    def loss(ws, x):
        def layer(x, w):
            y = factor * jnp.abs(x @ mw.declare(w, "orthogonal"))
            return y, y[:, 0]

        y, ys = lax.scan(layer, x, ws, reverse=reverse)
        carried, brought = (jnp.asarray(a, x.dtype) for a in (carry, output))
        return carried * jnp.sum(y) + brought * jnp.sum(ys[-1 - place if reverse else place])

    args = orthogonal(depth, width=6), rows(width=6)
    truth = jax.jit(jax.grad(loss))(*jax.tree.map(lambda a: a.astype(jnp.float64), args))
    theirs = error(jax.jit(jax.grad(loss))(*args), truth)
    bound = 10 * max(theirs, 1.2e-7 * math.sqrt(depth))
    # Of a sum, a walk cannot recover what is lost in the other summand: then it must say so.
    if place != -1:
        quiet = dataclasses.replace(METHODS[method], on_inexact="nan")
        gradient = jax.jit(mw.grad(loss, method=quiet))(*args)
        assert bool(jnp.all(jnp.isnan(gradient))) or error(gradient, truth) <= bound
    else:
        gradient = jax.jit(mw.grad(loss, method=METHODS[method]))(*args)
        assert error(gradient, truth) <= bound


@pytest.mark.parametrize(
    ("used", "method"),
    some_cases(
        itertools.product(("unused", "all"), ("default", *METHODS)),
        {("all", "anchors"), ("all", "segments")},
    ),
)
def test_outputs_of_an_inner_scan_handed_on(used, method):
    def loss(ws, x):
        def layer(x, w):
            y = jnp.abs(x @ mw.declare(w, "orthogonal"))
            return y, y[:, 0]

        y, ys = lax.scan(lambda x, w: lax.scan(layer, x, w), x, ws)
        return jnp.sum(y) + (jnp.sum(ys**2) if used == "all" else 0)

    args = orthogonal(6, dtype=jnp.float64).reshape(3, 2, WIDTH, WIDTH), rows(dtype=jnp.float64)
    found = jax.jit(mw.grad(loss, method=METHODS.get(method, mw.Moonwalk())))(*args)
    assert error(found, jax.grad(loss)(*args)) <= 1e-11


@pytest.mark.parametrize("method", some(METHODS, ["anchors", "segments"]))
def test_outputs_without_entries(method):
    def loss(ws, x):
        body = lambda c, w: ((jnp.abs(c[0] @ mw.declare(w, "orthogonal")), c[1] * 2), c[1])
        (y, z), zs = lax.scan(body, (x, jnp.zeros((0, 3), x.dtype)), ws)
        return jnp.sum(y) + jnp.sum(z) + jnp.sum(zs)

    args = orthogonal(7), rows()
    found = jax.jit(mw.grad(loss, method=METHODS[method]))(*args)
    assert error(found, jax.grad(loss)(*args)) <= 1e-5


def test_a_backward_pass_of_ones_own_is_compared_at_its_own_scale():
    """Behind layers that rescale, it works with the cotangent itself, and so does its certificate."""
    gate = jax.custom_vjp(lambda x: 2 * x)
    gate.defvjp(lambda x: (2 * x, None), lambda _, h: (2 * h,))

    def loss(ws, x):
        for i, w in enumerate(ws):
            x = jnp.abs(x @ mw.declare(w, "orthogonal"))
            x = gate(x) if i in (1, 18) else 0.5 * x
        return jnp.mean(x**2)

    args = list(orthogonal(20)), rows()
    found, measured = jax.jit(mw.grad(loss, method=ALWAYS, certify=True))(*args)
    assert float(measured.error) <= 1e-4
    assert error(found, jax.grad(loss)(*args)) <= 1e-4


def test_large_batches_in_float16():
    """The sum over a batch may leave the range of float16 where the mean does not."""
    loss = scanned(lambda x, w: jnp.abs(x @ mw.declare(w, "orthogonal")))
    x = 20 * jnp.tile(rows(dtype=jnp.float16), (4096, 1))
    ws = orthogonal(4, dtype=jnp.float16)
    found, expected = (jax.jit(f(loss))(ws, x) for f in (mw.grad, jax.grad))
    assert bool(jnp.all(jnp.isfinite(expected)))
    assert error(found, expected) <= 0.02


def test_branches_of_different_scales():
    """A branch that shrinks beside a skip that does not: each cotangent has its own exponent."""

    def loss(params, x):
        ws, bs = params
        y = x
        for w, b in zip(ws, bs, strict=True):
            y = 0.02 * jnp.abs(y @ mw.declare(w, "orthogonal")) + b
        return jnp.mean((x @ mw.declare(ws[0], "orthogonal")) * 1e3 + y * 1e-20) ** 2

    ws, bs = biased(20)
    args = ((list(ws), list(bs)), rows())
    wide = jax.tree.map(lambda a: a.astype(jnp.float64), args)
    truth, theirs = jax.jit(jax.grad(loss))(*wide), jax.jit(jax.grad(loss))(*args)
    ours = jax.jit(mw.grad(loss, method=ALWAYS))(*args)
    for leaf, backprop, exact in zip(*map(jax.tree.leaves, (ours, theirs, truth)), strict=True):
        if np.linalg.norm(exact) > 1e-35:  # in range at all
            assert error(leaf, exact) <= 10 * max(error(backprop, exact), 1.2e-7)


def test_powers_of_two_are_exact():
    a = jax.random.normal(jax.random.key(0), (100,), jnp.float32)
    for by in (0, 1, -30, 100, -100):
        there = shifted(a, jnp.int32(by))
        np.testing.assert_array_equal(np.asarray(there, np.float64), np.asarray(a, np.float64) * 2.0**by)
        np.testing.assert_array_equal(shifted(there, jnp.int32(-by)), a)
    tiny = jnp.float32(2.0**-120)
    assert float(shifted(tiny, jnp.int32(200))) == 2.0**80  # although 2^200 is not in range
    h = Cotangents({"a": a}, {"a": jnp.int32(-3)})
    h.add("a", a, jnp.int32(-1))
    np.testing.assert_allclose(h.unscaled()["a"], a * 2.0**-3 + a * 2.0**-1, rtol=1e-6)


# --- sketches ---------------------------------------------------------------------------------------

SHAPES = [(), (1,), (7,), (0, 3), (5000,), (8, 16), (3, 5, 7), (2, 3, 4096), (1, 1, 4), (6, 1, 2100)]


@pytest.mark.parametrize("shape", SHAPES)
def test_a_sketch_is_linear_and_small(shape):
    a, b = (jax.random.normal(jax.random.key(i), shape, jnp.float64) for i in range(2))
    both, one, other = (certificate.sketch(x) for x in (2 * a - b, a, b))
    assert both.size <= BUCKETS
    np.testing.assert_allclose(both, 2 * one - other, atol=1e-11)


def faults():
    """Errors of size ε ‖h‖ in one entry, a row, a column, a head, a block, everywhere."""
    shape = (64, 128)
    i, j = np.indices(shape)
    return {
        "an entry": (i == 17) & (j == 90),
        "a row": i == 3,
        "a channel": j == 77,
        "a head": (j >= 32) & (j < 36),
        "a corner": (i < 8) & (j < 16),
        "all": i >= 0,
    }


@pytest.mark.parametrize("where", some(faults(), ["an entry", "a head", "all"]))
def test_a_fault_is_seen_wherever_it_lies(where):
    """Of 200 faults of relative size 1e-3 nearly none is measured as less than 1e-4."""
    mask = faults()[where]
    rng = np.random.default_rng(0)
    measured = []
    for _ in range(200):
        h = rng.normal(size=mask.shape)
        fault = np.where(mask, rng.normal(size=mask.shape), 0)
        fault *= 1e-3 * np.linalg.norm(h) / np.linalg.norm(fault)
        sketches = [certificate.sketch(jnp.asarray(a)) for a in (h + fault, h)]
        measured.append(float(certificate.compare(*sketches)))
    assert np.median(measured) == pytest.approx(1e-3, rel=0.5)
    assert np.mean(np.asarray(measured) < 1e-4) <= 0.01


def test_what_is_not_finite():
    good = jnp.ones(4)
    bad = good.at[1].set(jnp.nan)
    assert float(certificate.compare(bad, good)) == math.inf
    assert math.isnan(float(certificate.compare(good, bad)))
    assert float(certificate.compare(0 * good, 0 * good)) == 0


# --- loud -------------------------------------------------------------------------------------------

HEADS, SIZE = 32, 4


def heads(x, w):
    """Block-diagonal: a matrix per head."""
    x = x.reshape(ROWS, HEADS, SIZE)
    return jnp.abs(jnp.einsum("rhi,hio->rho", x, w)).reshape(ROWS, HEADS * SIZE)


def drifted(ws, where, size=0.3):
    noise = size * jax.random.normal(jax.random.key(5), ws.shape, ws.dtype)
    return ws + jnp.where(jnp.asarray(where).reshape(1, -1, 1, 1), noise, 0)


@pytest.mark.parametrize("count", [1, slow(4), 28])
def test_heads_that_drift(count):
    """A plan measured on orthogonal heads, some of which are not orthogonal any more."""
    drawn = jax.random.normal(jax.random.key(0), (12, HEADS, SIZE, SIZE), jnp.float64)
    ws = jnp.linalg.qr(drawn)[0].astype(jnp.float32)
    x = rows(width=HEADS * SIZE)
    loss = scanned(heads)
    plan = mw.plan(loss, ws, x, method=ALWAYS)
    assert plan.walks
    run = jax.jit(mw.grad(loss, method=plan))
    assert error(run(ws, x), jax.grad(loss)(ws, x)) <= 1e-4
    # The general solver follows weights wherever they go; a singular head leaves no way back.
    singular = ws.at[6, :count, :, 0].set(0.0)
    with pytest.raises(
        Exception, match=r"certificate exceeds the tolerance .*layer \d+ of 12, at .*test_certificate"
    ):
        jax.block_until_ready(run(singular, x))


@pytest.mark.parametrize(
    ("certified_by", "count"),
    [("probe", 28), ("certificate", 1), slow("probe", 1), slow("certificate", 28)],
)
def test_false_declarations_of_some_heads(count, certified_by):
    ws = jnp.linalg.qr(jax.random.normal(jax.random.key(0), (12, HEADS, SIZE, SIZE), jnp.float64))[0]
    ws, x = ws.astype(jnp.float32), rows(width=HEADS * SIZE)
    loss = scanned(lambda x, w: heads(x, mw.declare(w, "orthogonal")))
    size = 0.3 if certified_by == "probe" else 3e-5  # within what a declaration may be off
    lying = drifted(ws, np.arange(HEADS) < count, size)
    run = jax.jit(mw.grad(loss, method=mw.Moonwalk(walk="always", tolerance=1e-6)))
    match = "declared 'orthogonal'.*not what is declared" if certified_by == "probe" else "certificate"
    with pytest.raises(Exception, match=match):
        jax.block_until_ready(run(lying, x))


def test_declared_and_then_trained_raw():
    """One step of Adam at 1e-3 is enough for the declaration to be false."""
    loss = scanned(lambda x, w: jnp.abs(x @ mw.declare(w, "orthogonal")))
    ws, x = orthogonal(32, width=64), rows(width=64)
    optimizer = optax.adam(1e-3)
    run = jax.jit(mw.grad(loss, method=ALWAYS))
    updates, _ = optimizer.update(run(ws, x), optimizer.init(ws))
    trained = optax.apply_updates(ws, updates)
    with pytest.raises(Exception, match=r"the weight `params\[layer\]`.*moonwalk.nn.orthogonal"):
        jax.block_until_ready(run(trained, x))


def test_a_small_drift_over_many_layers():
    """Q (1 + 4e-6) is orthogonal to rounding; 400 layers of it are not."""
    loss = scanned(lambda x, w: jnp.abs(x @ mw.declare(w, "orthogonal")))
    ws, x = orthogonal(400), rows()
    run = jax.jit(mw.grad(loss, method=ALWAYS))
    assert error(run(ws, x), jax.grad(loss)(ws, x)) <= 1e-4
    with pytest.raises(Exception, match="certificate exceeds the tolerance 1.0e-04"):
        jax.block_until_ready(run(ws * (1 + 4e-6), x))


def leaky_net(ws, x):
    for w in ws:
        x = jax.nn.leaky_relu(x @ mw.declare(w, "orthogonal"), 0.01)
    return jnp.mean(x**2)


@pytest.mark.parametrize("options", [{"anchor_every": 12}, {"tolerance": math.inf}, {"tolerance": 1e30}])
def test_anchors_that_are_too_far_apart(options):
    method = mw.Moonwalk(walk="always", **options)
    run = jax.jit(mw.grad(leaky_net, method=method))
    if options.get("tolerance") == 1e30:  # the user's own, and all that is asked for
        found = jax.block_until_ready(run(list(orthogonal(12)), rows()))
        assert error(found, jax.grad(leaky_net)(list(orthogonal(12)), rows())) > 1
        return
    with pytest.raises(Exception, match="certificate exceeds the tolerance 1.0e-04"):
        jax.block_until_ready(run(list(orthogonal(12)), rows()))


def test_a_rule_that_is_wrong_by_one_per_cent():
    @mw.custom_vijp
    def turn(x, w):
        return x @ w

    turn.defvijp(lambda primals, h: 1.01 * h @ primals[1])

    def loss(ws, x):
        for w in ws:
            x = jnp.abs(turn(x, w))
        return jnp.mean(x**2)

    args = list(orthogonal(4)), rows()
    with pytest.raises(mw.InexactError, match="custom_vijp rule does not hold"):
        mw.grad(loss, method=mw.Moonwalk(walk="always", tolerance=math.inf))(*args)
    quiet = mw.Moonwalk(walk="always", tolerance=math.inf, on_inexact="ignore")
    assert 1e-2 < error(mw.grad(loss, method=quiet)(*args), jax.grad(loss)(*args)) < 0.1


@pytest.mark.parametrize("depth", [2, slow(12), 48])
def test_bfloat16_is_held_to_what_bfloat16_can_do(depth):
    loss = scanned(lambda x, w: jnp.abs(x @ mw.declare(w, "orthogonal")))
    args = orthogonal(depth, dtype=jnp.bfloat16), rows(dtype=jnp.bfloat16)
    gradient, found = jax.jit(mw.grad(loss, method=ALWAYS, certify=True))(*args)
    assert bool(jnp.all(jnp.isfinite(gradient)))
    assert 0 < float(found.error) < 0.1


# --- messages ---------------------------------------------------------------------------------------


def test_the_first_line_says_it_all(capfd):
    loss = scanned(lambda x, w: jnp.abs(x @ mw.declare(w, "orthogonal")))
    ws, x = orthogonal(8).at[5].multiply(1.5), rows()
    with pytest.raises(Exception, match="not what is declared") as raised:
        jax.block_until_ready(jax.jit(mw.grad(loss, method=ALWAYS))(ws, x))
    first = capfd.readouterr().err.splitlines()[0]
    for part in (
        "moonwalk.DeclarationError: value_and_grad: the weight `params[layer]` (f32[16,16])",
        "declared 'orthogonal', layer 5 of 8, at ",
        "test_certificate.py:",
        "1.2e+00 off",
        "moonwalk.nn.orthogonal",
    ):
        assert part in first
        assert part.removeprefix("moonwalk.") in str(raised.value)
    assert "filter_jit" not in str(raised.value)


def test_eagerly_the_error_is_the_librarys_own():
    with pytest.raises(
        mw.InexactError, match=r"dot_general .*test_certificate.py:\d+ \(leaky_net\), is \d"
    ):
        mw.grad(leaky_net, method=mw.Moonwalk(walk="always", anchor_every=12))(
            list(orthogonal(12)), rows()
        )


@pytest.mark.parametrize("form", [scanned, looped])
def test_nan_is_not_drift(form):
    """A gradient that is not finite in backpropagation is NaN, and no error of a walk."""
    loss = form(scaled_layer(1.0))
    (ws, bs), x = biased(6), rows()
    for params in ((ws.at[3, 2, 1].set(jnp.nan), bs), (ws, bs.at[4, 0].set(jnp.inf))):
        found = jax.jit(mw.grad(loss, method=ALWAYS))(params, x)
        assert all(bool(jnp.all(jnp.isnan(a))) for a in found)


@pytest.mark.parametrize("transform", ["vmap", "checkpoint", "scan"])
def test_errors_under_transformations(transform):
    loss = scanned(lambda x, w: jnp.abs(x @ mw.declare(w, "orthogonal")))
    ws, x = orthogonal(6), rows()
    lying = ws.at[2].multiply(1.1)
    gradient = mw.grad(loss, method=ALWAYS)
    if transform == "vmap":
        run, args = jax.vmap(gradient, in_axes=(0, None)), (jnp.stack([ws, lying]), x)
    elif transform == "checkpoint":
        run, args = jax.checkpoint(gradient), (lying, x)
    else:
        run = lambda w, x: lax.scan(lambda c, _: (c, gradient(w, x)), 0, length=2)[1]
        args = (lying, x)
    with pytest.raises(Exception, match="not what is declared"):
        jax.block_until_ready(jax.jit(run)(*args))


def test_certificates_take_next_to_no_memory():
    """Every walk carries one: at 64 layers less than a hundredth of what the walk takes."""
    loss = scanned(lambda x, w: jnp.abs(x @ mw.declare(w, "orthogonal")))
    ws = jax.ShapeDtypeStruct((64, 64, 64), jnp.float32)
    x = jax.ShapeDtypeStruct((16_384, 64), jnp.float32)

    def temporaries(action):
        run = jax.jit(mw.grad(loss, method=mw.Moonwalk(walk="always", on_inexact=action)))
        return run.lower(ws, x).compile().memory_analysis().temp_size_in_bytes

    # On a CPU, XLA does not overwrite gradients in place where NaN may have to take theirs.
    gradients = ws.size * 4
    assert temporaries("raise") <= 1.01 * temporaries("ignore") + gradients


CONTRACTIONS = {
    "a sum of halves": lambda x: sum(jnp.split(x, 2, -1)),
    "means of pairs": lambda x: x.reshape(len(x), 2, -1).mean(1),
    "a strided convolution": lambda x: lax.conv_general_dilated(
        x[..., None],
        jnp.ones((2, 1, 1), x.dtype),
        (1,),
        [(0, 0)],
        rhs_dilation=(4,),
        dimension_numbers=("NWC", "WIO", "NWC"),
    )[..., 0],
}


@pytest.mark.parametrize(
    ("name", "half"),
    some_cases(
        itertools.product(CONTRACTIONS, (0, 1)),
        {("a sum of halves", 1), ("means of pairs", 0), ("a strided convolution", 1)},
    ),
)
def test_errors_are_seen_before_a_contraction_forgets_them(name, half):
    """A step with fewer numbers out than in may read a part of a cotangent: the rest's errors end there."""
    rng, contract = np.random.default_rng(0), CONTRACTIONS[name]
    q, r = (np.linalg.qr(rng.standard_normal((4, 4)))[0] for _ in range(2))
    bad = np.eye(8)
    bad[4 * half : 4 * half + 4, 4 * half : 4 * half + 4] = q @ np.diag(np.geomspace(1, 1e-5, 4)) @ r
    x = rng.standard_normal((16, 8))

    def loss(params, x):
        x = x @ params["stem"]
        x = contract(x @ params["bad"] + params["bias"])
        for w in params["rest"]:
            x = jnp.abs(x @ w)
        return jnp.sum(x**2)

    params = {"stem": np.eye(8), "bad": bad, "bias": np.zeros(8), "rest": [q] * 3}
    params, x = jax.tree.map(lambda a: jnp.asarray(a, jnp.float32), (params, x))
    settings = {"anchor_every": 100, "walk": "always"}
    truth = jax.grad(loss)(params, x)
    found = mw.grad(loss, method=mw.Moonwalk(**settings, on_inexact="ignore"))(params, x)
    off = [
        jnp.linalg.norm(a - b) / jnp.linalg.norm(b)
        for a, b in zip(*map(jax.tree.leaves, (found, truth)), strict=True)
    ]
    if max(off) > 1e-3:
        with pytest.raises(mw.InexactError, match="certificate exceeds the tolerance"):
            mw.grad(loss, method=mw.Moonwalk(**settings))(params, x)
    else:
        assert half == 0 or contract is not CONTRACTIONS["a sum of halves"]  # there is something to see
