"""One of two processes of `test_devices.py`: gradients across both, against those of one device.

    python distributed_worker.py RANK PORT

Each process has two CPU devices. It prints, as JSON, how far each gradient is from the one that
`jax.value_and_grad` finds on a single device of its own.
"""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import moonwalk as mw

# NumPy's, because JAX may not compute before the processes have met.
_RNG = np.random.default_rng(0)
WS = np.linalg.qr(_RNG.normal(size=(6, 8, 8)))[0]
X = _RNG.normal(size=(32, 8))


def layer(x, w):
    return jax.nn.leaky_relu(x @ mw.declare(w, "orthogonal"), 0.3)


def scanned(ws, x):
    return jnp.mean((lax.scan(lambda x, w: (layer(x, w), None), x, ws)[0] - 0.5) ** 2)


def looped(ws, x):
    for w in ws:
        x = layer(x, w)
    return jnp.mean((x - 0.5) ** 2)


def spread(array, mesh, spec):
    """An array of all processes; each holds its part of it."""
    return jax.make_array_from_callback(
        array.shape, NamedSharding(mesh, spec), lambda index: array[index]
    )


def distance(found, truth):
    """Over the parts that this process holds."""
    worst = 0.0
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(truth), strict=True):
        whole = np.asarray(b)
        for shard in a.addressable_shards:
            off = np.abs(np.asarray(shard.data) - whole[shard.index])
            worst = max(worst, float(np.max(off) / np.max(np.abs(whole))))
    return worst


def under_jit(loss, kind, spec):
    """The batch over all devices; the parameters whole, or divided like it."""
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType[kind],))
    step = jax.jit(
        mw.value_and_grad(loss, certify=True), out_shardings=(None, NamedSharding(mesh, spec), None)
    )
    with jax.set_mesh(mesh):
        return step(spread(WS, mesh, spec), spread(X, mesh, P("data")))


def in_shard_map(loss):
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))

    @jax.jit
    @jax.shard_map(mesh=mesh, in_specs=(P(), P("data")), out_specs=P())
    def step(ws, x):
        return mw.value_and_grad(lambda ws, x: lax.pmean(loss(ws, x), "data"), certify=True)(ws, x)

    return step(spread(WS, mesh, P()), spread(X, mesh, P("data")))


def main(rank, port):
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", 2, rank)
    assert jax.process_count() == 2 and jax.device_count() == 4, jax.devices()
    report = {}

    def compare(name, loss, found):
        truth = jax.jit(jax.value_and_grad(loss))(WS, X)
        report[name] = {
            "distance": distance(found[:2], truth),
            "certificate": float(found[2].error),
        }

    compare("loop", looped, under_jit(looped, "Auto", P()))
    compare("scan, parameters divided", scanned, under_jit(scanned, "Auto", P(None, "data")))
    compare("scan, Explicit axes", scanned, under_jit(scanned, "Explicit", P()))
    compare("scan in shard_map", scanned, in_shard_map(scanned))
    print(json.dumps(report))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
