"""The time of vijps: every layer's is right, and the table says what it costs."""

import pytest
import samples
from marks import some

from moonwalk.lab.bench import operators
from moonwalk.lab.bench.experiments import vijp
from moonwalk.lab.bench.tasks import Request, Task

SMALL = operators.Sizes(rows=6, features=8, images=2, side=8, channels=4, length=12)
NAMES = some(operators.LAYERS, ["dense, triangular", "convolution, identity pivot"])


@pytest.mark.parametrize("name", NAMES)
def test_layers_are_recovered(name):
    found = operators.measure(name, SMALL, 1, whole=name == operators.QUICK[1])
    assert found["error"] < 1e-5
    assert found["vjp"]["median"] > 0 and found["vijp"]["median"] > 0
    assert ("whole_vijp" in found) == (name == operators.QUICK[1])


def test_tasks():
    (quick,) = vijp.tasks(Request("cpu", quick=True))
    assert quick.settings["cases"] == list(operators.QUICK)
    for platform in ("cpu", "gpu"):
        full = vijp.tasks(Request(platform))
        assert sorted(n for t in full for n in t.settings["cases"]) == sorted(operators.LAYERS)
        assert len({t.key for t in full}) == len(full)


def test_a_task_is_measured():
    (quick,) = vijp.tasks(Request("cpu", quick=True))
    task = Task("vijp", "all", "vijp", settings=quick.settings | {"cases": ["|x|"], "repeats": 1})
    (case,) = vijp.measure(task)["extra"]["cases"]
    assert case["name"] == "|x|" and case["rule"] == "pointwise"


def test_unknown_layers_name_the_nearest():
    with pytest.raises(ValueError, match="unknown layer 'MinMax'; did you mean 'MaxMin'"):
        operators.measure("MinMax", SMALL, 1, whole=False)


def test_the_table():
    (table,) = vijp.summary(samples.vijp()["records"])
    verdicts = {row[0]: row[-1] for row in table.rows}
    assert verdicts["dense, orthogonal"] == "none"
    assert verdicts["causal convolution"] == "more"
    assert verdicts["an unlucky one"] == "WRONG"
    assert vijp.summary([samples.record("vijp", "vijp", status="timeout")]) == []
