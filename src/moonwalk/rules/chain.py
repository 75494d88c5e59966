"""Blocks with their rules, composed: the vijp of a whole function.

    h₀ ──vijp₁──▶ h₁ ──vijp₂──▶ h₂ ── … ──▶ h_L        (J₁ is the first block's Jacobian)

The chain rule for right inverses, (J_L ⋯ J₁)⁺ = J₁⁺ ⋯ J_L⁺ on the row space, is the paper's Eq. 7: it
makes the composition of the blocks' vijps the vijp of the composition.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from .. import _jax
from .._jax import JaxprEqn, Literal
from ..errors import NotSubmersiveError
from ..trace import activity, graph, partition
from ..trace.graph import Block, Cutter, Graph
from . import registry
from .registry import Alarm, Gain, Rule, Verdict


class Link(NamedTuple):
    """A block and the rule that serves it."""

    block: Block
    rule: Rule
    verdict: Verdict


Tape = tuple[tuple[Any, Any], ...]  # per link: (factors, what was kept of the forward pass)


@dataclass(frozen=True, eq=False)
class Chain:
    """A function whose every block has a vijp."""

    schedule: tuple[Link | JaxprEqn, ...]
    inputs: tuple[Any, ...]
    outputs: tuple[Any, ...]

    @property
    def links(self) -> list[Link]:
        """The blocks with their rules, in the order of the forward pass."""
        return [item for item in self.schedule if isinstance(item, Link)]

    def prepare(self, env: Mapping[Any, Any]) -> tuple[Any, ...]:
        """For each block, its factors if its operands follow from `env` (weights) alone, else None."""
        return tuple(
            None if operands is None else link.rule.prepare(link.block, operands)
            for link, operands in self._with_operands(env)
        )

    def gains(self, env: Mapping[Any, Any]) -> list[Gain]:
        """Gains of all blocks, measured if their operands follow from `env` (weights)."""
        return [link.rule.gain(link.block, operands) for link, operands in self._with_operands(env)]

    def _with_operands(self, env: Mapping[Any, Any]) -> Iterator[tuple[Link, list[Any] | None]]:
        """Each block with its operands, or None if these do not follow from `env` alone."""
        env = dict(env)
        for item in self.schedule:
            if isinstance(item, Link):
                known = all(v in env for v in item.block.operands)
                yield item, [env[v] for v in item.block.operands] if known else None
            elif all(isinstance(v, Literal) or v in env for v in item.invars):
                graph.run([item], env)

    def forward(
        self, env: Mapping[Any, Any], factors: Sequence[Any] | None = None
    ) -> tuple[dict[Any, Any], Tape]:
        """Run everything; (the values of all variables, what the vijps need)."""
        env, tape = dict(env), []
        given = iter(factors if factors is not None else [None] * len(self.links))
        for item in self.schedule:
            if not isinstance(item, Link):
                graph.run([item], env)
                continue
            block, rule, _ = item
            operands = [env[v] for v in block.operands]
            made = next(given)
            made = rule.prepare(block, operands) if made is None else made
            x = tuple(env[v] for v in block.inputs)
            y, kept = rule.linearize(block, x, operands)
            env.update(zip(block.outputs, y, strict=True))
            if block.exports:
                env.update(zip(block.exports, block.values(block.exports, x, operands), strict=True))
            tape.append((made, kept))
        return env, tuple(tape)

    def vijp(self, tape: Tape, h: Sequence[Any]) -> tuple[Any, ...]:
        """The outputs' cotangents from the inputs'."""
        cotangents = dict(zip(self.inputs, h, strict=True))
        for (block, rule, _), (factors, kept) in zip(self.links, tape, strict=True):
            arriving = tuple(cotangents[v] for v in block.inputs)
            leaving = rule.vijp(block, factors, kept, arriving)
            cotangents.update(zip(block.outputs, leaving, strict=True))
        return tuple(cotangents[v] for v in self.outputs)

    def alarms(self, tape: Tape) -> list[Alarm]:
        """All alarms for the values on the tape."""
        return [
            replace(alarm, place=f"{alarm.place}\n  {place(block)}")
            for (block, rule, _), (factors, kept) in zip(self.links, tape, strict=True)
            for alarm in rule.alarms(block, factors, kept)
        ]

    def describe(self) -> str:
        """One line per block: rule, types, why it is submersive."""
        return "\n".join(
            f"{rule.name:<16} {describe_types(block.inputs)} -> {describe_types(block.outputs)}"
            f"  {verdict.reason}"
            for block, rule, verdict in self.links
        )


def combined(gains: Iterable[Gain]) -> Gain:
    """The gain of several blocks in a row; diagonal ones count once something mixes."""
    gains = list(gains)
    mixes = any(g.mixes for g in gains)
    factors = [g.factor for g in gains if mixes or math.isinf(g.factor)]
    return Gain(math.prod(factors), mixes)


def build(cut: Graph, fallback: Rule | None = None) -> Chain:
    """Give every block its rule, or raise `NotSubmersiveError` at the first that has none."""
    schedule: list[Link | JaxprEqn] = []
    for item in with_isometries_joined(cut.schedule, cut.cutter):
        if isinstance(item, Block):
            item = Link(item, *choose(item, fallback))
        schedule.append(item)
    _refuse_constant_outputs(cut)
    return Chain(tuple(schedule), cut.inputs, cut.outputs)


def choose(block: Block, fallback: Rule | None = None) -> tuple[Rule, Verdict]:
    """The rule for a block: the first that finds it submersive, else `fallback`, else an error."""
    refusal: Verdict | None = None
    n, n_out = block.sizes
    if any(jnp.issubdtype(v.aval.dtype, jnp.complexfloating) for v in (*block.inputs, *block.outputs)):
        way_out = "compute with real and imaginary parts"
        raise refuse(block, Verdict(None, "its state is complex, not real", way_out))
    for rule in registry.rules_for(block):
        verdict = rule.verdict(block)
        if verdict and n_out <= n:  # a block that expands is not submersive, whatever a rule says
            return rule, verdict
        verdict = _no_rule(block) if verdict else verdict
        refusal = verdict if refusal is None else refusal
    refusal = _no_rule(block) if refusal is None else refusal
    if fallback is not None and refusal.submersive is None:
        verdict = fallback.verdict(block)
        if verdict:
            return fallback, verdict
        refusal = verdict
    raise refuse(block, refusal)


def refuse(block: Block, verdict: Verdict) -> NotSubmersiveError:
    """The error that names the equation, its place, the reason and the way out."""
    eqn = verdict.at or block.eqn
    text = describe_equation(eqn)
    if len(block.eqns) > 1 and verdict.at is None:
        names = list(dict.fromkeys(e.primitive.name for e in block.eqns))
        shown = ", ".join(names[:8]) + (", …" if len(names) > 8 else "")
        text += f"  (of a block of {len(block.eqns)} equations: {shown})"
    return NotSubmersiveError(text, _jax.source_line(eqn), verdict.reason, verdict.way_out)


def describe_equation(eqn: JaxprEqn) -> str:
    """'dot_general: f32[8,3], f32[3,4] -> f32[8,4]'."""
    label = _jax.label(eqn)
    name = f"{eqn.primitive.name} `{label}`" if label else eqn.primitive.name
    return f"{name}: {describe_types(eqn.invars)} -> {describe_types(eqn.outvars)}"


def describe_types(variables: Iterable[Any]) -> str:
    """'f32[8,3], f32[3,4]'."""
    return ", ".join(graph.type_of(v) for v in variables)


def place(block: Block) -> str:
    return f"in {describe_equation(block.eqn)}, at {_jax.source_line(block.eqn)}"


_CUSTOM = "wrap the layer in moonwalk.custom_vijp and give it a rule"
_KRYLOV = "ask for the matrix-free rule: moonwalk.vijp(..., fallback=moonwalk.MatrixFree())"


def _no_rule(block: Block) -> Verdict:
    """The verdict on a block that no rule serves."""
    n, n_out = block.sizes
    primitives = {e.primitive.name for e in block.eqns}
    control = sorted(primitives & {"cond", "while"})
    uses = {v: sum(any(v is u for u in e.invars) for e in block.eqns) for v in block.inputs}
    passing = [v for v in block.outputs if v in block.inputs]
    if passing:
        return Verdict(
            False if n_out > n else None,
            f"the value {graph.type_of(passing[0])} is returned and also used here: its cotangent is a "
            "sum, whose parts no rule takes apart"
            + (" (nor could any: it expands)" if n_out > n else ""),
            f"return it as auxiliary data (has_aux=True); or {_KRYLOV} if the function as a whole is "
            "submersive",
        )
    if n_out > n:
        return Verdict(
            False,
            f"it expands: {n} numbers go in and {n_out} come out, so part of the output's cotangent "
            "leaves no trace in the input's",
            "make the layer's output no larger than its input, or keep this cotangent "
            "instead of recovering it",
        )
    if len(block.eqns) > 1 and any(u > 1 for u in uses.values()):
        fork = max(block.inputs, key=lambda v: uses[v])
        return Verdict(
            None,
            f"the state {graph.type_of(fork)} is used {uses[fork]} times and its uses meet again "
            f"here: their cotangents add up, and a sum such as x + f(x) is not submersive just "
            "because f is",
            f"{_KRYLOV} if the block as a whole is submersive; or {_CUSTOM}; or keep this cotangent "
            "instead of recovering it",
        )
    if control:
        return Verdict(
            None,
            f"`{control[0]}` is opaque to moonwalk: which path runs is not known while tracing",
            _CUSTOM,
        )
    missing = ", ".join(f"`{p}`" for p in sorted(primitives))
    return Verdict(None, f"no vijp rule is registered for {missing}", f"{_CUSTOM}; or {_KRYLOV}")


def _refuse_constant_outputs(cut: Graph) -> None:
    """An output that no derivative reaches: every row of its Jacobian is zero."""
    produced = {v for b in cut.blocks for v in b.outputs} | set(cut.inputs)
    for v in cut.outputs:
        if v in produced or not activity.is_differentiable(v.aval):
            continue
        maker = next((e for e in cut.schedule if isinstance(e, JaxprEqn) and v in e.outvars), None)
        raise NotSubmersiveError(
            describe_equation(maker) if maker is not None else f"the output {graph.type_of(v)}",
            _jax.source_line(maker) if maker is not None else "a value from outside the function",
            "no derivative flows from the inputs to this output: its Jacobian is zero",
            "return it as auxiliary data (has_aux=True); or, if a rounding or a stop_gradient was "
            "meant as straight-through, give it that derivative with jax.custom_jvp",
        )


# A block that may belong to a following isometry.
_COPYING = partition.MOVING | {lax.pad_p}


def with_isometries_joined(
    schedule: Iterable[Block | JaxprEqn], cutter: Cutter
) -> list[Block | JaxprEqn]:
    """Join a convolution declared isometric with the copying step that it needs before it.

    A circular convolution is a wrap-around copy, which repeats entries and so is not submersive,
    followed by a convolution. The declaration refers to both together.
    """
    result: list[Block | JaxprEqn] = []
    for item in schedule:
        if isinstance(item, Block) and is_declared_isometric(item):
            while (
                (before := _feeding(result, item)) is not None
                and all(e.primitive in _COPYING for e in before.eqns)
                and not any(rule.verdict(before) for rule in registry.rules_for(before))
            ):
                result.remove(before)
                item = cutter.join([before, item])
        result.append(item)
    return result


def is_declared_isometric(block: Block) -> bool:
    """Whether a block is a convolution (after copying steps) whose kernel is declared isometric."""
    if not block.outputs:
        return False
    eqn = block.eqn
    if eqn.primitive is not lax.conv_general_dilated_p or not all(
        e is eqn or e.primitive in _COPYING for e in block.eqns
    ):
        return False
    declaration = block.declaration(eqn.invars[1])
    out, inp, *_ = eqn.params["dimension_numbers"].rhs_spec
    return declaration is not None and declaration.of_kernel(inp, out) == "isometric"


def _feeding(result: Sequence[Block | JaxprEqn], block: Block) -> Block | None:
    """The block whose outputs are all that `block` takes in, if nothing in between reads them."""
    for item in reversed(result):
        if isinstance(item, Block):
            return item if item.outputs == block.inputs and not item.exports else None
        if any(v in block.inputs for v in item.invars if not isinstance(v, Literal)):
            return None
    return None
