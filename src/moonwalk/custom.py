"""`custom_vijp`: a layer with a vijp of its own, the way `jax.custom_jvp` gives one a jvp."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from . import compat
from .errors import DuplicateRuleError
from .graph import Block
from .registry import Rule, State, Verdict, register_vijp
from .rules.generic import MatrixFree
from .staging import evaluate


class custom_vijp:
    """Give a function a vijp rule of its own.

    The first argument is the state; all others are operands (weights, data) and must not depend on the
    state. Arguments named by `nondiff_argnums` are static Python values. Keyword arguments and defaults
    are resolved as in a plain call. Everything else about the function stays as it is: `jit`, `vmap`,
    `grad`, … see the function itself.

    **Example:** a rotation, whose inverse is known:

    >>> import jax, jax.numpy as jnp, moonwalk as mw
    >>> @mw.custom_vijp
    ... def turn(x, angle):
    ...     c, s = jnp.cos(angle), jnp.sin(angle)
    ...     return jnp.stack([c * x[0] - s * x[1], s * x[0] + c * x[1]])
    >>> @turn.defvijp
    ... def turn_vijp(primals, h):
    ...     x, angle = primals
    ...     return turn(h, angle)              # an isometry: the vijp is the jvp
    >>> x, angle = jnp.array([1.0, 2.0]), jnp.array(0.3)
    >>> _, vijp_fun = mw.vijp(lambda x: turn(x, angle), x)
    >>> (h,) = jax.vjp(lambda x: turn(x, angle), x)[1](jnp.array([3.0, 4.0]))
    >>> [round(float(v), 5) for v in vijp_fun(h)]
    [3.0, 4.0]
    """

    def __init__(self, fun: Callable[..., Any], nondiff_argnums: Sequence[int] = ()):
        self.fun = fun
        self.nondiff_argnums = tuple(nondiff_argnums)
        self.rule: Callable[[Any, Any], Any] | MatrixFree | None = None
        functools.update_wrapper(self, fun)

    def defvijp(self, rule: Any) -> Any:
        """Set the rule: `rule(*nondiff, primals, h) -> h'`, or `moonwalk.MatrixFree(...)`.

        `primals` are the arguments of the call without the `nondiff` ones (of which there are none by
        default), `h` is the cotangent of the first of them, `h'` that of the output, in its pytree.
        """
        if not callable(rule) and not isinstance(rule, MatrixFree):
            raise TypeError(
                "defvijp takes a function rule(primals, h) or moonwalk.MatrixFree(), "
                f"got {type(rule).__name__}"
            )
        if self.rule is not None:
            raise DuplicateRuleError(f"custom_vijp: {compat.origin(self.fun)} already has a rule")
        self.rule = rule
        return rule

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.rule is None:
            raise AttributeError(
                f"custom_vijp: no rule was set for {compat.origin(self.fun)}; decorate one with "
                f"@{compat.origin(self.fun)}.defvijp"
            )
        args = self._resolved(args, kwargs)
        static = tuple(args[i] for i in self.nondiff_argnums)
        primals = tuple(a for i, a in enumerate(args) if i not in self.nondiff_argnums)
        leaves, in_tree = jax.tree.flatten(primals)
        state = len(jax.tree.leaves(primals[0]))
        out_trees = []

        def flat_fun(*flat: Any) -> Any:
            given = iter(jax.tree.unflatten(in_tree, flat))
            merged = [args[i] if i in self.nondiff_argnums else next(given) for i in range(len(args))]
            out, tree = jax.tree.flatten(self.fun(*merged))
            out_trees.append(tree)
            return out

        closed = jax.make_jaxpr(flat_fun)(*leaves)
        jaxpr, consts = compat.open_jaxpr(closed)
        out_tree = out_trees[-1]

        # Arrays that the function closes over become operands like any others.
        def call(*flat: Any) -> list[Any]:
            inner, outer = flat[: len(leaves)], flat[len(leaves) :]
            return evaluate(jaxpr, outer, inner, {})

        def rule(flat: Sequence[Any], h: Sequence[Any]) -> list[Any]:
            primals = jax.tree.unflatten(in_tree, flat[: len(leaves)])
            state_tree = jax.tree.structure(primals[0])
            cotangent = jax.tree.unflatten(state_tree, h)
            result = self.rule(*static, primals, cotangent)  # type: ignore[operator, misc]
            found, found_tree = jax.tree.flatten(result)
            if found_tree != out_tree:
                raise TypeError(
                    f"custom_vijp: the rule of {compat.origin(self.fun)} must return a cotangent "
                    f"with the structure of the output, {out_tree}, but returned {found_tree}"
                )
            return found

        out = custom_vijp_p.bind(
            *leaves,
            *consts,
            call=call,
            rule=self.rule if isinstance(self.rule, MatrixFree) else rule,
            state=state,
            label=compat.origin(self.fun),
        )
        return jax.tree.unflatten(out_tree, out)

    def _resolved(self, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """Positional arguments, with keywords and defaults in their places."""
        try:
            bound = inspect.signature(self.fun).bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"custom_vijp: {compat.origin(self.fun)}: {error}") from error
        bound.apply_defaults()
        if bound.kwargs or not bound.args or 0 in self.nondiff_argnums:
            raise TypeError(
                f"custom_vijp: {compat.origin(self.fun)} needs its state as the first positional "
                "argument, and takes no keyword-only arguments"
            )
        return bound.args


# --- the primitive: a call that keeps its rule ------------------------------------------------------

custom_vijp_p = compat.Primitive("custom_vijp_call")
custom_vijp_p.multiple_results = True
custom_vijp_p.def_impl(lambda *args, call, **_: call(*args))


def _abstract(*avals: Any, call: Any, **_: Any) -> Any:
    closed = jax.make_jaxpr(call)(*(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals))
    return [v.aval for v in compat.open_jaxpr(closed)[0].outvars]


def _jvp(primals: Any, tangents: Any, *, call: Any, **_: Any) -> Any:
    tangents = tuple(compat.ad.instantiate_zeros(t) for t in tangents)
    return jax.jvp(call, tuple(primals), tangents)


def _batch(args: Any, dims: Any, *, call: Any, rule: Any, state: int, label: str) -> Any:
    axes = [None if d is compat.not_mapped else d for d in dims]
    size = next(a.shape[d] for a, d in zip(args, axes, strict=True) if d is not None)
    # A state shared by a batch of operands has one cotangent, the sum over the batch: a rule written
    # for one example cannot take it apart. Spread the state first; that step is then what is refused.
    args = list(args)
    for i in range(state):
        if axes[i] is None:
            args[i], axes[i] = jnp.broadcast_to(args[i], (size, *args[i].shape)), 0

    def batched_rule(flat: Any, h: Any) -> Any:
        return jax.vmap(rule, in_axes=(axes, axes[:state]))(list(flat), list(h))

    out = custom_vijp_p.bind(
        *args,
        call=jax.vmap(call, in_axes=tuple(axes)),
        rule=rule if isinstance(rule, MatrixFree) else batched_rule,
        state=state,
        label=label,
    )
    return out, [0] * len(out)


custom_vijp_p.def_abstract_eval(_abstract)
compat.ad.primitive_jvps[custom_vijp_p] = _jvp
compat.batching.primitive_batchers[custom_vijp_p] = _batch
compat.mlir.register_lowering(
    custom_vijp_p,
    compat.mlir.lower_fun(lambda *args, call, **_: call(*args), multiple_results=True),
)


@register_vijp(custom_vijp_p)
class CustomRule(Rule):
    """The author's rule."""

    name = "custom"
    keeps_pullback = False

    def verdict(self, block: Block) -> Verdict:
        eqn = block.eqn
        if any(v in block.inputs for v in eqn.invars[eqn.params["state"] :]):
            return Verdict(
                None,
                f"an operand of `{eqn.params['label']}` depends on the state; custom_vijp takes the "
                "state as its first argument and constants as all others",
                "pass everything that depends on the state in the first argument (a tuple)",
            )
        state = eqn.invars[: eqn.params["state"]]
        if len(block.inputs) < len(state):
            return Verdict(
                None,
                f"part of the first argument of `{eqn.params['label']}` is constant, or the same state "
                "twice: the rule's h would not be that of independent states",
                "pass each state once, and constants in the other arguments",
            )
        rule = eqn.params["rule"]
        if isinstance(rule, MatrixFree):
            return rule.verdict(block)
        return Verdict(True, f"rule given by the author of `{eqn.params['label']}`")

    def linearize(self, block: Block, x: State, operands: Sequence[Any]) -> tuple[State, Any]:
        if isinstance(block.eqn.params["rule"], MatrixFree):
            return super().linearize(block, x, operands)
        values = dict(zip((*block.inputs, *block.operands), (*x, *operands), strict=True))
        args = [v.val if isinstance(v, compat.Literal) else values[v] for v in block.eqn.invars]
        return block(x, operands), args

    def vijp(self, block: Block, factors: Any, kept: Any, h: State) -> State:
        eqn = block.eqn
        if isinstance(eqn.params["rule"], MatrixFree):
            return eqn.params["rule"].vijp(block, factors, kept, h)
        found = dict(zip(block.inputs, h, strict=True))
        arriving = [found[v] for v in eqn.invars[: eqn.params["state"]]]
        leaving = dict(zip(eqn.outvars, eqn.params["rule"](kept, arriving), strict=True))
        for v in block.outputs:
            if leaving[v].shape != v.aval.shape:
                raise TypeError(
                    f"custom_vijp: the rule of `{eqn.params['label']}` must return a cotangent of "
                    f"shape {v.aval.shape}, but returned {leaving[v].shape}"
                )
        return tuple(leaving[v].astype(v.aval.dtype) for v in block.outputs)

    def alarms(self, block: Block, factors: Any, kept: Any) -> list[Any]:
        rule = block.eqn.params["rule"]
        return rule.alarms(block, factors, kept) if isinstance(rule, MatrixFree) else []
