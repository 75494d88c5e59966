"""`fused_update` against `value_and_grad` and optax: networks, optimizers, tied weights, memory."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from forced import planned
from marks import some, some_cases
from networks import NETWORKS, X, Y, orthogonals, turn
from test_engine import arrays, error
from weights import general

import moonwalk as mw
from moonwalk.lab.bench.experiments import fused
from moonwalk.lab.bench.tasks import Task

pytestmark = pytest.mark.filterwarnings("ignore::moonwalk.PlanWarning")

CLIPPED = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(optax.cosine_decay_schedule(1e-2, 50)))


def unfused(loss, optimizer, **options):
    """The step that a fused one must equal."""

    def step(params, state, *data, **kwargs):
        value, gradients = mw.value_and_grad(loss, **options)(params, *data, **kwargs)
        updates, state = optimizer.update(gradients, state, params)
        return value, optax.apply_updates(params, updates), state

    return step


def both(loss, optimizer, params, *data, steps=1, jit=True, **options):
    """(parameters and state after some fused steps, after as many unfused ones)."""
    result = []
    for step in (mw.fused_update(loss, optimizer, **options), unfused(loss, optimizer, **options)):
        step = jax.jit(step) if jit else step
        new, state = params, optimizer.init(params)
        for _ in range(steps):
            value, new, state = step(new, state, *data)
        result.append(arrays((value, new, state)))
    return result


NAMES = [
    "MLP with biases",
    "strided CNN 1D",
    "residual around walked layers",
    "tied weights",
    "weight decay",
    "embedding stem, tied head",
    "scan",
    "scan with biases, between layers",
    "scan, shared weights",
    "scan with outputs",
    "scan, reversed, a last period that is shorter",
    "scan, two states",
    "LoRA",
]
EAGER = ["tied weights", "scan, shared weights"]


AGAINST_BACKPROPAGATION = ["MLP with biases", "scan", "tied weights", "weight decay"]


@pytest.mark.parametrize(
    "name", some(NAMES, set(NAMES) - {*AGAINST_BACKPROPAGATION, "scan with biases, between layers"})
)
def test_networks(name):
    n = NETWORKS[name]
    found, expected = both(n.loss, optax.adam(1e-2), *n.args, method=n.method)
    assert error(found, expected) <= 1e-12


@pytest.mark.parametrize("name", some(NAMES, {"MLP with biases", "scan, shared weights"}))
def test_networks_in_two_passes(name):
    n = NETWORKS[name]
    found, expected = both(n.loss, CLIPPED, *n.args, method=n.method)
    assert error(found, expected) <= 1e-12


@pytest.mark.parametrize("name", [*EAGER, *(pytest.param(n, marks=pytest.mark.slow) for n in NAMES[:3])])
def test_eagerly(name):
    n = NETWORKS[name]
    found, expected = both(n.loss, optax.adam(1e-2), *n.args, method=n.method, jit=False)
    assert error(found, expected) <= 1e-12


@pytest.mark.parametrize("name", AGAINST_BACKPROPAGATION)
def test_against_backpropagation(name):
    """One step, in which what is declared holds."""
    n, optimizer = NETWORKS[name], optax.sgd(0.1, momentum=0.9)
    params, *data = n.args
    found = jax.jit(mw.fused_update(n.loss, optimizer))(params, optimizer.init(params), *data)
    value, gradients = jax.jit(jax.value_and_grad(n.loss))(*n.args)
    updates, state = optimizer.update(gradients, optimizer.init(params), params)
    expected = (value, optax.apply_updates(params, updates), state)
    assert error(arrays(found), arrays(expected)) <= 1e-10


def looped(ws, x, y):
    for w in ws["layers"]:
        x = turn(x, jnp.linalg.qr(w)[0])  # stays orthogonal while it learns
    return jnp.mean((x * ws["scale"] - y) ** 2)


def scanned(ws, x, y):
    def layer(x, w):
        return turn(x, jnp.linalg.qr(w)[0]), None

    return jnp.mean((jax.lax.scan(layer, x, ws["layers"])[0] * ws["scale"] - y) ** 2)


LAYERS = orthogonals(4)
LIST = {"layers": LAYERS, "scale": jnp.ones(()), "unused": jnp.ones(3)}
STACK = {**LIST, "layers": jnp.stack(LAYERS)}


FORMS = {"looped": (looped, LIST), "scanned": (scanned, STACK)}
# With its default eps of 1e-8, Adam makes a step of 1e-11 of a gradient that is 1e-17 by rounding alone.
TWO = {"adam": optax.adam(1e-2, eps=1e-4), "clipped": CLIPPED}


@pytest.mark.parametrize(
    ("form", "optimizer"),
    some_cases(itertools.product(FORMS, TWO), {("looped", "adam"), ("scanned", "clipped")}),
)
def test_twenty_steps(form, optimizer):
    loss, params = FORMS[form]
    found, expected = both(loss, TWO[optimizer], params, X, Y, steps=20)
    assert error(found, expected) <= 1e-12


def isometric(ws, x, y):
    x, _ = jax.lax.scan(lambda x, w: (turn(x, w), None), x, ws["layers"])
    return jnp.mean((x * ws["scale"] - y) ** 2)


def plain_scan(ws, x, y):
    z, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, ws["layers"])
    return jnp.mean((z * ws["scale"] - y) ** 2)


OPTIMIZERS = {
    "lion": optax.lion(1e-3),
    "rmsprop": optax.rmsprop(1e-2, momentum=0.5),
    "clip": optax.chain(optax.clip(0.01), optax.sgd(0.1)),
    "masked": optax.chain(
        optax.sgd(0.1),
        optax.masked(optax.add_decayed_weights(0.1), {**dict.fromkeys(STACK, False), "layers": True}),
    ),
    "groups": optax.multi_transform(
        {"a": optax.adam(1e-2), "b": optax.sgd(0.1)}, {"layers": "a", "scale": "b", "unused": "b"}
    ),
    "injected": optax.inject_hyperparams(optax.adam)(learning_rate=optax.linear_schedule(0.1, 0.0, 10)),
}


@pytest.mark.parametrize("name", some(OPTIMIZERS, set(OPTIMIZERS) - {"rmsprop", "clip"}))
def test_optimizers(name):
    found, expected = both(plain_scan, OPTIMIZERS[name], STACK, X, Y, steps=3)
    assert error(found, expected) <= 1e-12


def test_an_update_of_one_leaf_by_its_own_norm():
    for params, loss in ((LIST, looped), (STACK, scanned)):  # of stacked layers: in two passes
        optimizer = optax.chain(optax.clip_by_block_rms(1e-3), optax.sgd(0.1))
        found, expected = both(loss, optimizer, params, X, Y)
        assert error(found, expected) <= 1e-12


METHODS = {
    "checkpoint": mw.Moonwalk(checkpoint=2),
    "anchors": mw.Moonwalk(anchor_every=2),
    "forward": mw.PureForward(per_example=True),
}
PASSES = {"one pass": optax.adam(1e-2), "two passes": CLIPPED}


@pytest.mark.parametrize(
    ("name", "passes"),
    some_cases(
        itertools.product(METHODS, PASSES),
        {("checkpoint", "two passes"), ("anchors", "one pass"), ("forward", "two passes")},
    ),
)
def test_methods(name, passes):
    found, expected = both(isometric, PASSES[passes], STACK, X, Y, method=METHODS[name])
    assert error(found, expected) <= 1e-12


def test_aux_and_certificate():
    def loss(ws, x):
        x = turn(turn(x, ws[0]), ws[1])
        return jnp.sum(x**2), {"norm": jnp.linalg.norm(x), "name": "two layers"}

    optimizer = optax.sgd(0.1)
    step = mw.fused_update(loss, optimizer, has_aux=True, certify=True)
    (value, aux), params, _, certificate = step(LAYERS[:2], optimizer.init(LAYERS[:2]), X)
    assert aux["name"] == "two layers"
    np.testing.assert_allclose(aux["norm"] ** 2, value)
    assert certificate.error <= 1e-12
    assert len(params) == 2


def test_donated_arguments():
    optimizer = optax.adam(1e-2)
    params = jax.tree.map(jnp.array, STACK)
    state = optimizer.init(params)
    expected = unfused(plain_scan, optimizer)(params, state, X, Y)
    step = jax.jit(mw.fused_update(plain_scan, optimizer), donate_argnums=(0, 1))
    found = step(params, state, X, Y)
    assert params["layers"].is_deleted()
    assert error(arrays(found), arrays(expected)) <= 1e-12


def test_prints_once_in_two_passes(capfd):
    def loss(w, x):
        jax.debug.print("seen")
        return jnp.sum(jnp.tanh(x @ w["a"]) @ w["b"])

    params = {"a": general(8, 8), "b": general(8, 8, seed=1)}
    jax.block_until_ready(jax.jit(mw.fused_update(loss, CLIPPED))(params, CLIPPED.init(params), X))
    jax.effects_barrier()
    assert capfd.readouterr().out.count("seen") == 1


# --- what is refused ----------------------------------------------------------------------------------


def test_what_prints_in_a_stored_stretch_prints_once(capfd):
    """The second pass linearises the stretch as a whole, and once printed with it."""

    def loss(w, x):
        x = jnp.tanh(x @ w["a"])
        jax.debug.print("state {}", x.sum())
        return jnp.sum(x @ w["b"])

    w = {"a": general(8, 8), "b": general(8, 8, seed=1)}
    plan, *_ = planned(loss, mw.Moonwalk(), w, X, kinds=["store"])
    step = jax.jit(mw.fused_update(loss, CLIPPED, method=plan))
    jax.block_until_ready(step(w, CLIPPED.init(w), X))
    jax.effects_barrier()
    assert capfd.readouterr().out.count("state") == 1


def test_an_optimizer_that_needs_whole_gradients_is_refused():
    def update(updates, state, params=None):
        flat = jnp.concatenate([jnp.ravel(u) for u in jax.tree.leaves(updates)])
        return jax.tree.map(lambda u: u * jnp.max(jnp.sort(flat)), updates), state

    optimizer = optax.GradientTransformation(lambda params: optax.EmptyState(), update)
    with pytest.raises(
        mw.OptimizerError, match=r"(?s)concatenate.*params\['layers'\]\[0\].*value_and_grad"
    ):
        mw.fused_update(looped, optimizer)(LIST, optimizer.init(LIST), X, Y)


def test_a_factored_update_of_stacked_layers_is_refused():
    optimizer = optax.adafactor(1e-2, min_dim_size_to_factor=4)
    found, expected = both(looped, optimizer, LIST, X, Y)
    assert error(found, expected) <= 1e-12
    step = jax.jit(mw.fused_update(isometric, optimizer))
    with pytest.raises(mw.OptimizerError, match=r"params\['layers'\], and "):
        step(STACK, optimizer.init(STACK), X, Y)


def test_no_optimizer():
    with pytest.raises(TypeError, match="must be an optax GradientTransformation"):
        mw.fused_update(looped, 0.1)


def test_it_cannot_be_differentiated():
    optimizer = optax.sgd(0.1)
    step = mw.fused_update(lambda w, x: jnp.sum((x @ w) ** 2), optimizer)
    with pytest.raises(TypeError, match="fused_update cannot be differentiated"):
        jax.grad(lambda w: step(w, optimizer.init(w), X)[0])(general(8, 8))


# --- memory -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", ["abs", "relu, looped"])
def test_less_than_half_the_parameters(variant):
    """All networks and optimizers are in test_fused_cases.py, and printed by `moonwalk bench fused`."""
    found = fused.measure(
        Task("fused", "dense", "fused", variant, 16, 1024, 0, 64, settings={"optimizer": "adam"})
    )
    assert found["temp_bytes"] <= found["extra"]["parameter_bytes"] / 2
