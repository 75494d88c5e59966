"""The public functions: pytrees, argument checks, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import Partial

from .. import _jax, settings
from .._jax import Literal
from ..errors import NotSubmersiveError, SingularError
from ..rules import chain
from ..rules.alarms import enforce
from ..rules.chain import Chain, Tape
from ..rules.registry import Alarm, Rule
from ..trace import activity, graph
from ..trace.staging import stage


def vijp(
    fun: Callable[..., Any],
    *primals: Any,
    has_aux: bool = False,
    fallback: Rule | None = None,
    check: bool | None = None,
) -> Any:
    r"""Vector–inverse-Jacobian product: the twin of `jax.vjp` that goes the other way.

    `jax.vjp` takes the cotangent of the outputs to that of the inputs, h = h' J. `vijp` takes it
    back, h' = h J⁺, where J = ∂fun/∂primals and J⁺ is a right inverse.

    `fun` is traced and cut into blocks, every block finds its rule, and the rules are composed. All
    arrays that `fun` closes over (weights, data) are constants. If some block has no vijp,
    `moonwalk.NotSubmersiveError` names its equation, its source line, the reason and the way out.

    **Arguments:**

    - `fun`: a function of the primals. Its outputs may be any pytree of arrays.
    - `primals`: pytrees of real floating-point arrays: the state with respect to which J is taken.
    - `has_aux`: if True, `fun` returns `(out, aux)`, and `aux` is not differentiated.
    - `fallback`: the rule for blocks that no other rule serves: None (raise) or `moonwalk.MatrixFree()`.
    - `check`: whether to raise at singular values (a zero pivot, a saturated tanh) and false
        declarations. None: raise eagerly, do not check under a trace; True: raise under `jit` too (by a
        callback, at some cost); False: never check.

    **Returns:** `(out, vijp_fun)`, or `(out, vijp_fun, aux)`. `vijp_fun` takes one cotangent per
    primal, shaped like the primals, and returns one shaped like `out`. It is a pytree, like the
    function that `jax.vjp` returns, and may cross a `jit` boundary.

    !!! warning "The row space"

        J⁺ is unique only on the row space of J. **Only h in the row space is promised**: h must be
        the pullback of some h' (h = vjp(h')), which every cotangent that backpropagation produces is.
        For other h the result is that of *some* right inverse, not of the pseudo-inverse, and no
        error is raised.

    Outputs that are not differentiable (integers, booleans) get `float0` cotangents as in JAX.

    **Example:**

    >>> import jax, jax.numpy as jnp, moonwalk as mw
    >>> w = jnp.array([[2.0, 0.0], [1.0, 1.0], [0.0, 3.0]])
    >>> f = lambda x: jax.nn.leaky_relu(x @ w, 0.5)
    >>> x = jnp.array([[1.0, -1.0, 2.0]])
    >>> y, vjp_fun = jax.vjp(f, x)
    >>> (h,) = vjp_fun(jnp.array([[1.0, 2.0]]))
    >>> y, vijp_fun = mw.vijp(f, x)
    >>> jnp.allclose(vijp_fun(h), jnp.array([[1.0, 2.0]]), atol=1e-6).item()
    True

    **Reference:** "Moonwalk: Inverse-Forward Differentiation", AISTATS 2026, §4.2.
    """
    _check_settings(fun, has_aux, fallback, check)
    primals = jax.tree.map(_real_array, primals, is_leaf=lambda leaf: leaf is None)
    leaves = jax.tree.leaves(primals)
    if not leaves:
        raise TypeError("vijp: there is nothing to differentiate: the primals hold no arrays")
    staged = stage(_split_aux(fun, has_aux), *primals)
    out_tree, aux_tree = staged.out_tree.children()
    results = staged.jaxpr.outvars[: out_tree.num_leaves]

    known = dict(zip(staged.jaxpr.constvars, staged.consts, strict=True))
    outputs = [v for v in results if activity.is_differentiable(v.aval)]
    _refuse_repeated(outputs)
    cut = graph.build(staged.jaxpr, staged.jaxpr.invars, outputs, consts=known, names=staged.names)
    composed = chain.build(cut, fallback)
    env, tape = composed.forward({**known, **dict(zip(staged.jaxpr.invars, leaves, strict=True))})

    def read(atom: Any) -> Any:
        return jnp.asarray(atom.val) if isinstance(atom, Literal) else env[atom]

    values = [read(v) for v in staged.jaxpr.outvars]
    out = jax.tree.unflatten(out_tree, values[: out_tree.num_leaves])
    aux = jax.tree.unflatten(aux_tree, values[out_tree.num_leaves :])
    vijp_fun = Partial(_Vijp(composed, primals, results, out_tree, check), tape)
    return (out, vijp_fun, aux) if has_aux else (out, vijp_fun)


def _check_settings(fun: Any, has_aux: Any, fallback: Any, check: Any) -> None:
    if not callable(fun):
        raise TypeError(f"vijp: fun is a function of the primals, got {fun!r}")
    if fallback is not None and not isinstance(fallback, Rule):
        is_class = isinstance(fallback, type) and issubclass(fallback, Rule)
        hint = f"; call it: {fallback.__name__}()" if is_class else ""
        raise TypeError(
            f"vijp: fallback takes None (raise) or a rule, moonwalk.MatrixFree(), got {fallback!r}{hint}"
        )
    settings.flag("vijp", "has_aux", has_aux)
    if check is not None and not isinstance(check, bool):
        rule = "is None (raise eagerly), True (under jit, too) or False (never)"
        raise settings.refuse("vijp", "check", rule, check)


class _Vijp:
    """The static half of a `vijp_fun`: everything except the arrays on its tape."""

    def __init__(self, composed: Chain, primals: Any, results: Any, out_tree: Any, check: Any):
        self.composed, self.results, self.out_tree, self.check = composed, results, out_tree, check
        self.expected = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, p.dtype), primals)

    def __call__(self, tape: Tape, *h: Any) -> Any:
        leaves = _cotangents_like(self.expected, h)
        leaving = self.composed.vijp(tape, leaves)
        if self.check is not False:
            alarms = [*self.composed.alarms(tape), _not_finite(leaves, leaving)]
            leaving = enforce(leaving, alarms, self.check)
        found = dict(zip(self.composed.outputs, leaving, strict=True))
        return jax.tree.unflatten(
            self.out_tree,
            [
                found[v]
                if activity.is_differentiable(v.aval)
                else np.zeros(v.aval.shape, jax.dtypes.float0)
                for v in self.results
            ],
        )


def _not_finite(arriving: Any, leaving: Any) -> Alarm:
    """An alarm for a finite cotangent whose result is not finite: an elimination diverged."""

    def finite(arrays: Any) -> Any:
        return jnp.all(jnp.stack([jnp.all(jnp.isfinite(a)) for a in arrays])) if arrays else True

    return Alarm(
        jnp.asarray(finite(arriving)) & ~jnp.asarray(finite(leaving)),
        "vijp: the recovered cotangent is not finite although no pivot is singular: an elimination over "
        "space or depth has diverged; shrink the taps beside the pivot, or use fewer layers at once",
        SingularError,
    )


def _split_aux(fun: Callable[..., Any], has_aux: bool) -> Callable[..., Any]:
    """`fun`, always returning (out, aux)."""

    def wrapped(*primals: Any) -> Any:
        result = fun(*primals)
        if not has_aux:
            return result, None
        if not isinstance(result, tuple) or len(result) != 2:
            raise TypeError(
                f"vijp: with has_aux=True the function must return a pair (out, aux), but "
                f"{_jax.origin(fun)} returned {type(result).__name__}"
            )
        return result

    wrapped.__wrapped__ = fun  # type: ignore[attr-defined]
    return wrapped


def _real_array(leaf: Any) -> Any:
    """An array that can be differentiated, or the TypeError that `jax.grad` would raise."""
    if leaf is None:
        return None
    try:
        array = jnp.asarray(leaf)
    except TypeError as error:
        raise TypeError(
            f"vijp: primals must be arrays or numbers, but got {leaf!r} of type {type(leaf).__name__}"
        ) from error
    if not jnp.issubdtype(array.dtype, jnp.floating):
        kind = "complex" if jnp.issubdtype(array.dtype, jnp.complexfloating) else "integer"
        raise TypeError(
            "vijp requires real-valued inputs (input dtype that is a sub-dtype of np.floating), but "
            f"got {array.dtype}. "
            + (
                "Cast integer inputs to a floating dtype, or close over them."
                if kind == "integer"
                else "Split complex inputs into real and imaginary parts."
            )
        )
    return array


def _refuse_repeated(outputs: list[Any]) -> None:
    """Refuse a value that is returned twice: its two cotangents cannot be told apart."""
    seen: set[int] = set()
    for v in outputs:
        if isinstance(v, Literal):
            raise NotSubmersiveError(
                f"the output {graph.type_of(v)} is the constant {v.val}",
                "the function's return statement",
                "no derivative flows from the inputs to this output: its Jacobian is zero",
                "return it as auxiliary data (has_aux=True)",
            )
        if id(v) in seen:
            raise NotSubmersiveError(
                f"the output {graph.type_of(v)} is returned more than once",
                "the function's return statement",
                "the cotangents of equal outputs add up and cannot be told apart",
                "return it once, or return the copy as auxiliary data (has_aux=True)",
            )
        seen.add(id(v))


def _cotangents_like(expected: Any, h: Any) -> list[Any]:
    """The leaves of h, checked against the primals; errors show both."""
    tree = jax.tree.structure(expected)
    got_leaves, got_tree = jax.tree.flatten(h)
    if got_tree != tree:
        raise TypeError(
            "vijp_fun: the cotangent must have the structure of the primals, but the primals have\n"
            f"  {tree}\nand the cotangent has\n  {got_tree}"
        )
    arrays = []
    for (path, want), leaf in zip(jax.tree.flatten_with_path(expected)[0], got_leaves, strict=True):
        got = jnp.asarray(leaf)
        where = f"of primal {path[0].idx}{jax.tree_util.keystr(path[1:])}"
        if got.shape != want.shape:
            raise ValueError(
                f"vijp_fun: the cotangent {where} must have the primal's shape {want.shape}, but has "
                f"shape {got.shape}"
            )
        # A Python number says nothing about precision; an array does.
        if got.dtype != want.dtype and not isinstance(leaf, int | float):
            raise TypeError(
                f"vijp_fun: the cotangent {where} must have the primal's dtype {want.dtype}, but has "
                f"dtype {got.dtype}"
            )
        arrays.append(got.astype(want.dtype))
    return arrays
