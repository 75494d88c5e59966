"""`value_and_grad` and `grad` as a JAX user meets them: arguments, errors, transformations, effects."""

import gc
import math
import pathlib
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import io_callback
from marks import some
from weights import general, normal, orthogonal

import moonwalk as mw
from moonwalk import _jax, gradient
from moonwalk.segments import layers, walk

pytestmark = pytest.mark.filterwarnings("ignore::moonwalk.PlanWarning")

ROWS, WIDTH, DEPTH = 16, 6, 8
X = normal(ROWS, WIDTH, seed=100)
LAYERS = [orthogonal(WIDTH, seed=i) for i in range(DEPTH)]
STACK = jnp.stack(LAYERS)


def leaky(x):
    return jax.nn.leaky_relu(x, 0.3)


def max_min(x):
    a, b = x[..., ::2], x[..., 1::2]
    in_order = a >= b
    return jnp.concatenate([jnp.where(in_order, a, b), jnp.where(in_order, b, a)], -1)


def turn(x, w):
    """A layer that is walked: an orthogonal matrix, and LeakyReLU."""
    return leaky(x @ mw.declare(w, "orthogonal"))


def looped(ws, x):
    """Walked, one node after the other."""
    for w in ws:
        x = turn(x, w)
    return jnp.mean((x - 0.5) ** 2)


def scanned(ws, x):
    """Walked, as one scan."""
    return jnp.mean((lax.scan(lambda c, w: (turn(c, w), None), x, ws)[0] - 0.5) ** 2)


WALKED = {"looped": (looped, LAYERS), "scanned": (scanned, STACK)}
walked = pytest.mark.parametrize("name", WALKED)


def close(found, expected, tolerance=1e-10):
    """The same tree, types and (relative to the largest entry) values."""
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert jnp.shape(a) == jnp.shape(b)
        assert jnp.result_type(a) == jnp.result_type(b)
        scale = float(jnp.max(jnp.abs(b), initial=1e-300))
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * scale)


def equations(jaxpr, inside=()):
    """Every equation, however deep, with the names of the primitives that it stands in."""
    for e in jaxpr.eqns:
        yield e, inside
        for value in e.params.values():
            for inner in value if isinstance(value, tuple | list) else [value]:
                if hasattr(inner, "eqns") or hasattr(inner, "jaxpr"):
                    yield from equations(_jax.open_jaxpr(inner)[0], (*inside, e.primitive.name))


def traced(fun, *args):
    return list(equations(jax.make_jaxpr(fun)(*args).jaxpr))


@walked
def test_these_networks_walk(name):
    """The rest of this file means what it says only if they do."""
    assert mw.plan(WALKED[name][0], *jax.eval_shape(lambda *a: a, WALKED[name][1], X)).walks


# --- arguments ----------------------------------------------------------------------------------------


def bilinear(a, b, c):
    return jnp.sum(jnp.sin(a["u"] @ b) * c)


ARGS = ({"u": normal(3, 4), "v": normal(2)}, normal(4, 5, seed=1), normal(3, 5, seed=2))


@pytest.mark.parametrize(
    "argnums", [0, 1, -1, -3, (0,), (2, 0), (-1, 0), (0, 1, 2), [1, 2], np.int32(1)]
)
def test_argnums(argnums):
    expected = jax.value_and_grad(bilinear, argnums)(*ARGS)
    close(mw.value_and_grad(bilinear, argnums)(*ARGS), expected)


def test_grad_is_the_second_half():
    close(mw.grad(bilinear, (0, 2))(*ARGS), jax.grad(bilinear, (0, 2))(*ARGS))


@pytest.mark.parametrize("argnums", [(1, 1), (1, -2)])
def test_argnums_that_repeat(argnums):
    """JAX returns the same gradient twice; one of the two is a slip of the pen."""
    with pytest.raises(ValueError, match=r"grad: argnums=\(1, .*\) names an argument twice"):
        mw.grad(bilinear, argnums)(*ARGS)


def with_aux(w, x):
    y = jnp.sin(x @ w)
    return jnp.sum(y**2), {"y": y, "depth": 8, "name": "net", "kind": len, "none": None, "w": w}


def test_has_aux():
    """Leaves that are no arrays come back as they are."""
    (value, aux), found = mw.value_and_grad(with_aux, has_aux=True)(LAYERS[0], X)
    (expected, truth), gradient = jax.value_and_grad(with_aux, has_aux=True)(LAYERS[0], X)
    arrays = lambda aux: [aux.pop("y"), aux.pop("w")]
    close((value, arrays(aux), found), (expected, arrays(truth), gradient))
    assert aux == truth == {"depth": 8, "name": "net", "kind": len, "none": None}
    found, aux = mw.grad(with_aux, has_aux=True)(LAYERS[0], X)
    close(found, gradient)
    assert aux["name"] == "net"


def test_aux_of_a_network_that_is_walked():
    def fun(ws, x):
        value = scanned(ws, x)
        return value, {"value": value, "norms": jnp.sum(ws**2, (1, 2)), "positive": x > 0}

    found = jax.jit(mw.value_and_grad(fun, has_aux=True))(STACK, X)
    close(found[1], jax.jit(jax.grad(scanned))(STACK, X))
    assert jax.tree.structure(found[0]) == jax.tree.structure(jax.eval_shape(fun, STACK, X))
    np.testing.assert_array_equal(found[0][1]["positive"], X > 0)


def test_certify_appends_a_certificate():
    fun = mw.value_and_grad(scanned, certify=True)
    value, found, certificate = jax.jit(fun)(STACK, X)
    close((value, found), jax.jit(jax.value_and_grad(scanned))(STACK, X))
    assert 0 < float(certificate.closure) <= float(certificate.error) < 1e-11
    found, aux, certificate = mw.grad(with_aux, has_aux=True, certify=True)(LAYERS[0], X)
    assert aux["name"] == "net"
    assert float(certificate.error) == 0  # nothing was walked


def test_keywords_are_not_differentiated():
    def fun(ws, x=None, *, scale, target):
        return scale * scanned(ws, x) + jnp.sum(target["y"] * ws[0])

    options = {"scale": 2.0, "target": {"y": LAYERS[1]}}
    found = jax.jit(lambda ws, x, **rest: mw.grad(fun)(ws, x=x, **rest))(STACK, X, **options)
    close(found, jax.jit(jax.grad(fun))(STACK, X, **options))


def test_none_leaves_stay():
    params = [{"w": w, "b": None} for w in LAYERS]
    fun = lambda p, x: looped([q["w"] for q in p], x)
    found = jax.jit(mw.grad(fun))(params, X)
    assert all(q["b"] is None for q in found)
    close(found, jax.jit(jax.grad(fun))(params, X))


def test_python_and_numpy_numbers():
    assert float(mw.grad(lambda w: w**2)(3.0)) == 6.0
    fun = lambda p, x: jnp.sum((p["a"] * x + p["b"]) ** 2) * p["c"]
    params = {"a": 2.0, "b": np.float32(3), "c": np.ones(())}
    close(mw.value_and_grad(fun)(params, X), jax.value_and_grad(fun)(params, X))


def test_complex_parameters():
    fun = lambda w, x: jnp.sum(jnp.abs(x @ w) ** 2)
    w = normal(WIDTH, 4) + 1j * normal(WIDTH, 4, seed=1)
    close(jax.jit(mw.grad(fun))(w, X), jax.jit(jax.grad(fun))(w, X))


def test_a_python_number_decides_while_tracing():
    """What is no array is not traced."""

    def fun(ws, x, depth, mode="walk"):
        return looped(ws[:depth], x) if mode == "walk" else 0.0

    def run(module):
        return jax.jit(lambda ws: module.grad(fun)(ws, X, 3))(LAYERS[:4])

    close(run(mw), run(jax))


def test_the_wrapper_keeps_the_name():
    assert mw.grad(looped).__name__ == mw.value_and_grad(looped).__name__ == "looped"
    assert mw.grad(looped).__wrapped__ is looped


# --- errors -------------------------------------------------------------------------------------------


def raised_by(transform, fun, args, options):
    """(type, words); a tracer that is printed as part of them is not the point."""
    try:
        transform(fun, **options)(*args)
    except Exception as error:
        return type(error), str(error).split(" with value ")[0]
    raise AssertionError("nothing was raised")


@pytest.mark.parametrize("function", ["grad", "value_and_grad"])
@pytest.mark.parametrize(
    ("fun", "args", "options"),
    [
        (lambda w: w @ X.T, (X,), {}),  # not a scalar
        (lambda w: (w.sum(), w), (X,), {}),  # a pair, and has_aux was not said
        (lambda w: w.sum() > 0, (X,), {}),  # not a real number
        (lambda w: jnp.int32(3), (X,), {}),
        (lambda w: w.sum() * 1j, (X,), {}),
        (lambda w: None, (X,), {}),
        (lambda w: w.sum(), (X,), {"has_aux": True}),  # no pair
        (lambda w: (w.sum(), w, w), (X,), {"has_aux": True}),
        (lambda n: n * 2.0, (3,), {}),  # integers have no derivative
        (lambda n: n.sum() * 2.0, (np.arange(3),), {}),
        (lambda p: p["w"].sum(), ({"w": X, "n": 3},), {}),
        (lambda b: b * 2.0, (True,), {}),
        (lambda p: p["w"].sum(), ({"w": X, "name": "net"},), {}),
        (lambda w, x: (w * x).sum(), (X, X), {"argnums": 2}),
        (lambda w, x: (w * x).sum(), (X, X), {"argnums": (0, 5)}),
        (lambda w, x: (w * x).sum(), (X, X), {"argnums": -3}),
        (lambda w, x: (w * x).sum(), (X, X), {"argnums": "w"}),
        (lambda w, x: (w * x).sum(), (X, X), {"argnums": 0.5}),
        (lambda w, x: (w * x).sum(), (X,), {}),  # an argument is missing
    ],
)
def test_errors_are_those_of_jax(function, fun, args, options):
    """Even their words."""
    found, expected = (raised_by(getattr(m, function), fun, args, options) for m in (mw, jax))
    assert found == expected


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"tolerance": 0.0}, "tolerance must be positive (math.inf for no anchors), got 0.0"),
        ({"tolerance": -1.0}, "tolerance must be positive"),
        ({"tolerance": math.nan}, "tolerance must be positive"),
        ({"walk": "never"}, "walk must be one of 'auto', 'always', got 'never'"),
        ({"anchor_every": 0}, "anchor_every counts layers, at least 1, got 0"),
        ({"anchor_every": 2.5}, "anchor_every counts layers, at least 1, got 2.5"),
        ({"on_inexact": "warn"}, "on_inexact must be one of 'raise', 'nan', 'ignore', got 'warn'"),
    ],
)
def test_settings_are_checked(settings, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        mw.Moonwalk(**settings)


def test_inputs_must_be_differentiated():
    method = mw.Moonwalk(inputs=(1,))
    with pytest.raises(ValueError, match=r"inputs=\(1,\): argument 1 is not differentiated; argnums=0"):
        mw.grad(looped, method=method)(LAYERS, X)
    assert mw.Moonwalk(inputs=1) == method


@pytest.mark.parametrize("method", ["moonwalk", None, mw.Moonwalk, 3])
@pytest.mark.parametrize("function", [mw.grad, mw.value_and_grad])
def test_method_must_be_one(function, method):
    with pytest.raises(TypeError, match="method= takes moonwalk.Moonwalk.* but got") as raised:
        function(looped, method=method)
    assert repr(method) in str(raised.value)
    with pytest.raises(TypeError, match="method= takes"):
        mw.plan(looped, LAYERS, X, method=method)


def test_a_plan_serves_its_own_shapes_alone():
    plan = mw.plan(looped, *jax.eval_shape(lambda *a: a, LAYERS, X))
    close(jax.jit(mw.grad(looped, method=plan))(LAYERS, X), jax.jit(jax.grad(looped))(LAYERS, X))
    with pytest.raises(mw.PlanMismatchError) as raised:
        mw.grad(looped, method=plan)(LAYERS, X[:8])
    assert "planned float64[16,6], called with float64[8,6]" in str(raised.value)
    assert "moonwalk.plan(fun, *args)" in str(raised.value)
    with pytest.raises(
        mw.PlanMismatchError, match=r"ws\[7\]: planned float64\[6,6\], called with nothing"
    ):
        mw.grad(looped, method=plan)(LAYERS[:-1], X)
    with pytest.raises(
        mw.PlanMismatchError, match=r"planned float64\[6,6\], called with float32\[6,6\]"
    ):
        mw.grad(looped, method=plan)([w.astype(jnp.float32) for w in LAYERS], X)


def test_a_mismatch_names_arguments_as_the_function_does():
    """Positional ones, those in a pytree, by keyword, and those that have no name."""

    def fun(w, data, *more, scale=None):
        return jnp.sum(w * data["x"]) * (1.0 if scale is None else scale[0]) + sum(map(jnp.sum, more))

    one, two = jnp.ones(1), jnp.ones(2)
    data = lambda x: {"x": x}
    cases = [
        ("w", (one, data(one)), {}, (two, data(one)), {}),
        ("data['x']", (one, data(one)), {}, (one, data(two)), {}),
        ("args[2]", (one, data(one), one), {}, (one, data(one), two), {}),
        ("scale[0]", (one, data(one)), {"scale": [one[0]]}, (one, data(one)), {"scale": [1]}),
    ]
    for name, args, kwargs, others, other in cases:
        plan = mw.plan(fun, *args, **kwargs)
        mw.grad(fun, method=plan)(*args, **kwargs)
        with pytest.raises(mw.PlanMismatchError, match=rf"\n  {re.escape(name)}: planned"):
            mw.grad(fun, method=plan)(*others, **other)


def test_a_plan_serves_its_own_function_alone():
    """Other layers of the same shapes: what is known of the one says nothing about the other."""

    def other(ws, x):
        for w in ws:
            x = jnp.tanh(x @ w)
        return jnp.mean((x - 0.5) ** 2)

    plan = mw.plan(looped, *jax.eval_shape(lambda *a: a, LAYERS, X))
    try:
        found = jax.jit(mw.grad(other, method=plan))(LAYERS, X)
    except mw.PlanMismatchError:
        return
    close(found, jax.jit(jax.grad(other))(LAYERS, X))


@pytest.mark.filterwarnings("default::moonwalk.PlanWarning")
def test_little_saved_is_said_once():
    def dense(w, x):
        return jnp.sum(jnp.sin(x @ w))

    wide = jnp.ones((WIDTH, 2**14))  # a MiB and more: of toys nothing is said
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        mw.grad(dense)(wide, X)
        jax.eval_shape(mw.grad(dense), wide, X)
        jax.eval_shape(mw.value_and_grad(dense), wide, X)
        with _jax.keeping_barriers():
            jax.eval_shape(mw.grad(looped), LAYERS, X)  # saves much, and says nothing
    (warning,) = (w for w in caught if issubclass(w.category, mw.PlanWarning))
    text = str(warning.message)
    costly = max(mw.plan(dense, wide, X).rows, key=lambda r: r.bytes)
    assert f"The costliest block is {costly.block} at {costly.source}" in text
    assert costly.source.endswith("dense)") and pathlib.Path(__file__).name in text
    assert warning.filename == __file__


@pytest.mark.filterwarnings("default::moonwalk.PlanWarning")
def test_advice_is_forgotten_with_its_function():
    plan = mw.plan(lambda w, x: jnp.sum(jnp.sin(x @ w)), jnp.ones((WIDTH, 2**14)), X)
    gc.collect()
    before = len(gradient._advised)

    def advise(count):
        for i in range(count):
            fun = eval(f"lambda: {i}")  # each has code of its own
            for again in (fun, eval(f"lambda: {i}")):  # the same code: said once
                gradient._advise(again, plan)

    with pytest.warns(mw.PlanWarning) as caught:
        advise(10)
    assert len(caught) == 10
    gc.collect()
    assert len(gradient._advised) == before
    gradient._advise([], plan)  # cannot be remembered: nothing is said


@pytest.mark.parametrize("branch", [lambda w, x: w[0, 0] > 0, lambda w, x: x[0, 0] > 0])
def test_branching_on_values_gets_a_note(branch):
    def fun(w, x):
        return jnp.sum(x @ w) if branch(w, x) else jnp.sum(w)

    with pytest.raises(jax.errors.TracerBoolConversionError) as raised:
        mw.grad(fun)(LAYERS[0], X)
    (note,) = (n for n in raised.value.__notes__ if "moonwalk" in n)  # JAX adds its own
    assert "moonwalk.grad traces the function" in note
    assert "jax.lax.cond" in note


# --- transformations ----------------------------------------------------------------------------------


@walked
def test_jit(name):
    fun, ws = WALKED[name]
    close(jax.jit(mw.value_and_grad(fun))(ws, X), jax.jit(jax.value_and_grad(fun))(ws, X))


@walked
def test_gradients_per_example(name):
    fun, ws = WALKED[name]
    rows = X[:4, None]
    found = jax.jit(jax.vmap(mw.grad(fun), in_axes=(None, 0)))(ws, rows)
    close(found, jax.jit(jax.vmap(jax.grad(fun), in_axes=(None, 0)))(ws, rows))


def test_an_ensemble():
    several = jnp.stack([STACK, STACK[::-1], -STACK])
    found = jax.jit(jax.vmap(mw.value_and_grad(scanned), in_axes=(0, None)))(several, X)
    close(found, jax.jit(jax.vmap(jax.value_and_grad(scanned), in_axes=(0, None)))(several, X))


@walked
def test_training_in_a_scan(name):
    """What is declared must hold at every step, so the weights are made from free parameters."""
    fun, ws = WALKED[name]
    batches = normal(3, ROWS, WIDTH, seed=5)
    loss = lambda ws, x: fun(jax.tree.map(lambda a: jnp.linalg.qr(a)[0], ws), x)

    def train(module):
        def step(ws, x):
            value, gradients = module.value_and_grad(loss)(ws, x)
            return jax.tree.map(lambda w, g: w - 0.1 * g, ws, gradients), value

        return jax.jit(lambda ws: lax.scan(step, ws, batches))(ws)

    close(train(mw), train(jax))


def test_donation():
    def step(ws, x):
        return jax.tree.map(lambda w, g: w - 0.1 * g, ws, mw.grad(looped)(ws, x))

    expected = jax.tree.map(lambda w, g: w - 0.1 * g, LAYERS, jax.jit(jax.grad(looped))(LAYERS, X))
    own = [jnp.array(w) for w in LAYERS]
    found = jax.jit(step, donate_argnums=0)(own, X)
    assert all(w.is_deleted() for w in own)
    close(found, expected)


@walked
def test_differentiating_again(name):
    """By JAX, forward and in reverse, in the weights and in the data."""
    fun, ws = WALKED[name]
    d_ws, d_x = jax.tree.map(lambda w: jnp.sin(3 * w), ws), jnp.cos(X)

    def again(module):
        gradient = module.grad(fun)
        small = lambda ws, x: sum(jnp.sum(jnp.sin(g)) for g in jax.tree.leaves(gradient(ws, x)))
        return jax.jvp(gradient, (ws, X), (d_ws, d_x)), jax.grad(small, argnums=(0, 1))(ws, X)

    close(jax.jit(lambda: again(mw))(), jax.jit(lambda: again(jax))())


def test_value_and_grad_may_be_part_of_a_loss():
    def meta(module):
        def loss(rate, ws, x):
            value, gradients = module.value_and_grad(scanned)(ws, x)
            return scanned(ws - rate * gradients, x) + value

        return jax.value_and_grad(loss)

    close(jax.jit(meta(mw))(0.3, STACK, X), jax.jit(meta(jax))(0.3, STACK, X))


def test_grad_of_grad():
    def penalty(module):
        inner = module.grad(scanned, argnums=1)
        return module.grad(lambda ws, x: jnp.sum(inner(ws, x) ** 2) + scanned(ws, x))

    close(jax.jit(penalty(mw))(STACK, X), jax.jit(penalty(jax))(STACK, X))


def test_grad_of_grad_of_a_number():
    f = lambda w: jnp.sin(w) * w**2
    close(mw.grad(mw.grad(mw.grad(f)))(0.7), jax.grad(jax.grad(jax.grad(f)))(0.7))


@pytest.mark.parametrize("outer", ["jit", "vmap", "grad", "moonwalk"])
def test_closed_over_tracers(outer):
    """Weights that are known, inside a trace, over data that is not."""

    def run(module):
        total = lambda y: jnp.sum(module.grad(lambda ws: scanned(ws, y))(STACK) ** 2)
        return {
            "jit": lambda: jax.jit(total)(X),
            "vmap": lambda: jax.jit(jax.vmap(total))(jnp.stack([X, 2 * X])),
            "grad": lambda: jax.jit(jax.grad(total))(X),
            "moonwalk": lambda: jax.jit(module.grad(total))(X),
        }[outer]()

    close(run(mw), run(jax))


def test_everything_known_inside_jit():
    close(jax.jit(lambda: mw.grad(scanned)(STACK, X))(), jax.jit(jax.grad(scanned))(STACK, X))


# --- effects ------------------------------------------------------------------------------------------


class Counter:
    """Counts calls back to the host; `count` belongs into a loss."""

    def __init__(self):
        self.calls = []

    def note(self, *values):
        self.calls.append([np.asarray(v) for v in values])

    def count(self, *values):
        jax.debug.callback(self.note, *values)

    def settled(self):
        jax.effects_barrier()
        calls, self.calls = self.calls, []
        return calls


def observed(layer, ws, x, count, looped=True):
    """A network that tells of every layer."""
    if looped:
        for w in ws:
            x = layer(x, w)
            count(x.sum())
        return jnp.mean((x - 0.5) ** 2)

    def step(x, w):
        x = layer(x, w)
        count(x.sum())
        return x, None

    return jnp.mean((lax.scan(step, x, ws)[0] - 0.5) ** 2)


def shortcut(x, w):
    return jax.nn.gelu(jnp.tanh(x @ w) + x)


@pytest.mark.parametrize(
    ("layer", "is_loop", "mode"),
    [
        (turn, True, "walk"),
        (turn, False, "walk"),
        (shortcut, True, "recompute"),
        (shortcut, False, None),
    ],
)
def test_a_callback_runs_once_per_layer(layer, is_loop, mode):
    """Though segments are run again, or swept: and with the right values."""
    counter = Counter()
    ws = LAYERS if is_loop else STACK
    fun = lambda ws, x: observed(layer, ws, x, counter.count, is_loop)
    plan = mw.plan(fun, *jax.eval_shape(lambda *a: a, ws, X))
    assert mode is None or mode in {r.mode for r in plan.rows}
    assert counter.settled() == []
    found = jax.jit(mw.value_and_grad(fun))(ws, X)
    calls = sorted(float(c[0]) for c in counter.settled())
    silent = lambda ws, x: observed(layer, ws, x, lambda _: None, is_loop)
    close(found, jax.jit(jax.value_and_grad(silent))(ws, X))
    expected, x = [], X
    for w in LAYERS:
        x = layer(x, w)
        expected.append(float(x.sum()))
    np.testing.assert_allclose(calls, sorted(expected), rtol=1e-10)


@pytest.mark.parametrize("place", ["data", "weights", "loss"])
def test_a_callback_beside_the_trunk_runs_once(place):
    counter = Counter()

    def fun(ws, x):
        if place == "data":
            counter.count(jnp.sum(x))
        if place == "weights":
            counter.count(jnp.sum(ws))
        value = scanned(ws, x)
        if place == "loss":
            counter.count(value)
        return value

    compiled = jax.jit(mw.grad(fun))
    for _ in range(2):
        compiled(STACK, X)
        assert len(counter.settled()) == 1


def test_eager_callbacks_run_once():
    counter = Counter()

    def fun(w, x):
        counter.count(x.sum())
        h = jnp.sin(x @ w)
        counter.count(h.sum())
        return jnp.sum(jnp.cos(h @ w))

    mw.grad(fun)(LAYERS[0], X)
    assert len(counter.settled()) == 2


def test_debug_print(capfd):
    def fun(ws, x):
        jax.debug.print("rows {}", x.shape[0] + ws.size * 0)
        return scanned(ws, x)

    jax.jit(mw.grad(fun))(STACK, X)
    jax.effects_barrier()
    assert capfd.readouterr().out.count("rows 16") == 1


@pytest.mark.parametrize("is_loop", [True, False])
def test_an_answer_from_the_host_is_refused(is_loop):
    def asked(x, w):
        scale = io_callback(lambda: np.float64(1.0), jax.ShapeDtypeStruct((), np.float64))  # here
        return turn(x, w) * scale

    fun = lambda ws, x: observed(asked, ws, x, lambda _: None, is_loop)
    line = pathlib.Path(__file__).read_text().split("# here\n")[0].count("\n") + 1
    with pytest.raises(mw.EffectError) as raised:
        mw.grad(fun)(LAYERS if is_loop else STACK, X)
    assert "`io_callback`" in str(raised.value)
    assert f"{pathlib.Path(__file__).name}:{line} (" in str(raised.value)
    assert "jax.pure_callback" in str(raised.value)


# --- the program that comes out -------------------------------------------------------------------------


@walked
def test_phases_have_names(name):
    fun, ws = WALKED[name]
    text = jax.jit(mw.grad(fun)).lower(ws, X).as_text(debug_info=True)
    assert all(f"phase_{i}" in text for i in (1, 2, 3))


def test_what_the_user_checkpoints_is_not_stored():
    """Not even where storing takes a bit per entry, and the state 64."""

    @jax.checkpoint
    def asked(x, w):
        return jax.nn.relu(jnp.sin(x @ w))

    def fun(ws, x, layer=asked):
        for w in ws:
            x = layer(x, w)
        return jnp.sum(x**2)

    rows = [r for r in mw.plan(fun, LAYERS, X).rows if r.source.endswith("asked)")]
    assert rows
    assert "store" not in {r.mode for r in rows}
    close(jax.jit(mw.grad(fun))(LAYERS, X), jax.jit(jax.grad(fun))(LAYERS, X))

    step = jax.checkpoint(leaky)
    rows = mw.plan(lambda w, x: jnp.sum(jnp.sin(step(jnp.tanh(x @ w)))), LAYERS[0], X).rows
    assert "store" not in {r.mode for r in rows if r.block.startswith("ge+mul")}


@pytest.mark.parametrize(
    ("activation", "method", "depths"),
    [
        (max_min, mw.Moonwalk(), (32, 64)),  # more than one tile in either
        (leaky, mw.Moonwalk(anchor_every=8), (16, 64)),  # more than one period in either
        (jnp.tanh, mw.Moonwalk(), (8, 64)),
    ],
)
def test_scanned_networks_trace_to_the_same_length_at_any_depth(activation, method, depths):
    def fun(ws, x):
        step = lambda x, w: (activation(x @ mw.declare(w, "orthogonal")), None)
        return jnp.mean(lax.scan(step, x, ws)[0] ** 2)

    def size(depth):
        structs = [jax.ShapeDtypeStruct(s, jnp.float64) for s in ((depth, 6, 6), (64, 6))]
        return len(traced(mw.grad(fun, method=method), *structs))

    assert size(depths[0]) == size(depths[1])


ORTHOGONALISED = {
    "qr": lambda a: jnp.linalg.qr(a)[0],
    "expm": lambda a: jax.scipy.linalg.expm(a - a.T),
    "shared qr": lambda a: jnp.linalg.qr(a)[0],
}
FACTORIZATIONS = "qr geqrf householder_product lu triangular_solve custom_linear_solve while".split()


def made_inside(name):
    """A scan whose body makes its weight, and the parameters."""
    make = ORTHOGONALISED[name]
    if name.startswith("shared"):
        loss = lambda a, x: lax.scan(lambda c, _: (turn(c, make(a)), None), x, None, length=DEPTH)[0]
        params = general(WIDTH)
    else:
        loss = lambda a, x: lax.scan(lambda c, a: (turn(c, make(a)), None), x, a)[0]
        params = jnp.stack([general(WIDTH, seed=i) for i in range(DEPTH)])
    return (lambda a, x: jnp.mean((loss(a, x) - 0.5) ** 2)), params


@pytest.mark.parametrize("name", some(ORTHOGONALISED, ["qr"]))
def test_weights_made_in_a_loop_are_made_outside_of_it(name):
    """For all layers in one batched call; the loops find them ready."""
    fun, params = made_inside(name)
    assert mw.plan(fun, params, X).walks
    found = traced(mw.grad(fun), params, X)
    costly = [(e, inside) for e, inside in found if e.primitive.name in FACTORIZATIONS]
    assert costly
    assert not [e for e, inside in costly if "scan" in inside]
    if name == "qr":
        factored = [e for e, _ in costly if e.primitive.name in ("qr", "geqrf")]
        assert {e.invars[0].aval.shape for e in factored} == {(DEPTH, WIDTH, WIDTH)}
    close(jax.jit(mw.grad(fun))(params, X), jax.jit(jax.grad(fun))(params, X))


@pytest.mark.parametrize("name", ["qr", "shared qr"])
def test_weights_are_factored_once(name):
    """All phases read one result: XLA sees that their calls are the same."""
    fun, params = made_inside(name)
    text = jax.jit(mw.grad(fun)).lower(params, X).compile().as_text()
    assert len(re.findall(r'custom_call_target="lapack_\w*geqrf', text)) == 1


def test_all_phases_of_a_scan_read_the_same_weights(monkeypatch):
    """To the bit: a walk is the inverse of what Phase II did, not of something close to it."""
    seen = []
    hoist = layers.ScanLayers._hoist

    def spied(self, *args):
        found = hoist(self, *args)
        seen.append([np.asarray(a) for a in found[0]])
        return found

    monkeypatch.setattr(layers.ScanLayers, "_hoist", spied)
    fun, params = made_inside("qr")
    mw.grad(fun)(params, X)
    assert len(seen) >= 3
    for later in seen[1:]:
        for a, b in zip(seen[0], later, strict=True):
            np.testing.assert_array_equal(a, b)


def test_all_phases_of_a_loop_read_the_same_weights(monkeypatch):
    seen = {}
    phases = ("phase_one", "phase_two", "phase_three")
    for phase in phases:
        own = getattr(walk.WalkExecutor, phase)

        def spied(self, fixed, *args, own=own, phase=phase, **kwargs):
            read = dict.fromkeys(
                v for s in self.steps for v in s.block.operands if v in self.network.weights
            )
            seen.setdefault(phase, []).extend(np.asarray(fixed[v]) for v in read)
            return own(self, fixed, *args, **kwargs)

        monkeypatch.setattr(walk.WalkExecutor, phase, spied)
    params = [general(WIDTH, seed=i) for i in range(DEPTH)]
    mw.grad(lambda ps, x: looped([jnp.linalg.qr(p)[0] for p in ps], x))(params, X)
    assert len(seen["phase_one"]) == DEPTH
    for phase in phases[1:]:
        for a, b in zip(seen["phase_one"], seen[phase], strict=True):
            np.testing.assert_array_equal(a, b)


def test_unknown_precisions_are_refused():
    with pytest.raises(ValueError, match="walk_precision must be None, a jax.lax.Precision"):
        mw.Moonwalk(walk_precision="exact")
    assert mw.Moonwalk(walk_precision="highest") == mw.Moonwalk(walk_precision=lax.Precision.HIGHEST)
