"""One measurement in one process: `python -m moonwalk.lab.bench.worker`.

Reads {"task": …, "cache": folder or null} as JSON from standard input, and prints the record as JSON on
the last line of standard output. With `--about` it prints what the device and the versions are.
"""

from __future__ import annotations

import json
import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import jax

from ... import _jax
from . import experiments, measuring
from .tasks import Record, Task, record


def about() -> dict[str, Any]:
    """Device and versions, for the header of a file."""
    device = jax.devices()[0]
    try:
        own = version("moonwalk-jax")
    except PackageNotFoundError:
        own = "0.0.0+source"
    return {
        "device": device.device_kind,
        "platform": "gpu" if device.platform in ("gpu", "cuda", "rocm") else device.platform,
        "jax": jax.__version__,
        "jaxlib": version("jaxlib"),
        "moonwalk": own,
        "python": platform.python_version(),
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
    }


def measure(task: Task, cache: Path | None) -> Record:
    """The record of a task, whatever happens."""
    try:
        own = getattr(experiments.load(task.experiment), "measure", None)
        return record(task, **(own(task) if own else measuring.measure(task, cache)))
    except Exception as error:
        return record(task, **measuring.failure(error))


def main(arguments: list[str]) -> None:
    if arguments == ["--about"]:
        print(json.dumps(about()))
        return
    asked = json.loads(sys.stdin.read())
    cache = Path(asked["cache"]) if asked.get("cache") else None
    with _jax.keeping_barriers():
        print(json.dumps(measure(Task.from_dict(asked["task"]), cache)))


if __name__ == "__main__":
    main(sys.argv[1:])
