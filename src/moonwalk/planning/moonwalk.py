"""`Moonwalk`: the cheapest mixture of walking, storing, recomputing and inverting."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from .. import _jax
from .._jax import Literal
from ..execute.residuals import nbytes
from ..network.cutting import Network
from ..rules import alarms
from ..rules.registry import Gain
from ..segments.base import Executor
from ..segments.costs import NodeCost, node_costs
from ..trace import graph
from ..trace.declare import declare_p
from ..trace.partition import MOVING
from . import report, search
from .cotangents import GainTable, Options
from .methods import Moonwalk
from .report import Plan
from .search import Choice


class PlanRequest(NamedTuple):
    """Of a call that is planned: what every planner is told beside the loss and the method.

    `signature`: names and types of the arguments; `gains`: those that an earlier plan measured;
    `values`: of the jaxpr's inputs, where gains are to be measured; `fused`: for `fused_update`.
    """

    signature: tuple[tuple[str, str], ...]
    gains: Iterable[tuple[Any, Gain]]
    values: dict[Any, Any] | None
    fused: bool


class Draft(NamedTuple):
    """A loss, cut and costed: what every method plans from."""

    network: Network
    book: GainTable
    options: Options
    tolerance: float
    costs: list[NodeCost]
    plain: Choice  # without walks

    def describe(self, choice: Choice, method: Any, signature: Any) -> Plan:
        """The choice as a user reads it, its certificates held to the tolerance."""
        side = self.network.weight_prologue
        segments = choice.segments
        tolerance = search.tolerance_of(self.network, method, segments, self.tolerance)
        tolerance = search.hold_to(tolerance, self.network, method, segments)
        return report.describe(
            self.network,
            choice,
            self.plain,
            self.costs,
            method,
            tolerance,
            signature,
            tuple(self.book.recorded.items()),
            sum(nbytes(v.aval) for e in side if _computes(e) for v in e.outvars),
        )


def draft(
    network: Network,
    method: Any,
    *,
    gains: Iterable[tuple[Any, Gain]] = (),
    values: dict[Any, Any] | None = None,
    fused: bool = False,
) -> Draft:
    """`values`: of the jaxpr's inputs, where gains are to be measured. `fused`: for `fused_update`."""
    book = GainTable(gains, known_values(network, values))
    options, tolerance = search.options_for(network, method)
    costs = node_costs(network, fused=fused)
    plain = search.choose_segments(network, options, costs, book)
    return Draft(network, book, options, tolerance, costs, plain)


def known_values(network: Network, values: dict[Any, Any] | None) -> dict[Any, Any] | None:
    """`values` of the jaxpr's inputs, and what the prologues make of them."""
    if values is None:
        return None
    values = dict(values)
    for e in (*network.data_prologue, *network.weight_prologue):
        if not _jax.has_effects(e) and all(isinstance(v, Literal) or v in values for v in e.invars):
            graph.run([e], values)
    return values


def plan(network: Network, method: Moonwalk, call: PlanRequest) -> Plan:
    """The cheapest mixture that the search finds."""
    made = draft(network, method, gains=call.gains, values=call.values, fused=call.fused)
    whole, book, options, _, costs, plain = made
    choice = search.choose_segments(whole, options, costs, book, plain)
    if plain.peak <= report.WORTH * choice.peak and not options.always:
        choice = plain
    return made.describe(choice, method, call.signature)


def heed_weights(network: Network, executors: Iterable[Executor], values: dict[Any, Any] | None) -> None:
    """What concrete weights say against a walk is said at once."""
    if values is None:
        return
    table = GainTable((), known_values(network, values))
    for executor in executors:
        alarms.heed(None, executor.weight_alarms(table), None)


def _computes(eqn: Any) -> bool:
    """Whether a step on the weight side makes new numbers (and is not an identity or a layout)."""
    return eqn.primitive not in MOVING and eqn.primitive not in (declare_p, _jax.pvary_p)
