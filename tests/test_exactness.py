"""How exact the engine is in the precisions people train in. Truth is float64 backpropagation."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from marks import slow

import moonwalk as mw

pytestmark = pytest.mark.filterwarnings("ignore::moonwalk.PlanWarning")

WIDTH = 64


def cast(tree, dtype):
    return jax.tree.map(lambda a: a.astype(dtype), tree)


def error(found, truth):
    """‖a−b‖/‖b‖ over all leaves together."""
    pairs = [
        (np.asarray(a, np.float64), np.asarray(b, np.float64))
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(truth), strict=True)
    ]
    off = sum(np.sum((a - b) ** 2) for a, b in pairs)
    return math.sqrt(off / sum(np.sum(b**2) for _, b in pairs))


def maxmin(x):
    a, b = x[..., 0::2], x[..., 1::2]
    in_order = a >= b
    return jnp.concatenate([jnp.where(in_order, a, b), jnp.where(in_order, b, a)], -1)


def isometric(activation):
    def loss(ws, x, t):
        layer = lambda x, w: (activation(x @ mw.declare(w, "orthogonal")), None)
        return jnp.mean((lax.scan(layer, x, ws)[0] - t).astype(jnp.float32) ** 2)

    return loss


def orthogonal_stack(depth, seed, dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(seed), 3)
    ws = jnp.linalg.qr(jax.random.normal(keys[0], (depth, WIDTH, WIDTH)))[0]
    x, t = (jax.random.normal(k, (32, WIDTH)) for k in keys[1:])
    return cast((ws, x, t), dtype)


@pytest.mark.parametrize("activation", [slow(jnp.abs), maxmin], ids=["abs", "maxmin"])
@pytest.mark.parametrize("depth", [slow(10), 100, slow(1000)])
def test_isometric_networks_do_not_lose_accuracy_with_depth(depth, activation):
    loss = isometric(activation)
    ours, theirs, apart = [], [], []
    gradients = [jax.jit(f(loss)) for f in (mw.grad, jax.grad)]
    assert mw.plan(loss, *orthogonal_stack(depth, 0)).walks
    for seed in range(5):
        args = orthogonal_stack(depth, seed)
        truth = gradients[1](*cast(args, jnp.float64))
        found, backprop = (g(*args) for g in gradients)
        ours.append(error(found, truth))
        theirs.append(error(backprop, truth))
        apart.append(error(found, backprop))
    if depth < 1000:
        assert np.median(ours) <= 2 * np.median(theirs)
    else:  # flipped signs put float32 backpropagation itself off
        assert np.median(apart) <= 2e-5


def test_bfloat16_is_as_exact_as_bfloat16_backpropagation():
    loss = isometric(jnp.abs)
    args = orthogonal_stack(24, 0, jnp.bfloat16)
    assert mw.plan(loss, *args).walks
    truth = jax.grad(loss)(*cast(args, jnp.float64))  # at the same rounded weights
    ours, theirs = (error(jax.jit(f(loss))(*args), truth) for f in (mw.grad, jax.grad))
    assert ours <= 2 * theirs


def test_float16_cotangents_are_promoted():
    """Far from the loss float16 cotangents would underflow; a walk's are float32."""
    loss = isometric(jnp.abs)
    args = orthogonal_stack(24, 0, jnp.float16)
    assert mw.plan(loss, *args).walks
    truth = jax.grad(loss)(*cast(args, jnp.float64))
    gradient = jax.jit(mw.grad(loss))(*args)
    assert gradient.dtype == jnp.float16
    assert error(gradient, truth) <= 1.1 * error(jax.jit(jax.grad(loss))(*args), truth)
    kept = str(jax.make_jaxpr(mw.grad(loss))(*args))
    assert "f32[32,64]" in kept


@pytest.mark.parametrize("dtype", [jnp.float32, slow(jnp.bfloat16)])
def test_loss_scaling_is_harmless(dtype):
    """A power of two changes no bit of the gradient but its exponent."""
    loss = isometric(jnp.abs)
    args = orthogonal_stack(12, 0, dtype)
    plain = jax.jit(mw.grad(loss))(*args)
    run = jax.jit(mw.grad(lambda ws, x, t, scale: loss(ws, x, t) * scale))
    for scale in (2.0**-14, 2.0**14):
        scaled = run(*args, jnp.float32(scale))
        np.testing.assert_array_equal(np.asarray(plain * dtype(scale)), np.asarray(scaled))


# --- networks that lose accuracy ---------------------------------------------------------------------


def triangular(slope):
    """The paper's dense layers: a lower-triangular weight and a LeakyReLU."""

    def loss(ws, x, t):
        for w in ws:
            x = jax.nn.leaky_relu(x @ mw.declare(jnp.tril(w), "lower"), slope)
        return jnp.mean((x - t) ** 2)

    return loss


def he_stack(depth, seed=0):
    keys = jax.random.split(jax.random.key(seed), 3)
    ws = jax.random.normal(keys[0], (depth, WIDTH, WIDTH)) * (2 / WIDTH) ** 0.5
    ws = jnp.tril(ws, -1) + 2**0.5 * jnp.eye(WIDTH)
    x, t = (jax.random.normal(k, (256, WIDTH)) for k in keys[1:])
    return list(ws), x, t


@pytest.mark.slow
def test_the_papers_layers_stay_exact_by_plan():
    """24 layers of slope 0.01 have a gain of 1e43; anchors and recomputation keep the gradient."""
    loss, args = triangular(0.01), cast(he_stack(24), jnp.float32)
    backprop = jax.jit(jax.grad(loss))(*args)
    plan = mw.plan(loss, *args)  # from concrete values: gains are measured
    assert error(jax.jit(mw.grad(loss, method=plan))(*args), backprop) <= 1e-3
    assert error(jax.jit(mw.grad(loss))(*args), backprop) <= 1e-3


@pytest.mark.parametrize(("slope", "depth"), [slow(0.3, 12), (0.2, 8)])
def test_measured_gains_place_anchors(slope, depth):
    loss, args = triangular(slope), cast(he_stack(depth), jnp.float32)
    truth = jax.jit(jax.grad(loss))(*he_stack(depth))
    plan = mw.plan(loss, *args, method=mw.Moonwalk(walk="always"))
    assert plan.walks and plan.measured and plan.anchors >= 1
    assert plan.predicted_gain <= plan.tolerance / 1e-7
    assert error(jax.jit(mw.grad(loss, method=plan))(*args), truth) <= plan.tolerance


@pytest.mark.parametrize(("slope", "depth"), [slow(0.3, 12), (0.1, 6), slow(0.2, 8)])
def test_the_certificate_tells_the_truth(slope, depth):
    """Anchors off: it is within a factor of 10 of the largest error that a swept cotangent has.

    The gradient of a shift of every activation is that activation's cotangent itself.
    """

    def loss(params, x, t):
        for w, before, after in zip(*params, strict=True):
            x = jax.nn.leaky_relu(x @ mw.declare(jnp.tril(w), "lower") + before, slope) + after
        return jnp.mean((x - t) ** 2)

    ws, x, t = he_stack(depth)
    shifts = [jnp.zeros_like(x)] * depth
    full = ((ws, shifts, shifts), x, t)
    args = cast(full, jnp.float32)
    _, *truth = jax.jit(jax.grad(loss))(*full)
    method = mw.Moonwalk(tolerance=math.inf, on_inexact="ignore")
    (_, *found), certificate = jax.jit(mw.grad(loss, method=method, certify=True))(*args)
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(truth), strict=True)
    worst = max(error(a, b) for a, b in pairs)
    assert 1e-5 < worst < 1
    assert worst / 10 <= certificate.error <= 10 * worst
    assert certificate.closure <= certificate.error


@pytest.mark.parametrize(("slope", "depth"), [slow(0.3, 12), (0.2, 8)])
def test_on_inexact_acts(slope, depth):
    """A plan whose weights have drifted: measured on gentle weights, used with worse than the paper's."""
    loss, (ws, *data) = triangular(slope), cast(he_stack(depth), jnp.float32)
    args = ([w + 0.5 * jnp.tril(w, -1) for w in ws], *data)  # far beyond the tolerance, in any sample
    gentle = [jnp.eye(WIDTH, dtype=jnp.float32)] * depth
    for action in ("nan", "raise", "ignore"):
        method = mw.Moonwalk(tolerance=1e-3, on_inexact=action)
        plan = mw.plan(loss, gentle, *args[1:], method=method)
        assert plan.walks and plan.measured
        run = jax.jit(mw.grad(loss, method=plan))
        if action == "raise":
            with pytest.raises(Exception, match="certificate exceeds the tolerance"):
                jax.block_until_ready(run(*args))
            with pytest.raises(
                mw.InexactError, match=r"dot_general .*test_exactness.py:\d+ .*is \d.* off"
            ):
                mw.grad(loss, method=plan)(*args)
        else:
            gradients = run(*args)
            finite = [bool(jnp.all(jnp.isfinite(g))) for g in gradients]
            assert all(finite) == (action == "ignore")
            assert any(finite) == (action == "ignore")


def test_an_identity_pivot_is_bit_identical():
    """Nothing mixes, and slope 1/8 is a power of two: not one bit is lost in 12 layers."""

    def loss(ws, x, t):
        for w in ws:
            kernel = mw.declare(w.at[1].set(jnp.eye(4, dtype=w.dtype)), "diagonal")
            layout = ("NWC", "WIO", "NWC")
            x = lax.conv_general_dilated(x, kernel, (2,), [(1, 1)], dimension_numbers=layout)
            x = jax.nn.leaky_relu(x, 1 / 8)
        return jnp.mean((x.mean(1) - t) ** 2)

    keys = jax.random.split(jax.random.key(0), 3)
    ws = list(jax.random.normal(keys[0], (12, 3, 4, 4)) * 0.3)
    args = cast(
        (ws, jax.random.normal(keys[1], (2, 4096, 4)), jax.random.normal(keys[2], (2, 4))), jnp.float32
    )
    method = mw.Moonwalk(walk="always", tolerance=math.inf)
    plan = mw.plan(loss, *args, method=method)
    assert plan.walked >= 16 and plan.anchors == 0
    ours, theirs = jax.jit(mw.grad(loss, method=method))(*args), jax.jit(jax.grad(loss))(*args)
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(a, b)


def test_false_declarations_are_seen_by_the_certificate():
    loss = isometric(jnp.abs)
    ws, x, t = orthogonal_stack(6, 0)
    noisy = ws + 1e-3 * jax.random.normal(jax.random.key(9), ws.shape, ws.dtype)
    run = jax.jit(mw.grad(loss, certify=True, method=mw.Moonwalk(on_inexact="nan")))
    gradient, certificate = run(noisy, x, t)
    assert certificate.error > 1e-3
    assert bool(jnp.all(jnp.isnan(gradient)))
    with pytest.raises(mw.DeclarationError, match="declared 'orthogonal', but its values are not"):
        mw.grad(loss)(noisy, x, t)


def test_products_of_a_lossy_walk_are_in_true_float32():
    """Where the gain is 1 the ambient precision stays, elsewhere the cotangents' chain is precise."""

    def loss(slope):
        def f(ws, x, t):
            for w in ws:
                x = jax.nn.leaky_relu(x @ mw.declare(w, "orthogonal"), slope)
            return jnp.mean((x - t) ** 2)

        return f

    ws, x, t = orthogonal_stack(8, 0)

    def precise_products(fun, method):
        text = jax.jit(mw.grad(fun, method=method)).lower(list(ws), x, t).as_text()
        return sum(
            "HIGHEST" in line for line in text.splitlines() if "dot_general" in line and "32x64" in line
        )

    assert mw.plan(loss(0.5), list(ws), x, t).predicted_gain > 1
    assert precise_products(loss(0.5), mw.Moonwalk()) > 0
    assert precise_products(loss(1.0), mw.Moonwalk()) == 0
    assert precise_products(loss(1.0), mw.Moonwalk(walk_precision="highest")) > 0


# --- what no trace can bound is checked, whether asked for or not ---------------------------------------


def small_branches(scale):
    """Residual blocks of six walked layers, whose sum hardly moves the state."""

    def block(x, ws):
        z = x
        for w in ws:
            z = jnp.abs(z @ mw.declare(w, "orthogonal"))
        return x + scale * z

    def looped(ws, x, t):
        for layers in ws:
            x = block(x, list(layers))
        return jnp.mean(jnp.tanh(x) * t)

    def scanned(ws, x, t):
        return jnp.mean(jnp.tanh(lax.scan(lambda x, w: (block(x, list(w)), None), x, ws)[0]) * t)

    return {"loop": looped, "scan": scanned}


@pytest.mark.parametrize("kind", [slow("loop"), "scan"])
def test_small_branches_are_not_lost_in_a_difference(kind):
    """h of the branch is 1e-6 of that of the skip: as their difference, float32 would not have it."""
    ws, x, t = orthogonal_stack(24, 0)
    args = ws.reshape(4, 6, WIDTH, WIDTH), jnp.tile(x, (8, 1)), jnp.tile(t, (8, 1))
    loss = small_branches(1e-6)[kind]
    plan = mw.plan(loss, *args)
    assert plan.walks and "fork" in {r.mode for r in plan.rows}
    ours, theirs = jax.jit(mw.grad(loss))(*args), jax.jit(jax.grad(loss))(*args)
    assert error(ours, theirs) <= 1e-5


def test_a_difference_that_cancels_is_not_silent():
    """A U-Net whose inner levels hardly matter: walking them takes a difference, which is checked."""

    def loss(ws, x, t):
        level = lambda x, ws: jax.tree.reduce(
            lambda x, w: jnp.abs(x @ mw.declare(w, "orthogonal")), ws, x
        )
        x = level(x, ws[:4])
        inner = level(x.reshape(x.shape[0] // 2, 2, -1)[:, 0], ws[4:12])
        x = 1e-7 * jnp.repeat(inner, 2, axis=0) + x
        return jnp.mean(level(x, ws[12:]) * t)

    ws, x, t = orthogonal_stack(16, 0)
    args = list(ws), jnp.tile(x, (16, 1)), jnp.tile(t, (16, 1))
    plan = mw.plan(loss, *args)
    assert plan.walks and plan.checked
    gradients = jax.jit(mw.grad(loss, method=mw.Moonwalk(on_inexact="nan")))(*args)
    truth = jax.jit(jax.grad(loss))(*args)
    worst = max(error(a, b) for a, b in zip(gradients, truth, strict=True))
    assert math.isnan(worst) or worst <= 1e-3


def test_a_badly_scaled_diagonal_is_not_silent():
    """Alone a declared diagonal loses nothing; after something that mixes its spread counts."""

    def loss(params, x, t):
        for q, d in zip(*params, strict=True):
            x = jnp.abs(x @ mw.declare(q, "orthogonal")) @ mw.declare(d, "diagonal")
        return jnp.mean(x * t)

    qs, x, t = orthogonal_stack(12, 0)
    spread = [jnp.diag(jnp.logspace(0, -2, WIDTH, dtype=jnp.float32))] * 12
    even = [jnp.eye(WIDTH, dtype=jnp.float32)] * 12
    args = jnp.tile(x, (8, 1)), jnp.tile(t, (8, 1))
    run = jax.jit(mw.grad(loss, method=mw.Moonwalk(on_inexact="nan")))
    lost = run((list(qs), spread), *args)
    assert all(bool(jnp.all(jnp.isnan(g))) for g in jax.tree.leaves(lost))
    kept = (list(qs), even)
    assert error(run(kept, *args), jax.jit(jax.grad(loss))(kept, *args)) <= 1e-4
    planned = mw.plan(loss, (list(qs), spread), *args)  # measured: anchors, or none of it is walked
    truth = jax.jit(jax.grad(loss))((list(qs), spread), *args)
    assert error(jax.jit(mw.grad(loss, method=planned))((list(qs), spread), *args), truth) <= 1e-4
