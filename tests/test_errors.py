"""Every message a user can meet: what, where, why and the way out."""

import os

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import conv
from jax import lax
from weights import general, kernel, normal, orthogonal

import moonwalk as mw

X = normal(3, 6)
HERE = (os.path.basename(__file__), "cases.py")


def refused(fun, *primals, **options):
    with pytest.raises(mw.NotSubmersiveError) as caught:
        mw.vijp(fun, *primals, **options)
    error = caught.value
    text = str(error)
    for part in ("equation:", "source:", "reason:", "way out:"):
        assert part in text
    assert any(f in error.source for f in HERE), error.source  # the user's line, not ours, not JAX's
    assert error.way_out
    return error


REFUSALS = {
    "expanding layer": (lambda x: x @ normal(6, 8), X, "dot_general", "6 features become 8"),
    "relu": (jax.nn.relu, X, "relu", "exactly zero on part of its range"),
    "relu by maximum": (lambda x: jnp.maximum(x, 0), X, "max", "exactly zero on part"),
    "relu6": (jax.nn.relu6, X, "relu6", "exactly zero on part"),
    "hard tanh": (jax.nn.hard_tanh, X, "select_n", "exactly zero on part"),
    "dropout": (
        lambda x: jnp.where(jax.random.bernoulli(jax.random.key(0), 0.5, x.shape), 2 * x, 0),
        X, "select_n", "exactly zero on part",
    ),
    "rounding": (jnp.round, X, "round", "no derivative flows"),
    "stop_gradient": (lambda x: lax.stop_gradient(2 * x), X, "stop_gradient", "no derivative flows"),
    "residual sum": (lambda x: x + jnp.tanh(x @ general(6)), X, "add", "used 2 times"),
    "layer norm": (
        lambda x: (x - x.mean(-1, keepdims=True)) / jnp.std(x, axis=-1, keepdims=True),
        X, "div", "loses one number for every 6 entries",
    ),
    "softmax": (jax.nn.softmax, X, "div", "loses one number for every 6 entries"),
    "self-product": (lambda x: x @ x.T, normal(3, 3), "dot_general", "their cotangents add up|both factors"),
    "stride ≤ padding": (
        conv(kernel((3,), 4, 4, (1,)), 1, (1, 1)), normal(1, 9, 4), "conv_general_dilated", "stride > padding",
    ),
    "channels expand": (
        conv(normal(3, 4, 6), 2, (1, 1)), normal(1, 9, 4), "conv_general_dilated", "channels expand",
    ),
    "transposed convolution": (
        lambda x: lax.conv_transpose(x, normal(3, 4, 4), (2,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")),
        normal(1, 5, 4), "conv_general_dilated", "transposed",
    ),
    "overlapping max-pool": (
        lambda x: lax.reduce_window(x, -np.inf, lax.max, (1, 3), (1, 2), "VALID"), X,
        "reduce_window_max", "windows overlap .axis 1: size 3, stride 2",
    ),
    "window in the padding": (
        lambda x: lax.reduce_window(x, 0.0, lax.add, (1, 2), (1, 2), [(0, 0), (2, 0)]), X,
        "reduce_window_sum", "wholly in the padding",
    ),
    "same-padded sums": (
        lambda x: lax.reduce_window(x, 0.0, lax.add, (1, 3), (1, 1), "SAME"), X,
        "reduce_window_sum", "no pivot tap",
    ),
    "zero pad": (lambda x: jnp.pad(x, 1), X, "pad", "do not depend on the input"),
    "circular pad": (lambda x: jnp.pad(x, ((0, 0), (1, 1)), mode="wrap"), X, "concatenate", "repeats entries"),
    "tile": (lambda x: jnp.tile(x, 2), X, "", "repeats entries|repeat"),
    "broadcast": (lambda x: jnp.broadcast_to(x, (2, 3, 6)), X, "broadcast_in_dim", "repeats entries"),
    "overlapping slices": (lambda x: (x[:, :2], x[:, 1:3]), X, "slice", "overlap"),
    "repeated index": (lambda x: x[:, np.array([0, 1, 1])], X, "gather", "used more than once"),
    "traced index": (
        lambda x: jax.jit(lambda i: x[:, i])(jnp.asarray([0, 1]) + jnp.int64(x.sum() > 9e9)),
        X, "gather", "not known while tracing",
    ),
    "index out of bounds": (lambda x: jnp.take(x, np.array([0, 9]), axis=1), X, "gather", "out of bounds"),
    "a part twice": (lambda x: jnp.concatenate([x, x]), X, "concatenate", "twice|repeats"),
    "a constant part": (lambda x: jnp.concatenate([x[:, :2], jnp.ones((3, 2))], 1), X, "concatenate", "does not depend"),
    "half an update": (lambda x: lax.dynamic_update_slice(x, jnp.ones((1, 1)), (0, 0)), X, "dynamic_update_slice", "only one of the two"),
    "returned and used": (lambda x: (x, jnp.tanh(x)), X, "tanh", "returned and also used.*it expands"),
    "cond": (lambda x: lax.cond(x[0, 0] > 0, jnp.sin, jnp.cos, x), X, "cond", "opaque"),
    "while": (lambda x: lax.while_loop(lambda c: c[0, 0] > 0, lambda c: c - 1, x), X, "while", "opaque"),
    "scan with a bad body": (
        lambda x: lax.scan(lambda c, w: (jax.nn.relu(c @ w), None), x, normal(2, 6, 6))[0], X,
        "scan", "its body has no vijp: .*relu",
    ),
    "scan over the state": (lambda x: lax.scan(lambda c, r: (c + r, None), jnp.zeros(6), x)[0], X, "scan", "not as its carry"),
    "scan that stacks the state": (lambda x: lax.scan(lambda c, _: (2 * c, c), x, None, length=2), X, "scan", "stacked outputs"),
    "no rule": (lambda x: jnp.fft.rfft(x).real, X, "", "complex"),
    "eigenvalues": (jnp.linalg.cholesky, jnp.eye(3), "", "no vijp rule|used|expands"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSALS)
def test_not_submersive(name):
    fun, x, equation, reason = REFUSALS[name]
    error = refused(fun, x)
    assert equation in error.equation
    with pytest.raises(mw.NotSubmersiveError, match=f"(?s)reason:.*({reason})"):
        raise error


def test_the_source_line_is_the_users():
    def model(x):
        x = x @ general(6)
        return jax.nn.relu(x)  # the line to find

    error = refused(model, X)
    line = model.__code__.co_firstlineno + 2
    assert f"{HERE[0]}:{line} (" in error.source and "model" in error.source


def test_the_source_line_inside_a_layer_library():
    layer = eqx.nn.Linear(3, 5, key=jax.random.key(0))
    error = refused(lambda x: layer(x), jnp.ones(3))
    assert "through" in error.source and "equinox" in error.source


def test_constant_and_repeated_outputs():
    with pytest.raises(mw.NotSubmersiveError, match="no derivative flows"):
        mw.vijp(lambda x: (2 * x, jnp.ones(3)), X)
    with pytest.raises(mw.NotSubmersiveError, match="constant 1"):
        mw.vijp(lambda x: (2 * x, 1.0), X)
    with pytest.raises(mw.NotSubmersiveError, match="returned more than once"):
        mw.vijp(lambda x: (2 * x, 2 * x), X)


# --- the cotangent ------------------------------------------------------------------------------------


def test_wrong_cotangents():
    _, vijp_fun = mw.vijp(lambda x: x @ general(6, 4), X)
    with pytest.raises(ValueError, match=r"primal's shape \(3, 6\), but has shape \(6, 3\)"):
        vijp_fun(X.T)
    with pytest.raises(TypeError, match="primal's dtype float64, but has dtype float32"):
        vijp_fun(X.astype(jnp.float32))
    with pytest.raises(TypeError, match="(?s)structure of the primals.*and the cotangent has"):
        vijp_fun([X])
    with pytest.raises(TypeError, match="structure of the primals"):
        vijp_fun(X, X)


def test_the_leaf_is_named():
    _, vijp_fun = mw.vijp(lambda p: 2 * p["a"], {"a": X})
    with pytest.raises(ValueError, match=r"primal 0\['a'\]"):
        vijp_fun({"a": X[0]})


# --- the primals --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("x", "dtype"), [(jnp.arange(3), "int"), (jnp.ones(3) * 1j, "complex"), (jnp.ones(3, bool), "bool")]
)
def test_primals_must_be_real(x, dtype):
    with pytest.raises(TypeError, match=f"vijp requires real-valued inputs.*{dtype}"):
        mw.vijp(lambda x: x, x)
    if dtype != "complex":  # which jax.grad takes as a pair of reals, and a vijp does not
        with pytest.raises(TypeError, match="requires real- or complex-valued inputs"):
            jax.grad(lambda x: jnp.sum(x).real)(x)


def test_other_bad_primals():
    with pytest.raises(TypeError, match="primals must be arrays or numbers, but got 'a'"):
        mw.vijp(lambda x: x, "a")
    with pytest.raises(TypeError, match="the primals hold no arrays"):
        mw.vijp(lambda: 1.0)
    with pytest.raises(TypeError, match=r"must return a pair \(out, aux\)"):
        mw.vijp(lambda x: x, X, has_aux=True)


# --- singular values ------------------------------------------------------------------------------------

SINGULAR = {
    "dense": (lambda x: x @ jnp.ones((6, 6)), X, "general pivot"),
    "lower": (lambda x: x @ mw.declare(jnp.tril(normal(6, 6), -1), "lower"), X, "lower pivot.*at .0,.*, .1,"),
    "diagonal": (lambda x: x @ mw.declare(jnp.diag(jnp.arange(6.0)), "diagonal"), X, r"diagonal pivot.*at \(0,\)"),
    "conv": (conv(kernel((3,), 4, 4, (1,)).at[1].set(0), 2, (1, 1)), normal(1, 9, 4), "pivot tap 1"),
    "tanh": (jnp.tanh, X.at[1, 2].set(100), r"derivative that is zero to rounding.*\(1, 2\)"),
    "sigmoid": (jax.nn.sigmoid, X - 2000, "saturated"),
    "scale": (lambda x: x * jnp.arange(6.0), X, "a zero scale"),
    "tie": (lambda x: (jnp.maximum(x[0], x[1]), jnp.minimum(x[0], x[1])), jnp.ones((2, 3)), "a tie"),
    "three states": (lambda x, y, z: (x * y, y * z, z * x), jnp.zeros(2), "zero to rounding"),
    "product of zeros": (lambda x: jnp.prod(x, -1), jnp.zeros((2, 3)), "reduce_prod"),
    "scan": (lambda x: lax.scan(lambda c, w: (c @ w, None), x, jnp.stack([jnp.eye(6), 0 * jnp.eye(6)]))[0], X, "general pivot"),
}  # fmt: skip


@pytest.mark.parametrize("name", SINGULAR)
def test_singular(name):
    fun, x, message = SINGULAR[name]
    primals = (x, x, x) if name == "three states" else (x,)
    h = tuple(jnp.ones_like(p) for p in primals)
    _, vijp_fun = mw.vijp(fun, *primals)
    with pytest.raises(mw.SingularError, match=f"(?s){message}") as caught:
        vijp_fun(*h)
    assert any(f in str(caught.value) for f in HERE)
    # under jit it can be asked to
    checked = eqx.filter_jit(lambda *p: mw.vijp(fun, *p, check=True)[1](*h))
    with pytest.raises(Exception, match="vijp: "):
        jax.block_until_ready(checked(*primals))
    # and told not to look
    mw.vijp(fun, *primals, check=False)[1](*h)


def test_which_weight():
    class Net(eqx.Module):
        layers: list

        def __call__(self, x):
            for w in self.layers:
                x = jax.nn.leaky_relu(x @ w)
            return x

    net = Net([general(6), general(6).at[:, 3].set(0)])
    _, vijp_fun = mw.vijp(lambda x: net(x), X)
    with pytest.raises(
        mw.SingularError, match=r"weight `net.layers\[1\]` \(f64\[6,6\]\) is singular.*\(3,\)"
    ):
        vijp_fun(X)


def test_a_healthy_check_under_jit_changes_nothing():
    fun = lambda x: jnp.tanh(x @ general(6))
    plain, checked = (
        jax.jit(lambda x, c=c: mw.vijp(fun, x, check=c)[1](x))(0.1 * X) for c in (None, True)
    )
    np.testing.assert_array_equal(plain, checked)


def test_matrix_free_notices_what_it_cannot_solve():
    flat = lambda x: x + x @ -jnp.eye(6).at[0, 0].set(0)  # a residual sum that loses all but one
    _, vijp_fun = mw.vijp(flat, X, fallback=mw.MatrixFree())
    with pytest.raises(mw.SingularError, match="did not recover a random cotangent"):
        vijp_fun(X)
    with pytest.raises(mw.NotSubmersiveError, match="exactly zero"):  # a definite no stays one
        mw.vijp(jax.nn.relu, X, fallback=mw.MatrixFree())
    with pytest.raises(mw.NotSubmersiveError, match="expands"):
        mw.vijp(
            lambda x: jnp.concatenate([jnp.sin(x) + x[::-1], jnp.cos(x) + x]),
            X,
            fallback=mw.MatrixFree(),
        )


def test_matrix_free_needs_enough_steps():
    fun = lambda x: x + jnp.tanh(x @ orthogonal(6)) * 0.9
    _, vijp_fun = mw.vijp(fun, X, fallback=mw.MatrixFree(max_steps=1))
    with pytest.raises(mw.SingularError, match="raise max_steps"):
        vijp_fun(X)


# --- diagnoses ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "reflect",
    [
        lambda x, v: x - 2 * (x @ v)[..., None] * v / (v @ v),
        lambda x, v: x - 2 * jnp.outer(x @ v, v) / (v @ v),
        lambda x, v: x + jnp.sum(x * v, -1, keepdims=True) * v,
    ],
)
def test_a_reflection_is_no_normalisation(reflect):
    v = normal(6, seed=3)
    with pytest.raises(mw.NotSubmersiveError) as error:
        mw.vijp(lambda x: reflect(x, v), X)
    message = str(error.value)
    assert "diagonal map plus one of low rank" in message
    assert "'orthogonal'" in message
    assert "MatrixFree()" in message
    assert "normalisation" not in message
    assert "loses" not in message
    _, vijp_fun = mw.vijp(lambda x: reflect(x, v), X, fallback=mw.MatrixFree())  # the way out
    (h,) = jax.vjp(lambda x: reflect(x, v), X)[1](X)
    np.testing.assert_allclose(vijp_fun(h), X, rtol=1e-6, atol=1e-6)


NOT_A_NUMBER = {
    "dense": lambda x, w: x @ w,
    "declared": lambda x, w: x @ mw.declare(w, "orthogonal"),
    "scale": lambda x, w: x * w[0],
    "convolution": lambda x, w: jax.lax.conv_general_dilated(
        x[None], w[None], (1,), [(0, 0)], dimension_numbers=("NWC", "WIO", "NWC")
    ),
    "isometric": lambda x, w: x @ mw.declare(w, "isometric"),
}


@pytest.mark.parametrize("name", NOT_A_NUMBER)
def test_nan_is_called_nan(name):
    w = jnp.eye(6).at[0, 0].set(jnp.nan)
    _, vijp_fun = jax.jit(lambda x, w: mw.vijp(lambda x: NOT_A_NUMBER[name](x, w), x))(X, w)
    with pytest.raises(mw.SingularError, match="NaN or infinit"):
        vijp_fun(X)
