"""Pointwise blocks: activations, scale and bias, MaxMin, gates.

A pointwise block maps k states of one shape to k' ≤ k states of that shape, by any mixture of pointwise
primitives and custom derivatives. Entry i of the outputs depends only on entry i of the inputs, so the
Jacobian splits into one k' × k matrix per entry. For k = k' = 1 it is diagonal:

    h = h' · d      ⇒      h' = h / d,          d = pullback(1)

For MaxMin (k = k' = 2) it is a permutation of two, for a gate a·σ(b) (k = 2, k' = 1) a row.

Whether a block is pointwise is read off its *derivative program*, the flat jaxpr that maps tangents to
tangents (or cotangents to cotangents), so custom rules are judged by what they do. Whether a derivative
can vanish is probed: the same program, evaluated at one number per entry.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.tree_util import Partial

from .. import _jax
from .._jax import Literal
from ..errors import SingularError
from ..trace import graph, staging
from ..trace.graph import Block
from ..trace.linearity import is_linear
from ..trace.partition import POINTWISE
from . import predicates
from .predicates import TIE
from .registry import Alarm, Gain, Rule, State, Verdict, pull_back_units, register_region

_OWN_DERIVATIVE = {_jax.custom_jvp_call_p, _jax.custom_vjp_call_p}
_LEAKY = (
    "use an activation whose derivative never vanishes: jax.nn.leaky_relu, jnp.abs, or MaxMin; "
    "or keep this cotangent instead of recovering it"
)


@register_region
class Elementwise(Rule):
    """k' ≤ k states of one shape, computed entry by entry."""

    name = "elementwise"

    def matches(self, block: Block) -> bool:
        touched = set(block.inputs)
        for e in block.eqns:  # equations that do not read the state may be anything (a broadcast bias)
            if any(not isinstance(v, Literal) and v in touched for v in e.invars):
                if e.primitive not in POINTWISE and e.primitive not in _OWN_DERIVATIVE:
                    return False
                touched.update(e.outvars)
        shapes = {v.aval.shape for v in (*block.inputs, *block.outputs)}
        if len(shapes) != 1 or len(block.outputs) > len(block.inputs):
            return False
        return derivative_program(block) is not None

    def verdict(self, block: Block) -> Verdict:
        probe = _probe(_checked(block), _known_numbers(block))
        if probe.vanishing > 0.05:
            share = "everywhere" if probe.vanishing > 0.999 else "on part of its range"
            return Verdict(
                False,
                f"its derivative is exactly zero {share} (at {probe.vanishing:.0%} of probed inputs "
                "between -3 and 3), and there the output's cotangent leaves no trace in the input's",
                _LEAKY,
            )
        if probe.gain < np.inf:
            return Verdict(True, "pointwise, with a derivative bounded away from zero")
        if probe.singular_at_ties:
            return Verdict(True, f"pointwise, regular except that {TIE}; checked on values")
        return Verdict(True, "pointwise; its derivative may vanish at some inputs, checked on values")

    def keep(self, block: Block, x: State, operands: Sequence[Any]) -> tuple[State, Any]:
        compact = block.once(_compact_form)
        if compact is None:
            return self.linearize(block, x, operands)
        pullback = Partial(compact, compact.bits(x, operands), tuple(operands))
        return block(x, operands), pullback

    def vijp(self, block: Block, factors: Any, kept: Any, h: State) -> State:
        del factors
        rows = pull_back_units(block, kept)  # of the k' × k matrices
        if len(block.inputs) == 1:
            (((d,),), (h0,)) = rows, h
            solved = (h0 / d,)
        elif len(block.outputs) == 1:
            (row,) = rows
            # scaled by the largest entry, whose square alone might underflow
            size = functools.reduce(jnp.maximum, (jnp.abs(j) for j in row))
            row = [j / size for j in row]
            products = [j * a for j, a in zip(row, h, strict=True)]
            solved = (_sum(products) / _sum([j * j for j in row]) / size,)
        elif len(block.inputs) == len(block.outputs) == 2:
            # [h₁ h₂] = [h'₁ h'₂] [[a, b], [c, d]]; exact where the matrix is a permutation.
            ((a, b), (c, d)), (h1, h2) = rows, h
            det = a * d - b * c
            solved = ((h1 * d - h2 * c) / det, (a * h2 - b * h1) / det)
        else:
            solved = _least_squares(rows, h)
        return tuple(a.astype(v.aval.dtype) for a, v in zip(solved, block.outputs, strict=True))

    def gain(self, block: Block, operands: Sequence[Any] | None = None) -> Gain:
        if not operands:
            probe = _probe(_checked(block), _known_numbers(block))
        else:
            known = [_jax.concrete(o) for o in operands]
            values = [None if a is None else a.astype(np.float64) for a in known]
            probe = _evaluate_probe(_checked(block), values)
        return Gain(probe.gain, mixes=False, reason=TIE if probe.singular_at_ties else "")

    def alarms(self, block: Block, factors: Any, kept: Any) -> list[Alarm]:
        del factors
        rows = pull_back_units(block, kept)  # of the k' × k matrices
        eps = float(jnp.finfo(rows[0][0].dtype).eps)
        finite = functools.reduce(jnp.logical_and, (jnp.isfinite(j) for row in rows for j in row))
        if len(block.outputs) == 1:
            size = functools.reduce(jnp.maximum, (jnp.abs(j) for j in rows[0]))
            regular = size >= jnp.finfo(size.dtype).tiny
        elif len(block.inputs) == len(block.outputs) == 2:
            (a, b), (c, d) = rows
            regular = jnp.abs(a * d - b * c) > 8 * eps * (jnp.abs(a * d) + jnp.abs(b * c))
        else:
            values = jnp.linalg.svd(_stacked(rows), compute_uv=False)
            regular = values[..., -1] > 8 * eps * values[..., 0]
        operands = [v for v in block.operands if v in block.names]
        weights = f" (operands: {', '.join(block.name(v) for v in operands)})" if operands else ""
        return [
            Alarm(
                ~finite,
                "vijp: a pointwise block has a derivative that is NaN or infinite at some "
                f"entries{weights}: an activation or a weight is not finite, or the function has a pole "
                "there. The output's cotangent cannot be recovered; look for the step that made it so",
                SingularError,
            ),
            Alarm(
                finite & ~regular,
                "vijp: a pointwise block has a derivative that is zero to rounding at some "
                f"entries{weights}: a saturated or flat activation, a tie, or a zero scale. The "
                "output's cotangent cannot be recovered there; " + _LEAKY,
                SingularError,
            ),
        ]

    def inverts(self, block: Block) -> Verdict:
        if len(block.inputs) > 1:
            return Verdict(None, "no inverse is known: several states, entry by entry")
        if block.once(_newton_inverts):
            return Verdict(True, "pointwise, linear in two pieces: inverted by two Newton steps")
        return Verdict(
            False,
            "no inverse is known: two inputs may share an output (as those of |x| do), or it is not "
            "linear in two pieces (as LeakyReLU is)",
        )

    def inverse(self, block: Block, operands: Sequence[Any], y: State) -> State:
        def value_and_slope(x: Any) -> tuple[Any, Any]:
            (value,), (slope,) = jax.jvp(lambda x: block((x,), operands), (x,), (jnp.ones_like(x),))
            return value, slope

        return (_newton(value_and_slope, y[0]).astype(block.inputs[0].aval.dtype),)


def _newton(value_and_slope: Any, y: Any) -> Any:
    """x with f(x) = y, for a monotone f of two linear pieces.

    The first step solves the piece that it starts in. If y belongs to the other piece, the result lies
    in that piece too, because f is monotone, and the second step solves it.
    """
    x = y
    for _ in range(2):
        value, slope = value_and_slope(x)
        x = x + (y - value) / slope
    return x


def _newton_inverts(block: Block) -> bool:
    """Whether `_newton` finds probed inputs again."""
    (state,), operands = block.structs()

    def both(x: Any, *operands: Any) -> Any:
        (value,), (slope,) = jax.jvp(lambda x: block((x,), operands), (x,), (jnp.ones_like(x),))
        return value, slope

    if _checked(block).backward:  # a custom_vjp has no forward derivative
        return False
    flat = [state, *operands]
    jaxpr, consts = staging.flatten_calls(jax.make_jaxpr(both)(*flat), flat)
    program = Program(jaxpr, tuple(consts), 1, 0, False)
    rng = np.random.default_rng(0)
    x = _inputs(state.dtype, rng)
    others = [
        _samples(v.aval, rng) if known is None else _drawn(known, rng)
        for v, known in zip(block.operands, _known_numbers(block), strict=True)
    ]

    def value_and_slope(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        value, slope = _pointwise(program, [x.astype(state.dtype), *others])
        return value, slope

    with np.errstate(all="ignore"):
        value, slope = value_and_slope(x)
        found = _newton(value_and_slope, value)
        # Allows for rounding in y, and in a bias as large as these operands.
        size = np.abs(x) + (np.abs(value) + 8) / np.abs(slope)
        rounding = 32 * float(jnp.finfo(state.dtype).eps) * size
    inside = np.abs(x) < 1e3  # beyond, a bias is lost in rounding, and squares overflow
    return bool((np.abs(found - x) <= rounding)[inside].all())


def _sum(terms: Sequence[Any]) -> Any:
    return functools.reduce(jnp.add, terms)


def _stacked(rows: Sequence[State]) -> Any:
    """[..., k', k] in at least float32."""
    matrix = jnp.stack([jnp.stack(row, -1) for row in rows], -2)
    return matrix.astype(_jax.working_dtype(matrix.dtype))


def _least_squares(rows: Sequence[State], h: State) -> State:
    """h' with h' J = h per entry, through a QR of Jᵀ."""
    matrix = _stacked(rows)
    q, r = jnp.linalg.qr(jnp.swapaxes(matrix, -1, -2))
    right = jnp.einsum("...ij,...i->...j", q, jnp.stack(h, -1).astype(q.dtype))
    solved = jax.scipy.linalg.solve_triangular(r, right[..., None])[..., 0]
    return tuple(solved[..., i] for i in range(len(rows)))


# --- the derivative program -----------------------------------------------------------------------


class Program(NamedTuple):
    """The flat jaxpr (x, tangents, operands) -> tangents, or its transpose if `backward`."""

    jaxpr: Any
    consts: tuple[Any, ...]
    states: int  # number of x's
    seeds: int  # number of tangents, or cotangents, that go in
    backward: bool


def derivative_program(block: Block) -> Program | None:
    """The block's derivative as a flat jaxpr, or None if it is not linear and pointwise."""
    return block.once(_derivative_program)


def _checked(block: Block) -> Program:
    program = derivative_program(block)
    assert program is not None, "asked of a block that the rule does not match"
    return program


def _derivative_program(block: Block) -> Program | None:
    x, operands = block.structs()
    # a custom_vjp has no forward derivative
    backward = any(e.primitive is _jax.custom_vjp_call_p for e in block.eqns)
    seeds = [_jax.struct(v.aval) for v in block.outputs] if backward else x
    k = len(x)

    def forward_program(*args: Any) -> Any:
        x, t, operands = args[:k], args[k : 2 * k], args[2 * k :]
        return jax.jvp(lambda *x: block(x, operands), x, t)[1]

    def backward_program(*args: Any) -> Any:
        x, ct, operands = args[:k], args[k : k + len(seeds)], args[k + len(seeds) :]
        return jax.vjp(lambda *x: block(x, operands), *x)[1](tuple(ct))

    fun = backward_program if backward else forward_program
    flat = [*x, *seeds, *operands]
    jaxpr, consts = staging.flatten_calls(jax.make_jaxpr(fun)(*flat), flat)
    program = Program(jaxpr, tuple(consts), k, len(seeds), backward)
    shape = block.outputs[0].aval.shape
    if not _is_pointwise(program, shape):
        return None
    if backward and not is_linear(_needed(jaxpr), _seeds(program), jaxpr.outvars):
        return None
    return program


def _needed(jaxpr: Any) -> list[Any]:
    """The equations that the outputs need (a jvp also traces tangents that nothing reads)."""
    wanted = {v for v in jaxpr.outvars if not isinstance(v, Literal)}
    kept = []
    for eqn in reversed(jaxpr.eqns):
        if any(v in wanted for v in eqn.outvars):
            kept.append(eqn)
            wanted.update(v for v in eqn.invars if not isinstance(v, Literal))
    return kept[::-1]


def _seeds(program: Program) -> list[Any]:
    return program.jaxpr.invars[program.states : program.states + program.seeds]


def _is_pointwise(program: Program, shape: tuple[int, ...]) -> bool:
    """Every equation that a tangent goes through works entry by entry on one shape."""
    carries = set(_seeds(program))
    for eqn in _needed(program.jaxpr):
        touched = [v for v in eqn.invars if not isinstance(v, Literal) and v in carries]
        if not touched:
            continue
        same_shape = all(v.aval.shape == shape for v in (*touched, *eqn.outvars))
        layout_only = eqn.primitive in (lax.broadcast_in_dim_p, lax.squeeze_p, *_jax.PLACING) or (
            eqn.primitive is lax.reshape_p and eqn.params["dimensions"] is None
        )
        if not same_shape or not (
            eqn.primitive in POINTWISE or eqn.primitive is _jax.add_jaxvals_p or layout_only
        ):
            return False
        carries.update(eqn.outvars)
    return True


# --- the derivative in a few bits -----------------------------------------------------------------


class _Compact:
    """A pullback whose Jacobian depends on the state only through a few booleans.

    For max(x, y) JAX may keep floats and compare them. But the Jacobian depends only on which of the two
    was larger, or neither (at a tie JAX takes the mean): two bits. They determine JAX's own pullback at
    every input, ties included.
    """

    def __init__(self, jaxpr: Any, consts: Sequence[Any], states: int, outputs: int, booleans: Any):
        self.jaxpr, self.consts, self.states, self.outputs = jaxpr, consts, states, outputs
        self.kept = predicates.Bits(predicates.Reader(jaxpr.eqns), booleans)
        self.for_bits = needed_for(jaxpr.eqns, self.kept.reads)
        entries = [v for v in jaxpr.outvars if not isinstance(v, Literal)]
        self.for_entries = needed_for(jaxpr.eqns, entries, known=booleans)

    def _env(self, x: Sequence[Any] | None, operands: Sequence[Any]) -> dict[Any, Any]:
        env = dict(zip(self.jaxpr.constvars, self.consts, strict=True))
        invars = self.jaxpr.invars
        if x is not None:
            env.update(zip(invars[: self.states], x, strict=True))
        env.update(zip(invars[self.states :], operands, strict=True))
        return env

    def bits(self, x: Sequence[Any], operands: Sequence[Any]) -> list[Any]:
        """The booleans that are kept."""
        env = self._env(x, operands)
        graph.run(self.for_bits, env)
        return self.kept.make(env, self.jaxpr.invars[0].aval.shape)

    def __call__(self, bits: Sequence[Any], operands: Sequence[Any], h: Sequence[Any]) -> State:
        """The pullback."""
        env = self._env(None, operands)
        env.update(self.kept.read(bits))
        graph.run(self.for_entries, env)
        entries = [jnp.asarray(v.val) if isinstance(v, Literal) else env[v] for v in self.jaxpr.outvars]
        columns = [entries[i * self.outputs : (i + 1) * self.outputs] for i in range(self.states)]
        return tuple(_sum([d * a for d, a in zip(column, h, strict=True)]) for column in columns)


def needed_for(eqns: Sequence[Any], wanted: Sequence[Any], known: Any = ()) -> list[Any]:
    """The equations that `wanted` needs, given the values of `known`."""
    missing, kept = {v for v in wanted if v not in known}, []
    for eqn in reversed(eqns):
        if any(v in missing for v in eqn.outvars):
            kept.append(eqn)
            missing.update(v for v in eqn.invars if not isinstance(v, Literal) and v not in known)
    return kept[::-1]


def _compact_form(block: Block) -> _Compact | None:
    """The Jacobian's entries as a jaxpr cut at its booleans, or None if these do not determine them."""
    if any(e.primitive is _jax.custom_vjp_call_p for e in block.eqns):
        return None
    x, operands = block.structs()
    k = len(x)
    shapes = {v.aval.shape for v in (*block.inputs, *block.outputs)}
    if len(shapes) != 1 or any(_jax.has_effects(e) for e in block.eqns):
        return None

    def entries(*args: Any) -> list[Any]:
        x, operands = args[:k], args[k:]
        found: list[Any] = []
        for i in range(k):
            units = tuple(jnp.full_like(a, float(i == j)) for j, a in enumerate(x))
            found += jax.jvp(lambda *x: block(x, operands), tuple(x), units)[1]
        return found

    flat = [*x, *operands]
    jaxpr, consts = staging.flatten_calls(jax.make_jaxpr(entries)(*flat), flat)
    booleans = _booleans(jaxpr, k)
    if not booleans:
        return None
    return _Compact(jaxpr, tuple(consts), k, len(block.outputs), booleans)


def _booleans(jaxpr: Any, states: int) -> list[Any] | None:
    """The booleans that carry all dependence of the outputs on the state; None if there is any other."""
    depends = set(jaxpr.invars[:states])
    producer = {}
    for eqn in jaxpr.eqns:
        producer.update((v, eqn) for v in eqn.outvars)
        if any(not isinstance(v, Literal) and v in depends for v in eqn.invars):
            depends.update(eqn.outvars)
    shape = jaxpr.invars[0].aval.shape
    found: dict[Any, None] = {}
    pending = [v for v in jaxpr.outvars if not isinstance(v, Literal)]
    seen: set[Any] = set()
    while pending:
        v = pending.pop()
        if v in seen or v not in depends:
            continue
        seen.add(v)
        if v.aval.dtype == np.bool_ and v.aval.shape == shape:
            found[v] = None
        elif v not in producer:
            return None
        else:
            pending += [u for u in producer[v].invars if not isinstance(u, Literal)]
    return [v for e in jaxpr.eqns for v in e.outvars if v in found]


# --- probing --------------------------------------------------------------------------------------

_CORE, _WIDE = 160, 256


class Probe(NamedTuple):
    """What probing the derivative found."""

    vanishing: float  # share of inputs in the core at which the Jacobian is exactly singular
    gain: float  # inf where the derivative is not bounded away from zero
    singular_at_ties: bool  # whether that is due to JAX's derivative at ties


_probes: dict[Any, Probe] = {}


def _known_numbers(block: Block) -> list[np.ndarray | None]:
    """For each operand its value, if that is a single number known while tracing."""
    return [block.constants.get(v) if v.aval.size == 1 else None for v in block.operands]


def _probe(program: Program, numbers: Sequence[np.ndarray | None]) -> Probe:
    """Evaluate the derivative at one number per entry; memoised on the program's text."""
    if program.consts:
        return _evaluate_probe(program, numbers)
    values = tuple(None if a is None else a.item() for a in numbers)
    key = (str(program.jaxpr), program.states, program.seeds, program.backward, values)
    if key not in _probes:
        _probes[key] = _evaluate_probe(program, numbers)
    return _probes[key]


def _evaluate_probe(program: Program, operands: Sequence[np.ndarray | None]) -> Probe:
    """`operands`: their values, None where those are not known."""
    invars = program.jaxpr.invars
    rng = np.random.default_rng(0)
    x = [_inputs(v.aval.dtype, rng) for v in invars[: program.states]]
    others = [
        _samples(v.aval, rng) if o is None else _drawn(o, rng)
        for v, o in zip(invars[program.states + program.seeds :], operands, strict=True)
    ]
    probed = _jacobians(program, x, others)
    finite, largest, smallest = _singular_values(probed)
    inside = finite & np.repeat([True, False], [_CORE, _WIDE])
    singular = smallest <= _ZERO * largest
    vanishing = float(singular[inside].mean()) if inside.any() else 0.0
    with np.errstate(all="ignore"):
        unknown = [o is None for o in operands]
        beside, tied = _Knots(program, x, others, unknown).jacobians()
    gain = _gain(np.concatenate([probed, beside]))
    finite, largest, smallest = _singular_values(tied)
    if gain < np.inf and (finite & (smallest <= _ZERO * largest)).any():
        return Probe(vanishing, np.inf, True)
    return Probe(vanishing, _gain(np.concatenate([probed, beside, tied])), False)


_ZERO = 1e-14  # a singular value, relative to the largest


def _jacobians(
    program: Program, x: Sequence[np.ndarray], others: Sequence[np.ndarray], **given: Any
) -> np.ndarray:
    """[probes, k', k]; `given`: as of `_pointwise`."""
    seeds, size = _seeds(program), len(x[0])
    columns = []
    for i in range(program.seeds):
        unit = [np.full(size, float(i == j), v.aval.dtype) for j, v in enumerate(seeds)]
        columns.append(_pointwise(program, [*x, *unit, *others], **given))
    jacobian = np.stack([np.stack(c, -1) for c in columns], -2)  # [probes, seed, result]
    return jacobian if program.backward else np.swapaxes(jacobian, -1, -2)


def _singular_values(jacobian: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(which are finite, the largest, the smallest)."""
    finite = np.isfinite(jacobian).all((-2, -1))
    values = np.linalg.svd(np.where(finite.reshape(-1, 1, 1), jacobian, 0), compute_uv=False)
    return finite, values[:, 0], values[:, -1]


class _Knots:
    """Inputs at which two values that the derivative compares are equal.

    A range of inputs may lie between two probes without containing any, and no probe hits a tie. So
    where a comparison has different outcomes at two probes, the line between them is bisected. A
    comparison of operands alone, whose values are not known, may have any outcome.
    """

    def __init__(
        self,
        program: Program,
        x: Sequence[np.ndarray],
        others: Sequence[np.ndarray],
        unknown: Sequence[bool],
    ):
        self.program, self.x, self.others = program, x, others
        self.comparisons = predicates.Reader(_needed(program.jaxpr)).comparisons()
        ways: dict[predicates.Pair, set[int]] = {}
        for c in self.comparisons.values():
            ways.setdefault(c.pair, set()).add(min(c.true_at, c.opposite.true_at))
        self.pairs = list(ways)
        on_state, on_unknown = self._dependent(unknown)
        self.free = [p for p in ways if {p.a, p.b} & on_unknown and not {p.a, p.b} & on_state]
        # For a single comparison both sides are probed, and a tie belongs to one of them.
        tie_differs = any(len(found) > 1 or predicates.EQUAL in found for found in ways.values())
        self.which = np.zeros(0, int)  # for each knot, the pair that is equal there
        if len(ways) > 1 or tie_differs:
            self._find()

    def _dependent(self, unknown: Sequence[bool]) -> tuple[set[Any], set[Any]]:
        """The variables that depend on the states, and those that depend on unknown operands."""
        jaxpr, states = self.program.jaxpr, self.program.states
        operands = jaxpr.invars[states + self.program.seeds :]
        on_state = set(jaxpr.invars[:states])
        on_unknown = {v for v, u in zip(operands, unknown, strict=True) if u}
        on_unknown |= {
            v
            for v, c in zip(jaxpr.constvars, self.program.consts, strict=True)
            if _jax.concrete(c) is None
        }
        for eqn in jaxpr.eqns:
            read = {v for v in eqn.invars if not isinstance(v, Literal)}
            for found in (on_state, on_unknown):
                found.update(eqn.outvars if read & found else ())
        return on_state, on_unknown

    def _find(self) -> None:
        x = self.x
        # For one state, consecutive probes; for several, neighbours that are not far apart.
        order = np.argsort(x[0]) if len(x) == 1 else np.arange(_CORE + _WIDE // 2)
        slots, following = order[:-1], order[1:]
        low, high = ([a.astype(np.float64)[at] for a in x] for at in (slots, following))
        turns = self._differences(low, slots) * self._differences(high, slots) < 0
        room = max(1, len(x[0]) // len(self.pairs))
        chosen = [np.flatnonzero(t) for t in turns]
        chosen = [c[np.linspace(0, len(c) - 1, min(len(c), room)).astype(int)] for c in chosen]
        lines = np.concatenate(chosen)
        self.which = np.repeat(np.arange(len(self.pairs)), [len(c) for c in chosen])
        self.slots = slots[lines]
        self.low, self.high = ([a[lines] for a in side] for side in (low, high))
        self.width = np.max([np.abs(a - b) for a, b in zip(self.low, self.high, strict=True)], 0)
        if len(lines):
            self._bisect()

    def _bisect(self) -> None:
        here = self.which, np.arange(len(self.which))
        below = self._differences(self.low, self.slots)[here] < 0
        for _ in range(50):
            middle = [a + (b - a) / 2 for a, b in zip(self.low, self.high, strict=True)]
            same = (self._differences(middle, self.slots)[here] < 0) == below
            self.low = [np.where(same, m, a) for m, a in zip(middle, self.low, strict=True)]
            self.high = [np.where(same, b, m) for m, b in zip(middle, self.high, strict=True)]

    def _differences(self, x: Sequence[np.ndarray], slots: np.ndarray) -> np.ndarray:
        """a - b of each pair: [pairs, probes]."""
        atoms = [v for pair in self.pairs for v in (pair.a, pair.b)]
        jaxpr, zeros = self.program.jaxpr, np.zeros(len(slots))
        watched = SimpleNamespace(
            constvars=jaxpr.constvars,
            invars=jaxpr.invars,
            eqns=jaxpr.eqns,
            outvars=[v for v in atoms if not isinstance(v, predicates.Number)],
        )
        args = [*x, *(zeros for _ in _seeds(self.program)), *(o[slots] for o in self.others)]
        found = iter(_pointwise(self.program._replace(jaxpr=watched), args, slots))
        values = [v.value + zeros if isinstance(v, predicates.Number) else next(found) for v in atoms]
        pairs = zip(values[::2], values[1::2], strict=True)
        return np.stack([np.where(a == b, 0.0, a - b) for a, b in pairs])

    def jacobians(self) -> tuple[np.ndarray, np.ndarray]:
        """The Jacobians on both sides of the knots, and at them."""
        none = np.zeros((0, len(self.program.jaxpr.outvars), self.program.seeds))
        none = np.swapaxes(none, -1, -2) if self.program.backward else none
        beside, tied = self._at_knots() if len(self.which) else (none, none)
        return np.concatenate([beside, *self._with_free_outcomes()]), tied

    def _with_free_outcomes(self) -> Iterator[np.ndarray]:
        """The Jacobians at the probes, for all outcomes of comparisons of operands alone."""
        for pair in self.free[:8]:
            for outcome in (predicates.LESS, predicates.EQUAL, predicates.GREATER):
                forced = {
                    v: (np.ones(len(self.x[0]), bool), bool(c.true_at & outcome))
                    for v, c in self.comparisons.items()
                    if c.pair == pair
                }
                yield _jacobians(self.program, self.x, self.others, forced=forced)

    def _at_knots(self) -> tuple[np.ndarray, np.ndarray]:
        sides = [self._jacobians(side, ()) for side in (self.low, self.high)]
        apart = [(self._differences(side, self.slots) != 0).all(0) for side in (self.low, self.high)]
        beside, sides = np.concatenate(apart), np.concatenate(sides)
        tied = [self._jacobians(self.low, several) for several in self._ties()]
        return sides[beside], np.concatenate([sides[~beside], *tied])

    def _ties(self) -> list[np.ndarray]:
        """Several choices of which pairs to treat as equal: [pairs, knots]."""
        number = np.arange(len(self.pairs))[:, None]
        # Pairs that are equal at the same place: max(x, 0) + max(2x, 0).
        near = np.abs(self._differences(self.low, self.slots)) <= 2.0**-20 * self.width
        tied = near | (number == self.which)
        if len(self.low) == 1:
            return [tied]
        # With several states, others may be equal by chance: a and b, c and d.
        few = range(min(len(self.pairs), 4))
        chances = [s for n in (2, 3, 4) for s in itertools.combinations(few, n)]
        return [tied, *(tied | np.isin(number, s) for s in chances)]

    def _jacobians(self, x: Sequence[np.ndarray], tied: Any) -> np.ndarray:
        forced = {
            v: (tied[self.pairs.index(c.pair)], bool(c.true_at & predicates.EQUAL))
            for v, c in self.comparisons.items()
            if len(tied)
        }
        others = [o[self.slots] for o in self.others]
        return _jacobians(self.program, x, others, slots=self.slots, forced=forced)


def _gain(jacobian: np.ndarray) -> float:
    """(r² + 1) / 2r for derivatives between r and 1, half of them at each end (docs/numerics.md §1).

    A continuous derivative that changes its sign passes through zero, however wide the probes miss
    it; one that jumps between a few values (|x|, LeakyReLU) does not.
    """
    finite, largest, smallest = _singular_values(jacobian)
    jacobian, largest, smallest = jacobian[finite], largest[finite], smallest[finite]
    if not len(jacobian) or smallest.min() <= 1e-3 * largest.max():
        return np.inf
    if jacobian.shape[-2:] == (1, 1):
        d = jacobian[:, 0, 0]
        if d.min() < 0 < d.max() and len(np.unique(d)) > 8:
            return np.inf
    ratio = float(smallest.min() / largest.max())
    return (ratio**2 + 1) / (2 * ratio)


def _inputs(dtype: Any, rng: np.random.Generator) -> np.ndarray:
    """Probed inputs: a core around zero, where activations live, and large magnitudes."""
    info = jnp.finfo(dtype)
    reach = min(36.0, float(np.log10(float(info.max))) - 1, -float(np.log10(float(info.tiny))) - 1)
    core = rng.uniform(-3, 3, _CORE)
    # Evenly over magnitudes, with alternating signs; jittered, so that no two states tie.
    near = np.linspace(-1, 2, _WIDE // 2) + rng.uniform(0, 6 / _WIDE, _WIDE // 2)
    far = rng.uniform(-reach, reach, _WIDE - _WIDE // 2)
    wide = np.resize([1, -1], _WIDE) * 10.0 ** np.concatenate([near, far])
    return np.concatenate([core, wide]).astype(dtype)


def _samples(aval: Any, rng: np.random.Generator) -> np.ndarray:
    """Samples for unknown operands: any boolean, any moderate number of either sign."""
    n = _CORE + _WIDE
    if jnp.issubdtype(aval.dtype, jnp.inexact):
        return (rng.choice([-1, 1], n) * 2.0 ** rng.uniform(-2, 2, n)).astype(aval.dtype)
    if aval.dtype == np.bool_:
        return rng.integers(0, 2, n).astype(bool)
    return rng.integers(0, 4, n).astype(aval.dtype)


def _drawn(values: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Known operands: entries drawn from their own values."""
    return rng.choice(values.ravel(), _CORE + _WIDE)


# Equations that preserve "one number per entry".
_HANDING_ON = _jax.SAME_VALUES | {lax.broadcast_in_dim_p, lax.reshape_p, lax.squeeze_p}


def _pointwise(
    program: Program,
    args: Sequence[np.ndarray],
    slots: np.ndarray | None = None,
    forced: Mapping[Any, tuple[np.ndarray, bool]] = MappingProxyType({}),
) -> list[np.ndarray]:
    """Evaluate the program with one number in place of every array.

    The result of an equation that is not pointwise (a norm under `stop_gradient`) is unknown, and
    sampled like any other operand, in the same way at every call; `slots` says which samples to take.
    `forced`: booleans that are set to true or false at some of the probes.
    """
    jaxpr = program.jaxpr
    taken = slice(None) if slots is None else slots
    size = len(args[0])
    with _jax.evaluated_now(), jax.debug_nans(False):
        env: dict[Any, Any] = {}
        for i, (var, const) in enumerate(zip(jaxpr.constvars, program.consts, strict=True)):
            known, rng = _jax.concrete(const), np.random.default_rng([3, i])
            env[var] = (_samples(var.aval, rng) if known is None else _drawn(known, rng))[taken]
        env.update((v, jnp.asarray(a, v.aval.dtype)) for v, a in zip(jaxpr.invars, args, strict=True))

        def read(atom: Any) -> Any:
            value = jnp.asarray(atom.val) if isinstance(atom, Literal) else env[atom]
            return jnp.broadcast_to(value, (size,))

        places = {id(eqn): i for i, eqn in enumerate(jaxpr.eqns)}
        for eqn in _needed(jaxpr):
            if eqn.primitive in POINTWISE or eqn.primitive is _jax.add_jaxvals_p:
                found = _jax.bind_now(eqn, [read(v) for v in eqn.invars])
                env.update(zip(eqn.outvars, found, strict=True))
            elif eqn.primitive in _HANDING_ON:
                env[eqn.outvars[0]] = read(eqn.invars[0])
            else:
                rng = np.random.default_rng([4, places[id(eqn)]])
                env.update((v, _samples(v.aval, rng)[taken]) for v in eqn.outvars)
            for v in eqn.outvars:
                if v in forced:
                    at, value = forced[v]
                    env[v] = jnp.where(at, value, env[v])
        return [np.asarray(read(v), np.float64) for v in jaxpr.outvars]
