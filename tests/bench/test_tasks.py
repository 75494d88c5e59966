"""Tasks, records and tables: plain data with a way through JSON."""

import json

import pytest

from moonwalk.lab.bench import Request, Table, Task, experiments
from moonwalk.lab.bench.tasks import record

TASK = Task("fig2", "pyramid", "moonwalk", "identity", depth=2, width=4, settings={"repeats": 3})


def test_a_task_survives_json():
    again = Task.from_dict(json.loads(json.dumps(TASK.to_dict())))
    assert again == TASK
    assert again.key == TASK.key
    assert TASK.with_settings(run=False).key != TASK.key
    assert str(TASK) == "fig2: pyramid (identity), moonwalk, depth 2, width 4"


def test_a_record_has_all_fields_and_no_others():
    found = record(TASK, temp_bytes=3)
    assert found["status"] == "ok" and found["temp_bytes"] == 3 and found["gradient_error"] is None
    with pytest.raises(ValueError, match="a record has no speed; other figures go to extra"):
        record(TASK, speed=1)
    with pytest.raises(
        ValueError, match="status is one of ok, oom, refused, timeout, error, got 'fine'"
    ):
        record(TASK, status="fine")


def test_tables_are_rectangular():
    with pytest.raises(ValueError, match="table 'memory': a row of 1, 2 columns"):
        Table("memory", ("a", "b"), [[1]])


def test_unknown_experiments_suggest_the_nearest():
    with pytest.raises(ValueError, match="unknown experiment 'fig22'; did you mean 'fig2'"):
        experiments.load("fig22")


def test_a_request_is_for_a_cpu_by_default():
    assert not Request().on_gpu and Request("gpu").on_gpu
