"""An optimizer's update, traced and cut into pieces that can run one by one.

    first    what depends on no gradient, parameter or array of the state: counters, schedules
    norms    numbers computed from one leaf's gradient that other leaves need (a global norm)
    middle   what is computed from those numbers once all are known
    leaf     new parameter and new state of one leaf, from its gradient and all of the above

The cut follows from the dependencies of the traced update, not from a list of optimizers: any update
that mixes leaves only through single numbers can be cut. A leaf that is updated layer by layer inside a
scan must satisfy more. Every step must act entry by entry, so that it does the same to a layer as to the
stack; reductions over the leaf are norms, summed over the layers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from .. import _jax
from .._jax import JaxprEqn, Literal
from ..errors import OptimizerError
from ..execute.sinks import take
from ..trace import graph, staging
from ..trace.graph import needed
from ..trace.partition import POINTWISE

Env = dict[Any, Any]

# reduction → how two layers' results are combined
REDUCTIONS: dict[Any, Any] = {
    lax.reduce_sum_p: lax.add,
    lax.reduce_max_p: lax.max,
    lax.reduce_min_p: lax.min,
    lax.reduce_prod_p: lax.mul,
    lax.reduce_and_p: lax.bitwise_and,
    lax.reduce_or_p: lax.bitwise_or,
}


_LAYERED = (
    "this leaf stacks the layers of a scan, whose gradients come layer by layer (keep the layers as "
    "separate leaves, or exclude them from this transformation)"
)


class Program:
    """The traced update of an optimizer on given parameters."""

    def __init__(self, optimizer: Any, params: Any, state: Any, layered: Iterable[int] = ()):
        """`layered`: leaves that are updated layer by layer, along their first axis."""
        leaves, self.tree = jax.tree.flatten(params)
        self.state_leaves, self.state_tree = jax.tree.flatten(state)
        self.count, self.layered = len(leaves), frozenset(layered)
        paths = jax.tree.flatten_with_path(params)[0]
        self.names = [f"params{jax.tree_util.keystr(path)}" for path, _ in paths]

        def update(*flat: Any) -> list[Any]:
            n = self.count
            grads, params = (jax.tree.unflatten(self.tree, flat[k * n : (k + 1) * n]) for k in range(2))
            state = jax.tree.unflatten(self.state_tree, flat[2 * n :])
            updates, state = optimizer.update(grads, state, params)
            if jax.tree.structure(state) != self.state_tree:
                raise OptimizerError(
                    "fused_update: the optimizer's update returns a state of another structure than it "
                    "was given; use moonwalk.value_and_grad and apply the update after it"
                )
            new = optax.apply_updates(params, updates)
            return [*jax.tree.leaves(new), *jax.tree.leaves(state)]

        try:
            staged = staging.stage(update, *leaves, *leaves, *self.state_leaves)
        except Exception as error:
            self._explain(error, optimizer, params, state)
            raise
        jaxpr, n = staged.jaxpr, self.count
        self.known = dict(zip(jaxpr.constvars, staged.consts, strict=True))
        self.g, self.p, self.s = jaxpr.invars[:n], jaxpr.invars[n : 2 * n], jaxpr.invars[2 * n :]
        self.outputs = jaxpr.outvars
        for e in jaxpr.eqns:
            if _jax.has_effects(e):
                self._refuse(e, (), "it prints or calls back")
        self._sort(needed(jaxpr.eqns, [v for v in self.outputs if _is_var(v)]))

    def _explain(self, error: Exception, optimizer: Any, params: Any, state: Any) -> None:
        """Raise a more helpful error than the one from inside the optimizer, if there is one."""
        if isinstance(error, TypeError) and "keyword-only" in str(error):
            raise OptimizerError(
                "fused_update: the optimizer's update must do with gradients, state and parameters, but "
                f"it asks for more: {error}; use moonwalk.value_and_grad and apply the update after it"
            ) from error
        expected, given = _types(jax.eval_shape(optimizer.init, params)), _types(state)
        names = [n for n in (*expected, *given) if expected.get(n) != given.get(n)]
        if names:
            name = names[0]
            raise ValueError(
                "fused_update: opt_state is not a state of this optimizer for these parameters: "
                f"opt_state{name} should be {expected.get(name, 'absent')}, but is "
                f"{given.get(name, 'absent')}; make it with optimizer.init(params)"
            ) from error

    # -- sorting -----------------------------------------------------------------------------------
    def _sort(self, eqns: Sequence[JaxprEqn]) -> None:
        leaf: dict[Any, frozenset[int]] = {}  # the leaves whose values a variable depends on
        for i in range(self.count):
            leaf[self.g[i]] = leaf[self.p[i]] = frozenset({i})
        no_leaf: frozenset[int] = frozenset()
        arrays = {v for v in self.s if v.aval.size > 1}  # arrays of the state, and what depends on them
        after: set[Any] = set()  # what depends on norms
        self.norms: dict[int, list[Any]] = {}
        self.eqns: list[JaxprEqn] = []
        self.maker = {v: e for e in eqns for v in e.outvars}
        first, middle, free, common = [], [], [], []  # the last two: candidates for the first two
        for e in eqns:
            reads = [v for v in e.invars if _is_var(v)]
            on = frozenset().union(*(leaf.get(v, no_leaf) for v in reads)) if reads else no_leaf
            numbers = all(v.aval.size == 1 for v in (*reads, *e.outvars))
            waits = any(v in after for v in reads)
            if len(on) == 1 and on <= self.layered and _reduces_all(e):
                self._wait_for(e.outvars[0], e, on, waits)
                after.update(e.outvars)
                on = no_leaf
            elif numbers and (len(on) > 1 or (waits and not any(v in after and leaf[v] for v in reads))):
                for v in reads:
                    if leaf.get(v):
                        self._wait_for(v, e, leaf[v], v in after)
                middle.append(e)
                common.append(e)
                after.update(e.outvars)
                on = no_leaf
            elif len(on) > 1:
                self._refuse(e, on, "it combines whole gradients")
            else:
                self.eqns.append(e)
                if waits:
                    after.update(e.outvars)
                if any(v in arrays for v in reads):
                    arrays.update(e.outvars)
                elif not on and not waits:
                    free.append(e)
                    if numbers or not _is_entrywise(e):
                        first.append(e)
                if not on:
                    common.append(e)
            leaf.update((v, on) for v in e.outvars)
        self.first = needed(free, _made(first))
        known = _made(self.first)
        self.eqns = [e for e in self.eqns if not known.issuperset(e.outvars)]
        self.middle = [e for e in needed(common, _made(middle)) if not known.issuperset(e.outvars)]
        owners = [leaf.get(v, no_leaf) if _is_var(v) else no_leaf for v in self.outputs]
        self.leaf_of = [next(iter(on)) if on else None for on in owners]
        self.mine = {
            i: [k for k, owner in enumerate(self.leaf_of) if owner == i] for i in range(self.count)
        }
        for i in self.layered:
            self._check_layered(i)

    def _wait_for(self, v: Any, e: JaxprEqn, on: frozenset[int], waits: bool) -> None:
        """Record a number that is computed from one leaf's gradient, and that other leaves wait for."""
        (i,) = on
        if waits:
            why = "it takes a norm of what another norm has made"
            self._refuse(e, on, f"{why}; {_LAYERED}" if i in self.layered else why)
        if i in self.layered and not _reduces_all(self.maker[v]):
            self._refuse(e, on, _LAYERED)
        if v not in self.norms.setdefault(i, []):
            self.norms[i].append(v)

    @property
    def needs_norms(self) -> bool:
        """Whether all gradients must be known before the first can be applied."""
        return bool(self.norms)

    @property
    def owned(self) -> list[int]:
        """Outputs that belong to a leaf."""
        return [k for k, owner in enumerate(self.leaf_of) if owner is not None]

    def _refuse(self, e: JaxprEqn, leaves: Iterable[int], why: str) -> None:
        names = [self.names[i] for i in sorted(leaves)]
        shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        raise OptimizerError(
            f"fused_update cannot serve this optimizer: `{e.primitive.name}` at {_jax.source_line(e)}"
            + (f" is applied to {shown}, and " if names else ": ")
            + f"{why}, so the update cannot run as gradients come; use "
            "moonwalk.value_and_grad and apply the update after it"
        )

    def _check_layered(self, i: int) -> None:
        shape = self.p[i].aval.shape
        ends = [self.outputs[k] for k in self.mine[i]]
        ends += [self.maker[v].invars[0] for v in self.norms.get(i, [])]
        for e in self.slice_for(ends):
            alike = all(v.aval.shape == shape or v.aval.size == 1 for v in (*e.invars, *e.outvars))
            if not alike or not _is_entrywise(e):
                self._refuse(e, [i], _LAYERED)
        for k in self.mine[i]:
            new, old = self.outputs[k], self.stacked_input(k)
            if (new.aval.shape, new.aval.dtype) != (shape, old.aval.dtype):
                why = (
                    f"its result {graph.type_of(new)} cannot replace {graph.type_of(old)} layer by layer"
                )
                self._refuse(self.maker[new], [i], why)

    # -- running -----------------------------------------------------------------------------------
    def slice_for(self, ends: Sequence[Any]) -> list[JaxprEqn]:
        """Those of the leaves' equations that some variables need."""
        return needed(self.eqns, [v for v in ends if _is_var(v)])

    def begin(self, params: Sequence[Any], state: Sequence[Any]) -> Env:
        """The values of the first stage."""
        env = {**self.known, **dict(zip((*self.p, *self.s), (*params, *state), strict=True))}
        graph.run(self.first, env)
        return env

    def leaf_norms(self, env: Env, i: int, g: Any) -> list[Any]:
        """The norms of one leaf: numbers computed from its gradient that other leaves need."""
        return self._at(env, i, g, self.norms.get(i, []))

    def after_norms(self, env: Env, norms: Env) -> Env:
        """The values once all norms are known."""
        env = {**env, **norms}
        graph.run(self.middle, env)
        return env

    def leaf_update(self, env: Env, i: int, g: Any) -> dict[int, Any]:
        """New values of a leaf's outputs, by index among all outputs."""
        found = self._at(env, i, g, [self.outputs[k] for k in self.mine[i]])
        return dict(zip(self.mine[i], found, strict=True))

    def _at(self, env: Env, i: int, g: Any, ends: Sequence[Any]) -> list[Any]:
        env = {**env, self.g[i]: g}
        graph.run(self.slice_for(ends), env)
        return [graph.read(env, v) for v in ends]

    def rest(self, env: Env) -> dict[int, Any]:
        """Outputs that belong to no leaf."""
        places = [k for k, owner in enumerate(self.leaf_of) if owner is None]
        ends = [self.outputs[k] for k in places]
        env = dict(env)
        graph.run(self.slice_for(ends), env)
        return {k: graph.read(env, v) for k, v in zip(places, ends, strict=True)}

    # -- one layer of a leaf -----------------------------------------------------------------------
    def carried(self, i: int) -> list[int]:
        """Outputs of a layered leaf that its loop carries: the parameter first."""
        return [i, *(k for k in self.mine[i] if k != i)]

    def stacked_input(self, k: int) -> Any:
        """The variable whose layers an output replaces."""
        return self.p[k] if k < self.count else self.s[k - self.count]

    def layer_update(self, env: Env, i: int, layer: Any, g: Any, old: dict[int, Any]) -> dict[int, Any]:
        """One layer of a leaf's new outputs. `old`: the same layer of their old values, by output."""
        ends = [self.outputs[k] for k in self.mine[i]]
        env = self._layer(env, i, layer, g, old, ends)
        return {k: graph.read(env, v) for k, v in zip(self.mine[i], ends, strict=True)}

    def layer_norms(self, env: Env, i: int, layer: Any, g: Any, old: dict[int, Any]) -> list[Any]:
        """One layer's share of a leaf's norms."""
        ends = [self.maker[v].invars[0] for v in self.norms[i]]
        env = self._layer(env, i, layer, g, old, ends)
        result = []
        for v, end in zip(self.norms[i], ends, strict=True):
            a = graph.read(env, end)
            e = self.maker[v]
            whole = e.replace(params={**e.params, "axes": tuple(range(a.ndim))})
            result += _jax.bind(whole, [a])
        return result

    def no_norms(self, i: int) -> list[Any]:
        """The norms of zero layers, to start a sum from."""
        return [_identity(self.maker[v].primitive, v.aval.dtype) for v in self.norms[i]]

    def add_norms(self, i: int, total: Sequence[Any], more: Sequence[Any]) -> list[Any]:
        """The norms of some layers, combined with those of one more."""
        makers = [self.maker[v].primitive for v in self.norms[i]]
        return [REDUCTIONS[p](a, b) for p, a, b in zip(makers, total, more, strict=True)]

    def _layer(
        self, env: Env, i: int, layer: Any, g: Any, old: dict[int, Any], ends: Sequence[Any]
    ) -> Env:
        own = {self.g[i]: g, **{self.stacked_input(k): a for k, a in old.items()}}
        return run_layer(self.slice_for(ends), env, own, self.p[i].aval.shape, layer)


def run_layer(eqns: Sequence[JaxprEqn], env: Env, own: Env, shape: tuple[int, ...], layer: Any) -> Env:
    """Run entrywise equations between stacks of a shape on one layer of each.

    `own`: that layer's values of some variables. For other stacks (noise, a mask), the layer is taken
    from `env`.
    """
    others = {v for e in eqns for v in e.invars if _is_var(v)} - _made(eqns) - set(own)
    own = {**{v: take(env[v], layer) for v in others if v.aval.shape == shape}, **own}
    env = {**env, **own}
    for e in eqns:
        if e.primitive is lax.broadcast_in_dim_p and e.outvars[0].aval.shape == shape:
            value = jnp.reshape(graph.read(env, e.invars[0]), ())
            env[e.outvars[0]] = jnp.broadcast_to(value, shape[1:])
            continue
        inputs = [graph.read(env, v) for v in e.invars]
        if e.outvars[0].aval.shape == shape:  # a single number may have as many axes as the stack
            inputs = [
                a if v.aval.shape == shape else jnp.reshape(a, ())
                for v, a in zip(e.invars, inputs, strict=True)
            ]
        env.update(zip(e.outvars, _jax.bind(e, inputs), strict=True))
    return env


def is_entrywise(eqns: Iterable[JaxprEqn], shape: tuple[int, ...]) -> bool:
    """Whether equations act entry by entry on stacks of a shape."""
    return all(
        _is_entrywise(e)
        and all(v.aval.shape == shape or v.aval.size == 1 for v in (*e.invars, *e.outvars))
        for e in eqns
    )


def _is_entrywise(e: JaxprEqn) -> bool:
    spreads = e.primitive is lax.broadcast_in_dim_p and e.invars[0].aval.size == 1
    return e.primitive in POINTWISE or spreads


def _reduces_all(e: JaxprEqn) -> bool:
    return e.primitive in REDUCTIONS and e.outvars[0].aval.shape == () and e.invars[0].aval.ndim > 0


def _identity(reduction: Any, dtype: Any) -> Any:
    if reduction in (lax.reduce_and_p, lax.reduce_or_p):
        return jnp.full((), reduction is lax.reduce_and_p, dtype)
    if reduction in (lax.reduce_sum_p, lax.reduce_prod_p):
        return jnp.full((), 0 if reduction is lax.reduce_sum_p else 1, dtype)
    limits = jnp.finfo(dtype) if jnp.issubdtype(dtype, np.floating) else jnp.iinfo(dtype)
    infinite = np.inf if jnp.issubdtype(dtype, np.floating) else limits.max
    return jnp.full((), -infinite if reduction is lax.reduce_max_p else infinite, dtype)


def _types(tree: Any) -> dict[str, str]:
    """Types of a tree's leaves by their paths."""
    leaves = jax.tree.flatten_with_path(tree)[0]
    return {jax.tree_util.keystr(p): f"{jnp.result_type(a)}{list(jnp.shape(a))}" for p, a in leaves}


def _made(eqns: Iterable[JaxprEqn]) -> set[Any]:
    return {v for e in eqns for v in e.outvars}


def _is_var(atom: Any) -> bool:
    return not isinstance(atom, Literal)
