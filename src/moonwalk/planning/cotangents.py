"""Plans a walk over consecutive nodes: where Phase III takes each cotangent from.

A cotangent is recovered by vijp where a rule serves the node and its gain is known, taken from kept
copies at a fork, or restored from a fragment where a rule offers one that is exact enough. Everywhere
else it comes from an anchor, as it does wherever the product of gains since the last exact cotangent
exceeds tolerance / eps, with a margin. The body of a scan is planned like a network, with anchors every
K layers.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax import lax

from .. import _jax
from ..execute.residuals import nbytes
from ..network.cutting import Network, Node
from ..network.loop_body import Body
from ..rules import fragments
from ..rules.fragments import Ask, Fragment, FragmentRule
from ..rules.registry import Gain
from ..segments.layers import body_of
from ..segments.linearised import restricted, rule_through
from ..segments.scan_step import ScanStep, make_scan_step
from ..segments.sources import Anchor, Copies, Given, Layers, Restored, Source, Unneeded, Vijp
from ..segments.steps import WALKED, BlockStep, Step, bind_steps
from ..segments.walk import WalkExecutor
from ..trace import graph

# A walk's worst sampled error was up to 12 times eps × the product of its gains (docs/numerics.md §8). A
# plan must not fail its certificate on the weights it was measured on.
MARGIN = 10

# Assumed for a fragment that the user asked for and nothing bounds; its certificate measures it.
TRUSTED = Gain(3.0, mixes=True, assumed=True, lasting=1.0)

Values = Mapping[Any, Any]


@dataclass(frozen=True)
class Growth:
    """How much relative error has grown since the last exact cotangent.

    Error dies out along blocks that keep fragments. The growth through them and the diagonal blocks
    between them counts once, at its largest (`faded`), however many there are; only `base` compounds.
    """

    product: float = 1.0
    mixes: bool = False
    base: float = 1.0
    faded: float = 0.0
    counted: bool = False  # whether diagonal blocks are part of `faded` here

    @property
    def factor(self) -> float:
        """Diagonal factors count once something has mixed (docs/numerics.md §1)."""
        return self.product if self.mixes or math.isinf(self.product) else 1.0

    def times(self, gain: Gain) -> Growth:
        if gain.lasting is None:
            if self.counted and not gain.mixes:
                return self
            lasts = gain.mixes or (self.faded > 0 and not self.counted)
            base = self.base * gain.factor if lasts else self.base
            return Growth(self.product * gain.factor, self.mixes or gain.mixes, base, self.faded)
        # `gain.factor` is that of a long run of such blocks, with the diagonal ones between them.
        base = (self.base if self.faded or not self.mixes else self.product) * gain.lasting
        faded = max(self.faded, gain.factor / gain.lasting)
        return Growth(base * faded, True, base, faded, counted=True)

    def gain(self, assumed: bool = False) -> Gain:
        """The gain of all the blocks passed so far, as if they were one."""
        return Gain(self.product, self.mixes, assumed, self.base if self.faded else None)

    @staticmethod
    def worst(several: Iterable[Growth]) -> Growth:
        several = list(several)
        if not several:
            return Growth()
        return Growth(
            max(g.product for g in several),
            any(g.mixes for g in several),
            max(g.base for g in several),
            max(g.faded for g in several),
            all(g.counted for g in several),
        )


class GainTable:
    """Gains by node: what a trace can bound, or what was measured on values.

    A node's key is its place, (3,) for the fourth node, (3, 0) for the first in the body of a scan, with
    its description, so that a table is never applied to another network.
    """

    def __init__(self, recorded: Iterable[tuple[Any, Gain]] = (), values: Values | None = None):
        self.recorded: dict[Any, Gain] = dict(recorded)
        self.values = values
        self.layers: dict[Any, list[Values] | None] = {}  # what the layers of scans can read, by node

    @property
    def is_static(self) -> bool:
        """Whether gains are those that a trace can bound."""
        return self.values is None and not self.recorded

    def layer_values(self, node: Node, body: Body, envs: Any) -> list[Values] | None:
        """What every layer of a scan can read, evaluated once."""
        if node not in self.layers:
            self.layers[node] = _layer_values(node, body, envs)
        return self.layers[node]

    def gain(
        self, key: Any, rule: Any, block: Any, operands: Sequence[Any], envs: Sequence[Values] | None
    ) -> tuple[Gain, bool]:
        """(gain, whether it rests on a measurement).

        `block`: the representative that the rule sees of all blocks that compute the same; `operands`:
        the node's own.
        """
        static = block.once(rule.gain)
        if math.isfinite(static.factor) and not static.assumed:
            return static, False
        if key in self.recorded:
            return self.recorded[key], True
        known = [e for e in envs or () if all(v in e for v in operands)]
        if not known:
            return static, False
        measured = [rule.gain(block, [e[v] for v in operands]) for e in known]
        lasting = max((g.lasting for g in measured if g.lasting is not None), default=None)
        worst = max(measured, key=lambda g: g.factor)
        mixes = any(g.mixes for g in measured)
        gain = Gain(worst.factor, mixes, lasting=lasting, reason=worst.reason)
        gain = Gain.unknown() if math.isnan(gain.factor) else gain  # the weights are not finite
        self.recorded[key] = gain
        return gain, True


WORTHWHILE = 2**20  # bytes; smaller cotangents are never anchored just to save memory


@dataclass
class Options:
    """A method's settings for one network."""

    limit: float  # how far error may grow between exact cotangents
    anchors: bool = True  # whether anchors may be placed just to save memory
    anchor_every: int | None = None
    precision: Any = None  # of products in the cotangents' chain; None: chosen by the gains
    ambient: float = 1.0  # the growth of error up to which the ambient precision is used
    fragments: bool = True  # whether blocks may keep part of a cotangent
    requested: Fragment | None = None  # how they do so, if the user requests it
    checkpoint: Any = None  # how walks are cut into segments whose Phase I is run again
    always: bool = False  # walk whatever can be walked, even where something else takes less


def plan_walk(
    network: Network,
    start: int,
    stop: int,
    options: Options,
    *,
    wanted: Iterable[Any] = (),
    given: Iterable[Any] = (),
    table: GainTable | None = None,
    envs: Sequence[Values] | None = None,
    prefix: tuple[int, ...] = (),
) -> tuple[WalkExecutor, dict[Any, Growth]]:
    """A walk over the nodes [start, stop), with as few anchors as the gains allow.

    `wanted`: outputs whose cotangents Phase III must recover (a scan's carry). `given`: outputs whose
    cotangents it already knows. `envs`: values of the operands (for each layer of a scan), if gains are
    to be measured.
    """
    table = table or GainTable()
    about = (options, set(wanted), frozenset(given), table, envs, (prefix, start))
    found = []
    for planner in _ways_at_joins(network, start, stop, *about):
        growth = planner.settle()
        walk = WalkExecutor(network, start, stop, planner.steps(), frozenset(given))
        walk.growth = planner.largest_growth
        found.append((walk, growth))
    walk, growth = min(found, key=lambda pair: pair[0].kept_bytes)
    if not prefix:
        # Where nothing is lost the ambient precision is right; elsewhere rounding would grow.
        precise = lax.Precision.HIGHEST if walk.growth > options.ambient else None
        precision = precise if options.precision is None else options.precision
        if precision is not None:
            walk.in_precision(precision)
    return walk, growth


def least_bytes(
    network: Network,
    options: Options,
    table: GainTable,
    envs: Sequence[Values] | None,
    *,
    light: bool,
    given: Iterable[Any] = (),
    prefix: tuple[int, ...] = (),
) -> list[int]:
    """Lower bounds of the anchors, fragments and copies that a walk over the network keeps, by node.

    Without `light`, only outputs of products with weights that have neither a vijp nor a fragment are
    counted. With it, all nodes are, and finding the rules of the others requires tracing each of them.
    """
    about = (options, set(), frozenset(given), table, envs, (prefix, 0))
    ways = []
    for planner in _ways_at_joins(network, 0, len(network.nodes), *about):
        if light:
            planner.settle()
        ways.append([planner.least_bytes(i, light=light) for i in range(len(network.nodes))])
    return [min(of_node) for of_node in zip(*ways, strict=True)]


def _ways_at_joins(network: Network, start: int, stop: int, *about: Any) -> Iterable[_CotangentPlanner]:
    """A join takes its cotangent from the branch, or from the skip, whose copy is then kept.

    Taking the skip leaves the branch with a difference of cotangents, which may cancel, so it is chosen
    only where it keeps less.
    """
    nodes = network.nodes[start:stop]
    yield _CotangentPlanner(network, nodes, *about, by_skips=False)
    if any(n.is_fork for n in nodes):
        yield _CotangentPlanner(network, nodes, *about, by_skips=True)


class _CotangentPlanner:
    def __init__(
        self,
        network: Network,
        nodes: Sequence[Node],
        options: Options,
        wanted: set[Any],
        given: frozenset[Any],
        table: GainTable,
        envs: Sequence[Values] | None,
        place: tuple[tuple[int, ...], int],
        *,
        by_skips: bool,
    ):
        self.network, self.nodes, self.options, self.by_skips = network, nodes, options, by_skips
        self.wanted_out, self.given = wanted, given
        self.table, self.envs, self.place = table, envs, place
        self.measured: set[int] = set()
        self.largest_growth = 1.0
        self.reader = {v: i for i, n in enumerate(nodes) for v in n.block.inputs}
        self.maker = {v: i for i, n in enumerate(nodes) for v in n.block.outputs}
        self.forced: dict[int, str] = {}
        self.scan_steps: dict[int, ScanStep | str] = {}
        self.schemes: dict[int, tuple[BlockStep, Gain]] = {}
        # Cached and computed on demand: either may require a trace.
        self.through = functools.cache(self._through)
        self.gain = functools.cache(self._gain)

    # -- what each node offers ---------------------------------------------------------------------
    def _through(self, i: int) -> tuple[Any, ...]:
        """The inputs whose cotangents a walk uses to recover that of the node's output.

        A sum can take its cotangent from any one summand: a branch, or a skip (a fork's copy). What a
        stem adds has no cotangent in the sweep.
        """
        node = self.nodes[i]
        inputs = node.block.inputs
        if len(inputs) < 2 or node.rule is None:
            return inputs
        if [e.primitive for e in node.block.eqns] in ([lax.add_p], [lax.sub_p]):
            skips = [v for v in inputs if v in self.maker and self.nodes[self.maker[v]].is_fork]
            others = [v for v in inputs if v not in skips and not self._is_stem(v)]
            choice = (skips[-1:] or others[:1]) if self.by_skips else (others[:1] or skips[-1:])
            if choice and rule_through(node, self.network, choice)[0] is not None:
                return tuple(choice)
        walked = tuple(v for v in inputs if not self._is_stem(v))
        return walked if walked else inputs

    def _is_stem(self, v: Any) -> bool:
        return v in self.maker and not self.nodes[self.maker[v]].block.inputs

    def _gain(self, i: int) -> Gain | None:
        """The gain of a node's vijp; None where it has none."""
        node = self.nodes[i]
        if node.is_fork or node.is_aside or not (node.block.inputs or node.is_scan):
            return None
        if node.is_scan:
            return self._scan_gain(i)
        rule, _, model = rule_through(node, self.network, self.through(i))
        if rule is None:
            return None
        operands = restricted(node.block, self.through(i)).operands
        key = (self._key(i), node.describe())
        gain, measured = self.table.gain(key, rule, model, operands, self.envs)
        if measured:
            self.measured.add(i)
        return gain

    def _is_lossy(self, i: int) -> bool:
        """Whether a node has no vijp, or one that the tolerance forbids."""
        gain = self.gain(i)
        return gain is None or gain.factor > self.options.limit

    def _find_fragment(self, i: int) -> None:
        """The smallest fragment that is exact enough, for a node without a vijp of its own."""
        node = self.nodes[i]
        plain = node.is_fork or node.is_aside or node.is_scan or not node.block.inputs
        if plain or not self.options.fragments or not self._is_lossy(i):
            return
        # Walks over the same nodes are planned many times.
        ask = Ask(self.options.requested, self._slope(i))
        places = tuple(node.block.inputs.index(v) for v in self.through(i))
        # Unless gains are measured, nodes that compute the same have the same gains.
        known = node.model if self.table.is_static else node
        key = ("fragment", known, places, ask, self.options.limit, bool(self.place[0]))
        if key not in self.network.memory:
            self.network.memory[key] = self._best_fragment(i, ask)
        found = self.network.memory[key]
        if found is not None:
            step, gain, measured = found
            self.schemes[i] = step, gain
            self.measured |= {i} if measured else set()

    def _best_fragment(self, i: int, ask: Ask) -> tuple[BlockStep, Gain, bool] | None:
        """(a step that keeps the fragment; its gain; whether that was measured or is taken on trust)."""
        _, _, block = rule_through(self.nodes[i], self.network, self.through(i))
        operands = restricted(self.nodes[i].block, self.through(i)).operands
        whole = nbytes(*(v.aval for v in block.outputs))
        unbounded: BlockStep | None = None
        for scheme in fragments.candidates(block, ask):
            if scheme.reads_factors and not all(v in self.network.fixed for v in operands):
                continue
            gain, measured = self._fragment_gain(i, scheme, block, operands)
            usable = gain is not None or (scheme.blind and math.isinf(self.options.limit))
            if not usable:
                continue
            step = BlockStep(self.nodes[i].served_by(scheme), self.network, "fragment", self.through(i))
            step.looped = bool(self.place[0])
            if step.fragment_bytes >= whole:
                continue
            if gain is not None:
                return step, gain, measured
            unbounded = step
        if unbounded is not None:  # the last candidate, which keeps most
            return unbounded, Gain.unknown(), False
        return None

    def _fragment_gain(
        self, i: int, scheme: FragmentRule, block: Any, operands: Sequence[Any]
    ) -> tuple[Gain | None, bool]:
        """A fragment's gain; None beyond the limit, unless the user asked for just this fragment."""
        key = (self._key(i), self.nodes[i].describe(), scheme.label)
        gain, measured = self.table.gain(key, scheme, block, operands, self.envs)
        bounded = gain.factor <= self.options.limit and math.isfinite(gain.factor)
        if scheme.asked and not bounded:
            return replace(TRUSTED, factor=min(TRUSTED.factor, self.options.limit)), True
        return (gain if bounded else None), measured

    def _slope(self, i: int) -> float:
        """An s such that derivatives between blocks like this one lie in [s, 1]; see `Gain`."""

        def along(step: Any) -> float:
            product, at = 1.0, i
            while (at := step(at)) is not None:
                gain = self.gain(at)
                if gain is None or gain.mixes or not math.isfinite(gain.factor):
                    break
                product *= gain.factor
            return product

        def after(at: int) -> int | None:
            (v, *rest) = self.nodes[at].block.outputs
            return None if rest else self.reader.get(v)

        def before(at: int) -> int | None:
            (v, *rest) = self.through(at) or (None,)
            return None if rest else self.maker.get(v)

        factor = max(along(after), along(before))
        return factor - math.sqrt(max(0.0, factor**2 - 1))

    def _key(self, i: int) -> tuple[int, ...]:
        prefix, start = self.place
        return (*prefix, start + i)

    def _scan_gain(self, i: int) -> Gain | None:
        step = _plan_scan(self.nodes[i], self.network, self.options, self.table, self.envs, self._key(i))
        self.scan_steps[i] = step
        return step.gain if isinstance(step, ScanStep) else None

    # -- backward: who needs which cotangent -------------------------------------------------------
    def _decide(self) -> None:
        wanted = set(self.wanted_out)
        self.source = ["none"] * len(self.nodes)
        self.kept_copies: dict[int, tuple[tuple[int, ...], tuple[int, ...], int | None]] = {}
        for i in reversed(range(len(self.nodes))):
            node = self.nodes[i]
            outputs = node.block.outputs
            if node.is_aside:
                continue
            if node.is_fork:
                self._decide_fork(i, wanted)
                continue
            is_stem = node.is_stem and not isinstance(self.scan_steps.get(i), ScanStep)
            needed = any(v in wanted for v in outputs) or (bool(node.weights) and not is_stem)
            if not needed:
                continue
            if all(v in self.given for v in outputs):
                self.source[i] = "given"
            elif i in self.forced or is_stem:
                self.source[i] = "anchor"
            elif i in self.schemes:
                self.source[i] = "fragment"
                wanted.update(self.through(i))
            elif (gain := self.gain(i)) is None:
                self.source[i] = "anchor"
            elif isinstance(self.scan_steps.get(i), ScanStep):  # it places its own anchors
                self.source[i] = "vijp"
                wanted.update(node.block.inputs)
            elif gain.factor > self.options.limit and (
                self.options.anchor_every is None or gain.may_vanish
            ):
                self.forced[i] = _too_large(gain)
                self.source[i] = "anchor"
            else:
                self.source[i] = "vijp"
                wanted.update(self.through(i))

    def _decide_fork(self, i: int, wanted: set[Any]) -> None:
        (v,), copies = self.nodes[i].block.inputs, self.nodes[i].block.outputs
        known = tuple(k for k, c in enumerate(copies) if c in self.given)
        needed = [k for k, c in enumerate(copies) if c in wanted and k not in known]
        rest = [k for k in range(len(copies)) if k not in needed and k not in known]
        if not needed:
            self.kept_copies[i] = ((), known, None)
        elif rest or len({self.reader.get(c) for c in copies}) == 1:
            # A scan needs the cotangents of all carries that one state starts at once, so a difference,
            # which may cancel, would gain nothing.
            self.kept_copies[i] = (tuple(needed), known, None)
        else:
            # The copy that is read first begins the long way round; the kept ones are exact at the join.
            difference = min(needed, key=lambda k: self.reader.get(copies[k], math.inf))
            self.kept_copies[i] = (tuple(k for k in needed if k != difference), known, difference)
            wanted.add(v)

    # -- forward: how error grows --------------------------------------------------------------------
    def settle(self) -> dict[Any, Growth]:
        """Choose a source for every node, placing anchors until error stays within the limit."""
        for i in range(len(self.nodes)):
            self.gain(i)  # for a loop, this plans its body
        for i in range(len(self.nodes)):
            self._find_fragment(i)
        if self.options.anchor_every is not None:
            self._regular_anchors(self.options.anchor_every)
        elif self.options.anchors and not self.place[0]:
            self._anchor_instead_of_a_seed()
        while True:
            self._decide()
            grown, violated = self._grow()
            if violated is None:
                return grown
            self.forced[violated] = "error would exceed the tolerance"

    def _anchor_instead_of_a_seed(self) -> None:
        """Anchor the first layer if its cotangent is far smaller than the one that starts the sweep.

        A pyramid's first state, of s bytes, is larger than all that follow. A walk that starts there
        holds the state and its cotangent at once, 2s bytes. With an anchor of k bytes behind the first
        layer it holds the state, the anchor and the layer's output, s + 2k.
        """
        self._decide()
        first = next((i for i, n in enumerate(self.nodes) if n.weights and not n.is_stem), None)
        if first is None or self.nodes[first].is_scan or self.source[first] != "vijp":
            return
        before = [i for i, n in enumerate(self.nodes[:first]) if not n.is_aside]
        seeds = [v for i in (*before, first) for v in self.through(i)]
        others = [v for n in self.nodes[first + 1 :] for v in n.block.outputs]
        kept = nbytes(*(v.aval for v in self.nodes[first].block.outputs))
        seed = max((nbytes(v.aval) for v in seeds), default=0)
        smaller = 3 * kept <= seed and all(3 * nbytes(v.aval) <= seed for v in others)
        if smaller and seed >= WORTHWHILE:
            self.forced[first] = "smaller than the cotangent that a sweep would start from"

    def _regular_anchors(self, every: int) -> None:
        count = 0
        for i, node in enumerate(self.nodes):
            following = next((n for n in self.nodes[i + 1 :] if not n.is_aside), None)
            count += node.is_heavy and not node.is_scan and bool(node.block.inputs)
            if count >= every and following is not None and following.is_heavy:
                self.forced[i] = f"anchor_every={every}"
                count = 0

    def _grow(self) -> tuple[dict[Any, Growth], int | None]:
        growth: dict[Any, Growth] = {}
        self.largest_growth = 1.0
        limited = self.options.anchor_every is None
        for i, node in enumerate(self.nodes):
            outputs = node.block.outputs
            if node.is_fork:
                (v,), (_, _, difference) = node.block.inputs, self.kept_copies[i]
                for k, copy in enumerate(outputs):
                    growth[copy] = growth.get(v, Growth()) if k == difference else Growth()
                continue
            if self.source[i] not in WALKED:
                growth.update((v, Growth()) for v in outputs)
                continue
            arriving = Growth.worst(growth.get(v, Growth()) for v in self.through(i))
            gain = self.schemes[i][1] if self.source[i] == "fragment" else self.gain(i)
            assert gain is not None
            step = self.scan_steps.get(i)
            if isinstance(step, ScanStep):
                leaving, largest = self._through_scan(step, arriving, gain)
            else:
                leaving = largest = arriving.times(gain)
                if limited and leaving.factor > self.options.limit:
                    return growth, self._cheapest(i)
            growth.update((v, leaving) for v in outputs)
            self.largest_growth = max(self.largest_growth, largest.factor)
        return growth, None

    def _cheapest(self, violated: int) -> int:
        """Where to anchor so that node `violated` stays exact: a small state, preferably late."""
        best, i = violated, violated
        size = nbytes(*(v.aval for v in self.nodes[violated].block.outputs))
        while True:
            before = [self.maker.get(v) for v in self.through(i)]
            if len(before) != 1 or before[0] is None:
                return best
            i = before[0]
            if self.source[i] not in WALKED or self.nodes[i].is_scan:
                return best
            here = nbytes(*(v.aval for v in self.nodes[i].block.outputs))
            if 2 * here <= size:  # an earlier anchor must be clearly smaller to be worth it
                best, size = i, here

    def _through_scan(self, step: ScanStep, arriving: Growth, layer: Gain) -> tuple[Growth, Growth]:
        """Choose the scan's period; returns the growth at its end, and the largest inside."""
        if self.options.anchor_every is not None:
            step.period = self.options.anchor_every if self.options.anchor_every < step.length else None
        else:
            step.period = period_for(layer, arriving, step.length, self.options.limit)
        # Error may be larger inside a layer than at its end.
        inside = Growth(step.walk.growth, layer.mixes)
        if step.period is None:
            whole = arriving.times(layer.over(step.length))
            return whole, Growth.worst([whole, inside])
        period = Growth().times(layer.over(step.period))
        rest = step.length % step.period or step.period
        return Growth().times(layer.over(rest)), Growth.worst([period, inside])

    # -- the plan -----------------------------------------------------------------------------------
    def least_bytes(self, i: int, *, light: bool) -> int:
        """The bound of the function `least_bytes` for one node, or for all layers of a loop."""
        node = self.nodes[i]
        outputs = node.block.outputs
        if node.is_scan:
            return self._least_bytes_of_scan(i)
        if light:
            if node.is_fork:
                return len(self.kept_copies[i][0]) * nbytes(outputs[0].aval)
            if self.source[i] == "fragment":
                step, _ = self.schemes[i]
                return step.fragment_bytes + step.kept_bytes
            anchored = self.source[i] == "anchor" and not node.is_stem
            return nbytes(*(v.aval for v in outputs)) if anchored else 0
        known = node.is_stem or all(v in self.given for v in outputs)
        if known or not node.weights or not node.is_heavy or not self._is_lossy(i):
            return 0
        if self.options.anchor_every is not None and self.gain(i) is not None:
            return 0
        return 0 if self._may_keep_a_fragment(i) else nbytes(*(v.aval for v in outputs))

    def _least_bytes_of_scan(self, i: int) -> int:
        node = self.nodes[i]
        (eqn,) = node.block.eqns
        body = body_of(node, self.network)
        if isinstance(body, str):
            return nbytes(*(v.aval for v in node.block.outputs)) if node.weights else 0
        _, ys = body.outputs
        envs = self.table.layer_values(node, body, self.envs)
        about = (replace(self.options, anchor_every=None), self.table, envs)
        layer = least_bytes(body.network, *about, light=False, given=ys, prefix=self._key(i))
        return eqn.params["length"] * sum(layer)

    def _may_keep_a_fragment(self, i: int) -> bool:
        """Whether some fragment is exact enough, or may turn out to be once its gain is measured."""
        if not self.options.fragments:
            return False
        _, _, block = rule_through(self.nodes[i], self.network, self.through(i))
        schemes = fragments.candidates(block, Ask(self.options.requested))
        if not self.table.is_static or math.isinf(self.options.limit):
            return any(True for _ in schemes)
        return any(self._fragment_gain(i, s, block, ())[0] is not None for s in schemes)

    def steps(self) -> list[Step]:
        loops = {i: step for i, step in self.scan_steps.items() if isinstance(step, ScanStep)}
        for i, step in loops.items():
            step.source = "none" if self.source[i] == "none" else "vijp"
        sources = [loops[i].data if i in loops else self._source(i) for i in range(len(self.nodes))]
        start = self.place[1]
        stop, in_loop = start + len(self.nodes), bool(self.place[0])
        return bind_steps(self.network, start, stop, sources, in_loop=in_loop, loops=loops)

    def _source(self, i: int) -> Source:
        node, kind = self.nodes[i], self.source[i]
        if node.is_aside:
            return Unneeded("no derivative")
        if node.is_fork:
            return Copies("a state with several readers", *self.kept_copies[i])
        places = tuple(node.block.inputs.index(v) for v in self.through(i))
        if kind == "vijp":
            gain = self.gain(i)
            assert gain is not None
            return Vijp(self._reason(i), places, gain, i in self.measured)
        if kind == "fragment":
            step, gain = self.schemes[i]
            scheme = step.node.rule
            assert isinstance(scheme, FragmentRule)
            _, _, block = rule_through(node, self.network, self.through(i))
            reason, ask = scheme.verdict(block).reason, Ask(self.options.requested, self._slope(i))
            return Restored(reason, places, gain, i in self.measured, scheme.label, ask)
        return {"anchor": Anchor, "given": Given, "none": Unneeded}[kind](self._reason(i))

    def _reason(self, i: int) -> str:
        node, source = self.nodes[i], self.source[i]
        if source == "vijp":
            return node.verdict.reason + ("; needs no fragment" if self._has_unneeded(i) else "")
        if source == "none":
            return "no weight needs its cotangent"
        if source == "given":
            return "its cotangent is known"
        if not node.block.inputs:
            return "stem: its output's cotangent seeds the sweep"
        if i in self.forced:
            return self.forced[i]
        if isinstance(self.scan_steps.get(i), str):
            return str(self.scan_steps[i])
        return node.verdict.reason

    def _has_unneeded(self, i: int) -> bool:
        """Whether the fragment that the user requested would serve a node that needs none."""
        requested = self.options.requested
        if requested is None:
            return False
        try:
            return any(s.asked for s in fragments.candidates(self.nodes[i].block, Ask(requested)))
        except ValueError:  # the requested span is too short for this node, which does not need it
            return True


def _too_large(gain: Gain) -> str:
    if math.isinf(gain.factor):
        return gain.reason or (
            "its gain is not bounded while tracing: declare the weight's structure, or plan with "
            "concrete arguments"
        )
    return f"gain {gain.factor:.3g} alone exceeds the tolerance"


def period_for(layer: Gain, arriving: Growth, length: int, limit: float) -> int | None:
    """The longest uniform distance between anchors, preferring one that divides the length."""
    if arriving.times(layer.over(length)).factor <= limit:
        return None
    lasting = layer.factor if layer.lasting is None else layer.lasting
    if lasting <= 1:
        return length if layer.factor <= limit else 1
    room = limit * lasting / layer.factor if layer.fades else limit
    longest = int(math.log(max(room, 1.0)) / math.log(lasting) + 1e-9)
    return evenly(length, max(1, min(length, longest)))


# --- scans ------------------------------------------------------------------------------------------


def _plan_scan(
    node: Node,
    network: Network,
    options: Options,
    table: GainTable,
    envs: Sequence[Values] | None,
    key: tuple[int, ...],
) -> ScanStep | str:
    """A scan as a step of a walk, or the reason why it cannot be one."""
    if not node.block.eqns[0].params["length"]:
        return "it has no layers"
    inner, _ = _jax.open_jaxpr(node.block.eqns[0].params["jaxpr"])
    if any(_jax.has_effects(e) and e.outvars for e in inner.eqns):
        return "something inside it calls back to the host, which must happen once"
    body = body_of(node, network)
    if isinstance(body, str):
        return body
    if not body.active:
        return "no carry takes part in the derivative"
    carry_out, ys = body.outputs
    walk, growth = plan_walk(
        body.network,
        0,
        len(body.network.nodes),
        Options(options.limit, fragments=options.fragments, requested=options.requested),
        wanted=carry_out,
        given=ys,
        table=table,
        envs=table.layer_values(node, body, envs),
        prefix=key,
    )
    layer = Growth.worst([growth[v] for v in carry_out if v in growth])
    gain = layer.gain(any(s.gain.assumed for s in walk.steps))
    reason = f"{node.block.eqns[0].params['length']} layers"
    step = make_scan_step(node, network, body, walk, Layers(reason, gain=gain))
    step.layers.hoisted = step.layers.is_worth_hoisting()
    for inner in step.probed:
        inner.probed_outside = True
    return step


def _layer_values(node: Node, body: Body, envs: Sequence[Values] | None) -> list[Values] | None:
    """What each layer of a scan can read, as far as that is known."""
    (eqn,) = node.block.eqns
    if not envs:
        return None
    result: list[Values] = []
    stacked = body.counts.stacked
    side: Any = None
    for env in envs:
        outer = [v.val if hasattr(v, "val") else env.get(v) for v in eqn.invars]
        for layer in range(eqn.params["length"]):
            inner = dict(zip(body.jaxpr.constvars, body.consts, strict=True))
            for i, (v, a) in enumerate(zip(body.jaxpr.invars, outer, strict=True)):
                carried = body.counts.consts <= i < stacked
                if a is not None and not carried and i not in body.volatile:
                    inner[v] = a[layer] if i >= stacked else a
            side = side or _Side(body, inner)
            result.append(side.run(inner))
    return result


class _Side:
    """Evaluates a body's prologues from known values: one compiled program for all layers."""

    def __init__(self, body: Body, known: Values):
        self.given, self.eqns = list(known), []
        seen = set(known)
        for e in (*body.network.data_prologue, *body.network.weight_prologue):
            if not _jax.has_effects(e) and all(hasattr(v, "val") or v in seen for v in e.invars):
                self.eqns.append(e)
                seen.update(e.outvars)
        self.made = [v for e in self.eqns for v in e.outvars]

        @jax.jit
        def program(values: Sequence[Any]) -> list[Any]:
            env = dict(zip(self.given, values, strict=True))
            graph.run(self.eqns, env)
            return [env[v] for v in self.made]

        self.program = program

    def run(self, known: Values) -> Values:
        """`known`, extended by what the prologues compute from it."""
        if not self.eqns:
            return known
        made = self.program([known[v] for v in self.given])
        return {**known, **dict(zip(self.made, made, strict=True))}


def evenly(length: int, longest: int) -> int:
    """A size ≤ `longest` to cut `length` by: a divisor if one is close, else as even as possible."""
    divisor = next(k for k in range(longest, 0, -1) if length % k == 0)
    return divisor if 5 * divisor >= 4 * longest else -(-length // -(-length // longest))
