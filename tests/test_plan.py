"""`moonwalk.plan`: what it says, and that what it says is what happens."""

import dataclasses
import json
import math
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from marks import slow
from weights import general, lower, normal, orthogonal

import moonwalk as mw
from moonwalk import _jax
from moonwalk.planning import report
from moonwalk.planning.report import format_bytes

pytestmark = pytest.mark.filterwarnings("ignore::moonwalk.PlanWarning")

ROWS, WIDTH, DEPTH = 32, 8, 8
X = normal(ROWS, WIDTH, seed=100)
STATE = X.nbytes
ORTHOGONAL = [orthogonal(WIDTH, seed=i) for i in range(DEPTH)]
GENERAL = [general(WIDTH, seed=i) for i in range(DEPTH)]
COLUMNS = "block mode kept M_x M_θ gain why source".split()


def leaky(x):
    return jax.nn.leaky_relu(x, 0.3)


def turn(x, w):
    return leaky(x @ mw.declare(w, "orthogonal"))


def dense(x, w):
    return leaky(x @ w)


def loss_of(layer):
    def loss(ws, x):
        for w in ws:
            x = layer(x, w)
        return jnp.mean((x - 0.5) ** 2)

    return loss


def scan_of(layer, **options):
    def loss(ws, x):
        return jnp.mean((lax.scan(lambda c, w: (layer(c, w), None), x, ws, **options)[0] - 0.5) ** 2)

    return loss


def structs(*args):
    return jax.eval_shape(lambda *a: a, *args)


def check(loss, ws, x=X, method=None, tolerance=1e-10):
    """The gradient that a method (or plan) gives, under jit."""
    found = jax.jit(mw.grad(loss, method=mw.Moonwalk() if method is None else method))(ws, x)
    expected = jax.jit(jax.grad(loss))(ws, x)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * float(jnp.max(jnp.abs(b))))


@pytest.fixture(scope="module")
def walking():
    return mw.plan(loss_of(turn), *structs(ORTHOGONAL, X))


# --- the table ----------------------------------------------------------------------------------------


def test_the_table(walking):
    first, header, *rows, last = walking.table().splitlines()
    assert header.split() == COLUMNS
    assert len(rows) == len(walking.rows)
    for line, row in zip(rows, walking.rows, strict=True):
        assert line.strip().startswith(row.block)
        assert line.endswith(row.source)
        assert row.mode in line and format_bytes(row.bytes) in line
    assert f"{walking.walked} blocks walked" in first and "tolerance 1e-11" in first
    for size in (walking.kept_bytes, walking.peak_bytes, walking.backprop_bytes):
        assert format_bytes(size) in last


def test_a_row_per_block(walking):
    """Two per layer, and the loss."""
    names = [r.block.split()[0] for r in walking.rows]
    assert names.count("dot_general") == DEPTH
    assert sum("select_n" in n for n in names) == DEPTH
    assert "test_plan.py" in walking.rows[0].source


def test_rows_of_a_scan_are_indented():
    plan = mw.plan(scan_of(turn), *structs(jnp.stack(ORTHOGONAL), X))
    outer, *inner = (r for r in plan.rows if r.depth or r.block.startswith("scan"))
    assert (outer.depth, outer.times) == (0, 1)
    assert [(r.depth, r.times) for r in inner] == [(1, DEPTH)] * 2
    lines = plan.table().splitlines()
    assert any(line.startswith("  dot_general") and f"×{DEPTH}" in line for line in lines)


def test_sizes_are_readable():
    assert [format_bytes(n) for n in (0, 1023, 1024, 5 * 2**20, 3 * 2**31)] == [
        "0 B",
        "1023 B",
        "1.0 KiB",
        "5.0 MiB",
        "6.0 GiB",
    ]


# --- the object ---------------------------------------------------------------------------------------


def test_a_plan_is_plain_data(walking):
    found = json.loads(json.dumps(walking.to_dict(), allow_nan=False))
    assert found["walked"] == walking.walked
    assert [r["block"] for r in found["rows"]] == [r.block for r in walking.rows]
    measured = mw.plan(loss_of(dense), GENERAL, X)
    factors = [factor for *_, factor in json.loads(json.dumps(measured.to_dict()))["gains"]]
    assert factors and all(f is None or f > 0 for f in factors)  # None: not bounded


def test_a_plan_is_frozen_and_hashable(walking):
    again = mw.plan(loss_of(turn), *structs(ORTHOGONAL, X))
    assert hash(again) == hash(again) and {walking: 1}[walking] == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        walking.walked = 0  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError):
        walking.rows[0].mode = "store"  # type: ignore[misc]
    assert dataclasses.replace(walking, rows=()) != walking


def test_equal_plans_are_equal():
    """Two of the same function at the same arguments, so that jit may cache by them."""
    loss = scan_of(turn)
    args = structs(jnp.stack(ORTHOGONAL), X)
    assert mw.plan(loss, *args) == mw.plan(loss, *args)


def test_a_plan_may_be_planned_with():
    """Its settings are taken, and nothing else."""
    loss = loss_of(turn)
    first = mw.plan(loss, *structs(ORTHOGONAL, X), method=mw.Moonwalk(anchor_every=2))
    assert mw.plan(loss, *structs(ORTHOGONAL, X), method=first).method == first.method


# --- bytes --------------------------------------------------------------------------------------------


def test_totals(walking):
    """A bit per entry and layer; backprop keeps the products' inputs besides."""
    assert walking.kept_bytes <= DEPTH * STATE // 64 + 2 * STATE
    assert walking.backprop_bytes >= (DEPTH - 1) * STATE
    assert walking.kept_bytes < walking.peak_bytes < walking.checkpoint_bytes <= walking.backprop_bytes
    assert walking.weight_side_bytes < STATE * DEPTH
    assert walking.advice() is None


def test_m_x_and_m_theta(walking):
    """∂y/∂x of a product reads the weight alone, ∂y/∂θ the whole state; of LeakyReLU, a bit."""
    products = [r for r in walking.rows if r.block.startswith("dot_general")]
    assert {r.m_x for r in products} == {0}
    assert {r.m_theta for r in products[1:]} == {STATE}
    assert products[0].m_theta == 0  # its state is the data, which is there anyhow
    signs = [r for r in walking.rows if "select_n" in r.block]
    assert {(r.m_x, r.m_theta) for r in signs} == {(STATE // 64, 0)}


def test_more_layers_keep_a_bit_per_entry_each():
    """Without a loss of accuracy, that is: |x| has gain 1 at any depth."""
    loss = loss_of(lambda x, w: jnp.abs(x @ mw.declare(w, "orthogonal")))
    kept = [mw.plan(loss, *structs(ORTHOGONAL * n, X)).kept_bytes for n in (1, 2)]
    assert kept[1] - kept[0] == DEPTH * STATE // 64


def test_advice_names_the_costliest_block():
    """Where one block has all the memory, it is stored, and nothing is gained."""
    plan = mw.plan(lambda w, x: jnp.sum(jnp.sin(x @ w)), *structs(jnp.ones((WIDTH, 2**14)), X))
    costly = max(plan.rows, key=lambda r: r.bytes)
    assert not plan.walks
    assert costly.block in plan.advice() and costly.source in plan.advice()


def totals(peak, backprop, checkpoint, **changes):
    """A plan that takes as much, in MiB."""
    plan = mw.plan(loss_of(lambda x, w: jnp.sin(x @ w)), *structs(ORTHOGONAL, X))
    sizes = dict(peak_bytes=peak, backprop_bytes=backprop, checkpoint_bytes=checkpoint)
    return dataclasses.replace(plan, **{k: v * 2**20 for k, v in sizes.items()}, **changes)


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        # A stock transformer, with one line: it is checkpointing, and a lot is gained.
        (dict(peak=27, backprop=299, checkpoint=27), None),
        (dict(peak=27, backprop=299, checkpoint=299), None),
        (dict(peak=10, backprop=100, checkpoint=30, walked=4), None),
        (
            dict(peak=280, backprop=299, checkpoint=290),
            "moonwalk: this plan saves less than 10 % of what backpropagation takes (about 280.0 MiB "
            "beside 299.0 MiB). The costliest block",
        ),
        # Nothing is gained over either: backpropagation comes first.
        (
            dict(peak=300, backprop=299, checkpoint=90, walked=4),
            "less than 10 % of what backpropagation takes (about 300.0 MiB beside 299.0 MiB). The",
        ),
        *(
            (
                dict(peak=28, backprop=299, checkpoint=27) | how,
                "moonwalk: this plan saves less than 10 % of what checkpointing takes (about 28.0 MiB "
                "beside 27.0 MiB; backpropagation 299.0 MiB). method=moonwalk.Checkpoint() would take "
                "about as little, and less time. The costliest block",
            )
            for how in (dict(walked=4), dict(inverted=4))
        ),
    ],
)
def test_advice_compares_with_backprop_first_and_with_checkpointing_second(plan, said):
    found = totals(**plan).advice()
    assert found is None if said is None else said in found


def test_a_plan_that_is_checkpointing_and_saves_says_nothing():
    rows = jnp.ones((2**13, WIDTH))  # more than a MiB: of toys nothing is said anyway
    plan = mw.plan(loss_of(lambda x, w: jnp.sin(x @ w)), *structs(ORTHOGONAL * 2, rows))
    assert not plan.walks and plan.backprop_bytes > 2**20
    assert plan.peak_bytes <= 1.1 * plan.checkpoint_bytes < plan.backprop_bytes / 1.5
    assert plan.advice() is None


# --- compilers that delete barriers -------------------------------------------------------------------


@pytest.fixture
def old_jax(monkeypatch):
    """As with JAX 0.10 on a CPU, in a process that has said nothing yet."""
    options = {"xla_disable_hlo_passes": "cse_barrier_expander"}
    monkeypatch.setattr(_jax, "barrier_options", lambda: options)
    monkeypatch.setattr(jax, "__version__", "0.10.1")
    monkeypatch.setattr(report, "_said_barriers", False)
    monkeypatch.setenv("XLA_FLAGS", "")


def barrier_warnings(run):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run()
    return [w for w in caught if "optimization barriers" in str(w.message)]


WAYS = {
    "walked": lambda: mw.plan(loss_of(turn), *structs(ORTHOGONAL, X)),
    "recomputed": lambda: mw.plan(
        loss_of(lambda x, w: jnp.sin(x @ w)), *structs(ORTHOGONAL * 2, X), method=mw.Checkpoint()
    ),
    "inverted": lambda: mw.plan(loss_of(turn), *structs(ORTHOGONAL, X), method=mw.Reversible()),
    "called": lambda: jax.eval_shape(mw.value_and_grad(loss_of(turn)), *structs(ORTHOGONAL, X)),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_plan_that_rests_on_barriers_says_where_they_are_deleted_once(way, old_jax):
    (warning,) = barrier_warnings(lambda: (WAYS[way](), WAYS[way]()))
    assert issubclass(warning.category, mw.PlanWarning) and warning.filename == __file__
    words = str(warning.message)
    assert words.startswith("moonwalk: under jax.jit this plan will take about ")
    for part in (
        "JAX 0.10.1 deletes optimization barriers when it compiles for a CPU",
        "compiler_options={'xla_disable_hlo_passes': 'cse_barrier_expander'}",
        "XLA_FLAGS=--xla_disable_hlo_passes=cse_barrier_expander",
        "Python 3.12",
    ):
        assert part in words


def test_what_it_will_take_then_is_about_backpropagations(old_jax):
    (warning,) = barrier_warnings(WAYS["recomputed"])
    took = float(re.search(r"about ([\d.]+) KiB instead", str(warning.message))[1]) * 1024
    assert 0.8 < took / WAYS["recomputed"]().backprop_bytes < 1.01


def test_where_barriers_stay_or_do_not_matter_nothing_is_said(old_jax, monkeypatch):
    scanned = lambda: mw.plan(scan_of(turn), *structs(jnp.stack(ORTHOGONAL), X))
    assert not barrier_warnings(scanned)
    with _jax.keeping_barriers():
        assert not barrier_warnings(WAYS["walked"])
    monkeypatch.setenv("XLA_FLAGS", "--xla_disable_hlo_passes=cse_barrier_expander")
    assert not barrier_warnings(WAYS["walked"])
    monkeypatch.setenv("XLA_FLAGS", "")
    monkeypatch.setattr(_jax, "barrier_options", dict)
    assert not barrier_warnings(WAYS["walked"])


# --- arguments ----------------------------------------------------------------------------------------


def test_structs_and_values_plan_alike_where_all_is_declared():
    loss = loss_of(turn)
    a, b = mw.plan(loss, ORTHOGONAL, X), mw.plan(loss, *structs(ORTHOGONAL, X))
    assert (str(a), a.table()) == (str(b), b.table())
    assert (a.kept_bytes, a.signature) == (b.kept_bytes, b.signature)
    assert not a.measured and not b.measured


def test_options_and_keywords():
    def loss(x, ws, *, scale):
        return scale * loss_of(turn)(ws, x), x

    plan = mw.plan(loss, X, ORTHOGONAL, argnums=1, has_aux=True, scale=2.0)
    assert plan.walks
    found, _ = jax.jit(mw.grad(loss, argnums=1, has_aux=True, method=plan))(X, ORTHOGONAL, scale=2.0)
    expected = jax.jit(jax.grad(loss_of(turn)))(ORTHOGONAL, X)
    np.testing.assert_allclose(found[0], 2 * expected[0], rtol=1e-9)


@pytest.mark.parametrize("make", [slow(loss_of), scan_of])
def test_measured_gains(make):
    """Nothing is declared: values say what a trace cannot, and the plan carries it into jit."""
    loss = make(dense)
    ws = GENERAL if make is loss_of else jnp.stack(GENERAL)
    unknown = mw.plan(loss, *structs(ws, X))
    assert not unknown.walks and not unknown.measured
    plan = mw.plan(loss, ws, X)
    assert plan.walks and plan.measured
    assert plan.kept_bytes < unknown.kept_bytes or plan.peak_bytes < unknown.peak_bytes
    assert plan.predicted_gain > 1
    assert "gains measured" in str(plan) and "gains measured" in plan.table()
    check(loss, ws, method=plan)
    text = jax.jit(mw.grad(loss, method=plan)).lower(ws, X).as_text(debug_info=True)
    assert "phase_3" in text
    assert "phase_3" not in jax.jit(mw.grad(loss)).lower(ws, X).as_text(debug_info=True)


def test_a_measured_plan_refuses_weights_that_have_drifted():
    loss = loss_of(dense)
    plan = mw.plan(loss, GENERAL, X)
    drifted = [w @ jnp.diag(jnp.logspace(0, -9, WIDTH)) for w in GENERAL]
    with pytest.raises(mw.InexactError, match="certificate exceeds the tolerance 1.0e-11"):
        mw.grad(loss, method=plan)(drifted, X)


# --- anchors ------------------------------------------------------------------------------------------


def test_no_anchors_where_nothing_is_lost(walking):
    assert walking.anchors == 0
    assert walking.predicted_gain < 1e-11 / np.finfo(np.float64).eps


def test_anchors_by_tolerance():
    """A smaller one wants more of them; an infinite one, none."""
    loss = loss_of(dense)
    plan = lambda t: mw.plan(loss, GENERAL, X, method=mw.Moonwalk(tolerance=t))
    strict, usual, free = map(plan, (5e-14, 1e-11, math.inf))
    assert strict.anchors > usual.anchors == free.anchors == 0
    rows = [r for r in strict.rows if r.mode == "anchor"]
    assert "error would exceed the tolerance" in {r.why for r in rows}
    # An anchor is a whole cotangent, kept in Phase II.
    assert all(r.bytes >= STATE for r in rows)
    assert strict.predicted_gain < free.predicted_gain
    # So strict a tolerance is finer than what rounding alone leaves: it is not to be enforced here.
    lenient = dataclasses.replace(strict.method, on_inexact="ignore")
    check(loss, GENERAL, method=dataclasses.replace(strict, method=lenient), tolerance=1e-12)


@pytest.mark.parametrize("every", [1, 5])
def test_anchors_every_so_many_layers(every):
    depth = 12
    ws = [orthogonal(WIDTH, seed=i) for i in range(depth)]
    loss, method = loss_of(turn), mw.Moonwalk(anchor_every=every)
    plan = mw.plan(loss, *structs(ws, X), method=method)
    assert plan.walks == (every > 1)  # an anchor at every layer is an activation at every layer
    if plan.walks:
        assert 1 <= plan.anchors <= (depth - 2) // every  # none is wanted after the first or the last
        assert f"anchor_every={every}" in {r.why for r in plan.rows}
        check(loss, ws, method=method)


@pytest.mark.parametrize(
    ("length", "every", "reverse"),
    [(10, 4, False), slow(10, 4, True), (9, 8, True), slow(8, 4, False)],
)
def test_periods_that_do_not_divide_the_length(length, every, reverse):
    ws = jnp.stack([orthogonal(WIDTH, seed=i) for i in range(length)])
    loss, method = scan_of(turn, reverse=reverse), mw.Moonwalk(anchor_every=every)
    plan = mw.plan(loss, *structs(ws, X), method=method)
    assert plan.walks
    assert plan.anchors == (every < length)
    assert (f"an anchor every {every}" in plan.rows[0].why) == (every < length)
    check(loss, ws, method=method)


def test_anchors_in_a_scan_bound_its_gain():
    """Error starts afresh in every period; inside of one it grows, and the products are precise."""
    length, every = 12, 4
    ws = jnp.stack([orthogonal(WIDTH, seed=i) for i in range(length)])
    method = mw.Moonwalk(anchor_every=every)

    def precise_products(layer):
        text = jax.jit(mw.grad(scan_of(layer), method=method)).lower(ws, X).as_text()
        products = re.findall(rf"dot_general.*-> tensor<{ROWS}x{WIDTH}xf64>", text)
        return sorted("HIGHEST" in line for line in products)

    anchored, whole = (
        mw.plan(scan_of(turn), *structs(ws, X), method=m) for m in (method, mw.Moonwalk())
    )
    layer = (1 + 0.3**2) / (2 * 0.3)
    assert anchored.rows[0].gain == pytest.approx(layer)
    assert anchored.predicted_gain == pytest.approx(layer**every)
    assert whole.predicted_gain == pytest.approx(layer**length)
    # Phases I and III run the layer; Phase II and the vijp are the cotangents' chain.
    assert precise_products(turn) == [False, False, True, True]
    lossless = precise_products(lambda x, w: jnp.abs(x @ mw.declare(w, "orthogonal")))
    assert lossless == [False] * 4


@pytest.mark.parametrize("tolerance", [slow(1e-13), 1e-11])
def test_a_scan_finds_its_period(tolerance):
    """By the gain of one layer: the error between two anchors stays within the tolerance."""
    ws = jnp.stack([lower(WIDTH, seed=i) for i in range(12)])
    loss = scan_of(lambda x, w: leaky(x @ mw.declare(w, "lower")))
    plan = mw.plan(loss, ws, X, method=mw.Moonwalk(tolerance=tolerance))
    if plan.walks:
        assert plan.predicted_gain * np.finfo(np.float64).eps <= max(tolerance, 1e-300)
        assert bool(plan.anchors) == ("an anchor every" in plan.rows[0].why)
    assert plan.walks or tolerance < 1e-11
    check(loss, ws, method=plan, tolerance=max(1e-11, 1e-15 * plan.predicted_gain))


# --- branches -----------------------------------------------------------------------------------------


def shortcut(x, w):
    return x + turn(turn(x, w[0]), w[1])


def test_forks():
    """A state with two readers: the long way's cotangent is kept, and nobody needs the short way's."""
    ws = [(orthogonal(WIDTH, seed=i), orthogonal(WIDTH, seed=i + 9)) for i in range(4)]
    plan = mw.plan(loss_of(shortcut), *structs(ws, X), method=mw.Moonwalk(walk="always"))
    rows = [r for r in plan.rows if r.mode == "fork"]
    assert rows
    for row in rows:
        assert row.block == f"fork f64[{ROWS},{WIDTH}] ×2"
        assert row.why in ("keeps 1 of 2 cotangents", "keeps 0 of 2 cotangents")
        assert row.bytes in (0, STATE)
    check(loss_of(shortcut), ws, method=mw.Moonwalk(walk="always"))


def unet(p, x):
    """Three levels of pooling, skips added on the way up."""
    skips = []
    for w in p["down"]:
        x = turn(x, w)
        skips.append(x)
        x = x.reshape(-1, 2, x.shape[-1]).mean(1)
    x = turn(x, p["middle"])
    for w, skip in zip(p["up"], reversed(skips), strict=True):
        x = turn(jnp.repeat(x, 2, 0) + skip, w)
    return jnp.mean((x - 0.5) ** 2)


UNET = {"down": ORTHOGONAL[:3], "middle": ORTHOGONAL[3], "up": ORTHOGONAL[4:7]}


@pytest.mark.slow  # test_memory.py has a larger one
def test_a_unet_keeps_at_most_what_its_plan_says():
    """By XLA's own account, at a size where activations outweigh everything else."""
    x = jax.ShapeDtypeStruct((2**15, WIDTH), jnp.float64)
    params = structs(UNET)[0]
    plan = mw.plan(unet, params, x)
    assert plan.peak_bytes <= min(plan.backprop_bytes, report.WORTH * plan.checkpoint_bytes)
    compiled = jax.jit(mw.grad(unet, method=plan)).lower(params, x).compile()
    assert compiled.memory_analysis().temp_size_in_bytes <= 1.25 * plan.peak_bytes


@pytest.mark.slow
def test_the_gradient_of_a_unet():
    check(unet, UNET)


# --- what must be run again, or once ------------------------------------------------------------------


ODD = [
    mw.Moonwalk(),
    mw.Moonwalk(walk="always"),
    slow(mw.Moonwalk(walk="always", checkpoint="auto")),
    mw.Checkpoint(),
    slow(mw.Checkpoint("recursive")),
]


@pytest.mark.parametrize("method", ODD)
def test_a_checkpointed_scan_behind_a_wide_state(method):
    """It cannot be walked, nor stored, and no stretch may begin before it where all else is walked."""

    def body(carry, w):
        y, b = carry
        return (jnp.tanh(y * w), jnp.tanh(b + jnp.sum(y * w))), None

    def loss(ws, x):
        wide, stack, square = ws
        y = turn(turn(x, square), square) @ wide
        z = jax.checkpoint(lambda y, b, s: lax.scan(body, (y, b), s)[0][1])(y, jnp.sum(square[0]), stack)
        return z**2 + z

    ws = (normal(WIDTH, 4 * WIDTH), normal(3, 4 * WIDTH), orthogonal(WIDTH))
    check(loss, ws, method=method)


@pytest.mark.parametrize("method", ODD)
def test_what_prints_inside_a_checkpoint_runs_once(method):
    seen = []

    def body(x, w):
        jax.debug.callback(lambda _: seen.append(1), x[0, 0])
        return jnp.tanh(x @ w), None

    def loss(ws, x):
        scanned = jax.checkpoint(lambda x, ws: lax.scan(body, x, ws)[0])
        return jnp.mean(turn(scanned(turn(x, ws[0]), ws), ws[1]) ** 2)

    ws = jnp.stack([orthogonal(WIDTH, seed=i) for i in range(3)])
    found = jax.jit(mw.grad(loss, method=method))(ws, X)
    jax.effects_barrier()
    assert len(seen) == 3
    np.testing.assert_allclose(found, jax.grad(loss)(ws, X), atol=1e-12)
