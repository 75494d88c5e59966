"""From a loss to its value and gradient: staging, planning, phases.

The run is a `custom_jvp` function: a derivative of the engine itself would be wrong, because a vijp
equals the Jacobian's inverse only for the cotangents that the loss makes (for an isometry it is the
jvp, which off the manifold is another function). Whoever differentiates a gradient gets the derivative
of `jax.value_and_grad`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from . import certificate, compat, graph, phases, planning, staging, trunk
from .certificate import Certificate
from .compat import Literal
from .methods import Moonwalk
from .planning import Options
from .sides import DataSide, WeightSide
from .staging import Staged
from .trunk import Trunk
from .walks import Walk


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
    fun: Callable[..., Any], leaves: Sequence[Any], others: Sequence[Any], is_input: Sequence[bool]
) -> Staging:
    """`fun(*leaves, *others)` returns a flat list whose first entry is the loss."""
    staged = staging.stage(fun, *leaves, *others)
    order = tuple(staged.jaxpr.invars[: len(leaves)])
    weights = tuple(v for v, i in zip(order, is_input, strict=True) if not i)
    inputs = tuple(v for v, i in zip(order, is_input, strict=True) if i)
    return Staging(staged, weights, inputs, order)


def cut(staging: Staging, names: dict[Any, str] | None = None) -> Trunk:
    """The loss as sides and trunk."""
    staged = staging.staged
    return trunk.build(
        staged.jaxpr,
        state=staging.inputs,
        weights=staging.weights,
        outputs=[staging.loss] if not isinstance(staging.loss, Literal) else [],
        consts=dict(zip(staged.jaxpr.constvars, staged.consts, strict=True)),
        names={**staged.names, **(names or {})},
    )


class Engine:
    """A planned loss: everything static; called with the values of the jaxpr's inputs and constants."""

    def __init__(
        self,
        staging: Staging,
        cut: Trunk,
        segments: Sequence[Any],
        method: Moonwalk,
        options: Options,
        tolerance: float,
        *,
        certify: bool,
        check: bool,
    ):
        self.staging, self.cut, self.segments = staging, cut, list(segments)
        self.method, self.options, self.tolerance = method, options, tolerance
        self.certify, self.check = certify, check
        jaxpr = staging.jaxpr
        results = [v for v in jaxpr.outvars if not isinstance(v, Literal)]
        self.results = frozenset(results)
        self.weight_side = WeightSide(cut, staging.weights, results)
        self.data_side = DataSide(cut, results)

    def reference(self, *flat: Any) -> tuple[list[Any], list[Any]]:
        """([loss and auxiliary outputs], gradients) by JAX's own reverse mode."""
        jaxpr, count = self.staging.jaxpr, len(self.staging.order)

        def run(leaves: Sequence[Any], rest: Sequence[Any]) -> tuple[Any, list[Any]]:
            split = len(jaxpr.invars) - count
            env = dict(zip(jaxpr.invars, (*leaves, *rest[:split]), strict=True))
            env.update(zip(jaxpr.constvars, rest[split:], strict=True))
            graph.run(jaxpr.eqns, env)
            out = [_read(env, v) for v in jaxpr.outvars]
            return out[0], out

        (_, out), gradients = jax.value_and_grad(run, has_aux=True)(list(flat[:count]), flat[count:])
        return out, gradients

    def run(self, *flat: Any) -> tuple[list[Any], list[Any], list[Any]]:
        """([loss and auxiliary outputs], gradients, sampled errors) by the three phases."""
        jaxpr = self.staging.jaxpr
        fixed = dict(zip((*jaxpr.invars, *jaxpr.constvars), flat, strict=True))
        parameters = dict(fixed)
        x = {v: fixed.pop(v) for v in self.staging.inputs}
        with jax.named_scope("moonwalk"):
            with jax.named_scope("sides"):
                self.data_side.run(fixed, effects=True)
                self.weight_side.run(fixed, effects=True)
            saved = phases.forward(self.segments, fixed, x, self.results | frozenset(self.staging.inputs))
            out = [_read({**fixed, **x}, v) for v in jaxpr.outvars]
            h: dict[Any, Any] = {}
            if self.cut.outputs:
                (loss,) = self.cut.outputs
                h[loss] = jnp.ones_like(out[0])
            found, errors = phases.reverse(self.segments, fixed, saved, h)
            with jax.named_scope("sides"):
                if self.cut.outputs and self.cut.outputs[0] in self.cut.weights:
                    found[self.cut.outputs[0]] = h[self.cut.outputs[0]]
                pulled = dict(zip(self.staging.weights, self.weight_side.pull(fixed, found), strict=True))
        gradients = []
        for v in self.staging.order:
            g = pulled.get(v) if v in pulled else h.get(v)
            gradients.append(jnp.zeros_like(parameters[v]) if g is None else g)
        return out, gradients, errors

    @property
    def walks(self) -> list[Walk]:
        return [s for s in self.segments if isinstance(s, Walk)]

    def __call__(self, *flat: Any) -> tuple[list[Any], list[Any], Certificate | None]:
        """As `run`, differentiable like `jax.value_and_grad`."""

        @jax.custom_jvp
        def run(*flat: Any) -> Any:
            out, gradients, errors = self.run(*flat)
            return out, gradients, certificate.worst(errors).astype(jnp.float32)

        @run.defjvp
        def _(primals: Any, tangents: Any) -> Any:
            (out, gradients), (d_out, d_gradients) = jax.jvp(self.reference, primals, tangents)
            zero = jnp.zeros((), jnp.float32)
            return (out, gradients, zero), (d_out, d_gradients, zero)

        out, gradients, error = run(*flat)
        return out, gradients, Certificate(error, error)


def _read(env: dict[Any, Any], atom: Any) -> Any:
    return jnp.asarray(atom.val, atom.aval.dtype) if isinstance(atom, Literal) else env[atom]


def plan_engine(staging: Staging, method: Moonwalk, *, certify: bool, values: Any = None) -> Engine:
    """Cut, cost and plan."""
    whole = cut(staging)
    options, tolerance = planning.options_for(whole, method, certify)
    costs = planning.node_costs(whole)
    choice = planning.choose_segments(whole, options, costs, values)
    return Engine(staging, whole, choice.segments, method, options, tolerance, certify=certify, check=False)


__all__ = ["Engine", "compat", "plan_engine", "stage"]
