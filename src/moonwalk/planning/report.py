"""`Plan`: how a function is differentiated, as data; made from a choice, bound to a network."""

from __future__ import annotations

import itertools
import json
import math
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from .. import _jax
from ..errors import PlanMismatchError, PlanWarning
from ..network.cutting import Network, Node
from ..rules.registry import Gain
from ..segments import codec
from ..segments.base import Executor, Segment, check_in_a_row
from ..segments.base import Row as Row
from ..segments.base import format_bytes as format_bytes
from ..segments.codec import in_plans
from ..segments.costs import NodeCost, node_costs
from ..segments.seconds import device_kind
from . import summary
from .methods import Checkpoint, Moonwalk, PureForward, Reversible
from .search import Choice
from .timeline import backprop_peak, backprop_seconds, timeline_of
from .tolerance import Planned

for _method in (Moonwalk, PureForward, Checkpoint, Reversible):
    in_plans(_method)

WORTH = 1.1  # factor of memory that a walk, which takes longer and rounds, must save; less is warned of
TOY = 2**20  # bytes: of a function for which backpropagation takes less, nothing is said


@in_plans
@dataclass(frozen=True)
class Plan:
    """How `moonwalk.value_and_grad` will differentiate a function at given shapes.

    Accepted wherever `method=` is. A plan made from concrete arguments carries the gains that were
    measured on them. `print` shows what it takes, what is done to which part of the function, and what
    would help; `table()` has every block.
    """

    rows: tuple[Row, ...]
    method: Planned
    tolerance: float
    kept_bytes: int
    peak_bytes: int
    backprop_bytes: int
    checkpoint_bytes: int
    weight_side_bytes: int
    walked: int  # blocks with a recovered output cotangent
    anchors: int
    fragments: int  # walked blocks that keep part of their output's cotangent
    rerun: int  # walks, and parts of scans, whose Phase I is run again (`checkpoint=`)
    predicted_gain: float
    measured: bool  # whether a walk rests on measured gains
    checked: bool  # whether it walks or inverts anything, and so carries a certificate
    signature: tuple[tuple[str, str], ...]
    gains: tuple[tuple[Any, Gain], ...]
    segments: tuple[Segment, ...]  # what runs, in order
    nodes: tuple[str, ...]  # descriptions of the network's nodes when it was planned
    numbers: tuple[str, ...] = ()  # arguments that were Python numbers, and so part of the function
    inverted: int = 0  # blocks whose input is reconstructed from their output
    jvps: int = 0  # how many the seed takes (`PureForward`)
    seconds: float = 0.0  # predicted, for the device that was there; figures compare, roughly
    backprop_seconds: float = 0.0
    checkpoint_seconds: float = 0.0
    argument_bytes: int = 0  # of the call, on one device; `peak_bytes` is besides arguments and results
    result_bytes: int = 0
    parts: int = 1  # into which the data are divided, among as many devices; `peak_bytes` is of all
    device: str = ""  # what kind of device the seconds are for
    compiled_bytes: int | None = None  # temporaries of the compiled program (`verify=True`)
    budget_bytes: int | None = None  # what `Moonwalk(budget=...)` allows
    compiler_limit: int | None = None  # a larger program is recomputed in part by the compiler's choice
    held: tuple[int, ...] = ()  # bytes that each segment keeps until its turn in the reverse pass
    busiest: int | None = None  # the segment in which the peak lies

    @property
    def total_bytes(self) -> int:
        """The peak on one device with arguments and results, which a budget is compared with.

        It is as compiled if the plan was verified, and predicted otherwise.
        """
        predicted = self.peak_bytes // self.parts
        peak = predicted if self.compiled_bytes is None else self.compiled_bytes
        return peak + self.argument_bytes + self.result_bytes

    @property
    def kinds(self) -> str:
        """How many segments of each kind there are: '12 recompute, 3 store'."""
        counts = Counter(type(segment).__name__.lower() for segment in self.segments)
        return ", ".join(f"{count} {kind}" for kind, count in counts.most_common())

    @property
    def walks(self) -> bool:
        """Whether any block is walked through."""
        return self.walked > 0

    def to_dict(self) -> dict[str, Any]:
        """The report's figures as plain numbers and strings; what is not bounded is None."""
        result = asdict(replace(self, segments=(), nodes=()))
        del result["segments"], result["nodes"]
        result["gains"] = [[list(key[0]), key[1], gain.factor] for key, gain in self.gains]
        return _finite(result)

    def to_json(self) -> str:
        """The plan as text for `from_json`: to keep beside a model, or to run on another machine.

        **Example:**

        >>> import jax.numpy as jnp, moonwalk as mw
        >>> plan = mw.plan(lambda w, x: jnp.sum(jnp.tanh(x @ w)), jnp.eye(2), jnp.ones((4, 2)))
        >>> mw.Plan.from_json(plan.to_json()) == plan
        True
        """
        return json.dumps(codec.encode(self), ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """The plan that `to_json` wrote."""
        try:
            found = codec.decode(json.loads(text))
        except json.JSONDecodeError as error:
            raise ValueError(f"Plan.from_json: this is no JSON: {error}") from None
        if not isinstance(found, Plan):
            raise ValueError(f"Plan.from_json: this is no plan, but {found!r:.60}")
        return found

    def fits(self, network: Network) -> bool:
        """Whether it was made for a network like this one."""
        return describe_nodes(network) == self.nodes

    def bind(self, network: Network) -> list[Executor]:
        """Its executors on `network`; raises PlanMismatchError if it was made for another network."""
        new = describe_nodes(network)
        if new != self.nodes:
            pairs = itertools.zip_longest(self.nodes, new, fillvalue="nothing")
            number, (then, now) = next((i, p) for i, p in enumerate(pairs) if p[0] != p[1])
            raise PlanMismatchError(
                "method=: the plan was made for another function (or by another version of JAX): its "
                f"block {number} was `{then}`, and is `{now}`. Make it anew with "
                "moonwalk.plan(fun, *args)."
            )
        check_in_a_row(self.segments, 0, len(network.nodes))
        return [segment.bind(network) for segment in self.segments]

    def __str__(self) -> str:
        return summary.summary(self)

    def table(self) -> str:
        """Every block, with its mode, bytes, gain, reason and source line."""
        return summary.table(self)

    def advice(self) -> str | None:
        """A sentence if nothing is gained, naming the costliest block and what would help.

        A plan that saves over backpropagation is worth having even if checkpointing would do as well: it
        may *be* the best checkpointing, without a line of it in the loss. Plans that walk or invert take
        longer and round, so they are also compared with checkpointing.
        """
        rival = self._rival()
        if rival is None:
            return None
        if not self.rows:
            if self.weight_side_bytes < 2**20:  # the whole function is tiny
                return None
            return (
                "moonwalk: everything in this loss depends on differentiated arguments alone, so there "
                "is no path to walk and all of it is stored; name the arguments that are network "
                "inputs: method=moonwalk.Moonwalk(inputs=...)"
            )
        theirs = self.backprop_bytes if rival == "backpropagation" else self.checkpoint_bytes
        costly = max(self.rows, key=lambda r: r.bytes * r.times, default=None)
        text = (
            f"moonwalk: this plan saves less than 10 % of what {rival} takes "
            f"(about {format_bytes(self.peak_bytes)} beside {format_bytes(theirs)}"
        )
        if rival == "checkpointing":
            text += (
                f"; backpropagation {format_bytes(self.backprop_bytes)}). method=moonwalk.Checkpoint() "
                "would take about as little, and less time."
            )
        else:
            text += ")."
        if costly is not None and costly.bytes:
            text += f" The costliest block is {costly.block} at {costly.source}: {costly.why}."
        return text + " Print moonwalk.plan(...) for all of it."

    @property
    def saves_little(self) -> bool:
        """Whether the plan saves little, so that there is something to advise."""
        return self._rival() is not None

    def _rival(self) -> str | None:
        """The method that takes about as little memory as the plan, if there is one."""
        if self.backprop_bytes < TOY or self.budget_bytes is not None:
            return None  # with a budget, the fastest plan was asked for
        if WORTH * self.peak_bytes > self.backprop_bytes:
            return "backpropagation"
        if (self.walked or self.inverted) and WORTH * self.peak_bytes > self.checkpoint_bytes:
            return "checkpointing"
        return None


_said_barriers = False


def warn_of_deleted_barriers(plan: Plan, rows: Callable[[], Sequence[Row]]) -> None:
    """Warn once per process that this compiler deletes the barriers that a plan rests on.

    Outside scans, only a barrier keeps a second run of a block from being merged with the first; merged,
    it keeps all its residuals.
    """
    global _said_barriers
    deleted = None if _said_barriers else _jax.deleted_barriers()
    if deleted is None:
        return
    merged = sum(
        row.m_x + row.m_theta
        for row in rows()
        if row.depth == 0 and row.mode not in ("store", "fork") and not row.block.startswith("scan")
    )
    taken = min(plan.peak_bytes + merged, plan.backprop_bytes)
    if taken <= WORTH * plan.peak_bytes:
        return
    _said_barriers = True
    warnings.warn(
        f"moonwalk: under jax.jit this plan will take about {format_bytes(taken)} instead of "
        f"{format_bytes(plan.peak_bytes)}: {deleted}.",
        PlanWarning,
        stacklevel=_jax.levels_to_user(),
    )


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def describe_nodes(network: Network) -> tuple[str, ...]:
    """Descriptions by which a plan recognises the network it was made for."""

    def describe(node: Node) -> str:
        text = f"{node.describe()}, {len(node.weights)} weights"
        if node.is_scan:
            inner, _ = _jax.open_jaxpr(node.block.eqns[0].params["jaxpr"])
            text += f", {len(inner.eqns)} equations in its body"
        return text

    return tuple(describe(n) for n in network.nodes)


def describe(
    network: Network,
    choice: Choice,
    plain: Choice,
    costs: Sequence[NodeCost],
    method: Planned,
    tolerance: float,
    signature: tuple[tuple[str, str], ...],
    gains: tuple[tuple[Any, Gain], ...],
    prologues: Any,
) -> Plan:
    """The plan without its rows, which `with_rows` adds when they are read."""
    facts = [segment.facts for segment in choice.segments]
    timeline = timeline_of(network, costs)
    busiest = timeline.busiest(choice.segments)
    return Plan(
        rows=(),
        method=method,
        tolerance=tolerance,
        kept_bytes=choice.kept,
        peak_bytes=prologues.beside(choice.peak),
        backprop_bytes=prologues.beside(backprop_peak(network, costs)),
        checkpoint_bytes=prologues.beside(plain.peak),
        weight_side_bytes=prologues.weights if network.nodes else prologues.alone,
        seconds=choice.seconds,
        backprop_seconds=backprop_seconds(network),
        checkpoint_seconds=plain.seconds,
        device=device_kind(),
        compiler_limit=_jax.compiler_limit(),
        walked=sum(f.walked for f in facts),
        anchors=sum(f.anchors for f in facts),
        fragments=sum(f.fragments for f in facts),
        rerun=sum(f.rerun for f in facts),
        predicted_gain=max((f.growth for f in facts), default=1.0),
        measured=any(f.measured for f in facts),
        checked=any(f.checked for f in facts),
        signature=signature,
        gains=gains,
        segments=tuple(executor.data for executor in choice.segments),
        nodes=describe_nodes(network),
        jvps=sum(f.jvps for f in facts),
        inverted=sum(f.inverted for f in facts),
        held=tuple(segment.held(timeline) for segment in choice.segments),
        busiest=None if busiest is None else choice.segments.index(busiest),
    )


def with_rows(plan: Plan, network: Network, executors: Sequence[Executor], *, fused: bool) -> Plan:
    """The plan with the rows of its report: what is done to every block."""
    costs = node_costs(network, fused=fused)
    chosen = isinstance(plan.method, Moonwalk | PureForward)
    rows = (
        replace(row, segment=number)
        for number, executor in enumerate(executors)
        for row in executor.rows(costs, chosen=chosen)
    )
    return replace(plan, rows=tuple(rows))
