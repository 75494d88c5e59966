"""Memory by `memory_analysis()` of compiled programs; nothing runs. `moonwalk bench engine` prints more."""

import jax
import jax.numpy as jnp
import pytest
from marks import slow
from memory import MIB, WIDTH, dense_types, network, temp

import moonwalk as mw
from moonwalk.lab.bench import networks
from moonwalk.lab.bench.tasks import Task

pytestmark = pytest.mark.filterwarnings("ignore::moonwalk.PlanWarning")

ROWS = 16384
ACTIVATION = ROWS * WIDTH * 4 / MIB


def walked(made, **options):
    return temp(mw.value_and_grad(made.loss, **options), *made.types())


def plain(loss, made):
    return temp(jax.value_and_grad(loss), *made.types())


@pytest.fixture(scope="module")
def dense():
    few, more = (network("abs", n, ROWS) for n in (64, 128))
    plans = [mw.plan(n.loss, *n.types()).peak_bytes / MIB for n in (few, more)]
    ours, maxmin = walked(few), [walked(network("maxmin", n, ROWS)) for n in (32, 128)]
    return {
        "moonwalk_mib": ours,
        "moonwalk_certified_mib": walked(few, certify=True),
        "backprop_mib": plain(few.loss, few),
        "checkpoint_mib": {k: plain(few.by_hand(64 // k), few) for k in (1, 2, 4, 8, 16, 32)},
        "activations_per_added_layer": (walked(more) - ours) / 64 / ACTIVATION,
        "predicted_activations_per_added_layer": (plans[1] - plans[0]) / 64 / ACTIVATION,
        "predicted_mib": plans[0],
        "maxmin_activations_per_added_layer": (maxmin[1] - maxmin[0]) / 96 / ACTIVATION,
    }


def test_64_dense_layers(dense):
    assert dense["moonwalk_mib"] <= dense["backprop_mib"] / 10
    assert dense["moonwalk_mib"] <= min(dense["checkpoint_mib"].values()) / 3
    assert dense["activations_per_added_layer"] <= 1 / 24


def test_the_certificate_costs_one_per_cent(dense):
    assert dense["moonwalk_certified_mib"] <= 1.01 * dense["moonwalk_mib"]


def test_maxmin_keeps_a_bit_per_pair(dense):
    assert dense["maxmin_activations_per_added_layer"] <= 1 / 48


def test_a_plan_predicts_what_a_layer_costs(dense):
    predicted = dense["predicted_activations_per_added_layer"]
    assert abs(predicted / dense["activations_per_added_layer"] - 1) <= 0.05
    assert abs(dense["predicted_mib"] / dense["moonwalk_mib"] - 1) <= 0.25


def test_a_python_loop_is_in_the_same_class(dense):
    assert walked(network("abs, looped", 64, ROWS)) <= 1.3 * dense["moonwalk_mib"]


@pytest.mark.slow
def test_the_unet_keeps_half_of_checkpointing():
    made = network("", 6, ROWS, "skips")
    found = walked(made)
    assert found <= plain(made.by_hand("block"), made) / 2
    assert abs(mw.plan(made.loss, *made.types()).peak_bytes / MIB / found - 1) <= 0.25


PLAIN = {
    "relu": ("dense", "relu, looped", {"depth": 24, "width": WIDTH, "batch": 4096}),
    "residual": ("dense", "residual, looped", {"depth": 12, "width": WIDTH, "batch": 4096}),
    "tanh": ("dense", "tanh, looped", {"depth": 24, "width": WIDTH, "batch": 4096}),
    "transformer": ("gpt", "tiny", {"depth": 6, "width": WIDTH, "length": 128, "batch": 16}),
}


@pytest.mark.parametrize("name", ["relu", slow("residual"), "tanh", slow("transformer")])
def test_networks_that_cannot_be_walked_cost_no_more_than_checkpointing(name):
    kind, variant, sizes = PLAIN[name]
    made = networks.make(Task("", kind, "", variant, **sizes))
    best = min(plain(made.loss, made), plain(made.by_hand("block"), made))
    jaxpr = jax.make_jaxpr(made.loss)(*made.types())
    largest = max(v.aval.size * 4 for e in jaxpr.eqns for v in e.outvars) / MIB
    assert walked(made) <= 1.1 * best + 4 * largest


def relu_layers(ws, x, t):
    for w in ws:
        x = jax.nn.relu(x @ w)
    return jnp.mean((x - t) ** 2)


def residual_layers(ws, x, t):
    for w in ws:
        x = x + jax.nn.relu(x @ w) @ w
    return jnp.mean((x - t) ** 2)


def anchored_scan(ws, x, t):
    """An anchor per period: LeakyReLU's gain adds up."""

    def layer(x, w):
        return jax.nn.leaky_relu(x @ mw.declare(w, "orthogonal"), 0.4), None

    return jnp.mean((jax.lax.scan(layer, x, ws)[0] - t) ** 2)


@pytest.mark.parametrize(
    ("loss", "loop", "layers"),
    [slow(relu_layers, True, 96), slow(residual_layers, True, 48), (anchored_scan, False, 96)],
)
def test_peaks_are_predicted_where_much_is_kept(loss, loop, layers):
    """Eight activations kept, or more: within 25 %."""
    rows = 4096
    args = dense_types(layers, rows, loop)
    plan = mw.plan(loss, *args)
    assert plan.kept_bytes >= 8 * rows * WIDTH * 4
    found = temp(mw.value_and_grad(loss), *args) * MIB
    assert abs(plan.peak_bytes / found - 1) <= 0.25


def test_bytes_per_layer_that_is_added_to_a_loop_are_predicted():
    few, many = (network("abs, looped", n, ROWS) for n in (32, 48))
    found = walked(many) - walked(few)
    plans = [mw.plan(n.loss, *n.types()).peak_bytes / MIB for n in (few, many)]
    assert abs((plans[1] - plans[0]) / found - 1) <= 0.05
