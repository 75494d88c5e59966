"""The layers of a scan: what each of them reads, and where its gradients go.

Walks, inversions and tiles that run again all go over the layers of a scan whose body is a network of
its own. What they share is here: the environment of a layer, what is made of the weights of all layers
at once, how cotangents enter and leave the scan, and how gradients are collected. How the layers are
visited is in `execute/loops.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .. import _jax
from .._jax import Literal
from ..execute.barriers import Env
from ..execute.loops import LayerLoop
from ..execute.precision import as_cotangent
from ..execute.residuals import nbytes
from ..execute.sinks import Gradients, GradientSink, StackedSink, take
from ..network import loop_body
from ..network.cutting import Network, Node, is_heavy
from ..network.loop_body import Body
from ..network.prologues import DataPrologue, WeightPrologue
from ..rules.fragments import Place
from ..trace import graph


def body_of(node: Node, network: Network) -> Body | str:
    """The body of a scan, opened once; or why it cannot be walked."""
    key = ("body", node)
    if key not in network.memory:
        network.memory[key] = loop_body.open_body(node, network.fixed, network.numbers)
    return network.memory[key]


class ScanLayers:
    """The layers of a scan.

    `hoisted`: the body's weight prologue runs for all layers at once, before the loop.
    """

    def __init__(self, node: Node, body: Body, *, hoisted: bool = False):
        self.node, self.body, self.hoisted = node, body, hoisted
        self.eqn = eqn = node.block.eqns[0]
        self.length = eqn.params["length"]
        self.loop = LayerLoop(self.length, eqn.params["reverse"])
        results = [v for v in body.jaxpr.outvars if not isinstance(v, Literal)]
        parameters = [body.jaxpr.invars[i] for i in body.weights]
        self.weight_prologue = WeightPrologue(body.network, parameters, results)
        self.data_prologue = DataPrologue(body.network, results)
        # Carries that are part of the state only inside: the data's own, at the start of a network.
        starts = eqn.invars[body.counts.consts :]
        self.seeded = [j for j in body.active if starts[j] not in node.block.inputs]
        ins = body.jaxpr.invars[body.counts.consts : body.counts.stacked]
        self.ins, self.h_ins = ins, [ins[j] for j in body.active]

    # -- bytes -----------------------------------------------------------------------------------
    @property
    def carry_bytes(self) -> int:
        return nbytes(*(v.aval for v in self.h_ins))

    @property
    def operand_bytes(self) -> int:
        """Of one layer's weights, as its nodes read them."""
        return nbytes(*(v.aval for v in self.weight_prologue.wanted))

    @property
    def hoisted_bytes(self) -> int:
        """What is made of the weights of all layers before the loop."""
        return self.length * self.operand_bytes if self.hoisted else 0

    @property
    def is_light(self) -> bool:
        """Whether weights weigh less than activations: then what is made of them for all layers at
        once, before the loop, costs little memory and saves its latency in every layer."""
        return self.operand_bytes <= self.carry_bytes

    # -- what layers read ------------------------------------------------------------------------
    def operands_of(self, fixed: Env, x: Env, moved: Place = (0, 0, 0)) -> tuple[Operands, list[Any]]:
        """(what all layers read, the carry at the start).

        `moved`: how far grids of spans have moved before the first layer.
        """

        def value(v: Any) -> Any:
            if isinstance(v, Literal):
                return _jax.literal(v)
            return fixed[v] if v in fixed else x.get(v)

        consts, carry, xs = self.body.counts.groups([value(v) for v in self.eqn.invars])
        made, pull = self._hoist(consts, xs)
        return Operands(consts, xs, made, pull, moved), carry

    def _hoist(self, consts: Sequence[Any], xs: Sequence[Any]) -> Any:
        """Values of the weight prologue for all layers in one batched call, and their pullback."""
        if not self.hoisted:
            return None, None
        known = [i for i in self.body.weights]
        stacked = self.body.counts.stacked

        def made_of(*weights: Any) -> Any:
            axes = tuple(0 if i >= stacked else None for i in known)
            size = {} if any(a == 0 for a in axes) else {"axis_size": self.length}
            shared = dict(zip(self.body.jaxpr.constvars, self.body.consts, strict=True))
            numbers = self.body.network.numbers
            ins = zip(self.body.jaxpr.invars, consts, strict=False)
            shared.update((v, a) for v, a in ins if v in numbers)
            graph.run([e for e in self.body.network.data_prologue if set(e.outvars) <= numbers], shared)
            values = functools.partial(self.weight_prologue.values, others=shared)
            return jax.vmap(values, in_axes=axes, **size)(*weights)

        weights = [consts[i] if i < stacked else xs[i - stacked] for i in known]
        return jax.vjp(made_of, *weights)

    def fixed_in(self, consts: Any, xs: Any, made: Any, *, first: bool = False) -> Env:
        """Everything that all phases can read in one layer. `first`: what prints does so now."""
        body = self.body
        env = dict(zip(body.jaxpr.constvars, body.consts, strict=True))
        in_consts, _, in_xs = body.counts.groups(body.jaxpr.invars)
        skip = {body.jaxpr.invars[i] for i in body.volatile}
        env.update(
            (v, a) for v, a in zip((*in_consts, *in_xs), (*consts, *xs), strict=True) if v not in skip
        )
        self.data_prologue.run(env, effects=first)
        if made is None:
            self.weight_prologue.run(env, effects=first)
        else:
            env.update(zip(self.weight_prologue.wanted, made, strict=True))
        return env

    def environment(self, operands: Operands, i: Any) -> Env:
        """What all phases can read in layer i."""
        return self.fixed_in(operands.consts, operands.layer(i), take(operands.made, i))

    def state_in(self, consts: Sequence[Any], carry: Sequence[Any], xs: Sequence[Any]) -> Env:
        """What a layer starts from: its carry, and what only a forward pass has."""
        body = self.body
        values = dict(zip(body.jaxpr.invars, (*consts, *carry, *xs), strict=True))
        skip = {body.jaxpr.invars[i] for i in body.volatile}
        return {v: a for v, a in values.items() if v in skip or v in self.ins}

    # -- cotangents of the scan --------------------------------------------------------------------
    def arriving(self, h: Env) -> tuple[list[Any], list[Any]]:
        """Cotangents of the scan's results, taken from `h`: (of the carry, of the stacked outputs)."""
        outs, body = self.eqn.outvars, self.body
        h_ys = [h.pop(outs[body.counts.carry + k]) for k in body.active_ys]
        h_last = []
        for j in body.active:
            found = h.pop(outs[j], None)
            found = _jax.full(self.ins[j].aval, 0.0) if found is None else found
            h_last.append(as_cotangent(self.ins[j], found))
        return h_last, h_ys

    def leaving(self, h_first: Sequence[Any]) -> list[tuple[Any, Any]]:
        """Cotangents of the carry's start, by the variables that it starts from."""
        starts = self.eqn.invars[self.body.counts.consts :]
        pairs = zip(self.body.active, h_first, strict=True)
        return [(starts[j], value) for j, value in pairs if j not in self.seeded]

    # -- weights ---------------------------------------------------------------------------------
    def weights_behind(self, operands: Iterable[Any]) -> tuple[Any, ...]:
        """The scan's own operands whose gradients follow from those of operands inside."""
        reached = set(self.weight_prologue.sources(operands))
        body = self.body
        found = [self.eqn.invars[i] for i in body.weights if body.jaxpr.invars[i] in reached]
        return tuple(dict.fromkeys(found))

    def is_worth_hoisting(self) -> bool:
        """Whether the weight prologue does more than move entries, and depends on weights alone."""
        prologue, body = self.weight_prologue, self.body
        if prologue.is_trivial:
            return False
        parameters = {body.jaxpr.invars[i] for i in body.weights}
        known = parameters | set(body.jaxpr.constvars) | body.network.numbers
        made = {v for e in prologue.eqns for v in e.outvars}
        if not self.is_light or prologue.silent or any(v in made for v in body.network.results):
            return False
        reads = (v for e in prologue.eqns for v in e.invars if not isinstance(v, Literal))
        if any(v not in made and v not in known for v in reads):
            return False
        return any(is_heavy(e) or costly_inside(e) for e in prologue.eqns)


class Operands(NamedTuple):
    """What all layers of a scan read."""

    consts: Sequence[Any]
    xs: Sequence[Any]
    made: Any  # where the weight prologue is hoisted: its values for all layers
    pull: Any  # and its pullback
    moved: Place = (0, 0, 0)  # how far grids of spans have moved before the first layer
    newer: Any = None  # (gradients, what they carry): where some of `xs` have newer values

    def layer(self, i: Any) -> Any:
        """Layer i of what is scanned over."""
        if self.newer is None:
            return take(self.xs, i)
        gradients, carried = self.newer
        return gradients.layer(self.xs, carried, i)


class LayerGradients:
    """Gradients that a loop over layers hands out: of shared operands summed, of stacked ones by layer.

    Where the weight prologue is hoisted they are the gradients of its results, pulled back after the
    loop.
    """

    def __init__(
        self,
        layers: ScanLayers,
        operands: Operands,
        inner: Sequence[Any],
        out: GradientSink | None = None,
        apart: Sequence[Any] = (),
    ):
        """`inner`: operands in the body whose gradients are found. `out`: decides how those of stacked
        operands are handed out, except those in `apart`."""
        self.layers, self.operands, self.inner = layers, operands, inner
        prologue, body = layers.weight_prologue, layers.body
        self.sinks: list[StackedSink] = []
        self.shared: dict[int, Any] = {}  # by place among the body's weights
        self.stacked: dict[int, Any] = {}  # their variables outside, by that place
        if operands.made is not None:
            made = dict(zip(prologue.wanted, operands.made, strict=True))
            self.sinks.append(StackedSink({v: made[v] for v in inner if v in made}))
            return
        reached = set(prologue.sources(inner))
        first = body.counts.stacked
        for k, i in enumerate(body.weights):
            if body.jaxpr.invars[i] in reached:
                if i < first:
                    self.shared[k] = operands.consts[i]
                else:
                    self.stacked[k] = layers.eqn.invars[i]
        values = {v: operands.xs[body.weights[k] - first] for k, v in self.stacked.items()}
        others = {*apart, *(layers.eqn.invars[body.weights[k]] for k in self.shared)}
        alone = {v: a for v, a in values.items() if v not in others}
        self.sinks.append(StackedSink({v: a for v, a in values.items() if v in others}))
        self.sinks.append(StackedSink(alone) if out is None else out.layers(alone))

    def start(self) -> Any:
        """What the loop carries, at its start."""
        zeros = {k: jnp.zeros_like(a) for k, a in self.shared.items()}
        return zeros, [sink.start() for sink in self.sinks]

    def layer(self, xs: Sequence[Any], carried: Any, i: Any) -> list[Any]:
        """Layer i of what is scanned over."""
        found: dict[Any, Any] = {}
        for sink, own in zip(self.sinks, carried[1], strict=True):
            found.update(sink.read(own, i))
        variables = self.layers.body.counts.groups(self.layers.eqn.invars)[2]
        return [
            found[v] if not isinstance(v, Literal) and v in found else take(a, i)
            for v, a in zip(variables, xs, strict=True)
        ]

    def add(self, carried: Any, i: Any, env: Env, found: Gradients) -> Any:
        """Take the gradients that layer i has found."""
        if not self.inner:
            return carried
        shared, stacked = carried
        prologue = self.layers.weight_prologue
        if self.operands.made is not None:
            complete = dict(zip(prologue.wanted, prologue.complete(env, found), strict=True))
            return shared, [self.sinks[0].write(stacked[0], i, complete)]
        gradients = prologue.pull(env, found)
        shared = {k: total + gradients[k] for k, total in shared.items()}
        summed = GradientSink()
        for k, v in self.stacked.items():
            summed.add({v: gradients[k]})
        new = [sink.write(own, i, summed.found) for sink, own in zip(self.sinks, stacked, strict=True)]
        return shared, new

    def finish(self, carried: Any) -> Gradients:
        """Gradients of the scan's operands."""
        shared, stacked = carried
        layers, total = self.layers, GradientSink()
        if self.operands.made is not None:
            found = self.sinks[0].finish(stacked[0])
            if found:
                made = dict(zip(layers.weight_prologue.wanted, self.operands.made, strict=True))
                pulled = self.operands.pull([found.get(v, jnp.zeros_like(a)) for v, a in made.items()])
                for i, g in zip(layers.body.weights, pulled, strict=True):
                    total.add({layers.eqn.invars[i]: g})
            return total.found
        for k, g in shared.items():
            total.add({layers.eqn.invars[layers.body.weights[k]]: g})
        for sink, own in zip(self.sinks, stacked, strict=True):
            total.add(sink.finish(own))
        return total.found


_COSTLY = (
    "triangular_solve lu householder_product geqrf geqp3 qr cholesky svd eigh while scan "
    "custom_linear_solve schur"
).split()


def costly_inside(eqn: Any) -> bool:
    """Whether it solves or factorises, or calls what does."""
    if any(eqn.primitive.name.startswith(name) for name in _COSTLY):
        return True
    return any(costly_inside(e) for inner in _jax.inner_jaxprs(eqn) for e in inner.eqns)
