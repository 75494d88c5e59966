"""One table of layer kinds. A kind is a function `kind(g, x)` of a `Draw` and a state, in ordinary JAX.

`where` says which states it takes; `same` that the state keeps its shape and dtype, so that it may stand in a
branch or a loop. What is drawn by `g.choice` and `g.weight` appears in the listing of a network.
"""

import dataclasses
import functools
import operator
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import moonwalk as mw

LARGEST = 2048  # entries of a state


@dataclasses.dataclass(frozen=True)
class Kind:
    name: str
    run: Callable
    where: Callable
    same: bool
    themes: tuple[str, ...]
    often: int
    wide: bool  # whether it needs at least float32


KINDS: dict[str, Kind] = {}

anything = lambda x: True
features = lambda x: x.ndim >= 1 and x.shape[-1] >= 1  # has a last axis to mix
pairs = lambda x: features(x) and x.shape[-1] % 2 == 0
rows = lambda x: x.ndim >= 2 and x.shape[0] >= 1 and features(x)
halves = lambda x: rows(x) and x.shape[0] % 2 == 0
sequence = lambda x: x.ndim == 3 and x.shape[1] >= 2 and features(x)
image = lambda x: x.ndim == 4 and min(x.shape[1:3]) >= 2 and features(x)
nonempty = lambda x: x.size > 0
small = lambda x: features(x) and 2 * x.size <= LARGEST


def kind(where=features, same=True, themes=(), often=1, wide=False):
    def register(run):
        name = run.__name__
        assert name not in KINDS, name
        KINDS[name] = Kind(
            name,
            run,
            where,
            same,
            tuple(themes) if not isinstance(themes, str) else (themes,),
            often,
            wide,
        )
        return run

    return register


def layer(g, x, *, same=False):
    """One layer, of a kind drawn among those that take the state."""
    theme = g.settings.theme
    favour = 25 if theme == "walked" else 6
    table = [k for k in KINDS.values() for _ in range(k.often * (favour if theme in k.themes else 1))]
    nested = len(g.path) > 5
    at = len(g.root.lines)
    while True:
        k = table[g.rng.integers(len(table))]
        if (
            k.where(x)
            and (k.same or not same)
            and not (nested and "nesting" in k.themes)
            and (g.is_wide or not k.wide)
        ):
            break
    g.notes.clear()
    y = k.run(g, x)
    if same:
        assert (y.shape, y.dtype) == (x.shape, x.dtype), (k.name, x, y)
    g.note(k.name, x, y, at)
    return y


def chain(g, x, length=None, *, same=True):
    """A few layers, one after the other."""
    for i in range(g.choice(1, 1, 2, 3) if length is None else length):
        place = g.child(i)
        if place.path not in g.drop:
            x = layer(place, x, same=same)
    return x


def keep(g, x, y):
    """y as something of x's shape and dtype."""
    if y.shape != x.shape:
        y = jnp.mean(y) + jnp.zeros(x.shape, y.dtype) if y.size else jnp.zeros(x.shape, y.dtype)
    return y.astype(x.dtype)


# --- pointwise --------------------------------------------------------------------------------------

ACTIVATIONS = [
    jax.nn.relu, jax.nn.relu6, jax.nn.sigmoid, jax.nn.softplus, jax.nn.sparse_plus, jax.nn.sparse_sigmoid,
    jax.nn.soft_sign, jax.nn.silu, jax.nn.log_sigmoid, jax.nn.leaky_relu, jax.nn.hard_sigmoid, jax.nn.hard_silu,
    jax.nn.hard_tanh, jax.nn.elu, jax.nn.celu, jax.nn.selu, jax.nn.gelu, jax.nn.squareplus, jax.nn.mish,
    jax.nn.identity, jnp.tanh,
]  # fmt: skip


@kind(anything, themes="jax.nn", often=6)
def activation(g, x):
    return g.choice(*ACTIVATIONS)(x)


@kind(anything, themes="jax.nn")
def exact_gelu(g, x):
    return jax.nn.gelu(x, approximate=False)


@kind(anything, themes="walked", often=3)
def leaky(g, x):
    slope = g.choice(0.5, 0.25, 0.1, 0.01, -0.5)
    return g.choice(lambda x, s: jnp.where(x > 0, x, s * x), jax.nn.leaky_relu)(x, slope)


FUNCTIONS = {
    "abs": jnp.abs, "sin": jnp.sin, "cos": jnp.cos, "square": jnp.square, "cube": lambda x: x**3 / 10,
    "exp": lambda x: jnp.exp(-jnp.abs(x)), "log1p": lambda x: jnp.log1p(jnp.abs(x)), "sign": jnp.sign,
    "sqrt": lambda x: jnp.sqrt(jnp.abs(x) + 0.1), "rsqrt": lambda x: lax.rsqrt(1 + x * x), "erf": lax.erf,
    "atan2": lambda x: jnp.arctan2(x, 2.0), "cbrt": lambda x: jnp.cbrt(jnp.abs(x) + 0.1), "floor": jnp.floor,
    "round": jnp.round, "clip": lambda x: jnp.clip(x, -1, 1), "logaddexp": lambda x: jnp.logaddexp(x, 0.3),
    "maximum": lambda x: jnp.maximum(x, 0.5 * x), "minimum": lambda x: jnp.minimum(x, 0.5 * x + 0.5),
    "clip_plus": lambda x: jnp.clip(x, -1, 1) + 0.5 * x, "hypot": lambda x: jnp.hypot(x, 1.0),
    "shrink": lambda x: jnp.sign(x) * jnp.maximum(jnp.abs(x) - 0.5, 0), "sinc": jnp.sinc, "arcsinh": jnp.arcsinh,
    "reciprocal": lambda x: 1 / (2 + jnp.abs(x)), "mod": lambda x: jnp.mod(x, 2.0), "nan_to_num": jnp.nan_to_num,
    "two_slopes": lambda x: jnp.maximum(x - 1, 0) - 0.3 * jnp.maximum(1 - x, 0), "sinh": lambda x: jnp.sinh(jnp.clip(x, -3, 3)),
    "lgamma": lambda x: lax.lgamma(jnp.abs(x) + 1.0), "identity_plus": lambda x: x + 1, "negate": operator.neg,
}  # fmt: skip


@kind(anything, often=4)
def function(g, x):
    return FUNCTIONS[g.choice(*FUNCTIONS)](x)


@kind(anything, themes="walked", often=2)
def pieces(g, x):
    """Piecewise linear, with kinks anywhere: predicates that agree at most values, or at all integers."""
    y = x
    for _ in range(g.choice(1, 2, 3)):
        t, a = g.choice(-1.5, -1, 0, 0.0, 1, 1.5, 50, 51.5), g.choice(-0.4, 0.3, 0.5, 2.0)
        y = y + a * g.choice(
            lambda x, t: jnp.where(x > t, x - t, 0),
            lambda x, t: jnp.where(x >= t, x - t, 0),
            lambda x, t: jnp.maximum(x - t, 0),
        )(x, t)
    return y


@kind(anything)
def casts_to_integers(g, x):
    return x * (1 + 0.1 * jnp.clip(x, -9, 9).astype(jnp.int32) % 3).astype(x.dtype)


@kind(anything)
def numbers(g, x):
    return g.choice(0.1, 0.5, 1.0, 3.0) * x + g.choice(-1, 0, 0.5)


@kind(anything)
def huge_and_back(g, x):
    """Cotangents leave the usual range and come back."""
    a = g.choice(1e-30, 1e-12, 1e12, 1e30) if g.is_wide else g.choice(1e-3, 1e3)
    return keep(g, x, chain(g, x * jnp.asarray(a, x.dtype)) / jnp.asarray(a, x.dtype))


@kind(anything)
def noise(g, x):
    key = g.key()
    how = g.choice("add", "multiply", "dropout", "mask")
    if how == "dropout":
        return jnp.where(jax.random.bernoulli(key, 0.8, x.shape), x / 0.8, 0)
    if how == "mask":
        return x * g.constant(*x.shape, kind="ties").astype(x.dtype)
    n = jax.random.normal(key, x.shape, x.dtype)
    return x + 0.1 * n if how == "add" else x * (1 + 0.1 * n)


@kind(anything)
def stopped(g, x):
    how = g.choice("scale", "add", "shift", "barrier")
    if how == "barrier":
        return lax.optimization_barrier(x)
    held = lax.stop_gradient(x)
    return (
        x * jnp.tanh(held)
        if how == "scale"
        else x + held
        if how == "add"
        else x - held.mean()
        if x.size
        else x
    )


# --- weights ----------------------------------------------------------------------------------------


@kind(features, often=5, same=False, themes=("convolutions", "custom", "control"))
def dense(g, x):
    return x @ g.weight(x.shape[-1], g.choice(4, 6, 8))


@kind(features, often=5, themes=("jax.nn", "control"))
def square_dense(g, x):
    n = x.shape[-1]
    return x @ g.weight(n, n) + (g.weight(n) if g.chance(0.5) else 0)


@kind(features, themes="walked", often=6)
def declared_dense(g, x):
    n = x.shape[-1]
    structure = g.choice("orthogonal", "orthogonal", "lower", "diagonal")
    w = g.weight(n, n, kind=structure)
    if not g.is_wide:  # rounding may break what is declared
        return x @ w
    if g.chance(0.15):
        structure = {"lower": "upper"}.get(structure, structure)
        return (x @ mw.declare(w.T, structure)).astype(x.dtype)
    return (x @ mw.declare(w, structure)).astype(x.dtype)


@kind(features, same=False, themes="walked")
def declared_contraction(g, x):
    n = x.shape[-1]
    w = g.weight(n, g.choice(*[m for m in (1, 4, 6, 8) if m <= n] or [1]), kind="orthogonal")
    return x @ (mw.declare(w, "orthogonal") if g.is_wide else w)


@kind(features, themes="walked", often=2)
def bias(g, x):
    return x + g.weight(x.shape[-1])


@kind(features, themes="walked")
def scale(g, x):
    return x * g.choice(lambda a: 1 + 0.3 * jnp.tanh(a), jnp.exp, lambda a: a)(g.weight(x.shape[-1]))


@kind(anything)
def scalar_weights(g, x):
    return x * g.weight(kind="positive") + g.weight()


@kind(anything)
def unused_weight(g, x):
    g.weight(g.choice(3, 4))
    return x


@kind(features)
def same_weight_twice(g, x):
    n = x.shape[-1]
    w = g.weight(n, n)
    return g.choice(jax.nn.elu, jnp.tanh, jnp.abs, jax.nn.selu)(x @ w) @ g.choice(
        lambda w: w, jnp.transpose
    )(w)


@kind(features)
def diagonal_and_dense(g, x):
    w = g.weight(x.shape[-1], x.shape[-1])
    return jax.nn.elu(x * jnp.diagonal(w)) @ w


@kind(features)
def low_rank(g, x):
    n = x.shape[-1]
    return x @ (g.constant(n, n).astype(x.dtype) + g.weight(n, 2) @ g.weight(2, n))


@kind(features)
def normalised_weight(g, x):
    n = x.shape[-1]
    w = g.weight(n, n)
    return x @ (w / (1e-3 + jnp.sqrt(jnp.sum(w**2, 0))))


@kind(features)
def masked_weight(g, x):
    n = x.shape[-1]
    return x @ (g.weight(n, n) * g.constant(n, n, kind="ties").astype(x.dtype))


@kind(features)
def empty_weight(g, x):
    return x + x[..., :0] @ g.weight(0, x.shape[-1])


@kind(features)
def weight_from_state(g, x):
    """A hypernetwork."""
    n = x.shape[-1]
    w = (g.weight(n, n).reshape(-1) * jnp.mean(jnp.tanh(x))).reshape(n, n) if x.size else g.weight(n, n)
    return keep(g, x, x @ w)


@kind(rows, same=False)
def embedding(g, x):
    """Rows of a table, picked by integers, added; the table may be tied elsewhere."""
    table = g.weight(8, x.shape[-1])
    ids = g.integers(8, *x.shape[:-1])
    return x + g.choice(
        lambda t: t[ids],
        lambda t: jnp.take(t, ids, axis=0),
        lambda t: jax.nn.one_hot(ids, 8, dtype=t.dtype) @ t,
    )(table)


@kind(features, same=False)
def tied_head(g, x):
    table = g.weight(6, x.shape[-1])
    return jax.nn.selu(x + table[g.integers(6)]) @ table.T


@kind(features)
def multi_einsum(g, x):
    n = x.shape[-1]
    return jnp.einsum("...i,ij,jk->...k", x, g.weight(n, 3), g.weight(3, n))


@kind(features)
def solve(g, x):
    n = x.shape[-1]
    a = g.weight(n, n) / 4 + 2 * jnp.eye(n, dtype=x.dtype)
    if not g.is_wide:
        return x @ a
    flat = x.reshape(-1, n).T
    how = g.choice("solve", "triangular", "cholesky", "inverse")
    if how == "triangular":
        y = lax.linalg.triangular_solve(a, flat, left_side=True, lower=True)
    elif how == "cholesky":
        y = jnp.linalg.cholesky(a @ a.T + jnp.eye(n, dtype=x.dtype)) @ flat
    else:
        y = jnp.linalg.solve(a, flat) if how == "solve" else jnp.linalg.inv(a) @ flat
    return y.T.reshape(x.shape)


# --- along the features -----------------------------------------------------------------------------

NORMS = {
    "softmax": jax.nn.softmax, "log_softmax": jax.nn.log_softmax,
    "standardize": lambda x: jax.nn.standardize(x, epsilon=1e-3), "rms": lambda x: x / jnp.sqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-3),
    "unit": lambda x: x / (jnp.linalg.norm(x, axis=-1, keepdims=True) + 0.1), "centre": lambda x: x - x.mean(-1, keepdims=True),
    "sort": lambda x: jnp.sort(x, -1), "cumsum": lambda x: jnp.cumsum(x, -1), "cummax": lambda x: lax.cummax(x, x.ndim - 1),
    "cumprod": lambda x: jnp.cumprod(jnp.tanh(x), -1), "flip": lambda x: jnp.flip(x, -1), "roll": lambda x: jnp.roll(x, 1, -1),
    "logsumexp": lambda x: x - jax.nn.logsumexp(x, -1, keepdims=True), "minus_max": lambda x: x - x.max(-1, keepdims=True),
    "logmeanexp": lambda x: x - jax.nn.logsumexp(x, -1, keepdims=True, b=0.5),
    "cumlogsumexp": lambda x: lax.cumlogsumexp(x, x.ndim - 1), "rank": lambda x: jnp.take_along_axis(x, jnp.argsort(x, -1), -1),
    "hardmax": lambda x: x + jax.nn.one_hot(jnp.argmax(x, -1), x.shape[-1], dtype=x.dtype),
    "ptp": lambda x: x - jnp.min(x, -1, keepdims=True), "median": lambda x: x - jnp.median(x, -1, keepdims=True),
    "diff": lambda x: jnp.diff(x, axis=-1, prepend=0), "prod": lambda x: x + jnp.prod(jnp.tanh(x), -1, keepdims=True),
    "triangle": lambda x: x @ jnp.tril(jnp.ones((x.shape[-1],) * 2, x.dtype)) / x.shape[-1],
    "variance": lambda x: x / (1 + jnp.var(x, -1, keepdims=True)), "associative": lambda x: lax.associative_scan(jnp.add, x, axis=x.ndim - 1),
}  # fmt: skip


@kind(features, themes="jax.nn", often=4)
def along_features(g, x):
    return keep(g, x, NORMS[g.choice(*NORMS)](x))


@kind(features, often=2)
def layer_norm(g, x):
    return jax.nn.standardize(x, epsilon=1e-5) * (1 + 0.1 * g.weight(x.shape[-1])) + g.weight(
        x.shape[-1]
    )


@kind(rows, often=2, themes="convolutions")
def batch_norm(g, x):
    """Its statistics are auxiliary outputs, as running averages are."""
    axes = tuple(range(x.ndim - 1))
    mean, var = x.mean(axes), x.var(axes)
    if not g.compute and len(g.path) == 1:
        g.root.aux[f"statistics {g.path}"] = (mean, var)
    return (x - mean) * lax.rsqrt(var + 1e-3) * g.weight(x.shape[-1], kind="positive") + g.weight(
        x.shape[-1]
    )


@kind(rows)
def batch_mean(g, x):
    return x - x.mean(0, keepdims=True)


@kind(pairs, themes="walked", often=3)
def max_min(g, x):
    a, b = jnp.split(x, 2, -1) if g.chance(0.5) else (x[..., ::2], x[..., 1::2])
    how = g.choice("max", "where", "sort")
    if how == "sort":
        return jnp.sort(x.reshape(*x.shape[:-1], x.shape[-1] // 2, 2), -1).reshape(x.shape)
    first, second = (
        (jnp.maximum(a, b), jnp.minimum(a, b))
        if how == "max"
        else (jnp.where(a > b, a, b), jnp.where(a > b, b, a))
    )
    return jnp.concatenate([first, second], -1)


@kind(pairs, themes="walked")
def rotation(g, x):
    a, b = jnp.split(x, 2, -1)
    angle = g.weight(x.shape[-1] // 2)
    return jnp.concatenate(
        [a * jnp.cos(angle) - b * jnp.sin(angle), a * jnp.sin(angle) + b * jnp.cos(angle)], -1
    )


@kind(pairs, same=False, themes="jax.nn")
def gate(g, x):
    a, b = jnp.split(x, 2, -1)
    return g.choice(
        lambda a, b: jax.nn.glu(jnp.concatenate([a, b], -1)),
        lambda a, b: jax.nn.silu(a) * b,
        lambda a, b: a * b,
    )(a, b)


@kind(pairs, themes=("walked", "custom"), often=2)
def coupling(g, x):
    """A shear; or moonwalk.nn's coupling, which has an inverse."""
    n = x.shape[-1] // 2
    v, w = g.weight(n, n), g.weight(n, n)
    f, h = (lambda x: jnp.tanh(x @ v)), (lambda x: jax.nn.silu(x @ w))
    if g.choice("plain", "moonwalk.nn") == "moonwalk.nn":
        return mw.nn.Coupling(f, h)(x)
    a, b = jnp.split(x, 2, -1)
    a = a + f(b)
    return jnp.concatenate([a, b + h(a)], -1)


@kind(features, themes="walked")
def permutation(g, x):
    order = generator_order(g, x.shape[-1])
    return g.choice(
        lambda x: x[..., order],
        lambda x: jnp.take(x, order, -1),
        lambda x: jnp.zeros_like(x).at[..., order].set(x),
    )(x)


def generator_order(g, n):
    return np.argsort(g.integers(10**6, n))


@kind(pairs, themes="walked")
def interleave(g, x):
    n = x.shape[-1]
    return x.reshape(-1, 2, n // 2).transpose(0, 2, 1)[:, ::-1].reshape(x.shape)


@kind(features)
def top_k(g, x):
    values, places = lax.top_k(x, min(2, x.shape[-1]))
    return g.choice(lambda x: x * (x >= values[..., -1:]), lambda x: x - values.sum(-1, keepdims=True),
                    lambda x: x + jax.nn.one_hot(places[..., 0], x.shape[-1], dtype=x.dtype))(x)  # fmt: skip


@kind(features)
def scatter(g, x):
    n = x.shape[-1]
    at = g.integers(n, 3)
    update = g.weight(3)
    how = g.choice("add", "set", "max", "min")
    return getattr(x.at[..., at], how)(update)


@kind(rows)
def segments(g, x):
    ids = g.integers(3, x.shape[0])
    return x + jax.ops.segment_sum(x, ids, 3)[ids]


@kind(features)
def padded(g, x):
    zero = jnp.zeros((), x.dtype)
    wide = lax.pad(
        x,
        g.choice(lambda: zero, lambda: g.weight())(),
        [(0, 0, 0)] * (x.ndim - 1) + [g.choice((1, 1, 0), (0, 2, 0), (1, 0, 1), (2, 0, 0))],
    )
    return wide[..., : x.shape[-1]]


@kind(features)
def empty_parts(g, x):
    return jnp.concatenate([x[..., :0], x, jnp.zeros((*x.shape[:-1], 0), x.dtype)], -1)


@kind(nonempty)
def through_a_scalar(g, x):
    s = g.choice(
        jnp.mean,
        jnp.max,
        jnp.sum,
        lambda x: x.reshape(-1)[0],
        lambda x: jax.nn.logsumexp(x),
        lambda x: jnp.sqrt(jnp.sum(x * x) + 1),
    )(x)
    return x + 0.1 * jnp.tanh(s) * g.weight()


@kind(lambda x: nonempty(x) and x.ndim >= 1, same=False)
def to_a_scalar(g, x):
    return jnp.tanh(jnp.sum(x))


@kind(lambda x: x.ndim == 0, same=False, often=40)
def from_a_scalar(g, x):
    return x * g.weight(g.choice(4, 6)) + g.weight(1)


@kind(rows, same=False)
def reshaped(g, x):
    return g.choice(
        lambda x: x.reshape(x.shape[0], -1),
        lambda x: x.reshape(-1, x.shape[-1]),
        lambda x: jnp.swapaxes(x, 0, -1),
        lambda x: x[..., 0],
        lambda x: x[: x.shape[0] // 2 + 1],
    )(x)


@kind(lambda x: x.ndim == 2 and small(x), same=False)
def to_a_sequence(g, x):
    return (
        jnp.stack([x, g.choice(jnp.tanh, jnp.abs, lambda x: x)(x)], 1) if g.chance(0.7) else x[:, None]
    )


@kind(lambda x: x.ndim == 3, same=False)
def to_an_image(g, x):
    return x[:, :, None] if g.chance(0.5) or 2 * x.size > LARGEST else jnp.stack([x, -x], 2)


@kind(small, same=False)
def wider(g, x):
    return g.choice(
        lambda x: jnp.concatenate([x, x], -1),
        lambda x: jnp.repeat(x, 2, -1),
        lambda x: jnp.concatenate([x, jnp.sin(x)], -1),
        lambda x: jnp.tile(x, 2),
    )(x)


@kind(lambda x: pairs(x) and x.shape[-1] > 4, same=False)
def narrower(g, x):
    a, b = jnp.split(x, 2, -1)
    return g.choice(operator.add, jnp.maximum, lambda a, b: a, lambda a, b: a * jnp.tanh(b))(a, b)


# --- complex numbers --------------------------------------------------------------------------------


@kind(lambda x: features(x) and nonempty(x), often=2, wide=True)
def fourier(g, x):
    n = x.shape[-1]
    w = g.weight(n // 2 + 1)
    how = g.choice("rfft", "fft", "modulus", "product", "angle")
    if how == "rfft":
        return jnp.fft.irfft(jnp.fft.rfft(x) * (1 + 0.3j * w), n).astype(x.dtype)
    if how == "fft":
        return jnp.real(jnp.fft.ifft(jnp.fft.fft(x) * jnp.exp(1j * w[0]))).astype(x.dtype)
    z = lax.complex(x, jnp.roll(x, 1, -1) + w[0])
    if how == "modulus":
        return jnp.abs(z + (0.5 + 0.5j)).astype(x.dtype)
    z = z * z if how == "product" else jnp.exp(1j * jnp.angle(z + 3))
    return (jnp.real(z) + jnp.imag(z)).astype(x.dtype)


# --- convolutions, pooling, attention ---------------------------------------------------------------


def conv(x, w, strides, padding, groups=1, dilation=1):
    d = x.ndim - 2
    numbers = {1: ("NWC", "WIO", "NWC"), 2: ("NHWC", "HWIO", "NHWC")}[d]
    return lax.conv_general_dilated(
        x,
        w,
        (strides,) * d,
        padding,
        feature_group_count=groups,
        rhs_dilation=(dilation,) * d,
        dimension_numbers=numbers,
    )


spatial = lambda x: (sequence(x) or image(x)) and nonempty(x)


@kind(spatial, same=False, themes="convolutions", often=6)
def convolution(g, x):
    d, m = x.ndim - 2, x.shape[-1]
    groups = g.choice(1, 1, 2, m) if m % 2 == 0 else 1
    taps, stride, dilation = g.choice(1, 2, 3), g.choice(1, 1, 2), g.choice(1, 1, 1, 2)
    padding = g.choice("SAME", "VALID", "lemma", "causal")
    padding = {"lemma": [(stride - 1, 0)] * d, "causal": [(dilation * (taps - 1), 0)] * d}.get(
        padding, padding
    )
    if padding == "VALID" and dilation * (taps - 1) + 1 > min(x.shape[1:-1]):
        padding = "SAME"
    out = m * g.choice(1, 1, 2) if x.size * 2 <= LARGEST else m
    y = conv(x, g.weight(*(taps,) * d, m // groups, out), stride, padding, groups, dilation)
    return y + (g.weight(out) if g.chance(0.5) else 0) if min(y.shape) > 0 else x


@kind(spatial, same=False, themes=("convolutions", "walked"), often=4)
def pivot_convolution(g, x):
    """A kernel whose lemma's tap has a declared structure."""
    d, m = x.ndim - 2, x.shape[-1]
    structure = g.choice("orthogonal", "lower", "diagonal")
    stride, taps = g.choice((2, 3), (2, 2), (1, 2), (1, 3))
    w = 0.1 * g.weight(*(taps,) * d, m, m) / max(1.0, g.settings.weight_scale)
    pivot = g.weight(m, m, kind=structure)
    # Strided: the tap at the window's own place; stride one, causal: the last tap.
    tap = (1,) * d if stride == 2 else (taps - 1,) * d
    w = w.at[tap].set(pivot)
    if g.is_wide:
        w = mw.declare(w, structure, taps=tap)
    padding = [(1, taps - 2)] * d if stride == 2 else [(taps - 1, 0)] * d
    return conv(x, w, stride, padding)


@kind(spatial, same=False, themes="convolutions")
def transposed_convolution(g, x):
    d, m = x.ndim - 2, x.shape[-1]
    if x.size * 2**d > LARGEST:
        return x
    return lax.conv_transpose(
        x,
        g.weight(*(2,) * d, m, m),
        (2,) * d,
        g.choice("SAME", "VALID"),
        dimension_numbers={1: ("NWC", "WIO", "NWC"), 2: ("NHWC", "HWIO", "NHWC")}[d],
    )


@kind(spatial, same=False, themes="convolutions", often=2)
def pooling(g, x):
    d = x.ndim - 2
    window, strides = (1, *(2,) * d, 1), g.choice((1, *(2,) * d, 1), (1, *(1,) * d, 1))
    if g.choice("max", "mean") == "max":
        return lax.reduce_window(x, np.asarray(-np.inf, x.dtype), lax.max, window, strides, "SAME")
    return lax.reduce_window(x, np.asarray(0, x.dtype), lax.add, window, strides, "SAME") / 2**d


@kind(
    lambda x: spatial(x) and all(n % 2 == 0 for n in x.shape[1:-1]), themes=("convolutions", "nesting")
)
def u_shape(g, x):
    """Down, through some layers, up again, and beside what was there before."""
    d, n = x.ndim - 2, x.shape[1:-1]
    halves = [v for m in n for v in (m // 2, 2)]
    y = x.reshape(x.shape[0], *halves, x.shape[-1]).mean(tuple(range(2, 2 * d + 1, 2)))
    y = chain(g, y)
    for axis in range(1, d + 1):
        y = jnp.repeat(y, 2, axis)
    return jnp.concatenate([x, y], -1) @ g.weight(2 * x.shape[-1], x.shape[-1])


@kind(lambda x: sequence(x) and nonempty(x), themes="jax.nn", often=3)
def attention(g, x):
    n = x.shape[-1]
    q, k, v = (x @ g.weight(n, n) for _ in range(3))
    how = g.choice("plain", "causal", "jax.nn", "linear")
    if how == "jax.nn" and g.nominal == "float32":
        return jax.nn.dot_product_attention(q[:, :, None], k[:, :, None], v[:, :, None])[:, :, 0]
    if how == "linear":
        return jnp.einsum("nik,njk,njv->niv", jax.nn.elu(q) + 1, jax.nn.elu(k) + 1, v) / x.shape[1]
    scores = jnp.einsum("nik,njk->nij", q, k) / 2
    if how == "causal":
        scores = jnp.where(
            jnp.tril(jnp.ones(scores.shape[1:], bool)), scores, -1e4 if g.nominal == "float16" else -1e9
        )
    return x + jax.nn.softmax(scores) @ v


@kind(lambda x: spatial(x) and x.shape[-1] % 2 == 0, themes="convolutions")
def group_norm(g, x):
    y = x.reshape(*x.shape[:-1], 2, -1)
    axes = (*range(1, x.ndim - 1), x.ndim)
    y = (y - y.mean(axes, keepdims=True)) * lax.rsqrt(y.var(axes, keepdims=True) + 1e-3)
    return y.reshape(x.shape) * g.weight(x.shape[-1], kind="positive")


# --- custom derivatives -----------------------------------------------------------------------------


def backward(fun, bwd):
    """A custom_vjp without residuals."""
    f = jax.custom_vjp(fun)
    f.defvjp(lambda x: (fun(x), None), lambda _, h: (bwd(h),))
    return f


CUSTOM = {
    "reversal": backward(lambda x: x, lambda h: -0.5 * h),
    "clipped": backward(lambda x: x, lambda h: jnp.clip(h, -0.01, 0.01)),
    "unit": backward(lambda x: x, lambda h: h / (jnp.sqrt(jnp.sum(h * h)) + 1e-3)),
    "sign": backward(jnp.tanh, jnp.sign),
    "straight_through_round": backward(lambda x: jnp.round(x), lambda h: h),
    "straight_through_sign": backward(jnp.sign, lambda h: h),
    "square": backward(lambda x: x, lambda h: h * jnp.abs(h)),
    "zero": backward(jnp.sin, jnp.zeros_like),
    "constant": backward(jnp.sin, jnp.ones_like),
    "stopped_round": lambda x: x + lax.stop_gradient(jnp.round(x) - x),
}  # fmt: skip


@kind(anything, themes="custom", often=4)
def custom_backward(g, x):
    return CUSTOM[g.choice(*CUSTOM)](x)


@jax.custom_jvp
def own_slope(x):
    return jnp.maximum(x, 0)


own_slope.defjvp(
    lambda primals, tangents: (
        own_slope(*primals),
        jnp.where(primals[0] > 0, 1.0, 0.25).astype(primals[0].dtype) * tangents[0],
    )
)


@jax.custom_jvp
def smooth(x, w):
    return jnp.tanh(x) * w


@smooth.defjvp
def _(primals, tangents):
    (x, w), (dx, dw) = primals, tangents
    return smooth(x, w), (0.5 + 1 / (1 + x * x)) * w * dx + jnp.tanh(x) * dw


@jax.custom_vjp
def remembering(x, w):
    return x @ w


remembering.defvjp(
    lambda x, w: (x @ w, (x, w)),
    lambda kept, h: (
        h @ kept[1].T,
        jnp.clip(jnp.tensordot(kept[0], h, [tuple(range(h.ndim - 1))] * 2), -1, 1),
    ),
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def powered(x, n):
    return x**n


powered.defvjp(lambda x, n: (x**n, x), lambda n, x, h: (n * jnp.abs(x) ** (n - 1) * h,))


@kind(features, themes="custom", often=2)
def custom_with_residuals(g, x):
    n = x.shape[-1]
    how = g.choice("own_slope", "smooth", "remembering", "powered")
    if how == "smooth":
        return smooth(x, jnp.broadcast_to(g.weight(n), x.shape))
    return (
        {"own_slope": own_slope, "powered": lambda x: powered(x, 2)}[how](x)
        if how != "remembering"
        else remembering(x, g.weight(n, n))
    )


@mw.custom_vijp
def turn(x, angle):
    a, b = jnp.split(x, 2, -1)
    return jnp.concatenate(
        [jnp.cos(angle) * a - jnp.sin(angle) * b, jnp.sin(angle) * a + jnp.cos(angle) * b], -1
    )


turn.defvijp(lambda primals, h: turn(h, primals[1]))


@mw.custom_vijp
def with_sum(x):
    return jnp.concatenate([x, x.sum(-1, keepdims=True)], -1)


with_sum.deffragment(
    lambda primals, h_out: h_out[..., -1:],
    lambda primals, last, h: jnp.concatenate([h - last, last], -1),
)


@kind(pairs, themes=("custom", "walked"), often=2)
def custom_vijp(g, x):
    if g.choice("turn", "with_sum") == "turn":
        return turn(x, g.weight().astype(x.dtype))
    n = x.shape[-1]
    w = g.weight(n + 1, n, kind="orthogonal")
    return with_sum(x) @ (mw.declare(w, "orthogonal") if g.is_wide else w)


# --- moonwalk.nn ------------------------------------------------------------------------------------


def module(g, make):
    """A module of `moonwalk.nn`, its raw arrays wherever an optimizer might have moved them."""
    shapes = eqx.filter_eval_shape(make)
    return jax.tree.map(
        lambda a: (
            g.weight(*a.shape, scale=0.5)
            if eqx.is_array(a) or isinstance(a, jax.ShapeDtypeStruct)
            else a
        ),
        shapes,
    )


@kind(features, themes="walked", often=3, wide=True)
def nn_linear(g, x):
    n, sort = x.shape[-1], g.choice("orthogonal", "lower", "free")
    return keep(g, x, module(g, lambda: mw.nn.Linear(n, n, sort, key=jax.random.key(0)))(x))


@kind(spatial, same=False, themes=("walked", "convolutions"), often=3, wide=True)
def nn_convolution(g, x):
    n, key = x.shape[-1], jax.random.key(0)
    if x.ndim == 3:
        make = g.choice(
            lambda: mw.nn.Conv1d(n, n, 3, 2, 1, key=key),
            lambda: mw.nn.CausalConv1d(n, n, 2, key=key),
            lambda: mw.nn.OrthogonalConv1d(n, 3, key=key),
        )
    else:
        make = g.choice(
            lambda: mw.nn.Conv2d(n, n, 3, 2, 1, key=key),
            lambda: mw.nn.Conv2d(n, n, 3, 2, 1, groups=2 - n % 2, key=key),
            lambda: mw.nn.OrthogonalConv2d(n, 2, key=key),
        )
    return module(g, make)(x)


@kind(pairs, themes="walked", often=2, wide=True)
def nn_activation(g, x):
    return g.choice(lambda: mw.nn.LeakyReLU(0.5), mw.nn.Abs, mw.nn.MaxMin)()(x)


# --- structure: branches, loops, calls --------------------------------------------------------------

NESTING = ("nesting", "control")


@kind(anything, themes=("nesting", "convolutions", "jax.nn"), often=3)
def residual(g, x):
    return x + g.choice(1, 0.5) * chain(g, x)


@kind(anything, themes="nesting", often=2)
def fork(g, x):
    a, b = chain(g.child("a"), x), chain(g.child("b"), x)
    return g.choice(operator.add, operator.sub, operator.mul, jnp.maximum)(a, b)


@kind(lambda x: True, often=2)
def earlier_state(g, x):
    """A skip from any earlier state."""
    if not g.root.states or g.compute or len(g.path) != 1:
        return x
    s = g.root.states[g.rng.integers(len(g.root.states))]
    g.notes.append(f"{list(s.shape)}")
    if s.shape == x.shape:
        return g.choice(operator.add, jnp.maximum, lambda a, b: a * jnp.tanh(b))(x, s).astype(x.dtype)
    return (x + jnp.tanh(s).sum()).astype(x.dtype)


@kind(lambda x: features(x), same=False)
def beside_an_earlier_state(g, x):
    states = [s for s in g.root.states if s.shape[:-1] == x.shape[:-1] and s.ndim == x.ndim]
    if not states or g.compute or len(g.path) != 1:
        return x
    s = states[g.rng.integers(len(states))]
    return jnp.concatenate([x, s.astype(x.dtype)], -1) if x.size + s.size <= LARGEST else x


@kind(anything, themes=NESTING, often=4)
def called(g, x):
    how = g.choice("jit", "checkpoint", "dots", "closed_call", "nested")
    inside = lambda x: chain(g.child("inside"), x)
    wrap = {"jit": jax.jit, "checkpoint": jax.checkpoint, "nested": lambda f: jax.jit(jax.checkpoint(f)),
            "dots": functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.dots_saveable)}  # fmt: skip
    return wrap.get(how, lambda f: f)(inside)(x)


@kind(lambda x: x.ndim >= 2 and x.shape[0] >= 1, themes=NESTING, often=2)
def mapped(g, x):
    inside = lambda x: chain(g.child("inside"), x)
    if g.choice("vmap", "vmap", "map") == "vmap":
        axis = g.choice(0, 0, -1)
        return jax.vmap(inside, axis, axis)(x)
    return lax.map(inside, x)


def scanned(g, x, length, *, reverse=False, outputs=False, counter=False, key=False, unroll=1):
    """A scan over stacked weights; carries may hold an integer and a PRNG key, steps may give outputs."""
    if g.filling:
        child = g.child("body", {})
        y = chain(child, x)
        g.stack(length, child.weights, child.makers)
        return (y + 0 * jnp.sum(y)).astype(x.dtype) if outputs and y.size else y
    weights = g.stack(length, None, None)

    def body(carry, ws):
        y = chain(g.child("body", ws), carry[0])
        i, k = carry[1] + 1, carry[2]
        if counter:
            y = y * jnp.where(carry[1] % 2 == 0, 1.0, 0.9).astype(y.dtype)
        if key:
            k, now = jax.random.split(k)
            y = y * (1 + 0.1 * jax.random.normal(now, y.shape, y.dtype))
        return (y, i, k), (jnp.tanh(jnp.sum(y)) if outputs else None)

    state = (x, jnp.zeros((), jnp.int32), jax.random.key(1) if key else jnp.zeros((), bool))
    (y, _, _), out = lax.scan(body, state, weights, length=length, reverse=reverse, unroll=unroll)
    return (y + 0.1 * jnp.sum(out)).astype(x.dtype) if outputs else y


@kind(anything, themes=("nesting", "control", "walked"), often=4)
def scan(g, x):
    length = g.choice(0, 1, 2, 3, 5, 9) if len(g.path) > 2 else g.choice(1, 2, 3, 5, 8, 13, 30)
    options = {
        name: g.chance(p)
        for name, p in (("reverse", 0.3), ("outputs", 0.3), ("counter", 0.2), ("key", 0.1))
    }
    g.notes += [name for name, on in options.items() if on]
    return scanned(
        g, x, length, unroll=2 if g.chance(0.1) and length % 2 == 0 and length else 1, **options
    )


@kind(lambda x: 0 < x.size <= 128, themes="nesting")
def deep_scan(g, x):
    return scanned(g, x, g.choice(60, 120, 200) if len(g.path) == 1 else 2)


@kind(lambda x: 0 < x.size <= 256 and features(x), themes=("walked", "nesting"), often=2)
def deep_walk(g, x):
    """Many layers that can be walked, as a scan or written out, in which cotangents shrink or grow."""
    n = x.shape[-1]
    factor, how = g.choice(1.0, 0.5, 0.1, 2.0), g.choice("abs", "leaky", "none")
    act = {"abs": jnp.abs, "leaky": lambda x: jnp.where(x > 0, x, 0.5 * x), "none": lambda x: x}[how]
    structure = g.choice("orthogonal", "orthogonal", "diagonal")
    say = lambda w: mw.declare(w, structure) if g.is_wide else w
    one = lambda x, w, b: (factor * act(x @ say(w)) + b).astype(x.dtype)
    if g.choice("scan", "loop") == "loop":
        for _ in range(g.choice(3, 4, 8, 16)):
            x = one(x, g.weight(n, n, kind=structure), g.weight(n))
        return x
    length = g.choice(12, 40, 120, 200) if len(g.path) == 1 else g.choice(3, 3, 12, 12)
    w, b = g.weight(length, n, n, kind=structure), g.weight(length, n)
    return lax.scan(lambda x, p: (one(x, *p), None), x, (w, b))[0]


@kind(anything, themes=NESTING)
def loop(g, x):
    """The same few layers again and again."""
    for _ in range(g.choice(2, 3, 4)):
        x = chain(g.child("again"), x, 1)
    return x


@kind(anything, themes=NESTING, often=2)
def counted(g, x):
    """A fori_loop, which JAX differentiates as a scan."""
    return lax.fori_loop(
        0, g.choice(1, 2, 5), lambda i, x: (x + 0.1 * chain(g.child("body"), x)).astype(x.dtype), x
    )


@kind(nonempty, themes=NESTING)
def searched(g, x):
    """A while_loop, whose result is not differentiated."""
    s = lax.while_loop(
        lambda s: s[0] < 5,
        lambda s: (s[0] + 1, 0.5 * s[1] + 0.1),
        (0, lax.stop_gradient(jnp.max(jnp.abs(x)))),
    )[1]
    return x / (1 + s)


@kind(nonempty, themes=NESTING, often=2)
def decided(g, x):
    """A cond or a switch on the state or on data."""
    branches = [lambda x: chain(g.child("a"), x), lambda x: chain(g.child("b"), x), lambda x: x]
    if g.choice("cond", "switch") == "cond":
        return lax.cond(jnp.mean(x) > g.choice(0, 0.5), *branches[:2], x)
    return lax.switch(jnp.argmax(x.reshape(-1)) % 3, branches, x)


@kind(lambda x: rows(x) and nonempty(x), themes="control")
def experts(g, x):
    """Every row goes through the layer that its router picks."""
    n = x.shape[-1]
    flat = x.reshape(-1, n)
    weight, chosen = lax.top_k(jax.nn.softmax(flat @ g.weight(n, 3)), 1)
    out = jnp.einsum("bi,bij->bj", flat, g.weight(3, n, n)[chosen[:, 0]])
    return (weight * out).reshape(x.shape)


@kind(anything, themes="nesting", often=2)
def half_precision(g, x):
    """A stretch in fewer bits (in the exact twin of the network: as it is)."""
    dtype = g.choice(
        jnp.bfloat16, jnp.bfloat16, jnp.float16, *([jnp.float32] if g.nominal == "float64" else [])
    )
    inside = g.child("inside")
    inside.nominal = np.dtype(dtype).name
    g.root.narrow.add(inside.nominal)
    if g.exact:
        return chain(inside, x)
    inside.compute = inside.nominal
    return chain(inside, x.astype(dtype)).astype(x.dtype)


@kind(features, themes="control")
def fixed_point(g, x):
    """An equilibrium whose derivative is given by its own (custom_vjp around a loop)."""
    w = 0.1 * jnp.tanh(g.weight(x.shape[-1], x.shape[-1]))

    @jax.custom_vjp
    def solved(w, x):
        return lax.fori_loop(0, 20, lambda _, z: jnp.tanh(z @ w + x), jnp.zeros_like(x))

    def bwd(kept, h):
        w, x, z = kept
        _, pull = jax.vjp(lambda w, x, z: jnp.tanh(z @ w + x), w, x, z)
        u = lax.fori_loop(0, 20, lambda _, u: h + pull(u)[2], h)
        return pull(u)[:2]

    solved.defvjp(lambda w, x: (z := solved(w, x), (w, x, z)), bwd)
    return solved(w, x)


@kind(nonempty)
def inner_gradient(g, x):
    """A gradient inside: second derivatives."""
    a = g.weight()
    energy = lambda x: jnp.sum(jnp.sin(x) * jnp.cos(a * x))
    return x - 0.1 * jax.grad(energy)(x)
