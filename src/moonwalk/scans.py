"""`scan` over stacked layers: the body is planned once, and each phase is one scan.

With anchors every K layers the scan becomes two nested ones, the outer over periods: Phase II hands
out the cotangent at the start of each period, Phase III starts each period from it. Layers that K does
not divide form a shorter last period.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from . import certificate, compat, graph, staging, trunk
from .compat import Literal
from .partition import active_variables, is_differentiable
from .residuals import nbytes
from .sides import DataSide, WeightSide
from .trunk import Node, Trunk
from .walks import Env, Gradients, Step, Swept, Walk, add_gradients, as_cotangent


@dataclass(frozen=True, eq=False, repr=False)
class Body:
    """The body of a scan as a trunk of its own, and how its inputs are grouped."""

    jaxpr: Any
    consts: tuple[Any, ...]
    trunk: Trunk
    counts: compat.ScanCounts
    active: tuple[int, ...]  # carries that carry a cotangent
    active_ys: tuple[int, ...]  # stacked outputs that do
    weights: tuple[int, ...]  # inputs (consts or xs) whose gradient is wanted
    volatile: tuple[int, ...]  # inputs that Phase II cannot read

    @property
    def outputs(self) -> tuple[list[Any], list[Any]]:
        """The trunk's outputs: (active carries, active ys)."""
        found = list(self.trunk.outputs)
        return found[: len(self.active)], found[len(self.active) :]


def open_body(node: Node, fixed: frozenset[Any], numbers: frozenset[Any] = frozenset()) -> Body | str:
    """The body of a scan node, or the reason why it cannot be walked.

    `numbers`: variables that are neither weights nor data.
    """
    block, (eqn,) = node.block, node.block.eqns
    counts = compat.scan_counts(eqn)
    num_consts, num_carry = counts
    carries = range(num_consts, num_consts + num_carry)
    for i, v in enumerate(eqn.invars):
        if not isinstance(v, Literal) and v in block.inputs and i not in carries:
            return "a state enters the scan as a constant or as scanned-over data, not as its carry"
    closed = eqn.params["jaxpr"]
    inner, _ = compat.open_jaxpr(closed)
    jaxpr, consts = staging.flatten_calls(closed, [graph.struct(v) for v in inner.invars])
    weights = [i for i, v in enumerate(eqn.invars) if _in(v, node.weights) and i not in carries]
    if any(_in(v, node.weights) and i in carries for i, v in enumerate(eqn.invars)):
        return "a carry starts from a weight"
    states = [v for v in eqn.invars[num_consts : num_consts + num_carry] if _in(v, block.inputs)]
    if len(set(states)) < len(states):
        return "one state enters the scan as two carries"
    ys = [k for k, v in enumerate(eqn.outvars[num_carry:]) if v in block.outputs]
    final = [j for j, v in enumerate(eqn.outvars[:num_carry]) if v in block.outputs]
    start = [j for j in range(num_carry) if _in(eqn.invars[num_consts + j], block.inputs)]
    active = _active_carries(jaxpr, num_consts, num_carry, weights, start, final, ys)
    outputs = [jaxpr.outvars[j] for j in active] + [jaxpr.outvars[num_carry + k] for k in ys]
    if any(isinstance(v, Literal) for v in outputs):
        return "a carry is overwritten by a constant"
    if not set(start) <= set(active):
        return "a state enters the scan and is not used"
    in_carry = jaxpr.invars[num_consts : num_consts + num_carry]
    volatile = [num_consts + j for j in range(num_carry) if j not in active]
    volatile += [
        i
        for i, v in enumerate(eqn.invars)
        if i not in carries and not isinstance(v, Literal) and v not in fixed
    ]
    plain = [i for i in range(num_consts) if i not in weights and i not in volatile]
    unread = [i for i in plain if isinstance(eqn.invars[i], Literal) or eqn.invars[i] in numbers]
    cut = trunk.build(
        jaxpr,
        state=[in_carry[j] for j in active],
        weights=[jaxpr.invars[i] for i in weights],
        outputs=outputs,
        volatile=[jaxpr.invars[i] for i in volatile],
        constants=trunk.small(jaxpr.constvars) + trunk.small(jaxpr.invars[i] for i in unread),
        **graph.facts_inside_scan(block, jaxpr, consts),
    )
    on_way = {v for n in cut.nodes for v in n.block.outputs} | set(cut.state)
    if any(v not in on_way for v in cut.outputs[: len(active)]):
        # Its cotangent ends in the loop, layer after layer: no sweep could bring it back.
        return "a carry is overwritten by what does not depend on the state"
    return Body(
        jaxpr,
        tuple(consts),
        cut,
        counts,
        tuple(active),
        tuple(ys),
        tuple(weights),
        tuple(volatile),
    )


def _in(v: Any, variables: Sequence[Any]) -> bool:
    return not isinstance(v, Literal) and v in variables


def _active_carries(
    jaxpr: Any,
    num_consts: int,
    num_carry: int,
    weights: Sequence[int],
    start: Sequence[int],
    final: Sequence[int],
    ys: Sequence[int],
) -> list[int]:
    """Carries on a differentiable way from a weight or a state to an output, round the loop."""
    ins = jaxpr.invars[num_consts : num_consts + num_carry]
    outs = jaxpr.outvars[:num_carry]
    sources = [jaxpr.invars[i] for i in weights]
    every = [v for v in jaxpr.outvars if not isinstance(v, Literal)]

    def grow(found: set[int], reached: Any) -> set[int]:
        while True:
            more = found | reached(found)
            if more == found:
                return found
            found = more

    def forward(found: set[int]) -> set[int]:
        on = active_variables(jaxpr.eqns, [*sources, *(ins[j] for j in found)], every)
        return {
            j
            for j, v in enumerate(outs)
            if not isinstance(v, Literal) and v in on and is_differentiable(v.aval)
        }

    stacked = [jaxpr.outvars[num_carry + k] for k in ys]

    def backward(found: set[int]) -> set[int]:
        sinks = [v for v in (*stacked, *(outs[j] for j in found)) if not isinstance(v, Literal)]
        on = active_variables(jaxpr.eqns, [*sources, *ins], sinks)
        return {j for j, v in enumerate(ins) if v in on and is_differentiable(v.aval)}

    return sorted(grow(set(start), forward) & grow(set(final), backward))


@dataclass(eq=False, repr=False)
class ScanStep(Step):
    """A scan, walked."""

    body: Body = None  # type: ignore[assignment]
    walk: Walk = None  # type: ignore[assignment]
    period: int | None = None  # anchors every so many layers
    hoisted: bool = False  # the body's weight side is done for all layers at once, before the loop
    certify: bool = False

    def __post_init__(self) -> None:
        eqn = self.block.eqns[0]
        self.eqn, self.length, self.reverse = eqn, eqn.params["length"], eqn.params["reverse"]
        body = self.body
        results = [v for v in body.jaxpr.outvars if not isinstance(v, Literal)]
        parameters = [body.jaxpr.invars[i] for i in body.weights]
        self.weight_side = WeightSide(body.trunk, parameters, results)
        self.data_side = DataSide(body.trunk, results)
        # Carries that are part of the state only inside: the data's own, at the start of a network.
        self.seeded = [
            j for j in body.active if not _in(eqn.invars[body.counts.consts + j], self.block.inputs)
        ]
        ins = body.jaxpr.invars[body.counts.consts : body.counts.stacked]
        self.ins, self.h_ins = ins, [ins[j] for j in body.active]
        self.measured = self.walk.is_measured

    @property
    def has_difference(self) -> bool:
        return self.walk.has_difference

    @property
    def is_stem(self) -> bool:
        return False  # a scan over the data itself still walks its layers

    def in_precision(self, precision: Any) -> None:
        """Do the products of the cotangents' chain in a precision of their own."""
        self.walk.in_precision(precision)

    # -- bytes -----------------------------------------------------------------------------------
    @property
    def carry_bytes(self) -> int:
        return nbytes(*(v.aval for v in self.h_ins))

    @property
    def kept_bytes(self) -> int:
        return self.length * sum(s.kept_bytes for s in self.walk.steps)

    @property
    def memo_bytes(self) -> int:
        inner = self.length * sum(s.memo_bytes for s in self.walk.steps)
        anchors = 0 if self.period is None else -(-self.length // self.period) * self.carry_bytes
        seeds = nbytes(*(self.ins[j].aval for j in self.seeded))
        ys = self.eqn.outvars[self.body.counts.carry :]
        given = nbytes(*(ys[k].aval for k in self.body.active_ys))
        hoisted = self.length * self.operand_bytes if self.hoisted else 0
        copied = 0
        if self.period is not None and self.length % self.period:  # the shorter last period is cut off
            copied = nbytes(*(v.aval for v in self.eqn.invars if _in(v, self.node.weights)))
        return inner + anchors + seeds + given + hoisted + copied

    @property
    def operand_bytes(self) -> int:
        """Of one layer's weights, as its nodes read them."""
        return nbytes(*(v.aval for v in self.weight_side.wanted))

    @property
    def is_light(self) -> bool:
        """Whether weights weigh less than activations: then what is made of them for all layers at
        once, before the loop, costs little memory and saves its latency in every layer."""
        return self.operand_bytes <= self.carry_bytes

    # -- values ----------------------------------------------------------------------------------
    def _inputs(self, fixed: Env, x: Env) -> tuple[list[Any], list[Any], list[Any]]:
        def value(v: Any) -> Any:
            if isinstance(v, Literal):
                return compat.literal(v)
            return fixed[v] if v in fixed else x.get(v)

        return self.body.counts.groups([value(v) for v in self.eqn.invars])

    def _hoist(self, consts: Sequence[Any], xs: Sequence[Any]) -> Any:
        """Weight-side values of all layers in one batched call, and their pullback."""
        if not self.hoisted:
            return None, None
        known = [i for i in self.body.weights]
        stacked = self.body.counts.stacked

        def side(*weights: Any) -> Any:
            axes = tuple(0 if i >= stacked else None for i in known)
            size = {} if any(a == 0 for a in axes) else {"axis_size": self.length}
            shared = dict(zip(self.body.jaxpr.constvars, self.body.consts, strict=True))
            numbers = self.body.trunk.numbers
            ins = zip(self.body.jaxpr.invars, consts, strict=False)
            shared.update((v, a) for v, a in ins if v in numbers)
            graph.run([e for e in self.body.trunk.data_side if set(e.outvars) <= numbers], shared)
            values = functools.partial(self.weight_side.values, others=shared)
            return jax.vmap(values, in_axes=axes, **size)(*weights)

        weights = [consts[i] if i < stacked else xs[i - stacked] for i in known]
        return jax.vjp(side, *weights)

    def _fixed(self, consts: Any, xs: Any, made: Any, *, first: bool = False) -> Env:
        """Everything that all phases can read in one layer."""
        body = self.body
        env = dict(zip(body.jaxpr.constvars, body.consts, strict=True))
        in_consts, _, in_xs = body.counts.groups(body.jaxpr.invars)
        skip = {body.jaxpr.invars[i] for i in body.volatile}
        env.update(
            (v, a) for v, a in zip((*in_consts, *in_xs), (*consts, *xs), strict=True) if v not in skip
        )
        self.data_side.run(env, effects=first)
        if made is None:
            self.weight_side.run(env, effects=first)
        else:
            env.update(zip(self.weight_side.wanted, made, strict=True))
        return env

    def _layer_x(self, consts: Sequence[Any], carry: Sequence[Any], xs: Sequence[Any]) -> Env:
        body = self.body
        values = dict(zip(body.jaxpr.invars, (*consts, *carry, *xs), strict=True))
        skip = {body.jaxpr.invars[i] for i in body.volatile}
        return {v: a for v, a in values.items() if v in skip or v in self.ins}

    def _results(self, fixed: Env, x: Env) -> list[Any]:
        known = {**fixed, **x}
        return [graph.read(known, v) for v in self.body.jaxpr.outvars]

    def _scan(self, step: Any, carry: Any, xs: Any, *, backward: bool = False, length: Any) -> Any:
        return lax.scan(step, carry, xs, length=length, reverse=self.reverse != backward)

    # -- the phases ------------------------------------------------------------------------------
    def keep(self, fixed: Env, x: Env) -> Any:
        consts, carry, xs = self._inputs(fixed, x)
        made, _ = self._hoist(consts, xs)
        retain = frozenset(v for v in self.body.jaxpr.outvars if not isinstance(v, Literal))
        split = self.body.counts.carry

        def step(carry: Any, inputs: Any) -> Any:
            xs, made = inputs
            env = self._fixed(consts, xs, made, first=True)
            state = self._layer_x(consts, carry, xs)
            kept = self.walk.phase_one(env, state, retain)
            out = self._results(env, state)
            return out[:split], (out[split:], kept)

        last, (ys, kept) = self._scan(step, carry, (xs, made), length=self.length)
        x.update((v, a) for v, a in zip(self.eqn.outvars, (*last, *ys), strict=True))
        return kept

    def back(self, fixed: Env, kept: Any, h: Env) -> tuple[Any, Gradients]:
        body = self.body
        consts, _, xs = self._inputs(fixed, {})
        made, pull = self._hoist(consts, xs)
        outs = self.eqn.outvars
        h_ys = [h.pop(outs[body.counts.carry + k]) for k in body.active_ys]
        h_last = []
        for j in body.active:
            found = h.pop(outs[j], None)
            found = compat.full(self.ins[j].aval, 0.0) if found is None else found
            h_last.append(as_cotangent(self.ins[j], found))
        out_carry, out_ys = body.outputs

        def step(carry: Any, inputs: Any) -> Any:
            h_carry, total = carry
            xs, made, kept, h_ys = inputs
            env = self._fixed(consts, xs, made)
            layer = {}
            for v, a in zip((*out_carry, *out_ys), (*h_carry, *h_ys), strict=True):
                layer[v] = a
            samples = [certificate.sample(a) for a in h_carry] if self.certify else ()
            memos, inner, found = self.walk.phase_two(env, kept, layer)
            # An output of weights alone is read by no node: its cotangent is its gradient.
            for v, a in zip(out_ys, h_ys, strict=True):
                if v in body.trunk.weights:
                    add_gradients(found, {v: a})
            total, per_layer = self._share(env, found, total, made)
            return ([layer[v] for v in self.h_ins], total), (memos, (samples, inner), per_layer)

        start = (h_last, self._zero_totals(consts, made))
        (h_first, total), (memos, samples, per_layer), anchors = self._in_periods(
            step, start, (xs, made, kept, h_ys)
        )
        for j, value in zip(body.active, h_first, strict=True):
            v = self.eqn.invars[body.counts.consts + j]
            if j not in self.seeded:
                h[v] = value if v not in h else h[v] + value
        seeds = [h_first[body.active.index(j)] for j in self.seeded]
        gradients = self._collect(total, per_layer, pull)
        return (memos, samples, anchors, seeds, h_ys), gradients

    def _in_periods(self, step: Any, start: Any, inputs: Any) -> Any:
        """Phase II: reverse over periods, handing out the cotangent at the start of each."""
        if self.period is None:
            last, outs = self._scan(step, start, inputs, backward=True, length=self.length)
            return last, outs, None
        (periods, main), (short, rest) = self._split(inputs)
        anchors_rest = outs_rest = None
        carry = start
        if short:
            carry, outs_rest = self._scan(step, carry, rest, backward=True, length=short)
            anchors_rest = carry[0]

        def outer(carry: Any, inputs: Any) -> Any:
            carry, outs = self._scan(step, carry, inputs, backward=True, length=self.period)
            return carry, (outs, carry[0])

        carry, (outs, anchors) = self._scan(outer, carry, main, backward=True, length=periods)
        return carry, self._joined(outs, outs_rest), (anchors, anchors_rest)

    def _split(self, tree: Any) -> Any:
        """((periods, [periods, K, …]), (rest, [rest, …])) of stacked arrays, in the scan's order."""
        assert self.period is not None
        periods, short = divmod(self.length, self.period)
        cut = short if self.reverse else self.length - short

        def take(a: Any) -> tuple[Any, Any]:
            first, second = a[:cut], a[cut:]
            main, rest = (second, first) if self.reverse else (first, second)
            return main.reshape((periods, self.period, *a.shape[1:])), rest

        leaves, structure = jax.tree.flatten(tree)
        pairs = [
            take(a) if short else (a.reshape((periods, self.period, *a.shape[1:])), None) for a in leaves
        ]
        main = jax.tree.unflatten(structure, [p[0] for p in pairs])
        rest = jax.tree.unflatten(structure, [p[1] for p in pairs]) if short else None
        return (periods, main), (short, rest)

    def _joined(self, main: Any, rest: Any) -> Any:
        """The inverse of `_split` on outputs."""
        flat = jax.tree.map(lambda a: a.reshape((-1, *a.shape[2:])), main)
        if rest is None:
            return flat
        order = (lambda a, b: [b, a]) if self.reverse else (lambda a, b: [a, b])
        return jax.tree.map(lambda a, b: jnp.concatenate(order(a, b)), flat, rest)

    def prepare(self, fixed: Env) -> Any:
        """Factors that need a solve, for all layers in one batched call; None: made in the loop."""
        if not self.is_light:
            return None
        consts, _, xs = self._inputs(fixed, {})
        if any(
            xs[i - self.body.counts.stacked] is None
            for i in self.body.volatile
            if i >= self.body.counts.stacked
        ):
            return None
        made, _ = self._hoist(consts, xs)

        def layer(xs: Any, made: Any) -> Any:
            env = self._fixed(consts, xs, made)
            return [
                s.prepare(env) if i < self.walk.end and is_costly(s, env) else None
                for i, s in enumerate(self.walk.steps)
            ]

        return jax.vmap(layer, axis_size=self.length)(xs, made)

    def sweep(self, fixed: Env, kept: Any, memo: Any, factors: Any, x: Env, h: Env) -> Swept:
        body = self.body
        memos, samples, anchors, seeds, h_ys = memo
        consts, carry, xs = self._inputs(fixed, x)
        made, pull = self._hoist(consts, xs)
        out_carry, out_ys = body.outputs
        split = body.counts.carry
        arriving = []
        for j in body.active:
            if j in self.seeded:
                arriving.append(seeds[self.seeded.index(j)])
            else:
                v = self.eqn.invars[body.counts.consts + j]
                arriving.append(h.pop(v, None))
        wants_ys = self.wants_ys

        def step(carry: Any, inputs: Any) -> Any:
            x_carry, h_carry, total, worst, before = carry
            xs, made, kept, memos, (samples, inner), factors, h_ys = inputs
            # Compared at the start of the next layer, where h is a carry and exists anyhow: a
            # comparison at the end of its own layer would keep one more h alive.
            worst = self._compared(worst, h_carry, before)
            env = self._fixed(consts, xs, made)
            state = self._layer_x(consts, x_carry, xs)
            layer = dict(zip(self.h_ins, h_carry, strict=True))
            layer.update(zip(out_ys, h_ys, strict=True))
            ready = [
                s.prepare(env) if f is None else f for s, f in zip(self.walk.steps, factors, strict=True)
            ]
            found, errors = self.walk.phase_three(
                env, kept, memos, inner, ready, state, layer, whole=True
            )
            if errors:
                worst = jnp.maximum(worst, certificate.worst(errors))
            total, per_layer = self._share(env, found, total, made)
            out = self._results(env, state)
            new_h = [layer[v] for v in out_carry]
            return (out[:split], new_h, total, worst, samples), (
                per_layer,
                out[split:] if wants_ys else (),
            )

        factors = [None] * len(self.walk.steps) if factors is None else factors
        inputs = (xs, made, kept, memos, samples, factors, h_ys)
        total = self._zero_totals(consts, made)
        worst = compat.varying_zero((consts, carry, arriving, inputs), jnp.float32)
        if self.period is None:
            before = self._samples(arriving)
            carry = (carry, arriving, total, worst, before)
            carry, (per_layer, ys) = self._scan(step, carry, inputs, length=self.length)
        else:
            (periods, main), (short, rest) = self._split(inputs)
            main_anchors, rest_anchors = anchors

            def outer(carry: Any, inputs: Any) -> Any:
                inputs, anchor = inputs
                x_carry, h_carry, total, worst, before = carry
                worst = self._compared(worst, h_carry, before)
                carry = (x_carry, anchor, total, worst, self._samples(anchor))
                return self._scan(step, carry, inputs, length=self.period)

            first = [jnp.zeros_like(a[0]) for a in main_anchors]
            carry = (carry, first, total, worst, self._samples(first))
            carry, outs = self._scan(outer, carry, (main, main_anchors), length=periods)
            outs_rest = None
            if short:
                x_carry, h_carry, total, worst, before = carry
                worst = self._compared(worst, h_carry, before)
                carry = (x_carry, rest_anchors, total, worst, self._samples(rest_anchors))
                carry, outs_rest = self._scan(step, carry, rest, length=short)
            per_layer, ys = self._joined(outs, outs_rest)
        last, h_last, total, worst, before = carry
        worst = self._compared(worst, h_last, before)
        for j, v in enumerate(self.eqn.outvars[:split]):
            x[v] = last[j]
        for j, value in zip(body.active, h_last, strict=True):
            h[self.eqn.outvars[j]] = value
        for k, value in zip(body.active_ys, h_ys, strict=True):
            h[self.eqn.outvars[split + k]] = value
        if wants_ys:
            x.update(zip(self.eqn.outvars[split:], ys, strict=True))
        return self._collect(total, per_layer, pull), [worst] if self.certify else []

    def _samples(self, h: Sequence[Any]) -> Any:
        return [certificate.sample(a) for a in h] if self.certify else ()

    def _compared(self, worst: Any, h: Sequence[Any], samples: Sequence[Any]) -> Any:
        """The largest error so far, with that of `h` against what Phase II had of it."""
        if not self.certify:
            return worst
        pairs = zip(h, samples, strict=True)
        errors = [certificate.compare(certificate.sample(a), s) for a, s in pairs]
        return jnp.maximum(worst, certificate.worst(errors).astype(worst.dtype))

    wants_ys = False  # whether Phase III must stack the outputs again for a later node

    # -- gradients: of stacked weights layer by layer, of shared ones summed in the carry -----------
    def _positions(self) -> tuple[list[int], list[int]]:
        stacked = self.body.counts.stacked
        shared = [k for k, i in enumerate(self.body.weights) if i < stacked]
        layered = [k for k, i in enumerate(self.body.weights) if i >= stacked]
        return shared, layered

    def _zero_totals(self, consts: Sequence[Any], made: Any) -> list[Any]:
        if made is not None:
            return []
        shared, _ = self._positions()
        return [jnp.zeros_like(consts[self.body.weights[k]]) for k in shared]

    def _share(self, env: Env, found: Gradients, total: list[Any], made: Any) -> tuple[Any, Any]:
        """Gradients of one layer, as (new totals of shared weights, those of the layer's own)."""
        if not found:
            return total, ()
        if made is not None:
            return total, self.weight_side.complete(env, found)
        gradients = self.weight_side.pull(env, found)
        shared, layered = self._positions()
        total = [t + gradients[k] for t, k in zip(total, shared, strict=True)]
        return total, [gradients[k] for k in layered]

    def _collect(self, total: Any, per_layer: Any, pull: Any) -> Gradients:
        """Gradients of the scan's operands."""
        if not jax.tree.leaves((total, per_layer)):
            return {}
        shared, layered = self._positions()
        if pull is not None:
            if not jax.tree.leaves(per_layer):
                return {}
            values = list(pull(list(per_layer)))
        else:
            values = [None] * len(self.body.weights)
            for k, a in zip(shared, total, strict=True):
                values[k] = a
            if per_layer:
                for k, a in zip(layered, per_layer, strict=True):
                    values[k] = a
        gradients: Gradients = {}
        for i, a in zip(self.body.weights, values, strict=True):
            v = self.eqn.invars[i]
            if a is not None:
                gradients[v] = a if v not in gradients else gradients[v] + a
        return gradients


_COSTLY = (
    "triangular_solve lu householder_product geqrf geqp3 qr cholesky svd eigh while scan "
    "custom_linear_solve schur"
).split()


def is_costly(step: Step, env: Env) -> bool:
    """Whether a step's factors take more than moving entries about and a product."""
    structs = {v: jax.typeof(a) for v, a in env.items() if v in step.block.operands}
    names = list(structs)
    try:
        closed = jax.make_jaxpr(lambda *values: step.prepare(dict(zip(names, values, strict=True))))(
            *(compat.struct(structs[v]) for v in names)
        )
    except KeyError:
        return False
    return any(costly_inside(e) for e in compat.open_jaxpr(closed)[0].eqns)


def costly_inside(eqn: Any) -> bool:
    if eqn.primitive in compat.CALLS:
        return any(costly_inside(e) for e in compat.called_jaxpr(eqn)[0].eqns)
    return any(eqn.primitive.name.startswith(name) for name in _COSTLY)


def checkpointed(node: Node, period: int, x: Sequence[Any], operands: Sequence[Any]) -> tuple[Any, ...]:
    """A scan's outputs and exports, by a scan over checkpointed scans of `period` layers."""
    block, (eqn,) = node.block, node.block.eqns
    counts = compat.scan_counts(eqn)
    env = dict(zip((*block.inputs, *block.operands), (*x, *operands), strict=True))
    consts, carry, xs = counts.groups([graph.read(env, v) for v in eqn.invars])
    inner, inner_consts = compat.open_jaxpr(eqn.params["jaxpr"])
    length, reverse = eqn.params["length"], eqn.params["reverse"]

    def step(carry: Any, xs: Any) -> Any:
        env = dict(zip(inner.constvars, inner_consts, strict=True))
        env.update(zip(inner.invars, (*consts, *carry, *xs), strict=True))
        graph.run(inner.eqns, env)
        out = [graph.read(env, v) for v in inner.outvars]
        return out[: counts.carry], out[counts.carry :]

    if period == 1:
        last, ys = lax.scan(
            jax.checkpoint(step, prevent_cse=False), carry, xs, length=length, reverse=reverse
        )
    else:
        periods = length // period

        @functools.partial(jax.checkpoint, prevent_cse=False)
        def outer(carry: Any, xs: Any) -> Any:
            return lax.scan(step, carry, xs, length=period, reverse=reverse)

        chunks = [a.reshape((periods, period, *a.shape[1:])) for a in xs]
        last, ys = lax.scan(outer, carry, chunks, length=periods, reverse=reverse)
        ys = [a.reshape((length, *a.shape[2:])) for a in ys]
    found = dict(zip(eqn.outvars, (*last, *ys), strict=True))
    return tuple(found[v] for v in (*block.outputs, *block.exports))
