"""Normalisations: entries that are transformed one by one, given a few statistics of them all.

LayerNorm, RMSNorm, GroupNorm, BatchNorm in training, mean subtraction and log-softmax are of the form

    y = f(x, s(x)),        f pointwise in x (and moving entries, at most), s(x) a few numbers per group.

Their Jacobian is diagonal up to a term of low rank in every group. So the input's cotangent loses at
most what the statistics see of the output's:

    a = h' ∂f/∂s                    the fragment: as many numbers as there are statistics
    h = D h' + a ∂s/∂x              D = ∂f/∂x, the statistics held fixed
    ⇒  h' = (h - a ∂s/∂x) / D

a is kept exactly, so an error in h enters h' divided by D, and in no other way. If D depends on x only
through the statistics (1/σ), that is as well conditioned as possible. If D depends on x itself, it may
be arbitrarily small, and nothing is promised.

No normalisation is known by name. A block is *cut*: going back from its output, the first values that
are clearly smaller than the state are the statistics; f is what lies after them, s what lies before, and
all derivatives are JAX's own. f must lead every entry of x to one entry of y. Moves of entries (into
groups, say) are followed, and values of x that meet must have undergone the same moves: x + xᵀ is
refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.tree_util import Partial

from .. import _jax
from .._jax import JaxprEqn, Literal
from ..errors import SingularError
from ..trace import graph, staging
from ..trace.activity import active_variables
from ..trace.graph import Block
from ..trace.linearity import is_linear
from ..trace.partition import POINTWISE
from .elementwise import needed_for
from .fragments import FragmentRule, Place
from .registry import (
    Alarm,
    Gain,
    Rule,
    State,
    Verdict,
    cast_like_outputs,
    pull_back_ones,
    register_region,
)

_KEEP = (
    "moonwalk.value_and_grad keeps those numbers; for a vijp, leave the normalisation out, or keep "
    "this cotangent instead of recovering it"
)


@register_region
class Statistics(Rule):
    """Matches normalisations, which it serves only with a fragment."""

    name = "statistics"

    def matches(self, block: Block) -> bool:
        cut = find_cut(block)
        return cut is not None and all(v.aval.size for v in cut.statistics)

    def verdict(self, block: Block) -> Verdict:
        if _is_low_rank_update(block):
            return Verdict(
                None,
                "it is a diagonal map plus one of low rank (like I - 2vvᵀ/vᵀv): whether that can be "
                "inverted is for its weights to say, and no rule does",
                "apply it as one matrix, x @ w, and declare that (moonwalk.declare(w, 'orthogonal') for "
                "a Householder reflection), give the layer a rule with moonwalk.custom_vijp, or pass "
                "fallback=moonwalk.MatrixFree()",
            )
        # Not False: with an epsilon under its root, an RMSNorm loses almost all of a number, but not
        # all.
        lost = f"{describe(block)} of its output's cotangent: those come back only added to the others"
        return Verdict(None, lost, _KEEP)

    def fragmented(self, block: Block, ask: Any) -> Iterator[Any]:
        del ask
        yield Normalisation()


@dataclass(frozen=True)
class Normalisation(FragmentRule):
    """Keeps what the statistics see of the output's cotangent."""

    name = "normalisation"

    def describe(self, block: Block) -> str:
        return describe(block)

    def linearize(self, block: Block, x: State, operands: Sequence[Any]) -> tuple[State, Any]:
        cut = _checked(block)

        def statistics(*x: Any) -> Any:
            return cut.statistics_at(block, x, operands)

        s, pull_s, others = jax.vjp(statistics, *x, has_aux=True)

        def entries(x: Any, s: Any) -> State:
            return cut.outputs_at(block, x, s, others, operands)

        y, pull_f = jax.vjp(entries, tuple(x), s)
        return y, Partial(_pull_back, pull_f, pull_s)

    def fragment(self, block: Block, factors: Any, kept: Any, h: State, place: Place) -> Any:
        del block, factors, place
        pull_f, _ = kept.args
        _, a = pull_f(tuple(h))
        return a

    def restore(
        self, block: Block, factors: Any, kept: Any, fragment: Any, h: State, place: Place
    ) -> State:
        del factors, place
        pull_f, pull_s = kept.args
        (d,), _ = pull_back_ones(block, pull_f)
        (seen,) = pull_s(tuple(fragment))
        wide = _jax.working_dtype(d.dtype)
        solved = (h[0].astype(wide) - seen.astype(wide)) / d.astype(wide)
        for eqn in _checked(block).moves:
            (solved,) = _jax.bind(eqn, [solved])
        return cast_like_outputs(block, (solved,))

    def gain(self, block: Block, operands: Sequence[Any] | None = None) -> Gain:
        diagonal = block.once(_diagonal)
        if diagonal.reads_x:
            return Gain.unknown()
        # It mixes, because subtracting what the statistics saw spreads rounding evenly over a group. No
        # weight tells how far groups differ (σ from channel to channel), so its gain is assumed.
        factor = 1.0
        known = None if operands is None else diagonal.known(operands)
        if diagonal.operands and known is not None:
            d = diagonal.at_ones(known)
            with np.errstate(all="ignore"):
                factor = float(np.sqrt(np.mean(d**2) * np.mean(d**-2.0)))
        return Gain(factor, mixes=True, assumed=True)

    def weight_alarms(self, block: Block, operands: Sequence[Any]) -> list[Alarm]:
        diagonal = block.once(_diagonal)
        known = diagonal.known(operands)
        if diagonal.reads_x or not diagonal.operands or known is None:
            return []
        d = diagonal.at_ones(known)
        named = [v for v in (block.operands[i] for i in diagonal.operands) if v in block.names]
        weights = f" (operands: {', '.join(map(block.name, named))})" if named else ""
        return [
            Alarm(
                jnp.asarray(~np.isfinite(d)),
                f"the scale of a normalisation is NaN or infinite at some entries{weights}; look for "
                "the step that made it so",
                SingularError,
            ),
            Alarm(
                jnp.asarray(d == 0),
                f"the scale of a normalisation is zero at some entries{weights}: the output's cotangent "
                "leaves no trace in the input's there; keep scales away from zero, or give the "
                "normalisation none",
                SingularError,
            ),
        ]


def _pull_back(pull_f: Any, pull_s: Any, h: State) -> State:
    """h' ↦ D h' + a ∂s/∂x."""
    (own,), a = pull_f(tuple(h))
    (seen,) = pull_s(tuple(a))
    return (own + seen,)


def describe(block: Block) -> str:
    """'its 2 statistics lose 2 numbers for every 64 entries'."""
    sizes = [v.aval.size for v in _checked(block).statistics]
    n, _ = block.sizes
    what = f"its {len(sizes)} statistics lose" if len(sizes) > 1 else "its statistic loses"
    if len(set(sizes)) == 1 and n % sizes[0] == 0:
        numbers = f"{len(sizes)} numbers" if len(sizes) > 1 else "one number"
        return f"{what} {numbers} for every {n // sizes[0]} entries"
    return f"{what} {sum(sizes)} of {n} numbers"


def _is_low_rank_update(block: Block) -> bool:
    """Whether y = D x + U Vᵀ x with weights in V, which normalises nothing and may lose nothing."""
    cut = _checked(block)
    weighed = any(v in block.operands for e in cut.before for v in _variables(e))
    return weighed and is_linear(block.eqns, block.inputs, block.outputs, affine=True)


# --- the cut --------------------------------------------------------------------------------------


class Cut(NamedTuple):
    """A block as y = f(x, s(x))."""

    statistics: tuple[Any, ...]
    others: tuple[Any, ...]  # small values that depend on x without a derivative
    before: tuple[JaxprEqn, ...]  # s
    after: tuple[JaxprEqn, ...]  # f
    moves: tuple[JaxprEqn, ...]  # those in f that take an entry of x to its place in y

    def statistics_at(self, block: Block, x: Sequence[Any], operands: Sequence[Any]) -> Any:
        """(s(x), the small values without a derivative)."""
        env = dict(zip((*block.inputs, *block.operands), (*x, *operands), strict=True))
        graph.run(self.before, env)
        return tuple(env[v] for v in self.statistics), tuple(env[v] for v in self.others)

    def outputs_at(self, block: Block, x: Any, s: Any, others: Any, operands: Sequence[Any]) -> State:
        """f."""
        variables = (*block.inputs, *self.statistics, *self.others, *block.operands)
        env = dict(zip(variables, (*x, *s, *others, *operands), strict=True))
        graph.run(self.after, env)
        return tuple(env[v] for v in block.outputs)


def find_cut(block: Block) -> Cut | None:
    """The block's f and s, or None if it is not of that form."""
    return block.once(_find_cut)


def _checked(block: Block) -> Cut:
    cut = find_cut(block)
    assert cut is not None, "asked of a block that the rule does not match"
    return cut


def _find_cut(block: Block) -> Cut | None:
    if len(block.inputs) != 1 or len(block.outputs) != 1 or block.inputs == block.outputs:
        return None
    (x,), (y,) = block.inputs, block.outputs
    real = all(jnp.issubdtype(v.aval.dtype, jnp.floating) for v in (x, y))
    same_size = x.aval.size == y.aval.size > 1
    if not real or not same_size or any(map(_jax.has_effects, block.eqns)):
        return None
    small = _small_values(block.eqns, x, y)
    after = needed_for(block.eqns, [y], known=small)
    moves = _moves(after, x, y)
    if not small or moves is None or x not in active_variables(after, [x], [y]):
        return None
    # What the statistics see through a small value without a derivative (a sign) is never asked for.
    active = active_variables(block.eqns, [x], [y])
    statistics = tuple(v for v in small if v in active)
    others = tuple(v for v in small if v not in active)
    before = needed_for(block.eqns, small)
    return Cut(statistics, others, tuple(before), tuple(after), moves) if statistics else None


def _small_values(eqns: Sequence[JaxprEqn], x: Any, y: Any) -> list[Any]:
    """The values through which y depends on x: going back from y, the first of at most half x's size."""
    makers: dict[Any, JaxprEqn] = {}  # of what depends on x
    for eqn in eqns:
        if any(v is x or v in makers for v in _variables(eqn)):
            makers.update((v, eqn) for v in eqn.outvars)
    found: set[Any] = set()
    pending, seen = [y] if y in makers else [], {y}
    while pending:
        for v in _variables(makers[pending.pop()]):
            if v not in makers or v in seen:
                continue
            seen.add(v)
            if 2 * v.aval.size <= x.aval.size:
                found.add(_origin(v, x, makers))
            else:
                pending.append(v)
    return [v for e in eqns for v in e.outvars if v in found]


def _origin(v: Any, x: Any, makers: dict[Any, JaxprEqn]) -> Any:
    """What a statistic was computed from, if that was copying (a mean, for every channel) or scaling.

    Copies would be kept needlessly, and a scale belongs to D, where its zeros are noticed.
    """
    best, scaled = v, False
    while True:
        eqn = makers[v]
        before = {u for u in _variables(eqn) if u in makers}
        others = [u for u in _variables(eqn) if u not in makers]
        if len(before) != 1 or any(u is x for u in others):
            return best
        (v,) = before
        scaled |= eqn.primitive in (lax.mul_p, lax.div_p) and any(u.aval.size > 1 for u in others)
        if v.aval.size < best.aval.size or (scaled and v.aval.size == best.aval.size):
            best, scaled = v, False


def _variables(eqn: JaxprEqn) -> list[Any]:
    return [v for v in eqn.invars if not isinstance(v, Literal)]


# --- the way of an entry --------------------------------------------------------------------------

# A move in normal form: the permutation of the axes (None: a reshape), and the shape after it.
Move = tuple[tuple[int, ...] | None, tuple[int, ...]]


class _Way(NamedTuple):
    moves: tuple[Move, ...]  # no two of a kind in a row, and none that changes nothing
    eqns: tuple[JaxprEqn, ...]


def _moves(eqns: Sequence[JaxprEqn], x: Any, y: Any) -> tuple[JaxprEqn, ...] | None:
    """The equations that move entries of x to their places in y; None if one mixes entries."""
    ways = {x: _Way((), ())}
    for eqn in eqns:
        carrying = [v for v in _variables(eqn) if v in ways]
        if not carrying:
            continue
        if len(eqn.outvars) != 1:
            return None
        way, (out,) = ways[carrying[0]], eqn.outvars
        if eqn.primitive in POINTWISE:
            same_shape = all(v.aval.shape == out.aval.shape for v in carrying)
            if not same_shape or len({ways[v].moves for v in carrying}) > 1:
                return None
            ways[out] = way
        elif out.aval.size == x.aval.size and (move := _move(eqn)) is not None:
            moves = _normal(way.moves, move, x.aval.shape)
            ways[out] = _Way(moves, (*way.eqns, eqn))
        else:
            return None
    return ways[y].eqns if y in ways else None


def _move(eqn: JaxprEqn) -> Move | None:
    """An equation that keeps the number of entries, as a move; None if it is not a move."""
    shape = eqn.outvars[0].aval.shape
    if len(_variables(eqn)) != 1:
        return None
    if eqn.primitive is lax.transpose_p:
        return tuple(eqn.params["permutation"]), shape
    plain = eqn.primitive is lax.reshape_p and eqn.params["dimensions"] is None
    if plain or eqn.primitive in (lax.squeeze_p, lax.broadcast_in_dim_p, *_jax.PLACING):
        return None, shape
    return None


def _normal(moves: tuple[Move, ...], move: Move, start: tuple[int, ...]) -> tuple[Move, ...]:
    """The moves and one more, from an array of shape `start`."""
    order, shape = move
    if moves and (moves[-1][0] is None) == (order is None):
        before, _ = moves[-1]
        moves = moves[:-1]
        order = None if order is None or before is None else tuple(before[i] for i in order)
    arriving = moves[-1][1] if moves else start
    if order == tuple(range(len(shape))) or (order is None and shape == arriving):
        return moves
    return (*moves, (order, shape))


# --- the diagonal ---------------------------------------------------------------------------------


class _Diagonal(NamedTuple):
    """D as a jaxpr of (x, statistics, others, operands)."""

    jaxpr: Any
    consts: tuple[Any, ...]
    eqns: list[Any]  # those it needs
    reads_x: bool
    operands: tuple[int, ...]  # those it needs, by number

    def known(self, operands: Sequence[Any]) -> dict[Any, Any] | None:
        """The values of the operands that it needs, by variable; None where one is not at hand."""
        variables = self.jaxpr.invars[len(self.jaxpr.invars) - len(operands) :]
        values = {variables[i]: _jax.concrete(operands[i]) for i in self.operands}
        return None if any(a is None for a in values.values()) else values

    def at_ones(self, known: dict[Any, Any]) -> np.ndarray:
        """D with ones for the statistics, which shows the operands' part in it."""
        with _jax.evaluated_now(), jax.debug_nans(False):
            env: dict[Any, Any] = {
                v: jnp.ones(v.aval.shape, v.aval.dtype) for v in self.jaxpr.invars[1:]
            }
            env.update(zip(self.jaxpr.constvars, self.consts, strict=True))
            env.update((v, jnp.asarray(a)) for v, a in known.items())
            for eqn in self.eqns:
                inputs = [v.val if isinstance(v, Literal) else env[v] for v in eqn.invars]
                env.update(zip(eqn.outvars, _jax.bind_now(eqn, inputs), strict=True))
            return np.asarray(graph.read(env, self.jaxpr.outvars[0]), np.float64)


def _diagonal(block: Block) -> _Diagonal:
    cut = _checked(block)
    (x,), operands = block.structs()
    s, others = ([graph.struct(v) for v in part] for part in (cut.statistics, cut.others))

    def entries(x: Any, s: Any, others: Any, operands: Any) -> Any:
        _, pullback = jax.vjp(lambda x: cut.outputs_at(block, (x,), s, others, operands), x)
        return pull_back_ones(block, pullback)

    args = (x, s, others, operands)
    flat = jax.tree.leaves(args)
    jaxpr, consts = staging.flatten_calls(jax.make_jaxpr(entries)(*args), flat)
    wanted = [v for v in jaxpr.outvars if not isinstance(v, Literal)]
    eqns = needed_for(jaxpr.eqns, wanted)
    reads = {*wanted, *(v for e in eqns for v in _variables(e))}
    given = jaxpr.invars[len(jaxpr.invars) - len(operands) :]
    needed = tuple(i for i, v in enumerate(given) if v in reads)
    return _Diagonal(jaxpr, tuple(consts), eqns, jaxpr.invars[0] in reads, needed)
