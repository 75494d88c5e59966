"""One table of small networks, differentiated in `test_engine.py` by `moonwalk.value_and_grad`.

A network is a loss, its arguments, and what its plan must do. All are in float64 and small: the suite
compiles each of them several times.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from weights import general, kernel, lower, normal, orthogonal

import moonwalk as mw


@dataclass(frozen=True)
class Network:
    """A loss, its arguments, and the facts that a test holds its plan to.

    `walked`: at least so many blocks recover their cotangent; None: none may. `walks`: whether the plan
    walks at all (a walk between anchors recovers nothing). `anchors`: whether there must (or must not)
    be any. `modes`: those that occur in the plan's rows.
    """

    name: str
    loss: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    argnums: int | tuple[int, ...] = 0
    has_aux: bool = False
    method: mw.Moonwalk = field(default_factory=mw.Moonwalk)
    walked: int | None = 0
    anchors: bool | None = None
    modes: frozenset[str] = frozenset()
    slow: bool = False  # a variant, left to `make test-all`

    @property
    def walks(self) -> bool:
        """Whether the plan must walk."""
        return bool(self.walked)

    @property
    def options(self) -> dict[str, Any]:
        """Those of `value_and_grad` that `jax.value_and_grad` has too."""
        return {"argnums": self.argnums, "has_aux": self.has_aux}


NETWORKS: dict[str, Network] = {}


def network(name: str, loss: Callable[..., Any], *args: Any, modes: str = "", **options: Any) -> None:
    assert name not in NETWORKS, name
    NETWORKS[name] = Network(name, loss, args, modes=frozenset(modes.split()), **options)


# --- parts --------------------------------------------------------------------------------------------

ROWS, WIDTH = 16, 8
X = normal(ROWS, WIDTH, seed=100)
MANY = normal(8 * ROWS, WIDTH, seed=101)  # where activations outweigh a copy of the weights
Y = normal(ROWS, WIDTH, seed=101)
SEQUENCE = normal(2, 32, 4, seed=102)
IMAGE = normal(2, 16, 16, 4, seed=103)
VOLUME = normal(1, 8, 8, 8, 2, seed=104)
TOKENS = jnp.asarray(np.random.default_rng(105).integers(0, 12, (2, 8)))
KEY = jax.random.key(106)
LABELS = jnp.asarray(np.random.default_rng(107).integers(0, WIDTH, ROWS))


def orthogonals(count, n=WIDTH, seed=0):
    return [orthogonal(n, seed=seed + i) for i in range(count)]


def stack(matrices):
    return jnp.asarray(np.stack(list(matrices)))


def square(x, y=0.5):
    """A loss whose cotangent has no structure to hide behind."""
    return jnp.mean((x - y) ** 2)


def leaky(x):
    return jax.nn.leaky_relu(x, 0.3)


def turn(x, w):
    """A layer that is walked without loss: an orthogonal matrix, and LeakyReLU."""
    return leaky(x @ mw.declare(w, "orthogonal"))


def max_min(x):
    a, b = x[..., ::2], x[..., 1::2]
    in_order = a >= b
    return jnp.concatenate([jnp.where(in_order, a, b), jnp.where(in_order, b, a)], -1)


def max_min_of_both_sides(x):
    """As `max_min`, except that at a tie JAX takes the mean of both sides."""
    a, b = x[..., ::2], x[..., 1::2]
    return jnp.concatenate([jnp.maximum(a, b), jnp.minimum(a, b)], -1)


def layer_norm(x, scale, bias):
    centred = x - x.mean(-1, keepdims=True)
    return centred * lax.rsqrt(jnp.mean(centred**2, -1, keepdims=True) + 1e-5) * scale + bias


def conv(x, w, stride=2, padding=(1, 1), structure=None, groups=1):
    d = w.ndim - 2
    spatial = "DHW"[-d:]
    w = w if structure is None else mw.declare(w, structure)
    return lax.conv_general_dilated(
        x,
        w,
        [stride] * d,
        [padding] * d,
        dimension_numbers=(f"N{spatial}C", f"{spatial}IO", f"N{spatial}C"),
        feature_group_count=groups,
    )


def windows(x, reducer, init, size=2):
    """Disjoint windows over all axes but batch and channels."""
    shape = (1, *[size] * (x.ndim - 2), 1)
    return lax.reduce_window(x, np.asarray(init, x.dtype), reducer, shape, shape, "VALID")


def average(x):
    return windows(x, lax.add, 0.0) / 2 ** (x.ndim - 2)


def maximum(x):
    return windows(x, lax.max, -np.inf)


def upsample(x):
    return jnp.repeat(jnp.repeat(x, 2, 1), 2, 2)


def network_of(layer, out=square):
    """The loss of a network with one layer after the other."""

    def loss(params, x, *rest):
        for p in params:
            x = layer(x, p)
        return out(x, *rest)

    return loss


# --- dense --------------------------------------------------------------------------------------------

network("MLP", network_of(turn), orthogonals(10), X, walked=8, anchors=False, modes="walk")
network(
    "MLP with biases",
    network_of(lambda x, p: turn(x, p["w"]) + p["b"], square),
    [{"w": w, "b": normal(WIDTH, seed=i)} for i, w in enumerate(orthogonals(10))],
    X,
    Y,
    walked=16,
    anchors=False,
)
network(
    "MLP, declared lower",
    network_of(lambda x, w: leaky(x @ mw.declare(w, "lower"))),
    [lower(WIDTH, seed=i) for i in range(10)],
    X,
    walked=8,
)
network(
    "MLP, nothing declared",
    network_of(lambda x, w: leaky(x @ w)),
    [general(WIDTH, seed=i) for i in range(10)],
    X,
    walked=8,
    slow=True,
)
network(
    "MLP with anchors",
    network_of(turn),
    orthogonals(12),
    X,
    method=mw.Moonwalk(anchor_every=5),
    walked=8,
    anchors=True,
    modes="walk anchor",
)
network(
    "narrowing MLP",
    network_of(turn),
    [orthogonal(n, max(4, n - 1), seed=n) for n in (12, 11, 10, 9, 8, 7, 6, 5)],
    normal(ROWS, 12, seed=3),
    walked=6,
    slow=True,
)
network("ReLU", network_of(lambda x, w: jax.nn.relu(x @ w)), orthogonals(6), X, walked=None)
network(
    "ReLU, declared orthogonal",
    network_of(lambda x, w: jax.nn.relu(x @ mw.declare(w, "orthogonal"))),
    orthogonals(8),
    X,
    slow=True,
)
network(
    "MaxMin",
    network_of(lambda x, w: max_min(x @ mw.declare(w, "orthogonal"))),
    orthogonals(10),
    X,
    walked=10,
    anchors=False,
)
network(
    "expanding layers",
    network_of(lambda x, w: leaky(x @ w)),
    [*orthogonals(3), orthogonal(8, 12), *orthogonals(3, 12), orthogonal(12, 16), *orthogonals(2, 16)],
    X,
)
network("gelu", network_of(lambda x, w: jax.nn.gelu(x @ w)), orthogonals(5), X, slow=True)
network(
    "gelu with a shortcut",
    network_of(lambda x, w: jax.nn.gelu(x @ w) + 0.1 * x),
    orthogonals(5),
    X,
    modes="fork",
    slow=True,
    method=mw.Moonwalk(walk="always"),
)
network(
    "tanh",
    network_of(lambda x, w: jnp.tanh(0.5 * x @ mw.declare(w, "orthogonal"))),
    orthogonals(6),
    X,
    slow=True,
)

# --- convolution ----------------------------------------------------------------------------------------

network(
    "strided CNN 1D",
    network_of(lambda x, w: leaky(conv(x, w, structure="diagonal"))),
    [kernel((3,), 4, 4, (1,), "diagonal", seed=i) for i in range(4)],
    SEQUENCE,
    walked=2,
    method=mw.Moonwalk(walk="always"),
)
network(
    "strided CNN 2D",
    network_of(lambda x, w: leaky(conv(x, w, structure="lower"))),
    [kernel((3, 3), 4, 4, (1, 1), "lower", seed=i) for i in range(3)],
    IMAGE,
    walked=2,
    method=mw.Moonwalk(walk="always"),
)
network(
    "strided CNN 3D",
    network_of(lambda x, w: leaky(conv(x, w, structure="diagonal"))),
    [kernel((3, 3, 3), 2, 2, (1, 1, 1), "diagonal", seed=i) for i in range(2)],
    VOLUME,
    slow=True,
    method=mw.Moonwalk(walk="always"),
)
network(
    "strided CNN, deep and orthogonal",
    network_of(lambda x, w: leaky(conv(x, w, 1, (0, 0), structure="orthogonal"))),
    [orthogonal(4, seed=i).reshape(1, 1, 4, 4) for i in range(8)],
    IMAGE[:, :4, :4],
    walked=14,
    anchors=False,
    slow=True,
)
network(
    "patchify",
    lambda p, x: square(network_of(turn, lambda x: x)(p["trunk"], leaky(conv(x, p["stem"], 4, (0, 0))))),
    {"stem": orthogonal(64, 16).reshape(4, 4, 4, 16), "trunk": orthogonals(8, 16)},
    IMAGE,
    walked=14,
)
network(
    "patchify inside",
    lambda p, x: square(
        leaky(
            conv(
                network_of(lambda x, w: leaky(conv(x, w, 1, (0, 0))), lambda x: x)(p["body"], x),
                p["patch"],
                2,
                (0, 0),
            )
        )
    ),
    {
        "body": [general(4, seed=i).reshape(1, 1, 4, 4) for i in range(6)],
        "patch": orthogonal(16, 16).reshape(2, 2, 4, 16),
    },
    IMAGE[:, :4, :4],
    slow=True,
)
network(
    "causal CNN",
    network_of(lambda x, w: leaky(conv(x, w, 1, (2, 0), structure="lower"))),
    [kernel((3,), 4, 4, (2,), "lower", others=0.05, seed=i) for i in range(6)],
    SEQUENCE[:, :12],
)
network(
    "average pooling",
    network_of(lambda x, w: average(leaky(conv(x, w, 1, (0, 0), "orthogonal")))),
    [orthogonal(4, seed=i).reshape(1, 1, 4, 4) for i in range(3)],
    IMAGE,
)
network(
    "max pooling",
    network_of(lambda x, w: maximum(leaky(conv(x, w, 1, (0, 0), "orthogonal")))),
    [orthogonal(4, seed=i).reshape(1, 1, 4, 4) for i in range(3)],
    IMAGE,
)
network(
    "depthwise separable",
    network_of(lambda x, p: leaky(leaky(conv(x, p[0], groups=4)) @ mw.declare(p[1], "orthogonal"))),
    [(kernel((3, 3), 4, 4, (1, 1), groups=4, seed=i), orthogonal(4, seed=i)) for i in range(2)],
    IMAGE,
    slow=True,
)

# --- branches ---------------------------------------------------------------------------------------------

network(
    "residual",
    network_of(lambda x, p: turn(x + 0.3 * jnp.tanh(x @ p[0]) @ p[1], p[2])),
    [(general(8, 4, i), general(4, 8, i), orthogonal(8, seed=i)) for i in range(5)],
    X,
)
network(
    "residual around walked layers",
    network_of(lambda x, p: x + turn(turn(x, p[0]), p[1])),
    list(zip(orthogonals(4), orthogonals(4, seed=9), strict=True)),
    X,
    modes="fork",
    method=mw.Moonwalk(walk="always"),
)


def unet(join):
    """Three levels: down by strided convolutions, up by nearest neighbours, skips joined."""

    def loss(p, x):
        skips = []
        for w in p["down"]:
            x = leaky(conv(x, w, 1, (0, 0), "orthogonal"))
            skips.append(x)
            x = average(x)
        x = leaky(conv(x, p["middle"], 1, (0, 0), "orthogonal"))
        for w, skip in zip(p["up"], reversed(skips), strict=True):
            x = leaky(conv(join(upsample(x), skip), w, 1, (0, 0)))
        return square(x)

    return loss


def unet_params(channels_up):
    one = lambda seed, n=4: orthogonal(n, 4, seed).reshape(1, 1, n, 4)
    return {
        "down": [one(i) for i in range(3)],
        "middle": one(5),
        "up": [one(6 + i, channels_up) for i in range(3)],
    }


network("U-Net, added", unet(jnp.add), unet_params(4), IMAGE[:, :8, :8])
network(
    "U-Net, concatenated",
    unet(lambda a, b: jnp.concatenate([a, b], -1)),
    unet_params(8),
    IMAGE[:, :8, :8],
)


def towers(p, x, y):
    """Two towers over two inputs, joined by a product."""
    for w in p["x"]:
        x = turn(x, w)
    for w in p["y"]:
        y = turn(y, w)
    return square(leaky(jnp.concatenate([x, y], 1) @ p["head"]))


network(
    "two towers",
    towers,
    {"x": orthogonals(6), "y": orthogonals(6, seed=20), "head": orthogonal(16, 4)},
    X,
    Y,
    walked=8,
)
network(
    "two towers multiplied",
    lambda p, x, y: square(
        network_of(turn, lambda x: x)(p[0], x) * network_of(turn, lambda x: x)(p[1], y)
    ),
    (orthogonals(6), orthogonals(6, seed=20)),
    X,
    Y,
    walked=8,
    slow=True,
)

# --- normalisation, attention, embeddings -------------------------------------------------------------------

network(
    "LayerNorm MLP",
    network_of(lambda x, p: leaky(layer_norm(x @ p["w"], p["scale"], p["bias"]))),
    [
        {"w": w, "scale": jnp.linspace(0.5, 1.5, WIDTH), "bias": normal(WIDTH, seed=i)}
        for i, w in enumerate(orthogonals(5))
    ],
    X,
    slow=True,
)


def batch_norm(params, state, x):
    """Training mode: statistics of the batch, whose running means are the new state."""
    new = []
    for p, s in zip(params, state, strict=True):
        x = x @ mw.declare(p["w"], "orthogonal")
        mean, var = x.mean(0), x.var(0)
        x = leaky((x - mean) * lax.rsqrt(var + 1e-5) * p["scale"] + p["bias"])
        new.append({"mean": 0.9 * s["mean"] + 0.1 * mean, "var": 0.9 * s["var"] + 0.1 * var})
    return square(x), new


network(
    "BatchNorm",
    batch_norm,
    [
        {"w": w, "scale": jnp.linspace(0.5, 1.5, WIDTH), "bias": normal(WIDTH, seed=i)}
        for i, w in enumerate(orthogonals(4))
    ],
    [{"mean": jnp.zeros(WIDTH), "var": jnp.ones(WIDTH)}] * 4,
    X,
    has_aux=True,
)


def transformer(params, x):
    for p in params:
        y = layer_norm(x, 1.0, 0.0)
        q, k, v = (jnp.einsum("btc,chd->bhtd", y, p[n]) for n in "qkv")
        a = jax.nn.softmax(q @ k.mT / math.sqrt(q.shape[-1]), -1)
        x = x + jnp.einsum("bhtd,hdc->btc", a @ v, p["o"])
        y = layer_norm(x, 1.0, 0.0)
        x = x + jax.nn.gelu(y @ p["up"]) @ p["down"]
    return square(x)


def attention(c, heads, seed):
    d = c // heads
    p = {n: normal(c, heads, d, seed=seed + i) / math.sqrt(c) for i, n in enumerate("qkv")}
    p["o"] = normal(heads, d, c, seed=seed + 3) / math.sqrt(c)
    p["up"], p["down"] = general(c, 2 * c, seed), general(2 * c, c, seed)
    return p


network("transformer", transformer, [attention(8, 2, 10 * i) for i in range(2)], normal(2, 6, 8, seed=4))


def language_model(p, tokens):
    x = jnp.take(p["embedding"], tokens, axis=0) + p["position"]
    for w in p["layers"]:
        x = turn(x, w)
    logits = x @ p["embedding"].T  # tied
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[..., None], -1))


network(
    "embedding stem, tied head",
    language_model,
    {"embedding": normal(12, 8, seed=1), "position": normal(8, 8, seed=2), "layers": orthogonals(8)},
    TOKENS,
    walked=12,
)

# --- control flow in the loss -----------------------------------------------------------------------------


def branching(params, x, flag):
    for i, w in enumerate(params):
        if i == 3:
            x = lax.cond(flag, lambda x, w=w: jnp.tanh(x @ w), lambda x: 2 * x, x)
        elif i == 5:  # a predicate that depends on the state
            x = lax.cond(x.sum() > 0, lambda x, w=w: x @ w, lambda x, w=w: x @ w.T, x)
        else:
            x = turn(x, w)
    return square(x)


network(
    "cond", branching, orthogonals(10), X, jnp.array(True), method=mw.Moonwalk(walk="always"), walked=4
)
network(
    "own checkpoint",
    network_of(
        lambda x, p: turn(jax.checkpoint(lambda x, w: jnp.tanh(leaky(x @ w)) + x)(x, p[0]), p[1])
    ),
    list(zip(orthogonals(4), orthogonals(4, seed=9), strict=True)),
    X,
    modes="recompute",
)
network(
    "own checkpoint of walkable layers",
    network_of(jax.checkpoint(turn)),
    orthogonals(6),
    X,
    slow=True,
)
network(
    "jitted layers",
    network_of(jax.jit(turn)),
    orthogonals(8),
    X,
    walked=12,
    slow=True,
)
network(
    "vmapped layers",
    network_of(lambda x, p: jax.vmap(lambda x: leaky(mw.declare(p[0], "orthogonal").T @ x + p[1]))(x)),
    [(w, normal(WIDTH, seed=i)) for i, w in enumerate(orthogonals(8))],
    X,
    walked=12,
    slow=True,
)
network(
    "while_loop beside the trunk",
    lambda p, x: network_of(turn)(
        p, x * lax.while_loop(lambda s: s < 3.0, lambda s: s * 2, jnp.abs(x).max())
    ),
    orthogonals(8),
    X,
    walked=12,
    slow=True,
)

# --- scans ------------------------------------------------------------------------------------------------

W_STACK = stack(orthogonals(9))
LOWER_STACK = stack(lower(WIDTH, seed=i) for i in range(10))
CARRY = lambda step: lambda c, a: (step(c, a), None)

network(
    "scan",
    lambda w, x: square(lax.scan(CARRY(turn), x, w)[0]),
    W_STACK,
    X,
    walked=2,
    anchors=False,
    modes="walk",
)
network(
    "scan with biases, between layers",
    lambda p, x: square(
        turn(
            lax.scan(lambda c, p: (turn(c, p[0]) + p[1], None), turn(x, p["first"]), p["layers"])[0],
            p["last"],
        )
    ),
    {"first": orthogonal(8, seed=30), "last": orthogonal(8, seed=31), "layers": (W_STACK, normal(9, 8))},
    X,
    walked=4,
)
network(
    "scan, shared weights",
    lambda w, x: square(lax.scan(lambda c, _: (turn(c, w), None), x, None, length=8)[0]),
    orthogonal(8),
    X,
    walked=2,
    slow=True,
)
network(
    "scan, reversed",
    lambda w, x: square(lax.scan(CARRY(turn), x, w, reverse=True)[0]),
    W_STACK,
    X,
    walked=2,
    slow=True,
)
network(
    "scan over data",
    lambda p, xs: square(
        lax.scan(lambda c, x: (turn(c, p["w"]) + x @ p["u"], None), jnp.zeros((ROWS, WIDTH)), xs)[0]
    ),
    {"w": orthogonal(8), "u": general(4, 8)},
    normal(7, ROWS, 4, seed=8),
    walked=2,
)
network(
    "scan with outputs",
    lambda w, x: (lambda last, ys: square(last) + square(ys, 0.2))(
        *lax.scan(lambda c, w: (lambda y: (y, jnp.sin(y)))(turn(c, w)), x, w)
    ),
    W_STACK,
    X,
)
network(
    "scan with small outputs",
    lambda w, x: (lambda last, ys: square(last) + square(ys, 0.2))(
        *lax.scan(lambda c, w: (lambda y: (y, y[:, 0].mean()))(turn(c, w)), x, w)
    ),
    W_STACK,
    X,
    slow=True,
)
network(
    "scan with outputs alone",
    lambda w, x: square(lax.scan(lambda c, w: (lambda y: (y, y.mean(0)))(turn(c, w)), x, w)[1], 0.2),
    W_STACK,
    X,
)
network(
    "scan, two states",
    lambda w, x, y: square(
        jnp.stack(
            lax.scan(lambda c, w: ((c[1], turn(c[0], w[0]) + 0.5 * (c[1] @ w[1])), None), (x, y), w)[0]
        )
    ),
    (W_STACK, 0.1 * W_STACK),
    X,
    Y,
)
network(
    "scan, two states that never meet",
    lambda w, x, y: (lambda a, b: square(a) + square(b, 0.1))(
        *lax.scan(lambda c, w: ((turn(c[0], w[0]), turn(c[1], w[1])), None), (x, y), w)[0]
    ),
    (W_STACK, W_STACK[::-1]),
    X,
    Y,
    walked=4,
    slow=True,
)


def noisy_step(carry, w):
    x, count, key = carry
    key, own = jax.random.split(key)
    x = turn(x, w) + 0.01 * count * jax.random.normal(own, x.shape)
    return (x, count + 1, key), None


def dropout_step(carry, w):
    x, count, key = carry
    key, own = jax.random.split(key)
    kept = jax.random.bernoulli(own, 0.8, x.shape)
    return (turn(jnp.where(kept, x / 0.8, 0), w) * (1 + 0.1 * count), count + 1, key), None


network(
    "scan, counter and key",
    lambda w, x, key: square(lax.scan(noisy_step, (x, 0, key), w)[0][0]),
    W_STACK,
    X,
    KEY,
    walked=2,
)
network(
    "scan, a weight times the counter",
    lambda p, x: square(
        lax.scan(lambda c, w: ((turn(c[0], w) + 0.1 * c[1] * p["b"], c[1] + 1), None), (x, 0), p["w"])[
            0
        ][0]
    ),
    {"w": W_STACK, "b": normal(WIDTH)},
    X,
    walked=2,
    anchors=False,
)
network(
    "scan, noise through a weight",
    lambda p, x, key: square(
        lax.scan(
            lambda c, w: (
                (turn(c[0], w) + jax.random.normal(c[1], (ROWS, 4)) @ p["u"], jax.random.split(c[1])[0]),
                None,
            ),
            (x, key),
            p["w"],
        )[0][0]
    ),
    {"w": stack(orthogonals(20)), "u": general(4, 8)},
    X,
    KEY,
)
network(
    "scan, dropout",
    lambda w, x, key: square(lax.scan(dropout_step, (x, 0, key), w)[0][0]),
    W_STACK,
    X,
    KEY,
)
network(
    "scan, a last period that is shorter",
    lambda w, x: square(lax.scan(CARRY(turn), x, w)[0]),
    stack(orthogonals(10)),
    MANY,
    method=mw.Moonwalk(anchor_every=4),
    walked=2,
    anchors=True,
)
network(
    "scan, reversed, a last period that is shorter",
    lambda p, x: square(lax.scan(lambda c, p: (turn(c, p[0]) + p[1], None), x, p, reverse=True)[0]),
    (stack(orthogonals(10)), normal(10, 8)),
    MANY,
    method=mw.Moonwalk(anchor_every=3),
    walked=2,
    anchors=True,
)
network(
    "scan, anchors by tolerance",
    lambda w, x: square(lax.scan(lambda c, w: (leaky(c @ mw.declare(w, "lower")), None), x, w)[0]),
    LOWER_STACK,
    X,
    method=mw.Moonwalk(tolerance=1e-13, on_inexact="ignore"),
)
network(
    "scan of general matrices",
    lambda w, x: square(lax.scan(CARRY(lambda x, w: leaky(x @ w)), x, w)[0]),
    stack(general(WIDTH, seed=i) for i in range(8)),
    X,
    walked=2,
)
network(
    "scans in a Python loop",
    lambda p, x: square(
        network_of(lambda x, p: turn(lax.scan(CARRY(turn), x, p[0])[0], p[1]), lambda x: x)(p, x)
    ),
    [(stack(orthogonals(4, seed=10 * i)), orthogonal(8, seed=40 + i)) for i in range(3)],
    X,
    walked=4,
)
network(
    "scan of scans",
    lambda w, x: square(lax.scan(CARRY(lambda x, w: lax.scan(CARRY(turn), x, w)[0]), x, w)[0]),
    W_STACK.reshape(3, 3, 8, 8),
    X,
)
network(
    "scan, residual inside",
    lambda w, x: square(lax.scan(CARRY(lambda x, w: turn(x + 0.2 * jnp.tanh(x @ w[0]), w[1])), x, w)[0]),
    (W_STACK, W_STACK[::-1]),
    X,
)
network(
    "scan of convolutions",
    lambda w, x: square(
        lax.scan(CARRY(lambda x, w: leaky(conv(x, w, 1, (0, 0), "orthogonal"))), x, w)[0]
    ),
    stack(orthogonal(4, seed=i).reshape(1, 4, 4) for i in range(8)),
    SEQUENCE,
    walked=2,
    slow=True,
)
network(
    "scan, weights made inside",
    lambda a, x: square(lax.scan(CARRY(lambda x, a: turn(x, jnp.linalg.qr(a)[0])), x, a)[0]),
    stack(general(6, seed=i) for i in range(6)),
    X[:, :6],
    walked=2,
    slow=True,
)
network(
    "fori_loop",
    lambda w, x: square(lax.fori_loop(0, 6, lambda i, x: turn(x, w), x)),
    orthogonal(8),
    X,
    walked=2,
)
network(
    "scan, first carry is a weight",
    lambda p, x: square(lax.scan(lambda c, w: (turn(c, w) + x, None), p["start"], p["w"])[0]),
    {"start": Y, "w": W_STACK},
    X,
)

# --- weights ------------------------------------------------------------------------------------------------


def tied(w, x):
    for _ in range(8):
        x = turn(x, w)
    return square(x @ w.T)


network("tied weights", tied, orthogonal(8), X, walked=12)
network(
    "LoRA",
    lambda p, frozen, x: network_of(lambda x, q: leaky(x @ (q[0] + q[1]["a"] @ q[1]["b"])))(
        list(zip(frozen, p, strict=True)), x
    ),
    [{"a": 0.1 * normal(8, 2, seed=i), "b": 0.1 * normal(2, 8, seed=50 + i)} for i in range(8)],
    orthogonals(8),
    X,
    walked=8,
)
network(
    "LoRA beside the weight",
    lambda p, frozen, x: network_of(lambda x, q: leaky(x @ q[0] + (x @ q[1]["a"]) @ q[1]["b"]))(
        list(zip(frozen, p, strict=True)), x
    ),
    [{"a": 0.1 * normal(8, 2, seed=i), "b": 0.1 * normal(2, 8, seed=50 + i)} for i in range(6)],
    orthogonals(6),
    X,
    slow=True,
)
network(
    "frozen layers",
    lambda p, frozen, x: network_of(turn)([*p[:2], *frozen, *p[2:]], x),
    orthogonals(5),
    orthogonals(5, seed=60),
    X,
    walked=8,
)
MASK = np.tril(np.ones((WIDTH, WIDTH)))
network(
    "masked weights",
    network_of(lambda x, w: leaky(x @ mw.declare(w * MASK, "lower"))),
    [lower(WIDTH, seed=i) + jnp.triu(normal(WIDTH, WIDTH, seed=i), 1) for i in range(8)],
    X,
    walked=8,
)
network(
    "weights made orthogonal",
    network_of(lambda x, a: turn(x, jnp.linalg.qr(a)[0])),
    [normal(8, 8, seed=i) for i in range(8)],
    X,
    walked=14,
    slow=True,
)
network(
    "weight decay",
    lambda p, x: network_of(turn)(p, x) + 1e-2 * sum(jnp.sum(w**2) for w in p),
    orthogonals(8),
    X,
    walked=12,
)
network(
    "biases times data",
    lambda p, x, s: network_of(lambda x, q: turn(x, q[0]) + s * q[1])(p, x),
    [(w, normal(WIDTH, seed=i)) for i, w in enumerate(orthogonals(8))],
    X,
    jnp.float64(0.3),
    walked=12,
    anchors=False,
)
network("loss of weights alone", lambda w, x: jnp.sum(jnp.sin(w)), orthogonal(8), X, walked=None)
network(
    "unused parameters",
    lambda p, x: network_of(turn)(p["used"], x),
    {"used": orthogonals(8), "unused": normal(3)},
    X,
    walked=12,
    slow=True,
)
network(
    "None leaves",
    network_of(lambda x, p: turn(x, p["w"]) + (0 if p["b"] is None else p["b"])),
    [{"w": w, "b": None if i % 2 else normal(WIDTH, seed=i)} for i, w in enumerate(orthogonals(8))],
    X,
    walked=12,
    slow=True,
)

# --- arguments ----------------------------------------------------------------------------------------------


def with_aux(params, x, labels):
    hidden = []
    for w in params:
        x = turn(x, w)
        hidden.append(x.mean())
    right = jnp.argmax(x, 1) == labels
    loss = -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(x), labels[:, None], 1))
    return loss, {
        "logits": x,
        "right": right.sum(),
        "hidden": hidden,
        "norm": jnp.sum(params[0] ** 2),
        "name": "eight layers",
        "depth": len(params),
        "none": None,
    }


network("aux", with_aux, orthogonals(8), X, LABELS, has_aux=True, walked=12)
network(
    "keywords",
    lambda params, x, *, target, scale: scale * network_of(turn)(params, x, target["y"]),
    orthogonals(8),
    X,
    kwargs={"target": {"y": Y}, "scale": 2.0},
    walked=12,
    slow=True,
)
network(
    "gradient of the input",
    network_of(turn),
    orthogonals(8),
    X,
    argnums=(0, 1),
    method=mw.Moonwalk(inputs=(1,)),
    walked=14,
)
network(
    "gradient of an input that is a weight",
    network_of(turn),
    orthogonals(8),
    X,
    argnums=(0, 1),
    slow=True,
)
network(
    "gradient of the input alone",
    network_of(turn),
    orthogonals(4),
    X,
    argnums=1,
    method=mw.Moonwalk(inputs=(1,)),
    walked=None,
)


def with_dropout(params, x, key):
    for w in params:
        key, own = jax.random.split(key)
        x = turn(jnp.where(jax.random.bernoulli(own, 0.8, x.shape), x / 0.8, 0), w)
    return square(x)


network("dropout", with_dropout, orthogonals(6), X, KEY)


def with_noise(params, x, key):
    for w in params:
        key, own = jax.random.split(key)
        x = turn(x * (1 + 0.1 * jax.random.uniform(own, x.shape)), w)
    return square(x)


network(
    "multiplicative noise",
    with_noise,
    orthogonals(8),
    X,
    KEY,
    method=mw.Moonwalk(walk="always"),
    walked=12,
    slow=True,
)
network(
    "stop_gradient in the middle",
    lambda p, x: square(
        network_of(turn, lambda x: x)(p[4:], lax.stop_gradient(network_of(turn, lambda x: x)(p[:4], x)))
    ),
    orthogonals(10),
    X,
    walked=8,
)
network(
    "stop_gradient on one way",
    network_of(lambda x, w: turn(x, w) + 0.1 * lax.stop_gradient(x)),
    orthogonals(8),
    X,
    slow=True,
)


def deeply_supervised(params, x):
    total = 0.0
    for w in params:
        x = turn(x, w)
        total += 0.1 * jnp.mean(x[:, :2] ** 2)
    return total + square(x)


network("auxiliary losses on the way", deeply_supervised, orthogonals(8), X)


# --- libraries ------------------------------------------------------------------------------------------------


def with_orthogonal(model, where):
    """An Equinox model whose weights [out, in] are orthogonal."""
    return eqx.tree_at(
        where, model, [orthogonal(*w.shape[::-1], seed=i).T for i, w in enumerate(where(model))]
    )


def equinox(model, x, **facts):
    params, static = eqx.partition(model, eqx.is_inexact_array)

    def loss(params, x):
        return square(jax.vmap(eqx.combine(params, static))(x))

    network(f"Equinox {type(model).__name__}", loss, params, x, **facts)


equinox(
    with_orthogonal(
        eqx.nn.MLP(8, 8, 8, 8, leaky, key=KEY, dtype=jnp.float64), lambda m: [l.weight for l in m.layers]
    ),
    X,
    walked=8,
)
equinox(
    eqx.nn.Sequential(
        [
            eqx.nn.Conv1d(4, 4, 3, stride=2, padding=1, key=KEY, dtype=jnp.float64),
            eqx.nn.Lambda(leaky),
            eqx.nn.Conv1d(4, 4, 2, stride=2, key=KEY, dtype=jnp.float64),
            eqx.nn.Lambda(leaky),
            eqx.nn.AvgPool1d(2, 2),
            eqx.nn.Lambda(jnp.ravel),
            eqx.nn.Linear(16, 3, key=KEY, dtype=jnp.float64),
        ]
    ),
    SEQUENCE.mT,
)


class Flax(nnx.Module):
    def __init__(self, rngs):
        options = {"param_dtype": jnp.float64, "rngs": rngs}
        self.stem = nnx.Conv(4, 8, (3,), strides=2, padding=1, **options)
        self.layers = nnx.List(
            [nnx.Linear(8, 8, kernel_init=nnx.initializers.orthogonal(), **options) for _ in range(6)]
        )
        self.norm = nnx.LayerNorm(8, **options)
        self.dropout = nnx.Dropout(0.2, deterministic=True)

    def __call__(self, x):
        x = leaky(self.stem(x))
        for layer in self.layers:
            x = leaky(layer(x))
        return self.dropout(self.norm(x).mean(1))


def flax():
    graph, params, rest = nnx.split(Flax(nnx.Rngs(0)), nnx.Param, ...)

    def loss(params, rest, x):
        return square(nnx.merge(graph, params, rest)(x))

    network("Flax NNX", loss, params, rest, SEQUENCE[:, :16], walked=8)


flax()
