"""Segments that are not walked: differentiated by JAX's own vjp, stored or recomputed.

Phase I keeps either the residuals of the pullback (`store`) or, where that is less, the state at the
segment's start (`recompute`), from which the segment is run and linearised again when the reverse pass
arrives. Gradients are had at once; Phase III never sees such a segment.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from . import graph, scans
from .residuals import Residual, nbytes
from .trunk import Trunk
from .walks import Env, Gradients, hold


class Plain:
    """Consecutive nodes [start, stop) of a trunk."""

    def __init__(self, trunk: Trunk, start: int, stop: int, periods: dict[int, int] | None = None):
        """`periods`: of scans that are run as scans of checkpointed scans, by node."""
        self.trunk, self.start, self.stop = trunk, start, stop
        self.nodes = trunk.nodes[start:stop]
        self.periods = periods or {}
        made = {v for n in self.nodes for v in (*n.block.outputs, *n.block.exports)}
        reads = dict.fromkeys(v for n in self.nodes for v in (*n.block.inputs, *n.block.operands))
        states = {v for n in self.nodes for v in n.block.inputs}
        self.inputs = tuple(v for v in reads if v not in made and v in states)
        self.weights = tuple(dict.fromkeys(v for n in self.nodes for v in n.weights))
        self.operands = (
            *self.weights,
            *(v for v in reads if v not in made and v not in states and v not in self.weights),
        )
        later = {v for v, i in trunk.last_read.items() if i >= stop}
        # Only what is read as a state sends a cotangent back.
        wanted = {v for n in trunk.nodes[stop:] for v in n.block.inputs} | set(trunk.outputs)
        self.outputs = tuple(v for n in self.nodes for v in n.block.outputs if v in wanted)
        self.exports = tuple(
            v for v in made if v not in self.outputs and (v in later or v in trunk.results)
        )
        rerun = not any(e.effects and e.outvars for n in self.nodes for e in n.block.eqns)
        self.residual = Residual(
            self._linearize,
            [graph.struct(v) for v in self.inputs],
            [graph.struct(v) for v in self.operands],
            trunk.kinds(self.operands),
            rerun=rerun,
        )
        if any(n.checkpointed for n in self.nodes) and rerun:
            self.residual.from_state = True  # what the user checkpointed is never stored

    @property
    def kind(self) -> str:
        return "recompute" if self.residual.from_state else "store"

    @property
    def kept_bytes(self) -> int:
        return self.residual.bytes

    @property
    def transient_bytes(self) -> int:
        """What exists besides while the segment is differentiated."""
        return self.residual.leaf_bytes if self.residual.from_state else 0

    def _run(self, x: Sequence[Any], operands: Sequence[Any]) -> Env:
        env = dict(zip((*self.inputs, *self.operands), (*x, *operands), strict=True))
        for i, node in enumerate(self.nodes):
            block = node.block
            values = [env[v] for v in block.inputs], [env[v] for v in block.operands]
            if self.start + i in self.periods:
                out = scans.checkpointed(node, self.periods[self.start + i], *values)
            else:
                out = block.values((*block.outputs, *block.exports), *values)
            env.update(zip((*block.outputs, *block.exports), out, strict=True))
        return env

    def _linearize(self, x: Sequence[Any], operands: Sequence[Any]) -> Any:
        split = len(self.weights)

        def run(x: Any, weights: Any) -> Any:
            env = self._run(x, [*weights, *operands[split:]])
            return [env[v] for v in self.outputs], [env[v] for v in self.exports]

        y, pullback, exports = jax.vjp(run, list(x), list(operands[:split]), has_aux=True)
        return (*y, *exports), pullback

    def phase_one(self, fixed: Env, x: Env, retain: frozenset[Any] = frozenset()) -> Any:
        """Forward: reads and writes `x`, returns what is kept."""
        operands = [fixed[v] if v in fixed else x[v] for v in self.operands]
        y, kept = self.residual.forward([x[v] for v in self.inputs], operands)
        for v in (*self.inputs, *self.operands):
            if v in x and v not in retain and self.trunk.last_read.get(v, -1) < self.stop:
                del x[v]
        x.update(zip((*self.outputs, *self.exports), y, strict=True))
        if self.residual.from_state:
            hold((x, list(x)))
        return kept

    def reverse(self, fixed: Env, kept: Any, h: Env) -> Gradients:
        """From the outputs' cotangents to the inputs', and the gradients."""
        box: dict[Any, Any] = {"kept": kept}
        if self.residual.from_state:  # or XLA would merge the second forward pass with the first
            hold((h, [v for v in self.outputs if v in h]), (box, ["kept"]))
        operands = [fixed.get(v) for v in self.operands]
        pullback = self.residual.restore(box["kept"], operands)
        h_inputs, gradients = pullback([h.pop(v).astype(v.aval.dtype) for v in self.outputs])
        h.update(zip(self.inputs, h_inputs, strict=True))
        found = dict(zip(self.weights, gradients, strict=True))
        # Or XLA would put gradients off, and keep the activations that they need.
        hold((h, list(self.inputs)), (found, list(found)))
        return found


def live_bytes(trunk: Trunk) -> list[int]:
    """Bytes of the activations alive before each node (and after the last)."""
    born: dict[Any, int] = {v: 0 for v in trunk.state}
    for i, n in enumerate(trunk.nodes):
        born.update((v, i + 1) for v in (*n.block.outputs, *n.block.exports))
    change = [0] * (len(trunk.nodes) + 2)
    for v, start in born.items():
        stop = trunk.last_read.get(v, -1)
        if stop >= start:
            change[start] += nbytes(v.aval)
            change[stop + 1] -= nbytes(v.aval)
    total, result = 0, []
    for delta in change[:-1]:
        total += delta
        result.append(total)
    return result
