"""Memory of compiled programs, and the bench's networks by their sizes; nothing runs."""

import jax
import jax.numpy as jnp
from jax import lax

import moonwalk as mw
from moonwalk.lab.bench import measuring, networks
from moonwalk.lab.bench.tasks import Task

MIB = 2**20
WIDTH = 256


def struct(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def temp(fun, *args):
    """MiB of temporaries."""
    return measuring.memory(measuring.compiled(fun, *args))["temp_bytes"] / MIB


def network(variant, layers, rows, name="dense", width=WIDTH):
    return networks.make(Task("", name, "", variant, layers, width, 0, rows))


def dense_types(layers, rows, loop=False):
    w = [struct(WIDTH, WIDTH)] * layers if loop else struct(layers, WIDTH, WIDTH)
    return w, struct(rows, WIDTH), struct(rows, WIDTH)


def layer(x, w):
    return jnp.abs(x @ mw.declare(w, "orthogonal"))


def head(x, t):
    return jnp.sum(x * t)


def scanned(ws, x, t):
    return head(lax.scan(lambda x, w: (layer(x, w), None), x, ws)[0], t)


def looped(ws, x, t):
    for w in ws:
        x = layer(x, w)
    return head(x, t)


def segmented(ws, x, t, every):
    """One level of checkpoints, a scan of `every` layers in each."""

    def segment(x, ws):
        return lax.scan(lambda x, w: (layer(x, w), None), x, ws)

    ws = ws.reshape((-1, every, *ws.shape[1:]))
    return head(lax.scan(jax.checkpoint(segment, prevent_cse=False), x, ws)[0], t)
