"""All results as one self-contained HTML file: interactive plots, tables, verdicts.

Plotly's script is inlined. A content security policy forbids all requests, so that the page never needs
a network.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from . import experiments, text
from .charts import ENDS, chart
from .judgement import EXACT, TOLERANCE, verdict
from .plots import plot
from .store import load, replace
from .tasks import Table

_SIZES = ("network", "variant", "method", "depth", "width", "batch")
_FACTS = ("device", "jax", "jaxlib", "moonwalk", "commit", "python", "date")


def write(files: Sequence[Path], folder: Path) -> Path:
    """Writes `folder/report.html` from files of records, in the order in which they are given."""
    results = [load(path) for path in files]
    tables = {
        str(r["experiment"]): experiments.load(r["experiment"]).summary(r["records"]) for r in results
    }
    path = folder / "report.html"
    replace(path, render(results, tables))
    return path


def render(results: Sequence[Mapping[str, Any]], tables: Mapping[str, Sequence[Table]]) -> str:
    """The report as text.

    **Arguments:**

    - `results`: what files of records hold, one per experiment.
    - `tables`: what `summary` of each experiment made of its records, by its name.
    """
    plots: list[dict[str, Any]] = []
    sections = [_section(result, tables.get(result["experiment"], ()), plots) for result in results]
    parts = {
        "style": _file("page.css"),
        "contents": "".join(
            f'<a href="#{r["experiment"]}">{html.escape(r["experiment"])}</a>' for r in results
        ),
        "facts": _facts(results),
        "warning": _warning(results),
        "sections": "".join(sections),
        "plotly": _plotly(),
        "plots": json.dumps(plots, allow_nan=False).replace("</", "<\\/"),
        "script": _file("page.js"),
        "tolerance": f"{TOLERANCE:g}",
        "exact": f"{EXACT:g}",
    }
    return re.sub(r"@@(\w+)@@", lambda found: parts[found[1]], _file("page.html"))


def _file(name: str) -> str:
    return resources.files(str(__package__)).joinpath(name).read_text(encoding="utf-8")


def _plotly() -> str:
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise ImportError("the report is drawn by Plotly: pip install 'moonwalk-jax[plots]'") from error
    return get_plotlyjs().replace("</script", "<\\/script")


# --- head ---------------------------------------------------------------------------------------------


def _facts(results: Sequence[Mapping[str, Any]]) -> str:
    """Facts that all results share are shown at the top; others with each experiment."""
    rows = []
    for name in _FACTS:
        if found := _common(results, name):
            rows.append(f"<div><dt>{name}</dt><dd>{html.escape(found)}</dd></div>")
    return "".join(rows)


def _common(results: Sequence[Mapping[str, Any]], name: str) -> str | None:
    found = {str(r["header"].get(name, "")) for r in results}
    if name == "date" and len(found) > 1:
        return f"{min(found)} to {max(found)}"
    return found.pop() if len(found) == 1 and found != {""} else None


def _warning(results: Sequence[Mapping[str, Any]]) -> str:
    """A warning about wrong gradients at the top of the page."""
    counts = {
        r["experiment"]: sum(verdict(x, r["records"]) == "WRONG" for x in r["records"]) for r in results
    }
    wrong = {name: count for name, count in counts.items() if count}
    if not wrong:
        return ""
    where = ", ".join(f'<a href="#{name}">{name}</a> ({count})' for name, count in wrong.items())
    plural = "measurements have" if sum(wrong.values()) > 1 else "measurement has"
    return (
        f'<p class="warning"><b class="bad">{sum(wrong.values())} {plural} a wrong gradient</b>, '
        f"and nothing else that is said of them counts: {where}. They are ringed in plots and marked in "
        "tables.</p>"
    )


# --- sections -----------------------------------------------------------------------------------------


def _section(result: Mapping[str, Any], tables: Sequence[Table], plots: list[dict[str, Any]]) -> str:
    name, header = str(result["experiment"]), result["header"]
    found = chart(result)
    own = [f"{n} {header[n]}" for n in ("device", "jax", "commit") if header.get(n)]
    quick = '<span class="badge">quick sizes</span>' if header.get("quick") else ""
    parts = [
        f'<section id="{name}"><h2>{html.escape(experiments.load(name).TITLE)} {quick}</h2>',
        f'<p class="own">{html.escape(" · ".join(own))} · <code>moonwalk bench {name}</code></p>',
    ]
    for row in found.rows if found else ():
        if row.title:
            parts.append(f"<h3>{html.escape(row.title)}</h3>")
        wide = len(row.panels) % 2 == 0 or row.panels[0].kind == "bars"
        parts.append('<div class="row even">' if wide else '<div class="row">')
        for panel in row.panels:
            plots.append({"id": f"plot-{len(plots)}", **plot(panel)})
            height = 140 + 26 * len(panel.series) if panel.kind == "bars" else 360
            parts.append(f'<div class="plot" id="{plots[-1]["id"]}" style="height:{height}px"></div>')
        parts.append("</div>")
    parts += [table(t) for t in tables]
    parts.append(_records(result))
    return "".join([*parts, "</section>"])


def table(given: Table) -> str:
    """A `Table` as HTML; verdicts are coloured, and wrong gradients stand out."""
    under = "".join(f"<p>{html.escape(n)}</p>" for n in given.notes)
    notes = f'<div class="notes">{under}</div>' if under else ""
    return f"<h3>{html.escape(given.title)}</h3>" + _grid(given.columns, given.rows) + notes


def _grid(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Columns of numbers are right-aligned, others left-aligned."""
    right = [all(_is_number(row[i]) for row in rows) for i in range(len(columns))]
    cells = zip(columns, right, strict=True)
    head = "".join(f'<th class="{"number" if r else ""}">{html.escape(c)}</th>' for c, r in cells)
    lines = ("<tr>" + "".join(map(_cell, columns, row, right)) + "</tr>" for row in rows)
    return (
        f'<div class="table"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(lines)}</tbody></table></div>"
    )


def _is_number(content: Any) -> bool:
    return content is None or isinstance(content, int | float) or str(content)[:1].isdigit()


_TONES = {  # by the word that a cell begins with, perhaps after a number
    "wrong|unlike the paper": "bad",
    "as the paper|same|none|exact": "good",
    "less|inexact|refused": "fair",
    "more|oom|out of memory|timeout|took too long|error|failed": "poor",
}


def _cell(column: str, content: Any, right: bool) -> str:
    place = "number" if right else ""
    if content is None:
        return f'<td class="none {place}">–</td>'
    said = text.cell(column, content)
    tones = (t for words, t in _TONES.items() if re.match(rf"(-?[\d.]+ )?({words})\b", said.lower()))
    tone = "" if isinstance(content, int | float) else next(tones, "")
    return f'<td class="{tone or place}">{html.escape(said)}</td>'


def _records(result: Mapping[str, Any]) -> str:
    """Every measurement, folded away."""
    records = result["records"]
    columns = [*_SIZES, "temporaries, bytes", "peak, bytes", "seconds", "gradient error", "verdict"]
    rows = []
    for record in records:
        task, seconds = record["task"], record.get("seconds")
        found = verdict(record, records)
        label = ENDS.get(found, found)
        rows.append(
            [
                *(task.get(c) for c in _SIZES),
                record.get("temp_bytes"),
                record.get("peak_bytes"),
                seconds and seconds["median"],
                record.get("gradient_error"),
                label if not record.get("message") else f"{label}: {record['message'].splitlines()[0]}",
            ]
        )
    summary = f"<summary>all {len(rows)} measurements</summary>"
    return f"<details>{summary}{_grid(columns, rows)}</details>"
