"""How to differentiate: small frozen objects for `method=`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jax import lax

from .fragments import Fragment

CHECKPOINT = ("auto", "sqrt", "block")
ON_INEXACT = ("raise", "nan", "ignore")


@dataclass(frozen=True)
class Moonwalk:
    """The paper's algorithm: walk what can be walked, keep or recompute the rest.

    **Arguments:**

    - `tolerance`: the relative error of a cotangent that a plan may predict before it places an anchor.
        None: 1e-11 in float64, 1e-4 in float32, 1e-2 in bfloat16 and float16. `math.inf`: no anchors for
        accuracy's sake, and whatever has a rule may be walked.
    - `anchor_every`: an anchor every so many layers, whatever the gains are.
    - `fragment`: how convolutions of stride one keep part of a cotangent: `moonwalk.Fragment(...)`,
        taken as it is, with a certificate. None: the largest staggered span that the tolerance allows,
        as far as that is known.
    - `checkpoint`: walks in segments whose Phase I is run again from the state at their start: less
        memory for one more forward pass. None: none; "auto": as many as keep least; a number of
        segments; "sqrt": as many as the root of the depth; "block": one for every layer.
    - `walk_precision`: the precision of products in the cotangents' chain. None: the ambient one where
        the walk loses nothing (in TF32: little, so that it stays within 1e-2), true float32 elsewhere.
    - `inputs`: differentiated arguments (by number) that are network inputs, not weights.
    - `on_inexact`: what happens when a walk whose error no trace can bound (`Plan.checked`), or any walk
        with `certify=True`, turns out worse than the tolerance: "raise", "nan" (the gradients) or
        "ignore" (and then only `certify=True` still looks).
    """

    tolerance: float | None = None
    anchor_every: int | None = None
    fragment: Fragment | None = None
    checkpoint: int | str | None = None
    walk_precision: Any = None
    inputs: tuple[int, ...] = ()
    on_inexact: str = "raise"

    def __post_init__(self) -> None:
        if self.anchor_every is not None and (
            not isinstance(self.anchor_every, int) or self.anchor_every < 1
        ):
            raise ValueError(
                f"Moonwalk: anchor_every counts layers and must be at least 1, got {self.anchor_every!r}"
            )
        if self.fragment is not None and not isinstance(self.fragment, Fragment):
            raise ValueError(
                "Moonwalk: fragment takes moonwalk.Fragment(span=..., stagger=...) or None, got "
                f"{self.fragment!r}"
            )
        counts = isinstance(self.checkpoint, int) and not isinstance(self.checkpoint, bool)
        if self.checkpoint is not None and not (
            self.checkpoint >= 1 if counts else self.checkpoint in CHECKPOINT  # type: ignore[operator]
        ):
            raise ValueError(
                "Moonwalk: checkpoint must be None, a number of segments, or one of "
                f"{', '.join(map(repr, CHECKPOINT))}, got {self.checkpoint!r}"
            )
        _check(self)


@dataclass(frozen=True)
class PureForward:
    """The paper's forward-only variant: a seed by jvp alone, then the sweep; memory constant in depth.

    Needs a network that can be walked from its first state to its last weight without anchors, and one
    jvp for every number of that first state.

    **Arguments:**

    - `chunk`: how many jvps run side by side.
    - `per_example`: the loss is a sum or a mean over independent examples, which lie along axis 0 of the
        first state and of what the loss sums: one jvp per feature then serves all examples. Examples
        that are not independent (batch normalisation) are noticed by the check at the sweep's end.
    - `tolerance`, `walk_precision`, `inputs`, `on_inexact`: as for `Moonwalk`.
    """

    chunk: int = 16
    per_example: bool = False
    tolerance: float | None = None
    walk_precision: Any = None
    inputs: tuple[int, ...] = ()
    on_inexact: str = "raise"

    def __post_init__(self) -> None:
        if not isinstance(self.chunk, int) or self.chunk < 1:
            raise ValueError(
                f"PureForward: chunk counts jvps side by side, at least 1, got {self.chunk!r}"
            )
        _check(self)


def _check(method: Any) -> None:
    """Settings that all methods have; numbers and names become what they stand for."""
    name = type(method).__name__
    if method.tolerance is not None and not method.tolerance > 0:
        raise ValueError(
            f"{name}: tolerance must be positive (math.inf for no anchors), got {method.tolerance}"
        )
    if method.on_inexact not in ON_INEXACT:
        raise ValueError(
            f"{name}: on_inexact must be one of {', '.join(map(repr, ON_INEXACT))}, "
            f"got {method.on_inexact!r}"
        )
    inputs = (method.inputs,) if isinstance(method.inputs, int) else tuple(method.inputs)
    object.__setattr__(method, "inputs", inputs)
    precision = method.walk_precision
    if precision is not None and not isinstance(precision, lax.Precision | lax.DotAlgorithmPreset):
        try:
            object.__setattr__(method, "walk_precision", lax.Precision(precision))
        except ValueError:
            raise ValueError(
                f"{name}: walk_precision must be None, a jax.lax.Precision (or its name: "
                f"'high', 'highest') or a jax.lax.DotAlgorithmPreset, got {precision!r}"
            ) from None
