"""The networks that are measured: shapes, references, variants."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from marks import slow

from moonwalk.bench import Task, networks

SMALL = {"depth": 4, "width": 4, "length": 8, "batch": 2}
VARIANTS = [
    slow(("dense", "abs")),
    slow(("dense", "maxmin")),
    slow(("dense", "slope 0.25")),
    slow(("pyramid", "identity, slope 0.25")),
    slow(("pyramid", "lower, slope 0.1")),
    slow(("pyramid", "identity, slope 0.25, residual")),
    slow(("signal", "slope 0.3, looped")),
    ("signal", "slope 0.3"),
    slow(("isometric", "")),
]


def network(name, variant, **sizes):
    return networks.make(Task("fig2", name, "backprop", variant, **{**SMALL, "depth": 3, **sizes}))


@pytest.mark.parametrize("kind", VARIANTS, ids=str)
def test_types_are_those_of_the_arguments_and_checkpoints_change_nothing(kind):
    made = network(*kind, depth=4 if kind[0] != "pyramid" else 3)
    args = made.arguments(0)
    found = jax.tree.map(lambda a: (a.shape, a.dtype), args)
    assert found == jax.tree.map(lambda a: (a.shape, a.dtype), made.types())
    value, truth = jax.jit(jax.value_and_grad(made.loss))(*args)
    again, g = jax.jit(jax.value_and_grad(made.checkpointed))(*args)
    assert np.isfinite(value) and value > 0
    np.testing.assert_allclose(again, value, rtol=1e-5)
    for a, b in zip(jax.tree.leaves(g), jax.tree.leaves(truth), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5 * float(jnp.linalg.norm(b)))


@pytest.mark.slow
def test_the_isometric_network_keeps_lengths():
    made = network("isometric", "", depth=5)
    params, x, _ = made.arguments(3)
    y = x
    for w in params["layers"]:
        y = made.layer(y, w)
    np.testing.assert_allclose(jnp.linalg.norm(y), jnp.linalg.norm(x), rtol=1e-5)
    assert float(jnp.abs(params["layers"][0] - params["layers"][1]).max()) > 0.1


@pytest.mark.slow
def test_seeds_make_other_arguments_and_the_same_again():
    made = network("dense", "abs")
    one, again, other = (made.arguments(seed) for seed in (0, 0, 1))
    for a, b, c in zip(*map(jax.tree.leaves, (one, again, other)), strict=True):
        np.testing.assert_array_equal(a, b)
        assert not np.array_equal(a, c)


def test_wrong_names_get_the_nearest():
    with pytest.raises(ValueError, match="unknown network 'piramid'; did you mean 'pyramid'"):
        network("piramid", "")
    with pytest.raises(
        ValueError, match="unknown variant of pyramid 'lowr'; did you mean 'lower'.*slope 0.25"
    ):
        network("pyramid", "lowr, slope 0.1")
