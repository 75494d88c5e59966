"""The charts of an experiment, as plain data: from records to rows of panels.

`figures` draws them with Matplotlib, `plots` with Plotly: the same points, colours and marks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...planning.report import format_bytes
from . import experiments, fits, judgement

Record = Mapping[str, Any]

ENDS = {"oom": "out of memory", "timeout": "took too long", "refused": "refused", "error": "failed"}


@dataclass(frozen=True)
class Style:
    """A colour per family, a dash and a marker per member: readable without colours, too."""

    colour: str
    dash: str = "solid"  # solid, dash, dot, dashdot
    marker: str = "circle"  # circle, square, diamond, triangle, cross, star


# Okabe and Ito's colours, which people with any colour vision tell apart, on white and on black.
_GREY, _BLUE, _SKY, _GREEN = "#8a8a8a", "#0072B2", "#56B4E9", "#009E73"
_ORANGE, _RED, _PINK, _YELLOW = "#E69F00", "#D55E00", "#CC79A7", "#B59F00"
WRONG = "#E00034"

STYLES = {
    "backprop": Style(_GREY),
    "checkpoint": Style(_BLUE, "solid", "square"),
    "checkpoint-block": Style(_BLUE, "dash", "square"),
    "checkpoint-sqrt": Style(_BLUE, "dot", "square"),
    "checkpoint-recursive": Style(_BLUE, "dashdot", "square"),
    "jax-checkpoint": Style(_SKY, "dash", "square"),
    "jax-checkpoint-block": Style(_SKY, "dot", "square"),
    "jax-checkpoint-dots": Style(_GREY, "dash", "square"),
    "jax-checkpoint-sqrt": Style(_SKY, "dashdot", "square"),
    "accumulate": Style(_PINK, "solid", "triangle"),
    "forward": Style(_YELLOW, "solid", "star"),
    "projected-forward": Style(_YELLOW, "dash", "star"),
    "reversible": Style(_SKY, "solid", "cross"),
    "moonwalk": Style(_RED, "solid", "diamond"),
    "moonwalk-checkpoint": Style(_RED, "dash", "diamond"),
    "moonwalk-within": Style(_RED, "dashdot", "diamond"),
    "moonwalk-as-printed": Style(_RED, "dot", "cross"),
    "moonwalk-fragment-4": Style(_GREEN, "solid", "diamond"),
    "moonwalk-fragment-8": Style(_GREEN, "dash", "diamond"),
    "moonwalk-fragment-16": Style(_GREEN, "dot", "diamond"),
    "moonwalk-fragment": Style(_GREEN, "dashdot", "diamond"),
    "pure-forward": Style(_ORANGE, "solid", "triangle"),
}


def style_of(method: str) -> Style:
    """The style of the longest name in `STYLES` that `method` begins with."""
    known = [name for name in STYLES if method == name or method.startswith(name + "-")]
    return STYLES[max(known, key=len)] if known else Style("#555555")


@dataclass(frozen=True)
class Point:
    x: float | str
    y: float
    text: str = ""
    low: float | None = None
    high: float | None = None
    wrong: bool = False
    remark: str = ""


@dataclass(frozen=True)
class Series:
    """Points of one method.

    `end`: where the series stops and why, as (x, y, status); `note`: text at the last point.
    """

    name: str
    style: Style
    points: tuple[Point, ...]
    end: tuple[float, float, str] | None = None
    note: str = ""


@dataclass(frozen=True)
class Panel:
    """Axes. `kind`: "lines" over x, "scatter" (one named point per series), or horizontal "bars"."""

    title: str
    x: str
    y: str
    series: tuple[Series, ...]
    kind: str = "lines"
    log_x: bool = False
    log_y: bool = False
    reference: float | None = None  # a line across, in units of y (for bars: of their length)
    reference_name: str = ""


@dataclass(frozen=True)
class Row:
    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True)
class Chart:
    experiment: str
    title: str
    rows: tuple[Row, ...]

    @property
    def panels(self) -> list[Panel]:
        return [panel for row in self.rows for panel in row.panels]


def bar_label(series: Series) -> str:
    """The label behind a bar."""
    y = series.points[0].y
    return series.note or (f"{y:.3g}" if y < 1000 else f"{y:,.0f}")


def chart(result: Mapping[str, Any]) -> Chart | None:
    """The chart of one experiment's file; None if there is nothing to draw."""
    name, records = result["experiment"], result["records"]
    make = _MAKERS.get(name)
    rows = [] if make is None else [row for row in make(records) if row.panels]
    return Chart(name, experiments.load(name).TITLE, tuple(rows)) if rows else None


# --- fig2, fig3: against depth ------------------------------------------------------------------------


MEASURES = {
    "temp_bytes": "temporaries of the program",
    "peak_bytes": "peak of the process",
    "seconds": "time of one gradient",
    "gradient_error": "relative error of the gradient",
}


def _against_depth(records: Sequence[Record]) -> list[Row]:
    """Lines for networks measured at several depths; those at one depth share a row of bars."""
    rows, single = [], []
    for title, group in _grouped(records).items():
        if len({r["task"]["depth"] for r in group}) == 1:
            single += group
            continue
        panels = [_lines(label, "depth", name, group, records) for name, label in MEASURES.items()]
        rows.append(Row(title, tuple(p for p in panels if p is not None)))
    if single:
        depths = sorted({r["task"]["depth"] for r in single})
        panels = [_at_one_depth(label, name, single, records) for name, label in MEASURES.items()]
        title = f"other variants, {' and '.join(map(str, depths))} layers"
        rows.append(Row(title, tuple(p for p in panels if p is not None)))
    return rows


def _at_one_depth(title: str, name: str, group: list[Record], records: Sequence[Record]) -> Panel | None:
    usable = [(r, v) for r in group if r["status"] == "ok" and (v := value(r, name)) is not None]
    if not usable:
        return None
    wide = name == "gradient_error"
    scale, unit = unit_of(name, max(v for _, v in usable))
    series = []
    for record, v in usable:
        task, y = record["task"], max(v, _NOTHING) if wide else v
        label = f"{task['variant'] or task['network']}: {task['method']}"
        bar = _point(record, label, y / scale, name, scale, records)
        series.append(Series(label, style_of(task["method"]), (bar,)))
    reference = judgement.TOLERANCE if wide else None
    named = "what a method may add" if wide else ""
    return Panel(title, unit, "", tuple(series), "bars", wide, False, reference, named)


def _grouped(records: Iterable[Record]) -> dict[str, list[Record]]:
    """Records by network, variant and precision, in the order in which they were measured."""
    found: dict[str, list[Record]] = {}
    for record in records:
        task = record["task"]
        parts = [task["network"], task.get("variant"), _precision(task.get("precision"))]
        found.setdefault(" · ".join(p for p in parts if p), []).append(record)
    return found


def _precision(name: str | None) -> str:
    return "" if name in (None, "", "default") else f"{name} precision"


def value(record: Record, name: str) -> float | None:
    """A measured number, or None."""
    found = record.get(name)
    if isinstance(found, Mapping):
        found = found.get("median")
    return found if found is not None and math.isfinite(found) else None


def _lines(
    title: str, axis: str, name: str, group: list[Record], records: Sequence[Record]
) -> Panel | None:
    """One line per method; it ends in a mark if the next size ran out of memory."""
    numbers = [v for r in group if (v := value(r, name)) is not None]
    if not numbers:
        return None
    scale, unit = unit_of(name, max(numbers))
    wide, series = name == "gradient_error", []
    for method, own in _by_method(group).items():
        own = sorted(own, key=lambda r: r["task"][axis])
        points, end = [], None
        for record in own:
            y = value(record, name)
            if record["status"] == "ok" and y is not None:
                y = max(y, _NOTHING) if wide else y
                points.append(_point(record, record["task"][axis], y / scale, name, scale, records))
            elif record["status"] != "ok" and points and end is None and not wide:
                end = (record["task"][axis], points[-1].y, record["status"])
        if points:
            series.append(Series(method, style_of(method), tuple(points), end))
    return Panel(
        title,
        _AXES[axis],
        f"{unit} (0 drawn at {_NOTHING:g})" if wide and min(numbers) < _NOTHING else unit,
        tuple(series),
        log_y=wide or _wide([p.y for s in series for p in s.points]),
        reference=judgement.TOLERANCE if wide else None,
        reference_name="what a method may add" if wide else "",
    )


_NOTHING = 1e-9  # where an error of zero is drawn on a logarithmic axis
_AXES = {"depth": "layers", "width": "width n", "batch": "batch", "length": "length"}


def _by_method(records: Iterable[Record]) -> dict[str, list[Record]]:
    found: dict[str, list[Record]] = {}
    for record in records:
        found.setdefault(record["task"]["method"], []).append(record)
    return found


def _point(
    record: Record, x: float | str, y: float, name: str, scale: float, records: Sequence[Record]
) -> Point:
    found = judgement.verdict(record, records)
    seconds = record.get("seconds") if name == "seconds" else None
    low, high = (seconds["low"] / scale, seconds["high"] / scale) if seconds else (None, None)
    remark = found if found == "not finite" else ""
    return Point(x, y, describe(record, found), low, high, found == "WRONG", remark)


def describe(record: Record, found: str) -> str:
    """The text shown when the reader points at it."""
    task = record["task"]
    parts = [task["method"], f"{task['depth']} layers, width {task['width']}, batch {task['batch']}"]
    for name, label in (
        ("temp_bytes", "temporaries"),
        ("peak_bytes", "process peak"),
        ("seconds", "time"),
    ):
        if (number := value(record, name)) is not None:
            scale, unit = unit_of(name, number)
            parts.append(f"{label} {number / scale:.3g} {unit}")
    error = record.get("gradient_error")
    parts.append(f"gradient: {found}" if error is None else f"gradient: {found}, off by {error:.1e}")
    return "<br>".join(parts)


def unit_of(name: str, largest: float) -> tuple[float, str]:
    """(the divisor, the unit) for showing some values."""
    if name.endswith("bytes"):
        units = [(2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")]
    elif name == "seconds":
        units = [(1.0, "s"), (1e-3, "ms"), (1e-6, "µs")]
    else:
        return 1.0, "relative error" if name == "gradient_error" else ""
    return next(((s, u) for s, u in units if largest >= s), units[-1])


def _wide(values: Sequence[float]) -> bool:
    """Whether to use a logarithmic axis, because on a linear one the smallest value would vanish."""
    positive = [v for v in values if v > 0]
    return bool(positive) and max(positive) > 30 * min(positive)


# --- depth, batch: the largest that fits --------------------------------------------------------------


def _largest(axis: str) -> Callable[[Sequence[Record]], list[Row]]:
    def rows(records: Sequence[Record]) -> list[Row]:
        found = []
        for title, group in _grouped(records).items():
            series = []
            for method, own in _by_method(group).items():
                ran = [r for r in own if r["status"] == "ok" and "search" not in r["task"]["settings"]]
                if not ran:
                    continue
                best = max(ran, key=lambda r: r["task"][axis])
                size = best["task"][axis]
                # A search that reached the largest size allowed has not found the limit.
                open_ended = any(r["extra"].get("most") == size for r in own)
                note = f"{size:,} or more" if open_ended else ""
                bar = _point(best, method, size, "size", 1.0, records)
                series.append(Series(method, style_of(method), (bar,), note=note))
            limits = {r["task"]["settings"].get("limit_bytes") for r in group} - {None}
            within = f" within {format_bytes(max(limits))}" if limits else ""
            panel = Panel(f"largest {axis}{within}", _AXES[axis], "", tuple(series), "bars")
            found.append(Row(title, (panel,) if series else ()))
        return found

    return rows


# --- engine and others: bars of methods ---------------------------------------------------------------


def _bars(records: Sequence[Record]) -> list[Row]:
    """A row for every network and its sizes, a panel for every measure."""
    groups: dict[str, list[Record]] = {}
    for record in records:
        task = record["task"]
        parts = [
            task["network"],
            task.get("variant"),
            f"{task['depth']} layers, batch {task['batch']:,}",
        ]
        parts.append(task["settings"].get("optimizer"))
        groups.setdefault(" · ".join(p for p in parts if p), []).append(record)
    rows = []
    for title, group in groups.items():
        panels = [_at_one_depth(label, name, group, records) for name, label in MEASURES.items()]
        rows.append(Row(title, tuple(p for p in panels if p is not None)))
    return rows


def _named(key: str, names: Mapping[str, str], title: str) -> Callable[[Sequence[Record]], list[Row]]:
    """Bars for the programs in one record's `extra[key]`: {name: {"seconds": …}}."""

    def rows(records: Sequence[Record]) -> list[Row]:
        found = []
        for record in records:
            if record["status"] != "ok":
                continue
            task, programs = record["task"], record["extra"][key]
            scale, unit = unit_of("seconds", max(p["seconds"]["median"] for p in programs.values()))
            series = []
            for name, program in programs.items():
                took = {k: program["seconds"][k] / scale for k in ("median", "low", "high")}
                text = f"{name}<br>{took['median']:.3g} {unit}"
                bar = Point(name, took["median"], text, took["low"], took["high"])
                series.append(Series(name, style_of(names.get(name, name)), (bar,)))
            about = " · ".join(
                filter(None, (task["network"], task["variant"], f"{task['depth']} layers"))
            )
            found.append(Row(about, (Panel(title, unit, "", tuple(series), "bars"),)))
        return found

    return rows


# --- fig4: accuracy -----------------------------------------------------------------------------------

_PIVOTS = {
    "free": Style(_GREY),
    "lower": Style(_GREEN, "dash", "square"),
    "diagonal": Style(_RED, "dot", "diamond"),
}


def _accuracy(records: Sequence[Record]) -> list[Row]:
    """The mean of the seeds, with the lowest and the highest around it."""
    groups: dict[tuple[str, str], dict[str, list[Record]]] = {}
    for record in records:
        if record["status"] == "ok":
            task, extra = record["task"], record["extra"]
            where = f"{task['network']} on {extra['data']}"
            where += "" if task["variant"] else f" · {task['depth']} layers"
            group = groups.setdefault((where, extra["axis"]), {})
            group.setdefault(task["variant"] or task["method"], []).append(record)
    rows = []
    for (title, axis), pivots in groups.items():
        series = []
        for pivot, own in pivots.items():
            label = f"{pivot} pivot" if pivot in _PIVOTS else pivot
            curves = [dict(map(tuple, r["extra"]["curve"])) for r in own]
            points = []
            for x in sorted(set.intersection(*map(set, curves))):
                ys = [100 * c[x] for c in curves]
                mean = sum(ys) / len(ys)
                text = f"{label}, {axis} {x}<br>{mean:.2f} %, {len(ys)} seeds"
                points.append(Point(x, mean, text, min(ys), max(ys)))
            look = _PIVOTS.get(pivot) or style_of(pivot)
            series.append(Series(label, look, tuple(points), note=f"{points[-1].y:.1f}"))
        panel = Panel("test accuracy", axis, "%", tuple(series))
        rows.append(Row(title, (panel,)))
    return rows


# --- pareto: memory against time ----------------------------------------------------------------------


def _pareto(records: Sequence[Record]) -> list[Row]:
    rows = []
    for title, group in _grouped(records).items():
        panels = []
        for name, label in (("temp_bytes", "temporaries"), ("peak_bytes", "peak of the process")):
            usable = [r for r in group if r["status"] == "ok" and value(r, "seconds") and value(r, name)]
            if not usable:
                continue
            s_scale, s_unit = unit_of("seconds", max(value(r, "seconds") or 0 for r in usable))
            b_scale, b_unit = unit_of(name, max(value(r, name) or 0 for r in usable))
            series = [
                Series(
                    _labelled(r),
                    style_of(r["task"]["method"]),
                    (
                        _point(
                            r,
                            (value(r, "seconds") or 0) / s_scale,
                            (value(r, name) or 0) / b_scale,
                            name,
                            b_scale,
                            records,
                        ),
                    ),
                )
                for r in usable
            ]
            panels.append(
                Panel(
                    f"{label} against time",
                    f"time of one gradient, {s_unit}",
                    b_unit,
                    tuple(series),
                    "scatter",
                    log_x=True,
                    log_y=True,
                )
            )
        rows.append(Row(title, tuple(panels)))
    return rows


def _labelled(record: Record) -> str:
    """The method, with the settings that distinguish it from its neighbours."""
    label = record["task"].get("settings", {}).get("label")
    return label or record["task"]["method"]


# --- vijp: ratios -------------------------------------------------------------------------------------


def _ratios(records: Sequence[Record]) -> list[Row]:
    series = []
    for case in sorted(cases_of(records), key=lambda c: c["vijp"]["median"] / c["vjp"]["median"]):
        ratio = case["vijp"]["median"] / case["vjp"]["median"]
        text = (
            f"{case['name']}<br>{case['rule']}<br>vijp {1e3 * case['vijp']['median']:.3g} ms, "
            f"vjp {1e3 * case['vjp']['median']:.3g} ms"
        )
        colour = _GREEN if ratio <= 1.1 else _ORANGE if ratio <= 2 else _RED
        wrong = case["error"] > case["tolerance"]
        low, high = (case["vijp"][end] / case["vjp"]["median"] for end in ("low", "high"))
        point = Point(case["name"], ratio, text, low, high, wrong)
        series.append(Series(case["name"], Style(colour), (point,)))
    if not series:
        return []
    panel = Panel(
        "time of a vijp over that of its vjp",
        "vijp / vjp",
        "",
        tuple(series),
        "bars",
        log_x=_wide([s.points[0].y for s in series]),
        reference=1.0,
        reference_name="no overhead",
    )
    return [Row("", (panel,))]


def cases_of(records: Iterable[Record]) -> list[Mapping[str, Any]]:
    """All cases in records of `vijp`, each of which holds several."""
    return [c for r in records if r["status"] == "ok" for c in r["extra"].get("cases", ())]


# --- table1: growth -----------------------------------------------------------------------------------

AXES = {
    "depth": "depth L",
    "width": "width n (d = n² parameters a layer)",
    "parameters": "parameters a layer d, at fixed n",
    "batch": "batch",
}


def _growth(records: Sequence[Record]) -> list[Row]:
    rows = []
    for name, title in (("temp_bytes", "memory"), ("seconds", "time")):
        panels = []
        for axis, label in AXES.items():
            series = []
            for record in records:
                points = points_of(record, axis, name)
                fit = fits.growth([x for x, _ in points], [y for _, y in points])
                if not points or fit is None:
                    continue
                method = record["task"]["method"]
                slope = f"{method}<br>grows as x^{fit.exponent:.2f}"
                scale = 2**20 if name == "temp_bytes" else 1e-3
                drawn = tuple(
                    Point(x, y / scale, f"{slope}<br>{x:g}: {y / scale:.3g}") for x, y in points
                )
                note = f"{fit.exponent:.1f}"
                series.append(Series(method, style_of(method), drawn, note=note.replace("-0.0", "0.0")))
            unit = "MiB of temporaries" if name == "temp_bytes" else "ms"
            if series:
                panels.append(
                    Panel(f"{title} against {axis}", label, unit, tuple(series), "lines", True, True)
                )
        rows.append(Row(title, tuple(panels)))
    return rows


def points_of(record: Record, axis: str, name: str) -> list[tuple[float, float]]:
    """(size, figure) of one method's growth along an axis, as `table1` records them."""
    found = [
        (float(p["size"]), value(p, name))
        for p in record.get("extra", {}).get("points", ())
        if p["axis"] == axis
    ]
    return sorted((x, y) for x, y in found if y is not None)


_MAKERS: dict[str, Callable[[Sequence[Record]], list[Row]]] = {
    "table1": _growth,
    "fig2": _against_depth,
    "fig3": _against_depth,
    "fig4": _accuracy,
    "depth": _largest("depth"),
    "batch": _largest("batch"),
    "pareto": _pareto,
    "vijp": _ratios,
    "engine": _bars,
    "checkpoint": _bars,
    "zoo": _bars,
    "segments": _bars,
    "fragments": _bars,
    "reversible": _bars,
    "fused": _bars,
    "certificates": _named(
        "programs",
        {"ignore": "moonwalk-as-printed", "nan": "moonwalk-checkpoint", "raise": "moonwalk"},
        "time of one gradient",
    ),
    "isometric": _accuracy,
    "lowering": _named(
        "ways", {"jax": "backprop", "planned": "moonwalk-checkpoint"}, "time to trace and lower"
    ),
}
