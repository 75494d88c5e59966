"""The operator as a JAX user meets it."""

import doctest
import importlib
import pkgutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from marks import slow
from weights import general, normal, orthogonal

import moonwalk as mw

X = normal(3, 6)


def layer(x, w):
    return jax.nn.leaky_relu(x @ w, 0.3)


def fun(x):
    return layer(x, general(6, 4))


def test_the_primal_output_is_the_functions():
    out, _ = mw.vijp(fun, X)
    np.testing.assert_allclose(out, fun(X), rtol=1e-14)


def test_round_trip_with_vjp():
    out, vjp_fun = jax.vjp(fun, X)
    truth = normal(*out.shape, seed=1)
    np.testing.assert_allclose(mw.vijp(fun, X)[1](*vjp_fun(truth)), truth, rtol=1e-10)


def test_composition_is_the_chain_of_vijps():
    """The paper's Eq. 7: layer by layer equals all at once."""
    w1, w2 = general(6, 5), general(5, 4)
    x1 = layer(X, w1)
    whole = lambda x: layer(layer(x, w1), w2)
    truth = normal(3, 4, seed=1)
    (h0,) = jax.vjp(whole, X)[1](truth)
    h1 = mw.vijp(lambda x: layer(x, w1), X)[1](h0)
    np.testing.assert_allclose(h1, jax.vjp(lambda x: layer(x, w2), x1)[1](truth)[0], rtol=1e-10)
    h2 = mw.vijp(lambda x: layer(x, w2), x1)[1](h1)
    np.testing.assert_allclose(h2, mw.vijp(whole, X)[1](h0), rtol=1e-10)
    np.testing.assert_allclose(h2, truth, rtol=1e-10)


def test_crosses_a_jit_boundary_like_vjp():
    out, vijp_fun = jax.jit(lambda x: mw.vijp(fun, x))(X)
    np.testing.assert_allclose(out, fun(X), rtol=1e-14)
    (h,) = jax.vjp(fun, X)[1](jnp.ones_like(out))
    np.testing.assert_allclose(jax.jit(lambda f, h: f(h))(vijp_fun, h), 1.0, rtol=1e-10)


def test_inside_scan():
    ws = jnp.stack([orthogonal(6, seed=s) for s in range(4)])

    def step(carry, w):
        x, h = carry
        y, vijp_fun = mw.vijp(lambda x: layer(x, w), x)
        return (y, vijp_fun(h)), None

    whole = lambda x: lax.scan(lambda x, w: (layer(x, w), None), x, ws)[0]
    truth = normal(3, 6, seed=1)
    (h0,) = jax.vjp(whole, X)[1](truth)
    (y, h), _ = lax.scan(step, (X, h0), ws)
    np.testing.assert_allclose(y, whole(X), rtol=1e-12)
    np.testing.assert_allclose(h, truth, rtol=1e-9)


def test_traced_weights():
    @jax.jit
    def recover(w, x, h):
        return mw.vijp(lambda x: layer(x, w), x)[1](h)

    w = general(6, 4)
    (h,) = jax.vjp(lambda x: layer(x, w), X)[1](jnp.ones((3, 4)))
    np.testing.assert_allclose(recover(w, X, h), 1.0, rtol=1e-10)
    np.testing.assert_allclose(
        jax.vmap(recover, in_axes=(0, None, None))(jnp.stack([w, w]), X, h), 1.0, rtol=1e-10
    )


def test_several_primals_and_none():
    f = lambda x, y, z: (2 * x, {"y": y["a"] @ general(6)})
    out, vijp_fun = mw.vijp(f, X, {"a": X, "b": None}, None)
    h = vijp_fun(X, {"a": X, "b": None}, None)
    assert jax.tree.structure(h) == jax.tree.structure(out)
    np.testing.assert_allclose(h[0], X / 2)


def test_unused_primals_and_passing_through():
    out, vijp_fun = mw.vijp(lambda x, y: (x, 3 * x.sum() if False else y[0]), X, X)
    h = vijp_fun(X, X)
    np.testing.assert_array_equal(h[0], X)
    np.testing.assert_array_equal(h[1], X[0])
    np.testing.assert_array_equal(mw.vijp(lambda x, y: 2 * y, X, X)[1](0 * X, X), X / 2)


def test_an_additive_coupling_is_solved_on_request():
    w = general(6)
    f = lambda a, b: (a, b + jnp.tanh(a @ w))
    with pytest.raises(mw.NotSubmersiveError, match="returned and also used"):
        mw.vijp(f, X, X)
    mw.testing.check_vijp(f, X, 2 * X, modes=["jit"], fallback=mw.MatrixFree())


def test_aux_may_fork_what_it_likes():
    f = lambda x: (jnp.tanh(x), (x, jnp.mean(x), "note" and 3))
    out, vijp_fun, aux = mw.vijp(f, X, has_aux=True)
    np.testing.assert_array_equal(aux[0], X)
    (h,) = jax.vjp(jnp.tanh, X)[1](X)
    np.testing.assert_allclose(vijp_fun(h), X, rtol=1e-12)


def test_integer_outputs_get_float0():
    (_, index), vijp_fun = mw.vijp(lambda x: (2 * x, jnp.argmax(x, -1)), X)
    h = vijp_fun(X)
    assert h[1].dtype == jax.dtypes.float0
    assert h[1].shape == index.shape


def test_python_numbers():
    out, vijp_fun = mw.vijp(lambda x: 3 * x, 2.0)
    assert float(out) == 6.0
    assert float(vijp_fun(1.5)) == 0.5


def test_dtypes_are_kept():
    for dtype in (jnp.float32, jnp.bfloat16, jnp.float16):
        out, vijp_fun = mw.vijp(
            lambda x: x.astype(jnp.float32) @ general(6, 4).astype(jnp.float32), X.astype(dtype)
        )
        assert vijp_fun(X.astype(dtype)).dtype == out.dtype == jnp.float32


def test_debug_print_runs_once_per_call(capfd):
    def noisy(x):
        jax.debug.print("seen {}", x.shape[0])
        return jnp.tanh(x)

    mw.vijp(noisy, X)[1](X)
    jax.effects_barrier()
    assert capfd.readouterr().out.count("seen 3") == 1


def test_only_the_row_space_is_promised():
    """Off the row space the result is that of some right inverse, not an error, not the pseudo-inverse."""
    w = jnp.eye(3, 2)
    lower = lambda x: x @ mw.declare(w, "lower")
    found = mw.vijp(lower, jnp.ones(3))[1](jnp.array([1.0, 2.0, 5.0]))
    np.testing.assert_array_equal(found, [1.0, 2.0])
    assert "row space" in mw.vijp.__doc__


def test_the_matrix_free_rule_agrees_with_the_pseudo_inverse():
    w = general(6, 4)
    f = lambda x: x + 0.3 * jnp.sin(x @ w @ w.T)
    jacobian = jax.jacobian(f)(X[0])
    h = normal(6, seed=3)
    found = mw.vijp(f, X[0], fallback=mw.MatrixFree())[1](h)
    np.testing.assert_allclose(found, h @ jnp.linalg.pinv(jacobian), rtol=1e-10)


def test_check_vijp_fails_when_it_should():
    @mw.custom_vijp
    def wrong(x):
        return 2 * x

    wrong.defvijp(lambda primals, h: h / 3)
    with pytest.raises(AssertionError, match="mode 'eager', seed 0. is off by 0.333"):
        mw.testing.check_vijp(wrong, X)
    with pytest.raises(ValueError, match="unknown mode 'pmap'"):
        mw.testing.check_vijp(fun, X, modes=["pmap"])


def _modules():
    return [m.name for m in pkgutil.walk_packages(mw.__path__, "moonwalk.")]


def _is_slow(name):
    """Examples that run whole networks, operation by operation."""
    return name.startswith("moonwalk.models.") or name == "moonwalk.nn.isometries"


@pytest.mark.parametrize("name", [slow(n) if _is_slow(n) else n for n in _modules()])
def test_doctests(name):
    results = doctest.testmod(importlib.import_module(name))
    assert results.failed == 0


def test_public_names_are_documented():
    for module in (mw, mw.nn, mw.models):
        for name in dir(module):
            if not name.startswith("_") and callable(getattr(module, name)):
                assert getattr(module, name).__doc__, name
