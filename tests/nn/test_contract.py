"""What every layer of `moonwalk.nn` promises; `layers.py` has the table."""

import functools
import inspect
import io
import math

import equinox as eqx
import forced
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from layers import LAYERS, example
from marks import some

import moonwalk as mw

pytestmark = pytest.mark.filterwarnings("ignore::moonwalk.PlanWarning")

KEY = jax.random.key(0)
LONG = (
    "CausalConv1d",
    "Conv2d",
    "Conv2d, identity",
    "OrthogonalConv1d, zeros",
    "OrthogonalConv2d",
    "Patchify",
    "Stack",
)  # to train in `make test`
EVERY = some(LAYERS, [name for name, layer in LAYERS.items() if not layer.slow])
TRAINABLE = some(
    [name for name, layer in LAYERS.items() if layer.trainable],
    [name for name, layer in LAYERS.items() if layer.trainable and not layer.slow and name not in LONG],
)
# What it is made of has a row, or a test of its own: isometries, spans, pivots.
MADE_OF_OTHERS = {"OrthogonalConv1d, zeros", "Conv1d, same", "Conv2d, identity", "Downsample", "Abs"}
MODES = {"vijp": "walk", "given": "walk", "fragment": "fragment", "anchor": "anchor"}


@functools.cache
def made(name):
    return LAYERS[name].make(KEY)


def network(layer, x):
    """(loss, parameters): a stem, the layer, and a weight behind it, so that a walk must pass the layer."""
    params, static = eqx.partition(layer, eqx.is_inexact_array)
    out = jax.eval_shape(layer, x)
    rng = np.random.default_rng(2)
    stem = jnp.asarray(np.eye(x.shape[-1]) + 0.3 * rng.standard_normal((x.shape[-1],) * 2))
    head = jnp.asarray(rng.standard_normal(math.prod(out.shape)))

    def loss(p, x):
        stem, own, head = p
        y = eqx.combine(own, static)(x @ stem)
        return jnp.sin(jnp.vdot(head, y.reshape(-1)) / head.size)

    return loss, (stem, params, head)


def crossed(walk):
    """The steps between the stem and the head's product (before which y is flattened)."""
    steps = [s for s in walk.steps if not s.node.is_aside]
    last = max(i for i, s in enumerate(steps) if s.node.describe().startswith("dot_general"))
    assert steps[0].is_stem
    return steps[1:last]


def mode_of(walk):
    found = {MODES[s.source] for s in crossed(walk) if s.source != "none"}
    return next((m for m in ("anchor", "fragment", "walk") if m in found), "walk")


def planned(loss, p, x, gains=()):
    """The walk that a trace makes, without running it."""
    walks = []

    def run(p, x):
        walks.append(forced.walked(loss, mw.Moonwalk(), p, x, gains=gains)[2])

    jax.eval_shape(run, p, x)
    return walks[0]


def largest_gain(walk):
    return max((s.gain.factor for s in crossed(walk) if s.is_walked), default=1.0)


@pytest.mark.parametrize(
    "name",
    some(LAYERS, {name for name, layer in LAYERS.items() if not layer.slow} - MADE_OF_OTHERS),
)
def test_a_walk_passes_it_with_the_right_gradient(name):
    """The rule is found, its gain is what the layer promises, the gradient is JAX's, in float64."""
    row, x, method = LAYERS[name], example(name), mw.Moonwalk()
    loss, p = network(made(name), x)
    gains = forced.measured(loss, method, p, x)
    found, error, walk = forced.under_jit(loss, method, p, x, gains=gains)
    assert mode_of(walk) == row.mode
    assert largest_gain(walk) <= row.gain * (1 + 1e-9)
    assert forced.difference(found, jax.jit(jax.grad(loss))(p, x)) <= 1e-10
    assert error <= 1e-10


@pytest.mark.parametrize("name", EVERY)
def test_what_a_trace_knows_of_it(name):
    loss, p = network(made(name), example(name))
    assert mode_of(planned(loss, p, example(name))) == (LAYERS[name].traced or LAYERS[name].mode)


@pytest.mark.parametrize("name", some(LAYERS, ["Conv2d"]))
def test_value_and_grad(name):
    """As a user calls it, whatever the plan chooses."""
    x = example(name)
    loss, p = network(made(name), x)
    value, found = jax.jit(mw.value_and_grad(loss))(p, x)
    expected, truth = jax.jit(jax.value_and_grad(loss))(p, x)
    np.testing.assert_allclose(value, expected, rtol=1e-12)
    assert forced.difference(found, truth) <= 1e-10


@functools.cache
def trained(name):
    """After 200 steps of Adam with a learning rate that is far too high."""
    x, layer = example(name), made(name)
    params, static = eqx.partition(layer, eqx.is_inexact_array)
    target = jnp.asarray(np.random.default_rng(3).standard_normal(jax.eval_shape(layer, x).shape))
    optimizer = optax.adam(0.1)

    def loss(p):
        return jnp.mean((eqx.combine(p, static)(x) - 5 * target) ** 2)

    def step(carry, _):
        p, state = carry
        value, g = jax.value_and_grad(loss)(p)
        updates, state = optimizer.update(g, state)
        return (optax.apply_updates(p, updates), state), value

    (p, _), values = jax.jit(lambda p: jax.lax.scan(step, (p, optimizer.init(p)), length=200))(params)
    moved = [
        jnp.max(jnp.abs(a - b)) for a, b in zip(jax.tree.leaves(p), jax.tree.leaves(params), strict=True)
    ]
    assert moved and all(d > 0.1 for d in moved)
    assert values[-1] < values[0]
    return eqx.combine(p, static)


@pytest.mark.parametrize("name", TRAINABLE)
def test_the_constraint_holds_after_training(name):
    row, x, layer = LAYERS[name], example(name), trained(name)
    layer(x)  # eagerly: what it declares is checked on the values
    row.holds(layer, x)
    if row.gain < math.inf:
        loss, p = network(layer, x)
        walk = planned(loss, p, x, forced.measured(loss, mw.Moonwalk(), p, x))
        assert mode_of(walk) == row.mode
        assert largest_gain(walk) <= row.gain * (1 + 1e-9)


@pytest.mark.parametrize("name", EVERY)
def test_leading_axes_jit_and_vmap(name):
    layer, x = made(name), example(name)
    twice = jnp.stack([x, 2 * x])

    @eqx.filter_jit
    def ways(layer):
        return layer(x), layer(twice)[0], jax.vmap(layer)(twice)[0], jnp.stack([layer(a) for a in x])

    y, *others = ways(layer)
    for other in others:
        np.testing.assert_allclose(other, y, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", EVERY)
def test_types_are_those_of_the_input(name):
    for dtype in (jnp.float32, jnp.bfloat16):
        assert jax.eval_shape(made(name), example(name).astype(dtype)).dtype == dtype


@pytest.mark.parametrize("name", EVERY)
def test_serialised_and_read_again(name):
    layer = made(name)
    file = io.BytesIO()
    eqx.tree_serialise_leaves(file, layer)
    file.seek(0)
    again = eqx.tree_deserialise_leaves(file, LAYERS[name].make(jax.random.key(1)))
    assert jax.tree.structure(again) == jax.tree.structure(layer)
    pairs = zip(jax.tree.leaves(again), jax.tree.leaves(layer), strict=True)
    assert all(np.array_equal(a, b) for a, b in pairs)


def test_every_layer_has_a_row():
    public = {
        value
        for name in dir(mw.nn)
        if not name.startswith("_")
        and inspect.isclass(value := getattr(mw.nn, name))
        and issubclass(value, eqx.Module)
    }
    rows = {type(made(name)) for name in LAYERS}
    assert public - rows == set()
