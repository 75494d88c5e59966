"""`Checkpoint` beside `jax.checkpoint` written by hand in the same places: memory of compiled programs."""

import jax
import jax.numpy as jnp
import memory
import numpy as np
import pytest
from jax import lax
from marks import slow

import moonwalk as mw
from moonwalk.lab.bench import networks
from moonwalk.lab.bench.methods import differentiate
from moonwalk.lab.bench.tasks import Task

pytestmark = pytest.mark.filterwarnings("ignore::moonwalk.PlanWarning")

SIZES = {
    "dense": {"depth": 16, "width": 64, "batch": 2**12},
    "gpt": {"depth": 8, "width": 32, "length": 128, "batch": 4},
    "resnet": {"depth": 8, "width": 8, "length": 32, "batch": 8},
}
KINDS = [
    ("dense", "relu"),
    ("dense", "relu, looped"),
    ("gpt", "scanned, tiny"),
    ("gpt", "tiny"),
    ("resnet", ""),
]
FAST = {
    ("gpt", "scanned, tiny", 4),
    ("gpt", "tiny", "sqrt"),
}
CASES = [(*kind, places) for kind in KINDS for places in ("block", "sqrt", 2, 4)]

assert set(CASES) >= FAST


@pytest.mark.parametrize(
    ("name", "variant", "places"), [c if c in FAST else slow(*c) for c in CASES], ids=str
)
def test_takes_no_more_than_by_hand(name, variant, places):
    network = networks.make(Task("", name, "", variant, settings={}, **SIZES[name]))
    types = network.types()
    ours = memory.temp(mw.value_and_grad(network.loss, method=mw.Checkpoint(places)), *types)
    theirs = memory.temp(differentiate("backprop", network.by_hand(places), types), *types)
    assert ours <= 1.03 * theirs


@pytest.mark.parametrize("scanned", [False, True])
def test_what_is_cheap_to_make_is_not_kept(scanned):
    """A mask of indices and one-hot labels, as large as activations, are made where they are read."""

    def layer(x, w):
        scores = x @ w
        causal = jnp.arange(256)[:, None] >= jnp.arange(256)
        mask = jnp.logical_and(jnp.ones((64, 256, 256), bool), causal)
        return jnp.tanh(jnp.where(mask, scores, jnp.full((64, 256, 256), -1e9, x.dtype))), None

    def loss_of(layer):
        def loss(params, x, labels):
            ws, head = params
            if scanned:
                x, _ = lax.scan(layer, x, ws)
            else:
                for w in ws:
                    x, _ = layer(x, w)
            return -jnp.mean(jax.nn.one_hot(labels, 256, dtype=x.dtype) * jax.nn.log_softmax(x @ head))

        return loss

    struct = memory.struct
    labels = jax.ShapeDtypeStruct((64, 256), jnp.int32)
    ws = struct(6, 256, 256) if scanned else [struct(256, 256)] * 6
    args = ((ws, struct(256, 256)), struct(64, 256, 256), labels)
    state = 64 * 256 * 256 * 4 / memory.MIB
    by_hand = loss_of(jax.checkpoint(layer, prevent_cse=not scanned))
    ours = memory.temp(mw.value_and_grad(loss_of(layer), method=mw.Checkpoint("block")), *args)
    assert ours <= 1.03 * memory.temp(jax.value_and_grad(by_hand), *args) + 0.1 * state


def test_stretches_that_read_cheap_tables_in_another_order_are_others():
    def loss(ws, x, row):
        one, two = jnp.broadcast_to(row, x.shape), jnp.broadcast_to(row[::-1], x.shape)
        three = jnp.sin(one)
        for i, w in enumerate(ws):
            a, b = [(one, two), (two, one), (one, three), (three, one), (one, one)][i % 5]
            x = jnp.tanh(x @ w * a) - x * b
        return jnp.sum(x**2)

    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape))
    args = [draw(4, 4) for _ in range(15)], draw(8, 4), draw(4)
    expected = jax.tree.leaves(jax.value_and_grad(loss)(*args))
    for method in (mw.Checkpoint("block"), mw.Checkpoint(3), mw.Checkpoint(), mw.Moonwalk()):
        found = jax.tree.leaves(jax.jit(mw.value_and_grad(loss, method=method))(*args))
        for a, b in zip(found, expected, strict=True):
            assert jnp.linalg.norm(a - b) <= 1e-12 * jnp.linalg.norm(b)
