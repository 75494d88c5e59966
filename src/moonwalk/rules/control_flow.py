"""`scan` over stacked layers: the body's vijp, scanned.

The state is the part of the carry that carries a derivative. The body is cut into blocks and given
rules once; weight-only factors of all layers are made in one batched call before the loop. `cond` and
`while_loop` have no rule, because which path runs is not known while tracing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from .. import _jax
from .._jax import Literal
from ..errors import NotSubmersiveError
from ..trace import graph, staging
from ..trace.graph import Block
from . import chain
from .chain import Chain, combined
from .registry import Alarm, Gain, Rule, State, Verdict, register_vijp


class Body(NamedTuple):
    """A scan's body with its rules, and how its inputs are grouped."""

    jaxpr: Any
    consts: tuple[Any, ...]
    chain: Chain
    counts: _jax.ScanCounts
    active: tuple[int, ...]  # the carries that are the state

    def env(self, consts: Sequence[Any], carry: Sequence[Any] | None, xs: Sequence[Any]) -> dict:
        """Values of the body's inputs; without a carry, those known before the loop."""
        in_consts, in_carry, in_xs = self.counts.groups(self.jaxpr.invars)
        env = dict(zip(self.jaxpr.constvars, self.consts, strict=True))
        env.update(zip(in_consts, consts, strict=True))
        env.update(zip(in_xs, xs, strict=True))
        if carry is not None:
            env.update(zip(in_carry, carry, strict=True))
        return env


def _state_positions(block: Block) -> list[int]:
    eqn = block.eqn
    return [i for i, v in enumerate(eqn.invars) if v in block.inputs]


def _body(block: Block) -> Body | Verdict:
    return block.once(_build_body)


def _build_body(block: Block) -> Body | Verdict:
    eqn = block.eqn
    counts = _jax.scan_counts(eqn)
    num_consts, num_carry = counts
    positions = _state_positions(block)
    carries = range(num_consts, num_consts + num_carry)
    if any(i not in carries for i in positions):
        return Verdict(
            None,
            "the state enters the scan as a constant or as scanned-over data, not as its carry",
            "carry the state through the scan, or wrap it in moonwalk.custom_vijp",
        )
    if len(positions) > len(block.inputs):
        return Verdict(
            None,
            "one state enters the scan twice: the cotangents of its copies add up",
            "carry it once",
        )
    if any(v in block.outputs for v in eqn.outvars[num_carry:]):
        return Verdict(
            None,
            "stacked outputs of the scan depend on the state: together with the carry they hold more "
            "numbers than go in",
            "return them as auxiliary data (has_aux=True), or only the final carry",
        )
    active = tuple(i - num_consts for i in positions)
    closed = eqn.params["jaxpr"]
    inner, _ = _jax.open_jaxpr(closed)
    structs = [graph.struct(v) for v in inner.invars]
    jaxpr, consts = staging.flatten_calls(closed, structs)
    in_carry = jaxpr.invars[num_consts : num_consts + num_carry]
    state, outputs = [in_carry[i] for i in active], [jaxpr.outvars[i] for i in active]
    if len({id(v) for v in outputs}) < len(outputs) or any(isinstance(v, Literal) for v in outputs):
        return Verdict(False, "a carry is overwritten by a constant or by another", "scan over it once")
    reached = {
        v
        for i, v in enumerate(jaxpr.outvars[:num_carry])
        if i not in active and not isinstance(v, Literal)
    }
    try:
        cut = graph.build(jaxpr, state, outputs, **graph.facts_inside_scan(block, jaxpr, consts))
        spilled = graph.build(jaxpr, state, [*outputs, *reached])
        if any(v in b.outputs for b in spilled.blocks for v in reached) or reached & set(state):
            return Verdict(
                None,
                "a carry that is not part of the state at the start becomes part of it in the body",
                "start it from the state, or return it as auxiliary data",
            )
        composed = chain.build(cut)
    except NotSubmersiveError as error:
        return Verdict(
            None,
            f"its body has no vijp: {error.equation} at {error.source}: {error.reason}",
            error.way_out,
        )
    return Body(jaxpr, tuple(consts), composed, counts, active)


@register_vijp(lax.scan_p)
class Scan(Rule):
    """The body's vijp, once per layer, in the order of the forward pass.

    What is kept is the carry that each layer saw. A layer's blocks are linearised again from it, by the
    same program on the same numbers: one more forward pass, and no activation inside a layer is kept.
    """

    name = "scan"
    keeps_pullback = False

    def verdict(self, block: Block) -> Verdict:
        body = _body(block)
        if isinstance(body, Verdict):
            return body
        return Verdict(True, f"{block.eqn.params['length']} steps of {len(body.chain.links)} blocks")

    def _operands(self, block: Block, body: Body, operands: Sequence[Any], x: State | None) -> Any:
        found = dict(zip(block.operands, operands, strict=True))
        if x is not None:
            found.update(zip(block.inputs, x, strict=True))
        values = [
            jnp.asarray(v.val) if isinstance(v, Literal) else found.get(v) for v in block.eqn.invars
        ]
        return body.counts.groups(values)

    def prepare(self, block: Block, operands: Sequence[Any]) -> Any:
        body = _checked(block)
        consts, _, xs = self._operands(block, body, operands, None)
        if not xs:
            return body.chain.prepare(body.env(consts, None, []))
        return jax.vmap(lambda *xs: body.chain.prepare(body.env(consts, None, xs)))(*xs)

    def linearize(self, block: Block, x: State, operands: Sequence[Any]) -> tuple[State, Any]:
        body = _checked(block)
        consts, carry, xs = self._operands(block, body, operands, x)

        def step(carry: Any, xs: Any) -> Any:
            env = body.env(consts, carry, xs)
            graph.run(body.jaxpr.eqns, env)
            out = [jnp.asarray(v.val) if isinstance(v, Literal) else env[v] for v in body.jaxpr.outvars]
            return out[: body.counts.carry], (out[body.counts.carry :], carry)

        last, (ys, carries) = self._scan(block, step, carry, xs)
        found = dict(zip(block.eqn.outvars, [*last, *ys], strict=True))
        return tuple(found[v] for v in block.outputs), (carries, consts, xs)

    def vijp(self, block: Block, factors: Any, kept: Any, h: State) -> State:
        body = _checked(block)

        def step(h: Any, tape: Any) -> Any:
            return body.chain.vijp(tape, h), None

        h = tuple(h[block.inputs.index(block.eqn.invars[body.counts.consts + i])] for i in body.active)
        last, _ = self._along(block, body, factors, kept, step, h)
        found = {block.eqn.outvars[i]: a for i, a in zip(body.active, last, strict=True)}
        return tuple(found[v] for v in block.outputs)

    def alarms(self, block: Block, factors: Any, kept: Any) -> list[Alarm]:
        body = _checked(block)
        texts: list[Any] = []  # the static parts of alarms, as no tracer may leave the loop

        def step(_: Any, tape: Any) -> Any:
            alarms = body.chain.alarms(tape)
            texts[:] = [(a.message, a.error, a.place) for a in alarms]
            return (), [jnp.any(a.bad) for a in alarms]

        _, bad = self._along(block, body, factors, kept, step, ())
        return [Alarm(b, *text) for b, text in zip(bad, texts, strict=True)]

    def gain(self, block: Block, operands: Sequence[Any] | None = None) -> Gain:
        body, length = _checked(block), block.eqn.params["length"]
        if operands is None:
            return combined([link.rule.gain(link.block) for link in body.chain.links]).over(length)
        consts, _, xs = self._operands(block, body, operands, None)
        return combined(
            [
                combined(body.chain.gains(body.env(consts, None, [x[i] for x in xs])))
                for i in range(length)
            ]
        )

    def _along(self, block: Block, body: Body, factors: Any, kept: Any, step: Any, start: Any) -> Any:
        """Scan over the layers again, with each layer's tape made from the carry that it saw."""
        carries, consts, xs = kept

        def with_tape(state: Any, inputs: Any) -> Any:
            carry, xs, made = inputs
            made = made if xs else factors
            _, tape = body.chain.forward(body.env(consts, carry, xs), made)
            return step(state, tape)

        per_layer = factors if xs else None
        return self._scan(block, with_tape, start, (carries, xs, per_layer))

    @staticmethod
    def _scan(block: Block, step: Any, start: Any, inputs: Any) -> Any:
        params = block.eqn.params
        return lax.scan(step, start, inputs, length=params["length"], reverse=params["reverse"])


def _checked(block: Block) -> Body:
    body = _body(block)
    assert isinstance(body, Body), body
    return body
