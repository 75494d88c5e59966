"""Functions with a derivative of their own.

A `custom_jvp`/`custom_vjp` function that is not pointwise is also differentiated by its own rule: its
Jacobian is the linear program t ↦ J t that the rule defines. That program is traced, cut into blocks and
solved like any other function; being linear, it has the same Jacobian everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from .. import _jax
from .._jax import Literal
from ..errors import NotSubmersiveError
from ..trace import graph, staging
from ..trace.graph import Block
from ..trace.linearity import is_linear
from . import chain
from .chain import Chain, combined
from .registry import Alarm, Gain, Rule, State, Verdict, register_vijp


class Tangents(NamedTuple):
    """The program t ↦ J t: its inputs are (t, x, operands)."""

    jaxpr: Any
    consts: tuple[Any, ...]
    chain: Chain


def _tangents(block: Block) -> Tangents | Verdict:
    return block.once(_trace_tangents)


def _trace_tangents(block: Block) -> Tangents | Verdict:
    x, operands = block.structs()
    k = len(x)
    outputs = tuple(graph.struct(v) for v in block.outputs)
    backward = block.eqn.primitive is _jax.custom_vjp_call_p

    def forward_program(*args: Any) -> Any:
        t, x, operands = args[:k], args[k : 2 * k], args[2 * k :]
        return jax.jvp(lambda *x: block(x, operands), x, t)[1]

    def transposed_program(*args: Any) -> Any:
        t, x, operands = args[:k], args[k : 2 * k], args[2 * k :]
        _, pullback = jax.vjp(lambda *x: block(x, operands), *x)
        (result,) = jax.linear_transpose(pullback, outputs)(tuple(t))
        return result

    flat = [*x, *x, *operands]
    try:
        program = jax.make_jaxpr(transposed_program if backward else forward_program)(*flat)
    except Exception as error:  # JAX raises various exceptions for what it cannot transpose
        return Verdict(
            None,
            f"its own derivative cannot be read as a linear map ({type(error).__name__})",
            "wrap the function in moonwalk.custom_vijp and give it a rule",
        )
    jaxpr, consts = staging.flatten_calls(program, flat, derivative=True)
    if backward and not _has_linear_backward(block):
        return Verdict(
            None,
            "its backward rule is not linear in the cotangent",
            "wrap the function in moonwalk.custom_vijp and give it a rule",
        )
    outs = [v for v in jaxpr.outvars if not isinstance(v, Literal)]
    if len(set(outs)) < len(jaxpr.outvars):
        return Verdict(False, "two of its outputs have equal derivatives, or one has none", "drop one")
    known = dict(zip(jaxpr.constvars, consts, strict=True))
    declarations = {
        v: block.declarations[o]
        for v, o in zip(jaxpr.invars[2 * k :], block.operands, strict=True)
        if o in block.declarations
    }
    try:
        cut = graph.build(
            jaxpr, jaxpr.invars[:k], jaxpr.outvars, consts=known, declarations=declarations
        )
        return Tangents(jaxpr, tuple(consts), chain.build(cut))
    except NotSubmersiveError as error:
        return Verdict(None, f"in its own derivative, {error.equation}: {error.reason}", error.way_out)


def _has_linear_backward(block: Block) -> bool:
    x, operands = block.structs()
    outputs = [graph.struct(v) for v in block.outputs]
    k, n = len(x), len(outputs)

    def backward(*args: Any) -> Any:
        ct, x, operands = args[:n], args[n : n + k], args[n + k :]
        return jax.vjp(lambda *x: block(x, operands), *x)[1](tuple(ct))

    flat = [*outputs, *x, *operands]
    jaxpr, _ = staging.flatten_calls(jax.make_jaxpr(backward)(*flat), flat, derivative=True)
    return is_linear(jaxpr.eqns, jaxpr.invars[:n], jaxpr.outvars)


@register_vijp(_jax.custom_jvp_call_p, _jax.custom_vjp_call_p)
class OwnDerivative(Rule):
    """The vijp of the linear program that the function's own rule defines."""

    name = "own derivative"
    keeps_pullback = False

    def verdict(self, block: Block) -> Verdict:
        tangents = _tangents(block)
        if isinstance(tangents, Verdict):
            return tangents
        return Verdict(True, f"by its own derivative, {len(tangents.chain.links)} blocks")

    def linearize(self, block: Block, x: State, operands: Sequence[Any]) -> tuple[State, Any]:
        tangents = _checked(block)
        t = [_jax.full(v.aval, 0.0) for v in block.inputs]
        env = dict(zip(tangents.jaxpr.constvars, tangents.consts, strict=True))
        env.update(zip(tangents.jaxpr.invars, [*t, *x, *operands], strict=True))
        _, tape = tangents.chain.forward(env)
        return block(x, operands), tape

    def vijp(self, block: Block, factors: Any, kept: Any, h: State) -> State:
        return _checked(block).chain.vijp(kept, h)

    def alarms(self, block: Block, factors: Any, kept: Any) -> list[Alarm]:
        return _checked(block).chain.alarms(kept)

    def gain(self, block: Block, operands: Sequence[Any] | None = None) -> Gain:
        return combined([link.rule.gain(link.block) for link in _checked(block).chain.links])


def _checked(block: Block) -> Tangents:
    tangents = _tangents(block)
    assert isinstance(tangents, Tangents), tangents
    return tangents
