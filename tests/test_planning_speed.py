"""Planning traces every distinct block once, however many there are; held by counting, not by timing."""

import jax
import jax.numpy as jnp
import pytest

import moonwalk as mw
from moonwalk.execute import residuals

pytestmark = pytest.mark.filterwarnings("ignore::moonwalk.PlanWarning")

WIDTH = 8


def residual_network(params, x):
    for p in params:
        y = (x - x.mean(-1, keepdims=True)) * p["scale"]
        x = x + jax.nn.gelu(y @ p["up"]) @ p["down"]
    return jnp.mean(x**2)


def types(depth):
    struct = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    layer = {"scale": struct(WIDTH), "up": struct(WIDTH, 4 * WIDTH), "down": struct(4 * WIDTH, WIDTH)}
    return [layer] * depth, struct(64, WIDTH)


@pytest.mark.parametrize(
    "method",
    [mw.Moonwalk(), mw.Moonwalk(walk="always"), mw.Checkpoint(), mw.Checkpoint("block")],
    ids=str,
)
def test_residuals_are_traced_once_for_blocks_that_compute_the_same(method, monkeypatch):
    traced, own = [], residuals.Residual.__init__

    def spied(self, *args, **kwargs):
        traced.append(self)
        own(self, *args, **kwargs)

    monkeypatch.setattr(residuals.Residual, "__init__", spied)

    def count(depth):
        traced.clear()
        mw.plan(residual_network, *types(depth), method=method)
        return len(traced)

    few, many = count(8), count(24)
    assert many <= few + 2, (few, many)


def test_a_given_plan_traces_what_runs_and_no_more(monkeypatch):
    args = types(12)
    plan = mw.plan(residual_network, *args)
    made, own = [], residuals.Residual.__init__

    def spied(self, *args, **kwargs):
        made.append(self)
        own(self, *args, **kwargs)

    monkeypatch.setattr(residuals.Residual, "__init__", spied)
    jax.make_jaxpr(mw.value_and_grad(residual_network, method=plan))(*args)
    given = len(made)
    made.clear()
    jax.make_jaxpr(mw.value_and_grad(residual_network))(*args)
    assert given <= len(made)
