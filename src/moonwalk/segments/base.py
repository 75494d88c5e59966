"""A way to differentiate consecutive nodes: as data, and bound to a network.

A plan is a tuple of *segments*: consecutive nodes, each segment differentiated in its own way. A
`Segment` is data: it is compared, printed, written to a file. Bound to a network it becomes an
`Executor`, which says what it takes, and runs. The engine, the report and fused updates know segments by
these two interfaces alone, and the search for a plan by what a `Proposer` offers, so a new way is one
file (see CONTRIBUTING).
"""

from __future__ import annotations

import abc
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from .. import _jax
from ..errors import PlanMismatchError
from ..execute.barriers import Env
from ..execute.certificate import Measured, Place
from ..execute.sinks import GradientSink
from ..network.cutting import Network, Node
from ..rules.registry import Alarm
from .codec import in_plans
from .costs import NodeCost


@in_plans
@dataclass(frozen=True)
class Row:
    """One block of a plan, as a user reads it."""

    block: str
    source: str  # the user's line
    mode: str  # walk, fragment, anchor, fork, store, recompute, invert
    bytes: int  # kept until the block is done with
    gain: float | None  # of a block that is walked through
    why: str
    m_x: int  # bytes that ∂y/∂x needs
    m_theta: int  # bytes that ∂y/∂θ needs besides
    depth: int = 0  # inside a scan
    times: int = 1  # layers of that scan
    way_out: str = ""  # of a block without a vijp: what would give it one
    scope: str = ""  # the user's named scopes around it (`jax.named_scope`, modules of Flax)
    calls: str = ""  # the user's functions around it, as far as the trace knows them
    segment: int = 0  # the plan's segment that it belongs to

    @classmethod
    def of(cls, node: Node, *about: Any, way_out: str = "") -> Row:
        """The row of a node; `about`: the fields from `mode` on."""
        places = [] if node.is_fork or not node.block.eqns else [node.block.eqns[-1]]
        scope, calls = (
            "".join(map(find, places)) for find in (_jax.named_scopes, _jax.calling_functions)
        )
        return cls(node.describe(), line_of(node), *about, way_out=way_out, scope=scope, calls=calls)


class Facts(NamedTuple):
    """What a segment does, in numbers."""

    walked: int = 0  # blocks whose output's cotangent is recovered
    anchors: int = 0
    fragments: int = 0
    rerun: int = 0  # walks, and parts of loops, whose Phase I is run again
    growth: float = 1.0  # how much relative error is predicted to grow, at most
    measured: bool = False  # whether it rests on measured gains
    checked: bool = False  # whether it carries a certificate
    walks: bool = False
    jvps: int = 0  # that a seed takes
    inverted: int = 0  # blocks whose input is reconstructed from their output
    recovers: bool = (
        False  # whether a walk recovers a cotangent: between anchors, recomputing does as well
    )


@dataclass(frozen=True)
class Segment(abc.ABC):
    """Nodes [start, stop) of a network, and how they are differentiated."""

    start: int
    stop: int

    @abc.abstractmethod
    def bind(self, network: Network) -> Executor:
        """What runs it on a network."""

    def cut(self, start: int) -> Segment | None:
        """The same for its nodes from a later one on; None if it cannot be divided."""
        del start
        return None


class Priced(abc.ABC):
    """Bytes that nodes [start, stop) take over time: a segment's, or a lower bound of them.

    `timeline`: the `planning.timeline.Timeline` that knows the nodes around it.
    """

    start: int
    stop: int

    @abc.abstractmethod
    def held(self, timeline: Any) -> int:
        """Bytes kept from the forward pass until the segment's turn in the reverse pass."""

    def held_states(self) -> Iterable[Any]:
        """Activations among what is held, which other segments may hold, too: they are there once."""
        return ()

    @abc.abstractmethod
    def forward_peak(self, timeline: Any) -> int:
        """The most bytes alive at once in the forward pass, with what the segment keeps."""

    @abc.abstractmethod
    def backward_peak(self, timeline: Any) -> int:
        """The same in the reverse pass."""

    def seconds(self, timeline: Any) -> float:
        """What both passes over the nodes take; at least a forward pass and a pullback of each."""
        nodes = timeline.seconds[self.start : self.stop]
        return sum(n.forward + n.backward for n in nodes)


class Executor(Priced):
    """A segment, bound to a network."""

    network: Network

    @property
    @abc.abstractmethod
    def data(self) -> Segment:
        """The segment that it runs."""

    # -- running -----------------------------------------------------------------------------------
    @abc.abstractmethod
    def forward(self, fixed: Env, x: Env, results: frozenset[Any], *, again: bool = False) -> Any:
        """Run the nodes: read and write `x`, dropping what is dead; return what `backward` needs.

        `fixed`: weights, data and what follows from either alone. `results`: variables that must stay in
        `x`. `again`: the nodes have run before, so that nothing prints or calls back.
        """

    @abc.abstractmethod
    def backward(self, fixed: Env, saved: Any, h: Env, out: GradientSink) -> list[Measured]:
        """From the outputs' cotangents in `h` to the inputs'; gradients go to `out`.

        Returns the errors measured at `places`.
        """

    @property
    def places(self) -> list[Place]:
        """Where errors are measured: nowhere, in what JAX differentiates itself."""
        return []

    def hold_to(self, limit: float) -> None:
        """Let the certificate be at most so large."""
        del limit  # what JAX differentiates itself carries none

    # -- what others ask -------------------------------------------------------------------------------
    @abc.abstractmethod
    def rows(self, costs: Sequence[NodeCost], *, chosen: bool) -> list[Row]:
        """The nodes as a report shows them. `costs`: of all the network's nodes. `chosen`: whether there
        was a choice between this and walking."""

    @property
    def facts(self) -> Facts:
        """What it does, in numbers."""
        return Facts()

    @property
    def rerun(self) -> int:
        """How many segments are run again, the innermost of nested ones."""
        return 0

    @property
    def blocks_walked(self) -> int:
        """How often rounding enters a cotangent that is walked on, layers of loops counted."""
        return 0

    @property
    def loops(self) -> Sequence[Any]:
        """Walked loops, whose stacked weights may be updated layer by layer."""
        return ()

    def weight_alarms(self, table: Any) -> Iterable[Alarm]:
        """What the weights' values say against it."""
        return ()


class Offer(NamedTuple):
    """Nodes [start, stop) as a segment of some kind: what the search for a plan weighs."""

    start: int
    stop: int
    kept: float  # bytes from the forward pass to the reverse pass
    transient: float = 0  # bytes besides, while it is differentiated
    seconds: float = 0.0  # that it takes beyond a forward pass and a pullback of each node
    setting: Any = None  # for `Proposer.realise`
    at_once: float = 0  # of what it keeps, bytes that are sure to be alive together: no peak is lower


class Proposer(abc.ABC):
    """How the search for a plan learns of a kind of segment.

    The search goes over the nodes with a limit on what a segment may take while it is differentiated,
    and with a number of bytes that a second is worth, once for each of several pairs of these. It asks
    every proposer for segments that end at each node.
    """

    joins = False  # whether consecutive offers are one segment

    @abc.abstractmethod
    def limits(self) -> set[int]:
        """Limits worth trying."""

    @abc.abstractmethod
    def begin(self, limit: int, worth: float) -> None:
        """Go over the nodes once more, with this limit; a second is worth so many bytes."""

    @abc.abstractmethod
    def ending_at(self, stop: int, best: Sequence[float]) -> Iterable[Offer]:
        """Segments that end before node `stop`; asked for 1, 2, … in turn.

        `best`: for the nodes before each place, up to there, the least bytes that they keep, with what
        the seconds that they take are worth.
        """

    @abc.abstractmethod
    def realise(self, offer: Offer) -> Realised:
        """What runs an offer."""


class Realised(NamedTuple):
    """Segments that run an offer, with their true bytes."""

    executors: Sequence[Any]  # `Executor`s; of a proposer of lower bounds, `Priced`
    kept: float
    transient: float = 0


def check_in_a_row(segments: Sequence[Segment], start: int, stop: int) -> None:
    """PlanMismatchError unless the segments are all nodes [start, stop), each once, in their order.

    Of no nodes there may be an empty segment.
    """
    place = start
    for segment in segments:
        if not isinstance(segment, Segment):
            raise PlanMismatchError(
                f"method=: {segment!r} among the plan's segments is no segment. Make the plan anew with "
                "moonwalk.plan(fun, *args), or mend it."
            )
        if segment.start != place or segment.stop < place + (start < stop):
            break
        place = segment.stop
    else:
        if place == stop:
            return
    found = ", ".join(f"[{s.start}, {s.stop})" for s in segments) or "none"
    raise PlanMismatchError(
        f"method=: the plan's segments must be the nodes [{start}, {stop}), one after another, but they "
        f"are {found}. Make the plan anew with moonwalk.plan(fun, *args), or mend it."
    )


def line_of(node: Node) -> str:
    """The user's line that a node comes from."""
    return "" if node.is_fork or not node.block.eqns else _jax.source_line(node.block.eqns[-1])


def format_bytes(size: float) -> str:
    """'16.0 MiB'."""
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"
