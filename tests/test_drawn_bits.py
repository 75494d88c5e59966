"""Random bits are drawn where they are read: of `jax.checkpoint`'s stretches XLA draws many at once."""

import jax
import jax.numpy as jnp
import memory
import numpy as np
import pytest
from marks import slow

import moonwalk as mw

WIDTH, ROWS, DEPTH = 32, 1024, 6
X = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32)


def bernoulli(key, x):
    return jnp.where(jax.random.bernoulli(key, 0.9, x.shape), x / 0.9, 0)


def noise(key, x):
    return x * (1 + 0.1 * jax.random.normal(key, x.shape, x.dtype))


def chosen(key, x):
    """Another number of bits for each entry, compared and combined before they are read."""
    scores = jax.random.uniform(key, x.shape, x.dtype)
    return jnp.where((scores > 0.1) & (scores < 0.8), x, -x)


def loss_of(draw, wrap=lambda f: f):
    def block(x, w, key):
        h = draw(key, jax.nn.gelu(x @ w[0]))
        return draw(jax.random.fold_in(key, 1), x + h @ w[1])

    def loss(ws, x, key):
        for i, w in enumerate(ws):
            x = wrap(block)(x, w, jax.random.fold_in(key, i))
        return jnp.mean(x**2)

    return loss


def args_of(generator):
    key = jax.random.key(0, impl=generator)
    weights = [
        jax.random.normal(k, (2, WIDTH * WIDTH * 4), jnp.float32) / WIDTH
        for k in jax.random.split(key, DEPTH)
    ]
    pairs = [(a.reshape(WIDTH, -1), b.reshape(-1, WIDTH)) for a, b in weights]
    return pairs, jax.random.normal(key, X.shape, X.dtype), key


@pytest.mark.parametrize(
    ("draw", "generator"),
    [
        (bernoulli, "rbg"),
        slow(bernoulli, "threefry2x32"),
        slow(chosen, "rbg"),
        slow(chosen, "threefry2x32"),
        slow(noise, "threefry2x32"),
    ],
)
def test_takes_no_more_than_by_hand(draw, generator):
    args = args_of(generator)
    ours = memory.temp(mw.value_and_grad(loss_of(draw)), *args)
    assert ours <= 1.02 * memory.temp(jax.value_and_grad(loss_of(draw, jax.checkpoint)), *args)


@pytest.mark.parametrize(
    "method", [mw.Moonwalk(), mw.Checkpoint("block"), slow(mw.Moonwalk(budget="1TB"))], ids=str
)
@pytest.mark.parametrize("draw", [bernoulli, slow(noise), slow(chosen)])
def test_the_bits_are_the_same_in_both_passes(draw, method):
    with jax.enable_x64():
        args = jax.tree.map(
            lambda a: a.astype(jnp.float64) if a.dtype == jnp.float32 else a, args_of("rbg")
        )
        ours = jax.jit(mw.value_and_grad(loss_of(draw), method=method))(*args)
        theirs = jax.jit(jax.value_and_grad(loss_of(draw)))(*args)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-13), ours, theirs)
