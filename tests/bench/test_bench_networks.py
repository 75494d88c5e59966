"""The networks that are measured: shapes, references, variants."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from marks import slow

from moonwalk.lab.bench import Task, networks

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
    slow(("dense", "relu, looped")),
    slow(("dense", "residual")),
    slow(("dense", "abs, first, looped")),
    slow(("skips", "")),
    slow(("resnet", "tiny")),
    slow(("gpt", "tiny, scanned")),
    slow(("gpt", "tiny")),
    slow(("gpt", "tiny, bfloat16")),
    slow(("unet", "tiny")),
    slow(("reversible", "tiny")),
]


def network(name, variant, **sizes):
    sizes = {**SMALL, "depth": 3, **networks.SIZES.get(name, {}).get("tiny", {}), **sizes}
    return networks.make(Task("fig2", name, "backprop", variant, **sizes))


@pytest.mark.parametrize("kind", VARIANTS, ids=str)
def test_types_are_those_of_the_arguments_and_checkpoints_change_nothing(kind):
    sizes = {"pyramid": {"depth": 3}, "skips": {"depth": 1, "batch": 16}}
    made = network(*kind, **sizes.get(kind[0], {"depth": 4}))
    args = made.arguments(0)
    found = jax.tree.map(lambda a: (a.shape, a.dtype), args)
    assert found == jax.tree.map(lambda a: (a.shape, a.dtype), made.types())
    value, truth = jax.jit(jax.value_and_grad(made.loss))(*args)
    assert np.isfinite(value) and value > 0
    # Recomputed in bfloat16, sums may be rounded in another place.
    exact = 1e-1 if "bfloat16" in kind[1] else 1e-5
    for loss in (made.checkpointed, made.by_hand("block"), made.by_hand(2)):
        again, g = jax.jit(jax.value_and_grad(loss))(*args)
        np.testing.assert_allclose(again, value, rtol=exact)
        for a, b in zip(jax.tree.leaves(g), jax.tree.leaves(truth), strict=True):
            np.testing.assert_allclose(a, b, atol=exact * (1e-3 + float(jnp.linalg.norm(b))))


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


def test_checkpoints_by_hand_stand_around_runs_of_layers():
    def count(loss):
        text = str(jax.make_jaxpr(loss)(*made.types()))
        return len(re.findall(r"\b(?:remat2|checkpoint)\[", text))

    made = network("gpt", "tiny", depth=4)
    found = [count(made.by_hand(segments)) for segments in ("block", 2, "sqrt", 1)]
    assert found == [4, 2, 2, 1] and count(made.loss) == 0
    made = network("dense", "relu", depth=12)
    assert made._every("sqrt") == 3 and made._every(5) == 2  # a scan's runs are of equal length
    assert network("dense", "relu, looped", depth=12)._every(5) == 2


@pytest.mark.parametrize(("name", "millions"), [("resnet", 25.557), ("gpt", 124.476), ("unet", 60.734)])
def test_full_sizes_are_those_of_the_literature(name, millions):
    made = networks.make(Task("", name, "", "bfloat16", **networks.SIZES[name]["full"]))
    params, *_ = made.types()
    assert sum(a.size for a in jax.tree.leaves(params)) / 1e6 == pytest.approx(millions, abs=1e-3)
