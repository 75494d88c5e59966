"""Whether the sources of a walk fit its nodes.

A plan may come from a file, or from an editor. A node with weights whose cotangent nothing brings would
get no gradient, and in silence, so that is asked before anything runs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NoReturn

from ..errors import PlanMismatchError
from ..network.cutting import Node
from ..settings import is_count
from .sources import Copies, Given, Layers, Restored, Source, Unneeded, Vijp


def check_sources(
    nodes: Sequence[Node],
    sources: Sequence[Source],
    given: frozenset[Any] = frozenset(),
    carried: Sequence[Any] = (),
) -> None:
    """PlanMismatchError unless every cotangent that Phase III needs is brought by some source.

    Of the body of a scan, `given`: its stacked outputs, whose cotangents are known; `carried`: what a
    layer hands to the next, cotangents included.
    """
    if len(nodes) != len(sources):
        raise PlanMismatchError(
            f"method=: a walk over {len(nodes)} nodes has {len(sources)} sources in the plan, and needs "
            f"one for each. {_WAY_OUT}"
        )
    made = {v for n in nodes for v in n.block.outputs}
    brought: set[Any] = set()  # variables whose cotangents Phase III has
    for node, source in zip(nodes, sources, strict=True):
        _check_kind(node, source, given)
        for v in _reads(node, source):
            if v in made and v not in brought:
                _refuse(node, source, "needs a cotangent that no source before it brings")
        brought.update(_brings(node, source))
    for node, source in zip(nodes, sources, strict=True):
        if any(v in carried and v not in brought for v in node.block.outputs):
            _refuse(node, source, "does not bring the cotangent that the next layer starts from")


def check_limit(segment: str, limit: float) -> None:
    """PlanMismatchError unless it bounds a certificate."""
    if not isinstance(limit, int | float) or math.isnan(limit) or limit < 0:
        raise PlanMismatchError(
            f"method=: {segment}(limit={limit}) in the plan bounds no error: it is a number, at least "
            f"0. {_WAY_OUT}"
        )


def _check_kind(node: Node, source: Source, given: frozenset[Any]) -> None:
    if node.is_aside:
        if isinstance(source, Vijp | Restored | Copies | Layers):
            _refuse(node, source, "does not fit: no cotangent arrives there")
        return
    if node.is_fork != isinstance(source, Copies):
        _refuse(node, source, "does not fit: the copies of a fork, and they alone, have `Copies`")
    if isinstance(source, Layers):
        _check_layers(node, source)
    known = node.block.outputs if isinstance(source, Given) else ()
    if isinstance(source, Copies):
        known = [v for k, v in enumerate(node.block.outputs) if k in source.given]
    if not given.issuperset(known):
        _refuse(node, source, "takes as given what is no stacked output of a scan, in its body")
    # Phase II comes by the weights of a stem, but by a scan's only layer by layer.
    is_done = node.is_stem and not isinstance(source, Layers)
    if _is_skipped(source) and node.weights and not is_done:
        _refuse(node, source, "would leave its weights without a gradient")
    if isinstance(source, Vijp | Restored):
        count = len(node.block.inputs)
        if not all(isinstance(i, int) and 0 <= i < count for i in source.through):
            _refuse(node, source, f"goes through inputs {source.through} of {count}")
        if count and not source.through:
            _refuse(node, source, "goes through none of its inputs")


def _check_layers(node: Node, source: Layers) -> None:
    if not node.is_scan:
        _refuse(node, source, "is for a scan")
    if source.period is not None and not is_count(source.period):
        _refuse(node, source, f"has anchors every {source.period} layers: at least 1, or None")


def _reads(node: Node, source: Source) -> Sequence[Any]:
    """The variables whose cotangents a source starts from."""
    inputs = node.block.inputs
    if isinstance(source, Vijp | Restored):
        return [inputs[i] for i in source.through]
    if isinstance(source, Layers):
        return inputs if source.needed else ()
    if isinstance(source, Copies) and source.difference is not None:
        return inputs
    return ()


def _brings(node: Node, source: Source) -> Sequence[Any]:
    """The variables whose cotangents it brings."""
    outputs = node.block.outputs
    if isinstance(source, Copies):
        places = {*source.kept, *source.given, source.difference} - {None}
        if not all(isinstance(k, int) and 0 <= k < len(outputs) for k in places):
            _refuse(node, source, f"names copies {sorted(places)} of {len(outputs)}")
        return [outputs[k] for k in places]
    return () if _is_skipped(source) else outputs


def _is_skipped(source: Source) -> bool:
    return isinstance(source, Unneeded) or (isinstance(source, Layers) and not source.needed)


_WAY_OUT = "Make the plan anew with moonwalk.plan(fun, *args), or mend it."


def _refuse(node: Node, source: Source, why: str) -> NoReturn:
    kind = type(source).__name__
    raise PlanMismatchError(
        f"method=: in the plan, the source {kind} of {node.describe()} {why}. {_WAY_OUT}"
    )
