"""Convolutions whose centre tap dominates: separators and cyclic reduction (`rules/separators.py`)."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from marks import slow
from weights import normal

import moonwalk as mw
from moonwalk.errors import SingularError
from moonwalk.rules.fragments import Ask, Fragment, candidates
from moonwalk.rules.registry import Gain
from moonwalk.rules.separators import Separators
from moonwalk.rules.spans import Spans
from moonwalk.trace import graph, staging

pytestmark = pytest.mark.filterwarnings("ignore::moonwalk.PlanWarning")


def dominant(k, m, scale, groups=1, seed=0, dtype=np.float64):
    """[k, m, g·m]: taps of `scale` × He around the identity."""
    w = np.asarray(normal(k, m, groups * m, seed=seed)) * scale * math.sqrt(2 / (k * m))
    w[k // 2] += np.tile(np.eye(m), (1, groups))
    return jnp.asarray(w, dtype)


def conv(x, w, groups=1, padding=None, dilation=1):
    half = dilation * (w.shape[0] // 2)
    return lax.conv_general_dilated(
        x,
        w,
        (1,),
        [padding or (half, half)],
        rhs_dilation=(dilation,),
        dimension_numbers=("NWC", "WIO", "NWC"),
        feature_group_count=groups,
    )


def block_of(fun, x):
    staged = staging.stage(fun, x)
    known = dict(zip(staged.jaxpr.constvars, staged.consts, strict=True))
    cut = graph.build(staged.jaxpr, staged.jaxpr.invars, staged.jaxpr.outvars, consts=known)
    (block,) = cut.blocks
    return block


def restored(rule, w, truth, groups=1):
    """The cotangent that a rule restores from its fragment and the pullback."""
    block = block_of(lambda x: conv(x, w, groups), truth)

    @jax.jit
    def there_and_back(w, truth):
        (h,) = jax.vjp(lambda x: conv(x, w, groups), truth)[1](truth)
        fragment = rule.fragment(block, None, None, (truth,), ())
        return rule.restore(block, rule.prepare(block, [w]), None, fragment, (h,), ())[0]

    return there_and_back(w, truth)


def relative(found, expected):
    leaves = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    pairs = [(np.asarray(a, np.float64), np.asarray(b, np.float64)) for a, b in leaves]
    norm = lambda arrays: math.sqrt(sum(float(np.sum(a**2)) for a in arrays))
    return norm([a - b for a, b in pairs]) / norm([b for _, b in pairs])


# --- one layer ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("k", "times", "n"),
    [
        # the whole axis: any number of blocks, the last one whole or cut
        (3, 0, 1),
        (3, 0, 37),
        (5, 0, 13),
        (7, 0, 29),
        # spans: whole ones only, a rest of one or more blocks, a rest that the axis cuts
        (3, 4, 32),
        (3, 8, 39),
        (5, 4, 51),
        (5, 8, 33),
        (7, 4, 31),
        (7, 8, 59),
    ],
)
def test_restores_any_length(k, times, n):
    truth = normal(2, n, 3, seed=n)
    found = restored(Separators(times), dominant(k, 3, 0.4, seed=k), truth)
    np.testing.assert_allclose(found, truth, rtol=0, atol=1e-10)


@pytest.mark.parametrize(("times", "groups"), [(0, 6), (4, 2)])
def test_groups(times, groups):
    truth, w = normal(2, 21, 6), dominant(5, 6 // groups, 0.3, groups)
    np.testing.assert_allclose(restored(Separators(times), w, truth, groups), truth, atol=1e-10, rtol=0)


def test_layouts():
    """Channels first, as Equinox and PyTorch have them."""
    truth, w = normal(2, 3, 23), jnp.transpose(dominant(3, 3, 0.4), (2, 1, 0))
    first = lambda x: lax.conv_general_dilated(x, w, (1,), [(1, 1)])
    block, rule = block_of(first, truth), Separators(8)

    @jax.jit
    def there_and_back(w, truth):
        fragment = rule.fragment(block, None, None, (truth,), ())
        h = jax.vjp(first, truth)[1](truth)
        return rule.restore(block, rule.prepare(block, [w]), None, fragment, h, ())[0]

    np.testing.assert_allclose(there_and_back(w, truth), truth, atol=1e-10, rtol=0)


def test_it_does_not_depend_on_what_lies_beyond_the_end():
    """A kernel that is far from symmetric, and one block only."""
    w = jnp.stack([0.4 * jnp.eye(2), jnp.eye(2) + 0.1, -0.3 * jnp.ones((2, 2))])
    for n in (1, 3):
        truth = normal(1, n, 2)
        np.testing.assert_allclose(restored(Separators(0), w, truth), truth, atol=1e-12, rtol=0)


@pytest.mark.parametrize("k", [3, 5])
def test_half_of_what_spans_keep(k):
    """For the same length of spans."""
    n, w = 64 * (k - 1), dominant(k, 3, 0.4)
    truth = normal(2, n, 3)
    block = block_of(lambda x: conv(x, w), truth)

    def size(rule):
        return sum(a.size for a in jax.tree.leaves(rule.fragment(block, None, None, (truth,), (0,))))

    spans = [s for s in candidates(block, Ask()) if isinstance(s, Spans)]
    assert len(spans) > 2
    for scheme in spans:
        assert 2 * size(Separators(scheme.span // (k // 2))) == size(Spans(scheme.lines, stagger=False))
    assert size(Separators(0)) == 0


W = dominant(3, 4, 0.1)


@pytest.mark.parametrize(
    ("w", "options"),
    [
        (W, {"padding": (2, 0)}),  # causal
        (W, {"padding": (0, 0)}),
        (W, {"dilation": 2}),
        (W[..., :3], {}),  # fewer channels
        (normal(4, 4, 4), {"padding": (1, 2)}),  # no centre tap
        (W[:1], {}),
    ],
)
def test_refused(w, options):
    block = block_of(lambda x: conv(x, w, **options), normal(1, 64, 4))
    assert not any(isinstance(s, Separators) for s in candidates(block, Ask()))


def test_spans_that_were_asked_for_are_taken():
    block = block_of(lambda x: conv(x, W), normal(1, 64, 4))
    assert [type(s) for s in candidates(block, Ask(Fragment(8)))] == [Spans]
    kinds = [type(s) for s in candidates(block, Ask())]
    assert kinds.index(Spans) == kinds.count(Separators) - 2 > 0  # the short ones come after spans


# --- gains ----------------------------------------------------------------------------------------------


def gain(w, times=0, n=64, slope=1.0, budget=1 / 4):
    block = block_of(lambda x: conv(x, w), jnp.zeros((1, n, w.shape[1]), w.dtype))
    rule = Separators(times, budget, slope)
    assert rule.gain(block) == Gain.unknown()  # while tracing
    return rule.gain(block, [w])


@pytest.mark.parametrize(("times", "n"), [(0, 24), (8, 64)])
def test_gain_is_that_of_the_matrix(times, n):
    w = dominant(3, 4, 0.4)
    size = times - 1 if times else n
    matrix = np.zeros((size, 4, size, 4))
    for i in range(size):
        for tap in range(3):
            if 0 <= i - tap + 1 < size:
                matrix[i, :, i - tap + 1] = w[tap]
    inverse = np.linalg.inv(matrix.reshape(4 * size, -1))
    expected = math.sqrt(np.sum(np.asarray(w) ** 2) / 4) * np.linalg.norm(inverse) / math.sqrt(4 * size)
    found = gain(w, times, n)
    assert found.factor - 0.1 == pytest.approx(expected, rel=0.05)
    assert found.mixes
    assert found.lasting is None


def test_they_are_taken_only_where_anchors_would_cost_less_than_spans():
    assert gain(dominant(3, 8, 0.1)).factor < 1.15
    assert gain(dominant(3, 8, 0.4)).factor < 2
    # The activation's gain compounds with it: LeakyReLU of slope .1 leaves room for nothing.
    assert gain(dominant(3, 8, 0.1), slope=0.3).factor < 1.15
    assert gain(dominant(3, 8, 0.1), slope=0.1) == Gain.unknown()
    # A tap beside the centre dominates: (*) grows along the axis, `spans` does not.
    w = jnp.stack([jnp.eye(8), 0.9 * jnp.eye(8), 0 * jnp.eye(8)])
    assert gain(w) == gain(w, 8) == Gain.unknown()
    assert gain(w.at[1, 0, 0].set(jnp.nan)) == Gain.unknown()


def test_general_kernels_do_not_choose_them():
    he = normal(3, 8, 8) * math.sqrt(2 / 24)
    block = block_of(lambda x: conv(x, he), normal(1, 64, 8))
    found = [s for s in candidates(block, Ask()) if isinstance(s, Separators)]
    assert len(found) == 6
    assert {s.gain(block, [he]) for s in found} == {Gain.unknown()}


def test_one_bad_mode_of_many_shows_on_a_long_axis():
    """It grows by a tenth a window: little over some, everything over many."""
    w = jnp.zeros((3, 8, 8)).at[1].set(jnp.eye(8)).at[0, 0, 0].set(1.1)
    assert gain(w, n=12).factor < 3
    assert gain(w, n=64) == Gain.unknown()


def test_a_singular_system_rings():
    w = jnp.stack([jnp.eye(2), jnp.eye(2), jnp.eye(2)])  # of two windows: [[1, 1], [1, 1]]
    block = block_of(lambda x: conv(x, w), normal(1, 2, 2))
    alarms = Separators(0).weight_alarms(block, [w])
    rung = [a for a in alarms if bool(jnp.any(a.bad))]
    assert [a.error for a in rung] == [SingularError]
    assert "reduced around its centre tap is singular" in rung[0].message
    good = Separators(0).weight_alarms(block, [w.at[1].set(3 * jnp.eye(2))])
    assert not any(bool(jnp.any(a.bad)) for a in good)
    broken = Separators(0).weight_alarms(block, [w.at[0, 0, 0].set(jnp.nan)])
    assert any(bool(jnp.any(a.bad)) for a in broken)


# --- networks -------------------------------------------------------------------------------------------


def layer(x, w):
    return jnp.abs(conv(x, w))


def by_loop(ws, x):
    for w in ws:
        x = layer(x, w)
    return jnp.mean((x - 0.5) ** 2)


def by_scan(ws, x):
    return jnp.mean((lax.scan(lambda x, w: (layer(x, w), None), x, ws)[0] - 0.5) ** 2)


def network(kind, depth, k, m, scale, n, dtype=np.float64):
    """(loss, weights, x); each its own function, because measured gains belong to one."""
    ws = [dominant(k, m, scale, seed=10 + i, dtype=dtype) for i in range(depth)]
    x = normal(4, n, m, seed=5).astype(dtype)
    if kind == "loop":
        return lambda ws, x: by_loop(ws, x), ws, x
    return lambda ws, x: by_scan(ws, x), jnp.stack(ws), x


def fragments_of(plan):
    return [r for r in plan.rows if r.mode == "fragment"]


def differentiated(kind, depth, k, m, scale, n, dtype=np.float64):
    """(plan, gradients by that plan under `jit`, those of backpropagation in float64)."""
    loss, ws, x = network(kind, depth, k, m, scale, n, dtype)
    plan = mw.plan(loss, ws, x, method=mw.Moonwalk(walk="always"))  # three layers are few
    found = jax.jit(mw.value_and_grad(loss, method=plan))(ws, x)
    wide = jax.tree.map(lambda a: a.astype(np.float64), (ws, x))
    return plan, found, jax.jit(jax.value_and_grad(loss))(*wide)


@pytest.mark.parametrize(("kind", "k", "n"), [slow("loop", 3, 21), slow("scan", 5, 25)])
def test_a_plan_handed_to_jit_walks_without_fragments(kind, k, n):
    plan, found, expected = differentiated(kind, 3, k, 4, 0.2, n)
    rows = fragments_of(plan)
    assert len(rows) == (2 if kind == "loop" else 1)  # the first of the loop is a stem
    for row in rows:
        assert "fragment: 0 % of the cotangent; its centre tap dominates: cyclic reduction" in row.why
        assert row.bytes == 0
        assert 1 < row.gain < 1.3
    assert plan.measured
    assert plan.checked
    assert relative(found, expected) < 1e-9


@pytest.mark.slow
def test_separators_where_the_whole_axis_is_too_much():
    """One mode in eight grows by a tenth a window, which spans of 16 bear."""
    ws = jnp.stack([dominant(3, 8, 0.05, seed=i).at[0, 0, 0].set(1.1) for i in range(3)])
    x, loss = normal(4, 61, 8, seed=5), lambda ws, x: by_scan(ws, x)
    plan = mw.plan(loss, ws, x)
    (row,) = fragments_of(plan)
    assert "fragment: 6.6 % of the cotangent; 1 slice of every span of 16" in row.why
    assert row.bytes == 4 * 4 * 8 * 8  # bytes: of 4 examples, 4 slices of 8 numbers
    found = jax.jit(mw.value_and_grad(loss, method=plan))(ws, x)
    assert relative(found, jax.jit(jax.value_and_grad(loss))(ws, x)) < 1e-9


@pytest.mark.slow
def test_float32_over_many_layers():
    """|x| and 16 layers: as exact as backpropagation."""
    plan, found, expected = differentiated("scan", 16, 3, 8, 0.1, 24, np.float32)
    assert len(fragments_of(plan)) == 1
    assert not any("anchor" in r.why for r in plan.rows)
    assert relative(found, expected) < 2e-6


@pytest.mark.slow
def test_gains_compound_and_anchors_stop_them():
    plan, found, expected = differentiated("scan", 16, 3, 8, 0.4, 24, np.float32)
    (row,) = fragments_of(plan)
    assert 1.4 < row.gain < 3
    assert "an anchor every" in plan.rows[0].why
    assert relative(found, expected) < 2e-5


def test_without_values_nothing_is_assumed():
    loss, ws, x = network("loop", 2, 3, 4, 0.2, 64)
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), (ws, x))
    assert not any("centre tap" in r.why for r in mw.plan(loss, *shapes).rows)
