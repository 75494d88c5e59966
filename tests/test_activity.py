"""Which variables a derivative flows through, and rules that ask: as JAX does it."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from marks import slow, some
from weights import normal

import moonwalk as mw
from moonwalk.trace import staging
from moonwalk.trace.activity import active_variables

pytestmark = pytest.mark.filterwarnings("ignore::moonwalk.PlanWarning")  # they are small

X = normal(24, 6, seed=1)
W = 0.4 * normal(5, 6, 6, seed=2)
KEY = jax.random.key(3)
forbid = eqx.internal.nondifferentiable_backward


def active(fun, *args):
    """Of each argument: whether a derivative flows from it to the first result."""
    jaxpr = staging.stage(fun, *args).jaxpr
    found = active_variables(jaxpr.eqns, jaxpr.invars, jaxpr.outvars[:1])
    return [v in found for v in jaxpr.invars]


def test_a_loop_hands_on_what_nothing_enters():
    def loop(x, y):
        def turn(carry, _):
            a, b, i = carry
            return (jnp.sin(a), b * 2 + jnp.sign(y), i + 1), b

        (a, b, _), bs = lax.scan(turn, (x, jnp.ones(()), 0), None, 3)
        return a, b, bs

    assert active(lambda x, y: loop(x, y)[0], 1.0, 2.0) == [True, False]
    assert active(lambda x, y: loop(x, y)[1], 1.0, 2.0) == [False, False]
    assert active(lambda x, y: jnp.sum(loop(x, y)[2]), 1.0, 2.0) == [False, False]


def test_carries_reach_each_other_after_some_turns():
    def loop(x, y, z):
        turn = lambda c, _: ((c[1], c[2], c[2] * 2), None)
        return lax.scan(turn, (x, y, z), None, 4)[0][0]

    assert active(loop, 1.0, 2.0, 3.0)[2]


def test_a_condition_has_no_derivative():
    def loop(x, y):
        return lax.while_loop(lambda c: c[0] < y, lambda c: (c[0] + 1, c[1] * 2), (0.0, x))[1]

    assert active(loop, 1.0, 2.0) == [True, False]


def test_branches():
    def branch(flag, x, y, z):
        return lax.cond(flag, lambda x, y, z: (x, z), lambda x, y, z: (jnp.floor(y), y), x, y, z)[0]

    assert active(branch, True, 1.0, 2.0, 3.0) == [False, True, False, False]


def test_what_a_custom_derivative_ignores():
    @jax.custom_jvp
    def solve(start, x):
        return jnp.sin(x) + 0 * start

    solve.defjvp(lambda p, t: (solve(*p), jnp.cos(p[1]) * t[1]))
    assert active(solve, 1.0, 2.0) == [False, True]

    @jax.custom_vjp
    def solve_back(start, x):
        return jnp.sin(x) + 0 * start

    # JAX makes an array of zeros of None, and calls the backward passes of what precedes with it.
    solve_back.defvjp(lambda s, x: (solve_back(s, x), x), lambda x, h: (None, jnp.cos(x) * h))
    assert active(solve_back, 1.0, 2.0) == [True, True]


BACKWARD = {
    "nothing": lambda h: None,
    "zeros": jnp.zeros_like,
    "ones": jnp.ones_like,
    "itself": lambda h: h,
    "sign": jnp.sign,
}


@pytest.mark.parametrize("first", BACKWARD)
@pytest.mark.parametrize("second", BACKWARD)
@pytest.mark.parametrize("network", ["chain", "residual", "branches"])
def test_backward_passes_behind_one_another(first, second, network):
    def layer(backward):
        f = jax.custom_vjp(jnp.sin)
        f.defvjp(lambda x: (jnp.sin(x), None), lambda _, h: (backward(h),))
        return f

    a, b = layer(BACKWARD[first]), layer(BACKWARD[second])

    def loss(w, x):
        x = x @ w
        y = {
            "chain": lambda: b(a(x)),
            "residual": lambda: b(x + a(x)),
            "branches": lambda: a(x) * jnp.floor(b(x)),
        }[network]()
        return jnp.sum(y**2)

    w, x = jnp.eye(3) + 0.1, jnp.arange(6.0).reshape(2, 3)
    for method in (mw.Moonwalk(), mw.Moonwalk(walk="always"), mw.Checkpoint("block")):
        close(mw.grad(loss, (0, 1), method=method)(w, x), jax.grad(loss, (0, 1))(w, x))


def test_a_backward_pass_that_ignores_its_cotangent_counts():
    @jax.custom_vjp
    def clipped(x):
        return jnp.sin(x)

    clipped.defvjp(lambda x: (clipped(x), x), lambda x, h: (jnp.cos(x),))
    assert active(clipped, 1.0) == [True]


def test_what_comes_after_a_derivative_that_is_zero():
    rounded = jax.custom_jvp(lambda x: lax.round(x))
    rounded.defjvp(lambda p, t: (rounded(*p), jnp.zeros_like(*t)))
    assert active(lambda x, y: rounded(x) * y, 1.0, 2.0) == [False, True]


def test_each_result_of_a_sort_has_its_own_operand():
    assert active(lambda x, y: lax.sort((x, y), num_keys=1)[0], X, X + 1) == [True, False]


# --- networks ----------------------------------------------------------------------------------------


def close(found, expected):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12)


def fixed_point(w, x):
    """Implicit differentiation: the solver must not be differentiated, where it starts does not count."""

    def step(z, w, x):
        return jnp.tanh(0.3 * z @ w + x)

    @jax.custom_jvp
    def attach(z, w, x):
        return z

    @attach.defjvp
    def _(primals, tangents):
        z, w, x = primals
        _, t = jax.jvp(lambda w, x: step(z, w, x), (w, x), tangents[1:])
        dz = lax.custom_linear_solve(
            lambda v: v - jax.jvp(lambda z: step(z, w, x), (z,), (v,))[1],
            t,
            lambda mv, b: lax.fori_loop(0, 60, lambda _, v: v + b - mv(v), b),
            lambda mv, b: lax.fori_loop(0, 60, lambda _, v: v + b - mv(v), b),
        )
        return z, dz

    first = forbid(jnp.zeros_like(x) + 0 * (x @ w[0]))
    body = lambda c: (c[0] + 1, step(c[1], forbid(w[0]), forbid(x)))
    z = lax.while_loop(lambda c: c[0] < 60, body, (0, first))[1]
    return jnp.mean((attach(z, w[0], x @ w[1]) @ w[2]) ** 2)


def carried(w, x):
    """A carry beside the state that must not be differentiated."""

    def turn(carry, w):
        x, s = carry
        return (jnp.tanh(x @ w), forbid(jnp.sin(s @ w))), jnp.sum(s)

    (x, s), sums = lax.scan(turn, (x, x), w)
    return jnp.mean(x**2), (s, sums)


def branching(w, x):
    s = forbid(jnp.tanh(x @ w[0]))
    y, s = lax.cond(
        x[0, 0] > 0,
        lambda y, s: (jnp.tanh(y @ w[2]), s + 1),
        lambda y, s: (jnp.sin(y @ w[2]), s),
        x @ w[1],
        s,
    )
    return jnp.mean(y**2), s


def with_keys(w, x, key):
    """Keys and counters in the carries of nested loops."""

    def outer(carry, w):
        x, key, i = carry

        def inner(carry, j):
            x, key = carry
            key, sub = jax.random.split(key)
            noise = jax.random.uniform(sub, x.shape)
            return (
                lax.cond(i % 2 == 0, lambda x: jnp.sin(x @ w) * noise * (j + 1), jnp.tanh, x),
                key,
            ), j

        (x, key), _ = lax.scan(inner, (x, key), jnp.arange(3))
        return (x, key, i + 1), None

    (x, key, i), _ = lax.scan(outer, (x, key, jnp.int32(0)), w)
    return jnp.mean(x**2), (key, i)


def with_raw_key(w, x, key):
    def turn(carry, w):
        x, key = carry
        key, sub = jax.random.split(key)
        return (jax.nn.leaky_relu(x @ w) * jax.random.bernoulli(sub, 0.8, x.shape), key), None

    return jnp.mean(lax.scan(turn, (x, jax.random.key_data(key)), w)[0][0] ** 2)


def switching(w, x):
    bound = lax.while_loop(
        lambda c: (c[1] < jnp.sum(w**2)) & (c[0] < 9), lambda c: (c[0] + 1, c[1] * 2), (0, 1.0)
    )
    y = lax.fori_loop(0, 5, lambda i, x: jnp.tanh(x @ w[i]), x)
    z = lax.switch(bound[0] % 3, [lambda y: y @ w[2], lambda y: jax.nn.relu(y @ w[3]), jnp.sin], y)
    return jnp.mean(z**2) * bound[1]


def equinox_loop(kind):
    def loss(w, x):
        """Its result has a derivative only where it is told that something in it is differentiated."""
        body = lambda c: (c[0] + 1, jnp.tanh(c[1] @ w[0]))
        y = eqx.internal.while_loop(lambda c: c[0] < 4, body, (0, x), max_steps=8, kind=kind)[1]
        return jnp.mean((y @ w[1]) ** 2)

    return loss


def equinox_loop_in_a_scan(w, x):
    @jax.checkpoint
    def turn(x, w):
        body = lambda c: (c[0] + 1, jnp.tanh(c[1] @ w))
        y = eqx.internal.while_loop(lambda c: c[0] < 2, body, (0, x), max_steps=4, kind="checkpointed")
        return y[1], None

    return jnp.mean(lax.scan(turn, x, w)[0] ** 2)


def asking(w, x):
    """A custom_vjp that is told which of its arguments are differentiated."""

    @jax.custom_vjp
    def f(x, w, y):
        return jnp.sin(x @ w), jnp.cos(y)

    def forward(x, w, y):
        both = x.perturbed and w.perturbed
        return f(x.value, w.value, y.value), (x.value, w.value, y.value, both)

    def backward(kept, h):
        x, w, y, both = kept
        _, pullback = jax.vjp(lambda x, w: jnp.sin(x @ w), x, w)
        found = pullback(h[0]) if both else (jnp.zeros_like(x), jnp.zeros_like(w))
        if type(h[1]) is not jax.custom_derivatives.SymbolicZero:
            raise ValueError("the second result is not differentiated")
        return *found, None

    f.defvjp(forward, backward, symbolic_zeros=True)
    y, other = f(x @ w[0], w[1], x @ w[2])
    return jnp.mean((y @ w[3]) ** 2), other


NETWORKS = {
    "fixed point": (fixed_point, (W, X), False),
    "forbidden carry": (carried, (W, X), True),
    "forbidden branch": (branching, (W, X), True),
    "keys and counters": (with_keys, (W, X, KEY), True),
    "raw key": (with_raw_key, (W, X, KEY), False),
    "while and switch": (switching, (W, X), False),
    "checkpointed loop": (equinox_loop("checkpointed"), (W, X), False),
    "bounded loop": (equinox_loop("bounded"), (W, X), False),
    "checkpointed loop in a scan": (equinox_loop_in_a_scan, (W, X), False),
    "asking": (asking, (W, X), True),
}
METHODS = {
    "default": mw.Moonwalk(),
    "always": mw.Moonwalk(walk="always"),
    "checkpoint": mw.Checkpoint(),
    "recursive": mw.Checkpoint("recursive"),
}


@pytest.mark.parametrize(
    "name", some(NETWORKS, set(NETWORKS) - {"raw key", "checkpointed loop", "bounded loop"})
)
def test_symbolic_zeros_stay_symbolic(name):
    loss, args, has_aux = NETWORKS[name]

    @jax.jit
    def run(*args):
        found = [mw.value_and_grad(loss, has_aux=has_aux, method=m)(*args) for m in METHODS.values()]
        return jax.value_and_grad(loss, has_aux=has_aux)(*args), found

    expected, found = run(*args)
    assert all(np.any(g) for g in jax.tree.leaves(expected[1]))
    for result in found:
        close(result, expected)


def test_a_forbidden_derivative_is_refused_as_by_jax():
    loss = lambda w, x: jnp.mean(forbid(jnp.tanh(x @ w)) ** 2)
    for value_and_grad in (jax.value_and_grad, mw.value_and_grad):
        with pytest.raises(RuntimeError, match="Unexpected cotangent"):
            value_and_grad(loss)(W[0], X)


@pytest.mark.parametrize("checkpoint", [slow(3), "auto"])
def test_keys_that_an_earlier_loop_has_split(checkpoint):
    """The second loop hands its key on unchanged: all its layers read what only a forward pass has."""
    q = jnp.linalg.qr(normal(8, 6, 6, seed=5))[0]

    def splitting(carry, w):
        x, key = carry
        key, sub = jax.random.split(key)
        x = x @ mw.declare(w, "orthogonal") + 0.1 * jax.random.normal(sub, x.shape)
        return (jnp.abs(x), key), None

    def folding(carry, w):
        x, key, i = carry
        noise = jax.random.normal(jax.random.fold_in(key, i), x.shape)
        return (jnp.abs(x @ mw.declare(w, "orthogonal") + 0.1 * noise), key, i + 1), None

    def loss(w, x, key):
        (x, key), _ = lax.scan(splitting, (x @ w[0], key), w)
        (x, _, _), _ = lax.scan(folding, (x, key, 0), w)
        return jnp.mean(x**3)

    method = mw.Moonwalk(checkpoint=checkpoint, walk="always")
    found = jax.jit(mw.value_and_grad(loss, method=method))(q, X, KEY)
    close(found, jax.jit(jax.value_and_grad(loss))(q, X, KEY))
