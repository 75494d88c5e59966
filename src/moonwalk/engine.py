"""From a loss to its value and gradient: staging, planning, phases.

The run is a `custom_jvp` function: a derivative of the engine itself would be wrong, because a vijp
equals the Jacobian's inverse only for the cotangents that the loss makes (for an isometry it is the
jvp, which off the manifold is another function). Whoever differentiates a gradient gets the derivative
of `jax.value_and_grad`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from . import certificate, checks, compat, graph, phases, planning, plans, sources, staging, trunk
from .certificate import Findings, Measured
from .compat import Literal
from .costs import NodeCost, node_costs
from .declare import declare_p
from .errors import EffectError
from .ledger import Ledger
from .methods import Moonwalk
from .partition import MOVING
from .planning import Choice
from .plans import Plan
from .registry import Gain
from .residuals import nbytes
from .sides import DataSide, WeightSide
from .sources import Book, Options
from .staging import Staged
from .trunk import Trunk
from .walks import Env, Walk


class Staging(NamedTuple):
    """A staged loss, and which of its inputs are what."""

    staged: Staged
    weights: tuple[Any, ...]  # variables of the differentiated leaves that are weights
    inputs: tuple[Any, ...]  # variables of those that are network inputs
    order: tuple[Any, ...]  # all differentiated leaves, in the order of the arguments

    @property
    def jaxpr(self) -> Any:
        return self.staged.jaxpr

    @property
    def loss(self) -> Any:
        return self.jaxpr.outvars[0]


def stage(
    fun: Callable[..., Any],
    leaves: Sequence[Any],
    others: Sequence[Any],
    is_input: Sequence[bool],
    names: Sequence[str] = (),
) -> Staging:
    """`fun(*leaves, *others)` returns a flat list whose first entry is the loss."""
    staged = staging.stage(fun, *leaves, *others, differentiated=len(leaves))
    order = tuple(staged.jaxpr.invars[: len(leaves)])
    staged = staged._replace(names={**staged.names, **dict(zip(order, names, strict=False))})
    weights = tuple(v for v, i in zip(order, is_input, strict=True) if not i)
    inputs = tuple(v for v, i in zip(order, is_input, strict=True) if i)
    return Staging(staged, weights, inputs, order)


def cut(staging: Staging) -> Trunk:
    """The loss as sides and trunk."""
    staged = staging.staged
    return trunk.build(
        staged.jaxpr,
        state=staging.inputs,
        weights=staging.weights,
        constants=trunk.small(staged.jaxpr.constvars),
        outputs=[staging.loss] if not isinstance(staging.loss, Literal) else [],
        consts=dict(zip(staged.jaxpr.constvars, staged.consts, strict=True)),
        names=staged.names,
    )


class Engine:
    """A planned loss: everything static; called with the values of the jaxpr's inputs and constants."""

    def __init__(self, staging: Staging, cut: Trunk, segments: Sequence[Any]):
        self.staging, self.cut, self.segments = staging, cut, list(segments)
        jaxpr = staging.jaxpr
        results = [v for v in jaxpr.outvars if not isinstance(v, Literal)]
        self.results = frozenset(results)
        self.weight_side = WeightSide(cut, staging.weights, results)
        self.data_side = DataSide(cut, results)

    @property
    def places(self) -> list[certificate.Place]:
        """Where errors are measured, in the order of the reverse pass."""
        return [place for segment in reversed(self.segments) for place in segment.places]

    def __call__(self, *flat: Any) -> tuple[list[Any], list[Any], Findings]:
        """([loss and auxiliary outputs], gradients, errors at `places`); its derivative is JAX's."""

        @jax.custom_jvp
        def run(*flat: Any) -> Any:
            out, gradients, errors = self.run(*flat)
            return out, gradients, Findings.of(errors, self.places)

        @run.defjvp
        def _(primals: Any, tangents: Any) -> Any:
            (out, gradients), (d_out, d_gradients) = jax.jvp(self.reference, primals, tangents)
            exact = Findings.none(self.places)
            return (out, gradients, exact), (d_out, d_gradients, exact.tangent())

        return run(*flat)

    def run(self, *flat: Any) -> tuple[list[Any], list[Any], list[Measured]]:
        """([loss and auxiliary outputs], gradients, the errors that were measured)."""
        fixed, x, leaves = self.environments(flat)
        out = Ledger()
        with jax.named_scope("moonwalk"):
            self.run_sides(fixed)
            values, h, errors = self.phases(fixed, x, out)
            with jax.named_scope("sides"):
                pulled = self.weight_side.pull(fixed, out.found)
        gradients = dict(zip(self.staging.weights, pulled, strict=True))
        gradients.update((v, h[v].astype(v.aval.dtype)) for v in self.staging.inputs if v in h)
        return values, [gradients.get(v, jnp.zeros_like(a)) for v, a in leaves.items()], errors

    def environments(self, flat: Sequence[Any]) -> tuple[Env, Env, Env]:
        """(what every phase can read, the network's inputs, the differentiated leaves)."""
        jaxpr = self.staging.jaxpr
        fixed = dict(zip((*jaxpr.invars, *jaxpr.constvars), flat, strict=True))
        leaves = dict(zip(self.staging.order, flat, strict=False))
        return fixed, {v: fixed.pop(v) for v in self.staging.inputs}, leaves

    def run_sides(self, fixed: Env, *, effects: bool = True) -> None:
        """Data side and weight side, into `fixed`. `effects`: print and call back, too."""
        with jax.named_scope("sides"):
            self.data_side.run(fixed, effects=effects)
            self.weight_side.run(fixed, effects=effects)

    def phases(
        self, fixed: Env, x: Env, out: Ledger, *, again: bool = False
    ) -> tuple[list[Any], Env, list[Measured]]:
        """The three phases: (the jaxpr's results, cotangents at the trunk's entry, measured errors).

        `again`: another pass prints and calls back.
        """
        saved = phases.forward(self.segments, fixed, x, self.results, again=again)
        values = [graph.read({**fixed, **x}, v) for v in self.staging.jaxpr.outvars]
        h: Env = {}
        if self.cut.outputs:
            h[self.cut.outputs[0]] = jnp.ones_like(values[0])
        errors = phases.reverse(self.segments, fixed, saved, h, out)
        self.hand_out_weights(h, out)
        return values, h, errors

    def hand_out_weights(self, h: Env, out: Ledger) -> None:
        """A loss of weights alone is read by no node: its cotangent is its gradient."""
        for v in self.cut.outputs:
            if v in self.weight_side.wanted and v in h:
                out.add({v: h[v]})

    def reference(self, *flat: Any) -> tuple[list[Any], list[Any]]:
        """([loss and auxiliary outputs], gradients) by JAX's own reverse mode."""
        jaxpr, count = self.staging.jaxpr, len(self.staging.order)

        def run(leaves: Sequence[Any], rest: Sequence[Any]) -> tuple[Any, list[Any]]:
            env = dict(zip((*jaxpr.invars, *jaxpr.constvars), (*leaves, *rest), strict=True))
            graph.run(jaxpr.eqns, env)
            out = [graph.read(env, v) for v in jaxpr.outvars]
            return out[0], out

        (_, out), gradients = jax.value_and_grad(run, has_aux=True)(list(flat[:count]), flat[count:])
        return out, gradients


class Circumstances(NamedTuple):
    """Of a call that is planned: what every planner is told beside the loss and the method.

    `signature`: names and types of the arguments; `gains`: those that an earlier plan measured;
    `values`: of the jaxpr's inputs, where gains are to be measured; `fused`: for `fused_update`.
    """

    signature: tuple[tuple[str, str], ...]
    gains: Iterable[tuple[Any, Gain]]
    values: dict[Any, Any] | None
    fused: bool


class Draft(NamedTuple):
    """A loss, cut and costed: what every method plans from."""

    cut: Trunk
    book: Book
    options: Options
    tolerance: float
    costs: list[NodeCost]
    plain: Choice  # without walks

    def describe(self, choice: Choice, method: Any, signature: Any) -> Plan:
        """The choice as a user reads it, its certificates held to the tolerance."""
        side = self.cut.weight_side
        segments = choice.segments
        tolerance = planning.tolerance_of(self.cut, method, segments, self.tolerance)
        tolerance = planning.hold_to(tolerance, self.cut, method, segments)
        return plans.describe(
            self.cut,
            choice,
            self.plain,
            self.costs,
            method,
            tolerance,
            signature,
            tuple(self.book.recorded.items()),
            sum(nbytes(v.aval) for e in side if _computes(e) for v in e.outvars),
        )


def draft(
    staging: Staging,
    method: Any,
    *,
    gains: Iterable[tuple[Any, Gain]] = (),
    values: dict[Any, Any] | None = None,
    fused: bool = False,
) -> Draft:
    """`values`: of the jaxpr's inputs, where gains are to be measured. `fused`: for `fused_update`."""
    refuse_effects(staging.jaxpr)
    whole = cut(staging)
    if values is not None:
        values = dict(values)
        for e in (*whole.data_side, *whole.weight_side):
            if not compat.has_effects(e) and all(
                isinstance(v, Literal) or v in values for v in e.invars
            ):
                graph.run([e], values)
    book = Book(gains, values)
    options, tolerance = planning.options_for(whole, method)
    costs = node_costs(whole, fused=fused)
    plain = planning.choose_segments(whole, options, costs, book, walks=False)
    return Draft(whole, book, options, tolerance, costs, plain)


def plan(
    staging: Staging,
    method: Moonwalk,
    call: Circumstances,
) -> tuple[Engine, Plan]:
    """Cut, cost and plan."""
    made = draft(staging, method, gains=call.gains, values=call.values, fused=call.fused)
    whole, book, options, _, costs, plain = made
    choice = planning.choose_segments(whole, options, costs, book)
    if plain.peak <= plans.WORTH * choice.peak and not options.always:
        choice = plain
    heed_weights(choice, book)
    return Engine(staging, whole, choice.segments), made.describe(choice, method, call.signature)


def heed_weights(choice: Choice, book: Book) -> None:
    """What concrete weights say against a walk is said at once."""
    if book.values is None:
        return
    for walk in (s for s in choice.segments if isinstance(s, Walk)):
        checks.heed(None, sources.weight_alarms(walk, [book.values], book), None)


def _computes(eqn: Any) -> bool:
    """Whether a step on the weight side makes new numbers (and is not an identity or a layout)."""
    return eqn.primitive not in MOVING and eqn.primitive not in (declare_p, compat.pvary_p)


def refuse_effects(jaxpr: Any) -> None:
    """A callback whose answer the loss reads would be asked again in Phase III."""
    for e in jaxpr.eqns:
        if not compat.has_effects(e):
            continue
        inner = compat.inner_jaxprs(e)
        for j in inner:
            refuse_effects(j)
        if not inner and e.outvars:
            raise EffectError(
                f"value_and_grad: the loss runs `{e.primitive.name}` at {compat.source_line(e)} and "
                "reads its answer, but Moonwalk runs parts of the forward pass twice; compute that "
                "value before the loss and pass it as an argument, or use jax.pure_callback if "
                "repeating it is harmless"
            )
