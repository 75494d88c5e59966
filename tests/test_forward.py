"""`PureForward` against `jax.value_and_grad`: the table of `networks.py`, refusals, memory, seeds."""

import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from marks import slow, some
from memory import network, temp
from networks import LABELS, NETWORKS, WIDTH, X, Y, orthogonals, turn
from test_engine import arrays, compare, error, reference, under_jit
from weights import general, normal, orthogonal

import moonwalk as mw

pytestmark = pytest.mark.filterwarnings("ignore::moonwalk.PlanWarning")

LOOPED = ["MLP with biases", "MaxMin", "strided CNN 1D", "average pooling", "frozen layers"]
SCANNED = ["scan", "scan with biases, between layers", "scan, reversed", "scan, counter and key"]
OTHERS = ["aux", "gradient of the input", "keywords", "scan of scans", "weight decay"]
EAGER = ["scan", "aux"]


def differentiated(name, **options):
    n = NETWORKS[name]
    method = mw.PureForward(inputs=n.method.inputs, **options)
    return mw.value_and_grad(lambda *a, **k: n.loss(*a, **k), method=method, **n.options)


NAMES = [*LOOPED, *SCANNED, *OTHERS]
VARIANTS = {"MLP with biases", "average pooling", "frozen layers", "scan, reversed", "weight decay"}


@pytest.mark.parametrize("name", some(NAMES, set(NAMES) - VARIANTS))
def test_gradient_under_jit(name):
    n = NETWORKS[name]
    compare(under_jit(differentiated(name), *n.args, **n.kwargs), reference(name))


@pytest.mark.parametrize(
    "name", [*EAGER, *(pytest.param(n, marks=pytest.mark.slow) for n in [*LOOPED, *SCANNED[1:]])]
)
def test_gradient_eagerly(name):
    n = NETWORKS[name]
    compare(arrays(differentiated(name)(*n.args, **n.kwargs)), reference(name))


def mean_loss(ws, x, y):
    for w in ws:
        x = turn(x, w)
    return jnp.mean((x - y) ** 2)


def two_terms(ws, x, y):
    z, _ = jax.lax.scan(lambda x, w: (turn(x, w), None), x, jnp.stack(ws))
    return jnp.sqrt(jnp.sum((z - y) ** 2) + 1.0) + 0.3 * jnp.mean(jnp.sum(jnp.abs(z), -1))


def cross_entropy(params, x, labels):
    for w in params["layers"]:
        x = turn(x, w)
    logits = jax.nn.log_softmax(x @ params["head"])
    return -jnp.mean(jnp.take_along_axis(logits, labels[:, None], 1))


CLASSIFIER = {"layers": orthogonals(3), "head": general(WIDTH, WIDTH, seed=9)}


@pytest.mark.parametrize(
    ("loss", "args", "chunk"),
    [
        slow(mean_loss, (orthogonals(4), X, Y), 3),
        slow(mean_loss, (orthogonals(4), X, Y), 64),
        (two_terms, (orthogonals(4), X, Y), 3),
        slow(two_terms, (orthogonals(4), X, Y), 64),
        slow(cross_entropy, (CLASSIFIER, X, LABELS), 3),
        (cross_entropy, (CLASSIFIER, X, LABELS), 64),
    ],
)
def test_one_jvp_per_feature(loss, args, chunk):
    method = mw.PureForward(chunk=chunk, per_example=True)
    plan = mw.plan(loss, *args, method=method)
    assert plan.jvps == WIDTH
    assert f"a seed by {WIDTH} jvps" in plan.table()
    assert mw.plan(loss, *args, method=mw.PureForward()).jvps == X.size
    json.dumps(plan.to_dict())
    found = under_jit(mw.value_and_grad(loss, method=method, certify=True), *args)
    expected = under_jit(jax.value_and_grad(loss), *args)
    *gradients, certificate_error, _ = found[1:]
    assert error(gradients, expected[1:]) <= 1e-10
    assert certificate_error <= 1e-10


def test_memory_does_not_grow_with_depth():
    for each in (False, True):
        method = mw.PureForward(chunk=8, per_example=each)
        made = [network("abs", n, 256) for n in (8, 64)]
        few, many = (temp(mw.value_and_grad(n.loss, method=method), *n.types()) for n in made)
        assert many <= 1.05 * few


# --- what is refused ----------------------------------------------------------------------------------


def relu_in_the_middle(ws, x):
    x = turn(x, ws[0])
    return jnp.sum(turn(turn(jax.nn.relu(turn(x, ws[1])), ws[2]), ws[0]) ** 2)


def skip(ws, x):
    y = turn(turn(x, ws[0]), ws[2])
    y = y + turn(turn(y, ws[1]), ws[2])
    return jnp.sum(turn(turn(y, ws[0]), ws[1]) ** 2)


def steep(ws, x):
    def layer(x, w):
        return jax.nn.leaky_relu(turn(x, w), 0.01), None

    return jnp.sum(jax.lax.scan(layer, x, jnp.concatenate([jnp.stack(ws)] * 8))[0] ** 2)


@pytest.mark.parametrize(
    ("loss", "block", "reason"),
    [
        (relu_in_the_middle, "custom_jvp_call", "exactly zero"),
        (skip, "fork", "several readers"),
        (steep, "scan", "error would exceed the tolerance"),
        (lambda ws, x: jnp.sum((x @ ws[0] @ ws[1] @ ws[2]) ** 2), "dot_general", "gain is not bounded"),
    ],
)
def test_what_cannot_be_walked_is_named(loss, block, reason):
    fun = jax.jit(mw.grad(loss, method=mw.PureForward()))
    with pytest.raises(mw.NotSubmersiveError) as raised:
        fun(orthogonals(3), X)
    assert block in raised.value.equation
    assert reason in raised.value.reason
    assert "moonwalk.Moonwalk()" in raised.value.way_out
    if block != "fork":
        assert "test_forward.py" in raised.value.source


def test_a_loss_that_is_no_sum_over_examples():
    def loss(ws, x):
        return jnp.sum(jnp.mean(turn(turn(x, ws[0]), ws[1]), 0) ** 2)

    with pytest.raises(ValueError, match=r"per_example=True.*examples are 16.*leave per_example out"):
        mw.grad(loss, method=mw.PureForward(per_example=True))(orthogonals(2), X)


def test_examples_that_are_not_independent_are_noticed():
    def loss(ws, x):
        x = turn(turn(x, ws[0]), ws[1])
        return jnp.sum((x - jnp.mean(x, 0)) ** 2 * Y)

    method = mw.PureForward(per_example=True)
    with pytest.raises(mw.InexactError, match="examples are not independent"):
        mw.grad(loss, method=method)(orthogonals(2), X)
    nan = mw.PureForward(per_example=True, on_inexact="nan")
    found = jax.jit(mw.grad(loss, method=nan))(orthogonals(2), X)
    assert all(np.isnan(g).all() for g in found)


def test_settings():
    with pytest.raises(ValueError, match="chunk counts jvps"):
        mw.PureForward(chunk=0)
    with pytest.raises(ValueError, match="PureForward: on_inexact must be one of"):
        mw.PureForward(on_inexact="shout")


def test_prints_once(capfd):
    def loss(ws, x):
        x = turn(turn(x, ws[0]), ws[1])
        jax.debug.print("seen")
        return jnp.sum(x**2)

    jax.block_until_ready(jax.jit(mw.grad(loss, method=mw.PureForward()))(orthogonals(2), X))
    jax.effects_barrier()
    assert capfd.readouterr().out.count("seen") == 1


# --- docs/seeds.md ------------------------------------------------------------------------------------


def test_when_a_parameter_gradient_determines_the_seed():
    w, b, h = orthogonal(8), normal(8, seed=1), normal(5, 8, seed=2)
    x = normal(5, 8, seed=3)  # five examples of eight features: their rows are independent
    _, pullback = jax.vjp(lambda w, b: x @ w + b, w, b)
    g, _ = pullback(h)
    np.testing.assert_allclose(jnp.linalg.solve(x @ x.T, x @ g), h, rtol=1e-9)
    _, pullback = jax.vjp(lambda w, b: x[:1] @ w + b, w, b)
    g, g_b = pullback(h[:1])
    np.testing.assert_allclose(x[0] @ g / jnp.sum(x[0] ** 2), h[0], rtol=1e-12)
    np.testing.assert_allclose(g_b, h[0], rtol=1e-12)


def test_a_first_layer_that_shrinks_the_state_needs_no_anchor():
    """Where there is a reverse pass, a plan would keep the first layer's cotangent instead of the seed."""
    keys = jax.random.split(jax.random.key(0), 3)
    ws = [jax.random.normal(k, s) for k, s in zip(keys, [(16, 16), (16, 4)], strict=False)]
    x = jax.random.normal(keys[2], (64, 16))

    def loss(ws, x):
        return jnp.sum(jnp.sin(jnp.abs(jnp.abs(x @ ws[0]) @ ws[1])))

    found = mw.grad(loss, method=mw.PureForward(tolerance=math.inf))(ws, x)
    for a, b in zip(found, jax.grad(loss)(ws, x), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-9)


def test_a_custom_vjp_has_no_jvp():
    """Refused where a tangent would have to pass it; run where none does."""
    w, x = jnp.eye(4), jnp.ones((2, 4))
    sine = jax.custom_vjp(jnp.sin)
    sine.defvjp(lambda x: (jnp.sin(x), x), lambda x, h: (h * jnp.cos(x),))
    for loss in (lambda w, x: jnp.sum(sine(x @ w) @ w), lambda w, x: jnp.sum(sine(x @ w @ w))):
        with pytest.raises(mw.NotSubmersiveError, match="found by jvps, and jax.custom_vjp has none"):
            mw.plan(loss, w, x, method=mw.PureForward())

    def beside(w, x):
        y = x @ w
        return jnp.sum(y) + jnp.sum(y * (sine(y) > 0)), sine(y)

    found, _ = mw.grad(beside, has_aux=True, method=mw.PureForward())(w, x)
    expected, _ = jax.grad(beside, has_aux=True)(w, x)
    np.testing.assert_allclose(found, expected, rtol=1e-12)
