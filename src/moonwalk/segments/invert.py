"""Segments whose states are reconstructed from their outputs: reversible networks.

Where every block of a segment has an inverse (`Rule.inverse`), Phase I keeps the state at its *end*
alone. The reverse pass takes each block's input from its output, and
pulls back there, h and g at once:

    x = inverse(y),    (h, g) = vjp(block, x)(h')

as in reversible residual networks (Gomez et al. 2017). Nothing grows with the depth, and there is no
Phase III. What is lost is rounding: the inverse's x is not Phase I's, and the difference travels down
the segment. So a sketch of the state at its start is kept, and compared with that of what it arrives at.

Inverses that an author gave (couplings, `nn.Coupling`) are used by every plan, since a vijp would have
to keep a state there. Those that rules *derive*, of square affine blocks and of pointwise ones, only
serve `Reversible`: such blocks are walked for a bit an entry, and walks do not round states.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .. import _jax
from ..errors import PlanMismatchError
from ..execute import certificate
from ..execute.barriers import Env, barrier
from ..execute.certificate import Measured, Place
from ..execute.residuals import nbytes
from ..execute.sinks import GradientSink
from ..network.cutting import Network, Node
from ..network.loop_body import Body
from ..rules import registry
from ..rules.registry import Rule, State, Verdict
from ..trace.graph import Block
from ..trace.linearity import is_linear
from .base import Facts, Offer, Proposer, Realised, Row, Segment
from .checks import check_limit
from .codec import in_plans
from .costs import NodeCost, full_residual, node_costs
from .layers import LayerGradients, ScanLayers, body_of
from .seconds import node_seconds
from .store import Stretch


def find_inverse(node: Node, network: Network, *, derived: bool) -> Rule | Verdict:
    """The rule that inverts a node, whose operands every phase can read; or why there is none.

    `derived`: also inverses that no author has given.
    """
    block = node.block
    if node.is_fork:
        return Verdict(False, "several blocks read this state, and none of them alone leads back to it")
    if node.effects:
        return Verdict(False, "it prints or calls back, and its output is read")
    if node.checkpointed:
        return Verdict(False, "it is wrapped in jax.checkpoint, which asks for its state to be kept")
    if not block.inputs:
        return Verdict(False, "it makes a state of weights or data alone, in the middle of others")
    if block.exports or not set(block.operands) <= network.fixed:
        return Verdict(False, "values from inside the network, other than its state, go in or out")
    rules = [r for r in registry.rules_for(block) if derived or r.inverse_is_given]
    if not (rules or derived):
        return Verdict(None, "no inverse is known")
    if block.once(_is_half_inside):
        return Verdict(False, "half precision: rounding loses the state after a few layers")
    for rule in rules:
        verdict = rule.inverts(block)
        if verdict:
            return rule
        if verdict.submersive is False:
            return verdict
    return Affine.of(node) if derived else Verdict(None, "no inverse is known")


class Affine(Rule):
    """A square block whose Jacobian does not depend on the state: its vijp, transposed, inverts it.

    With y = f(0) + J x and J square, x = J⁻¹ (y − f(0)); the vijp is h ↦ h J⁻¹ of rows, and its
    transpose therefore applies J⁻¹ to columns.
    """

    name = "affine"

    def __init__(self, rule: Rule):
        self.rule = rule

    @classmethod
    def of(cls, node: Node) -> Affine | Verdict:
        """The inverse of a node, or why it has none of this kind."""
        block = node.block
        inputs, outputs = (sum(v.aval.size for v in vs) for vs in (block.inputs, block.outputs))
        if inputs != outputs:
            return Verdict(
                False,
                f"it takes {inputs} numbers to {outputs}, so its input cannot be had from its output",
            )
        if node.rule is None:
            return Verdict(False, f"no inverse is known: {node.verdict.reason}")
        if not node.rule.keeps_pullback:  # an author's, who need not have written it to be transposed
            return Verdict(False, "no inverse is known", "give it one: custom_vijp.definverse")
        # The function itself, and not its derivative: that of floor is constant, too.
        if not is_linear(block.eqns, block.inputs, block.outputs, affine=True):
            return Verdict(False, "no inverse is known: its equations do not show that it is affine")
        return cls(node.rule)

    def inverts(self, block: Block) -> Verdict:
        del block
        return Verdict(True, "square and affine: inverted by its vijp, transposed")

    def inverse(self, block: Block, operands: Sequence[Any], y: State) -> State:
        zero = tuple(_jax.full(v.aval, 0.0) for v in block.inputs)
        # Or XLA would compute f(0), as large as a state, for all layers before the first is inverted.
        zero, y, operands = lax.optimization_barrier((zero, tuple(y), tuple(operands)))
        factors = self.rule.prepare(block, operands)
        offset, kept = self.rule.linearize(block, zero, operands)  # of J, the same everywhere

        def vijp(*h: Any) -> State:
            return self.rule.vijp(block, factors, kept, h)

        if not is_linear(block.eqns, block.inputs, block.outputs):
            y = tuple(a - b for a, b in zip(y, offset, strict=True))
        return tuple(jax.linear_transpose(vijp, *zero)(y))


def _is_half_inside(block: Block) -> bool:
    """Whether anything is computed in half precision.

    Of a state in half precision, what rounding takes away is felt after a few layers. And a function
    that rounds a float32 state to half precision takes a difference in the last place to one in the
    eighth bit, wherever a value lies between two of its own.
    """
    x, operands = block.structs()

    def moved(x: Any, operands: Any) -> Any:  # its derivative opens every call
        return jax.jvp(lambda *x: block(x, operands), x, x)

    closed = jax.make_jaxpr(moved)(tuple(x), list(operands))
    pending = [_jax.open_jaxpr(closed)[0]]
    while pending:
        jaxpr = pending.pop()
        for v in (*jaxpr.invars, *(v for e in jaxpr.eqns for v in e.outvars)):
            dtype = getattr(v.aval, "dtype", None)
            if dtype is not None and jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32:
                return True
        pending += [inner for e in jaxpr.eqns for inner in _jax.inner_jaxprs(e)]
    return False


def inverted(node: Node, network: Network, *, derived: bool = False) -> Part | None:
    """How to invert a node, or None."""
    found = inverted_or_why(node, network, derived=derived)
    return None if isinstance(found, Verdict) else found


def inverted_or_why(node: Node, network: Network, *, derived: bool) -> Part | Verdict:
    """How to invert a node, or why it cannot be."""
    key = (node, "inverted", derived)
    if key not in network.memory:
        if node.is_aside:
            network.memory[key] = SkippedNode(node)
        elif node.is_scan and not node.effects and not node.checkpointed:
            network.memory[key] = _inverted_scan(node, network, derived)
        else:
            model = (node.model, "inverse", derived)
            if model not in network.memory:
                network.memory[model] = find_inverse(node.model, network, derived=derived)
            rule = network.memory[model]
            network.memory[key] = (
                rule if isinstance(rule, Verdict) else InvertedBlock(node, network, rule)
            )
    return network.memory[key]


class SkippedNode:
    """What looks at a state and has no derivative (a mean for a log, a print): no way back needs it."""

    def __init__(self, node: Node):
        self.node = node
        self.origins: tuple[Any, ...] = ()
        self.unread: tuple[Any, ...] = ()
        self.bytes = 0

    is_inverted = False
    is_derived = True
    blocks = 0

    def back(self, fixed: Env, x: Env, h: Env, out: GradientSink) -> None:
        """Nothing."""

    def rows(self, cost: NodeCost, kept: int, depth: int = 0, times: int = 1) -> list[Row]:
        """None."""
        return []


class InvertedBlock:
    """A block with an inverse."""

    def __init__(self, node: Node, network: Network, rule: Rule):
        self.node, self.rule = node, rule
        self.origins: tuple[Any, ...] = ()  # data that it starts from
        self.unread: tuple[Any, ...] = ()  # results that are needed, though nothing else reads them
        self.residual = full_residual(node, network)
        self.bytes = self.residual.bytes  # what it takes while it is differentiated

    is_inverted = True
    blocks = 1

    @property
    def is_derived(self) -> bool:
        """Whether the inverse was found by a rule, not given by its author."""
        return not self.rule.inverse_is_given

    def rows(self, cost: NodeCost, kept: int, depth: int = 0, times: int = 1) -> list[Row]:
        """As a report shows it."""
        why = self.rule.inverts(self.node.block).reason
        about = ("invert", kept, None, why, cost.m_x, cost.m_theta, depth, times)
        return [Row.of(self.node, *about)]

    def back(self, fixed: Env, x: Env, h: Env, out: GradientSink) -> None:
        """From the outputs' values and cotangents to the inputs'."""
        block, weights = self.node.block, self.node.weights
        operands = [fixed[v] for v in block.operands]
        state = self.rule.inverse(block, operands, tuple(x.pop(v) for v in block.outputs))
        # A coupling's inverse has run what its pullback runs, on the same values: XLA runs it once.
        _, kept = self.residual.forward(list(state), operands)
        arriving = tuple(h.pop(v).astype(v.aval.dtype) for v in block.outputs)
        leaving, found = self.residual.restore(kept, operands)(arriving)
        x.update(zip(block.inputs, state, strict=True))
        h.update(zip(block.inputs, leaving, strict=True))
        out.add(dict(zip(weights, found, strict=True)))
        out.close(weights)


class InvertedLoop:
    """A scan over layers that are inverted: one loop back."""

    def __init__(self, node: Node, layers: ScanLayers, layer: list[Part]):
        self.node, self.layers, self.layer = node, layers, layer
        weights = dict.fromkeys(v for part in layer for v in part.node.weights)
        self.weights = tuple(weights)
        counts = layers.body.counts
        self.first = tuple(layers.eqn.invars[counts.consts : counts.stacked])
        self.last = tuple(layers.eqn.outvars[: counts.carry])
        self.origins = tuple(self.first[j] for j in layers.seeded)
        shown = {*node.block.outputs, *node.block.exports}
        self.unread = tuple(v for v in self.last if v not in shown)
        # While a layer is differentiated, its gradients lie beside what they are written to.
        self.bytes = max(part.bytes for part in layer) + 2 * layers.operand_bytes + layers.hoisted_bytes

    is_inverted = True
    is_derived = False

    @property
    def blocks(self) -> int:
        """Of its body, those whose input is reconstructed."""
        return sum(part.blocks for part in self.layer)

    def rows(self, cost: NodeCost, kept: int, depth: int = 0, times: int = 1) -> list[Row]:
        """As a report shows it: the loop, and what is in its body."""
        length = self.layers.length
        why = f"{length} layers, each from the one after it"
        about = ("invert", kept, None, why, cost.m_x, cost.m_theta, depth, times)
        rows = [Row.of(self.node, *about)]
        for part, inner in zip(self.layer, node_costs(self.layers.body.network), strict=True):
            rows += part.rows(inner, 0, depth + 1, length)
        return rows

    def back(self, fixed: Env, x: Env, h: Env, out: GradientSink) -> None:
        layers = self.layers
        operands, _ = layers.operands_of(fixed, {})
        ends, _ = layers.body.outputs
        y = [x.pop(v) for v in self.last]
        h_last, _ = layers.arriving(h)
        gradients = LayerGradients(layers, operands, self.weights)

        def layer(carry: Any, i: Any, _: Any) -> Any:
            y, h, total = carry
            env = layers.environment(operands, i)
            inner_x, inner_h = dict(zip(ends, y, strict=True)), dict(zip(ends, h, strict=True))
            found = GradientSink()
            for part in reversed(self.layer):
                part.back(env, inner_x, inner_h, found)
            total = gradients.add(total, i, env, found.found)
            h_ins = layers.h_ins
            return ([inner_x[v] for v in h_ins], [inner_h[v] for v in h_ins], total), None

        carry, _ = layers.loop.visit(layer, (y, h_last, gradients.start()), backward=True)
        start, h_first, total = carry
        x.update(zip(self.first, start, strict=True))
        for v, value in layers.leaving(h_first):
            h[v] = value if v not in h else h[v] + value
        out.add(gradients.finish(total))
        out.close(self.node.weights)


Part = InvertedBlock | InvertedLoop | SkippedNode


def _inverted_scan(node: Node, network: Network, derived: bool) -> InvertedLoop | Verdict:
    if not node.block.eqns[0].params["length"]:
        return Verdict(False, "it has no layers")
    body = body_of(node, network)
    if not isinstance(body, Body):
        return body if isinstance(body, Verdict) else Verdict(False, str(body))
    whole = len(body.active) == body.counts.carry and not body.active_ys and not body.volatile
    if not whole or not body.network.nodes or not _starts_inside(node, body):
        return Verdict(False, "its carry is not the state alone, from one layer to the next")
    parts: list[Part] = []
    for inner in body.network.nodes:
        part = inverted_or_why(inner, body.network, derived=derived)
        if isinstance(part, Verdict):
            return Verdict(False, f"in its body, {inner.describe()}: {part.reason}")
        parts.append(part)
    if not _is_chain(body.network):
        return Verdict(False, "its carry does not determine every state in its body")
    layers = ScanLayers(node, body)
    layers.hoisted = layers.is_worth_hoisting()
    return InvertedLoop(node, layers, parts)


def _starts_inside(node: Node, body: Body) -> bool:
    """Whether every carry starts from a state or data of its own, to arrive at again."""
    (eqn,) = node.block.eqns
    carries = eqn.invars[body.counts.consts : body.counts.stacked]
    known = {*node.block.inputs, *node.block.operands}
    return not any(isinstance(v, _jax.Literal) or v not in known for v in carries) and len(
        set(carries)
    ) == len(carries)


def _is_chain(network: Network) -> bool:
    """Whether the outputs are all that the nodes leave behind, and determine every state."""
    nodes = [n for n in network.nodes if not n.is_aside]
    made = [v for n in nodes for v in n.block.outputs]
    read = {v for n in nodes for v in n.block.inputs}
    return {v for v in made if v not in read} == set(network.outputs) and set(network.state) <= read


@in_plans
@dataclass(frozen=True)
class Invert(Segment):
    """The state at the end is kept, and each node's input reconstructed from its output."""

    derived: bool = False  # also by inverses that no author has given
    limit: float = math.inf  # how far from the state at the start the inverses may arrive

    def bind(self, network: Network) -> InvertExecutor:
        check_limit("Invert", self.limit)
        nodes = network.nodes[self.start : self.stop]
        rigid = [n for n in nodes if inverted(n, network, derived=self.derived) is None]
        if rigid:
            raise PlanMismatchError(
                f"method=: Invert(start={self.start}, stop={self.stop}) in the plan holds "
                f"{rigid[0].describe()}, which has no inverse. Make the plan anew with "
                "moonwalk.plan(fun, *args), or mend it."
            )
        bound = InvertExecutor(network, self.start, self.stop, derived=self.derived)
        bound.hold_to(self.limit)
        return bound


class InvertExecutor(Stretch):
    """Consecutive nodes [start, stop) of a network that are inverted."""

    limit = math.inf

    def __init__(self, network: Network, start: int, stop: int, *, derived: bool = False):
        super().__init__(network, start, stop)
        self.derived = derived
        parts = [inverted(n, network, derived=derived) for n in self.nodes]
        self.parts = [part for part in parts if part is not None]
        assert len(self.parts) == len(parts)
        nodes = [n for n in self.nodes if not n.is_aside]
        made = dict.fromkeys(v for n in nodes for v in n.block.outputs)
        read = dict.fromkeys(v for n in nodes for v in n.block.inputs)
        self.starts = tuple(v for v in read if v not in made)
        # A scan's last carry is needed whole, though a part of it may have no other reader, or only
        # readers without a derivative.
        scans = [part for part in self.parts if isinstance(part, InvertedLoop)]
        carries = [v for part in scans for v in part.last]
        self.ends = tuple(dict.fromkeys(v for v in (*made, *carries) if v not in read))
        self.also = {i: part.unread for i, part in enumerate(self.parts) if part.unread}

    @property
    def data(self) -> Segment:
        return Invert(self.start, self.stop, self.derived, self.limit)

    @property
    def kept_bytes(self) -> int:
        """The state at the end."""
        return nbytes(*(v.aval for v in self.ends))

    @property
    def transient_bytes(self) -> int:
        """What one block takes while it is differentiated."""
        return max(part.bytes for part in self.parts)

    def forward(self, fixed: Env, x: Env, results: frozenset[Any], *, again: bool = False) -> Any:
        box: dict[str, Any] = {"sketches": [certificate.sketch(x[v]) for v in self.starts]}
        self.run(fixed, x, results, again=again)
        barrier((x, list(x)), (box, list(box)))
        return [x[v] for v in self.ends], box["sketches"]

    @property
    def places(self) -> list[Place]:
        """The state at the start."""
        blocks = [part.node for part in self.parts if part.is_inverted]
        node = blocks[0]
        line = _jax.source_line(node.block.eqns[-1])
        return [Place("inverse", node.describe(), line, self.limit, ends=True)]

    def hold_to(self, limit: float) -> None:
        self.limit = limit

    def backward_peak(self, timeline: Any) -> int:
        return self.transient_bytes + max(map(timeline.inverted, range(self.start, self.stop)))

    def seconds(self, timeline: Any) -> float:
        # An inverse is as much work as a forward pass, and from the input that it finds a block is
        # linearised.
        nodes = timeline.seconds[self.start : self.stop]
        return super().seconds(timeline) + 2 * sum(n.forward for n in nodes)

    @property
    def facts(self) -> Facts:
        return Facts(checked=True, inverted=sum(part.blocks for part in self.parts))

    def rows(self, costs: Sequence[NodeCost], *, chosen: bool) -> list[Row]:
        rows: list[Row] = []
        last = max(i for i, part in enumerate(self.parts) if part.is_inverted)
        for i, part in enumerate(self.parts):
            rows += part.rows(costs[self.start + i], self.kept_bytes if i == last else 0)
        return rows

    def backward(self, fixed: Env, saved: Any, h: Env, out: GradientSink) -> list[Measured]:
        """From the end's state and cotangent to the start's, handing out gradients; the error there."""
        ends, sketches = saved
        x = dict(zip(self.ends, ends, strict=True))
        # Behind a barrier: what a coupling passes on is the state itself, and XLA would keep all that
        # Phase I has computed from it.
        barrier((x, list(x)), (h, list(h)))
        for part in reversed(self.parts):
            part.back(fixed, x, h, out)
            inputs = [v for v in part.node.block.inputs if v in x and v in h]
            barrier((x, inputs), (h, inputs), *out.parts(part.node.weights))
        pairs = [(certificate.sketch(x[v]), s) for v, s in zip(self.starts, sketches, strict=True)]
        origins = [v for part in self.parts for v in part.origins]
        pairs += [(certificate.sketch(x[v]), certificate.sketch(fixed[v])) for v in origins]
        error = certificate.compare_together(pairs, [certificate.sketch(a) for a in ends])
        return [Measured(error, *self.places)]


class InvertProposer(Proposer):
    """For every node, the longest run of inverses that ends there."""

    def __init__(self, network: Network, costs: Sequence[NodeCost]):
        self.network, self.costs, self.limit = network, costs, 0
        self.offers = _longest_runs(network)

    def limits(self) -> set[int]:
        return {int(offer.transient) for offer in self.offers if offer is not None}

    def begin(self, limit: int, worth: float) -> None:
        del worth
        self.limit = limit

    def ending_at(self, stop: int, best: Sequence[float]) -> Iterable[Offer]:
        del best
        offer = self.offers[stop]
        if offer is not None and offer.transient <= self.limit:
            yield offer

    def realise(self, offer: Offer) -> Realised:
        run = InvertExecutor(self.network, offer.start, offer.stop)
        gradients = max(c.gradients for c in self.costs[offer.start : offer.stop])
        return Realised([run], run.kept_bytes, run.transient_bytes + gradients)


def _longest_runs(network: Network) -> list[Offer | None]:
    """By the place where they end; what they take follows from that of a run that is a node shorter."""
    found: list[Offer | None] = []
    seconds = node_seconds(network)
    ends: dict[Any, None] = {}  # what the run leaves behind
    read: set[Any] = set()
    transient = 0
    for stop, start in enumerate(runs(network)):
        if start == stop:
            ends, read, transient = {}, set(), 0
            found.append(None)
            continue
        node = network.nodes[stop - 1]
        part = inverted(node, network)
        assert part is not None
        if not node.is_aside:
            read.update(node.block.inputs)
            # Of a scan's last carry all is needed, though a part of it may have no other reader.
            carries = part.last if isinstance(part, InvertedLoop) else ()
            ends.update(dict.fromkeys((*node.block.outputs, *carries)))
            ends = {v: None for v in ends if v not in read}
        transient = max(transient, part.bytes)
        again = 2 * sum(n.forward for n in seconds[start:stop])  # the inverse, and to linearise
        found.append(Offer(start, stop, nbytes(*(v.aval for v in ends)), transient, again))
    return found


def runs(network: Network) -> list[int]:
    """For every place between nodes, the start of the longest run of inverses that ends there."""
    starts = [0]
    for i, node in enumerate(network.nodes):
        goes_on = starts[-1] < i if node.is_aside else inverted(node, network) is not None
        starts.append(starts[-1] if goes_on else i + 1)
    return starts
