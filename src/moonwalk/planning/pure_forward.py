"""`PureForward`: where a sweep without a reverse pass can start, and what forbids one.

Without a Phase II nothing can be kept for the sweep. So between stem and head, a fork, a block without a
vijp, or an error that would grow past the tolerance is refused.
"""

from __future__ import annotations

from collections.abc import Sequence

from .. import _jax
from ..errors import NotSubmersiveError
from ..network.cutting import Network, Node
from ..segments.costs import NodeCost
from ..segments.scan_step import ScanStep
from ..segments.store import store_or_recompute
from ..segments.sweep import SweepExecutor, find_seeds, obstacles
from ..segments.walk import WalkExecutor
from ..trace import graph
from . import cotangents, draft, search
from .cotangents import GainTable, Options
from .draft import PlanRequest
from .methods import PureForward
from .report import Plan
from .search import Choice


def plan(network: Network, method: PureForward, call: PlanRequest) -> Plan:
    """Like `moonwalk.plan`. The closure is always computed and enforced, for a few JVPs of the head."""
    made = draft.draft(network, method, gains=call.gains, values=call.values, fused=call.fused)
    choice = choose(network, made.options, made.table, method, made.costs)
    return made.describe(choice, method, call)


def choose(
    network: Network,
    options: Options,
    table: GainTable,
    method: PureForward,
    costs: Sequence[NodeCost],
) -> Choice:
    """Where to start; raises NotSubmersiveError naming the block if one forbids it."""
    envs = None if table.values is None else [table.values]
    n = len(network.nodes)

    def walk_over(start: int, stop: int) -> tuple[WalkExecutor, dict[int, str]]:
        walk, _ = cotangents.plan_walk(network, start, stop, options, table=table, envs=envs)
        return walk, obstacles(walk)

    stop = n
    whole, bad = walk_over(0, n)
    if bad:
        layers = [
            i
            for i, s in enumerate(whole.steps)
            if s.node.weights and not s.is_stem and any(v.aval.size != 1 for v in s.block.outputs)
        ]
        # A scan is many layers, so only what follows it can be the head.
        stop = layers[-1] + network.nodes[layers[-1]].is_scan if layers else n
        whole, bad = walk_over(0, stop)
    start = max(bad, default=-1) + 1
    if any(s.node.weights and (not s.is_stem or s.node.is_scan) for s in whole.steps[:start]):
        _refuse(whole.steps[max(bad)].node, bad[max(bad)])
    walk, _ = walk_over(start, stop)
    for node in network.nodes[start:]:
        if node.has_own_pullback and not (node.is_stem or node.is_aside):
            _refuse(
                node,
                "the sweep's first cotangent is found by jvps, and jax.custom_vjp has none",
                "use method=moonwalk.Moonwalk(), or define its derivative by jax.custom_jvp",
            )
    for step in walk.steps:
        if isinstance(step, ScanStep):
            _keep_nothing(step)
    found = find_seeds(network, walk)
    if method.per_example and found:
        examples = {s.variable.aval.shape[:1] for s in found}
        if len(examples) > 1 or examples == {()}:
            shapes = ", ".join(graph.type_of(s.variable) for s in found)
            raise ValueError(
                "PureForward(per_example=True): the examples must lie along axis 0 of every state that "
                f"the sweep starts from, but these are {shapes}; leave per_example out"
            )
    stem = store_or_recompute(network, 0, start) if start else None
    head = store_or_recompute(network, stop, n) if stop < n else None
    sweep = SweepExecutor(network, walk, stem, head, method.chunk, method.per_example)
    return search.priced(network, costs, [sweep], 0)


_WAYS_OUT = (
    "use method=moonwalk.Moonwalk(), which keeps an anchor there; declare the weight's structure; "
    "or raise PureForward(tolerance=...) where only the gain forbids it"
)


def _refuse(node: Node, why: str, ways_out: str = _WAYS_OUT) -> None:
    line = _jax.source_line(node.block.eqns[-1]) if node.block.eqns else ""
    raise NotSubmersiveError(
        node.describe(),
        line or "a state that several blocks read",
        f"PureForward cannot walk it: {why}",
        ways_out,
    )


def _keep_nothing(step: ScanStep) -> None:
    """Disable hoisting: factors made for all layers at once would grow with the depth."""
    step.layers.hoisted = False
    for inner in step.walk.steps:
        if isinstance(inner, ScanStep):
            _keep_nothing(inner)
