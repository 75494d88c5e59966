"""Layers one by one: which tap is the pivot, how variance is kept, what a stack does, what is refused."""

import itertools

import equinox as eqx
import forced
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from weights import normal

import moonwalk as mw
from moonwalk import nn
from moonwalk.rules import fragments, registry
from moonwalk.trace import graph, staging

KEY = jax.random.key(0)


def refused(layer, size):
    """Whether a layer finds no tap for its pivot."""
    try:
        layer.kernel(size)
    except ValueError as error:
        return "no tap that could be a pivot" in str(error)
    return False


def one_block(layer, x):
    params, static = eqx.partition(layer, eqx.is_array)
    staged = staging.stage(lambda x, p: eqx.combine(p, static)(x), x, params)
    made = graph.build(staged.jaxpr, [staged.jaxpr.invars[0]], staged.jaxpr.outvars)
    (block,) = made.blocks
    return block


def test_every_geometry_is_declared_at_the_tap_that_rules_read():
    """Rules compare a declaration with the values of the tap that they divide by: none may complain."""
    found = {"vijp": 0, "spans": 0, "refused": 0}
    for k, s, r, pads, n in itertools.product(
        (2, 3), (1, 2, 3), (1, 2), ((0, 0), (1, 1), (2, 0)), (1, 12)
    ):
        if n + sum(pads) <= r * (k - 1):
            continue  # no window at all
        layer = nn.Conv1d(2, 2, k, s, (pads,), r, pivot="lower", use_bias=False, key=KEY)
        if refused(layer, (n,)):
            assert r > 1
            assert s > 1
            found["refused"] += 1
            continue
        block = one_block(layer, normal(1, n, 2))
        (rule,) = registry.rules_for(block)
        serving = list(fragments.candidates(block, fragments.Ask()))[
            -1:
        ]  # one span is as good as another
        found["spans"] += len(serving)
        if rule.verdict(block):
            serving.append(rule)
            found["vijp"] += 1
        for one in serving:
            for alarm in one.weight_alarms(block, [layer.kernel((n,))]):
                assert not np.any(alarm.bad), (k, s, r, pads, n, alarm.message)
    assert min(found.values()) >= 2


OPTIONS = [
    dict(stride=2, padding=1),
    dict(padding="SAME", dilation=2),
    dict(padding=((0, 1), (2, 1)), groups=2),
    dict(padding="CIRCULAR"),
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_it_is_the_convolution_of_equinox(options):
    """With the kernel moved from [*k, in, out] to Equinox's [out, in, *k], and channels first."""
    layer = nn.Conv2d(4, 4, 3, **options, pivot="lower", key=KEY)
    layer = eqx.tree_at(lambda layer: layer.bias, layer, normal(4, seed=2))
    options = dict(options)
    if options["padding"] == "CIRCULAR":
        options.update(padding=1, padding_mode="CIRCULAR")
    other = eqx.nn.Conv2d(4, 4, 3, **options, key=KEY)
    x = normal(2, 7, 6, 4)
    w = jnp.transpose(layer.kernel((7, 6)), (3, 2, 0, 1))
    other = eqx.tree_at(lambda m: (m.weight, m.bias), other, (w, layer.bias.reshape(4, 1, 1)))
    expected = jnp.moveaxis(jax.vmap(other)(jnp.moveaxis(x, -1, 1)), 1, -1)
    np.testing.assert_allclose(layer(x), expected, atol=1e-12)


@pytest.mark.parametrize("pivot", ["diagonal", "identity", "lower", "free"])
def test_convolutions_keep_the_variance_of_activations(pivot):
    """x -> LeakyReLU(conv(x)), with weights of the total variance 2 / (1 + slope²) per output."""
    layer = nn.Conv2d(64, 64, 3, 2, 1, pivot=pivot, slope=0.25, key=KEY)
    w = np.asarray(layer.kernel((9, 9)))
    total = np.sum(w**2, axis=(0, 1, 2)).mean()
    np.testing.assert_allclose(total, 2 / (1 + 0.25**2), rtol=0.03)
    x = nn.LeakyReLU(0.25)(layer(normal(4, 17, 17, 64)))[:, 1:-1, 1:-1]
    np.testing.assert_allclose(jnp.mean(x**2), 1, rtol=0.1)


@pytest.mark.parametrize("kind", ["orthogonal", "lower", "free"])
def test_dense_layers_start_with_low_gains(kind):
    w = nn.Linear(64, 64, kind, key=KEY).weight
    if kind != "free":
        assert np.linalg.norm(w) * np.linalg.norm(np.linalg.inv(w)) / 64 <= 2
    np.testing.assert_allclose(
        jnp.sum(w**2, 0).mean(), {"orthogonal": 1, "lower": 1.5, "free": 1.88}[kind], rtol=0.1
    )


def test_a_stack_is_its_layers_and_is_walked_with_its_weights_made_before_the_loop():
    def make(key):
        return nn.Sequential([nn.Linear(6, 6, key=key), nn.Abs()])

    stack = nn.Stack(make, 5, key=KEY)
    x = normal(16, 6)
    y = x
    for key in jax.random.split(KEY, 5):
        y = make(key)(y)
    np.testing.assert_allclose(stack(x), y, atol=1e-12)
    params, static = eqx.partition(stack, eqx.is_inexact_array)
    loss = lambda p, x: jnp.mean(jnp.sin(eqx.combine(p, static)(x)))
    plan = mw.plan(loss, params, x)
    assert [(r.mode, r.times) for r in plan.rows if r.depth] == [("walk", 5)] * 3
    *_, walk = forced.under_jit(loss, mw.Moonwalk(), params, x)
    (scan,) = [s for s in walk.steps if s.is_loop]
    assert scan.layers.hoisted


def test_keys_are_handed_to_layers():
    class Noise(eqx.Module):
        def __call__(self, x, *, key=None):
            return x if key is None else x + jax.random.normal(key, x.shape)

    for net in (nn.Sequential([Noise(), Noise()]), nn.Stack(lambda key: Noise(), 2, key=KEY)):
        expected = sum(jax.random.normal(k, (3,)) for k in jax.random.split(KEY, 2))
        np.testing.assert_allclose(net(jnp.zeros(3), key=KEY), expected)
        np.testing.assert_array_equal(net(jnp.zeros(3)), 0)


def test_sequential_is_a_sequence():
    net = nn.Sequential([nn.Abs(), nn.MaxMin()])
    assert len(net) == 2
    assert isinstance(net[1], nn.MaxMin)


def test_pooling_and_rearranging():
    x = np.asarray(normal(2, 4, 6, 3))
    windows = x.reshape(2, 2, 2, 3, 2, 3)
    np.testing.assert_allclose(nn.MeanPool(2)(x), windows.mean((2, 4)), atol=1e-14)
    np.testing.assert_allclose(nn.MeanPool(2, orthonormal=True)(x), windows.sum((2, 4)) / 2, atol=1e-14)
    np.testing.assert_array_equal(nn.MaxPool(2)(x), windows.max((2, 4)))
    np.testing.assert_allclose(nn.GlobalMean()(x), x.mean((1, 2)), atol=1e-14)
    np.testing.assert_array_equal(nn.GlobalMax()(x), x.max((1, 2)))
    y = np.asarray(nn.Unshuffle(2)(x))
    for i, j in itertools.product(range(2), range(2)):
        np.testing.assert_array_equal(y[..., 3 * (2 * i + j) : 3 * (2 * i + j + 1)], x[:, i::2, j::2])


def test_patches_are_products():
    layer = nn.Patchify(3, 10, 2, key=KEY)
    x = normal(2, 4, 4, 3)
    patches = x.reshape(2, 2, 2, 2, 2, 3).transpose(0, 1, 3, 2, 4, 5).reshape(2, 2, 2, 12)
    np.testing.assert_allclose(layer(x), patches @ nn.orthogonal(layer.raw), atol=1e-12)


def test_the_causal_layer_does_not_look_ahead():
    layer = nn.CausalConv1d(4, 3, 3, dilation=2, key=KEY)
    x = normal(1, 12, 4)
    moved = x.at[:, 7].add(1.0)
    changed = np.any(np.asarray(layer(x) != layer(moved)), axis=(0, 2))
    np.testing.assert_array_equal(np.flatnonzero(changed), [7, 9, 11])


def test_group_norm_is_flax_group_norm():
    from flax import nnx

    layer, x = nn.GroupNorm(2, 6), normal(2, 4, 4, 6)
    other = nnx.GroupNorm(6, num_groups=2, epsilon=1e-5, rngs=nnx.Rngs(0), dtype=jnp.float64)
    np.testing.assert_allclose(layer(x), other(x), atol=1e-6)


CONV = dict(key=KEY)
REFUSED = {
    "expanding": (
        lambda: nn.Conv2d(3, 8, 3, **CONV),
        "channels expand, 3 -> 8.*diagonal pivot.*pivot='free'.*Unshuffle",
    ),
    "unknown pivot": (
        lambda: nn.Conv2d(3, 3, 3, pivot="upper", **CONV),
        "unknown pivot 'upper'.*diagonal, identity, lower, free",
    ),
    "groups": (
        lambda: nn.Conv1d(4, 3, 3, groups=2, **CONV),
        "4 -> 3 channels do not divide into 2 groups",
    ),
    "kernel size": (
        lambda: nn.Conv2d(3, 3, (3, 3, 3), **CONV),
        r"kernel_size is a positive number, or 2 of them, got \(3, 3, 3\)",
    ),
    "stride": (lambda: nn.Conv2d(3, 3, 3, 0, **CONV), "stride is a positive number"),
    "padding": (
        lambda: nn.Conv2d(3, 3, 3, 1, "WRAP", **CONV),
        "unknown padding 'WRAP'.*SAME, VALID, CIRCULAR",
    ),
    "negative padding": (
        lambda: nn.Conv2d(3, 3, 3, 1, -1, **CONV),
        "padding is a number.*none negative, got -1",
    ),
    "conv's channels": (
        lambda: nn.Conv2d(3, 3, 3, **CONV)(normal(2, 8, 8, 4)),
        r"Conv2d: takes arrays \[..., size, size, 3\].*\(2, 8, 8, 4\)",
    ),
    "no pivot": (
        lambda: nn.Conv1d(3, 3, 2, 3, 1, 2, **CONV)(normal(10, 3)),
        "Conv1d: spatial axis 0.*no tap that could be a pivot.*pivot='free'",
    ),
    "kind": (
        lambda: nn.Linear(3, 3, "upper", key=KEY),
        "unknown kind 'upper'; choose one of orthogonal, lower, free",
    ),
    "lower expands": (
        lambda: nn.Linear(3, 4, "lower", key=KEY),
        "cannot expand, 3 -> 4; take kind='orthogonal'",
    ),
    "dense features": (
        lambda: nn.Linear(3, 4, key=KEY)(normal(2, 4)),
        r"Linear: takes arrays \[..., 3\], channels last, got the shape \(2, 4\)",
    ),
    "causal expands": (
        lambda: nn.CausalConv1d(3, 4, 3, key=KEY),
        "channels expand, 3 -> 4.*moonwalk.nn.Linear",
    ),
    "causal dilation": (
        lambda: nn.CausalConv1d(3, 3, 3, dilation=0, key=KEY),
        "dilation is a whole number, at least 1, got 0",
    ),
    "causal channels": (
        lambda: nn.CausalConv1d(3, 3, 3, key=KEY)(normal(8, 4)),
        r"takes arrays \[..., size, 3\]",
    ),
    "patch": (
        lambda: nn.Patchify(3, 13, 2, key=KEY),
        "a patch of 12 numbers has no 13 orthonormal columns.*kind='free'",
    ),
    "patch size": (
        lambda: nn.Patchify(3, 3, 0, key=KEY),
        "patches have a positive size along 1, 2 or 3 axes",
    ),
    "patch kind": (
        lambda: nn.Patchify(3, 3, 2, kind="lower", key=KEY),
        "Patchify: unknown kind 'lower'",
    ),
    "patch channels": (lambda: nn.Patchify(3, 3, 2, key=KEY)(normal(8, 8, 4)), "Patchify: takes arrays"),
    "slope": (lambda: nn.LeakyReLU(0.0), r"slope must lie in \(0, 1\], got 0.0.*jax.nn.relu"),
    "odd channels": (lambda: nn.MaxMin()(normal(2, 3)), "channels come in pairs.*even number"),
    "PReLU's slope": (lambda: nn.PReLU(slope=0.01), "starts between 0.125 and 1, got 0.01"),
    "PReLU's channels": (lambda: nn.PReLU(3)(normal(2, 4)), "3 slopes, but the input has shape"),
    "window": (lambda: nn.MaxPool(0), "a window's size is a positive number, got 0"),
    "pool's axes": (lambda: nn.MeanPool(2)(normal(4, 4)), "MeanPool: takes arrays"),
    "odd size": (
        lambda: nn.Unshuffle(2)(normal(5, 4, 3)),
        r"a factor of 2 does not divide the spatial shape \(5, 4\)",
    ),
    "norm's groups": (lambda: nn.GroupNorm(4, 6), "6 channels do not divide into 4 groups"),
    "norm's channels": (lambda: nn.GroupNorm(2, 6)(normal(2, 2, 4)), "GroupNorm: takes arrays"),
    "depth": (
        lambda: nn.Stack(lambda key: nn.Abs(), 0, key=KEY),
        "depth counts layers, at least 1, got 0",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_arguments(name):
    call, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(
    "layer",
    [nn.Conv2d(3, 3, 3, key=KEY), nn.Linear(3, 3, key=KEY), nn.MaxPool(2)],
    ids=lambda m: type(m).__name__,
)
def test_images_in_bytes(layer):
    with pytest.raises(
        TypeError, match=r"takes floating-point arrays, got uint8; scale images.*x / 255"
    ):
        layer(jnp.zeros((4, 4, 3), jnp.uint8))


def test_what_is_no_layer():
    with pytest.raises(TypeError, match="layer 1 is no layer but int"):
        nn.Sequential([nn.Abs(), 3])


@pytest.mark.slow
@pytest.mark.parametrize("stride", [2, 3])
def test_a_pad_in_front_does_not_move_the_pivot(stride):
    """The layer chose its tap for the padding that it knows of."""
    keys = jax.random.split(jax.random.key(0), 4)
    convs = [nn.Conv1d(4, 4, 3, stride=stride, pivot="diagonal", key=k) for k in keys[:3]]
    params, static = eqx.partition(convs, eqx.is_inexact_array)

    def loss(params, x):
        for conv in eqx.combine(params, static):
            x = jnp.abs(conv(jnp.pad(x, ((0, 0), (1, 1), (0, 0)))))
        return jnp.mean(x**2)

    x = jax.random.normal(keys[3], (8, 64, 4))
    truth = jax.grad(loss)(params, x)
    for found in (jax.jit(mw.grad(loss))(params, x), mw.grad(loss)(params, x)):
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(truth), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12)


def test_orthogonal_convolutions_of_one_tap_and_of_integers():
    layer = nn.OrthogonalConv1d(4, 1, key=jax.random.key(0))
    assert layer(jnp.ones((2, 8, 4))).shape == (2, 8, 4)
    with pytest.raises(TypeError, match="takes floating-point arrays"):
        layer(jnp.arange(32).reshape(1, 8, 4))
