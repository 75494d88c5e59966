"""`scan` over stacked layers: the body is planned once, and each phase is one loop over the layers.

Loops are nested where something happens every so many layers (`execute/loops.py`). With anchors every K
layers, Phase II hands out the cotangent at the start of each period, and Phase III starts each period
from it. In tiles of a few layers, Phase II sketches the cotangent for the certificate and rescales it;
Phase III compares, and undoes that.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .. import _jax
from .._jax import Literal
from ..errors import PlanMismatchError
from ..execute import certificate
from ..execute.barriers import Env
from ..execute.certificate import Measured, Worst
from ..execute.loops import Level, Piece, Visit
from ..execute.residuals import nbytes
from ..execute.scale import Cotangents, Exponent, exponent_for, is_none, shifted, sum_of
from ..execute.sinks import GradientSink, take
from ..network.cutting import Network, Node
from ..network.loop_body import Body
from ..rules.fragments import Place
from ..rules.registry import Alarm
from ..trace import graph
from .base import Row
from .checks import check_sources
from .costs import NodeCost, node_costs
from .layers import LayerGradients, Operands, ScanLayers, body_of, costly_inside
from .sources import Layers, Source
from .steps import BINDERS, EXPONENT, GRID_OFFSET, BlockStep, Scale, Step, bind_steps, moved
from .walk import WalkExecutor, check_spacing


@dataclass(eq=False, repr=False)
class ScanStep(Step):
    """A scan, walked."""

    layers: ScanLayers = None  # type: ignore[assignment]
    walk: WalkExecutor = None  # type: ignore[assignment]
    period: int | None = None  # anchors every so many layers

    def __post_init__(self) -> None:
        self.body, self.length = self.layers.body, self.layers.length
        self.seeded = self.layers.seeded
        self.measured = self.walk.is_measured
        if self.node.has_own_pullback:
            self._pin()

    def _pin(self) -> None:
        """Let no scan in the body rescale anything."""
        for step in self.walk.steps:
            if isinstance(step, ScanStep):
                step.pinned = True
                step._pin()

    is_loop = True

    @property
    def data(self) -> Source:
        body = tuple(step.data for step in self.walk.steps)
        needed = self.source != "none"
        growth, hoisted = self.walk.growth, self.layers.hoisted
        return Layers(self.reason, body, self.period, self.gain, growth, hoisted, needed)

    def is_read_by(self, variables: Collection[Any]) -> None:
        self.wants_ys = any(v in variables for v in self._stacked_outputs)

    @property
    def inner_steps(self) -> list[Step]:
        return self.walk.all_steps if self.source != "none" else []

    @property
    def is_anchored(self) -> bool:
        return self.period is not None

    @property
    def walks_from(self) -> tuple[Any, ...]:
        # With anchors, the first period starts from one: what is walked to the loop's start ends there.
        return () if self.is_anchored else super().walks_from

    @property
    def blocks_walked(self) -> int:
        return self.length * self.walk.blocks_walked if self.is_walked else 0

    def working_bytes(self, states: int, *, has_h: bool) -> int:
        del has_h
        # Its seed is the h that Phase II ends with, which is one of the two.
        return 2 * states - self._seed_bytes

    def weight_alarms(self, envs: Sequence[Any], table: Any) -> Iterable[Alarm]:
        return self.walk.alarms_on(table.layer_values(self.node, self.body, envs) or (), table)

    # -- the report --------------------------------------------------------------------------------
    @property
    def mode(self) -> str:
        return "walk"

    @property
    def why(self) -> str:
        return self.reason + ("" if self.period is None else f", an anchor every {self.period}")

    def rows(self, cost: NodeCost, walk: WalkExecutor, depth: int = 0, times: int = 1) -> list[Row]:
        inner = sum(s.kept_bytes + s.memo_bytes for s in self.walk.steps)
        size = self.kept_bytes + self.memo_bytes - self.length * inner
        gain = self.gain.factor if self.is_walked else None
        about = (self.mode, size, gain, self.why, cost.m_x, cost.m_theta, depth, times)
        rows = [Row.of(self.node, *about)]
        costs = node_costs(self.body.network)
        for step, inner_cost in zip(self.walk.steps, costs, strict=True):
            rows += step.rows(inner_cost, self.walk, depth + 1, self.length)
        return rows

    @property
    def has_difference(self) -> bool:
        return self.walk.has_difference

    @property
    def is_stem(self) -> bool:
        return False  # a scan over the data itself still walks its layers

    def in_precision(self, precision: Any) -> None:
        """Do the products of the cotangents' chain in a precision of their own."""
        self.walk.in_precision(precision)

    @property
    def moves(self) -> Place:
        return tuple(self.length * m for m in self.walk.moves)

    def _moved(self, env: Env, operands: Operands, i: Any) -> Env:
        """The environment of layer i, with how far the layers before it have moved grids of spans."""
        moves = self.walk.moves
        if any(moves):
            before = self.length - 1 - i if self.layers.loop.reverse else i
            env[GRID_OFFSET] = tuple(a + before * m for a, m in zip(operands.moved, moves, strict=True))
        return env

    # -- bytes -----------------------------------------------------------------------------------
    @property
    def _stacked_outputs(self) -> Sequence[Any]:
        return self.layers.eqn.outvars[self.body.counts.carry :]

    @property
    def _seed_bytes(self) -> int:
        return nbytes(*(self.layers.ins[j].aval for j in self.seeded))

    @property
    def kept_bytes(self) -> int:
        return self.length * sum(s.kept_bytes for s in self.walk.steps)

    @property
    def layers_memo_bytes(self) -> int:
        """Of what Phase II keeps, that which grows with the layers."""
        inner = self.length * sum(s.memo_bytes for s in self.walk.steps)
        anchors = 0 if self.period is None else -(-self.length // self.period) * self.layers.carry_bytes
        return inner + anchors

    @property
    def memo_bytes(self) -> int:
        given = nbytes(*(self._stacked_outputs[k].aval for k in self.body.active_ys))
        return self.layers_memo_bytes + self._seed_bytes + given + self.layers.hoisted_bytes

    # -- weights ---------------------------------------------------------------------------------
    @property
    def inner_in_back(self) -> tuple[Any, ...]:
        """Operands in the body whose gradients Phase II finds: stems', and outputs of weights alone."""
        found = [v for s in self.walk.steps for v in s.weights_in_back]
        found += [v for v in self.body.outputs[1] if v in self.body.network.weights]
        return tuple(dict.fromkeys(found))

    @property
    def inner_in_sweep(self) -> tuple[Any, ...]:
        return tuple(dict.fromkeys(v for s in self.walk.steps for v in s.weights_in_sweep))

    @property
    def weights_in_back(self) -> tuple[Any, ...]:
        return self.layers.weights_behind(self.inner_in_back)

    @property
    def weights_in_sweep(self) -> tuple[Any, ...]:
        return () if self.source == "none" else self.layers.weights_behind(self.inner_in_sweep)

    # -- values ----------------------------------------------------------------------------------
    def operands_of(self, fixed: Env, x: Env) -> tuple[Operands, list[Any]]:
        """(what all layers read, the carry at the start)."""
        return self.layers.operands_of(fixed, x, moved(fixed, self.place))

    def _results(self, fixed: Env, x: Env, wanted: Sequence[Any]) -> list[Any]:
        known = {**fixed, **x}
        return [graph.read(known, v) for v in wanted]

    # -- loops over some of the layers ---------------------------------------------------------------
    # Layers are `first` + 0 … count−1. What belongs to all layers is read by the layer's number, what a
    # phase of these layers made by its place among them; as scanned-over inputs of nested loops either
    # would be copied.
    def forward(
        self,
        operands: Operands,
        carry: Any,
        layers: tuple[Any, int],
        *,
        keep: bool = True,
        again: bool = False,
    ) -> Any:
        """Phase I: (carry, ys, what is kept). `again`: what prints or calls back has done so."""
        first, count = layers
        retain = frozenset(v for v in self.body.jaxpr.outvars if not isinstance(v, Literal))
        split = self.body.counts.carry

        def layer(carry: Any, place: Any, _: Any) -> Any:
            xs, made = operands.layer(first + place), take(operands.made, first + place)
            env = self.layers.fixed_in(operands.consts, xs, made, first=not again)
            state = self.layers.state_in(operands.consts, carry, xs)
            kept = self.walk.phase_one(env, state, retain, keep=keep, again=again)
            out = self._results(env, state, self.body.jaxpr.outvars)
            return out[:split], (out[split:], kept)

        last, (ys, kept) = self.layers.loop.visit(layer, carry, count=count)
        return last, ys, kept

    def backward(
        self,
        operands: Operands,
        kept: Any,
        h_carry: Any,
        h_ys: Any,
        layers: Any,
        gradients: LayerGradients,
        total: Any,
        base: Exponent = 0,
    ) -> Any:
        """Phase II: (h at the start, its exponent, gradients so far, memo).

        `base`: the exponent of the cotangents that arrive at the scan.
        """
        first, count = layers
        out_carry, out_ys = self.body.outputs
        orders = [jax.vmap(_order)(a) for a in h_ys] if self.rescales else []

        def layer(state: Down, i: Any, _: Any) -> Any:
            i = first + i
            own = take(h_ys, i)
            # A layer may bring cotangents of its own that are far larger than the carry's.
            by = _needed(state.exponent, take(orders, i))
            exponent = sum_of(state.exponent, by)
            h = [shifted(a, -by) for a in state.h] if own else state.h
            env = self._moved(self.layers.environment(operands, i), operands, i)
            env[EXPONENT] = base + exponent
            h_layer = [shifted(a, -exponent) for a in own]
            inside = Cotangents(zip((*out_carry, *out_ys), (*h, *h_layer), strict=True))
            found = GradientSink()
            memos, sketches, scales = self.walk.phase_two(env, take(kept, i - first), inside, found)
            # An output of weights alone is read by no node: its cotangent is its gradient.
            weights = self.body.network.weights
            found.add({v: shifted(a, base) for v, a in zip(out_ys, own, strict=True) if v in weights})
            total = gradients.add(state.total, i, env, found.found)
            h_ins = self.layers.h_ins
            grown = inside.align(h_ins)  # 0, unless a scan in the body rescales
            state = Down([inside[v] for v in h_ins], exponent + grown, total)
            return state, (memos, sketches, _traced(scales, grown), by)

        start = Down(h_carry, np.int32(0), total)
        levels = [level.down for level in self._levels(count)]
        end, memo = self.layers.loop.visit(layer, start, levels=levels, count=count, backward=True)
        return end.h, end.exponent, end.total, memo

    def _levels(self, count: int, first: Any = 0) -> list[Levels]:
        """What happens every so many of `count` layers from `first` on."""
        found = [tiles(self, check_spacing(self.length), first)]
        # A segment starts from an exact cotangent; a whole scan in one period from its anchor.
        if self.period is not None and count >= min(self.period + 1, self.length):
            found.insert(0, anchors(self.period))
        return found

    def onward(
        self,
        operands: Operands,
        kept: Any,
        memo: Any,
        factors: Any,
        x_carry: Any,
        h_carry: Any,
        exponent: Exponent,
        h_ys: Any,
        layers: Any,
        gradients: LayerGradients,
        total: Any,
        worst: Any,
        base: Exponent = 0,
    ) -> Any:
        """Phase III: (x, h at the end, gradients so far, largest errors so far, ys).

        `exponent`: of h at the start. At the end, h has the one that it had when Phase II began.
        """
        first, count = layers
        out_carry, out_ys = self.body.outputs
        split = self.body.counts.carry

        def layer(state: Up, i: Any, memo: Any) -> Any:
            memos, sketches, scales, by = memo
            i = first + i
            made, h_layer = take((operands.made, h_ys), i)
            xs = operands._replace(newer=(gradients, state.total)).layer(i)
            env = self._moved(self.layers.fixed_in(operands.consts, xs, made), operands, i)
            x = self.layers.state_in(operands.consts, state.x, xs)
            scales, grown = self._untraced(scales)
            exponent = state.exponent - grown
            env[EXPONENT] = base + exponent
            h_ins = self.layers.h_ins
            inside = Cotangents(zip(h_ins, state.h, strict=True), dict.fromkeys(h_ins, grown))
            inside.update(zip(out_ys, (shifted(a, -exponent) for a in h_layer), strict=True))
            ready = [
                s.prepare(env) if f is None else take(f, i)
                for s, f in zip(self.walk.steps, factors, strict=True)
            ]
            found = GradientSink()
            held = None if kept is None else take(kept, i - first)
            errors = self.walk.phase_three(
                *(env, held, memos, sketches, scales, ready, x, inside, found), whole=True
            )
            worst = self.worst.update(state.worst, [m.error for m in errors], i, first=len(out_carry))
            total = gradients.add(state.total, i, env, found.found)
            for v in out_carry:
                inside.move(v, 0)
            h = [inside[v] for v in out_carry]
            if h_layer:
                h, exponent = [shifted(a, by) for a in h], exponent - by
            outvars = self.body.jaxpr.outvars
            out = self._results(env, x, outvars if self.wants_ys else outvars[:split])
            return Up(out[:split], h, exponent, total, worst), out[split:]

        state = Up(x_carry, h_carry, exponent, total, worst)
        levels: list[Level] = []
        if memo is None:  # there was no Phase II
            steps = self.walk.steps
            memo = ([s.no_memo() for s in steps], [()] * len(steps), {}, ())
        else:
            levels = [level.up for level in self._levels(count, first)]
        if len(levels) > 1:  # it starts from an anchor
            state = state._replace(h=[jnp.zeros_like(a) for a in h_carry])
        loop = self.layers.loop
        state, ys = loop.visit(layer, state, memo, levels, count=count, join=loop.joined)
        return state.x, state.h, state.total, state.worst, ys

    def _untraced(self, kept: Any) -> tuple[list[Scale], Exponent]:
        """Exponents of a layer's steps and of its start: those that the loop kept, and zeros."""
        scales, grown = self.walk.unscaled(), 0
        for i, scale in kept.items():
            if i == _START:
                grown = scale
            else:
                scales[i] = Scale(*scale)
        return scales, grown

    # -- the phases ------------------------------------------------------------------------------
    def run(self, fixed: Env, x: Env, *, again: bool = False) -> None:
        operands, carry = self.operands_of(fixed, x)
        last, ys, _ = self.forward(operands, carry, (0, self.length), keep=False, again=again)
        x.update(zip(self.layers.eqn.outvars, (*last, *ys), strict=True))

    def keep(self, fixed: Env, x: Env, *, again: bool = False) -> Any:
        operands, carry = self.operands_of(fixed, x)
        last, ys, kept = self.forward(operands, carry, (0, self.length), again=again)
        x.update(zip(self.layers.eqn.outvars, (*last, *ys), strict=True))
        return kept

    def keep_late(self, fixed: Env, x: Env) -> Any:
        return None  # its layers are linearised one by one

    def back(self, fixed: Env, kept: Any, h: Cotangents, scale: Scale, out: GradientSink) -> Any:
        operands, _ = self.operands_of(fixed, {})
        h_last, h_ys = self.layers.arriving(h)
        gradients = LayerGradients(self.layers, operands, self.inner_in_back)
        h_first, exponent, total, memo = self.backward(
            *(operands, kept, h_last, h_ys, (0, self.length), gradients, gradients.start()),
            sum_of(fixed.get(EXPONENT, 0), scale.at),
        )
        for v, value in self.layers.leaving(h_first):
            h.add(v, value, scale.at + exponent)
        seeds = [h_first[self.body.active.index(j)] for j in self.seeded]
        out.add(gradients.finish(total))
        return memo, exponent, seeds, h_ys

    def no_memo(self, seeds: Sequence[Any] = ()) -> Any:
        return None, None, list(seeds), []

    def prepare(self, fixed: Env) -> Any:
        """Factors that need a solve, for all layers in one batched call; None: made in the loop."""
        if not self.layers.is_light:
            return None
        operands, _ = self.operands_of(fixed, {})
        stacked = self.body.counts.stacked
        if any(operands.xs[i - stacked] is None for i in self.body.volatile if i >= stacked):
            return None

        def layer(xs: Any, made: Any) -> Any:
            env = self.layers.fixed_in(operands.consts, xs, made)
            return [
                s.prepare(env) if i < self.walk.end and is_costly(s, env) else None
                for i, s in enumerate(self.walk.steps)
            ]

        return jax.vmap(layer, axis_size=self.length)(operands.xs, operands.made)

    def sweep(
        self,
        fixed: Env,
        kept: Any,
        memo: Any,
        factors: Any,
        x: Env,
        h: Cotangents,
        scale: Scale,
        out: GradientSink,
    ) -> list[Measured]:
        if self.source == "none":  # no weight in it, nor a cotangent behind it that is walked to
            for v in self.block.inputs:
                h.pop(v, None)
            self.run(fixed, x, again=True)
            return []
        body = self.body
        memo, exponent, seeds, h_ys = memo
        exponent = np.int32(0) if exponent is None else exponent  # there was no Phase II
        operands, carry = self.operands_of(fixed, x)
        arriving = []
        for j in body.active:
            if j in self.seeded:
                arriving.append(seeds[self.seeded.index(j)])
            else:
                v = self.layers.eqn.invars[body.counts.consts + j]
                if v in h:
                    h.move(v, scale.at + exponent)
                arriving.append(h.pop(v, None))
        apart = self.weights_in_back
        gradients = LayerGradients(self.layers, operands, self.inner_in_sweep, out, apart)
        factors = [None] * len(self.walk.steps) if factors is None else factors
        declarations = self.probe_all(operands)
        zero = _jax.varying_zero((operands[:3], carry, arriving, kept, memo, h_ys), jnp.float32)
        last, h_last, total, worst, ys = self.onward(
            *(operands, kept, memo, factors, carry, arriving, exponent, h_ys),
            *((0, self.length), gradients, gradients.start(), self.worst.start(zero)),
            sum_of(fixed.get(EXPONENT, 0), scale.at),
        )
        split = body.counts.carry
        x.update(zip(self.layers.eqn.outvars[:split], last, strict=True))
        for j, value in zip(body.active, h_last, strict=True):
            h.put(self.layers.eqn.outvars[j], value, scale.at)
        for k, value in zip(body.active_ys, h_ys, strict=True):
            h.put(self.layers.eqn.outvars[split + k], value, scale.at)
        if self.wants_ys:
            x.update(zip(self.layers.eqn.outvars[split:], ys, strict=True))
        out.add(gradients.finish(total))
        return [*declarations, *self.worst.finish(worst)]

    # -- the certificate ---------------------------------------------------------------------------
    def places(self, limit: float) -> list[certificate.Place]:
        """Of the weights that all layers are probed for at once, of the carry's cotangents at the end of
        every tile, and inside the layers."""
        if self.source == "none":
            return []
        declared = [p for s in self.probed for p in s.declared_places]
        carry = self.place_of("walk", limit, ends=True)
        found = [*declared, *[carry] * len(self.body.active), *self.walk.places]
        return [replace(p, layers=self.length, ends=p is carry) for p in found]

    @property
    def worst(self) -> Worst:
        """Of what the loops measure."""
        first = sum(len(s.declared_places) for s in self.probed)
        return Worst(self.places(self.walk.limit)[first:])

    @property
    def probed(self) -> list[BlockStep]:
        """Steps whose declared weights are probed for all layers in one batched call: in the loop, it
        would be a few small products in every layer, which take as long as their latency."""
        steps = [s for s in self.walk.steps if isinstance(s, BlockStep)]
        at_hand = self.layers.hoisted or self.layers.weight_prologue.is_trivial
        inside = {self.body.jaxpr.invars[i] for i in self.body.volatile}
        return [
            s
            for s in steps
            if at_hand
            and s.declared_places
            and all(v in self.body.network.fixed and v not in inside for v in s.inner.operands)
        ]

    def probe_all(self, operands: Operands) -> list[Measured]:
        """How far the weights of `probed` are from what is declared of them."""
        steps = self.probed
        if not steps:
            return []

        def layer(xs: Any, made: Any) -> list[Any]:
            env = self.layers.fixed_in(operands.consts, xs, made)
            return [m.error for s in steps for m in s.probe(env)]

        stacks = jax.vmap(layer, axis_size=self.length)(operands.xs, operands.made)
        places = self.places(self.walk.limit)
        return [
            Measured(certificate.largest(a), place, jnp.argmax(a))
            for a, place in zip(stacks, places, strict=False)
        ]

    def hold_to(self, limit: float) -> None:
        self.walk.hold_to(limit)

    wants_ys = False  # whether Phase III must stack the outputs again for a later node


def bind_scan(node: Node, network: Network, source: Layers, in_loop: bool = False) -> ScanStep:
    """A scan as a step of a walk."""
    del in_loop
    body = body_of(node, network)
    if not isinstance(body, Body):
        raise PlanMismatchError(
            f"method=: the plan walks {node.describe()} layer by layer, and {body}. Make the plan anew "
            "with moonwalk.plan(fun, *args), or mend it."
        )
    carried, ys = body.outputs
    given = frozenset(ys)
    check_sources(body.network.nodes, source.body, given, carried if source.needed else ())
    steps = bind_steps(body.network, 0, len(body.network.nodes), source.body, in_loop=True)
    walk = WalkExecutor(body.network, 0, len(steps), steps, given, source.growth)
    return make_scan_step(node, network, body, walk, source)


def make_scan_step(
    node: Node, network: Network, body: Body, walk: WalkExecutor, source: Layers
) -> ScanStep:
    """`walk`: over the body; `source` says all but its steps."""
    walk.is_body, walk.end = True, len(walk.steps)  # a layer is swept to its carry
    kind = "vijp" if source.needed else "none"
    about = (source.reason, source.gain)
    layers = ScanLayers(node, body, hoisted=source.hoisted)
    step = ScanStep(node, network, kind, node.block.inputs, *about, layers=layers, walk=walk)
    step.period = source.period
    for inner in step.probed:
        inner.probed_outside = True
    return step


BINDERS[Layers] = bind_scan


class Down(NamedTuple):
    """What Phase II carries from layer to layer."""

    h: Sequence[Any]
    exponent: Any  # of h, relative to the cotangents that arrived at the scan
    total: Any  # gradients


class Up(NamedTuple):
    """What Phase III carries from layer to layer."""

    x: Sequence[Any]
    h: Sequence[Any]
    exponent: Any
    total: Any
    worst: Any  # errors


class Levels(NamedTuple):
    """What happens at the ends of pieces: in Phase II, which arrives at the end of a piece and leaves at
    its start, and in Phase III, the other way round. What Phase II returns, Phase III is given."""

    down: Level
    up: Level


def anchors(period: int) -> Levels:
    """Every piece starts from the cotangent that Phase II had there."""

    def down(run: Visit, state: Down, kept: Any, piece: Piece) -> Any:
        state, memo = run(state, kept)
        return state, (memo, (state.h, state.exponent))

    def up(run: Visit, state: Up, kept: Any, piece: Piece) -> Any:
        memo, (h, exponent) = kept
        return run(state._replace(h=h, exponent=exponent), memo)

    return Levels(Level(period, down), Level(period, up))


def tiles(scan: ScanStep, size: int, first: Any = 0) -> Levels:
    """At the end of every piece, the cotangent is sketched and rescaled to a moderate size."""

    def down(run: Visit, state: Down, kept: Any, piece: Piece) -> Any:
        state, at_end = _sketched(scan, state)
        state, memo = run(state, kept)
        return state, (memo, at_end)

    def up(run: Visit, state: Up, kept: Any, piece: Piece) -> Any:
        memo, at_end = kept
        state, ys = run(state, memo)
        last = piece.first if scan.layers.loop.reverse else piece.first + piece.count - 1
        return _compared(scan, state, at_end, first + last), ys

    return Levels(Level(size, down), Level(size, up))


_ZERO = -(2**20)  # the order of magnitude of nothing


def _order(h: Any) -> Any:
    """The power of two that the entries of an array have."""
    sketch = certificate.sketch(h)
    return jnp.where(jnp.any(sketch != 0), certificate.exponent(sketch, h.size), _ZERO)


def _needed(exponent: Any, orders: Sequence[Any]) -> Any:
    """By how much an exponent must grow so that arrays of these orders of magnitude are in range."""
    if not orders:
        return np.int32(0)
    largest = functools.reduce(jnp.maximum, orders)
    return jnp.maximum(exponent_for(largest) - exponent, 0).astype(jnp.int32)


def _sketched(scan: ScanStep, state: Down) -> tuple[Down, Any]:
    """The state with its cotangent rescaled; sketches of that, and by how much it was."""
    sketches = [certificate.sketch(a) for a in state.h]
    if not scan.rescales:
        return state, (sketches, np.int32(0))
    sizes = [certificate.exponent(s, a.size) for s, a in zip(sketches, state.h, strict=True)]
    order = state.exponent + functools.reduce(jnp.maximum, sizes)
    by = exponent_for(order) - state.exponent
    h = [shifted(a, -by) for a in state.h]
    sketches = [shifted(s, -by) for s in sketches]
    return state._replace(h=h, exponent=state.exponent + by), (sketches, by)


def _compared(scan: ScanStep, state: Up, kept: Any, layer: Any) -> Up:
    """The state with the cotangent's scale restored, and its distance from the sketches noted."""
    sketches, by = kept
    h, exponent = state.h, state.exponent
    if scan.rescales:
        # Sketched after it is rescaled, and not before: then that is one pass over it.
        h, sketches = ([shifted(a, by) for a in arrays] for arrays in (h, sketches))
        exponent = exponent - by
    errors = [certificate.compare(certificate.sketch(a), s) for a, s in zip(h, sketches, strict=True)]
    worst = scan.worst.update(state.worst, errors, layer)
    return state._replace(h=h, exponent=exponent, worst=worst)


_START = -1


def _traced(scales: Sequence[Scale], grown: Exponent) -> dict[int, Any]:
    """Of a layer's exponents those that are not known to be 0, by step; of its start, by `_START`."""
    found: dict[int, Any] = {
        i: tuple(s) for i, s in enumerate(scales) if not all(map(is_none, (*s.before, s.at)))
    }
    return found if is_none(grown) else {**found, _START: grown}


def is_costly(step: Step, env: Env) -> bool:
    """Whether a step's factors take more than moving entries about and a product."""
    structs = {v: jax.typeof(a) for v, a in env.items() if v in step.block.operands}
    names = list(structs)
    try:
        closed = jax.make_jaxpr(lambda *values: step.prepare(dict(zip(names, values, strict=True))))(
            *(_jax.struct(structs[v]) for v in names)
        )
    except KeyError:
        return False
    return any(costly_inside(e) for e in _jax.open_jaxpr(closed)[0].eqns)
