"""What nodes cost to store: the bytes that ∂y/∂x needs, and what ∂y/∂θ needs besides."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from .. import _jax
from ..execute.loops import checkpointed
from ..execute.residuals import Residual, nbytes
from ..network.cutting import Network, Node


def full_residual(node: Node, network: Network, periods: tuple[int, ...] = ()) -> Residual:
    """What a node keeps for ∂y/∂x and ∂y/∂θ; a scan may be run as scans of checkpointed scans."""
    key = (node.model, periods)
    if key not in network.memory:
        network.memory[key] = _full_residual(node.model, network, periods)
    return network.memory[key]


def _full_residual(node: Node, network: Network, periods: tuple[int, ...]) -> Residual:
    block = node.block
    places = [block.operands.index(v) for v in node.weights]

    def linearize(x: Sequence[Any], operands: Sequence[Any]) -> Any:
        def run(x: Any, weights: Any) -> Any:
            values = list(operands)
            for place, w in zip(places, weights, strict=True):
                values[place] = w
            if periods:
                out = checkpointed(node, periods, x, values)
            else:
                out = block.values((*block.outputs, *block.exports), x, values)
            return out[: len(block.outputs)], out[len(block.outputs) :]

        y, pullback, exports = jax.vjp(run, list(x), [operands[p] for p in places], has_aux=True)
        return (*y, *exports), pullback

    x, operands = block.structs()
    # A light node may be linearised again from its state; a heavy one would take as long again.
    rerun = not node.is_heavy and not node.effects
    return Residual(linearize, x, operands, network.kinds(block.operands), rerun=rerun)


@dataclass
class NodeCost:
    """Bytes of one node."""

    backprop: int = 0  # everything that reverse mode keeps, Booleans as bits
    wrt_x: Callable[[], int] = int  # what of that ∂y/∂x needs
    period: int | None = None  # of a scan that is cheaper as a scan of checkpointed scans
    transient: int = 0  # of such a scan: the residuals of one period
    carries: int = 0  # and the carries that it keeps
    stored: int = 0  # what storing keeps: less than all, where the state itself is less
    gradients: int = 0  # of stacked weights, where they would otherwise not all exist at once
    unpacked: int = 0  # what Booleans take beyond a bit each where JAX keeps them, as bytes

    @functools.cached_property
    def m_x(self) -> int:
        """Bytes that ∂y/∂x needs. Found by tracing its pullback when a report asks for it."""
        return min(self.wrt_x(), self.backprop)

    @property
    def m_theta(self) -> int:
        """Bytes that ∂y/∂θ needs besides."""
        return self.backprop - self.m_x

    @property
    def full(self) -> int:
        """What differentiating the node by itself takes, at its best."""
        kept = self.stored if self.period is None else self.carries + self.transient
        return kept + self.gradients


def node_costs(network: Network, *, fused: bool = False) -> list[NodeCost]:
    """What every node takes, by tracing its pullback; once for nodes that compute the same.

    `fused`: gradients are applied as they come, but those of a scan that is not walked come at once.
    """
    result = []
    for node in network.nodes:
        key = ("cost", node.model)
        if key not in network.memory:
            network.memory[key] = _node_cost(node.model, network)
        cost = network.memory[key]
        if fused and node.is_scan:
            cost = replace(cost, gradients=nbytes(*(v.aval for v in node.weights)))
        result.append(cost)
    return result


def _node_cost(node: Node, network: Network) -> NodeCost:
    block = node.block
    if node.is_aside or node.is_fork:
        return NodeCost()
    x, operands = block.structs()

    def pullback(x: Any, operands: Any) -> Any:
        return jax.vjp(lambda *x: block(x, operands), *x)

    def wrt_x() -> int:
        return Residual(pullback, x, operands, network.kinds(block.operands)).leaf_bytes if x else 0

    whole = full_residual(node, network)
    cost = NodeCost(whole.leaf_bytes, wrt_x, stored=whole.bytes)
    masks = [v.aval for v in whole.distinct if v.aval.dtype == np.bool_]
    cost.unpacked = sum(a.size for a in masks) - nbytes(*masks)
    if node.is_scan and not node.effects:
        _checkpoint_cost(node, cost)
    return cost


def _checkpoint_cost(node: Node, cost: NodeCost) -> None:
    """The period at which a scan of checkpointed scans keeps least."""
    length = node.block.eqns[0].params["length"]
    best = cost.stored
    root = math.isqrt(length)
    # For every number of periods the shortest: 2 √L of them.
    periods = {*range(1, root + 1), *(-(-length // count) for count in range(1, root + 1))}
    for period in sorted(periods):
        kept, transient = in_periods(node, cost.backprop, (period,))
        if kept + transient < best:
            best = kept + transient
            cost.period, cost.carries, cost.transient = period, kept, transient


def in_periods(node: Node, backprop: int, periods: Sequence[int]) -> tuple[int, int]:
    """A scan of checkpointed scans: (the carries that it keeps, what it takes besides at once).

    `backprop`: what all its layers would keep.
    """
    (eqn,) = node.block.eqns
    length = max(1, eqn.params["length"])
    carry, stacked = carry_bytes(node), eqn.invars[sum(_jax.scan_counts(eqn)[:2]) :]
    read = nbytes(*(v.aval for v in stacked), *(v.aval for v in stacked if v in node.weights))
    counts = [-(-a // b) for a, b in itertools.pairwise((length, *periods))]
    # Every level inside has its own copy of what its layers read, and of gradients; so have whole
    # periods where they leave layers over.
    copies = read * sum(periods[:-1]) // length + (read if length % periods[0] else 0)
    return carry * counts[0], carry * sum(counts[1:]) + backprop * periods[-1] // length + copies


def carry_bytes(node: Node) -> int:
    """Of a scan's carry."""
    (eqn,) = node.block.eqns
    first, carries = _jax.scan_counts(eqn)[:2]
    return nbytes(*(v.aval for v in eqn.invars[first : first + carries]))
