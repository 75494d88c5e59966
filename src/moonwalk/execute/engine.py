"""The algorithm on one page.

    forward    over the segments: each keeps what it needs
    backward   segment by segment, the last first: from the cotangents of its outputs to those of its
               inputs, handing out gradients on the way
    last       the weight prologue turns gradients of operands into gradients of parameters

The engine does not know how a segment differentiates: by JAX's pullback, by a walk down and up again, or
by inverses.

The run is a `custom_jvp` function: a derivative of the engine itself would be wrong, because a vijp
equals the Jacobian's inverse only for the cotangents that the loss makes (for an isometry the vijp is
the jvp, and off the manifold that is another function). A derivative of a gradient is that of
`jax.value_and_grad`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .._jax import Literal
from ..network.cutting import Network
from ..network.loss import Staging
from ..network.prologues import DataPrologue, WeightPrologue
from ..trace import graph
from . import certificate
from .barriers import Env
from .certificate import Findings, Measured
from .sinks import GradientSink


class Engine:
    """A planned loss: static itself, and called with values of the jaxpr's inputs and constants."""

    def __init__(self, staging: Staging, network: Network, segments: Sequence[Any]):
        self.staging, self.network, self.segments = staging, network, list(segments)
        jaxpr = staging.jaxpr
        results = [v for v in jaxpr.outvars if not isinstance(v, Literal)]
        self.results = frozenset(results)
        self.weight_prologue = WeightPrologue(network, staging.weights, results)
        self.data_prologue = DataPrologue(network, results)

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
        out = GradientSink()
        with jax.named_scope("moonwalk"):
            self.run_prologues(fixed)
            values, h, errors = self.phases(fixed, x, out)
            with jax.named_scope("prologues"):
                pulled = self.weight_prologue.pull(fixed, out.found)
        gradients = dict(zip(self.staging.weights, pulled, strict=True))
        gradients.update((v, h[v].astype(v.aval.dtype)) for v in self.staging.inputs if v in h)
        return values, [gradients.get(v, jnp.zeros_like(a)) for v, a in leaves.items()], errors

    def environments(self, flat: Sequence[Any]) -> tuple[Env, Env, Env]:
        """(what every phase can read, the network's inputs, the differentiated leaves)."""
        jaxpr = self.staging.jaxpr
        fixed = dict(zip((*jaxpr.invars, *jaxpr.constvars), flat, strict=True))
        leaves = dict(zip(self.staging.order, flat, strict=False))
        return fixed, {v: fixed.pop(v) for v in self.staging.inputs}, leaves

    def run_prologues(self, fixed: Env, *, effects: bool = True) -> None:
        """Evaluate both prologues into `fixed`. `effects`: also print and call back."""
        with jax.named_scope("prologues"):
            self.data_prologue.run(fixed, effects=effects)
            self.weight_prologue.run(fixed, effects=effects)

    def phases(
        self, fixed: Env, x: Env, out: GradientSink, *, again: bool = False
    ) -> tuple[list[Any], Env, list[Measured]]:
        """The three phases: (the jaxpr's results, cotangents at the network's entry, measured errors).

        `again`: do not print or call back, because another pass does.
        """
        saved: list[Any] = []
        for number, segment in enumerate(self.segments):
            with jax.named_scope(f"forward_{number}"):
                saved.append(segment.forward(fixed, x, self.results, again=again))
        values = [graph.read({**fixed, **x}, v) for v in self.staging.jaxpr.outvars]
        h: Env = {}
        if self.network.outputs:
            h[self.network.outputs[0]] = jnp.ones_like(values[0])
        errors: list[Measured] = []
        for number, segment in reversed(list(enumerate(self.segments))):
            with jax.named_scope(f"backward_{number}"):
                errors += segment.backward(fixed, saved.pop(), h, out)
        self.hand_out_weights(h, out)
        return values, h, errors

    def hand_out_weights(self, h: Env, out: GradientSink) -> None:
        """Hand out gradients of outputs that no node reads, because they depend on weights alone."""
        for v in self.network.outputs:
            if v in self.weight_prologue.wanted and v in h:
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
