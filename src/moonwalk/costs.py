"""What nodes cost to store: the bytes that ∂y/∂x needs, and what ∂y/∂θ needs besides."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax

from . import compat
from .residuals import Residual, nbytes
from .segments import full_residual
from .trunk import Node, Trunk


@dataclass
class NodeCost:
    """Bytes of one node: what ∂y/∂x needs, and what ∂y/∂θ needs besides."""

    m_x: int
    m_theta: int
    period: int | None = None  # of a scan that is cheaper as a scan of checkpointed scans
    transient: int = 0  # of such a scan: the residuals of one period
    carries: int = 0  # and the carries that it keeps
    stored: int = 0  # what storing keeps: less than all, where the state itself is less
    gradients: int = 0  # of stacked weights, where they would otherwise not all exist at once

    @property
    def backprop(self) -> int:
        """Everything that reverse mode keeps."""
        return self.m_x + self.m_theta

    @property
    def full(self) -> int:
        """What differentiating the node by itself takes, at its best."""
        kept = self.stored if self.period is None else self.carries + self.transient
        return kept + self.gradients


def node_costs(cut: Trunk, *, fused: bool = False) -> list[NodeCost]:
    """M_x and M_θ of every node, by tracing its pullbacks.

    `fused`: gradients are applied as they come, but those of a scan that is not walked come at once.
    """
    memory: dict[Any, NodeCost] = {}
    result = []
    for node in cut.nodes:
        key = _signature(node, cut)
        if key is None or key not in memory:
            cost = _node_cost(node, cut)
            if key is not None:
                memory[key] = cost
        else:
            cost = memory[key]
        if fused and node.is_scan:
            cost = replace(cost, gradients=nbytes(*(v.aval for v in node.weights)))
        result.append(cost)
    return result


def _signature(node: Node, cut: Trunk) -> Any:
    """What makes two nodes cost the same: equal equations between equal types."""
    numbers: dict[Any, int] = {}
    rows = []
    block = node.block
    for v in (*block.inputs, *block.operands):
        numbers[v] = len(numbers)
    for e in block.eqns:
        atoms = []
        for v in e.invars:
            if hasattr(v, "val"):
                atoms.append(("literal", str(v.aval), str(v.val)))
            else:
                atoms.append((numbers.setdefault(v, len(numbers)), str(v.aval)))
        for v in e.outvars:
            numbers.setdefault(v, len(numbers))
        params = tuple(sorted((k, v) for k, v in e.params.items()))
        rows.append((e.primitive, tuple(atoms), params))
    flags = tuple(cut.kinds(block.operands))
    wanted = tuple(v in node.weights for v in block.operands)
    outputs = tuple(numbers.get(v) for v in (*block.outputs, *block.exports))
    key = (type(block), tuple(rows), flags, wanted, outputs, tuple(str(v.aval) for v in block.inputs))
    try:
        hash(key)
    except TypeError:
        return None
    return key


def _node_cost(node: Node, cut: Trunk) -> NodeCost:
    block = node.block
    if node.is_aside or node.is_fork:
        return NodeCost(0, 0)
    x, operands = block.structs()

    def wrt_x(x: Any, operands: Any) -> Any:
        return jax.vjp(lambda *x: block(x, operands), *x)

    whole = full_residual(node, cut)
    m_x = Residual(wrt_x, x, operands, cut.kinds(block.operands)).leaf_bytes if x else 0
    m_x = min(m_x, whole.leaf_bytes)
    cost = NodeCost(m_x, whole.leaf_bytes - m_x, stored=whole.bytes)
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
    carry, stacked = carry_bytes(node), eqn.invars[sum(compat.scan_counts(eqn)[:2]) :]
    read = nbytes(*(v.aval for v in stacked), *(v.aval for v in stacked if v in node.weights))
    counts = [-(-a // b) for a, b in itertools.pairwise((length, *periods))]
    # Every level inside has its own copy of what its layers read, and of gradients; so have whole
    # periods where they leave layers over.
    copies = read * sum(periods[:-1]) // length + (read if length % periods[0] else 0)
    return carry * counts[0], carry * sum(counts[1:]) + backprop * periods[-1] // length + copies


def carry_bytes(node: Node) -> int:
    """Of a scan's carry."""
    (eqn,) = node.block.eqns
    first, carries = compat.scan_counts(eqn)[:2]
    return nbytes(*(v.aval for v in eqn.invars[first : first + carries]))
