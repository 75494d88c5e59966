"""What a plan says: the table, its totals, and how to carry it from concrete arguments into `jit`."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from . import compat
from .costs import NodeCost, node_costs
from .errors import PlanWarning
from .inversion import Bystander, Inverted, OneBlock, Part
from .methods import Moonwalk, PureForward
from .peaks import backprop_peak
from .planning import Choice, Planned
from .registry import Gain
from .residuals import nbytes
from .scan_walks import ScanWalk
from .scans import ScanStep
from .segments import Plain
from .trunk import Node, Trunk
from .walks import ForkStep, Step, Walk

WORTH = 1.1  # times the memory: less is not worth a walk, which takes longer and rounds; nor silence


@dataclass(frozen=True)
class Row:
    """One block of a plan."""

    block: str
    source: str  # the user's line
    mode: str  # walk, fragment, anchor, fork, store, recompute, invert
    bytes: int  # kept until the block is done with
    gain: float | None  # of a block that is walked through
    why: str
    m_x: int  # bytes that ∂y/∂x needs
    m_theta: int  # bytes that ∂y/∂θ needs besides
    depth: int = 0  # inside a scan
    times: int = 1  # layers of that scan


@dataclass(frozen=True)
class Plan:
    """How `moonwalk.value_and_grad` will differentiate a function at given shapes.

    Printable; accepted wherever `method=` is. A plan made from concrete arguments carries the gains that
    were measured on them.
    """

    rows: tuple[Row, ...]
    method: Planned
    tolerance: float
    kept_bytes: int
    peak_bytes: int
    backprop_bytes: int
    checkpoint_bytes: int
    weight_side_bytes: int
    walked: int  # blocks whose output's cotangent is recovered
    anchors: int
    fragments: int  # of the blocks walked, those that keep part of their output's cotangent
    segments: int  # walks, and parts of scans, whose Phase I is run again (`checkpoint=`)
    predicted_gain: float
    measured: bool  # whether a walk rests on measured gains
    checked: bool  # whether it walks or inverts anything: that carries a certificate
    signature: tuple[tuple[str, str], ...]
    gains: tuple[tuple[Any, Gain], ...]
    inverted: int = 0  # blocks whose input is had again from their output
    jvps: int = 0  # that a seed takes (`PureForward`)

    @property
    def walks(self) -> bool:
        """Whether any block is walked through."""
        return self.walked > 0

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers and strings, for JSON; what is not bounded is None."""
        result = asdict(self)
        result["gains"] = [[list(key[0]), key[1], gain.factor] for key, gain in self.gains]
        return _finite(result)

    def __str__(self) -> str:
        return _table(self)

    def advice(self) -> str | None:
        """A sentence if nothing is gained, naming the costliest block and what would help.

        A gain over backpropagation is one, though checkpointing might do as well: a plan may *be* the
        best checkpointing, without a line of it in the loss. Only a plan that walks or inverts, which
        takes longer and rounds, and takes no less memory than checkpointing is worth a word then.
        """
        if not self.rows:
            if self.weight_side_bytes < 2**20:  # a function of a few numbers
                return None
            return (
                "moonwalk: everything in this loss depends on differentiated arguments alone, so there "
                "is no trunk to walk and all of it is stored; name the arguments that are network "
                "inputs: method=moonwalk.Moonwalk(inputs=...)"
            )
        if WORTH * self.peak_bytes > self.backprop_bytes:
            rival, theirs = "backpropagation", self.backprop_bytes
        elif (self.walked or self.inverted) and WORTH * self.peak_bytes > self.checkpoint_bytes:
            rival, theirs = "checkpointing", self.checkpoint_bytes
        else:
            return None
        costly = max(self.rows, key=lambda r: r.bytes * r.times, default=None)
        text = (
            f"moonwalk: this plan saves less than 10 % of what {rival} takes "
            f"(about {human(self.peak_bytes)} beside {human(theirs)}"
        )
        if rival == "checkpointing":
            text += (
                f"; backpropagation {human(self.backprop_bytes)}). method=moonwalk.Checkpoint() would "
                "take about as little, and less time."
            )
        else:
            text += ")."
        if costly is not None and costly.bytes:
            text += f" The costliest block is {costly.block} at {costly.source}: {costly.why}."
        return text + " Print moonwalk.plan(...) for all of it."


_said_barriers = False


def warn_of_deleted_barriers(plan: Plan) -> None:
    """Say once per process that the compiler at hand undoes what a plan rests on.

    Blocks outside scans that are run again are told from their first run by a barrier alone; merged with
    it, they keep all their residuals.
    """
    global _said_barriers
    deleted = None if _said_barriers else compat.deleted_barriers()
    merged = sum(
        row.m_x + row.m_theta
        for row in plan.rows
        if row.depth == 0 and row.mode not in ("store", "fork") and not row.block.startswith("scan")
    )
    taken = min(plan.peak_bytes + merged, plan.backprop_bytes)
    if deleted is None or taken <= WORTH * plan.peak_bytes:
        return
    _said_barriers = True
    warnings.warn(
        f"moonwalk: under jax.jit this plan will take about {human(taken)} instead of "
        f"{human(plan.peak_bytes)}: {deleted}.",
        PlanWarning,
        stacklevel=compat.levels_to_user(),
    )


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def human(size: float) -> str:
    """'16.0 MiB'."""
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"


def _table(plan: Plan) -> str:
    lines = [
        f"weight side {human(plan.weight_side_bytes)}; tolerance {plan.tolerance:.0e}; "
        f"{plan.walked} blocks walked, {plan.anchors} anchors"
        + (f", {plan.fragments} fragments" if plan.fragments else "")
        + (f", {plan.inverted} blocks inverted" if plan.inverted else "")
        + (f"; {plan.segments} segments run again" if plan.segments else "")
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
                human(r.bytes) + times,
                human(r.m_x),
                human(r.m_theta),
                "" if r.gain is None else f"{r.gain:.3g}",
                r.why if len(r.why) < 120 else r.why[:117] + "…",
                r.source,
            )
        )
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    for row in cells:
        lines.append("  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip())
    lines.append(
        f"kept {human(plan.kept_bytes)}, peak about {human(plan.peak_bytes)}; backprop about "
        f"{human(plan.backprop_bytes)}, checkpointing about {human(plan.checkpoint_bytes)}"
    )
    return "\n".join(lines)


def describe(
    cut: Trunk,
    choice: Choice,
    plain: Choice,
    costs: Sequence[NodeCost],
    method: Planned,
    tolerance: float,
    signature: tuple[tuple[str, str], ...],
    gains: tuple[tuple[Any, Gain], ...],
    weight_side_bytes: int,
) -> Plan:
    """The plan as a user reads it."""
    rows: list[Row] = []
    for segment in choice.segments:
        if isinstance(segment, Walk):
            for i, step in enumerate(segment.steps):
                rows += _step_rows(step, costs[segment.start + i], segment)
        elif isinstance(segment, Inverted):
            rows += _inverted_rows(segment, costs)
        else:
            for leaf in segment.leaves:
                rows += _plain_rows(leaf, costs, chosen=isinstance(method, Moonwalk | PureForward))
    walks = [s for s in choice.segments if isinstance(s, Walk)]
    inverted = [s for s in choice.segments if isinstance(s, Inverted)]
    steps = [s for w in walks for s in _all_steps(w)]
    return Plan(
        rows=tuple(rows),
        method=method,
        tolerance=tolerance,
        kept_bytes=choice.kept,
        peak_bytes=choice.peak + weight_side_bytes,
        backprop_bytes=backprop_peak(cut, costs) + weight_side_bytes,
        checkpoint_bytes=plain.peak + weight_side_bytes,
        weight_side_bytes=weight_side_bytes,
        walked=sum(s.is_walked and not isinstance(s, ScanStep) for s in steps),
        anchors=sum(s.source == "anchor" and not s.is_stem for s in steps if not isinstance(s, ScanStep))
        + sum(s.period is not None for s in steps if isinstance(s, ScanStep)),
        fragments=sum(s.source == "fragment" for s in steps),
        segments=sum(w.segments if isinstance(w, ScanWalk) else w.recomputed for w in walks),
        predicted_gain=max((w.growth for w in walks), default=1.0),
        measured=any(w.is_measured for w in walks),
        checked=bool(walks or inverted),
        signature=signature,
        gains=gains,
        inverted=sum(row.mode == "invert" and "scan" not in row.block.split()[:1] for row in rows),
    )


def _all_steps(walk: Walk) -> list[Step]:
    result = []
    for step in walk.steps:
        result.append(step)
        if isinstance(step, ScanStep) and step.source != "none":
            result += _all_steps(step.walk)
    return result


def _line(node: Node) -> str:
    if node.is_fork or not node.block.eqns:
        return ""
    return compat.source_line(node.block.eqns[-1])


def _step_rows(step: Step, cost: NodeCost, walk: Walk, depth: int = 0, times: int = 1) -> list[Row]:
    node = step.node
    if node.is_aside:
        return []
    mode = {"vijp": "walk", "given": "walk", "none": "pass"}.get(step.source, step.source)
    why = step.reason
    if step.source == "fragment":
        why = f"fragment: {_share(step)} of the cotangent; {why}"
        if step.kept_bytes:
            why += f"; Phase I keeps {human(step.kept_bytes)}"
    if isinstance(step, ForkStep):
        mode = "fork"
        why = f"keeps {len(step.kept_copies)} of {len(node.block.outputs)} cotangents"
    if step.is_stem:
        mode = "stem"
    gain = step.gain.factor if step.is_walked else None
    size = step.kept_bytes + step.memo_bytes
    m_x, m_theta = cost.m_x, cost.m_theta
    if isinstance(step, ScanStep):
        mode = "walk"
        inner = sum(s.kept_bytes + s.memo_bytes for s in step.walk.steps)
        size -= step.length * inner
        if step.period is not None:
            why += f", an anchor every {step.period}"
        if isinstance(walk, ScanWalk):
            size = walk.start_bytes
            why += f", {walk.segments} segments of {walk.every}"
    elif walk.recomputed:
        why += "; Phase I run again"
    rows = [Row(node.describe(), _line(node), mode, size, gain, why, m_x, m_theta, depth, times)]
    if isinstance(step, ScanStep):
        for inner_step, inner_cost in zip(step.walk.steps, node_costs(step.body.trunk), strict=True):
            rows += _step_rows(inner_step, inner_cost, step.walk, depth + 1, step.length)
    return rows


def _share(step: Step) -> str:
    """'0.8 %'."""
    share = 100 * step.memo_bytes / max(1, nbytes(*(v.aval for v in step.block.outputs)))
    return f"{share:.2g} %" if share < 10 else f"{share:.0f} %"


def _inverted_rows(segment: Inverted, costs: Sequence[NodeCost]) -> list[Row]:
    rows: list[Row] = []
    blocks = [i for i, part in enumerate(segment.parts) if not isinstance(part, Bystander)]
    for i, part in enumerate(segment.parts):
        last = i == blocks[-1]
        rows += _part_rows(part, costs[segment.start + i], segment.kept_bytes if last else 0)
    return rows


def _part_rows(part: Part, cost: NodeCost, kept: int, depth: int = 0, times: int = 1) -> list[Row]:
    node = part.node
    if isinstance(part, Bystander):
        return []
    if isinstance(part, OneBlock):
        why = part.rule.inverts(node.block).reason
    else:
        why = f"{part.step.length} layers, each from the one after it"
    row = Row(
        node.describe(), _line(node), "invert", kept, None, why, cost.m_x, cost.m_theta, depth, times
    )
    if isinstance(part, OneBlock):
        return [row]
    inner = zip(part.layer, node_costs(part.step.body.trunk), strict=True)
    length = part.step.length
    return [row, *(r for p, c in inner for r in _part_rows(p, c, 0, depth + 1, length))]


def _plain_rows(segment: Plain, costs: Sequence[NodeCost], *, chosen: bool) -> list[Row]:
    """`chosen`: whether there was a choice between this and walking."""
    rows = []
    for i, node in enumerate(segment.nodes):
        if node.is_aside or node.is_fork:
            continue
        cost = costs[segment.start + i]
        stored = segment.kind == "store"
        size = cost.backprop if stored else 0
        if not stored and not rows:
            size = segment.kept_bytes
        why = node.verdict.reason
        if not chosen:
            why = "stored, as residuals" if stored else "run again from the segment's start"
            periods = segment.periods.get(segment.start + i)
            if periods:
                size = segment.kept_bytes
                why = f"segments of {' of '.join(map(str, periods))} layers, run again"
        elif node.rule is not None:
            why = "stored: cheaper than walking" if stored else "recomputed: cheaper than walking"
        rows.append(
            Row(
                node.describe(),
                _line(node),
                segment.kind,
                size,
                None,
                why,
                cost.m_x,
                cost.m_theta,
            )
        )
    return rows
