"""Which variables a derivative flows through: as JAX finds them, not more.

A path of equations from the state to an output is not enough. A loop may hand on a carry that no
derivative enters; a custom derivative may ignore an argument, as implicit differentiation ignores where
the solver started. JAX sees this because the tangent or cotangent there is a symbolic zero. An array of
zeros in its place would be refused by what must not be differentiated, and cost time everywhere else.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from . import compat
from .compat import JaxprEqn, Literal

# Pointwise primitives whose derivative is zero wherever it exists.
_FLAT: frozenset[Any] = frozenset(
    {lax.stop_gradient_p, lax.sign_p, lax.floor_p, lax.ceil_p, lax.round_p, lax.nextafter_p}
)


def is_differentiable(aval: Any) -> bool:
    """Whether a variable of this type can carry a cotangent."""
    return jnp.issubdtype(aval.dtype, jnp.inexact)


def active_variables(eqns: Sequence[JaxprEqn], state: Iterable[Any], outputs: Iterable[Any]) -> set[Any]:
    """Variables on a differentiable path from the state to the outputs."""
    state = {v for v in state if is_differentiable(v.aval)}
    tangents = _with_tangents(eqns, state)
    wanted = {v for v in outputs if not isinstance(v, Literal)}
    reads: list[list[bool]] = []  # of each equation, from the last: the inputs that get a cotangent
    for eqn in reversed(eqns):
        arriving = [v in wanted and v in tangents for v in eqn.outvars]
        entering = [not isinstance(v, Literal) and v in tangents for v in eqn.invars]
        reads.append(_cotangents(eqn, entering, arriving))
        wanted.update(v for v, read in zip(eqn.invars, reads[-1], strict=True) if read)
    # A custom derivative may be zero: what it hands on is then as constant as what no tangent enters.
    reached = set(state)
    for eqn, read in zip(eqns, reversed(reads), strict=True):
        if any(r and v in reached for v, r in zip(eqn.invars, read, strict=True)):
            reached.update(v for v in eqn.outvars if v in tangents)
    return reached & wanted


def _with_tangents(eqns: Iterable[JaxprEqn], state: Iterable[Any]) -> set[Any]:
    """Variables whose tangent is no symbolic zero, if those of the state are none."""
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
        found = loop.tangents(entering)
    elif eqn.primitive is lax.cond_p:
        branches = [_jaxpr_tangents(b, entering[1:]) for b in eqn.params["branches"]]
        found = [any(of) for of in zip(*branches, strict=True)]
    elif eqn.primitive in compat.CALLS:
        found = _jaxpr_tangents(compat.called_jaxpr(eqn)[0], entering)
    else:
        found = can
    return [f and c for f, c in zip(found, can, strict=True)]


def _cotangents(eqn: JaxprEqn, entering: Sequence[bool], arriving: Sequence[bool]) -> list[bool]:
    """Which inputs get a cotangent, where these inputs have tangents and these outputs cotangents."""
    if not any(entering) or not any(arriving):
        return [False] * len(entering)
    loop = _Loop.of(eqn)
    if loop is not None:
        found = loop.cotangents(entering, arriving)
    elif eqn.primitive is lax.cond_p:
        branches = [_jaxpr_cotangents(b, entering[1:], arriving) for b in eqn.params["branches"]]
        found = [False, *(any(of) for of in zip(*branches, strict=True))]
    elif eqn.primitive in compat.CALLS:
        found = _jaxpr_cotangents(compat.called_jaxpr(eqn)[0], entering, arriving)
    elif len(eqn.outvars) > 1 or eqn.primitive in (compat.custom_jvp_call_p, compat.custom_vjp_call_p):
        found = _cotangents_by_tracing(eqn, entering, arriving)
    else:
        found = entering
    return [f and e for f, e in zip(found, entering, strict=True)]


def _jaxpr_tangents(jaxpr: Any, entering: Sequence[bool]) -> list[bool]:
    jaxpr, _ = compat.open_jaxpr(jaxpr)
    found = _with_tangents(jaxpr.eqns, itertools.compress(jaxpr.invars, entering))
    return [not isinstance(v, Literal) and v in found for v in jaxpr.outvars]


def _jaxpr_cotangents(jaxpr: Any, entering: Sequence[bool], arriving: Sequence[bool]) -> list[bool]:
    jaxpr, _ = compat.open_jaxpr(jaxpr)
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
            return cls(params["jaxpr"], 0, *compat.scan_counts(eqn))
        if eqn.primitive is lax.while_p:
            consts = params["cond_nconsts"] + params["body_nconsts"]
            return cls(
                params["body_jaxpr"],
                params["cond_nconsts"],
                params["body_nconsts"],
                len(eqn.invars) - consts,
            )
        return None

    def tangents(self, entering: Sequence[bool]) -> list[bool]:
        """Of the outputs."""
        _, found = self._around(entering)
        return found

    def cotangents(self, entering: Sequence[bool], arriving: Sequence[bool]) -> list[bool]:
        """Of the inputs."""
        inside, _ = self._around(entering)
        carries, ys = list(arriving[: self.carry]), list(arriving[self.carry :])
        while True:
            found = _jaxpr_cotangents(self.body, inside, [*carries, *ys])
            more = [a or b for a, b in zip(carries, found[self.consts :][: self.carry], strict=True)]
            if more == carries:
                # A carry that is not changed passes its cotangent on.
                found[self.consts : self.consts + self.carry] = carries
                return [False] * self.skipped + found
            carries = more

    def _around(self, entering: Sequence[bool]) -> tuple[list[bool], list[bool]]:
        """(the body's inputs that have a tangent in some turn, the outputs that then have one)."""
        inside = list(entering[self.skipped :])
        carries = slice(self.consts, self.consts + self.carry)
        while True:
            found = _jaxpr_tangents(self.body, inside)
            more = [a or b for a, b in zip(inside[carries], found[: self.carry], strict=True)]
            if more == inside[carries]:
                return inside, [*more, *found[self.carry :]]
            inside[carries] = more


def _cotangents_by_tracing(
    eqn: JaxprEqn, entering: Sequence[bool], arriving: Sequence[bool]
) -> list[bool]:
    """What JAX's own pullback returns something else than zeros for."""
    places = [i for i, e in enumerate(entering) if e]
    others = [i for i, v in enumerate(eqn.invars) if i not in places and not isinstance(v, Literal)]

    def pull(x: Sequence[Any], rest: Sequence[Any], h: Sequence[Any]) -> Any:
        def run(*x: Any) -> list[Any]:
            values = [v.val if isinstance(v, Literal) else None for v in eqn.invars]
            for i, a in (*zip(places, x, strict=True), *zip(others, rest, strict=True)):
                values[i] = a
            return list(itertools.compress(compat.bind(eqn, values), arriving))

        return jax.vjp(run, *x)[1](list(h))

    types = [[compat.struct(eqn.invars[i].aval) for i in at] for at in (places, others)]
    h = [compat.struct(v.aval) for v in itertools.compress(eqn.outvars, arriving)]
    try:
        jaxpr, consts = compat.open_jaxpr(jax.make_jaxpr(pull)(*types, h))
    except Exception:  # it cannot be differentiated: JAX says so where the gradient is computed
        return list(entering)
    known = dict(zip(jaxpr.constvars, consts, strict=True))
    made = {v: e for e in jaxpr.eqns for v in e.outvars}

    def is_zero(atom: Any) -> bool:
        if isinstance(atom, Literal):
            return not np.any(atom.val)
        if atom in known:
            value = compat.concrete(known[atom])
            return value is not None and not np.any(value)
        source = made.get(atom)
        keeps_zero = {lax.broadcast_in_dim_p, lax.convert_element_type_p, *compat.SAME_VALUES}
        return source is not None and source.primitive in keeps_zero and is_zero(source.invars[0])

    found = list(entering)
    for i, atom in zip(places, jaxpr.outvars, strict=True):
        found[i] = not is_zero(atom)
    return found
