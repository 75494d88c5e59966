"""Which nodes of a recomputed stretch truly run again.

JAX traces all of them, but XLA drops what no pullback reads: a product's pullback reads the product's
input, not its output, so a stretch that ends with a product does not compute it again; nor an addition
behind it. That is what makes "keep the outputs of products" cheap: cut behind every product, and only
the light nodes between products run twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..network.cutting import Network, Node
from .costs import full_residual

_MOST = 64  # nodes that the search looks back over from the end of a stretch


def spared(nodes: Sequence[Node], network: Network) -> list[int]:
    """The places of nodes that do not run again if these, in their order, are recomputed together."""
    asked: set[object] = set()
    result = []
    for i in reversed(range(len(nodes))):
        node = nodes[i]
        runs, reads = _needs(node, network)
        if runs or not asked.isdisjoint((*node.block.outputs, *node.block.exports)):
            runs = reads = True
        if reads:
            asked.update((*node.block.inputs, *node.block.operands))
        if not runs:
            result.append(i)
    return result[::-1]


def spared_by_end(network: Network, seconds: Sequence[float]) -> Callable[[int, int], float]:
    """(start, stop) -> the seconds that nodes at the end of a stretch are spared.

    Every start is answered from one pass back from `stop`.
    """
    memory = network.memory.setdefault("spared", {})

    def of(start: int, stop: int) -> float:
        if stop not in memory:
            first = max(0, stop - _MOST)
            places = [first + i for i in spared(network.nodes[first:stop], network)]
            memory[stop] = [(i, seconds[i]) for i in places if seconds[i]]
        return sum(s for i, s in memory[stop] if i >= start)

    return of


def _needs(node: Node, network: Network) -> tuple[bool, bool]:
    """Of a node's pullback: (whether it reads what the node computes, whether it reads its inputs)."""
    if node.is_aside or node.is_fork:
        return False, False
    key = "needs", node.model
    if key not in network.memory:
        held = full_residual(node, network).held
        network.memory[key] = any(place is None for place, _ in held), bool(held)
    return network.memory[key]
