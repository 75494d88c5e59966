"""Measurements side by side: they compile together, and run alone."""

import subprocess
import sys
import time

from bench import samples

from moonwalk.lab.bench import runner, turns
from moonwalk.lab.bench.store import Store
from moonwalk.lab.bench.tasks import Task, record

HOLD = """
import pathlib, sys, time
from moonwalk.lab.bench import turns
folder, what, log = map(str, sys.argv[1:])
with getattr(turns, what)(pathlib.Path(folder)):
    with open(log, "a") as file:
        file.write(f"{what} in\\n")
    time.sleep(0.5)
    with open(log, "a") as file:
        file.write(f"{what} out\\n")
"""


def test_processes_compile_together_and_run_alone(tmp_path):
    log = tmp_path / "log"
    kinds = ["compiling", "compiling", "running", "running"]
    found = [
        subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path), kind, str(log)]) for kind in kinds
    ]
    assert [p.wait(60) for p in found] == [0] * 4
    lines = log.read_text().splitlines()
    inside = set()
    for i, line in enumerate(lines):
        what, end = line.split()
        if end == "in":
            assert "running" not in inside, lines
            assert what == "compiling" or not inside, lines
            inside.add(what)
        else:
            others = lines[i + 1 :].count("compiling out")
            inside -= {what} if what == "running" or others != 1 else set()
    assert lines.count("running in") == lines.count("compiling in") == 2


def test_without_a_folder_nobody_waits():
    with turns.running(None), turns.running(None), turns.compiling(None):
        pass


def test_several_jobs_leave_a_record_for_every_task(tmp_path, monkeypatch):
    under_way, most = 0, 0

    def measure(task, platform, cache, timeout):
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        time.sleep(0.05)
        under_way -= 1
        return record(task, temp_bytes=task.depth)

    monkeypatch.setattr(runner, "in_process", measure)
    store = Store(tmp_path, "zoo", samples.HEADER)
    told = []
    each = runner.Runner(store, "cpu", jobs=4, on_record=lambda found, is_new: told.append(is_new))
    tasks = [Task("zoo", "gpt", "backprop", depth=i) for i in range(12)]
    each.run_all(tasks)
    assert 1 < most <= 4
    assert sorted(r["temp_bytes"] for r in store.records) == list(range(12))
    assert told == [True] * 12
    each.run_all(tasks)  # all are known
    assert len(store.records) == 12
