"""`custom_vijp`: gives a function its own vijp rule, as `jax.custom_jvp` gives it a jvp rule.

A function without a vijp can be given a fragment (`rules.fragments`) or an inverse (`segments.invert`).
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .. import _jax
from ..errors import DuplicateRuleError
from ..rules.fragments import FragmentRule, Place
from ..rules.generic import MatrixFree
from ..rules.registry import Gain, Rule, State, Verdict, register_vijp
from ..trace.graph import Block
from ..trace.staging import evaluate


class Pair(NamedTuple):
    """An author's fragment, on flat lists of arrays."""

    fragment: Callable[[Sequence[Any], Sequence[Any]], Any]  # (arguments, h') -> any pytree
    restore: Callable[[Sequence[Any], Any, Sequence[Any]], list[Any]]  # (arguments, fragment, h) -> h'


class custom_vijp:
    """Give a function a vijp rule of its own.

    The first argument is the state; all others are operands (weights, data) and must not depend on the
    state. Arguments named by `nondiff_argnums` are static Python values. Keyword arguments and defaults
    are resolved as in a plain call. Nothing else about the function changes: `jit`, `vmap`, `grad`, …
    see the function itself.

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
        self.gain: float | Callable[..., Any] | None = None
        self.pair: tuple[Callable[..., Any], Callable[..., Any]] | None = None
        self.inverse: Callable[..., Any] | None = None
        functools.update_wrapper(self, fun)

    def defvijp(self, rule: Any = None, *, gain: float | Callable[..., Any] | None = None) -> Any:
        """Set the rule: `rule(*nondiff, primals, h) -> h'`, or `moonwalk.MatrixFree(...)`.

        `primals` are the arguments of the call without the `nondiff` ones (by default there are none).
        `h` is the cotangent of the first of them, and `h'`, the cotangent of the output, has the
        output's pytree.

        `gain` states how much the rule multiplies relative error in h: 1 for an isometry; the condition
        number of the Jacobian is always safe. It is a number, or a function `gain(*others) -> number` of
        the arguments other than the state, which is called when a plan is made with concrete values.
        Without it, `moonwalk.value_and_grad` does not walk through the function unless told to
        (`tolerance=inf`). The number is taken on trust, and the walk's certificate checks the result.

        **Example:** a layer that is walked under `jit`:

        >>> import jax, jax.numpy as jnp, moonwalk as mw
        >>> @mw.custom_vijp
        ... def mirrored(x, w):
        ...     return jnp.abs(x @ w)
        >>> @mirrored.defvijp(gain=1.0)        # w is orthogonal
        ... def mirrored_vijp(primals, h):
        ...     x, w = primals
        ...     return jnp.where(x @ w >= 0, 1, -1) * (h @ w)
        >>> def loss(ws, x):
        ...     for w in ws:
        ...         x = mirrored(x, w)
        ...     return jnp.sum(x**2)
        >>> ws, x = [jnp.eye(8)] * 4, jnp.ones((64, 8))
        >>> [row.mode for row in mw.plan(loss, ws, x, method=mw.Moonwalk(walk="always")).rows][:4]
        ['stem', 'walk', 'walk', 'walk']
        """
        if rule is None and gain is not None:  # as a decorator with arguments
            return functools.partial(self.defvijp, gain=gain)
        if not callable(rule) and not isinstance(rule, MatrixFree):
            raise TypeError(
                "defvijp takes a function rule(primals, h) or moonwalk.MatrixFree(), "
                f"got {type(rule).__name__}"
            )
        if self.rule is not None:
            raise DuplicateRuleError(f"custom_vijp: {_jax.origin(self.fun)} already has a rule")
        self.gain = gain if gain is None or callable(gain) else _checked_gain(gain, self.fun)
        self.rule = rule
        return rule

    def deffragment(self, fragment: Callable[..., Any], restore: Callable[..., Any]) -> None:
        """Set a fragment, for a layer that loses part of its output's cotangent h'.

        A walk keeps that part and restores the rest from it:

        - `fragment(*nondiff, primals, h') -> any pytree`, linear in h', is what a walk keeps of it;
        - `restore(*nondiff, primals, fragment, h) -> h'` recovers h' from that and the first argument's
            cotangent.

        `moonwalk.value_and_grad` keeps the fragment if it is smaller than h', and trusts that error does
        not grow in `restore`; the walk's certificate checks the result. A layer may have both this pair
        and a vijp: the pair is used where the tolerance rules the vijp out (because nothing bounds its
        gain). Parts of the state that neither function reads are not kept.

        **Example:** a layer that appends the sum of its features, and so loses one cotangent:

        >>> import jax, jax.numpy as jnp, moonwalk as mw
        >>> @mw.custom_vijp
        ... def with_sum(x):
        ...     return jnp.concatenate([x, x.sum(-1, keepdims=True)], -1)
        >>> with_sum.deffragment(
        ...     lambda primals, h_out: h_out[..., -1:],
        ...     lambda primals, last, h: jnp.concatenate([h - last, last], -1),
        ... )
        >>> def loss(ws, x):
        ...     for w in ws:
        ...         x = jnp.abs(with_sum(x) @ mw.declare(w, "orthogonal"))
        ...     return jnp.sum(x**2)
        >>> ws, x = [jnp.eye(9, 8)] * 4, jnp.ones((64, 8))
        >>> method = mw.Moonwalk(walk="always")  # four layers are fewer than a plan would walk
        >>> mw.plan(loss, ws, x, method=method).fragments
        3
        >>> g = jax.jit(mw.grad(loss, method=method))(ws, x)
        >>> bool(jnp.allclose(g[0], jax.grad(loss)(ws, x)[0]))
        True
        """
        for function in (fragment, restore):
            if not callable(function):
                raise TypeError(
                    "deffragment takes two functions, fragment(primals, h_out) and restore(primals, "
                    f"fragment, h), got {type(function).__name__}"
                )
        if self.pair is not None:
            raise DuplicateRuleError(f"custom_vijp: {_jax.origin(self.fun)} already has a fragment")
        self.pair = fragment, restore

    def definverse(self, inverse: Callable[..., Any]) -> Callable[..., Any]:
        """Set an inverse, for a layer whose state can be reconstructed from its output.

        `inverse(y, *others) -> x` takes the arguments of the function itself, with its output in place
        of the state. Of consecutive layers of this kind, `moonwalk.value_and_grad` keeps only the last
        output, and compares a sketch of the first state with that of its reconstruction.

        **Example:** half of an additive coupling, the layer of reversible networks:

        >>> import jax, jax.numpy as jnp, moonwalk as mw
        >>> @mw.custom_vijp
        ... def shear(x, w):
        ...     return x[0] + jnp.tanh(x[1] @ w), x[1]
        >>> @shear.definverse
        ... def unshear(y, w):
        ...     return y[0] - jnp.tanh(y[1] @ w), y[1]
        >>> def loss(ws, x):
        ...     x = x, x
        ...     for w in ws:
        ...         x = shear(x, w)[::-1]
        ...     return jnp.mean(x[0] ** 2)
        >>> ws, x = [0.1 * jnp.eye(8)] * 6, jnp.ones((64, 8))
        >>> [row.mode for row in mw.plan(loss, ws, x).rows][1:5]
        ['invert', 'invert', 'invert', 'invert']
        """
        if not callable(inverse):
            raise TypeError(
                f"definverse takes a function inverse(y, *others), got {type(inverse).__name__}"
            )
        if self.inverse is not None:
            raise DuplicateRuleError(f"custom_vijp: {_jax.origin(self.fun)} already has an inverse")
        self.inverse = inverse
        return inverse

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.rule is None and self.pair is None and self.inverse is None:
            raise AttributeError(
                f"custom_vijp: no rule was set for {_jax.origin(self.fun)}; decorate one with "
                f"@{_jax.origin(self.fun)}.defvijp"
            )
        args = self._resolved(args, kwargs)
        static = tuple(args[i] for i in self.nondiff_argnums)
        primals = tuple(a for i, a in enumerate(args) if i not in self.nondiff_argnums)
        leaves, in_tree = jax.tree.flatten(primals)
        state = len(jax.tree.leaves(primals[0]))
        out_trees = []

        def flat_fun(*flat: Any) -> Any:
            merged = self._merged(args, jax.tree.unflatten(in_tree, flat))
            out, tree = jax.tree.flatten(self.fun(*merged))
            out_trees.append(tree)
            return out

        closed = jax.make_jaxpr(flat_fun)(*leaves)
        jaxpr, consts = _jax.open_jaxpr(closed)
        out_tree = out_trees[-1]

        # Arrays that the function closes over become operands like any others.
        def call(*flat: Any) -> list[Any]:
            inner, outer = flat[: len(leaves)], flat[len(leaves) : len(leaves) + len(consts)]
            return evaluate(jaxpr, outer, inner, {})

        def unflatten(flat: Sequence[Any], h: Sequence[Any]) -> tuple[Any, Any]:
            primals = jax.tree.unflatten(in_tree, flat[: len(leaves)])
            return primals, jax.tree.unflatten(jax.tree.structure(primals[0]), h)

        def cotangents(result: Any, what: str) -> list[Any]:
            found, found_tree = jax.tree.flatten(result)
            if found_tree != out_tree:
                raise TypeError(
                    f"custom_vijp: {what} of {_jax.origin(self.fun)} must return a cotangent "
                    f"with the structure of the output, {out_tree}, but returned {found_tree}"
                )
            return found

        def rule(flat: Sequence[Any], h: Sequence[Any]) -> list[Any]:
            found = self.rule(*static, *unflatten(flat, h))  # type: ignore[operator, misc]
            return cotangents(found, "the rule")

        def fragment(flat: Sequence[Any], h_out: Sequence[Any]) -> Any:
            primals = jax.tree.unflatten(in_tree, flat[: len(leaves)])
            return self.pair[0](*static, primals, jax.tree.unflatten(out_tree, h_out))  # type: ignore[index]

        def restore(flat: Sequence[Any], part: Any, h: Sequence[Any]) -> list[Any]:
            primals, cotangent = unflatten(flat, h)
            found = self.pair[1](*static, primals, part, cotangent)  # type: ignore[index]
            return cotangents(found, "`restore`")

        def flat_inverse(y: Sequence[Any], others: Sequence[Any]) -> list[Any]:
            rest = jax.tree.unflatten(jax.tree.structure(primals[1:]), others[: len(leaves) - state])
            merged = self._merged(args, (jax.tree.unflatten(out_tree, y), *rest))
            found, tree = jax.tree.flatten(self.inverse(*merged))  # type: ignore[misc]
            expected = jax.tree.structure(primals[0])
            if tree != expected:
                raise TypeError(
                    f"custom_vijp: the inverse of {_jax.origin(self.fun)} must return a state with "
                    f"the structure of the first argument, {expected}, but returned {tree}"
                )
            return found

        def flat_gain(others: Sequence[Any]) -> float:
            rest = jax.tree.unflatten(jax.tree.structure(primals[1:]), others[: len(leaves) - state])
            merged = self._merged(args, (None, *rest))
            return _checked_gain(self.gain(*merged[1:]), self.fun)  # type: ignore[operator, misc]

        # Traced together with the function: in the caller's precision, and with its closure visible.
        inverse: Any = None
        more: list[Any] = []
        if self.inverse is not None:
            y_types = [_jax.struct(v.aval) for v in jaxpr.outvars]
            others = [_jax.struct(jax.typeof(a)) for a in leaves[state:]]
            undone, closed_over = _jax.open_jaxpr(jax.make_jaxpr(flat_inverse)(y_types, others))
            have = {id(c): len(others) + i for i, c in enumerate(consts)}
            more = [c for c in closed_over if id(c) not in have]
            have |= {id(c): len(others) + len(consts) + i for i, c in enumerate(more)}
            places = [have[id(c)] for c in closed_over]

            def undo(y: Sequence[Any], operands: Sequence[Any]) -> list[Any]:
                own = [operands[place] for place in places]
                return evaluate(undone, own, [*y, *operands[: len(others)]], {})

            inverse = undo

        out = custom_vijp_p.bind(
            *leaves,
            *consts,
            *more,
            call=call,
            rule=rule if callable(self.rule) else self.rule,
            gain=flat_gain if callable(self.gain) else self.gain,
            pair=None if self.pair is None else Pair(fragment, restore),
            inverse=inverse,
            state=state,
            label=_jax.origin(self.fun),
        )
        return jax.tree.unflatten(out_tree, out)

    def _merged(self, args: Sequence[Any], primals: Iterable[Any]) -> list[Any]:
        """The arguments of a call, with other primals."""
        given = iter(primals)
        return [a if i in self.nondiff_argnums else next(given) for i, a in enumerate(args)]

    def _resolved(self, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """Positional arguments, with keywords and defaults in their places."""
        try:
            bound = inspect.signature(self.fun).bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"custom_vijp: {_jax.origin(self.fun)}: {error}") from error
        bound.apply_defaults()
        if bound.kwargs or not bound.args or 0 in self.nondiff_argnums:
            raise TypeError(
                f"custom_vijp: {_jax.origin(self.fun)} needs its state as the first positional "
                "argument, and takes no keyword-only arguments"
            )
        return bound.args


# --- the primitive: a call that keeps its rule ------------------------------------------------------

custom_vijp_p = _jax.Primitive("custom_vijp_call")
custom_vijp_p.multiple_results = True
custom_vijp_p.def_impl(lambda *args, call, **_: call(*args))


def _abstract(*avals: Any, call: Any, **_: Any) -> Any:
    closed = jax.make_jaxpr(call)(*map(_jax.struct, avals))
    return [v.aval for v in _jax.open_jaxpr(closed)[0].outvars]


def _jvp(primals: Any, tangents: Any, *, call: Any, **_: Any) -> Any:
    # If zero tangents were instantiated, the pullback would keep the state for the operands' gradients.
    moving = [i for i, t in enumerate(tangents) if type(t) is not _jax.ad.Zero]

    def moved(*moved: Any) -> Any:
        args = list(primals)
        for i, a in zip(moving, moved, strict=True):
            args[i] = a
        return call(*args)

    return jax.jvp(moved, [primals[i] for i in moving], [tangents[i] for i in moving])


def _batch(
    args: Any,
    dims: Any,
    *,
    call: Any,
    rule: Any,
    gain: Any,
    pair: Any,
    inverse: Any,
    state: int,
    label: str,
) -> Any:
    axes = [None if d is _jax.not_mapped else d for d in dims]
    size = next(a.shape[d] for a, d in zip(args, axes, strict=True) if d is not None)
    # A state shared by a batch of operands has one cotangent, the sum over the batch, which a rule for
    # one example cannot split. So the state is broadcast first, and that step is what is refused.
    args = list(args)
    for i in range(state):
        if axes[i] is None:
            args[i], axes[i] = jnp.broadcast_to(args[i], (size, *args[i].shape)), 0

    def batched_rule(flat: Any, h: Any) -> Any:
        return jax.vmap(rule, in_axes=(axes, axes[:state]))(list(flat), list(h))

    # The outputs' batch is their first axis, and so is the fragment's.
    def fragment(flat: Any, h_out: Any) -> Any:
        return jax.vmap(pair.fragment, in_axes=(axes, 0))(list(flat), list(h_out))

    def restore(flat: Any, part: Any, h: Any) -> Any:
        return jax.vmap(pair.restore, in_axes=(axes, 0, axes[:state]))(list(flat), part, list(h))

    def batched_inverse(y: Any, others: Any) -> Any:
        over = jax.vmap(inverse, in_axes=(0, axes[state:]), out_axes=axes[:state], axis_size=size)
        return over(list(y), list(others))

    def largest_gain(others: Any) -> float:
        def one(i: int) -> list[Any]:
            pairs = zip(others, axes[state:], strict=True)
            return [a if d is None else jnp.take(a, i, d) for a, d in pairs]

        batched = any(d is not None for d in axes[state:])
        return max(gain(one(i)) for i in range(size if batched else 1))

    out = custom_vijp_p.bind(
        *args,
        call=jax.vmap(call, in_axes=tuple(axes)),
        rule=batched_rule if callable(rule) else rule,
        gain=largest_gain if callable(gain) else gain,
        pair=None if pair is None else Pair(fragment, restore),
        inverse=None if inverse is None else batched_inverse,
        state=state,
        label=label,
    )
    return out, [0] * len(out)


custom_vijp_p.def_abstract_eval(_abstract)
_jax.ad.primitive_jvps[custom_vijp_p] = _jvp
_jax.batching.primitive_batchers[custom_vijp_p] = _batch
_jax.mlir.register_lowering(
    custom_vijp_p,
    _jax.mlir.lower_fun(lambda *args, call, **_: call(*args), multiple_results=True),
)


@register_vijp(custom_vijp_p)
class CustomRule(Rule):
    """The author's rule."""

    name = "custom"
    keeps_pullback = False
    inverse_is_given = True

    def verdict(self, block: Block) -> Verdict:
        refusal = _misused(block)
        if refusal is not None:
            return refusal
        rule, label = block.eqn.params["rule"], block.eqn.params["label"]
        if rule is None:
            lacking = "it can only be inverted, as moonwalk.value_and_grad does"
            if block.eqn.params["pair"] is not None:
                lacking = (
                    "it needs a fragment of its output's cotangent, which moonwalk.value_and_grad keeps"
                )
            return Verdict(
                False,
                f"`{label}` has no vijp: {lacking}",
                f"differentiate with moonwalk.value_and_grad, or set a rule: {label}.defvijp",
            )
        if isinstance(rule, MatrixFree):
            return rule.verdict(block)
        return Verdict(True, f"rule given by the author of `{label}`")

    def linearize(self, block: Block, x: State, operands: Sequence[Any]) -> tuple[State, Any]:
        if isinstance(block.eqn.params["rule"], MatrixFree):
            return super().linearize(block, x, operands)
        return block(x, operands), _arguments(block, x, operands)

    def vijp(self, block: Block, factors: Any, kept: Any, h: State) -> State:
        rule = block.eqn.params["rule"]
        if isinstance(rule, MatrixFree):
            return rule.vijp(block, factors, kept, h)
        return _leaving(block, rule(kept, _arriving(block, h)), "the rule")

    def gain(self, block: Block, operands: Sequence[Any] | None = None) -> Gain:
        gain: Any = block.eqn.params["gain"]
        label = block.eqn.params["label"]
        if gain is None:
            reason = (
                f"its author states no gain, so nothing bounds the error of its vijp: pass one, "
                f"{label}.defvijp(rule, gain=...)"
            )
            return Gain(math.inf, mixes=True, reason=reason)
        if isinstance(gain, float):
            return Gain(gain, mixes=True, assumed=True)
        others = None if operands is None else _others(block, [_jax.concrete(a) for a in operands])
        if others is None or any(a is None for a in others):
            reason = f"the gain of `{label}` is a function of values: plan with concrete arguments"
            return Gain(math.inf, mixes=True, reason=reason)
        with _jax.evaluated_now():
            return Gain(gain(others), mixes=True, assumed=True)

    def inverts(self, block: Block) -> Verdict:
        eqn, label = block.eqn, block.eqn.params["label"]
        if eqn.params["inverse"] is None:
            return Verdict(None, f"`{label}` has no inverse", f"set one: {label}.definverse")
        if set(block.outputs) != set(eqn.outvars) or _misused(block) is not None:
            return Verdict(None, f"part of the state or of the output of `{label}` is not at hand")
        return Verdict(True, f"inverse given by the author of `{label}`")

    def inverse(self, block: Block, operands: Sequence[Any], y: State) -> State:
        eqn, given = block.eqn, dict(zip(block.outputs, y, strict=True))
        state, others = eqn.invars[: eqn.params["state"]], _others(block, operands)
        found = eqn.params["inverse"]([given[v] for v in eqn.outvars], others)
        for v, a in zip(state, found, strict=True):
            if jnp.shape(a) != v.aval.shape:
                raise TypeError(
                    f"custom_vijp: the inverse of `{eqn.params['label']}` must return a state of shape "
                    f"{v.aval.shape}, but returned {jnp.shape(a)}"
                )
        by_variable = dict(zip(state, found, strict=True))
        return tuple(jnp.asarray(by_variable[v], v.aval.dtype) for v in block.inputs)

    def fragmented(self, block: Block, ask: Any) -> Iterator[FragmentRule]:
        if block.eqn.params["pair"] is not None and _misused(block) is None:
            yield CustomFragment()

    def alarms(self, block: Block, factors: Any, kept: Any) -> list[Any]:
        rule = block.eqn.params["rule"]
        return rule.alarms(block, factors, kept) if isinstance(rule, MatrixFree) else []


@dataclass(frozen=True)
class CustomFragment(FragmentRule):
    """The author's fragment."""

    name = "custom fragment"
    keeps_pullback = False

    def describe(self, block: Block) -> str:
        return f"fragment given by the author of `{block.eqn.params['label']}`"

    def linearize(self, block: Block, x: State, operands: Sequence[Any]) -> tuple[State, Any]:
        arguments = _arguments(block, x, operands)
        # The fragment of a linear layer reads no state, so Phase I need not keep it.
        read = block.once(_read_by_pair)
        kept = [a if i >= len(read) or read[i] else None for i, a in enumerate(arguments)]
        return block(x, operands), kept

    def fragment(self, block: Block, factors: Any, kept: Any, h: State, place: Place) -> Any:
        pair, given = block.eqn.params["pair"], dict(zip(block.outputs, h, strict=True))
        h_out = [given[v] if v in given else _jax.full(v.aval, 0.0) for v in block.eqn.outvars]
        return pair.fragment(_filled(block, kept), h_out)

    def restore(
        self, block: Block, factors: Any, kept: Any, fragment: Any, h: State, place: Place
    ) -> State:
        pair, arriving = block.eqn.params["pair"], _arriving(block, h)
        return _leaving(block, pair.restore(_filled(block, kept), fragment, arriving), "`restore`")

    def gain(self, block: Block, operands: Sequence[Any] | None = None) -> Gain:
        del block, operands
        return Gain(1.0, mixes=True, assumed=True)


def _misused(block: Block) -> Verdict | None:
    """The error for an author's functions that do not fit this call."""
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
    return None


def _arguments(block: Block, x: State, operands: Sequence[Any]) -> list[Any]:
    """The flat arguments of the call."""
    values = dict(zip((*block.inputs, *block.operands), (*x, *operands), strict=True))
    return [v.val if isinstance(v, _jax.Literal) else values[v] for v in block.eqn.invars]


def _others(block: Block, operands: Sequence[Any]) -> list[Any]:
    """The flat arguments of the call, except the state."""
    values = dict(zip(block.operands, operands, strict=True))
    others = block.eqn.invars[block.eqn.params["state"] :]
    return [v.val if isinstance(v, _jax.Literal) else values[v] for v in others]


def _checked_gain(gain: Any, fun: Callable[..., Any]) -> float:
    """A gain as a number."""
    try:
        found = float(gain)
    except (TypeError, ValueError):
        found = math.nan
    if not 1 <= found < math.inf or isinstance(gain, bool | str):
        raise ValueError(
            f"custom_vijp: the gain of {_jax.origin(fun)} must be a finite number of at least 1 (1 of "
            f"an isometry), or a function of the operands that returns one, got {gain!r}"
        )
    return found


def _arriving(block: Block, h: State) -> list[Any]:
    """The state's cotangents in the order of the call."""
    found = dict(zip(block.inputs, h, strict=True))
    return [found[v] for v in block.eqn.invars[: block.eqn.params["state"]]]


def _leaving(block: Block, found: Sequence[Any], what: str) -> State:
    """The outputs' cotangents that an author's function returned, checked."""
    leaving = dict(zip(block.eqn.outvars, found, strict=True))
    for v in block.outputs:
        if jnp.shape(leaving[v]) != v.aval.shape:
            raise TypeError(
                f"custom_vijp: {what} of `{block.eqn.params['label']}` must return a cotangent of "
                f"shape {v.aval.shape}, but returned {jnp.shape(leaving[v])}"
            )
    return tuple(jnp.asarray(leaving[v], v.aval.dtype) for v in block.outputs)


def _filled(block: Block, kept: Sequence[Any]) -> list[Any]:
    """The call's arguments, with zeros for those that its author's functions do not read."""
    pairs = zip(kept, block.eqn.invars, strict=True)
    return [_jax.full(v.aval, 0.0) if a is None else a for a, v in pairs]


def _read_by_pair(block: Block) -> list[bool]:
    """Which of the state's arrays a fragment and its restoration read."""
    eqn, count = block.eqn, block.eqn.params["state"]
    pair, args = eqn.params["pair"], [_jax.struct(v.aval) for v in eqn.invars]

    def both(args: Any, h_out: Any, h: Any) -> Any:
        part = pair.fragment(args, h_out)
        return part, pair.restore(args, part, h)

    h_out = [_jax.struct(v.aval) for v in eqn.outvars]
    jaxpr, _ = _jax.open_jaxpr(jax.make_jaxpr(both)(args, h_out, args[:count]))
    read = {v for e in jaxpr.eqns for v in e.invars if not isinstance(v, _jax.Literal)}
    read |= {v for v in jaxpr.outvars if not isinstance(v, _jax.Literal)}
    return [v in read for v in jaxpr.invars[:count]]
