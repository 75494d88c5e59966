"""Plans as JSON, and back.

Everything in a plan is a frozen dataclass of numbers, strings, tuples and other such classes. A class
that may stand in a plan says so with `@in_plans`; its fields are then written under its name, those that
have their default value left out.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import types
import typing
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
        given = {k: decode(v) for k, v in fields.items()}
        for field, value_of in given.items():
            if not _fits(value_of, _hints(cls).get(field, Any)):
                raise TypeError(f"{name}.{field} is {value_of!r:.60}")
        return cls(**given)
    except TypeError as error:
        raise ValueError(
            f"this is no plan that this version of moonwalk can read: {error}; make the plan anew with "
            "moonwalk.plan(fun, *args)"
        ) from None


@functools.cache
def _hints(cls: Any) -> dict[str, Any]:
    """The types of a class's fields; none where an annotation names what only a type checker imports."""
    try:
        return typing.get_type_hints(cls)
    except NameError:
        return {}


def _fits(value: Any, hint: Any) -> bool:
    """Whether a value is of an annotated type, as far as that is plain."""
    origin, inside = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, h) for h in inside)
    if origin is tuple:
        if not isinstance(value, tuple):
            return False
        each = (inside[0],) * len(value) if inside[-1:] == (...,) else inside
        return len(value) == len(each) and all(map(_fits, value, each))
    if hint in (int, float):
        numbers = (int,) if hint is int else (int, float)
        return isinstance(value, numbers) and not isinstance(value, bool)
    return hint is Any or not isinstance(hint, type) or isinstance(value, hint)


def _is_default(field: Any, value: Any) -> bool:
    if field.default is not dataclasses.MISSING:
        return type(value) is type(field.default) and value == field.default
    made = field.default_factory
    return made is not dataclasses.MISSING and value == made()
