"""Segments that JAX differentiates itself: stored, or recomputed.

`Store` keeps what JAX's pullback needs, `Recompute` the state at its start, from which the nodes run
once more when the reverse pass arrives. Either way JAX gets the whole stretch in one call of `jax.vjp`,
as it would by `jax.checkpoint`, so that XLA sees all of it at once: what it fuses, and what it keeps for
a moment, is its own choice. Gradients are found at once; Phase III never sees such a segment.

Bits are packed where that pays. Booleans take a byte each; packed eight to a byte they must be packed
*now*, or XLA puts it off and keeps what they were made from. That takes a barrier behind every product,
and so a call of `jax.vjp` for every node. It is done where Booleans are most of what is kept. A product
whose state is a large part of all states is taken by itself, too: see `is_large_product`.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import numpy as np

from .. import _jax
from .._jax import Literal
from ..execute.barriers import Env, barrier
from ..execute.certificate import Measured
from ..execute.loops import checkpointed
from ..execute.precision import PRODUCTS
from ..execute.residuals import Residual, nbytes
from ..execute.sinks import GradientSink
from ..network.cutting import Network, Node
from ..network.remade import cheap_steps, is_drawn
from ..trace import fingerprint, graph
from .base import Executor, Row, Segment, check_in_a_row
from .codec import in_plans
from .costs import NodeCost, full_residual, in_periods
from .fusion import costly_bytes, drawing_bytes, fusion_of, workspace_bytes
from .reruns import spared


@in_plans
@dataclass(frozen=True)
class Store(Segment):
    """What JAX's pullback needs is kept.

    `packs`: Booleans are packed to bits. `again`: of the nodes, counted from `start`, those of which the
    state is kept, because it is less than what their pullback needs. Where they are None, both are found
    out by tracing the nodes.
    """

    packs: bool | None = None
    again: tuple[int, ...] | None = None

    def bind(self, network: Network) -> StoreExecutor:
        bound = StoreExecutor(network, self.start, self.stop)
        return _as_planned(bound, again=self.again, packs=self.packs)

    def cut(self, start: int) -> Segment:
        return Store(start, self.stop, self.packs)


@in_plans
@dataclass(frozen=True)
class Recompute(Segment):
    """The state at the start is kept. The nodes run again, by `parts` where there are any: each of them
    then keeps what it keeps itself. `again`: as in `Store`."""

    parts: tuple[Segment, ...] = ()
    again: tuple[int, ...] | None = None

    def bind(self, network: Network) -> RecomputeExecutor | NestedExecutor:
        if self.parts:
            check_in_a_row(self.parts, self.start, self.stop)
            return NestedExecutor([part.bind(network) for part in self.parts])
        bound = RecomputeExecutor(network, self.start, self.stop)
        return _as_planned(bound, again=self.again)

    def cut(self, start: int) -> Segment | None:
        return None if self.parts else Recompute(start, self.stop)


PlainBound = TypeVar("PlainBound", bound="PlainStretch")


def _as_planned(bound: PlainBound, **planned: Any) -> PlainBound:
    """With what a plan says, so that it need not be found out by tracing the nodes."""
    for name, value in planned.items():
        if value is not None:
            setattr(bound, name, value)  # in place of a cached property
    return bound


class Stretch(Executor):
    """Consecutive nodes [start, stop) of a network, in the order in which they run."""

    def __init__(self, network: Network, start: int, stop: int):
        self.network, self.start, self.stop = network, start, stop
        self.nodes = network.nodes[start:stop]
        self.also: dict[int, tuple[Any, ...]] = {}  # further results of nodes that a segment needs
        self.last: dict[Any, int] = {}
        for i, node in enumerate(self.nodes):
            self.last.update((v, i) for v in (*node.block.inputs, *node.block.operands))

        made = {v for n in self.nodes for v in (*n.block.outputs, *n.block.exports)}
        reads = dict.fromkeys(v for n in self.nodes for v in (*n.block.inputs, *n.block.operands))
        self.inputs = tuple(v for v in reads if v not in made and v not in network.fixed)
        self.state_bytes = nbytes(*(v.aval for v in self.inputs))

    # -- what it takes -----------------------------------------------------------------------------
    @property
    def kept_bytes(self) -> int:
        """What the forward pass keeps."""
        return self.state_bytes

    @property
    def transient_bytes(self) -> int:
        """What exists besides while the segment is differentiated."""
        return 0

    def held(self, timeline: Any) -> int:
        del timeline
        return self.kept_bytes

    def forward_peak(self, timeline: Any) -> int:
        peak = timeline.forward(self, [0] * len(self.nodes), fused=True)
        return max(peak, self.held(timeline) + self._drawing_peak(timeline))

    def _drawing_peak(self, timeline: Any) -> int:
        """What is alive while random bits are drawn, at the stretch's start."""
        return timeline.live[self.start] + drawing_bytes(self.draws)

    # -- running -----------------------------------------------------------------------------------
    def run_keeping_start(self, fixed: Env, x: Env, retain: frozenset[Any], *, again: bool) -> list[Any]:
        """Forward: what `start_again` needs."""
        kept = [x[v] for v in self.inputs]
        self.run(self.drawn(fixed, x), x, retain, again=again)
        barrier((x, list(x)))
        return kept

    @functools.cached_property
    def draws(self) -> list[Any]:
        """Steps of the data prologue that draw random bits for these nodes."""
        reads = dict.fromkeys(v for n in self.nodes for v in (*n.block.inputs, *n.block.operands))
        return cheap_steps(self.network, [v for v in reads if is_drawn(self.network, v)])

    def drawn(self, fixed: Env, x: Env) -> Env:
        """What every phase can read, with random bits that are drawn once the state is there.

        XLA would draw those of all stretches early, and keep them.
        """
        if not self.draws:
            return fixed
        made = {v for e in self.draws for v in e.outvars}
        reads = dict.fromkeys(v for e in self.draws for v in e.invars if not isinstance(v, Literal))
        fixed = dict(fixed)
        barrier((x, [v for v in self.inputs if v in x]), (fixed, [v for v in reads if v not in made]))
        graph.run(self.draws, fixed)
        return fixed

    def start_again(self, fixed: Env, kept: list[Any], h: Env) -> tuple[Env, Env]:
        """What every phase can read, and the state at the start, for another pass once h is there."""
        x, fixed = dict(zip(self.inputs, kept, strict=True)), dict(fixed)
        # Behind a barrier with h, or XLA would merge this forward pass with the first. Weights, too:
        # what is made of them (a broadcast, a cast) would be made for the first pass, and kept.
        reads = [v for v in self.reads_again if v in fixed]
        barrier((x, list(x)), (h, list(h)), (fixed, reads))
        return fixed, x

    @property
    def reads_again(self) -> Sequence[Any]:
        """What another pass reads besides the state at the start."""
        return list(dict.fromkeys(v for n in self.nodes for v in n.block.operands))

    def run(self, fixed: Env, x: Env, retain: frozenset[Any], *, again: bool) -> None:
        """Forward, keeping nothing: reads and writes `x`. `again`: another pass prints."""
        for i, node in enumerate(self.nodes):
            if again and node.is_silent:
                continue
            values = [_value(x, fixed, v) for v in (*node.block.inputs, *node.block.operands)]
            split = len(node.block.inputs)
            made = (*node.block.outputs, *node.block.exports, *self.also.get(i, ()))
            x.update(zip(made, node.block.values(made, values[:split], values[split:]), strict=True))
            self.drop(x, i, retain)

    def drop(self, x: Env, i: int, retain: frozenset[Any]) -> None:
        """Forget what node i was the last to read."""
        after = self.network.last_read
        for v in (*self.nodes[i].block.inputs, *self.nodes[i].block.operands):
            if v in x and v not in retain and self.last[v] == i and after.get(v, -1) < self.stop:
                del x[v]


class PlainStretch(Stretch):
    """Nodes that JAX differentiates: what it keeps of each."""

    kind: str
    runs_again = False  # whether the nodes run once more before they are differentiated

    def __init__(self, network: Network, start: int, stop: int, tile: tuple[int, ...] = ()):
        """`tile`: of one scan, run as a scan of checkpointed scans of so many layers (of so many, …)."""
        super().__init__(network, start, stop)
        self.tile = tile

    @functools.cached_property
    def residuals(self) -> list[Residual | None]:
        """What JAX keeps of each node."""
        return [
            None if n.is_aside or n.is_fork else full_residual(n, self.network, self.tile)
            for n in self.nodes
        ]

    @functools.cached_property
    def again(self) -> tuple[int, ...]:
        """Of a light node the state may be less than its residuals: it is linearised again from it."""
        return tuple(i for i, r in enumerate(self.residuals) if r is not None and r.from_state)

    @property
    def kept_by_node(self) -> list[int]:
        """What storing keeps; a state that several nodes keep is the first one's."""
        return self._kept[0]

    @functools.cached_property
    def _kept(self) -> tuple[list[int], dict[Any, int]]:
        """(`kept_by_node`, the states among it with the nodes that they are counted at)"""
        states: dict[Any, int] = {}
        by_node = [0] * len(self.nodes)
        fused = not (self.packs or self.tile)
        for places in fusion_of(self.network).runs(self.start, self.stop):
            best: tuple[int, list[tuple[int, int, Any]]] | None = None
            for chain in self._ways(places) if fused else [self._items(places)]:
                new = [item for item in chain if item[2] is None or item[2] not in states]
                size = sum(size for _, size, _ in new)
                if best is None or size < best[0]:
                    best = size, new
            for i, size, v in best[1] if best else ():
                by_node[i - self.start] += size
                if v is not None:
                    states[v] = i - self.start
        return by_node, states

    def _ways(self, places: range) -> list[list[tuple[int, int, Any]]]:
        """What consecutive nodes may keep: (node, bytes, the state that it is or None), in several ways.

        Light nodes keep their residuals, up to a place behind which all are computed again from what is
        alive there. XLA finds such a place: it fuses the chain into the pullback.
        """
        key = ("chain", places)
        if key not in self.network.memory:
            items = self._items(places)
            ways = [items]
            fusion = fusion_of(self.network)
            if not fusion.apart[places[0]]:
                # The state is counted at the first node that needs it.
                for first in sorted({i for i, size, _ in items if size}):
                    for begin in fusion.computed_again(places):
                        if begin > first:
                            break
                        alive = self._begins(range(begin, places[-1] + 1))
                        kept = [(first, nbytes(v.aval), v) for v in alive]
                        ways.append([item for item in items if item[0] < first] + kept)
            self.network.memory[key] = ways
        return self.network.memory[key]

    def _items(self, places: range) -> list[tuple[int, int, Any]]:
        """The residuals of nodes: (node, bytes, the state that it is or None)."""
        of = fusion_of(self.network).of
        found: list[tuple[int, int, Any]] = []
        seen: set[Any] = set()
        for i in places:
            node, residual = self.nodes[i - self.start], self.residuals[i - self.start]
            for place, aval in residual.held if residual is not None else ():
                v = None
                if place is not None:
                    v = of((*node.block.inputs, *node.block.operands)[place])
                    if v in seen:
                        continue
                    seen.add(v)
                size = aval.size if aval.dtype == np.bool_ and not self.packs else nbytes(aval)
                found.append((i, size, v))
            if residual is not None and residual.from_state and not (self.packs or self.tile):
                costly = costly_bytes(node, self.network)
                found += [(i, costly, None)] if costly else []
        return found

    def _begins(self, places: range) -> list[Any]:
        """The activations that a run of light nodes starts from."""
        nodes = [self.network.nodes[i] for i in places]
        of = fusion_of(self.network).of
        made = {v for n in nodes if not n.is_fork for v in (*n.block.outputs, *n.block.exports)}
        reads = (v for n in nodes if not n.is_aside for v in (*n.block.inputs, *n.block.operands))
        read = dict.fromkeys(map(of, reads))
        return [v for v in read if v not in made and v not in self.network.fixed]

    @functools.cached_property
    def also_alive(self) -> list[int]:
        """By node, bytes of what is kept that is alive in a forward pass anyway."""
        change = [0] * (len(self.nodes) + 1)
        fusion = fusion_of(self.network)
        for v, k in self._kept[1].items():
            stop = min(fusion.last_read.get(v, -1) + 1 - self.start, len(self.nodes))
            if v in fusion.written and stop > k + 1:
                change[k + 1] += nbytes(v.aval)
                change[stop] -= nbytes(v.aval)
        return list(itertools.accumulate(change[:-1]))

    @functools.cached_property
    def stored_bytes(self) -> int:
        """What JAX's pullback keeps."""
        return sum(self.kept_by_node)

    @functools.cached_property
    def packs(self) -> bool:
        """Whether Booleans are packed to bits."""
        return False

    @functools.cached_property
    def pieces(self) -> list[Piece]:
        """What is differentiated at once: all of it.

        But single nodes where bits are packed, and products whose state is a large part of all.
        """
        bounds = {0, len(self.nodes)}
        for i, node in enumerate(self.nodes):
            if self.packs or is_large_product(node, self.network):
                bounds.update((i, i + 1))
        return [Piece(self, range(i, j)) for i, j in itertools.pairwise(sorted(bounds))]

    @property
    def rerun(self) -> int:
        if not self.tile:
            return 0
        return -(-self.nodes[0].block.eqns[0].params["length"] // self.tile[-1])

    def seconds(self, timeline: Any) -> float:
        # A light node that is linearised again reads its state instead of residuals, in the same time.
        nodes = timeline.seconds[self.start : self.stop]
        again = len(self.tile) * sum(n.forward for n in nodes)
        if self.runs_again:
            again += sum(n.forward for n in nodes) - sum(nodes[i].forward for i in self.spared)
        return super().seconds(timeline) + again

    @functools.cached_property
    def spared(self) -> list[int]:
        """Of the nodes, those that need not run again."""
        return spared(self.nodes, self.network)

    def reverse_peak(self, timeline: Any, *, again: bool) -> int:
        """Of the reverse pass over the nodes. `again`: once they have run again."""
        arriving, fused = timeline.live[self.stop], not self.packs
        kept = list(itertools.accumulate(self.kept_by_node, initial=0))
        top = arriving + self._drawing_peak(timeline) if again else 0
        for k, i in enumerate(range(self.start, self.stop)):
            if again:
                states = timeline.states(i, fused=fused) - self.also_alive[k] * fused
                top = max(top, kept[k] + states + arriving)
            inside = 0
            if self.tile:
                inside = in_periods(self.nodes[k], timeline.costs[i].backprop, self.tile)[1]
            ordered = is_large_product(self.nodes[k], self.network)
            step = timeline.reverse(i, kept[k], kept[k + 1], ordered=ordered, fused=fused)
            top = max(top, step + inside + workspace_bytes(self.nodes[k], self.network))
        return top

    def rows(self, costs: Sequence[NodeCost], *, chosen: bool) -> list[Row]:
        rows = []
        for i, node in enumerate(self.nodes):
            if node.is_aside or node.is_fork:
                continue
            cost = costs[self.start + i]
            (size, why), way_out = self.row(cost, first=not rows), ""
            if chosen:
                why, way_out = node.verdict.reason, node.verdict.way_out
                if node.rule is not None:
                    why = "stored" if self.kind == "store" else "recomputed"
                    why, way_out = why + ": cheaper than walking", ""
            about = (self.kind, size, None, why, cost.m_x, cost.m_theta)
            rows.append(Row.of(node, *about, way_out=way_out))
        return rows

    def row(self, cost: NodeCost, *, first: bool) -> tuple[int, str]:
        """(bytes, why) of a node."""
        raise NotImplementedError


class StoreExecutor(PlainStretch):
    """Keeps what the pullback needs."""

    kind = "store"

    @property
    def data(self) -> Segment:
        return Store(self.start, self.stop, self.packs, self.again)

    @functools.cached_property
    def packs(self) -> bool:
        held = [a for r in self.residuals if r is not None for _, a in r.held]
        masks = sum(a.size for a in held if a.dtype == np.bool_)
        return masks > sum(nbytes(a) for a in held if a.dtype != np.bool_)

    @property
    def kept_bytes(self) -> int:
        return self.stored_bytes

    def held_states(self) -> Iterable[Any]:
        return (v for v in self._kept[1] if v.aval.dtype != np.bool_)

    def forward_peak(self, timeline: Any) -> int:
        if self.packs:
            peak = timeline.forward(self, self.kept_by_node)
        else:
            peak = timeline.forward(self, self.kept_by_node, self.also_alive, fused=True)
        return max(peak, self.held(timeline) + drawing_bytes(self.draws))

    def backward_peak(self, timeline: Any) -> int:
        return self.reverse_peak(timeline, again=False)

    def row(self, cost: NodeCost, *, first: bool) -> tuple[int, str]:
        return cost.backprop, "stored, as residuals"

    def forward(self, fixed: Env, x: Env, results: frozenset[Any], *, again: bool = False) -> Any:
        saved: list[Any] = []
        for piece in self.pieces:
            piece.meet_equals()
            saved.append(piece.linearise(fixed, x, again=again))
            for i in piece.places:
                self.drop(x, i, results)
            last = piece is self.pieces[-1]
            if self.packs and (piece.is_heavy or last):
                barrier((x, list(x)), (saved, range(len(saved))))
        return saved

    def backward(self, fixed: Env, saved: Any, h: Env, out: GradientSink) -> list[Measured]:
        for piece, kept in zip(reversed(self.pieces), reversed(saved), strict=True):
            piece.backward(piece.restore(fixed, kept), h, out)
        for node in self.nodes:
            out.close(node.weights)
        return []


class RecomputeExecutor(PlainStretch):
    """Keeps the state at its start, and runs again."""

    kind = "recompute"
    runs_again = True

    @property
    def reads_again(self) -> Sequence[Any]:
        return list(dict.fromkeys(v for p in self.pieces for v in (*p.weights, *p.others)))

    @property
    def rerun(self) -> int:
        return 1

    @property
    def data(self) -> Segment:
        return Recompute(self.start, self.stop, again=self.again)

    @property
    def transient_bytes(self) -> int:
        return self.stored_bytes

    def held_states(self) -> Iterable[Any]:
        return self.inputs

    def backward_peak(self, timeline: Any) -> int:
        return self.kept_bytes + self.reverse_peak(timeline, again=True)

    def row(self, cost: NodeCost, *, first: bool) -> tuple[int, str]:
        del cost
        return self.kept_bytes if first else 0, "run again from the segment's start"

    def forward(self, fixed: Env, x: Env, results: frozenset[Any], *, again: bool = False) -> Any:
        for piece in self.pieces:
            piece.meet_equals()
        return self.run_keeping_start(fixed, x, results, again=again)

    def backward(self, fixed: Env, saved: Any, h: Env, out: GradientSink) -> list[Measured]:
        fixed, x = self.start_again(fixed, saved, h)
        pullbacks = [piece.pullback(fixed, x) for piece in self.pieces]
        for piece in reversed(self.pieces):
            piece.backward(pullbacks.pop(), h, out)
        for node in self.nodes:
            out.close(node.weights)
        return []


class NestedExecutor(Stretch):
    """Segments in a segment: run again from its start, each of them keeps what it keeps itself."""

    def __init__(self, parts: Sequence[Any]):
        super().__init__(parts[0].network, parts[0].start, parts[-1].stop)
        self.parts = parts

    @property
    def data(self) -> Segment:
        return Recompute(self.start, self.stop, tuple(part.data for part in self.parts))

    @property
    def transient_bytes(self) -> int:
        return sum(p.kept_bytes for p in self.parts) + max(p.transient_bytes for p in self.parts)

    def forward(self, fixed: Env, x: Env, results: frozenset[Any], *, again: bool = False) -> Any:
        return self.run_keeping_start(fixed, x, results, again=again)

    def backward(self, fixed: Env, saved: Any, h: Env, out: GradientSink) -> list[Measured]:
        fixed, x = self.start_again(fixed, saved, h)
        inside = [part.forward(fixed, x, frozenset(), again=True) for part in self.parts]
        for part in reversed(self.parts):
            part.backward(fixed, inside.pop(), h, out)
        return []

    def held_states(self) -> Iterable[Any]:
        return self.inputs

    def backward_peak(self, timeline: Any) -> int:
        inside = timeline.through(self.parts, beside=self.inputs)
        return self.kept_bytes + timeline.live[self.stop] + inside

    def seconds(self, timeline: Any) -> float:
        again = sum(n.forward for n in timeline.seconds[self.start : self.stop])
        return again + sum(part.seconds(timeline) for part in self.parts)

    def rows(self, costs: Sequence[NodeCost], *, chosen: bool) -> list[Row]:
        return [row for part in self.parts for row in part.rows(costs, chosen=chosen)]

    @property
    def rerun(self) -> int:
        return sum(part.rerun or 1 for part in self.parts)


class Piece:
    """Consecutive nodes of a stretch that are differentiated by one call of `jax.vjp`."""

    def __init__(self, stretch: PlainStretch, places: range):
        self.places, self.stretch = places, stretch
        self.network, self.tile = stretch.network, stretch.tile
        self.nodes = nodes = [stretch.nodes[i] for i in places]
        self.is_heavy = any(n.is_heavy for n in nodes)
        made = dict.fromkeys(v for n in nodes for v in (*n.block.outputs, *n.block.exports))
        self.states, self.outputs, self.weights = ends(nodes)
        reads = dict.fromkeys(v for n in nodes for v in (*n.block.inputs, *n.block.operands))
        known = {*made, *self.states, *self.weights}
        others = [v for v in reads if v not in known]
        # Made here again, and not kept since the prologue. What they are made of is read instead.
        self.cheap = cheap_steps(self.network, others)
        remade = {v for e in self.cheap for v in e.outvars}
        of = [v for e in self.cheap for v in e.invars if not isinstance(v, Literal)]
        self.others = [v for v in dict.fromkeys((*others, *of)) if v not in remade]
        after, stop = stretch.network.last_read, stretch.start + places[-1] + 1
        results = stretch.network.results
        arriving = set(self.outputs)
        self.exports = [
            v for v in made if v not in arriving and (after.get(v, -1) >= stop or v in results)
        ]
        self.again = [i in stretch.again for i in places]

    @functools.cached_property
    def equals(self) -> list[Piece]:
        """The pieces that run and compute the same, by the same nodes, wired alike."""
        numbers: dict[Any, int] = {}

        def places(variables: Sequence[Any]) -> tuple[int, ...]:
            return tuple(numbers.setdefault(v, len(numbers)) for v in variables)

        blocks = ((n.model, n.block) for n in self.nodes)
        wiring = tuple(
            (model, places((*b.inputs, *b.operands, *b.outputs, *b.exports))) for model, b in blocks
        )
        ends = (self.states, self.outputs, self.weights, self.others, self.exports)
        ends = tuple(map(places, ends))
        made = [v for e in self.cheap for v in e.outvars]
        cheap = (fingerprint.of_equations(self.cheap, numbers), places(made))
        key = ("piece", wiring, ends, cheap, tuple(self.again), self.tile)
        return self.network.memory.setdefault(key, [])

    def meet_equals(self) -> None:
        """Let pieces that compute the same know of each other before the first is pulled back."""
        for piece in (self, *self.units):
            if piece not in piece.equals:
                piece.equals.append(piece)

    @property
    def model(self) -> Piece:
        """The one that is traced for all that compute the same."""
        return self.equals[0]

    @functools.cached_property
    def units(self) -> list[Piece]:
        """It in several pieces, one for each product, convolution or loop; none where it has one.

        Stretches are cut where that saves memory, so that few compute the same. Their units do.
        """
        bounds = sorted({0, *(k for k, n in enumerate(self.nodes) if n.is_heavy), len(self.nodes)})
        first = self.places[0]
        places = [range(first + i, first + j) for i, j in itertools.pairwise(bounds)]
        return [Piece(self.stretch, of) for of in places] if len(places) > 1 else []

    @functools.cached_property
    def _run_jitted(self) -> Any:
        """`_run_staged`, traced, differentiated and lowered once. XLA inlines it."""
        return jax.jit(self._run_staged)

    def _run_staged(self, states: Any, weights: Any, others: Any) -> Any:
        """`_run` without what prints, where a program is staged: units that compute the same share
        theirs."""
        if not self.units:
            return self._run(states, weights, others, silent=True)
        env = self._env(states, weights, others)
        for unit in self.units:
            of_unit = (unit.states, unit.weights, unit.others)
            y, exports = unit.program(*([env[v] for v in of] for of in of_unit))
            env.update(zip((*unit.outputs, *unit.exports), (*y, *exports), strict=True))
        return self._results(env)

    @property
    def program(self) -> Callable[..., Any]:
        """`_run_staged`, shared with the pieces that compute the same, if there are any."""
        return self.model._run_jitted if len(self.equals) > 1 else self._run_staged

    def _run(self, states: Any, weights: Any, others: Any, *, silent: bool) -> Any:
        """(outputs, exports). `silent`: what prints or calls back has done so."""
        env = self._env(states, weights, others)
        for node, again in zip(self.nodes, self.again, strict=True):
            if silent and node.is_silent:
                continue
            block = node.block
            made = (*block.outputs, *block.exports)
            x, operands = ([env[v] for v in of] for of in (block.inputs, block.operands))
            if self.tile:
                values = checkpointed(node, self.tile, x, operands)
            elif again:
                run = functools.partial(block.values, made)
                values = jax.checkpoint(run, prevent_cse=False)(x, operands)
            else:
                values = block.values(made, x, operands)
            env.update(zip(made, values, strict=True))
        return self._results(env)

    def _env(self, states: Any, weights: Any, others: Any) -> Env:
        reads = (*self.states, *self.weights, *self.others)
        env = dict(zip(reads, (*states, *weights, *others), strict=True))
        graph.run(self.cheap, env)
        return env

    def _results(self, env: Env) -> tuple[list[Any], list[Any]]:
        return [env[v] for v in self.outputs], [env[v] for v in self.exports]

    def pullback(self, fixed: Env, x: Env) -> Any:
        """JAX's own, where the nodes have run before."""
        reads = (self.states, self.weights, self.others)
        states, weights, others = ([_value(x, fixed, v) for v in of] for of in reads)
        # Eagerly, every call of a shared program would compile it.
        staged = _jax.is_staged(states, weights, others)
        run = self.program if staged else functools.partial(self._run, silent=True)
        y, pullback, exports = _vjp(run, states, weights, others)
        x.update(zip((*self.outputs, *self.exports), (*y, *exports), strict=True))
        return pullback

    @functools.cached_property
    def residual(self) -> Residual:
        """What the pullback keeps."""
        split = len(self.weights)

        def linearize(states: Any, operands: Any) -> Any:
            run = functools.partial(self._run, silent=False)
            y, pullback, exports = _vjp(run, states, operands[:split], operands[split:])
            return (*y, *exports), pullback

        operands = (*self.weights, *self.others)
        states, values = ([graph.struct(v) for v in of] for of in (self.states, operands))
        return Residual(linearize, states, values, self.network.kinds(operands), rerun=False)

    def linearise(self, fixed: Env, x: Env, *, again: bool) -> Any:
        """Run the nodes; returns what `restore` needs.

        `again`: what prints or calls back has done so.
        """
        if again and all(n.is_silent for n in self.nodes):
            return []
        states = [x[v] for v in self.states]
        operands = [_value(x, fixed, v) for v in (*self.weights, *self.others)]
        y, kept = self.model.residual.forward(states, operands, silent=again)
        x.update(zip((*self.outputs, *self.exports), y, strict=True))
        return kept

    def restore(self, fixed: Env, kept: Any) -> Any:
        """The pullback again."""
        if not self.outputs:
            return None
        return self.model.residual.restore(kept, [fixed.get(v) for v in (*self.weights, *self.others)])

    def backward(self, pullback: Any, h: Env, out: GradientSink) -> None:
        if not self.outputs:
            return
        arriving = [h.pop(v).astype(v.aval.dtype) for v in self.outputs]
        if len(self.nodes) == 1 and is_one_product(self.nodes[0]):
            # The state is read by the gradient alone: take that first, and the state is gone before its
            # cotangent, which is as large, is made.
            box = {"found": pullback(arriving)[1], "arriving": arriving}
            barrier((box, list(box)))
            found, leaving = box["found"], pullback(box["arriving"])[0]
        else:
            leaving, found = pullback(arriving)
        h.update(zip(self.states, leaving, strict=True))
        out.add(dict(zip(self.weights, found, strict=True)))
        if len(self.nodes) == 1 and self.is_heavy:
            # Or XLA would put gradients off, and keep the activations that they need.
            barrier((h, self.states), *out.parts(self.weights))


def _vjp(run: Any, states: Sequence[Any], weights: Sequence[Any], others: Sequence[Any]) -> Any:
    """Of a piece's `run`: (outputs, pullback to states and weights, exports)."""
    return jax.vjp(lambda *args: run(*args, list(others)), list(states), list(weights), has_aux=True)


def ends(nodes: Sequence[Node]) -> tuple[list[Any], list[Any], list[Any]]:
    """(states whose cotangents leave, outputs whose cotangents arrive, weights) of consecutive nodes."""
    carrying = [n for n in nodes if not n.is_aside]
    made = {v for n in nodes for v in (*n.block.outputs, *n.block.exports)}
    read = dict.fromkeys(v for n in carrying for v in n.block.inputs)
    produced = dict.fromkeys(v for n in carrying for v in n.block.outputs)
    states = [v for v in read if v not in made]
    outputs = [v for v in produced if v not in read]
    return states, outputs, list(dict.fromkeys(v for n in carrying for v in n.weights))


def store_or_recompute(network: Network, start: int, stop: int) -> StoreExecutor | RecomputeExecutor:
    """Whichever keeps less, where there is a choice."""
    nodes = network.nodes[start:stop]
    stored, recomputed = StoreExecutor(network, start, stop), RecomputeExecutor(network, start, stop)
    if any(n.calls_once for n in nodes):
        return stored
    if any(n.checkpointed for n in nodes):  # what the user checkpointed is never stored
        return recomputed
    return recomputed if recomputed.kept_bytes < stored.kept_bytes else stored


def stored_sizes(network: Network, costs: Sequence[NodeCost]) -> list[int]:
    """What storing takes, node by node; of a run of light nodes, at the nodes at which it is kept.

    Of such a run the residuals are kept, or masks as bits, or what it is computed again from.
    """
    key = "stored sizes", tuple(c.gradients for c in costs)
    if key not in network.memory:
        whole = StoreExecutor(network, 0, len(network.nodes))
        whole.packs = False
        sizes: list[int] = []
        for run in fusion_of(network).runs(0, len(costs)):
            alone = [costs[i].full for i in run]
            fused = [whole.kept_by_node[i] + costs[i].gradients for i in run]
            sizes += min(alone, fused, key=sum)
        network.memory[key] = sizes
    return network.memory[key]


def may_run_again(nodes: Sequence[Node]) -> bool:
    """Whether nothing inside calls back to the host and reads the answer."""
    return not any(n.calls_once for n in nodes)


def is_large_product(node: Node, network: Network) -> bool:
    """Whether a product reads a seventh of all that products of the network read, or more.

    In a network whose states shrink, memory is greatest at the first of them. There it matters in which
    order gradients are computed, and is worth a barrier that XLA does not fuse across.
    """
    if not is_one_product(node):
        return False
    if "read by products" not in network.memory:
        network.memory["read by products"] = sum(
            nbytes(*(v.aval for v in n.block.inputs)) for n in network.nodes if n.is_heavy
        )
    return 7 * nbytes(*(v.aval for v in node.block.inputs)) >= network.memory["read by products"]


def is_one_product(node: Node) -> bool:
    """Whether ∂y/∂x and ∂y/∂θ of a node with weights share no work."""
    has_both = bool(node.weights and node.block.inputs)
    return has_both and [e.primitive in PRODUCTS for e in node.block.eqns] == [True]


def _value(x: Env, fixed: Env, v: Any) -> Any:
    """A variable's value, among the activations or the prologues."""
    return x[v] if v in x else fixed[v]
