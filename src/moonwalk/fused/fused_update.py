"""`fused_update`: a training step in which no full gradient ever exists."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from .. import _jax, gradient
from ..execute.barriers import barrier
from ..execute.certificate import Certificate, Findings, summary
from ..execute.engine import Engine
from ..gradient import Call, Method
from ..planning.methods import Moonwalk
from ..planning.report import Plan
from ..planning.tolerance import Planned
from .optimizers import Program
from .updates import Fusing, Updating

_DEFAULT = Moonwalk()


def fused_update(
    fun: Callable[..., Any],
    optimizer: Any,
    *,
    has_aux: bool = False,
    method: Method = _DEFAULT,
    certify: bool = False,
) -> Callable[..., Any]:
    """A training step that applies each gradient as soon as it exists, and forgets it.

    The parameters and the state after it are those of `optimizer.update` on the gradients of
    `moonwalk.value_and_grad`, but a parameter is updated while the sweep is at its layer: with donated
    arguments, neither all gradients nor a second copy of the parameters or of the state exist at once.

    This works for every optax transformation whose update of one leaf depends on other leaves' gradients
    only through single numbers. If it depends on none (SGD, Adam, AdamW, Lion, masks, schedules, weight
    decay), one pass suffices; a global norm takes two, the first for the norm alone. Parameters that
    stack the layers of a scan are updated layer by layer, for which the update must act entry by entry.

    **Arguments:**

    - `fun`: returns a real scalar, or with `has_aux` a pair of it and anything; its first argument is
        the parameters.
    - `optimizer`: an optax gradient transformation.
    - `has_aux`, `method`, `certify`: as for `moonwalk.value_and_grad`.

    **Returns:** a function `step(params, opt_state, *data, **kwargs)` that returns
    `(value, params, opt_state)`, or `((value, aux), params, opt_state)` with `has_aux`; with `certify`
    followed by the certificate. Jit it with `donate_argnums=(0, 1)`.

    **Example:**

    >>> import jax.numpy as jnp, moonwalk as mw, optax
    >>> optimizer = optax.sgd(0.5)
    >>> step = mw.fused_update(lambda w, x: jnp.sum((w - x) ** 2), optimizer)
    >>> w = jnp.zeros(2)
    >>> value, w, state = step(w, optimizer.init(w), jnp.ones(2))
    >>> print(value, w)
    2.0 [1. 1.]
    """
    settings = gradient.check_planned("fused_update", method)
    if isinstance(settings, Moonwalk) and settings.budget is not None:
        raise ValueError(
            "fused_update: a budget counts whole gradients and no optimizer state, but here gradients "
            "are applied as they come; leave budget out of method=Moonwalk(...) (the least memory is "
            "chosen), or pass a plan of moonwalk.frontier(fun, ...) as method="
        )
    if not callable(getattr(optimizer, "update", None)):
        raise TypeError(
            "fused_update: the optimizer must be an optax GradientTransformation, with an `update` "
            f"method, but got {optimizer!r}"
        )

    def step(params: Any, opt_state: Any, *data: Any, **kwargs: Any) -> Any:
        call = Call("fused_update", fun, 0, has_aux, (params, *data), kwargs)
        value, aux, params, opt_state, found = call.measuring(
            method, lambda: _step(call, optimizer, params, opt_state, settings)
        )
        result = ((value, aux) if has_aux else value, params, opt_state)
        return (*result, found) if certify else result

    return step


def _step(
    call: Call, optimizer: Any, params: Any, opt_state: Any, method: Planned | Plan
) -> tuple[Any, Any, Any, Any, Certificate]:
    """(value, auxiliary data, new parameters, new state, certificate)."""
    engine, _, staged = call.plan(method, fused=True)
    leaves, tree = [jnp.asarray(a) for a in call.leaves], jax.tree.structure(params)
    update = Fused(engine, optimizer, jax.tree.unflatten(tree, leaves), opt_state)
    out, new, found = update(leaves, (*call.others, *staged.staged.consts))
    settings = method.method if isinstance(method, Plan) else method
    own = [k for k in update.program.owned if jnp.issubdtype(new[k].dtype, jnp.inexact)]
    enforced = gradient.enforce([new[k] for k in own], found, engine.places, settings)
    for k, a in zip(own, enforced, strict=True):
        new[k] = a
    new_params, new_state = new[: len(leaves)], new[len(leaves) :]
    state = jax.tree.unflatten(update.program.state_tree, new_state)
    certificate = summary(found, engine.places)
    return *call.results(out), jax.tree.unflatten(tree, new_params), state, certificate


class Fused:
    """An engine and an optimizer's program, run together."""

    def __init__(self, engine: Engine, optimizer: Any, params: Any, state: Any):
        self.engine = engine
        staging = engine.staging
        self.fusing = Fusing(engine.network, engine.weight_prologue, staging.order, engine.segments)
        self.program = Program(optimizer, params, state, self.fusing.layered)

    def __call__(self, leaves: Any, rest: Any) -> tuple[Any, list[Any], Findings]:
        """([loss and auxiliary outputs], new parameters and state, measured errors)."""

        @jax.custom_jvp
        def run(leaves: Any, state: Any, rest: Any) -> Any:
            return self.run(leaves, state, rest)

        @run.defjvp
        def _(primals: Any, tangents: Any) -> Any:
            raise TypeError(
                "fused_update cannot be differentiated: its gradients are gone once they are applied; "
                "differentiate a step made of moonwalk.value_and_grad and the optimizer"
            )

        return run(leaves, [jnp.asarray(a) for a in self.program.state_leaves], rest)

    def run(self, leaves: Any, state: Any, rest: Any) -> Any:
        """One pass, or two where norms must be known before the first update."""
        program = self.program
        with jax.named_scope("optimizer"):
            env = program.begin(leaves, state)
        if program.needs_norms:
            with jax.named_scope("norms"):
                _, found, _ = self._pass(env, leaves, rest, norms=True)
            box = {"leaves": list(leaves), "rest": list(rest), "norms": list(found.values())}
            # Otherwise XLA would merge the second pass with the first and keep all its activations.
            barrier((box, list(box)))
            leaves, rest = box["leaves"], box["rest"]
            env = {**env, **dict(zip(program.p, leaves, strict=True))}
            norms = dict(zip(found, box["norms"], strict=True))
            with jax.named_scope("optimizer"):
                env = program.after_norms(env, norms)
        out, new, errors = self._pass(env, leaves, rest)
        with jax.named_scope("optimizer"):
            new = {**new, **program.rest(env)}
        found = Findings.of(errors, self.engine.places)
        return out, [new[k] for k in range(len(program.outputs))], found

    def _pass(self, env: Any, leaves: Any, rest: Any, *, norms: bool = False) -> Any:
        engine = self.engine
        fixed, x, _ = engine.environments((*leaves, *rest))
        with jax.named_scope("moonwalk"):
            engine.run_prologues(fixed, effects=not norms)
            sink = Updating(self.fusing, self.program, env, fixed, norms=norms)
            out, h, errors = engine.phases(fixed, x, sink, again=norms)
            for v in engine.staging.inputs:
                sink.give(v, h[v] if v in h else _jax.full(v.aval, 0.0))
            return out, sink.finish(), errors
