"""A small run that may be killed: `python training_worker.py FOLDER SECONDS_PER_STEP`."""

import sys
import time

import equinox as eqx
import jax
import jax.numpy as jnp

import moonwalk as mw
from moonwalk import data, training

STEPS, EVERY = 24, 2


class Free(eqx.Module):
    """Dense layers of one width with |x|: orthogonal at first, and nobody says so."""

    layers: list[jax.Array]
    head: jax.Array

    def __init__(self, depth, *, key, width=40):
        first, second = jax.random.split(key)
        matrices = jax.random.orthogonal(first, width, shape=(depth,), dtype=jnp.float32)
        self.layers = list(matrices)
        self.head = jax.random.normal(second, (width, 10), jnp.float32) / width**0.5

    def __call__(self, x, *, key=None):
        x = x.reshape(len(x), -1)
        for w in self.layers:
            x = jnp.abs(self.weight(x, w))
        return x @ self.head

    def weight(self, x, w):
        return x @ w


class Orthogonal(Free):
    """The same, made orthogonal at every step."""

    def weight(self, x, w):
        return x @ mw.declare(jnp.linalg.qr(w)[0], "orthogonal")


def checkpoints(folder, resume=True, **settings):
    return training.Checkpoints(folder, {"model": "orthogonal"} | settings, resume=resume)


def run(saved, pause=0.0, steps=STEPS, **options):
    return training.fit(
        Orthogonal(2, key=jax.random.key(0)),
        data.mnist1d(examples=200),
        optimizer=training.optimizer("adam", 1e-2),
        steps=steps,
        batch=32,
        checkpoints=saved,
        checkpoint_every=EVERY,
        callbacks=[lambda record: time.sleep(pause)],
        **options,
    )


if __name__ == "__main__":
    run(checkpoints(sys.argv[1]), float(sys.argv[2]))
