"""The paper's networks: shapes, what is walked, gradients, refusals."""

import equinox as eqx
import forced
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from marks import slow
from weights import normal

import moonwalk as mw
from moonwalk import models

KEY = jax.random.key(0)
pytestmark = pytest.mark.filterwarnings("ignore::moonwalk.PlanWarning")


def small(name, **settings):
    """(model, a batch)."""
    make, shape, defaults = {
        "pyramid": (models.pyramid_cnn, (16, 16, 3), dict(width=4)),
        "signal": (models.conv1d_cnn, (24, 1), dict(width=4, depth=3)),
        "residual": (models.residual_cnn, (8, 8, 1), dict(widths=(4,), halved=(0,))),
        "residual of two blocks": (models.residual_cnn, (8, 8, 1), dict(widths=(4, 8), halved=(1,))),
    }[name]
    return make(shape, 5, key=KEY, **{**defaults, **settings}), normal(2, *shape)


def differentiated(model, x):
    params, static = eqx.partition(model, eqx.is_inexact_array)
    labels = jnp.arange(len(x)) % 5

    def loss(p, x):
        log = jax.nn.log_softmax(eqx.combine(p, static)(x))
        return -jnp.mean(jnp.take_along_axis(log, labels[:, None], 1))

    return loss, params


@pytest.mark.parametrize(
    ("name", "pivot"),
    [
        ("pyramid", "diagonal"),
        slow("pyramid", "lower"),
        slow("pyramid", "free"),
        slow("signal", "diagonal"),
        ("signal", "lower"),
        ("residual", "lower"),
        slow("residual of two blocks", "lower"),
        slow("residual", "diagonal"),
        slow("residual", None),
    ],
)
def test_gradients(name, pivot):
    model, x = small(name, pivot=pivot)
    loss, p = differentiated(model, x)
    assert jax.eval_shape(model, x).shape == (2, 5)
    value, found = jax.jit(mw.value_and_grad(loss))(p, x)
    expected, truth = jax.jit(jax.value_and_grad(loss))(p, x)
    np.testing.assert_allclose(value, expected, rtol=1e-12)
    assert forced.difference(found, truth) <= 1e-10


def planned(model, shape, measured=False, walk="auto"):
    """At a size where walking pays; only what is measured computes anything."""
    x = jax.ShapeDtypeStruct(shape, jnp.float32)
    loss, p = differentiated(model, jnp.zeros(shape[:1]))
    p = jax.tree.map(lambda a: a.astype(jnp.float32), p)
    if measured:
        x = jnp.asarray(normal(*shape), jnp.float32)
    else:
        p = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), p)
    return mw.plan(loss, p, x, method=mw.Moonwalk(walk=walk))


def convolutions(plan):
    return [r.mode for r in plan.rows if r.block.startswith("conv_general_dilated")]


def test_the_pyramid_is_walked_whole():
    """Diagonal pivots have no gain: no anchor, whatever the depth."""
    model = models.pyramid_cnn((64, 64, 3), 10, key=KEY, width=8)
    plan = planned(model, (4, 64, 64, 3), walk="always")
    assert convolutions(plan) == ["stem"] + 5 * ["walk"]
    assert plan.kept_bytes < plan.backprop_bytes / 20


@pytest.mark.slow
def test_a_triangular_pyramid_is_walked_whole_once_measured():
    lower = models.pyramid_cnn((64, 64, 3), 10, key=KEY, width=8, pivot="lower")
    plans = (planned(lower, (4, 64, 64, 3), measured=m, walk="always") for m in (False, True))
    assert [set(convolutions(plan)) for plan in plans] == [
        {"stem", "fragment", "anchor"},
        {"stem", "walk"},
    ]


@pytest.mark.slow
def test_signals_keep_fragments():
    """From concrete weights, spans: under `jit` alone a plan recomputes."""
    model = models.conv1d_cnn((512, 3), 10, key=KEY, width=32, depth=16)
    plan = planned(model, (8, 512, 3), measured=True)
    assert convolutions(plan) == ["fragment"]
    assert plan.peak_bytes < plan.checkpoint_bytes
    assert planned(model, (8, 512, 3)).walked == 0


def test_the_residual_network_has_ten_layers():
    """Of which the stem and the head are free, and the eight in between are constrained alike."""
    make = lambda **settings: models.residual_cnn((28, 28, 1), 10, key=KEY, **settings)
    model = eqx.filter_eval_shape(make, pivot="lower")
    stem, *blocks, norm, act, pool, head = model.layers
    convs = [c for block in blocks for c in block.convs]
    assert len([stem, *convs, head]) == 10
    assert {c.pivot for c in convs} == {"lower"}
    assert (stem.pivot, head.kind) == ("free", "free")
    assert [c.raw.shape[-1] for c in convs] == [64, 64, 128, 128, 256, 256, 256, 256]
    free = eqx.filter_eval_shape(make)
    assert {c.pivot for block in free.layers[1:5] for c in block.convs} == {"free"}
    count = lambda model: sum(a.size for a in jax.tree.leaves(model))
    assert count(free) == count(model)


def test_half_precision_stays_half():
    for name in ("pyramid", "signal", "residual"):
        model, x = small(name)
        assert jax.eval_shape(model, x.astype(jnp.bfloat16)).dtype == jnp.bfloat16


REFUSED = {
    "pyramid of a signal": (
        lambda: models.pyramid_cnn((40, 1), 10, key=KEY),
        r"in_shape is \(height, width, channels\) \(.*conv1d_cnn\), got \(40, 1\)",
    ),
    "even stem": (lambda: models.pyramid_cnn((8, 8, 1), 10, key=KEY, stem_size=2), "odd size, got 2"),
    "signal of an image": (
        lambda: models.conv1d_cnn((8, 8, 1), 10, key=KEY),
        r"in_shape is \(length, channels\).*pyramid_cnn and residual_cnn",
    ),
    "even kernel": (lambda: models.conv1d_cnn((8, 1), 10, key=KEY, kernel_size=4), "odd size, got 4"),
    "residual of a signal": (
        lambda: models.residual_cnn((40, 1), 10, key=KEY),
        "residual_cnn: in_shape is",
    ),
    "falling widths": (
        lambda: models.residual_cnn((8, 8, 1), 10, key=KEY, widths=(8, 4)),
        r"must not fall from block to block, got \(8, 4\)",
    ),
    "odd images": (
        lambda: models.residual_cnn((30, 30, 1), 10, key=KEY),
        r"\(30, 30\) cannot be halved 2 times.*halved=",
    ),
    "too wide": (
        lambda: models.residual_cnn((8, 8, 1), 10, key=KEY, widths=(4, 8), halved=(), pivot="lower"),
        "channels expand, 4 -> 8",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_arguments(name):
    call, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        call()


# --- isometric networks -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "shape", "settings"),
    [
        slow(models.isometric_cnn, (12, 1), dict(channels=4, padding="ZEROS")),
        slow(models.isometric_cnn, (12, 1), dict(channels=4)),
        slow(models.isometric_cnn, (6, 5, 2), dict(channels=3, activation="abs", head="mean")),
        (models.isometric_mlp, (4, 3), dict(width=6)),
        slow(models.isometric_mlp, (4, 3), dict(width=5, activation="abs")),
    ],
)
def test_gradients_of_isometric_networks(make, shape, settings):
    """In float64, through a walk of all layers."""
    model, x = make(shape, 5, key=KEY, depth=4, **settings), normal(3, *shape)
    loss, p = differentiated(model, x)
    found, error, walk = forced.under_jit(loss, mw.Moonwalk(), p, x)
    assert walk.growth == 1
    assert forced.difference(found, jax.jit(jax.grad(loss))(p, x)) <= 1e-10
    assert error <= 1e-10


def temporaries(fun, *args):
    return jax.jit(fun).lower(*args).compile().memory_analysis().temp_size_in_bytes


def test_a_thousand_isometric_layers():
    """Walked whole, without a gain or an anchor before the head, in a small part of what others take."""
    model = models.isometric_cnn((40, 1), 5, key=KEY, channels=4, depth=1000)
    plan = planned(model, (16, 40, 1))
    assert {r.mode for r in plan.rows if r.times == 1000} == {"walk"}
    assert plan.predicted_gain == 1
    # Of MaxMin by one comparison, backpropagation keeps a mask, too, and no longer two states.
    assert plan.peak_bytes <= min(plan.backprop_bytes / 25, plan.checkpoint_bytes / 1.8, 420_000)


@pytest.mark.slow
def test_a_thousand_isometric_layers_learn():
    """200 steps: the loss falls by half, and what is measured is what the plan says."""
    model = models.isometric_cnn((40, 1), 5, key=KEY, channels=4, depth=1000)
    model = jax.tree.map(lambda a: a.astype(jnp.float32) if eqx.is_inexact_array(a) else a, model)
    x = jnp.asarray(normal(16, 40, 1), jnp.float32)
    loss, params = differentiated(model, x)
    optimizer = optax.adam(1e-3)

    @jax.jit
    def step(p, state):
        value, g = mw.value_and_grad(loss)(p, x)
        updates, state = optimizer.update(g, state)
        return value, optax.apply_updates(p, updates), state

    state, values, p = optimizer.init(params), [], params
    for _ in range(200):
        value, p, state = step(p, state)
        values.append(float(value))
    assert values[-1] < values[0] / 2
    walked = temporaries(mw.value_and_grad(loss), params, x)
    assert walked <= temporaries(jax.value_and_grad(loss), params, x) / 8


def test_isometric_mistakes():
    with pytest.raises(
        ValueError, match=r"in_shape is \(length, channels\) or \(height, width, channels\)"
    ):
        models.isometric_cnn((4,), 5, key=KEY)
    with pytest.raises(
        ValueError, match="isometric_cnn: unknown activation 'relu'; choose one of maxmin"
    ):
        models.isometric_cnn((4, 1), 5, key=KEY, activation="relu")
    with pytest.raises(
        ValueError, match="isometric_mlp: MaxMin takes channels in pairs, got 5; take an"
    ):
        models.isometric_mlp((4, 1), 5, key=KEY, width=5)
    with pytest.raises(ValueError, match="unknown head 'max'; choose one of flatten, mean"):
        models.isometric_cnn((4, 1), 5, key=KEY, head="max")
    with pytest.raises(ValueError, match="the stem's kernel has an odd size, got 2"):
        models.isometric_cnn((4, 1), 5, key=KEY, stem_size=2)
