"""The paper's networks: shapes, what is walked, gradients, refusals."""

import equinox as eqx
import forced
import jax
import jax.numpy as jnp
import numpy as np
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


def planned(model, shape, measured=False):
    """At a size where walking pays; only what is measured computes anything."""
    x = jax.ShapeDtypeStruct(shape, jnp.float32)
    loss, p = differentiated(model, jnp.zeros(shape[:1]))
    p = jax.tree.map(lambda a: a.astype(jnp.float32), p)
    if measured:
        return mw.plan(loss, p, jnp.asarray(normal(*shape), jnp.float32))
    return mw.plan(loss, jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), p), x)


def convolutions(plan):
    return [r.mode for r in plan.rows if r.block.startswith("conv_general_dilated")]


def test_the_pyramid_is_walked_whole():
    """Diagonal pivots have no gain: no anchor, whatever the depth."""
    model = models.pyramid_cnn((64, 64, 3), 10, key=KEY, width=8)
    plan = planned(model, (4, 64, 64, 3))
    assert convolutions(plan) == ["stem"] + 5 * ["walk"]
    assert plan.kept_bytes < plan.backprop_bytes / 20


@pytest.mark.slow
def test_a_triangular_pyramid_is_walked_whole_once_measured():
    lower = models.pyramid_cnn((64, 64, 3), 10, key=KEY, width=8, pivot="lower")
    assert set(convolutions(planned(lower, (4, 64, 64, 3)))) == {"stem", "fragment", "anchor"}
    assert convolutions(planned(lower, (4, 64, 64, 3), measured=True)) == ["stem"] + 5 * ["walk"]


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
        r"in_shape is \(height, width, channels\), got \(40, 1\).*conv1d_cnn",
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
