"""A walk: nodes differentiated by Moonwalk, one step for every node.

    Phase I    x₀ → x₁ → … → x_L          keep per node only what ∂y/∂x needs
    Phase II   h_L → … → h₁ → h₀          cotangents alone; keep the planned anchors and fragments
    Phase III  (x₀, h₀) → … → (x_L, h_L)  x again, h by vijp (or from an anchor), g = vjp(node, θ, h)

Phase II rescales cotangents where it sketches them for the certificate, and Phase III undoes that step
by step: between two nodes a cotangent has the same exponent in both.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from ..execute import certificate
from ..execute.barriers import Env, barrier
from ..execute.certificate import Measured
from ..execute.precision import as_cotangent
from ..execute.residuals import nbytes
from ..execute.scale import Cotangents, Exponent, difference, exponent_for, largest, shifted
from ..execute.sinks import GradientSink
from ..network.cutting import Network
from ..rules.fragments import Place
from ..rules.registry import Alarm
from .base import Executor, Facts, Row, Segment
from .checks import check_limit, check_sources
from .codec import in_plans
from .costs import NodeCost
from .fusion import workspace_bytes
from .sources import Source
from .steps import Scale, Step, bind_steps


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
            inside = self._inside(k, timeline) if steps[k].is_stem else 0
            inside += workspace_bytes(steps[k].node, self.network)
            top = max(top, residuals + after + timeline.states(self.start + k) + inside)
            after += memos[k]
        for k, step in enumerate(steps[: self.end]):  # Phase III
            has_h = k > 0 and steps[k - 1].source != "none" and not steps[k - 1].is_stem
            seeded = k == 0 and bool(self.seeds)
            working = step.working_bytes(timeline.states(self.start + k), has_h=has_h or seeded)
            inside = 0 if step.is_stem else self._inside(k, timeline)
            inside += workspace_bytes(step.node, self.network) if step.is_walked else 0
            top = max(top, residuals + after + working + inside)
            residuals -= step.kept_bytes
            after -= memos[k]
        return timeline.start(self) + top

    def _inside(self, k: int, timeline: Any) -> int:
        """What the pullback to the weights of step k keeps for a moment, besides the step's state."""
        node = self.steps[k].node
        if node.is_scan or not (node.weights and node.keeps_inside) or self.steps[k].source == "none":
            return 0
        state = nbytes(*(v.aval for v in node.block.inputs))
        return max(0, timeline.costs[self.start + k].backprop - state)

    def seconds(self, timeline: Any) -> float:
        nodes = timeline.seconds[self.start : self.stop]
        # Phase I twice if it is run again, Phase II, and in Phase III up to the last weight: x, h by a
        # vijp, which is as much work as a forward pass, and the gradients.
        forward = (1 + self.recomputed) * sum(n.forward for n in nodes)
        swept = sum(2 * n.forward + n.wrt_theta for n in nodes[: self.end])
        return forward + sum(n.wrt_x for n in nodes) + swept

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
