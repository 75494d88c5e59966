"""Where Phase III of a walk takes the cotangent of a node's outputs from, as data.

One source per node. They hold places (the number of an input, of a copy) and numbers, never variables
or arrays, so that a plan can be written to a file.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ..rules.fragments import Ask, Fragment
from ..rules.registry import Gain
from .codec import in_plans

for _held in (Ask, Fragment, Gain):
    in_plans(_held)

EXACT = Gain(1.0, mixes=False)


@dataclass(frozen=True)
class Source:
    """`reason`: in words, for a report."""

    reason: str = ""


@in_plans
@dataclass(frozen=True)
class Vijp(Source):
    """By the node's vijp, from the cotangents of some of its inputs."""

    through: tuple[int, ...] = ()
    gain: Gain = EXACT
    measured: bool = False  # whether the gain was measured on weights, which drift


@in_plans
@dataclass(frozen=True)
class Restored(Source):
    """From a fragment that Phase II keeps, and the cotangents of some inputs."""

    through: tuple[int, ...] = ()
    gain: Gain = EXACT
    measured: bool = False
    label: str = ""  # which of the fragments that a rule offers
    ask: Ask = field(default_factory=Ask)  # what the rule was asked for


@in_plans
@dataclass(frozen=True)
class Anchor(Source):
    """Kept whole in Phase II."""


@in_plans
@dataclass(frozen=True)
class Given(Source):
    """Known from outside: a stacked output of a scan."""


@in_plans
@dataclass(frozen=True)
class Unneeded(Source):
    """No weight needs it."""


@in_plans
@dataclass(frozen=True)
class Copies(Source):
    """Of a fork's copies some are kept; the cotangent of one is what those leave of the whole."""

    kept: tuple[int, ...] = ()
    given: tuple[int, ...] = ()
    difference: int | None = None


@in_plans
@dataclass(frozen=True)
class Layers(Source):
    """Of a scan: layer by layer, each as its body's sources say; an anchor every `period` layers."""

    body: tuple[Source, ...] = ()
    period: int | None = None
    gain: Gain = EXACT
    growth: float = 1.0  # of error inside a layer, at most
    hoisted: bool = False  # what is made of the weights is made for all layers before the loop
    needed: bool = True  # whether a weight needs its cotangents
