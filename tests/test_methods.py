"""Every method of the paper's Table 1: one contract; and what each of them alone promises."""

import dataclasses
import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from marks import slow, some
from weights import normal, orthogonal

import moonwalk as mw
from moonwalk import _jax

EXACT = {
    "backprop": mw.Backprop(),
    "checkpoint": mw.Checkpoint(),
    "checkpoint 2": mw.Checkpoint(segments=2),
    "checkpoint sqrt": mw.Checkpoint(segments="sqrt"),
    "checkpoint block": mw.Checkpoint(segments="block"),
    "checkpoint recursive": mw.Checkpoint(segments="recursive"),
    "forward": mw.Forward(chunk=3),
    "reversible": mw.Reversible(),
    "moonwalk": mw.Moonwalk(),
    "moonwalk checkpoint": mw.Moonwalk(checkpoint="sqrt"),
    "pure forward": mw.PureForward(chunk=3),
}
ALL = {**EXACT, "projected forward": mw.ProjectedForward(0, samples=2)}
SCANNED = ("reversible",)  # in `make test`, beside all of them looped
PLANNED = mw.Moonwalk | mw.PureForward | mw.Checkpoint | mw.Reversible


def network(depth=5, n=4, rows=3, dtype=jnp.float64):
    """Square orthogonal layers with LeakyReLU: every method serves it."""
    keys = jax.random.split(jax.random.key(0), 3)
    ws = jax.random.orthogonal(keys[0], n, shape=(depth,)).astype(dtype)
    bs = jax.random.normal(keys[1], (depth, n)).astype(dtype) / 4
    x = jax.random.normal(keys[2], (rows, n)).astype(dtype)
    return {"w": ws, "b": bs}, x


def layer(x, w, b):
    return jax.nn.leaky_relu(x @ mw.declare(w, "orthogonal") + b, 0.5)


def looped(params, x):
    for w, b in zip(params["w"], params["b"], strict=True):
        x = layer(x, w, b)
    return jnp.sum(x**2), {"mean": jnp.mean(x)}


def scanned(params, x):
    x, _ = lax.scan(lambda x, p: (layer(x, p["w"], p["b"]), None), x, params)
    return jnp.sum(x**2), {"mean": jnp.mean(x)}


def off(found, truth):
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(truth), strict=True)
    return max(float(jnp.linalg.norm(a - b) / jnp.linalg.norm(b)) for a, b in pairs)


@pytest.mark.parametrize(
    ("name", "loss"),
    [
        pytest.param(
            name,
            loss,
            id=f"{name}, {kind}",
            marks=[] if kind == "looped" or name in SCANNED else pytest.mark.slow,
        )
        for kind, loss in (("looped", looped), ("scanned", scanned))
        for name in ALL
    ],
)
def test_contract(name, loss):
    method = ALL[name]
    params, x = network()
    run = jax.jit(mw.value_and_grad(loss, has_aux=True, method=method))
    (value, aux), gradients = run(params, x)
    (true, true_aux), truth = jax.value_and_grad(loss, has_aux=True)(params, x)
    np.testing.assert_allclose(value, true, rtol=1e-12)
    np.testing.assert_allclose(aux["mean"], true_aux["mean"], rtol=1e-12)
    assert jax.tree.structure(gradients) == jax.tree.structure(truth)
    if name in EXACT:
        assert off(gradients, truth) < 1e-11


@pytest.mark.parametrize("name", ALL)
def test_is_small_frozen_hashable_and_printable(name):
    method = ALL[name]
    again = dataclasses.replace(method)
    assert method == again and hash(method) == hash(again) and method is not again
    assert type(method).__name__ in repr(method)
    for field in dataclasses.fields(method):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(method, field.name, None)
    orders = type(method).__doc__
    assert re.search(r"Time\s+O\(", orders) and re.search(r"[Mm]emory\s+O\(", orders)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("dtype", [slow(jnp.float32), jnp.bfloat16])
def test_dtypes_and_shapes_are_kept(name, dtype):
    method = ALL[name]
    if dtype == jnp.bfloat16:
        if name == "reversible":
            pytest.skip("states in half precision are not inverted: see below")
        if name == "pure forward":
            method = dataclasses.replace(method, tolerance=1.0)
    params, x = network(depth=2, dtype=dtype)
    abstract = jax.eval_shape(mw.grad(looped, has_aux=True, method=method), params, x)[0]
    assert jax.tree.map(lambda a: (a.shape, a.dtype), abstract) == jax.tree.map(
        lambda a: (a.shape, a.dtype), params
    )


@pytest.mark.parametrize("name", some(EXACT, ["backprop", "checkpoint recursive", "reversible"]))
def test_certificates_and_plans(name):
    method = EXACT[name]
    params, x = network()
    *_, found = mw.value_and_grad(looped, has_aux=True, method=method, certify=True)(params, x)
    assert float(found.error) < 1e-11
    if isinstance(method, PLANNED):
        plan = mw.plan(looped, params, x, has_aux=True, method=method)
        assert plan.method == method and str(plan)
        (_, _), gradients = mw.value_and_grad(looped, has_aux=True, method=plan)(params, x)
        assert off(gradients, jax.grad(looped, has_aux=True)(params, x)[0]) < 1e-11
    else:
        with pytest.raises(ValueError, match="differentiates the function as a whole"):
            mw.plan(looped, params, x, has_aux=True, method=method)
        with pytest.raises(ValueError, match="fused_update: .* no plan"):
            mw.fused_update(looped, None, method=method)


def test_a_class_in_place_of_a_method():
    with pytest.raises(TypeError, match=r"call it: moonwalk\.Checkpoint\(\.\.\.\)"):
        mw.grad(looped, method=mw.Checkpoint)
    with pytest.raises(TypeError, match="method= takes moonwalk.Moonwalk"):
        mw.grad(looped, method="backprop")


# --- Checkpoint -------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [7, slow(12), slow(16)])
@pytest.mark.parametrize("segments", some([1, 3, 5, "sqrt", "block", "recursive"], [3, "recursive"]))
@pytest.mark.parametrize("reverse", [slow(False), True])
def test_checkpointed_scans_of_any_length(depth, segments, reverse):
    """Lengths that segments do not divide, in both directions, with outputs of every layer."""
    params, x = network(depth)

    def loss(params, x):
        x, ys = lax.scan(
            lambda x, p: ((y := layer(x, p["w"], p["b"])), jnp.sum(y, 1)), x, params, reverse=reverse
        )
        return jnp.sum(x**2) + jnp.sum(jnp.sin(ys)), ys

    method = mw.Checkpoint(segments=segments)
    (value, ys), found = jax.jit(mw.value_and_grad(loss, has_aux=True, method=method))(params, x)
    (true, true_ys), truth = jax.value_and_grad(loss, has_aux=True)(params, x)
    np.testing.assert_allclose(ys, true_ys, rtol=1e-12)
    np.testing.assert_allclose(value, true, rtol=1e-12)
    assert off(found, truth) < 1e-12


def test_checkpoint_wants_enough_layers():
    params, x = network(3)
    with pytest.raises(ValueError, match=r"segments=4\): the network has 3 layers, too few"):
        mw.grad(looped, has_aux=True, method=mw.Checkpoint(segments=4))(params, x)
    with pytest.raises(
        ValueError, match="segments must be None, a number of segments, or one of 'sqrt'"
    ):
        mw.Checkpoint(segments="root")


@pytest.mark.parametrize("segments", some([None, 1, 4, "sqrt", "block", "recursive"], ["recursive"]))
def test_checkpoint_of_a_residual_network_and_of_two_scans(segments):
    params, x = network(6)

    def loss(params, x):
        for w, b in zip(params["w"][:3], params["b"][:3], strict=True):
            x = x + jnp.tanh(x @ w + b)
        x, _ = lax.scan(
            lambda x, p: (jnp.tanh(x @ p["w"] + p["b"]), None), x, jax.tree.map(lambda a: a[3:], params)
        )
        y, _ = lax.scan(lambda x, p: (x + jnp.tanh(x @ p["w"] + p["b"]), None), x, params)
        return jnp.sum(x * y), None

    truth = jax.grad(loss, has_aux=True)(params, x)[0]
    method = mw.Checkpoint(segments=segments)
    found = jax.jit(mw.grad(loss, has_aux=True, method=method))(params, x)[0]
    assert off(found, truth) < 1e-12


def test_what_prints_prints_once_and_what_answers_is_refused(capfd):
    params, x = network(4)

    def loss(params, x):
        for w in params["w"]:
            jax.debug.print("layer")
            x = jnp.tanh(x @ w)
        return jnp.sum(x)

    for method in (mw.Checkpoint(2), mw.Checkpoint("recursive"), mw.Forward(), mw.ProjectedForward(0)):
        capfd.readouterr()
        jax.block_until_ready(mw.grad(loss, method=method)(params, x))
        jax.effects_barrier()
        assert capfd.readouterr().out.count("layer") == 4


# --- Forward and ProjectedForward --------------------------------------------------------------------


def test_forward_of_complex_and_empty_leaves():
    p = {"z": jnp.array([1.0 + 2j, 0.5 - 1j]), "e": jnp.zeros((0, 3)), "r": jnp.array(2.0)}

    def loss(p):
        return (
            jnp.sum(jnp.abs(p["z"] ** 2 * p["r"]) ** 2)
            + jnp.sum(jnp.real(p["z"] * (1 + 1j)))
            + jnp.sum(p["e"])
        )

    truth, found = jax.grad(loss)(p), mw.grad(loss, method=mw.Forward())(p)
    for name in p:
        np.testing.assert_allclose(found[name], truth[name], rtol=1e-12)
    exact = mw.grad(loss, method=mw.ProjectedForward(0, samples=0, direction=truth))(p)
    np.testing.assert_allclose(exact["z"], truth["z"], rtol=1e-12)


@pytest.fixture(scope="module")
def estimates():
    """(the gradient, many estimates of it with and without a predicted direction), flat."""
    params, x = network(depth=2, n=3)
    flat, back = jax.flatten_util.ravel_pytree(params)

    def loss(flat):
        return looped(back(flat), x)[0]

    truth = jax.grad(loss)(flat)
    guess = truth + 0.5 * jnp.linalg.norm(truth) * jax.random.normal(jax.random.key(1), truth.shape) / 5
    keys = jax.random.split(jax.random.key(2), 20_000)

    def estimate(key, direction):
        return mw.grad(loss, method=mw.ProjectedForward(key, direction=direction))(flat)

    plain = jax.jit(jax.vmap(lambda k: estimate(k, None)))(keys)
    guided = jax.jit(jax.vmap(lambda k: estimate(k, guess)))(keys)
    return truth, {"random": plain, "predicted": guided}


@pytest.mark.parametrize("kind", ["random", "predicted"])
def test_projected_forward_is_unbiased(estimates, kind):
    truth, found = estimates[0], estimates[1][kind]
    error = jnp.std(found, 0) / np.sqrt(len(found))  # of the mean
    z = (jnp.mean(found, 0) - truth) / error
    assert float(jnp.max(jnp.abs(z))) < 5
    assert float(jnp.sqrt(jnp.mean(z**2))) < 1.5


def test_projected_forward_has_the_variance_that_it_says(estimates):
    truth, found = estimates
    size = float(jnp.sum(truth**2))
    variance = {k: float(jnp.mean(jnp.sum((a - truth) ** 2, 1))) for k, a in found.items()}
    assert variance["random"] / size == pytest.approx(len(truth) + 1, rel=0.1)
    # Of the part orthogonal to the prediction alone.
    assert variance["predicted"] < 0.5 * variance["random"]


def test_more_samples_less_variance():
    params, x = network(depth=2, n=3)
    truth = jax.grad(looped, has_aux=True)(params, x)[0]

    def error(samples):
        def one(key):
            method = mw.ProjectedForward(key, samples=samples)
            g = mw.grad(looped, has_aux=True, method=method)(params, x)[0]
            return sum(jnp.sum((a - b) ** 2) for a, b in zip(g.values(), truth.values(), strict=True))

        return float(jnp.mean(jax.jit(jax.vmap(one))(jax.random.split(jax.random.key(3), 2000))))

    assert error(1) / error(8) == pytest.approx(8, rel=0.25)


def test_projected_forward_with_a_right_prediction_is_exact():
    params, x = network()
    truth = jax.grad(looped, has_aux=True)(params, x)[0]
    for samples in (0, 2):
        method = mw.ProjectedForward(jax.random.key(0), samples=samples, direction=truth)
        found = mw.grad(looped, has_aux=True, method=method)(params, x)[0]
        assert off(found, truth) < 1e-11


def test_projected_forward_input_errors():
    params, x = network(2)
    with pytest.raises(ValueError, match=r"at least 1 \(0 needs a direction\), got 0"):
        mw.ProjectedForward(0, samples=0)
    with pytest.raises(TypeError, match="key takes a jax.random key"):
        mw.ProjectedForward(None)
    with pytest.raises(ValueError, match="direction is a prediction of the gradient"):
        mw.grad(looped, has_aux=True, method=mw.ProjectedForward(0, direction={"w": 1.0}))(params, x)
    with pytest.raises(ValueError, match="an estimate, whose error no certificate bounds"):
        mw.value_and_grad(looped, method=mw.ProjectedForward(0), certify=True)
    with pytest.raises(ValueError, match="Forward: chunk counts jvps"):
        mw.Forward(chunk=0)
    assert mw.ProjectedForward(0) != mw.ProjectedForward(1)
    assert mw.ProjectedForward(jax.random.key(0)) == mw.ProjectedForward(jax.random.key(0))


# --- Reversible --------------------------------------------------------------------------------------


def absolute(params, x):
    for w in params:
        x = jnp.abs(x @ mw.declare(w, "orthogonal"))
    return jnp.sum(jnp.sin(x))


def reducing(params, x):
    """6 → 6 → 4 → 4 → 6."""
    x = jax.nn.leaky_relu(x @ mw.declare(params[0], "orthogonal"), 0.5)
    x = jax.nn.leaky_relu(x @ mw.declare(params[1], "orthogonal")[:, :4], 0.5)
    x = jax.nn.leaky_relu(x @ params[2][:4, :4], 0.5)
    return jnp.sum(jnp.sin(x @ params[3][:4]))


def test_reversible_refuses_what_moonwalk_serves():
    keys = jax.random.split(jax.random.key(0), 2)
    ws = list(jax.random.orthogonal(keys[0], 6, shape=(4,)))
    x = jax.random.normal(keys[1], (5, 6))
    for loss, block, reason in (
        (absolute, r"abs .*test_methods.py", "two inputs may share an output"),
        (reducing, r"dot_general .*test_methods.py", "30 numbers to 20"),
    ):
        with pytest.raises(mw.NotInvertibleError, match=f"Reversible: {block}.*{reason}.*Moonwalk"):
            mw.grad(loss, method=mw.Reversible())(ws, x)
        truth = jax.grad(loss)(ws, x)
        found = jax.jit(mw.grad(loss, method=mw.Moonwalk()))(ws, x)
        np.testing.assert_allclose(found[0], truth[0], rtol=1e-9, atol=1e-12)


def test_reversible_names_the_block_inside_a_scan():
    params, x = network()
    loss = lambda ws, x: jnp.sum(lax.scan(lambda x, w: (jnp.abs(x @ w), None), x, ws)[0])
    with pytest.raises(mw.NotInvertibleError, match="scan .*in its body, "):
        mw.grad(loss, method=mw.Reversible())(params["w"], x)


def test_reversible_refuses_half_precision():
    params, x = network(dtype=jnp.bfloat16)
    with pytest.raises(mw.NotInvertibleError, match="half precision"):
        mw.grad(looped, has_aux=True, method=mw.Reversible())(params, x)


def test_reversible_inverts_structures_triangles_and_free_products():
    keys = jax.random.split(jax.random.key(0), 5)
    w = jnp.tril(jax.random.normal(keys[0], (6, 6))) * 0.3 + jnp.eye(6)
    params = {
        "stem": jax.random.normal(keys[1], (3, 6)),
        "lower": w,
        "scale": jnp.linspace(0.5, 2, 6),
        "free": jax.random.normal(keys[2], (6, 6)),
        "head": jax.random.normal(keys[3], (6, 2)),
    }
    x = jax.random.normal(keys[4], (2, 4, 3))

    def loss(p, x):
        x = jnp.tanh(x @ p["stem"])
        x = jax.nn.leaky_relu(x @ mw.declare(p["lower"], "lower"), 0.2)
        x = jnp.flip(x, 1) * p["scale"] + 1
        x = x.reshape(2, 2, 2, 6).transpose(0, 2, 1, 3).reshape(2, 4, 6)
        x = jnp.where(x > 0, x, x / 3) @ p["free"]
        return jnp.sum(jax.nn.logsumexp(x @ p["head"], -1))

    plan = mw.plan(loss, params, x, method=mw.Reversible())
    assert plan.inverted >= 5
    found = jax.jit(mw.grad(loss, method=plan))(params, x)
    assert off(found, jax.grad(loss)(params, x)) < 1e-11


@pytest.mark.slow
def test_reversible_serves_isometric_convolutions():
    model = mw.nn.Sequential(
        [
            mw.nn.OrthogonalConv1d(4, 3, key=jax.random.key(0)),
            mw.nn.LeakyReLU(0.5),
            mw.nn.OrthogonalConv1d(4, 3, key=jax.random.key(1)),
        ]
    )
    params, static = eqx.partition(model, eqx.is_inexact_array)
    x = jax.random.normal(jax.random.key(2), (2, 8, 4))
    params = jax.tree.map(lambda a: a.astype(jnp.float64), params)

    def loss(params, x):
        return jnp.sum(jnp.sin(eqx.combine(params, static)(x)))

    plan = mw.plan(loss, params, x, argnums=(0, 1), method=mw.Reversible(inputs=(1,)))
    assert plan.inverted >= 3
    found = jax.jit(mw.grad(loss, method=plan, argnums=(0, 1)))(params, x)
    assert off(found, jax.grad(loss, argnums=(0, 1))(params, x)) < 1e-11


def test_reversible_notices_that_rounding_took_the_state():
    """LeakyReLU(.01) sixty times over: a state of float32 is lost on the way back."""
    keys = jax.random.split(jax.random.key(0), 2)
    ws = jax.random.orthogonal(keys[0], 16, shape=(60,)).astype(jnp.float32)
    x = jax.random.normal(keys[1], (8, 16), jnp.float32)

    def loss(ws, x):
        def one(x, w):
            return jax.nn.leaky_relu(x @ mw.declare(w, "orthogonal"), 0.01), None

        return jnp.sum(lax.scan(one, x, ws)[0])

    with pytest.raises(mw.InexactError, match="did not arrive at the state.*use moonwalk.Moonwalk"):
        mw.grad(loss, method=mw.Reversible())(ws, x)


WS = list(jax.random.orthogonal(jax.random.key(1), 6, shape=(4,)))
X = jax.random.normal(jax.random.key(2), (64, 6))


@jax.custom_vjp
def turned_back(x):
    return x


turned_back.defvjp(lambda x: (x, None), lambda _, g: (-g,))


@pytest.mark.parametrize(
    "odd",
    [
        lambda x: x + jnp.floor(x / 6 + 0.5),
        lambda x: x + lax.stop_gradient(x),
        lambda x: x - 0.01 * jnp.sign(x),
        lambda x: x + 0.05 * jnp.sin(x),
        turned_back,
    ],
    ids=["floor", "stop_gradient", "sign", "sin", "gradient reversal"],
)
def test_reversible_takes_no_constant_derivative_for_an_affine_function(odd):
    def loss(ws, x):
        return jnp.sum((odd(jax.nn.leaky_relu(x @ ws[0], 0.5) @ ws[1]) @ ws[2] @ ws[3]) ** 4)

    with pytest.raises(mw.NotInvertibleError, match="no inverse is known"):
        mw.grad(loss, method=mw.Reversible())(WS, X)


def test_reversible_memory_does_not_grow_in_a_loop_of_affine_layers():
    def loss(ws, x):
        for w in ws:
            x = jax.nn.leaky_relu(x @ mw.declare(w, "orthogonal") + 1, 0.5)
        return jnp.sum(x)

    def temporaries(depth):
        ws = [jax.ShapeDtypeStruct((16, 16), jnp.float32)] * depth
        x = jax.ShapeDtypeStruct((4096, 16), jnp.float32)
        program = _jax.compiled(jax.jit(mw.grad(loss, method=mw.Reversible())), ws, x)
        return program.memory_analysis().temp_size_in_bytes

    assert temporaries(16) < temporaries(4) + 4096 * 16 * 4


def test_reversible_looks_past_bystanders():
    def loss(ws, x):
        seen = []
        for w in ws:
            x = jax.nn.leaky_relu(x @ mw.declare(w, "orthogonal"), 0.5)
            seen.append(lax.stop_gradient(x).mean())
        x, ys = lax.scan(
            lambda x, w: ((y := x @ mw.declare(w, "orthogonal")), lax.stop_gradient(y).mean()),
            x,
            jnp.stack(ws),
        )
        return jnp.sum(jnp.sin(x)), (seen, ys)

    found, (seen, ys) = jax.jit(mw.grad(loss, has_aux=True, method=mw.Reversible()))(WS, X)
    truth, (true_seen, true_ys) = jax.grad(loss, has_aux=True)(WS, X)
    assert off(found, truth) < 1e-11
    np.testing.assert_allclose(seen, true_seen, rtol=1e-10)
    np.testing.assert_allclose(ys, true_ys, rtol=1e-10)


@pytest.mark.parametrize("length", [0, 1, slow(2)])
@pytest.mark.parametrize(
    "method", [mw.Checkpoint("recursive"), mw.Checkpoint("block"), mw.Reversible()], ids=str
)
def test_short_scans_and_single_layers(length, method):
    def loss(ws, x):
        return jnp.sum(jnp.tanh(lax.scan(lambda x, w: (x @ w, None), x, ws[:length])[0] @ ws[0]))

    ws = jnp.stack(WS)
    if length or isinstance(method, mw.Checkpoint):
        np.testing.assert_allclose(
            mw.grad(loss, method=method)(ws, X), jax.grad(loss)(ws, X), rtol=1e-9, atol=1e-12
        )
    else:
        with pytest.raises(mw.NotInvertibleError, match="it has no layers"):
            mw.grad(loss, method=method)(ws, X)
    single = lambda w, x: jnp.sum(jnp.tanh(x @ w))
    np.testing.assert_allclose(
        mw.grad(single, method=method)(WS[0], X), jax.grad(single)(WS[0], X), rtol=1e-12
    )


def test_directions_of_any_size_and_kind():
    truth = jax.grad(looped, has_aux=True)(*network())[0]
    for scale in (1e-200, 1e200):
        guess = jax.tree.map(lambda a, s=scale: a * s, truth)
        method = mw.ProjectedForward(0, samples=0, direction=guess)
        assert off(mw.grad(looped, has_aux=True, method=method)(*network())[0], truth) < 1e-11
    with pytest.raises(ValueError, match="direction is a prediction"):
        mw.grad(lambda a, b: a * b, (0, 1), method=mw.ProjectedForward(0, direction=1.0))(1.0, 2.0)
    for key in (1j, [1, 2], np.float32(1.5), np.True_, jnp.ones(2)):
        with pytest.raises(TypeError, match="key takes a jax.random key"):
            mw.ProjectedForward(key)
    rbg, other = (mw.ProjectedForward(jax.random.key(0, impl=i)) for i in ("rbg", "unsafe_rbg"))
    assert rbg != other


def test_what_follows_the_last_layer_need_not_be_invertible():
    """A mask with zeros has no inverse, but nothing behind it needs one."""
    weights = [orthogonal(8, seed=i) for i in range(5)]
    x, mask = normal(40, 8, seed=1), (normal(40, 8, seed=2) > 0).astype(float)

    def loss(weights, x, mask):
        for w in weights:
            x = jax.nn.leaky_relu(x @ mw.declare(w, "orthogonal"), 0.5)
        return jnp.sum(x * mask)

    expected = jax.value_and_grad(loss)(weights, x, mask)
    for run in (lambda f: f, jax.jit):
        found = run(mw.value_and_grad(loss, method=mw.Reversible()))(weights, x, mask)
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-9)
