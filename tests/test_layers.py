"""Real layers nobody here wrote: jax.nn, Equinox and Flax NNX, as their users call them."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from marks import slow
from weights import general, normal

import moonwalk as mw

KEY = jax.random.key(0)


@pytest.fixture(params=["jit", slow("eager"), slow("vmap")])
def check(request):
    """Layers like these differ in what they trace to, not in how a mode runs that."""
    return functools.partial(mw.testing.check_vijp, modes=[request.param])


@pytest.mark.parametrize("name", ["identity", "hard_silu"])  # the others are in cases.py
def test_jax_nn_activations(name, check):
    check(getattr(jax.nn, name), normal(4, 5, seed=1))


@pytest.mark.parametrize("name", ["relu", "relu6", "hard_tanh"])
def test_jax_nn_activations_that_lose_cotangents(name):
    with pytest.raises(mw.NotSubmersiveError, match="exactly zero on part of its range"):
        mw.vijp(getattr(jax.nn, name), normal(4, 5))


def equinox_conv(d, **options):
    """Equinox's convolution with its own initialisation, and a pivot that is well conditioned."""
    layer = eqx.nn.Conv(d, 4, 4, 3, key=KEY, **options)
    groups = options.get("groups", 1)
    pivot = jnp.concatenate([general(4 // groups, seed=g).T for g in range(groups)])
    tap = tuple(p[0] for p in layer.padding)
    return eqx.tree_at(lambda m: m.weight, layer, layer.weight.at[(..., *tap)].set(pivot))


@pytest.mark.parametrize("d", [1, 2, 3])
def test_equinox_conv(d, check):
    layer = equinox_conv(d, stride=2, padding=1)
    assert type(layer).__name__ == "Conv"
    check(layer, normal(4, *([5] * d)))
    check(jax.vmap(layer), normal(2, 4, *([5] * d)))


@pytest.mark.parametrize("layer", [eqx.nn.Conv1d, eqx.nn.Conv2d, eqx.nn.Conv3d])
def test_equinox_conv_classes_patchify(layer, check):
    made = layer(3, 5, 2, stride=2, key=KEY)
    check(jax.vmap(made), normal(2, 3, *([4] * made.num_spatial_dims)), tolerance=1e-9)


def test_equinox_conv_groups_and_causal(check):
    check(equinox_conv(2, stride=2, padding=1, groups=2), normal(4, 7, 7))
    causal = eqx.nn.Conv1d(4, 4, 3, padding=((2, 0),), key=KEY)
    weight = 0.2 * causal.weight
    causal = eqx.tree_at(lambda m: m.weight, causal, weight.at[..., 2].set(general(4)))
    check(causal, normal(4, 9))


def test_equinox_linear():
    layer = eqx.nn.Linear(6, 4, key=KEY)
    mw.testing.check_vijp(layer, normal(6))
    mw.testing.check_vijp(jax.vmap(jax.vmap(layer)), normal(2, 3, 6))


def test_equinox_pooling(check):
    x = normal(3, 6, 6)
    check(eqx.nn.AvgPool2d(2, 2), x)
    check(eqx.nn.AvgPool2d(3, 2), normal(3, 7, 7))  # overlapping
    check(eqx.nn.MaxPool2d(2, 2), x)
    check(eqx.nn.AdaptiveAvgPool2d(2), x)
    with pytest.raises(mw.NotSubmersiveError, match="windows overlap"):
        mw.vijp(eqx.nn.MaxPool2d(3, 2), x)


def test_equinox_others(check):
    check(eqx.nn.PReLU(0.25), normal(4, 5))
    check(eqx.nn.Lambda(jnp.abs), normal(4, 5))
    for layer in (eqx.nn.LayerNorm(6), eqx.nn.RMSNorm(6)):
        with pytest.raises(mw.NotSubmersiveError):
            mw.vijp(layer, normal(6))


def test_equinox_sequential(check):
    k1, k2, k3 = jax.random.split(KEY, 3)
    net = eqx.nn.Sequential(
        [
            eqx.nn.Conv2d(3, 12, 2, stride=2, key=k1),
            eqx.nn.Lambda(lambda x: jax.nn.leaky_relu(x, 0.3)),
            eqx.nn.AvgPool2d(2, 2),
            eqx.nn.Lambda(jnp.ravel),
            eqx.nn.Linear(48, 16, key=k2),
            eqx.nn.Lambda(jnp.tanh),
            eqx.nn.Linear(16, 8, key=k3),
        ]
    )
    check(net, normal(3, 8, 8))
    check(jax.vmap(net), normal(2, 3, 8, 8))


def nnx_conv(**options):
    layer = nnx.Conv(4, 4, (3,), rngs=nnx.Rngs(0), param_dtype=jnp.float64, **options)
    tap = {"CAUSAL": 2}.get(options["padding"], 1)
    layer.kernel[...] = (0.2 * layer.kernel[...]).at[tap].set(general(4))
    return layer


def test_flax_conv(check):
    x = normal(2, 9, 4)
    strided, causal = nnx_conv(strides=2, padding=1), nnx_conv(padding="CAUSAL")
    check(lambda x: strided(x), x)
    check(lambda x: causal(x), x)
    patchify = nnx.Conv(
        4, 8, (3,), strides=3, padding="VALID", rngs=nnx.Rngs(0), param_dtype=jnp.float64
    )
    check(lambda x: patchify(x), x)


def test_flax_linear():
    layer = nnx.Linear(6, 4, rngs=nnx.Rngs(0), param_dtype=jnp.float64)
    mw.testing.check_vijp(lambda x: layer(x), normal(2, 3, 6))
    einsum = nnx.LinearGeneral((2, 3), (4,), axis=(-2, -1), rngs=nnx.Rngs(0), param_dtype=jnp.float64)
    mw.testing.check_vijp(lambda x: einsum(x), normal(5, 2, 3))


def test_flax_sequential(check):
    net = nnx.Sequential(
        nnx.Linear(6, 6, rngs=nnx.Rngs(0), param_dtype=jnp.float64),
        nnx.leaky_relu,
        nnx.Linear(6, 3, rngs=nnx.Rngs(1), param_dtype=jnp.float64),
    )
    check(lambda x: net(x), normal(2, 6))
