"""Pure-forward Moonwalk as one segment: no reverse pass, and memory that does not grow with the depth.

    seed      h of the earliest state from which every later weight can be walked to, by JVPs alone
    Phase III sweep x and h forward from there; each block is linearised as the sweep comes to it
    closure   at the end of the sweep, <h, v> against dJ[v] for a few random directions v

What precedes the seed may hold the stem's weights only. Where the last layer cannot be walked, it and
what follows are the head. JAX differentiates both by themselves.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .. import _jax
from .._jax import Literal
from ..errors import PlanMismatchError
from ..execute import seeds
from ..execute.barriers import Env, barrier
from ..execute.certificate import Measured, Place
from ..execute.precision import as_cotangent
from ..execute.residuals import nbytes
from ..execute.scale import Cotangents
from ..execute.sinks import GradientSink
from ..network.cutting import Network, Node
from ..rules.registry import Alarm
from ..settings import is_count
from ..trace import graph
from .base import Executor, Facts, Row, Segment, check_in_a_row
from .checks import check_limit
from .codec import in_plans
from .costs import NodeCost
from .scan_step import ScanStep
from .steps import ForkStep, Step
from .walk import Walk, WalkExecutor

DIRECTIONS = 4  # in which the end of a sweep is compared with the loss's own derivative


@in_plans
@dataclass(frozen=True)
class Sweep(Segment):
    """The whole network: [stem,] walk [, head], the walk's first cotangent computed with JVPs."""

    walk: Walk
    stem: Segment | None = None
    head: Segment | None = None
    chunk: int = 16  # how many JVPs run side by side
    per_example: bool = False  # one JVP per feature serves all examples
    limit: float = math.inf  # how far the closure may be off

    def bind(self, network: Network) -> SweepExecutor:
        check_limit("Sweep", self.limit)
        parts: list[Segment] = [s for s in (self.stem, self.walk, self.head) if s is not None]
        for row in ([self], parts):
            check_in_a_row(row, 0, len(network.nodes))
        if not is_count(self.chunk):
            raise PlanMismatchError(
                f"method=: Sweep(chunk={self.chunk}) in the plan runs no JVPs: it is a whole number, at "
                "least 1. Make the plan anew with moonwalk.plan(fun, *args), or mend it."
            )
        stem, head = (None if s is None else s.bind(network) for s in (self.stem, self.head))
        walk = self.walk.bind(network)
        for i, why in obstacles(walk).items():
            raise PlanMismatchError(
                f"method=: the plan's Sweep cannot go through {walk.steps[i].node.describe()}: {why}. "
                "Make the plan anew with moonwalk.plan(fun, *args), or mend it."
            )
        return SweepExecutor(network, walk, stem, head, self.chunk, self.per_example, self.limit)


def obstacles(walk: WalkExecutor) -> dict[int, str]:
    """Of the steps that a sweep cannot go through without Phase II: why."""
    found = {i: _obstacle(s) for i, s in enumerate(walk.steps) if i < walk.end or s.is_stem}
    return {i: why for i, why in found.items() if why is not None}


def _obstacle(step: Step) -> str | None:
    """Why a sweep cannot go through a step."""
    if isinstance(step, ForkStep):
        if step.kept_copies:
            return "a state with several readers: the cotangent of one of them must be kept"
        return None
    if isinstance(step, ScanStep):
        if step.source == "none":
            return None
        if step.period is not None:
            return f"error would exceed the tolerance after {step.period} of {step.length} layers"
        if step.body.active_ys or step.inner_in_back:
            return "its outputs' cotangents, or its layers' own stems, need a reverse pass"
        for inner in step.walk.steps:
            why = _obstacle(inner)
            if isinstance(inner, ScanStep) and inner.seeded and inner.source != "none":
                why = "it starts from data in every layer, and that cotangent needs a reverse pass"
            if why is not None:
                return f"in its body, {inner.node.describe()}: {why}"
        return None
    if step.is_stem and step.node.is_scan:
        return "a scan that reads no state is differentiated as a whole, which keeps every layer"
    if step.is_stem or step.node.is_aside:
        return None
    if step.node.calls_once:
        return "something inside it calls back to the host, which must happen once"
    if not step.block.inputs and step.source == "anchor":
        return "it starts a way of its own, whose cotangent would be kept in a reverse pass"
    if step.source in ("anchor", "given"):
        return step.reason or "an anchor there would be kept in a reverse pass, and a sweep has none"
    return None


class Seed(NamedTuple):
    """A variable whose cotangent the sweep starts from; `node`: where it is a scan's own start."""

    variable: Any
    node: int | None = None


class SweepExecutor(Executor):
    """A network differentiated by pure-forward Moonwalk."""

    def __init__(
        self,
        network: Network,
        walk: WalkExecutor,
        stem: Executor | None,
        head: Executor | None,
        chunk: int,
        per_example: bool,
        limit: float = math.inf,
    ):
        self.network, self.start, self.stop = network, 0, len(network.nodes)
        self.walk, self.stem, self.head = walk, stem, head
        self.chunk, self.per_example, self.limit = chunk, per_example, limit
        self.seeds = find_seeds(network, walk)
        self.sums = self._sums() if per_example and self.seeds else None

    @property
    def data(self) -> Segment:
        stem, head = (None if s is None else s.data for s in (self.stem, self.head))
        walk = self.walk.data
        assert isinstance(walk, Walk)
        about = (self.chunk, self.per_example, self.limit)
        return Sweep(self.start, self.stop, walk, stem, head, *about)

    @property
    def parts(self) -> list[Executor]:
        return [s for s in (self.stem, self.walk, self.head) if s is not None]

    # -- what it takes -----------------------------------------------------------------------------
    @property
    def jvps(self) -> int:
        """How many a seed takes."""
        reals = [2 if jnp.iscomplexobj(s.variable.aval) else 1 for s in self.seeds]
        count = sum(r * s.variable.aval.size for r, s in zip(reals, self.seeds, strict=True))
        examples = self.seeds[0].variable.aval.shape[0] if self.per_example and self.seeds else 1
        return count // max(1, examples)

    def held(self, timeline: Any) -> int:
        del timeline
        return 0

    def forward_peak(self, timeline: Any) -> int:
        return 2 * max(timeline.live, default=0)

    def backward_peak(self, timeline: Any) -> int:
        """The JVPs side by side, each with a state and its tangent; then both states and cotangents."""
        state = max(timeline.live, default=0)
        seeds = nbytes(*(s.variable.aval for s in self.seeds))
        return state * 2 * (min(self.chunk, self.jvps) + 1) + seeds + 4 * state

    def seconds(self, timeline: Any) -> float:
        # A JVP is twice a forward pass; the sweep itself is a walk without Phases I and II.
        nodes = timeline.seconds[self.start : self.stop]
        forward = sum(n.forward for n in nodes)
        return (2 * (self.jvps + DIRECTIONS) + 3) * forward + sum(n.wrt_theta for n in nodes)

    # -- what others ask ---------------------------------------------------------------------------
    @property
    def places(self) -> list[Place]:
        """The end of the sweep."""
        nodes = [s.node for s in self.walk.steps[: self.walk.end] if s.block.eqns]
        block, line = "the loss", ""
        if nodes:
            block, line = nodes[-1].describe(), _jax.source_line(nodes[-1].block.eqns[-1])
        return [Place("seed", block, line, self.limit, ends=True)]

    def hold_to(self, limit: float) -> None:
        self.limit = limit

    @property
    def facts(self) -> Facts:
        return self.walk.facts._replace(checked=True, jvps=self.jvps)

    @property
    def blocks_walked(self) -> int:
        return self.walk.blocks_walked

    @property
    def loops(self) -> Sequence[Any]:
        return self.walk.loops

    def weight_alarms(self, table: Any) -> Sequence[Alarm]:
        return list(self.walk.weight_alarms(table))

    def rows(self, costs: Sequence[NodeCost], *, chosen: bool) -> list[Row]:
        rows = [row for part in self.parts for row in part.rows(costs, chosen=chosen)]
        return [replace(row, bytes=0) for row in rows]  # nothing is kept from phase to phase

    # -- running -----------------------------------------------------------------------------------
    def forward(self, fixed: Env, x: Env, results: frozenset[Any], *, again: bool = False) -> Any:
        stem = None if self.stem is None else self.stem.forward(fixed, x, results, again=again)
        start = dict(x)
        with jax.named_scope("value"):
            env = {**fixed, **x}
            for node in self.network.nodes[self.walk.start : self.walk.stop]:
                _run(node, env, env, silent=again)
            head = None if self.head is None else self.head.forward(fixed, env, results, again=again)
        x.clear()
        x.update((v, a) for v, a in env.items() if v in results and v not in fixed)
        return stem, start, head

    def backward(self, fixed: Env, saved: Any, h: Env, out: GradientSink) -> list[Measured]:
        walk = self.walk
        stem, start, head = saved
        if self.head is not None:
            self.head.backward(fixed, head, dict(h), out)
        with jax.named_scope("seed"):
            found = self._seed_cotangents(fixed, start)
        swept = Cotangents()
        of_scans: dict[int, list[Any]] = {}
        for seed, a in zip(self.seeds, found, strict=True):
            a = as_cotangent(seed.variable, a)
            if seed.node is None:
                swept[seed.variable] = a
            else:
                of_scans.setdefault(seed.node, []).append(a)
        weights = {v: a for v, a in h.items() if v in self.network.weights}
        h.clear()
        h.update({**weights, **swept})
        barrier((start, list(start)), (swept, list(swept)))
        with jax.named_scope("phase_3"):
            scales = walk.unscaled()
            memos = [
                s.back(fixed, None, swept, scale, out)
                if s.is_stem
                else s.no_memo(of_scans.get(walk.start + i, ()))
                for i, (s, scale) in enumerate(zip(walk.steps, scales, strict=True))
            ]
            factors = [None if s.node.is_scan else s.prepare(fixed) for s in walk.steps]
            if self.stem is not None:
                self.stem.backward(fixed, stem, h, out)
            sketches = [()] * len(walk.steps)
            walk.phase_three(fixed, None, memos, sketches, scales, factors, start, swept, out)
        with jax.named_scope("closure"):
            error = self._closure(fixed, start, swept)
        return [Measured(error, *self.places)]

    # -- the seed -----------------------------------------------------------------------------------
    def _tail(self, fixed: Env, x: Env, nodes: range, moved: Sequence[Seed], wanted: Any) -> Any:
        """The loss (or other values) as a function of some variables."""
        given = {s.variable for s in moved if s.node is None}

        def tail(*values: Any) -> list[Any]:
            env = {**fixed, **x}
            own: dict[int, Env] = {}
            for seed, a in zip(moved, values, strict=True):
                if seed.node is None:
                    env[seed.variable] = a
                else:
                    own.setdefault(seed.node, {})[seed.variable] = a
            for i in nodes:
                node = self.network.nodes[i]
                if not (node.block.outputs and all(v in given for v in node.block.outputs)):
                    _run(node, env, {**env, **own.get(i, {})}, silent=True, also=wanted)
            return [graph.read(env, v) for v in wanted]

        return tail

    def _seed_cotangents(self, fixed: Env, x: Env) -> list[Any]:
        if not self.seeds:
            return []
        env = {**fixed, **x}
        for node in self.network.nodes[self.walk.start :]:
            if node.is_stem:
                _run(node, env, env, silent=True)
        values = [env[s.variable] for s in self.seeds]
        if not any(a.size for a in values):
            return [jnp.zeros_like(a) for a in values]
        nodes = range(self.walk.start, len(self.network.nodes))
        sums = self.sums
        if sums is None:
            tail = self._tail(fixed, x, nodes, self.seeds, self.network.outputs)
            return seeds.by_entries(tail, values, self.chunk)
        tail = self._tail(fixed, x, nodes, self.seeds, sums.summands)

        def outer(*made: Any) -> list[Any]:
            return seeds.evaluate(
                sums.outer, {**env, **dict(zip(sums.results, made, strict=True))}, [sums.loss]
            )

        shapes = [v.aval.shape for v in sums.results]
        return seeds.by_features(tail, outer, shapes, values, self.chunk)

    def _sums(self) -> seeds.Sums:
        """The loss as sums over the examples, or ValueError."""
        examples = self.seeds[0].variable.aval.shape[0]
        nodes = self.network.nodes[self.walk.start :]
        source = {copy: n.block.inputs[0] for n in nodes if n.is_fork for copy in n.block.outputs}

        def original(v: Any) -> Any:
            while not isinstance(v, Literal) and v in source:
                v = source[v]
            return v

        eqns = [e.replace(invars=[original(v) for v in e.invars]) for n in nodes for e in n.block.eqns]
        moved = [original(v) for n in nodes for v in (*n.block.inputs, *n.block.outputs)]
        moved += [s.variable for s in self.seeds]
        found = seeds.find_sums(eqns, original(self.network.outputs[0]), moved)
        if isinstance(found, str):
            reason = found
        else:
            odd = [v for v in found.summands if v.aval.shape[0] != examples]
            if not odd:
                return found
            reason = f"what the loss sums is {graph.type_of(odd[0])}, and the examples are {examples}"
        raise ValueError(
            f"PureForward(per_example=True): {reason}; let the loss end in a sum or a mean over the "
            "examples, along axis 0, or leave per_example out"
        )

    # -- the check ----------------------------------------------------------------------------------
    def _closure(self, fixed: Env, x: Env, h: Env) -> Any:
        """Largest relative difference between <h, v> and dJ[v] at the end of the sweep."""
        walk = self.walk
        nodes = range(walk.start + walk.end, len(self.network.nodes))
        ends = [v for v in h if v in x]
        if not ends:
            return jnp.zeros((), jnp.float32)
        tail = self._tail(fixed, x, nodes, [Seed(v) for v in ends], [self.network.outputs[0]])
        at = [x[v] for v in ends]
        wide = [h[v].astype(_jax.working_dtype(h[v].dtype)) for v in ends]
        size = jnp.sqrt(sum(jnp.sum(jnp.abs(a) ** 2) for a in wide))

        def difference(key: Any) -> Any:
            keys = jax.random.split(key, len(at))
            v = [jax.random.normal(k, a.shape, a.dtype) for k, a in zip(keys, at, strict=True)]
            expected = jax.jvp(lambda *a: tail(*a)[0], tuple(at), tuple(v))[1]
            found = sum(jnp.sum(jnp.real(a * b)) for a, b in zip(wide, v, strict=True))
            return jnp.abs(found - expected) / jnp.maximum(size, jnp.finfo(size.dtype).tiny)

        keys = jax.random.split(jax.random.key(0), DIRECTIONS)
        return jnp.max(jax.lax.map(difference, keys)).astype(jnp.float32)


def find_seeds(network: Network, walk: WalkExecutor) -> list[Seed]:
    """Cotangents that the sweep, and what precedes it, need to begin with."""
    made = {v for n in network.nodes[walk.start :] for v in n.block.outputs}
    found = [v for n in network.nodes[walk.start :] for v in n.block.inputs if v not in made]
    result = [Seed(v) for v in dict.fromkeys(found)]
    for i, step in enumerate(walk.steps):
        if isinstance(step, ScanStep):
            starts = step.layers.eqn.invars[step.body.counts.consts :]
            result += [Seed(starts[j], walk.start + i) for j in step.seeded]
        elif step.is_stem:
            result += [Seed(v) for v in step.block.outputs]
    return result


def _run(node: Node, env: Env, reads: Env, *, silent: bool = False, also: Sequence[Any] = ()) -> None:
    """Run a node, reading from `reads` and writing to `env`.

    `silent`: nothing prints or calls back. `also`: variables that are wanted, though no node reads them.
    """
    block = node.block
    if silent and node.effects:
        block = replace(block, eqns=tuple(_jax.silenced(block.eqns)))
    inside = [v for e in block.eqns for v in e.outvars if any(v is a for a in also)]
    made = tuple(dict.fromkeys((*block.outputs, *block.exports, *inside)))
    x, operands = ([graph.read(reads, v) for v in of] for of in (block.inputs, block.operands))
    if node.is_aside:  # no derivative flows through it, and a backward pass inside has no jvp
        x, operands = ([jax.lax.stop_gradient(a) for a in of] for of in (x, operands))
    values = block.values(made, x, operands)
    env.update(zip(made, values, strict=True))
