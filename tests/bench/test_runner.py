"""Fresh processes, and what becomes of them."""

import json
import signal
import subprocess

import pytest

from moonwalk.lab.bench import Request, Task, runner
from moonwalk.lab.bench.store import Store
from moonwalk.lab.bench.tasks import record

TASK = Task("pareto", "dense", "backprop", "abs", depth=2, width=4, batch=4, settings={"repeats": 1})
HEADER = dict(platform="cpu", device="cpu", jax="1", jaxlib="1", quick=True, commit="a")


@pytest.fixture
def ends(monkeypatch):
    """Pretend that a process ended like this."""

    def pretend(code, out="", err=""):
        done = subprocess.CompletedProcess([], code, out, err)
        monkeypatch.setattr(runner, "_worker", lambda *_: done)

    return pretend


@pytest.mark.slow  # `test_command.py` has another
def test_a_measurement_in_a_process_of_its_own(tmp_path):
    found = runner.in_process(TASK.with_settings(reference="float64"), "cpu", tmp_path)
    assert found["status"] == "ok", found["message"]
    assert found["temp_bytes"] > 0 and found["seconds"]["runs"] == 1
    assert found["gradient_error"] < 1e-5 and list(tmp_path.glob("*.npz"))


def test_time_that_runs_out():
    found = runner.in_process(TASK, "cpu", None, timeout=0.05)
    assert (found["status"], found["message"]) == ("timeout", "not done after 0.05 s")


@pytest.mark.parametrize(
    ("code", "err", "status", "said"),
    [
        (-signal.SIGKILL, "", "oom", "the process was ended by SIGKILL: too little memory?"),
        (-signal.SIGSEGV, "a\nb", "error", "the process was ended by SIGSEGV: a\nb"),
        (1, "RESOURCE_EXHAUSTED: 3 GiB", "oom", "the process ended with code 1: RESOURCE_EXHAUSTED"),
        (1, "ImportError: x", "error", "the process ended with code 1: ImportError: x"),
        (0, "", "error", "the process ended with code 0: "),
    ],
)
def test_processes_that_end_badly_are_results(ends, code, err, status, said):
    ends(code, err=err)
    found = runner.in_process(TASK, "cpu", None)
    assert found["status"] == status and found["message"].startswith(said)
    assert found["task"] == TASK.to_dict()


def test_a_record_is_the_last_line(ends):
    ends(0, "some library says hello\n" + json.dumps(record(TASK, temp_bytes=5)) + "\n")
    assert runner.in_process(TASK, "cpu", None)["temp_bytes"] == 5


def test_a_process_says_what_happened_to_its_task():
    from moonwalk.lab.bench import worker

    wrong = worker.measure(Task("pareto", "dens", "backprop"), None)
    assert wrong["status"] == "error" and "did you mean 'dense'" in wrong["message"]
    assert worker.about()["platform"] == "cpu"


def test_what_is_in_the_store_is_not_measured_again(tmp_path, monkeypatch):
    measured, told = [], []

    def measure(task, *_):
        measured.append(task)
        return record(task, status="error" if len(measured) == 1 else "ok")

    monkeypatch.setattr(runner, "in_process", measure)

    def new(**options):
        store = Store(tmp_path, "pareto", HEADER)
        return runner.Runner(store, "cpu", on_record=lambda r, n: told.append(n), **options)

    assert new().run(TASK)["status"] == "error"
    assert new().run(TASK)["status"] == "error" and len(measured) == 1
    assert new(retry=True).run(TASK)["status"] == "ok" and len(measured) == 2
    last = new(retry=True)
    assert last.run(TASK) == last.run(TASK) and len(measured) == 2
    assert told == [True, False, True, False]


def test_an_interrupted_search_goes_on(tmp_path, monkeypatch):
    def measure(task, *_):
        measured.append(task)
        if len(measured) == 5:
            raise KeyboardInterrupt
        return record(task, extra={"largest": 8} if "search" in task.settings else {})

    monkeypatch.setattr(runner, "in_process", measure)
    request = Request(quick=True, only=("moonwalk", "backprop", "checkpoint"))
    measured: list[Task] = []
    with pytest.raises(KeyboardInterrupt):
        runner.run("depth", request, runner.Runner(Store(tmp_path, "depth", HEADER), "cpu"))
    before = len(Store(tmp_path, "depth", HEADER).records)
    assert before == 4
    measured = [TASK] * 10
    runner.run("depth", request, runner.Runner(Store(tmp_path, "depth", HEADER), "cpu"))
    assert len(measured) == 12
    assert [t.depth for t in measured[10:]] == [8, 8]


def test_no_gpu(ends):
    ends(0, json.dumps({"platform": "cpu", "device": "cpu"}))
    with pytest.raises(
        ValueError, match="--device gpu, but JAX finds only cpu; is its CUDA package there"
    ):
        runner.header("gpu", False)
    assert runner.header("cpu", True, "abc")["commit"] == "abc"
