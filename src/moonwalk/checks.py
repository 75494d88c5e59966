"""Alarms: eagerly they raise, under a trace they can be asked to."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from . import compat
from .registry import Alarm


def heed(values: Any, alarms: Iterable[Alarm], check: bool | None) -> Any:
    """Return `values`, or raise if an alarm rings.

    `check`: True checks always, under a trace through `equinox.error_if`; None checks what is
    concrete now; False never checks.
    """
    if check is False:
        return values
    for alarm in alarms:
        bad = compat.concrete(alarm.bad)
        if bad is not None:
            if bad.any():
                raise alarm.error(alarm.message + _where(bad) + alarm.place)
        elif check:
            values = raise_when_run(values, jnp.any(alarm.bad), alarm.message + alarm.place)
    return values


def raise_when_run(values: Any, bad: Any, message: str) -> Any:
    """`values`, which under a trace cannot be had without an error if `bad` is true on any device."""
    bad = compat.largest_anywhere(jnp.asarray(bad, jnp.float32)) > 0
    fine = _guard_p.bind(jnp.ones((), jnp.float32), bad, message=message) > 0
    return jax.tree.map(lambda a: jnp.where(fine, a, jnp.nan).astype(a.dtype), values)


# --- the primitive: one number, which is an error, or NaN, where something is bad --------------------

_guard_p = compat.Primitive("moonwalk_guard")
_guard_p.def_impl(lambda *args, **params: jax.jit(functools.partial(_guard_p.bind, **params))(*args))
_guard_p.def_abstract_eval(lambda one, bad, **_: one)
compat.ad.primitive_jvps[_guard_p] = lambda primals, tangents, **params: (
    _guard_p.bind(*primals, **params),
    tangents[0],
)
compat.batching.primitive_batchers[_guard_p] = lambda args, dims, **params: (
    _guard_p.bind(jnp.ones((), jnp.float32), jnp.any(args[1]), **params),  # one of a batch is enough
    compat.not_mapped,
)


def _lower_guard(context: Any, one: Any, bad: Any, *, message: str) -> Any:
    """Raised on one device alone, an error would leave the others waiting for it for ever."""

    def raising(one: Any, bad: Any) -> Any:
        return eqx.error_if(one, bad, message)

    def silent(one: Any, bad: Any) -> Any:
        return jnp.where(bad, jnp.nan, one)

    run = compat.on_every_device(context, raising) or silent
    return compat.mlir.lower_fun(run, multiple_results=False)(context, one, bad)


compat.mlir.register_lowering(_guard_p, _lower_guard)
compat.sees_devices(_guard_p)


def _where(bad: np.ndarray) -> str:
    """The first few places where an alarm rings."""
    if bad.ndim == 0:
        return ""
    places = np.argwhere(bad)
    shown = ", ".join(str(tuple(int(i) for i in p)) for p in places[:4])
    more = f" and {len(places) - 4} more" if len(places) > 4 else ""
    return f" (at {shown}{more})"
