"""The networks that people train, in plain JAX and by frameworks: JAX's gradient, and no more memory than backpropagation."""

import functools
from dataclasses import dataclass

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from marks import some, some_cases

import moonwalk as mw
from moonwalk.lab.bench import networks
from moonwalk.lab.bench.tasks import Task

pytestmark = pytest.mark.filterwarnings("ignore::moonwalk.PlanWarning")

METHODS = {"moonwalk": mw.Moonwalk(), "checkpoint": mw.Checkpoint("block")}
VARIANTS = {"gpt": ("", "scanned"), "recurrent": ("", "gru")}
VARIANTS |= {name: ("", "scanned") for name in ("vit", "mixer", "moe", "lru", "graphnet", "pinn")}
EXACT = 1e-10


# --- plain JAX ----------------------------------------------------------------------------------------


def of_the_bench(name, variant):
    words = ", ".join(filter(None, ("tiny", variant)))
    made = networks.make(Task("", name, "", words, **networks.SIZES[name]["tiny"]))
    return made.loss, made.arguments(0)


# --- Equinox ------------------------------------------------------------------------------------------


class Attention(eqx.Module):
    """A block of a vision transformer, for one picture: [patches, width]."""

    norm1: eqx.nn.LayerNorm
    attention: eqx.nn.MultiheadAttention
    norm2: eqx.nn.LayerNorm
    mlp: eqx.nn.MLP
    dropout: eqx.nn.Dropout

    def __init__(self, width, *, key):
        one, two = jax.random.split(key)
        self.norm1, self.norm2 = eqx.nn.LayerNorm(width), eqx.nn.LayerNorm(width)
        self.attention = eqx.nn.MultiheadAttention(2, width, key=one)
        self.mlp = eqx.nn.MLP(width, width, 4 * width, 1, activation=jax.nn.gelu, key=two)
        self.dropout = eqx.nn.Dropout(0.1)

    def __call__(self, x, key):
        one, two = jax.random.split(key)
        y = jax.vmap(self.norm1)(x)
        x = x + self.dropout(self.attention(y, y, y), key=one)
        y = jax.vmap(self.mlp)(jax.vmap(self.norm2)(x))
        return x + self.dropout(y, key=two)


class Transformer(eqx.Module):
    stem: eqx.nn.Conv2d
    places: jax.Array
    blocks: list[Attention]
    norm: eqx.nn.LayerNorm
    head: eqx.nn.Linear

    def __init__(self, width, depth, *, key):
        stem, places, head, *blocks = jax.random.split(key, 3 + depth)
        self.stem = eqx.nn.Conv2d(3, width, 4, 4, key=stem)
        self.places = 0.02 * jax.random.normal(places, (16, width))
        self.blocks = [Attention(width, key=k) for k in blocks]
        self.norm = eqx.nn.LayerNorm(width)
        self.head = eqx.nn.Linear(width, 10, key=head)

    def __call__(self, image, key):
        x = self.stem(image).reshape(self.places.shape[1], -1).T + self.places
        for block, own in zip(self.blocks, jax.random.split(key, len(self.blocks)), strict=True):
            x = block(x, own)
        return self.head(self.norm(x.mean(0)))


class Mixer(eqx.Module):
    """Equinox's own example of an MLP-Mixer, for one picture; blocks of [channels, patches]."""

    stem: eqx.nn.Conv2d
    blocks: list
    norm: eqx.nn.LayerNorm
    head: eqx.nn.Linear

    def __init__(self, width, depth, *, key):
        stem, head, *keys = jax.random.split(key, 2 + 2 * depth)
        self.stem = eqx.nn.Conv2d(3, width, 4, 4, key=stem)
        mlp = lambda size, key: eqx.nn.MLP(size, size, 2 * size, 1, activation=jax.nn.gelu, key=key)
        self.blocks = [
            (
                mlp(16, one),
                mlp(width, two),
                eqx.nn.LayerNorm((width, 16)),
                eqx.nn.LayerNorm((16, width)),
            )
            for one, two in zip(keys[::2], keys[1::2], strict=True)
        ]
        self.norm = eqx.nn.LayerNorm((width, 16))
        self.head = eqx.nn.Linear(width, 10, key=head)

    def __call__(self, image, key):
        x = self.stem(image)
        x = x.reshape(x.shape[0], -1)
        for patches, channels, norm1, norm2 in self.blocks:
            x = x + jax.vmap(patches)(norm1(x))
            x = x.T
            x = x + jax.vmap(channels)(norm2(x))
            x = x.T
        return self.head(self.norm(x).mean(1))


def pictures(channels_last):
    rng = np.random.default_rng(0)
    shape = (4, 16, 16, 3) if channels_last else (4, 3, 16, 16)
    return jnp.asarray(rng.standard_normal(shape)), jnp.asarray(rng.integers(0, 10, 4))


def cross_entropy(logits, labels):
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], 1))


def equinox(kind):
    params, static = eqx.partition(kind(16, 3, key=jax.random.key(0)), eqx.is_inexact_array)

    def loss(params, data, labels):
        images, key = data
        model = eqx.combine(params, static)
        logits = jax.vmap(model)(images, jax.random.split(key, len(images)))
        return cross_entropy(logits, labels)

    images, labels = pictures(channels_last=False)
    return loss, (params, (images, jax.random.key(1)), labels)


# --- Flax ---------------------------------------------------------------------------------------------


def flax_nnx():
    nnx = pytest.importorskip("flax.nnx")

    class Block(nnx.Module):
        def __init__(self, width, rngs):
            self.norm1, self.norm2 = nnx.LayerNorm(width, rngs=rngs), nnx.LayerNorm(width, rngs=rngs)
            self.attention = nnx.MultiHeadAttention(2, width, decode=False, rngs=rngs)
            self.up = nnx.Linear(width, 4 * width, rngs=rngs)
            self.down = nnx.Linear(4 * width, width, rngs=rngs)
            self.dropout = nnx.Dropout(0.1, rngs=rngs)

        def __call__(self, x):
            x = x + self.dropout(self.attention(self.norm1(x)))
            return x + self.dropout(self.down(nnx.gelu(self.up(self.norm2(x)))))

    class ViT(nnx.Module):
        def __init__(self, width, depth, rngs):
            self.stem = nnx.Conv(3, width, (4, 4), strides=(4, 4), rngs=rngs)
            self.places = nnx.Param(0.02 * jax.random.normal(rngs.params(), (16, width)))
            self.blocks = nnx.List([Block(width, rngs) for _ in range(depth)])
            self.norm = nnx.LayerNorm(width, rngs=rngs)
            self.head = nnx.Linear(width, 10, rngs=rngs)

        def __call__(self, images):
            x = self.stem(images)
            x = x.reshape(len(x), -1, x.shape[-1]) + self.places
            for block in self.blocks:
                x = block(x)
            return self.head(self.norm(x.mean(1)))

    graph, params, rest = nnx.split(ViT(16, 3, nnx.Rngs(0, dropout=1)), nnx.Param, ...)

    def loss(params, rest, images, labels):
        model = nnx.merge(graph, params, rest, copy=True)  # dropout counts its calls in the copy
        return cross_entropy(model(images), labels)

    return loss, (params, rest, *pictures(channels_last=True))


def flax_linen(scanned):
    nn = pytest.importorskip("flax.linen")

    class Block(nn.Module):
        width: int

        @nn.compact
        def __call__(self, x, _=None):
            y = nn.MultiHeadDotProductAttention(2, deterministic=True)(nn.LayerNorm()(x))
            x = x + nn.Dropout(0.1, deterministic=False)(y)
            y = nn.gelu(nn.Dense(4 * self.width)(nn.LayerNorm()(x)))
            x = x + nn.Dropout(0.1, deterministic=False)(nn.Dense(self.width)(y))
            return (x, None) if scanned else x

    class ViT(nn.Module):
        width: int
        depth: int

        @nn.compact
        def __call__(self, images):
            x = nn.Conv(self.width, (4, 4), strides=(4, 4))(images)
            x = x.reshape(len(x), -1, self.width)
            x = x + self.param("places", nn.initializers.normal(0.02), x.shape[1:])
            if scanned:
                axes = {"params": 0}
                rngs = {"params": True, "dropout": True}
                stack = nn.scan(Block, variable_axes=axes, split_rngs=rngs, length=self.depth)
                x, _ = stack(self.width)(x, None)
            else:
                for _ in range(self.depth):
                    x = Block(self.width)(x)
            return nn.Dense(10)(nn.LayerNorm()(x.mean(1)))

    model = ViT(16, 3)
    images, labels = pictures(channels_last=True)
    params = jax.jit(model.init)({"params": jax.random.key(0), "dropout": jax.random.key(1)}, images)

    def loss(params, images, key, labels):
        return cross_entropy(model.apply(params, images, rngs={"dropout": key}), labels)

    return loss, (params, images, jax.random.key(2), labels)


# --- all of them --------------------------------------------------------------------------------------

MADE = {
    ", ".join(filter(None, (name, variant))): functools.partial(of_the_bench, name, variant)
    for name in networks.SIZES
    for variant in VARIANTS.get(name, ("",))
}
MADE |= {
    "Equinox, transformer": functools.partial(equinox, Transformer),
    "Equinox, mixer": functools.partial(equinox, Mixer),
    "Flax NNX": flax_nnx,
    "Flax Linen": functools.partial(flax_linen, scanned=False),
    "Flax Linen, scanned": functools.partial(flax_linen, scanned=True),
}


@dataclass
class Run:
    """What a compiled gradient returned, and the bytes of its temporaries."""

    leaves: list
    temporaries: int


@functools.cache
def problem(name):
    loss, args = MADE[name]()
    wide = lambda a: a.astype(jnp.float64) if jnp.issubdtype(a.dtype, jnp.floating) else a
    return loss, jax.tree.map(wide, args)


@functools.cache
def run(name, method=None):
    loss, args = problem(name)
    fun = mw.value_and_grad(loss, method=METHODS[method]) if method else jax.value_and_grad(loss)
    program = jax.jit(fun).lower(*args).compile()
    return Run(jax.tree.leaves(program(*args)), program.memory_analysis().temp_size_in_bytes)


# One form of each network, and one of each framework.
FAST = [
    name for name in MADE if "scanned" not in name and name not in ("Equinox, mixer", "recurrent, gru")
]


@pytest.mark.parametrize(
    ("name", "method"),
    some_cases([(n, m) for n in MADE for m in METHODS], [(n, "moonwalk") for n in FAST]),
    ids=str,
)
def test_the_gradient_is_jaxs(name, method):
    truth = run(name).leaves
    # Of the bias of keys in attention the gradient is zero: what is found is rounding of all others.
    rounding = jnp.finfo(jnp.float64).eps * sum(jnp.linalg.norm(b) for b in truth)
    for a, b in zip(run(name, method).leaves, truth, strict=True):
        assert jnp.linalg.norm(a - b) <= EXACT * jnp.linalg.norm(b) + rounding


@pytest.mark.parametrize("name", some(MADE, FAST))
def test_takes_no_more_memory_than_backpropagation(name):
    assert run(name, "moonwalk").temporaries <= 1.1 * run(name).temporaries
