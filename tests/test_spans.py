"""Convolutions without a pivot: fragments on a grid of spans (`rules/spans.py`)."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from forced import difference, measured, under_jit, walked
from jax import lax
from marks import slow
from memory import MIB, struct, temp
from weights import normal

import moonwalk as mw
from moonwalk.rules import fragments
from moonwalk.rules.fragments import Ask
from moonwalk.trace import graph, staging

pytestmark = pytest.mark.filterwarnings("ignore::moonwalk.PlanWarning")


def kernel(k, m, m_out=None, dims=1, scale=0.5, seed=0, groups=1, pivot="lower", dtype=np.float64):
    """Taps [k…, m, g·m'] of a share of He's size; the first is unit lower triangular, or like the others."""
    m_out = m if m_out is None else m_out
    rng = np.random.default_rng(seed)
    size = scale * math.sqrt(2 / (m * k**dims))
    w = size * rng.standard_normal((*(k,) * dims, m, groups, m_out))
    if pivot != "general":
        first = np.tril(w[(0,) * dims].transpose(1, 0, 2), -1) if pivot == "lower" else 0
        w[(0,) * dims] = (
            (first + np.eye(m, m_out)).transpose(1, 0, 2)
            if pivot == "lower"
            else (np.eye(m, m_out)[:, None] * (1 + 0.2 * rng.standard_normal((1, groups, m_out))))
        )
    return jnp.asarray(w.reshape((*(k,) * dims, m, groups * m_out)).astype(dtype))


def conv(x, w, padding, stride=1, dilation=1, groups=1, layout="last"):
    d = w.ndim - 2
    space = "XYZ"[:d]
    numbers = (f"N{space}C", f"{space}IO", f"N{space}C")
    if layout == "first":
        numbers = (f"NC{space}", f"{space}IO", f"NC{space}")
    return lax.conv_general_dilated(
        x,
        w,
        (stride,) * d,
        [padding] * d,
        rhs_dilation=(dilation,) * d,
        dimension_numbers=numbers,
        feature_group_count=groups,
    )


def block_of(fun, x, w):
    """The one block of fun(x, w), its state x."""
    staged = staging.stage(fun, x, w)
    made = graph.build(staged.jaxpr, [staged.jaxpr.invars[0]], staged.jaxpr.outvars)
    (block,) = made.blocks
    return block


def round_trip(fun, x, w, requested, place=(0, 0, 0)):
    """Relative error of restore(fragment(h'), h), and the share of h' that was kept."""
    block = block_of(fun, x, w)
    (rule,) = fragments.candidates(block, Ask(requested))

    traced = not isinstance(place[0], int)

    @jax.jit
    def run(x, w, truth, at):
        where = at if traced else place
        factors = rule.prepare(block, [w])
        _, pullback = rule.keep(block, (x,), [w])
        kept = rule.fragment(block, factors, pullback, (truth,), where)
        (found,) = rule.restore(block, factors, pullback, kept, pullback((truth,)), where)
        return found, sum(a.size for a in jax.tree.leaves(kept)) / truth.size

    truth = normal(*block.outputs[0].aval.shape, seed=3)
    found, share = run(x, w, truth, place)
    return difference(found, truth), float(share)


CASES = {
    "k=3": dict(k=3, padding=(1, 1), n=21),
    "k=3, diagonal": dict(k=3, padding=(1, 1), n=21, pivot="diagonal"),
    "k=3, more in front": dict(k=3, padding=(2, 0), n=21, flip=True),
    "k=3, none in front": dict(k=3, padding=(0, 2), n=22),
    "k=3, valid": dict(k=3, padding=(0, 0), n=22),
    "k=4": dict(k=4, padding=(1, 2), n=25),
    "k=5, p=1": dict(k=5, padding=(1, 3), n=37),
    "k=5, p=2": dict(k=5, padding=(2, 2), n=37),
    "k=5, p=3": dict(k=5, padding=(3, 1), n=37),
    "k=7, p=1": dict(k=7, padding=(1, 5), n=40),
    "k=7, p=3": dict(k=7, padding=(3, 3), n=41),
    "fewer channels": dict(k=3, padding=(1, 1), n=21, m=5, m_out=3),
    "groups": dict(k=3, padding=(1, 1), n=21, m=3, groups=2),
    "dilated": dict(k=3, padding=(2, 2), n=21, dilation=2),
    "channels first": dict(k=3, padding=(1, 1), n=21, layout="first"),
    "padding beyond the kernel": dict(k=3, padding=(3, 4), n=15),
    "shorter than a span": dict(k=3, padding=(1, 1), n=4),
    "2D, k=3": dict(k=3, padding=(1, 1), n=11, dims=2),
    "2D, k=5": dict(k=5, padding=(2, 2), n=13, dims=2),
    "3D, k=3": dict(k=3, padding=(1, 1), n=6, dims=3, m=2),
}


def case(
    k,
    padding,
    n,
    m=4,
    m_out=None,
    dims=1,
    groups=1,
    dilation=1,
    layout="last",
    pivot="lower",
    flip=False,
):
    w = kernel(k, m, m_out, dims, 0.3, groups=groups, pivot=pivot)
    w = w[::-1] if flip else w  # a causal one is eliminated from its end
    x = normal(2, *(n,) * dims, groups * m)
    x = jnp.moveaxis(x, -1, 1) if layout == "first" else x
    fun = lambda x, w: conv(x, w, padding, 1, dilation, groups, layout)
    return fun, x, w, dilation * (k - 1)


# Of their like, those with more entries, or with as many.
LARGER = {"k=4", "k=5, p=1", "k=5, p=3", "k=7, p=1", "2D, k=5"}
ALIGNED = {"k=3", "2D, k=3"}


@pytest.mark.parametrize(
    ("name", "stagger"),
    [
        *(slow(n, True) if n in LARGER else (n, True) for n in CASES),
        *((n, False) if n in ALIGNED else slow(n, False) for n in CASES),
    ],
)
def test_what_is_kept_restores_the_rest(name, stagger):
    fun, x, w, reach = case(**CASES[name])
    spans = (reach + 1, 32) if x.ndim == 3 else (reach + 2,)
    moving = (jnp.int32(5), jnp.int32(2), jnp.int32(9))
    for span in spans:
        error, _ = round_trip(fun, x, w, mw.Fragment(span, stagger), moving if stagger else (0, 0, 0))
        assert error <= 1e-10, span


@pytest.mark.parametrize(
    ("k", "stride", "padding", "n"),
    [
        (5, 2, (2, 2), 21),
        slow(5, 2, (3, 3), 20),
        slow(6, 3, (3, 2), 22),
        slow(3, 2, (2, 2), 16),
        (4, 2, (3, 1), 19),
    ],
)
def test_strides_not_above_the_padding(k, stride, padding, n):
    """The rows of one residue class are a convolution of stride one; at the edges they are missing."""
    w = kernel(k, 4, scale=1.0, pivot="general", seed=2)
    w = w + 2 * jnp.eye(4)  # whichever tap is the pivot
    fun = lambda x, w: conv(x, w, padding, stride)
    for span in (4, 9):
        error, share = round_trip(fun, normal(2, n, 4), w, mw.Fragment(span))
        assert error <= 1e-9
        assert share < 1


def test_shares():
    """(k−1)/B in one axis, 1 − (1 − (k−1)/B)² in two, and p slices at the edges of a moving grid."""
    fun, x, w, _ = case(3, (1, 1), 64)
    assert round_trip(fun, x, w, mw.Fragment(8, stagger=False))[1] == 0.25
    assert round_trip(fun, x, w, mw.Fragment(8))[1] == 0.25 + 1 / 64
    fun, x, w, _ = case(3, (1, 1), 32, dims=2)
    assert round_trip(fun, x, w, mw.Fragment(8, stagger=False))[1] == 1 - 0.75**2


# --- in networks --------------------------------------------------------------------------------------


def layers(k, count, m=4, dims=1, **options):
    return jnp.stack([kernel(k, m, dims=dims, seed=s, **options) for s in range(count)])


def looped(ws, x, padding, slope=0.3, act=None):
    act = act or functools.partial(jax.nn.leaky_relu, negative_slope=slope)
    for w in ws:
        x = act(conv(x, w, padding))
    return 0.5 * jnp.mean((x - 1) ** 2)


def scanned(ws, x, padding, slope=0.3, reverse=False):
    step = lambda x, w: (jax.nn.leaky_relu(conv(x, w, padding), slope), None)
    return 0.5 * jnp.mean((lax.scan(step, x, ws, reverse=reverse)[0] - 1) ** 2)


NETWORKS = {
    "k=3, p=1": (3, (1, 1), 19, 1, 8),
    "k=5, p=1": (5, (1, 3), 26, 1, 12),
    "k=7, p=3": (7, (3, 3), 33, 1, 16),
    "causal": (3, (2, 0), 19, 1, 5),
    "2D": (3, (1, 1), 13, 2, 6),
    "3D": (3, (1, 1), 12, 3, 12),
}


def fragments_in(walk):
    steps = [i for s in walk.steps for i in (s.walk.steps if s.node.is_scan else [s])]
    return [s for s in steps if s.source == "fragment"]


@pytest.mark.parametrize(
    ("name", "loss"),
    [
        *((n, scanned) if n in ("k=3, p=1", "2D") else slow(n, scanned) for n in NETWORKS),
        *((n, looped) if n in ("k=5, p=1", "causal") else slow(n, looped) for n in NETWORKS),
    ],
)
def test_networks(name, loss):
    k, padding, n, dims, span = NETWORKS[name]
    ws, x = layers(k, 3, dims=dims, scale=0.3), normal(2, *(n,) * dims, 4)
    ws = ws[:, ::-1] if name == "causal" else ws
    fun = functools.partial(loss, padding=padding)
    truth = jax.jit(jax.grad(fun))(ws, x)
    method = mw.Moonwalk(fragment=mw.Fragment(span))
    found, error, walk = under_jit(fun, method, ws, x)
    assert fragments_in(walk)
    assert difference(found, truth) <= 1e-9
    assert 0 < error <= 1e-9


@pytest.mark.slow
def test_eagerly_and_reversed():
    ws, x = layers(3, 3, scale=0.3), normal(2, 19, 4)
    fun = functools.partial(scanned, padding=(1, 1), reverse=True)
    found, _, walk = walked(fun, mw.Moonwalk(fragment=mw.Fragment(8)), ws, x)
    assert fragments_in(walk)
    assert difference(found, jax.grad(fun)(ws, x)) <= 1e-12


@pytest.mark.slow
def test_the_grid_moves_from_layer_to_layer():
    ws, x = layers(5, 3, scale=0.3), normal(2, 30, 4)
    fun = functools.partial(looped, padding=(1, 3))
    _, _, walk = under_jit(fun, mw.Moonwalk(fragment=mw.Fragment(12)), ws, x)
    places = [s.place[0] for s in fragments_in(walk)]
    assert np.diff(places).tolist() == [3] * (len(places) - 1)  # k − 1 − p
    _, _, walk = under_jit(fun, mw.Moonwalk(fragment=mw.Fragment(12, stagger=False)), ws, x)
    assert {s.place[0] for s in fragments_in(walk)} == {0}


@pytest.mark.slow
def test_segments_run_again_and_many_anchors():
    ws, x = layers(3, 6, scale=0.3), normal(2, 40, 4)
    fun = functools.partial(scanned, padding=(1, 1))
    truth = jax.grad(fun)(ws, x)
    for options in (dict(checkpoint=2), dict(checkpoint="auto"), dict(anchor_every=4)):
        method = mw.Moonwalk(fragment=mw.Fragment(8), **options)
        _, found = jax.jit(mw.value_and_grad(fun, method=method))(ws, x)
        assert difference(found, truth) <= 1e-12


# --- error ----------------------------------------------------------------------------------------------

# Total error of 24 layers with taps by He, aligned and staggered (docs/numerics.md §9).
TABLE = {
    (4, 0.1): (2e-6, 8e-7),
    (4, 0.3): (1e-6, 9e-7),
    (8, 0.1): (1e-2, 2e-5),
    (8, 0.3): (8e-5, 3e-6),
    (16, 0.1): (4e5, 0.23),
    (16, 0.3): (1.9, 8e-4),
}


@pytest.mark.parametrize(
    ("span", "slope", "stagger"),
    [
        (8, 0.3, True),
        slow(8, 0.3, False),
        slow(16, 0.3, True),
        *(slow(*key, s) for key in TABLE for s in (True, False) if key not in [(8, 0.3), (16, 0.3)]),
        slow(16, 0.3, False),
    ],
)
def test_the_table_of_errors(span, slope, stagger):
    ws = layers(3, 24, m=32, scale=1.0, dtype=np.float32)
    x = normal(2, 128, 32, dtype=np.float32)
    fun = functools.partial(scanned, padding=(1, 1), slope=slope)
    truth = jax.jit(jax.grad(fun))(ws.astype(jnp.float64), x.astype(jnp.float64))
    own = jax.jit(jax.grad(fun))(ws, x)
    method = mw.Moonwalk(fragment=mw.Fragment(span, stagger))
    found, _, _ = under_jit(fun, method, ws, x)
    # float32 backpropagation is itself off, and more so where a sign flips: the walk's part is ours.
    error = difference(found, own) + min(difference(own, truth), 1e-6)
    expected = TABLE[span, slope][0 if not stagger else 1]
    assert expected / 10 <= error <= 10 * expected


def random_network(seed):
    """Taps at a quarter, a half, once and 1.5 times He's size; triangular, diagonal and general pivots."""
    scale = (0.25, 0.5, 1.0, 1.5)[seed % 4]
    pivot = ("lower", "diagonal", "general")[seed % 3]
    slope = (0.1, 0.3, 0.5)[seed // 4 % 3]
    options = dict(scale=scale, pivot=pivot, dtype=np.float32)
    ws = jnp.stack([kernel(3, 16, seed=100 * seed + s, **options) for s in range(8)])
    return ws, normal(2, 96, 16, seed=seed, dtype=np.float32), slope


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(50))
def test_the_automatic_choice(seed):
    ws, x, slope = random_network(seed)
    fun = functools.partial(scanned, padding=(1, 1), slope=slope)
    gains = measured(fun, mw.Moonwalk(), ws, x)
    found, certificate, walk = under_jit(fun, mw.Moonwalk(), ws, x, gains=gains)
    assert difference(found, jax.jit(jax.grad(fun))(ws, x)) <= 1e-3
    assert certificate <= 1e-4
    chosen = [s.node.rule.span for s in fragments_in(walk)]
    assert chosen or seed not in (0, 9)


def test_while_tracing_a_declared_pivot_takes_twice_the_reach():
    ws, x = layers(3, 12), normal(2, 64, 4)

    def loss(ws, x):
        step = lambda x, w: (jax.nn.leaky_relu(conv(x, mw.declare(w, "lower"), (1, 1)), 0.3), None)
        return jnp.sum(lax.scan(step, x, ws)[0] ** 2)

    _, _, walk = under_jit(loss, mw.Moonwalk(), ws, x)
    (step,) = fragments_in(walk)
    assert step.node.rule.span == 4
    assert walk.is_measured  # it carries its certificate
    # Of an undeclared one nothing is known: a Gaussian matrix may be as good as singular.
    _, _, walk = under_jit(functools.partial(scanned, padding=(1, 1)), mw.Moonwalk(), ws, x)
    assert not fragments_in(walk)


@pytest.mark.slow
def test_an_unstable_causal_layer_takes_fragments():
    """One tap touches each window's own row, but the recursion along the whole axis explodes."""
    ws, x = layers(3, 2, m=8, scale=1.0), normal(2, 200, 8)
    fun = functools.partial(looped, padding=(0, 2))
    gains = measured(fun, mw.Moonwalk(), ws, x)
    found, certificate, walk = under_jit(fun, mw.Moonwalk(), ws, x, gains=gains)
    assert fragments_in(walk)
    assert difference(found, jax.grad(fun)(ws, x)) <= 1e-9
    assert certificate <= 1e-11
    tame = ws.at[:, 1:].multiply(0.2)
    gains = measured(fun, mw.Moonwalk(), tame, x)
    _, _, walk = under_jit(fun, mw.Moonwalk(), tame, x, gains=gains)
    assert not fragments_in(walk)
    assert any(s.source == "vijp" and s.node.is_heavy for s in walk.steps)


@pytest.mark.slow
def test_training_for_500_steps():
    """Weights drift, the certificate notices, the plan is made anew: gradients stay within tolerance.

    The tolerance is on cotangents. A gradient sums them over examples and positions; where they cancel in that sum
    their errors need not, and it loses as much more as the sum's condition number says.
    """
    teacher = layers(3, 8, m=8, scale=1.5, dtype=np.float32)
    ws = layers(3, 8, m=8, scale=0.2, dtype=np.float32)
    x = normal(4, 64, 8, dtype=np.float32)
    run = lambda ws, x: lax.scan(lambda x, w: (jax.nn.leaky_relu(conv(x, w, (1, 1)), 0.3), None), x, ws)[
        0
    ]
    target = run(teacher, x)
    loss = lambda ws, x: jnp.mean((run(ws, x) - target) ** 2)
    method = mw.Moonwalk(on_inexact="ignore")
    optimizer = optax.adam(2e-2)
    state = optimizer.init(ws)
    truth = jax.jit(jax.grad(loss))

    def planned(ws):
        plan = mw.plan(loss, ws, x, method=method)
        return plan, jax.jit(mw.value_and_grad(loss, method=plan, certify=True))

    @jax.jit
    def condition(ws):
        """‖Σ |x| |h|‖ / ‖Σ x h‖ of the gradients, in float64."""
        ws, y = ws.astype(np.float64), [x.astype(np.float64)]
        pullbacks = []
        for w in ws:
            z, pull = jax.vjp(lambda y, w: conv(y, w, (1, 1)), y[-1], w)
            out, act = jax.vjp(lambda z: jax.nn.leaky_relu(z, 0.3), z)
            pullbacks.append((pull, act))
            y.append(out)
        h, sums, absolute = 2 * (y[-1] - target) / target.size, [], []
        for w, (pull, act), y_in in zip(ws[::-1], pullbacks[::-1], y[-2::-1], strict=True):
            (h_z,) = act(h)
            absolute.append(
                jax.vjp(lambda w, y=y_in: conv(jnp.abs(y), w, (1, 1)), w)[1](jnp.abs(h_z))[0]
            )
            h, g = pull(h_z)
            sums.append(g)
        return jnp.linalg.norm(jnp.stack(absolute)) / jnp.linalg.norm(jnp.stack(sums))

    @jax.jit
    def update(ws, state, gradients):
        changes, state = optimizer.update(gradients, state, ws)
        return optax.apply_updates(ws, changes), state

    (plan, step), plans, spans = planned(ws), 1, []
    first = None
    for _ in range(500):
        value, gradients, found = step(ws, x)
        if not found.error <= plan.tolerance:
            plan, step = planned(ws)
            plans += 1
            value, gradients, found = step(ws, x)
            assert found.error <= plan.tolerance
        spans.append(plan.fragments)
        first = value if first is None else first
        # A certificate is measured on cotangents, and is itself an estimate to a few per cent.
        off = difference(gradients, truth(ws, x))
        assert off <= max(plan.tolerance, found.error * condition(ws)) and off <= 2 * plan.tolerance
        ws, state = update(ws, state, gradients)
    assert plans > 1
    assert sum(spans) >= 100  # steps with fragments
    assert value < first / 3


# --- memory -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("span", [slow(4), 8])
def test_bytes_of_a_layer_are_bits_and_fragment(span):
    n, m, batch = 512, 16, 64
    method = mw.Moonwalk(fragment=mw.Fragment(span))
    walks = []

    def run(ws, x):
        gradients, _, walk = walked(functools.partial(scanned, padding=(1, 1)), method, ws, x)
        walks.append(walk)
        return gradients

    sizes = [temp(run, struct(k, 3, m, m), struct(batch, n, m)) for k in (32, 96)]
    (scan, *_) = walks[0].steps
    conv_step, act = scan.walk.steps
    entries = batch * n * m
    assert act.kept_bytes == entries / 8
    tiles = -(-(n + span - 1) // span)
    assert conv_step.memo_bytes == 4 * batch * m * (2 * tiles + 1)
    weights = 2 * 4 * 3 * m * m  # gradients, and factors of the pivot
    formula = act.kept_bytes + conv_step.memo_bytes + weights
    assert (sizes[1] - sizes[0]) * MIB / 64 == pytest.approx(formula, rel=0.05)


# --- plans and errors ---------------------------------------------------------------------------------------


def test_the_plan_says_what_is_kept():
    ws, x = layers(3, 12, scale=0.3), normal(2, 256, 4)
    plan = mw.plan(functools.partial(scanned, padding=(1, 1)), ws, x)
    (row,) = [r for r in plan.rows if r.mode == "fragment"]
    assert row.why == (
        "fragment: 14 % of the cotangent; 2 slices of every span of 16, staggered; pivot general"
    )
    assert row.gain > 1
    assert plan.fragments == 1
    assert plan.checked
    assert ", 1 fragments" in plan.table()


def test_bad_input():
    with pytest.raises(ValueError, match="span counts the positions that one fragment serves"):
        mw.Fragment(span=1)
    with pytest.raises(ValueError, match="stagger is True or False"):
        mw.Fragment(8, stagger="yes")
    with pytest.raises(ValueError, match=r"fragment takes moonwalk.Fragment\(span=..., stagger=...\)"):
        mw.Moonwalk(fragment=8)
    ws, x = layers(5, 2), normal(2, 19, 4)
    with pytest.raises(
        ValueError, match=r"test_spans.*has 5 taps along an axis and keeps 4.*at least 5"
    ):
        mw.plan(
            functools.partial(looped, padding=(2, 2)), ws, x, method=mw.Moonwalk(fragment=mw.Fragment(4))
        )


def test_a_singular_pivot():
    ws, x = layers(3, 12, scale=0.3).at[3, 0, 1, 1].set(0.0), normal(2, 64, 4)
    method = mw.Moonwalk(fragment=mw.Fragment(8))

    def loss(ws, x):
        return scanned(mw.declare(ws, "lower"), x, (1, 1))

    with pytest.raises(mw.SingularError, match="pivot tap 0 of its fragments is singular"):
        mw.plan(loss, ws, x, method=method)
    # Under jit nothing of the weights is known: the certificate is not finite.
    with pytest.raises(Exception, match="certificate exceeds the tolerance"):
        jax.block_until_ready(jax.jit(mw.value_and_grad(loss, method=method))(ws, x))


def test_a_layer_that_needs_none():
    ws = jnp.stack([kernel(3, 4, seed=s, scale=0.1, pivot="diagonal") for s in range(2)])

    def loss(ws, x):
        for w in ws:
            x = jax.nn.leaky_relu(conv(x, mw.declare(w, "diagonal"), (0, 2)[:2], stride=3), 0.5)
        return jnp.sum(x**2)

    method = mw.Moonwalk(fragment=mw.Fragment(8))
    _, _, walk = under_jit(loss, method, ws, normal(2, 81, 4))
    heavy = [s for s in walk.steps if s.node.is_heavy and s.source == "vijp"]
    assert heavy
    assert all(s.reason.endswith("; needs no fragment") for s in heavy)


def test_a_scheme_that_is_not_exact_enough():
    ws = layers(3, 12, m=8, scale=1.5, dtype=np.float32)
    x = normal(2, 256, 8, dtype=np.float32)
    fun = functools.partial(scanned, padding=(1, 1), slope=0.1)
    with pytest.raises(Exception, match="certificate exceeds the tolerance"):
        jax.jit(mw.value_and_grad(fun, method=mw.Moonwalk(fragment=mw.Fragment(32))))(ws, x)
    method = mw.Moonwalk(fragment=mw.Fragment(32), on_inexact="nan")
    _, found = jax.jit(mw.value_and_grad(fun, method=method))(ws, x)
    assert np.isnan(found).all()


@pytest.mark.slow
def test_fragments_asked_for_are_taken():
    """Whatever is known of their error, and whatever the tolerance is."""
    ws, x = layers(3, 3, scale=0.3, dtype=np.float32), normal(2, 40, 4, dtype=np.float32)
    fun = functools.partial(scanned, padding=(1, 1))
    asked = mw.Fragment(8)
    for method in (mw.Moonwalk(fragment=asked, tolerance=math.inf), mw.Moonwalk(fragment=asked)):
        _, _, walk = under_jit(fun, method, ws, x)
        assert [s.node.rule.span for s in fragments_in(walk)] == [8]
    half = jax.tree.map(lambda a: a.astype(jnp.bfloat16), (ws, x))
    _, _, walk = under_jit(fun, mw.Moonwalk(fragment=asked), *half)
    assert fragments_in(walk)


def test_spans_are_no_longer_than_their_axes():
    block = block_of(lambda x, w: conv(x, w, (1, 1)), normal(1, 8, 8, 4), kernel(3, 4, dims=2))
    assert [way.span for way in fragments.candidates(block, Ask()) if way.name == "spans"] == [4]
    (way,) = fragments.candidates(block, Ask(mw.Fragment(32)))
    assert way.span == 8


@pytest.mark.slow
def test_a_span_too_short_for_a_layer_that_needs_none():
    ws = jnp.stack([kernel(9, 4, seed=s, scale=0.1) for s in range(2)])
    fun = functools.partial(looped, padding=(0, 8))
    method = mw.Moonwalk(fragment=mw.Fragment(4))
    gains = measured(fun, mw.Moonwalk(), ws, normal(2, 30, 4))
    _, _, walk = under_jit(fun, method, ws, normal(2, 30, 4), gains=gains)
    assert not fragments_in(walk)
    assert any(s.reason.endswith("; needs no fragment") for s in walk.steps)


@pytest.mark.parametrize(
    ("k", "stride", "padding", "tap"),
    [(5, 3, (1, 1), 1), (3, 2, (2, 0), 2), (3, 2, (0, 0), 0)],
    ids=["a parallel tap beside the lemma's", "backward", "forward"],
)
def test_fragments_read_the_tap_that_a_declaration_speaks_of(k, stride, padding, tap):
    """Where windows have an order, spans used to divide by whichever tap reaches least."""
    w = 0.2 * normal(k, 4, 4).at[tap].set(5 * jnp.diag(1 + 0.1 * jnp.arange(4.0)))
    x = normal(2, 28, 4)

    def loss(p, x):
        y = conv(x @ p[0], mw.declare(p[1], "diagonal"), padding, stride)
        return jnp.sum(jnp.sin(y @ p[2]))

    p = (jnp.eye(4) + 0.1 * normal(4, 4), w, normal(4, 4, seed=1))
    found, _, walk = under_jit(loss, mw.Moonwalk(), p, x)
    assert "fragment" in {s.source for s in walk.steps}
    assert difference(found, jax.grad(loss)(p, x)) <= 1e-10
