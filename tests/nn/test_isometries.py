"""Paraunitary kernels and the layers made of them: orthogonal, whatever an optimizer has done."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from marks import slow
from weights import normal

import moonwalk as mw
from moonwalk import nn
from moonwalk.nn.qr import inverse_upper, q_factor

KEY = jax.random.key(0)


def circular(x, w):
    """A convolution on a torus, by NumPy's indices: y[u] = Σ_j x[u + j - p] w[j], p = ⌊(k-1)/2⌋."""
    dims = w.ndim - 2
    y = 0
    for tap in np.ndindex(*w.shape[:dims]):
        by = [(k - 1) // 2 - j for j, k in zip(tap, w.shape, strict=False)]
        y = y + np.roll(x, by, tuple(range(1, dims + 1))) @ w[tap]
    return y


def off(layer, size, rows=4):
    """‖J Jᵀ u - u‖ / ‖u‖ of an operator, on random u."""
    u = jax.random.normal(jax.random.key(5), (rows, *size), jnp.float32)
    bare = eqx.tree_at(lambda m: m.bias, layer, None, is_leaf=lambda leaf: leaf is None)

    @jax.jit
    def there_and_back(u):
        (h,) = jax.vjp(bare, jnp.zeros_like(u))[1](u)
        return bare(h)

    return float(jnp.linalg.norm(there_and_back(u) - u) / jnp.linalg.norm(u))


@pytest.mark.parametrize(("taps", "dims"), [(3, 1), slow(2, 1), slow(5, 1), slow(2, 2), slow(3, 2)])
def test_the_layer_is_the_convolution_of_its_kernel(taps, dims):
    cls, size = (nn.OrthogonalConv1d, (7,)) if dims == 1 else (nn.OrthogonalConv2d, (5, 6))
    layer = cls(4, taps, key=KEY)
    x = normal(2, *size, 4, seed=1)
    w = np.asarray(jax.jit(lambda: layer.weight)())
    np.testing.assert_allclose(eqx.filter_jit(layer)(x), circular(np.asarray(x), w), atol=1e-12)
    zeros = cls(4, taps, "ZEROS", key=KEY)
    edge = taps // 2
    inside = tuple(slice(edge, n - edge) for n in size)
    np.testing.assert_allclose(
        eqx.filter_jit(zeros)(x)[:, *inside], circular(np.asarray(x), w)[:, *inside], atol=1e-12
    )


def test_a_small_one_is_an_orthogonal_matrix():
    layer = nn.OrthogonalConv1d(3, 4, use_bias=False, key=KEY)
    jacobian = jax.jit(jax.jacobian(layer))(jnp.zeros((5, 3))).reshape(15, 15)
    np.testing.assert_allclose(jacobian @ jacobian.T, np.eye(15), atol=1e-13)


@pytest.mark.parametrize(("taps", "dims"), [slow(3, 1), slow(5, 1), (3, 2)])
def test_no_spread_is_the_identity(taps, dims):
    raw = nn.paraunitary_init(KEY, 4, taps, dims, spread=0.0)
    kernel = jax.jit(nn.paraunitary_kernel)(raw)
    expected = np.zeros(kernel.shape)
    expected[(taps // 2,) * dims] = np.eye(4)
    np.testing.assert_allclose(kernel, expected, atol=1e-13)


def test_stacks():
    raws = jax.vmap(lambda key: nn.paraunitary_init(key, 4, 3, 2))(jax.random.split(KEY, 3))
    kernels = jax.jit(nn.paraunitary_kernel)(raws)
    assert kernels.shape == (3, 3, 3, 4, 4)
    one = jax.jit(nn.paraunitary_kernel)(jax.tree.map(lambda a: a[2], raws))
    np.testing.assert_allclose(kernels[2], one, atol=1e-14)


# --- training ------------------------------------------------------------------------------------------


def trained(layer, size, steps, rate):
    """After so many steps of Adam towards a random target, in float32."""
    layer = jax.tree.map(lambda a: a.astype(jnp.float32), layer)
    params, static = eqx.partition(layer, eqx.is_inexact_array)
    x, target = jax.random.normal(jax.random.key(2), (2, 8, *size), jnp.float32)
    optimizer = optax.adam(rate)

    def loss(p):
        return jnp.mean((eqx.combine(p, static)(x) - 5 * target) ** 2)

    def step(carry, _):
        p, state = carry
        updates, state = optimizer.update(jax.grad(loss)(p), state)
        return (optax.apply_updates(p, updates), state), None

    (p, _), _ = jax.jit(lambda p: lax.scan(step, (p, optimizer.init(p)), length=steps))(params)
    moved = jax.tree.map(lambda a, b: float(jnp.max(jnp.abs(a - b))), p, params)
    assert min(jax.tree.leaves(moved)) > 0.1
    return eqx.combine(p, static)


@pytest.mark.parametrize(
    ("cls", "channels", "taps", "steps", "rate"),
    [
        slow(nn.OrthogonalConv1d, 8, 3, 200, 0.3),
        slow(nn.OrthogonalConv1d, 16, 5, 1000, 0.1),
        slow(nn.OrthogonalConv1d, 16, 5, 1000, 0.01),
        slow(nn.OrthogonalConv2d, 8, 3, 1000, 0.1),
    ],
)
def test_orthogonal_after_training(cls, channels, taps, steps, rate):
    size = (6,) * cls.dims + (channels,)
    layer = trained(cls(channels, taps, key=KEY), size, steps, rate)
    assert layer.weight.dtype == jnp.float32
    assert off(layer, size) <= 1e-5
    if channels == 8 and cls.dims == 1:
        bare = eqx.tree_at(lambda m: m.bias, layer, None)
        jacobian = jax.jacobian(bare)(jnp.zeros(size, jnp.float32)).reshape(48, 48)
        assert np.linalg.norm(jacobian @ jacobian.T - np.eye(48), 2) <= 1e-5


@pytest.mark.slow
def test_downsampling_is_orthonormal_after_training():
    layer = jax.tree.map(lambda a: a.astype(jnp.float32), nn.Downsample(3, 8, key=KEY))
    raw, optimizer = layer.projection.raw, optax.adam(0.1)
    target = jax.random.normal(KEY, raw.shape, jnp.float32)

    def step(carry, _):
        raw, state = carry
        g = jax.grad(lambda raw: jnp.sum((nn.orthogonal(raw) - target) ** 2))(raw)
        updates, state = optimizer.update(g, state)
        return (raw + updates, state), None

    (raw, _), _ = jax.jit(lambda r: lax.scan(step, (r, optimizer.init(r)), length=1000))(raw)
    w = np.asarray(nn.orthogonal(raw), np.float64)
    assert np.linalg.norm(w.T @ w - np.eye(8), 2) <= 1e-5


# --- the QR decomposition under them -------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(6, 4), (5, 5), (3, 7, 3)], ids=str)
def test_the_derivative_of_q(shape):
    """Against JAX's own, first and second."""
    a, c = np.random.default_rng(0).standard_normal((2, *shape))

    def signed(a):
        q, r = jnp.linalg.qr(a)
        return q * jnp.sign(jnp.diagonal(r, axis1=-2, axis2=-1))[..., None, :]

    def both(make):
        loss = lambda a: jnp.sum(jnp.sin(make(a)) * c)
        along = lambda a: jax.jvp(jax.grad(loss), (a,), (jnp.asarray(c),))[1]
        return jax.jit(lambda a: (make(a), jax.grad(loss)(a), along(a)))(a)

    for found, expected in zip(both(q_factor), both(signed), strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-11)


def test_the_inverse_of_a_triangle():
    for m in (1, 2, 11):
        r = np.triu(np.random.default_rng(m).standard_normal((2, m, m))) + 2 * np.eye(m)
        np.testing.assert_allclose(jax.jit(inverse_upper)(r), np.linalg.inv(r), atol=1e-12)


def test_stacks_are_decomposed_one_by_one_on_a_cpu():
    """Batched LAPACK calls side by side may wait for each other for ever (see `nn.qr`)."""
    fun = jax.grad(lambda a: jnp.sum(jax.vmap(q_factor)(a) ** 3))
    text = jax.jit(fun).lower(jax.ShapeDtypeStruct((7, 2, 5, 3), jnp.float32)).as_text()
    calls = [line for line in text.splitlines() if "lapack_" in line]
    assert calls and not [line for line in calls if "7x" in line or "14x" in line]
    assert "trsm" not in text


# --- mistakes ------------------------------------------------------------------------------------------


def test_mistakes():
    with pytest.raises(ValueError, match="OrthogonalConv1d: unknown padding 'SAME'; an orthogonal conv"):
        nn.OrthogonalConv1d(4, 3, "SAME", key=KEY)
    with pytest.raises(ValueError, match="takes 2 channels or more, which neighbouring positions share"):
        nn.OrthogonalConv2d(1, 3, key=KEY)
    with pytest.raises(ValueError, match=r"takes arrays \[..., size, size, 4\], channels last, got the"):
        nn.OrthogonalConv2d(4, 3, key=KEY)(jnp.ones((4, 4, 3)))
    with pytest.raises(ValueError, match="7 taps go around an axis of 2 more than once; take a smaller"):
        nn.OrthogonalConv1d(4, 7, key=KEY)(jnp.ones((2, 4)))
    with pytest.raises(
        ValueError, match=r"8 channels of 2\^1 positions are 16 numbers.* at most 16 out"
    ):
        nn.Downsample(8, 20, dims=1, key=KEY)
    with pytest.raises(ValueError, match="1 channel cannot be divided between neighbouring positions"):
        nn.paraunitary_init(KEY, 1, 3)
    with pytest.raises(ValueError, match="a kernel has taps and axes, got 0 taps, 1 axes"):
        nn.paraunitary_init(KEY, 4, 0)
    raw = nn.paraunitary_init(KEY, 4, 3)
    with pytest.raises(
        ValueError, match=r"shapes \[..., taps - 1, dims, c, c // 2\] and .* see paraunit"
    ):
        nn.paraunitary_kernel(raw._replace(matrix=jnp.eye(3)))


def test_half_precision():
    """The kernel stays in float32; what it makes is rounded."""
    layer = jax.tree.map(lambda a: a.astype(jnp.bfloat16), nn.OrthogonalConv1d(4, 3, key=KEY))
    x = jax.random.normal(KEY, (2, 6, 4), jnp.bfloat16)
    y = eqx.filter_jit(layer)(x)
    assert y.dtype == jnp.bfloat16 and jax.eval_shape(lambda: layer.weight).dtype == jnp.float32
    ratio = jnp.linalg.norm(y.astype(jnp.float32)) / jnp.linalg.norm(x.astype(jnp.float32))
    assert abs(float(ratio) - 1) <= 1e-2
    assert jax.eval_shape(lambda x: mw.vijp(layer, x)[1](x), x).dtype == jnp.bfloat16
