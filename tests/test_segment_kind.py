"""A kind of segment is one file: this one. CONTRIBUTING shows it."""

import dataclasses
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import moonwalk as mw
from moonwalk.gradient import Call
from moonwalk.planning import search, timeline
from moonwalk.planning.draft import plain_proposers
from moonwalk.segments.base import Offer, Proposer, Realised, Row, Segment, line_of
from moonwalk.segments.codec import in_plans
from moonwalk.segments.costs import node_costs
from moonwalk.segments.store import Stretch, ends


# -- the kind: begins here ---------------------------------------------------------------------------
@in_plans
@dataclass(frozen=True)
class Transpose(Segment):
    """The state at the start is kept; the reverse pass linearises the nodes there, and transposes."""

    def bind(self, network):
        return TransposeExecutor(network, self.start, self.stop)


class TransposeExecutor(Stretch):
    """h = h' J and g = h' ∂y/∂θ: `jax.linearize` gives (J, ∂y/∂θ), `jax.linear_transpose` turns it."""

    @property
    def data(self):
        return Transpose(self.start, self.stop)

    # What it takes. `Stretch` knows the rest: it keeps its first state, and its nodes keep nothing.
    def backward_peak(self, timeline):
        nodes = range(self.start, self.stop)
        residuals = sum(timeline.costs[i].backprop for i in nodes)
        return self.kept_bytes + residuals + max(timeline.states(i) for i in nodes)

    def rows(self, costs, *, chosen):
        del chosen
        shown = [(n, c) for n, c in zip(self.nodes, costs[self.start :], strict=False) if not n.is_aside]
        why = "linearised again, and transposed"
        return [
            Row(n.describe(), line_of(n), "transpose", 0, None, why, c.m_x, c.m_theta) for n, c in shown
        ]

    # How it runs.
    def forward(self, fixed, x, results, *, again=False):
        return self.run_keeping_start(fixed, x, results, again=again)

    def backward(self, fixed, saved, h, out):
        fixed, x = self.start_again(fixed, saved, h)
        states, outputs, weights = ends(self.nodes)

        def run(at_states, at_weights):
            env = {**x, **dict(zip(states, at_states, strict=True))}
            values = {**fixed, **dict(zip(weights, at_weights, strict=True))}
            self.run(values, env, frozenset(), again=True)
            return [env[v] for v in outputs]

        primals = [x[v] for v in states], [fixed[v] for v in weights]
        _, linear = jax.linearize(run, *primals)
        leaving, found = jax.linear_transpose(linear, *primals)([h.pop(v) for v in outputs])
        h.update(zip(states, leaving, strict=True))
        out.add(dict(zip(weights, found, strict=True)))
        for node in self.nodes:
            out.close(node.weights)
        return []  # nothing is recovered, so there is no error to measure


class TransposeProposer(Proposer):
    """Offers every pair of neighbouring nodes; what a pair takes is what JAX's pullbacks keep."""

    def __init__(self, network, costs, live):
        self.network, self.costs, self.live = network, costs, live

    def limits(self):
        return {2 * max(cost.backprop for cost in self.costs)}

    def begin(self, limit, worth):
        self.limit = limit

    def ending_at(self, stop, best):
        taken = sum(cost.backprop for cost in self.costs[stop - 2 : stop])
        if stop > 1 and taken <= self.limit:
            yield Offer(stop - 2, stop, kept=self.live[stop - 2], transient=taken)

    def realise(self, offer):
        executor = TransposeExecutor(self.network, offer.start, offer.stop)
        return Realised([executor], executor.kept_bytes, offer.transient)


# -- the kind: ends here -----------------------------------------------------------------------------


def loss(ws, x):
    for w in ws:
        y = jnp.tanh(x @ w)
        x = x + y * jnp.where(y > 0, 1.0, 0.5)  # a skip: states with several readers, a mask
    return jnp.mean(x**2)


def arguments(depth=6, width=5):
    keys = jax.random.split(jax.random.key(0), depth + 1)
    return [jax.random.normal(k, (width, width)) / 2 for k in keys[1:]], jax.random.normal(
        keys[0], (8, width)
    )


@pytest.fixture
def plan():
    """A plan in which one segment of three is of the new kind."""
    ws, x = arguments()
    plan = mw.plan(loss, ws, x, method=mw.Checkpoint(3))
    first, middle, last = plan.segments
    return dataclasses.replace(plan, segments=(first, Transpose(middle.start, middle.stop), last))


def assert_close(found, expected):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_it_runs_as_planned(plan, wrap):
    ws, x = arguments()
    found = wrap(mw.value_and_grad(loss, method=plan))(ws, x)
    assert_close(found, jax.value_and_grad(loss)(ws, x))


def test_the_plan_decides_and_not_the_planner(plan, monkeypatch):
    """Were the segment ignored, its `backward` would not be called."""
    calls = []
    backward = TransposeExecutor.backward
    monkeypatch.setattr(
        TransposeExecutor, "backward", lambda self, *args: calls.append(self) or backward(self, *args)
    )
    mw.grad(loss, method=plan)(*arguments())
    assert [executor.data for executor in calls] == [plan.segments[1]]


def test_it_prints_and_goes_through_json(plan):
    assert mw.Plan.from_json(plan.to_json()) == plan
    kind = plan.segments[1]
    assert str(kind) == f"Transpose(start={kind.start}, stop={kind.stop})"


def test_it_has_rows_and_a_price(plan):
    ws, x = arguments()
    engine, _, _ = Call("plan", loss, 0, False, (ws, x), {}).plan(plan)
    costs = node_costs(engine.network)
    executor = engine.segments[1]
    rows = executor.rows(costs, chosen=False)
    assert {row.mode for row in rows} == {"transpose"}
    assert any(row.block.startswith("dot_general") for row in rows)
    peak = timeline.peak(engine.network, engine.segments, costs)
    assert peak >= executor.held(None) + sum(row.m_x + row.m_theta for row in rows)


def test_fused_updates_take_its_gradients(plan):
    ws, x = arguments()
    optimizer = optax.sgd(0.1)
    state = optimizer.init(ws)
    fused = mw.fused_update(loss, optimizer, method=plan)
    found = fused(ws, state, x)
    g = jax.grad(loss)(ws, x)
    assert_close(found[1], jax.tree.map(lambda w, g: w - 0.1 * g, ws, g))


@pytest.mark.parametrize("cheap", [True, False])
def test_the_search_takes_its_offers_where_they_keep_less(cheap, plan):
    """Beside stored and recomputed stretches, which the search knows no better than this kind."""
    engine, _, _ = Call("plan", loss, 0, False, arguments(), {}).plan(plan)
    network, costs = engine.network, node_costs(engine.network)
    live = [0 if cheap else 2**40] * (len(network.nodes) + 1)
    own = TransposeProposer(network, costs, live)
    choice = search.choose(network, costs, [*plain_proposers(network, costs), own])
    taken = [proposer is own for proposer, _ in choice.chosen]
    assert any(taken) if cheap else not any(taken)
    assert [s.start for s in choice.segments] == [0, *(s.stop for s in choice.segments[:-1])]
    assert choice.segments[-1].stop == len(network.nodes)
