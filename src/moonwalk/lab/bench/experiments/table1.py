"""The paper's Table 1: orders of memory and time of eight methods, and its other columns, measured.

Every method is one task, in a process of its own: `growth` compiles and runs it at several sizes of one
network, `properties` does the small experiments behind the columns "high-variance", "forward" and
"submersive". Two more tasks are about Phase I (`phase_one`): what networks keep, and from where to where
Moonwalk pays. Memory is read from compiled programs; the deep ones are never run.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from ....errors import PlanWarning
from .. import fits, growth, phase_one, properties
from ..growth import Size
from ..tasks import Record, Request, Table, Task

TITLE = "Table 1: how memory and time grow, beside the paper's orders"

Exponent = float | tuple[float, float]  # for a sum of terms: the smallest and the largest exponent

# In depth L, width n (with d = n² parameters a layer), parameters d at fixed n, and batch. The paper
# leaves out the batch, in which all methods are linear. M_x and M_θ of these layers are n numbers or
# bits: they grow with n, not with d.
ORDERS: dict[str, tuple[str, dict[str, Exponent], str, dict[str, Exponent]]] = {
    "backprop": (
        "M_x L + M_θ L",
        {"depth": 1, "width": 1, "parameters": 0, "batch": 1},
        "n²L + ndL",
        {"depth": 1, "width": 3, "parameters": (0, 1), "batch": 1},
    ),
    "checkpoint": (
        "√(n (M_x + M_θ) L)",
        {"depth": 0.5, "width": 1, "parameters": 0, "batch": 1},
        "n²L + ndL",
        {"depth": 1, "width": 3, "parameters": (0, 1), "batch": 1},
    ),
    "forward": (
        "M_x + M_θ",
        {"depth": 0, "width": 1, "parameters": 0, "batch": 1},
        "n²dL²",
        {"depth": 2, "width": 4, "parameters": 1, "batch": 1},
    ),
    "projected-forward": (
        "M_x + M_θ",
        {"depth": 0, "width": 1, "parameters": 0, "batch": 1},
        "n²L + ndL",
        {"depth": 1, "width": 3, "parameters": (0, 1), "batch": 1},
    ),
    "reversible": (
        "M_x + M_θ",
        {"depth": 0, "width": 1, "parameters": 0, "batch": 1},
        "n²L + ndL",
        {"depth": 1, "width": 3, "parameters": (0, 1), "batch": 1},
    ),
    "pure-forward-per-example": (
        "M_x + M_θ",
        {"depth": 0, "width": 1, "parameters": 0, "batch": 1},
        "n³L + ndL",
        {"depth": 1, "width": 3, "parameters": (0, 1), "batch": 1},
    ),
    "moonwalk": (
        "M_x L + M_θ",
        {"depth": (0, 1), "width": 1, "parameters": 0, "batch": 1},
        "n²L + ndL",
        {"depth": 1, "width": 3, "parameters": (0, 1), "batch": 1},
    ),
    "moonwalk-checkpoint": (
        "√(n M_x L) + M_θ",
        {"depth": (0, 0.5), "width": 1, "parameters": 0, "batch": 1},
        "n²L + ndL",
        {"depth": 1, "width": 3, "parameters": (0, 1), "batch": 1},
    ),
}
# high-variance, forward, submersive
COLUMNS = {
    "backprop": (False, False, True),
    "checkpoint": (False, False, True),
    "forward": (False, True, True),
    "projected-forward": (True, True, True),
    "reversible": (False, False, False),
    "pure-forward-per-example": (False, True, True),
    "moonwalk": (False, False, True),
    "moonwalk-checkpoint": (False, False, True),
}
HIGH = 1e-3  # a variance beyond rounding

# Methods that take one pass per parameter, or per feature, start from less. Blocks stay smaller than n.
_STARTS = {
    "gpu": {
        "": Size(16, 512, 64, 2**15),
        "pure": Size(8, 128, 16, 2**12),
        "forward": Size(4, 32, 4, 2**12),
    },
    "cpu": {"": Size(8, 128, 16, 2**11), "pure": Size(8, 32, 4, 1024), "forward": Size(2, 16, 2, 1024)},
    "quick": {"": Size(8, 64, 8, 2**10), "pure": Size(4, 32, 4, 512), "forward": Size(2, 16, 2, 1024)},
}
_FACTORS = {
    "gpu": {"depth": (1, 2, 4), "width": (1, 2, 4), "parameters": (1, 2, 4), "batch": (1, 2, 4)},
    "cpu": {"depth": (1, 2, 4), "width": (1, 2, 4), "parameters": (1, 2, 4), "batch": (1, 2, 4)},
    "quick": {"depth": (1, 4), "width": (1, 2), "parameters": (1, 4), "batch": (1, 4)},
}
# Compiled but never run, with states so large and parameters so few that states dominate memory.
_DEEP = Size(0, 16, 4, 2**20)
_DEPTHS = {
    "gpu": (4, 16, 64, 256, 1024, 4096),
    "cpu": (4, 16, 64, 256, 1024, 4096),
    "quick": (256, 4096),
}
_CROSSING = {
    "gpu": {"depths": (256, 1024, 4096, 16384), "ratios": tuple(phase_one.RATIOS)},
    "cpu": {"depths": (256, 1024, 4096, 16384), "ratios": tuple(phase_one.RATIOS)},
    "quick": {"depths": (1024, 16384), "ratios": (1.0, 4.0)},
}
_CROSS_DEPTH, _CROSS_WIDTH, _CROSS_BATCH = 64, 16, 2**20
_CROSS = ("moonwalk-as-printed", "checkpoint")


def tasks(request: Request) -> list[Task]:
    kind = "quick" if request.quick else "gpu" if request.on_gpu else "cpu"
    found = []
    for method in ORDERS:
        start = _STARTS[kind][method.split("-")[0] if method.split("-")[0] in _STARTS[kind] else ""]
        points = []
        for axis in growth.AXES:
            what = ["time"] if axis == "depth" else ["memory", "time"]
            sizes = (start.times(axis, f) for f in _FACTORS[kind][axis])
            points += [{"axis": axis, "what": what, **asdict(s)} for s in sizes]
        deep = asdict(_DEEP)
        points += [{"axis": "depth", "what": ["memory"], **deep, "depth": d} for d in _DEPTHS[kind]]
        settings = {"measure": "growth", "points": points, "repeats": 7}
        found.append(
            Task(
                "table1",
                "growing",
                method,
                depth=start.depth,
                width=start.width,
                batch=start.batch,
                settings=settings,
            )
        )
    kept = Task("table1", "all", "moonwalk", "Phase I", settings={"measure": "residuals", "sizes": kind})
    crossing = Task(
        "table1",
        "dense",
        "moonwalk-as-printed",
        "crossovers",
        _CROSS_DEPTH,
        _CROSS_WIDTH,
        0,
        _CROSS_BATCH,
        settings={"measure": "crossovers", **{k: list(v) for k, v in _CROSSING[kind].items()}},
    )
    return [*found, kept, crossing]


# --- measuring ----------------------------------------------------------------------------------------


def measure(task: Task) -> dict[str, Any]:
    warnings.simplefilter("ignore", PlanWarning)
    return _MEASURES[task.settings["measure"]](task)


def _grow(task: Task) -> dict[str, Any]:
    found = growth.measure(task.method, task.settings["points"], task.settings["repeats"])
    if found.get("status", "ok") == "ok":
        found["extra"] |= properties.measure(task.method)
    return found


NETWORKS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("dense", "abs", {"depth": 64, "width": 256, "batch": 16384}),
    ("dense", "maxmin", {"depth": 64, "width": 256, "batch": 16384}),
    ("pyramid", "identity, slope 0.25", {"depth": 8, "width": 128, "length": 256, "batch": 128}),
    ("pyramid", "lower, slope 0.1", {"depth": 8, "width": 128, "length": 256, "batch": 128}),
    ("signal", "slope 0.3", {"depth": 20, "width": 256, "length": 2048, "batch": 128}),
    ("isometric", "", {"depth": 64, "width": 256, "length": 2048, "batch": 128}),
)
"""The paper's sizes on any device, because nothing is compiled."""


def _residuals(task: Task) -> dict[str, Any]:
    del task
    found = [
        phase_one.residuals(Task("table1", network, "moonwalk", variant, **sizes))
        for network, variant, sizes in NETWORKS
    ]
    return {"extra": {"networks": found}}


def _crossovers(task: Task) -> dict[str, Any]:
    asked, place = task.settings, (task.width, task.batch)
    lines = {
        "depth": [(d, 32.0, d) for d in asked["depths"]],
        "ratio": [(r, r, task.depth) for r in asked["ratios"]],
    }
    points = [
        {
            "axis": axis,
            "x": x,
            "method": method,
            "temp_bytes": phase_one.at_ratio(ratio, method, depth, *place),
        }
        for axis, line in lines.items()
        for x, ratio, depth in line
        for method in _CROSS
    ]
    return {"extra": {"crossing": points}}


_MEASURES = {"growth": _grow, "residuals": _residuals, "crossovers": _crossovers}


# --- tables -------------------------------------------------------------------------------------------


def summary(records: Sequence[Record]) -> list[Table]:
    kinds: dict[str, list[Record]] = {name: [] for name in _MEASURES}
    for record in records:
        kinds[record["task"]["settings"]["measure"]].append(record)
    grown = kinds["growth"]
    tables = [_orders(grown, "memory"), _orders(grown, "time"), _columns(grown)] if grown else []
    tables += [_kept(r["extra"]["networks"]) for r in kinds["residuals"] if r["status"] == "ok"]
    tables += [_crossed(r) for r in kinds["crossovers"] if r["status"] == "ok"]
    return tables


def short(method: str) -> str:
    """The paper's name of a method; its pure-forward variant is the per-example one."""
    return method.removesuffix("-per-example")


NAMES = {"depth": "in L", "width": "in n, d = n²", "parameters": "in d", "batch": "in the batch"}
_FIGURES = {"memory": "temp_bytes", "time": "seconds"}


def _orders(records: Sequence[Record], figure: str) -> Table:
    rows, seen = [], set()
    for record in records:
        method = record["task"]["method"]
        memory, memory_orders, time, time_orders = ORDERS[method]
        orders = memory_orders if figure == "memory" else time_orders
        cells = []
        for axis in growth.AXES:
            cell, found = _exponent(record, figure, axis, orders[axis])
            cells.append(cell)
            seen.add((figure, axis, found))
        rows.append([short(method), memory if figure == "memory" else time, *cells])
    notes = [_CAPTIONS[figure], *(text for key, text in WHY.items() if key in seen)]
    columns = ("method", "the paper's order", *NAMES.values())
    return Table(f"{figure.capitalize()}: growth exponents beside the paper's", columns, rows, notes)


def _exponent(record: Record, figure: str, axis: str, paper: Exponent) -> tuple[str, str]:
    if record["status"] != "ok":
        return f"not measured: {record['status']}", record["status"]
    name = _FIGURES[figure]
    points = [p for p in record["extra"]["points"] if p["axis"] == axis and p[name] is not None]
    # Other load on the machine only adds time, so the fastest run shows the growth best.
    ys = [p[name]["low"] if figure == "time" else p[name] for p in points]
    fit = fits.growth([p["size"] for p in points], ys)
    found = fits.compare(fit and fit.exponent, paper)
    if fit is None:
        return found, found
    said = "same" if found == "as the paper" else f"{found} than {_spelled(paper)}"
    return f"{fit.exponent:.2f} {said}".replace("-0.00", "0.00"), found


def _spelled(paper: Exponent) -> str:
    return f"{paper[0]:g} to {paper[1]:g}" if isinstance(paper, tuple) else f"{paper:g}"


_HOW = "Exponents are slopes on logarithms over the three largest sizes; up to 0.2 off is the same."
_CAPTIONS = {
    "memory": f"Temporaries of compiled programs, beside parameters and gradients. {_HOW}",
    "time": f"The fastest of several runs. {_HOW} Times also show what orders leave out: fixed costs, "
    "caches, and how well a device multiplies matrices of a size.",
}
# Why a figure differs, if that is known.
WHY = {
    ("time", "width", "less"): "In n, the term n d: the paper counts ∂x/∂θ as a full n × d matrix, n³ "
    "products for a dense layer. A parameter of a dense layer meets one output: that vjp takes d = n².",
}


def _columns(records: Sequence[Record]) -> Table:
    rows, estimate = [], ""
    for record in records:
        method, extra = record["task"]["method"], record["extra"]
        if record["status"] != "ok":
            rows.append([short(method), *[f"not measured: {record['status']}"] * 3])
            continue
        noisy, forward, submersive = COLUMNS[method]
        variance = extra["variance"]
        said = f"{variance:.3g} ‖g‖²" if variance > HIGH else "none"
        if "variance_parameters" in extra:
            count, error = extra["variance_parameters"], math.sqrt(variance / extra["variance_keys"])
            estimate = (
                f" Of {count} parameters (D + 1) ‖g‖² = {count + 1} ‖g‖² is expected; the mean of "
                f"{extra['variance_keys']} was off by {extra['bias']:.2f} ‖g‖, where {error:.2f} is."
            )
        rows.append(
            [
                short(method),
                _beside(variance > HIGH, noisy, said),
                _beside(extra["forward"], forward, "yes" if extra["forward"] else "no"),
                _beside(extra["submersive"], submersive, _answered(extra)),
            ]
        )
    notes = (
        f"Variance: of ProjectedForward over keys; the others' programs are run again.{estimate}",
        "Forward: the method differentiates a network with a layer that has no reverse mode, a loop "
        "that runs until its data says so.",
        "Submersive: the gradient of a network from 16 features to 4, with |x|, is exact, or refused.",
    )
    return Table("The other columns", ("method", "variance", "forward only", "submersive"), rows, notes)


def _answered(extra: Mapping[str, Any]) -> str:
    return f"yes, {extra['submersive_why']}" if extra["submersive"] else "no, refused"


def _beside(found: bool, paper: bool, said: str) -> str:
    if found == paper:
        return f"as the paper: {said}"
    return f"unlike the paper: {said}, the paper: {'yes' if paper else 'no'}"


def _kept(networks: Sequence[Mapping[str, Any]]) -> Table:
    rows = []
    for found in networks:
        name = ", ".join(filter(None, (found["network"], found["variant"])))
        times = found["backprop_bytes"] / found["m_x_bytes"]
        verdict = "as the paper" if 2 <= times <= 3 else "less" if times > 3 else "more"
        rows.append(
            [
                f"{name}, {found['depth']} layers",
                found["m_x_bytes"],
                found["m_theta_bytes"],
                round(found["m_theta_bytes"] / found["m_x_bytes"], 1),
                found["backprop_bytes"],
                f"{verdict}: 1/{times:.1f}",
            ]
        )
    columns = ("network", "M_x, bytes", "M_θ, bytes", "M_θ / M_x", "backprop, bytes", "of backprop's")
    notes = (
        "The paper: Phase I takes 1/2 to 1/3 of what backprop's takes.",
        "Moonwalk keeps M_x in Phase I. Backprop: what jax.vjp keeps, weights left out. Anchors, "
        "fragments and the seed come in Phase II.",
    )
    return Table("What Phase I keeps", columns, rows, notes)


def _crossed(record: Record) -> Table:
    """Where a walk over everything takes as much memory as checkpointing with the best segments."""
    points, depth = record["extra"]["crossing"], record["task"]["depth"]
    rows = []
    for axis, label in (("depth", "L, at M_θ / M_x = 32"), ("ratio", f"M_θ / M_x, at L = {depth}")):
        xs = sorted({p["x"] for p in points if p["axis"] == axis})
        lines = {
            m: [
                next(p["temp_bytes"] for p in points if (p["axis"], p["x"], p["method"]) == (axis, x, m))
                for x in xs
            ]
            for m in _CROSS
        }
        at = fits.crossover(xs, lines[_CROSS[0]], lines[_CROSS[1]])
        rows += [
            [label, f"{x:g}", lines[_CROSS[0]][i], lines[_CROSS[1]][i], None] for i, x in enumerate(xs)
        ]
        if at is None:
            ahead = lines[_CROSS[0]][-1] < lines[_CROSS[1]][-1]
            said = (
                f"none from {xs[0]:g} to {xs[-1]:g}: {'Moonwalk' if ahead else 'checkpointing'} is less"
            )
        else:
            said = f"about {at:,.0f}" if at > 99 else f"about {at:.2g}"
        rows.append(
            [
                label,
                said,
                None,
                None,
                f"expected {_expected(axis, depth):,.{0 if axis == 'depth' else 1}f}",
            ]
        )
    columns = ("varied", "at", "Moonwalk, bytes", "checkpointing, bytes", "crossover")
    notes = (
        "Moonwalk without segments takes M_x L + M_θ, checkpointing at its best 2 √(n (M_x + M_θ) L); "
        "expected is where these are equal. In segments (moonwalk-checkpoint) it takes √(n M_x L).",
    )
    return Table("Where Moonwalk and checkpointing cross", columns, rows, notes)


def _expected(axis: str, depth: int) -> float:
    """Where M_x L + M_θ = 2 √(n (M_x + M_θ) L), which is c n + (M_x + M_θ) L / c for the best c.

    With n = M_θ = r M_x, in units of M_θ, that is L / r + 1 = 2 √((1 + 1 / r) L).
    """
    if axis == "ratio":  # (L / r)² − 2 L / r + 1 = 4 L
        return depth / (1 + 2 * math.sqrt(depth))
    r = 32.0  # the larger root in √L of  L / r − 2 √(1 + 1 / r) √L + 1
    middle = math.sqrt(1 + 1 / r)
    return ((middle + math.sqrt(middle**2 - 1 / r)) * r) ** 2
