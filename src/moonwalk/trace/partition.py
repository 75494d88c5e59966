"""Partitions the equations that carry derivatives into groups.

Equations that read the same state variable are in one group, as is everything on a cycle that this
creates (x + f(x) is one group). Then a variable's cotangent is determined by the one group that reads
it. The partition is the finest with this property.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .. import _jax
from .._jax import JaxprEqn, Literal
from .declare import declare_p

# Primitives that compute each output entry from the entries at the same place.
POINTWISE: frozenset[Any] = _jax.lax_primitives(
    "abs acos acosh add and asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil clamp "
    "convert_element_type copy cos cosh digamma div eq erf erf_inv erfc exp exp2 expm1 floor ge "
    "gt integer_pow is_finite le lgamma log log1p log2 logistic lt max min mul ne neg nextafter "
    "not one_minus_square or pow reduce_precision rem round rsqrt select_n sign sin sinh sqrt "
    "square stop_gradient sub tan tanh xor"
) | {_jax.name_p, declare_p}

# Primitives that place entries elsewhere, or copy them, and compute nothing.
MOVING: frozenset[Any] = _jax.lax_primitives(
    "broadcast_in_dim concatenate copy gather reshape rev slice split squeeze stack tile transpose "
    "unstack"
)


def partition(
    eqns: Sequence[JaxprEqn],
    active: set[Any],
    outputs: Sequence[Any],
    copies: Mapping[Any, Any] | None = None,
) -> list[list[JaxprEqn]]:
    """Groups of equations, in an order in which they can run: blocks, and equations off the path.

    `copies`: variables that are copies of others. A reader of a copy runs after what makes the original.
    """
    count = len(eqns)
    group = list(range(count))  # union-find

    def find(i: int) -> int:
        while group[i] != i:
            group[i] = group[group[i]]
            i = group[i]
        return i

    def merge(i: int, j: int) -> None:
        group[find(i)] = find(j)

    producer = {v: i for i, e in enumerate(eqns) for v in e.outvars}
    producer.update((c, producer[v]) for c, v in (copies or {}).items() if v in producer)
    on_path = [any(v in active for v in e.outvars) for e in eqns]
    consumers: dict[Any, list[int]] = {}
    for i, eqn in enumerate(eqns):
        for v in dict.fromkeys(v for v in eqn.invars if not isinstance(v, Literal)):
            consumers.setdefault(v, []).append(i)

    # 1. All differentiable uses of one state variable stand in one block.
    for v, users in consumers.items():
        path_users = [i for i in users if on_path[i]] if v in active else []
        for i in path_users[1:]:
            merge(i, path_users[0])

    # 2. A pointwise side computation read by one block only belongs to it (latest first).
    depends = _depends_on(eqns, active)
    path = {find(i) for i in range(count) if on_path[i]}
    for i in reversed(range(count)):
        if on_path[i] or not depends[i] or eqns[i].primitive not in POINTWISE:
            continue
        users = {find(j) for v in eqns[i].outvars for j in consumers.get(v, [])}
        escapes = any(v in outputs for v in eqns[i].outvars)
        if len(users) == 1 and users <= path and not escapes:
            merge(i, users.pop())

    # 3. Groups on a cycle become one group; then order the groups.
    return _ordered_components(eqns, [find(i) for i in range(count)], producer)


def _depends_on(eqns: Sequence[JaxprEqn], variables: Iterable[Any]) -> list[bool]:
    reached = set(variables)
    result = []
    for eqn in eqns:
        hit = any(not isinstance(v, Literal) and v in reached for v in eqn.invars)
        result.append(hit)
        if hit:
            reached.update(eqn.outvars)
    return result


def _ordered_components(
    eqns: Sequence[JaxprEqn], group: Sequence[int], producer: Mapping[Any, int]
) -> list[list[JaxprEqn]]:
    """Strongly connected components of the groups' dependencies, in topological order (Tarjan)."""
    members: dict[int, list[int]] = {}
    for i, g in enumerate(group):
        members.setdefault(g, []).append(i)
    needs = {
        g: dict.fromkeys(
            group[producer[v]]
            for i in ids
            for v in eqns[i].invars
            if not isinstance(v, Literal) and v in producer and group[producer[v]] != g
        )
        for g, ids in members.items()
    }
    index: dict[int, int] = {}
    low: dict[int, int] = {}
    stack: list[int] = []
    on_stack: set[int] = set()
    components: list[list[int]] = []
    for root in members:
        if root in index:
            continue
        work = [(root, iter(needs[root]))]
        index[root] = low[root] = len(index)
        stack.append(root)
        on_stack.add(root)
        while work:
            node, successors = work[-1]
            for nxt in successors:
                if nxt not in index:
                    index[nxt] = low[nxt] = len(index)
                    stack.append(nxt)
                    on_stack.add(nxt)
                    work.append((nxt, iter(needs[nxt])))
                    break
                if nxt in on_stack:
                    low[node] = min(low[node], index[nxt])
            else:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[node])
                if low[node] == index[node]:
                    component = []
                    while True:
                        top = stack.pop()
                        on_stack.discard(top)
                        component.append(top)
                        if top == node:
                            break
                    components.append(component)
    # Tarjan on "needs" edges emits dependencies first: already an order of execution.
    return [[eqns[i] for i in sorted(i for g in c for i in members[g])] for c in components]
