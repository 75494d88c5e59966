"""`value_and_grad` and `grad`: pytrees, argument checks, and nothing else."""

from __future__ import annotations

import functools
import inspect
import itertools
import math
import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np

from . import _jax
from .errors import DeclarationError, InexactError, PlanMismatchError, PlanWarning
from .execute import forward_mode
from .execute.certificate import Certificate, Findings, Place, summary
from .execute.engine import Engine
from .execute.residuals import nbytes
from .network import loss
from .network.cutting import Network
from .planning import checkpoint, pure_forward, report, reversible
from .planning import moonwalk as moonwalk_policy
from .planning.draft import PlanRequest, enforce_weight_alarms
from .planning.methods import (
    Backprop,
    Checkpoint,
    Forward,
    Moonwalk,
    ProjectedForward,
    PureForward,
    Reversible,
)
from .planning.report import Plan
from .planning.tolerance import Planned
from .rules import alarms

Unplanned = Backprop | Forward | ProjectedForward  # they cut nothing into blocks
Method = Planned | Unplanned | Plan
_PLANNERS: dict[type, Any] = {
    Moonwalk: moonwalk_policy.plan,
    PureForward: pure_forward.plan,
    Checkpoint: checkpoint.plan,
    Reversible: reversible.plan,
}
_DEFAULT = Moonwalk()


def value_and_grad(
    fun: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    holomorphic: bool = False,
    allow_int: bool = False,
    *,
    method: Method = _DEFAULT,
    certify: bool = False,
) -> Callable[..., Any]:
    """`jax.value_and_grad` without keeping the activations.

    The gradient is exact. It takes three phases: a forward pass that keeps of each block only what ∂y/∂x
    needs, a reverse pass for cotangents alone, and a forward sweep that recovers each block's cotangent
    by vijp and computes its parameter gradient. Blocks that cannot be walked are anchored, stored or
    recomputed, whichever keeps less; `moonwalk.plan` says which, and why.

    Calling convention, results and errors are those of `jax.value_and_grad`. The function is traced, so
    it must not look at the *values* of differentiated arguments. Under `jax.grad` or `jax.jvp` the
    result is differentiated as `jax.value_and_grad` would be.

    **Arguments:**

    - `fun`: returns a real scalar (with `holomorphic` a complex one), or with `has_aux` a pair of it and
        anything.
    - `argnums`: the positional argument(s) to differentiate. They are weights; name those that are
        network inputs in `Moonwalk(inputs=...)`.
    - `has_aux`: whether `fun` returns auxiliary data.
    - `holomorphic`: whether `fun` is promised to be holomorphic; inputs and output are then complex.
    - `allow_int`: whether differentiated arguments may hold integers, Booleans and random keys. Their
        gradients are zeros of dtype `float0`.
    - `method`: a row of the paper's Table 1, or a plan that `moonwalk.plan` returned: `Moonwalk`,
        `PureForward`, `Backprop`, `Checkpoint`, `Forward`, `ProjectedForward`, `Reversible`.
    - `certify`: append the `Certificate`, the measured error of the recovered cotangents.

    **Returns:** a function that returns `(value, gradients)`, `((value, aux), gradients)` with
    `has_aux`, and with `certify` the certificate as a third.

    **Example:**

    >>> import jax.numpy as jnp, moonwalk as mw
    >>> loss = lambda w, x: jnp.sum(jnp.abs(x @ mw.declare(w, "orthogonal")))
    >>> value, g = mw.value_and_grad(loss)(jnp.eye(2), jnp.array([[1.0, -2.0]]))
    >>> print(value, g.tolist())
    3.0 [[1.0, -1.0], [-2.0, 2.0]]
    """
    check_method(method)
    _check_certify("value_and_grad", method, certify)
    check_holomorphic("value_and_grad", method, holomorphic)

    @functools.wraps(fun)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        call = Call("value_and_grad", fun, argnums, has_aux, args, kwargs, holomorphic, allow_int)
        value, aux, gradients, found = call.differentiate(method)
        value = (value, aux) if has_aux else value
        return (value, gradients, found) if certify else (value, gradients)

    return wrapped


def grad(
    fun: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    holomorphic: bool = False,
    allow_int: bool = False,
    *,
    method: Method = _DEFAULT,
    certify: bool = False,
) -> Callable[..., Any]:
    """`jax.grad` without keeping the activations; see `moonwalk.value_and_grad`.

    **Returns:** a function that returns `gradients`, or `(gradients, aux)` with `has_aux`; with
    `certify` followed by the certificate.

    **Example:**

    >>> import jax.numpy as jnp, moonwalk as mw
    >>> print(mw.grad(lambda w: w**2)(3.0))
    6.0
    """
    check_method(method)
    _check_certify("grad", method, certify)
    check_holomorphic("grad", method, holomorphic)

    @functools.wraps(fun)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        call = Call("grad", fun, argnums, has_aux, args, kwargs, holomorphic, allow_int)
        _, aux, gradients, found = call.differentiate(method)
        result = ((gradients, aux) if has_aux else (gradients,)) + ((found,) if certify else ())
        return result if len(result) > 1 else gradients

    return wrapped


def check_method(method: Any) -> None:
    if not isinstance(method, Method):
        known = (*(m.__name__ for m in _PLANNERS), *(m.__name__ for m in get_args(Unplanned)))
        hint = ""
        if isinstance(method, type) and method.__name__ in known:
            hint = f"; call it: moonwalk.{method.__name__}(...)"
        raise TypeError(
            f"method= takes moonwalk.{', moonwalk.'.join(known)}, or a plan that moonwalk.plan "
            f"returned, but got {method!r}{hint}"
        )


def _check_certify(name: str, method: Any, certify: bool) -> None:
    if certify and isinstance(method, ProjectedForward):
        raise ValueError(
            f"{name}(certify=True): ProjectedForward returns an estimate, whose error no certificate "
            "bounds; leave certify out, or take an exact method"
        )


def check_holomorphic(name: str, method: Any, holomorphic: bool) -> None:
    if holomorphic and isinstance(method, Forward | ProjectedForward | PureForward):
        raise ValueError(
            f"{name}(holomorphic=True): {type(method).__name__} takes derivatives along real directions "
            "only; use moonwalk.Moonwalk, moonwalk.Checkpoint or moonwalk.Backprop"
        )


def check_planned(name: str, method: Any) -> Planned | Plan:
    """The method, if it is one of those that cut the function into blocks."""
    check_method(method)
    if isinstance(method, Unplanned):
        raise ValueError(
            f"{name}: {type(method).__name__} differentiates the function as a whole, so there is no "
            "plan to make or follow; use one of "
            + ", ".join(f"moonwalk.{planned.__name__}" for planned in _PLANNERS)
        )
    return method


_measured: weakref.WeakKeyDictionary[Any, dict[Any, Any]] = weakref.WeakKeyDictionary()
# By the code of each function that still exists: the signatures for which advice was given.
_advised: weakref.WeakKeyDictionary[Any, set[Any]] = weakref.WeakKeyDictionary()


class Call:
    """One call of a differentiated function: its arguments, flattened and sorted."""

    aux_tree: Any = None
    aux_static: list[Any]  # for each auxiliary leaf: None if it is an array, else (leaf,)

    def __init__(
        self,
        name: str,
        fun: Any,
        argnums: Any,
        has_aux: bool,
        args: tuple[Any, ...],
        kwargs: Any,
        holomorphic: bool = False,
        allow_int: bool = False,
    ):
        self.name, self.fun, self.has_aux, self.argnums = name, fun, has_aux, argnums
        self.args, self.kwargs = args, kwargs
        self.holomorphic, self.allow_int = holomorphic, allow_int
        self.single = not isinstance(argnums, list | tuple)
        numbers = (argnums,) if self.single else tuple(argnums)
        if not all(isinstance(i, int | np.integer) for i in numbers) or any(
            not -len(args) <= i < len(args) for i in numbers
        ):
            self._as_jax_would()
        self.numbers = [int(i) % len(args) for i in numbers]
        if len(set(self.numbers)) < len(self.numbers):
            raise ValueError(f"{name}: argnums={argnums} names an argument twice")
        self.every, self.tree = jax.tree.flatten(tuple(args[i] for i in self.numbers))
        # Those leaves of the differentiated arguments that have a derivative.
        self.has_gradient = [self._check_leaf(k, leaf) for k, leaf in enumerate(self.every)]
        self.leaves = list(itertools.compress(self.every, self.has_gradient))
        constant = (a for a, d in zip(self.every, self.has_gradient, strict=True) if not d)
        rest = [None if i in self.numbers else a for i, a in enumerate(args)]
        flat, self.rest_tree = jax.tree.flatten((rest, kwargs))
        self.traced = [_is_array(a) for a in flat]
        self.flat = flat
        self.others = [jnp.asarray(a) if _is_number(a) else a for a in constant]
        self.others += [a for a, t in zip(flat, self.traced, strict=True) if t]

    def _check_leaf(self, k: int, leaf: Any) -> bool:
        """Whether leaf k is differentiated; raises an error if it may not be an argument at all."""
        dtype = getattr(leaf, "dtype", None)
        dtype = jnp.result_type(leaf) if dtype is None and _is_number(leaf) else dtype
        if dtype is not None and jnp.issubdtype(dtype, jnp.inexact):
            if self.holomorphic and not jnp.issubdtype(dtype, jnp.complexfloating):
                self._as_jax_would()
            return True
        whole = (jnp.integer, jnp.bool_, jax.dtypes.extended)
        is_whole = dtype is not None and any(jnp.issubdtype(dtype, t) for t in whole)
        if self.holomorphic or not self.allow_int or not is_whole:
            self._as_jax_would(
                note=f"moonwalk.{self.name}: that is `{self._names(every=True)[k]}`. {_SPLIT}"
            )
        return False

    def _as_jax_would(self, note: str = "") -> None:
        """Run JAX's own transformation, so that it raises its own error."""
        try:
            jax.value_and_grad(self.fun, self.argnums, self.has_aux, self.holomorphic, self.allow_int)(
                *self.args, **self.kwargs
            )
        except Exception as error:
            if note:
                error.add_note(note)
            raise
        raise TypeError(f"{self.name}: these arguments cannot be differentiated: {self.argnums=}")

    # -- staging ---------------------------------------------------------------------------------
    def stage(self, inputs: Sequence[int]) -> loss.Staging:
        inputs = [i % len(self.args) if -len(self.args) <= i < 0 else i for i in inputs]
        for i in inputs:
            if i not in self.numbers:
                raise ValueError(
                    f"inputs={tuple(inputs)}: argument {i} is not differentiated; argnums={self.argnums}"
                )
        count = len(self.leaves)
        is_input: list[bool] = []
        for i, arg in zip(self.numbers, (self.args[i] for i in self.numbers), strict=True):
            is_input += [i in inputs] * len(jax.tree.leaves(arg))
        is_input = list(itertools.compress(is_input, self.has_gradient))

        def flat_fun(*values: Any) -> list[Any]:
            value = self._call(values[:count], values[count:])
            aux = None
            if self.has_aux:
                if not isinstance(value, tuple) or len(value) != 2:
                    self._as_jax_would()
                value, aux = value
            if not (_is_array(value) or _is_number(value)):
                raise _NotScalar
            kind = jnp.complexfloating if self.holomorphic else jnp.floating
            if jnp.shape(value) != () or not jnp.issubdtype(jnp.result_type(value), kind):
                raise _NotScalar
            aux_leaves, self.aux_tree = jax.tree.flatten(aux)
            self.aux_static = [None if _is_array(a) else (a,) for a in aux_leaves]
            return [value, *(a for a in aux_leaves if _is_array(a))]

        flat_fun.__wrapped__ = self.fun  # type: ignore[attr-defined]
        try:
            return loss.stage(flat_fun, self.leaves, self.others, is_input, self._names())
        except _NotScalar:
            self._as_jax_would()
            raise AssertionError("unreachable") from None
        except jax.errors.ConcretizationTypeError as error:
            error.add_note(
                f"moonwalk.{self.name} traces the function, as jax.jit does: it cannot branch on the "
                "values of its arrays. Use jax.lax.cond or jnp.where, or pass what decides as a Python "
                "number."
            )
            raise

    def _call(self, leaves: Sequence[Any], others: Sequence[Any]) -> Any:
        values, of_leaves = iter(others), iter(leaves)
        every = [next(of_leaves if d else values) for d in self.has_gradient]
        dynamic = jax.tree.unflatten(self.tree, every)
        flat = [next(values) if t else a for a, t in zip(self.flat, self.traced, strict=True)]
        args, kwargs = jax.tree.unflatten(self.rest_tree, flat)
        for i, arg in zip(self.numbers, dynamic, strict=True):
            args[i] = arg
        return self.fun(*args, **kwargs)

    def _roots(self) -> list[str]:
        """For every positional argument the function's own name, such as 'params', if it has one."""
        try:
            parameters = list(inspect.signature(self.fun).parameters.values())
        except (TypeError, ValueError):
            parameters = []
        kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        named = [p.name for p in parameters if p.kind in kinds]
        return [named[i] if i < len(named) else f"args[{i}]" for i in range(len(self.args))]

    def _names(self, *, every: bool = False) -> list[str]:
        """Names such as "params['w']" for all differentiated leaves, or for `every` leaf."""
        roots = self._roots()
        names = []
        for i in self.numbers:
            for path, _ in jax.tree.flatten_with_path(self.args[i])[0]:
                names.append(roots[i] + jax.tree_util.keystr(path))
        return names if every else list(itertools.compress(names, self.has_gradient))

    def signature(self) -> tuple[tuple[str, str], ...]:
        """Names and types of all input arrays."""
        args, kwargs = jax.tree.unflatten(self.rest_tree, self.flat)
        named = list(zip(self._names(every=True), self.every, strict=True))
        for root, arg in (*zip(self._roots(), args, strict=True), *kwargs.items()):
            for path, leaf in jax.tree.flatten_with_path(arg)[0]:
                # An argument may be a Python number eagerly and an array under jit.
                if _is_array(leaf) or _is_number(leaf):
                    named.append((root + jax.tree_util.keystr(path), leaf))
        return tuple((name, _type(a)) for name, a in named)

    def _is_eager(self) -> bool:
        """Whether the differentiated arguments have values, and no trace is running."""
        structs = any(isinstance(a, jax.ShapeDtypeStruct) for a in (*self.leaves, *self.others))
        return not structs and _jax.is_concrete(self.leaves, jnp.zeros(()))

    # -- planning --------------------------------------------------------------------------------
    def plan(
        self, method: Planned | Plan, *, fused: bool = False, anew: bool = False
    ) -> tuple[Engine, Plan, loss.Staging]:
        """Trace, cut, plan unless a plan is given, and bind the plan.

        `anew`: measure gains even if an earlier call has measured them.
        """
        given = method if isinstance(method, Plan) else None
        if given is not None:
            _match(given, self.signature())
        settings = method.method if isinstance(method, Plan) else method
        staged, network = self._cut(settings)
        numbers = self._python_numbers()
        if given is not None and (given.fits(network) or given.numbers == numbers):
            described = given
        else:
            # A Python number is part of the traced function, but under jit it is an array argument. A
            # plan for the one may not fit the other; then a new one is made from its measured gains.
            gains = () if given is None else given.gains
            (described,) = self._planned(staged, network, settings, fused, anew, gains)
        executors = described.bind(network)
        enforce_weight_alarms(network, executors, self._values(staged))

        def complete() -> Plan:
            return (
                described
                if described.rows
                else report.with_rows(described, network, executors, fused=fused)
            )

        report.warn_of_deleted_barriers(described, lambda: complete().rows)
        # A report traces more than a run needs, so it is made only when it is read.
        advised = given is None and not fused and isinstance(settings, Moonwalk | PureForward)
        reads = anew or (advised and described.saves_little)
        return Engine(staged, network, executors), complete() if reads else described, staged

    def frontier(self, method: Moonwalk, *, fitting: bool = True) -> list[Plan]:
        """The plans from least memory to least time, with their rows; `fitting`: only those that fit."""
        staged, network = self._cut(method)
        planner = functools.partial(moonwalk_policy.plans, fitting=fitting)
        found = self._planned(staged, network, method, planner=planner, anew=True)
        return [report.with_rows(p, network, p.bind(network), fused=False) for p in found]

    def compile(self, plan: Plan) -> Any:
        """The gradient by a plan, compiled for arguments of these types."""
        engine, _, staged = self.plan(plan)

        def run(*flat: Any) -> Any:
            out, gradients, found = engine(*flat)
            return out, enforce(gradients, found, engine.places, plan.method)

        flat = (*self.leaves, *self.others, *staged.staged.consts)
        variables = (*staged.jaxpr.invars, *staged.jaxpr.constvars)
        types = [
            jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype, sharding=_jax.sharding(a))
            for v, a in zip(variables, flat, strict=True)
        ]
        return _jax.compiled(jax.jit(run), *types)

    def _cut(self, method: Planned) -> tuple[loss.Staging, Network]:
        """The loss, staged and cut."""
        staged = self.stage(method.inputs)
        loss.refuse_effects(staged.jaxpr)
        # A sweep cannot walk crossing paths, but it need not: it pulls a stem of them back whole.
        return staged, loss.cut(staged, crossings=not isinstance(method, PureForward))

    def _values(self, staged: loss.Staging) -> dict[Any, Any] | None:
        """Values of the jaxpr's inputs and constants, in an eager call."""
        if not self._is_eager():
            return None
        variables = (*staged.jaxpr.invars, *staged.jaxpr.constvars)
        known = zip(variables, (*self.leaves, *self.others, *staged.staged.consts), strict=True)
        return {v: jnp.asarray(a) if _is_number(a) else a for v, a in known if _jax.is_concrete(a)}

    def _python_numbers(self) -> tuple[str, ...]:
        """Names of the arguments that are Python numbers."""
        args, kwargs = jax.tree.unflatten(self.rest_tree, self.flat)
        return tuple(
            root + jax.tree_util.keystr(path)
            for root, arg in (*zip(self._roots(), args, strict=True), *kwargs.items())
            for path, leaf in jax.tree.flatten_with_path(arg)[0]
            if _is_number(leaf) and not _is_array(leaf)
        )

    def _planned(
        self,
        staged: loss.Staging,
        network: Network,
        method: Planned,
        fused: bool = False,
        anew: bool = False,
        gains: Any = (),
        planner: Any = None,
    ) -> list[Plan]:
        """One plan, or all that another `planner` returns."""
        signature, values, numbers = self.signature(), self._values(staged), self._python_numbers()
        # Only among eager calls: what jit compiles must not depend on earlier calls.
        cache = _cache_for(self.fun) if self._is_eager() else None
        if cache is not None and not anew and not gains:
            gains = cache.get((signature, method), ())
        request = PlanRequest(signature, gains, values, fused, *self._sizes(staged))
        if planner is None:
            found = [_PLANNERS[type(method)](network, method, request)]
        else:
            found = planner(network, method, request)
        if cache is not None and values is not None:
            cache[signature, method] = found[0].gains
        return [replace(plan, numbers=numbers) for plan in found]

    def _sizes(self, staged: loss.Staging) -> tuple[int, int, int, int]:
        """(bytes of arguments, bytes of results, parts that data are divided into, bytes in use).

        Bytes are those on one device. What is computed from data that are divided among devices is
        divided, too, and a gradient is where its parameter is.
        """
        flat = (*self.leaves, *self.others, *staged.staged.consts)
        variables = (*staged.jaxpr.invars, *staged.jaxpr.constvars)
        parts = {v: _jax.parts(a) for v, a in zip(variables, flat, strict=True)}
        arguments = sum(nbytes(v.aval) // parts[v] for v in variables)
        gradients = sum(nbytes(v.aval) // parts.get(v, 1) for v in staged.order)
        outputs = nbytes(*(v.aval for v in staged.jaxpr.outvars))
        data = max(map(_jax.parts, self.others), default=1)
        return arguments, gradients + outputs, data, _jax.resident_bytes(flat)

    def measuring(self, method: Method, run: Callable[[], Any]) -> Any:
        """`run()`; if weights have drifted since their gains were measured, measure again, once."""
        try:
            return run()
        except InexactError:
            cache = _cache_for(self.fun)
            if isinstance(method, Plan) or not cache or not cache.pop((self.signature(), method), None):
                raise
            return run()

    def differentiate(self, method: Method) -> tuple[Any, Any, Any, Certificate]:
        """(value, auxiliary data, gradients, certificate)."""
        return self.measuring(method, lambda: self._differentiate(method))

    def _differentiate(self, method: Method) -> tuple[Any, Any, Any, Certificate]:
        try:
            return self._by(method)
        except jax.errors.UnexpectedTracerError as error:
            error.add_note(
                f"moonwalk.{self.name} traces the function, as jax.jit does, and differentiates it "
                "afterwards. When it calls the rule of a jax.custom_jvp or jax.custom_vjp function, the "
                "arrays around that function (arguments, and what was computed from them) are gone. "
                "Where a rule closes over one of them, pass it to the custom function as an argument."
            )
            raise

    def _by(self, method: Method) -> tuple[Any, Any, Any, Certificate]:
        if isinstance(method, Backprop):
            found, gradients = jax.value_and_grad(
                self.fun, self.argnums, self.has_aux, self.holomorphic, self.allow_int
            )(*self.args, **self.kwargs)
            value, aux = found if self.has_aux else (found, None)
            return value, aux, gradients, Certificate.exact()
        leaves = [jnp.asarray(a) for a in self.leaves]
        if isinstance(method, Forward | ProjectedForward):
            staged = self.stage(())
            loss.refuse_effects(staged.jaxpr)
            flat = (*leaves, *self.others, *staged.staged.consts)
            if isinstance(method, Forward):
                out, gradients = forward_mode.forward(staged, method.chunk, flat)
            else:
                out, gradients = forward_mode.projected(
                    staged, method.random_key(), method.samples, flat, self._direction(method)
                )
            return *self.results(out), self._as_arguments(gradients), Certificate.exact()
        made, described, staged = self.plan(method)
        if isinstance(method, Moonwalk | PureForward):
            _advise(self.fun, described)
        out, gradients, found = made(*leaves, *self.others, *staged.staged.consts)
        settings = method.method if isinstance(method, Plan) else method
        gradients = enforce(gradients, found, made.places, settings)
        certificate = summary(found, made.places)
        return *self.results(out), self._as_arguments(gradients), certificate

    def _as_arguments(self, gradients: Sequence[Any]) -> Any:
        found = iter(gradients)
        result = jax.tree.unflatten(
            self.tree,
            [
                next(found) if d else np.zeros(jnp.shape(a), jax.dtypes.float0)
                for a, d in zip(self.every, self.has_gradient, strict=True)
            ],
        )
        return result[0] if self.single else result

    def _direction(self, method: ProjectedForward) -> list[Any] | None:
        """The leaves of a predicted gradient, checked."""
        if method.direction is None:
            return None
        given = method.direction
        given = (given,) if self.single else tuple(given) if isinstance(given, list | tuple) else given
        leaves, tree = jax.tree.flatten(given)
        if tree != self.tree or [jnp.shape(a) for a in leaves] != [jnp.shape(a) for a in self.every]:
            raise ValueError(
                "ProjectedForward: direction is a prediction of the gradient and has its structure and "
                f"shapes, {_shapes(self.tree, self.every)}, but it is {_shapes(tree, leaves)}"
            )
        return [jnp.asarray(a) for a in itertools.compress(leaves, self.has_gradient)]

    def results(self, out: Sequence[Any]) -> tuple[Any, Any]:
        """(loss, auxiliary data) from the engine's flat list."""
        value, *arrays = out
        values = iter(arrays)
        leaves = [next(values) if s is None else s[0] for s in self.aux_static]
        return value, jax.tree.unflatten(self.aux_tree, leaves)


# Advice for a differentiated argument that holds more than parameters, as an `eqx.Module` does.
_SPLIT = (
    "Differentiate the parameters alone: params, static = eqx.partition(model, eqx.is_inexact_array), "
    "and a function of (params, ...) that calls eqx.combine(params, static); this is what "
    "eqx.filter_value_and_grad does around jax.value_and_grad. Without Equinox, pass everything that is "
    "no parameter as another argument."
)


class _NotScalar(Exception):
    pass


def _shapes(tree: Any, leaves: Sequence[Any]) -> str:
    """A tuple of arguments, written with the shapes of their leaves."""
    return str(jax.tree.unflatten(tree, [jnp.shape(a) for a in leaves]))


def _is_number(leaf: Any) -> bool:
    return isinstance(leaf, int | float | complex | np.generic)


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array | np.ndarray | jax.ShapeDtypeStruct | _jax.Tracer)


def _type(leaf: Any) -> str:
    if not hasattr(leaf, "dtype"):
        leaf = jnp.asarray(leaf)
    return f"{leaf.dtype}[{','.join(map(str, np.shape(leaf)))}]"


def _cache_for(fun: Any) -> dict[Any, Any] | None:
    try:
        return _measured.setdefault(fun, {})
    except TypeError:  # cannot be referred to weakly
        return None


_SHOWN = 8  # how many differences between a plan and a call a message lists


def _match(plan: Plan, signature: tuple[tuple[str, str], ...]) -> None:
    """PlanMismatchError unless a plan was made for arguments of these types, in this order.

    Names do not count, because a wrapper may rename arguments. Whether the network is the same is
    decided by the plan's nodes.
    """
    if [kind for _, kind in plan.signature] == [kind for _, kind in signature]:
        return
    old, new = dict(plan.signature), dict(signature)
    names = [name for name in dict.fromkeys((*old, *new)) if old.get(name) != new.get(name)]
    lines = [
        f"  {name}: planned {old.get(name, 'nothing')}, called with {new.get(name, 'nothing')}"
        for name in names[:_SHOWN]
    ]
    if not names:
        lines = ["  the same ones in another order, as by other argnums"]
    if len(names) > _SHOWN:
        lines.append(f"  … and {len(names) - _SHOWN} more")
    raise PlanMismatchError(
        "method=: the plan was made for other arguments:\n" + "\n".join(lines) + "\nMake it anew with "
        "moonwalk.plan(fun, *args)."
    )


def _advise(fun: Any, described: Plan) -> None:
    """Warn once per function that the plan saves little."""
    try:
        # Keyed by the code, not the function: a lambda in a loop is a new function in every iteration.
        advised = _advised.setdefault(getattr(fun, "__code__", fun), set())
    except TypeError:  # no hash, or cannot be referred to weakly
        return
    if described.signature in advised:
        return
    advised.add(described.signature)
    text = described.advice()
    if text:
        warnings.warn(text, PlanWarning, stacklevel=_jax.levels_to_user())


def enforce(
    gradients: list[Any], found: Findings, places: Sequence[Place], method: Planned
) -> list[Any]:
    """Raise, or make gradients NaN, if an error exceeds what its place allows.

    If the reverse pass itself is not finite, neither is backpropagation's, and the gradient is NaN.
    """
    if method.on_inexact == "ignore" or not places:
        return gradients
    exceeds = found.errors > jnp.asarray([p.limit for p in places], jnp.float32)
    bad = jnp.any(exceeds)
    if method.on_inexact == "raise":
        report = _Report(tuple(places), method)
        known = _jax.concrete(bad)
        if known is None:
            # The check is attached to a single number, because its callback would copy gradients.
            bad = alarms.raise_when_run(bad, bad, report, found.errors, found.layers)
        elif known.any():
            raise report(np.asarray(found.errors), np.asarray(found.layers))
    bad = bad | jnp.any(jnp.isnan(found.errors))
    return [jnp.where(bad, jnp.nan, g).astype(g.dtype) for g in gradients]


class _Report(NamedTuple):
    """Makes the error for a run whose certificate is too large, from the errors at all places."""

    places: tuple[Place, ...]
    method: Planned

    def __call__(self, errors: Any, layers: Any) -> Exception:
        errors, layers = errors.reshape(-1, len(self.places)), layers.reshape(-1, len(self.places))
        exceeds = [
            (p.kind != "declaration", -errors[row, i] / p.limit if p.limit else -math.inf, row, i)
            for i, p in enumerate(self.places)
            for row in range(len(errors))
            if errors[row, i] > p.limit
        ]
        *_, row, i = min(exceeds)  # a false declaration explains the rest
        place, error = self.places[i], float(errors[row, i])
        where = place.block
        if place.layers:
            where += f", layer {int(layers[row, i])} of {place.layers}"
        if place.line:
            where += f", at {place.line}"
        return _ERRORS[place.kind](place, error, where, self.method)


def _false_declaration(place: Place, error: float, where: str, method: Planned) -> Exception:
    del method
    return DeclarationError(
        f"value_and_grad: {where}: the values are not what is declared. They are {error:.1e} off, more "
        f"than rounding ({place.limit:.1e}) explains. Re-parametrise the weight so that the structure "
        "holds while it is trained (moonwalk.nn.orthogonal, lower, diagonal), or leave the declaration "
        "out (undeclared weights get the general solver)"
    )


def _broken_walk(place: Place, error: float, where: str, method: Planned) -> Exception:
    if math.isinf(error):
        cause = (
            "what was recovered is not finite, though the reverse pass is: a weight has become "
            "singular, or a derivative is zero there"
        )
    else:
        cause = (
            "the weights have drifted from those that the plan measured, a declared structure or a "
            "custom_vijp rule does not hold, the cotangents of a fork's branches cancel, or a span that "
            "fragment= asks for is too long"
        )
    return InexactError(
        f"value_and_grad: a walk's certificate exceeds the tolerance {place.limit:.1e}: the cotangent "
        f"of {where}, is {error:.1e} off; {cause}. Plan anew, ask for shorter spans, lower "
        f"anchor_every, or pass {type(method).__name__}(on_inexact='nan' or 'ignore')"
    )


def _broken_inverse(place: Place, error: float, where: str, method: Planned) -> Exception:
    return InexactError(
        "value_and_grad: reversible layers were inverted, and did not arrive at the state that they "
        f"started from to the tolerance {place.limit:.1e}: the input of {where}, is {error:.1e} off; an "
        "inverse is not one, or rounding grows too far in so many layers; "
        + (
            "use moonwalk.Moonwalk()"
            if isinstance(method, Reversible)
            else "wrap some of them in jax.checkpoint, which keeps their state"
        )
        + f", or pass {type(method).__name__}(on_inexact='nan' or 'ignore')"
    )


def _broken_seed(place: Place, error: float, where: str, method: Planned) -> Exception:
    del method
    return InexactError(
        "PureForward: at the end of the sweep the cotangent differs from the loss's own derivative by "
        f"more than the tolerance {place.limit:.1e}: at {where}, it is {error:.1e} off; the examples "
        "are not independent (per_example=True), a declared structure does not hold, or the weights "
        "have drifted from those that the plan measured; leave per_example out, plan anew, or pass "
        "on_inexact='nan' or 'ignore'"
    )


_ERRORS: dict[str, Callable[[Place, float, str, Any], Exception]] = {
    "declaration": _false_declaration,
    "walk": _broken_walk,
    "inverse": _broken_inverse,
    "seed": _broken_seed,
}
