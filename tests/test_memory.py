"""Memory by `memory_analysis()` of compiled programs; nothing runs. `make bench-engine` prints more."""

import importlib.util
import pathlib

import jax
import jax.numpy as jnp
import pytest
from marks import slow

import moonwalk as mw

pytestmark = pytest.mark.filterwarnings("ignore::moonwalk.PlanWarning")

_path = pathlib.Path(__file__).parents[1] / "results" / "engine.py"
_spec = importlib.util.spec_from_file_location("bench_engine", _path)
bench = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(bench)

ROWS = 16384
ACTIVATION = ROWS * bench.WIDTH * 4 / bench.MIB


@pytest.fixture(scope="module")
def dense():
    return bench.dense_memory(ROWS)


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
    loop = bench.loop_memory(ROWS)
    assert loop["moonwalk_mib"] <= 1.3 * dense["moonwalk_mib"]


@pytest.mark.slow
def test_the_unet_keeps_half_of_checkpointing():
    found = bench.unet_memory(ROWS)
    assert found["moonwalk_mib"] <= found["checkpoint_mib"] / 2
    assert abs(found["predicted_mib"] / found["moonwalk_mib"] - 1) <= 0.25


@pytest.mark.parametrize("name", ["relu", slow("residual"), "tanh", slow("transformer")])
def test_networks_that_cannot_be_walked_cost_no_more_than_checkpointing(name):
    found = bench.plain(name, timed=False)
    best = min(found["mib"]["backprop"], found["mib"]["checkpoint"])
    assert found["mib"]["moonwalk"] <= 1.1 * best + 4 * found["largest_activation_mib"]


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
    args = bench.dense_types(layers, rows, loop)
    plan = mw.plan(loss, *args)
    assert plan.kept_bytes >= 8 * rows * bench.WIDTH * 4
    found = bench.temp(mw.value_and_grad(loss), *args) * bench.MIB
    assert abs(plan.peak_bytes / found - 1) <= 0.25


def test_bytes_per_layer_that_is_added_to_a_loop_are_predicted():
    few, many = (bench.dense_types(n, ROWS, loop=True) for n in (32, 48))
    found = [bench.temp(mw.value_and_grad(bench.looped), *types) for types in (few, many)]
    plans = [mw.plan(bench.looped, *types).peak_bytes / bench.MIB for types in (few, many)]
    assert abs((plans[1] - plans[0]) / (found[1] - found[0]) - 1) <= 0.05
