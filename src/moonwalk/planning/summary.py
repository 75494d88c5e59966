"""A plan as text: a summary that fits on a screen, and the table of all its rows."""

from __future__ import annotations

import itertools
import os
import re
import textwrap
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any

from ..segments.base import Row, format_bytes
from .methods import Moonwalk

if TYPE_CHECKING:
    from .report import Plan

LINES, COLUMNS = 20, 100  # that a summary takes at most
_SLOWER = 1.03  # than backpropagation: from here on there are faster plans worth naming
_DONE = {"store": "stored", "recompute": "recomputed", "walk": "walked", "invert": "inverted"}
_FRAGMENT = "moonwalk.value_and_grad"  # in the way out of a block that a walk keeps a fragment of
_DETAILS = ("anchor", "fragment", "fork")  # cotangents, or parts of them, that a walk keeps


def format_seconds(seconds: float) -> str:
    """'12.3 ms'."""
    if seconds >= 1:
        return f"{seconds:.3g} s"
    return f"{1e3 * seconds:.3g} ms" if seconds >= 1e-3 else f"{1e6 * seconds:.3g} µs"


def summary(plan: Plan) -> str:
    """What the plan takes, what it does, and what would help: at most `LINES` lines of `COLUMNS`."""
    groups = _groups(plan)
    first, last = _totals(plan), _hints(plan, groups)
    middle = _actions(groups, LINES - len(first) - len(last))
    return "\n".join(_clipped(line, COLUMNS) for line in (*first, *middle, *last))


# -- what it takes -----------------------------------------------------------------------------------


def _totals(plan: Plan) -> list[str]:
    beside = plan.argument_bytes + plan.result_bytes
    table = [("predicted for " + plan.device, "temporaries", "in all", "time")]
    own = lambda of_all: of_all // plan.parts
    rows: list[tuple[str, int, float | None]] = [("this plan", own(plan.peak_bytes), plan.seconds)]
    if plan.compiled_bytes is not None:
        rows.append(("this plan, as compiled", plan.compiled_bytes, None))
    rows.append(("backpropagation", own(plan.backprop_bytes), plan.backprop_seconds))
    rows.append(("checkpointing", own(plan.checkpoint_bytes), plan.checkpoint_seconds))
    for name, bytes_, seconds in rows:
        time = "" if seconds is None else format_seconds(seconds)
        table.append((name, format_bytes(bytes_), format_bytes(bytes_ + beside), time))
    lines = [_title(plan)]
    lines += [f"  {name:<40} {a:>12} {b:>12} {c:>12}".rstrip() for name, a, b, c in table]
    about = f"arguments {format_bytes(plan.argument_bytes)}, results {format_bytes(plan.result_bytes)}"
    if plan.budget_bytes is not None:
        about += f", budget {format_bytes(plan.budget_bytes)}"
    if plan.parts > 1:
        about += f"; bytes of each of {plan.parts} devices"
    return [*lines, f"  in all: with {about}"]


def _title(plan: Plan) -> str:
    counts = (
        (plan.walked, "block walked", "blocks walked"),
        (plan.anchors, "anchor", "anchors"),
        (plan.fragments, "fragment", "fragments"),
        (plan.inverted, "block inverted", "blocks inverted"),
        (plan.rerun, "segment run again", "segments run again"),
        (plan.jvps, "jvp for the seed", "jvps for the seed"),
    )
    done = ", ".join(f"{n} {many if n > 1 else one}" for n, one, many in counts if n)
    parts = (plan.kinds or "nothing to differentiate", done, "gains measured" if plan.measured else "")
    return f"{_settings(plan.method)}: " + "; ".join(filter(None, parts))


def _settings(method: Any) -> str:
    """'Moonwalk(budget='8GiB')': the settings that differ from the defaults."""
    given = ((f.name, getattr(method, f.name), f.default) for f in fields(method))
    changed = (f"{name}={value!r}" for name, value, default in given if value != default)
    return f"{type(method).__name__}({', '.join(changed)})"


# -- what it does ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Group:
    """Segments that do the same to the same blocks."""

    segments: tuple[tuple[Row, ...], ...]
    held: tuple[int, ...]  # bytes that each of them keeps
    names: _Names

    @property
    def count(self) -> int:
        return len(self.segments)

    @property
    def bytes(self) -> int:
        return sum(self.held)

    @property
    def rows(self) -> tuple[Row, ...]:
        return self.segments[0]

    @cached_property
    def name(self) -> str:
        """'block', or 'Block_0 … Block_11' if the user's scopes tell them apart."""
        ends = (self.names.segment(rows) for rows in (self.segments[0], self.segments[-1]))
        return " … ".join(dict.fromkeys(ends))

    @property
    def place(self) -> str:
        return _place(self.rows[0])

    @property
    def done(self) -> str:
        """'walked, 3 anchors'."""
        modes = Counter(r.mode for r in self.rows if r.mode not in ("pass", "stem"))
        main = [m for m, _ in modes.most_common() if m not in _DETAILS]
        details = [f"{n} {m}{'s' * (n > 1)}" for m, n in modes.items() if m in _DETAILS]
        return ", ".join([*(_DONE.get(m, m) for m in main), *details])

    @property
    def kept(self) -> str:
        if self.count > 1 and len(set(self.held)) == 1 and self.bytes:
            return f"{format_bytes(self.bytes)} kept, {format_bytes(self.held[0])} each"
        return f"{format_bytes(self.bytes)} kept"


def _groups(plan: Plan) -> list[_Group]:
    """The plan's segments in their order, those that do the same in one group."""
    segments: dict[int, list[Row]] = {}
    for row in plan.rows:
        segments.setdefault(row.segment, []).append(row)
    found: dict[Any, list[int]] = {}
    for number, rows in segments.items():
        what = tuple((r.block, r.mode, r.depth, r.times) for r in rows)
        found.setdefault(what, []).append(number)
    held = dict(enumerate(plan.held))
    names = _Names.of(plan.rows)
    return [
        _Group(
            tuple(tuple(segments[n]) for n in numbers),
            tuple(held.get(n, sum(r.bytes * r.times for r in segments[n])) for n in numbers),
            names,
        )
        for numbers in found.values()
    ]


def _actions(groups: Sequence[_Group], room: int) -> list[str]:
    """A line for each group that keeps something, and for rows of it; in `room` lines."""
    keeping = [g for g in groups if g.bytes] or list(groups)
    chosen = sorted(keeping, key=lambda g: -g.bytes)
    chosen = chosen[: room - (len(groups) > min(room, len(chosen)))]
    others = [g for g in groups if g not in chosen]
    details = _details(chosen, room - len(chosen) - bool(others))
    lines: list[tuple[str, str, str, str]] = []
    for group in groups:
        if group not in chosen:
            continue
        lines.append((f"{group.count:>4} × {group.name}", group.place, group.done, group.kept))
        for row, count in details:
            if row in group.rows:
                size = f"{format_bytes(count * row.bytes)} of it"
                times = f"{count} × " if count > 1 else ""
                lines.append((f"       {times}{row.block}", _place(row), row.mode, size))
    if others:
        number = sum(g.count for g in others)
        done = ", ".join(dict.fromkeys(g.done for g in others))
        kept = f"{format_bytes(sum(g.bytes for g in others))} kept"
        lines.append((f"   and {number} more segment{'s' * (number > 1)}", "", done, kept))
    return _in_columns(lines)


def _details(groups: Sequence[_Group], room: int) -> list[tuple[Row, int]]:
    """The rows that keep most of what their segments keep, each with how many there are of it.

    Where pullbacks of several blocks share what they keep, no block keeps a part of its own.
    """
    found: list[tuple[Row, int]] = []
    for group in groups:
        alike: dict[Any, list[Row]] = {}
        for row in group.rows:
            if row.bytes:
                alike.setdefault((row.block, row.mode, row.bytes, row.times), []).append(row)
        counts = [(rows[0], group.count * len(rows) * rows[0].times) for rows in alike.values()]
        parts = sum(count * row.bytes for row, count in counts if row.mode not in _DETAILS)
        if parts <= 1.01 * group.bytes and (len(counts) > 1 or any(r.depth for r, _ in counts)):
            found += counts
    return sorted(found, key=lambda f: -f[1] * f[0].bytes)[: max(0, min(room, 4))]


def _in_columns(lines: Sequence[tuple[str, ...]]) -> list[str]:
    """Cells as lines; the first column takes what the others leave."""
    if not lines:
        return []
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    widths[1:3] = (min(w, most) for w, most in zip(widths[1:3], (22, 28), strict=True))
    widths[0] = min(widths[0], COLUMNS - sum(widths[1:]) - 2 * (len(widths) - 1))
    return [
        "  ".join(_clipped(cell, w).ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip()
        for line in lines
    ]


# -- names -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Names:
    """What the user calls blocks: by the named scopes that they are in, or else by the functions.

    `scopes`, `calls`: those that all blocks of the network are in, which tell nothing.
    """

    scopes: tuple[str, ...] = ()
    calls: tuple[str, ...] = ()

    @classmethod
    def of(cls, rows: Iterable[Row]) -> _Names:
        outer = [r for r in rows if not r.depth]
        scopes = _common(r.scope for r in outer if r.scope)
        return cls(scopes, _common(r.calls for r in outer))

    def segment(self, rows: Sequence[Row]) -> str:
        """The name of a segment; of a loop alone, what it repeats."""
        outer = [r for r in rows if not r.depth]
        inner = [r for r in rows if r.depth == 1]
        if len(outer) == 1 and not inner and outer[0].calls == "/".join(self.calls):
            return outer[0].scope or outer[0].block
        if len(outer) > 1 or not inner:
            return self.blocks(outer) or outer[0].block
        return f"{_operation(outer[0])} of {inner[0].times} × {_Names().blocks(inner) or 'layers'}"

    def blocks(self, rows: Sequence[Row]) -> str:
        """The scope or function that all of the rows are in, or 'first … last'; '' if there is none."""
        if rows[0].scope and rows[-1].scope:
            return _between([r.scope for r in rows], self.scopes, shown=2)
        return _between([r.calls for r in rows], self.calls)


def _between(paths: Sequence[str], outer: Sequence[str], shown: int = 1) -> str:
    """The last names that all paths have beyond `outer`, or the first such name of both ends."""

    def named(names: Sequence[str]) -> list[str]:
        return [short for short in map(_short, names) if short]

    inside = named(_common(paths)[len(outer) :])
    if inside:
        return "/".join(inside[-shown:])
    ends = (named(_split(path)[len(outer) :] or _split(path)[-1:])[:1] for path in (paths[0], paths[-1]))
    return " … ".join(dict.fromkeys(itertools.chain.from_iterable(ends)))


def _split(path: str) -> list[str]:
    return path.split("/") if path else []


def _common(paths: Iterable[str]) -> tuple[str, ...]:
    """The names that all paths begin with."""
    columns = zip(*map(_split, paths), strict=False)
    alike = itertools.takewhile(lambda names: len(set(names)) == 1, columns)
    return tuple(names[0] for names in alike)


def _short(call: str) -> str:
    """'Block' of 'Block.__call__'; nothing of a lambda or a generator."""
    owner, _, name = call.rpartition(".")
    if name.startswith("<"):
        return ""
    return owner.rpartition(".")[2] if name == "__call__" and owner else name


def _place(row: Row) -> str:
    """'model.py:12'."""
    found = re.match(r"(.*?):(\d+) \(", row.source)
    return f"{os.path.basename(found[1])}:{found[2]}" if found else ""


# -- what would help ---------------------------------------------------------------------------------


def _hints(plan: Plan, groups: Sequence[_Group]) -> list[str]:
    hints = []
    if plan.rows:
        group, row, text = _costliest(plan, groups)
        hints = [text, *_obstacles(group, row)]
    elif plan.weight_side_bytes:
        hints = ["All depends on differentiated arguments alone: name inputs, Moonwalk(inputs=...)."]
    if plan.compiler_limit is not None and plan.total_bytes > plan.compiler_limit:
        limit = format_bytes(plan.compiler_limit)
        hints.append(f"Beyond {limit} XLA recomputes values by its own choice: not in these figures.")
    slower = plan.backprop_seconds and plan.seconds > _SLOWER * plan.backprop_seconds
    if isinstance(plan.method, Moonwalk) and slower:
        hints.append("Faster, with more memory: print(moonwalk.frontier(...)), Moonwalk(budget=...).")
    return [line for hint in hints for line in _wrapped(hint)]


def _costliest(plan: Plan, groups: Sequence[_Group]) -> tuple[_Group, Row, str]:
    """The group and the row that most of the peak is for, and a sentence about them."""
    keeps = max(groups, key=lambda g: g.bytes)
    working = plan.peak_bytes - sum(plan.held[: 1 + (plan.busiest or 0)])
    busy = [g for g in groups if any(rows[0].segment == plan.busiest for rows in g.segments)]
    if busy and working > keeps.bytes:
        (group,) = busy
        row = max(group.rows, key=lambda r: r.m_x + r.m_theta)
        rows = next(rows for rows in group.segments if rows[0].segment == plan.busiest)
        text = f"{format_bytes(working)} while {group.names.segment(rows)} is differentiated"
    else:
        group, row = keeps, max(keeps.rows, key=lambda r: (r.bytes * r.times, r.m_x + r.m_theta))
        text = f"{format_bytes(keeps.bytes)} kept for {keeps.count} × {keeps.name}"
    # A walk works on one block at a time, whatever pullbacks of all of them would need.
    tells = row.gain is None and len([r for r in group.rows if not r.depth]) > 1
    return group, row, f"Most memory: {text}" + (f", most of it for {_what(row)}." if tells else ".")


def _obstacles(group: _Group, row: Row) -> list[str]:
    """Why the costliest blocks are not walked, and what would let them be."""
    without = [r for r in group.rows if r.way_out and _FRAGMENT not in r.way_out]
    blocked = {_operation(r): r for r in without}
    if not blocked:
        return []
    if len(blocked) > 2:
        places = dict.fromkeys(filter(None, (_Names().blocks([r]) for r in without)))
        text = f"Not walked: {len(blocked)} kinds of block there have no vijp"
        text += f" (in {', '.join(places)})." if places else "."
        if group.count > 1:
            text += " As reversible layers (moonwalk.nn.Coupling) all would be inverted."
        return [text]
    worst = blocked.get(_operation(row)) or next(iter(blocked.values()))
    why = re.sub(r"\S*[\\/](\S+\.py:\d+)", r"\1", worst.why)  # files without their folders
    return [f"Not walked: {_what(worst)}: {why}{_change(worst)}."]


def _change(row: Row) -> str:
    """The first of the ways out that changes the layer, rather than how it is differentiated."""
    ways = re.split(r"; (?:or )?|, or ", row.way_out)
    own = (w for w in ways if not re.search("keep|[Mm]atrix-?[Ff]ree", w))
    return "".join(f"; {way}" for way in itertools.islice(own, 1))


def _operation(row: Row) -> str:
    return row.block.partition(" ")[0]


def _what(row: Row) -> str:
    place = _place(row)
    return _operation(row) + (f" at {place}" if place else "")


def _wrapped(text: str) -> list[str]:
    """As at most three lines."""
    form: dict[str, Any] = dict(width=COLUMNS, subsequent_indent="  ", break_on_hyphens=False)
    return textwrap.wrap(text, max_lines=3, placeholder=" …", **form)


def _clipped(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1].rstrip() + "…"


# -- all of it ---------------------------------------------------------------------------------------


def table(plan: Plan) -> str:
    """A line for every row."""
    lines = [
        f"weight side {format_bytes(plan.weight_side_bytes)}; tolerance {plan.tolerance:.0e}; "
        f"{plan.walked} blocks walked, {plan.anchors} anchors"
        + (f", {plan.fragments} fragments" if plan.fragments else "")
        + (f", {plan.inverted} blocks inverted" if plan.inverted else "")
        + (f"; {plan.rerun} segments run again" if plan.rerun else "")
        + (f"; a seed by {plan.jvps} jvps" if plan.jvps else "")
        + ("; gains measured" if plan.measured else "")
    ]
    header = ("block", "mode", "kept", "M_x", "M_θ", "gain", "why", "source")
    cells: list[tuple[str, ...]] = [header]
    for r in plan.rows:
        times = f" ×{r.times}" if r.times > 1 else ""
        cells.append(
            (
                "  " * r.depth + r.block,
                r.mode,
                format_bytes(r.bytes) + times,
                format_bytes(r.m_x),
                format_bytes(r.m_theta),
                "" if r.gain is None else f"{r.gain:.3g}",
                r.why if len(r.why) < 120 else r.why[:117] + "…",
                r.source,
            )
        )
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    for row in cells:
        lines.append("  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip())
    lines.append(
        f"kept {format_bytes(plan.kept_bytes)}, peak about {format_bytes(plan.peak_bytes)}"
        + (f" (compiled {format_bytes(plan.compiled_bytes)})" if plan.compiled_bytes is not None else "")
        + "; "
        f"backprop about {format_bytes(plan.backprop_bytes)}, "
        f"checkpointing about {format_bytes(plan.checkpoint_bytes)}"
    )
    return "\n".join(lines)
