"""Pure-forward Moonwalk: no reverse pass at all, and memory that does not grow with the depth.

    seed      h of the earliest state from which every later weight can be walked to, by jvp alone
    Phase III sweep x and h forward from there; each block is linearised as the sweep comes to it
    closure   at the end of the sweep, <h, v> against dJ[v] for a few random directions v

What precedes the seed may hold the stem's weights only. Where the last layer cannot be walked, it and
what follows are the head. Both are differentiated by themselves (`Plain`), as one block each. There is
no Phase II, so nothing can be kept in it: between stem and head, a block without a vijp, a fork, an
error that would grow past the tolerance have no way out, and are refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from . import compat, engine, graph, planning, seeds, sources
from .certificate import Measured, Place
from .compat import Literal
from .engine import Circumstances, Engine, Staging
from .errors import NotSubmersiveError
from .ledger import Ledger
from .methods import PureForward
from .planning import Choice
from .plans import Plan
from .residuals import nbytes
from .scale import Cotangents
from .scans import ScanStep
from .segments import Plain, live_bytes
from .sources import Book, Options
from .trunk import Node, Trunk
from .walks import Env, ForkStep, Step, Walk, as_cotangent, hold

DIRECTIONS = 4  # in which the end of a sweep is compared with the loss's own derivative


class Seed(NamedTuple):
    """A variable whose cotangent the sweep starts from; `node`: where it is a scan's own start."""

    variable: Any
    node: int | None = None


def plan(
    staging: Staging,
    method: PureForward,
    call: Circumstances,
) -> tuple[Engine, Plan]:
    """As `engine.plan`. The closure is always computed, and heeded: it costs a few jvps of the head."""
    made = engine.draft(staging, method, gains=call.gains, values=call.values, fused=call.fused)
    choice, parts = choose(made.cut, made.options, made.book, method)
    engine.heed_weights(choice, made.book)
    described = made.describe(choice, method, call.signature)
    rows = tuple(replace(r, bytes=0) for r in described.rows)  # nothing is kept from phase to phase
    tolerance = described.tolerance
    if method.tolerance is None:
        # <h, v> and dJ[v] are both computed in the dtype of the activations.
        dtype = planning.state_dtype(made.cut)
        tolerance = max(tolerance, planning.rounding(made.cut, parts.walk, dtype))
    described = replace(described, rows=rows, tolerance=tolerance, checked=True, jvps=parts.jvps)
    return ForwardEngine(staging, made.cut, parts, method, tolerance), described


class Parts(NamedTuple):
    """[stem,] walk [, head]."""

    stem: Plain | None
    walk: Walk
    head: Plain | None
    seeds: list[Seed]
    jvps: int

    @property
    def segments(self) -> list[Any]:
        return [s for s in (self.stem, self.walk, self.head) if s is not None]


def choose(cut: Trunk, options: Options, book: Book, method: PureForward) -> tuple[Choice, Parts]:
    """Where to start, or NotSubmersiveError naming the block that forbids it."""
    envs = None if book.values is None else [book.values]
    n = len(cut.nodes)

    def walk_over(start: int, stop: int) -> tuple[Walk, dict[int, str]]:
        walk, _ = sources.plan_walk(cut, start, stop, options, book=book, envs=envs)
        found = {i: _obstacle(s) for i, s in enumerate(walk.steps) if i < walk.end or s.is_stem}
        return walk, {i: why for i, why in found.items() if why is not None}

    stop = n
    whole, bad = walk_over(0, n)
    if bad:
        layers = [
            i
            for i, s in enumerate(whole.steps)
            if s.node.weights and not s.is_stem and any(v.aval.size != 1 for v in s.block.outputs)
        ]
        # A scan is many layers: only what follows it is the head.
        stop = layers[-1] + cut.nodes[layers[-1]].is_scan if layers else n
        whole, bad = walk_over(0, stop)
    start = max(bad, default=-1) + 1
    if any(s.node.weights and (not s.is_stem or s.node.is_scan) for s in whole.steps[:start]):
        _refuse(whole.steps[max(bad)], bad[max(bad)])
    walk, _ = walk_over(start, stop)
    for step in walk.steps:
        if isinstance(step, ScanStep):
            _keep_nothing(step)
    found = _seeds(cut, walk)
    reals = [2 if jnp.iscomplexobj(s.variable.aval) else 1 for s in found]
    count = sum(r * s.variable.aval.size for r, s in zip(reals, found, strict=True))
    if method.per_example and found:
        examples = {s.variable.aval.shape[:1] for s in found}
        if len(examples) > 1 or examples == {()}:
            shapes = ", ".join(graph.type_of(s.variable) for s in found)
            raise ValueError(
                "PureForward(per_example=True): the examples must lie along axis 0 of every state that "
                f"the sweep starts from, but these are {shapes}; leave per_example out"
            )
        count //= max(1, next(iter(examples))[0])
    stem = Plain(cut, 0, start) if start else None
    head = Plain(cut, stop, n) if stop < n else None
    state = max(live_bytes(cut), default=0)
    # The jvps side by side, each with a state and its tangent; then both states and both cotangents.
    peak = state * 2 * (min(method.chunk, count) + 1) + nbytes(*(s.variable.aval for s in found))
    peak += 4 * state
    parts = Parts(stem, walk, head, found, count)
    return Choice(parts.segments, 0, peak), parts


def _obstacle(step: Step) -> str | None:
    """Why a sweep cannot go through a step without Phase II."""
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
    return step.reason if step.source in ("anchor", "given") else None


def _refuse(step: Step, why: str) -> None:
    node = step.node
    line = compat.source_line(node.block.eqns[-1]) if node.block.eqns else ""
    raise NotSubmersiveError(
        node.describe(),
        line or "a state that several blocks read",
        f"PureForward cannot walk it: {why}",
        "use method=moonwalk.Moonwalk(), which keeps an anchor there; declare the weight's structure; "
        "or raise PureForward(tolerance=...) where only the gain forbids it",
    )


def _keep_nothing(step: ScanStep) -> None:
    """What is made of weights is made in the loop: for all layers at once it grows with the depth."""
    step.hoisted = False
    for inner in step.walk.steps:
        if isinstance(inner, ScanStep):
            _keep_nothing(inner)


def _seeds(cut: Trunk, walk: Walk) -> list[Seed]:
    """Cotangents that the sweep, and what precedes it, need to begin with."""
    made = {v for n in cut.nodes[walk.start :] for v in n.block.outputs}
    found = [v for n in cut.nodes[walk.start :] for v in n.block.inputs if v not in made]
    result = [Seed(v) for v in dict.fromkeys(found)]
    for i, step in enumerate(walk.steps):
        if isinstance(step, ScanStep):
            first = step.body.counts.consts
            result += [Seed(step.eqn.invars[first + j], walk.start + i) for j in step.seeded]
        elif step.is_stem:
            result += [Seed(v) for v in step.block.outputs]
    return result


class ForwardEngine(Engine):
    """A loss planned for pure-forward Moonwalk."""

    def __init__(
        self,
        staging: Staging,
        cut: Trunk,
        parts: Parts,
        method: PureForward,
        tolerance: float,
    ):
        super().__init__(staging, cut, parts.segments)
        self.stem, self.walk, self.head, self.seeds, _ = parts
        self.method, self.tolerance = method, tolerance
        self.sums = self._sums() if method.per_example and self.seeds else None

    @property
    def places(self) -> list[Place]:
        """The end of the sweep."""
        nodes = [s.node for s in self.walk.steps[: self.walk.end] if s.block.eqns]
        block, line = "the loss", ""
        if nodes:
            block, line = nodes[-1].describe(), compat.source_line(nodes[-1].block.eqns[-1])
        return [Place("seed", block, line, self.tolerance, ends=True)]

    def phases(
        self, fixed: Env, x: Env, out: Ledger, *, again: bool = False
    ) -> tuple[list[Any], Env, list[Measured]]:
        """(values of the jaxpr's results, cotangents of the network's inputs, errors)."""
        walk, h = self.walk, Cotangents()
        held = (
            self.stem.phase_one(fixed, x, self.results, again=again) if self.stem is not None else None
        )
        start = dict(x)
        with jax.named_scope("value"):
            values = self._values_and_head(fixed, x, out, again=again)
        with jax.named_scope("seed"):
            found = self._seed_cotangents(fixed, start)
        of_scans: dict[int, list[Any]] = {}
        for seed, a in zip(self.seeds, found, strict=True):
            a = as_cotangent(seed.variable, a)
            if seed.node is None:
                h[seed.variable] = a
            else:
                of_scans.setdefault(seed.node, []).append(a)
        entry = dict(h)
        hold((start, list(start)), (h, list(h)))
        with jax.named_scope("phase_3"):
            scales = walk.unscaled()
            memos = [
                s.back(fixed, None, h, scale, out)
                if s.is_stem
                else s.no_memo(of_scans.get(walk.start + i, ()))
                for i, (s, scale) in enumerate(zip(walk.steps, scales, strict=True))
            ]
            factors = [None if s.node.is_scan else s.prepare(fixed) for s in walk.steps]
            if self.stem is not None:
                self.stem.reverse(fixed, held, entry, out)
            sketches = [()] * len(walk.steps)
            walk.phase_three(fixed, None, memos, sketches, scales, factors, start, h, out)
        with jax.named_scope("closure"):
            error = self._closure(fixed, start, h)
        return values, entry, [Measured(error, *self.places)]

    def _values_and_head(self, fixed: Env, x: Env, out: Ledger, *, again: bool) -> list[Any]:
        """The jaxpr's results; the head hands out its gradients on the way."""
        env = {**fixed, **x}
        for node in self.cut.nodes[self.walk.start : self.walk.stop]:
            _run(node, env, env, silent=again)
        held = (
            self.head.phase_one(fixed, env, self.results, again=again) if self.head is not None else None
        )
        values = [graph.read(env, v) for v in self.staging.jaxpr.outvars]
        h = {v: jnp.ones_like(values[0]) for v in self.cut.outputs}
        self.hand_out_weights(h, out)
        if self.head is not None:
            self.head.reverse(fixed, held, h, out)
        return values

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
                node = self.cut.nodes[i]
                if not (node.block.outputs and all(v in given for v in node.block.outputs)):
                    _run(node, env, {**env, **own.get(i, {})}, silent=True, also=wanted)
            return [graph.read(env, v) for v in wanted]

        return tail

    def _seed_cotangents(self, fixed: Env, x: Env) -> list[Any]:
        if not self.seeds:
            return []
        env = {**fixed, **x}
        for node in self.cut.nodes[self.walk.start :]:
            if node.is_stem:
                _run(node, env, env, silent=True)
        values = [env[s.variable] for s in self.seeds]
        if not any(a.size for a in values):
            return [jnp.zeros_like(a) for a in values]
        nodes = range(self.walk.start, len(self.cut.nodes))
        sums = self.sums
        if sums is None:
            tail = self._tail(fixed, x, nodes, self.seeds, self.cut.outputs)
            return seeds.by_entries(tail, values, self.method.chunk)
        tail = self._tail(fixed, x, nodes, self.seeds, sums.summands)

        def outer(*made: Any) -> list[Any]:
            return seeds.evaluate(
                sums.outer, {**env, **dict(zip(sums.results, made, strict=True))}, [sums.loss]
            )

        shapes = [v.aval.shape for v in sums.results]
        return seeds.by_features(tail, outer, shapes, values, self.method.chunk)

    def _sums(self) -> seeds.Sums:
        """The loss as sums over the examples, or ValueError."""
        examples = self.seeds[0].variable.aval.shape[0]
        nodes = self.cut.nodes[self.walk.start :]
        source = {copy: n.block.inputs[0] for n in nodes if n.is_fork for copy in n.block.outputs}

        def original(v: Any) -> Any:
            while not isinstance(v, Literal) and v in source:
                v = source[v]
            return v

        eqns = [e.replace(invars=[original(v) for v in e.invars]) for n in nodes for e in n.block.eqns]
        moved = [original(v) for n in nodes for v in (*n.block.inputs, *n.block.outputs)]
        moved += [s.variable for s in self.seeds]
        found = seeds.find_sums(eqns, original(self.cut.outputs[0]), moved)
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
        nodes = range(walk.start + walk.end, len(self.cut.nodes))
        ends = [v for v in h if v in x]
        if not ends:
            return jnp.zeros((), jnp.float32)
        tail = self._tail(fixed, x, nodes, [Seed(v) for v in ends], [self.cut.outputs[0]])
        at = [x[v] for v in ends]
        wide = [h[v].astype(compat.working_dtype(h[v].dtype)) for v in ends]
        size = jnp.sqrt(sum(jnp.sum(jnp.abs(a) ** 2) for a in wide))

        def difference(key: Any) -> Any:
            keys = jax.random.split(key, len(at))
            v = [jax.random.normal(k, a.shape, a.dtype) for k, a in zip(keys, at, strict=True)]
            expected = jax.jvp(lambda *a: tail(*a)[0], tuple(at), tuple(v))[1]
            found = sum(jnp.sum(jnp.real(a * b)) for a, b in zip(wide, v, strict=True))
            return jnp.abs(found - expected) / jnp.maximum(size, jnp.finfo(size.dtype).tiny)

        keys = jax.random.split(jax.random.key(0), DIRECTIONS)
        return jnp.max(jax.lax.map(difference, keys)).astype(jnp.float32)


def _run(node: Node, env: Env, reads: Env, *, silent: bool = False, also: Sequence[Any] = ()) -> None:
    """Run a node, reading from `reads` and writing to `env`.

    `silent`: nothing prints or calls back. `also`: variables that are wanted, though no node reads them.
    """
    block = node.block
    if silent and node.effects:
        block = replace(block, eqns=tuple(compat.silenced(block.eqns)))
    inside = [v for e in block.eqns for v in e.outvars if any(v is a for a in also)]
    made = tuple(dict.fromkeys((*block.outputs, *block.exports, *inside)))
    values = block.values(
        made, [reads[v] for v in block.inputs], [graph.read(reads, v) for v in block.operands]
    )
    env.update(zip(made, values, strict=True))
