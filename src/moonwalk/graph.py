"""A flat jaxpr becomes blocks.

Three kinds of equations:

- the *trunk*: equations through which a derivative flows from the state (the inputs) to the outputs;
- equations whose values depend on the state but whose derivatives do not matter (`x >= 0`, `floor`,
  what stands under `stop_gradient`): computed on the way, absorbed into the block that reads them
  where they are pointwise, so that a rule sees `ge` and `select_n` together;
- everything else (weights, data, constants), whose values are the blocks' *operands*.

The trunk is cut into *blocks* such that every state variable is consumed inside one block only. That
is what makes composition right: a variable's cotangent is then exactly what its block needs. Equations
that share a state variable therefore stand in one block, and so does everything on a cycle that this
creates (x + f(x) is one block). The partition is the finest with this property, so `leaky_relu` is one
block, a strided pair of slices one, and the layers of a network one each.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from . import compat
from .compat import JaxprEqn, Literal
from .declare import Declaration, declare_p, propagate

# Primitives that compute each output entry from the entries at the same place.
POINTWISE: frozenset[Any] = frozenset(
    getattr(lax, f"{name}_p")
    for name in [
        "abs",
        "acos",
        "acosh",
        "add",
        "and",
        "asin",
        "asinh",
        "atan",
        "atan2",
        "atanh",
        "bessel_i0e",
        "bessel_i1e",
        "cbrt",
        "ceil",
        "clamp",
        "convert_element_type",
        "copy",
        "cos",
        "cosh",
        "digamma",
        "div",
        "eq",
        "erf",
        "erf_inv",
        "erfc",
        "exp",
        "exp2",
        "expm1",
        "floor",
        "ge",
        "gt",
        "integer_pow",
        "is_finite",
        "le",
        "lgamma",
        "log",
        "log1p",
        "log2",
        "logistic",
        "lt",
        "max",
        "min",
        "mul",
        "ne",
        "neg",
        "nextafter",
        "not",
        "one_minus_square",
        "or",
        "pow",
        "reduce_precision",
        "rem",
        "round",
        "rsqrt",
        "select_n",
        "sign",
        "sin",
        "sinh",
        "sqrt",
        "square",
        "stop_gradient",
        "sub",
        "tan",
        "tanh",
        "xor",
    ]
    if hasattr(lax, f"{name}_p")
) | {compat.name_p, declare_p}

# Pointwise primitives whose derivative is zero wherever it exists.
_FLAT: frozenset[Any] = frozenset(
    {lax.stop_gradient_p, lax.sign_p, lax.floor_p, lax.ceil_p, lax.round_p, lax.nextafter_p}
)


def is_differentiable(aval: Any) -> bool:
    """Whether a variable of this type can carry a cotangent."""
    return jnp.issubdtype(aval.dtype, jnp.inexact)


@dataclass(frozen=True, eq=False)
class Block:
    """A piece of the trunk: one state in, one state out, each a tuple of variables.

    Rules see a block, never the network around it. `operands` are the variables it reads besides its
    state: weights, data, constants.
    """

    eqns: tuple[JaxprEqn, ...]
    inputs: tuple[Any, ...]
    outputs: tuple[Any, ...]
    operands: tuple[Any, ...]
    declarations: Mapping[Any, Declaration] = field(default_factory=dict)
    names: Mapping[Any, str] = field(default_factory=dict)
    constants: Mapping[Any, np.ndarray] = field(default_factory=dict)

    def __call__(self, x: Sequence[Any], operands: Sequence[Any]) -> tuple[Any, ...]:
        """The block's outputs at the state `x`."""
        env = dict(zip(self.inputs, x, strict=True))
        env.update(zip(self.operands, operands, strict=True))
        run(self.eqns, env)
        return tuple(env[v] for v in self.outputs)

    @property
    def eqn(self) -> JaxprEqn:
        """The equation that stands for the block in messages: the one that makes its output."""
        last = self.outputs[-1]
        return next(e for e in reversed(self.eqns) if any(v is last for v in e.outvars))

    @cached_property
    def sizes(self) -> tuple[int, int]:
        """(n, n'): numbers of entries of the state in and of the state out."""
        return sum(v.aval.size for v in self.inputs), sum(v.aval.size for v in self.outputs)

    def declaration(self, var: Any) -> Declaration | None:
        """What is declared of an operand."""
        return None if isinstance(var, Literal) else self.declarations.get(var)

    def constant(self, atom: Any) -> np.ndarray | None:
        """The values of an operand that is known while tracing (static indices), or None."""
        return np.asarray(atom.val) if isinstance(atom, Literal) else self.constants.get(atom)

    def name(self, var: Any) -> str:
        """An operand in words: its name in the user's code where it has one, and its type."""
        kind = type_of(var)
        return f"`{self.names[var]}` ({kind})" if var in self.names else f"of type {kind}"

    def structs(self) -> tuple[list[jax.ShapeDtypeStruct], list[jax.ShapeDtypeStruct]]:
        """Shapes and dtypes of the state in and of the operands, for abstract evaluation."""
        return [struct(v) for v in self.inputs], [struct(v) for v in self.operands]


def type_of(var: Any) -> str:
    """'f32[8,3]'."""
    return var.aval.str_short(short_dtypes=True)


def struct(var: Any) -> jax.ShapeDtypeStruct:
    """A variable's type without its value."""
    return jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype)


def run(eqns: Iterable[JaxprEqn], env: dict[Any, Any]) -> None:
    """Evaluate equations, reading from and writing to `env`."""
    for eqn in eqns:
        inputs = [v.val if isinstance(v, Literal) else env[v] for v in eqn.invars]
        env.update(zip(eqn.outvars, compat.bind(eqn, inputs), strict=True))


@dataclass(frozen=True, eq=False)
class Graph:
    """The schedule of a flat jaxpr: blocks, and the equations beside the trunk, in order."""

    schedule: tuple[Block | JaxprEqn, ...]
    inputs: tuple[Any, ...]  # the state at the entry
    outputs: tuple[Any, ...]  # the state at the exit
    declarations: Mapping[Any, Declaration]

    @property
    def blocks(self) -> list[Block]:
        """The trunk."""
        return [item for item in self.schedule if isinstance(item, Block)]


def build(
    jaxpr: Any,
    state: Sequence[Any],
    outputs: Sequence[Any],
    *,
    consts: Mapping[Any, Any] | None = None,
    declarations: Mapping[Any, Declaration] | None = None,
    names: Mapping[Any, str] | None = None,
) -> Graph:
    """Cut a flat jaxpr into blocks.

    **Arguments:**

    - `jaxpr`: flat, as `staging.stage` returns it.
    - `state`: the input variables that are differentiated.
    - `outputs`: the output variables whose cotangents are wanted.
    - `consts`: values of the variables that are known, for static indices.
    - `declarations`, `names`: of the jaxpr's inputs, where something is known of them.
    """
    declarations = propagate(jaxpr.eqns, declarations or {})
    names = _propagate_names(jaxpr.eqns, names or {})
    constants = _fold_constants(jaxpr.eqns, consts or {})
    outputs = tuple(dict.fromkeys(v for v in outputs if not isinstance(v, Literal)))
    eqns = jaxpr.eqns
    active = _active_variables(eqns, state, outputs)
    groups = _partition(eqns, active, outputs)
    readers: dict[Any, set[int]] = {}
    for i, group in enumerate(groups):
        for eqn in group:
            for v in eqn.invars:
                if not isinstance(v, Literal):
                    readers.setdefault(v, set()).add(i)

    schedule: list[Block | JaxprEqn] = []
    for i, group in enumerate(groups):
        if not any(v in active for e in group for v in e.outvars):
            schedule += group
            continue
        produced = {v for e in group for v in e.outvars}
        escaping = {v for v in produced if v in outputs or readers.get(v, set()) - {i}}
        reads = dict.fromkeys(
            v for e in group for v in e.invars if not isinstance(v, Literal) and v not in produced
        )
        trunk_reads = {
            v
            for e in group
            if any(o in active for o in e.outvars)
            for v in e.invars
            if not isinstance(v, Literal) and v in active
        }
        inputs = tuple(v for v in reads if v in trunk_reads)
        block = Block(
            eqns=tuple(group),
            inputs=inputs,
            outputs=tuple(v for e in group for v in e.outvars if v in active and v in escaping),
            operands=tuple(v for v in reads if v not in trunk_reads),
            declarations={v: d for v, d in declarations.items() if v in reads},
            names={v: n for v, n in names.items() if v in reads},
            constants={v: c for v, c in constants.items() if v in reads},
        )
        schedule.append(block)
    schedule = _close_forks(_merge_padding(schedule))
    return Graph(tuple(schedule), tuple(state), outputs, declarations)


def fuse(first: Block, second: Block, between: Sequence[JaxprEqn] = ()) -> Block:
    """Two blocks as one, with the equations between them that read the first."""
    inner = set(first.outputs) | {v for e in between for v in e.outvars}
    operands = dict.fromkeys(
        (
            *first.operands,
            *(v for e in between for v in e.invars if not isinstance(v, Literal)),
            *second.operands,
        )
    )
    return Block(
        eqns=(*first.eqns, *between, *second.eqns),
        inputs=(*first.inputs, *(v for v in second.inputs if v not in inner)),
        outputs=(*(v for v in first.outputs if v not in second.inputs), *second.outputs),
        operands=tuple(v for v in operands if v not in inner and v not in first.inputs),
        declarations={**first.declarations, **second.declarations},
        names={**first.names, **second.names},
        constants={**first.constants, **second.constants},
    )


def _close_forks(schedule: Sequence[Block | JaxprEqn]) -> list[Block | JaxprEqn]:
    """Join a block that hands out more than it took in with what reads it, until it does not.

    max(x, 0) + expm1(min(x, 0)) forks x into two states that only the sum brings together again.
    """
    items = list(schedule)
    i = 0
    while i < len(items):
        block = items[i]
        if not isinstance(block, Block) or not _expands_by_forking(block):
            i += 1
            continue
        reached = set(block.outputs)
        behind: list[Block | JaxprEqn] = []
        between: list[JaxprEqn] = []
        partner = None
        for j in range(i + 1, len(items)):
            item = items[j]
            reads = item.inputs + item.operands if isinstance(item, Block) else item.invars
            if not any(not isinstance(v, Literal) and v in reached for v in reads):
                behind.append(item)
            elif isinstance(item, Block):
                partner = j
                break
            else:
                between.append(item)
                reached.update(item.outvars)
        if partner is None:  # its outputs are the function's
            i += 1
            continue
        joined = fuse(block, items[partner], between)  # type: ignore[arg-type]
        items[i : partner + 1] = [*behind, joined]
    return items


def _merge_padding(schedule: Sequence[Block | JaxprEqn]) -> list[Block | JaxprEqn]:
    """A zero pad that only a convolution reads is that convolution's padding.

    Some libraries write a causal convolution as `jnp.pad` and a valid one; alone the pad would not be
    submersive.
    """
    pads = {b.outputs: b for b in schedule if isinstance(b, Block) and _is_zero_pad(b)}
    merged: dict[int, Block] = {}
    for item in schedule:
        if not isinstance(item, Block) or len(item.eqns) != 1 or item.inputs not in pads:
            continue
        eqn, pad = item.eqn, pads[item.inputs]
        if eqn.primitive is not lax.conv_general_dilated_p or any(
            d != 1 for d in eqn.params["lhs_dilation"]
        ):
            continue
        config = pad.eqn.params["padding_config"]
        batch, feature, *spatial = eqn.params["dimension_numbers"].lhs_spec
        if any(config[a] != (0, 0, 0) for a in (batch, feature)):
            continue
        padding = tuple(
            (low + config[a][0], high + config[a][1])
            for a, (low, high) in zip(spatial, eqn.params["padding"], strict=True)
        )
        convolution = eqn.replace(
            invars=[pad.inputs[0], eqn.invars[1]], params={**eqn.params, "padding": padding}
        )
        merged[id(pad)] = pad
        merged[id(item)] = replace(item, eqns=(convolution,), inputs=pad.inputs)
    return [
        merged.get(id(item), item)
        for item in schedule
        if not (id(item) in merged and merged[id(item)] is item)
    ]


def _is_zero_pad(block: Block) -> bool:
    if len(block.eqns) != 1 or block.eqn.primitive is not lax.pad_p or len(block.inputs) != 1:
        return False
    value = block.constant(block.eqn.invars[1])
    interior = any(step for _, _, step in block.eqn.params["padding_config"])
    return value is not None and not np.any(value) and not interior


def _expands_by_forking(block: Block) -> bool:
    n, n_out = block.sizes
    return n_out > n and len(block.outputs) > len(block.inputs)


def _active_variables(
    eqns: Sequence[JaxprEqn], state: Iterable[Any], outputs: Iterable[Any]
) -> set[Any]:
    """Variables on a differentiable path from the state to the outputs."""
    forward = set(state)
    for eqn in eqns:
        if eqn.primitive not in _FLAT and any(
            not isinstance(v, Literal) and v in forward for v in eqn.invars
        ):
            forward.update(v for v in eqn.outvars if is_differentiable(v.aval))
    backward = set(outputs)
    for eqn in reversed(eqns):
        if eqn.primitive not in _FLAT and any(v in backward and v in forward for v in eqn.outvars):
            backward.update(v for v in eqn.invars if not isinstance(v, Literal))
    return forward & backward


def _partition(
    eqns: Sequence[JaxprEqn], active: set[Any], outputs: Sequence[Any]
) -> list[list[JaxprEqn]]:
    """Groups of equations, in an order in which they can run: the blocks and what is beside them."""
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
    on_trunk = [any(v in active for v in e.outvars) for e in eqns]
    consumers: dict[Any, list[int]] = {}
    for i, eqn in enumerate(eqns):
        for v in dict.fromkeys(v for v in eqn.invars if not isinstance(v, Literal)):
            consumers.setdefault(v, []).append(i)

    # 1. All differentiable uses of one state variable stand in one block.
    for v, users in consumers.items():
        trunk_users = [i for i in users if on_trunk[i]] if v in active else []
        for i in trunk_users[1:]:
            merge(i, trunk_users[0])

    # 2. A pointwise side computation read by one block only belongs to it (latest first).
    depends = _depends_on(eqns, active)
    trunk = {find(i) for i in range(count) if on_trunk[i]}
    for i in reversed(range(count)):
        if on_trunk[i] or not depends[i] or eqns[i].primitive not in POINTWISE:
            continue
        users = {find(j) for v in eqns[i].outvars for j in consumers.get(v, [])}
        escapes = any(v in outputs for v in eqns[i].outvars)
        if len(users) == 1 and users <= trunk and not escapes:
            merge(i, users.pop())

    # 3. What lies on a cycle between groups stands in one group; then order them.
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


def _propagate_names(eqns: Iterable[JaxprEqn], names: Mapping[Any, str]) -> dict[Any, str]:
    """A weight keeps its name through the identities and layout changes on its way to a rule."""
    keeping = {
        declare_p,
        compat.name_p,
        lax.transpose_p,
        lax.reshape_p,
        lax.convert_element_type_p,
        lax.broadcast_in_dim_p,
        lax.squeeze_p,
        lax.copy_p,
    }
    names = dict(names)
    for eqn in eqns:
        source = eqn.invars[0] if eqn.invars else None
        if (
            eqn.primitive in keeping
            and source is not None
            and not isinstance(source, Literal)
            and source in names
        ):
            names[eqn.outvars[0]] = names[source]
    return names


_FOLD_LIMIT = 1 << 22  # entries; indices larger than this are not looked into


def _fold_constants(eqns: Iterable[JaxprEqn], consts: Mapping[Any, Any]) -> dict[Any, np.ndarray]:
    """Integer values that are known while tracing: static indices and what is computed from them."""
    known = {v: np.asarray(c) for v, c in consts.items() if compat.is_concrete(c) and _foldable(c)}
    for eqn in eqns:
        if (
            (eqn.primitive in POINTWISE or eqn.primitive in _FOLDED)
            and all(_foldable(v.aval) for v in eqn.outvars)
            and all(isinstance(v, Literal) or v in known for v in eqn.invars)
        ):
            with jax.ensure_compile_time_eval():
                inputs = [v.val if isinstance(v, Literal) else known[v] for v in eqn.invars]
                outputs = compat.bind(eqn, [jnp.asarray(a) for a in inputs])
            known.update((v, np.asarray(o)) for v, o in zip(eqn.outvars, outputs, strict=True))
    return known


def _foldable(array: Any) -> bool:
    """Indices and masks, and single numbers; never weights, never random keys."""
    if jnp.issubdtype(array.dtype, jax.dtypes.extended):
        return False
    return array.size <= (1 if jnp.issubdtype(array.dtype, jnp.inexact) else _FOLD_LIMIT)


_FOLDED: frozenset[Any] = frozenset(
    {
        lax.iota_p,
        lax.broadcast_in_dim_p,
        lax.reshape_p,
        lax.concatenate_p,
        lax.squeeze_p,
        lax.transpose_p,
        lax.slice_p,
        lax.rev_p,
        lax.clamp_p,
    }
)
