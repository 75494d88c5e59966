"""Normalisations: what their fragments hold, and walks through them against `jax.grad`."""

import functools
import math

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from forced import whole_walk
from jax import lax
from marks import slow, some
from networks import leaky
from weights import normal, orthogonal

import moonwalk as mw
from moonwalk.rules import chain, fragments, registry, statistics
from moonwalk.trace import graph, staging

pytestmark = pytest.mark.filterwarnings("ignore::moonwalk.PlanWarning")

EXACT = 1e-9  # in float64, of all leaves together
ROWS, WIDTH, GROUPS = 32, 16, 4
X, Y = 1 + 2 * normal(ROWS, WIDTH, seed=1), normal(ROWS, WIDTH, seed=2)
IMAGES = normal(3, 4, 4, 8, seed=3)
SCALE, BIAS = 1 + 0.3 * jnp.sin(jnp.arange(WIDTH)), normal(WIDTH, seed=4)


# --- normalisations -----------------------------------------------------------------------------------


def centre(p, x):
    return x - x.mean(-1, keepdims=True)


def layer_norm(p, x):
    scale, bias = p
    c = x - x.mean(-1, keepdims=True)
    return c * lax.rsqrt(jnp.mean(c**2, -1, keepdims=True) + 1e-5) * scale + bias


def rms_norm(p, x):
    return x * lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-5) * p[0]


def folded(axis):
    """As Flax writes it: E[x²] - E[x]², and the scale multiplied into 1/σ first."""

    def norm(p, x):
        mean, squares = x.mean(axis, keepdims=True), jnp.mean(x**2, axis, keepdims=True)
        variance = jnp.maximum(0.0, squares - mean**2)
        return (x - mean) * (lax.rsqrt(variance + 1e-6) * p[0]) + p[1]

    return norm


def group_norm(p, x):
    grouped = x.reshape(*x.shape[:-1], GROUPS, -1)
    axes = (*range(1, x.ndim - 1), x.ndim)
    return jax.nn.standardize(grouped, axis=axes).reshape(x.shape)


def batch_norm(p, x):
    return (x - x.mean(0)) / jnp.sqrt(x.var(0) + 1e-5) * p[0] + p[1]


def instance_norm(p, x):
    return jax.nn.standardize(x, axis=(1, 2))


def log_softmax(p, x):
    return jax.nn.log_softmax(x)


def equinox(module):
    params, static = eqx.partition(module, eqx.is_inexact_array)
    return lambda p, x: jax.vmap(eqx.combine(p, static))(x), params


def flax(module):
    static, params = nnx.split(module)
    return lambda p, x: nnx.merge(static, p)(x), params


def _flax(kind, *args, **options):
    return flax(kind(*args, **options, rngs=nnx.Rngs(0), param_dtype=jnp.float64))


PLAIN = (SCALE, BIAS)
# name: ((norm, its parameters), x, how many numbers all fragments hold, for how many groups)
NORMS = {
    "centring": ((centre, ()), X, 1, ROWS),
    "LayerNorm": ((layer_norm, PLAIN), X, 2, ROWS),
    "RMSNorm": ((rms_norm, PLAIN), X, 1, ROWS),
    "GroupNorm": ((group_norm, ()), X, 2, GROUPS * ROWS),
    "BatchNorm": ((batch_norm, PLAIN), X, 2, WIDTH),
    "log-softmax": ((log_softmax, ()), X, 1, ROWS),
    "LayerNorm, scale folded in": ((folded(-1), PLAIN), X, 2, ROWS),
    "BatchNorm, scale folded in": ((folded(0), PLAIN), X, 2, WIDTH),
    "Equinox LayerNorm": (equinox(eqx.nn.LayerNorm(WIDTH, dtype=jnp.float64)), X, 2, ROWS),
    "Equinox RMSNorm": (equinox(eqx.nn.RMSNorm(WIDTH, dtype=jnp.float64)), X, 1, ROWS),
    "Equinox GroupNorm": (
        equinox(eqx.nn.GroupNorm(GROUPS, WIDTH, dtype=jnp.float64)), X, 2, GROUPS * ROWS
    ),
    "Flax LayerNorm": (_flax(nnx.LayerNorm, WIDTH), X, 2, ROWS),
    "Flax RMSNorm": (_flax(nnx.RMSNorm, WIDTH), X, 1, ROWS),
    "Flax GroupNorm": (_flax(nnx.GroupNorm, WIDTH, num_groups=GROUPS), X, 2, GROUPS * ROWS),
}  # fmt: skip
OF_IMAGES = {
    "GroupNorm of images": ((group_norm, ()), IMAGES, 2, GROUPS * 3),
    "InstanceNorm": ((instance_norm, ()), IMAGES, 2, 8 * 3),
    "Flax GroupNorm of images": (_flax(nnx.GroupNorm, 8, num_groups=GROUPS), IMAGES, 2, GROUPS * 3),
    "Equinox GroupNorm of images": (
        equinox(eqx.nn.GroupNorm(GROUPS, 8, dtype=jnp.float64)),
        jnp.moveaxis(IMAGES, -1, 1), 2, GROUPS * 3,
    ),
}  # fmt: skip


# --- single blocks ------------------------------------------------------------------------------------


def blocks(fun, x):
    """The blocks of a function with their inputs and operands at x."""
    staged = staging.stage(fun, x)
    env = dict(zip(staged.jaxpr.constvars, staged.consts, strict=True))
    cut = graph.build(staged.jaxpr, staged.jaxpr.invars, staged.jaxpr.outvars, consts=env)
    env[staged.jaxpr.invars[0]] = x
    for item in cut.schedule:
        if isinstance(item, graph.Block):
            state, operands = (tuple(env[v] for v in part) for part in (item.inputs, item.operands))
            yield item, state, operands
            made = (*item.outputs, *item.exports)
            env.update(zip(made, item.values(made, state, operands), strict=True))
        else:
            graph.run([item], env)


def normalisations(fun, x):
    """The blocks that keep a fragment, with it."""
    for block, state, operands in blocks(fun, x):
        for rule in fragments.candidates(block, fragments.Ask()):
            yield rule, block, state, operands


def round_trip(rule, block, state, operands, h):
    """(h' restored, its fragment, the block's output and pullback by the rule, the same by JAX)."""
    y, kept = rule.keep(block, state, operands)
    fragment = rule.fragment(block, None, kept, h, (0, 0, 0))
    (restored,) = rule.restore(block, None, kept, fragment, kept(h), (0, 0, 0))
    expected, pullback = jax.vjp(lambda *x: block(x, operands), *state)
    return restored, fragment, (*y, *kept(h)), (*expected, *pullback(h))


@pytest.mark.parametrize(
    "name",
    some(
        NORMS | OF_IMAGES,
        {*NORMS, *OF_IMAGES} - {"Flax GroupNorm of images", "Equinox GroupNorm of images"},
    ),
)
def test_a_fragment_restores_the_cotangent(name):
    (norm, p), x, per_group, groups = (NORMS | OF_IMAGES)[name]
    held = 0
    for rule, block, state, operands in normalisations(lambda x: norm(p, x), x):
        h_out = normal(*block.outputs[0].aval.shape, seed=5)
        restored, fragment, ours, theirs = jax.jit(functools.partial(round_trip, rule, block))(
            state, operands, (h_out,)
        )
        assert np.abs(restored - h_out).max() <= 1e-12
        assert (restored.shape, restored.dtype) == (h_out.shape, h_out.dtype)
        for a, b in zip(ours, theirs, strict=True):
            assert np.allclose(a, b, rtol=0, atol=1e-12)
        assert rule.gain(block).factor == 1
        assert rule.gain(block).assumed
        held += sum(a.size for a in fragment)
    assert held == per_group * groups


def test_moves_are_followed():
    """Entries that stand elsewhere in the output, in another shape."""

    def fun(x):
        moved = jnp.swapaxes(x.reshape(ROWS, 4, 4), 0, 2) - x.mean()
        return (moved * lax.rsqrt(x.var()))[None].reshape(4, -1)

    ((rule, block, state, operands),) = normalisations(fun, X)
    h = normal(*block.outputs[0].aval.shape, seed=6)
    restored, *_ = jax.jit(functools.partial(round_trip, rule, block))(state, operands, (h,))
    assert np.abs(restored - h).max() <= 1e-12


def test_what_carries_no_derivative_is_not_kept():
    def fun(x):
        mean = x.mean(-1, keepdims=True)
        return (x - mean) * (2 + jnp.sign(mean))

    ((rule, block, state, operands),) = normalisations(fun, X)
    h = normal(*X.shape, seed=6)
    restored, fragment, *_ = jax.jit(functools.partial(round_trip, rule, block))(state, operands, (h,))
    assert np.abs(restored - h).max() <= 1e-12
    assert [a.size for a in fragment] == [ROWS]


def test_nothing_to_normalise():
    assert not any(statistics.find_cut(b) for b, *_ in blocks(lambda x: centre((), x), X[:0]))


SQUARE = normal(8, 8, seed=7)


@pytest.mark.parametrize(
    ("fun", "x"),
    [
        (lambda x: x + x.T - x.mean(), SQUARE),
        (lambda x: x + x.reshape(4, 16).T.reshape(8, 8) - x.mean(), SQUARE),
        (lambda x: x + x[::-1] - x.mean(), SQUARE),
        (lambda x: jnp.cumsum(x, 0) * x.mean(), SQUARE),
        (lambda x: jnp.broadcast_to(x.mean(-1, keepdims=True), x.shape) + lax.stop_gradient(x), SQUARE),
        (lambda x: x[:4] - x.mean(), SQUARE),
    ],
)
def test_what_mixes_entries_is_refused(fun, x):
    assert not any(statistics.find_cut(block) for block, *_ in blocks(fun, x))


@pytest.mark.parametrize(
    "fun",
    [
        lambda x: x * jax.nn.sigmoid(x - x.mean()),
        lambda x: jnp.exp(x) * x / jnp.exp(x).sum(-1, keepdims=True),
        lambda x: jnp.where(x > x.mean(), x, 0.1 * x),
    ],
)
def test_a_derivative_that_depends_on_the_entry_has_no_bounded_gain(fun):
    for rule, block, _, operands in normalisations(fun, X):
        assert rule.gain(block).factor == math.inf
        assert rule.gain(block, operands).factor == math.inf


def test_softmax_is_not_walked():
    """Its exponential has no bounded gain, whatever the division after it has."""
    gains = [
        rule.gain(block).factor
        for block, *_ in blocks(jax.nn.softmax, X)
        for rule in registry.rules_for(block)
    ]
    assert math.inf in gains


def test_blocks_with_a_vijp_keep_their_rule():
    """Beside a statistic that carries no derivative, a block is pointwise."""
    for block, *_ in blocks(lambda x: (x - lax.stop_gradient(x.mean())) * 2, X):
        assert chain.choose(block)[0].name == "elementwise"


def test_a_folded_scale_counts():
    scale = jnp.where(jnp.arange(WIDTH) % 2 == 0, 0.1, 1.0)
    for norm in (folded(-1), folded(0)):
        ((rule, block, _, operands),) = normalisations(lambda x, f=norm: f((scale, BIAS), x), X)
        gain = rule.gain(block, operands)
        assert gain.factor == pytest.approx(math.sqrt((1 + 0.01) / 2 * (1 + 100) / 2), rel=1e-6)
        assert gain.mixes
        zero = [jnp.where(jnp.arange(WIDTH) == 3, 0.0, a) if a.size == WIDTH else a for a in operands]
        assert rule.gain(block, zero).factor == math.inf


def test_a_vijp_refuses_and_says_what_is_lost():
    with pytest.raises(
        mw.NotSubmersiveError, match="its 2 statistics lose 2 numbers for every 16 entri"
    ):
        mw.vijp(lambda x: folded(-1)(PLAIN, x), X)


# --- walks --------------------------------------------------------------------------------------------


def whole(loss, *args, method=mw.Moonwalk(), measured=True, **options):  # noqa: B008
    """(a plan of one walk, whatever that costs, and the walk). `measured`: gains, on the arguments."""
    values = args if measured else None
    return whole_walk(loss, method, *args, values=values, **options)[:2]


def turn(x, w):
    return x @ mw.declare(w, "orthogonal")


def network(norm, layers=2):
    """Orthogonal layers, each normalised, and their parameters; with weights to the end."""

    def loss(params, x, y):
        for w, p in params[:-1]:
            x = leaky(norm(p, turn(x, w)))
        return jnp.mean((turn(x, params[-1]) - y) ** 2)

    weights = [orthogonal(WIDTH, seed=i) for i in range(layers + 1)]
    return loss, lambda p: [*((w, p) for w in weights[:-1]), weights[-1]]


def scanned(norm, layers=4):
    def loss(params, x, y):
        def layer(x, wp):
            return norm(wp[1], leaky(turn(x, wp[0]))), None

        return jnp.mean((turn(lax.scan(layer, x, params[0])[0], params[1]) - y) ** 2)

    def params(p):
        *stack, last = network(norm, layers)[1](p)
        return jax.tree.map(lambda *a: jnp.stack(a), *stack), last

    return loss, params


def differentiated(loss, plan, *args, **options):
    """(gradient by a plan, under jit; JAX's)."""
    found = jax.jit(mw.grad(loss, method=plan, **options))(*args)
    return found, jax.jit(jax.grad(loss, **options))(*args)


def error(found, expected):
    pairs = list(zip(map(np.asarray, jax.tree.leaves(found)), jax.tree.leaves(expected), strict=True))
    norms = [
        math.sqrt(sum(np.sum(np.square(np.asarray(a, np.float64))) for a in leaves))
        for leaves in ([a - b for a, b in pairs], [b for _, b in pairs])
    ]
    return norms[0] / norms[1]


def fragment_numbers(walk):
    """Of every layer, how many numbers its fragments hold."""
    return sum(s.fragment_bytes for s in walk.steps if s.source == "fragment") / 8


IN_A_LOOP = {"RMSNorm", "Flax GroupNorm"}
IN_A_SCAN = {"LayerNorm", "BatchNorm, scale folded in"}


@pytest.mark.parametrize("name", some(NORMS, IN_A_LOOP))
def test_gradient_in_a_loop(name):
    (norm, p), x, per_group, groups = NORMS[name]
    loss, params = network(norm, layers=1)
    args = (params(p), x, Y)
    plan, walk = whole(loss, *args)
    assert error(*differentiated(loss, plan, *args)) <= EXACT
    assert fragment_numbers(walk) == per_group * groups
    assert not plan.anchors and plan.checked


@pytest.mark.parametrize("name", some(NORMS, IN_A_SCAN))
def test_gradient_in_a_scan(name):
    (norm, p), x, per_group, groups = NORMS[name]
    loss, params = scanned(norm)
    args = (params(p), x, Y)
    plan, walk = whole(loss, *args)
    assert error(*differentiated(loss, plan, *args)) <= EXACT
    (scan,) = (s for s in walk.steps if s.node.is_scan)
    assert fragment_numbers(scan.walk) == per_group * groups
    assert plan.checked


@pytest.mark.slow
@pytest.mark.parametrize("make", [network, scanned])
def test_gradient_eagerly(make):
    loss, params = make(folded(-1))
    plan, _ = whole(loss, params(PLAIN), X, Y)
    found = mw.grad(loss, method=plan)(params(PLAIN), X, Y)
    assert error(found, jax.jit(jax.grad(loss))(params(PLAIN), X, Y)) <= EXACT
    assert plan.fragments and plan.measured and plan.checked


def test_under_jit_alone_the_gain_is_assumed():
    """No trace says how far groups differ: the walk is certified."""
    for make in (network, scanned):
        loss, params = make(folded(-1))
        shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), (params(PLAIN), X, Y))
        plan, _ = whole(loss, *shapes, measured=False)
        assert plan.fragments and plan.checked and not plan.anchors


def test_residual_branches():
    """A branch that begins with a norm: its uses of the state stay together."""

    def loss(weights, x, y):
        for w in weights:
            x = x + leaky(turn(folded(-1)(PLAIN, x), w))
        return jnp.mean((x - y) ** 2)

    weights = [orthogonal(WIDTH, seed=i) for i in range(3)]
    plan, walk = whole(loss, weights, X, Y, measured=False)
    assert error(*differentiated(loss, plan, weights, X, Y)) <= EXACT
    assert fragment_numbers(walk) == 2 * 2 * ROWS  # the first normalises data


def test_flax_batch_norm_with_running_statistics():
    modules = [nnx.BatchNorm(WIDTH, rngs=nnx.Rngs(0), param_dtype=jnp.float64) for _ in range(2)]
    static, scales, running = nnx.split(modules, nnx.Param, ...)

    def loss(params, running, x, y):
        (*weights, last), scales = params
        norms = nnx.merge(static, scales, running, copy=True)
        for w, norm in zip(weights, norms, strict=True):
            x = leaky(norm(turn(x, w)))
        return jnp.mean((turn(x, last) - y) ** 2), nnx.state(norms, nnx.BatchStat)

    params = ([orthogonal(WIDTH, seed=i) for i in range(3)], scales)
    args = (params, running, X, Y)
    plan, walk = whole(loss, *args, measured=False, has_aux=True)
    (found, aux), (expected, aux_expected) = differentiated(loss, plan, *args, has_aux=True)
    assert error(found, expected) <= EXACT
    assert error(aux, aux_expected) <= 1e-6  # running statistics are float32
    assert fragment_numbers(walk) == 2 * 2 * WIDTH


def test_equinox_batch_norm_with_state():
    norm, state = eqx.nn.make_with_state(eqx.nn.BatchNorm)(
        WIDTH, "batch", mode="batch", dtype=jnp.float64
    )
    scale, static = eqx.partition(norm, eqx.is_inexact_array)

    def loss(params, state, x, y):
        (w, last), scale = params
        batched = jax.vmap(
            eqx.combine(scale, static), axis_name="batch", in_axes=(0, None), out_axes=(0, None)
        )
        x, state = batched(turn(x, w), state)
        return jnp.mean((turn(x, last) - y) ** 2), state

    params = ((orthogonal(WIDTH), orthogonal(WIDTH, seed=1)), scale)
    args = (params, state, X, Y)
    plan, walk = whole(loss, *args, has_aux=True)
    (found, aux), (expected, aux_expected) = differentiated(loss, plan, *args, has_aux=True)
    assert error(found, expected) <= EXACT
    assert error(aux, aux_expected) <= 1e-12
    assert fragment_numbers(walk) == 2 * WIDTH


@pytest.mark.parametrize(("dtype", "worse"), [(jnp.float32, 10), slow(jnp.bfloat16, 1.5)])
def test_narrow_dtypes(dtype, worse):
    """About as exact as backpropagation in the same dtype."""
    loss, params = network(folded(-1))
    exact = jax.jit(jax.grad(loss))(params(PLAIN), X, Y)
    narrow = jax.tree.map(lambda a: a.astype(dtype), (params(PLAIN), X, Y))
    plan, _ = whole(loss, *narrow, measured=False)
    found, backprop = differentiated(loss, plan, *narrow)
    assert error(found, exact) <= worse * error(backprop, exact)
    assert plan.fragments


def test_a_scale_of_zero_is_noticed():
    loss, params = network(folded(-1), layers=1)
    weights = params((SCALE.at[3].set(0.0), BIAS))
    plan, _ = whole(loss, weights, X, Y, measured=False)
    with pytest.raises(Exception, match="certificate exceeds the tolerance"):
        jax.block_until_ready(jax.jit(mw.grad(loss, method=plan))(weights, X, Y))
    nan, _ = whole(loss, weights, X, Y, method=mw.Moonwalk(on_inexact="nan"), measured=False)
    found = jax.jit(mw.grad(loss, method=nan))(weights, X, Y)
    assert all(np.isnan(a).all() for a in jax.tree.leaves(found))


def test_a_scale_of_zero_is_seen_while_planning():
    """With concrete weights the cotangent is kept whole; whoever insists is told why not."""
    loss, params = network(folded(-1), layers=1)
    weights = params((SCALE.at[3].set(0.0), BIAS))
    plan, _ = whole(loss, weights, X, Y)
    found = mw.grad(loss, method=plan)(weights, X, Y)
    assert error(found, jax.jit(jax.grad(loss))(weights, X, Y)) <= EXACT
    assert plan.anchors == 1
    with pytest.raises(mw.SingularError, match=r"scale of a normalisation is zero.*params\[0\]"):
        mw.plan(loss, weights, X, Y, method=mw.Moonwalk(tolerance=math.inf, walk="always"))


# --- plans --------------------------------------------------------------------------------------------


def test_what_a_plan_says():
    loss, params = network(folded(-1), layers=1)
    text = whole(loss, params(PLAIN), X, Y)[0].table()
    assert (
        "fragment: 12 % of the cotangent; its 2 statistics lose 2 numbers for every 16 entries" in text
    )
    assert "Phase I keeps 4.0 KiB" in text
    loss, params = network(centre, layers=1)
    plan, _ = whole(loss, params(()), X, Y)
    (row,) = (r for r in plan.rows if r.mode == "fragment")
    assert row.why == (
        "fragment: 6.2 % of the cotangent; its statistic loses one number for every 16 entries"
    )
    assert row.bytes == 8 * ROWS


def test_norms_are_walked_through_where_asked():
    """Walking keeps less than backpropagation here; checkpointing about as much, so a plan would not."""
    loss, params = network(folded(-1), layers=12)
    asked, own = (
        mw.plan(loss, params(PLAIN), X, Y, method=mw.Moonwalk(checkpoint="auto", walk=walk))
        for walk in ("always", "auto")
    )
    assert asked.fragments == 12 and own.fragments == 0
    assert asked.peak_bytes < own.backprop_bytes / 2
    assert own.peak_bytes <= 1.1 * asked.peak_bytes and own.seconds < asked.seconds
