"""Blocks that lose part of their output's cotangent: keep that part, restore the rest.

A block whose Jacobian J has a cokernel loses h' there: h = h' J says nothing of it. A *fragment* is a
linear part F(h') that together with h determines h':

    Phase II     keep F(h')
    Phase III    h' = restore(F(h'), h)

The best fragment is h' in coordinates of the cokernel and nothing else (a normalisation: one or two
numbers per group; an expanding layer: n'-n). A fragment may hold more, to make restoring cheap or
stable: a stride-1 convolution keeps the first k-1 slices of every span.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from .. import settings
from ..trace.graph import Block
from . import registry
from .registry import Rule, State, Verdict

# How far grids of spans have moved along each axis: numbers, or traced in a scan.
Place = tuple[Any, ...]


@dataclass(frozen=True)
class Fragment:
    """How convolutions of stride one keep fragments: `moonwalk.Moonwalk(fragment=...)`.

    **Arguments:**

    - `span`: how many positions along each axis one fragment serves (the paper's block size B). The
        first k-1 slices of every span are kept. Error grows inside a span, so longer spans keep less and
        are less exact.
    - `stagger`: shift the grid of spans from layer to layer, so that errors meet kept slices sooner.
        False: the paper's scheme, the same grid in every layer.
    """

    span: int = 8
    stagger: bool = True

    def __post_init__(self) -> None:
        what = "counts the positions that one fragment serves"
        object.__setattr__(self, "span", settings.count("Fragment", "span", self.span, 2, what))
        object.__setattr__(self, "stagger", settings.flag("Fragment", "stagger", self.stagger))


@dataclass(frozen=True)
class Ask:
    """What a plan requires of a block's fragments."""

    requested: Fragment | None = None  # the user's choice; None: any that is exact enough
    slope: float = 1.0  # derivatives between such blocks lie in [slope, 1]


class FragmentRule(Rule):
    """A rule that needs a fragment. An instance belongs to one block, and is compared by value."""

    reads_factors: ClassVar[bool] = False  # whether `fragment` needs what `prepare` makes
    blind: ClassVar[bool] = True  # whether tolerance=inf may use it although nothing bounds its gain
    asked: bool = False  # whether the user asked for exactly this fragment

    @property
    def has_difference(self) -> bool:
        """Whether `restore` takes the difference of two cotangents, which may cancel."""
        return False

    def verdict(self, block: Block) -> Verdict:
        return Verdict(True, self.describe(block))

    @property
    def label(self) -> str:
        """What distinguishes it from other ways to serve the same block."""
        return self.name

    def describe(self, block: Block) -> str:
        """What is lost, in words."""
        raise NotImplementedError

    def moves(self, block: Block) -> tuple[int, ...]:
        """How far the next block's grid should be shifted against this one's, along each axis."""
        del block
        return ()

    def fragment(self, block: Block, factors: Any, kept: Any, h: State, place: Place) -> Any:
        """Phase II: what is kept of the outputs' cotangent."""
        raise NotImplementedError

    def restore(
        self, block: Block, factors: Any, kept: Any, fragment: Any, h: State, place: Place
    ) -> State:
        """Phase III: the outputs' cotangent, from that and the inputs' cotangent."""
        raise NotImplementedError


def candidates(block: Block, ask: Ask) -> Iterator[FragmentRule]:
    """Fragment rules that could serve a block, those that keep least first."""
    for rule in registry.rules_for(block):
        yield from rule.fragmented(block, ask)
