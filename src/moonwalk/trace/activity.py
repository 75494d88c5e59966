"""Which variables a derivative flows through: exactly those that JAX finds.

A path of equations from the state to an output is not enough. A loop may hand on a carry that no
derivative enters; a custom derivative may ignore an argument, as implicit differentiation ignores the
solver's starting point. JAX sees this because the tangent or cotangent there is a symbolic zero. If it
were an array of zeros, functions that must not be differentiated would refuse it, and all others would
spend time on it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .. import _jax
from .._jax import JaxprEqn, Literal
from . import fingerprint

# Pointwise primitives whose derivative is zero wherever it exists.
_FLAT: frozenset[Any] = frozenset(
    {lax.stop_gradient_p, lax.sign_p, lax.floor_p, lax.ceil_p, lax.round_p, lax.nextafter_p}
)


def is_differentiable(aval: Any) -> bool:
    """Whether a variable of this type can have a cotangent."""
    return jnp.issubdtype(aval.dtype, jnp.inexact)


def active_variables(eqns: Sequence[JaxprEqn], state: Iterable[Any], outputs: Iterable[Any]) -> set[Any]:
    """Variables on a differentiable path from the state to the outputs."""
    state = {v for v in state if is_differentiable(v.aval)}
    tangents = _with_tangents(eqns, state)
    wanted = {v for v in outputs if not isinstance(v, Literal)}
    reads: list[list[bool]] = []  # for each equation, from the last: which inputs get a cotangent
    known: Known = {}
    for eqn in reversed(eqns):
        arriving = [v in wanted and v in tangents for v in eqn.outvars]
        entering = [not isinstance(v, Literal) and v in tangents for v in eqn.invars]
        reads.append(_cotangents(eqn, entering, arriving, known))
        wanted.update(v for v, read in zip(eqn.invars, reads[-1], strict=True) if read)
    # A custom derivative may be zero. Its outputs are then as constant as those that no tangent enters.
    reached = set(state)
    for eqn, read in zip(eqns, reversed(reads), strict=True):
        if any(r and v in reached for v, r in zip(eqn.invars, read, strict=True)):
            reached.update(v for v in eqn.outvars if v in tangents)
    return reached & wanted


def _with_tangents(eqns: Iterable[JaxprEqn], state: Iterable[Any]) -> set[Any]:
    """Variables whose tangent is not a symbolic zero, given that those of the state are not."""
    found = set(state)
    for eqn in eqns:
        entering = [not isinstance(v, Literal) and v in found for v in eqn.invars]
        found.update(v for v, t in zip(eqn.outvars, _tangents(eqn, entering), strict=True) if t)
    return found


def _tangents(eqn: JaxprEqn, entering: Sequence[bool]) -> list[bool]:
    """Which outputs of an equation have a tangent, where these inputs have one."""
    can = [is_differentiable(v.aval) for v in eqn.outvars]
    if eqn.primitive in _FLAT or not any(entering):
        return [False] * len(can)
    loop = _Loop.of(eqn)
    if loop is not None:
        _, found = loop.tangents(entering)
    elif eqn.primitive is lax.cond_p:
        branches = [_jaxpr_tangents(b, entering[1:]) for b in eqn.params["branches"]]
        found = [any(of) for of in zip(*branches, strict=True)]
    elif eqn.primitive in _jax.CALLS:
        found = _jaxpr_tangents(_jax.called_jaxpr(eqn)[0], entering)
    else:
        found = can
    return [f and c for f, c in zip(found, can, strict=True)]


# Answers found by tracing, by call.
Known = dict[Hashable, list[bool]]


def _cotangents(
    eqn: JaxprEqn, entering: Sequence[bool], arriving: Sequence[bool], known: Known
) -> list[bool]:
    """Which inputs get a cotangent, where these inputs have tangents and these outputs cotangents."""
    if not any(entering) or not any(arriving):
        return [False] * len(entering)
    loop = _Loop.of(eqn)
    if loop is not None:
        found, _ = loop.cotangents(entering, arriving)
    elif eqn.primitive is lax.cond_p:
        branches = [_jaxpr_cotangents(b, entering[1:], arriving) for b in eqn.params["branches"]]
        found = [False, *(any(of) for of in zip(*branches, strict=True))]
    elif eqn.primitive in _jax.CALLS:
        found = _jaxpr_cotangents(_jax.called_jaxpr(eqn)[0], entering, arriving)
    elif eqn.primitive.name == "custom_vijp_call":
        found = (
            entering  # its author's rules are for the whole state, though half of a coupling passes by
        )
    elif len(eqn.outvars) > 1 or eqn.primitive in (_jax.custom_jvp_call_p, _jax.custom_vjp_call_p):
        operands = dict.fromkeys(v for v in eqn.invars if not isinstance(v, Literal))
        program = fingerprint.of_equations([eqn], {v: i for i, v in enumerate(operands)})
        key = (program, tuple(entering), tuple(arriving))
        if key not in known:
            known[key] = _cotangents_by_tracing(eqn, entering, arriving)
        found = known[key]
    else:
        found = entering
    return [f and e for f, e in zip(found, entering, strict=True)]


def _jaxpr_tangents(jaxpr: Any, entering: Sequence[bool]) -> list[bool]:
    jaxpr, _ = _jax.open_jaxpr(jaxpr)
    found = _with_tangents(jaxpr.eqns, itertools.compress(jaxpr.invars, entering))
    return [not isinstance(v, Literal) and v in found for v in jaxpr.outvars]


def _jaxpr_cotangents(jaxpr: Any, entering: Sequence[bool], arriving: Sequence[bool]) -> list[bool]:
    jaxpr, _ = _jax.open_jaxpr(jaxpr)
    state = itertools.compress(jaxpr.invars, entering)
    active = active_variables(jaxpr.eqns, state, itertools.compress(jaxpr.outvars, arriving))
    return [v in active for v in jaxpr.invars]


class _Loop:
    """A scan or a while loop: constants, then carries, then what is scanned over; carries, then ys."""

    def __init__(self, body: Any, skipped: int, consts: int, carry: int):
        """`skipped`: inputs in front that the body does not read (those of a while loop's condition)."""
        self.body, self.skipped, self.consts, self.carry = body, skipped, consts, carry

    @classmethod
    def of(cls, eqn: JaxprEqn) -> _Loop | None:
        """The loop that an equation is, if it is one."""
        params = eqn.params
        if eqn.primitive is lax.scan_p:
            return cls(params["jaxpr"], 0, *_jax.scan_counts(eqn))
        if eqn.primitive is lax.while_p:
            consts = params["cond_nconsts"] + params["body_nconsts"]
            return cls(
                params["body_jaxpr"],
                params["cond_nconsts"],
                params["body_nconsts"],
                len(eqn.invars) - consts,
            )
        return None

    def tangents(self, entering: Sequence[bool]) -> tuple[list[bool], list[bool]]:
        """(the body's inputs that have a tangent in some iteration, the outputs that then have one)."""
        inside = list(entering[self.skipped :])
        carries = slice(self.consts, self.consts + self.carry)
        while True:
            found = _jaxpr_tangents(self.body, inside)
            more = [a or b for a, b in zip(inside[carries], found[: self.carry], strict=True)]
            if more == inside[carries]:
                return inside, [*more, *found[self.carry :]]
            inside[carries] = more

    def cotangents(
        self, entering: Sequence[bool], arriving: Sequence[bool]
    ) -> tuple[list[bool], list[bool]]:
        """(the inputs that get a cotangent, the body's outputs that get one in some iteration)."""
        inside, _ = self.tangents(entering)
        leaving = list(arriving)
        while True:
            found = _jaxpr_cotangents(self.body, inside, leaving)
            carries = found[self.consts : self.consts + self.carry]
            more = [a or b for a, b in zip(leaving[: self.carry], carries, strict=True)]
            if more == leaving[: self.carry]:
                # A loop without iterations returns its initial carry.
                found[self.consts : self.consts + self.carry] = more
                return [False] * self.skipped + found, leaving
            leaving[: self.carry] = more


def _cotangents_by_tracing(
    eqn: JaxprEqn, entering: Sequence[bool], arriving: Sequence[bool]
) -> list[bool]:
    """Which inputs JAX's own pullback hands a cotangent.

    If a rule returns an array of zeros, what precedes it is still differentiated, and a backward pass
    there may turn the zeros into something else. A symbolic zero ends differentiation.
    """
    places = [i for i, e in enumerate(entering) if e]
    others = [i for i, v in enumerate(eqn.invars) if i not in places and not isinstance(v, Literal)]
    reached: set[int] = set()

    def pull(x: Sequence[Any], rest: Sequence[Any], h: Sequence[Any]) -> Any:
        def run(*x: Any) -> list[Any]:
            values = [v.val if isinstance(v, Literal) else None for v in eqn.invars]
            for i, a in (*zip(places, x, strict=True), *zip(others, rest, strict=True)):
                values[i] = a
            for i in places:
                values[i] = _noticing(values[i], i, reached)
            return list(itertools.compress(_jax.bind(eqn, values), arriving))

        return jax.vjp(run, *x)[1](list(h))

    types = [[_jax.struct(eqn.invars[i].aval) for i in at] for at in (places, others)]
    h = [_jax.struct(v.aval) for v in itertools.compress(eqn.outvars, arriving)]
    try:
        jax.eval_shape(pull, *types, h)
    except Exception:  # it cannot be differentiated; JAX reports that when the gradient is computed
        return list(entering)
    return [i in reached for i in range(len(entering))]


def _noticing(x: Any, place: int, reached: set[int]) -> Any:
    """The identity, noting its place if a cotangent arrives: JAX calls no rule for symbolic zeros."""
    identity = jax.custom_vjp(lambda x: x)

    def backward(_: Any, h: Any) -> tuple[Any]:
        reached.add(place)
        return (h,)

    identity.defvjp(lambda x: (x, None), backward)
    return identity(x)


# --- derivatives that ask what is differentiated ----------------------------------------------------


def settled(jaxpr: Any, consts: Sequence[Any], state: int, outputs: int) -> tuple[Any, Sequence[Any]]:
    """The jaxpr with custom derivatives that no longer ask which of their inputs are differentiated.

    With `symbolic_zeros=True` a rule is told which tangents and cotangents are zero, and may act on it:
    in Equinox's loops, a result has no derivative if nothing that it depends on has one. The engine
    differentiates block by block, with respect to some inputs in one phase and others in the next, so
    what a rule is told is settled here, as JAX would find it for the whole function.

    `state`, `outputs`: how many of the first inputs, and of the first outputs, are differentiated.
    """
    if not _any_asks(jaxpr):
        return jaxpr, consts
    entering = [i < state and is_differentiable(v.aval) for i, v in enumerate(jaxpr.invars)]
    arriving = [i < outputs for i in range(len(jaxpr.outvars))]
    return _jax.open_jaxpr(_settled_jaxpr(jaxpr, consts, entering, arriving))


def _asks(eqn: JaxprEqn) -> bool:
    custom = eqn.primitive in (_jax.custom_jvp_call_p, _jax.custom_vjp_call_p)
    return custom and bool(eqn.params.get("symbolic_zeros"))


def _any_asks(jaxpr: Any) -> bool:
    custom = (_jax.custom_jvp_call_p, _jax.custom_vjp_call_p)
    return any(
        _asks(e) or (e.primitive not in custom and any(map(_any_asks, _jax.inner_jaxprs(e))))
        for e in jaxpr.eqns
    )


def _settled_jaxpr(
    jaxpr: Any, consts: Sequence[Any], entering: Sequence[bool], arriving: Sequence[bool]
) -> Any:
    """A closed jaxpr, where these inputs have tangents and these outputs cotangents."""
    run = _settled_function(jaxpr, consts, entering, arriving)
    return jax.make_jaxpr(run)(*(_jax.struct(v.aval) for v in jaxpr.invars))


def _settled_function(
    jaxpr: Any, consts: Sequence[Any], entering: Sequence[bool], arriving: Sequence[bool]
) -> Callable[..., list[Any]]:
    tangents = _with_tangents(jaxpr.eqns, itertools.compress(jaxpr.invars, entering))
    wanted = {v for v in itertools.compress(jaxpr.outvars, arriving) if not isinstance(v, Literal)}
    flags: list[tuple[list[bool], list[bool]]] = []  # of each equation, from the last
    for eqn in reversed(jaxpr.eqns):
        leaving = [v in wanted and v in tangents for v in eqn.outvars]
        inside = [not isinstance(v, Literal) and v in tangents for v in eqn.invars]
        flags.append((inside, leaving))
        read = _cotangents(eqn, inside, leaving, {})
        wanted.update(v for v, r in zip(eqn.invars, read, strict=True) if r)

    def run(*args: Any) -> list[Any]:
        env = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))

        def read(atom: Any) -> Any:
            return atom.val if isinstance(atom, Literal) else env[atom]

        for eqn, (inside, leaving) in zip(jaxpr.eqns, reversed(flags), strict=True):
            values = _bind_settled(eqn, [read(v) for v in eqn.invars], inside, leaving)
            env.update(zip(eqn.outvars, values, strict=True))
        return [read(v) for v in jaxpr.outvars]

    return run


def _bind_settled(
    eqn: JaxprEqn, values: Sequence[Any], entering: Sequence[bool], arriving: Sequence[bool]
) -> Sequence[Any]:
    if not any(entering) or not any(arriving):
        return _jax.bind(eqn, values)
    if _asks(eqn):
        with _jax.source_context(eqn), eqn.ctx.manager:
            return _settled_rule(eqn, entering, arriving)(*values)
    if not any(map(_any_asks, _jax.inner_jaxprs(eqn))):
        return _jax.bind(eqn, values)
    loop = _Loop.of(eqn)
    if loop is not None:
        inside, _ = loop.tangents(entering)
        _, leaving = loop.cotangents(entering, arriving)
        name = "jaxpr" if eqn.primitive is lax.scan_p else "body_jaxpr"
        body = _settled_jaxpr(*_jax.open_jaxpr(loop.body), inside, leaving)
        eqn = eqn.replace(params={**eqn.params, name: body})
    elif eqn.primitive is lax.cond_p:
        branches = eqn.params["branches"]
        branches = [_settled_jaxpr(*_jax.open_jaxpr(b), entering[1:], arriving) for b in branches]
        eqn = eqn.replace(params={**eqn.params, "branches": tuple(branches)})
    elif eqn.primitive in _jax.CALLS:
        run = _settled_function(*_jax.called_jaxpr(eqn), entering, arriving)
        with _jax.source_context(eqn), eqn.ctx.manager:
            return _jax.checkpointed_as(eqn, run)(*values)
    return _jax.bind(eqn, values)


def _settled_rule(eqn: JaxprEqn, entering: Sequence[bool], arriving: Sequence[bool]) -> Any:
    """A function with the equation's derivative for just these inputs and outputs."""
    places = [i for i, e in enumerate(entering) if e]

    def over(values: Sequence[Any]) -> Any:
        def run(*x: Any) -> list[Any]:
            full = list(values)
            for i, a in zip(places, x, strict=True):
                full[i] = a
            return _jax.bind(eqn, full)

        return run

    if eqn.primitive is _jax.custom_jvp_call_p:
        by_jvp = jax.custom_jvp(lambda *values: _jax.bind(eqn, values))

        @by_jvp.defjvp
        def _(values: Any, tangents: Any) -> Any:
            x, t = ([of[i] for i in places] for of in (values, tangents))
            return jax.jvp(over(values), x, t)

        return by_jvp

    by_vjp = jax.custom_vjp(lambda *values: _jax.bind(eqn, values))

    def forward(*values: Any) -> Any:
        def run(*x: Any) -> Any:
            out = over(values)(*x)
            return list(itertools.compress(out, arriving)), out

        _, pullback, out = jax.vjp(run, *(values[i] for i in places), has_aux=True)
        return out, pullback

    def backward(pullback: Any, h: Any) -> Any:
        found = dict(zip(places, pullback(list(itertools.compress(h, arriving))), strict=True))
        return tuple(found.get(i) for i in range(len(entering)))

    by_vjp.defvjp(forward, backward)
    return by_vjp
