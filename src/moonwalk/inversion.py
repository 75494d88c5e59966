"""Segments whose states are had again from their outputs: reversible networks.

Where every block of a segment has an inverse (`Rule.inverse`: additive couplings, `nn.Coupling`), Phase
I keeps the state at its *end* alone. The reverse pass takes each block's input from its output, and
pulls back there, h and g at once:

    x = inverse(y),    (h, g) = vjp(block, x)(h')

as in reversible residual networks (Gomez et al. 2017). Nothing grows with the depth, and there is no
Phase III. What is lost is rounding: the inverse's x is not Phase I's, and the difference travels down
the segment. So 64 entries of the state at its start are kept, and compared with those it arrives at.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from . import certificate, compat, registry
from .bodies import Body, open_body
from .ledger import Ledger
from .registry import Rule
from .residuals import nbytes
from .scans import ScanStep, Sums
from .segments import Stretch, full_residual
from .sources import is_worth_hoisting
from .trunk import Node, Trunk
from .walks import Env, Step, Walk, hold


def inverse_rule(node: Node, trunk: Trunk) -> Rule | None:
    """The rule that inverts a node, whose operands every phase can read."""
    if node.is_fork or node.is_aside or node.effects or node.checkpointed:
        return None
    block = node.block
    if block.exports or not block.inputs or not set(block.operands) <= trunk.fixed:
        return None
    if _is_half_inside(node):
        return None
    return next((rule for rule in registry.rules_for(block) if rule.inverts(block)), None)


def _is_half_inside(node: Node) -> bool:
    """Whether anything is computed in half precision.

    Of a state in half precision, what rounding takes away is felt after a few layers. And a function
    that rounds a float32 state to half precision takes a difference in the last place to one in the
    eighth bit, wherever a value lies between two of its own.
    """
    x, operands = node.block.structs()

    def moved(x: Any, operands: Any) -> Any:  # its derivative opens every call
        return jax.jvp(lambda *x: node.block(x, operands), x, x)

    closed = jax.make_jaxpr(moved)(tuple(x), list(operands))
    pending = [compat.open_jaxpr(closed)[0]]
    while pending:
        jaxpr = pending.pop()
        for v in (*jaxpr.invars, *(v for e in jaxpr.eqns for v in e.outvars)):
            dtype = getattr(v.aval, "dtype", None)
            if dtype is not None and jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32:
                return True
        pending += [inner for e in jaxpr.eqns for inner in compat.inner_jaxprs(e)]
    return False


def inverted(node: Node, trunk: Trunk) -> OneBlock | OneScan | None:
    """How to invert a node, or None."""
    key = (node, "inverted")
    if key not in trunk.memory:
        found: OneBlock | OneScan | None = None
        if node.is_scan and not node.effects and not node.checkpointed:
            found = _inverted_scan(node, trunk)
        else:
            rule = inverse_rule(node, trunk)
            found = None if rule is None else OneBlock(node, trunk, rule)
        trunk.memory[key] = found
    return trunk.memory[key]


class OneBlock:
    """A block with an inverse."""

    def __init__(self, node: Node, trunk: Trunk, rule: Rule):
        self.node, self.rule = node, rule
        self.origins: tuple[Any, ...] = ()  # data that it starts from
        self.unread: tuple[Any, ...] = ()  # results that are needed, though nobody else reads them
        self.residual = full_residual(node, trunk)
        self.bytes = self.residual.bytes  # what it takes while it is differentiated

    def back(self, fixed: Env, x: Env, h: Env, out: Ledger) -> None:
        """From the outputs' values and cotangents to the inputs'."""
        block, weights = self.node.block, self.node.weights
        operands = [fixed[v] for v in block.operands]
        state = self.rule.inverse(block, operands, tuple(x.pop(v) for v in block.outputs))
        # A coupling's inverse has run what its pullback runs, on the same values: XLA runs it once.
        _, kept = self.residual.forward(list(state), operands)
        arriving = tuple(h.pop(v).astype(v.aval.dtype) for v in block.outputs)
        leaving, found = self.residual.restore(kept, operands)(arriving)
        x.update(zip(block.inputs, state, strict=True))
        h.update(zip(block.inputs, leaving, strict=True))
        out.add(dict(zip(weights, found, strict=True)))
        out.close(weights)


class OneScan:
    """A scan over layers that are inverted: one loop back."""

    def __init__(self, node: Node, step: ScanStep, layer: list[OneBlock | OneScan]):
        self.node, self.step, self.layer = node, step, layer
        weights = dict.fromkeys(v for part in layer for v in part.node.weights)
        self.weights = tuple(weights)
        first = step.eqn.invars[step.body.counts.consts : step.body.counts.stacked]
        self.first = tuple(first)
        self.origins = tuple(first[j] for j in step.seeded)
        shown = {*node.block.outputs, *node.block.exports}
        self.unread = tuple(v for v in step.eqn.outvars[: len(first)] if v not in shown)
        # While a layer is differentiated, its gradients lie beside what they are written to.
        self.bytes = max(part.bytes for part in layer) + 2 * step.operand_bytes
        self.bytes += step.length * step.operand_bytes if step.hoisted else 0

    def back(self, fixed: Env, x: Env, h: Env, out: Ledger) -> None:
        step = self.step
        operands, _ = step.operands_of(fixed, {})
        ends, _ = step.body.outputs
        y = [x.pop(v) for v in step.eqn.outvars[: step.body.counts.carry]]
        h_last, _ = step.arriving(h)
        sums = Sums(step, operands, self.weights)

        def layer(carry: Any, i: Any, _: Any) -> Any:
            y, h, total = carry
            env = step.environment(operands, i)
            inner_x, inner_h = dict(zip(ends, y, strict=True)), dict(zip(ends, h, strict=True))
            found = Ledger()
            for part in reversed(self.layer):
                part.back(env, inner_x, inner_h, found)
            total = sums.add(total, i, env, found.found)
            return ([inner_x[v] for v in step.h_ins], [inner_h[v] for v in step.h_ins], total), None

        carry, _ = step.scan(layer, (y, h_last, sums.start()), backward=True, length=step.length)
        start, h_first, total = carry
        x.update(zip(self.first, start, strict=True))
        step.leaving(h, h_first)
        out.add(sums.finish(total))
        out.close(self.node.weights)


def _inverted_scan(node: Node, trunk: Trunk) -> OneScan | None:
    body = open_body(node, trunk.fixed, trunk.numbers)
    if not isinstance(body, Body):
        return None
    whole = len(body.active) == body.counts.carry and not body.active_ys and not body.volatile
    if not whole or not body.trunk.nodes or not _starts_inside(node, body):
        return None
    layer = [inverted(n, body.trunk) for n in body.trunk.nodes]
    parts = [part for part in layer if part is not None]
    if len(parts) < len(layer) or not _is_chain(body.trunk):
        return None
    steps = [Step(n, body.trunk, "none") for n in body.trunk.nodes]
    walk = Walk(body.trunk, 0, len(steps), steps)
    step = ScanStep(node, trunk, "none", node.block.inputs, body=body, walk=walk)
    step.hoisted = is_worth_hoisting(step)
    return OneScan(node, step, parts)


def _starts_inside(node: Node, body: Body) -> bool:
    """Whether every carry starts from a state or data of its own, to arrive at again."""
    (eqn,) = node.block.eqns
    carries = eqn.invars[body.counts.consts : body.counts.stacked]
    known = {*node.block.inputs, *node.block.operands}
    return not any(isinstance(v, compat.Literal) or v not in known for v in carries) and len(
        set(carries)
    ) == len(carries)


def _is_chain(trunk: Trunk) -> bool:
    """Whether the outputs are all that the nodes leave behind, and determine every state."""
    made = [v for n in trunk.nodes for v in n.block.outputs]
    read = {v for n in trunk.nodes for v in n.block.inputs}
    return {v for v in made if v not in read} == set(trunk.outputs) and set(trunk.state) <= read


class Inverted(Stretch):
    """Consecutive nodes [start, stop) of a trunk that are inverted."""

    kind = "invert"
    is_estimated = True  # rounding in the inverses is bounded by no trace

    def __init__(self, trunk: Trunk, start: int, stop: int, *, certify: bool):
        super().__init__(trunk, start, stop)
        parts = [inverted(n, trunk) for n in self.nodes]
        self.parts = [part for part in parts if part is not None]
        assert len(self.parts) == len(parts)
        self.certify = certify
        made = dict.fromkeys(v for n in self.nodes for v in n.block.outputs)
        read = dict.fromkeys(v for n in self.nodes for v in n.block.inputs)
        self.starts = tuple(v for v in read if v not in made)
        # A scan's last carry is needed whole, though a part of it may have no other reader, or only
        # readers without a derivative.
        scans = [part for part in self.parts if isinstance(part, OneScan)]
        carries = [v for part in scans for v in part.step.eqn.outvars[: len(part.first)]]
        self.ends = tuple(dict.fromkeys(v for v in (*made, *carries) if v not in read))
        self.also = {i: part.unread for i, part in enumerate(self.parts) if part.unread}

    @property
    def kept_bytes(self) -> int:
        """The state at the end."""
        return nbytes(*(v.aval for v in self.ends))

    @property
    def transient_bytes(self) -> int:
        """What one block takes while it is differentiated."""
        return max(part.bytes for part in self.parts)

    def phase_one(
        self, fixed: Env, x: Env, retain: frozenset[Any] = frozenset(), *, again: bool = False
    ) -> Any:
        """Forward: reads and writes `x`, returns what is kept."""
        samples = [certificate.sample(x[v]) for v in self.starts] if self.certify else []
        box: dict[str, Any] = {"samples": samples}
        self.run(fixed, x, retain, again=again)
        hold((x, list(x)), (box, list(box)))
        return [x[v] for v in self.ends], box["samples"]

    def reverse(self, fixed: Env, kept: Any, h: Env, out: Ledger) -> list[Any]:
        """From the end's state and cotangent to the start's, handing out gradients; sampled errors."""
        ends, samples = kept
        x = dict(zip(self.ends, ends, strict=True))
        # Behind a barrier: what a coupling passes on is the state itself, and XLA would keep all that
        # Phase I has computed from it.
        hold((x, list(x)), (h, list(h)))
        for part in reversed(self.parts):
            part.back(fixed, x, h, out)
            inputs = [v for v in part.node.block.inputs if v in x and v in h]
            hold((x, inputs), (h, inputs), *out.parts(part.node.weights))
        if not self.certify:
            return []
        pairs = [(x[v], sample) for v, sample in zip(self.starts, samples, strict=True)]
        pairs += [(x[v], certificate.sample(fixed[v])) for part in self.parts for v in part.origins]
        return [certificate.compare_together(pairs)]


def runs(trunk: Trunk) -> list[int]:
    """For every place between nodes, the start of the longest run of inverses that ends there."""
    starts = [0]
    for i, node in enumerate(trunk.nodes):
        starts.append(starts[-1] if inverted(node, trunk) is not None else i + 1)
    return starts
