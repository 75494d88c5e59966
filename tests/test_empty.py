"""Arrays without entries, and loops without turns."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from marks import some
from weights import normal

import moonwalk as mw

pytestmark = pytest.mark.filterwarnings("ignore::moonwalk.PlanWarning")

W = [normal(6, 6, seed=i) for i in range(3)]
FILTERS = [normal(3, 4, 4, seed=i) for i in range(3)]


def layer_norm(x):
    return (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 0.1)


def max_min(x):
    a, b = jnp.split(x, 2, -1)
    return jnp.concatenate([jnp.maximum(a, b), jnp.minimum(a, b)], -1)


def dense(activation):
    def loss(w, x):
        for a in w:
            x = activation(x @ a)
        return jnp.sum(x**2)

    return loss


def convolutions(w, x):
    for a in w:
        x = lax.conv_general_dilated(x, a, (2,), ((1, 1),), dimension_numbers=("NHC", "HIO", "NHC"))
        x = jax.nn.leaky_relu(x)
    return jnp.sum(x)


def spans(w, x):
    for a in w:
        x = lax.conv_general_dilated(x, a, (1,), ((1, 1),), dimension_numbers=("NHC", "HIO", "NHC"))
        x = jax.nn.leaky_relu(x)
    return jnp.sum(x)


def loop(w, x):
    return jnp.sum(lax.scan(lambda x, a: (jnp.abs(x @ a), None), x @ w[0], w[1])[0] ** 2)


NARROW = [jnp.zeros((6, 0)), jnp.zeros((0, 6)), W[0]]
ACTIVATIONS = [jax.nn.leaky_relu, jax.nn.gelu, jax.nn.softmax, layer_norm, max_min, jnp.abs]
CASES = {
    **{f"no rows, {a.__name__}": (dense(a), W, jnp.zeros((0, 6))) for a in ACTIVATIONS},
    "no features": (dense(jnp.tanh), NARROW, normal(5, 6)),
    "no features, a norm": (dense(layer_norm), [*NARROW[1:], W[1]], jnp.zeros((5, 0))),
    "no images": (convolutions, FILTERS, jnp.zeros((0, 32, 4))),
    "no positions": (convolutions, FILTERS, jnp.zeros((2, 0, 4))),
    "no positions, stride one": (spans, FILTERS, jnp.zeros((2, 0, 4))),
    "a loop over no rows": (loop, (W[0], jnp.stack(W)), jnp.zeros((0, 6))),
    "a loop of no turns": (loop, (W[0], jnp.zeros((0, 6, 6))), normal(5, 6)),
    "a parameter without entries": (
        lambda w, x: jnp.sum(jnp.tanh(x @ w[0]) ** 2) + jnp.sum(w[1] ** 2),
        (W[0], jnp.zeros((0, 3))),
        normal(5, 6),
    ),
}
METHODS = {
    "default": mw.Moonwalk(),
    "always": mw.Moonwalk(walk="always"),
    "anchors": mw.Moonwalk(walk="always", anchor_every=2),
    "checkpoint": mw.Checkpoint(),
}


@pytest.mark.filterwarnings("ignore:Mean of empty slice")
@pytest.mark.parametrize(
    "case", some(CASES, set(CASES) - {f"no rows, {name}" for name in ("leaky_relu", "gelu", "softmax")})
)
def test_gradients(case):
    loss, w, x = CASES[case]
    expected = jax.value_and_grad(loss)(w, x)
    planned = mw.plan(loss, w, x, method=METHODS["always"])  # with gains that are measured

    @jax.jit
    def run(w, x):
        return [mw.value_and_grad(loss, method=m)(w, x) for m in (*METHODS.values(), planned)]

    for found in run(w, x):
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            assert a.shape == b.shape and a.dtype == b.dtype
            np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12)


def test_vijp():
    y, vijp_fun = mw.vijp(lambda x: jnp.tanh(x @ W[0]), jnp.zeros((0, 6)))
    assert vijp_fun(jnp.zeros((0, 6))).shape == y.shape == (0, 6)


def test_nothing_is_recovered_from_nothing():
    with pytest.raises(mw.NotSubmersiveError, match="0 numbers go in and 30 come out"):
        mw.vijp(lambda x: x @ NARROW[1], jnp.zeros((5, 0)))
