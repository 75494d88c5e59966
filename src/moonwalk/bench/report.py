"""All results as one HTML file that needs nothing else: plots to look into, tables, verdicts.

Plotly's script is inlined. A content security policy forbids the page every request, so that it cannot need a
network, today or later.
"""

from __future__ import annotations

import html
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .charts import ENDS, TITLES, WRONG, Panel, Series, chart
from .judgement import TOLERANCE, verdict

_FACTS = ("device", "jax", "jaxlib", "moonwalk", "commit", "python", "date")
_DASHES = {"solid": "solid", "dash": "dash", "dot": "dot", "dashdot": "dashdot"}
_MARKERS = {
    "circle": "circle",
    "square": "square",
    "diamond": "diamond",
    "triangle": "triangle-up",
    "cross": "cross",
    "star": "star",
}


def write(path: str | Path, results: Sequence[Mapping[str, Any]], tables: Mapping[str, Sequence[Any]]) -> Path:
    """Writes the report.

    **Arguments:**

    - `path`: of the HTML file.
    - `results`: what the store holds, one mapping per experiment.
    - `tables`: the tables (`title`, `columns`, `rows`, `notes`) of each experiment, by its name.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(render(results, tables), encoding="utf-8")
    return path


def render(results: Sequence[Mapping[str, Any]], tables: Mapping[str, Sequence[Any]]) -> str:
    """The report as text."""
    plots: list[dict[str, Any]] = []
    sections = [_section(result, tables.get(result["experiment"], ()), plots) for result in results]
    parts = {
        "style": _STYLE,
        "contents": "".join(
            f'<a href="#{r["experiment"]}">{html.escape(r["experiment"])}</a>' for r in results
        ),
        "facts": _facts(results),
        "warning": _warning(results),
        "sections": "".join(sections),
        "plotly": _plotly(),
        "plots": json.dumps(plots, allow_nan=False).replace("</", "<\\/"),
        "script": _SCRIPT,
    }
    page = _PAGE
    for name, text in parts.items():
        page = page.replace(f"@@{name}@@", text)
    return page


def _plotly() -> str:
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise ImportError("the report is drawn by Plotly: pip install 'moonwalk-jax[plots]'") from error
    return get_plotlyjs().replace("</script", "<\\/script")


# --- head ---------------------------------------------------------------------------------------------


def _facts(results: Sequence[Mapping[str, Any]]) -> str:
    """What all results have in common stands on top; what they do not, at each experiment."""
    rows = []
    for name in _FACTS:
        found = _common(results, name)
        if found is not None:
            rows.append(f"<div><dt>{name}</dt><dd>{html.escape(found)}</dd></div>")
    return "".join(rows)


def _common(results: Sequence[Mapping[str, Any]], name: str) -> str | None:
    found = {str(r["header"].get(name, "")) for r in results}
    if name == "date" and len(found) > 1:
        return f"{min(found)} to {max(found)}"
    return found.pop() if len(found) == 1 and found != {""} else None


def _warning(results: Sequence[Mapping[str, Any]]) -> str:
    """Whoever reads only the top should know of gradients that are wrong."""
    counts = {
        r["experiment"]: sum(verdict(x, r["records"]) == "WRONG" for x in r["records"]) for r in results
    }
    wrong = {name: count for name, count in counts.items() if count}
    if not wrong:
        return ""
    where = ", ".join(f'<a href="#{name}">{name}</a> ({count})' for name, count in wrong.items())
    plural = "measurements have" if sum(wrong.values()) > 1 else "measurement has"
    return (
        f'<p class="warning"><b class="bad">{sum(wrong.values())} {plural} a wrong gradient</b>, and nothing '
        f"else that is said of them counts: {where}. They are ringed in plots and marked in tables.</p>"
    )


# --- sections -----------------------------------------------------------------------------------------


def _section(result: Mapping[str, Any], tables: Sequence[Any], plots: list[dict[str, Any]]) -> str:
    name, header = result["experiment"], result["header"]
    found = chart(result)
    own = [f"{n} {header[n]}" for n in ("device", "jax", "commit") if header.get(n)]
    quick = '<span class="badge">quick sizes</span>' if header.get("quick") else ""
    text = [
        f'<section id="{name}"><h2>{html.escape(TITLES.get(name, name))} {quick}</h2>',
        f'<p class="own">{html.escape(" · ".join(own))} · <code>moonwalk bench {name}</code></p>',
    ]
    for row in found.rows if found else ():
        if row.title:
            text.append(f"<h3>{html.escape(row.title)}</h3>")
        text.append('<div class="row">' if len(row.panels) % 2 else '<div class="row even">')
        for panel in row.panels:
            plots.append({"id": f"plot-{len(plots)}", **plot(panel)})
            height = 90 + 26 * len(panel.series) if panel.kind == "bars" else 360
            text.append(f'<div class="plot" id="{plots[-1]["id"]}" style="height:{height}px"></div>')
        text.append("</div>")
    text += [table(t) for t in tables]
    text.append(_records(result))
    return "".join([*text, "</section>"])


def table(given: Any) -> str:
    """A `Table` as HTML; verdicts are coloured, and wrong gradients stand out."""
    head = "".join(f"<th>{html.escape(str(c))}</th>" for c in given.columns)
    body = "".join("<tr>" + "".join(_cell(c) for c in row) + "</tr>" for row in given.rows)
    notes = given.notes if not isinstance(given.notes, str) else [given.notes] if given.notes else []
    under = "".join(f"<p>{html.escape(n)}</p>" for n in notes)
    return (
        f"<h3>{html.escape(given.title)}</h3>"
        f'<div class="table"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
        + (f'<div class="notes">{under}</div>' if under else "")
    )


_TONES = {
    "wrong": "bad",
    "as the paper": "good",
    "exact": "good",
    "less": "fair",
    "more": "poor",
    "oom": "poor",
    "out of memory": "poor",
    "timeout": "poor",
    "error": "poor",
    "refused": "fair",
}


def _cell(content: Any) -> str:
    if content is None:
        return '<td class="none">–</td>'
    if isinstance(content, bool):
        content = "yes" if content else "no"
    if isinstance(content, int | float):
        return f'<td class="number">{_number(content)}</td>'
    text = html.escape(str(content))
    tone = next((t for word, t in _TONES.items() if str(content).lower().startswith(word)), "")
    if "wrong" in str(content).lower():
        tone = "bad"
    numeric = not tone and str(content)[:1].isdigit()
    return f'<td class="{tone or ("number" if numeric else "")}">{text}</td>'


def _number(value: float) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.3g}" if 1e-3 <= abs(value) < 1e4 or value == 0 else f"{value:.1e}"


def _records(result: Mapping[str, Any]) -> str:
    """Every measurement, folded away."""
    records = result["records"]
    columns = "network,variant,method,depth,width,batch,temporaries MiB,process peak MiB,ms,error,verdict".split(",")
    rows = []
    for record in records:
        task, seconds = record["task"], record.get("seconds")
        found = verdict(record, records)
        mib = [None if record.get(n) is None else record[n] / 2**20 for n in ("temp_bytes", "peak_bytes")]
        label = ENDS.get(found, found)
        rows.append(
            [
                *(task.get(c) for c in ("network", "variant", "method", "depth", "width", "batch")),
                *mib,
                None if seconds is None else 1e3 * seconds["median"],
                record.get("gradient_error"),
                label if not record.get("message") else f"{label}: {record['message'].splitlines()[0]}",
            ]
        )
    head = "".join(f"<th>{c}</th>" for c in columns)
    body = "".join("<tr>" + "".join(_cell(c) for c in row) + "</tr>" for row in rows)
    return (
        f"<details><summary>all {len(rows)} measurements</summary>"
        f'<div class="table"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div></details>'
    )


# --- plots --------------------------------------------------------------------------------------------


def plot(panel: Panel) -> dict[str, Any]:
    """Plotly's traces and layout. Colours of text and grid are set on the page, by its theme."""
    traces, shapes, notes = _DRAW[panel.kind](panel)
    axes = [
        {"title": {"text": label}, "type": "log" if log else "linear", "automargin": True, "exponentformat": "power"}
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
    if panel.kind == "lines" and not panel.log_y:
        layout["yaxis"]["rangemode"] = "tozero"
    if panel.kind == "bars":
        layout["yaxis"] = {"autorange": "reversed", "automargin": True, "ticks": ""}
    return {"data": traces, "layout": layout}


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
        label = f"{point.y:.3g}" if point.y < 1000 else f"{point.y:,.0f}"
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
    """The line of reference, and its name."""
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


# --- the page -----------------------------------------------------------------------------------------

_PAGE = f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy"
  content="default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Moonwalk, measured</title>
<style>@@style@@</style>
</head>
<body>
<header>
<div class="top"><h1>Moonwalk, measured</h1><button id="theme" type="button">light / dark</button></div>
<p class="lead">Memory, time and exactness of gradients by Moonwalk, by backpropagation with and without checkpoints,
and by forward methods, beside what <i>Moonwalk: Inverse-Forward Differentiation</i> says of them.</p>
<dl>@@facts@@</dl>
@@warning@@
<p class="legend">Every measurement was taken in a process of its own. Memory is what the compiled program allocates beside
its arguments and results, and on a GPU also the peak of the process; times are medians. A gradient is called
<b class="bad">wrong</b> when it is off its reference by more than {TOLERANCE:g} beyond twice what backpropagation is off at the
same precision.</p>
<nav>@@contents@@</nav>
</header>
<main>@@sections@@</main>
<script>@@plotly@@</script>
<script type="application/json" id="plots">@@plots@@</script>
<script>@@script@@</script>
</body>
</html>
"""

_STYLE = """
:root{--ink:#1b1f24;--soft:#5b6570;--paper:#fdfdfc;--panel:#ffffff;--line:#dfe3e6;--grid:#e9ecee;--link:#0062a3;
--good:#0a6b4d;--good-bg:#e2f4ec;--fair:#5c4a00;--fair-bg:#fbf2cf;--poor:#8a3300;--poor-bg:#fdeadd;--bad-bg:#e00034}
:root[data-theme=dark]{--ink:#e6e8ea;--soft:#9aa4ae;--paper:#14171a;--panel:#1b1f23;--line:#343a40;--grid:#2b3136;
--link:#6cb8f0;--good:#7fdcb8;--good-bg:#12382c;--fair:#ecd37a;--fair-bg:#3a3213;--poor:#ffb083;--poor-bg:#45240f}
*{box-sizing:border-box}
html{scroll-behavior:smooth}
body{margin:0;background:var(--paper);color:var(--ink);font:16px/1.55 system-ui,-apple-system,"Segoe UI",Roboto,
"Helvetica Neue",Arial,sans-serif;font-variant-numeric:tabular-nums}
header,main{max-width:1280px;margin:0 auto;padding:0 28px}
header{padding-top:36px}
.top{display:flex;align-items:baseline;justify-content:space-between;gap:16px}
h1{font-size:34px;line-height:1.15;letter-spacing:-.02em;margin:0}
h2{font-size:23px;letter-spacing:-.01em;margin:0 0 2px;padding-top:30px;border-top:1px solid var(--line)}
h3{font-size:15.5px;margin:26px 0 8px;color:var(--soft);font-weight:600}
.lead{font-size:18px;max-width:68ch;margin:10px 0 18px}
.legend,.own,.notes{color:var(--soft);font-size:14px;max-width:90ch}
.notes p{margin:6px 0}
.own{margin:0 0 6px}
a{color:var(--link);text-decoration:none}a:hover{text-decoration:underline}
code{font:13px ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace}
dl{display:flex;flex-wrap:wrap;gap:10px 34px;margin:0 0 14px}
dt{font-size:12px;color:var(--soft)}
dd{margin:0;font-weight:600}
nav{display:flex;flex-wrap:wrap;gap:4px 18px;padding:10px 0;margin:14px 0 26px}
button{font:13px inherit;color:var(--soft);background:none;border:1px solid var(--line);border-radius:6px;
padding:5px 11px;cursor:pointer}
button:hover{color:var(--ink)}
section{margin-bottom:44px}
.badge{font-size:12px;font-weight:600;color:var(--soft);border:1px solid var(--line);border-radius:99px;
padding:2px 9px;vertical-align:middle;letter-spacing:0}
.row{display:grid;grid-template-columns:repeat(auto-fit,minmax(380px,1fr));gap:14px}
.even{grid-template-columns:repeat(auto-fit,minmax(min(100%,520px),1fr))}
.plot{background:var(--panel);border:1px solid var(--line);border-radius:10px;min-width:0;overflow:hidden}
.table{overflow-x:auto;border:1px solid var(--line);border-radius:10px;background:var(--panel)}
table{border-collapse:collapse;width:100%;font-size:14px}
th,td{padding:7px 12px;text-align:left;border-bottom:1px solid var(--grid);vertical-align:top}
tbody tr:last-child td{border-bottom:0}
th{font-size:12.5px;color:var(--soft);font-weight:600;white-space:nowrap}
td.number{text-align:right;white-space:nowrap}
td.none{color:var(--soft);text-align:right}
td.good{color:var(--good);background:var(--good-bg)}
td.fair{color:var(--fair);background:var(--fair-bg)}
td.poor{color:var(--poor);background:var(--poor-bg)}
td.bad,b.bad{color:#fff;background:var(--bad-bg);font-weight:700}
b.bad{padding:1px 7px;border-radius:4px}
.warning{border-left:4px solid var(--bad-bg);padding:8px 14px;margin:16px 0;background:var(--panel)}
details{margin-top:18px}summary{cursor:pointer;color:var(--soft);font-size:14px;margin-bottom:8px}
@media(max-width:480px){.row{grid-template-columns:1fr}header,main{padding-inline:14px}}
@media print{button,nav{display:none}}
"""

_SCRIPT = """
const plots = JSON.parse(document.getElementById("plots").textContent);
const root = document.documentElement;
const dark = matchMedia("(prefers-color-scheme: dark)");
const themed = (layout) => {
  const css = getComputedStyle(root), of = (name) => css.getPropertyValue(name).trim();
  const axis = {gridcolor: of("--grid"), zerolinecolor: of("--line"), linecolor: of("--soft"), tickcolor: of("--soft")};
  return {...layout,
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: {family: getComputedStyle(document.body).fontFamily, size: 12, color: of("--ink")},
    margin: {l: 56, r: 26, t: 46, b: 46},
    modebar: {bgcolor: "rgba(0,0,0,0)", color: of("--line"), activecolor: of("--soft"), remove: ["select", "lasso"]},
    hoverlabel: {align: "left", font: {size: 12}},
    legend: {orientation: "h", yref: "container", y: 0.01, yanchor: "bottom", x: 0, font: {size: 11}, bgcolor: "rgba(0,0,0,0)"},
    xaxis: {...layout.xaxis, ...axis}, yaxis: {...layout.yaxis, ...axis},
    shapes: layout.shapes.map((s) => ({...s, line: {...s.line, color: of("--soft")}})),
    annotations: layout.annotations.map((a) => ({...a, font: {...a.font, color: of("--soft")}}))};
};
const draw = () => plots.forEach((p) =>
  Plotly.react(p.id, p.data, themed(p.layout), {responsive: true, displaylogo: false}));
const choose = (name) => { root.dataset.theme = name; draw(); };
document.getElementById("theme").addEventListener("click",
  () => choose(root.dataset.theme === "dark" ? "light" : "dark"));
dark.addEventListener("change", () => choose(dark.matches ? "dark" : "light"));
choose(dark.matches ? "dark" : "light");
"""
