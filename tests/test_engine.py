"""`value_and_grad` against `jax.value_and_grad`: the table of `networks.py`, and random networks."""

import functools
import json
import math

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax import lax
from networks import NETWORKS, conv, layer_norm, leaky, max_min
from weights import general, kernel, lower, normal, orthogonal

import moonwalk as mw

pytestmark = pytest.mark.filterwarnings("ignore::moonwalk.PlanWarning")

EXACT = 1e-10  # in float64, of all leaves together


def arrays(tree):
    """Leaves that can leave `jit`."""
    return [a for a in jax.tree.leaves(tree) if not isinstance(a, str)]


def norm(leaves):
    return math.sqrt(sum(float(np.sum(np.square(np.asarray(a, np.float64)))) for a in leaves))


def error(found, expected):
    """‖found − expected‖ / ‖expected‖ over all leaves together."""
    found, expected = arrays(found), arrays(expected)
    assert [a.shape for a in found] == [a.shape for a in expected]
    assert [a.dtype for a in found] == [a.dtype for a in expected]
    difference = norm([np.asarray(a) - np.asarray(b) for a, b in zip(found, expected, strict=True)])
    return difference / max(norm(expected), np.finfo(np.float64).tiny)


@functools.cache
def reference(name):
    n = NETWORKS[name]
    fun = jax.value_and_grad(n.loss, **n.options)
    return jax.jit(lambda *args, **kwargs: arrays(fun(*args, **kwargs)))(*n.args, **n.kwargs)


@functools.cache
def planned(name, method=None):
    n = NETWORKS[name]
    return mw.plan(n.loss, *n.args, method=n.method if method is None else method, **n.options, **n.kwargs)


def compare(found, expected, tolerance=EXACT):
    value, *rest = zip(found, expected, strict=True)
    assert jnp.allclose(*value, rtol=1e-12, atol=0)
    assert error([a for a, _ in rest], [b for _, b in rest]) <= tolerance


@pytest.mark.parametrize("name", NETWORKS)
def test_gradient_under_jit(name):
    n = NETWORKS[name]
    fun = mw.value_and_grad(n.loss, method=n.method, **n.options)
    compare(jax.jit(lambda *args, **kwargs: arrays(fun(*args, **kwargs)))(*n.args, **n.kwargs), reference(name))


@pytest.mark.parametrize("name", NETWORKS)
def test_gradient_eagerly(name):
    n = NETWORKS[name]
    found = mw.value_and_grad(n.loss, method=n.method, **n.options)(*n.args, **n.kwargs)
    expected = jax.eval_shape(lambda *a: jax.value_and_grad(n.loss, **n.options)(*a, **n.kwargs)[1], *n.args)
    assert jax.tree.structure(found[1]) == jax.tree.structure(expected)
    compare(arrays(found), reference(name))


@pytest.mark.parametrize("name", NETWORKS)
def test_plan(name):
    n = NETWORKS[name]
    plan = planned(name)
    assert str(plan)
    assert json.loads(json.dumps(plan.to_dict()))["walked"] == plan.walked
    assert {row.mode for row in plan.rows} >= n.modes
    if n.walked is None:
        assert not plan.walks
    else:
        assert plan.walked >= n.walked
    if n.anchors is not None:
        assert bool(plan.anchors) == n.anchors
    if plan.walks:
        assert plan.peak_bytes < min(plan.backprop_bytes, plan.checkpoint_bytes)


@pytest.mark.parametrize("name", [n for n in NETWORKS if NETWORKS[n].walks])
def test_without_anchors(name):
    """The prediction holds: error grows by the gain and no more.

    Rounding of the reference itself, and of sums over rows, is not in the prediction: hence the floor.
    The gains are measured on concrete arguments, and the plan carries them into `jit`.
    """
    n = NETWORKS[name]
    plan = planned(name, mw.Moonwalk(tolerance=math.inf, inputs=n.method.inputs))
    fun = mw.value_and_grad(n.loss, method=plan, **n.options)
    found = jax.jit(lambda *args, **kwargs: arrays(fun(*args, **kwargs)))(*n.args, **n.kwargs)
    compare(found, reference(name), max(1e-13, 1e-15 * plan.predicted_gain))
