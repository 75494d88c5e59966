"""Steps of a walk: a node each, and where Phase III takes its output's cotangent from.

Environments are dictionaries from variables to values: `fixed` holds weights, data and what their
prologues make, which every phase can read; `x` and `h` hold activations and cotangents of the variables
that are alive. Cotangents carry exponents (`scale`).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np

from .. import _jax
from ..errors import PlanMismatchError
from ..execute import certificate
from ..execute.barriers import Env, barrier
from ..execute.certificate import Measured
from ..execute.precision import PRODUCTS, as_cotangent
from ..execute.residuals import Residual, nbytes
from ..execute.scale import Cotangents, Exponent, difference, is_none, shifted, sum_of
from ..execute.sinks import Gradients, GradientSink
from ..network.cutting import Network, Node
from ..rules import chain, fragments
from ..rules.fragments import Ask, FragmentRule, Place
from ..rules.registry import Alarm, Gain
from ..trace.graph import Block
from .base import Row, format_bytes
from .costs import NodeCost
from .linearised import Linearised, cast, linearised, restricted, rule_through
from .sources import Anchor, Copies, Given, Restored, Source, Unneeded, Vijp

if TYPE_CHECKING:
    from .walk import WalkExecutor

# In an environment of a scan's layer:
GRID_OFFSET = "moved"  # how far the layers before it have moved grids
EXPONENT = "exponent"  # what exponents in it are relative to
WALKED = ("vijp", "fragment")  # sources that take the inputs' cotangents


class Scale(NamedTuple):
    """Exponents of the outputs' cotangents: as they arrive in Phase II, and as the step uses them."""

    before: tuple[Exponent, ...]
    at: Exponent


@dataclass(eq=False, repr=False)
class Step:
    """One node of a walk, and where Phase III takes its output's cotangent from.

    `source`: "vijp"; "fragment" (a part kept in Phase II, the rest restored); "anchor" (all of it kept
    in Phase II); "given" (known from outside: a scan's outputs); "none" (not needed).
    """

    node: Node
    network: Network
    source: str
    through: tuple[Any, ...] = ()  # the inputs whose cotangents the vijp uses
    reason: str = ""
    gain: Gain = field(default_factory=lambda: Gain(1.0, mixes=False))
    measured: bool = False  # whether walking here rests on a measured gain
    place: Place = (0, 0, 0)  # how far the steps before it have moved grids of spans
    has_difference = False  # whether a cotangent is computed as a difference here

    def __post_init__(self) -> None:
        """Whatever a kind of step makes of its node, it makes here."""

    @property
    def data(self) -> Source:
        """Its source, as a plan holds it."""
        return _PLAIN_SOURCES[self.source](self.reason)

    @property
    def block(self) -> Block:
        return self.node.block

    @property
    def is_walked(self) -> bool:
        """Whether its output's cotangent is recovered from its input's."""
        return self.source in WALKED

    @property
    def walks_from(self) -> tuple[Any, ...]:
        """Inputs whose cotangents its own is recovered from."""
        return self.through if self.is_walked else ()

    @property
    def contracts(self) -> bool:
        """Whether it takes the cotangents of more numbers to those of fewer."""
        arriving = sum(v.aval.size for v in self.walks_from)
        return arriving > sum(v.aval.size for v in self.block.outputs)

    @property
    def moves(self) -> Place:
        """How far it moves the grid of the steps after it."""
        return (0, 0, 0)

    @property
    def is_stem(self) -> bool:
        """It reads no state: its gradient is computed in Phase II, as its output's cotangent passes."""
        return self.node.is_stem

    @property
    def kept_bytes(self) -> int:
        """What Phase I keeps."""
        return 0

    @property
    def memo_bytes(self) -> int:
        """What Phase II keeps."""
        if self.source != "anchor" or self.is_stem:  # a stem's is the h that Phase II ends with
            return 0
        return nbytes(*(v.aval for v in self.block.outputs))

    is_loop = False

    @property
    def inner_steps(self) -> list[Step]:
        """Steps in its body, if it is a loop that is walked."""
        return []

    @property
    def is_anchored(self) -> bool:
        """Whether a whole cotangent is kept, besides the one that a sweep starts from."""
        return self.source == "anchor" and not self.is_stem

    @property
    def blocks_walked(self) -> int:
        return int(self.is_walked)

    def working_bytes(self, states: int, *, has_h: bool) -> int:
        """What Phase III works on: `states` before and after it, and cotangents.

        `has_h`: whether that of its input is at hand.
        """
        walked = self.through or self.block.inputs  # a sum takes its cotangent from one summand
        h_in = nbytes(*(v.aval for v in walked)) if has_h else 0
        # An anchor is a memo already.
        h_out = nbytes(*(v.aval for v in self.block.outputs)) if self.is_walked else 0
        return states + h_in + h_out

    def weight_alarms(self, envs: Sequence[Any], table: Any) -> Iterable[Alarm]:
        """What values of its operands say against it."""
        return ()

    # -- the report --------------------------------------------------------------------------------
    @property
    def mode(self) -> str:
        """What a report calls it."""
        if self.is_stem:
            return "stem"
        return {"vijp": "walk", "given": "walk", "none": "pass"}.get(self.source, self.source)

    @property
    def why(self) -> str:
        return self.reason

    def rows(self, cost: NodeCost, walk: WalkExecutor, depth: int = 0, times: int = 1) -> list[Row]:
        """As a report shows it: one row, and those of its body."""
        if self.node.is_aside:
            return []
        why = self.why + ("; Phase I run again" if walk.recomputed else "")
        gain = self.gain.factor if self.is_walked else None
        size = self.kept_bytes + self.memo_bytes
        about = (self.mode, size, gain, why, cost.m_x, cost.m_theta, depth, times)
        way_out = "" if self.is_walked or self.node.rule is not None else self.node.verdict.way_out
        return [Row.of(self.node, *about, way_out=way_out)]

    def is_read_by(self, variables: Collection[Any]) -> None:
        """What the steps around it read."""

    def operands(self, env: Env, fixed: Env) -> list[Any]:
        """Values of the operands; what later phases cannot read is None there."""
        return [fixed[v] if v in fixed else env.get(v) for v in self.block.operands]

    # -- the certificate -------------------------------------------------------------------------
    def places(self, limit: float) -> list[certificate.Place]:
        """Where its own sweep measures errors, which may be at most `limit`."""
        del limit
        return []

    def place_of(self, kind: str, limit: float, *, ends: bool = False) -> certificate.Place:
        """Its output, as a place where an error is measured."""
        line = _jax.source_line(self.block.eqns[-1]) if self.block.eqns else ""
        return certificate.Place(kind, self.node.describe(), line, limit, ends=ends)

    def hold_to(self, limit: float) -> None:
        """Let errors inside it be at most so large."""

    # -- the three phases ------------------------------------------------------------------------
    def run(self, fixed: Env, x: Env, *, again: bool = False) -> None:
        """Forward, keeping nothing: write the outputs to `x`."""
        block = self.block
        made = (*block.outputs, *block.exports)
        values = block.values(made, [x[v] for v in block.inputs], self.operands(x, fixed))
        x.update(zip(made, values, strict=True))

    def keep(self, fixed: Env, x: Env, *, again: bool = False) -> Any:
        """Phase I: run, write the outputs to `x`, return what is kept.

        `again`: another pass prints and calls back.
        """
        raise NotImplementedError

    def keep_late(self, fixed: Env, x: Env) -> Any:
        """What `keep` would have kept, where there was no Phase I; `x` is left as it is."""
        return self.keep(fixed, dict(x))

    # In the body of a scan with a pullback that need not be linear, where exponents are relative to the
    # scan's and that pullback must see the cotangent itself.
    pinned = False

    @property
    def rescales(self) -> bool:
        """Whether its pullback is linear, so that cotangents may be multiplied by powers of two."""
        return not (self.pinned or self.node.has_own_pullback)

    def back(self, fixed: Env, kept: Any, h: Cotangents, scale: Scale, out: GradientSink) -> Any:
        """Phase II: from the outputs' cotangents to the inputs'; returns what it keeps (its memo)."""
        raise NotImplementedError

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
        """Phase III: outputs and their cotangents (at `scale.at`) to `x` and `h`; returns errors."""
        raise NotImplementedError

    def no_memo(self, seeds: Sequence[Any] = ()) -> Any:
        """In place of what Phase II keeps, where there was none."""
        del seeds
        return ()

    @property
    def weights_in_back(self) -> tuple[Any, ...]:
        """Operands whose gradients Phase II hands out."""
        return self.node.weights if self.is_stem else ()

    @property
    def weights_in_sweep(self) -> tuple[Any, ...]:
        """Operands whose gradients Phase III hands out."""
        return () if self.is_stem or self.source == "none" else self.node.weights

    def prepare(self, fixed: Env) -> Any:
        """Weight-only factors of the vijp."""
        del fixed
        return ()


class BlockStep(Step):
    """A node that is one block."""

    wider: Block  # the block that cotangents go through: in more precision where that is asked for
    inner: Block  # of that, what the rule sees: inputs that are not walked through are operands
    precision: Any = None
    looped = False  # whether it stands in the body of a scan, where grids of spans move with the layer
    ask = Ask()  # what the rule of a fragment was asked for

    def __post_init__(self) -> None:
        self._linearise()

    @property
    def data(self) -> Source:
        if not self.is_walked:
            return super().data
        places = tuple(self.block.inputs.index(v) for v in self.through)
        about = (self.reason, places, self.gain, self.measured)
        if self.source == "vijp":
            return Vijp(*about)
        assert isinstance(self.node.rule, FragmentRule)
        return Restored(*about, self.node.rule.label, self.ask)

    @property
    def moves(self) -> Place:
        if self.source != "fragment":
            return (0, 0, 0)
        assert isinstance(self.node.rule, FragmentRule)
        return (*self.node.rule.moves(self.inner), 0, 0, 0)[:3]

    @property
    def has_difference(self) -> bool:
        rule = self.node.rule
        return self.source == "fragment" and isinstance(rule, FragmentRule) and rule.has_difference

    @property
    def memo_bytes(self) -> int:
        return self.fragment_bytes if self.source == "fragment" else super().memo_bytes

    @property
    def why(self) -> str:
        if self.source != "fragment":
            return self.reason
        share = 100 * self.memo_bytes / max(1, nbytes(*(v.aval for v in self.block.outputs)))
        text = f"{share:.2g} %" if share < 10 else f"{share:.0f} %"
        text = f"fragment: {text} of the cotangent; {self.reason}"
        return text + f"; Phase I keeps {format_bytes(self.kept_bytes)}" if self.kept_bytes else text

    def weight_alarms(self, envs: Sequence[Any], table: Any) -> Iterable[Alarm]:
        del table
        rule = self.node.rule
        if not self.is_walked or rule is None:
            return
        block = restricted(self.block, self.through)
        for env in envs:
            if all(v in env for v in block.operands):
                for alarm in rule.weight_alarms(block, [env[v] for v in block.operands]):
                    yield dataclasses.replace(alarm, place="\n  " + chain.place(block))

    def _place(self, fixed: Env) -> Place:
        return moved(fixed, self.place)

    def in_precision(self, precision: Any) -> None:
        """Do the products of the cotangents' chain in a precision of their own."""
        if any(e.primitive in PRODUCTS for e in self.block.eqns):
            self.precision = precision
            self._linearise()

    def _linearise(self) -> None:
        places = tuple(self.block.inputs.index(v) for v in self.through)
        key = ("walk", self.node.model, self.node.rule, places, self.is_walked, self.precision)
        memory = self.network.memory
        if key not in memory:
            memory[key] = linearised(self.node, self.network, places, self.is_walked, self.precision)
        self.linearised: Linearised = memory[key]
        self.wider, self.inner = self.linearised.wider, self.linearised.inner

    @property
    def residual(self) -> Residual:
        """What Phase I keeps, and how the pullback is restored from it."""
        return self.linearised.residual

    @property
    def fragment_bytes(self) -> int:
        """What is kept of the output's cotangent, which may depend on where its grid lies."""
        key = (self.place, self.looped)
        sizes = self.linearised.fragment_sizes
        if key not in sizes:
            sizes[key] = self._fragment_bytes()
        return sizes[key]

    def _fragment_bytes(self) -> int:
        rule, inner = self.node.rule, self.inner
        assert isinstance(rule, FragmentRule)
        traced = self.looped and any(self.moves)

        def made(x: Any, operands: Any, h: Any, place: Any) -> Any:
            _, kept = rule.keep(inner, x, operands)
            place = place if traced else self.place
            return rule.fragment(inner, rule.prepare(inner, operands), kept, h, place)

        outputs = tuple(_jax.struct(v.aval) for v in inner.outputs)
        x, operands = inner.structs()
        place = (jax.ShapeDtypeStruct((), np.int32),) * 3
        return nbytes(*jax.tree.leaves(jax.eval_shape(made, tuple(x), operands, outputs, place)))

    @property
    def kept_bytes(self) -> int:
        return self.residual.bytes

    probed_outside = False  # whether a scan probes the weights of all layers at once

    def places(self, limit: float) -> list[certificate.Place]:
        return [] if self.probed_outside else self.declared_places

    @functools.cached_property
    def declared_places(self) -> list[certificate.Place]:
        """Weights that the vijp takes to have a structure, and how far they may be from it."""
        rule = self.node.rule
        if not self.is_walked or rule is None:
            return []
        line = _jax.source_line(self.block.eqns[-1])
        declared = rule.declared(restricted(self.block, self.through))  # as exact as the user's dtype
        return [certificate.Place("declaration", what, line, limit) for what, limit in declared]

    def probe(self, env: Env) -> list[Measured]:
        """How far they are from it, by a few random vectors."""
        places = self.declared_places
        if not places:
            return []
        operands = self._operands_of_rule(env)
        assert operands is not None
        errors = self._program("probe")(operands)
        return [Measured(e, place) for e, place in zip(errors, places, strict=True)]

    def prepare(self, fixed: Env) -> Any:
        return self._prepare(fixed) if self.is_walked else None

    def _prepare(self, env: Env) -> Any:
        """Factors, or None where an operand is not at hand."""
        operands = self._operands_of_rule(env)
        return None if operands is None else self._program("prepare")(operands)

    def _operands_of_rule(self, env: Env) -> list[Any] | None:
        """Values of the operands that the rule reads, or None where one is not at hand."""
        block, wider = self.block, self.wider
        known = dict(
            zip((*wider.inputs, *wider.operands), (*block.inputs, *block.operands), strict=True)
        )
        if not all(known[v] in env for v in self.inner.operands):
            return None
        values = cast(self.inner.operands, [env[known[v]] for v in self.inner.operands])
        return [values[v] for v in self.inner.operands]

    def keep(self, fixed: Env, x: Env, *, again: bool = False) -> Any:
        block, operands = self.block, self.operands(x, fixed)
        state = [x[v] for v in block.inputs]
        y, kept = self._program("forward")(state, operands)
        x.update(zip(block.outputs, y, strict=True))
        if block.exports:
            x.update(zip(block.exports, block.values(block.exports, state, operands), strict=True))
        return kept

    def back(self, fixed: Env, kept: Any, h: Cotangents, scale: Scale, out: GradientSink) -> Any:
        block = self.block
        arriving = tuple(h.pop(v) for v in block.outputs)
        memo: Any = arriving if self.source == "anchor" else ()
        if self.is_stem:
            out.add(self._gradients(fixed, {}, arriving, scale.at)[1])
            return memo
        if not block.inputs:  # it reads what only a forward pass has: its gradient waits for the sweep
            return memo
        operands = self.operands({}, fixed)
        if self.source == "fragment":
            rule = self.node.rule
            assert isinstance(rule, FragmentRule)
            ours, pullback = self.residual.restore(kept, operands)
            wide = self.linearised.widened(arriving)
            factors = self._prepare(fixed) if rule.reads_factors else None
            memo = rule.fragment(self.inner, factors, ours, wide, self._place(fixed))
            leaving = (ours if pullback is None else pullback)(wide)
        else:
            leaving = self._program("pull_back")(kept, operands, arriving)
        for v, a in zip(block.inputs, leaving, strict=True):
            h.put(v, as_cotangent(v, a), scale.at)
        return memo

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
        block = self.block
        errors: list[Measured] = []
        if self.source == "anchor":
            leaving: Any = memo
        elif self.is_walked:
            errors = [] if self.probed_outside else self.probe({**fixed, **x})
            rule = self.node.rule
            assert rule is not None
            operands = self.operands({}, fixed)
            factors = self._prepare({**fixed, **x}) if factors is None else factors
            for v in self.through:
                h.move(v, scale.at)
            wide = [
                h[v].astype(t.aval.dtype) for v, t in zip(self.through, self.inner.inputs, strict=True)
            ]
            if isinstance(rule, FragmentRule) and self.source == "fragment":
                ours, _ = self.residual.restore(kept, operands)
                place = self._place(fixed)
                if not self.looped:
                    # What needs no h XLA would make for all blocks at once, as early as it can.
                    box = [memo, wide, factors]
                    barrier((box, [0, 1, 2]))
                    memo, wide, factors = box
                leaving = rule.restore(self.inner, factors, ours, memo, tuple(wide), place)
            else:
                leaving = self._program("recover")(kept, operands, factors, tuple(wide))
        elif self.source == "given":
            for v in block.outputs:
                h.move(v, scale.at)
            leaving = tuple(h[v] for v in block.outputs)
        else:
            leaving = None
        for v in block.inputs:
            h.pop(v, None)
        if leaving is not None:
            for v, a in zip(block.outputs, leaving, strict=True):
                h.put(v, a, scale.at)
        wanted = leaving is not None and self.node.weights and not self.is_stem
        y, gradients = self._gradients(fixed, x, leaving if wanted else None, scale.at)
        x.update(zip((*block.outputs, *block.exports), y, strict=True))
        out.add(gradients)
        return errors

    def _gradients(self, fixed: Env, x: Env, h: Any, exponent: Exponent) -> tuple[Any, Gradients]:
        """(outputs and exports, gradients of the weights where h is given, with its exponent)."""
        block, weights = self.block, self.node.weights
        operands = dict(zip(block.operands, self.operands(x, fixed), strict=True))
        state = [x[v] for v in block.inputs]
        shown = (*block.outputs, *block.exports)
        if h is None:
            return block.values(shown, state, [operands[v] for v in block.operands]), {}
        exponent = sum_of(fixed.get(EXPONENT, 0), exponent)
        # What is None is no argument of a program; the number 0 would be one.
        by = None if is_none(exponent) else exponent
        y, found = self._program("gradients")(state, [operands[v] for v in block.operands], h, by)
        return y, dict(zip(weights, found, strict=True))

    def _program(self, name: str) -> Callable[..., Any]:
        """One of the functions of `Linearised`, shared with the blocks that compute the same."""
        shares = not (self.looped or self.node.effects) and self.network.uses[self.node.model] > 1
        return self.linearised.shared(name) if shares else getattr(self.linearised, name)


def moved(fixed: Env, place: Place) -> Place:
    """How far grids have moved, here."""
    return tuple(a + b for a, b in zip(place, fixed.get(GRID_OFFSET, (0, 0, 0)), strict=True))


class ForkStep(Step):
    """Copies. All but one of the copies' cotangents that a walk needs are kept; the last is the rest."""

    kept_copies: tuple[int, ...] = ()
    given: tuple[int, ...] = ()  # copies whose cotangents are known anyhow
    difference: int | None = None  # the copy whose cotangent is what the kept ones leave of the whole

    @property
    def data(self) -> Source:
        return Copies(self.reason, self.kept_copies, self.given, self.difference)

    @property
    def mode(self) -> str:
        return "fork"

    @property
    def walks_from(self) -> tuple[Any, ...]:
        return self.block.inputs if self.difference is not None else ()

    @property
    def why(self) -> str:
        return f"keeps {len(self.kept_copies)} of {len(self.block.outputs)} cotangents"

    @property
    def has_difference(self) -> bool:
        return self.difference is not None and bool(self.kept_copies or self.given)

    @property
    def memo_bytes(self) -> int:
        return len(self.kept_copies) * nbytes(self.block.inputs[0].aval)

    def keep(self, fixed: Env, x: Env, *, again: bool = False) -> Any:
        (v,) = self.block.inputs
        x.update((copy, x[v]) for copy in self.block.outputs)
        return ()

    def back(self, fixed: Env, kept: Any, h: Cotangents, scale: Scale, out: GradientSink) -> Any:
        copies = self.block.outputs
        arriving = [h.pop(copy) for copy in copies]
        # Each copy keeps the exponent that it has: the smallest may be lost in the sum.
        summands = [
            shifted(a, difference(e, scale.at)) for a, e in zip(arriving, scale.before, strict=True)
        ]
        h.put(self.block.inputs[0], sum(summands[1:], summands[0]), scale.at)
        return tuple(arriving[i] for i in self.kept_copies)

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
        (v,), copies = self.block.inputs, self.block.outputs
        whole = h.pop(v, None)
        x.update((copy, x[v]) for copy in copies)
        for i, value in zip(self.kept_copies, memo, strict=True):
            h.put(copies[i], value, scale.before[i])
        if self.difference is not None:
            places = (*self.kept_copies, *self.given)
            known = [shifted(h[copies[i]], difference(h.exponent(copies[i]), scale.at)) for i in places]
            rest = whole - sum(known[1:], known[0]) if known else whole
            h.put(copies[self.difference], rest, scale.at)
        return []


class AsideStep(Step):
    """Values without a derivative: computed in Phase I, and again in Phase III where they are read."""

    again = True  # whether somebody reads its values in Phase III

    def is_read_by(self, variables: Collection[Any]) -> None:
        results = self.network.results
        self.again = any(v in variables or v in results for v in self.block.exports)

    def keep(self, fixed: Env, x: Env, *, again: bool = False) -> Any:
        self.run(fixed, x)
        return ()

    def keep_late(self, fixed: Env, x: Env) -> Any:
        return ()  # what prints or calls back has done so

    def back(self, fixed: Env, kept: Any, h: Cotangents, scale: Scale, out: GradientSink) -> Any:
        return ()

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
        if self.again and not self.node.effects:
            self.run(fixed, x)
        return []


def bind_steps(
    network: Network,
    start: int,
    stop: int,
    sources: Sequence[Source],
    *,
    in_loop: bool = False,
    loops: Mapping[int, Step] = MappingProxyType({}),
) -> list[Step]:
    """One step for each of the nodes [start, stop).

    `in_loop`: they are the body of a scan. `loops`: steps of scans, by place, that are bound already.
    """
    nodes = network.nodes[start:stop]
    read = {v for n in nodes for v in (*n.block.operands, *n.block.inputs)}
    # In a body, results of a scan may be what the outer loop hands on.
    read |= network.results if in_loop else set()
    steps: list[Step] = []
    place = (0, 0, 0)
    for i, (node, source) in enumerate(zip(nodes, sources, strict=True)):
        step = loops.get(i) or BINDERS[type(source)](node, network, source, in_loop)
        step.is_read_by(read)
        # Grids of spans move from block to block.
        step.place = place
        place = tuple(a + b for a, b in zip(place, step.moves, strict=True))
        steps.append(step)
    return steps


def _bind_walked(node: Node, network: Network, source: Any, in_loop: bool) -> Step:
    through = tuple(node.block.inputs[i] for i in source.through)
    rule, verdict, block = rule_through(node, network, through)
    kind = "vijp"
    if isinstance(source, Restored):
        kind = "fragment"
        rule = _fragment_rule(node, network, block, source)
        verdict = rule.verdict(block)
    if rule is None:
        raise PlanMismatchError(
            f"method=: the plan walks through {node.describe()}, which has no vijp here: "
            f"{verdict.reason}. Make it anew with moonwalk.plan(fun, *args)."
        )
    bound = node.served_by(rule, verdict)
    step = BlockStep(bound, network, kind, through, source.reason, source.gain, source.measured)
    step.looped = in_loop
    step.ask = source.ask if isinstance(source, Restored) else Ask()
    return step


def _fragment_rule(node: Node, network: Network, block: Block, source: Restored) -> FragmentRule:
    key = ("way", node.model, source.through, source.label, source.ask)
    if key not in network.memory:
        found = [s for s in fragments.candidates(block, source.ask) if s.label == source.label]
        if not found:
            raise PlanMismatchError(
                f"method=: the plan keeps the fragment {source.label!r} of {node.describe()}, which "
                "this version of moonwalk does not know. Make it anew with moonwalk.plan(fun, *args)."
            )
        network.memory[key] = found[0]
    return network.memory[key]


def _bind_plain(node: Node, network: Network, source: Source, in_loop: bool) -> Step:
    kind = next(k for k, cls in _PLAIN_SOURCES.items() if isinstance(source, cls))
    if node.is_aside:
        return AsideStep(node, network, kind, reason=source.reason)
    step = BlockStep(node, network, kind, reason=source.reason)
    step.looped = in_loop
    return step


def _bind_copies(node: Node, network: Network, source: Any, in_loop: bool) -> Step:
    del in_loop
    step = ForkStep(node, network, "none", reason=source.reason)
    step.kept_copies, step.given, step.difference = source.kept, source.given, source.difference
    return step


_PLAIN_SOURCES: dict[str, type[Source]] = {"anchor": Anchor, "given": Given, "none": Unneeded}

# How the source of each kind becomes a step; loops add their own.
BINDERS: dict[type[Source], Callable[[Node, Network, Any, bool], Step]] = {
    Vijp: _bind_walked,
    Restored: _bind_walked,
    Copies: _bind_copies,
    **dict.fromkeys(_PLAIN_SOURCES.values(), _bind_plain),
}
