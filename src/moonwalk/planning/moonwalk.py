"""`Moonwalk`: the cheapest mixture of walking, storing, recomputing and inverting.

Without a budget: the plan with the lowest peak or, if others come close to it, the fastest of these.
With one: the fastest plan that fits. Either way the plans that a good engineer would write by hand,
`jax.checkpoint` around every block or around the square root of their number, are among the candidates.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from .. import _jax, settings
from ..errors import BudgetError
from ..network.cutting import Network
from ..segments.base import Proposer, format_bytes, line_of
from ..segments.invert import InvertProposer
from ..segments.store import StoreExecutor, stored_sizes
from . import checkpoint, report, search
from .draft import Draft, PlanRequest, draft, plain_proposers
from .methods import Moonwalk
from .report import Plan
from .search import Choice
from .timeline import live_bytes, timeline_of
from .walks import RerunProposer, TileProposer, WalkBoundProposer, WalkProposer, Walks, cut_evenly

_LIMITS = 4  # on transient bytes, tried for each worth of a second beside the plan of least memory
_MANY_LIMITS = 16  # the same for a whole frontier
_WALKED, _WALKED_LIMITS = (-1, 0, 1), 4  # the same for walks, of which each takes longer to plan
_APART, _BETWEEN = 1.1, 12  # others are put between plans that differ by that factor, up to so many
_CHEAP, _DEAR = (-3, -2, -1, 0), (1, 3)  # what a second may be worth, as `search.worths` has it


def plan(network: Network, method: Moonwalk, call: PlanRequest) -> Plan:
    """The plan of least memory, or the fastest within the method's budget."""
    seen: list[Choice] = []
    made = _draft(network, method, call, seen)
    if method.budget is None:
        return made.describe(_smallest(made, seen), method, call)
    budget = _budget(method, call)
    fastest = _within(budget, _frontier(made, seen), made, method, call)[-1]
    return replace(made.describe(fastest, method, call), budget_bytes=budget)


def plans(network: Network, method: Moonwalk, call: PlanRequest, *, fitting: bool = True) -> list[Plan]:
    """The plans that no other is both as small and as fast as, the smallest first.

    With a budget, `fitting`: only those that fit; raises BudgetError if none does.
    """
    seen: list[Choice] = []
    made = _draft(network, method, call, seen)
    found = _frontier(made, seen)
    budget = None if method.budget is None else _budget(method, call)
    if budget is not None and fitting:
        found = _within(budget, found, made, method, call)
    return [replace(made.describe(c, method, call), budget_bytes=budget) for c in found]


def _draft(network: Network, method: Moonwalk, call: PlanRequest, seen: list[Choice]) -> Draft:
    return draft(network, method, gains=call.gains, values=call.values, fused=call.fused, seen=seen)


def _frontier(made: Draft, seen: list[Choice]) -> list[Choice]:
    """The choices from least memory to least time; the default is among them, or a better one."""
    walking: list[Proposer] = []
    default = _smallest(made, seen, walking)
    if made.is_settled:
        return [default]
    found = search.frontier([default, *_candidates(made, seen, walking)])
    return search.frontier([*found, *_between(made, found)])


def _smallest(made: Draft, seen: list[Choice], walking: list[Proposer] | None = None) -> Choice:
    """The choice of least memory, or a faster one that takes little more.

    `seen`, `walking`: as of `_with_walks`.
    """
    best = _with_walks(made, seen, [] if walking is None else walking)
    if made.is_settled:
        return best
    near = seen
    if made.plain.peak <= report.WORTH * best.peak:
        best = made.plain
        # A walk has to save a tenth. Otherwise none may be known: those that cannot are not priced.
        near = [c for c in seen if not c.walks]
    by_hand = checkpoint.by_hand(made.network, made.costs)
    near = [best, *by_hand, *near]
    least = min(c.peak for c in near)
    # Close to the least, but never above what a checkpoint around every block would take.
    limit = max(least, min([report.WORTH * least, *(c.peak for c in by_hand[:1])]))
    if best is made.plain:
        proposers = plain_proposers(made.network, made.costs)
        # Where a second is dear, plans keep far more than the least.
        worths = search.worths(made.network, made.costs, _CHEAP)
        near += search.faster(
            made.network, made.costs, proposers, below=limit, count=_LIMITS, worths=worths
        )
    chosen = min((c for c in near if c.peak <= limit), key=lambda c: (c.seconds, c.peak))
    whole = _stored(made)
    if whole is None:
        return chosen
    # Blocks at the end may be stored as long as others take the peak.
    more = search.largest_between(made.network, made.costs, chosen, whole, limit)
    near = [chosen] if more is None else [chosen, more]
    return min(near, key=lambda c: (c.seconds, c.peak))


def _stored(made: Draft) -> Choice | None:
    """Backpropagation; None if the user asked for a checkpoint anywhere."""
    nodes = made.network.nodes
    if any(node.checkpointed for node in nodes) or not nodes:
        return None
    return search.priced(made.network, made.costs, [StoreExecutor(made.network, 0, len(nodes))])


def _candidates(made: Draft, seen: list[Choice], walking: list[Proposer]) -> Iterable[Choice]:
    """Choices from least memory to least time, besides those that `seen` has."""
    network, costs = made.network, made.costs
    proposers = plain_proposers(network, costs)
    most = sum(stored_sizes(network, costs)) + 1
    worths = search.worths(network, costs, _CHEAP + _DEAR)
    found = search.faster(network, costs, proposers, below=most, count=_MANY_LIMITS, worths=worths)
    found = [*seen, made.plain, *checkpoint.by_hand(network, costs), *found]
    if walking:  # some nodes walked or inverted, and others stored
        dear = search.worths(network, costs, _WALKED)
        found += search.faster(network, costs, walking, below=most, count=_WALKED_LIMITS, worths=dear)
    whole = _stored(made)
    return found if whole is None else [*found, whole]


def _between(made: Draft, choices: Sequence[Choice]) -> Iterator[Choice]:
    """Choices between those that are far apart, and between the first and the last."""
    pairs = [(a, b) for a, b in itertools.pairwise(choices) if b.peak > _APART * a.peak]
    for small, fast in [*pairs, (choices[0], choices[-1])]:
        yield from search.between(made.network, made.costs, small, fast, _BETWEEN)


def _budget(method: Moonwalk, call: PlanRequest) -> int:
    """The method's budget in bytes. Arguments that are on the device already are not counted twice."""
    if method.budget != "device":
        return settings.size("Moonwalk", "budget", method.budget)
    free = _jax.free_bytes()
    if free is None:
        raise BudgetError(
            "Moonwalk(budget='device'): this device does not say how much memory it has; name a number "
            "of bytes, or a size such as '8GiB'"
        )
    return free + call.resident_bytes


def _within(
    budget: int, choices: Sequence[Choice], made: Draft, method: Moonwalk, call: PlanRequest
) -> list[Choice]:
    """The choices that fit a budget; BudgetError if none does."""
    beside = call.argument_bytes + call.result_bytes
    fitting = [c for c in choices if made.temporaries(c, call) + beside <= budget]
    if fitting:
        return fitting
    asked = f"Moonwalk(budget={method.budget!r})"
    if method.budget == "device":
        asked += f" ({format_bytes(budget)} are free)"
    parts = f"arguments {format_bytes(call.argument_bytes)}, results {format_bytes(call.result_bytes)}"
    if beside > budget:
        raise BudgetError(
            f"{asked}: the arguments and the results alone take {format_bytes(beside)} ({parts}); raise "
            "the budget, or divide the arguments among more devices"
        )
    least = choices[0]
    temporaries = made.temporaries(least, call)
    text = (
        f"{asked}: the least that a plan takes is about {format_bytes(temporaries + beside)} "
        f"({temporaries + beside:,} bytes: {parts}, temporaries {format_bytes(temporaries)}), most of "
        f"it for {_largest(made, least)}; raise the budget, or make that smaller (a smaller batch, or "
        "shorter examples)"
    )
    if call.values is None and any(n.is_heavy and n.rule is not None for n in made.network.nodes):
        text += (
            ". A plan from concrete arguments may take less, because it measures gains: pass "
            "method=moonwalk.plan(fun, *args, method=...)"
        )
    raise BudgetError(text)


def _largest(made: Draft, choice: Choice) -> str:
    """The node that takes most where the peak of a choice is."""
    timeline = timeline_of(made.network, made.costs)
    segment = timeline.busiest(choice.segments)
    if segment is None:
        return "the weights' own prologue"
    sizes = stored_sizes(made.network, made.costs)
    places = range(segment.start, segment.stop)
    node = made.network.nodes[max(places, key=lambda i: timeline.states(i) + sizes[i])]
    line = line_of(node)
    return node.describe() + (f" at {line}" if line else "")


def _with_walks(made: Draft, seen: list[Choice], walking: list[Proposer]) -> Choice:
    """The best choice that may also walk and invert.

    `seen` takes the choices that were evaluated, `walking` the proposers if there is anything to walk or
    to invert.
    """
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
        store, recompute = plain_proposers(network, costs, [not m for m in must])
        walker = WalkProposer(walks)
        walked: list[Proposer] = [walker]
        rerun: list[Proposer] = []
        if options.checkpoint == "auto":
            walked, rerun = [*walked, TileProposer(walks)], [RerunProposer(walks)]
        # Among offers that cost equally much, the earlier proposer wins.
        every = [store, *walked, *inverted, recompute, *rerun]
        recovers = not options.always
        best = search.choose(
            network, costs, every, best=best, thorough=False, recovers=recovers, seen=seen
        )
        walking += every
    if inverted:
        store, recompute = plain_proposers(network, costs)
        every = [store, *inverted, recompute]
        best = search.choose(network, costs, every, best=best, seen=seen)
        walking += [] if walking else every
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
    store, recompute = plain_proposers(made.network, made.costs)
    below = made.plain.peak / report.WORTH
    for light in (False, True):  # the bound that takes no trace first
        bound = WalkBoundProposer(walks, light=light)
        proposers = [store, bound, *inverted, recompute]
        if not search.may_choose(made.network, made.costs, proposers, bound, below):
            return False
    return True
