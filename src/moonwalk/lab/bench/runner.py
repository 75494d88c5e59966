"""Runs tasks, each in a fresh process; every outcome becomes a record."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from . import experiments
from .store import Store
from .tasks import Record, Request, Task, record

TIMEOUT = 600.0
_AGAIN = ("error", "timeout")  # what `retry` measures once more
_PACKAGE = Path(__file__).resolve().parents[3]  # the folder that has the package


class Runner:
    """Runs tasks whose records a store does not have yet.

    **Arguments:**

    - `store`
    - `platform`: "cpu" or "gpu".
    - `timeout`: seconds for one task.
    - `retry`: tasks that failed or took too long are measured again.
    - `jobs`: how many tasks may be under way at once; they compile together and run one at a time
        (`turns`).
    - `on_start`, `on_record`: called before each task, and with its record afterwards; `is_new` says
        whether it was measured just now.
    """

    def __init__(
        self,
        store: Store,
        platform: str,
        *,
        timeout: float = TIMEOUT,
        retry: bool = False,
        jobs: int = 1,
        on_start: Callable[[Task], None] = lambda task: None,
        on_record: Callable[[Record, bool], None] = lambda record, is_new: None,
    ):
        self.store, self.platform, self.timeout, self.retry = store, platform, timeout, retry
        self.jobs, self.on_start, self.on_record = jobs, on_start, on_record
        self.cache = store.path.parent / ".cache"
        self._told: set[str] = set()
        self._one = threading.Lock()  # for the store and for what reports

    def run(self, task: Task) -> Record:
        """The record of a task, measured if it is not in the store."""
        with self._one:
            found = self.store.find(task)
            failed = found is not None and found["status"] in _AGAIN and task.key not in self._told
            if found is not None and not (failed and self.retry):
                self._tell(task, found, is_new=False)
                return found
            self.on_start(task)
        patience = self.timeout * self.jobs  # in which others may have their turn
        found = in_process(task, self.platform, self.cache, patience)
        with self._one:
            self.store.add(found)
            self._tell(task, found, is_new=True)
        return found

    def run_all(self, tasks: Sequence[Task]) -> None:
        """All of these, `jobs` at once.

        The next ones begin when these are done: one that compiles would keep the others from running.
        """
        if self.jobs == 1:
            for task in tasks:
                self.run(task)
            return
        with ThreadPoolExecutor(self.jobs) as pool:
            for first in range(0, len(tasks), self.jobs):
                list(pool.map(self.run, tasks[first : first + self.jobs]))

    def _tell(self, task: Task, found: Record, is_new: bool) -> None:
        """Report a record once per task, because a search asks again for records of earlier tasks."""
        if task.key not in self._told:
            self._told.add(task.key)
            self.on_record(found, is_new)


def run(name: str, request: Request, runner: Runner) -> None:
    """Run an experiment: its tasks and its search."""
    module = experiments.load(name)
    runner.run_all(planned(module, request))
    if hasattr(module, "search"):
        module.search(request, runner.run)


def planned(module: Any, request: Request) -> list[Task]:
    """The tasks that are known beforehand."""
    return list(filter(request.wants, module.tasks(request)))


def in_process(task: Task, platform: str, cache: Path | None, timeout: float = TIMEOUT) -> Record:
    """A task in a process of its own."""
    asked = json.dumps({"task": task.to_dict(), "cache": cache and str(cache.resolve())})
    try:
        done = _worker([], asked, platform, timeout)
    except subprocess.TimeoutExpired:
        return record(task, status="timeout", message=f"not done after {timeout:g} s")
    lines = done.stdout.strip().splitlines()
    if done.returncode == 0 and lines:
        return json.loads(lines[-1])
    last = "\n".join(done.stderr.strip().splitlines()[-5:])
    if done.returncode < 0:
        name = signal.Signals(-done.returncode).name
        # A system that is out of memory kills a process with this signal, without a message.
        killed = -done.returncode == signal.SIGKILL
        message = f"the process was ended by {name}" + (
            ": too little memory?" if killed else f": {last}"
        )
        return record(task, status="oom" if killed else "error", message=message)
    no_room = any(word in done.stderr for word in ("RESOURCE_EXHAUSTED", "Out of memory"))
    message = f"the process ended with code {done.returncode}: {last}"
    return record(task, status="oom" if no_room else "error", message=message)


def _worker(
    arguments: list[str], asked: str, platform: str | None, timeout: float
) -> subprocess.CompletedProcess[str]:
    """Environment of a worker: float32 unless a measurement says otherwise, and this very package."""
    env = {k: v for k, v in os.environ.items() if k != "JAX_ENABLE_X64"}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, (str(_PACKAGE), env.get("PYTHONPATH"))))
    env.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # several workers may share a device
    if platform == "cpu":
        env["JAX_PLATFORMS"] = "cpu"
    command = [sys.executable, "-m", f"{__package__}.worker", *arguments]
    return subprocess.run(
        command, input=asked, env=env, capture_output=True, text=True, timeout=timeout, check=False
    )


def header(device: str | None, request_quick: bool, commit: str = "") -> dict[str, Any]:
    """Device and versions, asked of a process of its own: this one must not take the GPU's memory.

    `device`: "cpu", "gpu", or None for a GPU where there is one.
    """
    done = _worker(["--about"], "", device, 120.0)
    if done.returncode:
        raise RuntimeError(f"JAX does not start: {done.stderr.strip().splitlines()[-1:]}")
    found = json.loads(done.stdout.strip().splitlines()[-1])
    if device == "gpu" and found["platform"] != "gpu":
        raise ValueError(
            f"--device gpu, but JAX finds only {found['device']}; is its CUDA package there?"
        )
    date = datetime.now(UTC).isoformat(timespec="seconds")
    return {**found, "commit": commit or current_commit(), "date": date, "quick": request_quick}


def current_commit() -> str:
    """The commit of the package's checkout; empty if it is not in one."""
    command = ["git", "-C", str(_PACKAGE), "rev-parse", "--short", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def settings(request: Request) -> dict[str, Any]:
    """The settings of a request that the header records."""
    return asdict(request)
