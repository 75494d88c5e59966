"""Segments that are not walked: differentiated by JAX's own vjp, stored or recomputed.

Phase I keeps either the residuals of the nodes' pullbacks (`store`) or, where that is less, the state
at the segment's start (`recompute`), from which the nodes are run and linearised again when the reverse
pass arrives. Gradients are had at once; Phase III never sees such a segment.

Nodes are linearised one by one, with barriers between them, and not in one call of `jax.vjp`: XLA would
keep a pre-activation for the sake of its sign, where a bit of it is enough.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from . import scans
from .certificate import Measured, Place
from .ledger import Ledger
from .residuals import Residual, nbytes
from .trunk import Node, Trunk
from .twins import PRODUCTS
from .walks import Env, hold


def full_residual(node: Node, trunk: Trunk, periods: tuple[int, ...] = ()) -> Residual:
    """What a node keeps for ∂y/∂x and ∂y/∂θ; a scan may be run as scans of checkpointed scans."""
    block = node.block
    places = [block.operands.index(v) for v in node.weights]

    def linearize(x: Sequence[Any], operands: Sequence[Any]) -> Any:
        def run(x: Any, weights: Any) -> Any:
            values = list(operands)
            for place, w in zip(places, weights, strict=True):
                values[place] = w
            if periods:
                out = scans.checkpointed(node, periods, x, values)
            else:
                out = block.values((*block.outputs, *block.exports), x, values)
            return out[: len(block.outputs)], out[len(block.outputs) :]

        y, pullback, exports = jax.vjp(run, list(x), [operands[p] for p in places], has_aux=True)
        return (*y, *exports), pullback

    key = (node, periods)
    if key not in trunk.memory:
        x, operands = block.structs()
        # A light node may be linearised again from its state; a heavy one would take as long again.
        trunk.memory[key] = Residual(
            linearize,
            x,
            operands,
            trunk.kinds(block.operands),
            rerun=not node.is_heavy and not node.effects,
        )
    return trunk.memory[key]


class Stretch:
    """Consecutive nodes [start, stop) of a trunk, in the order in which they run."""

    def __init__(self, trunk: Trunk, start: int, stop: int):
        self.trunk, self.start, self.stop = trunk, start, stop
        self.nodes = trunk.nodes[start:stop]
        self.also: dict[int, tuple[Any, ...]] = {}  # further results of nodes that a segment needs
        self.last: dict[Any, int] = {}
        for i, node in enumerate(self.nodes):
            self.last.update((v, i) for v in (*node.block.inputs, *node.block.operands))

        made = {v for n in self.nodes for v in (*n.block.outputs, *n.block.exports)}
        reads = dict.fromkeys(v for n in self.nodes for v in (*n.block.inputs, *n.block.operands))
        self.inputs = tuple(v for v in reads if v not in made and v not in trunk.fixed)
        self.state_bytes = nbytes(*(v.aval for v in self.inputs))

    @property
    def places(self) -> list[Place]:
        """Where errors are measured: nowhere, in what JAX differentiates itself."""
        return []

    def run_keeping_start(self, fixed: Env, x: Env, retain: frozenset[Any], *, again: bool) -> list[Any]:
        """Forward: what `start_again` needs."""
        kept = [x[v] for v in self.inputs]
        self.run(fixed, x, retain, again=again)
        hold((x, list(x)))
        return kept

    def start_again(self, fixed: Env, kept: list[Any], h: Env) -> tuple[Env, Env]:
        """What every phase can read, and the state at the start, for another pass once h is there."""
        x, fixed = dict(zip(self.inputs, kept, strict=True)), dict(fixed)
        # Behind a barrier with h, or XLA would merge this forward pass with the first.
        data = [v for v in self._data() if v in fixed]
        hold((x, list(x)), (h, list(h)), (fixed, data))
        return fixed, x

    def _data(self) -> list[Any]:
        """Operands that are data: what a forward pass from the very start begins with."""
        reads = dict.fromkeys(v for n in self.nodes for v in n.block.operands)
        return [v for v, k in zip(reads, self.trunk.kinds(reads), strict=True) if k == "data"]

    def run(self, fixed: Env, x: Env, retain: frozenset[Any], *, again: bool) -> None:
        """Forward, keeping nothing: reads and writes `x`. `again`: another pass prints."""
        for i, node in enumerate(self.nodes):
            if again and node.is_silent:
                continue
            values = [graph_value(x, fixed, v) for v in (*node.block.inputs, *node.block.operands)]
            split = len(node.block.inputs)
            made = (*node.block.outputs, *node.block.exports, *self.also.get(i, ()))
            x.update(zip(made, node.block.values(made, values[:split], values[split:]), strict=True))
            self.drop(x, i, retain)

    def drop(self, x: Env, i: int, retain: frozenset[Any]) -> None:
        """Forget what node i was the last to read."""
        after = self.trunk.last_read
        for v in (*self.nodes[i].block.inputs, *self.nodes[i].block.operands):
            if v in x and v not in retain and self.last[v] == i and after.get(v, -1) < self.stop:
                del x[v]


class Plain(Stretch):
    """Nodes that are stored or recomputed."""

    def __init__(
        self,
        trunk: Trunk,
        start: int,
        stop: int,
        periods: dict[int, tuple[int, ...]] | None = None,
        *,
        recomputed: bool | None = None,
    ):
        """`periods`: of scans that are run as scans of checkpointed scans, by node.

        `recomputed`: run the nodes again, or not; None: where that keeps less.
        """
        super().__init__(trunk, start, stop)
        self.periods = periods = periods or {}
        self.residuals = [
            None if n.is_aside or n.is_fork else full_residual(n, trunk, periods.get(start + i, ()))
            for i, n in enumerate(self.nodes)
        ]
        self.kept_by_node = self._kept_by_node()
        self.stored_bytes = sum(self.kept_by_node)
        once = any(n.calls_once for n in self.nodes)
        asked = any(n.checkpointed for n in self.nodes)  # what the user checkpointed is never stored
        if recomputed is None:
            recomputed = self.state_bytes < self.stored_bytes
        self.recomputed = not once and (asked or recomputed)

    def _kept_by_node(self) -> list[int]:
        """What storing keeps; a state that several nodes keep is the first one's."""
        source = {copy: n.block.inputs[0] for n in self.nodes if n.is_fork for copy in n.block.outputs}
        states: set[Any] = set()
        result = []
        for node, residual in zip(self.nodes, self.residuals, strict=True):
            total = 0
            for place, aval in residual.held if residual is not None else ():
                if place is not None:
                    v = (*node.block.inputs, *node.block.operands)[place]
                    while v in source:
                        v = source[v]
                    if v in states:
                        continue
                    states.add(v)
                total += nbytes(aval)
            result.append(total)
        return result

    @property
    def kind(self) -> str:
        return "recompute" if self.recomputed else "store"

    @property
    def leaves(self) -> list[Plain]:
        """The innermost segments: itself."""
        return [self]

    @property
    def kept_bytes(self) -> int:
        return self.state_bytes if self.recomputed else self.stored_bytes

    @property
    def transient_bytes(self) -> int:
        """What exists besides while the segment is differentiated."""
        return self.stored_bytes if self.recomputed else 0

    def phase_one(
        self, fixed: Env, x: Env, retain: frozenset[Any] = frozenset(), *, again: bool = False
    ) -> Any:
        """Forward: reads and writes `x`, returns what is kept. `again`: another pass prints."""
        if not self.recomputed:
            return self._linearise(fixed, x, retain, again=again)
        return self.run_keeping_start(fixed, x, retain, again=again)

    def reverse(self, fixed: Env, kept: Any, h: Env, out: Ledger) -> list[Measured]:
        """From the outputs' cotangents to the inputs', handing out gradients; no errors to measure."""
        if self.recomputed:
            fixed, x = self.start_again(fixed, kept, h)
            kept = self._linearise(fixed, x, frozenset(), again=True)
        for i in reversed(range(len(self.nodes))):
            node, residual = self.nodes[i], self.residuals[i]
            block = node.block
            if node.is_aside:
                continue
            arriving = [h.pop(v) for v in block.outputs]
            if node.is_fork:
                h[block.inputs[0]] = sum(arriving[1:], arriving[0])
                continue
            assert residual is not None
            pullback = residual.restore(kept[i], [fixed.get(v) for v in block.operands])
            arriving = [a.astype(v.aval.dtype) for a, v in zip(arriving, block.outputs, strict=True)]
            if is_one_product(node):
                # The state is read by the gradient alone: take that first, and the state is gone before
                # its cotangent, which is as large, is made.
                box = {"found": pullback(tuple(arriving))[1], "arriving": arriving}
                hold((box, list(box)))
                found, h_inputs = box["found"], pullback(tuple(box["arriving"]))[0]
            else:
                h_inputs, found = pullback(tuple(arriving))
            h.update(zip(block.inputs, h_inputs, strict=True))
            out.add(dict(zip(node.weights, found, strict=True)))
            out.close(node.weights)
            if node.is_heavy:
                # Or XLA would put gradients off, and keep the activations that they need.
                hold((h, list(block.inputs)), *out.parts(node.weights))
        return []

    def _linearise(
        self, fixed: Env, x: Env, retain: frozenset[Any], *, again: bool = False
    ) -> list[Any]:
        """Run node by node, keeping residuals; `again`: what prints or calls back has done so."""
        kept: list[Any] = []
        waiting: list[int] = []
        for i, (node, residual) in enumerate(zip(self.nodes, self.residuals, strict=True)):
            block = node.block
            if node.is_heavy and waiting:
                hold((x, list(x)), (kept, waiting))
                waiting = []
            state = [x[v] for v in block.inputs]
            operands = [graph_value(x, fixed, v) for v in block.operands]
            made = (*block.outputs, *block.exports)
            if residual is not None:
                y, held = residual.forward(state, operands)
            elif again and node.is_silent:
                y, held = (), ()
            else:
                y, held = block.values(made, state, operands), ()
            x.update(zip(made, y, strict=True))
            kept.append(held)
            waiting.append(i)
            self.drop(x, i, retain)
        hold((x, list(x)), (kept, waiting))
        return kept


class Nested(Stretch):
    """Segments in a segment: run again from its start, each of them keeps what it keeps itself."""

    kind = "recompute"

    def __init__(self, parts: Sequence[Plain | Nested]):
        super().__init__(parts[0].trunk, parts[0].start, parts[-1].stop)
        self.parts = parts

    @property
    def leaves(self) -> list[Plain]:
        """The innermost segments."""
        return [leaf for part in self.parts for leaf in part.leaves]

    @property
    def kept_bytes(self) -> int:
        return self.state_bytes

    @property
    def transient_bytes(self) -> int:
        """What its parts keep together, and what one of them takes."""
        return sum(p.kept_bytes for p in self.parts) + max(p.transient_bytes for p in self.parts)

    def phase_one(
        self, fixed: Env, x: Env, retain: frozenset[Any] = frozenset(), *, again: bool = False
    ) -> Any:
        """Forward: reads and writes `x`, returns the state at the start."""
        return self.run_keeping_start(fixed, x, retain, again=again)

    def reverse(self, fixed: Env, kept: Any, h: Env, out: Ledger) -> list[Measured]:
        """As `Plain.reverse`."""
        fixed, x = self.start_again(fixed, kept, h)
        saved = [part.phase_one(fixed, x, again=True) for part in self.parts]
        for part in reversed(self.parts):
            part.reverse(fixed, saved.pop(), h, out)
        return []


def is_one_product(node: Node) -> bool:
    """Whether ∂y/∂x and ∂y/∂θ of a node with weights share no work."""
    has_both = bool(node.weights and node.block.inputs)
    return has_both and [e.primitive in PRODUCTS for e in node.block.eqns] == [True]


def graph_value(x: Env, fixed: Env, v: Any) -> Any:
    """A variable's value, among the activations or the sides."""
    return x[v] if v in x else fixed[v]


def live_bytes(trunk: Trunk) -> list[int]:
    """Bytes of the activations alive before each node (and after the last)."""
    return _overlaps(trunk, lambda first, last: (first, last + 1))


def passing_bytes(trunk: Trunk) -> list[int]:
    """Of those that are alive both before and after each node, such as a skip over it."""
    return _overlaps(trunk, lambda first, last: (first, last))[:-1]


def _overlaps(trunk: Trunk, span: Callable[[int, int], tuple[int, int]]) -> list[int]:
    """Bytes of the activations by place, each over the `span` of where it is first and last alive."""
    born: dict[Any, int] = {v: 0 for v in trunk.state}
    for i, n in enumerate(trunk.nodes):
        born.update((v, i + 1) for v in (*n.block.outputs, *n.block.exports))
    change = [0] * (len(trunk.nodes) + 2)
    for v, first in born.items():
        last = trunk.last_read.get(v, -1)
        if last >= first:
            start, stop = span(first, last)
            change[start] += nbytes(v.aval)
            change[stop] -= nbytes(v.aval)
    return list(itertools.accumulate(change[:-1]))
