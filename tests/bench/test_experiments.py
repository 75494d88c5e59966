"""The experiments: names that exist, the paper's sizes on a GPU, tables of what was found."""

import dataclasses

import pytest

from moonwalk.lab.bench import Request, Task, experiments, methods, networks
from moonwalk.lab.bench.tasks import record

OWN = ("fig2", "fig3", "fig4", "depth", "batch", "pareto")
OWN += ("engine", "checkpoint", "segments", "fragments", "reversible")
OTHERS = ("lowering", "certificates", "fused", "isometric")  # which measure in their own way
REQUESTS = [Request(platform, quick) for platform in ("cpu", "gpu") for quick in (False, True)]


@pytest.mark.parametrize("name", OWN)
@pytest.mark.parametrize("request_", REQUESTS, ids=lambda r: f"{r.platform}{'-quick' * r.quick}")
def test_tasks_name_what_there_is(name, request_):
    tasks = experiments.load(name).tasks(request_)
    assert tasks and len({t.key for t in tasks}) == len(tasks)
    for task in tasks:
        assert task.experiment == name
        if name != "fig4":
            networks.make(dataclasses.replace(task, depth=1, batch=4))
            args = (None, type("Types", (), {"shape": (16,)})(), None)
            if not methods.needs_values(task.method):
                assert methods.differentiate(task.method, lambda *_: None, args)


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("request_", REQUESTS, ids=lambda r: f"{r.platform}{'-quick' * r.quick}")
def test_tasks_differ(name, request_):
    tasks = experiments.load(name).tasks(request_)
    assert tasks and len({t.key for t in tasks}) == len(tasks)
    for task in tasks:
        assert task.experiment == name
        assert name == "isometric" or networks.make(task)


@pytest.mark.parametrize(
    ("name", "sizes"),
    [("fig2", (128, 256, 128)), ("fig3", (256, 2048, 128)), ("depth", (256, 2048, 128))],
)
def test_on_a_gpu_sizes_are_the_papers(name, sizes):
    for task in experiments.load(name).tasks(Request("gpu")):
        assert (task.width, task.length, task.batch) == sizes
        assert task.settings["reference"] == "highest" or name == "depth"


def test_the_papers_depths_spans_and_slopes_are_there():
    fig2 = experiments.load("fig2").tasks(Request("gpu"))
    assert {t.depth for t in fig2} >= {1, 8}
    printed = {t.variant for t in fig2 if t.method == "moonwalk-as-printed"}
    assert printed == {"identity, slope 0.25", *(f"lower, slope {s}" for s in (0.01, 0.1, 0.3))}
    fig3 = experiments.load("fig3").tasks(Request("gpu"))
    assert {f"moonwalk-fragment-{b}" for b in (4, 8, 16)} <= {t.method for t in fig3}
    assert max(t.depth for t in fig3) == 22
    aligned = {t.variant for t in fig3 if t.method.endswith("-aligned")}
    assert aligned == {f"slope {s}" for s in (0.01, 0.1, 0.3)}


def test_skips_are_another_variant():
    tasks = experiments.load("fig2").tasks(Request(residual=True))
    assert {t.variant for t in tasks} == {"identity, slope 0.25, residual"}


@pytest.mark.parametrize("name", ["depth", "batch"])
def test_the_limit_is_the_users(name):
    module = experiments.load(name)
    assert {t.settings["limit_bytes"] for t in module.tasks(Request("gpu"))} == {24 * 10**9}
    assert {t.settings["limit_bytes"] for t in module.tasks(Request(limit_bytes=99))} == {99}


@pytest.mark.parametrize("name", ["depth", "batch"])
def test_what_a_search_finds_is_run(name):
    module, done = experiments.load(name), []

    def run(task):
        size = (
            {"backprop": 12, "moonwalk": task.settings["search"]["most"]}.get(task.method, 0)
            if ("search" in task.settings)
            else None
        )
        found = record(
            task,
            temp_bytes=1,
            argument_bytes=2,
            output_bytes=3,
            gradient_error=1e-3,
            status="oom" if size == 0 else "ok",
            extra={} if size is None else {"largest": size, "most": task.settings["search"]["most"]},
        )
        done.append(found)
        return found

    module.search(Request(), run)
    runs = [r["task"] for r in done if "search" not in r["task"]["settings"]]
    assert {t["method"] for t in runs} == {"backprop", "moonwalk"}
    assert runs[0][name] == 12 and runs[0]["settings"]["reference"] == "float64"
    table = module.summary(done)[0]
    rows = {row[0]: row for row in table.rows}
    assert rows["backprop"][1:3] == [12, 6] and rows["backprop"][-2:] == [1e-3, "exact"]
    assert "as far as was tried" in rows["moonwalk"][1]
    assert rows["checkpoint"][1:] == [0, None, None, None, None, None, "oom"]


def test_tables_show_errors_and_what_failed():
    made = [
        record(
            Task("fig2", "pyramid", "moonwalk-as-printed", "lower, slope 0.01", depth=8),
            temp_bytes=2**20,
            seconds={"median": 1.0, "low": 0.9, "high": 1.2, "runs": 5},
            gradient_error=3e4,
        ),
        record(Task("fig2", "pyramid", "backprop", "identity", depth=8), status="oom"),
    ]
    tables = experiments.load("fig2").summary(made)
    assert [t.title for t in tables] == ["pyramid, lower, slope 0.01", "pyramid, identity"]
    assert tables[0].rows == [["moonwalk-as-printed", 8, "WRONG", 2**20, None, 1.0, 0.9, 1.2, None, 3e4]]
    assert tables[1].rows[0][:3] == ["backprop", 8, "oom"]
    assert experiments.load("pareto").summary(made[::-1])[0].rows[0][0] == "moonwalk-as-printed"


def test_accuracies():
    module = experiments.load("fig4")
    made = [
        record(t, extra={"data": "MNIST-1D", "test_accuracy": a})
        for t, a in zip(module.tasks(Request()), (0.5, 0.6, 0.7, 0.6, 0.6, 0.7), strict=False)
    ]
    (table,) = module.summary(made)
    assert table.title == "conv1d_cnn on MNIST-1D: test accuracy, %"
    assert table.rows[0] == ["free", pytest.approx(55), pytest.approx(50), pytest.approx(60), 2]
    assert "stand-in" in module.TITLE
    images = module.tasks(Request(data="images"))
    assert {t.network for t in images} == {"residual_cnn"} and len(images) == 9


@pytest.mark.slow
def test_the_stand_in_learns():
    module = experiments.load("fig4")
    task = module.tasks(Request(quick=True))[1].with_settings(steps=50)
    found = module.measure(task)["extra"]
    assert [step for step, _ in found["curve"]] == [25, 50]
    assert found["axis"] == "step" and found["test_accuracy"] > 0.15


@pytest.mark.slow
def test_images_are_learned(tmp_path):
    import numpy as np

    from moonwalk import data

    random = np.random.RandomState(0)
    x = random.randint(0, 256, (96, 8, 8, 1)).astype(np.uint8)
    y = (x.reshape(96, -1).mean(1) > 127).astype(np.int32)
    small = data.Dataset("bright", ("no", "yes"), x[:64], y[:64], x[64:], y[64:], (127.0,), (74.0,))
    data.save(tmp_path / "bright.npz", small)
    module = experiments.load("fig4")
    task = module.tasks(Request(quick=True, data=str(tmp_path / "bright.npz")))[0]
    task = dataclasses.replace(task, batch=16).with_settings(examples=[64, 32])
    found = module.measure(task)
    assert found["parameters"] > 0 and found["extra"]["data"] == "bright, first 64 and 32"
    assert [epoch for epoch, _ in found["extra"]["curve"]] == [1, 2]


def test_checkpoints_stand_beside_those_by_hand():
    module = experiments.load("checkpoint")
    made = [
        record(
            task,
            temp_bytes=2**20 if task.method.startswith("jax") else 2**21,
            seconds={"median": 1.0, "low": 1.0, "high": 1.0, "runs": 1},
            gradient_error=0.0,
        )
        for task in module.tasks(Request(quick=True))
    ]
    tables = module.summary(made)
    assert [t.title for t in tables][:2] == ["dense, relu, 16 layers", "dense, relu, looped, 16 layers"]
    assert tables[0].rows[0] == ["block", "exact", 2**21, 2**20, 2.0, 1.0, 1.0, 1.0]
    assert tables[0].notes == ["Backpropagation: 2,097,152 bytes, 1e+03 ms."]
    failed = [record(t, status="oom") for t in module.tasks(Request(quick=True))]
    assert module.summary(failed)[0].rows[0] == ["block", "oom", *[None] * 6]


def test_what_one_more_layer_costs():
    module = experiments.load("engine")
    tasks = [
        t for t in module.tasks(Request()) if t.variant == "abs" and not t.settings.get("run", True)
    ]
    state = 4 * 256 * 2**14
    made = [record(t, temp_bytes=state + t.depth * state // 32) for t in tasks]
    (table,) = module.summary(made)
    assert table.notes == ["One more layer costs Moonwalk 0.031 of a layer's output."]


def test_lowering_is_timed_and_traces_are_counted():
    module = experiments.load("lowering")
    task = next(t for t in module.tasks(Request(quick=True)) if t.variant == "relu, looped")
    found = module.measure(task)
    assert found["parameters"] == 4 * 8 * 8 and found["extra"]["plan_seconds"] > 0
    for way in module.WAYS:
        assert found["extra"]["ways"][way]["seconds"]["median"] > 0
        assert found["extra"]["ways"][way]["traces"] >= 1
    (table,) = module.summary([record(task, **found), record(task, status="timeout")])
    assert table.rows[0][0] == "dense, relu, looped" and table.rows[0][4] > 0
    assert table.rows[1][2] == "timeout"


def test_what_a_step_holds():
    module = experiments.load("fused")
    made = [record(t, **module.measure(t)) for t in module.tasks(Request(quick=True))]
    (table,) = module.summary(made)
    assert table.rows[0][:3] == ["abs", "adam", 8 * 64 * 64 * 4]
    assert table.rows[0][3] < table.rows[0][4]


@pytest.mark.slow
def test_certificates_are_timed_in_turns():
    module = experiments.load("certificates")
    (task,) = module.tasks(Request(quick=True))
    found = module.measure(task)
    assert set(found["extra"]["programs"]) == {"backprop", "ignore", "nan", "raise"}
    assert found["gradient_error"] < 1e-4
    (table,) = module.summary([record(task, **found)])
    assert [row[0] for row in table.rows] == list(module.PROGRAMS)


@pytest.mark.slow
def test_isometric_networks_are_trained_by_both():
    module = experiments.load("isometric")
    made = [record(t, **module.measure(t)) for t in module.tasks(Request(quick=True))]
    (table,) = module.summary(made)
    assert [row[0] for row in table.rows] == ["moonwalk", "backprop"] and table.rows[0][4] == 1
    twice = [
        record(t, extra={"test_accuracy": 0.5 + 0.01 * (t.method == "moonwalk")})
        for t in module.tasks(Request())
        if t.depth == 100
    ]
    assert module.summary(twice)[0].notes == [
        "Moonwalk ends +1.00 ± 0.00 points beside backpropagation."
    ]
