"""Reversible backpropagation: [stem,] layers that are inverted [, head].

This is how reversible networks are trained (Gomez et al. 2017). Before the second layer, a block without
an inverse (an embedding, a change of width, its activation) is stored together with all that precedes
it; after the last layer but one, a block without an inverse (a classifier, the loss) is stored together
with all that follows. Everything between must have an inverse, or it is refused. The paper's Table 1
lists that as a restriction of this method, which walks do not have.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .. import _jax
from ..errors import NotInvertibleError
from ..network.cutting import Network, Node
from ..rules.registry import Verdict
from ..segments.invert import InvertExecutor, inverted_or_why
from ..segments.store import StoreExecutor
from . import draft, search
from .draft import PlanRequest
from .methods import Reversible
from .report import Plan


def plan(network: Network, method: Reversible, call: PlanRequest) -> Plan:
    """Like `moonwalk.plan`. The state that inverses reconstruct is always compared with the true one."""
    made = draft.draft(network, method, gains=call.gains, fused=call.fused)
    start, stop = bounds(network)
    segments: list[Any] = [StoreExecutor(network, 0, start)] if start else []
    if start < stop:
        segments.append(InvertExecutor(network, start, stop, derived=True))
    if stop < len(network.nodes):
        segments.append(StoreExecutor(network, stop, len(network.nodes)))
    choice = search.priced(network, made.costs, segments, sum(s.kept_bytes for s in segments))
    return made.describe(choice, method, call)


def bounds(network: Network) -> tuple[int, int]:
    """The range of nodes to invert; raises NotInvertibleError naming a block that forbids it."""
    nodes = network.nodes
    found = [inverted_or_why(n, network, derived=True) for n in nodes]
    bad = [i for i, f in enumerate(found) if isinstance(f, Verdict)]
    weighted = [i for i, n in enumerate(nodes) if n.weights]
    if not weighted:
        return len(nodes), len(nodes)
    # The first layer may belong to the stem, the last to the head; a scan counts as several layers.
    stem = _one_layer(nodes, weighted)
    head = len(nodes) - _one_layer(nodes[::-1], [len(nodes) - 1 - i for i in reversed(weighted)])
    start = max((i + 1 for i in bad if i < stem), default=0)
    stop = min((i for i in bad if i >= max(head, start)), default=len(nodes))
    inside = [i for i in bad if start <= i < stop]
    if inside:
        _refuse(nodes, found, inside[0])
    # After the last layer, an inverse saves at most a bit per entry, and may divide by zeros of a mask.
    while stop > max(start, weighted[-1] + 1) and getattr(found[stop - 1], "is_derived", False):
        stop -= 1
    if start >= stop or all(nodes[i].is_aside for i in range(start, stop)):
        return len(nodes), len(nodes)  # a stem and a head
    return start, stop


def _one_layer(nodes: Sequence[Node], weighted: Sequence[int]) -> int:
    """How many nodes there are before the second layer."""
    first, *others = weighted
    return first if nodes[first].is_scan else others[0] if others else first + 1


def _refuse(nodes: Sequence[Node], found: Sequence[Any], i: int) -> None:
    node = nodes[i]
    line = _jax.source_line(node.block.eqns[-1]) if node.block.eqns else ""
    where = f" at {line}" if line else ""
    raise NotInvertibleError(
        f"Reversible: {node.describe()}{where} cannot be inverted: {found[i].reason}. Use "
        "moonwalk.Moonwalk(), which needs no inverse; build the network from moonwalk.nn.Coupling; or "
        "give the function an inverse with moonwalk.custom_vijp.definverse"
    )
