"""One table of layers: whatever `moonwalk.nn` exports has a row here, and keeps the contract."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from moonwalk import nn

BOUNDED = 2.125  # the gain of a diagonal, or of slopes, between r and 4r: (1 + 1/16) / (2/4)


@dataclasses.dataclass(frozen=True)
class Layer:
    """A row.

    `make(key)` builds the layer, `shape` is that of an input. `mode` is how a walk gets through it with
    gains that were measured, `traced` with what a trace knows: "walk", "fragment" or "anchor". `gain` is
    the largest that the layer promises for one of its blocks, at the start and after any training (inf:
    no promise). `holds(layer, x)` asserts the layer's own constraint.
    """

    make: Callable[..., Any]
    shape: tuple[int, ...]
    mode: str = "walk"
    traced: str | None = None  # None: as `mode`
    gain: float = math.inf
    holds: Callable[[Any, Any], None] = lambda layer, x: None
    slow: bool = False  # a variant of another row
    trainable: bool = True  # whether it has parameters


LAYERS: dict[str, Layer] = {}
PLAIN = dict(gain=1.0, trainable=False)


def row(name: str, make: Callable[..., Any], shape: tuple[int, ...], mode: str = "walk", **options: Any):
    assert name not in LAYERS, name
    LAYERS[name] = Layer(make, shape, mode, **options)


def part(cls: Any, *args: Any, **options: Any) -> Callable[..., Any]:
    """make(key) of a layer."""
    return lambda key: cls(*args, **options, key=key)


def fixed(cls: Any, *args: Any, **options: Any) -> Callable[..., Any]:
    """make(key) of a layer without random parameters."""
    return lambda key: cls(*args, **options)


# --- dense ----------------------------------------------------------------------------------------


def orthonormal(w):
    w = np.asarray(w)
    w = w if w.shape[0] >= w.shape[1] else w.T
    np.testing.assert_allclose(w.T @ w, np.eye(w.shape[1]), atol=1e-12)


def bounded(d):
    assert np.all(np.asarray(d) >= 0.5) and np.all(np.asarray(d) <= 2)


def lower_triangular(w):
    w = np.asarray(w)
    assert not np.triu(w, 1).any()
    bounded(np.diagonal(w))


ORTHOGONAL = dict(gain=1.0, holds=lambda layer, x: orthonormal(layer.weight))
row("Linear", part(nn.Linear, 6, 6), (3, 4, 6), **ORTHOGONAL)
row("Linear, contracting", part(nn.Linear, 6, 4), (3, 6), **ORTHOGONAL, slow=True)
row("Linear, expanding", part(nn.Linear, 6, 8), (3, 6), "fragment", **ORTHOGONAL, slow=True)
row(
    "Linear, lower",
    part(nn.Linear, 6, 5, "lower", use_bias=False),
    (3, 6),
    traced="anchor",
    holds=lambda layer, x: lower_triangular(layer.weight),
    slow=True,
)
row("Linear, free", part(nn.Linear, 6, 5, "free"), (3, 6), traced="anchor", slow=True)

# --- convolutions with a pivot --------------------------------------------------------------------


def has_pivot(structure, groups, tap, layer, x):
    """Written out for one geometry each: independent of the code that finds the tap."""
    w = np.asarray(layer.kernel(x.shape[-1 - len(tap) : -1]))[tap]
    for g in np.split(w, groups, axis=1):
        if structure == "lower":
            assert not np.triu(g, 1).any()
        else:
            assert not (g * (1 - np.eye(*g.shape))).any()
        bounded(np.diagonal(g))
        if structure == "identity":
            np.testing.assert_array_equal(np.diagonal(g), 1)


def conv(name, cls, args, shape, tap, mode="walk", structure="diagonal", groups=1, **options):
    make = part(cls, *args, pivot=structure, groups=groups)
    holds = functools.partial(has_pivot, structure, groups, tap)
    row(name, make, shape, mode, holds=holds, **options)


# All windows at once: the pivot is divided by, and nothing mixes.
conv("Conv2d", nn.Conv2d, (4, 4, 3, 2, 1), (2, 7, 6, 4), (1, 1), gain=BOUNDED)
conv(
    "Conv2d, groups", nn.Conv2d, (6, 4, 3, 2, 1), (2, 7, 7, 6), (1, 1), groups=2, gain=BOUNDED, slow=True
)
conv(
    "Conv2d, depthwise",
    nn.Conv2d,
    (4, 4, 3, 2, 1),
    (2, 7, 7, 4),
    (1, 1),
    groups=4,
    gain=BOUNDED,
    slow=True,
)
conv("Conv2d, dilated", nn.Conv2d, (4, 4, 2, 3, 1, 2), (2, 11, 11, 4), (1, 1), gain=BOUNDED, slow=True)
conv("Conv2d, 1×1", nn.Conv2d, (4, 4, 1), (2, 3, 3, 4), (0, 0), gain=BOUNDED, slow=True)
conv(
    "Conv2d, identity", nn.Conv2d, (4, 3, 3, 2, 1), (2, 7, 6, 4), (1, 1), structure="identity", gain=1.0
)
conv("Conv1d", nn.Conv1d, (4, 4, 3, 2, 1), (2, 9, 4), (1,), gain=BOUNDED, slow=True)
conv("Conv3d", nn.Conv3d, (3, 3, 3, 2, 1), (1, 5, 5, 5, 3), (1, 1, 1), gain=BOUNDED, slow=True)
conv("Conv3d, patches", nn.Conv3d, (3, 3, 2, 2), (1, 4, 4, 4, 3), (0, 0, 0), gain=BOUNDED, slow=True)
conv(
    "Conv2d, lower",
    nn.Conv2d,
    (4, 4, 3, 2, 1),
    (2, 7, 6, 4),
    (1, 1),
    structure="lower",
    traced="fragment",  # of nothing: the gain of a declared triangle is assumed, and certified
)
# Windows in an order: no promise after training.
conv("Conv1d, in order", nn.Conv1d, (4, 4, 5, 3, 1), (2, 28, 4), (1,), traced="fragment", slow=True)
conv("Conv1d, valid", nn.Conv1d, (4, 4, 3, 2, "VALID"), (2, 17, 4), (0,), traced="fragment", slow=True)
conv(
    "Conv1d, in order from the end",
    nn.Conv1d,
    (4, 4, 3, 2, ((2, 0),)),
    (2, 16, 4),
    (2,),
    traced="fragment",
    slow=True,
)
# No pivot along the whole axis: spans.
conv("Conv1d, same", nn.Conv1d, (4, 4, 3, 1, 1), (2, 16, 4), (0,), "fragment", structure="lower")
conv("Conv1d, circular", nn.Conv1d, (4, 4, 3, 1, "CIRCULAR"), (2, 16, 4), (0,), "fragment", slow=True)
conv("Conv2d, same", nn.Conv2d, (3, 3, 3, 1, "SAME"), (1, 12, 12, 3), (0, 0), "fragment", slow=True)
conv(
    "Conv2d, circular", nn.Conv2d, (3, 3, 3, 1, "CIRCULAR"), (1, 8, 8, 3), (0, 0), "fragment", slow=True
)
conv("Conv2d, one stride", nn.Conv2d, (4, 4, 3, (1, 2), 1), (2, 12, 7, 4), (0, 1), "fragment", slow=True)
row(
    "Conv2d, free",
    part(nn.Conv2d, 4, 4, 3, 2, 1, pivot="free"),
    (2, 7, 7, 4),
    traced="anchor",
    slow=True,
)
row(
    "Conv2d, free and expanding",
    part(nn.Conv2d, 3, 4, 1, pivot="free"),
    (2, 3, 3, 3),
    "fragment",
    traced="anchor",
    slow=True,
)


def stable(layer, x):
    """Σ ‖D⁻¹ W_j‖₂ ≤ 0.9, by NumPy's own norms."""
    *others, pivot = np.asarray(layer.kernel)
    out = pivot.shape[1]
    d = np.diagonal(pivot)
    bounded(d)
    assert not (pivot * (1 - np.eye(*pivot.shape))).any()
    assert sum(np.linalg.norm(w[:out] / d[:, None], 2) for w in others) <= 0.9


# ‖A‖ ≤ 1.9 and ‖A⁻¹‖ ≤ 10 of the recursion, times the pivot's own
row(
    "CausalConv1d",
    part(nn.CausalConv1d, 4, 4, 3),
    (2, 20, 4),
    traced="fragment",
    gain=19 * BOUNDED,
    holds=stable,
)
row(
    "CausalConv1d, dilated",
    part(nn.CausalConv1d, 4, 3, 2, 3),
    (2, 20, 4),
    traced="fragment",
    gain=19 * BOUNDED,
    holds=stable,
    slow=True,
)


def patches(layer, x):
    w = np.asarray(layer.kernel)
    orthonormal(w.reshape(-1, w.shape[-1]))


row("Patchify", part(nn.Patchify, 3, 10, 2), (2, 4, 5, 3), gain=1.0, holds=patches)
row(
    "Patchify, signals",
    part(nn.Patchify, 3, 6, 2, dims=1),
    (2, 8, 3),
    gain=1.0,
    holds=patches,
    slow=True,
)
row("Patchify, free", part(nn.Patchify, 3, 5, 2, kind="free"), (2, 4, 4, 3), traced="anchor", slow=True)

# --- isometries -----------------------------------------------------------------------------------


def paraunitary(layer, x):
    """Rows of windows at every distance from each other are orthonormal."""
    w = np.asarray(layer.weight)
    *taps, c, _ = w.shape
    for shift in np.ndindex(*(2 * k - 1 for k in taps)):
        by = [n - k + 1 for n, k in zip(shift, taps, strict=True)]
        here = w[tuple(slice(max(0, -n), min(k, k - n)) for n, k in zip(by, taps, strict=True))]
        there = w[tuple(slice(max(0, n), min(k, k + n)) for n, k in zip(by, taps, strict=True))]
        product = here.reshape(-1, c).T @ there.reshape(-1, c)
        np.testing.assert_allclose(product, np.eye(c) * (not any(by)), atol=1e-12)


ISOMETRY = dict(gain=1.0, holds=paraunitary)
row("OrthogonalConv1d", part(nn.OrthogonalConv1d, 4, 3), (2, 6, 4), **ISOMETRY, slow=True)
row(
    "OrthogonalConv1d, zeros",
    part(nn.OrthogonalConv1d, 5, 4, "ZEROS"),
    (2, 8, 5),
    "fragment",
    **ISOMETRY,
)
row("OrthogonalConv1d, even", part(nn.OrthogonalConv1d, 4, 4), (2, 6, 4), **ISOMETRY, slow=True)
row("OrthogonalConv2d", part(nn.OrthogonalConv2d, 4, 3), (1, 4, 5, 4), **ISOMETRY)
row(
    "OrthogonalConv2d, zeros",
    part(nn.OrthogonalConv2d, 4, 3, "ZEROS"),
    (1, 6, 5, 4),
    "fragment",
    **ISOMETRY,
    slow=True,
)
row(
    "OrthogonalConv2d, near the identity",
    part(nn.OrthogonalConv2d, 3, 2, use_bias=False, spread=0.1),
    (1, 4, 4, 3),
    **ISOMETRY,
    slow=True,
)
row("Downsample", part(nn.Downsample, 3, 8), (2, 4, 6, 3), **ORTHOGONAL)
row("Downsample, signals", part(nn.Downsample, 4, 8, dims=1), (2, 6, 4), **ORTHOGONAL, slow=True)

# --- activations, pooling, normalisation ----------------------------------------------------------

row("LeakyReLU", fixed(nn.LeakyReLU), (3, 6), gain=2.125, trainable=False)
row("Abs", fixed(nn.Abs), (3, 6), **PLAIN)
row("MaxMin", fixed(nn.MaxMin), (3, 6), **PLAIN)


def slopes(layer, x):
    assert np.all(layer.slope >= 1 / 8) and np.all(layer.slope <= 1)


SLOPES = dict(traced="anchor", gain=(1 + 1 / 64) / (2 / 8), holds=slopes)
row("PReLU", fixed(nn.PReLU, 6), (3, 6), **SLOPES)
row("PReLU, one slope", fixed(nn.PReLU), (3, 6), **SLOPES, slow=True)
row("MeanPool", fixed(nn.MeanPool, 2), (2, 4, 5, 3), **PLAIN)
row("MeanPool, orthonormal", fixed(nn.MeanPool, 2, 1, orthonormal=True), (2, 6, 3), **PLAIN, slow=True)
row("MaxPool", fixed(nn.MaxPool, 2), (2, 4, 4, 3), **PLAIN)
row("GlobalMean", fixed(nn.GlobalMean), (2, 3, 3, 4), **PLAIN)
row("GlobalMax", fixed(nn.GlobalMax), (2, 3, 3, 4), **PLAIN, slow=True)
row("Unshuffle", fixed(nn.Unshuffle, 2), (2, 4, 6, 3), **PLAIN)
row("GroupNorm", fixed(nn.GroupNorm, 2, 6), (2, 4, 4, 6), "fragment", traced="anchor")

# --- containers -----------------------------------------------------------------------------------


def dense_layer(key):
    return nn.Sequential([nn.Linear(6, 6, key=key), nn.Abs()])


def stacked(layer, x):
    for w in layer.layer[0].weight:  # that of a stack is the stack of weights
        orthonormal(w)


row(
    "Sequential",
    dense_layer,
    (3, 6),
    gain=1.0,
    holds=lambda layer, x: orthonormal(layer[0].weight),
    slow=True,
)
row("Stack", lambda key: nn.Stack(dense_layer, 4, key=key), (3, 6), gain=1.0, holds=stacked)


# --- couplings --------------------------------------------------------------------------------------


def coupling(key):
    f, g = jax.random.split(key)
    return nn.Coupling(nn.Linear(4, 4, kind="free", key=f), nn.Linear(4, 4, kind="free", key=g))


def is_inverted(layer, x):
    np.testing.assert_allclose(layer.inverse(layer(x)), x, rtol=1e-9, atol=1e-9)


# A plan inverts it (tests/test_inversion.py); in a walk, nothing bounds the gain of its vijp.
row("Coupling", coupling, (3, 8), "anchor", holds=is_inverted)


def example(name: str) -> jnp.ndarray:
    """An input."""
    return jnp.asarray(np.random.default_rng(1).standard_normal(LAYERS[name].shape))
