"""One table of cases, multiplied by {eager, jit, vmap} × dtype in `test_table.py`.

A case is a function, its primals, and the rules it is there for. `test_meta.py` fails when a
registered rule, or a primitive that has one, occurs in no case.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from weights import diagonal, general, kernel, lower, normal, orthogonal, upper

import moonwalk as mw


class Case(NamedTuple):
    name: str
    fun: Callable[..., Any]
    primals: tuple[Any, ...]
    half: bool = True  # also run in bfloat16
    tolerance: float = 1e-9  # in float64


CASES: dict[str, Case] = {}


def case(name: str, fun: Callable[..., Any], *primals: Any, **options: Any) -> None:
    assert name not in CASES, name
    CASES[name] = Case(name, fun, primals, **options)


def w(matrix: Any, x: Any) -> Any:
    """A weight in the dtype of the state, so that one case serves every precision.

    Behind a barrier it is computed, as far as a trace can see, and no constant.
    """
    return lax.optimization_barrier(matrix.astype(x.dtype))


X = normal(3, 6)
IMAGE = normal(2, 8, 8, 4, seed=3)
SEQUENCE = normal(2, 9, 4, seed=4)

# --- elementwise ----------------------------------------------------------------------------------

for activation in (
    "leaky_relu elu celu selu softplus tanh sigmoid log_sigmoid silu gelu mish soft_sign squareplus"
).split():
    case(activation, getattr(jax.nn, activation), X)
case("abs", jnp.abs, X)
case("prelu", lambda x: jnp.where(x >= 0, x, w(jnp.linspace(0.1, 0.6, 6), x) * x), X)
case("leaky by maximum", lambda x: jnp.maximum(x, 0.25 * x), X)
case("leaky by minimum", lambda x: -jnp.minimum(-x, -0.25 * x), X)
case("scale and bias", lambda x: x * w(jnp.linspace(0.5, 2, 6), x) + 3.0, X)
case("mixture", lambda x: jnp.where(x > 1, 2 * x - 1, jnp.where(x < -1, 3 * x + 2, x)), X)
case("masked scale", lambda x: jnp.where(np.arange(6) % 2 == 0, 2 * x, -x), X)
case("own normaliser", lambda x: x / lax.stop_gradient(jnp.linalg.norm(x, axis=-1, keepdims=True)), X)
case("straight-through", lambda x: x + lax.stop_gradient(jnp.round(x) - x), X)
case("clipped far out", lambda x: jnp.clip(x, -1e3, 1e3), X)

_POSITIVE = jnp.abs(X[:1]) + 0.5
_UNIT = 0.8 * jnp.tanh(X[:1])
POINTWISE_ZOO: dict[str, tuple[Callable[..., Any], Any]] = {}
for name, fun, x in (
    ("exp", jnp.exp, X[:1]),
    ("exp2", jnp.exp2, X[:1]),
    ("expm1", jnp.expm1, X[:1]),
    ("log", jnp.log, _POSITIVE),
    ("log1p", jnp.log1p, _POSITIVE),
    ("log2", jnp.log2, _POSITIVE),
    ("one_minus_square", getattr(lax, "one_minus_square", lambda x: 1 - x**2), _POSITIVE),
    ("sqrt", jnp.sqrt, _POSITIVE),
    ("rsqrt", lax.rsqrt, _POSITIVE),
    ("cbrt", jnp.cbrt, _POSITIVE),
    ("square", lax.square, _POSITIVE),
    ("integer_pow", lambda x: lax.integer_pow(x, 3), _POSITIVE),
    ("pow", lambda x: x**1.7, _POSITIVE),
    ("reciprocal", lambda x: 1 / x, _POSITIVE),
    ("sub", lambda x: 1 - x, X[:1]),
    ("sin", jnp.sin, _UNIT),
    ("cos", jnp.cos, _POSITIVE),
    ("tan", jnp.tan, _UNIT),
    ("asin", jnp.arcsin, _UNIT),
    ("acos", jnp.arccos, _UNIT),
    ("atan", jnp.arctan, X[:1]),
    ("atan2", lambda x: jnp.arctan2(x, 2.0), X[:1]),
    ("sinh", jnp.sinh, X[:1]),
    ("cosh", jnp.cosh, _POSITIVE),
    ("asinh", jnp.arcsinh, X[:1]),
    ("acosh", jnp.arccosh, _POSITIVE + 1),
    ("atanh", jnp.arctanh, _UNIT),
    ("erf", jax.scipy.special.erf, _UNIT),
    ("erfc", jax.scipy.special.erfc, _UNIT),
    ("erf_inv", jax.scipy.special.erfinv, _UNIT),
    ("lgamma", jax.scipy.special.gammaln, _POSITIVE + 2),
    ("digamma", jax.scipy.special.digamma, _POSITIVE + 2),
    ("rem", lambda x: lax.rem(x, jnp.full_like(x, 7)), X[:1]),
    ("clamp", lambda x: lax.clamp(jnp.asarray(-50, x.dtype), x, jnp.asarray(50, x.dtype)), X[:1]),
    ("logistic", lax.logistic, X[:1]),
    ("bessel_i0e", jax.scipy.special.i0e, _POSITIVE),
    ("bessel_i1e", jax.scipy.special.i1e, _POSITIVE + 3),
    ("reduce_precision", lambda x: 2 * lax.reduce_precision(x, 11, 52), X[:1]),
):
    POINTWISE_ZOO[name] = (fun, x)
# Independent states, each through a primitive of its own: a few to a case, for fewer compilations.
for first in range(0, len(POINTWISE_ZOO), 6):
    some = dict(list(POINTWISE_ZOO.items())[first : first + 6])
    case(
        "pointwise " + ", ".join(some),
        lambda states, some=some: {name: some[name][0](x) for name, x in states.items()},
        {name: x for name, (_, x) in some.items()},
        half=False,
    )
# The state itself is in half precision here, and so is its cotangent.
case("cast", lambda x: (2 * x.astype(jnp.bfloat16)).astype(jnp.float32), X, tolerance=1e-2)
case("copy", lambda x: 2 * jnp.array(x, copy=True), X)
case("named", lambda x: 2 * checkpoint_name(x, "kept"), X)


# --- pairs, gates -----------------------------------------------------------------------------------


def max_min(x):
    a, b = x[..., ::2], x[..., 1::2]
    return jnp.concatenate([jnp.maximum(a, b), jnp.minimum(a, b)], -1)


def rotary(x):
    a, b = jnp.split(x, 2, -1)
    angle = w(jnp.linspace(0, 2, 3), x)
    c, s = jnp.cos(angle), jnp.sin(angle)
    return jnp.concatenate([a * c - b * s, a * s + b * c], -1)


def mixed_three(x):
    a, b, c = jnp.split(x, 3, -1)
    return jnp.stack([a + 0.1 * b * c, b + 0.1 * jnp.sin(c), c - 0.1 * a])


case("max-min", max_min, X)
case("groupsort of pairs", lambda x: jnp.sort(x.reshape(3, 3, 2), -1).reshape(3, 6), X)
case("groupsort of threes", lambda x: jnp.sort(x.reshape(3, 2, 3), -1), X)
case(
    "groupsort by reductions",
    lambda x: (lambda p: jnp.stack([p.max(-1), p.min(-1)], -1))(x.reshape(3, 3, 2)),
    X,
)
case("rotary", rotary, X)
case("gate", jax.nn.glu, X)
case("maximum of two states", lambda x, y: jnp.maximum(x, y), X, normal(3, 6, seed=5))
case("sum of two states", lambda x, y: x + 2 * y, X, normal(3, 6, seed=5))
case("three states mixed", mixed_three, X)
case("top-k", lambda x: lax.top_k(x, 3)[0], X)

# --- linear -----------------------------------------------------------------------------------------

case("dense", lambda x: x @ w(general(6, 4), x), X)
case("dense, square", lambda x: x @ w(general(6), x), X)
case("dense, to one", lambda x: x @ w(general(6, 1)[:, 0], x), X)
case("dense, weight first", lambda x: w(general(6, 4).T, x) @ x.T, X)
case("dense, vmapped", jax.vmap(lambda x: w(general(6, 4).T, x) @ x), X)
case(
    "dense, ensemble",
    lambda x: jax.vmap(jnp.matmul)(x, w(jnp.stack([general(6, 4, s) for s in range(3)]), x)),
    X,
)
case(
    "dense, two axes in",
    lambda x: jnp.einsum("bij,ijk->bk", x.reshape(3, 2, 3), w(general(6, 4).reshape(2, 3, 4), x)),
    X,
)
case(
    "dense, heads",
    lambda x: jnp.einsum(
        "bhi,hio->hbo", x.reshape(3, 2, 3), w(jnp.stack([general(3, 2, s) for s in range(2)]), x)
    ),
    X,
)
for name, make in (
    ("lower", lower),
    ("upper", upper),
    ("diagonal", diagonal),
    ("orthogonal", orthogonal),
):
    case(
        f"dense {name}",
        lambda x, m=make, n=name: x @ mw.declare(w(m(6), x), n),
        X,
        half=name != "orthogonal",
    )
    case(
        f"dense {name}, tall",
        lambda x, m=make, n=name: x @ mw.declare(w(m(6, 4), x), n),
        X,
        half=name != "orthogonal",
    )
case("dense isometric", lambda x: x @ mw.declare(w(orthogonal(6, 4), x), "isometric"), X, half=False)

# --- convolution ------------------------------------------------------------------------------------


def conv(kernel_, stride, padding, dilation=1, groups=1, layout="last"):
    """A convolution function; `kernel_` is [k…, in, out] whatever the layout."""
    d = kernel_.ndim - 2
    spatial = "DHW"[-d:]
    if layout == "last":
        numbers = (f"N{spatial}C", f"{spatial}IO", f"N{spatial}C")
    else:
        numbers, kernel_ = (
            (f"NC{spatial}", f"OI{spatial}", f"NC{spatial}"),
            jnp.moveaxis(kernel_, (-2, -1), (1, 0)),
        )
    padding = [padding] * d if isinstance(padding, tuple) else padding

    def fun(x):
        return lax.conv_general_dilated(
            x,
            w(kernel_, x),
            [stride] * d,
            padding,
            rhs_dilation=[dilation] * d,
            dimension_numbers=numbers,
            feature_group_count=groups,
        )

    return fun


def declared_conv(kernel_, structure, stride, padding):
    inner = lambda x: lax.conv_general_dilated(
        x,
        mw.declare(w(kernel_, x), structure),
        [stride] * (kernel_.ndim - 2),
        [padding] * (kernel_.ndim - 2),
        dimension_numbers=("NWC", "WIO", "NWC") if kernel_.ndim == 3 else ("NHWC", "HWIO", "NHWC"),
    )
    return inner


case("conv lemma, parallel", conv(kernel((3,), 4, 4, (1,)), 2, (1, 1)), SEQUENCE)
case("conv lemma, recursion", conv(kernel((4,), 4, 3, (1,)), 2, (1, 1)), SEQUENCE)
case(
    "conv 2d, NCHW",
    conv(kernel((3, 3), 4, 4, (1, 1)), 2, (1, 1), layout="first"),
    jnp.moveaxis(IMAGE, -1, 1),
)
case("conv 2d, wavefront", conv(kernel((3, 3), 4, 4, (0, 0)), 1, (0, 2)), IMAGE[:, :5, :6])
case("conv 2d, valid", conv(kernel((2, 2), 4, 2, (0, 0)), 1, (0, 0)), IMAGE[:, :5, :5])
case("conv 3d", conv(kernel((3, 3, 3), 2, 2, (1, 1, 1)), 2, (1, 1)), normal(2, 5, 5, 5, 2))
case("conv 3d, wavefront", conv(kernel((2, 2, 2), 2, 2, (1, 1, 1)), 1, (1, 0)), normal(1, 3, 4, 3, 2))
case("conv, grouped", conv(kernel((3, 3), 4, 4, (1, 1), groups=2), 2, (1, 1), groups=2), IMAGE)
case("conv, depthwise", conv(kernel((3, 3), 4, 4, (1, 1), groups=4), 2, (1, 1), groups=4), IMAGE)
case("conv, depthwise causal", conv(kernel((3,), 4, 4, (2,), groups=4), 1, (2, 0), groups=4), SEQUENCE)
case("conv, causal", conv(kernel((3,), 4, 4, (2,)), 1, (2, 0)), SEQUENCE)
case("conv, causal and dilated", conv(kernel((3,), 4, 4, (2,)), 1, (4, 0), dilation=2), SEQUENCE)
case("conv, anti-causal", conv(kernel((3,), 4, 4, (0,)), 1, (0, 2)), SEQUENCE)
case("conv, asymmetric padding", conv(kernel((3, 3), 4, 4, (1, 1)), 2, [(1, 0), (0, 2)]), IMAGE)
case("conv, dilated kernel", conv(kernel((3,), 4, 4, (0,)), 3, (0, 1), dilation=2), normal(2, 12, 4))
case("conv, wider pivot", conv(kernel((3,), 4, 4, (1,)), 2, (0, 0)), SEQUENCE)
case(
    "patchify",
    conv(normal(2, 2, 4, 16, seed=2).at[...].set(general(16, 16).reshape(2, 2, 4, 16)), 2, (0, 0)),
    IMAGE,
)
case("patchify with gaps", conv(general(16, 10).reshape(2, 2, 4, 10), 3, (0, 0)), IMAGE)
case("conv 1×1", conv(general(4, 3).reshape(1, 1, 4, 3), 1, (0, 0)), IMAGE)
case(
    "conv, vmapped", jax.vmap(lambda x: conv(kernel((3,), 4, 4, (1,)), 2, (1, 1))(x[None])[0]), SEQUENCE
)
case(
    "conv, vmapped weights",
    lambda x: jax.vmap(
        lambda x, k: lax.conv_general_dilated(
            x[None], w(k, x), [2], [(1, 1)], dimension_numbers=("NWC", "WIO", "NWC")
        )[0]
    )(x, jnp.stack([kernel((3,), 4, 4, (1,), seed=s) for s in (1, 2)])),
    SEQUENCE,
)
case(
    "conv after an explicit pad",
    lambda x: conv(kernel((3,), 4, 4, (2,)), 1, (0, 0))(jnp.pad(x, ((0, 0), (2, 0), (0, 0)))),
    SEQUENCE,
)
for name in ("lower", "upper", "diagonal", "orthogonal"):
    case(
        f"conv {name} pivot",
        declared_conv(kernel((3, 3), 4, 4, (1, 1), name), name, 2, (1, 1)),
        IMAGE,
        half=name != "orthogonal",
    )
    case(
        f"conv {name} pivot, fewer channels",
        declared_conv(kernel((3,), 4, 3, (1,), name), name, 2, (1, 1)),
        SEQUENCE,
        half=name != "orthogonal",
    )
    case(
        f"conv {name} pivot, recursion",
        declared_conv(kernel((3,), 4, 4, (0,), name), name, 2, (0, 0)),
        SEQUENCE,
        half=name != "orthogonal",
    )


def circular(x):
    """A shift by one and a rotation of channels: isometric, with its wrap-around copy."""
    k = jnp.zeros((3, 4, 4), x.dtype).at[2].set(w(orthogonal(4), x))
    padded = jnp.concatenate([x[:, -1:], x, x[:, :1]], axis=1)
    return lax.conv_general_dilated(
        padded, mw.declare(k, "isometric"), [1], [(0, 0)], dimension_numbers=("NWC", "WIO", "NWC")
    )


case("circular isometry", circular, SEQUENCE, half=False)

# --- pooling ------------------------------------------------------------------------------------------


def pool(reducer, init, window, stride, padding="VALID", dilation=None):
    return lambda x: lax.reduce_window(
        x, np.asarray(init, x.dtype), reducer, window, stride, padding, window_dilation=dilation
    )


case("average windows", lambda x: pool(lax.add, 0, (1, 2, 2, 1), (1, 2, 2, 1))(x) / 4, IMAGE)
case("sum windows, padded", pool(lax.add, 0, (1, 3), (1, 3), [(0, 0), (1, 2)]), X)
case("overlapping sums, parallel", pool(lax.add, 0, (1, 3, 1), (1, 2, 1)), SEQUENCE)
case("overlapping sums, recursion", pool(lax.add, 0, (1, 2, 2, 1), (1, 1, 1, 1)), IMAGE[:, :5, :4, :2])
case("dilated sums", pool(lax.add, 0, (1, 2, 1), (1, 3, 1), dilation=(1, 2, 1)), SEQUENCE)
case("max windows", pool(lax.max, -jnp.inf, (1, 2, 2, 1), (1, 2, 2, 1)), IMAGE)
case("max windows, ties", pool(lax.max, -jnp.inf, (1, 2), (1, 2)), jnp.ones((2, 6)))
case("max windows, padded", pool(lax.max, -jnp.inf, (1, 2), (1, 3), [(0, 0), (1, 1)]), X)
case("min windows", pool(lax.min, jnp.inf, (1, 2), (1, 2)), X)
case("global mean", lambda x: x.mean((1, 2)), IMAGE)
case("global sum", lambda x: x.sum(-1), X)
case("global max", lambda x: x.max((1, 2)), IMAGE)
case("global max, ties", lambda x: x.max(-1), jnp.ones((2, 6)))
case("global min", lambda x: x.min(-1), X)
case("product", lambda x: jnp.prod(x, -1), _POSITIVE)

# --- structural ---------------------------------------------------------------------------------------

case("reshape", lambda x: x.reshape(2, 9), X)
case("transpose", lambda x: x.T, X)
case("reverse", lambda x: x[:, ::-1], X)
case("flip", lambda x: jnp.flip(x), X)
case("squeeze", lambda x: x[:, None].squeeze(1), X)
case("slice", lambda x: x[1:, ::2], X)
case("crop by pad", lambda x: lax.pad(x, jnp.zeros((), x.dtype), [(-1, 0, 0), (0, -2, 0)]), X)
case("dynamic slice", lambda x: lax.dynamic_slice(x, (1, 2), (2, 3)), X)
case("dynamic update", lambda x, y: lax.dynamic_update_slice(x, y, (1, 2)), X, normal(2, 3, seed=8))
case("static gather", lambda x: x[:, np.array([4, 0, 3])], X)
case("static take", lambda x: jnp.take(x, np.array([4, 0, 3]), axis=1), X)
case(
    "promised gather",
    lambda x: x.at[:, jnp.array([4, 0])].get(unique_indices=True, mode="promise_in_bounds"),
    X,
)
case("permutation and its sum", lambda x: jnp.cumsum(x[:, np.array([5, 3, 1, 0, 2, 4])], 1), X)
case("roll", lambda x: jnp.roll(x, 2, axis=1), X)
case("split", lambda x: jnp.split(x, 3, axis=1), X)
case("unstack", lambda x: jnp.unstack(x, axis=1), X)
case("stack", lambda x, y: jnp.stack([x, 2 * y]), X, normal(3, 6, seed=5))
case("concatenate", lambda x, y: jnp.concatenate([x, y], 1), X, normal(3, 2, seed=5))
case("even and odd", lambda x: (x[:, ::2] * 2, x[:, 1::2]), X)
case("shuffled halves", lambda x: jnp.concatenate([x[:, 3:], jnp.flip(x[:, :3], 1)], 1), X)
case(
    "pixel-unshuffle",
    lambda x: x.reshape(2, 4, 2, 4, 2, 4).transpose(0, 1, 3, 2, 4, 5).reshape(2, 4, 4, 16),
    IMAGE,
)
case(
    "pixel-unshuffle by slices",
    lambda x: jnp.concatenate([x[:, i::2, j::2] for i in (0, 1) for j in (0, 1)], -1),
    IMAGE,
)
case("gathered halves", lambda x: (x[:, np.array([1, 3, 5])], x[:, np.array([0, 2])]), X)
case("cumsum", lambda x: jnp.cumsum(x, axis=1), X)
case("cumsum, reversed", lambda x: lax.cumsum(x, axis=0, reverse=True), X)
case("tile once", lambda x: jnp.tile(2 * x, (1, 1)), X)
case("device_put", lambda x: 2 * jax.device_put(x), X)
case("returned and used", lambda x, y: (x, 2 * x + 3 * y), X, normal(3, 6, seed=5))
case(
    "crop, then a padded conv",
    lambda x: conv(kernel((3,), 4, 4, (1,)), 2, (1, 1))(
        lax.pad(x, jnp.zeros((), x.dtype), [(0, 0, 0), (-1, 0, 0), (0, 0, 0)])
    ),
    SEQUENCE,
)
case("barrier", lambda x: lax.optimization_barrier((x, 3.0))[0], X)

# --- calls and control flow ---------------------------------------------------------------------------


@jax.custom_jvp
def rounded(x):
    return jnp.round(x)


rounded.defjvp(lambda primals, tangents: (jnp.round(primals[0]), 2 * tangents[0]))


@jax.custom_vjp
def halved(x):
    return x * 1.0


halved.defvjp(lambda x: (x * 1.0, None), lambda _, g: (0.5 * g,))


@jax.custom_jvp
def doubly_dense(x, m):
    return x @ m


doubly_dense.defjvp(lambda p, t: (p[0] @ p[1], 2 * (t[0] @ p[1]) + p[0] @ t[1]))


@jax.custom_vjp
def dense_backwards(x, m):
    return x @ m


dense_backwards.defvjp(lambda x, m: (x @ m, m), lambda m, g: (3 * (g @ m.T), jnp.zeros_like(m)))


@mw.custom_vijp
def turn(x, angle):
    c, s = jnp.cos(angle), jnp.sin(angle)
    return jnp.stack([c * x[0] - s * x[1], s * x[0] + c * x[1]])


turn.defvijp(lambda primals, h: turn(h, primals[1]))


@mw.custom_vijp
def residual(x, m):
    return x + 0.2 * jnp.tanh(x @ m)


residual.defvijp(mw.MatrixFree())

STACK = jnp.stack([orthogonal(6, seed=s) for s in range(3)])


def layer(x, m):
    return jnp.abs(x @ m) + 0.1


case("jit", jax.jit(lambda x: jax.jit(jnp.tanh)(x @ w(general(6), x))), X)
case("checkpoint", jax.checkpoint(lambda x: jnp.tanh(x @ w(general(6), x))), X)
case("custom jvp", rounded, X)
case("custom vjp", halved, X)
case("custom jvp, dense", lambda x: doubly_dense(x, w(general(6, 4), x)), X)
case("custom vjp, dense", lambda x: dense_backwards(x, w(general(6, 4), x)), X)
case("custom vijp", lambda x: turn(x, 0.3), X[:2])
case("custom vijp, vmapped", jax.vmap(lambda x: turn(x, 0.3)), X[:, :2])
case("matrix-free layer", lambda x: residual(x, w(general(6), x)), X, half=False)
case("scan", lambda x: lax.scan(lambda c, m: (layer(c, m), None), x, w(STACK, x))[0], X)
case(
    "scan, declared inside",
    lambda x: lax.scan(lambda c, m: (layer(c, mw.declare(m, "orthogonal")), None), x, w(STACK, x))[0],
    X,
    half=False,
)
case(
    "scan, declared on the stack",
    lambda x: lax.scan(lambda c, m: (layer(c, m), None), x, mw.declare(w(STACK, x), "orthogonal"))[0],
    X,
    half=False,
)
case(
    "scan, reversed",
    lambda x: lax.scan(lambda c, m: (layer(c, m), None), x, w(STACK, x), reverse=True)[0],
    X,
)
case(
    "scan, shared weight",
    lambda x: lax.scan(lambda c, _: (layer(c, w(STACK[0], x)), None), x, None, length=3)[0],
    X,
)
case(
    "scan, counter in the carry",
    lambda x: lax.scan(lambda c, m: ((layer(c[0], m), c[1] + 1), None), (x, 0), w(STACK, x))[0][0],
    X,
)
case(
    "scan, two states",
    lambda x, y: lax.scan(lambda c, m: ((layer(c[1], m), c[0]), None), (x, y), w(STACK, x))[0],
    X,
    normal(3, 6, seed=9),
)
case("fori_loop", lambda x: lax.fori_loop(0, 3, lambda i, c: layer(c, w(STACK[0], x)), x), X)

# --- whole functions ----------------------------------------------------------------------------------


def network(x):
    x = conv(kernel((3, 3), 4, 4, (1, 1)), 2, (1, 1))(x)
    x = jax.nn.leaky_relu(x, 0.3)
    x = x.reshape(x.shape[0], -1) @ w(general(64, 20), x)
    return max_min(x).reshape(2, 10, 2).mean(-1)


case("network", network, IMAGE)
case(
    "pytrees",
    lambda p: {"a": (jnp.tanh(p["x"]),), "b": [p["y"][0] @ w(general(6, 4), p["x"]), p["y"][1]]},
    {"x": X, "y": [normal(3, 6, seed=11), normal(2, seed=12)]},
)


# Eagerly, every operation is compiled by itself: `make test` does that for these, which between them
# exercise every rule (test_meta.py sees to it), and `make test-all` for all.
EAGER = frozenset(
    {
        "leaky_relu",
        "tanh",
        "prelu",
        "max-min",
        "groupsort of pairs",
        "groupsort by reductions",
        "gate",
        "three states mixed",
        "top-k",
        "dense",
        "dense, weight first",
        "dense lower",
        "dense upper",
        "dense diagonal, tall",
        "dense orthogonal",
        "dense isometric",
        "conv lemma, parallel",
        "conv 2d, wavefront",
        "conv 3d, wavefront",
        "conv, depthwise causal",
        "patchify",
        "conv lower pivot",
        "conv diagonal pivot, recursion",
        "conv orthogonal pivot",
        "conv after an explicit pad",
        "circular isometry",
        "average windows",
        "overlapping sums, recursion",
        "max windows, ties",
        "global max, ties",
        "product",
        "reshape",
        "transpose",
        "crop by pad",
        "dynamic slice",
        "dynamic update",
        "static take",
        "split",
        "stack",
        "even and odd",
        "tile once",
        "cumsum",
        "custom jvp",
        "custom vjp, dense",
        "custom jvp, dense",
        "custom vijp",
        "matrix-free layer",
        "scan",
        "network",
        "pytrees",
    }
)
assert set(CASES) >= EAGER
