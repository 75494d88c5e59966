"""The network of a loss: nodes that never wait for each other, and exports that get no cotangent."""

import itertools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from marks import slow, some_cases
from tangles import Tangle
from weights import normal

import moonwalk as mw
from moonwalk.gradient import Call
from moonwalk.network import cutting
from moonwalk.network import loss as losses

pytestmark = pytest.mark.filterwarnings("ignore::moonwalk.PlanWarning")  # they are small

METHODS = {
    "default": mw.Moonwalk(),
    "always": mw.Moonwalk(walk="always"),
    "checkpoint": mw.Checkpoint(),
    "recursive": mw.Checkpoint("recursive"),
    "pure forward": mw.PureForward(),
}


def close(found, expected):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-9 * max(1, np.max(np.abs(b), initial=0)))


def cut(loss, *args, has_aux=False):
    return losses.cut(Call("plan", loss, 0, has_aux, args, {}).stage(()))


def described(loss, *args):
    return [n.describe().split(" ")[0] for n in cut(loss, *args).nodes]


X = normal(24, 6, seed=1)
VECTOR = normal(6, seed=2)
TABLE = normal(7, 6, seed=3)
TOKENS = jnp.asarray(np.random.default_rng(4).integers(0, 7, 24))
EDGES = jnp.asarray(np.random.default_rng(5).integers(0, 24, (2, 40)))
SQUARE = [normal(6, 6, seed=10 + i) / 2 for i in range(8)]


def twice(w, x):
    return jnp.sum((jax.nn.elu(x * w) @ w) ** 2)


def tied_embedding(table, tokens):
    return jnp.sum((jax.nn.selu(table[tokens]) @ table.T) ** 2)


def two_states(w, x):
    a = x @ w[0]
    m = jnp.tanh(a)
    n = a @ w[1] + m
    m2 = m + n @ w[2]
    n2 = n @ w[3] + m2
    return jnp.sum(n2**2) + jnp.sum(m2**2)


def graph_network(w, nodes, edges):
    e = nodes[edges[0]]
    for i in range(0, 8, 4):
        m = e @ w[i] + nodes[edges[0]] @ w[i + 1] + nodes[edges[1]] @ w[i + 2]
        nodes = nodes @ w[i + 3] + jax.ops.segment_sum(m, edges[1], 24) + nodes
        e = m + e
    return jnp.sum(nodes**2) + jnp.sum(e**2)


def silu_state(w, x):
    z = jax.nn.silu(x * w)
    return jnp.sum((z @ w) ** 2), z


def batch_norm(x):
    mean, var = x.mean(0), (x**2).mean(0) - x.mean(0) ** 2
    return (x - mean) / jnp.sqrt(var + 1e-2), 0.9 * mean


def resnet(w, x):
    h, stats = x @ w[6], []
    for i in range(0, 6, 2):
        y, s1 = batch_norm(h @ w[i])
        y, s2 = batch_norm(jax.nn.relu(y) @ w[i + 1])
        h = jax.nn.relu(y + h)
        stats += [s1, s2]
    return jnp.mean(h**2) + sum(jnp.sum(a**2) for a in w), stats


def preactivated(w, x):
    h, stats = x @ w[6], []
    for i in range(0, 4, 2):
        y, s1 = batch_norm(h)
        y, s2 = batch_norm(jax.nn.relu(y) @ w[i])
        h = h + jax.nn.relu(y) @ w[i + 1]
        stats += [s1, s2]
    return jnp.mean(h**2), stats


def of_derivatives(w, x):
    """A loss that holds derivatives: its reverse pass reads what a forward pass of tangents made."""

    def u(point):
        for a in w[:4]:
            point = jnp.tanh(point @ a)
        return jnp.sum(point)

    def one(point):
        gradient, second = jax.jvp(jax.grad(u), (point,), (jnp.arange(6.0),))
        return jnp.sum(gradient**2) + u(point) * second[0]

    return jnp.mean(jax.vmap(one)(x) ** 2)


CASES = {
    "a weight used twice": (twice, (VECTOR, X), False),
    "a tied embedding": (tied_embedding, (TABLE, TOKENS), False),
    "two states made of each other": (two_states, (SQUARE, X), False),
    "a graph network": (graph_network, (SQUARE, X, EDGES), False),
    "a state as aux": (silu_state, (VECTOR, X), True),
    "a loss that holds derivatives": (of_derivatives, (SQUARE, X), False),
    "batch statistics behind a skip": (resnet, (SQUARE, X), True),
    "batch statistics before a branch": (preactivated, (SQUARE, X), True),
}


FORWARD = {"a weight used twice", "a tied embedding", "a graph network", "a state as aux"}


# The default everywhere; of the others two of each case, or one.
FAST = {
    *((case, "default") for case in CASES),
    ("a weight used twice", "always"),
    ("a weight used twice", "pure forward"),
    ("a tied embedding", "recursive"),
    ("a tied embedding", "pure forward"),
    ("two states made of each other", "checkpoint"),
    ("two states made of each other", "pure forward"),
    ("a graph network", "always"),
    ("a graph network", "checkpoint"),
    ("a state as aux", "pure forward"),
    ("a loss that holds derivatives", "always"),
    ("batch statistics behind a skip", "recursive"),
    ("batch statistics behind a skip", "pure forward"),
    ("batch statistics before a branch", "always"),
}


@pytest.mark.parametrize(("case", "method"), some_cases(itertools.product(CASES, METHODS), FAST))
def test_what_is_read_twice(case, method):
    loss, args, has_aux = CASES[case]
    expected = jax.value_and_grad(loss, has_aux=has_aux)(*args)
    run = jax.jit(mw.value_and_grad(loss, has_aux=has_aux, method=METHODS[method]))
    if method == "pure forward" and case not in FORWARD:
        with pytest.raises(mw.NotSubmersiveError):
            run(*args)
    else:
        close(run(*args), expected)


def test_activations_stay_whole_between_uses_of_a_weight():
    names = described(twice, VECTOR, X)
    assert [n for n in names if n != "fork"][:3] == ["mul", "gt+select_n+expm1+…", "dot_general"]
    names = described(tied_embedding, TABLE, TOKENS)
    assert "gt+select_n+expm1+…" in names and "dot_general" in names


@pytest.mark.parametrize("loss", [graph_network, two_states, of_derivatives])
def test_crossing_paths_are_opened(loss):
    args = (SQUARE, X, EDGES)[: 3 if loss is graph_network else 2]
    assert not any(node.keeps_inside for node in cut(loss, *args).nodes)


def test_a_norm_between_crossing_paths_stays_whole():
    def loss(w, x):
        a, b = x @ w[0], x @ w[1]
        for i in range(2, 6, 2):
            a, b = jax.nn.standardize(a @ w[i]) + b, b @ w[i + 1] + a
        return jnp.sum(a * b)

    nodes = cut(loss, SQUARE, X).nodes
    assert not any(node.keeps_inside for node in nodes)
    norms = [n for n in nodes if any(e.primitive is lax.rsqrt_p for e in n.block.eqns)]
    assert len(norms) == 2
    assert all(len(n.block.inputs) == len(n.block.outputs) == 1 for n in norms)


def test_a_bias_times_data_belongs_to_the_sum():
    names = described(lambda w, x: jnp.sum(jnp.abs(x @ w[0] + w[1][0] * x[0])), SQUARE, X)
    assert names == ["dot_general", "mul+add", "abs", "reduce_sum"]


@pytest.mark.parametrize("case", CASES)
def test_every_variable_has_one_reader(case):
    loss, args, has_aux = CASES[case]
    made = cut(loss, *args, has_aux=has_aux)
    seen, read = set(made.state), set()
    for node in made.nodes:
        assert not read & set(node.block.inputs)
        read |= set(node.block.inputs)
        assert all(v in seen or v in made.fixed for v in (*node.block.inputs, *node.block.operands))
        seen |= {*node.block.outputs, *node.block.exports}
    outputs = {v for n in made.nodes for v in n.block.outputs}
    assert outputs == read | set(made.outputs)  # whoever waits for a cotangent gets one


def test_copies_inside_a_node_are_their_variable_again():
    """A fork whose copy is read where its variable is made would have to run in the middle of it."""
    jaxpr = jax.make_jaxpr(lambda x: jnp.sin(x) * jnp.cos(jnp.sin(x)))(X).jaxpr
    source = jaxpr.eqns[0].outvars[0]
    inside, outside, other = (cutting.Copy(source) for _ in range(3))
    own = [jaxpr.eqns[0], jaxpr.eqns[1].replace(invars=[inside])]
    forks = [(source, [inside, outside, other])]
    kept, restored = cutting._standing([own], forks)
    assert kept == [(source, [outside, other])] and restored == {inside: source}
    kept, restored = cutting._standing([own], [(source, [inside, outside])])
    assert not kept and restored == {inside: source, outside: source}


@pytest.mark.parametrize("seed", [*range(5), *(slow(seed) for seed in range(5, 150))])
def test_random_tangles(seed):
    loss = Tangle(seed)
    always = mw.plan(loss, *loss.args, has_aux=True, method=mw.Moonwalk(walk="always"))
    methods = [mw.Moonwalk(), always, mw.Checkpoint()]

    @jax.jit  # one program: compiling takes most of the time
    def run(*args):
        found = [mw.value_and_grad(loss, has_aux=True, method=m)(*args) for m in methods]
        return jax.value_and_grad(loss, has_aux=True)(*args), found

    expected, found = run(*loss.args)
    for result in found:
        close(result, expected)


def test_a_module_with_batch_statistics():
    """As Equinox writes them: a state that is threaded through, and returned as auxiliary output."""
    norm, state = eqx.nn.make_with_state(eqx.nn.BatchNorm)(6, "batch", mode="batch", dtype=jnp.float64)
    dense = [eqx.nn.Linear(6, 6, key=jax.random.key(i), dtype=jnp.float64) for i in range(3)]
    params, static = eqx.partition((norm, dense), eqx.is_inexact_array)

    def loss(params, state, x):
        norm, dense = eqx.combine(params, static)

        def one(x, state):
            for layer in dense:
                y, state = norm(layer(x), state)
                x = x + jax.nn.relu(y)
            return x, state

        y, state = jax.vmap(one, axis_name="batch", in_axes=(0, None), out_axes=(0, None))(x, state)
        return jnp.mean(y**2), state

    expected = jax.jit(jax.value_and_grad(loss, has_aux=True))(params, state, X)
    close(jax.jit(mw.value_and_grad(loss, has_aux=True))(params, state, X), expected)


@pytest.mark.parametrize("config", [((0, 0, 0), (1, 2, 0)), ((0, 0, 0), (-1, 2, 1))])
def test_a_pad_with_a_trained_value(config):
    def loss(params, x):
        y = lax.pad(jnp.abs(x @ params["w"]), params["value"], config)
        return jnp.sum(jnp.tanh(y * params["scale"]) ** 2)

    width = 6 + sum(config[1][:2]) + 5 * config[1][2]
    params = {"w": SQUARE[0], "value": jnp.float64(0.7), "scale": normal(width, seed=9)}
    expected = jax.value_and_grad(loss)(params, X)
    for method in METHODS.values():
        if not isinstance(method, mw.PureForward):
            close(jax.jit(mw.value_and_grad(loss, method=method))(params, X), expected)
    close(mw.value_and_grad(loss, method=METHODS["always"])(params, X), expected)


def test_a_pad_with_a_trained_value_in_a_branch():
    """JAX's pullback of a pad fails where the value alone is differentiated, in loops and branches, too."""

    def loss(params, x):
        y = jnp.abs(x @ params["w"])
        branches = [
            lambda y: lax.pad(y[:, 1:], params["value"], ((0, 0, 0), (0, 1, 0))),
            lambda y: 2 * y,
        ]
        y = lax.switch(jnp.argmax(y[0]) % 2, branches, y)
        y, _ = lax.scan(
            lambda y, v: (lax.pad(y[:, 1:], v, ((0, 0, 0), (1, 0, 0))), None), y, params["many"]
        )
        return jnp.sum(jnp.tanh(y * params["scale"]) ** 2)

    params = {"w": SQUARE[0], "value": jnp.float64(0.7), "many": normal(3), "scale": normal(6, seed=9)}
    expected = jax.value_and_grad(loss)(params, X)
    for name in ("default", "always"):
        close(mw.value_and_grad(loss, method=METHODS.get(name, mw.Moonwalk()))(params, X), expected)


AUTO, ALWAYS, BLOCK = mw.Moonwalk(), mw.Moonwalk(walk="always"), mw.Checkpoint("block")
READ_TWICE = {
    (False, 0, True, AUTO),
    (False, 0, True, ALWAYS),
    (False, 2, True, BLOCK),
    (True, 0, True, BLOCK),
    (True, 2, True, AUTO),
    (True, 2, True, ALWAYS),
}


@pytest.mark.parametrize(
    ("scan_first", "steps", "has_aux", "method"),
    some_cases(
        itertools.product([False, True], range(3), [False, True], [AUTO, ALWAYS, BLOCK]), READ_TWICE
    ),
    ids=str,
)
def test_a_table_that_a_scan_and_a_node_read(scan_first, steps, has_aux, method):
    """A node that makes it for itself does not make it for the scan: they would wait for each other."""

    def loss(params, x, row):
        table = jnp.broadcast_to(row[None], x.shape)
        for _ in range(steps):
            table = jnp.sin(table)
        scan = lambda x: lax.scan(lambda x, w: (jnp.tanh(x @ w) * table, None), x, params[1])[0]
        node = lambda x: jnp.tanh(x @ params[2]) + table * x
        x = x @ params[0]
        for part in (scan, node) if scan_first else (node, scan):
            x = part(x)
        return (jnp.sum(x**2), table) if has_aux else jnp.sum(x**2)

    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape))
    args = (draw(4, 4), draw(3, 4, 4), draw(4, 4)), draw(8, 4), draw(4)
    expected = jax.value_and_grad(loss, has_aux=has_aux)(*args)
    found = jax.jit(mw.value_and_grad(loss, has_aux=has_aux, method=method))(*args)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12), found, expected)


@pytest.mark.parametrize("rule", ["jvp", "vjp"])
def test_a_rule_that_closes_over_an_argument_says_what_to_do(rule):
    def loss(w, x, d):
        if rule == "jvp":
            act = jax.custom_jvp(jnp.tanh)
            act.defjvp(lambda p, t: (jnp.tanh(p[0]), t[0] * d))
        else:
            act = jax.custom_vjp(jnp.tanh)
            act.defvjp(lambda x: (jnp.tanh(x), None), lambda _, h: (h * d,))
        return jnp.sum(act(x @ w) ** 2)

    w, x = jnp.eye(4), jnp.ones((8, 4))
    with pytest.raises(jax.errors.UnexpectedTracerError) as caught:
        mw.value_and_grad(loss)(w, x, 0.3 * x)
    assert "pass it to the custom function as an argument" in "".join(caught.value.__notes__)
    # Under jit it is JAX that notices, when the program is finished, and there is no place for a note.
    with pytest.raises(jax.errors.UnexpectedTracerError):
        jax.jit(mw.value_and_grad(loss))(w, x, 0.3 * x)


def test_static_indices_inside_a_scan_are_known_under_jit():
    """A plan that was made of values walks a permutation in a loop; bound under `jit`, it still can."""
    order = np.array([2, 0, 3, 1])
    loss = lambda w, x: jnp.sum(
        lax.scan(lambda x, w: (jnp.abs(x @ w)[:, order], None), x @ w[0], w[1])[0] ** 2
    )
    rng = np.random.default_rng(0)
    turn = lambda: np.linalg.qr(rng.standard_normal((4, 4)))[0]
    args = (
        (jnp.asarray(turn()), jnp.asarray([turn() for _ in range(5)])),
        jnp.asarray(rng.standard_normal((8, 4))),
    )
    plan = mw.plan(loss, *args, method=mw.Moonwalk(walk="always"))
    assert plan.walked
    found = jax.jit(mw.value_and_grad(loss, method=plan))(*args)
    expected = jax.value_and_grad(loss)(*args)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10), found, expected)


def derivatives_in_a_loop(w, x):
    """Two states of which the second hardly matters: cotangents that differ by many orders."""

    def body(carry, w):
        a, b = carry
        g = jax.grad(lambda y: jnp.sum(jnp.tanh(y @ w) * b))(a)
        h = jax.jvp(lambda y: jnp.tanh(y @ w @ w.T), (g,), (a,))[1]
        return (h + a, b * jnp.sin(g @ w)), g

    (a, b), ys = lax.scan(body, (x, x), w)
    last = lambda c, y: ((c[0] @ w[0] * c[1] + y, jnp.tanh(c[0] * c[1]) @ w[1]), None)
    (a, b), _ = lax.scan(last, (a, b), ys)
    return jnp.mean(a * b) + jnp.sum(ys)


@pytest.mark.parametrize("seed", [0, *map(slow, range(1, 6))])
def test_crossing_paths_in_a_loop_are_not_walked(seed):
    """A walk would subtract cotangents there, and its certificate would raise on an exact gradient."""
    w, x = 0.6 * normal(4, 4, 4, seed=seed), normal(6, 4, seed=50)
    found = mw.value_and_grad(derivatives_in_a_loop, method=mw.Moonwalk(walk="always"))(w, x)
    close(found, jax.value_and_grad(derivatives_in_a_loop)(w, x))


@pytest.mark.slow
def test_skips_in_each_other_beyond_the_recursion_limit():
    def loss(ws, x):
        skips = []
        for w in ws:
            skips.append(x)
            x = jnp.tanh(x @ w)
        for w in reversed(ws):
            x = jnp.tanh(x @ w) * skips.pop()
        return jnp.sum(x)

    ws, x = [jax.ShapeDtypeStruct((4, 4), float)] * 400, jnp.ones((8, 4))
    assert mw.plan(loss, ws, x, method=mw.Checkpoint()).segments
