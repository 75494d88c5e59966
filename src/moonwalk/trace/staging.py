"""A function becomes one flat jaxpr.

`jit`, closed calls and `jax.checkpoint` are inlined, because they do not affect a Jacobian.
`custom_jvp`/`custom_vjp` calls stay whole, because their author defines their derivative (inlined, a
straight-through estimator's gradient would become 0 and `relu`'s at 0 would become 1/2).

Cached jit bodies share their `Var` objects between calls, so equations are not spliced: the traced
jaxpr is evaluated under a second trace by an interpreter that opens the calls on its way.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from .. import _jax
from .._jax import Literal
from . import activity


class Staged(NamedTuple):
    """A flat jaxpr, its constants, and the names the constants have in the user's code."""

    jaxpr: Any
    consts: tuple[Any, ...]
    names: dict[Any, str]  # constvar -> "model.layers[3].weight"
    out_tree: Any


def stage(fun: Callable[..., Any], *args: Any, differentiated: int | None = None) -> Staged:
    """Trace `fun` at `args` (pytrees of arrays or ShapeDtypeStructs) into one flat jaxpr.

    `differentiated`: how many of the first leaves the first output will be differentiated in.
    """
    leaves, in_tree = jax.tree.flatten(args)
    out_trees = []

    def flat_fun(*flat: Any) -> list[Any]:
        out, out_tree = jax.tree.flatten(fun(*jax.tree.unflatten(in_tree, flat)))
        out_trees.append(out_tree)
        return out

    jaxpr, consts = flatten_calls(jax.make_jaxpr(flat_fun)(*leaves), leaves)
    if differentiated is not None:
        jaxpr, consts = activity.settled(jaxpr, consts, differentiated, 1)
    names = name_constants(fun, jaxpr.constvars, consts)
    return Staged(jaxpr, tuple(consts), names, out_trees[-1])


def flatten_calls(
    closed: Any, avals: Sequence[Any], *, derivative: bool = False
) -> tuple[Any, Sequence[Any]]:
    """The same jaxpr with all calls inlined that do not affect differentiation.

    `derivative`: the jaxpr is itself a derivative. There JAX transposes what a custom call computes,
    without asking for the call's own derivative, which may be the call itself.
    """
    jaxpr, consts = _jax.open_jaxpr(closed)
    opened = _jax.CALLS | set(_jax.CUSTOM_RULES) if derivative else _jax.CALLS
    if not any(e.primitive in opened for e in jaxpr.eqns) and _is_without_repeats(jaxpr):
        return jaxpr, consts
    flat = jax.make_jaxpr(lambda *flat: evaluate(jaxpr, consts, flat, {}, opened))(*avals)
    return _jax.open_jaxpr(flat)


def evaluate(
    jaxpr: Any,
    consts: Sequence[Any],
    args: Sequence[Any],
    done: dict[Any, Any],
    opened: Collection[Any] = _jax.CALLS,
) -> list[Any]:
    """Evaluate a jaxpr, inlining some calls and merging equal equations.

    `done` remembers each equation by its primitive, operands and parameters: `x[::2]` written twice
    must not look like two uses of x.
    """
    env = dict(zip(jaxpr.constvars, consts, strict=True))
    env.update(zip(jaxpr.invars, args, strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, Literal) else env[atom]

    for eqn in jaxpr.eqns:
        inputs = [read(v) for v in eqn.invars]
        if eqn.primitive in opened:
            with _jax.source_context(eqn), eqn.ctx.manager, _jax.checkpoint_mark(eqn):
                outputs = evaluate(*_jax.called_jaxpr(eqn), inputs, done, opened)
        elif (key := _key(eqn, inputs)) is not None and key in done:
            outputs = done[key][1]
        else:
            outputs = _jax.bind(eqn, inputs, as_written=True)
            if key is not None:
                done[key] = (inputs, outputs)  # the inputs too: an id is unique while they live
        env.update(zip(eqn.outvars, outputs, strict=True))
    return [read(v) for v in jaxpr.outvars]


def _is_without_repeats(jaxpr: Any) -> bool:
    """Whether no two equations are the same, so that `evaluate` would merge none."""
    keys = [_key(eqn, eqn.invars) for eqn in jaxpr.eqns]
    known = [key for key in keys if key is not None]
    return len(set(known)) == len(known)


def _key(eqn: _jax.JaxprEqn, inputs: Sequence[Any]) -> Any:
    """What makes two equations the same, or None where that cannot be told."""
    operands = tuple(
        (np.asarray(atom.val).tobytes(), str(atom.aval)) if isinstance(atom, Literal) else id(value)
        for atom, value in zip(eqn.invars, inputs, strict=True)
    )
    params = tuple(sorted(eqn.params.items(), key=lambda item: item[0]))
    try:
        hash(params)
    except TypeError:
        return None
    return None if _jax.has_effects(eqn) else (eqn.primitive, operands, params, _jax.context_of(eqn))


def name_constants(
    fun: Callable[..., Any], constvars: Sequence[Any], consts: Sequence[Any]
) -> dict[Any, str]:
    """The name of each closed-over array in the user's code, found by identity.

    Messages that say "the kernel `net.layers[2].weight`" are worth the search through the closure.
    """
    if not constvars:
        return {}
    by_id: dict[int, str] = {}
    for name, value in _captured(fun).items():
        try:
            leaves = jax.tree.flatten_with_path(value)[0]
        except (TypeError, ValueError):  # not a valid pytree (a dict with keys of mixed types)
            continue
        for path, leaf in leaves:
            by_id.setdefault(id(leaf), name + jax.tree_util.keystr(path))
    return {v: by_id[id(c)] for v, c in zip(constvars, consts, strict=True) if id(c) in by_id}


def _captured(fun: Any) -> dict[str, Any]:
    """Names and values that a function closes over, through wrappers and bound methods."""
    captured: dict[str, Any] = {}
    seen: set[int] = set()
    pending = [fun]
    while pending:
        f = pending.pop()
        if id(f) in seen or len(seen) > 64:
            continue
        seen.add(id(f))
        pending += [g for g in (getattr(f, "__wrapped__", None), getattr(f, "func", None)) if g]
        if inspect.ismethod(f):
            captured.setdefault("self", f.__self__)
            f = f.__func__
        if inspect.isfunction(f):
            try:
                variables = inspect.getclosurevars(f)
            except ValueError:  # a variable that is not assigned yet
                continue
            for name, value in {**variables.globals, **variables.nonlocals}.items():
                if inspect.isfunction(value) or inspect.ismethod(value):
                    pending.append(value)
                elif not inspect.ismodule(value):
                    captured.setdefault(name, value)
        elif not inspect.isclass(f) and not inspect.isbuiltin(f):
            captured.setdefault(type(f).__name__, f)  # a callable pytree, e.g. an Equinox module
    return captured
