"""What certificates cost, where time is bound by memory traffic and their passes weigh most.

With `on_inexact="ignore"` cotangents are still rescaled but nothing is compared, so the difference to
"nan" is the price of looking, and that between "nan" and "raise" the price of an error at run time. The
programs of a network run in turns in one process; a record's `extra` has them as `programs`.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import jax

from .... import gradient
from ....errors import PlanWarning
from ....planning.methods import ON_INEXACT, Moonwalk
from .. import measuring, networks
from ..tasks import Record, Request, Table, Task

TITLE = "What certificates cost"
PROGRAMS = ("backprop", *reversed(ON_INEXACT))
NETWORKS = (("dense", "abs"), ("dense", "abs, looped"), ("dense", "abs, first"), ("isometric", ""))


def tasks(request: Request) -> list[Task]:
    depth, width, rows, kinds = 64, 256, 2**18 if request.on_gpu else 2**12, NETWORKS
    if request.quick:
        depth, width, rows, kinds = 16, 16, 256, NETWORKS[:1]
    settings = {"repeats": 3 if request.quick else 15, "seed": request.seed}
    found = []
    for network, variant in kinds:
        length, batch = (rows // 128, 128) if network == "isometric" else (0, rows)
        found.append(
            Task(
                "certificates",
                network,
                "moonwalk",
                variant,
                depth,
                width,
                length,
                batch,
                settings=settings,
            )
        )
    return found


def measure(task: Task) -> dict[str, Any]:
    warnings.simplefilter("ignore", PlanWarning)
    network = networks.make(task)
    args = network.arguments(task.settings["seed"])
    programs = {"backprop": measuring.compiled(jax.value_and_grad(network.loss), *args)}
    for action in ON_INEXACT:
        method = Moonwalk(on_inexact=action, walk="always")
        fun = gradient.value_and_grad(network.loss, method=method)
        programs[action] = measuring.compiled(fun, *args)
    gradients = {name: jax.device_get(program(*args)[1]) for name, program in programs.items()}
    times = measuring.interleaved(programs, args, task.settings["repeats"])
    found = {
        name: {"temp_bytes": measuring.memory(programs[name])["temp_bytes"], "seconds": times[name]}
        for name in PROGRAMS
    }
    return {
        "temp_bytes": found["raise"]["temp_bytes"],
        "seconds": found["raise"]["seconds"],
        "gradient_error": measuring.error(gradients["raise"], gradients["backprop"]),
        "reference": "backprop, same precision",
        "extra": {"programs": found},
    }


def summary(records: Sequence[Record]) -> list[Table]:
    tables = []
    for record in records:
        if record["status"] != "ok":
            continue
        task, programs = record["task"], record["extra"]["programs"]
        name = ", ".join(filter(None, (task["network"], task["variant"])))
        plain = programs["ignore"]["seconds"]["median"]
        rows = [
            [p, found["temp_bytes"], found["seconds"]["median"], found["seconds"]["median"] / plain]
            for p, found in ((p, programs[p]) for p in PROGRAMS)
        ]
        columns = ("on_inexact", "temporaries, bytes", "seconds", "over ignore")
        tables.append(Table(f"{name}, {task['depth']} layers", columns, rows))
    return tables
