"""`value_and_grad` against `jax.value_and_grad`: the table of `networks.py`, and random networks."""

import dataclasses
import functools
import json
import math

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from jax import lax
from marks import slow, some
from networks import NETWORKS, conv, layer_norm, leaky, max_min, max_min_of_both_sides
from weights import general, kernel, lower, normal, orthogonal

import moonwalk as mw
from moonwalk.planning import report

pytestmark = pytest.mark.filterwarnings("ignore::moonwalk.PlanWarning")

EXACT = 1e-10  # in float64, of all leaves together

# Eagerly, every operation is compiled by itself, which takes most of the time: `make test` does that
# for these, which between them have every kind of step and segment, and `make test-all` for all.
EAGER = {
    "MLP with anchors",
    "max pooling",
    "residual around walked layers",
    "own checkpoint",
    "cond",
    "scan with outputs",
    "scan, counter and key",
    "aux",
    "None leaves",
}
# Without a gain above 1 or an anchor, a plan without anchors is the plan that the other tests run.
GAINS = {
    "MLP, declared lower",
    "MLP with anchors",
    "strided CNN 2D",
    "scan of general matrices",
    "scan, a last period that is shorter",
}


# Nothing bounds their gains while tracing: what is said of their plans holds of concrete arguments.
MEASURED = {
    "MLP, declared lower",
    "MLP, nothing declared",
    "gelu with a shortcut",
    "strided CNN 2D",
    "scan of general matrices",
    "LoRA",
    "masked weights",
    "multiplicative noise",
    "Equinox MLP",
    "Flax NNX",
}
FAST = {n for n in NETWORKS if not NETWORKS[n].slow}
# Under `jit` and in float64: what another network has, too, or another test, in segments or without anchors.
ELSEWHERE = {
    "MLP",
    "strided CNN 2D",
    "average pooling",
    "U-Net, added",
    "scan with biases, between layers",
    "scan, a weight times the counter",
    "scan, noise through a weight",
    "scan, dropout",
    "scan, a last period that is shorter",
    "frozen layers",
    "weight decay",
}


def arrays(tree):
    """Leaves that can leave `jit`."""
    return [a for a in jax.tree.leaves(tree) if not isinstance(a, str)]


def norm(leaves):
    return math.sqrt(sum(float(np.sum(np.square(np.asarray(a, np.float64)))) for a in leaves))


def error(found, expected):
    """‖found − expected‖ / ‖expected‖ over all leaves together."""
    found, expected = map(np.asarray, arrays(found)), map(np.asarray, arrays(expected))
    pairs = list(zip(found, expected, strict=True))
    assert [(a.shape, a.dtype) for a, _ in pairs] == [(b.shape, b.dtype) for _, b in pairs]
    return norm([a - b for a, b in pairs]) / max(norm([b for _, b in pairs]), np.finfo(np.float64).tiny)


@functools.cache
def reference(name):
    n = NETWORKS[name]
    fun = jax.value_and_grad(n.loss, **n.options)
    return jax.jit(lambda *args, **kwargs: arrays(fun(*args, **kwargs)))(*n.args, **n.kwargs)


@functools.cache
def planned(name, method=None):
    n = NETWORKS[name]
    return mw.plan(
        n.loss, *n.args, method=n.method if method is None else method, **n.options, **n.kwargs
    )


def compare(found, expected, tolerance=EXACT):
    value, *rest = zip(found, expected, strict=True)
    assert jnp.allclose(*value, rtol=1e-12, atol=0)
    assert error([a for a, _ in rest], [b for _, b in rest]) <= tolerance


def under_jit(fun, *args, **kwargs):
    return jax.jit(lambda *args, **kwargs: arrays(fun(*args, **kwargs)))(*args, **kwargs)


@pytest.fixture
def plans_made(monkeypatch):
    """The plans that calls make, which would otherwise have to be made once more."""
    made, own = [], report.describe

    def spied(network, choice, *args):
        plan = own(network, choice, *args)
        made.append(report.with_rows(plan, network, choice.segments, fused=False))
        return plan

    monkeypatch.setattr(report, "describe", spied)
    return made


@pytest.mark.parametrize("name", some(NETWORKS, FAST - ELSEWHERE))
def test_gradient_under_jit(name, plans_made):
    n = NETWORKS[name]

    def loss(*args, **kwargs):  # a function of its own: no gains are known of it that were measured
        return n.loss(*args, **kwargs)

    fun = mw.value_and_grad(loss, method=n.method, **n.options)
    compare(under_jit(fun, *n.args, **n.kwargs), reference(name))
    if name not in MEASURED:
        check_plan(n, *plans_made)


@pytest.mark.parametrize("name", some(NETWORKS, EAGER))
def test_gradient_eagerly(name):
    n = NETWORKS[name]
    found = mw.value_and_grad(n.loss, method=n.method, **n.options)(*n.args, **n.kwargs)
    differentiated = (
        n.args[n.argnums] if isinstance(n.argnums, int) else tuple(n.args[i] for i in n.argnums)
    )
    assert jax.tree.structure(found[1]) == jax.tree.structure(differentiated)
    compare(arrays(found), reference(name))


@pytest.mark.parametrize("name", some(NETWORKS, FAST & MEASURED))
def test_plan(name):
    """Of concrete arguments."""
    check_plan(NETWORKS[name], planned(name))


def check_plan(n, plan):
    assert str(plan)
    assert json.loads(json.dumps(plan.to_dict()))["walked"] == plan.walked
    assert {row.mode for row in plan.rows} >= n.modes
    if n.walked is None:
        assert not plan.walks
    else:
        assert plan.walked >= n.walked
    if n.anchors is not None:
        assert bool(plan.anchors) == n.anchors
    if n.method.walk == "always":
        return
    assert plan.peak_bytes <= min(plan.backprop_bytes, report.WORTH * plan.checkpoint_bytes)
    if plan.walks:
        assert plan.peak_bytes < plan.checkpoint_bytes


@pytest.mark.parametrize("name", some([n for n in NETWORKS if NETWORKS[n].walks], GAINS))
def test_without_anchors(name):
    """The prediction holds: error grows by the gain and no more.

    Rounding of the reference itself, and of sums over rows, is not in the prediction: hence the floor.
    The gains are measured on concrete arguments, and the plan carries them into `jit`.
    """
    n = NETWORKS[name]
    plan = planned(name, dataclasses.replace(n.method, tolerance=math.inf))
    found = under_jit(mw.value_and_grad(n.loss, method=plan, **n.options), *n.args, **n.kwargs)
    compare(found, reference(name), max(1e-13, 1e-15 * plan.predicted_gain))


def in_float32(tree):
    return jax.tree.map(
        lambda a: a.astype(np.float32) if getattr(a, "dtype", None) == np.float64 else a, tree
    )


FLOAT32 = {
    "strided CNN 2D",
    "patchify",
    "scan, reversed, a last period that is shorter",
}


# These close over float64 arrays, which a float32 argument cannot make float32.
MIXED = {"scan, counter and key", "masked weights", "scan over data", "multiplicative noise"}


@pytest.mark.parametrize(
    "name", some([n for n in NETWORKS if NETWORKS[n].walks and n not in MIXED], FLOAT32)
)
def test_float32(name):
    """Not much worse than float32 backpropagation; where gains are above one, as predicted from them."""
    n = NETWORKS[name]
    args, kwargs = in_float32((n.args, n.kwargs))
    plan = mw.plan(n.loss, *args, method=n.method, **n.options, **kwargs)

    def gradients(fun, *args, **kwargs):
        found = under_jit(
            lambda *a, **k: fun(*a, **k)[0] if n.has_aux else fun(*a, **k), *args, **kwargs
        )
        return [np.asarray(a, np.float64) for a in found]

    backprop = jax.grad(n.loss, **n.options)
    truth = gradients(backprop, *n.args, **n.kwargs)
    theirs = error(gradients(backprop, *args, **kwargs), truth)
    ours = error(gradients(mw.grad(n.loss, method=plan, **n.options), *args, **kwargs), truth)
    assert ours <= plan.tolerance
    if not plan.anchors:
        assert ours <= max(10 * theirs, np.finfo(np.float32).eps * plan.predicted_gain)


# --- random networks --------------------------------------------------------------------------------

ROWS, WIDTH = 16, 8
DENSE = {"orthogonal": orthogonal, "lower": lower, "general": general}
MASKS = np.random.default_rng(0).random((4, ROWS, WIDTH)) < 0.8


def dense(x, w, kind):
    return x @ (w if kind == "general" else mw.declare(w, kind))


def interleaved(x):
    """Rows by columns by halves, in another order."""
    return x.reshape(-1, 2, WIDTH // 2).transpose(0, 2, 1)[:, ::-1].reshape(-1, WIDTH)


def strided(x, w, kind):
    return conv(x[None], w, structure=None if kind == "general" else kind)[0]


def halved(x, reducer, init):
    return lax.reduce_window(x, np.asarray(init, x.dtype), reducer, (2, 1), (2, 1), "VALID")


@functools.cache
def matrix(kind, seed):
    return DENSE[kind](WIDTH, seed=seed)


@functools.cache
def taps(kind, seed):
    return kernel((3,), WIDTH, WIDTH, (1,), kind, seed=seed)


SAME = {  # layers that keep the shape: (parameters from a seed, function)
    **{f"dense {k}": (functools.partial(matrix, k), functools.partial(dense, kind=k)) for k in DENSE},
    "leaky": (None, lambda x, _: leaky(x)),
    "abs": (None, lambda x, _: jnp.abs(x)),
    "tanh": (None, lambda x, _: jnp.tanh(x)),
    "relu": (None, lambda x, _: jax.nn.relu(x)),
    "max-min": (None, lambda x, _: max_min(x)),
    "max-min by maximum": (None, lambda x, _: max_min_of_both_sides(x)),
    "bias": (lambda seed: normal(WIDTH, seed=seed), lambda x, b: x + b),
    "scale": (lambda seed: 1 + 0.3 * jnp.tanh(normal(WIDTH, seed=seed)), lambda x, a: a * x),
    "interleave": (None, lambda x, _: interleaved(x)),
    "norm": (
        lambda seed: 1 + 0.3 * jnp.tanh(normal(WIDTH, seed=seed)),
        lambda x, a: layer_norm(x, a, 0.0),
    ),
    "dropout": (None, lambda x, _: jnp.where(MASKS[0, : len(x)], x / 0.8, 0)),
}
HALVING = {
    **{f"conv {k}": (functools.partial(taps, k), functools.partial(strided, kind=k)) for k in DENSE},
    "average": (None, lambda x, _: halved(x, lax.add, 0.0) / 2),
    "max": (None, lambda x, _: halved(x, lax.max, -np.inf)),
}
DOUBLING = {"repeat": (None, lambda x, _: jnp.repeat(x, 2, 0))}
LAYERS = {**SAME, **HALVING, **DOUBLING}

simple = st.tuples(st.sampled_from(sorted(SAME)), st.integers(0, 3))
resizing = st.tuples(st.sampled_from(sorted({**HALVING, **DOUBLING})), st.integers(0, 3))
same = st.lists(simple, min_size=1, max_size=3)
residual = st.tuples(st.just("residual"), same)
scan = st.tuples(st.just("scan"), same, st.integers(2, 9), st.booleans())
deep = st.tuples(st.just("deep"), same, st.integers(4, 6))  # enough of the same for walking to pay
architectures = st.lists(
    st.one_of(simple, simple, resizing, residual, scan, deep), min_size=1, max_size=4
)


def parameters(layer):
    """Parameters of a layer (or of a compound of layers)."""
    if layer[0] == "residual":
        return [parameters(one) for one in layer[1]]
    if layer[0] in ("scan", "deep"):
        copies = [[parameters((k, s + 4 * i)) for k, s in layer[1]] for i in range(layer[2])]
        return jax.tree.map(lambda *a: jnp.stack(a), *copies) if layer[0] == "scan" else copies
    make = LAYERS[layer[0]][0]
    return None if make is None else make(layer[1])


def apply(layer, p, x):
    if layer[0] == "residual":
        return x + 0.5 * chain(layer[1], p, x)
    if layer[0] == "scan":
        step = lambda c, p: (chain(layer[1], p, c), None)
        return lax.scan(step, x, p, length=layer[2], reverse=layer[3])[0]
    if layer[0] == "deep":
        for one in p:
            x = chain(layer[1], one, x)
        return x
    if (layer[0] in HALVING and len(x) <= 2) or (layer[0] in DOUBLING and len(x) >= ROWS):
        return x
    return LAYERS[layer[0]][1](x, p)


def chain(layers, params, x):
    for layer, p in zip(layers, params, strict=True):
        x = apply(layer, p, x)
    return x


def check(architecture, measured, certify):
    params = [matrix("orthogonal", 0), *map(parameters, architecture)]
    x = normal(ROWS, WIDTH, seed=9)

    def loss(params, x):
        return jnp.mean((chain(architecture, params[1:], x @ params[0]) - 0.5) ** 2)

    method = mw.plan(loss, params, x) if measured else mw.Moonwalk()
    fun = mw.value_and_grad(loss, method=method, certify=certify)

    def both(*args):
        return fun(*args)[:2], jax.value_and_grad(loss)(*args)

    found, expected = jax.jit(both)(params, x)
    compare(arrays(found), arrays(expected))


def test_a_scan_without_weights_behind_which_nothing_is_walked():
    architecture = [
        ("scan", [("max-min", 0)], 2, False),
        ("abs", 0),
        ("dense lower", 0),
        ("conv orthogonal", 0),
    ]
    check(architecture, measured=False, certify=False)


# A thousand in parts that end: a shard of the suite has room for some of them only.
@pytest.mark.parametrize(
    ("seed", "examples"), [(0, 4), slow(0, 8), *(slow(s, 50) for s in range(1, 21))]
)
def test_random_networks(seed, examples):
    @hypothesis.seed(seed)
    @hypothesis.settings(max_examples=examples)
    @hypothesis.given(architectures, st.booleans(), st.booleans())
    def run(architecture, measured, certify):
        check(architecture, measured, certify)

    run()
