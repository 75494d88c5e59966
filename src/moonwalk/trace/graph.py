"""A flat jaxpr becomes blocks.

Three kinds of equations:

- the *path*: equations through which a derivative flows from the state (the inputs) to the outputs;
- equations whose values depend on the state but whose derivatives do not matter (`x >= 0`, `floor`,
  anything under `stop_gradient`): if they are pointwise, they are absorbed into the block that reads
  them, so that a rule sees `ge` and `select_n` together;
- everything else (weights, data, constants), whose values are the blocks' *operands*.

The path is cut into *blocks* such that every state variable is consumed by one block only (`partition`).
So `leaky_relu` is one block, as is a pair of strided slices, or each layer of a network.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jax
import numpy as np
from jax import lax

from .. import _jax
from .._jax import JaxprEqn, Literal
from .activity import active_variables
from .declare import Declaration, propagate
from .facts import Constants, propagate_names
from .partition import partition


@dataclass(frozen=True, eq=False)
class Block:
    """A piece of the path: one state in, one state out, each a tuple of variables.

    Rules see a block, never the network around it. `operands` are the variables it reads besides its
    state: weights, data, constants.
    """

    eqns: tuple[JaxprEqn, ...]
    inputs: tuple[Any, ...]
    outputs: tuple[Any, ...]
    operands: tuple[Any, ...]
    exports: tuple[Any, ...] = ()  # inner values that are read outside, and have no cotangent
    declarations: Mapping[Any, Declaration] = field(default_factory=dict)
    names: Mapping[Any, str] = field(default_factory=dict)
    constants: Constants = field(default_factory=lambda: Constants((), {}))
    # Not an argument, so that a block made by `dataclasses.replace` starts with an empty memory.
    _memory: dict[Any, Any] = field(default_factory=dict, init=False, repr=False)

    def once(self, make: Callable[[Block], Any]) -> Any:
        """`make(self)`, cached: what a rule derives from a block is derived once."""
        if make not in self._memory:
            self._memory[make] = make(self)
        return self._memory[make]

    def __call__(self, x: Sequence[Any], operands: Sequence[Any]) -> tuple[Any, ...]:
        """The block's outputs at the state `x`."""
        return self.values(self.outputs, x, operands)

    def values(
        self, wanted: Sequence[Any], x: Sequence[Any], operands: Sequence[Any]
    ) -> tuple[Any, ...]:
        """Any of the block's variables at the state `x`."""
        env = dict(zip(self.inputs, x, strict=True))
        env.update(zip(self.operands, operands, strict=True))
        run(self.eqns, env)
        return tuple(env[v] for v in wanted)

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
        """The declared structure of an operand, if there is one."""
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
    return _jax.type_name(var.aval)


def struct(var: Any) -> jax.ShapeDtypeStruct:
    """A variable's shape and dtype."""
    return _jax.struct(var.aval)


def read(env: Mapping[Any, Any], atom: Any) -> Any:
    """The value of a variable, or of a literal as an array of its type."""
    return _jax.literal(atom) if isinstance(atom, Literal) else env[atom]


def run(eqns: Iterable[JaxprEqn], env: dict[Any, Any]) -> None:
    """Evaluate equations, reading from and writing to `env`."""
    for eqn in eqns:
        inputs = [v.val if isinstance(v, Literal) else env[v] for v in eqn.invars]
        env.update(zip(eqn.outvars, _jax.bind(eqn, inputs), strict=True))


def facts_inside_scan(block: Block, jaxpr: Any, consts: Sequence[Any]) -> dict[str, Any]:
    """What is known inside a scan's body: constants, declarations and names of its inputs."""
    (eqn,) = block.eqns
    counts = _jax.scan_counts(eqn)
    known: dict[Any, Any] = {}
    declarations: dict[Any, Declaration] = {}
    names: dict[Any, str] = {}
    for i, (outer, var) in enumerate(zip(eqn.invars, jaxpr.invars, strict=True)):
        stacked = i >= counts.stacked
        constant = block.constant(outer) if i < counts.consts else None
        if constant is not None:
            known[var] = constant
        found = block.declaration(outer)
        if found is not None and stacked:
            found = found.moved(range(1, len(found.axes)))
        if found is not None and (stacked or i < counts.consts):  # a carry changes from layer to layer
            declarations[var] = found
        if not isinstance(outer, Literal) and outer in block.names:
            names[var] = block.names[outer] + ("[layer]" if stacked else "")
    known.update(zip(jaxpr.constvars, consts, strict=True))
    return {"consts": known, "declarations": declarations, "names": names}


@dataclass(frozen=True, eq=False)
class Graph:
    """The schedule of a flat jaxpr: blocks, and the equations off the path, in order."""

    schedule: tuple[Block | JaxprEqn, ...]
    inputs: tuple[Any, ...]  # the state at the entry
    outputs: tuple[Any, ...]  # the state at the exit
    cutter: Cutter

    @property
    def blocks(self) -> list[Block]:
        """The blocks of the path."""
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
    - `declarations`, `names`: those of the jaxpr's inputs, where known.
    """
    constants = Constants(jaxpr.eqns, consts or {})
    declared = propagate(jaxpr.eqns, declarations or {})
    eqns = merge_padding(jaxpr.eqns, jaxpr.outvars, constants, declared)
    outputs = tuple(dict.fromkeys(v for v in outputs if not isinstance(v, Literal)))
    active = active_variables(eqns, state, outputs)
    cutter = Cutter(
        eqns,
        results=frozenset(v for v in jaxpr.outvars if not isinstance(v, Literal)),
        outputs=frozenset(outputs),
        active=frozenset(active),
        declarations=declared,
        names=propagate_names(eqns, names or {}),
        constants=constants,
    )
    schedule: list[Block | JaxprEqn] = []
    for group in partition(eqns, active, outputs):
        if any(v in active for e in group for v in e.outvars):
            schedule.append(cutter.block(group))
        else:
            schedule += group
    return Graph(tuple(close_forks(schedule, cutter)), tuple(state), outputs, cutter)


class Cutter:
    """Makes blocks out of groups of equations of one jaxpr."""

    def __init__(
        self,
        eqns: Sequence[JaxprEqn],
        results: frozenset[Any],
        outputs: frozenset[Any],
        active: frozenset[Any],
        declarations: Mapping[Any, Declaration],
        names: Mapping[Any, str],
        constants: Constants,
        copies: Mapping[Any, Any] | None = None,
    ):
        """`copies`: variables that are copies (see `network.cutting.Fork`), and their originals."""
        self.results, self.outputs, self.active = results, outputs, active
        self.copies = copies or {}
        self.facts, self.constants = {"declarations": declarations, "names": names}, constants
        self.readers: dict[Any, list[JaxprEqn]] = {}
        for eqn in eqns:
            for v in eqn.invars:
                if not isinstance(v, Literal):
                    self.readers.setdefault(v, []).append(eqn)

    def on_path(self, eqn: JaxprEqn) -> bool:
        """Whether a derivative flows through the equation."""
        return any(v in self.active for v in eqn.outvars)

    def block(self, eqns: Sequence[JaxprEqn]) -> Block:
        """The block that these equations form."""
        inside = {id(e) for e in eqns}
        produced = dict.fromkeys(v for e in eqns for v in e.outvars)
        reads = dict.fromkeys(
            v for e in eqns for v in e.invars if not isinstance(v, Literal) and v not in produced
        )
        path_reads = {v for e in eqns if self.on_path(e) for v in e.invars if not isinstance(v, Literal)}
        inputs = tuple(v for v in reads if v in self.active and v in path_reads)
        outside = {v: [e for e in self.readers.get(v, ()) if id(e) not in inside] for v in produced}
        # An input that is also a result of the function passes through the block: its cotangent is the
        # sum of what arrives from the block and what comes in as a result's.
        passing = [v for v in inputs if v in self.outputs]
        outputs = (
            *passing,
            *(
                v
                for v in produced
                if v in self.active and (v in self.outputs or any(self.on_path(e) for e in outside[v]))
            ),
        )
        exports = tuple(v for v in produced if v not in outputs and (outside[v] or v in self.results))
        operands = tuple(v for v in reads if v not in inputs)
        facts = {
            kind: {v: known[v] for v in operands if v in known} for kind, known in self.facts.items()
        }
        return Block(tuple(eqns), inputs, outputs, operands, exports, **facts, constants=self.constants)

    def join(self, parts: Iterable[Block | JaxprEqn]) -> Block:
        """Several blocks, and equations between them, as one block."""
        eqns: list[JaxprEqn] = []
        for part in parts:
            eqns += part.eqns if isinstance(part, Block) else [part]
        return self.block(eqns)


def close_forks(
    schedule: Sequence[Block | JaxprEqn],
    cutter: Cutter,
    stays_open: Callable[[Block], bool] = lambda block: False,
) -> list[Block | JaxprEqn]:
    """Join each block that expands by forking its input with its readers, until it no longer does.

    max(x, 0) + expm1(min(x, 0)) forks x into two states, which the sum joins again. A reader of a copy
    (of a fork) is not joined: it runs after the fork, which cannot be inside a block.
    """
    items = list(schedule)
    i = 0
    while i < len(items):
        block = items[i]
        if not isinstance(block, Block) or not _expands_by_forking(block) or stays_open(block):
            i += 1
            continue
        found = _joined_with_reader(items, i, cutter)
        # A block that reads no state (a bias times data) is joined only to reach one that does.
        while found is not None and not found[1].inputs and not stays_open(found[1]):
            found = _joined_with_reader(found[0], found[0].index(found[1]), cutter)
        if found is None or not found[1].inputs:
            i += 1
        else:
            items = found[0]
    return items


def _joined_with_reader(
    items: Sequence[Block | JaxprEqn], i: int, cutter: Cutter
) -> tuple[list[Block | JaxprEqn], Block] | None:
    """The schedule with block i joined to the first that reads it, and that block."""
    block = items[i]
    assert isinstance(block, Block)
    reached = set(block.outputs) | set(block.exports)
    before: list[Block | JaxprEqn] = []
    joined: list[Block | JaxprEqn] = [block]
    for item in items[i + 1 :]:
        reads = item.inputs + item.operands if isinstance(item, Block) else item.invars
        reads = [v for v in reads if not isinstance(v, Literal)]
        if any(cutter.copies.get(v) in reached for v in reads):
            return None
        if not any(v in reached for v in reads):
            before.append(item)
            continue
        joined.append(item)
        if isinstance(item, Block):
            whole = cutter.join(joined)
            return [*items[:i], *before, whole, *items[i + len(before) + len(joined) :]], whole
        reached.update(item.outvars)
    return None  # its outputs are the function's


def _expands_by_forking(block: Block) -> bool:
    n, n_out = block.sizes
    return n_out > n and len(block.outputs) > len(block.inputs)


def merge_padding(
    eqns: Sequence[JaxprEqn],
    results: Sequence[Any],
    constants: Constants,
    declarations: Mapping[Any, Declaration],
) -> list[JaxprEqn]:
    """Merge a zero pad that only a convolution reads into that convolution's padding.

    Some libraries write a causal convolution as `jnp.pad` and a valid one; alone, the pad would not be
    submersive. If a declaration names its tap, the pad is left alone: the tap was named for the padding
    as written, and with more padding another tap would be the pivot.
    """
    reads: dict[Any, int] = {}
    for v in (*results, *(v for e in eqns for v in e.invars)):
        if not isinstance(v, Literal):
            reads[v] = reads.get(v, 0) + 1
    pads: dict[Any, JaxprEqn] = {}
    kept: list[JaxprEqn] = []
    for eqn in eqns:
        if _is_zero_pad(eqn, constants) and reads.get(eqn.outvars[0]) == 1:
            pads[eqn.outvars[0]] = eqn
        elif (
            eqn.primitive is lax.conv_general_dilated_p
            and eqn.invars[0] in pads
            and not _names_its_tap(eqn.invars[1], declarations)
            and (merged := _padded(eqn, pads[eqn.invars[0]]))
        ):
            kept.remove(pads[eqn.invars[0]])
            eqn = merged
        kept.append(eqn)
    return kept


def values_apart(eqns: Sequence[JaxprEqn], active: set[Any]) -> list[JaxprEqn]:
    """Rewrite pads with a differentiated value: pad with zeros, then select between these and the value.

    JAX's pullback of `pad` fails with respect to the value alone, which is all that a sweep asks for.
    """
    result: list[JaxprEqn] = []
    for eqn in eqns:
        value = eqn.invars[1] if eqn.primitive is lax.pad_p else None
        differentiated = value is not None and not isinstance(value, Literal) and value in active
        result += _value_apart(eqn) if differentiated else [eqn]
    return result


def _value_apart(eqn: JaxprEqn) -> list[JaxprEqn]:
    config = eqn.params["padding_config"]

    def pad(x: Any, value: Any) -> Any:
        padded = lax.pad(x, lax.full((), 0, x.dtype), config)
        inside = lax.pad(lax.full(x.shape, True), False, config)
        return lax.select_n(inside, lax.broadcast(value, padded.shape), padded)

    with _jax.source_context(eqn):
        jaxpr, _ = _jax.open_jaxpr(jax.make_jaxpr(pad)(*map(struct, eqn.invars)))
    new = dict(zip(jaxpr.invars, eqn.invars, strict=True))
    new.update(zip(jaxpr.outvars, eqn.outvars, strict=True))
    return [
        e.replace(
            invars=[v if isinstance(v, Literal) else new.get(v, v) for v in e.invars],
            outvars=[new.get(v, v) for v in e.outvars],
        )
        for e in jaxpr.eqns
    ]


def _names_its_tap(kernel: Any, declarations: Mapping[Any, Declaration]) -> bool:
    declaration = None if isinstance(kernel, Literal) else declarations.get(kernel)
    return declaration is not None and declaration.taps is not None


def _is_zero_pad(eqn: JaxprEqn, constants: Mapping[Any, np.ndarray]) -> bool:
    if eqn.primitive is not lax.pad_p:
        return False
    value = eqn.invars[1]
    value = value.val if isinstance(value, Literal) else constants.get(value)
    # Cropping by one and then padding by one is not padding by nothing.
    adds = all(low >= 0 and high >= 0 and not step for low, high, step in eqn.params["padding_config"])
    return value is not None and not np.any(value) and adds


def _padded(convolution: JaxprEqn, pad: JaxprEqn) -> JaxprEqn | None:
    """The convolution with the pad merged into its padding, if the pad is along spatial axes."""
    config = pad.params["padding_config"]
    batch, feature, *spatial = convolution.params["dimension_numbers"].lhs_spec
    if any(d != 1 for d in convolution.params["lhs_dilation"]) or any(
        tuple(config[a]) != (0, 0, 0) for a in (batch, feature)
    ):
        return None
    padding = tuple(
        (int(low + config[a][0]), int(high + config[a][1]))
        for a, (low, high) in zip(spatial, convolution.params["padding"], strict=True)
    )
    return convolution.replace(
        invars=[pad.invars[0], convolution.invars[1]],
        params={**convolution.params, "padding": padding},
    )


def needed(eqns: Sequence[JaxprEqn], outputs: Iterable[Any], *, effects: bool = False) -> list[JaxprEqn]:
    """The equations that these outputs need; with `effects`, also those that print or call back."""
    wanted, kept = set(outputs), []
    for eqn in reversed(eqns):
        if any(v in wanted for v in eqn.outvars) or (effects and _jax.has_effects(eqn)):
            kept.append(eqn)
            wanted.update(v for v in eqn.invars if not isinstance(v, Literal))
    return kept[::-1]
