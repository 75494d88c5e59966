"""The reversible transformer."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import moonwalk as mw


def built(in_shape, **settings):
    settings = {"width": 16, "depth": 12, "heads": 2, **settings}
    model = mw.models.reversible_transformer(in_shape, 5, key=jax.random.key(0), **settings)
    params, static = eqx.partition(model, eqx.is_inexact_array)

    def loss(params, x):
        return jnp.mean(jax.nn.logsumexp(eqx.combine(params, static)(x), -1))

    return params, loss, jax.random.normal(jax.random.key(1), (16, *in_shape))


@pytest.mark.slow
@pytest.mark.parametrize("in_shape", [(12, 2), (8, 8, 3)], ids=["signal", "image"])
def test_it_is_inverted_and_exact(in_shape):
    params, loss, x = built(in_shape)
    plan = mw.plan(loss, params, x)
    assert plan.inverted == 2
    g = jax.jit(mw.grad(loss, method=plan))(params, x)
    expected = jax.grad(loss)(params, x)
    for a, b in zip(jax.tree.leaves(g), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12)


@pytest.mark.slow
def test_depth_costs_parameters_alone():
    def temporaries(depth):
        params, loss, x = built((32, 2), depth=depth, width=16)
        lowered = jax.jit(mw.grad(loss)).lower(params, jnp.tile(x, (16, 1, 1)))
        used = lowered.compile().memory_analysis()
        return used.temp_size_in_bytes, used.output_size_in_bytes

    (few, _), (many, gradients) = temporaries(4), temporaries(16)
    assert many - few < 1.5 * gradients  # gradients are written in the loop


def test_messages():
    with pytest.raises(ValueError, match=r"\(length, channels\) or \(height, width, channels\)"):
        built((2, 2, 2, 1))
    with pytest.raises(ValueError, match="patches of 5 do not divide"):
        built((12, 2), patch=5)
    with pytest.raises(ValueError, match="3 heads do not divide a width of 16"):
        built((12, 2), heads=3)
