"""`fused_update` against a gradient followed by an update: the memory of a training step.

16 layers of 1024 × 1024 on 64 rows, so that parameters outweigh activations. Parameters and states are
donated; besides them a step holds its results and temporaries, less what these share with the arguments:
`temp_bytes` of the record. Nothing runs.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Sequence
from typing import Any

import jax
import optax

from .... import _jax
from ....errors import PlanWarning
from ....fused.fused_update import fused_update
from .. import networks
from ..tasks import Record, Request, Table, Task

TITLE = "What a training step holds: fused updates beside gradients"
METHODS = ("fused", "backprop")
OPTIMIZERS = {
    "adam": optax.adam(1e-3),
    "clipped": optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3)),
}


def tasks(request: Request) -> list[Task]:
    sizes: dict[str, Any] = {"depth": 16, "width": 1024, "batch": 64}
    variants: tuple[str, ...] = ("abs", "abs, looped", "relu", "relu, looped")
    optimizers = tuple(OPTIMIZERS)
    if request.quick:
        sizes, variants, optimizers = {"depth": 8, "width": 64, "batch": 8}, ("abs",), optimizers[:1]
    return [
        Task("fused", "dense", method, variant, settings={"optimizer": optimizer}, **sizes)
        for variant in variants
        for optimizer in optimizers
        for method in METHODS
    ]


def measure(task: Task) -> dict[str, Any]:
    warnings.simplefilter("ignore", PlanWarning)
    network, optimizer = networks.make(task), OPTIMIZERS[task.settings["optimizer"]]
    step = fused_update if task.method == "fused" else unfused
    params, *data = network.types()
    found = held(step(network.loss, optimizer), optimizer, params, *data)
    leaves = jax.tree.leaves(params)
    total = sum(a.size * a.dtype.itemsize for a in leaves)
    extra = {"parameter_bytes": total}
    return {"temp_bytes": found, "parameters": sum(a.size for a in leaves), "extra": extra}


def unfused(loss: Any, optimizer: Any) -> Any:
    def step(params: Any, state: Any, *data: Any) -> Any:
        value, gradients = jax.value_and_grad(loss)(params, *data)
        updates, state = optimizer.update(gradients, state, params)
        return value, optax.apply_updates(params, updates), state

    return step


def held(step: Any, optimizer: Any, params: Any, *data: Any) -> int:
    """Bytes besides donated arguments: output + temp − alias."""
    state = jax.eval_shape(optimizer.init, params)
    program = _jax.compiled(jax.jit(step, donate_argnums=(0, 1)), params, state, *data)
    m = program.memory_analysis()
    return m.output_size_in_bytes + m.temp_size_in_bytes - m.alias_size_in_bytes


def summary(records: Sequence[Record]) -> list[Table]:
    rows: dict[tuple[str, str], dict[str, Record]] = {}
    for record in records:
        task = record["task"]
        rows.setdefault((task["variant"], task["settings"]["optimizer"]), {})[task["method"]] = record
    columns = ("network", "optimizer", "parameters, bytes", "fused, bytes", "backprop, bytes")
    bytes_of = functools.partial(_figure, name="temp_bytes")
    shown = [
        [
            *place,
            next(iter(both.values()))["extra"].get("parameter_bytes"),
            *map(bytes_of, map(both.get, METHODS)),
        ]
        for place, both in rows.items()
    ]
    note = "Results and temporaries of a step, beside parameters and optimizer states that are donated."
    return [Table("What a step holds", columns, shown, (note,))] if shown else []


def _figure(record: Record | None, name: str) -> Any:
    return None if record is None else record[name]
