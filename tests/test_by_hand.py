"""`Checkpoint` beside `jax.checkpoint` written by hand in the same places: memory of compiled programs."""

import jax
import jax.numpy as jnp
import memory
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
    ("gpt", "tiny", 4),
    ("gpt", "scanned, tiny", 4),
    ("gpt", "tiny", "sqrt"),
    ("resnet", "", "block"),
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

    def loss(params, x, labels):
        ws, head = params
        if scanned:
            x, _ = lax.scan(layer, x, ws)
        else:
            for w in ws:
                x, _ = layer(x, w)
        return -jnp.mean(jax.nn.one_hot(labels, 256, dtype=x.dtype) * jax.nn.log_softmax(x @ head))

    struct = memory.struct
    labels = jax.ShapeDtypeStruct((64, 256), jnp.int32)
    ws = struct(6, 256, 256) if scanned else [struct(256, 256)] * 6
    args = ((ws, struct(256, 256)), struct(64, 256, 256), labels)
    state = 64 * 256 * 256 * 4 / memory.MIB
    block = jax.checkpoint(layer, prevent_cse=not scanned)

    def by_hand(params, x, labels):
        ws, head = params
        if scanned:
            x, _ = lax.scan(block, x, ws)
        else:
            for w in ws:
                x, _ = block(x, w)
        return -jnp.mean(jax.nn.one_hot(labels, 256, dtype=x.dtype) * jax.nn.log_softmax(x @ head))

    ours = memory.temp(mw.value_and_grad(loss, method=mw.Checkpoint("block")), *args)
    assert ours <= 1.03 * memory.temp(jax.value_and_grad(by_hand), *args) + 0.1 * state
