"""Panels for Plotly: traces and layouts as plain data, which `report` hands to the page."""

from __future__ import annotations

import math
from typing import Any

from .charts import ENDS, WRONG, Panel, Series, bar_label

_DASHES = {"solid": "solid", "dash": "dash", "dot": "dot", "dashdot": "dashdot"}
_MARKERS = {
    "circle": "circle",
    "square": "square",
    "diamond": "diamond",
    "triangle": "triangle-up",
    "cross": "cross",
    "star": "star",
}


def plot(panel: Panel) -> dict[str, Any]:
    """Plotly's traces and layout. Colours of text and grid are set on the page, by its theme."""
    traces, shapes, notes = _DRAW[panel.kind](panel)
    axes = [
        {
            "title": {"text": label},
            "type": "log" if log else "linear",
            "automargin": True,
            "exponentformat": "power",
        }
        for label, log in ((panel.x, panel.log_x), (panel.y, panel.log_y))
    ]
    layout: dict[str, Any] = {
        "title": {"text": f"<b>{panel.title}</b>", "x": 0.01, "xanchor": "left", "font": {"size": 14}},
        "xaxis": axes[0],
        "yaxis": axes[1],
        "shapes": shapes,
        "annotations": notes,
        "showlegend": panel.kind == "lines",
    }
    if panel.kind == "lines" and not panel.log_y and panel.y != "%":
        layout["yaxis"]["rangemode"] = "tozero"
    if panel.kind == "bars":
        layout["yaxis"] = {"autorange": "reversed", "automargin": True, "ticks": ""}
        layout["xaxis"]["range"] = _room(panel)
    for axis, log, values in (
        (axes[0], panel.log_x, _values(panel, panel.kind == "bars")),
        (axes[1], panel.log_y, _values(panel, True)),
    ):
        decades = math.log10(max(values) / min(values)) if log else 0
        if decades > 2:  # otherwise Plotly labels 2 and 5 as well
            axis["dtick"] = math.ceil(decades / (4 if panel.kind == "bars" else 7))
    return {"data": traces, "layout": layout}


def _values(panel: Panel, along_y: bool) -> list[float]:
    found = [p.y if along_y else float(p.x) for s in panel.series for p in s.points]
    return [*found, panel.reference] if along_y and panel.reference else found


def _room(panel: Panel) -> list[float]:
    """The range of bars, with room for the labels behind them."""
    values = _values(panel, True)
    if not panel.log_x:
        return [0, 1.4 * max(values)]
    low, high = math.log10(min(values)), math.log10(max(values))
    span = max(high - low, 0.3)
    return [low - 0.3 * span, high + 0.5 * span]


_Drawn = tuple[list[dict[str, Any]], list[dict[str, Any]], list[dict[str, Any]]]


def _lines(panel: Panel) -> _Drawn:
    traces: list[dict[str, Any]] = []
    for series in panel.series:
        trace = _base(series) | {
            "mode": "lines+markers",
            "line": {"color": series.style.colour, "dash": _DASHES[series.style.dash], "width": 2},
        }
        if all(p.low is not None and p.high is not None for p in series.points):
            trace["error_y"] = {
                "type": "data",
                "symmetric": False,
                "array": [(p.high or 0) - p.y for p in series.points],
                "arrayminus": [p.y - (p.low or 0) for p in series.points],
                "thickness": 1,
                "width": 2,
            }
        traces.append(trace)
        if series.end is not None:
            x, y, why = series.end
            traces.append(
                {
                    "type": "scatter",
                    "x": [series.points[-1].x, x],
                    "y": [series.points[-1].y, y],
                    "mode": "lines+markers",
                    "line": {"color": series.style.colour, "dash": "dot", "width": 1.5},
                    "marker": {
                        "color": series.style.colour,
                        "symbol": ["circle", "x"],
                        "size": [0.1, 11],
                    },
                    "hovertemplate": f"{series.name}: {ENDS.get(why, why)} at {x:g}<extra></extra>",
                    "showlegend": False,
                    "legendgroup": series.name,
                }
            )
        traces += _ring(series)
    shapes, notes = _across(panel, "y")
    return traces, shapes, notes


def _base(series: Series) -> dict[str, Any]:
    return {
        "type": "scatter",
        "name": series.name + (" (wrong)" if any(p.wrong for p in series.points) else ""),
        "legendgroup": series.name,
        "x": [p.x for p in series.points],
        "y": [p.y for p in series.points],
        "text": [p.text for p in series.points],
        "hovertemplate": "%{text}<extra></extra>",
        "marker": {"color": series.style.colour, "symbol": _MARKERS[series.style.marker], "size": 8},
    }


def _ring(series: Series) -> list[dict[str, Any]]:
    bad = [p for p in series.points if p.wrong]
    if not bad:
        return []
    ring = {"color": "rgba(0,0,0,0)", "size": 17, "line": {"color": WRONG, "width": 2.5}}
    return [
        {
            "type": "scatter",
            "x": [p.x for p in bad],
            "y": [p.y for p in bad],
            "mode": "markers",
            "marker": ring,
            "hoverinfo": "skip",
            "showlegend": False,
            "legendgroup": series.name,
        }
    ]


def _scatter(panel: Panel) -> _Drawn:
    traces: list[dict[str, Any]] = []
    for i, series in enumerate(panel.series):
        trace = _base(series) | {
            "mode": "markers+text",
            "text": [series.name],
            "customdata": [p.text for p in series.points],
            "hovertemplate": "%{customdata}<extra></extra>",
            "textposition": "middle right" if i % 2 == 0 else "middle left",
            "textfont": {"color": series.style.colour, "size": 11},
            "cliponaxis": False,
        }
        trace["marker"]["size"] = 11
        traces += [trace, *_ring(series)]
    return traces, [], []


def _bars(panel: Panel) -> _Drawn:
    start = panel.reference if panel.log_x and panel.reference else 0.0
    traces = []
    for series in panel.series:
        point = series.points[0]
        label = bar_label(series)
        bar = {
            "type": "bar",
            "orientation": "h",
            "y": [series.name],
            "x": [point.y - start],
            "base": [start],
            "text": [f"{label}  <b>WRONG</b>" if point.wrong else label],
            "textposition": "outside",
            "cliponaxis": False,
            "customdata": [point.text],
            "hovertemplate": "%{customdata}<extra></extra>",
            "marker": {"color": series.style.colour},
        }
        if point.wrong:
            bar["marker"]["line"] = {"color": WRONG, "width": 2.5}
            bar["textfont"] = {"color": WRONG}
        traces.append(bar)
    shapes, notes = _across(panel, "x")
    return traces, shapes, notes


def _across(panel: Panel, along: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The reference line, and its name."""
    if panel.reference is None:
        return [], []
    other = "x" if along == "y" else "y"
    log = panel.log_y if along == "y" else panel.log_x
    place = {f"{along}0": panel.reference, f"{along}1": panel.reference, f"{other}0": 0, f"{other}1": 1}
    line = {"type": "line", f"{other}ref": "paper", "line": {"dash": "dash", "width": 1}, **place}
    note = {
        along: math.log10(panel.reference) if log else panel.reference,
        other: 1,
        f"{other}ref": "paper",
        "text": panel.reference_name,
        "showarrow": False,
        "font": {"size": 11},
        "xanchor": "right" if along == "y" else "left",
        "yanchor": "bottom",
    }
    return [line], [note]


_DRAW = {"lines": _lines, "scatter": _scatter, "bars": _bars}
