"""Training by walks is training by backpropagation: to the last bit where nothing is rounded on the way."""

import os
import subprocess
import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import moonwalk as mw
from moonwalk import models

STEPS = 300


def data(shape, classes):
    """Noise with a label that it determines."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((STEPS, 8, *shape)).astype(np.float32)
    patterns = rng.standard_normal((*shape, classes)).astype(np.float32)
    return jnp.asarray(x), jnp.asarray(np.argmax(np.tensordot(x, patterns, len(shape)), -1))


def single(tree):
    """In float32."""
    return jax.tree.map(lambda a: a.astype(np.float32), tree)


def check_identical_parameters(use_bias):
    """300 steps of Adam in float32: h' is h at the pivots, times powers of two, so nothing is rounded."""
    model = models.pyramid_cnn(
        (12, 12, 2),
        3,
        key=jax.random.key(0),
        width=4,
        depth=2,
        pivot="identity",
        slope=1 / 4,
        use_bias=use_bias,
    )
    params, static = eqx.partition(model, eqx.is_inexact_array)
    params, (x, labels) = single(params), data((12, 12, 2), 3)
    optimizer = optax.adam(np.float32(3e-3))

    def loss(p, x, labels):
        logits = eqx.combine(p, static)(x)
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, labels))

    method = mw.Moonwalk(walk="always")
    plan = mw.plan(loss, params, x[0], labels[0], method=method)
    convolutions = [r for r in plan.rows if r.block.startswith("conv_general_dilated")]
    assert {r.mode for r in convolutions} >= {"stem", "walk"}
    assert plan.anchors == 0

    @jax.jit
    def update(p, state, g):
        updates, state = optimizer.update(g, state)
        return optax.apply_updates(p, updates), state

    def trained(differentiate):
        differentiate = jax.jit(differentiate)
        p, state, values = params, optimizer.init(params), []
        for batch in zip(x, labels, strict=True):
            value, g = differentiate(p, *batch)
            p, state = update(p, state, g)
            values.append(value)
        return p, np.asarray(values)

    by_walks, losses = trained(mw.value_and_grad(loss, method=method))
    by_backprop, _ = trained(jax.value_and_grad(loss))
    assert np.mean(losses[-20:]) < 0.9 * np.mean(losses[:20])
    pairs = zip(jax.tree.leaves(by_walks), jax.tree.leaves(by_backprop), strict=True)
    for a, b in pairs:
        assert a.dtype == np.float32
        np.testing.assert_array_equal(a, b)


@pytest.mark.slow  # one gradient is in test_exactness
def test_identity_pivots_give_identical_parameters():
    check_identical_parameters(use_bias=True)


@pytest.mark.slow
def test_identity_pivots_give_identical_parameters_in_optimised_programs():
    """As users compile. The gradient of a bias is a sum, which XLA fuses with what makes its summands, and adds
    up in another order, in one of two programs: in the last digit it may differ. So may what it fuses with an update.
    """
    env = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_ENABLE_X64")}
    done = subprocess.run([sys.executable, __file__], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


if __name__ == "__main__":
    check_identical_parameters(use_bias=False)
