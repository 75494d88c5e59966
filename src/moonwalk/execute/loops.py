"""The one loop: every pass over the layers of a scan.

The three phases of a walk, the forward pass that JAX differentiates, tiles that run again and the way
back by inverses are all a `LayerLoop.visit`. They differ in what a layer does, in which direction they
go, and in their *levels*: what happens every so many layers. A level cuts the layers into pieces of
equal size and runs each piece its own way:

    anchors          Phase II hands out the cotangent where a piece starts; Phase III starts from it
    certificates     cotangents are sketched, compared and rescaled where a piece ends
    tiles            a forward pass keeps the carry at the start of a piece; the reverse pass runs the
                     piece again from there
    `jax.checkpoint` the same, by JAX itself

Levels nest, the coarsest first. Layers that a size does not divide are a shorter piece at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .. import _jax
from ..network.cutting import Node
from ..trace import graph
from .barriers import barrier

Visit = Callable[[Any, Any], tuple[Any, Any]]  # (state, kept) -> (state, result)


class Piece(NamedTuple):
    """Consecutive layers: those at places `first` … `first + count − 1`."""

    first: Any
    count: int
    looped: bool = False  # whether a loop runs over this piece and others
    alone: bool = False  # whether the level has no other piece


class InPieces(NamedTuple):
    """Results of a visit in pieces: those of the whole pieces, stacked, and that of the shorter one."""

    whole: Any
    rest: Any = None


@dataclass(frozen=True)
class Level:
    """Pieces of `size` layers.

    `around(run, state, kept, piece)` runs a piece and returns its state and result, either by calling
    `run(state, kept)`, which visits the piece's layers, or in its own way. `barred`: in a backward pass
    a barrier makes the whole pieces wait for the shorter one, which runs before them.
    """

    size: int
    around: Callable[[Visit, Any, Any, Piece], tuple[Any, Any]]
    barred: bool = False


@dataclass(frozen=True)
class LayerLoop:
    """The loop of a scan: how many layers it has, and from which end it runs."""

    length: int
    reverse: bool

    def visit(
        self,
        layer: Callable[[Any, Any, Any], tuple[Any, Any]] | None,
        state: Any,
        kept: Any = None,
        levels: Sequence[Level] = (),
        *,
        count: int | None = None,
        backward: bool = False,
        cut: Callable[[Any, int, int], InPieces] | None = None,
        join: Callable[[Any, Any], Any] = InPieces,
    ) -> tuple[Any, Any]:
        """Call `layer(state, place, kept) -> (state, result)` layer by layer: (last state, results).

        **Arguments:**

        - `layer`: None if the last of `levels` runs its pieces itself.
        - `kept`: what the layers, or the pieces of `levels`, are given. By default this is the result of
            another visit with the same levels, and is already cut.
        - `count`: visit only so many layers. Places are counted from the first of them.
        - `backward`: against the order of the scan.
        - `cut(kept, count, size)`: how to cut `kept` if it is not; `self.cut` cuts arrays stacked by
            layer.
        - `join(whole, rest)`: how to join the results of several pieces; `self.joined` stacks them by
            layer.
        """
        passing = _Pass(self, layer, backward, cut, join)
        return passing.over(state, kept, 0, self.length if count is None else count, levels)

    def scan(self, step: Any, carry: Any, xs: Any, *, backward: bool, length: int) -> Any:
        """A loop over `length` places in the scan's order (or backward): step(carry, place, xs).

        The place is counted in the carry: XLA would not recognise the loop's counter in an array of
        places.
        """
        down = self.reverse != backward

        def body(carry: Any, xs: Any) -> Any:
            count, carry = carry
            carry, ys = step(carry, length - 1 - count if down else count, xs)
            return (count + 1, carry), ys

        (_, carry), ys = lax.scan(body, (np.int32(0), carry), xs, length=length, reverse=down)
        return carry, ys

    def cut(self, stacked: Any, count: int, size: int) -> InPieces:
        """Cut arrays that are stacked by layer into pieces of `size` layers."""
        number, short = divmod(count, size)
        start = short if self.reverse else 0

        def whole(a: Any) -> Any:
            a = a[start : start + number * size] if short else a
            return a.reshape((number, size, *a.shape[1:]))

        rest = [a[:short] if self.reverse else a[count - short :] for a in stacked] if short else None
        return InPieces([whole(a) for a in stacked], rest)

    def joined(self, whole: Any, rest: Any) -> Any:
        """Join the results of pieces into arrays stacked by layer."""
        flat = jax.tree.map(lambda a: a.reshape((a.shape[0] * a.shape[1], *a.shape[2:])), whole)
        if rest is None:
            return flat
        order = (lambda a, b: [b, a]) if self.reverse else (lambda a, b: [a, b])
        return jax.tree.map(lambda a, b: jnp.concatenate(order(a, b)), flat, rest)


@dataclass(frozen=True)
class _Pass:
    """One pass over layers, in pieces of pieces."""

    loop: LayerLoop
    layer: Callable[[Any, Any, Any], tuple[Any, Any]] | None
    backward: bool
    cut: Callable[[Any, int, int], InPieces] | None
    join: Callable[[Any, Any], Any]

    def over(self, state: Any, kept: Any, first: Any, count: int, levels: Sequence[Level]) -> Any:
        """The layers at `first` … `first + count − 1`: (state, results)."""
        if not levels:
            return self._scan(
                lambda s, k, own: self._layer(s, _after(first, k), own), state, kept, count
            )
        level, *inner = levels
        if level.size >= count:
            return self._piece(level, inner, state, kept, Piece(first, count, alone=True))
        if level.size == 1 and not inner and self.layer is not None:  # no loop inside the loop
            return self._scan(
                lambda s, k, own: self._single(level, s, own, _after(first, k)), state, kept, count
            )
        return self._pieces(level, inner, state, kept, Piece(first, count))

    def _pieces(self, level: Level, inner: Sequence[Level], state: Any, kept: Any, at: Piece) -> Any:
        """A loop over the whole pieces, and the shorter one behind them, in the order of the pass."""
        number, short = divmod(at.count, level.size)
        start, rest = (short, 0) if self.loop.reverse else (0, at.count - short)
        kept = kept if self.cut is None else self.cut(kept, at.count, level.size)
        of_whole, of_rest = (None, None) if kept is None else kept
        last, of_last = Piece(_after(at.first, rest), short), None

        def one(state: Any, k: Any, kept: Any) -> Any:
            place = _after(_after(at.first, start), k * level.size)
            return self._piece(level, inner, state, kept, Piece(place, level.size, looped=True))

        if short and self.backward:
            state, of_last = self._piece(level, inner, state, of_rest, last)
            if level.barred:
                box = [state, of_whole]
                barrier((box, [0, 1]))
                state, of_whole = box
        state, results = self._scan(one, state, of_whole, number)
        if short and not self.backward:
            state, of_last = self._piece(level, inner, state, of_rest, last)
        return state, self.join(results, of_last)

    def _piece(self, level: Level, inner: Sequence[Level], state: Any, kept: Any, at: Piece) -> Any:
        run = lambda state, kept: self.over(state, kept, at.first, at.count, inner)
        return level.around(run, state, kept, at)

    def _single(self, level: Level, state: Any, kept: Any, place: Any) -> Any:
        """A piece that is one layer."""
        run = lambda state, kept: self._layer(state, place, kept)
        return level.around(run, state, kept, Piece(place, 1, looped=True))

    def _layer(self, state: Any, place: Any, kept: Any) -> Any:
        assert self.layer is not None, "a level was to run its pieces itself"
        return self.layer(state, place, kept)

    def _scan(self, step: Any, state: Any, kept: Any, length: int) -> Any:
        return self.loop.scan(step, state, kept, backward=self.backward, length=length)


def _after(first: Any, k: Any) -> Any:
    """`first + k`, without an equation where either is known to be 0."""
    if isinstance(first, int) and first == 0:
        return k
    return first if isinstance(k, int) and k == 0 else first + k


def checkpointed(
    node: Node, periods: Sequence[int], x: Sequence[Any], operands: Sequence[Any]
) -> tuple[Any, ...]:
    """A scan's outputs and exports, by a scan over checkpointed scans of `periods[0]` layers.

    These are in turn scans over checkpointed scans of `periods[1]` layers, and so on.
    """
    block, (eqn,) = node.block, node.block.eqns
    counts = _jax.scan_counts(eqn)
    env = dict(zip((*block.inputs, *block.operands), (*x, *operands), strict=True))
    consts, carry, xs = counts.groups([graph.read(env, v) for v in eqn.invars])
    inner, inner_consts = _jax.open_jaxpr(eqn.params["jaxpr"])

    def layer(carry: Any, place: Any, xs: Any) -> Any:
        del place
        env = dict(zip(inner.constvars, inner_consts, strict=True))
        env.update(zip(inner.invars, (*consts, *carry, *xs), strict=True))
        graph.run(inner.eqns, env)
        out = [graph.read(env, v) for v in inner.outvars]
        return out[: counts.carry], out[counts.carry :]

    def around(run: Visit, carry: Any, xs: Any, piece: Piece) -> Any:
        if piece.alone:  # it runs again as part of a larger one
            return run(carry, xs)
        # XLA does not merge what is inside a loop with what is outside.
        return jax.checkpoint(run, prevent_cse=not piece.looped)(carry, xs)

    loop = LayerLoop(eqn.params["length"], eqn.params["reverse"])
    levels = [Level(period, around) for period in periods]
    last, ys = loop.visit(layer, carry, xs, levels, cut=loop.cut, join=loop.joined)
    found = dict(zip(eqn.outvars, (*last, *ys), strict=True))
    return tuple(found[v] for v in (*block.outputs, *block.exports))
