"""Table 1: exponents, verdicts and the experiments behind its columns."""

import math
import re

import jax
import pytest
import samples
from marks import some

from moonwalk.lab.bench import growth, methods, phase_one, properties
from moonwalk.lab.bench.experiments import table1
from moonwalk.lab.bench.growth import Size
from moonwalk.lab.bench.tasks import Request, Task

ALL = list(table1.ORDERS)
pytestmark = pytest.mark.filterwarnings("ignore::moonwalk.PlanWarning")


# --- what is asked for --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "request_", [Request("cpu", True), Request("cpu"), Request("gpu")], ids=["quick", "cpu", "gpu"]
)
def test_tasks(request_):
    tasks = table1.tasks(request_)
    assert len({t.key for t in tasks}) == len(tasks) == 10
    grown = [t for t in tasks if t.settings["measure"] == "growth"]
    assert [t.method for t in grown] == ALL == list(table1.COLUMNS)
    for task in grown:
        points = task.settings["points"]
        for axis in growth.AXES:
            for what in ("memory", "time"):
                sizes = [p for p in points if p["axis"] == axis and what in p["what"]]
                assert len(sizes) >= 2, (axis, what)
        for p in points:
            assert p["width"] % p["group"] == 0


def test_sizes_along_axes():
    size = Size(2, 16, 4, 8)
    assert size.times("width", 2) == Size(2, 32, 8, 8) and size.times("parameters", 4) == Size(
        2, 16, 16, 8
    )
    assert size.along("parameters") == 64 and size.times("width", 2).along("parameters") == 256


# --- measuring ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", some(ALL, ["moonwalk"]))
def test_growth(method):
    start = Size(2, 8, 4, 4)
    points = [
        {"axis": "depth", "what": ["time"], **start.__dict__},
        {"axis": "batch", "what": ["memory", "time"], **start.__dict__},
        {"axis": "batch", "what": ["memory"], **start.times("batch", 64).__dict__},
    ]
    found = growth.measure(method, points, 1)
    time, small, large = found["extra"]["points"]
    assert time["temp_bytes"] is None and time["seconds"] == small["seconds"]  # one program
    assert large["seconds"] is None and large["temp_bytes"] > 8 * small["temp_bytes"]
    assert [p["size"] for p in found["extra"]["points"]] == [2, 4, 256]
    assert found["parameters"] == 64
    assert found["extra"]["variance"] == 0
    if method != "projected-forward":
        assert found["gradient_error"] < 1e-5


def test_the_network_is_as_it_says():
    """x ↦ LeakyReLU(x Q W), written out."""
    params, (x, q), target = growth.arguments(Size(3, 6, 2, 5))
    y = x
    for blocks in params["layers"]:
        y = jax.nn.leaky_relu(y @ q @ jax.scipy.linalg.block_diag(*blocks), growth.SLOPE)
    expected = float(((y - target) ** 2).mean())
    assert float(growth.loss(params, (x, q), target)) == pytest.approx(expected, rel=1e-5)


def test_a_refusal_is_a_result(monkeypatch):
    from moonwalk.errors import MoonwalkError

    def refuse(*_):
        raise MoonwalkError("not this one")

    monkeypatch.setattr(methods, "differentiate", refuse)
    point = {"axis": "depth", "what": ["time"], **Size(2, 8, 4, 4).__dict__}
    found = growth.measure("reversible", [point], 1)
    assert found["status"] == "refused" and found["message"] == "not this one"


@pytest.mark.parametrize("method", some(ALL, ["moonwalk", "reversible"]))
def test_columns_are_the_papers(method):
    _, forward, submersive = table1.COLUMNS[method]
    found = properties.forward(method)
    assert found["forward"] is forward
    if not forward:
        assert properties.NO_REVERSE in found["forward_why"]
    elif method != "projected-forward":
        assert float(found["forward_why"].removeprefix("off by ")) < 1e-5
    found = properties.submersive(method)
    assert found["submersive"] is submersive
    if method == "reversible":
        assert "cannot be inverted" in found["submersive_why"]
    if method in properties.WALKS:
        assert re.fullmatch(r"off by \de-0\d, \d+ blocks walked", found["submersive_why"])


def test_a_gradient_that_was_not_walked_for_shows_nothing(monkeypatch):
    monkeypatch.setattr(properties, "WIDTHS", (16, 8))  # too little to be worth a walk
    found = properties.submersive("moonwalk")
    assert found["submersive"] is False and "0 blocks walked" in found["submersive_why"]


@pytest.mark.slow
def test_the_variance_of_an_estimate():
    found = properties.variance(keys=2000)
    assert found["variance"] == pytest.approx(found["variance_parameters"] + 1, rel=0.25)
    assert found["bias"] < 3 * math.sqrt(found["variance"] / 2000)


def test_what_phase_one_keeps():
    task = Task("table1", "dense", "moonwalk", "abs", depth=8, width=32, batch=256)
    found = phase_one.residuals(task)
    state = 256 * 32 * 4
    assert found["m_theta_bytes"] == 8 * state
    # a bit per entry of each layer, and the head's number per entry
    assert found["m_x_bytes"] == 8 * state // 32 + state
    assert found["backprop_bytes"] >= 8 * state


def test_phase_one_of_maxmin_is_a_bit_per_pair():
    task = Task("table1", "dense", "moonwalk", "maxmin", depth=8, width=32, batch=256)
    state = 256 * 32 * 4
    assert phase_one.residuals(task)["m_x_bytes"] == 8 * state // 64 + state


@pytest.mark.slow
def test_ratios_are_what_they_say():
    for ratio, (layers, smooths) in phase_one.RATIOS.items():
        kept = smooths * 32 if smooths else 1  # bits per entry
        assert ratio == layers * 32 / kept
    deep = [phase_one.at_ratio(r, "moonwalk-as-printed", 64, 8, 2**14) for r in (0.25, 1.0, 4.0, 32.0)]
    assert deep == sorted(deep, reverse=True) and deep[0] > 10 * deep[-1]


# --- tables -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tables():
    return {t.title: t for t in table1.summary(samples.table1()["records"])}


def column(table, name):
    return {row[0]: row[list(table.columns).index(name)] for row in table.rows}


def test_memory_exponents_and_verdicts(tables):
    found = column(tables["Memory: growth exponents beside the paper's"], "in L")
    assert found["backprop"] == "1.00 same"
    assert found["moonwalk"] == "0.90 same"
    assert found["projected-forward"] == "0.60 more than 0"


def test_time_exponents_and_verdicts(tables):
    table = tables["Time: growth exponents beside the paper's"]
    assert column(table, "in L")["forward"] == "2.00 same"
    assert column(table, "in L")["moonwalk-checkpoint"] == "1.50 more than 1"
    assert column(table, "in n, d = n²")["backprop"] == "2.00 less than 3"
    assert any("takes d = n²" in note for note in table.notes)  # why


def test_other_columns(tables):
    table = tables["The other columns"]
    assert column(table, "variance")["backprop"] == "as the paper: none"
    assert column(table, "variance")["projected-forward"] == "as the paper: 34 ‖g‖²"
    assert any("(D + 1) ‖g‖² = 33 ‖g‖² is expected" in note for note in table.notes)
    assert column(table, "submersive")["reversible"] == "as the paper: no, refused"


def test_columns_unlike_the_papers():
    result = samples.table1()
    result["records"][0]["extra"]["forward"] = True
    table = next(t for t in table1.summary(result["records"]) if t.title == "The other columns")
    assert column(table, "forward only")["backprop"] == "unlike the paper: yes, the paper: no"


def test_cells_that_were_not_measured():
    result = samples.table1()
    result["records"][4] |= {"status": "refused", "message": "no"}
    first = table1.summary(result["records"])[0]
    assert column(first, "in L")["reversible"] == "not measured: refused"


def test_phase_one_beside_backprop(tables):
    verdicts = [row[-1] for row in tables["What Phase I keeps"].rows]
    assert verdicts == [
        "less: 1/32.0",
        "as the paper: 1/2.5",
        "more: 1/1.0",
    ]


def test_crossovers(tables):
    rows = [row[1] for row in tables["Where Moonwalk and checkpointing cross"].rows]
    assert "about 4,096" in rows
    assert "none from 4 to 16: Moonwalk is less" in rows


def test_expected_crossovers_are_where_the_orders_are_equal():
    walk = lambda depth, r: depth / r + 1
    checkpointed = lambda depth, r: 2 * math.sqrt((1 + 1 / r) * depth)
    depth = table1._expected("depth", 64)
    assert depth > 1000 and walk(depth, 32) == pytest.approx(checkpointed(depth, 32))
    r = table1._expected("ratio", 64)
    assert walk(64, r) == pytest.approx(checkpointed(64, r))


def test_no_records():
    assert table1.summary([]) == []
