"""The interface of a vijp rule, and the one table of rules.

A rule answers for a *block* (`graph.Block`):

- `verdict`: whether it is submersive, and why; from shapes, strides, padding and declarations alone.
- `prepare`: factors that depend on the weights only (a factorisation, an inverse), made once.
- `linearize`: the forward pass of the block, and what is kept of it.
- `vijp`: h' from h, the factors and what was kept. **Never from x**: an activation recomputed with
  other rounding may flip a sign, and a flipped sign is a wrong gradient.
- `gain`: how much it multiplies relative rounding error.
- `alarms`: conditions on values that make the result meaningless (a zero pivot, a vanished derivative).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import jax
from jaxtyping import Array

from .. import _jax
from .._jax import JaxprEqn, Primitive
from ..errors import DuplicateRuleError
from ..trace.graph import Block

State = tuple[Any, ...]  # arrays: an activation, or a cotangent, of a block's inputs or outputs


@dataclass(frozen=True)
class Verdict:
    """Whether a block is submersive, and why.

    `submersive` is None where the rule cannot tell: the block may well be, but no elimination is
    known. Only such blocks are handed to the matrix-free rule.
    """

    submersive: bool | None
    reason: str
    way_out: str = ""
    at: JaxprEqn | None = None  # the equation to blame, if not the block's own

    def __bool__(self) -> bool:
        return self.submersive is True


@dataclass(frozen=True)
class Gain:
    """How much a vijp multiplies relative rounding error.

    For a pivot P of size m: ‖P‖_F ‖P⁻¹‖_F / m; for derivatives d: sqrt(mean d² · mean d⁻²), which for
    a LeakyReLU of slope α is (1 + α²) / 2α. A diagonal Jacobian only rescales errors entry by entry,
    so alone it loses nothing; its factor counts once some other block of the walk `mixes` entries
    and has spread the noise evenly. `factor` is inf where nothing bounds it while tracing. It is
    `assumed` if a trace cannot bound it but takes it to be 1: a declared diagonal. Fragments are exact
    where they are kept, so error dies out over many layers with fragments: `factor` is then the growth
    over all the layers that an error survives, and `lasting` the part that compounds from layer to
    layer. `reason` says why nothing bounds the factor, if no declaration could help.
    """

    factor: float
    mixes: bool
    assumed: bool = False
    lasting: float | None = None
    reason: str = ""

    @property
    def may_vanish(self) -> bool:
        """Whether a pointwise derivative is not bounded away from zero. If it vanishes, no anchor
        helps."""
        return math.isinf(self.factor) and not self.mixes

    @property
    def fades(self) -> bool:
        """Whether error dies out after some layers."""
        return self.lasting is not None

    def over(self, layers: int) -> Gain:
        """The gain of `count` such layers in a row."""
        if self.lasting is None:
            return Gain(power(self.factor, layers), self.mixes, self.assumed)
        lasting = power(self.lasting, layers)
        return Gain(self.factor / self.lasting * lasting, self.mixes, self.assumed, lasting)

    @classmethod
    def unknown(cls) -> Gain:
        """A gain that a trace cannot bound, and that is assumed to be bad."""
        return cls(math.inf, mixes=True)


def power(factor: float, exponent: int) -> float:
    """factor ** exponent, inf where that overflows."""
    try:
        return factor**exponent
    except OverflowError:
        return math.inf


@dataclass(frozen=True)
class Alarm:
    """A condition on values that makes a vijp meaningless, and the sentence to raise."""

    bad: Array  # booleans; any True raises
    message: str
    error: type[Exception]
    place: str = ""  # where it rang: the equation and its source line


class Rule:
    """One kind of block. Subclasses override what differs; instances hold nothing but options."""

    name: ClassVar[str]
    # Whether what `linearize` keeps is itself the pullback h' ↦ h' J, which the engine's Phase II needs.
    keeps_pullback: ClassVar[bool] = True
    # Whether `inverse` was supplied by an author, rather than derived from the block.
    inverse_is_given: ClassVar[bool] = False

    def matches(self, block: Block) -> bool:
        """Whether the rule is for this block at all (asked of rules for regions)."""
        del block
        return True

    def verdict(self, block: Block) -> Verdict:
        """Submersive or not, with the reason, from static knowledge alone."""
        raise NotImplementedError

    def prepare(self, block: Block, operands: Sequence[Any]) -> Any:
        """Factors that depend on the operands only."""
        del block, operands
        return ()

    def linearize(self, block: Block, x: State, operands: Sequence[Any]) -> tuple[State, Any]:
        """(outputs, what is kept for the vijp); by default JAX's own pullback."""
        return jax.vjp(lambda *x: block(x, operands), *x)

    def keep(self, block: Block, x: State, operands: Sequence[Any]) -> tuple[State, Any]:
        """Like `linearize`, in as few bits as `vijp` needs: what the engine keeps in Phase I.

        It may leave out what only `alarms` would need (a tie of two values, where no vijp exists).
        """
        return self.linearize(block, x, operands)

    def vijp(self, block: Block, factors: Any, kept: Any, h: State) -> State:
        """The cotangent of the outputs, from the cotangent of the inputs."""
        raise NotImplementedError

    def gain(self, block: Block, operands: Sequence[Any] | None = None) -> Gain:
        """Error amplification: while tracing (no operands), or measured on concrete operands."""
        del block, operands
        return Gain.unknown()

    def alarms(self, block: Block, factors: Any, kept: Any) -> list[Alarm]:
        """Conditions on the values under which the vijp is meaningless."""
        del block, factors, kept
        return []

    def weight_alarms(self, block: Block, operands: Sequence[Any]) -> list[Alarm]:
        """Those of the `alarms` that weights alone decide: a zero pivot, a false declaration."""
        del block, operands
        return []

    def declared(self, block: Block) -> list[tuple[str, float]]:
        """Weights whose declared structure the vijp relies on: (name, how far it may be off)."""
        del block
        return []

    def probe(self, block: Block, operands: Sequence[Any]) -> list[Any]:
        """How far the weights of `declared` are off; about as cheap as reading them."""
        del block, operands
        return []

    def inverts(self, block: Block) -> Verdict:
        """Whether `inverse` can compute a block's x from y and its operands."""
        del block
        return Verdict(None, "no inverse is known")

    def inverse(self, block: Block, operands: Sequence[Any], y: State) -> State:
        """The state that the block takes to `y`."""
        raise NotImplementedError

    def fragmented(self, block: Block, ask: Any) -> Iterator[Any]:
        """Ways to serve a block that keep part of the cotangent (`fragments`), smallest first."""
        del block, ask
        return iter(())


def pushforward(block: Block, pullback: Callable[..., Any], h: State) -> State:
    """J h, from the pullback h' ↦ h' J alone (its transpose); dtypes of the outputs."""
    outputs = tuple(_jax.struct(v.aval) for v in block.outputs)
    transposed = jax.linear_transpose(pullback, outputs)
    (result,) = transposed(tuple(h))
    return tuple(result)


def pull_back_ones(block: Block, pullback: Callable[..., Any]) -> State:
    """The sum of J's rows; if these have disjoint supports, it contains all of them."""
    return tuple(pullback(tuple(_jax.full(v.aval, 1.0) for v in block.outputs)))


def pull_back_units(block: Block, pullback: Callable[..., Any]) -> list[State]:
    """For each output, the pullback of ones for it and zeros for the others."""

    def unit(i: int) -> State:
        return tuple(_jax.full(v.aval, float(i == j)) for j, v in enumerate(block.outputs))

    return [tuple(pullback(unit(i))) for i in range(len(block.outputs))]


def random_cotangents(block: Block) -> State:
    """A random h', the same every time, for checks on a block's own linear map."""
    keys = jax.random.split(jax.random.key(0), len(block.outputs))
    pairs = zip(keys, block.outputs, strict=True)
    return tuple(jax.random.normal(k, v.aval.shape, v.aval.dtype) for k, v in pairs)


def cast_like_outputs(block: Block, h: Sequence[Any]) -> State:
    """Cotangents in the dtypes of the block's outputs."""
    return tuple(a.astype(v.aval.dtype) for a, v in zip(h, block.outputs, strict=True))


# --- the table -----------------------------------------------------------------------------------

_BY_PRIMITIVE: dict[Primitive, Rule] = {}
_FOR_REGIONS: list[Rule] = []

RuleClass = TypeVar("RuleClass", bound=Callable[[], Rule])


def register_vijp(*primitives: Primitive) -> Callable[[RuleClass], RuleClass]:
    """Class decorator: this rule serves blocks that are one equation of these primitives.

    A second registration of a primitive is refused: which of two rules runs must not depend on the
    order of imports.

    **Example:** see CONTRIBUTING.md, "add a rule in five minutes".
    """

    def register(rule: RuleClass) -> RuleClass:
        for primitive in primitives:
            if primitive in _BY_PRIMITIVE:
                raise DuplicateRuleError(
                    f"register_vijp: primitive `{primitive.name}` already has the rule "
                    f"{type(_BY_PRIMITIVE[primitive]).__name__!r}; wrap your function in "
                    "moonwalk.custom_vijp to give it a rule of its own"
                )
        instance: Rule = rule()
        for primitive in primitives:
            _BY_PRIMITIVE[primitive] = instance
        return rule

    if not primitives or not all(isinstance(p, Primitive) for p in primitives):
        raise TypeError(
            "register_vijp takes JAX primitives, e.g. @register_vijp(jax.lax.cumsum_p); "
            f"got {primitives!r}"
        )
    return register


def register_region(rule: RuleClass) -> RuleClass:
    """Class decorator: this rule serves blocks of several equations that it `matches`.

    Regions are asked in the order of registration, before single primitives.
    """
    _FOR_REGIONS.append(rule())
    return rule


class Empty(Rule):
    """A state without entries, whose cotangent has none either; no other rule sees such blocks."""

    name = "empty"

    def verdict(self, block: Block) -> Verdict:
        del block
        return Verdict(True, "its output has no entries")

    def vijp(self, block: Block, factors: Any, kept: Any, h: State) -> State:
        del factors, kept, h
        return tuple(_jax.full(v.aval, 0.0) for v in block.outputs)

    def gain(self, block: Block, operands: Sequence[Any] | None = None) -> Gain:
        del block, operands
        return Gain(1.0, mixes=False)


_EMPTY = Empty()


def rules_for(block: Block) -> Iterator[Rule]:
    """The rules that are for a block, most specific first."""
    n, n_out = block.sizes
    if not n or not n_out:  # the empty case has one rule
        yield from () if n_out else (_EMPTY,)
        return
    yield from (rule for rule in _FOR_REGIONS if rule.matches(block))
    passes_through = any(v in block.inputs for v in block.outputs)
    if len(block.eqns) == 1 and not passes_through and block.eqns[0].primitive in _BY_PRIMITIVE:
        yield _BY_PRIMITIVE[block.eqns[0].primitive]


def all_rules() -> dict[str, Rule]:
    """Every registered rule by name (for tests and docs)."""
    return {rule.name: rule for rule in (*_FOR_REGIONS, *_BY_PRIMITIVE.values())}


def primitives_with_rules() -> dict[Primitive, Rule]:
    """Every primitive that has a rule of its own."""
    return dict(_BY_PRIMITIVE)
