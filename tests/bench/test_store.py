"""Records on disk: whole after every record, continued, of one device."""

import csv
import json

import pytest

from moonwalk.lab.bench import Task, store
from moonwalk.lab.bench.tasks import record

HEADER = {"platform": "cpu", "device": "cpu", "jax": "1", "jaxlib": "1", "quick": True, "commit": "a"}
TASK = Task("fig2", "pyramid", "moonwalk", depth=2)
FOUND = record(TASK, temp_bytes=7, seconds={"median": 2.0, "low": 1.0, "high": 3.0, "runs": 3})


def test_what_is_added_is_found_by_the_next(tmp_path):
    first = store.Store(tmp_path / "new", "fig2", HEADER)
    assert first.find(TASK) is None
    first.add(FOUND)
    again = store.Store(tmp_path / "new", "fig2", HEADER)
    assert again.find(TASK) == FOUND
    again.add(record(TASK, status="oom"))
    assert [r["status"] for r in again.records] == ["oom"]
    data = json.loads((tmp_path / "new" / "fig2.json").read_text())
    assert data["experiment"] == "fig2" and data["header"] == HEADER and data["records"] == again.records
    assert not list((tmp_path / "new").glob(".*"))


def test_the_table(tmp_path):
    store.Store(tmp_path, "fig2", HEADER).add(FOUND)
    (row,) = csv.DictReader((tmp_path / "fig2.csv").read_text().splitlines())
    assert (row["method"], row["depth"], row["temp_bytes"], row["seconds"]) == (
        "moonwalk",
        "2",
        "7",
        "2.0",
    )
    assert row["gradient_error"] == ""


def test_a_file_is_of_one_device(tmp_path):
    store.Store(tmp_path, "fig2", HEADER).add(FOUND)
    other = {**HEADER, "device": "NVIDIA H200"}
    with pytest.raises(
        ValueError, match="device = 'cpu', not 'NVIDIA H200'; name another --out, or begin"
    ):
        store.Store(tmp_path, "fig2", other)
    assert store.Store(tmp_path, "fig2", other, fresh=True).records == []


def test_records_of_another_commit_say_so(tmp_path):
    store.Store(tmp_path, "fig2", HEADER).add(FOUND)
    later = store.Store(tmp_path, "fig2", {**HEADER, "commit": "b"})
    later.add(record(Task("fig2", "pyramid", "backprop")))
    assert later.header["commit"] == "a"
    assert [r["extra"] for r in later.records] == [{}, {"commit": "b"}]


def test_what_is_no_file_of_the_bench_is_refused(tmp_path):
    path = tmp_path / "fig2.json"
    path.write_text("{")
    with pytest.raises(ValueError, match="is not JSON .*; remove it, or name another folder"):
        store.load(path)
    path.write_text('{"records": []}')
    with pytest.raises(ValueError, match="has no experiment, header: it is no file of `moonwalk bench`"):
        store.load(path)
