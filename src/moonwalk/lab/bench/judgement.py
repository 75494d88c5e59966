"""Is a measured gradient right? One answer for tables, figures and the report.

Errors are measured against a better reference, float64 or full float32, so backpropagation has an error
too: several per cent for a deep network in TF32. What counts is the error that a method adds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

TOLERANCE = 2e-2
"""The error that a method may add to backpropagation's own at the same precision."""

EXACT = 1e-3
"""What it may add and still be called exact; between the two it is inexact."""

ESTIMATES = ("projected-forward",)
"""Methods whose result is a random estimate, so that its error is variance and not a fault."""

_PLACE = ("network", "variant", "precision")
_SIZES = ("depth", "width", "length", "batch")
# Methods implemented by JAX alone. `Checkpoint` is this library's: judged by its own error, it would
# always be found exact.
_BASELINES = ("backprop", "jax", "accumulate")

Record = Mapping[str, Any]


def floor(record: Record, records: Iterable[Record]) -> float:
    """The error of backpropagation, plain or by `jax.checkpoint`, where `record` was measured.

    At the same sizes if it fits there, and otherwise the largest one it has on this network.
    """
    task = record["task"]
    errors: dict[bool, list[float]] = {True: [], False: []}
    for other in records:
        error = other.get("gradient_error")
        if (
            str(other["task"]["method"]).split("-")[0] in _BASELINES
            and other.get("reference") == record.get("reference")
            and all(other["task"].get(name) == task.get(name) for name in _PLACE)
            and error is not None
            and math.isfinite(error)
        ):
            here = all(other["task"].get(name) == task.get(name) for name in _SIZES)
            errors[here].append(error)
    return max(errors[True] or errors[False], default=0.0)


def verdict(record: Record, records: Iterable[Record]) -> str:
    """ "exact", "inexact", "WRONG", "estimate", "unchecked"; or the status, with nothing to judge.

    "not finite": the reference is not finite, because the network itself overflows.
    """
    if record["status"] != "ok":
        return record["status"]
    error = record.get("gradient_error")
    if record["task"]["method"] in ESTIMATES:
        return "estimate"
    if error is None:
        return "unchecked"
    if math.isnan(error):
        return "not finite"
    added = error - 2 * floor(record, records)
    return "exact" if added <= EXACT else "inexact" if added <= TOLERANCE else "WRONG"
