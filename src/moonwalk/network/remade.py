"""Values of the data prologue that each stretch makes again, and does not keep since the prologue."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from jax import lax

from .. import _jax
from .._jax import JaxprEqn, Literal
from ..trace.partition import MOVING, POINTWISE

if TYPE_CHECKING:
    from .cutting import Network


# Random bits take arithmetic, but no memory: a stretch that runs again draws them again from their key.
_BITS = _jax.lax_primitives("bitcast_convert_type shift_left shift_right_arithmetic shift_right_logical")
_CHEAP = POINTWISE | MOVING | _jax.DRAWING | _BITS | {lax.iota_p}
_MOST_STEPS = 32  # longer chains are worth computing only once


def cheap_steps(network: Network, variables: Iterable[Any]) -> list[JaxprEqn]:
    """Steps of the data prologue that cheaply compute these variables from something smaller, in order.

    A mask computed from indices, or one-hot labels, is as large as an activation but made from next to
    nothing. The steps of a variable are the one that makes it and those that make inputs of the same
    size.
    """
    if "data makers" not in network.memory:
        network.memory["data makers"] = {v: e for e in network.data_prologue for v in e.outvars}
    makers = network.memory["data makers"]
    found: dict[int, JaxprEqn] = {}
    for v in variables:
        found.update(_steps_to(v, makers))
    # In the order in which they are read, not in that of the program, in which stretches that compute
    # the same may differ: there the later ones find some steps already taken by the first.
    done: dict[int, JaxprEqn] = {}
    pending = [makers[v] for v in reversed(list(variables)) if v in makers and id(makers[v]) in found]
    while pending:
        eqn = pending.pop()
        reads = [makers[v] for v in eqn.invars if not isinstance(v, Literal) and v in makers]
        missing = [e for e in reads if id(e) in found and id(e) not in done]
        if missing:
            pending += [eqn, *reversed(missing)]
        else:
            done[id(eqn)] = eqn
    return list(done.values())


def is_drawn(network: Network, v: Any) -> bool:
    """Whether making a value of the data prologue again would draw random bits again.

    A compiler does not do that by itself: between a forward pass and a pullback it keeps the value.
    """
    return any(e.primitive in _jax.DRAWING for e in cheap_steps(network, [v]))


def _steps_to(v: Any, makers: Mapping[Any, JaxprEqn]) -> dict[int, JaxprEqn]:
    steps: dict[int, JaxprEqn] = {}
    leaves: set[Any] = set()
    pending = [v]
    while pending:
        u = pending.pop()
        if u is not v and u.aval.size != v.aval.size:
            leaves.add(u)
            continue
        eqn = makers.get(u)
        if eqn is None or eqn.primitive not in _CHEAP or len(steps) == _MOST_STEPS:
            return {}
        if id(eqn) not in steps:
            steps[id(eqn)] = eqn
            pending += [a for a in eqn.invars if not isinstance(a, Literal)]
    return steps if v.aval.size > max(1, sum(u.aval.size for u in leaves)) else {}
