"""Charts as pictures: one PNG and one SVG per experiment, by Matplotlib."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .. import files
from .charts import ENDS, WRONG, Chart, Panel, Series, bar_label, chart

_DASHES = {"solid": "-", "dash": (0, (5, 2)), "dot": (0, (1.2, 1.6)), "dashdot": (0, (5, 1.6, 1.2, 1.6))}
_MARKERS = {"circle": "o", "square": "s", "diamond": "D", "triangle": "^", "cross": "P", "star": "*"}
_SIZES = {"*": 9, "^": 6, "P": 6.5}  # so that all markers look equally large
_LOOK = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "axes.titlesize": 9.5,
    "axes.titleweight": "bold",
    "axes.labelsize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#666666",
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e4e4e4",
    "grid.linewidth": 0.7,
    "xtick.color": "#444444",
    "ytick.color": "#444444",
    "lines.linewidth": 1.7,
    "lines.markersize": 5,
    "legend.frameon": False,
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "moonwalk",  # the same picture, the same file
}


def draw(name: str, result: Mapping[str, Any], folder: str | Path) -> list[Path]:
    """Writes `folder/<name>.png` and `.svg`, the figure of one experiment's file of records.

    **Returns:** the files; none where there is nothing to draw.
    """
    found = chart(result)
    if found is None:
        return []
    plt = _pyplot()
    folder = files.folder(folder)
    paths = [folder / f"{name}.{kind}" for kind in ("png", "svg")]
    with plt.rc_context(_LOOK):
        figure = _figure(plt, found, caption(result["header"]))
        for path in paths:
            dated = {"metadata": {"Date": None}} if path.suffix == ".svg" else {}
            with files.writing(path):
                figure.savefig(path, dpi=150, **dated)
        plt.close(figure)
    return paths


def caption(header: Mapping[str, Any]) -> str:
    """Where and with what it was measured."""
    parts = [header.get("device"), f"JAX {header.get('jax')}", f"commit {header.get('commit')}"]
    return ", ".join(str(p) for p in parts if p) + (", quick sizes" if header.get("quick") else "")


def _pyplot() -> Any:
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError(
            "figures are drawn by Matplotlib: pip install 'moonwalk-jax[plots]'"
        ) from error
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def _figure(plt: Any, found: Chart, text: str) -> Any:
    columns = max(len(row.panels) for row in found.rows)
    bars = all(p.kind == "bars" for p in found.panels)
    heights = [
        max(1.25 + 0.28 * len(p.series) if p.kind == "bars" else 3.0 for p in row.panels)
        for row in found.rows
    ]
    scattered = any(p.kind == "scatter" for p in found.panels)
    width = 8.5 if bars else max((5.2 if scattered else 3.5) * columns, 7.5)
    figure = plt.figure(figsize=(width, sum(heights) + 0.35 * len(heights) + 1.1), layout="constrained")
    title = textwrap.fill(found.title, int(8.7 * width))
    figure.suptitle(title, fontsize=12, fontweight="bold", x=0.01, ha="left")
    placed = []
    parts = figure.subfigures(len(found.rows), 1, height_ratios=heights, squeeze=False)
    for part, row in zip(parts[:, 0], found.rows, strict=True):
        if row.title:
            part.suptitle(row.title, fontsize=9.5, color="#555555", x=0.01, ha="left")
        axes = part.subplots(1, len(row.panels), squeeze=False)[0]
        # The same room in all panels for the name of the line across bars.
        pad = 16 if any(p.kind == "bars" and p.reference for p in row.panels) else 6
        for axis, panel in zip(axes, row.panels, strict=True):
            _DRAW[panel.kind](axis, panel)
            if (
                panel.kind == "bars"
                and axis is not axes[0]
                and _names_of(panel) == _names_of(row.panels[0])
            ):
                axis.set_yticklabels([])  # the first panel has them
            # Panels of bars are narrow, and layouts leave titles out of account.
            most = 72 // len(row.panels)
            name = textwrap.fill(panel.title, most) if panel.kind == "bars" else panel.title
            axis.set_title(name, loc="left", pad=pad)
            placed.append((axis, panel))
    strip = 0.24 / figure.get_figheight()  # below everything, for where it was measured
    if not _legend(figure, found):
        figure.get_layout_engine().set(rect=(0, strip, 1, 1 - strip))
    figure.text(0.995, 0.25 * strip, text, fontsize=7.5, color="#777777", ha="right", va="bottom")
    figure.canvas.draw()  # places are known from here on
    for axis, panel in placed:
        _names(axis, panel)
    return figure


# --- panels -------------------------------------------------------------------------------------------


def _scales(axis: Any, panel: Panel) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    if panel.log_x:
        axis.set_xscale("log", base=2 if panel.kind == "lines" else 10)
    if panel.log_y:
        axis.set_yscale("log")
    for log, side in ((panel.log_x, axis.xaxis), (panel.log_y, axis.yaxis)):
        low, high = side.get_view_interval()
        if log and high / low < 3e3:  # plain numbers, more than one to a decade
            side.set_major_locator(LogLocator(subs=(1, 2, 5) if high / low < 60 else (1,)))
            side.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g}"))
            side.set_minor_formatter(NullFormatter())
    axis.set_xlabel(panel.x)
    if panel.y:
        axis.set_ylabel(panel.y)


def _lines(axis: Any, panel: Panel) -> None:
    for series in panel.series:
        look: dict[str, Any] = {"color": series.style.colour, "zorder": 3}
        xs, ys = [p.x for p in series.points], [p.y for p in series.points]
        dash, marker = _DASHES[series.style.dash], _MARKERS[series.style.marker]
        axis.plot(xs, ys, ls=dash, marker=marker, ms=_SIZES.get(marker, 5), mec="white", mew=0.5, **look)
        if any(p.low is not None for p in series.points):
            low, high = [p.low for p in series.points], [p.high for p in series.points]
            axis.fill_between(xs, low, high, color=series.style.colour, alpha=0.15, lw=0)
        _wrong(axis, series)
        if series.end is not None:
            x, y, _ = series.end
            axis.plot([xs[-1], x], [ys[-1], y], ls=(0, (1, 1.5)), lw=1.2, **look)
            axis.plot([x], [y], ls="", marker="x", ms=8, mew=2.2, **look)
    _across(axis, panel, vertical=False)
    _scales(axis, panel)
    ticks = sorted(
        {p.x for s in panel.series for p in s.points} | {s.end[0] for s in panel.series if s.end}
    )
    if len(ticks) <= 7:
        axis.set_xticks(ticks, [f"{t:g}" for t in ticks])
        axis.minorticks_off()
    if not panel.log_y and panel.y != "%":
        axis.set_ylim(bottom=0)


def _wrong(axis: Any, series: Series) -> None:
    bad = [p for p in series.points if p.wrong]
    axis.plot(
        [p.x for p in bad],
        [p.y for p in bad],
        ls="",
        marker="o",
        ms=11,
        mfc="none",
        mec=WRONG,
        mew=1.6,
        zorder=4,
    )


def _scatter(axis: Any, panel: Panel) -> None:
    for series in panel.series:
        point = series.points[0]
        axis.plot(
            [point.x],
            [point.y],
            ls="",
            marker=_MARKERS[series.style.marker],
            ms=8,
            color=series.style.colour,
            mec="white",
            mew=0.6,
            zorder=3,
        )
        _wrong(axis, series)
    axis.margins(x=0.3, y=0.14)
    _scales(axis, panel)


def _bars(axis: Any, panel: Panel) -> None:
    names = [s.name for s in panel.series]
    points = [s.points[0] for s in panel.series]
    places = range(len(points))[::-1]  # the first on top
    colours = [s.style.colour for s in panel.series]
    # On a logarithmic axis the only natural start of a bar is the reference.
    start = panel.reference if panel.log_x and panel.reference else 0.0
    axis.barh(places, [p.y - start for p in points], left=start, color=colours, height=0.68, zorder=3)
    spans = [(y, p.low, p.high) for y, p in zip(places, points, strict=True) if p.low is not None]
    if spans:
        axis.hlines(
            [s[0] for s in spans],
            [s[1] for s in spans],
            [s[2] for s in spans],
            color="#222222",
            lw=1,
            zorder=4,
        )
    for place, series, point in zip(places, panel.series, points, strict=True):
        label = bar_label(series)
        end = max(point.y, point.high or 0, start)
        remark = "wrong" if point.wrong else point.remark
        text = f"{label}   {remark}".rstrip()
        axis.annotate(
            text,
            (end, place),
            xytext=(5, 0),
            textcoords="offset points",
            va="center",
            fontsize=8.5,
            color=WRONG if point.wrong else "#333333",
        )
    axis.set_yticks(list(places), names)
    axis.grid(axis="y", visible=False)
    axis.margins(x=0.16)
    _across(axis, panel, vertical=True)
    _scales(axis, panel)


def _names(axis: Any, panel: Panel) -> None:
    """Place the names of scattered points where they cover least; notes behind lines, top down."""
    if panel.kind == "bars":
        return
    scattered = panel.kind == "scatter"
    named = [(s.name if scattered else s.note, s) for s in panel.series if scattered or s.note]
    named = named if scattered else sorted(named, key=lambda pair: -pair[1].points[-1].y)
    place = {s.name: axis.transData.transform((s.points[-1].x, s.points[-1].y)) for s in panel.series}
    taken = [(x - 5, y - 5, 10.0, 10.0) for x, y in place.values()] if scattered else []
    unit = axis.figure.dpi / 72
    frame = axis.get_window_extent().bounds
    for text, series in named:
        (x, y), wide, tall = place[series.name], 4.4 * len(text) * unit, 8.5 * unit
        tried = []
        for dx, dy in _AROUND if scattered else _BEHIND:
            left = x + unit * dx - (0 if dx > 0 else wide if dx < 0 else wide / 2)
            box = (left, y + unit * dy - tall / 2, wide, tall)
            outside = wide * tall - _overlap(box, frame) if scattered else 0.0  # over ticks and names
            covered = sum(_overlap(box, other) for other in taken) + outside
            tried.append((round(covered, 3), len(tried), dx, dy, box))
        _, _, dx, dy, box = min(tried)
        taken.append(box)
        name = axis.annotate(
            text,
            (series.points[-1].x, series.points[-1].y),
            xytext=(dx, dy),
            textcoords="offset points",
            ha="left" if dx > 0 else "right" if dx < 0 else "center",
            va="center",
            fontsize=7.5,
            color=series.style.colour,
            annotation_clip=False,
        )
        name.set_in_layout(not scattered)  # otherwise the axes would be resized after names were placed


_AROUND = [(d, v) for v in (0, 7, -7, 14, -14, 21, -21, 28) for d in (8, -8, 0) if (d, v) != (0, 0)]
_BEHIND = [(8, -4 * step) for step in range(30)]


def _overlap(a: tuple[float, ...], b: tuple[float, ...]) -> float:
    width = min(a[0] + a[2], b[0] + b[2]) - max(a[0], b[0])
    height = min(a[1] + a[3], b[1] + b[3]) - max(a[1], b[1])
    return max(width, 0.0) * max(height, 0.0)


def _across(axis: Any, panel: Panel, vertical: bool) -> None:
    if panel.reference is None:
        return
    line = axis.axvline if vertical else axis.axhline
    line(panel.reference, color="#333333", ls=(0, (4, 3)), lw=1, zorder=5 if vertical else 2)
    if vertical:
        place, where = (panel.reference, 1.0), axis.get_xaxis_transform()
    else:
        place, where = (1.0, panel.reference), axis.get_yaxis_transform()
    axis.annotate(
        panel.reference_name,
        place,
        xycoords=where,
        xytext=(-3, 3) if not vertical else (4, -2),
        textcoords="offset points",
        ha="right" if not vertical else "left",
        va="bottom",
        fontsize=7.5,
        color="#555555",
    )


_DRAW = {"lines": _lines, "scatter": _scatter, "bars": _bars}


def _names_of(panel: Panel) -> list[str]:
    return [series.name for series in panel.series]


def _legend(figure: Any, found: Chart) -> bool:
    """Draw the figure's legend: its lines, and what its marks mean. Returns whether it has one."""
    from matplotlib.lines import Line2D

    lined = [p for p in found.panels if p.kind == "lines"]
    entries = {
        s.name: Line2D(
            [],
            [],
            color=s.style.colour,
            ls=_DASHES[s.style.dash],
            marker=_MARKERS[s.style.marker],
            mec="white",
            mew=0.5,
            label=s.name,
        )
        for p in lined
        for s in p.series
    }
    ends = sorted({s.end[2] for p in lined for s in p.series if s.end})
    if ends:
        label = " / ".join(ENDS.get(e, e) for e in ends)
        entries["ends"] = Line2D([], [], ls="", marker="x", ms=7, mew=2, color="#333333", label=label)
    if any(q.wrong for p in found.panels if p.kind != "bars" for s in p.series for q in s.points):
        ring = {"marker": "o", "ms": 9, "mfc": "none", "mec": WRONG, "mew": 1.6}
        entries["wrong"] = Line2D([], [], ls="", label="the gradient is wrong", **ring)
    if entries:
        room = figure.get_figwidth() - 3.4  # inches beside the caption
        columns = min(len(entries), max(1, int(room / (0.45 + 0.068 * max(map(len, entries))))))
        figure.legend(
            handles=list(entries.values()), loc="outside lower left", ncols=columns, fontsize=8
        )
    return bool(entries)
