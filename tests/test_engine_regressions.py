"""Networks that the engine once got wrong, each as small as it gets, against `jax.value_and_grad`."""

import itertools

import forced
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from marks import slow, some_cases
from weights import normal, orthogonal

import moonwalk as mw

pytestmark = pytest.mark.filterwarnings("ignore::moonwalk.PlanWarning")

WIDTH = 8
LAYERS = [orthogonal(WIDTH, seed=i) for i in range(6)]
W, B = jnp.stack(LAYERS), normal(6, WIDTH)
X = normal(32, WIDTH, seed=1)


def leaky(x):
    return jax.nn.leaky_relu(x, 0.3)


def check(loss, params, x, *, certify=False, kinds=None, **options):
    """Against JAX's gradient. `kinds`: instead of the planner's own choice, equal pieces of these kinds."""
    method = mw.Moonwalk()
    if kinds is not None:
        method, *_ = forced.planned(loss, method, params, x, kinds=kinds, **options)
    found = jax.jit(mw.value_and_grad(loss, method=method, certify=certify, **options))(params, x)[:2]
    expected = jax.jit(jax.value_and_grad(loss, **options))(params, x)
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        scale = float(jnp.max(jnp.abs(b), initial=1.0))
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-10 * scale)


# --- scans --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "step",
    [
        lambda c, w, x: (leaky(c[1] + c[0] @ w), x),
        lambda c, w, x: (leaky(c[0] @ w + c[1]), x),
        lambda c, w, x: (leaky((c[0] + c[1]) @ w), x),
        lambda c, w, x: (leaky(c[0] @ w + c[1]), 2.0 * w[:1] * jnp.ones_like(x)),
        lambda c, w, x: (leaky(c[1] @ w), c[0]),  # and one that is only passed on
    ],
)
def test_a_carry_that_is_overwritten(step):
    """Its cotangent ends in the layer: the sweep went on with an old one."""

    def loss(p, x):
        w = mw.declare(p, "orthogonal")
        (h, k), _ = lax.scan(lambda c, w: (step(c, w, x), None), (x @ w[0], x @ w[1]), w)
        return jnp.sum(h**2) + jnp.sum(jnp.sin(k))

    check(loss, W, X)


def test_outputs_of_weights_alone():
    """No node of the body reads their cotangent."""

    def loss(p, x):
        w = mw.declare(p[0], "orthogonal")
        h, y = lax.scan(lambda c, wb: (leaky(c @ wb[0]), wb[1] ** 2), x, (w, p[1]))
        return jnp.sum(h**2) + jnp.sum(y)

    check(loss, (W, B), X)


def test_the_same_output_of_weights_twice():
    def loss(p, x):
        w = mw.declare(p[0], "orthogonal")
        h, (a, b) = lax.scan(lambda c, wb: (leaky(c @ wb[0]), (wb[1], wb[1])), x, (w, p[1]))
        return jnp.sum(h**2) + jnp.sum(jnp.sin(a)) + jnp.sum(b)

    check(loss, (W, B), X)


def test_a_carry_made_of_weights_alone():
    def loss(p, x):
        w = mw.declare(p[0], "orthogonal")
        step = lambda c, wb: ((leaky(c[0] @ wb[0] + c[1]), jnp.tanh(wb[1])), None)
        h, k = lax.scan(step, (x, jnp.zeros(WIDTH)), (w, p[1]))[0]
        return jnp.sum(h**2) + jnp.sum(k)

    check(loss, (W, B), X)


def test_an_rnn_that_returns_its_state():
    """The state leaves as carry and as output: a fork whose source no equation reads."""

    def loss(p, x):
        step = lambda c, w: (lambda q: (q, q))(leaky(c @ w))
        return jnp.sum(lax.scan(step, x, mw.declare(p, "orthogonal"))[1] ** 2)

    check(loss, W, X)


@pytest.mark.parametrize(
    "step",
    [
        lambda c, w: ((leaky(c[0] @ w), c[1]), jnp.mean(c[0] > 0)),
        lambda c, w: ((leaky(c[0] @ w), c[1] + 1), None),
        lambda c, w: ((leaky(c[0] @ w), c[1]), c[0] > 0),
        lambda c, w: (
            (leaky(c[0] @ w) - 1e-2 * c[1], 0.9 * c[1] + lax.stop_gradient(jnp.mean(c[0]))),
            None,
        ),
    ],
)
def test_outputs_without_a_derivative(step):
    """Counters, statistics and masks, which the sweep must make again, or know to be unread."""

    def loss(p, x):
        (h, k), y = lax.scan(step, (x, jnp.zeros(())), mw.declare(p, "orthogonal"))
        return jnp.sum(h**2), (k, y)

    check(loss, W, X, has_aux=True)


def test_an_integer_counter():
    step = lambda c, w: ((leaky(c[0] @ w) * (1 + c[1]), c[1] + 1), None)
    check(lambda p, x: jnp.sum(lax.scan(step, (x, 0), mw.declare(p, "orthogonal"))[0][0] ** 2), W, X)


def test_a_key_as_carry():
    def step(c, w):
        x, key = c
        scale = 1 + jax.random.uniform(key, dtype=x.dtype)
        return (leaky(x @ w) * scale, jax.random.split(key)[0]), None

    def loss(p, x):
        return jnp.sum(lax.scan(step, (x, jax.random.key(0)), mw.declare(p, "orthogonal"))[0][0] ** 2)

    check(loss, W, X)


@pytest.mark.parametrize(
    "step",
    [
        lambda c, w, x: ((leaky(c[0] @ w), c[1]), x[0] * 2),
        lambda c, w, x: ((leaky(c[0] @ w), jnp.ones(WIDTH)), None),
        lambda c, w, x: ((leaky(c[0] @ w) + c[1], x[0]), jnp.ones(3)),
    ],
)
def test_outputs_of_data_or_constants(step):
    """Nothing else in the body asks for them."""

    def loss(p, x):
        w = mw.declare(p, "orthogonal")
        (h, _), y = lax.scan(lambda c, w: step(c, w, x), (x, jnp.zeros(WIDTH)), w)
        return jnp.sum(h**2), y

    check(loss, W, X, has_aux=True)


@pytest.mark.parametrize(
    "call",
    [
        lambda vg, loss: jax.jit(lambda y: vg(lambda p: loss(p, y))(W))(X),
        lambda vg, loss: jax.jit(lambda: vg(loss)(W, X))(),
        lambda vg, loss: jax.jit(jax.grad(lambda s: vg(lambda p: loss(p, s * X))(W)[0]))(2.0),
    ],
)
def test_known_weights_inside_a_trace(call):
    """They have values, but what is computed from them there has none."""
    loss = lambda p, x: jnp.sum(lax.scan(lambda c, w: (leaky(c @ w), None), x, p)[0] ** 2)
    found, expected = call(mw.value_and_grad, loss), call(jax.value_and_grad, loss)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9)


def test_one_state_as_two_carries():
    def loss(p, x):
        w = mw.declare(p, "orthogonal")
        start = x @ w[0]
        step = lambda c, w: ((leaky(c[0] @ w), leaky(c[1] @ w) * 2), None)
        return sum(jnp.sum(h**2) for h in lax.scan(step, (start, start), w)[0])

    check(loss, W, X)


def test_a_state_as_constant_of_a_scan():
    """Read there, and elsewhere."""

    def loss(p, x):
        e = leaky(x @ p[0])
        h = lax.scan(lambda c, w: (leaky(c @ w + e), None), x @ p[0], mw.declare(p, "orthogonal"))[0]
        return jnp.sum(h**2) + jnp.sum(e)

    check(loss, W, X)


# --- forks --------------------------------------------------------------------------------------------


def nested_forks(ws, x):
    """A state with three readers, made inside of what another fork joins."""
    h = leaky(x @ ws[0])
    a = h @ ws[1]
    c = leaky(a @ ws[2]) + leaky(a @ ws[3])
    return (c + h) @ ws[4] + a


def shared_products(ws, x):
    h = x @ ws[0]
    a = h @ ws[1]
    return (leaky(leaky(a) @ ws[2] + leaky(a) @ ws[3]) + h) @ ws[4] + a


def declared(ws):
    return [mw.declare(w, "orthogonal") for w in ws]


def between_layers(block):
    def loss(ws, x):
        ws = declared(ws)
        for w in ws[:4]:
            x = leaky(x @ w)
        x = block(ws, x)
        for w in ws[:4]:
            x = leaky(x @ w)
        return jnp.sum(x**2)

    return loss


def by_itself(block):
    return lambda ws, x: jnp.sum(leaky(block(declared(ws), x) @ ws[5]) ** 2)


@pytest.mark.parametrize(
    ("block", "around"),
    [
        (nested_forks, between_layers),
        slow(nested_forks, by_itself),
        slow(shared_products, between_layers),
        (shared_products, by_itself),
    ],
)
def test_forks_within_forks(block, around):
    """What is forked is an output of the block that makes it."""
    check(around(block), LAYERS, normal(256, WIDTH, seed=1))


PIECES = [
    ("walk", "walk"),
    ("store", "walk"),
    ("recompute", "store", "walk"),
    ("store", "recompute", "store", "recompute", "store"),
    ("walk",) * 7,
]


@pytest.mark.parametrize("kinds", PIECES, ids="-".join)
def test_a_segment_may_begin_between_the_ways_of_a_fork(kinds):
    """A cotangent was lost there: a state that a later segment reads was no output of its own."""
    both = lambda ws, x: by_itself(nested_forks)(ws, x) + by_itself(shared_products)(ws, x)
    check(both, LAYERS, X, kinds=kinds)


@pytest.mark.parametrize("kinds", PIECES[1:4], ids="-".join)
@pytest.mark.parametrize(
    "late", [lambda h, y: y * lax.stop_gradient(h), lambda h, y: jnp.where(h > 0, y, 2 * y)]
)
def test_a_state_read_late_without_a_derivative(late, kinds):
    """No cotangent comes from there; to wait for one is a mistake."""

    def loss(ws, x):
        h = jnp.tanh(x @ ws[0])
        y = h
        for w in ws[1:4]:
            y = leaky(y @ w)
        return jnp.sum(late(h, y) ** 2)

    check(loss, LAYERS, X, kinds=kinds)


@pytest.mark.parametrize(
    "end",
    [
        lambda h, p, x: jnp.sum(jnp.sin(jnp.where(h > 0, x, 0.0) @ p[0])),
        lambda h, p, x: jnp.sum(jnp.sin(jnp.argmax(h, 1)[:, None] * x @ p[0])),
        lambda h, p, x: jnp.sum(lax.stop_gradient(h) * jnp.sin(x @ p[0])),
    ],
)
def test_a_stem_that_reads_a_mask_of_the_state(end):
    """It has no state, but Phase II cannot read what it reads."""

    def loss(p, x):
        h = x
        for w in mw.declare(p[:4], "orthogonal"):
            h = leaky(h @ w)
        return jnp.sum(h**2) + end(h, p, x)

    check(loss, W, X, kinds=["walk"])


# --- nothing ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_loop", [True, False])
def test_no_rows(is_loop):
    """There is nothing to sample, and nothing wrong with that."""

    def loss(p, x):
        w = mw.declare(p, "orthogonal")
        if is_loop:
            for i in range(6):
                x = leaky(x @ w[i])
        else:
            x = lax.scan(lambda c, w: (leaky(c @ w), None), x, w)[0]
        return jnp.sum(x**2) + jnp.sum(p)

    check(loss, W, X[:0], certify=True, kinds=["walk"])


def test_scans_in_one_period_have_their_anchor():
    """Error that arrives large, and would grow too far in a scan, ends before it."""

    def leaky(x, w, slope):
        x = x @ mw.declare(w, "orthogonal")
        return jnp.where(x > 0, x, slope * x)

    def loss(p, x):
        x = leaky(x, p["first"], 0.6)
        for between, stack in zip(p["between"], p["stacks"], strict=True):
            x = leaky(x, between, 0.027)  # a gain of 20
            x, _ = lax.scan(lambda x, w: (leaky(x, w, 0.45), None), x, stack)  # 4.3 in all
        return jnp.mean(jnp.sin(x))

    single = lambda a: a.astype(jnp.float32)
    p = {
        "first": single(orthogonal(16, seed=1)),
        "between": [single(orthogonal(16, seed=s)) for s in range(2, 6)],
        "stacks": [
            single(jnp.stack([orthogonal(16, seed=10 * k + s) for s in range(5)])) for k in range(1, 5)
        ],
    }
    x = normal(512, 16, dtype=np.float32)
    plan = mw.plan(loss, p, x)
    assert plan.walks
    assert plan.anchors
    found = jax.jit(mw.grad(loss))(p, x)
    truth = jax.jit(jax.grad(loss))(p, x)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(truth), strict=True):
        assert jnp.linalg.norm(a - b) <= 1e-4 * jnp.linalg.norm(b)


def test_constants_beside_a_state():
    """Empty or not, they are no entries of the state, and no indices."""
    for more in (jnp.zeros((0,)), jnp.ones((2,))):

        def loss(w, x, more=more):
            y = x @ w
            return jnp.sum(jnp.concatenate([y[:0], y, more]) ** 2)

        args = normal(6, 6), normal(6, seed=1)
        for method in (mw.Moonwalk(), mw.Moonwalk(walk="always")):
            found = jax.jit(mw.grad(loss, method=method))(*args)
            np.testing.assert_allclose(found, jax.grad(loss)(*args), rtol=1e-12)


def test_float16_and_functions_with_types_of_their_own():
    """A custom rule, or a branch, fixes its types: cotangents are cast to them, and back."""

    @mw.custom_vijp
    def with_sum(x):
        return jnp.concatenate([x, x.sum(-1, keepdims=True)], -1)

    with_sum.deffragment(
        lambda primals, h: h[..., -1:],
        lambda primals, last, h: jnp.concatenate([h - last, last], -1),
    )

    def custom(ws, x):
        for w in ws:
            x = jnp.abs(with_sum(x) @ w)
        return jnp.sum(x)

    def branching(ws, x):
        for w in ws:
            branches = [lambda x, w=w: jnp.tanh(x @ w[:8]), lambda x: x]
            x = jnp.abs(lax.switch(jnp.argmax(x) % 2, branches, x) @ w[:8])
        return jnp.sum(x)

    half = lambda a: a.astype(jnp.float16)
    args = [half(orthogonal(9, 8, seed=s)) for s in range(3)], half(normal(16, 8))
    for loss in (custom, branching):
        found = jax.jit(mw.grad(loss, method=mw.Moonwalk(walk="always")))(*args)
        for a, b in zip(found, jax.jit(jax.grad(loss))(*args), strict=True):
            assert a.dtype == jnp.float16
            np.testing.assert_allclose(a, b, rtol=0.05, atol=0.05)


def test_statistics_of_nothing():
    def loss(p, x):
        y = x + p[1]
        y = y + y[:, :0] @ p[0]
        return jnp.mean(y * y)

    args = [jnp.zeros((0, 8)), normal(8)], normal(16, 8, seed=1)
    for method in (mw.Moonwalk(), mw.Moonwalk(walk="always")):
        found = jax.jit(mw.grad(loss, method=method))(*args)
        np.testing.assert_allclose(found[1], jax.grad(loss)(*args)[1], rtol=1e-12)


def test_arrays_among_default_arguments_of_a_coupling():
    def loss(ws, x):
        f, g = (lambda v, w=w: jnp.tanh(v @ w) for w in ws)
        return jnp.sum(mw.nn.Coupling(f, g)(x) ** 2)

    args = [normal(4, 4), normal(4, 4, seed=1)], normal(3, 8, seed=2)
    for method in (mw.Moonwalk(walk="always"), mw.Moonwalk(walk="always", anchor_every=3)):
        for a, b in zip(
            jax.jit(mw.grad(loss, method=method))(*args), jax.grad(loss)(*args), strict=True
        ):
            np.testing.assert_allclose(a, b, rtol=1e-10)


# --- carries whose derivative ends in the loop ----------------------------------------------------------


FLAT = {
    "floor": jnp.floor,
    "round": jnp.round,
    "sign": jnp.sign,
    "stop_gradient": lax.stop_gradient,
    "scaled": lambda x: 0.5 * lax.stop_gradient(x),
}
ALWAYS, AGAIN = mw.Moonwalk(walk="always"), mw.Moonwalk(checkpoint="auto", walk="always")
FAST = {
    ("floor", 1, mw.Checkpoint()),
    ("floor", 1, AGAIN),
    ("floor", 2, mw.Moonwalk()),
    ("floor", 2, ALWAYS),
    ("stop_gradient", 1, mw.Moonwalk()),
    ("stop_gradient", 1, ALWAYS),
    ("stop_gradient", 2, mw.Checkpoint()),
    ("stop_gradient", 2, AGAIN),
}


@pytest.mark.parametrize(
    ("name", "levels", "method"),
    some_cases(
        itertools.product(FLAT, (1, 2, 3), [ALWAYS, AGAIN, mw.Moonwalk(), mw.Checkpoint()]), FAST
    ),
    ids=str,
)
def test_a_carry_that_only_values_leave(name, levels, method):
    """No cotangent reaches the start of a layer, in a loop or in loops of loops."""
    flat = FLAT[name]

    def layer(x, w):
        return flat(x) @ w, None

    def loop(body):
        return lambda x, ws: (lax.scan(body, x, ws)[0], None)

    body = layer
    for _ in range(levels):
        body = loop(body)
    rng = np.random.default_rng(levels)
    ws = jnp.asarray(rng.standard_normal((*(3, 2, 2)[:levels], 4, 4)))
    first, x = jnp.asarray(rng.standard_normal((4, 4))), jnp.asarray(rng.integers(-2, 3, (8, 4)), float)
    loss = lambda first, ws, x: jnp.sum(jnp.sin(body(x @ first, ws)[0]))
    expected = jax.value_and_grad(loss, (0, 1))(first, ws, x)
    found = jax.jit(mw.value_and_grad(loss, (0, 1), method=method))(first, ws, x)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12), found, expected)
