"""A loss becomes a weight prologue, a data prologue and nodes.

- The *weight prologue* depends on parameters only (constraints, stacking, casts). Its pullback turns the
  gradients of the network's operands into gradients of the parameters, once, at the end.
- The *data prologue* depends on no parameter.
- The *network* depends on both. It is cut into *nodes*, each a block with one state in and one out.

The partition of `graph` keeps all uses of a variable in one block, because the vijp of a whole function
needs that. Here a block that no rule serves is opened: a variable that several nodes read is split by a
`Fork`, whose outputs are copies of it. Then every variable has exactly one reader, which alone
determines its cotangent.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

from jax import lax

from .. import _jax
from .._jax import JaxprEqn, Literal
from ..errors import NotSubmersiveError
from ..rules import chain
from ..rules.registry import Rule, Verdict
from ..trace import graph
from ..trace.activity import active_variables
from ..trace.declare import Declaration, propagate
from ..trace.facts import Constants, propagate_names
from ..trace.fingerprint import fingerprint, renamed
from ..trace.graph import Block, Cutter
from ..trace.partition import MOVING, POINTWISE, partition
from .remade import is_drawn


class Copy:
    """A variable made by a fork: one of several copies of another."""

    def __init__(self, source: Any):
        self.aval = source.aval


@dataclass(frozen=True, eq=False)
class Fork(Block):
    """One state in, several copies of it out. Its pullback is the sum."""

    def values(self, wanted: Sequence[Any], x: Sequence[Any], operands: Sequence[Any]) -> tuple:
        del operands
        return tuple(x[0] for _ in wanted)

    @property
    def eqn(self) -> JaxprEqn:
        raise AttributeError("a fork has no equation")


class Service:
    """A rule and its verdict, found on first use.

    Only walks and reports need to know whether a light block has a rule. Finding out takes a trace of
    its derivative, which a plan that stores and recomputes can do without.
    """

    def __init__(
        self,
        rule: Rule | None = None,
        verdict: Verdict | None = None,
        find: Callable[[], tuple[Rule | None, Verdict]] | None = None,
    ):
        self._found = None if verdict is None else (rule, verdict)
        self._find = find

    def _get(self) -> tuple[Rule | None, Verdict]:
        if self._found is None:
            assert self._find is not None
            self._found, self._find = self._find(), None
        return self._found

    @property
    def rule(self) -> Rule | None:
        return self._get()[0]

    @property
    def verdict(self) -> Verdict:
        return self._get()[1]


@dataclass(frozen=True, eq=False, repr=False)
class Node:
    """A block of the network, the operands whose gradient is wanted, and the rule that serves it."""

    block: Block
    weights: tuple[Any, ...]
    service: Service
    checkpointed: bool = False  # lies in a region that the user wrapped in jax.checkpoint
    is_stem: bool = False  # reads no state, and nothing else that only a forward pass has
    same: Node | None = None  # the first node of the network that computes the same

    @property
    def model(self) -> Node:
        """The representative of the nodes that compute the same, for what depends on a block alone."""
        return self if self.same is None else self.same

    @property
    def rule(self) -> Rule | None:
        """The rule that serves it, if there is one."""
        return self.service.rule

    @property
    def verdict(self) -> Verdict:
        """Whether it is submersive, and why."""
        return self.service.verdict

    def served_by(self, rule: Rule | None, verdict: Verdict | None = None) -> Node:
        """The same node with another rule."""
        return replace(self, service=Service(rule, verdict or self.verdict), same=self.model)

    @property
    def is_fork(self) -> bool:
        return isinstance(self.block, Fork)

    @property
    def is_aside(self) -> bool:
        """Values that depend on the state but carry no derivative."""
        return not self.block.outputs

    @property
    def is_scan(self) -> bool:
        return len(self.block.eqns) == 1 and self.block.eqns[0].primitive is lax.scan_p

    @cached_property
    def is_heavy(self) -> bool:
        """Whether it does enough work to deserve its own barrier."""
        return any(is_heavy(e) for e in self.block.eqns)

    @cached_property
    def keeps_inside(self) -> bool:
        """Whether it holds several products, or a loop: then its pullback keeps more than its state."""
        return sum(map(_products, self.block.eqns)) > 1

    @cached_property
    def effects(self) -> bool:
        return any(_jax.has_effects(e) for e in self.block.eqns)

    @cached_property
    def has_own_pullback(self) -> bool:
        """Whether a `custom_vjp` inside has a backward pass of its own, which need not be linear."""
        return any(_jax.runs(e, _jax.custom_vjp_call_p) for e in self.block.eqns)

    @cached_property
    def is_silent(self) -> bool:
        """Whether it only prints or calls back, and returns nothing."""
        return self.effects and not (self.block.outputs or self.block.exports)

    @cached_property
    def calls_once(self) -> bool:
        """Whether it calls back to the host and reads the answer, which must happen only once."""
        return any(_jax.has_effects(e) and e.outvars for e in self.block.eqns)

    def describe(self) -> str:
        """'dot_general f32[8,3] -> f32[8,4]'."""
        if self.is_fork:
            return f"fork {graph.type_of(self.block.inputs[0])} ×{len(self.block.outputs)}"
        names = [e.primitive.name for e in self.block.eqns if e.primitive not in _LAYOUT]
        names = list(dict.fromkeys(names or [e.primitive.name for e in self.block.eqns]))
        shown = "+".join(names[:3]) + ("+…" if len(names) > 3 else "")
        arrow = " -> ".join(
            chain.describe_types(v)
            for v in (self.block.inputs, self.block.outputs or self.block.exports)
        )
        return f"{shown} {arrow}"


_LAYOUT = MOVING | {lax.convert_element_type_p}


def is_heavy(eqn: JaxprEqn) -> bool:
    """Whether an equation is a product, convolution, loop or call, where most of the time goes."""
    own = {_jax.custom_jvp_call_p, _jax.custom_vjp_call_p}
    if eqn.primitive in own:
        inner, _ = _jax.called_jaxpr(eqn)
        return any(is_heavy(e) for e in inner.eqns)
    if eqn.primitive in _jax.CALLS:
        inner, _ = _jax.called_jaxpr(eqn)
        return any(is_heavy(e) for e in inner.eqns)
    return eqn.primitive in _HEAVY or eqn.primitive.name in _HEAVY_NAMES


def _products(eqn: JaxprEqn) -> int:
    """How many heavy equations it holds; a loop counts as several."""
    if not is_heavy(eqn):
        return 0
    if eqn.primitive in (lax.scan_p, lax.while_p):
        return 2
    return max(1, sum(_products(e) for inner in _jax.inner_jaxprs(eqn) for e in inner.eqns))


_HEAVY = {lax.dot_general_p, lax.conv_general_dilated_p, lax.scan_p, lax.while_p, lax.cond_p}
_HEAVY_NAMES = {
    *("custom_vijp_call", "shard_map", "pallas_call", "ffi_call"),
    *("ragged_dot_general", "scaled_dot", "scaled_matmul_wrapper", "dot_product_attention_fwd_wrapper"),
    *("fft", "triangular_solve", "tridiagonal_solve", "custom_linear_solve", "cholesky", "lu", "qr"),
    *("geqrf", "householder_product", "ormqr", "eigh", "eig", "svd", "schur", "hessenberg"),
}


@dataclass(frozen=True, eq=False, repr=False)
class Network:
    """The prologues and nodes of one flat jaxpr."""

    nodes: tuple[Node, ...]
    weight_prologue: tuple[JaxprEqn, ...]
    data_prologue: tuple[JaxprEqn, ...]
    state: tuple[Any, ...]
    outputs: tuple[Any, ...]  # one variable per wanted output; copies where a value is shared
    fixed: frozenset[
        Any
    ]  # variables that every phase can read: weights, data, and what their prologues make
    weights: frozenset[Any]  # those of `fixed` that are differentiated
    on_weights: frozenset[Any]  # those of `fixed` that depend on a weight
    results: frozenset[Any]  # what the jaxpr returns
    numbers: frozenset[Any] = frozenset()  # those of `fixed` that depend on neither weights nor data
    memory: dict[Any, Any] = field(default_factory=dict)  # derived once per model: residuals, bodies

    def kinds(self, variables: Iterable[Any]) -> list[str]:
        """For each operand "weight", "data", or "moving" if only a forward pass has its value.

        Random bits are made again in every forward pass, so what they decide is moving.
        """
        return [
            "moving"
            if v not in self.fixed or is_drawn(self, v)
            else "weight"
            if v in self.on_weights
            else "data"
            for v in variables
        ]

    @cached_property
    def uses(self) -> Counter[Node]:
        """For each model, how many nodes compute the same."""
        return Counter(n.model for n in self.nodes)

    @cached_property
    def wanted_weights(self) -> tuple[Any, ...]:
        """Operands of the nodes whose gradients the phases hand out."""
        return tuple(dict.fromkeys(v for n in self.nodes for v in n.weights))

    @cached_property
    def last_read(self) -> dict[Any, int]:
        """For each variable, the last node that reads it."""
        last: dict[Any, int] = {}
        for i, node in enumerate(self.nodes):
            for v in (*node.block.inputs, *node.block.operands):
                last[v] = i
        last.update((v, len(self.nodes)) for v in self.outputs)
        return last


def build(
    jaxpr: Any,
    *,
    state: Sequence[Any],
    weights: Sequence[Any],
    outputs: Sequence[Any],
    volatile: Sequence[Any] = (),
    constants: Iterable[Any] = (),
    consts: Mapping[Any, Any] | None = None,
    declarations: Mapping[Any, Declaration] | None = None,
    names: Mapping[Any, str] | None = None,
    crossings: bool = True,
) -> Network:
    """Sort a flat jaxpr's equations, cut its network and find the rules.

    **Arguments:**

    - `state`: inputs through which a cotangent flows and leaves (a scan's carry).
    - `weights`: inputs whose gradient is wanted, but which are not part of the state.
    - `outputs`: the variables whose cotangents come in.
    - `volatile`: inputs without a derivative that later phases cannot read (a scan's counter).
    - `constants`: inputs that do not count as data (numbers known while tracing).
    - `crossings`: open blocks in which paths cross, too.
    """
    folded = Constants(jaxpr.eqns, consts or {})
    declared = propagate(jaxpr.eqns, declarations or {})
    eqns = graph.merge_padding(jaxpr.eqns, jaxpr.outvars, folded, declared)
    active = active_variables(eqns, [*state, *weights], outputs)
    apart = graph.values_apart(eqns, active)
    if len(apart) > len(eqns):
        eqns, active = apart, active_variables(apart, [*state, *weights], outputs)
    prologues = _Prologues(jaxpr, eqns, state, weights, volatile, constants)
    on_network = active & (prologues.network_vars | set(state))
    eqns_of_network, outputs, forks, on_network = _separate_outputs(
        prologues.network, on_network, outputs
    )
    facts = {"declarations": declared, "names": propagate_names(eqns, names or {}), "constants": folded}
    opener = _Opener(facts, prologues, eqns, on_network, crossings=crossings)
    pieces = opener.cut(eqns_of_network, outputs, forks, results=jaxpr.outvars)
    outputs = [pieces.restored.get(v, v) if _is_var(v) else v for v in outputs]
    opener.add_all(pieces)
    opener.finish()
    results = frozenset(v for v in (*jaxpr.outvars, *outputs) if _is_var(v))
    weights_of_network = active - on_network
    network = Network(
        tuple(opener.nodes(weights_of_network)),
        tuple(prologues.weight),
        tuple(prologues.data),
        tuple(state),
        tuple(outputs),
        frozenset(prologues.fixed),
        frozenset(weights_of_network),
        frozenset(prologues.on_weights),
        results,
        frozenset(prologues.numbers),
    )
    return replace(network, nodes=_with_models(network))


def _with_models(network: Network) -> tuple[Node, ...]:
    """The nodes, each with the first one that computes the same from operands of the same kinds."""
    first: dict[Any, Node] = {}
    result = []
    for node in network.nodes:
        block = node.block
        kinds = tuple(network.kinds(block.operands))
        wanted = tuple(block.operands.index(v) for v in node.weights)
        key = (fingerprint(block), kinds, wanted, node.checkpointed, node.is_stem)
        model = first.setdefault(key, node)
        result.append(node if model is node else replace(node, same=model))
    return tuple(result)


def small(variables: Iterable[Any]) -> list[Any]:
    """The variables of a few numbers (thresholds, coefficients), which do not count as data."""
    return [v for v in variables if v.aval.size <= 16]


class _Prologues:
    """Sorts equations into weight prologue, data prologue and network by what they depend on."""

    def __init__(
        self,
        jaxpr: Any,
        eqns: Sequence[JaxprEqn],
        state: Sequence[Any],
        weights: Sequence[Any],
        volatile: Sequence[Any],
        constants: Iterable[Any],
    ):
        moving = {*state, *volatile}
        on_weights = set(weights)
        known = set(constants)
        on_data = {v for v in (*jaxpr.invars, *jaxpr.constvars) if v not in moving | on_weights | known}
        self.fixed = on_weights | on_data | known
        self.network: list[JaxprEqn] = []
        self.weight: list[JaxprEqn] = []
        self.data: list[JaxprEqn] = []
        self.producer: dict[Any, JaxprEqn] = {}
        for eqn in eqns:
            reads = [v for v in eqn.invars if not isinstance(v, Literal)]
            moves = any(v in moving for v in reads)
            w, d = any(v in on_weights for v in reads), any(v in on_data for v in reads)
            if moves or (w and d and not _shapes_a_weight(eqn, on_weights)):
                self.network.append(eqn)
                moving.update(eqn.outvars)
                continue
            self.fixed.update(eqn.outvars)
            self.producer.update((v, eqn) for v in eqn.outvars)
            if w:
                self.weight.append(eqn)
                on_weights.update(eqn.outvars)
            else:
                self.data.append(eqn)
                if d:
                    on_data.update(eqn.outvars)
        self.on_weights = on_weights
        self.numbers = self.fixed - on_weights - on_data
        self.network_vars = {v for e in self.network for v in e.outvars}

    def absorbed(self, eqns: Sequence[JaxprEqn]) -> list[JaxprEqn]:
        """`eqns`, preceded by the steps of the prologues that only enlarge their operands.

        A bias that the weight prologue broadcasts to an activation would be as large as one, and so
        would its gradient. Broadcast inside the node, both stay the size of a bias. A scan absorbs
        nothing, because its layers are cut by themselves.
        """
        if len(eqns) == 1 and eqns[0].primitive is lax.scan_p:
            return list(eqns)
        added: list[JaxprEqn] = []
        pending = list(eqns)
        while pending:
            eqn = pending.pop()
            for v in eqn.invars:
                source = None if isinstance(v, Literal) else self.producer.get(v)
                if source is not None and source not in added and _expands(source):
                    added.append(source)
                    pending.append(source)
        return [*reversed(added), *eqns]


def _expands(eqn: JaxprEqn) -> bool:
    cheap = eqn.primitive in POINTWISE or eqn.primitive in MOVING
    sizes = [v.aval.size for v in eqn.invars if not isinstance(v, Literal)]  # a number has none
    return cheap and eqn.outvars[0].aval.size > max(1, sum(sizes))


def _shapes_a_weight(eqn: JaxprEqn, on_weights: set[Any]) -> bool:
    """Whether it combines a weight with data, entry by entry: `w * mask`, `w_frozen + a @ b`."""
    if eqn.primitive not in POINTWISE or eqn.outvars[0].aval.ndim < 2:
        return False
    size = eqn.outvars[0].aval.size
    return any(
        not isinstance(v, Literal) and v in on_weights and v.aval.size == size for v in eqn.invars
    )


def _separate_outputs(
    eqns: Sequence[JaxprEqn], active: set[Any], outputs: Sequence[Any]
) -> tuple[list[JaxprEqn], list[Any], list[tuple[Any, list[Any]]], set[Any]]:
    """Fork every output that is also read inside, or wanted twice."""
    eqns, outputs, forks, active = list(eqns), list(outputs), [], set(active)
    readers = {v for e in eqns if any(o in active for o in e.outvars) for v in e.invars if _is_var(v)}
    for v in dict.fromkeys(v for v in outputs if _is_var(v) and v in active):
        places = [i for i, o in enumerate(outputs) if o is v]
        inside = v in readers
        if len(places) + inside < 2:
            continue
        copies = [Copy(v) for _ in range(len(places) + inside)]
        for place, copy in zip(places, copies, strict=False):
            outputs[place] = copy
        if inside:
            eqns = [_reading(e, {v: copies[-1]}) if _carries(e, active) else e for e in eqns]
        forks.append((v, copies))
        active.update(copies)
    return eqns, outputs, forks, active


def _is_var(atom: Any) -> bool:
    return not isinstance(atom, Literal)


def _carries(eqn: JaxprEqn, active: set[Any]) -> bool:
    return any(v in active for v in eqn.outvars)


def _reading(eqn: JaxprEqn, new: Mapping[Any, Any]) -> JaxprEqn:
    """The equation with some of the variables that it reads replaced."""
    invars = [new.get(v, v) if _is_var(v) else v for v in eqn.invars]
    return eqn if invars == eqn.invars else eqn.replace(invars=invars)


def _making(eqn: JaxprEqn, new: Mapping[Any, Any]) -> JaxprEqn:
    """The equation with some of the variables that it makes replaced."""
    outvars = [new.get(v, v) for v in eqn.outvars]
    return eqn if outvars == eqn.outvars else eqn.replace(outvars=outvars)


def _standing(
    groups: Sequence[Sequence[JaxprEqn]], forks: Forks
) -> tuple[list[tuple[Any, list[Any]]], dict[Any, Any]]:
    """(the forks that lie between groups, the copies to be replaced by their original variable)."""
    kept, restored = [], {}
    for v, copies in forks:
        own = next((g for g in groups if any(v is o for e in g for o in e.outvars)), [])
        inside = {u for e in own for u in e.invars if isinstance(u, Copy)}
        left = [copy for copy in copies if copy not in inside]
        if len(left) > 1:
            kept.append((v, left))
        restored.update((copy, v) for copy in copies if copy in inside or len(left) < 2)
    return kept, restored


def _join_isometries(groups: Sequence[Sequence[JaxprEqn]], cutter: Cutter) -> list[list[JaxprEqn]]:
    """Copying steps before a convolution declared isometric belong to it (see `chain`)."""
    schedule: list[Any] = []
    for group in groups:
        if any(v in cutter.active for e in group for v in e.outvars):
            schedule.append(cutter.block(group))
        else:
            schedule += group
    schedule = graph.close_forks(schedule, cutter, lambda block: any(map(is_heavy, block.eqns)))
    joined = chain.with_isometries_joined(schedule, cutter)
    return [list(item.eqns) if isinstance(item, Block) else [item] for item in joined]


Forks = Sequence[tuple[Any, Sequence[Any]]]  # variables, each with the copies that replace it


class _Pieces(NamedTuple):
    """Equations cut into groups, each of which becomes a part."""

    groups: list[list[JaxprEqn]]
    forks: list[tuple[Any, list[Any]]]  # those that lie between groups
    restored: dict[Any, Any]  # copies that were not needed, by the variables that replace them
    cutter: Cutter

    @property
    def is_whole(self) -> bool:
        """Whether nothing was cut."""
        return not self.forks and sum(any(map(self.cutter.on_path, g)) for g in self.groups) < 2


class _Opener:
    """Makes nodes of groups of equations, opening those that no rule serves.

    Groups never depend on each other in a cycle: those of one `cut` can be ordered, forks included, and
    opening a group replaces it by groups that can be ordered too.
    """

    def __init__(
        self,
        facts: dict[str, Any],
        prologues: _Prologues,
        order: Sequence[JaxprEqn],
        active: Iterable[Any],
        *,
        crossings: bool,
    ):
        self.facts, self.prologues, self.crossings = facts, prologues, crossings
        self.place = {id(v): i for i, e in enumerate(order) for v in e.outvars}
        self.active = set(active)
        self.parts: list[tuple[Block, Service]] = []
        self.waiting: list[tuple[Sequence[JaxprEqn], Cutter]] = []
        self.rules: dict[Any, tuple[Block, Rule | None, Verdict]] = {}

    def cut(
        self, eqns: Sequence[JaxprEqn], outputs: Iterable[Any], forks: Forks, *, results: Iterable[Any]
    ) -> _Pieces:
        """Partition equations as finely as possible, with the forks between the groups.

        `outputs`: variables that receive a cotangent from outside. `results`: others that are read
        outside. A fork inside a group would have to run in the middle of it, so the copies read there
        are replaced by the original variable.
        """
        outputs = [v for v in outputs if _is_var(v)]
        outside = [*outputs, *(v for v in results if _is_var(v)), *(v for v, _ in forks)]
        copies = {copy: v for v, made in forks for copy in made}
        active = {*self.active, *copies}
        groups = partition(eqns, active, outside, copies)
        kept, restored = _standing(groups, forks)
        if restored:
            groups = [[_reading(e, restored) for e in group] for group in groups]
            outputs = [restored.get(v, v) for v in outputs]
        cutter = Cutter(
            [e for group in groups for e in group],
            results=frozenset(outside),
            # A forked variable is read by its fork, which is not an equation.
            outputs=frozenset(v for v in (*outputs, *(v for v, _ in kept)) if v in active),
            active=frozenset(active),
            copies={copy: v for v, made in kept for copy in made},
            **self.facts,
        )
        # A branch that forks and rejoins (a norm) becomes one block.
        return _Pieces(_join_isometries(groups, cutter), kept, restored, cutter)

    def add_all(self, pieces: _Pieces) -> None:
        """Add the groups of a cut, and its forks."""
        for v, copies in pieces.forks:
            self.active.update(copies)
            fork = Fork((), (v,), tuple(copies), ())
            self.parts.append((fork, Service(None, Verdict(True, "copies a state"))))
        self.waiting += [(group, pieces.cutter) for group in reversed(pieces.groups)]

    def finish(self) -> None:
        """Add what `add_all` left. Groups that are opened leave others, which come next.

        A list rather than a recursion: networks with hundreds of skips in each other are opened one by
        one.
        """
        while self.waiting:
            self._add(*self.waiting.pop())

    def _add(self, group: Sequence[JaxprEqn], cutter: Cutter) -> None:
        """Add one group of a cut, opened if it is heavy and no rule serves it."""
        group = self.prologues.absorbed(group)
        block = cutter.block(group)
        # Absorbed equations also stay in the prologue, for their other readers.
        block = replace(block, exports=tuple(v for v in block.exports if v not in self.prologues.fixed))
        if not block.outputs:
            self.parts.append((block, Service(None, Verdict(None, "carries no derivative"))))
            return
        service = Service(None, Verdict(None, "reads the data"))
        if block.inputs:
            service = Service(find=partial(_rule_of, block, self.rules))
        if any(map(is_heavy, group)) and service.rule is None and self._open(block):
            return
        self.parts.append((block, service))

    def _open(self, block: Block) -> bool:
        """Fork a variable with several readers in the block whose results are joined late."""
        if len(block.eqns) == 1 and block.eqns[0].primitive is lax.scan_p:
            return self._open_scan(block)
        readers, leaving = self._readers(block.eqns), set(block.outputs)
        for v in (*block.inputs, *(o for e in block.eqns for o in e.outvars if o in self.active)):
            uses = self._uses(v, block.eqns, readers, leaving)
            if len(uses) < 2:
                continue
            copies = [Copy(v) for _ in uses]
            copy_of = {id(e): copy for copy, eqns in zip(copies, uses, strict=True) for e in eqns}
            # Each part absorbs what it reads from the prologues again.
            own = [e for e in block.eqns if not self.prologues.fixed.issuperset(e.outvars)]
            eqns = [_reading(e, {v: copy_of.get(id(e), v)}) for e in own]
            pieces = self.cut(eqns, block.outputs, [(v, copies)], results=block.exports)
            if not pieces.is_whole:
                self.add_all(pieces)
                return True
        return self.crossings and self._open_crossings(block)

    def _open_crossings(self, block: Block) -> bool:
        """Fork every variable that has several readers, where no single fork opens the block.

        Paths cross there, as in a loss that holds derivatives: each layer of its reverse pass reads what
        the same layer of the forward pass made. A norm, whose paths rejoin, is no crossing.
        """
        if sum(map(_products, block.eqns)) < 2:
            return False
        eqns = [e for e in block.eqns if not self.prologues.fixed.issuperset(e.outvars)]
        readers, leaving = self._readers(eqns), set(block.outputs)
        forks: list[tuple[Any, list[Any]]] = []
        read: dict[tuple[int, Any], Any] = {}  # what an equation reads instead of a variable
        source: dict[Any, Any] = {}  # what is made instead of a variable
        for v in (*block.inputs, *(o for e in eqns for o in e.outvars if o in self.active)):
            found = readers.get(v, [])
            if len(found) + (v in leaving) < 2 or self._rejoins(v, eqns, readers, leaving):
                continue
            copies = [Copy(v) for _ in found]
            read.update(((i, v), copy) for i, copy in zip(found, copies, strict=True))
            if v in leaving:  # outside, the copy that leaves has the variable's name
                source[v] = made = Copy(v)
                copies.append(v)
                self.active.add(made)
                self.place[id(made)] = self.place.get(id(v), -1)
            forks.append((source.get(v, v), copies))
        eqns = [
            _making(
                _reading(e, {v: read.get((i, v), source.get(v, v)) for v in e.invars if _is_var(v)}),
                source,
            )
            for i, e in enumerate(eqns)
        ]
        pieces = self.cut(eqns, block.outputs, forks, results=block.exports)
        if pieces.is_whole:
            return False
        self.add_all(pieces)
        return True

    def _readers(self, eqns: Sequence[JaxprEqn]) -> dict[Any, list[int]]:
        """For each variable, the places of the equations on the path that read it."""
        found: dict[Any, list[int]] = {}
        for i, e in enumerate(eqns):
            if _carries(e, self.active):
                for v in dict.fromkeys(filter(_is_var, e.invars)):
                    found.setdefault(v, []).append(i)
        return found

    def _rejoins(
        self,
        v: Any,
        eqns: Sequence[JaxprEqn],
        readers: Mapping[Any, Sequence[int]],
        leaving: Collection[Any],
    ) -> bool:
        """Whether what light steps make of a variable, reading nothing else, ends in a single one."""
        left = {v: len(readers.get(v, ())) + (v in leaving)}  # how often each is still to be read
        pending, seen = list(readers.get(v, ())), set[int]()
        heapq.heapify(pending)
        while pending:
            i = heapq.heappop(pending)
            if i in seen:
                continue
            seen.add(i)
            reads = [u for u in dict.fromkeys(filter(_is_var, eqns[i].invars)) if u in self.active]
            if is_heavy(eqns[i]) or not left.keys() >= set(reads):
                return False
            for u in reads:
                left[u] -= 1
            for o in eqns[i].outvars:
                left[o] = len(readers.get(o, ())) + (o in leaving)
                for j in readers.get(o, ()):
                    heapq.heappush(pending, j)
            alive = [u for u, count in left.items() if count]
            if len(alive) == 1:
                return alive[0] is not v
        return False

    def _open_scan(self, block: Block) -> bool:
        """Fork a state that starts several carries of a scan."""
        (eqn,) = block.eqns
        invars = list(eqn.invars)
        forks = []
        for v in block.inputs:
            places = [i for i, u in enumerate(invars) if u is v]
            if len(places) > 1:
                copies = [Copy(v) for _ in places]
                for place, copy in zip(places, copies, strict=True):
                    invars[place] = copy
                forks.append((v, copies))
        if not forks:
            return False
        split = [eqn.replace(invars=invars)]
        self.add_all(self.cut(split, block.outputs, forks, results=block.exports))
        return True

    def _uses(
        self,
        v: Any,
        eqns: Sequence[JaxprEqn],
        readers: Mapping[Any, Sequence[int]],
        leaving: Collection[Any],
    ) -> list[list[JaxprEqn]]:
        """The readers of v, grouped: paths that meet before all paths have met share a group."""
        own = readers.get(v, ())
        if len(own) < 2 or v in leaving:
            return [[eqns[i] for i in own]]
        place = {i: k for k, i in enumerate(own)}
        group = list(range(len(own)))
        count = len(group)

        def find(i: int) -> int:
            while group[i] != i:
                i = group[i]
            return i

        # colours: which readers a variable descends from; where all paths meet, nothing else is live
        colours: dict[Any, set[int]] = {}
        remaining: dict[Any, int] = {}  # of v and its descendants, how often each is still to be read
        live: set[Any] = {v}
        pending, reached = list(own), set[int]()
        heapq.heapify(pending)
        remaining[v] = len(own)
        while pending and count > 1:
            i = heapq.heappop(pending)
            if i in reached:
                continue
            reached.add(i)
            reads = dict.fromkeys(filter(_is_var, eqns[i].invars))
            found = set[int]().union(*(colours.get(u, ()) for u in reads))
            found |= {place[i]} if i in place else set()
            for u in reads:
                if u in remaining:
                    remaining[u] -= 1
                    if not remaining[u]:
                        live.discard(u)
            if not live and len(found) == len(own):
                break  # all paths meet here; what meets only here stays apart
            for o in eqns[i].outvars:
                if o in self.active:
                    colours[o] = found
                    remaining[o] = len(readers.get(o, ())) + (o in leaving)
                    if remaining[o]:
                        live.add(o)
                    for j in readers.get(o, ()):
                        heapq.heappush(pending, j)
            first, *rest = sorted(found)
            for other in rest:
                one, two = find(other), find(first)
                count -= one != two
                group[one] = two
        together: dict[int, list[JaxprEqn]] = {}
        for k, i in enumerate(own):
            together.setdefault(find(k), []).append(eqns[i])
        return list(together.values())

    def nodes(self, weights: set[Any]) -> list[Node]:
        """All parts in an order in which they can run, as close to the program's order as possible."""
        producer = {v: i for i, (b, _) in enumerate(self.parts) for v in (*b.outputs, *b.exports)}
        reads = [
            dict.fromkeys(
                producer[v] for v in (*b.inputs, *b.operands) if v in producer and producer[v] != i
            )
            for i, (b, _) in enumerate(self.parts)
        ]
        readers: list[list[int]] = [[] for _ in self.parts]
        for i, needs in enumerate(reads):
            for j in needs:
                readers[j].append(i)
        place = [
            min((self.place.get(id(v), -1) for e in b.eqns for v in e.outvars), default=-1)
            for b, _ in self.parts
        ]
        missing = [len(needs) for needs in reads]
        ready = [(place[i], i) for i, m in enumerate(missing) if not m]
        heapq.heapify(ready)
        result = []
        while ready:
            _, i = heapq.heappop(ready)
            block, service = self.parts[i]
            wanted = tuple(v for v in block.operands if v in weights)
            inside = any(_jax.in_checkpoint(e) for e in block.eqns)
            stem = not block.inputs and all(v in self.prologues.fixed for v in block.operands)
            result.append(Node(block, wanted, service, inside, stem and bool(block.outputs)))
            for j in readers[i]:
                missing[j] -= 1
                if not missing[j]:
                    heapq.heappush(ready, (place[j], j))
        assert len(result) == len(self.parts), "the network's nodes form a cycle"
        return result


def _rule_of(block: Block, known: dict[Any, Any]) -> tuple[Rule | None, Verdict]:
    """`find_rule`, once for blocks that compute the same."""
    key = fingerprint(block)
    if key not in known:
        known[key] = (block, *find_rule(block))
    first, rule, verdict = known[key]
    reason, way_out = (renamed(t, first, block) for t in (verdict.reason, verdict.way_out))
    return rule, replace(verdict, reason=reason, way_out=way_out)


def find_rule(block: Block) -> tuple[Rule | None, Verdict]:
    """The rule that serves a block, or None and why not."""
    try:
        return chain.choose(block)
    except NotSubmersiveError as error:
        return None, Verdict(None, error.reason, error.way_out)
