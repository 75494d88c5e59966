"""What a gradient will take, before it runs: `plan`, `frontier`, `memory`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax

from . import _jax, settings
from .errors import BudgetError
from .gradient import Call, Method, check_holomorphic, check_planned
from .planning.frontier import Frontier
from .planning.methods import Moonwalk
from .planning.report import Plan, format_bytes

_DEFAULT = Moonwalk()


def plan(
    fun: Callable[..., Any],
    *args: Any,
    method: Method = _DEFAULT,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    holomorphic: bool = False,
    allow_int: bool = False,
    verify: bool = False,
    **kwargs: Any,
) -> Plan:
    """How `moonwalk.value_and_grad(fun)` differentiates at these arguments.

    Arguments may be `jax.ShapeDtypeStruct`s. Where they are concrete, gains that a trace cannot bound
    are measured on them; handed to `method=`, the plan carries them into `jit`.

    **Arguments:**

    - `method`: `Moonwalk`, `PureForward`, `Checkpoint` or `Reversible`, or a plan, for one like it (with
        `verify`, for that very plan).
    - `verify`: compile the gradient for arguments of these types, so that the plan shows compiled bytes
        (`Plan.compiled_bytes`) beside predicted ones. With `Moonwalk(budget=...)`, plans are compiled
        from the fastest that fits by prediction to the smallest, until one fits as compiled.

    **Example:**

    >>> import jax.numpy as jnp, moonwalk as mw
    >>> loss = lambda w, x: jnp.sum(jnp.abs(x @ mw.declare(w, "orthogonal")))
    >>> mw.plan(loss, jnp.eye(2), jnp.ones((4, 2))).walks
    False
    """
    settings.flag("plan", "verify", verify)
    given = method
    if isinstance(method, Plan):
        method = method.method
    planned: Any = check_planned("plan", method)
    check_holomorphic("plan", planned, holomorphic)
    call = Call("plan", fun, argnums, has_aux, args, kwargs, holomorphic, allow_int)
    if verify and isinstance(given, Plan):
        return _verified(call, given)
    if not verify:
        return call.plan(planned, anew=True)[1]
    if not isinstance(planned, Moonwalk) or planned.budget is None:
        return _verified(call, call.plan(planned, anew=True)[1])
    return _within_as_compiled(call, planned)


def frontier(
    fun: Callable[..., Any],
    *args: Any,
    method: Method = _DEFAULT,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    holomorphic: bool = False,
    allow_int: bool = False,
    **kwargs: Any,
) -> Frontier:
    """The plans for `fun` at these arguments, from least memory to least time.

    `print` shows them as a table, `.plot()` draws them, and each may be passed as `method=`. Arguments
    are those of `moonwalk.plan`; with `Moonwalk(budget=...)`, only plans that fit are returned.

    **Example:**

    >>> import jax.numpy as jnp, moonwalk as mw
    >>> loss = lambda w, x: jnp.sum(jnp.tanh(jnp.tanh(x @ w) @ w))
    >>> found = mw.frontier(loss, jnp.eye(64), jnp.ones((4096, 64)))
    >>> found[0].total_bytes <= found[-1].total_bytes, found[0].seconds >= found[-1].seconds
    (True, True)
    """
    if not isinstance(method, Moonwalk):
        check_planned("frontier", method)
        raise ValueError(
            f"frontier: {type(method).__name__} has one plan; pass method=moonwalk.Moonwalk(...), or "
            "call moonwalk.plan"
        )
    check_holomorphic("frontier", method, holomorphic)
    call = Call("frontier", fun, argnums, has_aux, args, kwargs, holomorphic, allow_int)
    return Frontier(tuple(call.frontier(method)))


@dataclass(frozen=True)
class Memory:
    """Bytes of a compiled program."""

    temporaries: int
    arguments: int
    results: int
    shared: int = 0  # results that are written over arguments (donated ones)

    @property
    def total(self) -> int:
        """All that the program needs."""
        return self.temporaries + self.arguments + self.results - self.shared

    def __str__(self) -> str:
        return (
            f"{format_bytes(self.total)}: temporaries {format_bytes(self.temporaries)}, arguments "
            f"{format_bytes(self.arguments)}, results {format_bytes(self.results)}"
            + (f", of them {format_bytes(self.shared)} over arguments" if self.shared else "")
        )


def memory(fun: Callable[..., Any], *args: Any, **kwargs: Any) -> Memory:
    """What `fun`, compiled for these arguments, takes: temporaries, arguments and results.

    Nothing is run, and arguments may be `jax.ShapeDtypeStruct`s. A function that `jax.jit` returned is
    compiled with its own settings, such as donated arguments; of others, what is no array (a Python
    number, a function) is part of the program.

    **Example:**

    >>> import jax, jax.numpy as jnp, moonwalk as mw
    >>> print(mw.memory(lambda x: x + 1, jax.ShapeDtypeStruct((1024,), jnp.float32)))
    8.0 KiB: temporaries 0 B, arguments 4.0 KiB, results 4.0 KiB
    """
    if hasattr(fun, "lower"):
        return _memory(_jax.compiled(fun, *args, **kwargs))
    leaves, tree = jax.tree.flatten((args, kwargs))
    is_array = [hasattr(leaf, "dtype") and hasattr(leaf, "shape") for leaf in leaves]
    arrays = [leaf for leaf, found in zip(leaves, is_array, strict=True) if found]

    def run(*arrays: Any) -> Any:
        given = iter(arrays)
        values = [next(given) if a else leaf for leaf, a in zip(leaves, is_array, strict=True)]
        args, kwargs = jax.tree.unflatten(tree, values)
        return fun(*args, **kwargs)

    types = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=_jax.sharding(a)) for a in arrays]
    return _memory(_jax.compiled(jax.jit(run), *types))


def _memory(program: Any) -> Memory:
    found = program.memory_analysis()
    return Memory(
        found.temp_size_in_bytes,
        found.argument_size_in_bytes,
        found.output_size_in_bytes,
        found.alias_size_in_bytes,
    )


def _verified(call: Call, made: Plan) -> Plan:
    return replace(made, compiled_bytes=_memory(call.compile(made)).temporaries)


_MORE = 4  # plans above the budget by prediction that are compiled if none below it fits


def _within_as_compiled(call: Call, method: Moonwalk) -> Plan:
    """The fastest plan that fits both by prediction and as compiled, or else as compiled alone."""
    every = call.frontier(method, fitting=False)
    first = every[0]
    if first.budget_bytes is not None and first.argument_bytes + first.result_bytes > first.budget_bytes:
        call.frontier(method)  # raises
    fitting = [p for p in every if p.budget_bytes is None or p.total_bytes <= p.budget_bytes]
    tried: list[Plan] = []
    for predicted in (*reversed(fitting), *every[len(fitting) :][:_MORE]):
        made = _verified(call, predicted)
        if made.budget_bytes is None or made.total_bytes <= made.budget_bytes:
            return made
        tried.append(made)
    if not fitting:
        call.frontier(method)  # raises, and says what the least is
    least = min(tried, key=lambda p: p.total_bytes)
    plans = "1 plan fits" if len(fitting) == 1 else f"{len(fitting)} plans fit"
    raise BudgetError(
        f"Moonwalk(budget={method.budget!r}): {plans} by prediction, but as compiled the smallest of "
        f"{len(tried)} plans takes {format_bytes(least.total_bytes)} (temporaries "
        f"{format_bytes(least.compiled_bytes or 0)}, predicted "
        f"{format_bytes(least.peak_bytes // least.parts)}); raise the budget to that"
    )
