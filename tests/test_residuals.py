"""What is kept between phases: bits in bytes, and nothing that can be made again."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from weights import general, normal

from moonwalk.execute.residuals import Residual, nbytes, pack, unpack

X, W = normal(16, 6), general(6)


def struct(a):
    return jax.ShapeDtypeStruct(a.shape, a.dtype)


def residual(fun, *operands, kinds=(), x=X, **options):
    return Residual(fun, [struct(x)], [struct(a) for a in operands], kinds, **options)


def pulled(layer):
    """Linearise a layer in its state alone."""

    def linearise(x, operands):
        y, pullback = jax.vjp(lambda *x: layer(*x, *operands), *x)
        return (y,), pullback

    return linearise


def kept_types(r, x=X, operands=()):
    """Types of what Phase I really hands on."""
    return [(a.shape, a.dtype) for a in r.forward([x], operands)[1]]


# --- bits -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "shape",
    [
        (8,),
        (16, 3),
        (3, 16),
        (2, 8, 5),
        (2, 3, 8, 8),
        (1,),
        (9,),
        (3, 5),
        (4, 4),  # eight divides the size, and no axis
        (),
        (0,),
        (0, 8),
        (8, 0),
    ],
)
def test_bits_come_back(shape):
    bits = np.asarray(np.random.default_rng(0).random(shape) < 0.5)
    packed = pack(jnp.asarray(bits))
    assert packed.dtype == np.uint8
    assert packed.size == -(-bits.size // 8) == nbytes(jax.ShapeDtypeStruct(shape, bool))
    found = unpack(packed, jax.ShapeDtypeStruct(shape, bool))
    assert found.dtype == bool
    np.testing.assert_array_equal(found, bits)


@pytest.mark.parametrize("shape", [(16,), (9,)])
def test_all_or_no_bits(shape):
    for bits in (jnp.ones(shape, bool), jnp.zeros(shape, bool)):
        np.testing.assert_array_equal(unpack(pack(bits), jax.ShapeDtypeStruct(shape, bool)), bits)


@pytest.mark.parametrize(
    ("shape", "packed"), [((16, 3), (2, 3)), ((8, 16), (8, 2)), ((8, 3, 5), (1, 3, 5)), ((3, 5), (2,))]
)
def test_axes_stay_where_one_can_be_divided(shape, packed):
    """A flat reshape would undo how an activation is laid out, and sharded."""
    assert pack(jnp.ones(shape, bool)).shape == packed


def test_bits_under_jit_and_vmap():
    bits = jnp.asarray(np.random.default_rng(1).random((4, 5, 8)) < 0.5)
    round_trip = lambda b: unpack(pack(b), jax.typeof(b))
    np.testing.assert_array_equal(jax.jit(round_trip)(bits), bits)
    np.testing.assert_array_equal(jax.vmap(round_trip)(bits), bits)


def test_bytes_of_types():
    key = jax.eval_shape(lambda: jax.random.key(0))
    assert nbytes(jax.ShapeDtypeStruct((9,), bool)) == 2
    assert nbytes(jax.ShapeDtypeStruct((3, 5), jnp.bfloat16), jax.ShapeDtypeStruct((), jnp.int8)) == 31
    assert nbytes(key) == 8
    assert nbytes() == 0


# --- residuals --------------------------------------------------------------------------------------


def test_a_product_keeps_nothing():
    """∂y/∂x of x @ w is w, which every phase can read."""
    r = residual(pulled(jnp.matmul), W, kinds=["weight"])
    y, kept = r.forward([X], [W])
    assert kept == []
    assert r.bytes == 0
    np.testing.assert_allclose(y[0], X @ W, rtol=1e-14)
    (h,) = r.restore(kept, [W])(jnp.ones((16, 6)))
    np.testing.assert_allclose(h, jnp.ones((16, 6)) @ W.T, rtol=1e-14)


@pytest.mark.parametrize("kind", ["weight", "data"])
def test_what_follows_from_one_side_is_made_again(kind):
    """However much work it is."""
    layer = lambda x, a: x @ jnp.sin(a) @ jnp.linalg.inv(a)
    r = residual(pulled(layer), W, kinds=[kind])
    assert r.bytes == 0
    _, kept = r.forward([X], [W])
    found = r.restore(kept, [W])(X)
    np.testing.assert_allclose(found[0], jax.vjp(lambda x: layer(x, W), X)[1](X)[0], rtol=1e-12)


def test_what_follows_from_both_sides_is_kept():
    """Weights times data is as large as an activation: that is what it is."""
    data, w = normal(16, 6, seed=1), normal(6, seed=2)
    layer = lambda x, w, d: x * (w * d)
    r = residual(pulled(layer), w, data, kinds=["weight", "data"], rerun=False)
    assert r.bytes == X.nbytes
    _, kept = r.forward([X], [w, data])
    np.testing.assert_allclose(r.restore(kept, [w, data])(X)[0], X * w * data, rtol=1e-14)


def test_what_moves_is_kept():
    """Later phases cannot read it: None stands in its place."""
    r = residual(pulled(lambda x, m: x * m), X, kinds=["moving"])
    assert r.bytes == X.nbytes
    y, kept = r.forward([X], [2 * X])
    np.testing.assert_allclose(r.restore(kept, [None])(X)[0], 2 * X * X, rtol=1e-14)


@pytest.mark.parametrize("x", [X, normal(3, 5), normal(8, 8)])
def test_a_sign_is_a_bit(x):
    r = residual(pulled(lambda x: jnp.where(x >= 0, x, 0.3 * x)), x=x)
    assert r.bytes == -(-x.size // 8)
    ((shape, dtype),) = kept_types(r, x)
    assert dtype == np.uint8
    assert np.prod(shape) == r.bytes
    _, kept = r.forward([x], [])
    np.testing.assert_allclose(r.restore(kept, [])(x)[0], jnp.where(x >= 0, x, 0.3 * x), rtol=1e-14)


def test_the_state_where_it_is_smaller():
    """gelu's pullback reads more than one array of the state's size."""
    r = residual(pulled(jax.nn.gelu))
    assert r.leaf_bytes > X.nbytes
    assert r.from_state
    assert r.bytes == X.nbytes
    assert kept_types(r) == [(X.shape, X.dtype)]
    _, kept = r.forward([X], [])
    found = r.restore(kept, [])(jnp.ones_like(X))
    np.testing.assert_allclose(found[0], jax.vmap(jax.vmap(jax.grad(jax.nn.gelu)))(X), rtol=1e-12)


def test_not_the_state_where_the_function_must_not_run_again():
    r = residual(pulled(jax.nn.gelu), rerun=False)
    assert not r.from_state
    assert r.bytes == r.leaf_bytes
    assert sum(np.prod(s) * d.itemsize for s, d in kept_types(r)) == r.bytes
    _, kept = r.forward([X], [])
    found = r.restore(kept, [])(jnp.ones_like(X))
    np.testing.assert_allclose(found[0], jax.vmap(jax.vmap(jax.grad(jax.nn.gelu)))(X), rtol=1e-12)


def test_an_array_that_is_needed_twice_is_kept_once():
    r = residual(lambda x, _: ((x[0],), {"a": (s := jnp.sin(x[0])), "b": (s, s > 0, "name")[:2]}))
    assert r.leaf_bytes == X.nbytes + X.size // 8
    assert [aval.dtype for _, aval in r.held] == [X.dtype]  # the state itself is less
    _, kept = r.forward([X], [])
    found = r.restore(kept, [])
    np.testing.assert_array_equal(found["a"], jnp.sin(X))
    np.testing.assert_array_equal(found["b"][1], jnp.sin(X) > 0)


def test_constants_and_literals():
    """Neither is kept; both come back."""
    r = residual(lambda x, _: ((x[0] + 1,), (jnp.arange(6.0), 2.0, x[0] > 0)), rerun=False)
    assert r.bytes == X.size // 8
    _, kept = r.forward([X], [])
    a, b, c = r.restore(kept, [])
    np.testing.assert_array_equal(a, np.arange(6.0))
    assert float(b) == 2.0
    np.testing.assert_array_equal(c, X > 0)


def test_under_jit():
    r = residual(pulled(lambda x, w: jnp.abs(x @ w)), W, kinds=["weight"])

    @jax.jit
    def both(x, w, h):
        (y,), kept = r.forward([x], [w])
        return y, r.restore(kept, [w])(h)[0]

    truth, pullback = jax.vjp(lambda x: jnp.abs(x @ W), X)
    found = both(X, W, X)
    np.testing.assert_allclose(found[0], truth, rtol=1e-14)
    np.testing.assert_allclose(found[1], pullback(X)[0], rtol=1e-12)


def test_a_callback_runs_when_values_are_kept_and_not_when_they_are_restored():
    calls = []

    def noisy(x, _):
        jax.debug.callback(lambda v: calls.append(v), x[0].sum())
        y, pullback = jax.vjp(jax.nn.gelu, x[0])
        return (y,), pullback

    r = residual(noisy)
    assert r.from_state
    _, kept = r.forward([X], [])
    r.restore(kept, [])(X)
    jax.effects_barrier()
    assert len(calls) == 1
