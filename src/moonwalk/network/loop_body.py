"""The body of a scan, cut like a network: which of its inputs are weights, data, state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .. import _jax
from .._jax import Literal
from ..trace import graph, staging
from ..trace.activity import active_variables, is_differentiable
from . import cutting
from .cutting import Network, Node


@dataclass(frozen=True, eq=False, repr=False)
class Body:
    """The body of a scan as a network of its own, and how its inputs are grouped."""

    jaxpr: Any
    consts: tuple[Any, ...]
    network: Network
    counts: _jax.ScanCounts
    active: tuple[int, ...]  # carries that have a cotangent
    active_ys: tuple[int, ...]  # stacked outputs that have a cotangent
    weights: tuple[int, ...]  # inputs (consts or xs) whose gradient is wanted
    volatile: tuple[int, ...]  # inputs that Phase II cannot read

    @property
    def outputs(self) -> tuple[list[Any], list[Any]]:
        """The network's outputs: (active carries, active ys)."""
        found = list(self.network.outputs)
        return found[: len(self.active)], found[len(self.active) :]


def open_body(node: Node, fixed: frozenset[Any], numbers: frozenset[Any] = frozenset()) -> Body | str:
    """The body of a scan node, or the reason why it cannot be walked.

    `numbers`: variables that are neither weights nor data.
    """
    block, (eqn,) = node.block, node.block.eqns
    counts = _jax.scan_counts(eqn)
    num_consts, num_carry = counts
    carries = range(num_consts, num_consts + num_carry)
    for i, v in enumerate(eqn.invars):
        if not isinstance(v, Literal) and v in block.inputs and i not in carries:
            return "a state enters the scan as a constant or as scanned-over data, not as its carry"
    closed = eqn.params["jaxpr"]
    inner, _ = _jax.open_jaxpr(closed)
    jaxpr, consts = staging.flatten_calls(closed, [graph.struct(v) for v in inner.invars])
    weights = [i for i, v in enumerate(eqn.invars) if _in(v, node.weights) and i not in carries]
    if any(_in(v, node.weights) and i in carries for i, v in enumerate(eqn.invars)):
        return "a carry starts from a weight"
    states = [v for v in eqn.invars[num_consts : num_consts + num_carry] if _in(v, block.inputs)]
    if len(set(states)) < len(states):
        return "one state enters the scan as two carries"
    ys = [k for k, v in enumerate(eqn.outvars[num_carry:]) if v in block.outputs]
    final = [j for j, v in enumerate(eqn.outvars[:num_carry]) if v in block.outputs]
    start = [j for j in range(num_carry) if _in(eqn.invars[num_consts + j], block.inputs)]
    active = _active_carries(jaxpr, num_consts, num_carry, weights, start, final, ys)
    outputs = [jaxpr.outvars[j] for j in active] + [jaxpr.outvars[num_carry + k] for k in ys]
    if any(isinstance(v, Literal) for v in outputs):
        return "a carry is overwritten by a constant"
    if not set(start) <= set(active):
        return "a state enters the scan and is not used"
    in_carry = jaxpr.invars[num_consts : num_consts + num_carry]
    volatile = [num_consts + j for j in range(num_carry) if j not in active]
    volatile += [
        i
        for i, v in enumerate(eqn.invars)
        if i not in carries and not isinstance(v, Literal) and v not in fixed
    ]
    plain = [i for i in range(num_consts) if i not in weights and i not in volatile]
    unread = [i for i in plain if isinstance(eqn.invars[i], Literal) or eqn.invars[i] in numbers]
    network = cutting.build(
        jaxpr,
        state=[in_carry[j] for j in active],
        weights=[jaxpr.invars[i] for i in weights],
        outputs=outputs,
        volatile=[jaxpr.invars[i] for i in volatile],
        constants=cutting.small(jaxpr.constvars) + cutting.small(jaxpr.invars[i] for i in unread),
        # Only a walk looks into a body, and at a crossing it would have to subtract cotangents.
        crossings=False,
        **graph.facts_inside_scan(block, jaxpr, consts),
    )
    on_way = {v for n in network.nodes for v in n.block.outputs} | set(network.state)
    read = {v for n in network.nodes for v in n.block.inputs} | set(network.outputs)
    carried = network.outputs[: len(active)]
    if any(v not in read for v in network.state):
        return "no cotangent reaches a carry at the start of a layer: only its values are read"
    if any(v not in on_way for v in carried):
        # Its cotangent ends in every layer, so no sweep could recover it from the layer before.
        return "a carry is overwritten by what does not depend on the state"
    return Body(
        jaxpr,
        tuple(consts),
        network,
        counts,
        tuple(active),
        tuple(ys),
        tuple(weights),
        tuple(volatile),
    )


def _in(v: Any, variables: Sequence[Any]) -> bool:
    return not isinstance(v, Literal) and v in variables


def _active_carries(
    jaxpr: Any,
    num_consts: int,
    num_carry: int,
    weights: Sequence[int],
    start: Sequence[int],
    final: Sequence[int],
    ys: Sequence[int],
) -> list[int]:
    """Carries on a differentiable path from a weight or state to an output, around the loop."""
    ins = jaxpr.invars[num_consts : num_consts + num_carry]
    outs = jaxpr.outvars[:num_carry]
    sources = [jaxpr.invars[i] for i in weights]
    every = [v for v in jaxpr.outvars if not isinstance(v, Literal)]

    def grow(found: set[int], reached: Any) -> set[int]:
        while True:
            more = found | reached(found)
            if more == found:
                return found
            found = more

    def forward(found: set[int]) -> set[int]:
        on = active_variables(jaxpr.eqns, [*sources, *(ins[j] for j in found)], every)
        return {
            j
            for j, v in enumerate(outs)
            if not isinstance(v, Literal) and v in on and is_differentiable(v.aval)
        }

    stacked = [jaxpr.outvars[num_carry + k] for k in ys]

    def backward(found: set[int]) -> set[int]:
        sinks = [v for v in (*stacked, *(outs[j] for j in found)) if not isinstance(v, Literal)]
        on = active_variables(jaxpr.eqns, [*sources, *ins], sinks)
        return {j for j, v in enumerate(ins) if v in on and is_differentiable(v.aval)}

    return sorted(grow(set(start), forward) & grow(set(final), backward))
