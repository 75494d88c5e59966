"""Alarms: eagerly they raise, under a trace they can be asked to."""

from __future__ import annotations

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
    """`values`, which under a trace cannot be had without an error if `bad` is true on any device.

    The error hangs on one number: on many devices `equinox.error_if` of the values themselves would
    have to make arrays that are sharded, or vary, like them.
    """
    if left := compat.outer_axes():
        raise ValueError(
            "an error at run time needs a callback, which JAX does not have inside jax.shard_map over "
            f"only some axes of a mesh (here {', '.join(map(repr, left))} left out); pass "
            "Moonwalk(on_inexact='nan' or 'ignore') to value_and_grad, leave check=True out of vijp, or "
            "name all axes in jax.shard_map(..., axis_names=...)"
        )
    bad = compat.largest_anywhere(jnp.asarray(bad, jnp.float32)) > 0
    fine = eqx.error_if(jnp.ones((), jnp.float32), bad, message) > 0
    return jax.tree.map(lambda a: jnp.where(fine, a, jnp.nan).astype(a.dtype), values)


def _where(bad: np.ndarray) -> str:
    """The first few places where an alarm rings."""
    if bad.ndim == 0:
        return ""
    places = np.argwhere(bad)
    shown = ", ".join(str(tuple(int(i) for i in p)) for p in places[:4])
    more = f" and {len(places) - 4} more" if len(places) > 4 else ""
    return f" (at {shown}{more})"
