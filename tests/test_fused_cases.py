"""`fused_update` in detail, for `make test-all`: optimizers, refusals, odd parameters, random networks."""

import functools
import math
import re

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import strategies as st
from jax import lax
from networks import NETWORKS
from test_engine import architectures, chain, matrix, parameters
from weights import general, normal, orthogonal

import moonwalk as mw
from moonwalk.errors import OptimizerError
from moonwalk.fused import fused_update
from moonwalk.fused.optimizers import Program
from moonwalk.lab.bench.experiments import fused
from moonwalk.lab.bench.tasks import Task

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::moonwalk.PlanWarning")]

EXACT = 1e-12
ROWS, WIDTH, DEPTH = 16, 4, 5
X = normal(ROWS, WIDTH, seed=100)
STACK = jnp.stack([orthogonal(WIDTH, seed=i) for i in range(DEPTH)])
BIASES = 0.1 * normal(DEPTH, WIDTH, seed=7)
ADAM = optax.adam(1e-2)
MOMENTUM = optax.sgd(0.1, momentum=0.9)
CLIPPED = optax.chain(optax.clip_by_global_norm(1e-2), MOMENTUM)  # its norm is known after a first pass


def leaky(x):
    return jax.nn.leaky_relu(x, 0.3)


def turn(x, w):
    """A layer that is walked without loss."""
    return leaky(x @ mw.declare(w, "orthogonal"))


def over(layer, x, ws, **options):
    return lax.scan(lambda c, w: (layer(c, w), None), x, ws, **options)[0]


def square(x):
    return jnp.mean((x - 0.5) ** 2)


def arrays(tree):
    leaves = [a for a in jax.tree.leaves(tree) if isinstance(a, jax.Array)]
    keys = [jnp.issubdtype(a.dtype, jax.dtypes.prng_key) for a in leaves]
    return [jax.random.key_data(a) if k else a for a, k in zip(leaves, keys, strict=True)]


def differs(found, expected):
    """The largest difference of a leaf from what it should be, relative to the leaf.

    A leaf that should be zero (the change of a gradient between equal steps) is rounding of others.
    """
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    worst = 0.0
    finite = (np.asarray(b, np.float64) for b in arrays(expected))
    rounding = 16 * np.finfo(np.float64).eps * sum(np.linalg.norm(b[np.isfinite(b)]) for b in finite)
    for a, b in zip(arrays(found), arrays(expected), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        a, b = (np.asarray(v, np.float64) for v in (a, b))
        assert np.array_equal(np.isfinite(a), np.isfinite(b))
        a, b = (np.where(np.isfinite(v), v, 0) for v in (a, b))
        off, size = np.linalg.norm(a - b), np.linalg.norm(b)
        if off > rounding:
            worst = max(worst, off / max(size, np.finfo(np.float64).tiny))
    return worst


def unfused(value_and_grad, optimizer):
    """The step that `fused_update` replaces."""

    def step(params, opt_state, *data, **kwargs):
        value, gradients = value_and_grad(params, *data, **kwargs)
        updates, opt_state = optimizer.update(gradients, opt_state, params)
        return value, optax.apply_updates(params, updates), opt_state

    return step


@pytest.fixture
def layered(monkeypatch):
    """Names of the leaves that the last fused step updated layer by layer; numbers, if it was refused."""
    names = []

    class Fused(fused_update.Fused):
        def __init__(self, *args):
            try:
                super().__init__(*args)
            except OptimizerError:
                names[:] = self.fusing.layered
                raise
            names[:] = [self.program.names[i] for i in sorted(self.program.layered)]

    monkeypatch.setattr(fused_update, "Fused", Fused)
    return names


# --- networks -----------------------------------------------------------------------------------------

# Weights that were declared orthogonal are not, once they have been updated: several steps are compared
# with `moonwalk.value_and_grad`, which sees the same declarations. Left out are networks that have no
# parameters in their first argument alone, and those that are walked only when fused.
SEVERAL = [
    n
    for n in NETWORKS
    if NETWORKS[n].argnums == 0
    and n
    not in (
        "scan with small outputs",
        "scan with outputs alone",
        "scan, two states",
        "scan, noise through a weight",
    )
]
FAST = {
    "MLP with biases",
    "ReLU",
    "residual around walked layers",
    "embedding stem, tied head",
    "scan with biases, between layers",
    "scan, shared weights",
    "scan, reversed, a last period that is shorter",
    "scans in a Python loop",
    "masked weights",
    "LoRA",
    "None leaves",
    "aux",
}
EAGER = {"scan", "None leaves", "aux"}


def some(names, fast):
    assert fast <= set(names), fast - set(names)
    return [pytest.param(n, marks=() if n in fast else pytest.mark.slow) for n in names]


def steps_of(n, optimizer):
    """(fused, unfused) steps of a network of the table."""
    method = mw.Moonwalk(
        anchor_every=n.method.anchor_every, tolerance=n.method.tolerance, on_inexact="ignore"
    )
    options = {"has_aux": n.has_aux, "method": method}
    gradient = mw.value_and_grad(n.loss, **options)
    return mw.fused_update(n.loss, optimizer, **options), unfused(gradient, optimizer)


@pytest.mark.parametrize("name", some(SEVERAL, FAST))
def test_twenty_steps_of_adam(name):
    n = NETWORKS[name]
    optimizer = optax.adam(1e-4)
    steps = steps_of(n, optimizer)

    @jax.jit
    def run(params, opt_state, *data, **kwargs):
        def several(step):
            def body(carry, _):
                value, params, opt_state = step(*carry, *data, **kwargs)
                return (params, opt_state), arrays(value)

            return lax.scan(body, (params, opt_state), None, length=20)

        return [several(step) for step in steps]

    params, *data = n.args
    found, expected = run(params, optimizer.init(params), *data, **n.kwargs)
    assert differs(found, expected) <= EXACT


@pytest.mark.parametrize("name", some(SEVERAL, EAGER))
def test_eagerly(name):
    n = NETWORKS[name]
    params, *data = n.args
    start = (params, MOMENTUM.init(params), *data)
    found, expected = (step(*start, **n.kwargs) for step in steps_of(n, MOMENTUM))
    assert differs(found, expected) <= EXACT


WALKED = {"scan with outputs alone", "scan, two states", "scan of scans", "MLP with anchors"}


@pytest.mark.parametrize("name", some([n for n in NETWORKS if NETWORKS[n].argnums == 0], WALKED))
@pytest.mark.parametrize("optimizer", [pytest.param(MOMENTUM, marks=pytest.mark.slow), CLIPPED])
def test_one_step_beside_backpropagation(name, optimizer):
    n = NETWORKS[name]
    step, _ = steps_of(n, optimizer)
    plain = unfused(jax.value_and_grad(n.loss, has_aux=n.has_aux), optimizer)

    def both(*args, **kwargs):
        (a, *found), (b, *expected) = step(*args, **kwargs), plain(*args, **kwargs)
        return (arrays(a), found), (arrays(b), expected)

    params, *data = n.args
    found, expected = jax.jit(both)(params, optimizer.init(params), *data, **n.kwargs)
    assert differs(found, expected) <= 1e-10  # of the gradients: `test_engine.EXACT`


# --- one network for every optimizer ------------------------------------------------------------------


def mixed(p, x):
    """Stacked leaves, a matrix, a bias and a number."""
    x = over(lambda c, q: turn(c, q["w"]) + q["b"], x @ p["stem"] + p["bias"], p["layers"])
    return p["scale"] * square(x)


def separate(p, x):
    """The same, each layer with leaves of its own."""
    x = x @ p["stem"] + p["bias"]
    for q in p["layers"]:
        x = turn(x, q["w"]) + q["b"]
    return p["scale"] * square(x)


OTHERS = {"stem": general(WIDTH, seed=1), "bias": normal(WIDTH, seed=2), "scale": jnp.array(1.5, float)}
MIXED = {**OTHERS, "layers": {"w": STACK, "b": BIASES}}
SEPARATE = {**OTHERS, "layers": [{"w": w, "b": b} for w, b in zip(STACK[:2], BIASES[:2], strict=True)]}
STACKED = ["params['layers']['b']", "params['layers']['w']"]


def matrices(params):
    return jax.tree.map(lambda a: a.ndim > 1, params)


def kinds(params):
    return jax.tree.map(lambda a: "matrix" if a.ndim > 1 else "rest", params)


def cosine(peak):
    return optax.cosine_decay_schedule(peak, 10)


ONE_PASS = {
    "sgd": optax.sgd(0.1),
    "momentum": MOMENTUM,
    "nesterov": optax.sgd(0.1, momentum=0.9, nesterov=True),
    "adam": ADAM,
    "adamw": optax.adamw(1e-2, weight_decay=0.1, mask=matrices),
    "lion": optax.lion(1e-3),
    "rmsprop": optax.rmsprop(1e-2, centered=True, momentum=0.9),
    "masked": optax.masked(optax.adam(1e-2), matrices),
    "multi_transform": optax.multi_transform(
        {"matrix": optax.adam(1e-2), "rest": optax.set_to_zero()}, kinds
    ),
    "inject_hyperparams": optax.inject_hyperparams(optax.adam)(learning_rate=cosine(1e-2)),
    "schedule": optax.sgd(cosine(0.1)),
    "clip": optax.chain(optax.clip(1e-3), optax.sgd(0.1)),
    "noise": optax.chain(optax.add_noise(1e-2, 0.5, key=jax.random.key(0)), optax.sgd(0.1)),
    "ema": optax.chain(optax.ema(0.9), optax.sgd(0.1)),
    "optimistic": optax.optimistic_gradient_descent(1e-2),  # its state is the gradient itself
    "set_to_zero": optax.set_to_zero(),
    "identity": optax.identity(),
    "adabelief": optax.adabelief(1e-2),
    "adadelta": optax.adadelta(1e-2),
    "adagrad": optax.adagrad(1e-2),
    "adamax": optax.adamax(1e-2),
    "adan": optax.adan(1e-2),
    "amsgrad": optax.amsgrad(1e-2),
    "apply_every": optax.chain(optax.apply_every(2), optax.sgd(0.1)),
    "nadam": optax.nadam(1e-2),
    "radam": optax.radam(1e-2),
    "rprop": optax.rprop(1e-2),
    "yogi": optax.yogi(1e-2),
    "nonnegative": optax.chain(optax.sgd(0.1), optax.keep_params_nonnegative()),
    "schedule-free": optax.contrib.schedule_free_adamw(1e-2),
    "ademamix": optax.contrib.ademamix(1e-2),
    "cocob": optax.contrib.cocob(),
}
TWO_PASSES = {
    "global norm": optax.chain(optax.clip_by_global_norm(1e-2), optax.adam(1e-2)),
    "normalized": optax.chain(optax.normalize_by_update_norm(), optax.sgd(0.1)),
    "masked norm": optax.chain(
        optax.masked(optax.clip_by_global_norm(1e-2), matrices), optax.sgd(0.1, momentum=0.9)
    ),
    "norm after adam": optax.chain(
        optax.scale_by_adam(), optax.clip_by_global_norm(1e-2), optax.scale(-0.1)
    ),
    "distance over gradients": optax.contrib.dog(0.1),  # norms of its state, too
}
# These need a number or two of a leaf by itself: one pass where the leaf is no stack.
PER_LEAF = {
    "block rms": optax.chain(optax.clip_by_block_rms(1e-2), optax.sgd(0.1)),
    "nan counts": optax.chain(optax.zero_nans(), optax.sgd(0.1)),
    "distance of a leaf": optax.scale_by_distance_over_gradients(),
}
# And these need all of a leaf, or a norm of what another norm has made.
WHOLE_LEAF = {
    "trust ratio": optax.chain(optax.scale_by_trust_ratio(), optax.sgd(0.1)),
    "lamb": optax.lamb(1e-2),
    "lars": optax.lars(1e-2),
    "fromage": optax.fromage(1e-2),
    "adafactor": optax.adafactor(1e-2, min_dim_size_to_factor=2),
    "adafactor, not factored": optax.adafactor(1e-2),
    "factored rms": optax.chain(
        optax.scale_by_factored_rms(min_dim_size_to_factor=2), optax.scale(-1e-2)
    ),
    "adaptive clipping": optax.chain(optax.adaptive_grad_clip(1e-2), optax.sgd(0.1)),
    "centralized": optax.chain(optax.centralize(), optax.sgd(0.1)),
    "muon": optax.contrib.muon(1e-2),
    "clipped lamb": optax.chain(optax.clip_by_global_norm(1e-2), optax.lamb(1e-2)),
    "prodigy": optax.contrib.prodigy(0.1),
}
NEEDS_NORMS = {*TWO_PASSES, "clipped lamb", "prodigy"}

FAST_STACKED = {
    "sgd",
    "adam",
    "adamw",
    "lion",
    "rmsprop",
    "masked",
    "multi_transform",
    "inject_hyperparams",
    "clip",
    "ema",
    "optimistic",
    "global norm",
    "masked norm",
    "distance over gradients",
    "block rms",
    "nan counts",
}
FAST_SEPARATE = {"noise", "lamb", "lars", "adafactor", "clipped lamb"}


def compare_steps(loss, params, optimizer, *, count=3, reference=mw.value_and_grad):
    """A few steps beside the unfused ones, compiled together."""
    method = mw.Moonwalk(on_inexact="ignore")
    gradient = reference(loss, method=method) if reference is mw.value_and_grad else reference(loss)
    steps = mw.fused_update(loss, optimizer, method=method), unfused(gradient, optimizer)

    @jax.jit
    def both(*states):
        return [step(*state, X) for step, state in zip(steps, states, strict=True)]

    found = expected = (None, params, optimizer.init(params))
    for _ in range(count):
        found, expected = both(found[1:], expected[1:])
        assert differs(found, expected) <= EXACT
    return found


@pytest.mark.parametrize("name", some([*ONE_PASS, *TWO_PASSES, *PER_LEAF], FAST_STACKED))
def test_optimizers_on_stacked_leaves(name, layered):
    # Of a parameter that is one number, this optimizer makes an array of one: the loss is no scalar then.
    count = 1 if name == "distance of a leaf" else 3
    compare_steps(mixed, MIXED, {**ONE_PASS, **TWO_PASSES, **PER_LEAF}[name], count=count)
    assert layered == STACKED


@pytest.mark.parametrize("name", some([*ONE_PASS, *TWO_PASSES, *PER_LEAF, *WHOLE_LEAF], FAST_SEPARATE))
def test_optimizers_on_separate_leaves(name):
    count = 1 if name == "distance of a leaf" else 3  # as above
    optimizer = {**ONE_PASS, **TWO_PASSES, **PER_LEAF, **WHOLE_LEAF}[name]
    compare_steps(separate, SEPARATE, optimizer, count=count)


@pytest.mark.parametrize("name", [*ONE_PASS, *TWO_PASSES, *PER_LEAF, *WHOLE_LEAF])
def test_who_needs_two_passes(name):
    optimizer = {**ONE_PASS, **TWO_PASSES, **PER_LEAF, **WHOLE_LEAF}[name]
    assert Program(optimizer, SEPARATE, optimizer.init(SEPARATE)).needs_norms == (name in NEEDS_NORMS)
    if name not in WHOLE_LEAF:
        places = [i for i, (path, _) in enumerate(jax.tree.flatten_with_path(MIXED)[0]) if len(path) > 1]
        program = Program(optimizer, MIXED, optimizer.init(MIXED), places)
        assert program.needs_norms == (name not in ONE_PASS)


# --- refusals -------------------------------------------------------------------------------------------

ALTERNATIVE = "use moonwalk.value_and_grad and apply the update after it"
IN_LAYERS = "this leaf stacks the layers of a scan, whose gradients come layer by layer"
WHOLE = "it combines whole gradients"
NESTED = "it takes a norm of what another norm has made"


def refused(optimizer, loss=mixed, params=MIXED, error=OptimizerError):
    step = mw.fused_update(loss, optimizer)
    with pytest.raises(error) as caught:
        jax.eval_shape(step, params, optimizer.init(params), X)
    return str(caught.value)


STACKED_REFUSALS = {
    "adafactor": ("reduce_sum", NESTED),
    "factored rms": ("mul", IN_LAYERS),
    "adafactor, not factored": ("reduce_sum", NESTED),
    "trust ratio": ("reduce_sum", NESTED),
    "lamb": ("reduce_sum", NESTED),
    "lars": ("reduce_sum", NESTED),
    "fromage": ("reduce_sum", NESTED),
    "clipped lamb": ("reduce_sum", NESTED),
    "adaptive clipping": ("reduce_sum", IN_LAYERS),
    "centralized": ("reduce_sum", IN_LAYERS),
    "muon": ("", IN_LAYERS),
    "prodigy": ("add", IN_LAYERS),
}


@pytest.mark.parametrize("name", WHOLE_LEAF)
def test_refused_on_stacked_leaves(name):
    primitive, why = STACKED_REFUSALS[name]
    text = refused(WHOLE_LEAF[name])
    assert f"fused_update cannot serve this optimizer: `{primitive}" in text
    assert re.search(r"` at .*optax.*\.py:\d+ .* is applied to params\['layers'\]\['[bw]'\], and ", text)
    assert why in text and ALTERNATIVE in text
    if why is IN_LAYERS:
        assert "keep the layers as separate leaves, or exclude them from this transformation" in text


def summed(updates, params):
    """Every gradient, scaled by an entry of the first."""
    first = jax.tree.leaves(updates)[0].ravel()[0]
    return jax.tree.map(lambda g: g * first, updates)


def last_entry(updates, params):
    return jax.tree.map(lambda g: g * lax.slice(g, [0] * g.ndim, [1] * g.ndim), updates)


MIXING = {
    "concatenated": (optax.flatten(optax.adam(1e-2)), "concatenate", WHOLE),
    "only if finite": (optax.apply_if_finite(optax.adam(1e-2), 3), "", WHOLE),
    "novograd": (optax.novograd(1e-2), "cond", WHOLE),
    "added": (
        optax.stateless(lambda g, p: {**g, "bias": g["bias"] + g["stem"][0]}),
        "add",
        WHOLE,
    ),
    "a norm of a norm": (
        optax.chain(
            optax.clip_by_global_norm(1.0), optax.scale_by_adam(), optax.clip_by_global_norm(1.0)
        ),
        "add",
        NESTED,
    ),
}


@pytest.mark.parametrize("name", MIXING)
def test_refused_on_any_leaves(name):
    optimizer, primitive, why = MIXING[name]
    text = refused(optimizer, separate, SEPARATE)
    assert f"fused_update cannot serve this optimizer: `{primitive}" in text
    assert "is applied to params['" in text and why in text and ALTERNATIVE in text


def test_many_leaves_are_counted_not_listed():
    text = refused(optax.MultiSteps(ADAM, 2), separate, SEPARATE)
    names = "params['bias'], params['layers'][0]['b'], params['layers'][0]['w'] and 4 more"
    assert "`cond` at " in text and f"is applied to {names}, and {WHOLE}" in text


def test_an_entry_of_a_stack_is_refused():
    assert "`slice` at" in refused(optax.stateless(last_entry))
    text = refused(optax.stateless(lambda g, p: {**g, "scale": g["scale"] * g["layers"]["b"][0, 0]}))
    assert "params['layers']['b']" in text and IN_LAYERS in text


def test_an_optimizer_that_changes_its_state_is_refused():
    def update(updates, state, params=None):
        return updates, (state, state)

    text = refused(optax.GradientTransformation(lambda p: jnp.zeros(()), update))
    assert "the optimizer's update returns a state of another structure than it was given" in text
    assert ALTERNATIVE in text


def test_a_state_that_changes_its_type_is_refused_in_layers():
    def update(updates, state, params=None):
        return updates, jax.tree.map(lambda g: g.astype(jnp.float32), updates)

    widening = optax.GradientTransformation(
        lambda p: jax.tree.map(lambda a: a.astype(jnp.bfloat16), p), update
    )
    text = refused(widening)
    assert (
        "params['layers']['b'], and its result f32[5,4] cannot replace bf16[5,4] layer by layer" in text
    )


def test_an_optimizer_that_wants_the_value_is_refused():
    text = refused(optax.polyak_sgd())
    assert "must do with gradients, state and parameters, but it asks for more: " in text
    assert "'value'" in text and ALTERNATIVE in text


def test_an_optimizer_that_prints_is_refused():
    def noisy(updates, params):
        jax.debug.print("step")
        return updates

    text = refused(optax.stateless(noisy))
    assert re.search(r"`debug_\w+` at .*test_fused\w*.py.*: it prints or calls back, so", text)


def test_something_that_is_no_optimizer():
    for wrong in (3, optax.sgd):
        with pytest.raises(TypeError, match="must be an optax GradientTransformation, with an `update`"):
            mw.fused_update(square, wrong)


def test_a_state_of_another_optimizer():
    step = mw.fused_update(mixed, ADAM)
    with pytest.raises(ValueError, match=r"opt_state\[0\]\.count should be int32\[\], but is absent"):
        step(MIXED, optax.sgd(0.1).init(MIXED), X)
    with pytest.raises(ValueError, match=r"opt_state\[0\]\.mu\['bias'\] .* make it with optimizer.init"):
        step(MIXED, ADAM.init(SEPARATE["bias"]), X)
    other = {**MIXED, "bias": normal(3)}
    with pytest.raises(ValueError, match=r"should be float64\[4\], but is float64\[3\]"):
        step(MIXED, ADAM.init(other), X)


def test_an_error_of_the_optimizers_own_stays():
    def update(updates, state, params=None):
        raise ZeroDivisionError("mine")

    optimizer = optax.GradientTransformation(lambda p: (), update)
    with pytest.raises(ZeroDivisionError, match="mine"):
        mw.fused_update(mixed, optimizer)(MIXED, (), X)


# --- where weights come from and go to ------------------------------------------------------------------

CASES = {}


def case(name, loss, params, *data, stacked=None, slow=False, **options):
    """`stacked`: the leaves that must be updated layer by layer, where that matters."""
    marks = pytest.mark.slow if slow else ()
    CASES[name] = pytest.param(loss, params, (X, *data), stacked, options, marks=marks, id=name)


W, B = "params['w']", "params['b']"
LAYERS = {"w": STACK, "b": BIASES}
FREE = normal(DEPTH, WIDTH, WIDTH, seed=3)


def biased(x, q):
    return turn(x, q["w"]) + q["b"]


case(
    "stem and head tied",
    lambda p, x: square(over(turn, x @ p["e"], p["w"]) @ p["e"].T),
    {"e": orthogonal(WIDTH, seed=30), "w": STACK},
    stacked=[W],
)
case(
    "scan and loop tied",
    lambda p, x: square(over(turn, turn(x, p["w"][0]), p["w"])),
    {"w": STACK},
    stacked=[],
)
case(
    "two scans tied",
    lambda p, x: square(over(turn, over(turn, x, p["w"]), p["w"])),
    {"w": STACK},
    slow=True,
)
case(
    "scan and its weights' sum",
    lambda p, x: square(over(turn, x, p["w"])) + 0.1 * jnp.sum(p["w"] ** 2),
    {"w": STACK},
    stacked=[],
    slow=True,
)
case(
    "a leaf passed twice",
    lambda p, x: square(
        over(lambda c, w: leaky(turn(c, w[0]) @ (w[1] + jnp.eye(WIDTH))), x, (p["w"],) * 2)
    ),
    {"w": STACK},
)
case(
    "a leaf and a copy without gradient",
    lambda p, x: square(
        over(lambda c, w: turn(c, w[0]) + w[1][0], x, (p["w"], lax.stop_gradient(p["w"])))
    ),
    {"w": STACK},
    stacked=[W],
)
case(
    "a leaf and its mirror image",
    lambda p, x: square(over(lambda c, w: turn(c, w[0]) + 0.1 * w[1][0], x, (p["w"], p["w"][::-1]))),
    {"w": STACK},
    stacked=[],
    slow=True,
)
case(
    "unused leaves",
    lambda p, x: square(over(lambda c, q: turn(c, q["w"]), x, {"w": p["w"], "b": p["b"]})),
    {**LAYERS, "one": normal(3), "none": None, "number": jnp.array(2.0, float)},
    stacked=[W],
)
case(
    "numbers",
    lambda p, x: p["s"] * square(over(lambda c, q: turn(c, q[0]) * q[1], x, (p["w"], p["t"]))),
    {"w": STACK, "s": jnp.array(2.0, float), "t": 1 + 0.1 * normal(DEPTH)},
    stacked=["params['t']", W],
)
case(
    "frozen by stop_gradient",
    lambda p, x: square(over(lambda c, q: turn(c, lax.stop_gradient(q["w"])) + q["b"], x, p)),
    LAYERS,
    stacked=[B],
)
case(
    "QR of a stack",
    lambda p, x: square(over(turn, x, jnp.linalg.qr(p["w"])[0])),
    {"w": FREE},
    stacked=[],
)
case(
    "QR in the body",
    lambda p, x: square(over(lambda c, q: turn(c, jnp.linalg.qr(q["w"])[0]) + q["b"], x[:2], p)),
    {"w": FREE, "b": BIASES},
    stacked=[B, W],
)
case(
    "QR in the body, hoisted",
    lambda p, x: square(over(lambda c, w: turn(c, jnp.linalg.qr(w)[0]), x, p["w"])),
    {"w": FREE},
    stacked=[],
    slow=True,
)
case(
    "a stack made entry by entry",
    lambda p, x, t: square(over(biased, x, {"w": p["w"], "b": t * jnp.tanh(p["b"])})),
    LAYERS,
    jnp.array(0.3, float),
    stacked=[B, W],
)
case(
    "a stack masked by data",
    lambda p, x, m: square(over(lambda c, w: leaky(c @ (w + jnp.eye(WIDTH))), x, p["w"] * m)),
    {"w": 0.1 * FREE},
    (normal(*FREE.shape, seed=4) > 0).astype(float),
    stacked=[W],
)
case(
    "masked in the body",
    lambda p, x: square(over(lambda c, w: leaky(c @ (jnp.tril(w) + jnp.eye(WIDTH))), x, p["w"])),
    {"w": 0.1 * FREE},
    slow=True,
)
case(
    "LoRA",
    lambda p, x, f: square(over(lambda c, q: leaky(c @ (q[0] + q[1] @ q[2])), x, (f, p["a"], p["b"]))),
    {"a": 0.1 * normal(DEPTH, WIDTH, 2), "b": 0.1 * normal(DEPTH, 2, WIDTH)},
    STACK,
)
case(
    "LoRA outside",
    lambda p, x, f: square(over(lambda c, w: leaky(c @ w), x, f + p["a"] @ p["b"])),
    {"a": 0.1 * normal(DEPTH, WIDTH, 2), "b": 0.1 * normal(DEPTH, 2, WIDTH)},
    STACK,
    stacked=[],
    slow=True,
)
case("a stack in halves", lambda p, x: square(over(turn, over(turn, x, p[:2]), p[2:])), STACK, slow=True)
case(
    "a stack of leaves",
    lambda p, x: square(over(turn, x, jnp.stack(p))),
    list(STACK),
    stacked=[],
    slow=True,
)
case("a stack transposed", lambda p, x: square(over(turn, x, p.mT)), STACK, stacked=[], slow=True)
case("one layer", lambda p, x: square(over(turn, x, p)), STACK[:1], slow=True)
case(
    "one layer, one number",
    lambda p, x: square(over(lambda c, s: c * s, x, p)),
    jnp.array([1.5], float),
)
case(
    "outputs of weights",
    lambda p, x: (lambda y, z: square(y) + jnp.sum(z))(
        *lax.scan(lambda c, w: (turn(c, w), jnp.sum(w**2)), x, p)
    ),
    STACK,
    stacked=[],
)
case(
    "a carry that is a weight",
    lambda p, x: square(over(lambda c, w: turn(c, w) + x, p["start"], p["w"])),
    {"w": STACK, "start": normal(ROWS, WIDTH, seed=5)},
    slow=True,
)
case("weights alone", lambda p, x: jnp.sum(jnp.sin(p)), STACK)
case("no weights at all", lambda p, x: jnp.sum(x), STACK)
case("a weight that is the loss", lambda p, x: p["s"], {"s": jnp.array(1.0, float), "w": STACK})
for key, method in {
    "segments": mw.Moonwalk(checkpoint="auto"),
    "two segments": mw.Moonwalk(checkpoint=2),
    "anchors": mw.Moonwalk(anchor_every=2),
    "pure forward": mw.PureForward(),
    "precise": mw.Moonwalk(walk_precision="highest", tolerance=math.inf),
}.items():
    case(
        f"method: {key}",
        lambda p, x: square(over(biased, x @ p["stem"], p["layers"])),
        {"stem": orthogonal(WIDTH, seed=9), "layers": LAYERS},
        stacked=STACKED,
        method=method,
        slow=key in ("two segments", "precise"),
    )
case(
    "method: parameters are inputs",
    lambda p, x: jnp.sum(jnp.sin(x @ p["a"] @ p["b"])),
    {"a": general(WIDTH), "b": general(WIDTH, seed=1)},
    method=mw.Moonwalk(inputs=(0,)),
)


@pytest.mark.parametrize(("loss", "params", "data", "stacked", "options"), CASES.values())
def test_cases(loss, params, data, stacked, options, layered):
    """One step of either kind: in one pass, and in two."""
    optimizers = MOMENTUM, CLIPPED

    @jax.jit
    def all_steps(params, states, *data):
        gradient = jax.value_and_grad(loss)(params, *data)
        found, expected = [], []
        for optimizer, state in zip(optimizers, states, strict=True):
            found.append(mw.fused_update(loss, optimizer, **options)(params, state, *data))
            expected.append(unfused(lambda *_: gradient, optimizer)(params, state, *data))
        return found, expected

    # Of a second step: a state of zeros would hide what reads it wrongly.
    states = [
        jax.tree.map(lambda a: a + 0.1 * jnp.cos(jnp.arange(a.size, dtype=a.dtype)).reshape(a.shape), s)
        for s in (o.init(params) for o in optimizers)
    ]
    found, expected = all_steps(params, states, *data)
    assert differs(found, expected) <= EXACT
    if stacked is not None:
        assert layered == stacked


def test_a_plan():
    plan = mw.plan(mixed, MIXED, X)
    step = mw.fused_update(mixed, ADAM, method=plan)
    found = jax.jit(step)(MIXED, ADAM.init(MIXED), X)
    expected = unfused(jax.value_and_grad(mixed), ADAM)(MIXED, ADAM.init(MIXED), X)
    assert differs(found, expected) <= EXACT
    with pytest.raises(mw.PlanMismatchError, match="the plan was made for other arguments"):
        step(SEPARATE, ADAM.init(SEPARATE), X)


@pytest.mark.parametrize("optimizer", [ADAM, optax.inject_hyperparams(optax.adamw)(1e-2)])
@pytest.mark.parametrize("cast", ["parameters", "compute"])
def test_bfloat16(cast, optimizer, layered):
    """Beside the unfused step: the very same numbers."""
    if cast == "parameters":
        loss, params = mixed, jax.tree.map(lambda a: a.astype(jnp.bfloat16), MIXED)
    else:  # masters in float32, cast as they are used: those of stacks, before the scan
        params = jax.tree.map(lambda a: a.astype(jnp.float32), MIXED)
        loss = lambda p, x: mixed(jax.tree.map(lambda a: a.astype(jnp.bfloat16), p), x)
    x = X.astype(jnp.bfloat16)
    method = mw.Moonwalk(on_inexact="ignore")
    step = mw.fused_update(loss, optimizer, method=method)
    plain = unfused(mw.value_and_grad(loss, method=method), optimizer)
    state = optimizer.init(params)
    found, expected = jax.jit(lambda *a: (step(*a), plain(*a)))(params, state, x)
    assert layered == STACKED
    assert differs(found, expected) <= float(jnp.finfo(jnp.bfloat16).eps)


# --- as a function ----------------------------------------------------------------------------------------


def test_auxiliary_data_and_a_certificate():
    def loss(p, x, *, scale):
        value = scale * mixed(p, x)
        return value, {"value": value, "name": "mixed", "bias": p["bias"]}

    step = mw.fused_update(loss, ADAM, has_aux=True, certify=True)
    (value, aux), params, state, certificate = step(MIXED, ADAM.init(MIXED), X, scale=2.0)
    assert aux["name"] == "mixed" and aux["value"] == value
    assert jnp.array_equal(aux["bias"], MIXED["bias"])  # of the parameters before the step
    assert certificate.error <= 1e-13 and certificate.closure <= 1e-13
    doubled = lambda p, x: 2.0 * mixed(p, x)
    expected = unfused(jax.value_and_grad(doubled), ADAM)(MIXED, ADAM.init(MIXED), X)
    assert differs((value, params, state), expected) <= EXACT


def test_donated_arguments_are_reused():
    step = jax.jit(mw.fused_update(mixed, ADAM), donate_argnums=(0, 1))
    params = jax.tree.map(jnp.copy, MIXED)
    state = ADAM.init(params)
    given = jax.tree.leaves((params, state))
    _, params, state = step(params, state, X)
    assert all(a.is_deleted() for a in given)
    expected = unfused(jax.value_and_grad(mixed), ADAM)(MIXED, ADAM.init(MIXED), X)
    assert differs((params, state), expected[1:]) <= EXACT


def test_without_data_and_by_name():
    """The step's own signature is what `jit` sees, not the loss's."""
    step = mw.fused_update(lambda w: jnp.sum(w**2), optax.sgd(0.5))
    state = optax.sgd(0.5).init(jnp.ones(3))
    for options in ({"donate_argnums": (0, 1)}, {"donate_argnames": ("params", "opt_state")}):
        value, new, _ = jax.jit(step, **options)(jnp.ones(3), state)
        assert value == 3 and not new.any()

    def loss(w, *, mode):
        return jnp.sum(w**2) if mode == "square" else jnp.sum(w)

    step = jax.jit(mw.fused_update(loss, optax.sgd(0.5)), static_argnames="mode")
    assert step(jnp.ones(3), state, mode="linear")[1].tolist() == [0.5] * 3


def test_python_and_numpy_numbers():
    value, w, state = mw.fused_update(lambda w: w**2, MOMENTUM)(3.0, MOMENTUM.init(3.0))
    assert (float(value), float(w)) == pytest.approx((9.0, 2.4))
    _, w, _ = mw.fused_update(lambda w: jnp.sum(w**2), MOMENTUM)(np.ones(2), MOMENTUM.init(np.ones(2)))
    assert w.tolist() == pytest.approx([0.8, 0.8])


def test_steps_in_a_scan_and_an_ensemble():
    """A training loop, and several networks side by side."""
    optimizer = CLIPPED
    step = mw.fused_update(mixed, optimizer, method=mw.Moonwalk(on_inexact="ignore"))
    plain = unfused(mw.value_and_grad(mixed, method=mw.Moonwalk(on_inexact="ignore")), optimizer)
    params = jax.tree.map(lambda a: jnp.stack([a, a]), MIXED)
    xs = normal(2, 3, ROWS, WIDTH, seed=12)

    def train(one, params, xs):
        def body(carry, x):
            value, params, state = one(*carry, x)
            return (params, state), value

        return lax.scan(body, (params, optimizer.init(params)), xs)

    found, expected = (
        jax.jit(jax.vmap(functools.partial(train, one)))(params, xs) for one in (step, plain)
    )
    assert differs(found, expected) <= EXACT


@pytest.mark.parametrize("optimizer", [ADAM, CLIPPED])
def test_a_loss_prints_once(optimizer, capfd):
    def loss(p, x):
        def layer(c, w):
            jax.debug.print("layer")
            return turn(c, w)

        jax.debug.print("loss {}", x.sum())
        jax.debug.print("weights {}", p["e"].sum())
        x = over(layer, turn(x, p["e"]), p["w"])
        jax.debug.print("state {}", x.sum())
        return square(x)

    params = {"e": orthogonal(WIDTH), "w": STACK}
    jax.block_until_ready(jax.jit(mw.fused_update(loss, optimizer))(params, optimizer.init(params), X))
    jax.effects_barrier()
    lines = capfd.readouterr().out.split("\n")
    counts = [
        sum(line.startswith(word) for line in lines) for word in ("loss", "weights", "state", "layer")
    ]
    assert counts == [1, 1, 1, DEPTH]


def test_randomness_in_the_loss_is_the_same_in_both_passes():
    def loss(p, x, key):
        kept = jax.random.bernoulli(key, 0.8, x.shape)
        return mixed(p, jnp.where(kept, x, 0))

    args = (MIXED, CLIPPED.init(MIXED), X, jax.random.key(3))
    found = jax.jit(mw.fused_update(loss, CLIPPED))(*args)
    assert differs(found, unfused(jax.value_and_grad(loss), CLIPPED)(*args)) <= EXACT


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit])
def test_it_cannot_be_differentiated(wrap):
    step = wrap(mw.fused_update(mixed, ADAM))
    state = ADAM.init(MIXED)
    with pytest.raises(
        TypeError, match="fused_update cannot be differentiated: .* made of moonwalk.value"
    ):
        jax.grad(lambda p: step(p, state, X)[0])(MIXED)
    with pytest.raises(TypeError, match="fused_update cannot be differentiated"):
        jax.jvp(lambda x: step(MIXED, state, x)[0], (X,), (X,))


def lying(p, x):
    """Declared orthogonal, and far from it."""
    return square(over(biased, x, p))


LIES = {"w": 1.3 * STACK + 0.1, "b": BIASES}


def test_an_inexact_walk():
    state = ADAM.init(LIES)
    with pytest.raises(Exception, match="the values are not what is declared"):
        jax.jit(mw.fused_update(lying, ADAM, certify=True))(LIES, state, X)
    options = {"method": mw.Moonwalk(on_inexact="nan"), "certify": True}
    found = jax.jit(mw.fused_update(lying, ADAM, **options))(LIES, state, X)
    gradient = lambda *args: mw.value_and_grad(lying, **options)(*args)[:2]
    expected = jax.jit(unfused(gradient, ADAM))(LIES, state, X)
    assert found[-1].error > 1e-3
    assert jnp.isnan(expected[1]["w"]).all()
    assert differs(found[:3], expected) <= EXACT  # parameters and moments are nan, the counter is not


def test_integer_leaves_are_refused_as_jax_would():
    with pytest.raises(TypeError, match="grad requires real- or complex-valued inputs"):
        mw.fused_update(lambda w: jnp.sum(w), ADAM)(jnp.arange(3), ADAM.init(jnp.ones(3)))


# --- memory -----------------------------------------------------------------------------------------------


CHEAP = {("abs", "adam"), ("abs", "clipped"), ("relu", "clipped"), ("abs, looped", "adam")}


@pytest.mark.parametrize(
    ("variant", "optimizer"),
    [
        pytest.param(n, o, marks=() if (n, o) in CHEAP else pytest.mark.slow)
        for n in ("abs", "abs, looped", "relu", "relu, looped")
        for o in ("adam", "clipped")
    ],
)
def test_beside_its_arguments_a_step_holds_less_than_half_the_parameters(variant, optimizer):
    """16 layers of 1024 × 1024, on 64 rows: parameters outweigh activations by far."""
    asked = {"optimizer": optimizer}
    found = fused.measure(Task("fused", "dense", "fused", variant, 16, 1024, 0, 64, settings=asked))
    assert found["temp_bytes"] < found["extra"]["parameter_bytes"] / 2


# --- random networks and optimizers -----------------------------------------------------------------------

PIECES = {
    "clip": optax.clip(1e-2),
    "adam": optax.scale_by_adam(),
    "masked adam": optax.masked(optax.scale_by_adam(), matrices),
    "momentum": optax.trace(0.9, nesterov=True),
    "ema": optax.ema(0.9),
    "rms": optax.scale_by_stddev(),
    "decay": optax.add_decayed_weights(1e-2, matrices),
    "schedule": optax.scale_by_schedule(cosine(1.0)),
    "injected": optax.inject_hyperparams(optax.sgd)(learning_rate=cosine(0.1)),
    "two kinds": optax.multi_transform({"matrix": optax.trace(0.9), "rest": optax.scale(0.5)}, kinds),
    "every second": optax.apply_every(2),
    "optimistic": optax.scale_by_optimistic_gradient(),
    "adan": optax.scale_by_adan(),
    "nan counts": optax.zero_nans(),
    "block rms": optax.clip_by_block_rms(1e-2),
    "trust ratio": optax.scale_by_trust_ratio(),
    "centralized": optax.centralize(),
    "global norm": optax.clip_by_global_norm(1e-2),
    "masked norm": optax.masked(optax.clip_by_global_norm(1e-2), matrices),
    "distances": optax.contrib.dog(0.1),
}
GLOBAL = {"global norm", "masked norm", "distances"}
OF_A_LEAF = {"nan counts", "block rms", "trust ratio", "centralized"}
chains = st.lists(st.sampled_from(sorted(PIECES)), min_size=1, max_size=3)
methods = st.sampled_from([{}, {}, {"checkpoint": "auto"}, {"anchor_every": 2}])


def check(architecture, names, options, tied, stacked):
    params = {
        "stem": matrix("orthogonal", 0),
        "layers": [parameters(layer) for layer in architecture],
        "scale": jnp.array(1.5, float),
        "unused": normal(3),
    }
    x = normal(16, 8, seed=9)

    def loss(p, x):
        x = chain(architecture, p["layers"], x @ p["stem"])
        return p["scale"] * square(x @ p["stem"] if tied else x)

    optimizer = optax.chain(*(PIECES[n] for n in names), optax.scale(-0.1))
    step = mw.fused_update(loss, optimizer, method=mw.Moonwalk(on_inexact="ignore", **options))
    plain = unfused(jax.value_and_grad(loss), optimizer)

    def both(params, state, x):
        _, _, state = plain(params, state, x)  # of a second step, at parameters whose declarations hold
        return step(params, state, x), plain(params, state, x)

    try:
        found, expected = jax.jit(both)(params, optimizer.init(params), x)
    except OptimizerError:
        if sum(n in GLOBAL for n in names) < 2 and not (stacked and {*names} & (GLOBAL | OF_A_LEAF)):
            raise
    else:
        assert differs(found, expected) <= 1e-9  # gradients to 1e-10, and what a norm makes of that


@pytest.mark.parametrize("seed", range(8))
def test_random_networks_and_optimizers(seed, layered):
    @hypothesis.seed(seed)
    @hypothesis.settings(max_examples=25)
    @hypothesis.given(architectures, chains, methods, st.booleans())
    def run(architecture, names, options, tied):
        layered.clear()
        check(architecture, names, options, tied, layered)

    run()
