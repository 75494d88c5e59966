"""Alarms: eagerly they raise, under a trace they can be asked to."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import equinox as eqx
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
            values = eqx.error_if(values, jnp.any(alarm.bad), alarm.message + alarm.place)
    return values


def _where(bad: np.ndarray) -> str:
    """The first few places where an alarm rings."""
    if bad.ndim == 0:
        return ""
    places = np.argwhere(bad)
    shown = ", ".join(str(tuple(int(i) for i in p)) for p in places[:4])
    more = f" and {len(places) - 4} more" if len(places) > 4 else ""
    return f" (at {shown}{more})"
