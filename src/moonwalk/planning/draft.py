"""What every policy begins with: a network with its costs, and its best plan without walks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from .. import _jax
from .._jax import Literal
from ..execute.residuals import nbytes
from ..network.cutting import Network
from ..network.remade import cheap_steps
from ..rules import alarms
from ..rules.registry import Gain
from ..segments.base import Executor, Proposer
from ..segments.costs import NodeCost, node_costs
from ..trace import graph
from ..trace.declare import declare_p
from ..trace.partition import MOVING
from . import report, search, tolerance
from .cotangents import GainTable, Options
from .plain import Plain, RecomputeProposer, StoreProposer
from .report import Plan
from .search import Choice
from .timeline import live_bytes


class PlanRequest(NamedTuple):
    """What every planner is told about a call, besides the loss and the method.

    `signature`: names and types of the arguments; `gains`: those that an earlier plan measured;
    `values`: values of the jaxpr's inputs, if gains are to be measured; `fused`: whether the plan is for
    `fused_update`; `argument_bytes` and `result_bytes`: of the call, besides what a plan takes; `parts`:
    into how many the data are divided, among as many devices; `resident_bytes`: of the arguments, what
    is on the device when the plan is made. Bytes are those of one device.
    """

    signature: tuple[tuple[str, str], ...]
    gains: Iterable[tuple[Any, Gain]]
    values: dict[Any, Any] | None
    fused: bool
    argument_bytes: int = 0
    result_bytes: int = 0
    parts: int = 1
    resident_bytes: int = 0


class Draft(NamedTuple):
    """A loss, cut and costed: what every method plans from."""

    network: Network
    table: GainTable
    options: Options
    tolerance: float
    costs: list[NodeCost]
    plain: Choice  # without walks
    prologues: Prologues

    @property
    def is_settled(self) -> bool:
        """Whether the settings leave no choice: walks wherever possible, or in so many segments."""
        return self.options.always or self.options.checkpoint not in (None, "auto")

    def temporaries(self, choice: Choice, call: PlanRequest) -> int:
        """The peak of a choice and of the prologues together, besides arguments and results."""
        return self.prologues.beside(choice.peak) // call.parts

    def describe(self, choice: Choice, method: Any, call: PlanRequest) -> Plan:
        """The choice as a printable plan, with limits set for its certificates."""
        segments = choice.segments
        limit = tolerance.tolerance_of(self.network, method, segments, self.tolerance)
        limit = tolerance.hold_to(limit, self.network, method, segments)
        described = report.describe(
            self.network,
            choice,
            self.plain,
            self.costs,
            method,
            limit,
            call.signature,
            tuple(self.table.recorded.items()),
            self.prologues,
        )
        return replace(
            described,
            argument_bytes=call.argument_bytes,
            result_bytes=call.result_bytes,
            parts=call.parts,
        )


def draft(
    network: Network,
    method: Any,
    *,
    gains: Iterable[tuple[Any, Gain]] = (),
    values: dict[Any, Any] | None = None,
    fused: bool = False,
    seen: list[Choice] | None = None,
) -> Draft:
    """Cost a network and find its best plan without walks. Arguments are as for `PlanRequest`.

    `seen`: takes all plans without walks that were evaluated.
    """
    table = GainTable(gains, known_values(network, values))
    options, limit = tolerance.options_for(network, method)
    costs = node_costs(network, fused=fused)
    plain = search.choose(network, costs, plain_proposers(network, costs), seen=seen)
    assert plain is not None, "every node can be stored or recomputed"
    return Draft(network, table, options, limit, costs, plain, prologue_bytes(network))


def plain_proposers(
    network: Network, costs: Sequence[NodeCost], free: Sequence[bool] | None = None
) -> list[Proposer]:
    """Proposers of stored and recomputed segments; `free`: the nodes that need not be walked."""
    free = [True] * len(costs) if free is None else free
    plain = Plain(network, costs, live_bytes(network), free)
    return [StoreProposer(plain), RecomputeProposer(plain)]


def known_values(network: Network, values: dict[Any, Any] | None) -> dict[Any, Any] | None:
    """`values` of the jaxpr's inputs, and what the prologues make of them."""
    if values is None:
        return None
    values = dict(values)
    for e in (*network.data_prologue, *network.weight_prologue):
        if not _jax.has_effects(e) and all(isinstance(v, Literal) or v in values for v in e.invars):
            graph.run([e], values)
    return values


def enforce_weight_alarms(
    network: Network, executors: Iterable[Executor], values: dict[Any, Any] | None
) -> None:
    """Raise at once if concrete weights already rule out a walk."""
    if values is None:
        return
    table = GainTable((), known_values(network, values))
    for executor in executors:
        alarms.enforce(None, executor.weight_alarms(table), None)


class Prologues(NamedTuple):
    """Bytes that the prologues take.

    What nodes read is there from the first node to the last. What else the weight prologue makes on the
    way, and for its pullback, is there before the first node or after the last.
    """

    weights: int  # made of weights, and read by nodes
    data: int  # made of data, and read by nodes
    alone: int  # all that the weight prologue makes

    def beside(self, peak: int) -> int:
        """The peak of all, if that of the nodes is `peak`."""
        return max(peak + self.weights + self.data, self.alone)


def prologue_bytes(network: Network) -> Prologues:
    """What the prologues of a network take."""
    read = {v for n in network.nodes for v in (*n.block.operands, *n.block.inputs)}
    read.update(v for v in network.outputs if not isinstance(v, Literal))
    # Single numbers do not count, and each stretch makes cheap values itself, while it runs.
    data = [v for v in read if v.aval.size > 1 and not cheap_steps(network, [v])]
    weights = network.weight_prologue
    return Prologues(
        _made(weights, read),
        _made(network.data_prologue, data),
        sum(nbytes(*(v.aval for v in e.outvars)) for e in weights if _computes(e)),
    )


def _made(eqns: Sequence[Any], read: Iterable[Any]) -> int:
    """Bytes of what equations compute and others read, whatever its layout."""
    reached, total = set(read), 0
    for e in reversed(eqns):
        if not any(v in reached for v in e.outvars):
            continue
        if _computes(e):
            total += nbytes(*(v.aval for v in e.outvars if v in reached))
        else:
            reached.update(v for v in e.invars if not isinstance(v, Literal))
    return total


def _computes(eqn: Any) -> bool:
    """Whether an equation computes new values (not an identity or a relayout)."""
    return eqn.primitive not in MOVING and eqn.primitive not in (declare_p, _jax.pvary_p)
