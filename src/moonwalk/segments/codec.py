"""Plans as JSON, and back.

Everything in a plan is a frozen dataclass of numbers, strings, tuples and other such classes. A class
that may stand in a plan says so with `@in_plans`; its fields are then written under its name, those that
have their default value left out.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
from jax import lax

_CLASSES: dict[str, type] = {}
_ENUMS = {"Precision": lax.Precision, "DotAlgorithmPreset": lax.DotAlgorithmPreset}

Class = TypeVar("Class", bound=type)


def in_plans(cls: Class) -> Class:
    """Class decorator: objects of this frozen dataclass may stand in plans."""
    assert _CLASSES.setdefault(cls.__name__, cls) is cls, (
        f"two classes of plans are called {cls.__name__}"
    )
    return cls


def encode(value: Any) -> Any:
    """As lists, dictionaries, strings and finite numbers."""
    if type(value).__name__ in _CLASSES:
        fields = {
            f.name: encode(getattr(value, f.name))
            for f in dataclasses.fields(value)
            if f.init and not _is_default(f, getattr(value, f.name))
        }
        return {"is": type(value).__name__, **fields}
    if isinstance(value, tuple | list):
        return [encode(v) for v in value]
    if isinstance(value, np.generic):
        return encode(value.item())
    if isinstance(value, lax.Precision | lax.DotAlgorithmPreset):
        return {"is": type(value).__name__, "name": value.name}
    if isinstance(value, float) and not math.isfinite(value):
        return {"is": "float", "name": str(value)}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"a plan cannot hold {value!r}: decorate {type(value).__name__} with in_plans")


def decode(value: Any) -> Any:
    """What `encode` was given."""
    if isinstance(value, list):
        return tuple(decode(v) for v in value)
    if not isinstance(value, dict):
        return value
    fields = dict(value)
    name = fields.pop("is", None)
    if name == "float":
        return float(fields["name"])
    if name in _ENUMS:
        return _ENUMS[name][fields["name"]]
    cls: Callable[..., Any] | None = _CLASSES.get(name) if isinstance(name, str) else None
    if cls is None:
        raise ValueError(
            f"this is no plan that this version of moonwalk can read: it holds {name!r}; make the plan "
            "anew with moonwalk.plan(fun, *args)"
        )
    try:
        return cls(**{k: decode(v) for k, v in fields.items()})
    except TypeError as error:
        raise ValueError(
            f"this is no plan that this version of moonwalk can read: {error}; make the plan anew with "
            "moonwalk.plan(fun, *args)"
        ) from None


def _is_default(field: Any, value: Any) -> bool:
    if field.default is not dataclasses.MISSING:
        return type(value) is type(field.default) and value == field.default
    made = field.default_factory
    return made is not dataclasses.MISSING and value == made()
