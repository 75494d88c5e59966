"""A walk: nodes differentiated by Moonwalk, one step for every node.

    Phase I    x₀ → x₁ → … → x_L          keep per node only what ∂y/∂x needs
    Phase II   h_L → … → h₁ → h₀          cotangents alone; keep the planned anchors and fragments
    Phase III  (x₀, h₀) → … → (x_L, h_L)  x again, h by vijp (or from an anchor), g = vjp(node, θ, h)

Environments are dictionaries from variables to values: `fixed` holds weights, data and what their
prologues make, which every phase can read; `x` and `h` hold activations and cotangents of the variables
that are alive. Cotangents carry exponents (`scale`). Phase II rescales them where it sketches them for
the certificate, and Phase III undoes that step by step: between two nodes a cotangent has the same
exponent in both.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import numpy as np

from .. import _jax
from ..errors import PlanMismatchError
from ..execute import certificate
from ..execute.barriers import Env, barrier
from ..execute.certificate import Measured
from ..execute.precision import PRODUCTS, as_cotangent, is_narrow, precise, widened
from ..execute.residuals import Residual, nbytes
from ..execute.scale import (
    Cotangents,
    Exponent,
    difference,
    exponent_for,
    is_none,
    largest,
    shifted,
    sum_of,
)
from ..execute.shared import Shared
from ..execute.sinks import Gradients, GradientSink
from ..network.cutting import Network, Node, find_rule
from ..rules import chain, fragments
from ..rules.fragments import Ask, FragmentRule, Place
from ..rules.registry import Alarm, Gain, Rule, Verdict
from ..trace.graph import Block
from .base import Executor, Facts, Row, Segment, format_bytes, line_of
from .checks import check_limit, check_sources
from .codec import in_plans
from .costs import NodeCost
from .sources import Anchor, Copies, Given, Restored, Source, Unneeded, Vijp

# In an environment of a scan's layer:
GRID_OFFSET = "moved"  # how far the layers before it have moved grids
EXPONENT = "exponent"  # what exponents in it are relative to
WALKED = ("vijp", "fragment")  # sources that take the inputs' cotangents


@in_plans
@dataclass(frozen=True)
class Walk(Segment):
    """Nodes that are walked: where the sweep takes each cotangent from."""

    sources: tuple[Source, ...] = ()
    rerun: bool = False  # Phase I keeps its start alone, and is run again before Phase II
    precision: Any = None  # of products in the cotangents' chain; None: the ambient one
    growth: float = 1.0  # how much relative error is predicted to grow along it, at most
    limit: float = math.inf  # how large its certificate may be

    def bind(self, network: Network) -> WalkExecutor:
        check_limit("Walk", self.limit)
        check_sources(network.nodes[self.start : self.stop], self.sources)
        steps = bind_steps(network, self.start, self.stop, self.sources)
        walk = WalkExecutor(network, self.start, self.stop, steps, growth=self.growth)
        walk.recomputed = self.rerun
        if self.precision is not None:
            walk.in_precision(self.precision)
        walk.hold_to(self.limit)
        return walk


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
        return [Row(self.node.describe(), line_of(self.node), *about)]

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
            memory[key] = _linearised(self.node, self.network, places, self.is_walked, self.precision)
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
        values = _cast(self.inner.operands, [env[known[v]] for v in self.inner.operands])
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


class Linearised:
    """What a walk needs of a block, derived once for all blocks that compute the same.

    Its functions are of arrays alone, so that these blocks can share them as programs. The residual
    takes a trace, and is made when it is asked for: a fragment that keeps too much is not.
    """

    def __init__(
        self,
        node: Node,
        rule: Rule | None,
        wider: Block,
        inner: Block,
        trace: Callable[[], Residual],
    ):
        self.node, self._rule = node, rule
        self.wider, self.inner, self._trace = wider, inner, trace
        self.fragment_sizes: dict[Any, int] = {}  # by where their grid lies
        self._shared: dict[str, Shared] = {}

    @functools.cached_property
    def residual(self) -> Residual:
        return self._trace()

    @property
    def rule(self) -> Rule:
        assert self._rule is not None
        return self._rule

    def shared(self, name: str) -> Shared:
        """One of the functions below, as a program."""
        if name not in self._shared:
            self._shared[name] = Shared(getattr(self, name))
        return self._shared[name]

    def forward(self, x: Sequence[Any], operands: Sequence[Any]) -> Any:
        """Phase I: (outputs, what is kept)."""
        return self.residual.forward(x, operands)

    def pull_back(self, kept: Any, operands: Sequence[Any], h: Sequence[Any]) -> Any:
        """Phase II: the inputs' cotangents, from the outputs'."""
        ours, pullback = self.residual.restore(kept, operands)
        return (ours if pullback is None else pullback)(self.widened(h))

    def prepare(self, operands: Sequence[Any]) -> Any:
        """Factors of the vijp. `operands`: those that the rule reads."""
        return self.rule.prepare(self.inner, operands)

    def probe(self, operands: Sequence[Any]) -> list[Any]:
        """How far declared weights are from their structure."""
        return self.rule.probe(self.inner, operands)

    def recover(self, kept: Any, operands: Sequence[Any], factors: Any, h: Sequence[Any]) -> Any:
        """Phase III: the outputs' cotangents, from the inputs'."""
        ours, _ = self.residual.restore(kept, operands)
        return self.rule.vijp(self.inner, factors, ours, tuple(h))

    def gradients(
        self, x: Sequence[Any], operands: Sequence[Any], h: Sequence[Any], exponent: Any
    ) -> tuple[Any, list[Any]]:
        """(outputs and exports, gradients of the weights) where h, with its exponent, is of the outputs.

        `exponent`: None where nothing was rescaled.
        """
        block = self.node.block
        # The user's own precision: a gradient is one product away from its cotangent.
        wider = self.wider if is_narrow(block) else block
        at = [block.operands.index(v) for v in self.node.weights]
        values = _cast((*wider.inputs, *wider.operands), (*x, *operands))

        def run(*new: Any) -> Any:
            values.update(zip((wider.operands[i] for i in at), new, strict=True))
            out = wider.values(
                (*wider.outputs, *wider.exports),
                [values[v] for v in wider.inputs],
                [values[v] for v in wider.operands],
            )
            return out[: len(block.outputs)], out[len(block.outputs) :]

        y, pullback, exports = jax.vjp(run, *(values[wider.operands[i]] for i in at), has_aux=True)
        arriving = tuple(a.astype(v.aval.dtype) for a, v in zip(h, wider.outputs, strict=True))
        found = [
            shifted(g, 0 if exponent is None else exponent).astype(v.aval.dtype)
            for v, g in zip(self.node.weights, pullback(arriving), strict=True)
        ]
        out = (*y, *exports)
        if wider is not block:
            out = block.values((*block.outputs, *block.exports), x, operands)
        return out, found

    def widened(self, h: Sequence[Any]) -> tuple[Any, ...]:
        """Cotangents of the outputs, as precise as they are pulled back."""
        return tuple(a.astype(v.aval.dtype) for a, v in zip(h, self.wider.outputs, strict=True))


def _linearised(
    node: Node, network: Network, places: Sequence[int], is_walked: bool, precision: Any
) -> Linearised:
    rule, block = node.rule, node.model.block
    wider = block if precision is None else precise(block, precision)
    if is_narrow(block):
        wider = widened(block) or block
    inner = restricted(wider, [wider.inputs[i] for i in places]) if is_walked else wider
    x, operands = block.structs()

    def linearize(x: Sequence[Any], operands: Sequence[Any]) -> Any:
        y = block(x, operands)
        if not block.inputs:
            return y, (None, None)
        values = _cast((*wider.inputs, *wider.operands), (*x, *operands))
        wide = [values[v] for v in wider.operands]

        def run(*x: Any) -> Any:
            return wider(x, wide)

        if not is_walked and (rule is None or not rule.keeps_pullback):
            return y, (None, jax.vjp(run, *(values[v] for v in wider.inputs))[1])
        assert rule is not None
        own, kept = rule.keep(
            inner, tuple(values[v] for v in inner.inputs), [values[v] for v in inner.operands]
        )
        y = own if wider is block else y
        if inner is wider and rule.keeps_pullback:
            return y, (kept, None)
        return y, (kept, jax.vjp(run, *(values[v] for v in wider.inputs))[1])

    kinds = network.kinds(block.operands)
    trace = functools.partial(Residual, linearize, x, operands, kinds, rerun=not node.effects)
    return Linearised(node.model, rule, wider, inner, trace)


def rule_through(node: Node, network: Network, through: Sequence[Any]) -> tuple[Any, Verdict, Block]:
    """(rule, verdict, block that it sees) of a node that is walked through some of its inputs."""
    model = node.model
    places = tuple(node.block.inputs.index(v) for v in through)
    key = ("rule", model, places)
    if key not in network.memory:
        block = restricted(model.block, [model.block.inputs[i] for i in places])
        found = (model.rule, model.verdict) if block is model.block else find_rule(block)
        network.memory[key] = (*found, block)
    return network.memory[key]


def _cast(variables: Sequence[Any], values: Sequence[Any]) -> Env:
    """Values by variable, in the variables' dtypes."""
    return {
        v: a if a is None or a.dtype == v.aval.dtype else a.astype(v.aval.dtype)
        for v, a in zip(variables, values, strict=True)
    }


def moved(fixed: Env, place: Place) -> Place:
    """How far grids have moved, here."""
    return tuple(a + b for a, b in zip(place, fixed.get(GRID_OFFSET, (0, 0, 0)), strict=True))


def restricted(block: Block, through: Sequence[Any]) -> Block:
    """The block with some of its inputs as operands."""
    if tuple(through) == block.inputs:
        return block
    rest = tuple(v for v in block.inputs if v not in through)
    return Block(
        block.eqns,
        tuple(through),
        block.outputs,
        (*block.operands, *rest),
        block.exports,
        block.declarations,
        block.names,
        block.constants,
    )


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


@dataclass(eq=False, repr=False)
class WalkExecutor(Executor):
    """Consecutive nodes [start, stop) of a network, walked."""

    network: Network
    start: int
    stop: int
    steps: list[Any]
    given: frozenset[Any] = frozenset()  # outputs whose cotangents are known in Phase III
    growth: float = 1.0  # how much relative error is predicted to grow along it, at most
    limit: float = math.inf  # how large its certificate may be
    recomputed: bool = False  # Phase I keeps its start alone, and is run again before Phase II
    is_body: bool = False  # of a scan, which compares the carry's cotangents itself
    precision: Any = None

    def __post_init__(self) -> None:
        trained = [
            i
            for i, s in enumerate(self.steps)
            if (s.node.weights and not s.is_stem) and s.source != "none"
        ]
        self.end = trained[-1] + 1 if trained else 0  # the sweep ends at the last trainable node
        last = {}
        for i, step in enumerate(self.steps):
            for v in (*step.block.inputs, *step.block.operands):
                last[v] = i
        self.last = last

    @functools.cached_property
    def sampled(self) -> list[bool]:
        """The steps whose output's cotangent is compared with Phase II's.

        An error lasts as long as it is walked on, so it is enough to look every few layers, and where a
        walk ends: before an anchor, a kept copy, or the last weight. A step with fewer numbers out than
        in forgets part of the error that arrives, so what arrives there is looked at. What is restored
        from a fragment may forget its errors: there, every step is. Where a difference may cancel, every
        step with a weight or a product is, so that every cotangent that makes a gradient is compared.
        """
        last = self._last_walked | self._forgotten
        spacing = check_spacing(sum(s.node.is_heavy and s.is_walked for s in self.steps[: self.end]))
        passed, result = 0, []
        for i, step in enumerate(self.steps):
            walked = i < self.end and step.is_walked and not step.node.is_scan
            passed += walked and step.node.is_heavy
            regular = not self.is_body and step.node.is_heavy and passed % spacing == 0
            often = step.source == "fragment" or (
                self.has_difference and bool(step.node.is_heavy or step.node.weights)
            )
            result.append(walked and (often or i in last or regular))
        return result

    @functools.cached_property
    def _last_walked(self) -> set[int]:
        """The steps with an output behind which nothing is walked on.

        (A scan compares its layers' carry itself.)
        """
        return self._not_passed_on(self.steps[: self.end])

    @functools.cached_property
    def _forgotten(self) -> set[int]:
        """Those with an output of which a later step reads a part: a sum takes its cotangent from one
        summand, a stride from every other entry."""
        return self._not_passed_on([s for s in self.steps[: self.end] if not s.contracts])

    def _not_passed_on(self, readers: Iterable[Step]) -> set[int]:
        passed_on = {v for step in readers for v in step.walks_from}
        if self.is_body:
            passed_on.update(self.network.outputs)
        return {
            i
            for i, s in enumerate(self.steps[: self.end])
            if s.is_walked and not passed_on.issuperset(s.block.outputs)
        }

    @property
    def places(self) -> list[certificate.Place]:
        """Where Phase III measures errors, in its order."""
        sampled = self.sampled
        result: list[certificate.Place] = []
        for i, step in enumerate(self.steps[: self.end]):
            result += step.places(self.limit)
            if sampled[i]:
                result += [self._place(i)] * len(step.block.outputs)
        return result

    def _place(self, i: int) -> certificate.Place:
        return self.steps[i].place_of("walk", self.limit, ends=i in self._last_walked)

    def hold_to(self, limit: float) -> None:
        """Let the certificate be at most so large, in loops too."""
        self.limit = limit
        for step in self.steps:
            step.hold_to(limit)

    @property
    def is_measured(self) -> bool:
        """Whether its exactness rests on measured gains, which drift with the weights.

        Or on assumed ones: a declared diagonal loses nothing until something mixes.
        """
        walked = [s for s in self.steps[: self.end] if s.is_walked]
        mixes = any(s.gain.mixes for s in walked)
        return any(s.measured or (mixes and s.gain.assumed) for s in walked)

    @property
    def moves(self) -> Place:
        """How far it moves grids of spans, from its start to its end."""
        return tuple(sum(m) for m in zip((0, 0, 0), *(s.moves for s in self.steps), strict=True))

    @functools.cached_property
    def has_difference(self) -> bool:
        """Whether a cotangent is computed as a difference somewhere, which may cancel."""
        return any(s.has_difference for s in self.steps[: self.end])

    @property
    def kept_bytes(self) -> int:
        """What Phases I and II keep until Phase III."""
        return sum(s.kept_bytes + s.memo_bytes for s in self.steps)

    def in_precision(self, precision: Any) -> None:
        """Do the products of the cotangents' chain in a precision of their own."""
        self.precision = precision
        for step in self.steps:
            if hasattr(step, "in_precision"):
                step.in_precision(precision)

    @property
    def seeds(self) -> tuple[Any, ...]:
        """Variables from before the walk whose cotangents the sweep starts from."""
        made = {v for s in self.steps for v in s.block.outputs}
        return tuple(
            dict.fromkeys(v for s in self.steps[: self.end] for v in s.block.inputs if v not in made)
        )

    @property
    def data(self) -> Segment:
        sources = tuple(step.data for step in self.steps)
        about = (self.recomputed, self.precision, self.growth, self.limit)
        return Walk(self.start, self.stop, sources, *about)

    # -- as a segment ----------------------------------------------------------------------------
    def forward(self, fixed: Env, x: Env, results: frozenset[Any], *, again: bool = False) -> Any:
        start = {v: x[v] for v in self._start_state if v in x}
        with jax.named_scope("phase_1"):
            kept = self.phase_one(fixed, x, results, keep=not self.recomputed, again=again)
        return kept, start

    @property
    def _start_state(self) -> tuple[Any, ...]:
        """The activations that the sweep starts from; they are kept from Phase I."""
        made = {v for s in self.steps for v in (*s.block.outputs, *s.block.exports)}
        swept = self.steps if self.recomputed else self.steps[: self.end]
        reads = dict.fromkeys(v for s in swept for v in (*s.block.inputs, *s.block.operands))
        return tuple(v for v in reads if v not in made)

    def backward(self, fixed: Env, saved: Any, h: Env, out: GradientSink) -> list[Measured]:
        """Down with h alone, and up again with x and h side by side."""
        scaled = Cotangents({v: as_cotangent(v, a) for v, a in h.items()})
        errors = self.down_and_up(fixed, saved, h, scaled, out)
        if self.start:
            # What precedes waits for the sweep: nothing else keeps XLA from doing both side by side.
            barrier((h, list(h)), *out.parts([v for s in self.steps for v in s.node.weights]))
        return errors

    def down_and_up(
        self, fixed: Env, saved: Any, h: Env, scaled: Cotangents, out: GradientSink
    ) -> list[Measured]:
        """`scaled`: the cotangents in `h`, with exponents; those at the walk's start are left in `h`."""
        kept, start = saved
        if self.recomputed:
            with jax.named_scope("phase_1"):
                kept = self._phase_one_again(fixed, start, scaled)
        with jax.named_scope("phase_2"):
            memos, sketches, scales = self.phase_two(fixed, kept, scaled, out)
        with jax.named_scope("phase_3"):
            x = dict(start)
            state = Cotangents({v: scaled[v] for v in self.seeds if v in scaled}, scaled.exponents)
            replace_all(h, scaled.unscaled())
            box: dict[Any, Any] = {"kept": kept, "memos": memos, "sketches": sketches}
            fixed = dict(fixed)
            # Nothing of the sweep may be merged with Phase I: all that it starts from is barred.
            data = self._data_read(self.steps[: self.end], fixed)
            if self.end:
                # The stem's gradients are found in Phase II: or their cotangent would lie beside the
                # state.
                found = out.parts([v for s in self.steps if s.is_stem for v in s.node.weights])
                barrier((x, list(x)), (state, list(state)), (box, list(box)), (fixed, data), *found)
            factors = self.prepare(fixed)
            own = (box["kept"], box["memos"], box["sketches"], scales)
            return self.phase_three(fixed, *own, factors, x, state, out)

    def _phase_one_again(self, fixed: Env, start: Env, h: Env) -> list[Any]:
        """Phase I once more, from the state at the walk's start, once h has arrived at its end."""
        x, fixed = dict(start), dict(fixed)
        barrier((x, list(x)), (h, list(h)), (fixed, self._data_read(self.steps, fixed)))
        return self.phase_one(fixed, x, again=True)

    def _data_read(self, steps: Sequence[Step], fixed: Env) -> list[Any]:
        """The data among the operands: a forward pass from the very start begins with them."""
        reads = dict.fromkeys(v for s in steps for v in s.block.operands)
        return [v for v in reads if v in fixed and v not in self.network.weights]

    # -- what it takes -----------------------------------------------------------------------------
    def held(self, timeline: Any) -> int:
        residuals = 0 if self.recomputed else sum(s.kept_bytes for s in self.steps)
        return residuals + timeline.start(self)

    def forward_peak(self, timeline: Any) -> int:
        own = [0 if self.recomputed else s.kept_bytes for s in self.steps]
        return timeline.forward(self, own)

    def backward_peak(self, timeline: Any) -> int:
        steps = self.steps
        residuals = sum(s.kept_bytes for s in steps)
        memos = [s.memo_bytes for s in steps]
        top, after = 0, 0
        if self.recomputed:  # Phase I once more
            last = self.stop - 1
            top = residuals + timeline.states(last) + timeline.live[self.stop]
        for k in reversed(range(len(steps))):  # Phase II
            top = max(top, residuals + after + timeline.states(self.start + k))
            after += memos[k]
        for k, step in enumerate(steps[: self.end]):  # Phase III
            has_h = k > 0 and steps[k - 1].source != "none" and not steps[k - 1].is_stem
            seeded = k == 0 and bool(self.seeds)
            working = step.working_bytes(timeline.states(self.start + k), has_h=has_h or seeded)
            top = max(top, residuals + after + working)
            residuals -= step.kept_bytes
            after -= memos[k]
        return timeline.start(self) + top

    # -- what others ask ---------------------------------------------------------------------------
    @property
    def all_steps(self) -> list[Step]:
        """Its steps, those in the bodies of loops among them."""
        return [s for step in self.steps for s in (step, *step.inner_steps)]

    @property
    def recovers(self) -> bool:
        """Whether it recovers a cotangent anywhere: between anchors, recomputing does as well."""
        return any(s.is_walked for s in self.all_steps)

    @property
    def facts(self) -> Facts:
        steps = self.all_steps
        return Facts(
            walked=sum(s.is_walked and not s.is_loop for s in steps),
            anchors=sum(s.is_anchored for s in steps),
            fragments=sum(s.source == "fragment" for s in steps),
            rerun=int(self.recomputed),
            growth=self.growth,
            measured=self.is_measured,
            checked=True,
            walks=True,
            recovers=self.recovers,
        )

    @property
    def blocks_walked(self) -> int:
        return sum(s.blocks_walked for s in self.steps)

    @property
    def loops(self) -> Sequence[Any]:
        return [s for s in self.steps if s.is_loop and s.source != "none"]

    def rows(self, costs: Sequence[NodeCost], *, chosen: bool) -> list[Row]:
        own = costs[self.start : self.stop]
        return [r for s, cost in zip(self.steps, own, strict=True) for r in s.rows(cost, self)]

    def weight_alarms(self, table: Any) -> Iterable[Alarm]:
        return self.alarms_on([table.values], table)

    def alarms_on(self, envs: Sequence[Any], table: Any) -> Iterable[Alarm]:
        """What values of the operands (of each layer of a loop) say against it."""
        for step in self.steps:
            yield from step.weight_alarms(envs, table)

    # -- the three phases --------------------------------------------------------------------------
    def phase_one(
        self,
        fixed: Env,
        x: Env,
        retain: frozenset[Any] = frozenset(),
        *,
        keep: bool = True,
        again: bool = False,
    ) -> list[Any]:
        """Forward. Reads and writes `x`, dropping what is dead; returns what is kept, if anything is.

        `again`: what prints or calls back has done so.
        """
        kept: list[Any] = []
        waiting: list[int] = []
        for i, step in enumerate(self.steps):
            if step.node.is_heavy and waiting:
                barrier((x, list(x)), (kept, waiting))
                waiting = []
            with jax.named_scope(_name(step)):
                if again and step.node.is_silent:
                    kept.append(())
                elif keep:
                    kept.append(step.keep(fixed, x, again=again))
                    waiting.append(i)
                else:
                    step.run(fixed, x, again=again)
            self._drop(x, i, retain)
        barrier((x, list(x)), (kept, waiting))
        return kept

    def phase_two(
        self, fixed: Env, kept: Sequence[Any], h: Cotangents, out: GradientSink
    ) -> tuple[list[Any], list[Any], list[Scale]]:
        """Reverse. Reads and writes `h`, hands out the stems' gradients.

        Returns what each step keeps, sketches of its outputs' cotangents, and their exponents.
        """
        memos: list[Any] = [()] * len(self.steps)
        sketches: list[Any] = [()] * len(self.steps)
        scales = self.unscaled()
        sampled = self.sampled
        waiting: list[int] = []
        for i in reversed(range(len(self.steps))):
            step = self.steps[i]
            with jax.named_scope(_name(step)):
                before = tuple(h.exponent(v) for v in step.block.outputs)
                if sampled[i]:
                    sketches[i] = self._sketched(step, h)
                    # At once: a sketch that is put off keeps the cotangent as it was before.
                    barrier((h, list(step.block.outputs)), (sketches, [i]))
                scales[i] = scale = Scale(before, self._common_exponent(step, h))
                memos[i] = step.back(fixed, kept[i], h, scale, out)
            if step.source == "fragment":
                waiting.append(i)
            if step.node.is_heavy or step.node.is_fork:
                # A fragment that is cut out late would keep the whole cotangent till then.
                barrier((h, [v for v in step.block.inputs if v in h]), (memos, waiting))
                waiting = []
        return memos, sketches, scales

    def unscaled(self) -> list[Scale]:
        """Exponents where nothing was rescaled."""
        return [Scale((0,) * len(s.block.outputs), 0) for s in self.steps]

    def _sketched(self, step: Step, h: Cotangents) -> tuple[Any, ...]:
        """Sketches of the outputs' cotangents, all with the exponent that the step works with.

        Where it may, a walk rescales cotangents here to a moderate size. The layers of a scan have
        exponents in common, which the scan itself knows.
        """
        outputs = step.block.outputs
        pairs = [(v, certificate.sketch(h[v])) for v in outputs]
        if not step.rescales:
            common: Exponent = 0
        elif self.is_body:
            common = largest(h.exponent(v) for v in outputs)
        else:
            orders = [h.exponent(v) + certificate.exponent(s, h[v].size) for v, s in pairs]
            common = largest(map(exponent_for, orders))
        sketches = tuple(shifted(s, difference(h.exponent(v), common)) for v, s in pairs)
        for v in outputs:
            h.move(v, common)
        return sketches

    def _common_exponent(self, step: Step, h: Cotangents) -> Exponent:
        """The exponent that a step works with."""
        outputs = step.block.outputs
        if step.node.is_fork:
            return largest(h.exponent(v) for v in outputs)
        if step.rescales:
            return h.align(outputs)
        for v in outputs:  # a backward pass of someone's own, which clips perhaps
            if v in h:
                h.move(v, 0)
        return 0

    def prepare(self, fixed: Env) -> list[Any]:
        """Weight-only factors of all steps."""
        return [s.prepare(fixed) if i < self.end else None for i, s in enumerate(self.steps)]

    def phase_three(
        self,
        fixed: Env,
        kept: Sequence[Any] | None,
        memos: Sequence[Any],
        sketches: Sequence[Any],
        scales: Sequence[Scale],
        factors: Sequence[Any],
        x: Env,
        h: Cotangents,
        out: GradientSink,
        *,
        whole: bool = False,
    ) -> list[Measured]:
        """Sweep; returns the errors at `places`.

        `kept`: None where there was no Phase I, and each step is linearised as the sweep comes to it.
        `whole`: to the last node, even if no weight is left (the body of a scan).
        """
        errors: list[Measured] = []
        compared: list[Any] = []  # of these, comparisons with sketches
        waiting: list[int] = []  # those that no barrier has passed: put off, they would keep a cotangent
        end = len(self.steps) if whole else self.end
        heavy = [s.node.is_heavy and not s.node.is_scan for s in self.steps[:end]]
        places: dict[int, certificate.Place] = {}  # of comparisons, by their number among all errors
        for i, step in enumerate(self.steps[:end]):
            outputs, scale = step.block.outputs, scales[i]
            if heavy[i] and i and not heavy[i - 1]:
                inputs = step.block.inputs
                state = (x, [v for v in inputs if v in x]), (h, [v for v in inputs if v in h])
                barrier(*state, (compared, waiting))
                waiting = []
            with jax.named_scope(_name(step)):
                held = step.keep_late(fixed, x) if kept is None else kept[i]
                errors += step.sweep(fixed, held, memos[i], factors[i], x, h, scale, out)
                for v, exponent in zip(outputs, scale.before, strict=True):
                    if v in h:
                        h.move(v, exponent)
                for v, exponent, sketch in zip(outputs, scale.before, sketches[i], strict=False):
                    truth = shifted(sketch, difference(scale.at, exponent))
                    places[len(errors) + len(places)] = self._place(i)
                    waiting.append(len(compared))
                    compared.append(certificate.compare(certificate.sketch(h[v]), truth))
            out.close(step.node.weights)
            self._drop(x, i, self.network.results)
            if heavy[i]:
                # Where light steps follow, the cotangent may pass them before the state is computed, and
                # its own buffer is free by then: the barrier in front of the next heavy step is early
                # enough for it.
                waits = i + 1 == end or heavy[i + 1]
                barrier(
                    (x, [v for v in outputs if v in x]),
                    (h, [v for v in outputs if v in h and waits]),
                    (compared, waiting),
                    *out.parts(step.node.weights),
                )
                waiting = []
        for (number, place), error in zip(places.items(), compared, strict=True):
            errors.insert(number, Measured(error, place))
        for step in self.steps[end:]:
            out.close(step.node.weights)
        return errors

    def _drop(self, x: Env, i: int, retain: frozenset[Any]) -> None:
        step = self.steps[i]
        after = self.network.last_read
        for v in (*step.block.inputs, *step.block.operands):
            if v in x and v not in retain and self.last.get(v) == i and after.get(v, -1) < self.stop:
                del x[v]


def replace_all(env: Env, new: Env) -> None:
    """Let an environment hold these values, and no others."""
    env.clear()
    env.update(new)


def check_spacing(layers: int) -> int:
    """How many layers lie between two places where errors are measured.

    To measure is to go over two cotangents once or twice more: a quarter of the time of a layer that is
    bound by memory. And over so many layers a cotangent may lose two digits in each and still be in
    range when it is rescaled.
    """
    return min(16, max(1, layers))


def _name(step: Step) -> str:
    if step.node.is_fork:
        return "fork"
    return step.block.eqns[-1].primitive.name
