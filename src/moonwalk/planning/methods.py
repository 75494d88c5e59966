"""How to differentiate: small frozen objects for `method=`, one for each row of the paper's Table 1.

Orders are the paper's: L layers of n numbers with d parameters each, M_x bytes that ∂y/∂x needs and M_θ
that ∂y/∂θ needs besides. Time is that of one example; both grow with the batch. `moonwalk bench table1`
measures them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .. import _jax, settings
from ..rules.fragments import Fragment

CHECKPOINT = ("auto", "sqrt", "block")
SEGMENTS = ("sqrt", "recursive", "block")
WALK = ("auto", "always")
ON_INEXACT = ("raise", "nan", "ignore")


@dataclass(frozen=True)
class Backprop:
    """Reverse mode that keeps everything: `jax.value_and_grad` itself.

    Time O(n²L + ndL), memory O((M_x + M_θ) L).
    """


@dataclass(frozen=True)
class Checkpoint:
    """Reverse mode that keeps the states between segments, and runs each segment again.

    Time O(n²L + ndL), at most one forward pass more (recursive: log₄ L of them); memory
    O(√(n (M_x + M_θ) L)) (recursive: O(n log L + M_x + M_θ), and over a scan copies of what its
    layers read, of a third or of all). Segments are cut between the layers of the traced function, and
    scans become scans of checkpointed scans. A segment whose first state is larger than its residuals is
    stored instead, and so is a scan that prints.

    **Arguments:**

    - `segments`: None, the mixture of storing and recomputing with the lowest predicted peak; a number
        of segments with equally many layers (fewer, if it does not divide the number of layers); "sqrt",
        the square root of the depth, rounded up; "block", one for every layer; "recursive", quarters of
        quarters.
    - `inputs`: differentiated arguments (one number or several) that are inputs, not weights.
    """

    segments: int | str | None = None
    inputs: tuple[int, ...] = ()

    # What plans ask of every method; here nothing is walked.
    tolerance: ClassVar[float | None] = None
    walk_precision: ClassVar[Any] = None
    on_inexact: ClassVar[str] = "raise"

    def __post_init__(self) -> None:
        _check_segments(self, "segments", SEGMENTS)
        _set_inputs(self)


@dataclass(frozen=True)
class Forward:
    """Forward mode: one jvp for every parameter, exact.

    Time O(n²dL²), memory O(M_x + M_θ) for each of the jvps that run side by side.

    **Arguments:**

    - `chunk`: how many jvps run side by side.
    """

    chunk: int = 16

    def __post_init__(self) -> None:
        _check_chunk(self)


@dataclass(frozen=True, eq=False)
class ProjectedForward:
    """An estimate of the gradient from directional derivatives: Σ ⟨∇J, v⟩ v over random v.

    Time O(n²L + ndL) for each sample, memory O(M_x + M_θ). Unbiased, with a variance of (D + 1) ‖∇J‖²
    over the number of samples, D being the number of all parameters: the one method of the paper's table
    that is not exact.

    With a predicted `direction` d, the derivative along d is computed exactly and the samples only
    estimate the part of the gradient that is orthogonal to d. With u = d / ‖d‖ and v⊥ = v − ⟨v, u⟩ u for
    a normal v,

        ⟨∇J, u⟩ u + mean ⟨∇J, v⊥⟩ v⊥,        E v⊥ v⊥ᵀ = I − u uᵀ

    is unbiased whatever the prediction, and exact where it is right.

    **Arguments:**

    - `key`: a `jax.random` key, or a number that makes one. Use a new key for every step: inside `jit`,
        make the method from a key that is an argument.
    - `samples`: the number of random directions. 0: only the projection onto `direction`, which is
        biased.
    - `direction`: None, or what the gradient is predicted to be, as the gradient is returned.
    """

    key: Any
    samples: int = 1
    direction: Any = None

    def __post_init__(self) -> None:
        least = 1 if self.direction is None else 0
        if not settings.is_count(self.samples, least):
            rule = f"counts random directions, at least {least}"
            rule += " (0 needs a direction)" if least else ""
            raise settings.refuse("ProjectedForward", "samples", rule, self.samples)
        object.__setattr__(self, "samples", int(self.samples))
        is_number = isinstance(self.key, int | np.integer) and not isinstance(self.key, bool)
        dtype = getattr(self.key, "dtype", None)
        is_key = dtype is not None and (
            jnp.issubdtype(dtype, jax.dtypes.prng_key) or (dtype == np.uint32 and np.ndim(self.key) > 0)
        )
        if not (is_number or is_key):
            raise TypeError(
                "ProjectedForward: key takes a jax.random key, or a whole number that makes one, got "
                f"{self.key!r}"
            )

    def random_key(self) -> Any:
        """The key, made from a number if it is one."""
        if isinstance(self.key, int | np.integer):
            return jax.random.key(self.key)
        return self.key

    def _identity(self) -> tuple[Any, ...]:
        leaves, tree = jax.tree.flatten(self.direction)
        return (self.samples, tree, *(_identity(a) for a in (self.key, *leaves)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ProjectedForward) and self._identity() == other._identity()

    def __hash__(self) -> int:
        return hash(self._identity())


@dataclass(frozen=True)
class Reversible:
    """Reverse mode that reconstructs each state from the one after it: for invertible networks.

    Time O(n²L + ndL), memory O(M_x + M_θ). It inverts couplings (`moonwalk.nn.Coupling`, and any
    function with `custom_vijp.definverse`), square affine layers that have a vijp, and pointwise
    functions like LeakyReLU. The stem up to the first layer, and the head from the last one on, are
    stored. Anything else in between is refused with `NotInvertibleError`, which names it.

    **Arguments:**

    - `tolerance`: the largest relative difference allowed between the first state and its
        reconstruction. None: 1e-11 in float64, 1e-4 in float32.
    - `inputs`: differentiated arguments (one number or several) that are inputs, not weights.
    - `on_inexact`: what happens if the difference is larger: "raise", "nan" (the gradients) or "ignore".
    """

    tolerance: float | None = None
    inputs: tuple[int, ...] = ()
    on_inexact: str = "raise"

    walk_precision: ClassVar[Any] = None

    def __post_init__(self) -> None:
        _check(self)


@dataclass(frozen=True)
class Moonwalk:
    """The paper's algorithm: walk what can be walked, keep or recompute the rest.

    Time O(n²L + ndL), memory O(M_x L + M_θ); with `checkpoint` O(√(n M_x L) + M_θ).

    **Arguments:**

    - `budget`: the memory that a call may take, arguments and results included: bytes, a size such as
        "8GiB" or "24GB", or "device": what the default device has free when the plan is made. The
        fastest plan is chosen whose predicted peak fits; `BudgetError` if none does. None: the plan of
        least memory, or a faster one within a tenth of it.
    - `tolerance`: the relative error of a cotangent that a plan may predict before it places an anchor.
        None: 1e-11 in float64, 1e-4 in float32, 1e-2 in bfloat16 and float16. `math.inf`: no anchors for
        accuracy's sake, and whatever has a rule may be walked; certificates are held to the default.
    - `anchor_every`: an anchor every so many layers, whatever the gains are.
    - `fragment`: how convolutions of stride one keep part of a cotangent: a `moonwalk.Fragment(...)`,
        which is used whatever its gain and certified. None: the largest staggered span that the
        tolerance allows, as far as that is known.
    - `checkpoint`: walks in segments whose Phase I is run again from the state at their start: less
        memory for one more forward pass. None: no segments; "auto": the number that takes least memory;
        a number of segments; "sqrt": the square root of the depth; "block": one for every layer.
    - `walk_precision`: the precision of products in the cotangents' chain. None: the ambient one where
        the walk loses nothing (in TF32: little, so that it stays within 1e-2), true float32 elsewhere.
    - `inputs`: differentiated arguments (one number or several) that are inputs, not weights.
    - `on_inexact`: what happens if a walk is less exact than the tolerance, or a weight does not have
        the structure declared for it: "raise", "nan" (all gradients) or "ignore".
    - `walk`: "auto", where that takes a tenth less memory than storing or recomputing; "always",
        wherever it can be done, as in the paper.
    """

    tolerance: float | None = None
    anchor_every: int | None = None
    fragment: Fragment | None = None
    checkpoint: int | str | None = None
    walk_precision: Any = None
    inputs: tuple[int, ...] = ()
    on_inexact: str = "raise"
    walk: str = "auto"
    budget: int | str | None = None

    def __post_init__(self) -> None:
        settings.choice("Moonwalk", "walk", self.walk, WALK)
        if self.budget is not None:
            self._check_budget()
        if self.anchor_every is not None:
            _set(self, "anchor_every", _counted(self, "anchor_every", "counts layers"))
        if self.fragment is not None and not isinstance(self.fragment, Fragment):
            raise ValueError(
                "Moonwalk: fragment takes moonwalk.Fragment(span=..., stagger=...) or None, got "
                f"{self.fragment!r}"
            )
        _check_segments(self, "checkpoint", CHECKPOINT)
        _check(self)

    def _check_budget(self) -> None:
        if self.budget != "device":
            settings.size("Moonwalk", "budget", self.budget)
        settled = [f"walk={self.walk!r}"] if self.walk == "always" else []
        settled += [] if self.checkpoint in (None, "auto") else [f"checkpoint={self.checkpoint!r}"]
        if settled:
            raise ValueError(
                f"Moonwalk: budget={self.budget!r} chooses how much is kept, and {settled[0]} leaves no "
                "choice; leave out one of the two"
            )


@dataclass(frozen=True)
class PureForward:
    """The paper's forward-only variant: JVPs for the seed, then the sweep. Memory is constant in depth.

    Time O(n³L + ndL), memory O(M_x + M_θ). Needs a network that can be walked from its first state to
    its last weight without anchors, and one jvp for every number of that first state.

    **Arguments:**

    - `chunk`: how many jvps run side by side.
    - `per_example`: the loss is a sum or a mean over independent examples, which lie along axis 0 of the
        first state and of what the loss sums: one jvp per feature then serves all examples. Examples
        that are not independent (batch normalisation) are noticed by the check at the sweep's end.
    - `tolerance`, `walk_precision`, `inputs`, `on_inexact`: as for `Moonwalk`.
    """

    chunk: int = 16
    per_example: bool = False
    tolerance: float | None = None
    walk_precision: Any = None
    inputs: tuple[int, ...] = ()
    on_inexact: str = "raise"

    def __post_init__(self) -> None:
        _check_chunk(self)
        settings.flag("PureForward", "per_example", self.per_example)
        _check(self)


def _identity(leaf: Any) -> Any:
    """A key that is equal for equal settings: an array's values, or the identity of a tracer."""
    typed = hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    known = _jax.concrete(jax.random.key_data(leaf) if typed else leaf)
    if known is None:
        return id(leaf)
    return (known.shape, str(leaf.dtype if typed else known.dtype), known.tobytes())


def _set(method: Any, name: str, value: Any) -> None:
    """Replace a setting by its normalised value; methods are frozen."""
    object.__setattr__(method, name, value)


def _counted(method: Any, name: str, what: str) -> int:
    return settings.count(type(method).__name__, name, getattr(method, name), what=what)


def _check_segments(method: Any, name: str, words: tuple[str, ...]) -> None:
    given = getattr(method, name)
    if settings.is_count(given):
        _set(method, name, int(given))
    elif given is not None and not (isinstance(given, str) and given in words):
        rule = f"must be None, a number of segments, or one of {', '.join(map(repr, words))}"
        raise settings.refuse(type(method).__name__, name, rule, given)


def _check_chunk(method: Any) -> None:
    _set(method, "chunk", _counted(method, "chunk", "counts jvps side by side"))


def _set_inputs(method: Any) -> None:
    """`inputs`: one number, or several, like `argnums`."""
    given = method.inputs
    inputs = (given,) if isinstance(given, int | np.integer) else given
    is_sequence = isinstance(inputs, list | tuple)
    whole = is_sequence and all(
        isinstance(i, int | np.integer) and not isinstance(i, bool) for i in inputs
    )
    if not whole or len(set(inputs)) < len(inputs):
        raise settings.refuse(
            type(method).__name__,
            "inputs",
            "takes numbers of differentiated arguments, each once, such as 1 or (1, 2)",
            given,
        )
    _set(method, "inputs", tuple(map(int, inputs)))


def _check(method: Any) -> None:
    """Check and normalise the settings that walks and inverses share."""
    name = type(method).__name__
    if method.tolerance is not None:
        rule = f"must be positive (math.inf for no {'anchors' if name == 'Moonwalk' else 'limit'})"
        value = settings.number(name, "tolerance", method.tolerance, rule, lambda v: v > 0)
        _set(method, "tolerance", value)
    settings.choice(name, "on_inexact", method.on_inexact, ON_INEXACT)
    _set_inputs(method)
    precision = method.walk_precision
    if precision is not None and not isinstance(precision, lax.Precision | lax.DotAlgorithmPreset):
        try:
            _set(method, "walk_precision", lax.Precision(precision))
        except (ValueError, TypeError):
            raise ValueError(
                f"{name}: walk_precision must be None, a jax.lax.Precision (or its name: "
                f"'high', 'highest') or a jax.lax.DotAlgorithmPreset, got {precision!r}"
            ) from None
