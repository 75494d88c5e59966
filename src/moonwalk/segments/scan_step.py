"""`scan` over stacked layers: the body is planned once, and each phase is one scan.

Loops are nested where something happens every so many layers (`Level`). With anchors every K layers,
Phase II hands out the cotangent at the start of each period, and Phase III starts each period from it.
In tiles of a few layers, Phase II sketches the cotangent for the certificate and rescales it; Phase III
compares, and undoes that. Layers that K does not divide form a shorter last period.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .. import _jax
from .._jax import Literal
from ..execute import certificate
from ..execute.barriers import Env
from ..execute.certificate import Measured, Worst
from ..execute.residuals import nbytes
from ..execute.scale import Cotangents, Exponent, exponent_for, is_none, shifted, sum_of
from ..execute.sinks import Gradients, GradientSink, StackedSink, take
from ..execute.twins import as_cotangent
from ..network import loop_body
from ..network.cutting import Network, Node, is_heavy
from ..network.loop_body import Body
from ..network.prologues import DataPrologue, WeightPrologue
from ..rules.fragments import Place
from ..rules.registry import Alarm
from ..trace import graph
from .base import Row, line_of
from .costs import NodeCost, node_costs
from .sources import Layers, Source
from .walk import (
    BINDERS,
    EXPONENT,
    GRID_OFFSET,
    BlockStep,
    Scale,
    Step,
    WalkExecutor,
    bind_steps,
    check_spacing,
    moved,
)


@dataclass(eq=False, repr=False)
class ScanStep(Step):
    """A scan, walked."""

    body: Body = None  # type: ignore[assignment]
    walk: WalkExecutor = None  # type: ignore[assignment]
    period: int | None = None  # anchors every so many layers
    hoisted: bool = False  # the body's weight side is done for all layers at once, before the loop

    def __post_init__(self) -> None:
        eqn = self.block.eqns[0]
        self.eqn, self.length, self.reverse = eqn, eqn.params["length"], eqn.params["reverse"]
        body = self.body
        results = [v for v in body.jaxpr.outvars if not isinstance(v, Literal)]
        parameters = [body.jaxpr.invars[i] for i in body.weights]
        self.weight_prologue = WeightPrologue(body.network, parameters, results)
        self.data_prologue = DataPrologue(body.network, results)
        # Carries that are part of the state only inside: the data's own, at the start of a network.
        self.seeded = [
            j for j in body.active if eqn.invars[body.counts.consts + j] not in self.block.inputs
        ]
        ins = body.jaxpr.invars[body.counts.consts : body.counts.stacked]
        self.ins, self.h_ins = ins, [ins[j] for j in body.active]
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
        return Layers(self.reason, body, self.period, self.gain, self.walk.growth, self.hoisted, needed)

    def is_read_by(self, variables: Collection[Any]) -> None:
        self.wants_ys = any(v in variables for v in self.eqn.outvars[self.body.counts.carry :])

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
        return 2 * states - nbytes(*(self.ins[j].aval for j in self.seeded))

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
        rows = [Row(self.node.describe(), line_of(self.node), *about)]
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
            before = self.length - 1 - i if self.reverse else i
            env[GRID_OFFSET] = tuple(a + before * m for a, m in zip(operands.moved, moves, strict=True))
        return env

    # -- bytes -----------------------------------------------------------------------------------
    @property
    def carry_bytes(self) -> int:
        return nbytes(*(v.aval for v in self.h_ins))

    @property
    def kept_bytes(self) -> int:
        return self.length * sum(s.kept_bytes for s in self.walk.steps)

    @property
    def layers_memo_bytes(self) -> int:
        """Of what Phase II keeps, that which grows with the layers."""
        inner = self.length * sum(s.memo_bytes for s in self.walk.steps)
        anchors = 0 if self.period is None else -(-self.length // self.period) * self.carry_bytes
        return inner + anchors

    @property
    def memo_bytes(self) -> int:
        seeds = nbytes(*(self.ins[j].aval for j in self.seeded))
        ys = self.eqn.outvars[self.body.counts.carry :]
        given = nbytes(*(ys[k].aval for k in self.body.active_ys))
        hoisted = self.length * self.operand_bytes if self.hoisted else 0
        return self.layers_memo_bytes + seeds + given + hoisted

    @property
    def operand_bytes(self) -> int:
        """Of one layer's weights, as its nodes read them."""
        return nbytes(*(v.aval for v in self.weight_prologue.wanted))

    @property
    def is_light(self) -> bool:
        """Whether weights weigh less than activations: then what is made of them for all layers at
        once, before the loop, costs little memory and saves its latency in every layer."""
        return self.operand_bytes <= self.carry_bytes

    # -- weights ---------------------------------------------------------------------------------
    def _outer(self, operands: Iterable[Any]) -> tuple[Any, ...]:
        """The scan's own operands whose gradients follow from those of operands inside."""
        reached = set(self.weight_prologue.sources(operands))
        body = self.body
        found = [self.eqn.invars[i] for i in body.weights if body.jaxpr.invars[i] in reached]
        return tuple(dict.fromkeys(found))

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
        return self._outer(self.inner_in_back)

    @property
    def weights_in_sweep(self) -> tuple[Any, ...]:
        return () if self.source == "none" else self._outer(self.inner_in_sweep)

    # -- values ----------------------------------------------------------------------------------
    def operands_of(self, fixed: Env, x: Env) -> tuple[Operands, list[Any]]:
        """(what all layers read, the carry at the start)."""

        def value(v: Any) -> Any:
            if isinstance(v, Literal):
                return _jax.literal(v)
            return fixed[v] if v in fixed else x.get(v)

        consts, carry, xs = self.body.counts.groups([value(v) for v in self.eqn.invars])
        made, pull = self._hoist(consts, xs)
        return Operands(consts, xs, made, pull, moved(fixed, self.place)), carry

    def _hoist(self, consts: Sequence[Any], xs: Sequence[Any]) -> Any:
        """Weight-side values of all layers in one batched call, and their pullback."""
        if not self.hoisted:
            return None, None
        known = [i for i in self.body.weights]
        stacked = self.body.counts.stacked

        def side(*weights: Any) -> Any:
            axes = tuple(0 if i >= stacked else None for i in known)
            size = {} if any(a == 0 for a in axes) else {"axis_size": self.length}
            shared = dict(zip(self.body.jaxpr.constvars, self.body.consts, strict=True))
            numbers = self.body.network.numbers
            ins = zip(self.body.jaxpr.invars, consts, strict=False)
            shared.update((v, a) for v, a in ins if v in numbers)
            graph.run([e for e in self.body.network.data_prologue if set(e.outvars) <= numbers], shared)
            values = functools.partial(self.weight_prologue.values, others=shared)
            return jax.vmap(values, in_axes=axes, **size)(*weights)

        weights = [consts[i] if i < stacked else xs[i - stacked] for i in known]
        return jax.vjp(side, *weights)

    def _fixed(self, consts: Any, xs: Any, made: Any, *, first: bool = False) -> Env:
        """Everything that all phases can read in one layer."""
        body = self.body
        env = dict(zip(body.jaxpr.constvars, body.consts, strict=True))
        in_consts, _, in_xs = body.counts.groups(body.jaxpr.invars)
        skip = {body.jaxpr.invars[i] for i in body.volatile}
        env.update(
            (v, a) for v, a in zip((*in_consts, *in_xs), (*consts, *xs), strict=True) if v not in skip
        )
        self.data_prologue.run(env, effects=first)
        if made is None:
            self.weight_prologue.run(env, effects=first)
        else:
            env.update(zip(self.weight_prologue.wanted, made, strict=True))
        return env

    def environment(self, operands: Operands, i: Any) -> Env:
        """What all phases can read in layer i."""
        made = self._fixed(operands.consts, operands.layer(i), take(operands.made, i))
        return self._moved(made, operands, i)

    def _layer_x(self, consts: Sequence[Any], carry: Sequence[Any], xs: Sequence[Any]) -> Env:
        body = self.body
        values = dict(zip(body.jaxpr.invars, (*consts, *carry, *xs), strict=True))
        skip = {body.jaxpr.invars[i] for i in body.volatile}
        return {v: a for v, a in values.items() if v in skip or v in self.ins}

    def _results(self, fixed: Env, x: Env, wanted: Sequence[Any]) -> list[Any]:
        known = {**fixed, **x}
        return [graph.read(known, v) for v in wanted]

    def scan(self, step: Any, carry: Any, xs: Any = None, *, backward: bool = False, length: int) -> Any:
        """A loop over `length` places in the scan's order (or backward): step(carry, place, xs).

        The place is counted in the carry. Read from an array of places, XLA would not know it for the
        loop's own counter.
        """
        down = self.reverse != backward

        def body(carry: Any, xs: Any) -> Any:
            count, carry = carry
            carry, ys = step(carry, length - 1 - count if down else count, xs)
            return (count + 1, carry), ys

        (_, carry), ys = lax.scan(body, (np.int32(0), carry), xs, length=length, reverse=down)
        return carry, ys

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

        def step(carry: Any, place: Any, _: Any) -> Any:
            xs, made = operands.layer(first + place), take(operands.made, first + place)
            env = self._fixed(operands.consts, xs, made, first=not again)
            state = self._layer_x(operands.consts, carry, xs)
            kept = self.walk.phase_one(env, state, retain, keep=keep, again=again)
            out = self._results(env, state, self.body.jaxpr.outvars)
            return out[:split], (out[split:], kept)

        last, (ys, kept) = self.scan(step, carry, length=count)
        return last, ys, kept

    def backward(
        self,
        operands: Operands,
        kept: Any,
        h_carry: Any,
        h_ys: Any,
        layers: Any,
        sums: Sums,
        total: Any,
        base: Exponent = 0,
    ) -> Any:
        """Phase II: (h at the start, its exponent, gradients so far, memo).

        `base`: the exponent of the cotangents that arrive at the scan.
        """
        first, count = layers
        out_carry, out_ys = self.body.outputs
        orders = [jax.vmap(_order)(a) for a in h_ys] if self.rescales else []

        def step(state: Down, i: Any) -> Any:
            i = first + i
            own = take(h_ys, i)
            # A layer may bring cotangents of its own that are far larger than the carry's.
            by = _needed(state.exponent, take(orders, i))
            exponent = sum_of(state.exponent, by)
            h = [shifted(a, -by) for a in state.h] if own else state.h
            env = {**self.environment(operands, i), EXPONENT: base + exponent}
            h_layer = [shifted(a, -exponent) for a in own]
            layer = Cotangents(zip((*out_carry, *out_ys), (*h, *h_layer), strict=True))
            found = GradientSink()
            memos, inner, scales = self.walk.phase_two(env, take(kept, i - first), layer, found)
            # An output of weights alone is read by no node: its cotangent is its gradient.
            weights = self.body.network.weights
            found.add({v: shifted(a, base) for v, a in zip(out_ys, own, strict=True) if v in weights})
            total = sums.add(state.total, i, env, found.found)
            grown = layer.align(self.h_ins)  # 0, unless a scan in the body rescales
            state = Down([layer[v] for v in self.h_ins], exponent + grown, total)
            return state, (memos, inner, _traced(scales, grown), by)

        start = Down(h_carry, np.int32(0), total)
        end, memo = self._down(step, start, 0, count, self._levels(count))
        return end.h, end.exponent, end.total, memo

    def _levels(self, count: int) -> list[Level]:
        """What happens every so many of some layers."""
        levels: list[Level] = []
        # A segment starts from an exact cotangent; a whole scan in one period from its anchor.
        if self.period is not None and count >= min(self.period + 1, self.length):
            levels.append(Anchors(self.period))
        return [*levels, Tiles(check_spacing(self.length))]

    def _down(self, step: Any, state: Down, first: Any, count: int, levels: Sequence[Level]) -> Any:
        """The layers from `first` on, the last of them first: (state, what the loops kept)."""
        if not levels:
            return self.scan(lambda s, i, _: step(s, first + i), state, backward=True, length=count)
        level, *inner = levels

        def piece(state: Down, first: Any, count: int) -> Any:
            state, at_end = level.down_from_end(self, state)
            state, memo = self._down(step, state, first, count, inner)
            return state, (memo, at_end, level.down_at_start(state))

        if level.size >= count:
            return piece(state, first, count)
        pieces, short, start, rest = self._in_pieces(count, level.size)
        rest_memo = None
        if short:
            state, rest_memo = piece(state, first + rest, short)
        state, memo = self.scan(
            lambda s, k, _: piece(s, first + start + k * level.size, level.size),
            state,
            backward=True,
            length=pieces,
        )
        return state, (memo, rest_memo)

    def _in_pieces(self, count: int, size: int) -> tuple[int, int, int, int]:
        """(whole pieces, layers of the shorter last one, first place of the former, of the latter)."""
        pieces, short = divmod(count, size)
        return (pieces, short, short, 0) if self.reverse else (pieces, short, 0, count - short)

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
        sums: Sums,
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

        def step(state: Up, i: Any, memo: Any) -> Any:
            memos, inner, scales, by = memo
            i = first + i
            made, h_layer = take((operands.made, h_ys), i)
            xs = operands._replace(newer=(sums, state.total)).layer(i)
            env = self._moved(self._fixed(operands.consts, xs, made), operands, i)
            x = self._layer_x(operands.consts, state.x, xs)
            scales, grown = self._untraced(scales)
            exponent = state.exponent - grown
            env[EXPONENT] = base + exponent
            layer = Cotangents(zip(self.h_ins, state.h, strict=True), dict.fromkeys(self.h_ins, grown))
            layer.update(zip(out_ys, (shifted(a, -exponent) for a in h_layer), strict=True))
            ready = [
                s.prepare(env) if f is None else take(f, i)
                for s, f in zip(self.walk.steps, factors, strict=True)
            ]
            found = GradientSink()
            held = None if kept is None else take(kept, i - first)
            errors = self.walk.phase_three(
                *(env, held, memos, inner, scales, ready, x, layer, found), whole=True
            )
            worst = self.worst.update(state.worst, [m.error for m in errors], i, first=len(out_carry))
            total = sums.add(state.total, i, env, found.found)
            for v in out_carry:
                layer.move(v, 0)
            h = [layer[v] for v in out_carry]
            if h_layer:
                h, exponent = [shifted(a, by) for a in h], exponent - by
            outvars = self.body.jaxpr.outvars
            out = self._results(env, x, outvars if self.wants_ys else outvars[:split])
            return Up(out[:split], h, exponent, total, worst), out[split:]

        state = Up(x_carry, h_carry, exponent, total, worst)
        levels = self._levels(count) if memo is not None else []
        if levels and isinstance(levels[0], Anchors):
            state = state._replace(h=[jnp.zeros_like(a) for a in h_carry])
        state, ys = self._up(step, state, memo, 0, count, levels, first)
        return state.x, state.h, state.total, state.worst, ys

    def _up(
        self, step: Any, state: Up, memo: Any, first: Any, count: int, levels: Any, offset: Any
    ) -> Any:
        """The layers from `first` on, in their order: (state, ys). `offset`: of the first of all."""
        if not levels:
            if memo is None:  # there was no Phase II
                steps = self.walk.steps
                memo = ([s.no_memo() for s in steps], [()] * len(steps), {}, ())
            return self.scan(lambda s, i, m: step(s, first + i, m), state, memo, length=count)
        level, *inner = levels

        def piece(state: Up, memo: Any, first: Any, count: int) -> Any:
            memo, at_end, at_start = memo
            state = level.up_from_start(state, at_start)
            state, ys = self._up(step, state, memo, first, count, inner, offset)
            last = first if self.reverse else first + count - 1
            return level.up_at_end(self, state, at_end, offset + last), ys

        if level.size >= count:
            return piece(state, memo, first, count)
        pieces, short, start, rest = self._in_pieces(count, level.size)
        memo, rest_memo = memo
        state, ys = self.scan(
            lambda s, k, m: piece(s, m, first + start + k * level.size, level.size),
            state,
            memo,
            length=pieces,
        )
        rest_ys = None
        if short:
            state, rest_ys = piece(state, rest_memo, first + rest, short)
        return state, self.joined(ys, rest_ys)

    def _untraced(self, kept: Any) -> tuple[list[Scale], Exponent]:
        """Exponents of a layer's steps and of its start: those that the loop kept, and zeros."""
        scales, grown = self.walk.unscaled(), 0
        for i, scale in kept.items():
            if i == _START:
                grown = scale
            else:
                scales[i] = Scale(*scale)
        return scales, grown

    def joined(self, main: Any, rest: Any) -> Any:
        """Outputs of periods and of the shorter last one, as those of one loop."""
        flat = jax.tree.map(lambda a: a.reshape((a.shape[0] * a.shape[1], *a.shape[2:])), main)
        if rest is None:
            return flat
        order = (lambda a, b: [b, a]) if self.reverse else (lambda a, b: [a, b])
        return jax.tree.map(lambda a, b: jnp.concatenate(order(a, b)), flat, rest)

    # -- the phases ------------------------------------------------------------------------------
    def run(self, fixed: Env, x: Env, *, again: bool = False) -> None:
        operands, carry = self.operands_of(fixed, x)
        last, ys, _ = self.forward(operands, carry, (0, self.length), keep=False, again=again)
        x.update(zip(self.eqn.outvars, (*last, *ys), strict=True))

    def keep(self, fixed: Env, x: Env, *, again: bool = False) -> Any:
        operands, carry = self.operands_of(fixed, x)
        last, ys, kept = self.forward(operands, carry, (0, self.length), again=again)
        x.update(zip(self.eqn.outvars, (*last, *ys), strict=True))
        return kept

    def keep_late(self, fixed: Env, x: Env) -> Any:
        return None  # its layers are linearised one by one

    def arriving(self, h: Env) -> tuple[list[Any], list[Any]]:
        """Cotangents of the scan's results, taken from `h`: (of the carry, of the stacked outputs)."""
        outs, body = self.eqn.outvars, self.body
        h_ys = [h.pop(outs[body.counts.carry + k]) for k in body.active_ys]
        h_last = []
        for j in body.active:
            found = h.pop(outs[j], None)
            found = _jax.full(self.ins[j].aval, 0.0) if found is None else found
            h_last.append(as_cotangent(self.ins[j], found))
        return h_last, h_ys

    def leaving(self, h_first: Sequence[Any]) -> list[tuple[Any, Any]]:
        """Cotangents of the carry's start, by the variables that it starts from."""
        starts = self.eqn.invars[self.body.counts.consts :]
        pairs = zip(self.body.active, h_first, strict=True)
        return [(starts[j], value) for j, value in pairs if j not in self.seeded]

    def back(self, fixed: Env, kept: Any, h: Cotangents, scale: Scale, out: GradientSink) -> Any:
        operands, _ = self.operands_of(fixed, {})
        h_last, h_ys = self.arriving(h)
        sums = Sums(self, operands, self.inner_in_back)
        h_first, exponent, total, memo = self.backward(
            *(operands, kept, h_last, h_ys, (0, self.length), sums, sums.start()),
            sum_of(fixed.get(EXPONENT, 0), scale.at),
        )
        for v, value in self.leaving(h_first):
            h.add(v, value, scale.at + exponent)
        seeds = [h_first[self.body.active.index(j)] for j in self.seeded]
        out.add(sums.finish(total))
        return memo, exponent, seeds, h_ys

    def no_memo(self, seeds: Sequence[Any] = ()) -> Any:
        return None, None, list(seeds), []

    def prepare(self, fixed: Env) -> Any:
        """Factors that need a solve, for all layers in one batched call; None: made in the loop."""
        if not self.is_light:
            return None
        operands, _ = self.operands_of(fixed, {})
        stacked = self.body.counts.stacked
        if any(operands.xs[i - stacked] is None for i in self.body.volatile if i >= stacked):
            return None

        def layer(xs: Any, made: Any) -> Any:
            env = self._fixed(operands.consts, xs, made)
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
                v = self.eqn.invars[body.counts.consts + j]
                if v in h:
                    h.move(v, scale.at + exponent)
                arriving.append(h.pop(v, None))
        sums = Sums(self, operands, self.inner_in_sweep, out, apart=self.weights_in_back)
        factors = [None] * len(self.walk.steps) if factors is None else factors
        declarations = self.probe_all(operands)
        zero = _jax.varying_zero((operands[:3], carry, arriving, kept, memo, h_ys), jnp.float32)
        last, h_last, total, worst, ys = self.onward(
            *(operands, kept, memo, factors, carry, arriving, exponent, h_ys),
            *((0, self.length), sums, sums.start(), self.worst.start(zero)),
            sum_of(fixed.get(EXPONENT, 0), scale.at),
        )
        split = body.counts.carry
        x.update(zip(self.eqn.outvars[:split], last, strict=True))
        for j, value in zip(body.active, h_last, strict=True):
            h.put(self.eqn.outvars[j], value, scale.at)
        for k, value in zip(body.active_ys, h_ys, strict=True):
            h.put(self.eqn.outvars[split + k], value, scale.at)
        if self.wants_ys:
            x.update(zip(self.eqn.outvars[split:], ys, strict=True))
        out.add(sums.finish(total))
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
        at_hand = self.hoisted or self.weight_prologue.is_trivial
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
            env = self._fixed(operands.consts, xs, made)
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


def body_of(node: Node, network: Network) -> Body | str:
    """The body of a scan, opened once; or why it cannot be walked."""
    key = ("body", node)
    if key not in network.memory:
        network.memory[key] = loop_body.open_body(node, network.fixed, network.numbers)
    return network.memory[key]


def bind_scan(node: Node, network: Network, source: Layers, in_loop: bool = False) -> ScanStep:
    """A scan as a step of a walk."""
    del in_loop
    body = body_of(node, network)
    assert isinstance(body, Body), body
    steps = bind_steps(body.network, 0, len(body.network.nodes), source.body, in_loop=True)
    given = frozenset(body.outputs[1])
    walk = WalkExecutor(body.network, 0, len(steps), steps, given, source.growth)
    return make_scan_step(node, network, body, walk, source)


def make_scan_step(
    node: Node, network: Network, body: Body, walk: WalkExecutor, source: Layers
) -> ScanStep:
    """`walk`: over the body; `source` says all but its steps."""
    walk.is_body, walk.end = True, len(walk.steps)  # a layer is swept to its carry
    kind = "vijp" if source.needed else "none"
    about = (source.reason, source.gain)
    step = ScanStep(node, network, kind, node.block.inputs, *about, body=body, walk=walk)
    step.period, step.hoisted = source.period, source.hoisted
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


@dataclass(frozen=True)
class Level:
    """Something that happens at the ends of pieces of `size` layers.

    Phase II arrives at the end of a piece and leaves at its start; Phase III the other way round. What
    Phase II returns at an end, Phase III is given there.
    """

    size: int

    def down_from_end(self, scan: ScanStep, state: Down) -> tuple[Down, Any]:
        return state, ()

    def down_at_start(self, state: Down) -> Any:
        return ()

    def up_from_start(self, state: Up, kept: Any) -> Up:
        return state

    def up_at_end(self, scan: ScanStep, state: Up, kept: Any, layer: Any) -> Up:
        return state


class Anchors(Level):
    """Every piece starts from the cotangent that Phase II had there."""

    def down_at_start(self, state: Down) -> Any:
        return state.h, state.exponent

    def up_from_start(self, state: Up, kept: Any) -> Up:
        h, exponent = kept
        return state._replace(h=h, exponent=exponent)


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


class Tiles(Level):
    """At the end of every piece, the cotangent is sketched and rescaled to a moderate size."""

    def down_from_end(self, scan: ScanStep, state: Down) -> tuple[Down, Any]:
        sketches = [certificate.sketch(a) for a in state.h]
        if not scan.rescales:
            return state, (sketches, np.int32(0))
        sizes = [certificate.exponent(s, a.size) for s, a in zip(sketches, state.h, strict=True)]
        order = state.exponent + functools.reduce(jnp.maximum, sizes)
        by = exponent_for(order) - state.exponent
        h = [shifted(a, -by) for a in state.h]
        sketches = [shifted(s, -by) for s in sketches]
        return state._replace(h=h, exponent=state.exponent + by), (sketches, by)

    def up_at_end(self, scan: ScanStep, state: Up, kept: Any, layer: Any) -> Up:
        sketches, by = kept
        h, exponent = state.h, state.exponent
        if scan.rescales:
            # Sketched after it is rescaled, and not before: then that is one pass over it.
            h, sketches = ([shifted(a, by) for a in arrays] for arrays in (h, sketches))
            exponent = exponent - by
        errors = [
            certificate.compare(certificate.sketch(a), s) for a, s in zip(h, sketches, strict=True)
        ]
        worst = scan.worst.update(state.worst, errors, layer)
        return state._replace(h=h, exponent=exponent, worst=worst)


_START = -1


def _traced(scales: Sequence[Scale], grown: Exponent) -> dict[int, Any]:
    """Of a layer's exponents those that are not known to be 0, by step; of its start, by `_START`."""
    found: dict[int, Any] = {
        i: tuple(s) for i, s in enumerate(scales) if not all(map(is_none, (*s.before, s.at)))
    }
    return found if is_none(grown) else {**found, _START: grown}


class Operands(NamedTuple):
    """What all layers of a scan read."""

    consts: Sequence[Any]
    xs: Sequence[Any]
    made: Any  # where the weight side is hoisted: its values for all layers
    pull: Any  # and its pullback
    moved: Place = (0, 0, 0)  # how far grids of spans have moved before the first layer
    newer: Any = None  # (sums, what they carry): who has the current value of some of `xs`

    def layer(self, i: Any) -> Any:
        """Layer i of what is scanned over."""
        if self.newer is None:
            return take(self.xs, i)
        sums, carried = self.newer
        return sums.layer(self.xs, carried, i)


class Sums:
    """Gradients that a loop over layers hands out: of shared operands summed, of stacked ones by layer.

    Where the weight side is hoisted they are the gradients of its results, pulled back after the loop.
    """

    def __init__(
        self,
        scan: ScanStep,
        operands: Operands,
        inner: Sequence[Any],
        out: GradientSink | None = None,
        apart: Sequence[Any] = (),
    ):
        """`inner`: operands in the body whose gradients are found. `out`: who says how those of stacked
        operands are handed out, but for those in `apart`."""
        self.scan, self.operands, self.inner = scan, operands, inner
        side, body = scan.weight_prologue, scan.body
        self.layers: list[StackedSink] = []
        self.shared: dict[int, Any] = {}  # by place among the body's weights
        self.stacked: dict[int, Any] = {}  # their variables outside, by that place
        if operands.made is not None:
            made = dict(zip(side.wanted, operands.made, strict=True))
            self.layers.append(StackedSink({v: made[v] for v in inner if v in made}))
            return
        reached = set(side.sources(inner))
        first = body.counts.stacked
        for k, i in enumerate(body.weights):
            if body.jaxpr.invars[i] in reached:
                if i < first:
                    self.shared[k] = operands.consts[i]
                else:
                    self.stacked[k] = scan.eqn.invars[i]
        values = {v: operands.xs[body.weights[k] - first] for k, v in self.stacked.items()}
        others = {*apart, *(scan.eqn.invars[body.weights[k]] for k in self.shared)}
        alone = {v: a for v, a in values.items() if v not in others}
        self.layers.append(StackedSink({v: a for v, a in values.items() if v in others}))
        self.layers.append(StackedSink(alone) if out is None else out.layers(alone))

    def start(self) -> Any:
        """What the loop carries, at its start."""
        zeros = {k: jnp.zeros_like(a) for k, a in self.shared.items()}
        return zeros, [layers.start() for layers in self.layers]

    def layer(self, xs: Sequence[Any], carried: Any, i: Any) -> list[Any]:
        """Layer i of what is scanned over."""
        found: dict[Any, Any] = {}
        for layers, own in zip(self.layers, carried[1], strict=True):
            found.update(layers.read(own, i))
        variables = self.scan.body.counts.groups(self.scan.eqn.invars)[2]
        return [
            found[v] if not isinstance(v, Literal) and v in found else take(a, i)
            for v, a in zip(variables, xs, strict=True)
        ]

    def add(self, carried: Any, i: Any, env: Env, found: Gradients) -> Any:
        """Take the gradients that layer i has found."""
        if not self.inner:
            return carried
        shared, stacked = carried
        side = self.scan.weight_prologue
        if self.operands.made is not None:
            complete = dict(zip(side.wanted, side.complete(env, found), strict=True))
            return shared, [self.layers[0].write(stacked[0], i, complete)]
        gradients = side.pull(env, found)
        shared = {k: total + gradients[k] for k, total in shared.items()}
        ledger = GradientSink()
        for k, v in self.stacked.items():
            ledger.add({v: gradients[k]})
        new = [
            layers.write(own, i, ledger.found) for layers, own in zip(self.layers, stacked, strict=True)
        ]
        return shared, new

    def finish(self, carried: Any) -> Gradients:
        """Gradients of the scan's operands."""
        shared, stacked = carried
        scan, ledger = self.scan, GradientSink()
        if self.operands.made is not None:
            found = self.layers[0].finish(stacked[0])
            if found:
                made = dict(zip(scan.weight_prologue.wanted, self.operands.made, strict=True))
                pulled = self.operands.pull([found.get(v, jnp.zeros_like(a)) for v, a in made.items()])
                for i, g in zip(scan.body.weights, pulled, strict=True):
                    ledger.add({scan.eqn.invars[i]: g})
            return ledger.found
        for k, g in shared.items():
            ledger.add({scan.eqn.invars[scan.body.weights[k]]: g})
        for layers, own in zip(self.layers, stacked, strict=True):
            ledger.add(layers.finish(own))
        return ledger.found


_COSTLY = (
    "triangular_solve lu householder_product geqrf geqp3 qr cholesky svd eigh while scan "
    "custom_linear_solve schur"
).split()


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


def costly_inside(eqn: Any) -> bool:
    """Whether it solves or factorises, or calls what does."""
    if any(eqn.primitive.name.startswith(name) for name in _COSTLY):
        return True
    return any(costly_inside(e) for inner in _jax.inner_jaxprs(eqn) for e in inner.eqns)


def is_worth_hoisting(step: ScanStep) -> bool:
    """Whether the body's weight side is more than moving entries about, and depends on weights alone."""
    side = step.weight_prologue
    if side.is_trivial:
        return False
    parameters = {step.body.jaxpr.invars[i] for i in step.body.weights}
    known = parameters | set(step.body.jaxpr.constvars) | step.body.network.numbers
    made = {v for e in side.eqns for v in e.outvars}
    if not step.is_light or side.silent or any(v in made for v in step.body.network.results):
        return False
    for e in side.eqns:
        for v in e.invars:
            if hasattr(v, "val"):
                continue
            if v not in made and v not in known:
                return False
    return any(is_heavy(e) or costly_inside(e) for e in side.eqns)
