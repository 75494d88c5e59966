"""How to differentiate: small frozen objects for `method=`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jax import lax

ON_INEXACT = ("raise", "nan", "ignore")


@dataclass(frozen=True)
class Moonwalk:
    """The paper's algorithm: walk what can be walked, keep or recompute the rest.

    **Arguments:**

    - `tolerance`: the relative error of a cotangent that a plan may predict before it places an anchor.
        None: 1e-11 in float64, 1e-4 in float32, 1e-2 in bfloat16 and float16. `math.inf`: no anchors for
        accuracy's sake, and whatever has a rule may be walked.
    - `anchor_every`: an anchor every so many layers, whatever the gains are.
    - `walk_precision`: the precision of products in the cotangents' chain. None: the ambient one where
        the walk loses nothing (gain 1), true float32 elsewhere.
    - `inputs`: differentiated arguments (by number) that are network inputs, not weights.
    - `on_inexact`: what happens when a walk whose error no trace can bound (`Plan.checked`), or any walk
        with `certify=True`, turns out worse than the tolerance: "raise", "nan" (the gradients) or
        "ignore".
    """

    tolerance: float | None = None
    anchor_every: int | None = None
    walk_precision: Any = None
    inputs: tuple[int, ...] = ()
    on_inexact: str = "raise"

    def __post_init__(self) -> None:
        if self.tolerance is not None and not self.tolerance > 0:
            raise ValueError(
                f"Moonwalk: tolerance must be positive (math.inf for no anchors), got {self.tolerance}"
            )
        if self.anchor_every is not None and (
            not isinstance(self.anchor_every, int) or self.anchor_every < 1
        ):
            raise ValueError(
                f"Moonwalk: anchor_every counts layers and must be at least 1, got {self.anchor_every!r}"
            )
        if self.on_inexact not in ON_INEXACT:
            raise ValueError(
                f"Moonwalk: on_inexact must be one of {', '.join(map(repr, ON_INEXACT))}, "
                f"got {self.on_inexact!r}"
            )
        if isinstance(self.inputs, int):
            object.__setattr__(self, "inputs", (self.inputs,))
        object.__setattr__(self, "inputs", tuple(self.inputs))
        if self.walk_precision is not None and not isinstance(
            self.walk_precision, lax.Precision | lax.DotAlgorithmPreset
        ):
            try:
                object.__setattr__(self, "walk_precision", lax.Precision(self.walk_precision))
            except ValueError:
                raise ValueError(
                    "Moonwalk: walk_precision must be None, a jax.lax.Precision (or its name: "
                    f"'high', 'highest') or a jax.lax.DotAlgorithmPreset, got {self.walk_precision!r}"
                ) from None
