"""How long it takes to trace and lower a gradient: what a user waits for before a compiler begins.

`jax.jit(fun).trace(*types).lower()` of `jax.value_and_grad(loss)`, of `moonwalk.value_and_grad(loss)`,
and of the latter with a plan that was made beforehand, in one process, in turns. Nothing is compiled or
run, so networks have their full size on any machine. Caches are cleared before each: every time is that
of a first call. A record's `extra` has the `ways`, each with its `seconds` and `traces` (how often it
calls the loss), and the `plan_seconds` that planning alone takes. Seconds are CPU time of the process:
one thread does all the work, and other load on the machine does not count.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax

from .... import gradient, preview
from ....errors import PlanWarning
from .. import measuring, networks
from ..tasks import Record, Request, Table, Task

TITLE = "The time to trace and lower a gradient, beside jax.value_and_grad's"
WAYS = ("jax", "moonwalk", "planned")
_PATIENCE = 90.0  # seconds after which no further round is begun


def tasks(request: Request) -> list[Task]:
    size = "tiny" if request.quick else "full"
    word = "tiny" if request.quick else "bfloat16"
    found: list[tuple[str, str, dict[str, Any]]] = [
        ("resnet", word, networks.SIZES["resnet"][size]),
        ("gpt", word, networks.SIZES["gpt"][size]),
        ("gpt", f"scanned, {word}", networks.SIZES["gpt"][size]),
        ("unet", word, networks.SIZES["unet"][size]),
    ]
    dense = {"depth": 4, "width": 8, "batch": 8} if request.quick else {}
    dense = {"depth": 64, "width": 256, "batch": 2**14} | dense
    found += [("dense", v, dense) for v in ("relu, looped", "relu", "abs, looped", "abs")]
    found = found[1:6] if request.quick else found
    repeats = 1 if request.quick else 3
    return [
        Task("lowering", network, "value_and_grad", variant, settings={"repeats": repeats}, **sizes)
        for network, variant, sizes in found
    ]


def measure(task: Task) -> dict[str, Any]:
    warnings.simplefilter("ignore", PlanWarning)
    network = networks.make(task)
    types = network.types()
    jax.jit(jax.value_and_grad(network.loss)).trace(*types).lower()  # triggers imports and lazy loading
    begun = time.process_time()
    plan = preview.plan(network.loss, *types)
    plan_seconds = time.process_time() - begun
    make: dict[str, Callable[[Any], Any]] = {
        "jax": jax.value_and_grad,
        "moonwalk": gradient.value_and_grad,
        "planned": lambda loss: gradient.value_and_grad(loss, method=plan),
    }
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    traces, begun = {}, time.process_time()
    for number in range(task.settings["repeats"]):
        if number and time.process_time() - begun > _PATIENCE:
            break
        for way in WAYS:
            took, traces[way] = lowered(make[way], network.loss, types)
            seconds[way].append(took)
    ways = {w: {"seconds": measuring.spread(seconds[w]), "traces": traces[w]} for w in WAYS}
    return {
        "parameters": sum(a.size for a in jax.tree.leaves(types[0])),
        "extra": {"ways": ways, "plan_seconds": plan_seconds},
    }


def lowered(make: Callable[[Any], Any], loss: Any, types: Any) -> tuple[float, int]:
    """(seconds, how often the loss was called) for one call with empty caches."""
    calls = 0

    def counted(params: Any, x: Any, target: Any) -> Any:
        nonlocal calls
        calls += 1
        return loss(params, x, target)

    jax.clear_caches()
    begun = time.process_time()
    jax.jit(make(counted)).trace(*types).lower()
    return time.process_time() - begun, calls


def summary(records: Sequence[Record]) -> list[Table]:
    columns = ("network", "layers", "JAX, s", "Moonwalk, s", "ratio", "planned, s", "ratio planned")
    columns += ("plan alone, s", "traces by JAX", "by Moonwalk", "planned")
    rows = []
    for record in records:
        task, extra = record["task"], record["extra"]
        name = ", ".join(filter(None, (task["network"], task["variant"])))
        if record["status"] != "ok":
            rows.append([name, task["depth"], record["status"], *[None] * 8])
            continue
        own, ours, planned = (extra["ways"][w]["seconds"]["median"] for w in WAYS)
        counts = [extra["ways"][w]["traces"] for w in WAYS]
        times = [own, ours, ours / own, planned, planned / own, extra["plan_seconds"]]
        rows.append([name, task["depth"], *times, *counts])
    notes = ("Medians of calls that find nothing in JAX's caches; nothing is compiled or run.",)
    return [Table("Seconds to trace and lower a gradient", columns, rows, notes)] if rows else []
