"""`Moonwalk`: the cheapest mixture of walking, storing, recomputing and inverting."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from .. import _jax
from .._jax import Literal
from ..execute.residuals import nbytes
from ..network.cutting import Network
from ..rules import alarms
from ..rules.registry import Gain
from ..segments.base import Executor, Proposer
from ..segments.costs import NodeCost, node_costs
from ..segments.invert import InvertProposer
from ..trace import graph
from ..trace.declare import declare_p
from ..trace.partition import MOVING
from . import report, search, tolerance
from .cotangents import GainTable, Options
from .methods import Moonwalk
from .plain import Plain, RecomputeProposer, StoreProposer
from .report import Plan
from .search import Choice
from .timeline import live_bytes
from .walks import RerunProposer, TileProposer, WalkBoundProposer, WalkProposer, Walks, cut_evenly


class PlanRequest(NamedTuple):
    """What every planner is told about a call, besides the loss and the method.

    `signature`: names and types of the arguments; `gains`: those that an earlier plan measured;
    `values`: values of the jaxpr's inputs, if gains are to be measured; `fused`: whether the plan is for
    `fused_update`.
    """

    signature: tuple[tuple[str, str], ...]
    gains: Iterable[tuple[Any, Gain]]
    values: dict[Any, Any] | None
    fused: bool


class Draft(NamedTuple):
    """A loss, cut and costed: what every method plans from."""

    network: Network
    table: GainTable
    options: Options
    tolerance: float
    costs: list[NodeCost]
    plain: Choice  # without walks

    def describe(self, choice: Choice, method: Any, signature: Any) -> Plan:
        """The choice as a printable plan, with limits set for its certificates."""
        prologue = self.network.weight_prologue
        segments = choice.segments
        limit = tolerance.tolerance_of(self.network, method, segments, self.tolerance)
        limit = tolerance.hold_to(limit, self.network, method, segments)
        return report.describe(
            self.network,
            choice,
            self.plain,
            self.costs,
            method,
            limit,
            signature,
            tuple(self.table.recorded.items()),
            sum(nbytes(v.aval) for e in prologue if _computes(e) for v in e.outvars),
        )


def draft(
    network: Network,
    method: Any,
    *,
    gains: Iterable[tuple[Any, Gain]] = (),
    values: dict[Any, Any] | None = None,
    fused: bool = False,
) -> Draft:
    """Cost a network and find its best plan without walks. Arguments are as for `PlanRequest`."""
    table = GainTable(gains, known_values(network, values))
    options, limit = tolerance.options_for(network, method)
    costs = node_costs(network, fused=fused)
    plain = search.choose(network, costs, _plain_proposers(network, costs))
    assert plain is not None, "every node can be stored or recomputed"
    return Draft(network, table, options, limit, costs, plain)


def _plain_proposers(
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


def plan(network: Network, method: Moonwalk, call: PlanRequest) -> Plan:
    """The cheapest mixture that the search finds."""
    made = draft(network, method, gains=call.gains, values=call.values, fused=call.fused)
    choice = _with_walks(made)
    if made.plain.peak <= report.WORTH * choice.peak and not made.options.always:
        choice = made.plain
    return made.describe(choice, method, call.signature)


def _with_walks(made: Draft) -> Choice:
    """The best choice that may also walk and invert."""
    network, options, costs = made.network, made.options, made.costs
    walks = Walks(network, options, made.table, live_bytes(network))
    inverted: list[Proposer] = []
    # `anchor_every` requests stored states, so inversion is disabled.
    if options.anchor_every is None and not options.always:
        proposer = InvertProposer(network, costs)
        inverted = [proposer] if proposer.limits() else []
    best = None if inverted or options.always else made.plain
    if _may_pay(made, walks, inverted):
        must = [options.always and not never for never in walks.never]
        store, recompute = _plain_proposers(network, costs, [not m for m in must])
        walker = WalkProposer(walks)
        walked: list[Proposer] = [walker]
        rerun: list[Proposer] = []
        if options.checkpoint == "auto":
            walked, rerun = [*walked, TileProposer(walks)], [RerunProposer(walks)]
        # Among offers that keep equally much, the earlier proposer wins.
        every = [store, *walked, *inverted, recompute, *rerun]
        recovers = not options.always
        best = search.choose(network, costs, every, best=best, thorough=False, recovers=recovers)
    if inverted:
        store, recompute = _plain_proposers(network, costs)
        best = search.choose(network, costs, [store, *inverted, recompute], best=best)
    assert best is not None
    if options.checkpoint not in (None, "auto"):
        return search.realise(network, costs, cut_evenly(walker, best.chosen, options.checkpoint))
    return best


def _may_pay(made: Draft, walks: Walks, inverted: Sequence[Proposer]) -> bool:
    """Whether walks can keep less than all that other segments take.

    Most networks that people train have no layer that can be walked, so a walk would keep an anchor for
    each. The rules of the heavy nodes suffice to see that; what else a walk keeps takes a trace of every
    distinct block.
    """
    options = made.options
    if options.always or options.checkpoint is not None:
        return True
    store, recompute = _plain_proposers(made.network, made.costs)
    below = made.plain.peak / report.WORTH
    for light in (False, True):  # the bound that takes no trace first
        bound = WalkBoundProposer(walks, light=light)
        proposers = [store, bound, *inverted, recompute]
        if not search.may_choose(made.network, made.costs, proposers, bound, below):
            return False
    return True


def enforce_weight_alarms(
    network: Network, executors: Iterable[Executor], values: dict[Any, Any] | None
) -> None:
    """Raise at once if concrete weights already rule out a walk."""
    if values is None:
        return
    table = GainTable((), known_values(network, values))
    for executor in executors:
        alarms.enforce(None, executor.weight_alarms(table), None)


def _computes(eqn: Any) -> bool:
    """Whether a step of the weight prologue computes new values (not an identity or a relayout)."""
    return eqn.primitive not in MOVING and eqn.primitive not in (declare_p, _jax.pvary_p)
