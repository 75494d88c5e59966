"""The time of a vijp compared with its vjp: the paper claims that it costs no more."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from .. import operators
from ..operators import Sizes
from ..tasks import Record, Request, Table, Task

TITLE = "The time of a vijp beside that of its vjp"
OVERHEAD = 1.1  # times the vjp's time: up to this factor, no overhead

_SIZES = {
    "gpu": Sizes(rows=2**17, features=512, images=128, side=128, channels=128, length=2048),
    "cpu": Sizes(rows=2**13, features=256, images=8, side=64, channels=32, length=512),
    "quick": Sizes(rows=2**12, features=128, images=4, side=64, channels=16, length=128),
}


def tasks(request: Request) -> list[Task]:
    """One task for every family of rules; with `quick`, one for all."""
    kind = "quick" if request.quick else "gpu" if request.on_gpu else "cpu"
    if request.quick:
        families = {"all": list(operators.QUICK)}
    else:
        families = {}
        for name, layer in operators.LAYERS.items():
            families.setdefault(layer.rule, []).append(name)
    sizes = _SIZES[kind]
    return [
        Task(
            "vijp",
            family,
            "vijp",
            width=sizes.features,
            batch=sizes.rows,
            settings={
                "cases": names,
                "sizes": asdict(sizes),
                "repeats": 15 if request.quick else 25,
                "whole": not request.quick,
            },
        )
        for family, names in families.items()
    ]


def measure(task: Task) -> dict[str, Any]:
    asked = task.settings
    sizes = Sizes(**asked["sizes"])
    found = [operators.measure(n, sizes, asked["repeats"], asked["whole"]) for n in asked["cases"]]
    return {"extra": {"cases": found}}


def summary(records: Sequence[Record]) -> list[Table]:
    cases = [c for r in records if r["status"] == "ok" for c in r["extra"]["cases"]]
    if not cases:
        return []
    columns = ("layer", "vjp, ms", "vijp, ms", "vijp / vjp", "whole", "error", "overhead")
    rows = []
    for case in cases:
        ratio = case["vijp"]["median"] / case["vjp"]["median"]
        whole = None
        if "whole_vijp" in case:
            whole = case["whole_vijp"]["median"] / case["whole_vjp"]["median"]
        rows.append(
            [
                case["name"],
                1e3 * case["vjp"]["median"],
                1e3 * case["vijp"]["median"],
                ratio,
                whole,
                case["error"],
                _verdict(case, ratio),
            ]
        )
    notes = (
        "Both operators get what a forward pass left behind. Whole: the ratio of calls that are given "
        "x, the weights and the cotangent, and make all that they need, such as the inverse of a pivot.",
        f"The paper: no overhead. Up to {OVERHEAD} times a vjp is called that.",
    )
    return [Table("vijp beside vjp", columns, rows, notes)]


def _verdict(case: dict[str, Any], ratio: float) -> str:
    if not case["error"] <= case["tolerance"]:
        return "WRONG"
    return "none" if ratio <= OVERHEAD else "more"
