"""Alarms: raised eagerly, and on request under a trace."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .. import _jax
from .registry import Alarm


def enforce(values: Any, alarms: Iterable[Alarm], check: bool | None) -> Any:
    """Return `values`, or raise if an alarm rings.

    `check`: True checks always, under a trace when the program runs; None checks what is concrete now;
    False never checks.
    """
    if check is False:
        return values
    for alarm in alarms:
        bad = _jax.concrete(alarm.bad)
        if bad is not None:
            if bad.any():
                raise alarm.error(alarm.message + _where(bad) + alarm.place)
        elif check:
            report = functools.partial(alarm.error, alarm.message + alarm.place)
            values = raise_when_run(values, jnp.any(alarm.bad), report)
    return values


def raise_when_run(values: Any, bad: Any, report: Callable[..., Exception], *details: Any) -> Any:
    """`values` with a check attached: the program raises an error if `bad` is true on any device.

    `report`: makes the error from `details`, arrays that are the same on every device.
    """
    bad = _jax.largest_anywhere(jnp.asarray(bad, jnp.float32)) > 0
    fine = _guard_p.bind(jnp.ones((), jnp.float32), bad, *details, report=report) > 0
    return jax.tree.map(lambda a: jnp.where(fine, a, jnp.nan).astype(a.dtype), values)


# --- the primitive: one number, which is an error, or NaN, where something is bad --------------------

_guard_p = _jax.Primitive("moonwalk_guard")
_guard_p.def_impl(lambda *args, **params: jax.jit(functools.partial(_guard_p.bind, **params))(*args))
_guard_p.def_abstract_eval(lambda one, *_, **__: one)
_jax.ad.primitive_jvps[_guard_p] = lambda primals, tangents, **params: (
    _guard_p.bind(*primals, **params),
    tangents[0],
)


def _batch_guard(args: Sequence[Any], dims: Sequence[Any], **params: Any) -> Any:
    """For a batch one error is enough: that of the first bad entry."""
    _, bad, *details = args
    first = jnp.argmax(jnp.broadcast_to(bad, jnp.shape(bad) or (1,)))
    details = [
        a if d is _jax.not_mapped else lax.dynamic_index_in_dim(a, first, d, keepdims=False)
        for a, d in zip(details, dims[2:], strict=True)
    ]
    one = jnp.ones((), jnp.float32)
    return _guard_p.bind(one, jnp.any(bad), *details, **params), _jax.not_mapped


_jax.batching.primitive_batchers[_guard_p] = _batch_guard


def _lower_guard(context: Any, one: Any, bad: Any, *details: Any, report: Any) -> Any:
    """An error raised on one device alone would leave the others waiting for ever."""

    def fail(*details: Any) -> Any:
        # JAX wraps what a callback raises in its own error, below a long traceback. So the message is
        # written to stderr first.
        error = report(*map(np.asarray, details))
        print(f"moonwalk.{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        raise error

    def raising(one: Any, bad: Any, *details: Any) -> Any:
        number = jax.ShapeDtypeStruct((), jnp.float32)
        return lax.cond(bad, lambda: jax.pure_callback(fail, number, *details), lambda: one)

    def silent(one: Any, bad: Any, *details: Any) -> Any:
        del details
        return jnp.where(bad, jnp.nan, one)

    run = _jax.on_every_device(context, raising) or silent
    return _jax.mlir.lower_fun(run, multiple_results=False)(context, one, bad, *details)


_jax.mlir.register_lowering(_guard_p, _lower_guard)
_jax.sees_devices(_guard_p)


def _where(bad: np.ndarray) -> str:
    """The first few indices where an alarm rings."""
    if bad.ndim == 0:
        return ""
    places = np.argwhere(bad)
    shown = ", ".join(str(tuple(int(i) for i in p)) for p in places[:4])
    more = f" and {len(places) - 4} more" if len(places) > 4 else ""
    return f" (at {shown}{more})"
