"""The search among offers: what it leaves out is never better; plans that do not fit are refused by name."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from marks import slow, some_cases

import moonwalk as mw
from moonwalk.planning import search
from moonwalk.segments.loop import Loop
from moonwalk.segments.store import Recompute, Store

pytestmark = pytest.mark.filterwarnings("ignore::moonwalk.PlanWarning")


class Drawn:
    """A loss of scans, of residual blocks between them and of layers that can be walked, from a seed."""

    def __init__(self, seed):
        rng = np.random.default_rng(seed)
        self.width, rows = int(rng.choice([8, 16])), int(rng.choice([64, 1024]))
        kinds = ["scan", "rnn", "block", "block", "orthogonal", "wide", "coupling"]
        self.kinds = [str(k) for k in rng.choice(kinds, size=rng.integers(3, 12))]
        self.lengths = [int(n) for n in rng.integers(2, 20, size=len(self.kinds))]
        struct = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
        w = self.width
        shapes = {"scan": lambda n: (n, w, w), "rnn": lambda n: (w, w), "wide": lambda n: (w, 4 * w)}
        params = [
            struct(*shapes.get(k, lambda n: (w, w))(n))
            for k, n in zip(self.kinds, self.lengths, strict=True)
        ]
        self.args = params, struct(rows, w)

    def __call__(self, params, x):
        for kind, length, w in zip(self.kinds, self.lengths, params, strict=True):
            if kind == "scan":
                x, _ = lax.scan(lambda c, w: (c + jnp.tanh(jax.nn.gelu(c @ w) @ w), None), x, w)
            elif kind == "rnn":
                xs = x.reshape(-1, 8, self.width)
                cell = lambda c, s, w=w: (jnp.tanh(c @ w + s),) * 2
                x = lax.scan(cell, jnp.zeros_like(xs[0]), xs)[1].reshape(x.shape)
            elif kind == "orthogonal":
                for _ in range(length):
                    x = jnp.abs(x @ mw.declare(w, "orthogonal"))
            elif kind == "wide":
                x = x + jax.nn.gelu(x @ w) @ w.T
            elif kind == "coupling":
                a, b = jnp.split(x, 2, axis=-1)
                x = jnp.concatenate([a, b + jnp.tanh(a @ w[: self.width // 2, : self.width // 2])], -1)
            else:
                x = x + jax.nn.gelu(x @ w)
        return jnp.sum(x**2)


@pytest.mark.parametrize(
    "method", [mw.Moonwalk(), slow(mw.Moonwalk(checkpoint="auto")), mw.Checkpoint()], ids=str
)
@pytest.mark.parametrize("seed", [*range(6), *map(slow, range(6, 100))])
def test_a_lower_bound_leaves_out_nothing_better(seed, method, monkeypatch):
    """Plans with the bounds, and with bounds that exclude nothing."""
    loss = Drawn(seed)
    bounded = mw.plan(loss, *loss.args, method=method)
    monkeypatch.setattr(search, "_at_once", lambda chosen: 0)
    monkeypatch.setattr(search, "may_choose", lambda *args: True)
    unbounded = mw.plan(loss, *loss.args, method=method)
    assert bounded.peak_bytes == unbounded.peak_bytes, (loss.kinds, loss.lengths)


@pytest.mark.parametrize("seed", [*range(6), *map(slow, range(6, 60))])
def test_halving_finds_as_many_stored_nodes_as_trying_each(seed, monkeypatch):
    found = []

    def both(network, costs, small, fast, limit):
        one_by_one = search.between(network, costs, small, fast)
        fitting = list(itertools.takewhile(lambda c: c.peak <= limit, one_by_one))
        chosen = halving(network, costs, small, fast, limit)
        found.append((chosen, fitting, limit))
        return chosen

    halving = search.largest_between
    monkeypatch.setattr(search, "largest_between", both)
    loss = Drawn(seed)
    mw.plan(loss, *loss.args)
    ((chosen, fitting, limit),) = found
    assert (chosen is None) == (not fitting)
    assert chosen is None or (chosen.peak <= limit and chosen.seconds <= fitting[-1].seconds)


def dense(params, x):
    for w in params:
        x = jnp.tanh(x @ w)
    return jnp.sum(x**2)


def scanned(params, x):
    return jnp.sum(lax.scan(lambda c, w: (jnp.tanh(c @ w), None), x, params)[0] ** 2)


@pytest.mark.parametrize(
    "segments",
    [
        lambda n: (Store(1, n),),
        lambda n: (Store(0, n - 1),),
        lambda n: (Store(0, n + 5),),
        lambda n: (Store(0, 2), Store(3, n)),
        lambda n: (Store(0, 3), Store(2, n)),
        lambda n: (Store(0, 2), Store(2, 2), Store(2, n)),
        lambda n: (Recompute(0, n, (Store(0, 2), Store(3, n))),),
        lambda n: (),
    ],
)
def test_segments_that_are_not_all_nodes_in_a_row_are_refused(segments):
    args = [jnp.eye(4)] * 3, jnp.ones((2, 4))
    plan = mw.plan(dense, *args)
    plan = dataclasses.replace(plan, segments=segments(len(plan.nodes)))
    with pytest.raises(
        mw.PlanMismatchError, match=r"segments must be the nodes \[0, \d+\), one after another"
    ):
        mw.grad(dense, method=plan)(*args)


def test_a_loop_is_for_one_scan():
    args = [jnp.eye(4)] * 3, jnp.ones((2, 4))
    plan = mw.plan(dense, *args)
    n = len(plan.nodes)
    plan = dataclasses.replace(plan, segments=(Loop(0, 1, (2,)), Store(1, n)))
    with pytest.raises(
        mw.PlanMismatchError, match=r"Loop\(start=0, stop=1\) is for one scan, .* dot_general"
    ):
        mw.grad(dense, method=plan)(*args)


@pytest.mark.parametrize("tile", [(), (0,), (4, 0)])
def test_tiles_have_layers(tile):
    args = jnp.stack([jnp.eye(4)] * 8), jnp.ones((2, 4))
    plan = mw.plan(scanned, *args, method=mw.Checkpoint())
    n = len(plan.nodes)
    at = next(i for i, node in enumerate(plan.nodes) if node.startswith("scan"))
    before = (Store(0, at),) if at else ()
    plan = dataclasses.replace(plan, segments=(*before, Loop(at, at + 1, tile), Store(at + 1, n)))
    with pytest.raises(mw.PlanMismatchError, match="at least one layer"):
        mw.grad(scanned, method=plan)(*args)


# Seeds 2 and 5 draw no loops, seeds 0 and 4 more layers than these.
FAST = {(1, "block"), (1, "sqrt"), (3, "recursive"), (3, "block"), (3, 2)}


@pytest.mark.parametrize(
    ("seed", "asked"), some_cases(itertools.product(range(60), ["recursive", "block", "sqrt", 2]), FAST)
)
def test_checkpoints_of_loops_between_blocks(seed, asked):
    """A scan that repeats with what surrounds it is a segment of its own all the same."""
    loss = Drawn(seed)
    loss.kinds, shapes = loss.kinds * 2, [a.shape for a in loss.args[0]] * 2
    loss.lengths = loss.lengths * 2
    keys = jax.random.split(jax.random.key(seed), len(shapes) + 1)
    params = [jax.random.normal(k, s) / 8 for k, s in zip(keys[1:], shapes, strict=True)]
    x = jax.random.normal(keys[0], (16, loss.width))
    try:
        found = mw.grad(loss, method=mw.Checkpoint(asked))(params, x)
    except ValueError as error:
        if "too few for" not in str(error):
            raise
        return
    for a, b in zip(found, jax.grad(loss)(params, x), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12 * float(jnp.max(jnp.abs(b))))
